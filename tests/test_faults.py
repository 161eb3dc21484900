"""The faults of all seven: what becomes of every trainer's script when something fails.

The runs of a trainer here are one run, which has one fault after the other and is resumed after each, so that every
fault also shows that one can go on from what the one before it left. The script is a copy, in a folder with nothing
beside it but common/ and the environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from common.vec_env import env_seed
from tests.helpers import (
    ENDLESS,
    ROOT,
    checkpoint,
    content,
    members,
    on_linux,
    same,
    saved_step,
    script,
    summary,
    wait_for,
    workers_of,
)

pytestmark = on_linux
INTERVAL = 200  # steps between two checkpoints
PACE = 0.004  # seconds that a step of an environment takes, so that a machine with other work keeps up with it
START = 180  # seconds that a script may take to start, or to end of itself, on such a machine


class Small(NamedTuple):
    """How a trainer runs within seconds."""

    flags: list[str]
    one: list[str]  # flags that give it one process
    two: list[str]  # and two of them
    role: str  # of its processes
    n_envs: int  # with one process; actor-learners have one each
    late: int  # steps that may be under way: an update, chunks, or what others do while the parent looks elsewhere


VECTOR = ["--n-envs", "4", "--t-max", "5"]  # 20 steps an update
WORKERS = ["--n-workers", "1"], ["--n-workers", "2"]
APEX = ["--capacity", "2000", "--learning-starts", "50", "--batch-size", "16", "--chunk-size", "10"]
APEX += ["--replay-ratio", "1", "--save-replay"]
ACTORS = ["--n-actors", "1", "--envs-per-actor", "2"], ["--n-actors", "2", "--envs-per-actor", "1"]
PROCESSES = ["--n-processes", "1"], ["--n-processes", "2"]
SMALL = {
    "paac": Small(VECTOR, *WORKERS, "worker", 4, 40),
    "ppo_batch": Small([*VECTOR, "--minibatch-size", "10", "--update-epochs", "2"], *WORKERS, "worker", 4, 40),
    "apex": Small(APEX, *ACTORS, "actor", 2, 150),
    "a3c": Small([], *PROCESSES, "actor-learner", 1, 100),
    "async_q": Small([], *PROCESSES, "actor-learner", 1, 100),
    "nstep_q": Small([], *PROCESSES, "actor-learner", 1, 100),
    "sarsa": Small([], *PROCESSES, "actor-learner", 1, 100),
}

over = threading.Event()  # the tests end: nothing more is to be started


class Story:
    """The run of a trainer."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.code, self.small = name, folder, folder / "code", SMALL[name]
        self.replaces = self.small.role != "worker"  # processes that die
        shutil.copytree(ROOT / "common", self.code / "common", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / f"{name}.py", self.code)
        (self.code / "tests").mkdir()
        shutil.copy(ROOT / "tests" / "paac_envs.py", self.code / "tests")
        self.outcomes: dict[str, Future] = {}  # of the faults that it is to have, in their order
        self.n_runs = self.n_scripts = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        self.n_runs += 1
        self.run_dir = self.folder / f"run_{self.n_runs}"

    def finished_run(self) -> Path:
        """The run directory with a checkpoint in it."""
        if not (self.run_dir / "checkpoint.pt").exists():
            goes_on_to_the_end(self)
        return self.run_dir

    @property
    def step(self) -> int:
        return max(0, saved_step(self.run_dir))

    @property
    def stamp(self) -> Path:
        """A file that an environment writes when it goes wrong, one for each use."""
        return self.folder / f"stamp_{self.run_dir.name}_{self.step}"

    @property
    def taken(self) -> Path:
        """A file as large as the environments have taken steps since the script was last started."""
        return self.folder / f"taken_{self.n_scripts}"

    def has_taken(self, n_steps: int) -> bool:
        return self.taken.exists() and self.taken.stat().st_size >= n_steps

    def script(self, *flags: Any) -> contextlib.AbstractContextManager[subprocess.Popen]:
        assert not over.is_set()
        return script(self.name, *flags, folder=self.code, cwd=self.code)

    def go_on(self, *flags: Any, **env_kwargs: Any) -> contextlib.AbstractContextManager[subprocess.Popen]:
        """The script, from the last checkpoint where there is one."""
        self.n_scripts += 1
        env_kwargs = {"fault": "none", "after": 1, "pace": PACE, "count": str(self.taken)} | env_kwargs
        if (self.run_dir / "checkpoint.pt").exists():
            start = ["--resume", self.run_dir]
        else:
            start = ["--env-id", "tests.paac_envs:Faulty-v0", "--seed", "1", "--eval-episodes", "0", *self.small.flags]
            start += ["--run-dir", self.run_dir]
        start += self.small.one
        start += ["--env-kwargs", json.dumps(env_kwargs), "--total-steps", ENDLESS, "--checkpoint-interval", INTERVAL]
        return self.script(*start, *flags)

    def one_environment(self) -> dict[str, int]:
        """That the third of several workers' environments is the one to go wrong."""
        return {} if self.replaces else {"only": env_seed(1, self.step) + 2}

    def check(self, least: int, most: float = float("inf")) -> None:
        """The checkpoint is whole, sound, and of one of these steps."""
        state = checkpoint(self.run_dir)
        assert least <= state["step"] <= most and state["updates"] > 0
        assert all(tensor.isfinite().all() for tensor in state["model"].values())

    def check_loss(self, before: int, most: int) -> None:
        """Of the steps that were taken since step `before`, so many at most are not in the checkpoint."""
        assert self.taken.stat().st_size - (self.step - before) <= most + self.small.late

    def check_summary(self, status: str) -> None:
        result = summary(self.run_dir)
        assert (result["status"], result["steps"], result["eval"]) == (status, self.step, None)
        assert not list(self.run_dir.glob("*.tmp"))


def end(process: subprocess.Popen, code: int, seconds: float = START) -> tuple[str, str]:
    """Wait for the end of the script; its output. None of its processes is left."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == code, stderr
    assert wait_for(lambda: not members(process), 10)
    return stdout, stderr


# ------------------------------------------------------------------------------------------------------- faults


def help_is_shown(story: Story) -> None:
    with story.script("--help") as process:
        stdout, stderr = end(process, 0)
    assert stderr == "" and "--total-steps" in stdout


def full_disk(story: Story) -> None:
    """In the middle of a file: one that may not become larger stands for it, both are an OSError of the write."""
    before = story.step
    with story.go_on() as process:
        assert wait_for(lambda: story.step > before, START)
        size = (story.run_dir / "checkpoint.pt").stat().st_size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
        _, stderr = end(process, 1)
    assert stderr.startswith(f"{story.name}.py: {story.run_dir}: the checkpoint cannot be written: ")
    assert len(stderr.splitlines()) == 1
    story.check(before + INTERVAL)
    assert not list(story.run_dir.glob("*.tmp"))
    assert "File too large" in stderr
    story.check_loss(before, INTERVAL)


def full_disk_at_the_end(story: Story) -> None:
    """When it is to stop; the last checkpoint is still there."""
    before = story.step
    with story.go_on("--checkpoint-interval", 10**8) as process:
        assert wait_for(lambda: story.has_taken(INTERVAL), START)
        (story.run_dir / "checkpoint.pt.tmp").symlink_to("/dev/full")
        process.send_signal(signal.SIGTERM)
        _, stderr = end(process, 1, 15)
    assert stderr.startswith(f"{story.name}.py: {story.run_dir}: the checkpoint cannot be written: ")
    assert len(stderr.splitlines()) == 1 and "No space left on device" in stderr
    story.check(before, before)
    assert not list(story.run_dir.glob("*.tmp"))


def sigkill_of_the_parent(story: Story) -> None:
    """While a worker is in a step that would take long. One interval at most is lost, and one update."""
    before, n_steps = story.step, 4 * INTERVAL - 10
    fault = {"fault": "hang", "after": n_steps // max(2, story.small.n_envs) + 1, "stamp": str(story.stamp)}
    fault["pace"] = PACE * (2 if story.replaces else 1)  # two that step on their own
    summary_before = (story.run_dir / "summary.json").exists()
    with story.go_on(*story.small.two, **fault, **story.one_environment()) as process:
        assert wait_for(Path(fault["stamp"]).exists, START)
        assert wait_for(lambda: len(workers_of(process)) == 2, 10)
        process.kill()
        assert wait_for(lambda: not members(process), 10)
    story.check(before + INTERVAL, before + n_steps)
    story.check_loss(before, INTERVAL)
    assert (story.run_dir / "summary.json").exists() == summary_before


def what_was_learned_is_still_there(story: Story) -> None:
    """In the checkpoint of a run that was killed. Where it goes on with α = 0 and gradients of 0, θ stays, every
    statistic of the optimizer decays from where it was, the counts go on, and a normaliser adds to what it has seen.
    """
    folder = Path(shutil.copytree(story.finished_run(), story.folder / "still"))
    before = checkpoint(folder)
    # one process: two would race for the statistics
    flags = [*story.small.one, "--learning-rate", 0, "--max-grad-norm", 0, "--total-steps", before["step"] + INTERVAL]
    if "target_model" in before:
        flags += ["--target-interval", 10**8]
    with story.script("--resume", folder, *flags, "--env-kwargs", '{"fault": "none", "after": 1}') as process:
        _, stderr = end(process, 0)
    after = checkpoint(folder)
    assert stderr == "" and after["step"] >= before["step"] + INTERVAL
    assert after["updates"] > before["updates"] and after["episodes"] >= before["episodes"] + INTERVAL // 7 - 4
    assert after["wall_seconds"] > before["wall_seconds"] > 0
    norm = {name for name in before["model"] if name.startswith("trunk.") and name.endswith(("mean", "var", "count"))}
    assert bool(norm) == (story.name in ("paac", "ppo_batch"))
    assert all(
        torch.equal(tensor, after["model"][name]) for name, tensor in before["model"].items() if name not in norm
    )
    if norm:
        n_seen = [state["model"]["trunk.count"].item() for state in (before, after)]
        assert n_seen[1] - n_seen[0] == after["step"] - before["step"] and n_seen[0] == before["step"]
    if "target_model" in before:
        assert same(after["target_model"], before["target_model"])
    (name,) = [name for name in before if name.startswith("optimizer")]
    decay = before["args"].get("rms_decay")
    decays = {"square": decay, "mean": decay, "exp_avg": 0.9, "exp_avg_sq": 0.999}
    n_updates = set()
    for i, statistics in before[name]["state"].items():
        for key, tensor in statistics.items():
            now = after[name]["state"][i][key]
            if key == "step":
                n_updates.add(round((now - tensor).item()))
                continue
            largest = tensor.abs().argmax()
            ratio = (now.flatten()[largest] / tensor.flatten()[largest]).item()
            assert 0 < ratio < 1, (i, key, ratio)
            n_updates.add(round(math.log(ratio) / math.log(decays[key])))
            torch.testing.assert_close(now, tensor * ratio, rtol=1e-4, atol=1e-30)
    assert len(n_updates) == 1 and n_updates.pop() >= 10


def sigterm(story: Story) -> None:
    """No checkpoint was due."""
    before = story.step
    with story.go_on("--checkpoint-interval", 10**8, *story.small.two) as process:
        assert wait_for(lambda: story.has_taken(2 * INTERVAL), START)
        assert wait_for(lambda: len(workers_of(process)) == 2, 10)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = end(process, 143, 15)
    last = stdout.splitlines()[-1]
    assert stderr == "" and last.startswith("stopped by SIGTERM at step ") and f"--resume {story.run_dir}" in last
    story.check(before + INTERVAL)
    story.check_loss(before, 0)
    story.check_summary("interrupted")


def sigint(story: Story) -> None:
    """As the terminal sends it, to the whole group; no checkpoint was due, and an actor is in a long step.

    With some trainers it is SIGHUP, of a terminal that is closed.
    """
    number = signal.SIGHUP if story.name in ("ppo_batch", "nstep_q") else signal.SIGINT
    before, after = story.step, {"worker": 25, "actor": 51, "actor-learner": 101}[story.small.role]
    fault = {"fault": "hang" if story.replaces else "none", "after": after, "stamp": str(story.stamp)}
    with story.go_on("--checkpoint-interval", 10**8, **fault) as process:
        assert wait_for(Path(fault["stamp"]).exists, START)
        assert workers_of(process)
        os.killpg(process.pid, number)
        stdout, stderr = end(process, 128 + number, 20)
    last = stdout.splitlines()[-1]
    assert stderr == "" and f"stopped by {number.name} at step " in last and f"--resume {story.run_dir}" in last
    story.check(before + (50 if story.name == "apex" else 100))  # apex: 4 chunks of 10 may be on their way
    story.check_summary("interrupted")


CAUSES = {
    "nan reward": "FloatingPointError: the reward is not finite: nan",
    "nan observation": "FloatingPointError: the observation is not finite: [nan nan]",
    "raise": "ZeroDivisionError: the door is stuck",
}


def environment_raises(story: Story) -> None:
    environment_fails(story, "raise")


def nan_reward(story: Story) -> None:
    environment_fails(story, "nan reward")


def nan_observation(story: Story) -> None:
    environment_fails(story, "nan observation")


def environment_fails(story: Story, fault: str) -> None:
    """It ends the run. What was learned before is kept, although no checkpoint was due."""
    if story.replaces:  # a process has three lives: the other two faults come first, this one ends the run
        before, stamp, after = story.step, story.stamp, 150 if story.name == "apex" else 10
        others = [other for other in CAUSES if other != fault]
        faults = []
        for cause in (*others, fault):
            n_more = 0 if cause == "raise" else story.small.n_envs - 1  # those that take the same step all the same
            faults += [cause, *["none"] * n_more]
        kwargs = {"fault": faults, "after": after, "stamp": str(stamp), "pace": 0}
        with story.go_on("--checkpoint-interval", 10**8, **kwargs) as process:
            stdout, stderr = end(process, 1)
            assert time.time() - stamp.stat().st_mtime < 10
        made, closed = (Path(f"{stamp}_{what}").stat().st_size for what in ("made", "closed"))
        assert made == closed > 3 * story.small.n_envs
        assert stdout.count(f"{story.small.role} 0 died and is replaced: ") == 2
        assert [stdout.count(CAUSES[cause]) for cause in (*others, fault)] == [1, 1, 0]
        assert stderr.startswith(f"{story.name}.py: {story.small.role} 0 died three times")
        check_traceback(stderr, "environment 0 of Faulty-v0", CAUSES[fault])
        if story.name == "apex":  # 149 steps of each environment in each life, not all of them sent
            story.check(before + 3 * 260, before + 3 * 298)
        else:
            story.check(before + 27, before + 27)
        story.check_summary("interrupted")
        return
    before, stamp, n_workers = story.step, story.stamp, 2 if fault == "raise" else 0
    flags = ["--checkpoint-interval", 10**8, "--n-workers", n_workers]
    kwargs = {"fault": fault, "after": 38, "stamp": str(stamp), "pace": 0}  # in the eighth update of 20 steps
    with story.go_on(*flags, **kwargs, **story.one_environment()) as process:
        assert wait_for(lambda: len(workers_of(process)) == n_workers, START)
        _, stderr = end(process, 1)
        assert time.time() - stamp.stat().st_mtime < 10
    check_traceback(stderr, f"{'worker 1, ' if n_workers else ''}environment 2 of Faulty-v0", CAUSES[fault])
    story.check(before + 140, before + 140)
    story.check_summary("interrupted")


def check_traceback(stderr: str, where: str, cause: str) -> None:
    assert where in stderr
    assert stderr.count("Traceback") == 1 and stderr.count(cause) == 1


def sigkill_of_a_worker(story: Story) -> None:
    """It ends the run, where the others can do nothing without it."""
    before = story.step
    with story.go_on(*story.small.two, "--checkpoint-interval", 10**8) as process:
        assert wait_for(lambda: story.has_taken(2 * INTERVAL), START)
        os.kill(workers_of(process).pop(), signal.SIGKILL)
        _, stderr = end(process, 1, 10)
    assert len(stderr.splitlines()) == 1
    assert re.search(r"worker (0 \(environments 0 to 1|1 \(environments 2 to 3) of Faulty-v0\) died with .* -9", stderr)
    story.check(before + INTERVAL)
    story.check_loss(before, 0)
    story.check_summary("interrupted")


def sigkill_of_an_actor(story: Story) -> None:
    """The run goes on to its end with others in the place of one of two, and then of both at once."""
    before, total = story.step, story.step + 1200
    with story.go_on("--total-steps", total, *story.small.two) as process:
        assert wait_for(lambda: story.step > before, START)
        killed = set()
        for k in (1, 2):
            assert wait_for(lambda: len(workers_of(process)) == 2, START)
            victims = set(sorted(workers_of(process))[:k])
            killed |= victims
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda: not victims & members(process), 10)  # noqa: B023
        stdout, stderr = end(process, 0)
    events = [line for line in stdout.splitlines() if "died" in line]
    assert len(events) == len(killed) == 3 and stderr == ""
    assert all(line.endswith("died and is replaced: exit code -9") for line in events)
    assert all(line.startswith(f"{story.small.role} ") for line in events)
    story.check(total)
    story.check_summary("completed")


def goes_on_to_the_end(story: Story) -> None:
    total = story.step + 100
    with story.go_on("--total-steps", total) as process:
        _, stderr = end(process, 0)
    assert stderr == ""
    story.check(total)
    story.check_summary("completed")


# ------------------------------------------------------------------------------------------- damaged checkpoints


class Payload:
    """What an attacker pickles: loading it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path.with_name("ran"))

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


class Damage(NamedTuple):
    """What may be wrong with a run directory."""

    do: Callable[[Path, dict], Any]  # to the file checkpoint.pt, and what is in it
    named: str  # in the one line for the user
    flags: tuple[str, ...] = ()


def cut(size: float) -> Damage:
    """Only a part of the file is left."""
    return Damage(lambda path, state: os.truncate(path, int(size * path.stat().st_size)), "checkpoint.pt is damaged")


def flip(path: Path, state: dict) -> None:
    """64 bytes in the middle, where the numbers are."""
    data = bytearray(path.read_bytes())
    middle = slice(len(data) // 2, len(data) // 2 + 64)
    data[middle] = bytes(255 - byte for byte in data[middle])
    path.write_bytes(data)


def without(part: str) -> Damage:
    def do(path: Path, state: dict) -> None:
        torch.save({key: value for key, value in state.items() if not key.startswith(part)}, path)

    return Damage(do, f"it lacks {part}")


DAMAGES = {
    "empty folder": Damage(lambda path, state: path.unlink(), "it holds no checkpoint.pt"),
    "truncated": cut(0.5),
    "payload": Damage(
        lambda path, state: torch.save(state | {"returns": Payload(path)}, path), "checkpoint.pt is damaged or not"
    ),
    "another trainer": Damage(
        lambda path, state: torch.save(state | {"script": "dqn"}, path), "checkpoint.pt was written by dqn.py, not by"
    ),
    "another environment": Damage(lambda path, state: None, "--env-id CartPole-v1: ", ("--env-id", "CartPole-v1")),
    "empty": cut(0),
    "the beginning": cut(0.01),
    "all but the end": cut(0.9999),
    "pickle": Damage(
        lambda path, state: path.write_bytes(pickle.dumps(state | {"returns": Payload(path)})),
        "checkpoint.pt is damaged",
    ),
    "flipped bytes": Damage(flip, "checkpoint.pt is damaged"),
    "something else": Damage(lambda path, state: torch.save({"a": 1}, path), "checkpoint.pt is damaged or not a check"),
    "another version": Damage(
        lambda path, state: torch.save(state | {"args": state["args"] | {"from_the_future": 1}}, path),
        "it is from another version of",
    ),
    "another folder": Damage(lambda path, state: None, "--run-dir elsewhere: ", ("--run-dir", "elsewhere")),
    **{f"without {part}": without(part) for part in ("step", "updates", "episodes", "wall_seconds", "returns")},
    **{f"without {part}": without(part) for part in ("args", "model", "optimizer", "torch_rng", "cuda_rng")},
}


def checkpoint_with_a_payload(story: Story) -> None:
    """One line; no code of the file runs, and nothing is overwritten. All other damages: `test_refused`."""
    damage, folder = DAMAGES["payload"], Path(shutil.copytree(story.finished_run(), story.folder / "payload"))
    damage.do(folder / "checkpoint.pt", checkpoint(folder))
    before = content(folder)
    with story.script("--resume", folder, "--total-steps", ENDLESS) as process:
        stdout, stderr = end(process, 2)
    assert stdout == "" and len(stderr.splitlines()) == 1
    assert stderr.startswith(f"{story.name}.py: --resume {folder}: {damage.named}")
    assert content(folder) == before


def checkpoint_without_a_part(story: Story) -> None:
    """One that not every trainer has."""
    folder = Path(shutil.copytree(story.finished_run(), story.folder / "part"))
    without("target_model").do(folder / "checkpoint.pt", checkpoint(folder))
    before = content(folder)
    with story.script("--resume", folder, "--total-steps", ENDLESS) as process:
        _, stderr = end(process, 2)
    assert stderr == f"{story.name}.py: --resume {folder}: the checkpoint holds no target_model\n"
    assert content(folder) == before


# ------------------------------------------------------------------------------------------------------ the runs

FIRST = (help_is_shown, full_disk, full_disk_at_the_end, sigkill_of_the_parent, what_was_learned_is_still_there)
FIRST += (sigterm, sigint, environment_raises, nan_reward, nan_observation)


def faults_of(name: str) -> tuple[Callable[[Story], None], ...]:
    kill = sigkill_of_a_worker if SMALL[name].role == "worker" else sigkill_of_an_actor
    part = (checkpoint_without_a_part,) if name in ("async_q", "nstep_q", "sarsa", "apex") else ()
    return *FIRST, kill, checkpoint_with_a_payload, *part, goes_on_to_the_end


FAULTS = {(name, fault.__name__): fault for name in SMALL for fault in faults_of(name)}


def live(story: Story) -> None:
    """One fault after the other; after one that does not go as it should, the next has a run of its own."""
    for fault, outcome in story.outcomes.items():
        try:
            assert not over.is_set()
            outcome.set_result(FAULTS[story.name, fault](story))
        except BaseException as error:
            outcome.set_exception(error)
            story.begin_anew()


@pytest.fixture(scope="module")
def stories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """All trainers with those faults that are to be tested. Several live at the same time, for most of that time is
    spent on starting Python, once for each process.
    """
    stories = {name: Story(name, tmp_path_factory.mktemp(name)) for name in SMALL}
    for item in request.session.items:
        if getattr(item, "function", None) is test_fault:
            name, fault = item.callspec.params["name"], item.callspec.params["fault"]
            stories[name].outcomes[fault] = Future()
    with ThreadPoolExecutor(max_workers=3) as pool:
        for story in stories.values():
            pool.submit(live, story)
        yield stories
        over.set()


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_fault(name: str, fault: str, stories: dict[str, Story]) -> None:
    """How it went is told here; it happened in the trainer's own thread."""
    stories[name].outcomes[fault].result(timeout=10 * START)


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
@pytest.mark.parametrize("name", SMALL)
def test_a_seed_that_is_none(name: str, seed: str, refused: Callable[..., str]) -> None:
    assert f"--seed {seed}: " in refused(importlib.import_module(name), "--env-id", "CartPole-v1", "--seed", seed)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("name", SMALL)
def test_refused(name: str, flag: str, stories: dict[str, Story], tmp_path: Path, refused: Callable[..., str]) -> None:
    """The same and more of it, in this process, where one can see that nothing is started."""
    wait(stories[name].outcomes.values(), timeout=10 * START)
    trainer, run_dir = importlib.import_module(name), stories[name].finished_run()
    assert f"{flag} {tmp_path}/nothing: " in refused(trainer, flag, tmp_path / "nothing")
    for case, damage in DAMAGES.items():
        folder = Path(shutil.copytree(run_dir, tmp_path / case))
        damage.do(folder / "checkpoint.pt", checkpoint(folder))
        line = refused(trainer, flag, folder, "--total-steps", ENDLESS, *damage.flags)
        assert damage.named in line and f"{flag} {folder}" in line, line
        shutil.rmtree(folder)
