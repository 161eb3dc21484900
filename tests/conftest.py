"""The same start for every test, whoever runs them."""

import os
import signal

# Tiny networks gain nothing from more threads, and idle OpenMP threads spin on busy machines. Before torch is
# imported; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell runs the tests in its background
