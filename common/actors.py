"""Actor processes that feed one learner (Horgan et al. 2018, sec. 3), and what the two say to each other.

An actor sends chunks of transitions, asks for the newest parameters, and reports episodes; the learner receives and
publishes. `Link` is the actor's side of that, `Actors` the learner's. Here both are on one machine: chunks and
parameters lie in shared memory, and pipes carry only a few bytes that say where. Nobody holds a lock, so an actor
may be killed at any instant.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.crew import Crew
from common.run import Run

Chunk = dict[str, np.ndarray]
Fields = dict[str, tuple[tuple[int, ...], Any]]  # of a chunk: name → shape and dtype


class Link:
    """An actor's view of the learner.

    Args:
        index: of the actor.
        start: steps of the run when the parent started this process, which its random numbers depend on.
        fields: of a chunk.
        memory: room for `n_slots` chunks, shared with the learner.
        parameters: (n_parameters,) float32 in shared memory, as last published.
        flags: (1 + n_actors,) int64 in shared memory: twice the number of the last publication, odd while it
            is being written; then how often each actor has asked for one.
    """

    def __init__(
        self, index: int, start: int, fields: Fields, memory: Any, n_slots: int, parameters: Any, flags: Any
    ) -> None:
        self.index, self.start, self.fields, self.n_slots = index, start, fields, n_slots
        self.memory, self.parameters, self.flags = memory, parameters, flags
        self.version, self.wanted, self.free = -1, True, list(range(n_slots))

    def connect(self, connection: Any) -> None:
        """Called in the actor's own process."""
        self.connection = connection
        self.at_end = contextlib.ExitStack()
        self.slots = slot_arrays(self.memory, self.fields, self.n_slots)
        self.parameters = torch.frombuffer(self.parameters, dtype=torch.float32)
        self.flags = np.frombuffer(self.flags, np.int64)

    def send(self, stream: int, chunk: Chunk) -> None:
        """Hand a chunk of an environment, the stream, to the learner. Waits while all slots are under way."""
        while not self.free or self.connection.poll():
            self.free.append(self.connection.recv())  # the learner has taken what was there
        slot = self.free.pop()
        for name, array in self.slots.items():
            array[slot] = chunk[name]
        self.connection.send(("chunk", stream, slot))

    def report(self, episode_return: float, length: int) -> None:
        """Tell the learner of an episode that ended: its raw return and its length in agent steps."""
        self.connection.send(("episode", float(episode_return), int(length)))

    def request(self) -> None:
        """Ask for the parameters as they are now; `fetch` has them as soon as they are there."""
        if not self.wanted:  # what has been published by now answered an earlier request
            self.version = int(self.flags[0])  # read before asking: the answer must not look old
        self.flags[1 + self.index] += 1
        self.wanted = True

    @torch.no_grad()
    def fetch(self, parameters: list[Tensor]) -> bool:
        """Take over the parameters that were published since the last time, if this actor has asked for some.

        Returns whether there were any. What two processors see of each other's writing is in order on x86; elsewhere
        a mixture of two publications is conceivable, which the next one replaces.
        """
        version = int(self.flags[0])
        if not self.wanted or version == self.version or version % 2:
            return False
        copy = self.parameters.clone()
        if self.flags[0] != version:  # they were written meanwhile: the next call gets them
            return False
        for p, values in zip(parameters, copy.split([p.numel() for p in parameters]), strict=True):
            p.copy_(values.view(p.shape))
        self.version, self.wanted = version, False
        return True


class Actors(Crew):
    """The actors, as a context: they end with it.

    Args:
        target: the actor, a function of the top level, called as `target(link, *arguments)`.
        arguments: what all of them get.
        fields: of a chunk.
        n_slots: chunks that an actor may have under way.
        n_parameters: of the network.
        start: steps that earlier parts of the run have counted.
    """

    def __init__(
        self,
        target: Callable,
        arguments: tuple,
        n_actors: int,
        fields: Fields,
        n_slots: int,
        n_parameters: int,
        start: int = 0,
    ) -> None:
        super().__init__("actor", target, arguments, n_actors)
        self.fields, self.n_slots, self.start = fields, n_slots, start
        size = n_slots * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in fields.values())
        self.memories = [RawArray("B", size) for _ in range(n_actors)]  # anonymous: no exit of a process can leak it
        self.raw_parameters, self.raw_flags = RawArray("f", n_parameters), RawArray("q", 1 + n_actors)
        self.slots = [slot_arrays(memory, fields, n_slots) for memory in self.memories]
        self.parameters = torch.frombuffer(self.raw_parameters, dtype=torch.float32)
        self.flags = np.frombuffer(self.raw_flags, np.int64)
        self.answered = np.full(n_actors, -1)

    def new_member(self, index: int) -> Link:
        shared = self.memories[index], self.n_slots, self.raw_parameters, self.raw_flags
        return Link(index, self.start, self.fields, *shared)

    @torch.no_grad()
    def publish(self, parameters: list[Tensor]) -> None:
        """Let the actors have these parameters, if one of them has asked for some since the last time."""
        requests = self.flags[1:].copy()
        if (requests == self.answered).all():
            return
        self.answered = requests
        self.flags[0] += 1
        self.parameters.copy_(torch.cat([p.reshape(-1) for p in parameters]))
        self.flags[0] += 1

    def receive(self, run: Run, timeout: float) -> Iterator[tuple[int, Chunk]]:
        """Streams and chunks that have come; a chunk is valid until the next one.

        Reads at most `2 n_slots` messages of each actor, so that none holds the learner up, and waits `timeout`
        seconds for the first. Counts episodes, and replaces an actor that has died.

        Raises:
            FloatingPointError: a number of an actor is not finite. WorkerError: an actor died three times within a
                minute.
        """
        for connection in wait(self.connections, timeout):
            index = self.connections.index(connection)
            try:
                for _ in range(2 * self.n_slots):  # episodes as well; what is left waits for the next call
                    if not connection.poll():
                        break
                    kind, *content = connection.recv()
                    if kind == "chunk":
                        stream, slot = content
                        yield stream, {name: array[slot] for name, array in self.slots[index].items()}
                        with contextlib.suppress(OSError):  # it is dead; what it sent before counts all the same
                            connection.send(slot)
                    elif kind == "episode":
                        episode_return, length = content
                        run.count_episodes(np.array([episode_return]), np.array([length]))
                    else:
                        self.note_failure(index, kind, content[0])
            except (EOFError, OSError):
                self.start = max(run.step, self.start + 1)  # other seeds, whatever has been counted since
                self.replace(index, run)


def slot_arrays(memory: Any, fields: Fields, n_slots: int) -> dict[str, np.ndarray]:
    """The shared memory of an actor as arrays, (n_slots, ...) each."""
    arrays, offset = {}, 0
    for name, (shape, dtype) in fields.items():
        count = n_slots * math.prod(shape)
        arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(n_slots, *shape)
        offset += arrays[name].nbytes
    return arrays
