"""Wall-clock time and steps that batch PPO needs for a score, against the number of simulators (ChainerRL, 2018).

    python benchmarks/simulators.py --env-id CartPole-v1 --goal 475 --out results/ppo_simulators_cartpole
    python benchmarks/simulators.py --env-id Hopper-v5 --goal 1500 --max-steps 1_000_000 --out results/ppo_simulators

The goal is a mean return of the last 100 training episodes. N·T stays the same for every N. Runs follow one another,
alone on the machine; writes OUT.csv and OUT.png, with NaN for a run that ends before it gets there.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro

import ppo_batch


@dataclass
class Args:
    goal: float
    """mean return of the last 100 episodes"""
    out: Path
    """where to write, without ending"""
    env_id: str = "CartPole-v1"
    """environment"""
    n_envs: tuple[int, ...] = (1, 2, 4, 8, 16)
    """numbers of simulators"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """runs of each"""
    max_steps: int = 500_000
    """where a run ends that does not get there"""


def to_goal(args: Args, n_envs: int, seed: int) -> tuple[float, float]:
    """Agent steps and seconds from the start of training until the goal."""
    reached = []

    class GoalRun(ppo_batch.Run):
        def count_update(self, step: int, scalars: dict[str, Any]) -> None:
            super().count_update(step, scalars)
            if len(self.returns) == self.returns.maxlen and np.mean(self.returns) >= args.goal:
                reached.append((step, self.seconds))
                self.signal = 1  # stop

        def _finish(self) -> None:
            pass

    original, ppo_batch.Run = ppo_batch.Run, GoalRun
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            flags = ["--env-id", args.env_id, "--n-envs", str(n_envs), "--seed", str(seed)]
            status = ppo_batch.main([*flags, "--total-steps", str(args.max_steps), "--run-dir", f"{folder}/run"])
    finally:
        ppo_batch.Run = original
    if status and not reached:  # a failure, which has been told, is no measurement
        sys.exit(status)
    return reached[0] if reached else (float("nan"), float("nan"))


def plot(args: Args, rows: list[tuple[int, int, float, float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axis, column, name in ((axes[0], 2, "agent steps"), (axes[1], 3, "seconds")):
        axis.plot([row[0] for row in rows], [row[column] for row in rows], "o", alpha=0.5)
        means = [np.mean([row[column] for row in rows if row[0] == n]) for n in args.n_envs]
        axis.plot(args.n_envs, means, "-")
        axis.set(xscale="log", xlabel="simulators", ylabel=f"{name} to {args.goal:g}", ylim=(0, None))
        axis.set_xticks(args.n_envs, [str(n) for n in args.n_envs])
    figure.suptitle(f"batch PPO, {args.env_id}")
    figure.tight_layout()
    figure.savefig(args.out.with_suffix(".png"), dpi=100)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    rows = []
    for seed in args.seeds:
        for n_envs in args.n_envs:
            rows.append((n_envs, seed, *to_goal(args, n_envs, seed)))
            print("{} simulators, seed {}: {:,.0f} steps, {:.1f} s".format(*rows[-1]), flush=True)
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([("n_envs", "seed", "steps", "seconds"), *rows])
    plot(args, rows)


if __name__ == "__main__":
    main()
