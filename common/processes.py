"""Processes of their own session that end with their parent, and output that never fails."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # the last when a terminal is closed


class WorkerError(RuntimeError):
    """An environment failed or its worker died; the message names both."""


class Lasting:
    """Standard output or error that never fails: a run goes on where nobody reads any more what it prints."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115  # None where it was closed before we began
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what the encoding of a terminal lacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, function: Callable, *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError:  # a pipe whose reader has ended, a closed terminal, a full disk: nothing more is written
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_worker(target: Callable, arguments: tuple, name: str) -> tuple[multiprocessing.Process, Any]:
    """Spawn `target(*arguments, connection)` and return the process and the other end of the connection.

    The target is to call `enter_worker` first. The connection ends when the process does.
    """
    context = multiprocessing.get_context("spawn")
    multiprocessing.resource_tracker.ensure_running()  # its start would unblock the signals again
    ours, theirs = context.Pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the worker has left our process group
    try:
        worker = context.Process(target=target, args=(*arguments, theirs), name=name, daemon=True)
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()  # the worker's death must read as the end of the pipe
    return worker, ours


def enter_worker() -> None:
    """In a process of `start_worker`: one thread of torch, no signals of the terminal, and death with the parent.

    What it prints may be lost (see `Lasting`).
    """
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.setsid()  # Ctrl-C and `timeout` signal the whole group; only the parent shall answer
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what came in the meantime is dropped
    for number, handler in handlers.items():
        signal.signal(number, handler)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # even in the middle of a step
    if sys.platform == "linux":  # and in native code that lets no thread run: the end of the pipe is a signal there
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
