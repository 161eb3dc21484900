"""Hogwild: processes that each act and learn, on parameters that all of them share (Mnih et al. 2016, sec. 4).

`Team` is the parent's side: it starts the actor-learners, replaces one that dies, and keeps them quiet while a
checkpoint is written. `Worker` is what an actor-learner has of it. Nobody ever holds a lock, so a process may be
killed at any instant: the step counter T is the sum of one count a process, which only that process writes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.crew import Crew
from common.flags import UsageError
from common.processes import WorkerError, n_cores
from common.run import Run, to_float

POLL_INTERVAL = 0.05  # seconds between two looks of the parent
REPORT_INTERVAL = 1  # seconds between two reports of an actor-learner, of the losses of an update
PAUSE, STOP, CROSSED = 0, 1, 2  # indices of Worker.flags


class Worker:
    """An actor-learner's view of the others: the global step T, and whether to go on.

    `global_step` is T when this process last counted a step of its own.

    Args:
        counts: (n_processes,) int64 in shared memory, agent steps that each process has counted; those of earlier
            parts of the run are with the first.
        parked: (n_processes,) int64 in shared memory, the last pause that each process has come to rest for.
        flags: (3,) int64 in shared memory: the number of the pause that holds now (0: none), whether to stop, and T
            when a crossing was last noticed.
        start: T when the parent started this process, which its random numbers depend on.
    """

    def __init__(
        self, index: int, counts: Tensor, parked: Tensor, flags: Tensor, total_steps: int, start: int = 0
    ) -> None:
        self.index, self.total_steps, self.start = index, total_steps, start
        self.counts, self.parked, self.flags = counts, parked, flags
        self.connection: Any = None
        self.episode_return, self.episode_length, self.reported = 0.0, 0, -math.inf

    def connect(self, connection: Any) -> None:
        """Called in the actor-learner's own process."""
        self.connection = connection
        self.at_end = contextlib.ExitStack()
        self.counts, self.parked, self.flags = (x.numpy() for x in (self.counts, self.parked, self.flags))
        self.global_step = int(self.counts.sum())

    def count_step(self, reward: float, done: bool) -> None:
        """T ← T + 1. Takes the raw reward as well, and tells the parent of an episode that ends."""
        self.counts[self.index] += 1
        self.global_step = int(self.counts.sum())
        self.episode_return, self.episode_length = self.episode_return + reward, self.episode_length + 1
        if done:
            self.connection.send(("episode", self.episode_return, self.episode_length))
            self.episode_return, self.episode_length = 0.0, 0

    def crossed(self, interval: int) -> bool:
        """Whether T has passed a multiple of `interval`: told to the first that asks, and seldom to another as well."""
        if self.global_step // interval <= self.flags[CROSSED] // interval:
            return False
        self.flags[CROSSED] = self.global_step
        return True

    def go_on(self) -> bool:
        """Whether training goes on; to be asked where nothing is half done. Waits while the parent saves."""
        while self.flags[PAUSE] and not self.flags[STOP]:
            self.parked[self.index] = self.flags[PAUSE]
            time.sleep(0.001)
        return not self.ended

    @property
    def ended(self) -> bool:
        """Whether training has come to its end; does not wait, as `go_on` does, so that a rollout is ended by it."""
        return bool(self.flags[STOP]) or self.global_step >= self.total_steps

    def report_update(self, scalars: dict[str, Any]) -> None:
        """Tell the parent of an update, now and then and of the last."""
        now = time.monotonic()
        if now - self.reported >= REPORT_INTERVAL or self.ended:
            self.connection.send(("scalars", {name: to_float(value) for name, value in scalars.items()}))
            self.reported = now


class Team(Crew):
    """The actor-learners, as a context: they end with it.

    Args:
        target: the actor-learner, a function of the top level, called as `target(worker, *arguments)`.
        arguments: what all of them share; tensors, modules and optimizers must be in shared memory when this begins.
        start: agent steps that earlier parts of the run have counted.
    """

    def __init__(self, target: Callable, arguments: tuple, n_processes: int, total_steps: int, start: int = 0) -> None:
        super().__init__("actor-learner", target, arguments, n_processes)
        self.total_steps = total_steps
        counts, parked = torch.zeros(2, n_processes, dtype=torch.int64).share_memory_()
        counts[0] = start
        flags = torch.tensor([0, 0, start]).share_memory_()
        self.shared = counts, parked, flags
        self.counts, self.parked, self.flags = counts.numpy(), parked.numpy(), flags.numpy()
        self.start, self.pauses = start, 0
        self.scalars: dict[str, float] = {}

    @property
    def global_step(self) -> int:
        return int(self.counts.sum())

    def new_member(self, index: int) -> Worker:
        return Worker(index, *self.shared, self.total_steps, self.start)

    def __exit__(self, *exception: Any) -> None:
        self._stop()
        super().__exit__(*exception)

    def watch(self, run: Run) -> None:
        """Follow the actor-learners to the end of training: count, log, save and replace.

        What `Run` calls an update is a look of the parent here; losses are those of the process that last told any.

        Raises:
            FloatingPointError: a loss or gradient is not finite. WorkerError: an actor-learner died three times
                within a minute.
        """
        try:
            while self.global_step < self.total_steps and not run.stopped:
                run.count_update(self.global_step, self.scalars)
                time.sleep(POLL_INTERVAL)
                self._receive(run)
            self._stop()
            self._receive(run)
            for index, cause in enumerate(self.causes):
                if cause:
                    run.event(f"actor-learner {index} died at the end: {cause}")
        except WorkerError:
            self._stop()
            self._receive(run)  # the others' episodes, whose steps count
            run.count_update(self.global_step, self.scalars)
            raise
        run.count_update(self.global_step, self.scalars)

    def _stop(self) -> None:
        """Ask all to end after the current rollout, and wait for them, 2 s at most."""
        self.flags[STOP] = 1
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(timeout=max(0, deadline - time.monotonic()))

    def _receive(self, run: Run) -> None:
        for index, connection in enumerate(self.connections):
            try:
                while connection.poll():
                    kind, *content = connection.recv()
                    if kind == "episode":
                        run.count_episodes(*np.array(content)[:, None])
                    elif kind == "scalars":
                        self.scalars = content[0]
                    else:
                        self.note_failure(index, kind, content[0])
            except (EOFError, OSError):
                if self.global_step < self.total_steps and not self.flags[STOP]:
                    self.start = self.global_step
                    self.replace(index, run)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[int]:
        """A context in which no actor-learner is in the middle of an update; gives T.

        Waits for 10 s without a step at most, for one that starts or whose environment hangs.
        """
        self.pauses += 1
        self.flags[PAUSE] = self.pauses
        deadline, last_step = time.monotonic() + 10, self.global_step
        for index, process in enumerate(self.processes):
            while self.parked[index] != self.pauses and time.monotonic() < deadline and process.is_alive():
                time.sleep(0.001)
                if self.global_step != last_step:  # a rollout goes on to its end
                    deadline, last_step = time.monotonic() + 10, self.global_step
        try:
            yield self.global_step
        finally:
            self.flags[PAUSE] = 0


def pick_n_processes(args: Any, checkpoint: dict | None) -> int:
    """The number of --n-processes; None: one per core.

    Raises:
        UsageError: the checkpoint has optimizers of its own for another number.
    """
    own = args.optimizer != "shared-rmsprop"
    if checkpoint and own and args.n_processes != (n := checkpoint["args"]["n_processes"]):
        raise UsageError(f"--n-processes {args.n_processes}: the run has statistics for {n} processes")
    return n_cores() if args.n_processes is None else args.n_processes


def share(module: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Move the parameters of a module and the statistics of its optimizers into shared memory.

    Raises: OSError: there is no room for them, each of which keeps a file open.
    """
    try:
        module.share_memory()
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.share_memory_()
    except RuntimeError as error:
        raise OSError(f"shared memory: {str(error).splitlines()[0]}; ulimit -n and /dev/shm are its limits") from error


@torch.no_grad()
def sync(parameters: list[Tensor], source: list[Tensor]) -> None:
    """θ′ ← θ, or θ⁻ ← θ."""
    torch._foreach_copy_(parameters, source)


def hand_over(local: list[Tensor], shared: list[Tensor]) -> None:
    """Let the optimizer of the shared parameters find this process's own gradients, which nobody else sees."""
    for p, q in zip(local, shared, strict=True):
        q.grad = p.grad
