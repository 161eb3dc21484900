"""One thread for every test: tiny networks gain nothing from more, and idle OpenMP threads spin on busy machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it
