"""Processes that end with the one that started them: VecEnv's workers, actor-learners, actors.

They are no daemons, so an environment may start processes of its own. They are asked to end, by a
pipe that is closed or a flag, and then have time to close their environments.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import psutil
import torch
from torch import multiprocessing as mp

SIGNALS = signal.SIGINT, signal.SIGTERM
CLOSE_SECONDS = 60  # for a process to close its environments, before it is killed

# Processes are forks of a server that has imported these. With "spawn" each imports them itself,
# 16 of them in 12 s on two cores. On macOS libraries may fail after a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
LIBRARIES = ["torch", "gymnasium.wrappers.vector", "ale_py.vector_env", "tyro", "tqdm", "psutil"]


class WorkerError(RuntimeError):
    """A process died; its own traceback is on stderr."""


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def free_memory() -> int:
    """Bytes that this process may still use, of the machine or of its container."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # not Linux, or no limit: "max"
        limit, used = (np.loadtxt(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        stat = dict(np.loadtxt("/sys/fs/cgroup/memory.stat", str))
        free = min(free, limit - used + float(stat["inactive_file"]))  # files' cache, reclaimable
    return free


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, which it would give back and page in again at each step.

    An update of Ape-X with batches of 512 takes 15 % less CPU time by it, PAAC on Pong 3 % less.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 1 << 28)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD


def start(name: str, target: Callable, *args: Any) -> mp.Process:
    """Run `target(*args)` in a new process; tensors in shared memory stay shared."""
    context = mp.get_context(METHOD)
    context.set_forkserver_preload(LIBRARIES)
    args = dict(os.environ), target, *args
    process = context.Process(target=_enter, args=args, name=name)
    # The server, which starts with the first process, must outlive a signal to the whole group.
    resource_tracker.ensure_running()  # it starts there, too, and would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _enter(environ: dict[str, str], target: Callable, *args: Any) -> None:
    os.environ.update(environ)  # the server has that of its start
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    # Processes that an environment starts begin as they would without us, not as this one did.
    multiprocessing.set_start_method(None, force=True)
    # The parent answers signals to the whole group, such as Ctrl-C. SIGTERM must not be ignored:
    # programs that an environment starts would inherit that, and its close() could not end them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, only_in_this_process(lambda number: None))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    np.random.seed()  # as in a process of its own: environments may draw from it
    try:
        target(*args)
    except BrokenPipeError:
        if parent.is_alive():
            raise


def _end_after(parent: Any) -> None:
    parent.join()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def check(processes: list) -> None:
    """Raises WorkerError where one of the processes has failed."""
    for process in processes:
        if process.exitcode:
            raise WorkerError(f"{process.name} died with exit code {process.exitcode}")


def stop(processes: list) -> None:
    """Wait for processes that were asked to end, and kill those that do not."""
    deadline = time.monotonic() + CLOSE_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()


def only_in_this_process(handler: Callable) -> Callable:
    """Makes a signal handler that does not act in children, which an environment may fork."""
    pid = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == pid:
            handler(number)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


@contextlib.contextmanager
def on_signals(handler: Callable) -> Iterator[None]:
    """Within it SIGINT and SIGTERM call handler(number)."""
    handle = only_in_this_process(handler)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
