"""`common.vec_env` against Gymnasium's own SyncVectorEnv, and what happens when something breaks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from common import vec_env
from common.envs import find_spec, make_env
from common.processes import WorkerError, enter_worker, start_worker
from common.vec_env import VecEnv, make_vec_env
from tests import envs as test_envs
from tests.envs import CountingEnv, FailingEnv, LateEnv, LostEnv, NotFiniteEnv, RandomEnv, SlowEnv

ROOT = Path(__file__).resolve().parent.parent
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def worker_pids() -> set[int]:
    """Spawned children of this process, asked of the kernel and not of what the code under test remembers."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and "spawn_main" in command:
            pids.add(int(path.name))
    return pids


@pytest.fixture(autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    left = worker_pids()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def random_envs(n: int, *args: Any, **kwargs: Any) -> list[Callable[[], gym.Env]]:
    return [functools.partial(RandomEnv, *args, **kwargs)] * n


def compare(
    fns: list[Callable[[], gym.Env]],
    n_workers: int,
    steps: int = 300,
    copy: bool = True,
    seed: int | list[int] = 3,
    options: dict | None = None,
) -> None:
    """Step a VecEnv and a SyncVectorEnv with the same actions: every number must be the same."""
    ours, sync = VecEnv(fns, n_workers, copy), SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours.single_observation_space == sync.single_observation_space
    assert ours.observation_space == sync.observation_space
    assert ours.action_space == sync.action_space
    assert ours.num_envs == sync.num_envs
    assert ours.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    n_terminated = n_truncated = 0
    try:
        # the second reset, in the middle of episodes, goes on with the generators that the first one seeded
        for reset_seed in (seed, None):
            got, expected = ours.reset(seed=reset_seed, options=options), sync.reset(seed=reset_seed, options=options)
            np.testing.assert_array_equal(got[0], expected[0], strict=True)
            sync.action_space.seed(5)
            for _ in range(steps // 2):
                actions = sync.action_space.sample()
                obs, rewards, terminations, truncations, info = ours.step(actions)
                expected_obs, *expected_numbers, expected_info = sync.step(actions)
                np.testing.assert_array_equal(obs, expected_obs, strict=True)
                for array, expected_array in zip((rewards, terminations, truncations), expected_numbers, strict=True):
                    np.testing.assert_array_equal(array, expected_array, strict=True)
                assert ("final_obs" in info) == ("final_obs" in expected_info)
                if "final_obs" in info:
                    np.testing.assert_array_equal(info["_final_obs"], expected_info["_final_obs"], strict=True)
                    for final, expected_final in zip(info["final_obs"], expected_info["final_obs"], strict=True):
                        assert (final is None) == (expected_final is None)
                        if final is not None:
                            np.testing.assert_array_equal(final, expected_final)
                            assert ours.single_observation_space.contains(np.asarray(final)[()])
                n_terminated += int(terminations.sum())
                n_truncated += int((truncations & ~terminations).sum())
    finally:
        ours.close()
        sync.close()
    assert n_terminated > 10 and n_truncated > 10  # or the test has not seen what it is there for


@pytest.mark.parametrize("action_space", test_envs.ACTION_SPACES)
@pytest.mark.parametrize("observation_space", test_envs.OBSERVATION_SPACES)
def test_same_numbers_as_sync_vector_env_in_one_process(observation_space: str, action_space: str) -> None:
    compare(random_envs(3, observation_space, action_space), n_workers=0)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "n_envs", "n_workers"),
    [
        ("float", "discrete", 7, 3),
        ("image", "box", 5, 2),
        ("discrete", "multi_discrete", 3, 2),
        ("multi_discrete", "discrete", 2, 2),
        ("multi_binary", "box", 3, 1),
    ],
)
def test_same_numbers_as_sync_vector_env_in_workers(
    observation_space: str, action_space: str, n_envs: int, n_workers: int
) -> None:
    compare(random_envs(n_envs, observation_space, action_space), n_workers)


def test_same_numbers_with_a_list_of_seeds_options_and_shared_arrays() -> None:
    compare(random_envs(5), n_workers=2, copy=False, seed=[9, 2, 2, 70, 1], options={"past": 17})


def test_a_registered_environment_gives_the_numbers_of_sync_vector_env() -> None:
    fns = [functools.partial(gym.make, "CartPole-v1", max_episode_steps=20)] * 4
    compare(fns, n_workers=2)


def test_the_same_seed_again_gives_the_same_observations() -> None:
    envs = VecEnv(random_envs(3))
    first, _ = envs.reset(seed=4)
    envs.step(np.full(3, 2))
    again, _ = envs.reset(seed=4)
    other, _ = envs.reset(seed=5)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(first[1:], other[:-1])  # environment i has seed + i
    envs.close()


@pytest.mark.parametrize("n_workers", [0, 1])
def test_copy(n_workers: int) -> None:
    for copy in (True, False):
        envs = VecEnv([CountingEnv] * 2, n_workers, copy)
        first, _ = envs.reset()
        second, rewards, terminations, *_ = envs.step(np.zeros(2, int))
        third, *_ = envs.step(np.zeros(2, int))
        assert np.shares_memory(first, second) != copy and np.shares_memory(second, third) != copy
        np.testing.assert_array_equal(first, [[0], [0]] if copy else [[2], [2]])
        np.testing.assert_array_equal(second, [[1], [1]] if copy else [[2], [2]])
        _, rewards_at_end, terminations_at_end, _, _ = envs.step(np.zeros(2, int))
        assert not terminations.any() and terminations_at_end.all()  # these are never the shared arrays
        assert not np.shares_memory(rewards, rewards_at_end)
        envs.close()


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("copy", [True, False])
def test_final_obs_is_the_last_observation_and_stays(n_workers: int, copy: bool) -> None:
    envs = VecEnv([CountingEnv] * 2, n_workers, copy)
    envs.reset()
    finals = []
    for step in range(1, 10):
        obs, _, terminations, _, info = envs.step(np.zeros(2, int))
        assert terminations.all() == (step % 3 == 0)
        np.testing.assert_array_equal(obs, np.full((2, 1), step // 3 * 10 + step % 3))
        finals += list(info.get("final_obs", []))
    np.testing.assert_array_equal(np.ravel(finals), [3, 3, 13, 13, 23, 23])
    envs.close()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_final_info_is_that_of_sync_vector_env(n_workers: int) -> None:
    fns = random_envs(5, infos=True)
    ours, sync = VecEnv(fns, n_workers), SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    ours.reset(seed=0)
    sync.reset(seed=0)
    sync.action_space.seed(0)
    ended = 0
    for _ in range(60):
        actions = sync.action_space.sample()
        info, expected = ours.step(actions)[-1], sync.step(actions)[-1]
        assert ("final_info" in info) == ("final_info" in expected)
        if "final_info" in info:
            np.testing.assert_array_equal(info["_final_info"], expected["_final_info"])
            for key in ("length", "_length", "name", "_name"):
                np.testing.assert_array_equal(info["final_info"][key], expected["final_info"][key])
            ended += 1
    assert ended > 5
    ours.close()
    sync.close()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_episode_statistics_come_through(n_workers: int) -> None:
    envs = VecEnv([functools.partial(_with_statistics, CountingEnv)] * 3, n_workers)
    envs.reset()
    for _ in range(3):
        *_, info = envs.step(np.zeros(3, int))
    np.testing.assert_array_equal(info["final_info"]["episode"]["r"], [3, 3, 3])
    np.testing.assert_array_equal(info["final_info"]["episode"]["l"], [3, 3, 3])
    envs.close()


def _with_statistics(make: Callable[[], gym.Env]) -> gym.Env:
    return gym.wrappers.RecordEpisodeStatistics(make())


@pytest.mark.parametrize("n_workers", [0, 2])
def test_infos_that_fit_into_no_array_do_not_reach_trainers(n_workers: int) -> None:
    envs = make_vec_env("tests.envs:Simulator-v0", 4, n_workers)
    envs.reset()
    for _ in range(3):
        *_, terminated, _, info = envs.step(np.zeros(4, int))
    assert terminated.all() and set(info) == {"final_obs", "_final_obs"}
    np.testing.assert_array_equal(np.ravel(list(info["final_obs"])), [3, 3, 3, 3])
    envs.close()


# What is refused before anything starts


@pytest.mark.parametrize(("n_envs", "n_workers"), [(0, 0), (0, 1), (2, 3), (2, -1)])
def test_wrong_numbers_of_environments_and_workers(n_envs: int, n_workers: int) -> None:
    with pytest.raises(ValueError):
        VecEnv([CountingEnv] * n_envs, n_workers)


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Tuple((spaces.Discrete(2),)), spaces.Dict(a=spaces.Discrete(2))]
)
def test_an_unsupported_space_is_named_and_no_process_started(
    space: gym.Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", started.append)
    for pair in ((space, spaces.Discrete(2)), (spaces.Discrete(2), space)):
        with pytest.raises(ValueError, match=type(space).__name__):
            VecEnv([functools.partial(test_envs.SpaceEnv, *pair)] * 2, 2)
    assert not started


def test_wrong_arguments_of_reset_and_step() -> None:
    envs = VecEnv([CountingEnv] * 3)
    with pytest.raises(ValueError):
        envs.reset(seed=[1, 2])
    with pytest.raises(ValueError):
        envs.reset(options={"reset_mask": np.array([True, False, False])})
    envs.reset()
    for shape in ((2,), (4,), (3, 1), (1,), ()):
        with pytest.raises(ValueError, match="shape"):
            envs.step(np.zeros(shape, int))
    np.testing.assert_array_equal(envs.step(np.zeros(3, int))[0], np.ones((3, 1)))  # nothing has been stepped
    envs.close()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_close_twice_and_no_step_after_close(n_workers: int) -> None:
    envs = VecEnv([CountingEnv] * 2, n_workers)
    envs.reset()
    envs.close()
    envs.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        envs.step(np.zeros(2, int))
    with pytest.raises(gym.error.ClosedEnvironmentError):
        envs.reset()


@needs_proc
def test_workers_end_when_the_last_reference_goes() -> None:
    envs = VecEnv([CountingEnv] * 2, 2)
    assert len(worker_pids()) == 2
    del envs
    assert not worker_pids()


# What breaks


def one_bad(make: type[gym.Env], where: str, bad: int, n_envs: int = 5) -> list[Callable[[], gym.Env]]:
    return [functools.partial(make, where if i == bad else None) for i in range(n_envs)]


def drive(fns: list[Callable[[], gym.Env]], n_workers: int, steps: int = 4) -> None:
    envs = VecEnv(fns, n_workers)
    try:
        envs.reset(seed=0)
        for _ in range(steps):
            envs.step(np.zeros(len(fns), int))
    finally:
        envs.close()


@needs_proc
@pytest.mark.parametrize("where", ["init", "reset", "autoreset", "step"])
def test_an_environment_that_raises_in_a_worker(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        drive(one_bad(FailingEnv, where, bad=3), n_workers=2)
    assert time.monotonic() - start < 20
    assert not worker_pids()
    message = str(caught.value)
    assert "worker 1, environment 3 of Failing-v0" in message
    assert message.count("Traceback (most recent call last)") == 1
    assert message.count(f"RuntimeError: broken in {where}") == 1
    assert "_fail" in message  # where it was raised
    assert "broken in" not in capfd.readouterr().err  # the worker does not print it a second time


@needs_proc
def test_environments_that_raise_in_two_workers(capfd: pytest.CaptureFixture[str]) -> None:
    """The first is told, once; the other has nobody left to tell."""
    with pytest.raises(WorkerError, match="worker 0, environment 0 of Failing-v0"):
        drive([functools.partial(make, "step") for make in (FailingEnv, LateEnv)], n_workers=2)
    assert not worker_pids() and capfd.readouterr().err == ""


@needs_proc
def test_an_environment_whose_own_pipe_breaks_in_a_worker() -> None:
    with pytest.raises(WorkerError, match=r"environment 3 of Failing-v0[\s\S]*BrokenPipeError: broken in step"):
        drive(one_bad(LostEnv, "step", bad=3), n_workers=2)


@pytest.mark.parametrize("where", ["init", "reset", "autoreset", "step"])
def test_an_environment_that_raises_in_this_process(where: str) -> None:
    with pytest.raises(WorkerError, match=rf"environment 3 of Failing-v0[\s\S]*broken in {where}") as caught:
        drive(one_bad(FailingEnv, where, bad=3), n_workers=0)
    assert str(caught.value).count("Traceback") == 1


def test_the_first_environment_fails_before_any_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", started.append)
    with pytest.raises(RuntimeError, match="broken in init"):
        VecEnv(one_bad(FailingEnv, "init", bad=0), 2)
    assert not started


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize(
    "where",
    [
        "observation",
        "reward",
        pytest.param(
            "final observation",
        ),
    ],
)
def test_a_number_that_is_not_finite(where: str, n_workers: int) -> None:
    with pytest.raises(WorkerError, match=r"environment 3 of NotFinite-v0[\s\S]*not finite"):
        drive(one_bad(NotFiniteEnv, where, bad=3), n_workers, steps=1)


@needs_proc
def test_a_killed_worker_is_named() -> None:
    envs = VecEnv([CountingEnv] * 7, 3)
    envs.reset()
    (victim,) = [child for child in multiprocessing.active_children() if child.name == "vec-env-worker-1"]
    os.kill(victim.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 \(environments 3 to 4 of Counting-v0\).* -9"):
        for _ in range(2):
            envs.step(np.zeros(7, int))
    assert time.monotonic() - start < 5
    assert not worker_pids()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        envs.step(np.zeros(7, int))


@needs_proc
def test_a_killed_worker_is_named_while_another_is_busy() -> None:
    envs = VecEnv([functools.partial(SlowEnv, 8.0), functools.partial(SlowEnv, 8.0)], 2)
    envs.reset()
    (victim,) = [child for child in multiprocessing.active_children() if child.name == "vec-env-worker-1"]
    timer = threading.Timer(0.5, os.kill, (victim.pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1"):
        envs.step(np.zeros(2, int))
    timer.join()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("n_workers", [0, 2])
def test_environments_that_cannot_be_closed(
    n_workers: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each is told of, and the others are closed."""
    monkeypatch.setattr(test_envs.SimulatorEnv, "closed", 0)
    envs = VecEnv([test_envs.SimulatorEnv] * 4, n_workers)
    envs.reset()
    envs.step(np.zeros(4, int))
    envs.close()
    assert capfd.readouterr().err.count("BrokenPipeError: the simulator cannot be told to quit") == 4
    assert test_envs.SimulatorEnv.closed == (1 if n_workers else 5)  # one was made here for its spaces


@needs_proc
def test_close_does_not_wait_for_a_long_step() -> None:
    envs = VecEnv([SlowEnv] * 2, 2)
    envs.reset()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(2, int))
    envs.close()
    assert time.monotonic() - start < 8
    assert not worker_pids()


SCRIPT = """
import functools, multiprocessing, signal, sys
import numpy as np
from common.vec_env import VecEnv
from tests import envs

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    envs = VecEnv([functools.partial(getattr(envs, sys.argv[1]), float(sys.argv[2]))] * 3, 2)
    envs.reset()
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    for _ in range(5):
        envs.step(np.zeros(3, int))
    envs.close()
    print("stepped", flush=True)
"""


def start_script(tmp_path: Path, seconds_of_a_step: float, env: str = "SlowEnv") -> tuple[subprocess.Popen, list[int]]:
    """Run SCRIPT up to the point where it waits for a line; returns it and its workers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), env, str(seconds_of_a_step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    return process, pids


@needs_proc
@pytest.mark.parametrize(("in_a_step", "env"), [(False, "SlowEnv"), (True, "SlowEnv"), (True, "NativeEnv")])
def test_workers_die_with_a_killed_parent(in_a_step: bool, env: str, tmp_path: Path) -> None:
    if env == "NativeEnv" and sys.platform != "linux":
        pytest.skip("only on Linux is the parent's death a signal")
    process, pids = start_script(tmp_path, 60, env)
    if in_a_step:
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(0.5)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(is_alive(pid) for pid in pids):
        time.sleep(0.05)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert not left


@needs_proc
def test_interrupting_the_group_leaves_the_workers_to_the_parent(tmp_path: Path) -> None:
    process, pids = start_script(tmp_path, seconds_of_a_step=0.01)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert all(is_alive(pid) for pid in pids)
    out, err = process.communicate("go\n", timeout=30)
    assert out.strip() == "stepped" and process.returncode == 0
    assert "KeyboardInterrupt" not in err
    assert not any(is_alive(pid) for pid in pids)


# make_vec_env


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_atari_goes_to_ales_vector_environment(env_id: str) -> None:
    envs = make_vec_env(env_id, 2, 1)
    obs, _ = envs.reset(seed=0)
    assert isinstance(envs, AtariVectorEnv)
    assert obs.shape == envs.observation_space.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    assert envs.single_observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert envs.spec.id == env_id
    envs.close()


def test_atari_refuses_what_is_outside_the_protocol() -> None:
    with pytest.raises(ValueError, match="frameskipp"):
        make_vec_env("PongNoFrameskip-v4", 2, env_kwargs={"frameskipp": 4})
    with pytest.raises(ValueError, match="PongNoFrameskip-v4"):  # says what to use instead
        make_vec_env("Pong-v4", 2)


def test_an_option_that_the_environment_does_not_know() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        make_vec_env("CartPole-v1", 2, env_kwargs={"nonsense": 1})


def test_options_reach_the_environment() -> None:
    envs = make_vec_env("FrozenLake-v1", 2, env_kwargs={"map_name": "8x8"})
    assert envs.single_observation_space.shape == (64,)
    envs.close()


def test_discrete_observations_become_one_hot() -> None:
    envs = make_vec_env("FrozenLake-v1", 2, env_kwargs={"is_slippery": False})
    obs, _ = envs.reset(seed=0)
    assert envs.single_observation_space.shape == (16,)
    np.testing.assert_array_equal(obs, np.eye(16)[[0, 0]])
    right, down = 2, 1
    np.testing.assert_array_equal(envs.step(np.array([right, down]))[0], np.eye(16)[[1, 4]])
    envs.close()


def test_a_dict_of_one_box_is_that_box() -> None:
    envs = make_vec_env("tests.envs:OneBoxDict-v0", 2)
    assert envs.single_observation_space == spaces.Box(-1, 1, (4,), np.float32)
    assert envs.reset(seed=0)[0].shape == (2, 4)
    envs.close()


@pytest.mark.parametrize(("env_id", "size"), [("Matrix-v0", 6), ("Double-v0", 1), ("Memory-v0", 128)])
def test_other_arrays_become_float32_vectors(env_id: str, size: int) -> None:
    envs = make_vec_env(f"tests.envs:{env_id}", 2)
    obs, _ = envs.reset(seed=0)
    assert obs.shape == envs.observation_space.shape == (2, size)
    assert obs.dtype == envs.single_observation_space.dtype == np.float32
    assert obs.any()
    envs.close()


def count_threads(connection: Any) -> None:
    torch.set_num_threads(2)
    enter_worker()
    connection.send(torch.get_num_threads())


def test_a_worker_has_one_thread_of_torch() -> None:
    worker, connection = start_worker(count_threads, (), "counter")
    assert connection.poll(60) and connection.recv() == 1
    worker.join()


def test_a_refused_environment_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(test_envs.SpaceEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="TwoBoxDict"):
        make_env(find_spec("tests.envs:TwoBoxDict-v0"))
    assert len(closed) == 1


@pytest.mark.parametrize(
    "env_id", ["TwoBoxDict-v0", "TwoTuple-v0", "VectorTupleAction-v0", "VectorNoAction-v0", "Blackjack-v1"]
)
def test_spaces_that_no_trainer_takes_are_refused_by_name(env_id: str) -> None:
    with pytest.raises(ValueError, match=env_id):
        make_vec_env(env_id, 2, 2)


def test_pictures_are_grey_resized_and_stacked() -> None:
    envs = make_vec_env("tests.envs:Picture-v0", 2)
    assert envs.single_observation_space.shape == (4, 84, 84) and envs.single_observation_space.dtype == np.uint8
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    red, blue = 54, 18  # ITU-R BT.709 luma: 0.2126 and 0.0722 of 255
    left_red = np.zeros((84, 84))
    left_red[:, :42] = red

    def assert_close(frame: np.ndarray, expected: np.ndarray | int) -> None:
        difference = np.abs(frame.astype(int) - expected)
        difference[:, 41:43] = 0  # the edge is blurred
        assert difference.max() <= 1

    assert not obs[:, :3].any()
    assert_close(obs[0, 3], left_red)
    envs.step(np.zeros((2, 2), np.float32))
    obs, *_ = envs.step(np.zeros((2, 2), np.float32))
    assert not obs[:, 0].any()
    assert_close(obs[1, 1], left_red)
    assert_close(obs[1, 2], np.full((84, 84), blue))
    assert_close(obs[1, 3], left_red)
    envs.close()


@pytest.mark.parametrize(
    "env_id",
    [
        "GreyPicture-v0",
        pytest.param(
            "OneColourPicture-v0",
        ),
    ],
)
def test_pictures_of_one_colour(env_id: str) -> None:
    envs = make_vec_env(f"tests.envs:{env_id}", 2)
    assert envs.reset(seed=0)[0].shape == (2, 4, 84, 84)
    envs.close()


def test_actions_are_counted_from_0() -> None:
    envs = make_vec_env("tests.envs:VectorStartAt5-v0", 3)
    assert envs.single_action_space == spaces.Discrete(3)
    envs.reset(seed=0)
    rewards = envs.step(np.array([0, 1, 2]))[1]  # the reward is the action that arrived
    np.testing.assert_array_equal(rewards, [5, 6, 7])
    envs.close()


def test_an_id_with_a_module_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_new_module.py").write_text(
        "import gymnasium as gym\n"
        "from tests.envs import CountingEnv\n"
        "class NewEnv(CountingEnv):\n"
        "    def __init__(self, render_mode=None):\n"
        "        super().__init__()\n"
        "gym.register('New-v0', 'a_new_module:NewEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make_vec_env("a_new_module:New-v0", 2, 2)
    np.testing.assert_array_equal(envs.reset(seed=0)[0], [[0], [0]])
    np.testing.assert_array_equal(envs.step(np.zeros(2, int))[0], [[1], [1]])
    envs.close()
    with pytest.raises(ImportError, match="no_such_module"):
        make_vec_env("no_such_module:New-v0", 2)


@pytest.mark.parametrize(("wrong", "right"), [("CartPol-v1", "CartPole"), ("PongNoFrameskp-v4", "PongNoFrameskip")])
def test_a_misspelled_id_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(gym.error.Error, match=f"Did you mean.*{right}"):
        make_vec_env(wrong, 2)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads times in /proc")
@pytest.mark.parametrize(("cores", "waits"), [(2, True), (1, False)])
def test_only_a_worker_with_a_core_of_its_own_waits_awake(
    cores: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses its core, steps as any other, and ends at once when it is to, however long it would wait."""
    monkeypatch.setattr(vec_env, "AWAKE_SECONDS", 60.0)
    monkeypatch.setattr(vec_env, "n_cores", lambda: cores)
    envs = VecEnv([CountingEnv] * 2, 2)
    try:
        envs.reset(seed=0)
        envs.step(np.zeros(envs.action_space.shape, envs.action_space.dtype))

        def busy() -> float:
            times = [
                Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split() for worker in envs._workers
            ]
            return sum(int(fields[11]) + int(fields[12]) for fields in times) / os.sysconf("SC_CLK_TCK")

        before = busy()
        time.sleep(1)
        assert (busy() - before > 0.2) == waits
    finally:
        start = time.monotonic()
        envs.close()
    assert time.monotonic() - start < 2
