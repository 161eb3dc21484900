"""Curves and tables from the CSVs of benchmarks/learning.py.

    python benchmarks/plot.py results/small                         # pictures beside the CSVs, the table on the screen
    python benchmarks/plot.py results/small --readme README.md results/README.md       # and into these, between marks

A picture for each task: the return of training episodes against steps and against seconds, for each trainer the
interquartile mean over its seeds and its 95 % bootstrap interval (Agarwal et al. 2021), of one or two seeds each. The
table has the same of the evaluations at the end, and beside them what was published for the task; results/README.md
says under which protocol.
It goes between <!-- begin small --> and <!-- end small -->, a short one of the means between `scores of small`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro

from benchmarks.curve import read_table
from benchmarks.learning import PONG, TRAINERS, file_name

RESAMPLES = 2000
# What was published: the number that ours is compared with, and after how many steps or by whom.
PUBLISHED: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("a3c", PONG): [("20.9", "80M steps")],  # PFRL, the best of the intermediate evaluations
    ("ppo_batch", PONG): [("20.7", "10M steps")],  # Schulman et al., training episodes
    ("apex", PONG): [("20.9", "5.7G steps")],  # the paper
    ("ppo_batch", "HalfCheetah-v5"): [("1986", "± 175")],  # PFRL, v2 models
    ("ppo_batch", "Hopper-v5"): [("2793", "± 65")],
    ("ppo_batch", "Walker2d-v5"): [("2873", "± 138")],
    ("ppo_batch", "Swimmer-v5"): [("125", "± 11")],
    ("paac", "HalfCheetah-v5"): [("3041", "A2C")],  # rl-baselines3-zoo, one run of a million steps, v3 models
    ("paac", "Hopper-v5"): [("733", "A2C")],
    ("paac", "Swimmer-v5"): [("201", "A2C")],
}
PAAC = "Amidar 701.8, Centipede 5747.3, BeamRider 4062.0, Boxing 99.6, Breakout 470.1, MsPacman 2194.7, "  # arch_nips
PAAC += "NameThisGame 9743.7, Pong 20.6, Qbert 16561.7, Seaquest 1754.0, SpaceInvaders 1077.3, UpNDown 88105.3"
A2C = "BeamRider 2890, Breakout 280, Pong 17.3, Qbert 3882, Seaquest 1721, SpaceInvaders 627"  # rl-baselines3-zoo
for scores, after in ((PAAC, "115M steps"), (A2C, "A2C, 10M steps")):
    for game, score in (pair.split() for pair in scores.split(", ")):
        PUBLISHED.setdefault(("paac", f"{game}NoFrameskip-v4"), []).append((score, after))

STYLES = dict(zip(TRAINERS, ("C0-", "C1-", "C2-", "C3--", "C4-.", "C5-", "C9-"), strict=True))  # in every picture


@dataclass
class Args:
    folder: tyro.conf.Positional[Path]
    """where the CSVs are and the pictures go"""
    readme: tuple[Path, ...] = ()
    """files whose tables of this folder are replaced"""
    window: float = 0.05
    """a curve is averaged over the episodes of this share of the run"""


@dataclass
class Result:
    """One CSV: what its header says, and its columns, (n,) each."""

    header: dict[str, str]
    steps: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray

    @property
    def task(self) -> tuple[str, str, int]:
        trainer, env_id, seed = self.header["task"].split()
        return trainer, env_id, int(seed)

    @property
    def score(self) -> float:
        """The mean of the evaluation."""
        return json.loads(self.header["evaluation"])["mean"]


def read_result(path: Path) -> Result:
    """One CSV of benchmarks/learning.py."""
    header, rows = read_table(path)
    columns = np.array([[float(value) for value in row] for row in rows]).reshape(-1, 4)
    return Result(dict(line.split(": ", 1) for line in header), columns[:, 0], columns[:, 1], columns[:, 2])


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the middle half of axis 0, (n, ...) → (...): a quarter of the n is left out at each end.

    Where n is no multiple of four, the values at the borders count in part.
    """
    n = len(values)
    edges = np.clip(np.arange(n + 1), n / 4, 3 * n / 4)
    weights = np.diff(edges) / (n / 2)  # how much of the middle half each of the sorted values covers
    return np.tensordot(weights, np.sort(values, axis=0), axes=1)


def bootstrap_interval(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of a statistic over axis 0, which is drawn again with replacement: its two borders."""
    rng = np.random.default_rng(seed)
    draws = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(draws, (2.5, 97.5), axis=0)
    return low, high


def curve(x: np.ndarray, returns: np.ndarray, grid: np.ndarray, window: float) -> np.ndarray:
    """Mean of the returns within `window` before each x, then straight lines between; NaN before the first x."""
    sums = np.concatenate([[0], np.cumsum(returns)])
    starts, ends = np.searchsorted(x, x - window, side="right"), np.arange(1, len(x) + 1)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return np.interp(grid, x, means, left=np.nan)


def short_name(env_id: str) -> str:
    """A task as the tables and pictures name it."""
    return env_id.rpartition(":")[2].removesuffix("NoFrameskip-v4")


def picture(env_id: str, results: dict[str, list[Result]], path: Path, window: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for trainer, runs in results.items():
        groups = [runs] if len(runs) > 2 else [[run] for run in runs]  # of one or two seeds each is drawn
        for axis, column in zip(axes, ("steps", "seconds"), strict=True):
            for group in groups:
                end = min(getattr(run, column)[-1] for run in group)  # where the first of the seeds ends
                grid = np.linspace(0, end, 200)
                curves = np.stack([curve(getattr(run, column), run.returns, grid, window * end) for run in group])
                known = ~np.isnan(curves).any(axis=0)
                grid, curves = grid[known], curves[:, known]
                (line,) = axis.plot(
                    grid, interquartile_mean(curves), STYLES[trainer], linewidth=1.5 if len(group) > 1 else 1
                )
                if len(group) > 1:
                    low, high = bootstrap_interval(curves, interquartile_mean)
                    axis.fill_between(grid, low, high, color=line.get_color(), alpha=0.2)
            line.set_label(f"{trainer} ({len(runs)})")
    axes[0].set(xlabel="agent steps", ylabel="return of training episodes", xlim=(0, None))
    millions = axes[0].get_xlim()[1] > 1e6
    axes[0].xaxis.set_major_formatter(lambda x, position: f"{x / 1e6:g}M" if millions else f"{x:,.0f}")
    axes[0].locator_params(axis="x", nbins=5)
    axes[1].set(xlabel="seconds", xlim=(0, None))
    axes[1].legend(title="trainer (seeds)", loc="upper left", bbox_to_anchor=(1.01, 1))
    many = "; three seeds or more: interquartile mean, 95 % bootstrap interval"
    figure.suptitle(short_name(env_id) + (many if any(len(runs) > 2 for runs in results.values()) else ""))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def published(trainer: str, env_id: str, runs: list[Result]) -> str:
    """What was published for a task, and where the mean of ours, if there is any, is lower."""
    cells = []
    for number, note in PUBLISHED.get((trainer, env_id), []):
        lower = runs and np.mean([run.score for run in runs]) < float(number)
        cells.append(f"{number} ({note})" + ("; ours lower" if lower else ""))
    return "; ".join(cells)


def table(tasks: dict[str, dict[str, list[Result]]]) -> str:
    """Markdown: a line for each task and trainer, with the standard error of the mean over seeds.

    Steps are where the longest seed's curve ends, with an episode; minutes are the mean of the seeds. The mean of one
    seed and the interval of fewer than three are left out, and so are columns that stay empty.
    """
    titles = "task, trainer, steps, minutes, interquartile mean [95 %], mean ± s.e., each seed, published"
    rows = [titles.split(", ")]
    for env_id, trainers in tasks.items():
        for trainer, runs in trainers.items():
            scores = np.array([run.score for run in runs])
            middle = mean = ""
            if len(scores) > 1:
                mean = f"{scores.mean():.1f} ± {scores.std(ddof=1) / np.sqrt(len(scores)):.1f}"
            if len(scores) > 2:
                low, high = bootstrap_interval(scores, interquartile_mean)
                middle = f"{interquartile_mean(scores):.1f} [{low:.1f}, {high:.1f}]"
            cells = [
                short_name(env_id),
                f"`{trainer}.py`",
                f"{max(run.steps[-1] for run in runs):,.0f}",
                f"{np.mean([float(run.header['seconds']) for run in runs]) / 60:.1f}",
                middle,
                mean,
                ", ".join(f"{score:.1f}" for score in scores),
                published(trainer, env_id, runs),
            ]
            rows.append(cells)
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*kept, strict=True)]
    return "\n".join([lines[0], "|---" * len(kept) + "|", *lines[1:]])


def short_table(tasks: dict[str, dict[str, list[Result]]]) -> str:
    """Markdown: a line for each trainer, a column for each task; the mean over seeds, the lowest and the highest."""
    lines = [f"| | {' | '.join(map(short_name, tasks))} |", "|---" * (len(tasks) + 1) + "|"]
    for trainer in (name for name in TRAINERS if any(name in results for results in tasks.values())):
        cells = []
        for results in tasks.values():
            scores = np.array([run.score for run in results.get(trainer, [])])
            cell = f"{scores.mean():.1f} (one seed)" if len(scores) else ""
            if len(scores) > 1:
                cell = f"{scores.mean():.1f} ({len(scores)} seeds, {scores.min():.1f} to {scores.max():.1f})"
            cells.append(cell)
        lines.append(f"| `{trainer}.py` | {' | '.join(cells)} |")
        beside = [published(trainer, env_id, results.get(trainer, [])) for env_id, results in tasks.items()]
        if any(beside):
            lines.append(f"| published | {' | '.join(beside)} |")
    return "\n".join(lines)


def replace_tables(text: str, new: dict[str, str]) -> str:
    """The text with what stands between the two marks of each name replaced. Raises ValueError if it has none."""
    marks = {name: (f"<!-- begin {name} -->", f"<!-- end {name} -->") for name in new}
    marks = {name: pair for name, pair in marks.items() if all(mark in text for mark in pair)}
    if not marks:
        raise ValueError(f"there are no marks of {' or '.join(new)}")
    for name, (begin, end) in marks.items():
        text = f"{text.split(begin)[0]}{begin}\n{new[name]}\n{end}{text.split(end)[1]}"
    return text


def read_folder(folder: Path) -> dict[str, dict[str, list[Result]]]:
    """The results of a folder by task and trainer, seeds in order."""
    tasks: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    results = [read_result(path) for path in folder.glob("*.csv")]
    for result in sorted((r for r in results if "task" in r.header and len(r.steps)), key=lambda r: r.task):
        trainer, env_id, _ = result.task
        tasks[env_id][trainer].append(result)
    return tasks


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    try:
        tasks = read_folder(args.folder)
        if not tasks:
            raise ValueError(f"{args.folder} holds no CSV of benchmarks/learning.py")
        new = {args.folder.name: table(tasks), f"scores of {args.folder.name}": short_table(tasks)}
        texts = {path: replace_tables(path.read_text(), new) for path in args.readme}
        for path, text in texts.items():
            path.write_text(text)
    except (ValueError, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    for env_id, results in tasks.items():
        picture(env_id, results, args.folder / f"{file_name(env_id)}.png", args.window)
    print(new[args.folder.name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
