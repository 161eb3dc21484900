"""Draws the tables and the pictures of results/ from results/runs.csv and the curves that it names.

    python benchmarks/results.py                                    # rewrite all of them
    python benchmarks/results.py --add runs/pong-1                  # append a finished run, no more
    python benchmarks/results.py --add runs/pong-2 --variant paper --note "stopped"

A curve is named <trainer>_<environment>[_<variant>]_<seed>.csv. The table and the picture of a task
show its runs with `--preset short`, whose variant is "short", or else those without a variant; runs
with other constants have other variants. A table stands between
<!-- begin NAME --> and <!-- end NAME --> in README.md or in results/README.md; a file without the
two marks of a table does not get it.
"""

import csv
import dataclasses
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import tyro
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"

COLOURS = {"paac": "C0", "a3c": "C1", "async_q": "C2", "nstep_q": "C3", "sarsa": "C4"}
COLOURS |= {"ppo_batch": "C5", "apex": "black"}
ATARI = "{}NoFrameskip-v4".format
TASKS = "benchmarks.tasks:{}".format
SMALL = ["CartPole-v1", TASKS("CartPole0.01-v1"), TASKS("CartPole100-v1"), "Acrobot-v1"]
SMALL += [TASKS("CatchCells-v0"), TASKS("Corridor-v0"), "FrozenLake-v1", "CliffWalking-v1"]
BOX = ["Pendulum-v1"]
SMALL += [TASKS("Memory-v0"), *BOX]
MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Swimmer-v5", "Reacher-v5", "Ant-v5"]
# Clemente et al. 2017, Table 1, arch_nips: the best of three actors after 115 million steps.
PAAC = {"Amidar": 701.8, "BeamRider": 4062.0, "Boxing": 99.6, "Breakout": 470.1}
PAAC |= {"Centipede": 5747.3, "MsPacman": 2194.7, "NameThisGame": 9743.7}
PAAC |= {"Qbert": 16561.7, "Seaquest": 1754.0, "SpaceInvaders": 1077.3, "UpNDown": 88105.3}
# benchmark.md of rl-baselines3-zoo: A2C, one run; games 10 million steps, MuJoCo (v3) one million.
A2C = {"BeamRider": 2890, "Breakout": 280, "Qbert": 3882, "Seaquest": 1721}
A2C |= {"SpaceInvaders": 627, "HalfCheetah": 3041, "Hopper": 733, "Swimmer": 201}
# PFRL, examples/mujoco/reproduction/ppo: mean of 20 seeds after two million steps, models v2.
PPO = {"HalfCheetah": 1986, "Hopper": 2793, "Walker2d": 2873, "Swimmer": 125}
OTHER_COLUMNS = {"env_id", "seed", "total_steps", "run_dir", "resume", "eval_episodes"}
PUBLISHED_PONG = {
    "paac": "20.6 after 115M (Clemente et al. 2017); A2C 17.3 after 10M",
    "a3c": "20.9 after 80M (PFRL, best evaluation)",
    "ppo_batch": "20.7 after 10M (Schulman et al. 2017)",
    "apex": "20.9 after 5,700M (Horgan et al. 2018)",
}


@dataclasses.dataclass
class Args:
    add: Path | None = None
    """run directory of a finished run, to append to runs.csv"""
    variant: str = ""
    """a word for the constants of that run, where they are not those of the tables"""
    note: str = ""
    """a few words that a reader of that run needs"""


def file_name(env_id: str) -> str:
    return re.sub(r"[^\w-]", "-", env_id.rpartition(":")[2])


def title(env_id: str) -> str:
    return re.sub(r"(NoFrameskip)?-v\d+$", "", env_id.rpartition(":")[2])


def find(runs: list[dict], trainer: str, env_id: str) -> list[dict]:
    """The runs of a task that its table and picture show: of --preset short, or no variant."""
    prefix = f"curves/{trainer}_{file_name(env_id)}_"
    short = [run for run in runs if run["curve"] == f"{prefix}short_{run['seed']}.csv"]
    return short or [run for run in runs if run["curve"] == f"{prefix}{run['seed']}.csv"]


# ------------------------------------------------------------------------------------- adding a run


def add(folder: Path, variant: str, note: str) -> dict[str, str]:
    """Write the curve of a run directory; returns its line of runs.csv."""
    args = json.loads((folder / "args.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    score, trainer = summary.get("eval") or {}, summary["script"]
    env_id, seed, constants = args["env_id"], args["seed"], changed_flags(trainer, args)
    name = "_".join(filter(None, [trainer, file_name(env_id), variant, str(seed)]))
    path = RESULTS / "curves" / f"{name}.csv"
    if path.exists():
        sys.exit(f"{path} exists: give this run another --variant")
    command = f"python {trainer}.py --env-id {env_id} --total-steps {args['total_steps']}"
    head = [f"# command: {command} --seed {seed} {constants}", "step,seconds,episodic_return,SPS"]
    rows = [f"{s:.0f},{t:.1f},{r:.3f},{speed:.0f}" for s, t, r, speed in read_events(folder)]
    path.write_text("\n".join([*head, *rows, ""]))
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    line = {
        "trainer": trainer,
        "env_id": env_id,
        "seed": seed,
        "constants": constants,
        "steps": summary["steps"],
        "hours": f"{summary['wall_seconds'] / 3600:.4f}",
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor[1] if processor else "",
        "score": round(score["mean"], 3) if score else "",
        "std": round(score["std"], 2) if score else "",
        "episodes": score.get("episodes", ""),
        "curve": f"curves/{name}.csv",
        "note": note,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }
    return {key: str(value) for key, value in line.items()}


def changed_flags(trainer: str, args: dict) -> str:
    """The flags whose values are neither the trainer's nor its preset's, as they would be typed."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(trainer)
    defaults = dataclasses.asdict(module.Args()) | module.PRESETS[args["preset"]]
    defaults = json.loads(json.dumps(defaults))  # lists for tuples, as in args.json
    flags = []
    for key in sorted(args.keys() & defaults.keys() - OTHER_COLUMNS):
        value = args[key]
        if value != defaults[key]:
            words = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
            flags.append(f"--{'no-' if value is False else ''}{key.replace('_', '-')}")
            flags += [shlex.quote(str(word)) for word in words]
    return " ".join(flags)


def read_events(folder: Path, points: int = 500) -> np.ndarray:
    """(n, 4): step, seconds, return, steps/s of at most `points` points, means of neighbours.

    Points lie some seconds apart; a gap of a minute is a pause of a resumed run and does not count.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    speeds, seconds, total, last = {}, {}, 0.0, math.inf
    for event in events.Scalars("charts/SPS"):
        gap = event.wall_time - last
        total += gap if 0 < gap < 60 else 0.0
        speeds[event.step], seconds[event.step], last = event.value, total, event.wall_time
    returns = [e for e in events.Scalars("charts/episodic_return") if e.step in seconds]
    table = np.array([(e.step, seconds[e.step], e.value, speeds[e.step]) for e in returns])
    pieces = np.array_split(table, min(points, len(table)))
    return np.array([(*piece[-1, :2], *piece[:, 2:].mean(0)) for piece in pieces])


# ------------------------------------------------------------------------------------------- tables


def number(x: str | float) -> str:
    x = float(x)
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 1 or not x else f"{x:.2f}"


def millions(steps: str) -> str:
    return f"{int(steps) / 1e6:.2g}"


def each(runs: list[dict], key: str, form=str) -> str:
    """What the runs have in a column, seed by seed, or once where all have the same."""
    cells = [form(run[key]) if run[key] else "" for run in runs]
    return cells[0] if len(set(cells)) == 1 else ", ".join(cells)


def scores_of(runs: list[dict]) -> list[float]:
    return [float(run["score"]) for run in runs if run["score"]]


def spread(runs: list[dict]) -> str:
    """The mean over seeds, the lowest and the highest; for one seed ± is over its episodes."""
    scores = scores_of(runs)
    if len(scores) > 1:
        low, mean, high = map(number, (min(scores), np.mean(scores), max(scores)))
        return mean if low == high else f"{mean} ({low} to {high})"
    return f"{number(scores[0])} ± {number(runs[0]['std'])}" if scores else ""


def markdown(*rows: list[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def pong_table(runs: list[dict]) -> str:
    rows = [["trainer", "score", "million steps", "hours", "cores", "published"]]
    for trainer in COLOURS:
        pong = find(runs, trainer, ATARI("Pong"))
        cells = [f"`{trainer}.py`", each(pong, "score", number), each(pong, "steps", millions)]
        cells += [each(pong, "hours", number), each(pong, "cores")]
        rows.append([*cells, PUBLISHED_PONG.get(trainer, "")])
    return markdown(*rows)


def atari_table(runs: list[dict]) -> str:
    rows = [["`paac.py`", "score", "hours", "paper, 115M steps", "A2C, 10M steps"]]
    for game, published in PAAC.items():
        one = find(runs, "paac", ATARI(game))
        peer = number(A2C[game]) if game in A2C else ""
        rows.append([game, spread(one), each(one, "hours", number), number(published), peer])
    return markdown(*rows)


def task_table(runs: list[dict], env_ids: list[str], **published: dict[str, float]) -> list:
    """Trainers down, tasks across, and published scores below them."""
    env_ids = [e for e in env_ids if any(find(runs, trainer, e) for trainer in COLOURS)]
    rows = [["", *map(title, env_ids)]]
    for trainer in COLOURS:
        cells = [spread(find(runs, trainer, env_id)) for env_id in env_ids]
        rows += [[f"`{trainer}.py`", *cells]] if any(cells) else []
    for who, scores in published.items():
        cells = [number(scores[e]) if e in scores else "" for e in map(title, env_ids)]
        rows.append([f"published, {who}", *cells])
    return rows


# ----------------------------------------------------------------------------------------- pictures


def read_curve(run: dict) -> dict[str, np.ndarray]:
    """Million steps and hours, and returns as means over a twentieth of the curve, (n,) each."""
    lines = (RESULTS / run["curve"]).read_text().splitlines()
    rows = [line.split(",") for line in lines if not line.startswith("#")]
    steps, seconds, returns, _ = np.array(rows[1:], dtype=float).T
    n = max(1, len(steps) // 20)
    means = np.convolve(returns, np.full(n, 1 / n), "valid")
    steps, hours = steps[n - 1 :] / 1e6, seconds[n - 1 :] / 3600
    return {"million steps": steps, "hours": hours, "return": means}


def picture(runs: list[dict], name: str, panels: list[tuple[str, str, list[str]]], columns: int):
    """Small multiples: the mean over seeds and the range of three seeds or more, each of fewer.

    A panel is an environment, what is on its x-axis, and the trainers that it shows.
    """
    n_rows = -(-len(panels) // columns)
    size = (11, 1.2 + 2.4 * n_rows) if columns > 2 else (11, 4)
    figure, axes = plt.subplots(n_rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, (env_id, x, trainers) in zip(axes.flat, panels, strict=False):
        for trainer in trainers:
            style = {"color": COLOURS[trainer], "linewidth": 1.2}
            curves = [read_curve(run) for run in find(runs, trainer, env_id)]
            if len(curves) < 3:
                for curve in curves:
                    axis.plot(curve[x], curve["return"], **style)
            else:
                start, end = max(c[x][0] for c in curves), min(c[x][-1] for c in curves)
                grid = np.linspace(start, end, 400)
                returns = np.stack([np.interp(grid, c[x], c["return"]) for c in curves])
                axis.plot(grid, returns.mean(0), **style)
                axis.fill_between(grid, returns.min(0), returns.max(0), alpha=0.15, **style)
        axis.set(title=title(env_id), xlabel=x)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.supylabel("return of training episodes", fontsize="medium")
    if len(panels[0][2]) > 1:
        lines = [plt.Line2D([], [], color=COLOURS[trainer]) for trainer in panels[0][2]]
        figure.legend(lines, panels[0][2], loc="outside right center")
    figure.savefig(RESULTS / f"{name}.png", dpi=100)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    with open(RESULTS / "runs.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    if args.add:
        runs.append(dict.fromkeys(runs[0], "") | add(args.add, args.variant, args.note))
        with open(RESULTS / "runs.csv", "a", newline="") as file:
            csv.DictWriter(file, list(runs[0]), lineterminator="\n").writerow(runs[-1])
        return

    tables = {"pong": pong_table(runs), "atari": atari_table(runs)}
    small = task_table(runs, SMALL)
    tables["small"] = markdown(*zip(*small, strict=True))  # tasks down, trainers across
    tables["mujoco"] = markdown(*task_table(runs, MUJOCO, PPO=PPO, A2C=A2C))
    for path in (ROOT / "README.md", RESULTS / "README.md"):
        text = path.read_text()
        for name, table in tables.items():
            between = f"(<!-- begin {name} -->\n).*(<!-- end {name} -->)"
            text = re.sub(between, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        path.write_text(text)

    def panels(env_ids: list[str], trainers: list[str]) -> list[tuple[str, str, list[str]]]:
        return [(env_id, "million steps", trainers) for env_id in env_ids]

    every = list(COLOURS)
    picture(runs, "pong", [(ATARI("Pong"), x, every) for x in ("million steps", "hours")], 2)
    picture(runs, "atari", panels([ATARI(game) for game in PAAC], ["paac"]), 4)
    picture(runs, "small", panels(SMALL, every), 5)
    picture(runs, "mujoco", panels(MUJOCO, ["paac", "a3c", "ppo_batch"]), 3)


if __name__ == "__main__":
    main()
