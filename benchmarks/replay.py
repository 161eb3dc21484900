"""Ape-X's replay memory and learner under the paper's load: 12,500 transitions in, 20 batches of 512 out, each second.

    python benchmarks/replay.py                                         # a memory of 200,000 Atari transitions, CPU
    python benchmarks/replay.py --capacity 2_000_000 --device cuda --replay-device cuda

Prints three figures, each the median of `rounds`: what drawing 512 indices of two million and writing their
priorities back takes, beside cpprb's prioritised buffer where that is installed; what share of a second the replay
memory needs for one second of the paper's load, frames included; how many batches a second the learner learns from a
full memory of random frames.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import tyro
from gymnasium import spaces

import apex
from common.actors import Chunk
from common.flags import pick_device
from common.run import keep_freed_memory
from common.sum_tree import SumTree

SPACE, ACTIONS = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)
TREE_SIZE, BATCH_SIZE = 2_000_000, 512


@dataclass
class Args:
    capacity: int = 200_000
    """transitions in the replay memory"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """of the learner"""
    replay_device: Literal["cpu", "cuda"] = "cpu"
    """of the frames"""
    n_envs: int = 16
    """environments that the transitions come from"""
    bfloat16: bool = False
    """the learner's passes in bfloat16"""
    threads: int | None = None
    """of torch; None: as many as torch takes"""
    rounds: int = 5
    """of each measurement"""


def seconds(function: Callable[[], None], rounds: int) -> float:
    """The median time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def tree_seconds(rounds: int) -> float:
    """One draw of 512 from two million, and its priorities written back."""
    rng, tree = np.random.default_rng(0), SumTree(TREE_SIZE)
    tree.update(np.arange(TREE_SIZE), rng.random(TREE_SIZE))
    priorities = rng.random(BATCH_SIZE)
    return seconds(lambda: tree.update(tree.sample(BATCH_SIZE)[0], priorities), 100 * rounds)


def cpprb_seconds(rounds: int) -> float | None:
    """The same with cpprb, which also raises to α and works out the importance weights."""
    try:
        from cpprb import PrioritizedReplayBuffer
    except ImportError:
        return None
    rng, buffer = np.random.default_rng(0), PrioritizedReplayBuffer(TREE_SIZE, {"action": {}}, alpha=0.6)
    for _ in range(40):
        buffer.add(action=np.zeros(TREE_SIZE // 40), priorities=rng.random(TREE_SIZE // 40))
    priorities = rng.random(BATCH_SIZE)
    draw = lambda: buffer.update_priorities(buffer.sample(BATCH_SIZE, beta=0.4)["indexes"], priorities)  # noqa: E731
    return seconds(draw, 100 * rounds)


def random_chunk(rng: np.random.Generator, size: int) -> Chunk:
    chunk = {name: np.ones(*field) for name, field in apex.chunk_fields(SPACE, size).items()}
    frames = rng.integers(0, 256, chunk["frames"].shape, np.uint8)
    return chunk | {"frames": frames, "ages": np.full(size, 3, np.uint8), "errors": rng.random(size, np.float32)}


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    ours, theirs = tree_seconds(args.rounds), cpprb_seconds(args.rounds)
    print(f"sum tree, 2M: {ours * 1e3:.3f} ms for 512", end="")
    print(f"; cpprb {theirs * 1e3:.3f} ms, {theirs / ours:.2f} x" if theirs else "; cpprb is not installed")

    device = pick_device(args.device)
    trainer = apex.Args(capacity=args.capacity, n_actors=1, envs_per_actor=args.n_envs)
    trainer.replay_device = args.replay_device
    replay, rng = apex.Replay(SPACE, trainer, device), np.random.default_rng(0)
    chunks = [random_chunk(rng, trainer.chunk_size) for _ in range(20)]
    for i in range(args.capacity // trainer.chunk_size):
        replay.add(i % args.n_envs, chunks[i % len(chunks)])

    def one_second() -> None:
        for i in range(12_500 // trainer.chunk_size):
            replay.add(i % args.n_envs, chunks[i % len(chunks)])
            if i % 12 == 0:  # 21 batches
                batch = replay.sample()
                replay.set_priorities(batch, rng.random(BATCH_SIZE))
        replay.trim()
        if device.type == "cuda":
            torch.cuda.synchronize()

    print(f"replay memory: {seconds(one_second, args.rounds):.2f} s of work for 1 s of the paper's load")

    model = apex.QNetwork(SPACE, ACTIONS, "nature", args.bfloat16).to(device)
    target_model, parameters = copy.deepcopy(model), list(model.parameters())
    optimizer = apex.CentredRMSProp(parameters, trainer.learning_rate, trainer.rms_decay, trainer.rms_eps)
    n_updates = 50 if device.type == "cuda" else 2

    def learn() -> None:
        for _ in range(n_updates):
            batch = replay.sample()
            errors, _ = apex.update(model, target_model, optimizer, batch, trainer.max_grad_norm)
            replay.set_priorities(batch, errors)

    rate = n_updates / seconds(learn, args.rounds)
    print(f"learner on {device}: {rate:.1f} batches of 512 a second (paper: 19)")


if __name__ == "__main__":
    main()
