"""apex.py from its command line, and what its learner and its actors say to each other (common/actors.py)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import apex
import common.actors
import common.crew
import common.evaluation
import common.replay
import common.run
from common.actors import Actors, Fields, Link
from common.flags import check_env
from common.processes import WorkerError
from tests import helpers
from tests.helpers import check_files, checkpoint, same, squares, stop_after, summary, wait_for, watch_bfloat16
from tests.paac_envs import Bandit

pytestmark = pytest.mark.usefixtures("own_folder_and_handlers")
ENV = "tests.paac_envs:{}-v0"
SEVEN = ["--env-id", ENV.format("Faulty"), "--env-kwargs", '{"fault": "none", "after": 1}']  # 7 steps an episode
TINY = ["--capacity", "2000", "--learning-starts", "200", "--batch-size", "16", "--chunk-size", "10"]
TINY += ["--replay-ratio", "1", "--target-interval", "10", "--eval-episodes", "0"]
ONE = [*TINY, "--n-actors", "1", "--envs-per-actor", "2"]
TWO = [*TINY, "--n-actors", "2", "--envs-per-actor", "2"]

run = functools.partial(helpers.run, apex)


class Painted(Bandit):
    """A bandit that can be drawn: every picture has another colour."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode, self.drawn, self.steps = render_mode, 0, 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, *_ = super().step(action)
        self.steps += 1
        return obs, reward, self.steps % 5 == 0, False, {}

    def render(self) -> np.ndarray:
        self.drawn += 1
        return np.full((30, 40, 3), 20 * self.drawn, np.uint8)


class Fragile(Bandit):
    """Raises once: at step 30 of the environment whose reset has the seed `only`."""

    def __init__(self, only: int, render_mode: str | None = None) -> None:
        super().__init__()
        self.only, self.seed, self.steps = only, None, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        if self.steps == 30 and self.seed == self.only:
            raise ZeroDivisionError("the door is stuck")
        return super().step(action)


for env in (Painted, Fragile):
    gym.register(f"{env.__name__}-v0", f"{__name__}:{env.__name__}")


@contextlib.contextmanager
def time_limit(seconds: int = 100) -> Iterator[None]:
    """A run that never ends fails, and the actors end with it."""
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"it takes more than {seconds} seconds"))
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture(autouse=True)
def _ends_in_time_and_evaluates_without_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(common.evaluation, "n_cores", lambda: 0)
    with time_limit():
        yield


class Here:
    """A stand-in for an actor's process and for the learner's end of its pipe: a thread that lives only while the
    learner looks for its next message, so that a run is the same each time. Starting a process takes seconds.
    """

    MESSAGES = 3  # that the learner finds when it looks

    exitcode = -9

    def __init__(self, target: Callable, arguments: tuple) -> None:
        self.messages, self.answers, self.left = deque(), deque(), 0
        self.actor, self.learner = threading.Semaphore(0), threading.Semaphore(0)  # whose turn it is
        self.killed = self.ended = False
        end = SimpleNamespace(send=self._send, recv=self._recv, poll=lambda: bool(self.answers), close=self.close)
        self.thread = threading.Thread(target=self._live, args=(target, (*arguments, end)), daemon=True)
        self.thread.start()

    def _live(self, target: Callable, arguments: tuple) -> None:
        self.actor.acquire()
        if not self.killed:
            target(*arguments)
        self.ended = True
        self.learner.release()

    def _hand_over(self) -> None:
        self.learner.release()
        self.actor.acquire()
        if self.killed:
            raise BrokenPipeError

    def _send(self, message: Any) -> None:
        if self.killed:
            raise BrokenPipeError
        self.messages.append(message)
        self._hand_over()

    def _recv(self) -> Any:
        while not self.answers:
            self._hand_over()
        return self.answers.popleft()

    def poll(self) -> bool:
        self.left -= 1
        if self.left < 0:
            return False
        if not self.messages and not self.ended:
            self.actor.release()
            self.learner.acquire()
        return bool(self.messages) or self.ended

    def recv(self) -> Any:
        if not self.messages:
            raise EOFError
        return self.messages.popleft()

    def send(self, answer: Any) -> None:
        self.answers.append(answer)

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            self.actor.release()
            self.thread.join()

    def join(self, timeout: float | None = None) -> None:
        pass

    close = join


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every actor becomes a `Here`."""

    def start(target: Callable, arguments: tuple, name: str) -> tuple[Here, Here]:
        return (stand_in := Here(target, arguments)), stand_in

    def wait(stand_ins: list[Here], timeout: float) -> list[Here]:
        for stand_in in stand_ins:
            stand_in.left = Here.MESSAGES
        return list(stand_ins)

    monkeypatch.setattr(common.crew, "start_worker", start)
    monkeypatch.setattr(common.crew, "enter_worker", lambda: None)
    monkeypatch.setattr(common.actors, "wait", wait)


class Watch:
    """What a run's learner does, in its order: `log` has a row for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple] = []
        receive, add, update = Actors.receive, apex.Replay.add, apex.update

        def watched_receive(actors: Actors, run: common.run.Run, timeout: float) -> Iterator:
            self.log.append(("receive", timeout))
            return receive(actors, run, timeout)

        def watched_add(replay: apex.Replay, stream: int, chunk: dict) -> int:
            frames, n_added = chunk["frames"].copy(), add(replay, stream, chunk)
            self.replay = replay
            self.log.append(("add", stream, n_added, frames))
            return n_added

        def watched_update(model: Any, target_model: Any, optimizer: Any, batch: apex.Batch, *rest: Any) -> tuple:
            self.optimizer = optimizer
            self.log.append(("update", batch))
            return update(model, target_model, optimizer, batch, *rest)

        monkeypatch.setattr(Actors, "receive", watched_receive)
        monkeypatch.setattr(apex.Replay, "add", watched_add)
        monkeypatch.setattr(apex, "update", watched_update)

    def of(self, kind: str) -> list[tuple]:
        return [row for row in self.log if row[0] == kind]

    def added_before_learning(self) -> int:
        first = next(i for i, row in enumerate(self.log) if row[0] == "update")
        return sum(row[2] for row in self.log[:first] if row[0] == "add")


@pytest.fixture
def refused(refused: Callable[..., str]) -> Callable[..., str]:
    """Run with flags that must be refused: status 2, nothing started or written. Returns the one line of stderr."""
    return functools.partial(refused, apex)


def parse(*flags: Any) -> apex.Args:
    """The arguments that these flags mean; makes the run directory."""
    return apex.parse([str(flag) for flag in flags])[0]


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each tag in TensorBoard."""
    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


# ---------------------------------------------------------------------------------------------- run directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 2,000 steps by two actors in processes of their own; not to be changed."""
    run_dir = tmp_path_factory.mktemp("apex") / "r"
    flags = [*SEVEN, *TWO, "--total-steps", "2000", "--seed", "9", "--eval-episodes", "3", "--replay-ratio", "2"]
    with pytest.MonkeyPatch.context() as patch, time_limit():
        patch.setattr(common.evaluation, "n_cores", lambda: 0)
        assert run(*flags, "--learning-rate", "1e-3", "--run-dir", run_dir) == 0
    return run_dir


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be resumed or evaluated."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_run_directory_and_summary(finished: Path) -> None:
    check_files(finished)
    args = json.loads((finished / "args.json").read_text())
    expected = {"seed": 9, "total_steps": 2000, "preset": "vector", "arch": "mlp", "n_actors": 2, "gamma": 0.99}
    expected |= {"learning_rate": 1e-3, "capacity": 2000, "replay_ratio": 2.0, "run_dir": str(finished)}
    assert args | expected | {"resume": None} == args

    result = summary(finished)
    types = {"script": str, "env_id": str, "seed": int, "steps": int, "episodes": int, "wall_seconds": float}
    types |= {"steps_per_second": float, "return_last_100": float, "status": str, "eval": dict}
    assert {key: type(value) for key, value in result.items()} == types
    expected = {"script": "apex", "env_id": ENV.format("Faulty"), "seed": 9, "status": "completed"}
    assert result | expected == result
    most = 2 * 2 * 2 * 4 * 10  # that one look at the actors may bring: 8 messages of 10 transitions from each
    assert 2000 <= result["steps"] < 2000 + most
    assert result["steps"] / 7 - 4 < result["episodes"] < (result["steps"] + most) / 7  # some steps are still to come
    assert 0 < result["return_last_100"] < 7 and result["steps_per_second"] > 0 and result["wall_seconds"] > 0
    types = {"episodes": int, "mean": float, "std": float, "min": float, "max": float}
    assert {key: type(value) for key, value in result["eval"].items()} == types
    assert result["eval"]["episodes"] == 3
    assert 0 <= result["eval"]["min"] <= result["eval"]["mean"] <= result["eval"]["max"] <= 7

    state = checkpoint(finished)
    assert state["script"] == "apex" and state["step"] == result["steps"]
    assert state["episodes"] == result["episodes"] and len(state["returns"]) == 100
    assert "replay" not in state and not same(state["model"], state["target_model"])
    assert state["model"].keys() == state["target_model"].keys()


def test_what_tensorboard_has(finished: Path) -> None:
    points, state = scalars(finished), checkpoint(finished)
    tags = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "return_last_100", "SPS", "updates")}
    tags |= {f"charts/{name}" for name in ("replay_ratio", "replay_size")}
    tags |= {f"losses/{name}" for name in ("td_loss", "grad_norm", "q_values")}
    assert points.keys() == tags | {"eval/return_mean"}
    assert {value for _, value in points["charts/episodic_length"]} == {7}
    assert all(0 <= value <= 7 for _, value in points["charts/episodic_return"] + points["charts/return_last_100"])
    updates = [value for _, value in points["charts/updates"]]
    assert updates == sorted(set(updates)) and 0.7 * state["updates"] < updates[-1] <= state["updates"]
    assert all(value > 0 for _, value in points["charts/SPS"])
    assert all(200 <= value <= 2000 * 1.04 for _, value in points["charts/replay_size"])
    for tag in ("losses/td_loss", "losses/grad_norm"):
        assert all(0 <= value < math.inf for _, value in points[tag])
    for (step, ratio), n in zip(points["charts/replay_ratio"], updates, strict=True):
        assert 0 < ratio <= 2 and n * 16 / (step - 200) <= ratio * 1.001  # it began to count a little after 200
    assert points["eval/return_mean"] == [(state["step"], pytest.approx(summary(finished)["eval"]["mean"]))]


def test_default_run_directory(here: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SEVEN, *ONE, "--total-steps", "300", "--seed", "4") == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("tests.paac_envs-Faulty-v0__apex__4__")
    assert (summary(run_dir)["status"], summary(run_dir)["eval"]) == ("completed", None)
    lines = capfd.readouterr().out.splitlines()
    assert "2,000 transitions" in lines[0] and lines[1] == f"run directory: runs/{run_dir.name}"


def test_returns_are_raw_scores(here: None, tmp_path: Path) -> None:
    """Learning from clipped or scaled rewards changes nothing in what is reported."""
    kwargs = '{"fault": "huge reward", "after": 1}'  # 1e35 a step, 7 steps an episode
    flags = ["--env-id", ENV.format("Faulty"), "--env-kwargs", kwargs, *ONE, "--total-steps", "400"]
    assert run(*flags, "--clip-rewards", "--eval-episodes", "2", "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["return_last_100"] == pytest.approx(7e35)
    assert summary(tmp_path / "r")["eval"]["mean"] == pytest.approx(7e35)
    flags = ["--env-id", ENV.format("Steady"), "--env-kwargs", '{"max_episode_steps": 3}', *ONE, "--total-steps", "300"]
    assert run(*flags, "--reward-scale", "0.1", "--run-dir", "s") == 0
    assert summary(tmp_path / "s")["return_last_100"] == 3


@pytest.mark.parametrize(
    ("observations", "flags", "threads"),
    [("Echo", [], 1), ("PixelCue", [], 3), ("PixelCue", ["--learner-threads", "4"], 4)],
)
def test_threads_of_the_learner(
    observations: str, flags: list[str], threads: int, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for a small network, else one for each core that no actor has, or as many as the flag says."""
    monkeypatch.setattr(apex, "n_cores", lambda: 4)
    torch.set_num_threads(2)
    flags = ["--env-id", ENV.format(observations), *ONE, "--total-steps", "20", "--envs-per-actor", "1", *flags]
    assert run(*flags, "--run-dir", "r") == 0
    assert torch.get_num_threads() == threads


# ---------------------------------------------------------------------------------------------------- presets


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says how many bytes are free, besides what actors and updates need."""
    monkeypatch.setattr(common.replay, "ACTOR_MEMORY", 0)
    monkeypatch.setattr(common.replay, "BATCH_COPIES", 0)
    return lambda n: monkeypatch.setattr(common.replay, "free_memory", lambda device: n)


PAPER = {"n_step": 3, "gamma": 0.99, "epsilon": 0.4, "epsilon_alpha": 7, "priority_alpha": 0.6, "priority_beta": 0.4}
PAPER |= {"batch_size": 512, "target_interval": 2500, "learning_rate": 6.25e-5, "rms_decay": 0.95, "rms_eps": 1.5e-7}
PAPER |= {"max_grad_norm": 40, "chunk_size": 50, "fetch_interval": 100, "learning_starts": 50_000}
PAPER |= {"capacity": 2_000_000, "trim_interval": 100, "clip_rewards": True, "replay_ratio": None}
VECTOR = {"learning_starts": 1_000, "batch_size": 128, "replay_ratio": 8.0, "capacity": 100_000, "reward_scale": 0.1}
VECTOR |= {"clip_rewards": False, "n_step": 3, "gamma": 0.99, "eval_epsilon": 0.0, "envs_per_actor": 8}


@pytest.mark.parametrize(
    ("flags", "preset", "constants"),
    [
        ([], "atari", {**PAPER, "env_id": "PongNoFrameskip-v4", "eval_epsilon": 0.001, "arch": "nature"}),
        (["--env-id", "ALE/Breakout-v5"], "atari", PAPER),
        (["--env-id", ENV.format("PixelCue")], "atari", {**PAPER, "arch": "nature"}),
        (["--env-id", "CartPole-v1"], "vector", {**VECTOR, "arch": "mlp"}),
        (["--env-id", "CartPole-v1", "--preset", "atari"], "atari", {**PAPER, "arch": "mlp"}),
        (["--env-id", ENV.format("PixelCue"), "--preset", "vector"], "vector", {**VECTOR, "arch": "nature"}),
        (["--batch-size", "64", "--capacity", "70000"], "atari", PAPER | {"batch_size": 64, "capacity": 70_000}),
        (
            ["--env-id", "CartPole-v1", "--replay-ratio", "None", "--clip-rewards", "--learning-rate", "0.5"],
            "vector",
            VECTOR | {"replay_ratio": None, "clip_rewards": True, "learning_rate": 0.5},
        ),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_presets(flags: list[str], preset: str, constants: dict, memory: Callable[[float], None]) -> None:
    """Those of the kind of task, the paper's for pictures, and flags override them."""
    memory(1e12)
    args = vars(parse(*flags, "--run-dir", "r"))
    assert args["preset"] == preset
    assert args | constants == args


@pytest.mark.parametrize(
    ("device", "cores", "n_actors"), [("cpu", 8, 4), ("cpu", 1, 1), ("cuda", 8, 7), ("cuda", 1, 1)]
)
def test_default_number_of_actors(
    device: str, cores: int, n_actors: int, memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(1e12)
    monkeypatch.setattr(apex, "n_cores", lambda: cores)
    monkeypatch.setattr(apex, "pick_device", torch.device)
    assert parse("--device", device, "--run-dir", "r").n_actors == n_actors
    assert parse("--device", device, "--n-actors", "3", "--run-dir", "s").n_actors == 3


# --------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize(
    ("flags", "free", "low", "high"),
    [
        ([], 1e12, 2_000_000, 2_000_000),
        ([], 1e9, 100_000, 120_000),  # 0.8 GB of 1.04 · 7,056 bytes and a little more
        ([], 4e9, 400_000, 480_000),
        (["--n-actors", "10", "--envs-per-actor", "100"], 4e9, 400_000, 480_000),
        (["--env-id", "CartPole-v1"], 1e12, 100_000, 100_000),
        (["--env-id", "CartPole-v1", "--capacity", "None"], 1e12, 2_000_000, 2_000_000),
        (["--env-id", "CartPole-v1", "--capacity", "None"], 1.9e6, 20_000, 40_000),
    ],
)
def test_default_capacity(flags: list[str], free: float, low: int, high: int, memory: Callable[[float], None]) -> None:
    """Two million, or what fits into four fifths of the free memory."""
    memory(free)
    args = parse(*flags, "--run-dir", "r")
    assert low <= args.capacity <= high
    env = check_env(args)
    assert apex.replay_bytes(env.observation_space, args) <= free


@pytest.mark.parametrize("flags", [["--env-id", "CartPole-v1"], ["--env-id", ENV.format("PixelCue")]])
def test_memory_that_a_replay_memory_needs(flags: list[str]) -> None:
    args = parse(*flags, *ONE, "--capacity", "333", "--run-dir", "r")
    space = check_env(args).observation_space
    replay = apex.Replay(space, args, torch.device("cpu"))
    arrays = [replay.frames.numpy(), replay.tree.nodes, *replay.columns.values()]
    assert sum(array.nbytes for array in arrays) == apex.replay_bytes(space, args)


def test_capacity_that_does_not_fit(
    refused: Callable[..., str], memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names one that does, and nothing is allocated before."""
    memory(1e9)
    monkeypatch.setattr(apex, "Replay", None)
    line = refused("--capacity", "2000000", "--n-actors", "4")
    assert "--capacity 2000000" in line and "14.7 GB" in line and "1.0 GB are free for it" in line
    fits = int(re.search(r"--capacity (\d+) fits", line)[1])
    assert 120_000 < fits < 1e9 / 7056
    assert parse("--capacity", fits, "--n-actors", "4", "--run-dir", "r").capacity == fits
    assert "--capacity" in refused("--capacity", fits + 64, "--n-actors", "4")


@pytest.mark.parametrize("free", [0, 3e8])
def test_no_capacity_is_named_that_is_too_small(
    free: float, refused: Callable[..., str], memory: Callable[[float], None]
) -> None:
    memory(free)
    line = refused("--capacity", "60000", "--n-actors", "4")
    assert re.search(r"0\.4 GB of memory, 0\.[03] GB are free for it; \d+ would fit, at least 50000 are needed", line)


def test_actors_need_memory_too(monkeypatch: pytest.MonkeyPatch, memory: Callable[[float], None]) -> None:
    memory(4e9)
    alone = parse("--n-actors", "4", "--run-dir", "r").capacity
    monkeypatch.setattr(common.replay, "ACTOR_MEMORY", 5e8)
    assert parse("--n-actors", "4", "--run-dir", "s").capacity == pytest.approx(alone / 2, rel=0.05)


def test_updates_need_memory_too(monkeypatch: pytest.MonkeyPatch, memory: Callable[[float], None]) -> None:
    memory(6e9)
    monkeypatch.setattr(common.replay, "BATCH_COPIES", 100)  # of 1,000 stacks of 28,224 bytes
    few = parse("--batch-size", "1", "--run-dir", "r").capacity
    many = parse("--batch-size", "1000", "--run-dir", "s").capacity
    assert (few - many) * 7056 * 1.04 == pytest.approx(0.8 * 999 * 28_224 * 100, rel=0.02)


def test_capacity_that_fits_in_vectors(refused: Callable[..., str], memory: Callable[[float], None]) -> None:
    """The tree of priorities doubles here and there, and counts for as much as such short frames."""
    flags = ["--env-id", "CartPole-v1", "--n-actors", "1", "--learning-starts", "100"]
    for free in (3e6, 5e6, 2e7, 4e7):
        memory(free)
        fits = int(re.search(r"--capacity (\d+) fits", refused(*flags, "--capacity", "2000000"))[1])
        assert parse(*flags, "--capacity", fits, "--run-dir", str(free)).capacity == fits
        shutil.rmtree(str(free))
        assert "--capacity" in refused(*flags, "--capacity", fits + 8)


def test_too_little_memory_for_any_default(refused: Callable[..., str], memory: Callable[[float], None]) -> None:
    memory(1e7)
    assert re.search(
        r"--capacity: 0.0 GB are free for it, enough for 10\d\d transitions; at least 50000 are needed", refused()
    )


@pytest.mark.parametrize("flags", [[], ["--env-id", "CartPole-v1"], ["--env-id", "CartPole-v1", "--capacity", "5000"]])
def test_free_memory_that_nothing_tells(flags: list[str], memory: Callable[[float], None]) -> None:
    """As common.flags.free_memory has it where there is no /proc/meminfo: macOS, for one."""
    memory(math.inf)
    assert parse(*flags, "--run-dir", "r").capacity >= 5000


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--env-id", "Pogn-v4"], ["--env-id Pogn-v4", "Pong"]),
        (["--env-id", "no.such.module:Thing-v0"], ["--env-id", "no.such.module"]),
        (["--env-id", ENV.format("TwoKeys")], ["--env-id", "Dict"]),
        (["--env-id", ENV.format("VectorCue")], [f"--env-id {ENV.format('VectorCue')}", "Discrete", "Box(-2.0, 2.0"]),
        (["--env-id", "Pendulum-v1"], ["--env-id Pendulum-v1", "Discrete", "Box(-2.0, 2.0"]),
        (["--env-kwargs", "{size: 3}"], ["--env-kwargs"]),
        (["--n-actors", "0"], ["--n-actors 0"]),
        (["--n-actors", "1025"], ["--n-actors 1025"]),
        (["--n-actors", "-1"], ["--n-actors -1"]),
        (["--envs-per-actor", "0"], ["--envs-per-actor 0"]),
        (["--learner-threads", "0"], ["--learner-threads 0"]),
        (["--learner-threads", "1025"], ["--learner-threads 1025"]),
        (["--capacity", "0"], ["--capacity 0"]),
        (["--capacity", str(2**63)], [f"--capacity {2**63}", str(2**62)]),
        (["--capacity", "-5"], ["--capacity -5"]),
        (["--capacity", "60", "--learning-starts", "20"], ["--capacity 60", "136"]),  # 4 · 2 · (10 + 3 + 4)
        (["--capacity", "199"], ["--learning-starts 200", "--capacity 199"]),
        (["--capacity", "300", "--batch-size", "301"], ["--batch-size 301", "300"]),
        (["--learning-starts", "2001"], ["--learning-starts 2001", "2000"]),
        (["--learning-starts", "0"], ["--learning-starts 0"]),
        (["--replay-ratio", "0"], ["--replay-ratio 0"]),
        (["--replay-ratio", "-1"], ["--replay-ratio -1"]),
        (["--replay-ratio", "nan"], ["--replay-ratio nan"]),
        (["--epsilon", "2"], ["--epsilon 2"]),
        (["--epsilon", "-0.1"], ["--epsilon -0.1"]),
        (["--epsilon", "nan"], ["--epsilon nan"]),
        (["--epsilon-alpha", "nan"], ["--epsilon-alpha nan"]),
        (["--epsilon-alpha", "-1"], ["--epsilon-alpha -1"]),
        (["--eval-epsilon", "1.5"], ["--eval-epsilon 1.5"]),
        (["--batch-size", "0"], ["--batch-size 0"]),
        (["--batch-size", "many"], ["--batch-size"]),
        (["--n-step", "0"], ["--n-step 0"]),
        (["--chunk-size", "6"], ["--chunk-size 6", "7"]),
        (["--n-step", "7"], ["--chunk-size 10", "11"]),
        (["--fetch-interval", "0"], ["--fetch-interval 0"]),
        (["--target-interval", "0"], ["--target-interval 0"]),
        (["--trim-interval", "0"], ["--trim-interval 0"]),
        (["--total-steps", "0"], ["--total-steps 0"]),
        (["--checkpoint-interval", "0"], ["--checkpoint-interval 0"]),
        (["--eval-episodes", "-1"], ["--eval-episodes -1"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--gamma", "1.1"], ["--gamma 1.1"]),
        (["--gamma", "nan"], ["--gamma nan"]),
        (["--learning-rate", "nan"], ["--learning-rate nan"]),
        (["--learning-rate", "-1"], ["--learning-rate -1"]),
        (["--max-grad-norm", "nan"], ["--max-grad-norm nan"]),
        (["--reward-scale", "inf"], ["--reward-scale inf"]),
        (["--rms-decay", "2"], ["--rms-decay 2"]),
        (["--rms-eps", "0"], ["--rms-eps 0"]),
        (["--priority-alpha", "1.5"], ["--priority-alpha 1.5"]),
        (["--priority-beta", "nan"], ["--priority-beta nan"]),
        (["--priority-eps", "0"], ["--priority-eps 0"]),
        (["--priority-eps", "nan"], ["--priority-eps nan"]),
        (["--preset", "paper"], ["--preset", "atari", "vector"]),
        (["--arch", "nature"], ["--arch nature", ENV.format("Faulty")]),
        (["--env-id", "PongNoFrameskip-v4", "--arch", "mlp"], ["--arch mlp", "PongNoFrameskip-v4"]),
        (["--replay-device", "tpu"], ["--replay-device"]),
        (["--n-envs", "4"], ["--n-envs"]),
        (["--record"], ["--record"]),
        (["--resume", "nothing"], ["--resume nothing"]),
        (["--evaluate", "nothing"], ["--evaluate nothing"]),
        (["--resume", "a", "--evaluate", "b"], ["--resume", "--evaluate"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_refused(refused: Callable[..., str], flags: list[str], named: list[str]) -> None:
    line = refused(*([] if "--env-id" in flags else SEVEN), *TWO, *flags)
    assert all(text in line for text in named), line


def test_refused_offsets_that_do_not_fit_into_a_byte(refused: Callable[..., str]) -> None:
    """A chunk has them as uint8; from 256 on they would be taken modulo 256."""
    assert "--n-step 256" in refused(*SEVEN, *ONE, "--n-step", "256", "--chunk-size", "300", "--capacity", "20000")


@pytest.mark.parametrize("flag", ["--device", "--replay-device"])
def test_refused_without_cuda(flag: str, refused: Callable[..., str]) -> None:
    assert f"{flag} cuda" in refused(*SEVEN, *ONE, flag, "cuda")


def test_refused_run_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "checkpoint.pt").write_bytes(b"precious")
    assert "--run-dir taken" in refused(*SEVEN, *ONE, "--run-dir", "taken")


def test_refused_resume(copied: Path, refused: Callable[..., str]) -> None:
    for flags in ([], ["--total-steps", "1000"]):  # it is complete
        line = refused("--resume", "copy", *flags)
        assert "--resume copy" in line and f"{checkpoint(copied)['step']:,}" in line and "--total-steps" in line
    others = [("--env-id", "CartPole-v1"), ("--preset", "atari"), ("--arch", "nature"), ("--run-dir", "q")]
    others += [("--replay-ratio", "0"), ("--capacity", "100")]
    for other in others:
        assert " ".join(other) in refused("--resume", "copy", "--total-steps", "9000", *other)
    line = refused("--resume", "copy", "--total-steps", "9000", "--save-replay")
    assert "--save-replay" in line and "copy" in line and "replay memory" in line


def test_resume_of_a_run_that_is_bigger_than_the_memory(
    copied: Path, refused: Callable[..., str], memory: Callable[[float], None]
) -> None:
    memory(5e4)
    assert "--capacity 2000" in refused("--resume", "copy", "--total-steps", "9000")


@pytest.mark.parametrize("what", ["without target_model", "with another network"])
def test_resume_of_what_does_not_fit(
    what: str, copied: Path, here: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and nothing is overwritten."""
    if what == "without target_model":
        state = checkpoint(copied)
        del state["target_model"]
        torch.save(state, copied / "checkpoint.pt")
    else:  # the same environment with other actions
        monkeypatch.setattr("tests.paac_envs.Faulty.action_space", gym.spaces.Discrete(5))
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    capfd.readouterr()
    assert run("--resume", "copy", "--total-steps", "9000") == 2
    stderr = capfd.readouterr().err
    what = "holds no target_model" if what.startswith("without") else "holds another model:"
    assert len(stderr.splitlines()) == 1 and stderr.startswith(f"apex.py: --resume copy: the checkpoint {what}")
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


# ----------------------------------------------------------------------------------------------------- resume


def stopped_run(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *flags: Any) -> dict[str, Any]:
    """A run that SIGINT stops after 12 updates, two after θ⁻ ← θ; its checkpoint."""
    with monkeypatch.context() as patch:
        stop_after(patch, updates=12)
        assert run(*flags, "--total-steps", "100000", "--run-dir", run_dir) == 130
    return checkpoint(run_dir)


@pytest.fixture
def stopped(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The checkpoint of the run in `r`."""
    state = stopped_run(monkeypatch, tmp_path / "r", *SEVEN, *ONE)
    assert state["updates"] == 12 and summary(tmp_path / "r")["status"] == "interrupted"
    assert summary(tmp_path / "r")["steps"] == state["step"] >= 200 + 12 * 16
    assert not same(state["model"], state["target_model"])
    return state


def test_parameters_and_statistics_go_on(stopped: dict[str, Any], tmp_path: Path) -> None:
    """With gradients clipped to nothing θ and θ⁻ stay as they were, g and m decay from what they were."""
    total = stopped["step"] + 400
    flags = ["--total-steps", total, "--max-grad-norm", "0", "--target-interval", "100000"]
    assert run("--resume", "r", *flags) == 0
    after = checkpoint(tmp_path / "r")
    assert after["step"] >= total and after["updates"] > 12
    assert after["episodes"] > stopped["episodes"] and after["wall_seconds"] > stopped["wall_seconds"]
    assert summary(tmp_path / "r")["status"] == "completed" and summary(tmp_path / "r")["steps"] == after["step"]
    assert same(after["model"], stopped["model"]) and same(after["target_model"], stopped["target_model"])
    old, new = squares(stopped, "optimizer"), squares(after, "optimizer")
    ratio = (new[old.abs() > 1e-12] / old[old.abs() > 1e-12]).double()
    assert len(ratio) > 100
    expected = torch.tensor(0.95).double() ** (after["updates"] - 12)
    torch.testing.assert_close(ratio, expected.expand_as(ratio), rtol=1e-3, atol=0)


def test_updates_are_counted_on(stopped: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ⁻ ← θ comes at update 20, the eighth after the interruption."""
    for updates, equal in ((19, False), (20, True)):
        with monkeypatch.context() as patch:
            stop_after(patch, updates=updates)
            assert run("--resume", "r", "--learning-rate", "0") == 130
        after = checkpoint(tmp_path / "r")
        assert after["updates"] == updates and same(after["model"], stopped["model"])
        assert not torch.equal(squares(after, "optimizer"), squares(stopped, "optimizer"))
        assert same(after["target_model"], stopped["model" if equal else "target_model"])


def test_flags_override_those_of_the_resumed_run(
    stopped: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, total = Watch(monkeypatch), stopped["step"] + 400
    flags = ["--learning-rate", "0.01", "--rms-decay", "0.5", "--rms-eps", "0.2", "--batch-size", "8"]
    assert run("--resume", "r", *flags, "--total-steps", total, "--n-actors", "2") == 0
    args = json.loads((tmp_path / "r" / "args.json").read_text())
    expected = {"learning_rate": 0.01, "batch_size": 8, "n_actors": 2, "seed": 1, "capacity": 2000, "chunk_size": 10}
    assert args | expected | {"total_steps": total, "preset": "vector"} == args
    group = checkpoint(tmp_path / "r")["optimizer"]["param_groups"][0]
    assert (group["lr"], group["decay"], group["eps"]) == (0.01, 0.5, 0.2)
    assert {len(batch.obs) for _, batch in watch.of("update")} == {8}
    assert {row[1] for row in watch.of("add")} == {0, 1, 2, 3}


def test_a_resumed_run_meets_new_episodes(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    flags = ["--env-id", "CartPole-v1", *ONE, "--n-actors", "2"]
    assert run(*flags, "--total-steps", "300", "--run-dir", "r") == 0
    n = len(watch.log)
    assert run("--resume", "r", "--total-steps", "600") == 0
    starts = [
        next(row[3][0] for row in log if row[:2] == ("add", stream))
        for log in (watch.log[:n], watch.log[n:])
        for stream in range(4)
    ]
    assert len({start.tobytes() for start in starts}) == 8


@pytest.mark.usefixtures("here")
def test_actors_explore_with_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seed, the step at the start and the index: after a resume too."""
    seeds, manual_seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual_seed(seed))
    flags = ["--env-id", "CartPole-v1", *ONE, "--n-actors", "2"]
    assert run(*flags, "--total-steps", "300", "--run-dir", "r", "--seed", "7") == 0
    start = checkpoint(Path("r"))["step"]
    assert run("--resume", "r", "--total-steps", "600") == 0
    assert seeds[0] == seeds[3] == 7
    own = [apex.env_seed(7, step, index) for step in (0, start) for index in (0, 1)]
    assert sorted(seeds[1:3]) == sorted(own[:2]) and sorted(seeds[4:]) == sorted(own[2:]) and len(set(own)) == 4


def test_bfloat16_reaches_the_networks(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_bfloat16(apex, "QNetwork", monkeypatch)
    flags = ["--env-id", ENV.format("PixelCue"), *ONE, "--learning-starts", "60", "--total-steps", "100"]
    assert run(*flags, "--bfloat16", "--run-dir", "r") == 0
    assert made == [True, True]  # the learner's and its actor's


def test_seeds(here: None, tmp_path: Path) -> None:
    """With stand-ins for the actors a seed determines everything."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = ["--env-id", "CartPole-v1", *TWO, "--seed", seed, "--run-dir", name]
        assert run(*flags, "--total-steps", "600") == 0
    a, b, c = (checkpoint(tmp_path / name) for name in "abc")
    for key in ("model", "optimizer", "returns", "step", "updates"):
        assert same(a[key], b[key]), key
    assert not same(a["model"], c["model"]) and a["returns"] != c["returns"]


REPLAYS = {
    # 200 transitions of 7 steps an episode and more, in rings of 156: the oldest have gone
    "vector": [*SEVEN, *ONE, "--capacity", "300"],
    "image": ["--env-id", ENV.format("PixelCue"), *ONE, "--capacity", "600", "--learning-starts", "60"],
}


@pytest.mark.parametrize("kind", REPLAYS)
def test_saved_replay_memory(kind: str, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has it all and learns from it at once."""
    state = stopped_run(monkeypatch, tmp_path / "r", *REPLAYS[kind], "--save-replay")
    saved = state["replay"]
    assert saved["size"] == (saved["priorities"] > 0).sum() >= 60
    assert (saved["oldest"].min() > 0) == (kind == "vector")  # whether it has come full circle

    restored, load = {}, apex.Replay.load_state_dict

    def watched(replay: apex.Replay, state: dict) -> None:
        load(replay, state)
        assert replay.size == state["size"]
        restored.update({key: value.clone() for key, value in replay.state_dict().items() if torch.is_tensor(value)})
        restored["arrivals"] = list(replay.arrivals)

    monkeypatch.setattr(apex.Replay, "load_state_dict", watched)
    watch = Watch(monkeypatch)
    stop_after(monkeypatch, updates=14)
    assert run("--resume", "r") == 130

    frames, same_frames = saved["frames"], restored["frames"]
    length = math.ceil(1.04 * state["args"]["capacity"] / 2)
    for stream, written in enumerate(saved["written"].tolist()):
        assert torch.equal(frames[stream, : min(written, length)], same_frames[stream, : min(written, length)])
        assert frames[stream, : min(written, length)].float().std() > 0
    for key in saved.keys() - {"frames", "size"}:
        assert same(saved[key], restored[key]), key
    assert watch.added_before_learning() <= 40 < 60
    first = watch.of("update")[0][1]
    streams = first.indices // length
    old = first.positions < saved["written"].numpy()[streams]
    assert old.sum() > 4
    newest = first.obs[:, -1] if kind == "image" else first.obs
    assert torch.equal(newest[old], frames[streams[old], first.positions[old] % length])
    assert (checkpoint(tmp_path / "r")["replay"]["written"] > saved["written"]).all()


def test_replay_memory_that_is_not_saved(
    stopped: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning waits for --learning-starts transitions again."""
    assert "replay" not in stopped
    watch = Watch(monkeypatch)
    assert run("--resume", "r", "--total-steps", stopped["step"] + 190) == 0
    assert not watch.of("update") and checkpoint(tmp_path / "r")["updates"] == 12
    assert same(checkpoint(tmp_path / "r")["model"], stopped["model"])
    watch.log.clear()
    assert run("--resume", "r", "--total-steps", stopped["step"] + 600) == 0
    assert checkpoint(tmp_path / "r")["updates"] > 12
    assert watch.added_before_learning() >= 200


def test_saved_replay_memory_and_longer_returns(here: None, tmp_path: Path) -> None:
    """The first chunk of a new life covers n unfinished transitions, and now n is larger."""
    flags = [*SEVEN, *ONE, "--save-replay", "--total-steps"]
    assert run(*flags, "400", "--run-dir", "r") == 0
    assert run("--resume", "r", "--total-steps", "600", "--n-step", "5") == 0
    saved = checkpoint(tmp_path / "r")["replay"]
    assert saved["size"] == (saved["priorities"] > 0).sum()


def test_saved_replay_memory_that_would_mean_something_else(
    here: None, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Returns and priorities of one kind only in a memory; without it the flags may change."""
    stopped_run(monkeypatch, Path("r"), *SEVEN, *ONE, "--save-replay")
    for flag, value in [("gamma", "0.9"), ("reward-scale", "2.0"), ("priority-alpha", "0.5"), ("priority-eps", "0.1")]:
        line = refused("--resume", "r", f"--{flag}", value)
        assert f"--{flag} {value}" in line and "--no-save-replay" in line
    assert "--clip-rewards True" in refused("--resume", "r", "--clip-rewards")
    assert run("--resume", "r", "--gamma", "0.9", "--no-save-replay", "--total-steps", "600") == 0


def test_saved_replay_memory_of_another_shape(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More environments: refused in one line, unless the run goes on without it; shared out anew they are as many."""
    stopped_run(monkeypatch, tmp_path / "r", *SEVEN, *ONE, "--save-replay")
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    for flags in (["--n-actors", "2"], ["--capacity", "1900"]):
        capfd.readouterr()
        assert run("--resume", "r", *flags, "--total-steps", "600") == 2
        stderr = capfd.readouterr().err
        assert len(stderr.splitlines()) == 1 and "--no-save-replay" in stderr
        assert f"{' '.join(flags)}: the saved replay memory" in stderr
        assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before
    shared = ["--n-actors", "2", "--envs-per-actor", "1", "--total-steps", "600"]
    assert run("--resume", "r", *shared) == 0 and "replay" in checkpoint(tmp_path / "r")
    assert run("--resume", "r", "--n-actors", "2", "--no-save-replay", "--total-steps", "900") == 0
    assert "replay" not in checkpoint(tmp_path / "r")


# ------------------------------------------------------------------------------------------------- evaluation


def test_evaluate_adds_to_the_summary_and_touches_nothing_else(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "Replay", "Actors", "Run"):
        monkeypatch.setattr(apex, name, None)
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    assert run("--evaluate", "copy", "--eval-episodes", "5") == 0
    after = {path.name: path.read_bytes() for path in copied.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"summary.json"}
    old = json.loads(before["summary.json"])
    assert summary(copied)["eval"]["episodes"] == 5 and summary(copied) | {"eval": old["eval"]} == old
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_evaluation_needs_the_network_alone(copied: Path, refused: Callable[..., str]) -> None:
    """So the checkpoint that is kept in results/ is a quarter of a whole one."""
    state = checkpoint(copied)
    del state["target_model"]
    torch.save(state | {"optimizer": {}}, copied / "checkpoint.pt")
    assert run("--evaluate", "copy", "--eval-episodes", "2") == 0
    assert summary(copied)["eval"]["episodes"] == 2
    for steps in ("400", "9000"):  # whether it is complete or not
        assert "--resume copy: its checkpoint holds a network alone" in refused(
            "--resume", "copy", "--total-steps", steps
        )


def test_evaluation_of_a_run_without_enough_memory(copied: Path, memory: Callable[[float], None]) -> None:
    """It needs no replay memory."""
    memory(1e3)
    assert run("--evaluate", "copy", "--eval-episodes", "2") == 0
    assert summary(copied)["eval"]["episodes"] == 2


def test_evaluation_plays_epsilon_greedily_with_the_learned_network(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--env-id", ENV.format("Echo"), *ONE, "--total-steps", "300", "--run-dir", "r") == 0
    states: list[dict[str, Tensor]] = []
    make_policy = apex.make_policy

    def watched(model: apex.QNetwork, *arguments: Any) -> Any:
        states.append(model.state_dict())
        return make_policy(model, *arguments)

    monkeypatch.setattr(apex, "make_policy", watched)
    results = []
    for flags in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--eval-epsilon", "0"], []):
        flags = flags if "--eval-epsilon" in flags or not flags else [*flags, "--eval-epsilon", "1"]
        assert run("--evaluate", "r", "--eval-episodes", "40", *flags) == 0
        results.append(summary(tmp_path / "r")["eval"])
    assert all(same(dict(state), dict(checkpoint(tmp_path / "r")["model"])) for state in states) and len(states) == 5
    assert results[0] == results[1] != results[2] and results[0]["std"] > 0.1
    assert results[3] == results[4] and results[3]["std"] == 0  # greedily, as the preset has it


def test_gif(here: None, tmp_path: Path) -> None:
    """Of a run's end, and of an evaluation that plays nothing else."""
    flags = ["--env-id", f"{__name__}:Painted-v0", *ONE, "--total-steps", "50", "--run-dir", "r"]
    assert run(*flags, "--record") == 0
    gif = tmp_path / "r" / "agent.gif"
    with Image.open(gif) as image:
        assert (image.size, image.n_frames) == ((40, 30), 5)
    gif.unlink()
    check_files(tmp_path / "r")
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    assert run("--evaluate", "r", "--record", "--eval-episodes", "0") == 0
    with Image.open(gif) as image:
        assert image.n_frames == 5
    gif.unlink()
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before


# ------------------------------------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("seed", [1, 7])
def test_replacement_of_an_actor(seed: int, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same environments with the same ε, but other starts."""
    epsilons, lives, streams = {}, [], []
    epsilon_greedy, actor, add = apex.epsilon_greedy, apex.actor, apex.Replay.add

    def watched_epsilon_greedy(q_values: Tensor, epsilon: Tensor) -> Tensor:
        epsilons[threading.current_thread()] = epsilon.tolist()
        return epsilon_greedy(q_values, epsilon)

    def watched_actor(link: Link, args: apex.Args) -> None:
        lives.append((link.index, link.start, threading.current_thread()))
        actor(link, args)

    def watched_add(replay: apex.Replay, stream: int, chunk: dict) -> int:
        streams.append((len(lives), stream))
        return add(replay, stream, chunk)

    monkeypatch.setattr(apex, "epsilon_greedy", watched_epsilon_greedy)
    monkeypatch.setattr(apex, "actor", watched_actor)
    monkeypatch.setattr(apex.Replay, "add", watched_add)
    kwargs = {"only": apex.env_seed(seed, 0, 1, 1) + 1}  # the second environment of the second actor
    flags = ["--env-id", f"{__name__}:Fragile-v0", "--env-kwargs", json.dumps(kwargs), *TWO, "--seed", seed]
    assert run(*flags, "--total-steps", "1000", "--run-dir", "r") == 0
    assert [index for index, *_ in lives] == [0, 1, 1] and lives[0][1] == lives[1][1] == 0 < lives[2][1] < 200
    for index, _, thread in lives:
        assert epsilons[thread] == pytest.approx([0.4 ** (1 + 7 * i / 3) for i in (2 * index, 2 * index + 1)])
    assert {stream for life, stream in streams if life == 3} == {0, 1, 2, 3}
    accumulator = EventAccumulator(str(tmp_path / "r"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("events/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("actor 1 died and is replaced: ") and "the door is stuck" in text
    assert "environment 1 of Fragile-v0" in text


# ----------------------------------------------------------------------------------------------------- faults


def test_loss_that_is_not_finite(stopped: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The last checkpoint is of before it, with what had been learned, and from there the run can go on."""
    run_dir = tmp_path / "r"
    before = checkpoint(run_dir)
    flags = ["--resume", "r", "--checkpoint-interval", "1", "--total-steps", stopped["step"] + 500, "--env-kwargs"]
    capfd.readouterr()
    assert run(*flags, '{"fault": "huge reward", "after": 50}') == 1
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1 and "norm" in stderr and "inf" in stderr and stderr.startswith("apex.py: ")
    after = checkpoint(run_dir)  # saved while the memory filled
    assert all(same(after[part], before[part]) for part in ("model", "target_model", "optimizer", "updates"))
    assert after["step"] > before["step"] and not list(run_dir.glob("*.tmp"))
    assert run(*flags, SEVEN[3]) == 0
    assert checkpoint(run_dir)["updates"] > 12


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reward_that_is_not_finite_as_it_is_learned_from(
    stopped: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Too large for float32: the environment may give it, the actor's error is not finite."""
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    flags = ["--env-kwargs", '{"fault": "huge reward", "after": 50}', "--reward-scale", "1e10"]
    assert run("--resume", "r", *flags) == 1
    stderr = capfd.readouterr().err
    assert "finite" in stderr.splitlines()[-1] and "Traceback" not in stderr
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("ratio", ["0.1", "8", "None"])
def test_parameters_that_overflow(
    ratio: str, stopped: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A learning rate so large that nothing is finite afterwards, whether the learner or an actor sees it first."""
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    flags = ["--learning-rate", "1e38", "--replay-ratio", ratio, "--fetch-interval", "1"]
    assert run("--resume", "r", *flags) == 1
    stderr = capfd.readouterr().err
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert re.fullmatch(r"apex\.py: step \d+: .*(finite|nan|inf).*\n", stderr), stderr


# ---------------------------------------------------------------------------- what learner and actors exchange

FIELDS: Fields = {"frames": ((4, 3), np.float32), "marks": ((4,), np.uint8)}


def chunk_of(k: int) -> dict[str, np.ndarray]:
    """The k-th chunk that a test sends."""
    return {"frames": k + np.arange(12, dtype=np.float32).reshape(4, 3) / 16, "marks": np.full(4, k % 251, np.uint8)}


def check_chunk(chunk: dict[str, np.ndarray], k: int) -> None:
    assert chunk.keys() == FIELDS.keys()
    for name, array in chunk_of(k).items():
        np.testing.assert_array_equal(chunk[name], array)


class Line:
    """Actors and their links, connected by pipes within this process."""

    exitcode = -9  # of the process that there is none

    def __init__(self, n_actors: int = 1, n_slots: int = 3, n_parameters: int = 5) -> None:
        self.actors = Actors(lambda link: None, (), n_actors, FIELDS, n_slots, n_parameters)
        self.links, self.theirs, self.started = [None] * n_actors, [None] * n_actors, 0
        self.actors._start = self.start
        for index in range(n_actors):
            self.start(index)
        self.events, self.episodes = [], []
        self.run = SimpleNamespace(step=17, event=self.events.append, count_episodes=self.count_episodes)

    def start(self, index: int) -> None:
        self.links[index] = self.actors.new_member(index)
        self.actors.connections[index], self.theirs[index] = multiprocessing.Pipe()
        self.links[index].connect(self.theirs[index])
        self.actors.processes[index], self.started = self, self.started + 1

    def count_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        self.episodes += zip(returns.tolist(), lengths.tolist(), strict=True)

    def receive(self, timeout: float = 0.1) -> list[tuple[int, dict[str, np.ndarray]]]:
        """What one look brings, copied."""
        return [
            (stream, {name: array.copy() for name, array in chunk.items()})
            for stream, chunk in self.actors.receive(self.run, timeout)
        ]

    def join(self, timeout: float | None = None) -> None:
        pass

    kill = join


def in_background(function: Callable, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_chunks_arrive_whole_and_in_order() -> None:
    """Two actors, three slots each; a chunk stays as it is until the next one is asked for."""
    line, n, seen = Line(n_actors=2), 150, {0: [], 1: []}

    def send(index: int) -> None:
        for k in range(n):
            line.links[index].send(10 * index + k % 4, chunk_of(1000 * index + k))
            if k % 7 == 0:
                line.links[index].report(k, 10 * index)

    threads = [in_background(send, index) for index in range(2)]
    deadline = time.monotonic() + 30
    while len(seen[0]) + len(seen[1]) < 2 * n and time.monotonic() < deadline:
        for stream, chunk in line.actors.receive(line.run, 0.1):
            index = stream // 10
            k = len(seen[index])
            if k % 40 == 0:
                time.sleep(0.05)  # a slow learner
            assert stream == 10 * index + k % 4
            check_chunk(chunk, 1000 * index + k)
            seen[index].append(k)
    line.receive()
    for thread in threads:
        thread.join(timeout=10)
    assert seen == {0: list(range(n)), 1: list(range(n))}
    for length in (0, 10):
        assert [r for r, x in line.episodes if x == length] == list(range(0, n, 7))
    assert line.events == [] and line.started == 2


def test_an_actor_waits_while_all_slots_are_under_way() -> None:
    line, sent = Line(n_slots=3), []

    def send() -> None:
        for k in range(20):
            line.links[0].send(k, chunk_of(k))
            sent.append(k)

    thread = in_background(send)
    assert wait_for(lambda: len(sent) == 3, 10)
    time.sleep(0.2)
    assert len(sent) == 3
    receiving = line.actors.receive(line.run, 0.1)
    stream, chunk = next(receiving)
    time.sleep(0.2)
    assert (stream, len(sent)) == (0, 3)  # the first slot is still in the learner's hands
    check_chunk(chunk, 0)
    next(receiving)
    assert wait_for(lambda: len(sent) == 4, 10)
    rest = [stream for stream, _ in receiving]
    while len(rest) < 18:
        new = [stream for stream, _ in line.receive()]
        assert new
        rest += new
    thread.join(timeout=10)
    assert rest == list(range(2, 20)) and len(sent) == 20


def test_one_look_ends_though_an_actor_never_rests() -> None:
    line, stop = Line(n_actors=2, n_slots=3), threading.Event()

    def send() -> None:
        for k in range(10**6):
            line.links[0].send(0, chunk_of(k))
            line.links[0].report(1.0, 1)
            if stop.is_set():
                return

    thread = in_background(send)
    line.links[1].send(1, chunk_of(5))
    assert wait_for(line.actors.connections[0].poll, 10)
    looks = []
    for _ in range(5):
        looks.append([])
        for stream, _ in line.actors.receive(line.run, 0.1):
            looks[-1].append(stream)
            assert len(looks[-1]) <= 2 * 2 * 3
            time.sleep(0.005)  # so that there is always more to come
    assert looks[0].count(1) == 1  # the other one is not forgotten
    stop.set()
    while thread.is_alive():
        line.receive(0.01)


def test_parameters_are_published_on_request_and_fetched_once() -> None:
    line = Line(n_actors=2, n_parameters=6)
    theta = [torch.arange(4.0).reshape(2, 2), torch.tensor([7.0, -8.0])]
    theirs = [[torch.zeros(2, 2), torch.zeros(2)] for _ in range(2)]
    line.actors.publish(theta)  # the first time nobody needs to ask
    assert line.links[0].fetch(theirs[0]) and same(theirs[0], theta)
    assert not line.links[0].fetch(theirs[0])

    old, new = [p.clone() for p in theta], [p + 1 for p in theta]
    line.actors.publish(new)  # nobody has asked
    assert not line.links[0].fetch(theirs[0]) and same(theirs[0], old)
    assert line.links[1].fetch(theirs[1]) and same(theirs[1], old)

    line.links[1].request()
    assert not line.links[1].fetch(theirs[1])  # it is not there yet
    line.actors.publish(new)
    line.actors.publish([p + 100 for p in theta])  # that was for one request
    assert not line.links[0].fetch(theirs[0]) and same(theirs[0], old)  # it has not asked
    assert line.links[1].fetch(theirs[1]) and same(theirs[1], new)
    assert not line.links[1].fetch(theirs[1])

    line.links[0].request()
    assert not line.links[0].fetch(theirs[0])  # what is there is older than that
    line.links[1].request()
    new = [p + 2 for p in theta]
    line.actors.publish(new)  # one publication for two that have asked
    for index in range(2):
        assert line.links[index].fetch(theirs[index]) and same(theirs[index], new)
        assert not line.links[index].fetch(theirs[index])
    theirs[0][0] += 5
    assert not line.links[0].fetch(theirs[0]) and not torch.equal(theirs[0][0], new[0])

    line.start(0)  # a replacement has what there is, without a request
    late = [torch.zeros(2, 2), torch.zeros(2)]
    assert line.links[0].fetch(late) and same(late, new)
    for _ in range(3):
        line.links[0].request()
    line.actors.publish([p + 2 for p in theta])
    line.actors.publish([p + 3 for p in theta])
    assert line.links[0].fetch(late) and same(late, [p + 2 for p in theta])


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, [-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9]),  # a request that has not been answered yet stands
        (2, [-1, -1, -1, 2, 2, 4, 4, 6, 6, 8, 8, 10]),
        (4, [-1, -1, -1, -1, -1, 4, 4, 4, 4, 8, 8, 8]),
    ],
)
def test_an_actor_plays_with_parameters_from_after_its_request(interval: int, expected: list[int]) -> None:
    """With the actor's order of calls, a request and a fetch, the learner's answer comes a little later."""
    line, own = Line(n_parameters=1), [torch.zeros(1)]
    line.actors.publish([torch.tensor([-1.0])])
    played = []
    for t in range(12):
        if t % interval == 0:
            line.links[0].request()
        line.links[0].fetch(own)
        played.append(own[0].item())
        line.actors.publish([torch.tensor([float(t)])])  # the learner after step t
    assert played == expected


def test_a_request_is_answered_whatever_is_published_meanwhile() -> None:
    line, own = Line(n_parameters=1), [torch.zeros(1)]
    line.actors.publish([torch.ones(1)])
    assert line.links[0].fetch(own)
    flags = line.links[0].flags

    class Meanwhile:
        """The learner publishes between any two looks of the actor at the flags."""

        def __getitem__(self, index: int) -> int:
            line.actors.publish([torch.full((1,), 2.0)])
            return flags[index]

        def __setitem__(self, index: int, value: int) -> None:
            flags[index] = value
            line.actors.publish([torch.full((1,), 3.0)])

    line.links[0].flags = Meanwhile()
    line.links[0].request()
    line.links[0].flags = flags
    assert line.links[0].fetch(own) and own[0].item() == 3


def test_half_a_publication_is_not_taken() -> None:
    line = Line(n_parameters=3)
    link, own = line.links[0], [torch.zeros(3)]
    line.actors.publish([torch.ones(3)])
    line.actors.flags[0] += 1  # the learner has begun to write
    line.actors.parameters[:2] = 2.0
    assert not link.fetch(own) and own[0].tolist() == [0, 0, 0]
    line.actors.parameters[:] = 2.0
    line.actors.flags[0] += 1
    assert link.fetch(own) and own[0].tolist() == [2, 2, 2]

    class Torn:
        """Parameters that are written while they are read."""

        def clone(self) -> Tensor:
            copy = line.actors.parameters.clone()
            link.request()
            line.actors.publish([torch.full((3,), 4.0)])
            copy[0] = 4.0
            return copy

    link.request()
    line.actors.publish([torch.full((3,), 3.0)])
    whole, link.parameters = link.parameters, Torn()
    assert not link.fetch(own) and own[0].tolist() == [2, 2, 2]
    link.parameters = whole
    assert link.fetch(own) and own[0].tolist() == [4, 4, 4]


def test_death_in_the_middle_of_a_message() -> None:
    """The learner takes what came before it, does not wait for the rest, and the others are not held up."""
    line = Line(n_actors=2)
    line.links[0].send(3, chunk_of(3))
    line.links[0].slots["marks"][:] = 99  # it dies while it writes
    line.links[0].slots["marks"][2] = 3
    os.write(line.theirs[0].fileno(), struct.pack("!i", 500) + b"half of it")
    line.theirs[0].close()
    line.links[1].send(12, chunk_of(12))
    start = time.monotonic()
    received = dict(line.receive(5))
    assert time.monotonic() - start < 3
    assert received.keys() == {12} or received.keys() == {3, 12}
    check_chunk(received[12], 12)
    assert line.started == 3 and line.events == ["actor 0 died and is replaced: exit code -9"]
    assert line.links[0].start == 17 and line.links[0].index == 0
    line.links[0].send(4, chunk_of(4))
    ((stream, chunk),) = line.receive()
    assert stream == 4
    check_chunk(chunk, 4)


@pytest.mark.parametrize("dead", [False, True])
def test_the_learner_does_not_wait_for_an_actor_longer_than_it_says(dead: bool) -> None:
    line, looks = Line(n_actors=2), []
    if dead:
        line.theirs[1].close()

    def look(timeout: float) -> None:
        start = time.monotonic()
        assert line.receive(timeout) == []
        looks.append(time.monotonic() - start)

    for timeout in (4.0 if dead else 0.3, 0.0):
        in_background(look, timeout).join(timeout=5)
    assert len(looks) == 2 and line.started == 2 + dead
    assert looks[0] < 2 if dead else 0.25 < looks[0] < 3
    assert looks[1] < 1


def test_an_actor_that_dies_at_once_gets_other_seeds() -> None:
    """Nothing has been counted since it was started, and nothing may be repeated."""
    line, starts = Line(), []
    for _ in range(2):
        line.theirs[0].close()
        line.receive()
        starts.append(line.actors.new_member(0).start)
    assert 0 < starts[0] < starts[1]


def test_third_death_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same actor."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(common.crew, "time", SimpleNamespace(monotonic=lambda: clock.now))
    line = Line(n_actors=2)
    for now, index in ((0, 0), (1, 1), (30, 0), (61, 0), (91, 0), (92, 1)):
        clock.now = now
        line.theirs[index].send(("failed", f"the cause at {now}"))
        line.theirs[index].close()
        assert line.receive() == []
        assert line.events[-1] == f"actor {index} died and is replaced: the cause at {now}"
    line.theirs[0].close()
    with pytest.raises(WorkerError, match="actor 0 died three times within a minute:\nexit code -9"):
        line.receive()


def test_number_that_is_not_finite_ends_the_run_at_once() -> None:
    line = Line()
    line.theirs[0].send(("diverged", "actor 0: it is not finite"))
    with pytest.raises(FloatingPointError, match=r"^actor 0: it is not finite$"):
        line.receive()


def test_last_words_of_an_actor_that_has_sent_chunks() -> None:
    """It is dead before the learner looks: the chunks are there all the same, and so is the cause."""
    line = Line()
    for k in range(3):
        line.links[0].send(k, chunk_of(k))
    line.theirs[0].send(("failed", "the door is stuck"))
    line.theirs[0].close()
    received = line.receive() + line.receive()
    assert line.events == ["actor 0 died and is replaced: the door is stuck"]
    assert [stream for stream, _ in received] == [0, 1, 2]
    for stream, chunk in received:
        check_chunk(chunk, stream)


N_PARAMETERS = 200_000


def follower(link: Link) -> None:
    """An actor that sends the parameters that it has, as often as it can."""
    parameters = [torch.zeros(N_PARAMETERS - 1), torch.zeros(1)]
    for k in range(10**9):
        link.request()
        new = link.fetch(parameters)
        numbers = np.array([k, new, link.start])
        link.send(link.index, {"numbers": numbers, "parameters": torch.cat(parameters).numpy()})


def test_actors_in_processes_of_their_own() -> None:
    """Nothing is torn while both sides are at it all the time; a killed actor is replaced and begins anew."""
    fields = {"numbers": ((3,), np.int64), "parameters": ((N_PARAMETERS,), np.float32)}
    actors = Actors(follower, (), 1, fields, n_slots=2, n_parameters=N_PARAMETERS, start=5)
    events, processes, lives, published, deadline = [], [], [5], 0, time.monotonic() + 90
    run, seen = SimpleNamespace(step=40, event=events.append), []
    with actors:
        processes.append(actors.processes[0])
        while time.monotonic() < deadline and (len(lives) == 1 or len(set(seen)) < 20):
            published += 1
            actors.publish([torch.full((N_PARAMETERS - 1,), published), torch.full((1,), published)])
            for stream, chunk in actors.receive(run, 0.02):
                (k, new, start), values = chunk["numbers"].tolist(), chunk["parameters"]
                if start != lives[-1]:
                    lives.append(start)
                    seen.clear()
                assert (stream, k) == (0, len(seen))
                assert (values == values[0]).all() and ([0, *seen])[-1] <= values[0] <= published
                assert new == (values[0] != ([0, *seen])[-1])
                seen.append(float(values[0]))
            if len(lives) == 1 and len(seen) > 100:
                processes[0].kill()
        processes.append(actors.processes[0])
    assert lives == [5, 40] and events == ["actor 0 died and is replaced: exit code -9"]
    assert len(set(seen)) >= 20  # it has followed the learner
    assert processes[0].pid != processes[1].pid and not any(process.is_alive() for process in processes)


# ------------------------------------------------------------------------------------------------ replay ratio


@pytest.mark.parametrize("ratio", [0.3, 1.0, 6.0])
def test_replay_ratio(ratio: float, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner goes back to the actors as soon as it is less than a batch behind, and is never ahead."""
    watch = Watch(monkeypatch)
    flags = ["--env-id", "CartPole-v1", *TWO, "--batch-size", "32", "--replay-ratio", ratio, "--learning-rate", "1e-4"]
    assert run(*flags, "--total-steps", "1500", "--run-dir", "r") == 0
    size = added = learned = 0
    learning = False
    for kind, *content in watch.log:
        if kind == "receive":
            learning = size >= 200
            assert 0 <= ratio * added - learned < 32
            assert content[0] > 0  # it need not spin
        elif kind == "add":
            size, added = size + content[1], added + learning * content[1]
        else:
            learned += len(content[0].obs)
            assert learning and learned <= ratio * added + 1e-6
    assert size == checkpoint(tmp_path / "r")["step"] and learned == 32 * checkpoint(tmp_path / "r")["updates"]
    assert 1200 < added < 1400
    points = scalars(tmp_path / "r").get("charts/replay_ratio", [])
    assert all(0 < value <= ratio + 1e-6 for _, value in points) and (points or ratio < 1)


def test_what_follows_an_update(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch gets its errors as priorities; every K updates comes a removal; actors get the new parameters."""
    log, published, learner = [], set(), []
    update, set_priorities, trim = apex.update, apex.Replay.set_priorities, apex.Replay.trim
    publish = Actors.publish

    def watched_update(model: Any, target_model: Any, optimizer: Any, batch: apex.Batch, *rest: Any) -> tuple:
        result = update(model, target_model, optimizer, batch, *rest)
        log.append(("update", batch, result[0].copy()))
        learner[:] = model.parameters()
        return result

    def watched_set_priorities(replay: apex.Replay, batch: apex.Batch, errors: np.ndarray) -> None:
        log.append(("priorities", batch, errors.copy()))
        set_priorities(replay, batch, errors)

    def watched_trim(replay: apex.Replay) -> None:
        trim(replay)
        log.append(("trim", replay.size))

    def watched_publish(actors: Actors, parameters: list[torch.Tensor]) -> None:
        assert not learner or all(p is q for p, q in zip(parameters, learner, strict=True))  # θ, not θ⁻
        publish(actors, parameters)
        published.add(actors.parameters.numpy().tobytes())

    monkeypatch.setattr(apex, "update", watched_update)
    monkeypatch.setattr(apex.Replay, "set_priorities", watched_set_priorities)
    monkeypatch.setattr(apex.Replay, "trim", watched_trim)
    monkeypatch.setattr(Actors, "publish", watched_publish)
    flags = ["--env-id", "CartPole-v1", *TWO, "--capacity", "600", "--replay-ratio", "2", "--trim-interval", "7"]
    assert run(*flags, "--fetch-interval", "20", "--total-steps", "2000", "--run-dir", "r") == 0
    n_updates = checkpoint(tmp_path / "r")["updates"]
    expected = [["update", "priorities"] + ["trim"] * (k % 7 == 0) for k in range(1, n_updates + 1)]
    assert n_updates > 100 and [row[0] for row in log] == list(itertools.chain(*expected))
    for i, (kind, *content) in enumerate(log):
        if kind == "priorities":
            assert content[0] is log[i - 1][1] and (content[1] == log[i - 1][2]).all()
        elif kind == "trim":
            assert content[0] <= 600
    assert learner and len(published) > 10  # of some twenty requests of two actors each


def test_importance_weights_of_a_run(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """w = (N P)^-0.4, divided by the largest of the batch: P of what the memory holds, β the same to the end."""
    watch, update, n_updates = Watch(monkeypatch), apex.update, 0

    def checked_update(model: Any, target_model: Any, optimizer: Any, batch: apex.Batch, *rest: Any) -> tuple:
        nonlocal n_updates
        n_updates += 1
        priorities = watch.replay.tree[np.arange(watch.replay.tree.capacity)]
        weights = ((priorities > 0).sum() * priorities[batch.indices] / priorities.sum()) ** -0.4
        assert batch.weights.numpy() == pytest.approx(weights / weights.max(), rel=1e-5)
        assert batch.weights.min() < 0.99
        return update(model, target_model, optimizer, batch, *rest)

    monkeypatch.setattr(apex, "update", checked_update)
    flags = ["--env-id", "CartPole-v1", *TWO, "--replay-ratio", "2", "--capacity", "600"]
    assert run(*flags, "--total-steps", "1200", "--run-dir", "r") == 0
    assert n_updates == checkpoint(tmp_path / "r")["updates"] > 50


def test_target_parameters_begin_as_the_parameters(here: None, tmp_path: Path) -> None:
    """θ⁻ = θ before either has changed."""
    flags = ["--env-id", "CartPole-v1", *TWO, "--learning-rate", "0", "--target-interval", "100000"]
    assert run(*flags, "--total-steps", "400", "--run-dir", "r") == 0
    state = checkpoint(tmp_path / "r")
    assert state["updates"] > 0 and same(state["model"], state["target_model"])


def test_replay_ratio_at_the_end(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came last is learned from as well, or a short run falls far short of its ratio."""
    watch = Watch(monkeypatch)
    flags = ["--env-id", "CartPole-v1", *TWO, "--replay-ratio", "4", "--total-steps", "600", "--run-dir", "r"]
    assert run(*flags) == 0
    before = next(i for i, row in enumerate(watch.log) if row[0] == "update") - 1
    while watch.log[before][0] == "add":  # what one look at the actors brought, the first that counts
        before -= 1
    added = sum(row[2] for row in watch.log[before:] if row[0] == "add")
    assert 300 < added < 500
    assert 0 <= 4 * added - 16 * checkpoint(tmp_path / "r")["updates"] < 16


def test_the_last_update_is_logged(here: None, tmp_path: Path) -> None:
    """Episodes that ended since the last point would be missing otherwise, and all of them in a short run."""
    flags = ["--env-id", "CartPole-v1", *TWO, "--total-steps", "400", "--run-dir", "r"]
    assert run(*flags) == 0
    points = scalars(tmp_path / "r")
    assert (
        points["charts/episodic_return"][-1][0] == points["losses/td_loss"][-1][0] == checkpoint(tmp_path / "r")["step"]
    )


@pytest.mark.parametrize("ratio", ["4", "None"])
def test_a_run_takes_no_chunk_after_its_last_step(here: None, tmp_path: Path, ratio: str) -> None:
    """A chunk, which has 10 steps at most, may reach beyond it."""
    flags = ["--env-id", "CartPole-v1", *TWO, "--replay-ratio", ratio, "--total-steps", "601", "--run-dir", "r"]
    assert run(*flags) == 0
    assert 601 <= checkpoint(tmp_path / "r")["step"] < 611


@pytest.mark.parametrize(("total", "told"), [(150, True), (600, False)])
def test_a_run_that_can_learn_nothing_says_so(
    here: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], total: int, told: bool
) -> None:
    flags = ["--env-id", "CartPole-v1", *TWO, "--save-replay", "--run-dir", "r"]
    assert run(*flags, "--total-steps", total) == 0
    assert ("nothing is learned" in capfd.readouterr().out) == told == (checkpoint(tmp_path / "r")["updates"] == 0)
    assert run("--resume", "r", "--total-steps", total + 300) == 0  # with what it has, it can learn
    assert "nothing is learned" not in capfd.readouterr().out


def test_progress_before_learning_begins(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The memory may take minutes to fill, again after a resume; nobody should have to guess."""
    monkeypatch.setattr(common.run, "PRINT_INTERVAL", 0)
    assert run(*SEVEN, *ONE, "--total-steps", "150", "--run-dir", "r") == 0
    assert checkpoint(tmp_path / "r")["updates"] == 0
    shown = [int(step) for step in re.findall(r"^step (\d+) of 150, ", capfd.readouterr().out, re.MULTILINE)]
    assert len(shown) > 5 and shown == [step for step, _ in scalars(tmp_path / "r")["charts/SPS"]][: len(shown)]


def test_checkpoints_before_learning_begins(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory holds by then would be lost as well."""
    saved, save = [], apex.Run.save
    monkeypatch.setattr(apex.Run, "save", lambda self: (saved.append((self.step, self.updates)), save(self)))
    flags = ["--env-id", "CartPole-v1", *ONE, "--learning-starts", "1000", "--checkpoint-interval", "100"]
    assert run(*flags, "--save-replay", "--total-steps", "600", "--run-dir", "r") == 0
    steps = [step for step, updates in saved if updates == 0]
    assert len(steps) == len(saved) >= 4 and all(100 <= b - a < 200 for a, b in itertools.pairwise([0, *steps[:-1]]))


def test_no_replay_ratio(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update after each look at the actors, which never waits for them."""
    watch = Watch(monkeypatch)
    flags = ["--env-id", "CartPole-v1", *TWO, "--replay-ratio", "None", "--total-steps", "1000", "--run-dir", "r"]
    assert run(*flags) == 0
    first = next(i for i, row in enumerate(watch.log) if row[0] == "update")
    rest = [row for row in watch.log[first + 1 :] if row[0] != "add"]
    assert [row[0] for row in rest] == ["receive", "update"] * (len(rest) // 2) and len(rest) > 20
    assert {row[1] for row in rest if row[0] == "receive"} == {0.0}
    *before, last = [row[1] for row in watch.log[:first] if row[0] == "receive"]
    assert all(timeout > 0 for timeout in before) and last == 0.0  # it spins when there is something to learn
    added = sum(row[2] for row in watch.log[first - 7 :] if row[0] == "add")
    (step, ratio), *_ = scalars(tmp_path / "r")["charts/replay_ratio"][::-1]
    assert step >= 1000 and ratio == pytest.approx(16 * len(watch.of("update")) / added, rel=0.1)


def test_learning_begins_when_the_memory_can_hold_no_more(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--learning-starts may be as large as --capacity, and then a full memory must be enough."""
    watch = Watch(monkeypatch)
    flags = ["--env-id", "CartPole-v1", *ONE, "--envs-per-actor", "8", "--capacity", "400", "--learning-starts", "400"]
    assert run(*flags, "--total-steps", "2000", "--run-dir", "r") == 0
    assert watch.of("update")


# --------------------------------------------------------------------------------------------------- learning


def test_learns_the_value_of_each_action(here: None, tmp_path: Path) -> None:
    """Rewards are learned from times 0.1; an episode is one step, so that Q is the reward."""
    flags = ["--env-id", ENV.format("Bandit"), *TWO, "--total-steps", "3000", "--batch-size", "32"]
    flags += ["--learning-rate", "3e-4", "--epsilon", "1", "--epsilon-alpha", "0", "--eval-episodes", "10"]
    assert run(*flags, "--run-dir", "r", "--seed", "1") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] == 1.0  # greedily
    network = apex.QNetwork(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4), "mlp")
    network.load_state_dict(checkpoint(tmp_path / "r")["model"])
    q_values = network(torch.tensor([[1, -0.5, 0.25]]))[0]
    torch.testing.assert_close(q_values, 0.1 * torch.tensor(Bandit.REWARDS), atol=0.01, rtol=0)


def test_learns_from_pictures(here: None, tmp_path: Path) -> None:
    flags = ["--env-id", ENV.format("PixelCue"), *ONE, "--preset", "vector", "--total-steps", "500", "--seed", "1"]
    flags += ["--learning-rate", "3e-4", "--reward-scale", "1", "--eval-episodes", "20"]
    assert run(*flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > 0.8  # 1 is the most there is, chance gives 0.5


def test_learns_cartpole(tmp_path: Path) -> None:
    """By an actor in a process of its own. 500 is the most there is, chance gives 22, one action alone 9."""
    flags = ["--env-id", "CartPole-v1", "--n-actors", "1", "--total-steps", "24000", "--seed", "1"]
    assert run(*flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > 70


@pytest.mark.filterwarnings("error")
def test_an_atari_game_from_start_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word on stderr."""
    flags = ["--n-actors", "1", "--envs-per-actor", "2", "--capacity", "3000", "--learning-starts", "200"]
    flags += ["--batch-size", "16", "--eval-episodes", "0", "--device", "cpu", "--run-dir", tmp_path / "r"]
    assert run(*flags, "--total-steps", "600") == 0
    stdout, stderr = capfd.readouterr()
    assert (
        stdout.startswith("replay memory: 3,000 transitions, 22 MB when it is full; learning begins when 200 ")
        and stderr == ""
    )
    check_files(tmp_path / "r")
    result, state = summary(tmp_path / "r"), checkpoint(tmp_path / "r")
    assert (result["status"], result["steps"], result["env_id"]) == ("completed", state["step"], "PongNoFrameskip-v4")
    assert result["steps"] >= 600 and state["updates"] > 0 and state["model"]["trunk.0.weight"].shape == (32, 4, 8, 8)
    points = scalars(tmp_path / "r")
    assert all(math.isfinite(value) for tag in points for _, value in points[tag])
    assert {"losses/td_loss", "charts/replay_ratio", "charts/SPS"} <= points.keys()


def test_memory_of_the_device_counts(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 GB 30 batches of 512 x 28,224 bytes are the learner's, 0.57 GB are left; a frame has 7,056 bytes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 2 * 10**9))
    one = ["--replay-device", "cuda", "--n-actors", "1"]
    assert "14.7 GB of memory, 0.6 GB are free for it" in refused(*one, "--capacity", "2000000")
    assert 60_000 < parse(*one, "--run-dir", "r").capacity < 0.8 * 566e6 / 7056  # four fifths of what fits


# ------------------------------------------------------------------------------------------------------- CUDA


PONG = ["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"max_num_frames_per_episode": 160}']


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("replay_device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "flags",
    [SEVEN, PONG, [*PONG, "--bfloat16"]],
    ids=["vector", "image", "bfloat16"],
)
def test_training_on_cuda(
    flags: list[str], replay_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted and resumed there, with the replay memory; the checkpoint then serves on the CPU."""
    watch = Watch(monkeypatch)
    flags = [*flags, *TWO, "--device", "cuda", "--replay-device", replay_device, "--save-replay"]
    state = stopped_run(monkeypatch, tmp_path / "r", *flags)
    assert watch.replay.frames.device.type == replay_device
    assert run("--resume", "r", "--total-steps", state["step"] + 400, "--eval-episodes", "2") == 0
    batches = [batch for _, batch in watch.of("update")]
    for batch in (batches[0], batches[-1]):
        tensors = [x for x in batch if torch.is_tensor(x)]
        assert len(tensors) == 6 and all(x.is_cuda for x in tensors)
    after = checkpoint(tmp_path / "r")
    assert after["updates"] > 12 and not same(after["model"], state["model"])
    assert all(x.isfinite().all() for x in after["model"].values())
    before, written = state["replay"]["written"], after["replay"]["written"]  # one actor may have had all of the steps
    assert (written >= before).all() and (written > before).any()
    assert summary(tmp_path / "r")["eval"]["episodes"] == 2
    assert run("--evaluate", "r", "--device", "cpu", "--eval-episodes", "3") == 0
    assert summary(tmp_path / "r")["eval"]["episodes"] == 3
