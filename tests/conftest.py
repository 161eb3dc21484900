"""The same start for every test: one thread, and no GPU, as numbers of the CPU are expected."""

import os

# Before torch is imported; processes that tests start inherit it. Ray's actors have niceness 15
# otherwise, and stand still beside other programs.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", RAY_worker_niceness="0")
