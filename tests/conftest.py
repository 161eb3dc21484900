"""The same start for every test: one thread, and no GPU, as numbers of the CPU are expected."""

import os

# Before torch is imported. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

torch.set_num_threads(1)
