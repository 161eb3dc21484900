"""Processes that serve one parent, which replaces those that die: the base of `hogwild.Team` and `actors.Actors`."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from common.processes import WorkerError, enter_worker, start_worker
from common.run import Run, keep_freed_memory


class Crew:
    """The processes, as a context: they end with it.

    A process runs `target(member, *arguments)`, where `member` is what `new_member(index)` makes. Before it ends it may
    send why it failed (see `note_failure`); then it runs what was given to `member.at_end`, an ExitStack.

    Args:
        role: what to call a process.
        target: a function of the top level.
        arguments: what all of them get; tensors, modules and optimizers must be in shared memory when this begins.
    """

    def __init__(self, role: str, target: Callable, arguments: tuple, n_processes: int) -> None:
        self.role, self.target, self.arguments, self.n_processes = role, target, arguments, n_processes
        self.processes: list[Any] = [None] * n_processes
        self.connections: list[Any] = [None] * n_processes
        self.deaths = [deque(maxlen=3) for _ in range(n_processes)]
        self.causes = [""] * n_processes  # tracebacks of those that could still say why they end

    def new_member(self, index: int) -> Any:
        """What process `index` has of the crew; its `connect` takes its end of the pipe and makes `at_end`."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        try:
            for index in range(self.n_processes):
                self._start(index)
        except BaseException:  # those that have started must not stay; a subclass may wait for all
            Crew.__exit__(self)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in filter(None, self.processes):
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            if process:
                process.join()
                connection.close()

    def _start(self, index: int) -> None:
        arguments = (self.target, self.new_member(index), self.arguments, f"{self.role} {index}")
        self.processes[index], self.connections[index] = start_worker(_work, arguments, f"{self.role}-{index}")

    def note_failure(self, index: int, kind: str, cause: str) -> None:
        """Take a message that tells of a failure. Raises FloatingPointError where a number was not finite."""
        if kind == "diverged":
            raise FloatingPointError(cause)
        self.causes[index] = cause

    def replace(self, index: int, run: Run) -> None:
        """Start process `index`, whose pipe has ended, anew.

        Raises:
            WorkerError: it died for the third time within a minute; with its traceback.
        """
        process, deaths = self.processes[index], self.deaths[index]
        process.join(timeout=1)
        cause, self.causes[index] = self.causes[index] or f"exit code {process.exitcode}", ""
        deaths.append(time.monotonic())
        if len(deaths) == deaths.maxlen and deaths[-1] - deaths[0] < 60:
            raise WorkerError(f"{self.role} {index} died three times within a minute:\n{cause}")
        run.event(f"{self.role} {index} died and is replaced: {cause}")
        self.connections[index].close()
        process.kill()  # whatever still keeps it
        self._start(index)


def _work(target: Callable, member: Any, arguments: tuple, name: str, connection: Any) -> None:
    enter_worker()
    keep_freed_memory()
    member.connect(connection)
    with member.at_end:
        _report(target, member, arguments, name, connection)
        connection.close()  # the parent need not wait for what is done at the end


def _report(target: Callable, member: Any, arguments: tuple, name: str, connection: Any) -> None:
    try:
        target(member, *arguments)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has closed its end already
            if isinstance(error, FloatingPointError):
                connection.send(("diverged", f"{name}: {error}"))
            else:  # WorkerError: an environment's traceback is in it already
                connection.send(("failed", str(error) if isinstance(error, WorkerError) else traceback.format_exc()))
