"""Learning curves as CSV and picture, from the TensorBoard events of run directories.

    python benchmarks/curve.py runs/pong-1 runs/pong-2 --out results/paac_pong --title "PAAC, Pong" \
        --header "command: python paac.py --n-envs 32" "commit: 2ac81d4" "machine: two cores of an AMD EPYC"

writes results/paac_pong_<seed>.csv for each run (the header as comments, then step, seconds, episodic_return, SPS:
means of the episodes that ended since the last point) and results/paac_pong.png with all of them. Such a CSV in the
place of a run directory is drawn as it is.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run directories, or CSVs that end in _<seed>.csv, one per seed"""
    out: Path
    """where to write, without ending"""
    header: tuple[str, ...] = ()
    """what a reader needs to run it again, a line each; with --append after the lines that are there"""
    title: str = ""
    """of the picture"""
    points: int = 1000
    """at most this many points a curve; neighbours are averaged"""
    append: bool = False
    """go on from the CSV that is there, where a run was resumed from a checkpoint without its events"""
    window: int = 20
    """the line is the mean of so many points, which are drawn as dots"""


Row = tuple[int, float, float, float]


def read_curve(run: Path, points: int) -> list[Row]:
    """(step, seconds, episodic return, steps/s) of a run; seconds leave out the pauses between resumed sessions.

    Empty where no episode has ended.
    """
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return []
    speed, times, seconds, last = {}, {}, 0.0, None
    for event in events.Scalars("charts/SPS"):
        since = event.wall_time - last.wall_time if last else math.inf  # after a pause longer than the time at work
        steps = event.step - (last.step if last else 0)
        seconds += min(since, steps / event.value if event.value else since)
        last, speed[event.step], times[event.step] = event, event.value, seconds
    returns = [(event.step, event.value) for event in events.Scalars("charts/episodic_return") if event.step in times]
    size = max(1, -(-len(returns) // points))
    chunks = [returns[i : i + size] for i in range(0, len(returns), size)]
    return [
        (c[-1][0], times[c[-1][0]], sum(v for _, v in c) / len(c), sum(speed[s] for s, _ in c) / len(c)) for c in chunks
    ]


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The lines of a CSV's header, without their marks, and the cells below the names of its columns."""
    lines = path.read_text().splitlines()
    header = [line[2:] for line in lines if line.startswith("# ")]
    return header, list(csv.reader(lines[len(header) + 1 :]))


def write_table(path: Path, header: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence]) -> None:
    """What `read_table` reads."""
    with open(path, "w", newline="") as file:
        file.writelines(f"# {line}\n" for line in header)
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def write_csv(path: Path, header: Iterable[str], rows: list[Row]) -> None:
    """A curve, rounded to what it is worth."""
    rounded = ((step, round(time, 1), round(score, 3), round(speed)) for step, time, score, speed in rows)
    write_table(path, header, ("step", "seconds", "episodic_return", "SPS"), rounded)


def read_csv(path: Path) -> tuple[list[str], list[Row]]:
    """The header and the rows of a curve."""
    header, rows = read_table(path)
    return header, [(int(row[0]), *map(float, row[1:])) for row in rows]


def continued(rows: list[Row], past: list[Row]) -> list[Row]:
    """The rows of a run up to where it was resumed, and those since then, whose seconds go on from there."""
    past = [row for row in past if row[0] < rows[0][0]]
    if not past:
        return rows
    start = past[-1][1] + (rows[0][0] - past[-1][0]) / rows[0][3] - rows[0][1]
    return past + [(row[0], start + row[1], *row[2:]) for row in rows]


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for run in args.runs:
        if not ((run / "args.json").is_file() or (re.search(r"_\d+\.csv$", run.name) and run.is_file())):
            sys.exit(f"curve.py: {run}: it is neither a run directory nor a CSV that ends in _<seed>.csv")
        if run.suffix == ".csv":
            seed, (_, rows) = int(run.stem.rpartition("_")[2]), read_csv(run)
        else:
            seed, rows = json.loads((run / "args.json").read_text())["seed"], read_curve(run, args.points)
            if not rows:
                sys.exit(f"curve.py: {run}: no episode has ended")
            path, header = Path(f"{args.out}_{seed}.csv"), list(args.header)
            if args.append:
                past_header, past = read_csv(path)
                header, rows = past_header + header, continued(rows, past)
            write_csv(path, header, rows)
        returns = np.array([row[2] for row in rows])
        n = min(args.window, len(returns))
        means = np.convolve(returns, np.ones(n), "valid") / n  # of the last n points
        for axis, x in ((axes[0], [row[0] / 1e6 for row in rows]), (axes[1], [row[1] / 3600 for row in rows])):
            (line,) = axis.plot(x[n - 1 :], means, label=f"seed {seed}")
            axis.plot(x, returns, ".", markersize=2, alpha=0.3, color=line.get_color())
    axes[0].set_xlabel("million agent steps")
    axes[1].set_xlabel("hours")
    axes[0].set_ylabel("return of training episodes")
    axes[0].legend()
    figure.suptitle(args.title)
    figure.tight_layout()
    figure.savefig(f"{args.out}.png", dpi=100)


if __name__ == "__main__":
    main()
