"""Environment steps per second of `common.vec_env.VecEnv` beside Gymnasium's vector environments.

    python benchmarks/vec_env.py                      # two minutes
    python benchmarks/vec_env.py --n-workers 0 8 --rounds 5

One call of `step` counts `n_envs`. Actions are drawn beforehand, the same for all. The contenders
take turns, so that a machine that slows down slows all of them; the table has the medians.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from common.vec_env import VecEnv

ENV_IDS = ("HalfCheetah-v5", "CartPole-v1")
BATCHES = 64


@dataclass
class Args:
    n_envs: int = 32
    """environments of each contender"""
    n_workers: tuple[int, ...] = (0, 2)
    """worker processes of VecEnv: one contender for each number"""
    rounds: int = 3
    """turns that every contender takes"""
    seconds: float = 4.0
    """length of a turn"""


def make_contenders(env_id: str, args: Args) -> dict[str, VectorEnv]:
    fns = [functools.partial(gym.make, env_id)] * args.n_envs
    contenders = {f"VecEnv, n_workers={n}": VecEnv(fns, n) for n in args.n_workers}
    mode = AutoresetMode.SAME_STEP
    contenders["SyncVectorEnv"] = SyncVectorEnv(fns, autoreset_mode=mode)
    contenders["AsyncVectorEnv"] = AsyncVectorEnv(fns, context="spawn", autoreset_mode=mode)
    return contenders


def steps_per_second(envs: VectorEnv, actions: list[np.ndarray], seconds: float) -> float:
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in actions:
            envs.step(batch)
        steps += len(actions) * envs.num_envs
    return steps / (time.perf_counter() - start)


def measure(env_id: str, args: Args) -> dict[str, float]:
    """The median of each contender's steps/s."""
    contenders = make_contenders(env_id, args)
    try:
        action_space = next(iter(contenders.values())).action_space
        action_space.seed(0)
        actions = [action_space.sample() for _ in range(BATCHES)]
        for envs in contenders.values():
            envs.reset(seed=0)
            steps_per_second(envs, actions, 0.5)  # warms up
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, envs in contenders.items():
                rates[name].append(steps_per_second(envs, actions, args.seconds))
    finally:
        for envs in contenders.values():
            envs.close()
    return {name: statistics.median(values) for name, values in rates.items()}


def report(env_id: str, rates: dict[str, float], args: Args) -> str:
    others = [name for name in rates if not name.startswith("VecEnv")]
    lines = [
        f"{args.n_envs} x {env_id}, {os.cpu_count()} cores: steps/s, and how many times that of"
    ]
    lines.append(" " * 39 + "".join(f"{name:>26}" for name in others))
    for name, rate in rates.items():
        ratios = [f"{rate / rates[other]:>26.2f}" for other in others if name not in others]
        lines.append(f"{name:<26}{rate:>13,.0f}" + "".join(ratios))
    return "\n".join(lines) + "\n"


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    for env_id in ENV_IDS:
        print(report(env_id, measure(env_id, args), args), flush=True)


if __name__ == "__main__":
    main()
