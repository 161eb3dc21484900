"""Agent steps and seconds to a score against the number of parallel actors: Table 2 of Mnih et al. in small.

    python benchmarks/scaling.py --goal 400 --out results/ppo_scaling_cartpole
    python benchmarks/scaling.py --trainer a3c --counts 1 2 --goal 195 --out results/a3c_scaling_cartpole
    python benchmarks/scaling.py --trainer apex --counts 1 2 4 --goal 195 --out results/apex_scaling_cartpole

What is counted is environments (paac.py, ppo_batch.py, whose N·T stays the same), processes (the asynchronous four) or
actors (apex.py). The goal is a mean return of the last 100 training episodes, and seconds begin when the run directory
is there, so that they hold the start of processes. Runs follow one another, alone on the machine; writes OUT.csv and
OUT.png, with NaN for a run that ends before it gets there. What OUT.csv has already is drawn, and not run again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro

from benchmarks.curve import read_table, write_table
from benchmarks.learning import HOGWILD, Trainer, provenance
from common.run import Run

PARALLEL = {"paac": "--n-envs", "ppo_batch": "--n-envs", "apex": "--n-actors"} | dict.fromkeys(HOGWILD, "--n-processes")


Row = tuple[int, int, float, float]  # count, seed, steps, seconds


@dataclass
class Args:
    goal: float
    """mean return of the last 100 episodes"""
    out: Path
    """where to write, without ending"""
    trainer: Trainer = "ppo_batch"
    """whose time is taken"""
    env_id: str = "CartPole-v1"
    """environment"""
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    """numbers of environments, processes or actors"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """runs of each"""
    max_steps: int = 500_000
    """where a run ends that does not get there; --total-steps of the trainer"""
    flags: str = ""
    """more flags of the trainer"""


def to_goal(args: Args, count: int, seed: int) -> tuple[float, float]:
    """Agent steps and seconds from the start of training until the goal; NaN where it is not reached."""
    reached, count_episodes = [], Run.count_episodes

    def watch(run: Run, returns: np.ndarray, lengths: np.ndarray) -> None:
        count_episodes(run, returns, lengths)
        if not reached and len(run.returns) == run.returns.maxlen and np.mean(run.returns) >= args.goal:
            reached.append((run.step, run.seconds))
            run.signal = signal.SIGTERM  # stop

    Run.count_episodes = watch
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            flags = ["--env-id", args.env_id, PARALLEL[args.trainer], str(count), "--seed", str(seed)]
            flags += ["--total-steps", str(args.max_steps), "--eval-episodes", "0", "--run-dir", f"{folder}/run"]
            status = importlib.import_module(args.trainer).main([*flags, *shlex.split(args.flags)])
    finally:
        Run.count_episodes = count_episodes
    if status and not reached:  # a failure, which has been told, is no measurement
        sys.exit(status)
    return reached[0] if reached else (math.nan, math.nan)


def command(args: Args) -> list[str]:
    """What is measured, as flags; the counts and seeds that have run are in the rows."""
    flags = ["--trainer", args.trainer, "--env-id", args.env_id, "--goal", f"{args.goal:g}"]
    flags += ["--max-steps", str(args.max_steps)]
    return ["benchmarks/scaling.py", *flags, *(["--flags", args.flags] if args.flags else [])]


def plot(args: Args, rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axis, column, name in ((axes[0], 2, "agent steps"), (axes[1], 3, "seconds")):
        axis.plot([row[0] for row in rows], [row[column] for row in rows], "o", alpha=0.5)
        counts = sorted({row[0] for row in rows})
        means = [np.mean([row[column] for row in rows if row[0] == n]) for n in counts]  # NaN where one run is
        axis.plot(counts, means, "-")
        what = PARALLEL[args.trainer].removeprefix("--n-").replace("envs", "environments")
        axis.axhline(0, linewidth=0)  # nothing to see: zero counts where the limits are set
        axis.set(xscale="log", xlabel=what, ylabel=f"{name} to a return of {args.goal:g}")
        axis.set_ylim(bottom=0)
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.minorticks_off()
    figure.suptitle(f"{args.trainer}.py, {args.env_id}")
    figure.tight_layout()
    figure.savefig(args.out.with_suffix(".png"), dpi=100)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    path, now = args.out.with_suffix(".csv"), provenance(command(args))
    lines = [f"{key}: {value}" for key, value in now.items()]
    header, cells = read_table(path) if path.exists() else (lines, [])
    if header[:1] != lines[:1]:
        sys.exit(f"scaling.py: {path} is of another {header[0] if header else 'command'}")
    rows: list[Row] = [(int(row[0]), int(row[1]), float(row[2]), float(row[3])) for row in cells]
    there = {row[:2] for row in rows}
    for seed in args.seeds:
        for count in args.counts:
            if (count, seed) in there:
                continue
            rows.append((count, seed, *to_goal(args, count, seed)))
            print("{} {}, seed {}: {:,.0f} steps, {:.1f} s".format(PARALLEL[args.trainer], *rows[-1]), flush=True)
            for line in lines[1:]:
                key, known = line.split(": ")[0], [text.removeprefix("last rows, ") for text in header]
                if [text for text in known if text.startswith(key)][-1:] != [line]:
                    header.append(f"last rows, {line}")
            write_table(path, header, ("count", "seed", "steps", "seconds"), rows)  # at once: it may be stopped
    plot(args, rows)


if __name__ == "__main__":
    main()
