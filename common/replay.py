"""Prioritised replay memory of Ape-X (Horgan et al. 2018, sec. 3; Schaul et al. 2016).

Actors send chunks, as `chunk_fields` says; the learner draws batches and writes priorities back. `args` are the
flags of the trainer: n_actors, envs_per_actor, chunk_size, n_step, capacity, replay_device, seed, learning_starts,
batch_size, priority_alpha, priority_beta and priority_eps.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.actors import Chunk, Fields
from common.atari import STACK
from common.flags import UsageError, check_range, flag_and_value, free_memory
from common.sum_tree import SumTree
from common.vec_env import env_seed

ACTOR_MEMORY = 500e6  # bytes that an actor process needs, roughly: its libraries, games and chunks
BATCH_COPIES = 30  # times the observations of a batch that an update needs, roughly: floats, activations, gradients
SPARE = 1.04  # room of the memory per transition of its capacity, which is exceeded between two removals


def frame_space(space: spaces.Box) -> tuple[tuple[int, ...], type]:
    """Shape and dtype of what one step adds to the replay memory: the newest of 4 pictures, or the whole vector."""
    return (space.shape[1:], np.uint8) if len(space.shape) == 3 else (space.shape, np.float32)


def chunk_fields(space: spaces.Box, chunk_size: int) -> Fields:
    """What an actor sends: B frames with their ages, and the B transitions that they complete, n positions earlier.

    An age is the number of frames of the same episode before it, 3 at most. `acted` is False where there is no
    transition: at the final observation of a truncated episode, and before the first of all.
    """
    names = {"returns": np.float32, "discounts": np.float32, "errors": np.float32, "actions": np.int32}
    names |= {"offsets": np.uint8, "acted": np.bool_, "ages": np.uint8}
    shape, dtype = frame_space(space)
    fields = {name: ((chunk_size,), kind) for name, kind in names.items()}
    return {"frames": ((chunk_size, *shape), dtype)} | fields


def importance_weights(probabilities: np.ndarray, size: int, beta: float) -> np.ndarray:
    """w = (N P)^-β, divided by the largest of the batch, (n,)."""
    weights = (size * probabilities) ** -beta
    return (weights / weights.max()).astype(np.float32)


class Batch(NamedTuple):
    """Transitions from the replay memory, n of each.

    `indices` are their places in the memory, `positions` how many positions their streams had before them; a place
    is used again, a position is not. `discounts` is what Q of the next observation counts.
    """

    indices: np.ndarray
    positions: np.ndarray
    obs: Tensor
    actions: Tensor
    returns: Tensor
    discounts: Tensor
    next_obs: Tensor
    weights: Tensor


class Replay:
    """Prioritised replay memory in which every frame lies once (sec. 3).

    Each environment, or stream, has a ring of `length` positions, which follow one another in time; stacks of frames
    are made when they are drawn. A transition that is gone has priority zero.
    """

    def __init__(self, space: spaces.Box, args: Any, device: torch.device, start: int = 0) -> None:
        self.args, self.device = args, device
        self.n_streams, self.length = args.n_actors * args.envs_per_actor, ring_length(args)
        room = self.n_streams * self.length
        shape, dtype = frame_space(space)
        self.stack = STACK if len(space.shape) == 3 else 1
        dtype = torch.uint8 if dtype is np.uint8 else torch.float32
        self.frames = torch.empty((room, *shape), dtype=dtype, device=args.replay_device)
        fields = chunk_fields(space, room)
        self.columns = {
            name: np.zeros(*fields[name]) for name in ("ages", "actions", "returns", "discounts", "offsets")
        }
        self.tree = SumTree(room, env_seed(args.seed, start, 3))
        self.written = np.zeros(self.n_streams, np.int64)  # positions of each stream, ever
        self.oldest = np.zeros(self.n_streams, np.int64)  # the first position whose transition is still there
        self.arrivals: deque[tuple[int, int]] = deque()  # of chunks in their order: the stream and where it ends
        self.size = 0  # transitions

    def add(self, stream: int, chunk: Chunk) -> int:
        """Take a chunk and return how many transitions it has. A full ring forgets its oldest ones.

        Raises: FloatingPointError: an error δ of the actor is not finite.
        """
        if not np.isfinite(chunk["errors"]).all():
            raise FloatingPointError(f"an error of the actor of environment {stream} is not finite")
        first, n = int(self.written[stream]), self.args.n_step
        end = self.written[stream] = first + len(chunk["ages"])
        self._evict(stream, end - self.length + self.stack - 1)  # transitions whose frames are overwritten
        new, frames = self._indices(stream, np.arange(first, end)), torch.from_numpy(chunk["frames"])
        until_end = min(len(new), self.length - first % self.length)  # the rest begins the ring anew
        self.frames[new[0] : new[0] + until_end] = frames[:until_end]
        self.frames[new[-1] + 1 - len(new) + until_end : new[-1] + 1] = frames[until_end:]
        self.columns["ages"][new] = chunk["ages"]
        complete = slice(max(0, n - first), None)  # the first chunk begins before the first position
        old = self._indices(stream, np.arange(first - n, end - n)[complete])
        for name in ("actions", "returns", "discounts", "offsets"):
            self.columns[name][old] = chunk[name][complete]
        acted = chunk["acted"][complete]
        self._set(old, np.where(acted, self._priorities(chunk["errors"][complete]), 0.0))
        self.arrivals.append((stream, end - n))
        return int(acted.sum())

    def _priorities(self, errors: np.ndarray) -> np.ndarray:
        """p^α with p = |δ| + ε, for the errors of actors and learner alike."""
        return (np.abs(errors) + self.args.priority_eps) ** self.args.priority_alpha

    def _indices(self, stream: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        return stream * self.length + positions % self.length

    def _evict(self, stream: int, until: int) -> None:
        """Forget the transitions of a stream before position `until`."""
        if until > self.oldest[stream]:
            indices = self._indices(stream, np.arange(self.oldest[stream], until))
            self._set(indices, np.zeros(len(indices)))
            self.oldest[stream] = until

    def _set(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set priorities and count what comes and goes with them; no index twice."""
        self.size += int(np.count_nonzero(priorities)) - int(np.count_nonzero(self.tree[indices]))
        self.tree.update(indices, priorities)

    def trim(self) -> None:
        """Forget the oldest chunks of all streams until the capacity is kept: first in, first out."""
        while self.arrivals and self.size > self.args.capacity:
            self._evict(*self.arrivals.popleft())
        if len(self.arrivals) > self.tree.capacity // self.args.chunk_size:  # some were overwritten before their turn
            self.arrivals = deque((stream, end) for stream, end in self.arrivals if end > self.oldest[stream])

    def sample(self) -> Batch:
        """Draw a batch of transitions, in proportion to their priorities."""
        indices, probabilities = self.tree.sample(self.args.batch_size)
        streams, place = np.divmod(indices, self.length)
        # the newest position that has this place in the ring, which is not one of those still to be written
        last = self.written[streams] - 1
        positions = last - (last - place) % self.length
        following = positions + self.columns["offsets"][indices]
        weights = importance_weights(probabilities, self.size, self.args.priority_beta)
        columns = [self.columns[name][indices] for name in ("actions", "returns", "discounts")]
        actions, returns, discounts, weights = (torch.from_numpy(x).to(self.device) for x in (*columns, weights))
        obs, next_obs = self.observations(streams, positions), self.observations(streams, following)
        return Batch(indices, positions, obs, actions.long(), returns, discounts, next_obs, weights)

    def observations(self, streams: np.ndarray, positions: np.ndarray) -> Tensor:
        """What the actor saw at these positions, (n, 4, 84, 84) uint8 or (n, d) float32, on the learner's device."""
        indices = self._indices(streams, positions)
        if self.stack == 1:
            return self._take(indices)
        ages, back = self.columns["ages"][indices], np.arange(self.stack - 1, -1, -1)  # an older frame first
        frames = self._take(self._indices(streams[:, None], positions[:, None] - back))
        missing = (torch.from_numpy(x).to(self.device) for x in np.nonzero(back > ages[:, None]))
        frames[tuple(missing)] = 0  # before the episode's first frame
        return frames

    def _take(self, indices: np.ndarray) -> Tensor:
        flat = torch.from_numpy(indices.reshape(-1)).to(self.frames.device)
        taken = self.frames.index_select(0, flat)  # faster on CPU than frames[indices]
        return taken.to(self.device).unflatten(0, indices.shape)

    def set_priorities(self, batch: Batch, errors: np.ndarray) -> None:
        """Write the priorities of a batch back, but for transitions that are gone by now."""
        there = batch.positions >= self.oldest[batch.indices // self.length]
        self.tree.update(batch.indices[there], self._priorities(errors[there]))

    def state_dict(self) -> dict[str, Any]:
        used = min(int(self.written.max()), self.length)
        frames = self.frames.unflatten(0, (self.n_streams, self.length))
        frames = frames[:, :used].to("cpu", copy=True) if used < self.length // 2 else frames
        arrays = {name: torch.from_numpy(array) for name, array in self.columns.items()}
        arrays |= {"priorities": torch.from_numpy(self.tree[np.arange(self.tree.capacity)])}
        arrays |= {"written": torch.from_numpy(self.written), "oldest": torch.from_numpy(self.oldest)}
        return {"frames": frames, **arrays, "arrivals": list(self.arrivals), "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError: the state is that of a memory of another shape."""
        if len(state["priorities"]) != self.tree.capacity or len(state["written"]) != self.n_streams:
            raise ValueError("a replay memory of another shape")
        frames = state["frames"]
        self.frames.unflatten(0, (self.n_streams, self.length))[:, : frames.shape[1]] = frames
        for name, array in self.columns.items():
            array[:] = state[name].numpy()
        self.tree.update(np.arange(self.tree.capacity), state["priorities"].numpy())
        self.written[:], self.oldest[:] = state["written"].numpy(), state["oldest"].numpy()
        self.arrivals, self.size = deque(map(tuple, state["arrivals"])), state["size"]


def check_saved_replay(args: Any, checkpoint: dict[str, Any]) -> None:
    """Raises UsageError: the checkpoint has no replay memory, or one of another shape or meaning."""
    if "replay" not in checkpoint:
        raise UsageError(f"--save-replay: the checkpoint of {args.resume} has no replay memory")
    saved = checkpoint["args"]
    names = ["gamma", "clip_rewards", "reward_scale", "priority_alpha", "priority_eps", "capacity"]
    if args.n_actors * args.envs_per_actor != saved["n_actors"] * saved["envs_per_actor"]:
        names += ["n_actors", "envs_per_actor"]
    for name in names:
        if getattr(args, name) != saved[name]:
            what = f"the saved replay memory was made with {saved[name]}; --no-save-replay goes on without it"
            raise UsageError(f"{flag_and_value(args, name)}: {what}")


def ring_length(args: Any) -> int:
    """Positions of each environment in the replay memory."""
    return math.ceil(SPARE * args.capacity / (args.n_actors * args.envs_per_actor))


def replay_bytes(space: spaces.Box, args: Any) -> int:
    """Memory that the replay memory needs when it is full."""
    shape, dtype = frame_space(space)
    room = args.n_actors * args.envs_per_actor * ring_length(args)
    return room * (math.prod(shape) * np.dtype(dtype).itemsize + 14) + (2 << (room - 1).bit_length()) * 8


def fit_replay(args: Any, space: spaces.Box) -> None:
    """Choose --capacity where it is not given.

    Raises:
        UsageError: it does not fit into the free memory, or is too small for what the flags ask of it.
    """
    if args.capacity is not None:
        check_range(args, "capacity", 1)
    if args.replay_device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--replay-device cuda: no CUDA device is available")
    batch_bytes = args.batch_size * math.prod(space.shape) * space.dtype.itemsize
    other = BATCH_COPIES * batch_bytes + (args.n_actors * ACTOR_MEMORY if args.replay_device == "cpu" else 0)
    free = max(0, free_memory(args.replay_device) - other)
    n_envs = args.n_actors * args.envs_per_actor
    least = n_envs * 2 * (args.chunk_size + args.n_step + STACK)
    needed = max(least, args.learning_starts, args.batch_size)

    def fitting(most: int, budget: float) -> int:
        """The largest capacity up to `most` that the budget of memory allows."""
        need = lambda capacity: replay_bytes(space, dataclasses.replace(args, capacity=capacity))  # noqa: E731
        return bisect.bisect_right(range(1, most + 1), budget, key=need)

    if args.capacity is None:
        args.capacity = fitting(2_000_000, 0.8 * free)
        if args.capacity < needed:
            room = f"{free / 1e9:.1f} GB are free for it, enough for {args.capacity} transitions"
            raise UsageError(f"--capacity: {room}; at least {needed} are needed")
    elif args.capacity > (fits := fitting(args.capacity, free)):
        need = f"{replay_bytes(space, args) / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free for it"
        hint = f"--capacity {fits} fits" if fits >= needed else f"{fits} would fit, at least {needed} are needed"
        raise UsageError(f"--capacity {args.capacity}: it needs {need}; {hint}")
    for name in ("learning_starts", "batch_size"):
        if getattr(args, name) > args.capacity:
            raise UsageError(f"{flag_and_value(args, name)}: it is more than --capacity {args.capacity}")
    if args.capacity < least:
        raise UsageError(f"--capacity {args.capacity}: {n_envs} environments need {least} with these flags")
