"""The same start for every test: one thread, and no GPU, as numbers of the CPU are expected."""

import os

# before torch is imported; processes that tests start inherit it
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
