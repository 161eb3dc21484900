"""Runs a suite of trainings side by side and keeps one CSV a run: the proof that the trainers learn.

    python benchmarks/learning.py small                             # into results/small, an hour on two cores
    python benchmarks/learning.py mujoco --trainers ppo_batch --seeds 1 2
    python benchmarks/plot.py results/small                         # its curves and its table

A run that has its CSV is not run again, and one that was stopped, with Ctrl-C too, goes on from its checkpoint: the
same command finishes what is left. As many runs go on at once as there are cores for: Hogwild and Ape-X take two,
the others one. The CSV starts with the command, the commit that the run was started at, the versions of packages, the
machine and the evaluation; then one line a point, of the training episodes that ended since the point before.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.curve import read_curve, write_csv
from common.processes import n_cores

ROOT = Path(__file__).resolve().parent.parent
HOGWILD = ("a3c", "async_q", "nstep_q", "sarsa")
Trainer = Literal["paac", "a3c", "async_q", "nstep_q", "sarsa", "ppo_batch", "apex"]
TRAINERS = get_args(Trainer)
PACKAGES = ("torch", "gymnasium", "ale-py", "mujoco", "numpy")


@dataclass
class Args:
    suite: tyro.conf.Positional[Literal["small", "pixels", "mujoco", "atari"]]
    """what to run"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each task"""
    trainers: tuple[Trainer, ...] = TRAINERS
    """only these"""
    env_ids: tuple[str, ...] = ()
    """only these environments; none named: all of the suite"""
    cores: int | None = None
    """how many to use; None: all"""
    out: Path | None = None
    """where the CSVs go; None: results/<suite>"""
    runs: Path = ROOT / "runs"
    """where the run directories go, in a folder of the suite's name"""
    points: int = 500
    """at most this many lines a CSV; neighbours are averaged"""


def file_name(env_id: str) -> str:
    """An id as a part of a file's name: without the module that it comes from."""
    return re.sub(r"[^\w-]", "-", env_id.rpartition(":")[2])


@dataclass(frozen=True)
class Job:
    """One run: a trainer on a task with a seed, and the cores that it takes."""

    trainer: str
    env_id: str
    total_steps: int
    seed: int
    flags: tuple[str, ...] = ()
    cores: int = 1

    @property
    def name(self) -> str:
        """Of its CSV and its run directory, without a dot, which would begin a suffix."""
        return f"{self.trainer}_{file_name(self.env_id)}_{self.seed}"

    def command(self) -> list[str]:
        """The command line of a new run, from the root of the repository, without the run directory."""
        task = ["--env-id", self.env_id, "--total-steps", str(self.total_steps), "--seed", str(self.seed)]
        return [f"{self.trainer}.py", *task, *self.flags]


CATCH = "benchmarks.catch:Catch-v0"
MUJOCO = [f"{task}-v5" for task in ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Reacher")]
GAMES = ("Amidar", "Centipede", "BeamRider", "Boxing", "Breakout", "MsPacman")  # of PAAC's Table 1
GAMES += ("NameThisGame", "Pong", "Qbert", "Seaquest", "SpaceInvaders", "UpNDown")
ATARI = [f"{game}NoFrameskip-v4" for game in GAMES]
PONG = "PongNoFrameskip-v4"
# The only constants set here. The trainers' own for Atari are for tens of millions of steps and many cores; Catch is to
# be learned in 100,000 steps, games in ten million on one core or two (ppo_batch.py's own are for that). PAAC's were
# found on Breakout and ran on eleven other games as well; its policy on Pendulum must not become certain too early.
# a3c.py's for Box actions were found on Pendulum, whose rewards are far larger than MuJoCo's.
CATCH_Q = "--learning-rate 0.005 --epsilon-steps 50_000 --target-interval 2_000"
A3C_MUJOCO = "--gamma 0.99 --learning-rate 1e-4 --rms-eps 1e-3 --reward-scale 0.1 --entropy-coef 1e-3"
PONG_HOGWILD = "--rms-eps 1e-5 --learning-rate 3e-4"
PONG_Q = f"{PONG_HOGWILD} --epsilon-finals 0.1 0.02 --epsilon-probs 0.5 0.5 --epsilon-steps 1_000_000"
PONG_Q += " --target-interval 10_000"
PONG_APEX = "--learner-threads 2 --replay-ratio 8 --batch-size 64 --learning-rate 1e-4 --rms-eps 1e-10"
PONG_APEX += " --target-interval 500 --learning-starts 20_000 --capacity 200_000"
CONSTANTS = {("paac", "Pendulum-v1"): "--entropy-coef 0.01", ("a3c", CATCH): "--learning-rate 0.005"}
CONSTANTS |= {(trainer, CATCH): CATCH_Q for trainer in ("async_q", "nstep_q", "sarsa")}
CONSTANTS |= {("a3c", env_id): A3C_MUJOCO for env_id in MUJOCO}
CONSTANTS |= {("paac", env_id): "--rms-eps 1e-10 --learning-rate 7e-4" for env_id in ATARI}
CONSTANTS |= {("a3c", PONG): f"--t-max 20 {PONG_HOGWILD}", ("nstep_q", PONG): f"--t-max 20 {PONG_Q}"}
CONSTANTS |= {(trainer, PONG): f"--update-interval 20 {PONG_Q}" for trainer in ("async_q", "sarsa")}
CONSTANTS |= {("apex", PONG): PONG_APEX}


def job(trainer: str, env_id: str, total_steps: int, seed: int, cores: int) -> Job:
    """A job with the flags that hold a trainer to its share of `cores`, and those that its task needs."""
    flags, takes = ("--n-workers", "0"), 1
    if trainer in HOGWILD:
        flags, takes = ("--n-processes", "2"), 2
    elif trainer == "apex":
        flags, takes = ("--n-actors", "1"), 2
    elif env_id in ATARI:
        flags = ("--n-workers", "1")
    flags += tuple(CONSTANTS.get((trainer, env_id), "").split())
    flags += ("--eval-episodes", "100") if env_id in MUJOCO else ()  # as PFRL's table
    return Job(trainer, env_id, total_steps, seed, flags, min(takes, cores))


def suite(name: str, seeds: Sequence[int], cores: int) -> list[Job]:
    """The jobs of a suite; seeds vary slowest, so that one of each task is done first where all take as many cores."""
    tasks: list[tuple[str, str, int]] = []
    if name == "small":
        steps = {"paac": 200_000, "ppo_batch": 200_000, "a3c": 300_000, "apex": 300_000}  # the Q-learners 400,000
        tasks += [(trainer, "CartPole-v1", steps.get(trainer, 400_000)) for trainer in TRAINERS]
        steps = {"nstep_q": 400_000, "sarsa": 400_000}  # the others 200,000
        tasks += [(trainer, "Acrobot-v1", steps.get(trainer, 200_000)) for trainer in TRAINERS]
        tasks += [(trainer, "Pendulum-v1", 1_000_000) for trainer in ("paac", "a3c", "ppo_batch")]
    elif name == "pixels":
        tasks += [(trainer, CATCH, 100_000) for trainer in (*HOGWILD, "ppo_batch")]
    elif name == "mujoco":
        tasks += [(trainer, env_id, 2_000_000) for env_id in MUJOCO for trainer in ("ppo_batch", "a3c", "paac")]
    else:  # atari; Ape-X's 720,000 take as long as the others' ten million
        tasks += [(trainer, PONG, 720_000 if trainer == "apex" else 10_000_000) for trainer in TRAINERS]
        tasks += [("paac", env_id, 10_000_000) for env_id in ATARI if env_id != PONG]
    return [job(*task, seed, cores) for seed in seeds for task in tasks]


def provenance(command: list[str]) -> dict[str, str]:
    """What a reader needs to run it again: command, commit, packages, machine."""
    git, commit = ["git", "-C", str(ROOT)], ""
    with contextlib.suppress(FileNotFoundError):  # no git
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        if commit and subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode:
            commit += " with changes"
    versions = [f"python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return {
        "command": f"python {shlex.join(command)}",
        "commit": commit or "unknown",
        "packages": ", ".join(versions),
        "machine": machine(),
    }


def machine() -> str:
    """Processor, cores that may be used, and the GPU where there is one."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {n_cores()} cores, {gpu}"


def start(a_job: Job, run_dir: Path) -> subprocess.Popen | None:
    """Start, resume or evaluate a run; what it prints goes into a file beside the run directory.

    None: another process is at it. The lock belongs to the run and all that it starts, whoever started it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(run_dir.with_suffix(".log"), "a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if status(run_dir) == "completed":  # and stopped while it was evaluated
            arguments = [f"{a_job.trainer}.py", "--evaluate", str(run_dir)]
        elif (run_dir / "checkpoint.pt").exists():
            arguments = [f"{a_job.trainer}.py", "--resume", str(run_dir)]
        else:
            if run_dir.exists():  # stopped before its first checkpoint
                shutil.rmtree(run_dir)
            run_dir.with_suffix(".json").write_text(json.dumps(provenance(a_job.command()), indent=2))
            arguments = [*a_job.command(), "--run-dir", str(run_dir)]
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if a_job.cores == 1 else {})
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
        # a session of its own: signals of the terminal are for us to pass on
        return subprocess.Popen([sys.executable, *arguments], start_new_session=True, **options)


def status(run_dir: Path) -> str:
    """What a run has come to: "evaluated", or what its summary says, or "" """
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {"status": "", "eval": None}
    return "evaluated" if summary["status"] == "completed" and summary["eval"] else summary["status"]


def write_result(a_job: Job, run_dir: Path, path: Path, points: int) -> dict:
    """The CSV of a run that is complete; returns its summary. Raises ValueError where no episode has ended."""
    summary = json.loads((run_dir / "summary.json").read_text())
    header = json.loads(run_dir.with_suffix(".json").read_text()) | {
        "task": f"{a_job.trainer} {a_job.env_id} {a_job.seed}",
        "seconds": f"{summary['wall_seconds']:.0f}",
        "evaluation": json.dumps(summary["eval"]),
    }
    rows = read_curve(run_dir, points)
    if not rows:
        raise ValueError("no episode has ended")
    beside = path.with_suffix(".part")
    write_csv(beside, [f"{key}: {value}" for key, value in header.items()], rows)
    beside.replace(path)
    return summary


def run_all(jobs: list[Job], runs: Path, out: Path, cores: int, points: int) -> int:
    """Run what is left of the jobs. Returns the number of those that failed."""
    runs, out = runs.resolve(), out.resolve()
    waiting, running, failed = [a_job for a_job in jobs if not (out / f"{a_job.name}.csv").exists()], {}, 0
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before", flush=True)
    try:
        while waiting or running:
            free = cores - sum(a_job.cores for a_job in running)
            for a_job in [a_job for a_job in waiting if a_job.cores <= free][:1]:
                waiting.remove(a_job)
                run_dir = runs / a_job.name
                if status(run_dir) == "evaluated":
                    running[a_job] = None
                elif process := start(a_job, run_dir):
                    running[a_job] = process
                else:
                    failed += 1
                    print(f"{a_job.name}: another process is at {run_dir}", flush=True)
            for a_job, process in list(running.items()):
                if process is not None and process.poll() is None:
                    continue
                del running[a_job]
                try:
                    if process is not None and process.returncode:
                        raise ValueError(f"exit status {process.returncode}")
                    summary = write_result(a_job, runs / a_job.name, out / f"{a_job.name}.csv", points)
                except (ValueError, OSError) as error:
                    failed += 1
                    print(f"{a_job.name} failed: {error}; see {(runs / a_job.name).with_suffix('.log')}", flush=True)
                    continue
                mean, seconds = summary["eval"]["mean"], summary["wall_seconds"]
                print(f"{a_job.name}: {mean:.1f} after {seconds:.0f} s; {len(waiting)} to go", flush=True)
            time.sleep(0.2)
    finally:  # Ctrl-C as well: each run saves a checkpoint
        for process in filter(None, running.values()):
            process.send_signal(signal.SIGTERM)
        for process in filter(None, running.values()):
            process.wait()
    return failed


def select(args: Args, cores: int) -> list[Job]:
    """The jobs that the flags name. Raises ValueError where there is none for an environment, or no core."""
    if cores < 1:
        raise ValueError(f"--cores {cores}: at least one is needed")
    jobs = [a_job for a_job in suite(args.suite, args.seeds, cores) if a_job.trainer in args.trainers]
    known = {a_job.env_id for a_job in jobs}
    for env_id in args.env_ids:
        if env_id not in known:
            raise ValueError(f"--env-ids {env_id}: these trainers have {', '.join(sorted(known))}")
    # a seed may have been named twice
    return [a_job for a_job in dict.fromkeys(jobs) if not args.env_ids or a_job.env_id in args.env_ids]


def stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    cores = n_cores() if args.cores is None else args.cores
    try:
        jobs = select(args, cores)
    except ValueError as error:
        print(f"learning.py: {error}", file=sys.stderr)
        return 2
    out = args.out or ROOT / "results" / args.suite
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore the first
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, stop)
    try:
        return 1 if run_all(jobs, args.runs / args.suite, out, cores, args.points) else 0
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
        return 130


if __name__ == "__main__":
    sys.exit(main())
