"""The same start for every test: one thread, and no GPU, as numbers of the CPU are expected."""

import os

# before torch is imported; processes that tests start inherit it
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
os.environ["RAY_worker_niceness"] = "0"  # else 15: actors stand still beside other programs
