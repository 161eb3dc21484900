"""Steps/s of the asynchronous trainers against the number of processes (Mnih et al. 2016, Fig. 3 in small).

    python benchmarks/hogwild.py                                 # a3c and the three Q-learners, 1 and 2 processes
    python benchmarks/hogwild.py --trainers a3c --processes 1 2 4 8 16
    python benchmarks/hogwild.py --pfrl                          # beside PFRL's A3C with the same network

Steps are agent steps of all processes together. The contenders take turns, so that a machine that slows down slows
them all; the number of each is the median over the rounds. PFRL and Gym, which it needs, must be installed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import tyro

from common.atari import make_atari_env
from common.hogwild import Team
from common.processes import n_cores
from common.run import Run
from common.vec_env import make_vec_env


@dataclass
class Args:
    env_id: str = "PongNoFrameskip-v4"
    """environment"""
    trainers: tuple[str, ...] = ("a3c", "async_q", "nstep_q", "sarsa")
    """trainers to measure"""
    processes: tuple[int, ...] = (1, 2)
    """numbers of processes"""
    seconds: float = 15.0
    """measured time of one contender in one round"""
    rounds: int = 3
    """rounds"""
    pfrl: bool = False
    """measure PFRL's A3C as well"""
    pfrl_worker: int = 0
    """print the steps/s of PFRL's A3C with so many processes and nothing else: what --pfrl starts"""


def environment_rate(args: Args) -> float:
    """Steps/s of the vector environment alone, 32 games with random actions and a thread a core."""
    envs = make_vec_env(args.env_id, 32, min(32, n_cores()))
    envs.reset(seed=0)
    random, steps, start = np.random.default_rng(0), 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        envs.step(random.integers(envs.single_action_space.n, size=32))
        steps += 32
    rate = steps / (time.perf_counter() - start)
    envs.close()
    return rate


def trainer_rate(args: Args, name: str, n_processes: int) -> float:
    """Steps/s of a trainer, from when each of its processes has made 200 steps."""
    rates: list[float] = []

    def watch(self: Team, run: Run) -> None:
        while (self.counts < 200).any() and not run.stopped:
            time.sleep(0.1)
        step, start = self.global_step, time.perf_counter()
        while time.perf_counter() - start < args.seconds and not run.stopped:
            time.sleep(0.01)
        rates.append((self.global_step - step) / (time.perf_counter() - start))

    original, Team.watch = Team.watch, watch
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            flags = ["--env-id", args.env_id, "--n-processes", str(n_processes), "--run-dir", f"{folder}/run"]
            status = importlib.import_module(name).main(flags)
    finally:
        Team.watch = original
    if status:  # a failure, which has been told, or a signal that was meant for this program
        sys.exit(status)
    return rates[0]


class OldGym:
    """One game as PFRL wants it: `reset` gives an observation, `step` four values."""

    def __init__(self, env_id: str) -> None:
        self.env = make_atari_env(env_id)
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self) -> np.ndarray:
        return self.env.reset()[0]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(np.clip(reward, -1, 1)), terminated, info | {"needs_reset": truncated}

    def close(self) -> None:
        self.env.close()


def pfrl_rate(args: Args, n_processes: int) -> float:
    """Steps/s of PFRL's A3C as its Atari example sets it up, but with the small network."""
    import pfrl
    from pfrl.agents import a3c
    from pfrl.experiments import train_agent_async
    from pfrl.optimizers import SharedRMSpropEpsInsideSqrt
    from pfrl.policies import SoftmaxCategoricalHead
    from torch import nn

    n_actions = make_atari_env(args.env_id).action_space.n
    model = nn.Sequential(
        nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2592, 256),
        nn.ReLU(),
        pfrl.nn.Branched(nn.Sequential(nn.Linear(256, n_actions), SoftmaxCategoricalHead()), nn.Linear(256, 1)),
    )  # fmt: skip
    optimizer = SharedRMSpropEpsInsideSqrt(model.parameters(), lr=7e-4, eps=1e-1, alpha=0.99)
    agent = a3c.A3C(
        model, optimizer, t_max=5, gamma=0.99, beta=1e-2, max_grad_norm=40.0,
        phi=lambda obs: np.asarray(obs, dtype=np.float32) / 255,
    )  # fmt: skip
    marks = torch.zeros(4, dtype=torch.float64).share_memory_()  # time and step when measuring began, and the last ones

    def hook(env: Any, agent: Any, step: int) -> None:
        now = time.perf_counter()
        if step >= 400 and marks[0] == 0:
            marks[0], marks[1] = now, step
        marks[2], marks[3] = now, step
        if marks[0] and now - marks[0] > args.seconds:
            os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        train_agent_async(
            folder, processes=n_processes, make_env=lambda index, test: OldGym(args.env_id), steps=10**9,
            eval_interval=None, agent=agent, random_seeds=list(range(n_processes)), global_step_hooks=[hook],
        )  # fmt: skip
    return float((marks[3] - marks[1]) / (marks[2] - marks[0]))


def pfrl_process_rate(args: Args, n_processes: int) -> float:
    flags = ["--env-id", args.env_id, "--seconds", str(args.seconds), "--pfrl-worker", str(n_processes)]
    command = [sys.executable, os.path.abspath(__file__), *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return float(json.loads(output.split()[-1]))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    if args.pfrl_worker:
        print(json.dumps(pfrl_rate(args, args.pfrl_worker)))
        return
    print(f"{args.env_id}, {n_cores()} cores, torch {torch.__version__}; {args.rounds} x {args.seconds} s each")
    contenders: dict[tuple[str, int], Any] = {("environment alone", n_cores()): lambda: environment_rate(args)}
    for name in args.trainers:
        for n in args.processes:
            contenders[name, n] = lambda name=name, n=n: trainer_rate(args, name, n)
    if args.pfrl:
        for n in args.processes:
            contenders["PFRL A3C", n] = lambda n=n: pfrl_process_rate(args, n)
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
    for _ in range(args.rounds):
        for key, measure in contenders.items():
            rates[key].append(measure())
    medians = {key: statistics.median(values) for key, values in rates.items()}
    for (name, n), rate in medians.items():
        line = f"{name:18s} {n:3d} processes {rate:8,.0f} steps/s"
        if (name, 1) in medians:
            line += f"   {rate / medians[name, 1]:5.2f} x one process"
        if ("PFRL A3C", n) in medians:
            line += f"   {rate / medians['PFRL A3C', n]:5.2f} x PFRL"
        print(line)


if __name__ == "__main__":
    main()
