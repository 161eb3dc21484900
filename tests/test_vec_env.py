"""VecEnv against Gymnasium's SyncVectorEnv; what environments get and give; how they end."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from common.processes import WorkerError, on_signals, start
from common.vec_env import VecEnv, env_spaces, make_env, make_vec_env
from tests.envs import ACTIONS, OBSERVATIONS, Simulator, Walk

ROOT = Path(__file__).resolve().parent.parent
SIMULATOR = "tests.envs:Simulator-v0"


def notes(log: Path, what: str) -> list[int]:
    """The numbers behind this word in the file that environments write."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(what + " ")]


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file that environments write; what they have started ends with the test."""
    yield tmp_path / "log"
    for pid in filter(runs, notes(tmp_path / "log", "held")):
        os.kill(pid, signal.SIGKILL)


def play(envs: VectorEnv) -> list[np.ndarray]:
    """All that comes back from two parts of 60 steps; the second goes on with the generators."""
    envs.action_space.seed(5)
    arrays = []
    for seed, options in ((3, None), (None, {"start": 17})):
        arrays.append(envs.reset(seed=seed, options=options)[0])
        for _ in range(60):
            *results, info = envs.step(envs.action_space.sample())
            ended = np.flatnonzero(info.get("_final_obs", []))
            arrays += [*results, ended, *[np.asarray(info["final_obs"][i]) for i in ended]]
    envs.close()
    return arrays


KINDS = [("matrix", "start", 3, 0), ("float64", "integers", 4, 1)]
KINDS += [("discrete", "matrix", 5, 2), ("colour", "float64", 7, 3)]


@pytest.mark.parametrize(("observations", "actions", "n_envs", "n_workers"), KINDS)
def test_sync_vector_env(observations: str, actions: str, n_envs: int, n_workers: int) -> None:
    """The same numbers, seed for seed."""
    fns = [functools.partial(Walk, observations, actions)] * n_envs
    ours, sync = VecEnv(fns, n_workers), SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    for name in ("observation_space", "single_observation_space", "single_action_space"):
        assert getattr(ours, name) == getattr(sync, name)
    assert ours.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    ours, expected = play(ours), play(sync)
    for array, expected_array in zip(ours, expected, strict=True):  # later steps changed none
        np.testing.assert_array_equal(array, expected_array, strict=True)
    flags = [array for array in expected if array.dtype == bool]
    assert np.sum(flags[::2], 0).min() > 0 and np.sum(flags[1::2], 0).min() > 0


RAW_ACTIONS = [
    ("discrete", [3, 0], [[3], [0]]),
    ("int32", [2, 1], [[2], [1]]),
    ("start", [0, 2], [[-1], [1]]),
    ("bounds", [[-1, 0], [0.5, 0.25], [3, -7]], [[-2, 5], [1, 6.25], [2, 0]]),  # 2 x, 5 + 5 x
    ("no bounds", [[7.5, -3], [-0.5, 100]], [[7.5, -3], [-0.5, 100]]),
    ("half", [[-2, 5, -0.5], [9, -9, 4]], [[0, 3, 3], [9, -9, 6]]),  # 4 + 2 x in the third
    ("matrix", [[-1, -0.5, 0, 0.5, 1, 2]], [[-3, -1.5, 0, 1.5, 3, 3]]),
    ("float64", [[0], [-1], [2]], [[0.05], [0], [0.1]]),
    ("integers", [[-1, 1], [0, 0.45], [-9, -0.5]], [[-4, 8], [2, 5], [-4, -1]]),  # 2 + 6 x
]


@pytest.mark.parametrize(("space", "raw", "expected"), RAW_ACTIONS)
def test_environments_get_actions_of_their_own_space(space: str, raw: list, expected: list) -> None:
    """The simulator refuses every other action, and observes the one that arrives."""
    n, dtype = len(raw), np.int64 if isinstance(raw[0], int) else np.float32
    envs = make_vec_env(SIMULATOR, n, 0, json.dumps({"actions": space}))
    assert envs.single_action_space == ACTIONS[space]
    envs.reset(seed=0)
    obs = envs.step(np.array(raw, dtype))[0]
    np.testing.assert_array_equal(obs, np.float32(expected), strict=True)
    envs.close()


def vector(obs: Any) -> np.ndarray:
    """An observation of Walk as trainers want it; the discrete ones begin at -2."""
    obs = obs["screen"] if isinstance(obs, dict) else obs
    return np.float32(np.arange(4) == obs + 2 if np.ndim(obs) == 0 else obs).ravel()


@pytest.mark.parametrize("observations", ["matrix", "float64", "dict", "bytes", "grid", "discrete"])
def test_observations_become_float32_vectors(observations: str) -> None:
    envs = make_vec_env("tests.envs:Walk-v0", 1, 0, json.dumps({"observations": observations}))
    env = Walk(observations)
    obs, expected = envs.reset(seed=1)[0], env.reset(seed=1)[0]
    assert envs.observation_space.contains(obs)
    for action in range(4):
        np.testing.assert_array_equal(obs, vector(expected)[None], strict=True)
        obs, expected = envs.step(np.array([action]))[0], env.step(action)[0]
    envs.close()


@pytest.mark.parametrize("observations", ["grey", "one channel", "colour"])
def test_pictures_are_grey_resized_and_stacked(observations: str) -> None:
    """Frames of 50 x 60 whose left half is 50, 100, 150 bright; the right half is red, luma 54."""
    env = make_env("tests.envs:Picture-v0", {"observations": observations})
    assert env.observation_space == Box(0, 255, (4, 84, 84), np.uint8)
    first, _, last = env.reset()[0], env.step(0), env.step(0)[0]
    for stack, left in ((first, [0, 0, 0, 50]), (last, [0, 50, 100, 150])):
        assert env.observation_space.contains(stack)
        expected = np.zeros((4, 84, 84))
        expected[..., :42] = np.reshape(left, (4, 1, 1))
        expected[..., 42:] = np.sign(expected[..., :42]) * 54
        assert np.abs(stack - expected)[..., np.r_[:41, 43:84]].max() <= 1  # not the blurred edge


@pytest.mark.parametrize("spaces", [["stack"], ["two"], ["tuple"], ["vector", "several"]])
def test_spaces_that_no_trainer_takes_are_named(spaces: list[str]) -> None:
    named = re.escape(str((OBSERVATIONS | ACTIONS)[spaces[-1]]))
    with pytest.raises(ValueError, match=f"tests.envs:Walk-v0.*{named}"):
        make_env("tests.envs:Walk-v0", dict(zip(["observations", "actions"], spaces, strict=False)))


def test_a_mistaken_id_says_what_to_write() -> None:
    mistakes = ["CartPole", "MontezumaRevengeDeterministic-v4", "Pong-v4", "tests.envs:Wlak-v0"]
    meant = ["CartPole-v1", "MontezumaRevengeNoFrameskip-v4", "PongNoFrameskip-v4", "Walk-v0"]
    for mistake, right in zip(mistakes, meant, strict=True):
        with pytest.raises(ValueError, match=f"{mistake.split(':')[-1]}.*(names:|use) {right}"):
            make_vec_env(mistake, 2, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads
@pytest.mark.parametrize(("n_workers", "slow"), [(0, 0.01), (2, 1.5)])
def test_from_make_to_close(n_workers, slow, log, monkeypatch) -> None:
    """Environments may hold processes and take time to close; one is made for the spaces, once."""
    env_kwargs = json.dumps({"log": str(log), "slow": slow})
    start("process", int).join()
    monkeypatch.setenv("WORD", str(os.getpid()))  # later than the server of processes starts
    env_spaces(SIMULATOR, env_kwargs)
    envs = make_vec_env(SIMULATOR, 3, n_workers, env_kwargs)
    envs.reset(seed=0)
    assert envs.step(np.array([0, 1, 1]))[0].tolist() == [[0], [1], [1]]
    held = notes(log, "held")
    assert sum(map(runs, held)) == 2 * 3
    envs.close()
    assert len(notes(log, "closed")) == len(set(notes(log, "drew"))) == 4
    assert not any(map(runs, held))
    assert len(set(notes(log, "stepped"))) == max(n_workers, 1)  # processes
    assert notes(log, "hears") == [os.getpid()] * 4


def simulators(log: Path, bad: int, **kwargs: Any) -> list[functools.partial]:
    """Functions that make five simulators, the bad one with these options."""
    return [functools.partial(Simulator, str(log), **kwargs if i == bad else {}) for i in range(5)]


FAILURES = [("made", 0, 1), ("stepped", 0, 5), ("closed", 0, 4), ("made", 2, 4), ("stepped", 2, 6)]


@pytest.mark.parametrize(("fail", "n_workers", "closed"), FAILURES)
def test_what_raises(fail: str, n_workers: int, closed: int, log: Path) -> None:
    """A worker is named; all environments that were made are closed, the one for spaces as well."""
    error, message = RuntimeError, f"broken when {fail}"
    if n_workers:
        error, message = WorkerError, r"worker 1 \(environments 2 to 4\).* exit code 1$"
    with pytest.raises(error, match=message):
        fns = simulators(log, 1 if n_workers == 0 else 3, fail=fail)
        with contextlib.closing(VecEnv(fns, n_workers)) as envs:
            envs.reset(seed=0)
            envs.step(np.zeros(5, int))
    assert len(notes(log, "closed")) == closed


def test_a_killed_worker_is_named(log: Path) -> None:
    """Although the child of an environment outlives it, and keeps the pipe open."""
    envs = VecEnv(simulators(log, 3, slow=1.0), 2)
    envs.reset(seed=0)
    (victim,) = [p for p in multiprocessing.active_children() if "vec-env worker 1" in p.name]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 \(environments 2 to 4\).* exit code -9$"):
        for _ in range(2):
            envs.step(np.zeros(5, int))
    assert list(map(runs, notes(log, "held"))) == [True, True]
    envs.close()
    assert len(notes(log, "closed")) == 3  # the first worker's, and the one asked for its spaces


SCRIPT = """
import functools, os, sys
from common.vec_env import VecEnv
from tests.envs import Simulator

envs = VecEnv([functools.partial(Simulator, sys.argv[1])] * 3, 2)
envs.reset(seed=0)
if sys.argv[2] == "is killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("end", "status"), [("forgets", 0), ("is killed", -9)])
def test_workers_end_with_a_script(end: str, status: int, log: Path) -> None:
    """It does not call close(). run() waits for all processes that have inherited its stdout."""
    command = [sys.executable, "-c", SCRIPT, log, end]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    script = subprocess.run(command, env=environ, timeout=120, capture_output=True)
    assert (script.returncode, len(notes(log, "closed"))) == (status, 4)
    assert b"Traceback" not in script.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_signals_call_the_handler_in_this_process_only() -> None:
    """An environment may fork a child and end it by terminate()."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    before = [signal.getsignal(number) for number in numbers]
    arrived: list[int] = []
    ours, theirs = os.pipe()
    with on_signals(arrived.append):
        for number in numbers:
            signal.raise_signal(number)
            pid = os.fork()
            if pid == 0:
                os.write(theirs, b"forked")
                time.sleep(20)
                os._exit(1)
            os.read(ours, 6)
            os.kill(pid, number)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
    assert arrived == numbers and before == [signal.getsignal(number) for number in numbers]
