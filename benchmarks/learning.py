"""Runs a suite of trainings side by side, and adds each to results/runs.csv when it is done.

    python benchmarks/learning.py small                             # hours on two cores
    python benchmarks/learning.py pong --trainers ppo_batch --seeds 1 2 3
    python benchmarks/results.py                                    # then: tables and pictures

Interrupted, the same command goes on from the checkpoints in runs/<suite>/. A run that is in
results/curves/ already is not run again.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.results import ATARI, BOX, COLOURS, MUJOCO, PAAC, SMALL, file_name
from common.processes import n_cores

ROOT = Path(__file__).resolve().parent.parent
HOGWILD = ("a3c", "async_q", "nstep_q", "sarsa")
TRAINERS = tuple(COLOURS)


@dataclass
class Args:
    suite: tyro.conf.Positional[Literal["small", "mujoco", "pong", "atari"]]
    """what to run"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each task"""
    trainers: tuple[str, ...] = TRAINERS
    """only these"""
    env_ids: tuple[str, ...] = ()
    """only these; none named: all of the suite"""
    cores: int = n_cores()
    """Pong, Hogwild and Ape-X take two, the others one"""
    add: bool = True
    """add the runs to results/"""


def tasks(suite: str) -> list[tuple[str, str, int | None]]:
    """Trainer, environment and steps of each task of a suite; None: those of --preset short."""
    if suite == "small":
        return [
            (name, task, 100_000 if name == "apex" else 300_000)
            for name in TRAINERS
            for task in SMALL
            if (task not in BOX or name in ("paac", "a3c", "ppo_batch"))
            and ("Memory" not in task or name == "a3c")
        ]
    if suite == "mujoco":
        return [(name, task, 2_000_000) for task in MUJOCO for name in ("ppo_batch", "a3c", "paac")]
    if suite == "pong":
        return [(name, ATARI("Pong"), None) for name in TRAINERS]
    return [("paac", ATARI(game), None) for game in PAAC]


def command(run_dir: Path, trainer: str, env_id: str, steps: int | None, seed: int) -> list[str]:
    """What starts a run, or goes on with it."""
    script = [sys.executable, str(ROOT / f"{trainer}.py")]
    episodes = ["--eval-episodes", "100"] if env_id in (*MUJOCO, "FrozenLake-v1") else []
    summary = run_dir / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["status"] == "completed":
        return [*script, "--evaluate", str(run_dir), *episodes]
    if (run_dir / "checkpoint.pt").exists():
        return [*script, "--resume", str(run_dir)]
    flags = ["--total-steps", str(steps)] if steps else ["--preset", "short"]
    if trainer in ("paac", "ppo_batch") and steps:
        flags += ["--n-workers", "0"]
    flags += ["--lstm"] if "Memory" in env_id else []
    task = ["--env-id", env_id, "--seed", str(seed), "--run-dir", str(run_dir)]
    return [*script, *task, *flags, *episodes]


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    short = args.suite in ("pong", "atari")  # --preset short
    waiting = []
    for seed in args.seeds:
        for trainer, env_id, steps in tasks(args.suite):
            variant = "short_" if short else ""
            name = f"{trainer}_{file_name(env_id)}_{variant}{seed}"
            chosen = trainer in args.trainers and (not args.env_ids or env_id in args.env_ids)
            if chosen and not (args.add and (ROOT / f"results/curves/{name}.csv").exists()):
                waiting.append((ROOT / "runs" / args.suite / name, trainer, env_id, steps, seed))
    running: dict[Path, tuple[subprocess.Popen, list[int]]] = {}
    free = sorted(os.sched_getaffinity(0))[: args.cores]
    add = [sys.executable, str(ROOT / "benchmarks/results.py"), "--add"]
    while waiting or running:
        if waiting:
            run_dir, trainer = waiting[0][:2]
            both = args.suite == "pong" or trainer in (*HOGWILD, "apex")
            n = min(2 if both else 1, args.cores)
            if n <= len(free):
                cores, free = free[:n], free[n:]
                pin = functools.partial(os.sched_setaffinity, 0, cores)
                process = subprocess.Popen(command(*waiting.pop(0)), cwd=ROOT, preexec_fn=pin)
                running[run_dir] = process, cores
        for run_dir, (process, cores) in list(running.items()):
            if process.poll() is not None:
                del running[run_dir]
                free += cores
                if process.returncode:
                    print(f"{run_dir} ended with {process.returncode}", file=sys.stderr)
                elif args.add:
                    variant = ["--variant", "short"] if short else []
                    # pinned as the run was, for the number of cores
                    pin = functools.partial(os.sched_setaffinity, 0, cores)
                    subprocess.run([*add, str(run_dir), *variant], check=True, preexec_fn=pin)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
