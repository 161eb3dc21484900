"""n_envs environments stepped by n_workers processes: PAAC's n_e and n_w (Clemente et al. 2017, sec. 3).

A process per environment is slower than no process at all where a step is cheap: waking 32 processes costs more
than 32 CartPole steps. So every worker steps a share of the environments; observations, rewards and flags lie in
shared memory, and one message a worker wakes it and one says that it is done. A worker with a core of its own
waits awake for a moment before it sleeps, for waking it takes as long as many cheap steps.

    envs = make_vec_env("HalfCheetah-v5", n_envs=32, n_workers=2)     # Atari ids go to ALE's own threads
    envs = VecEnv([lambda: gym.make("CartPole-v1")] * 32, n_workers=2)

Workers are spawned, so a script that uses them keeps its top level under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space, concatenate

from common.atari import is_atari, make_atari_vec_env
from common.envs import close_env, find_spec, make_env
from common.processes import WorkerError, enter_worker, n_cores, start_worker

AWAKE_SECONDS = 0.001
ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class VecEnv(VectorEnv):
    """A vector environment that gives the numbers of `gymnasium.vector.SyncVectorEnv`, seed for seed.

    An environment that ends is reset in the same step (`AutoresetMode.SAME_STEP`): the returned observation is
    the next episode's first, the last one stands in `info["final_obs"][i]` and its info in
    `info["final_info"][i]`. Other infos of the environments are not passed on: they would cost more than the
    steps. An environment that raises, or whose observation or reward is not finite, raises `WorkerError`.

    Args:
        env_fns: one function per environment, each makes it. Called in the worker, the first one also here.
        n_workers: processes; environments are shared out evenly, the first ones take what is left over.
            0 steps all of them in the calling process.
        copy: whether `reset` and `step` return observations of their own; False returns the shared arrays,
            which the next call overwrites.
        final_info: whether to pass it on. Gymnasium cannot put every info in an array with those of others.

    Raises:
        ValueError: no environments, fewer of them than workers, or a space without fixed size.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gym.Env]], n_workers: int = 0, copy: bool = True, final_info: bool = True
    ) -> None:
        self.num_envs, self.copy = len(env_fns), copy
        if self.num_envs < 1:
            raise ValueError("at least one environment is needed")
        if not 0 <= n_workers <= self.num_envs:
            raise ValueError(f"{n_workers} workers for {self.num_envs} environments")
        env = env_fns[0]()  # for its spaces; it may raise before any process is started
        try:
            self.spec, self.metadata = env.spec, {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        finally:
            env.close()
        for space in (self.single_observation_space, self.single_action_space):
            if not isinstance(space, ARRAY_SPACES):
                raise ValueError(f"the space {space} is not supported")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        memory = _Memory(self.num_envs, self.single_observation_space, self.single_action_space, final_info)
        arrays = memory.arrays()
        self._observations, self._final_observations, self._actions = arrays[:3]
        self._rewards, self._terminations, self._truncations = arrays[3:]
        parts = max(n_workers, 1)
        bounds = [k * (self.num_envs // parts) + min(k, self.num_envs % parts) for k in range(parts + 1)]
        self._shares = [range(bounds[k], bounds[k + 1]) for k in range(parts)]
        self._share, self._workers, self._connections, self._died = None, [], [], []
        self._closing = threading.Event()
        self._stop_workers = weakref.finalize(self, _stop, self._workers, self._connections, self._closing)
        if n_workers == 0:
            self._share = _Share(self._shares[0], memory)
            self._run("make", [(env_fns,)])
            return
        awake = AWAKE_SECONDS if n_workers <= n_cores() else 0.0
        for k, share in enumerate(self._shares):
            fns = CloudpickleWrapper([env_fns[i] for i in share])
            worker, connection = start_worker(_work, (fns, share, memory, awake), f"vec-env-worker-{k}")
            self._workers.append(worker)
            self._connections.append(connection)
        self._watcher = threading.Thread(target=_watch, args=(self._workers, self._died, self._closing), daemon=True)
        self._watcher.start()
        self._receive_all()  # every environment is made

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset all environments: environment i with seed + i, or with the i-th of a list of seeds."""
        if options is not None and "reset_mask" in options:
            raise ValueError("reset_mask is not supported: environments are reset in the step that ends them")
        if seed is None:
            seeds = [None] * self.num_envs
        else:
            seeds = [int(seed) + i for i in range(self.num_envs)] if np.isscalar(seed) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
        self._run("reset", [([seeds[i] for i in share], options) for share in self._shares])
        return self._output(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments with actions (n_envs, ...); rewards are (n_envs,) float64, flags are bool."""
        actions = np.asarray(actions)
        if actions.shape != self._actions.shape:
            raise ValueError(f"actions of shape {actions.shape}, expected {self._actions.shape}")
        self._actions[...] = actions
        infos = [ended for answer in self._run("step", None) for ended in answer]
        terminations, truncations = self._terminations.copy(), self._truncations.copy()
        info: dict[str, Any] = {}
        dones = terminations | truncations
        if dones.any():
            info = {"final_obs": np.full(self.num_envs, None, dtype=object), "_final_obs": dones}
            for i in np.flatnonzero(dones):
                info["final_obs"][i] = self._final_observations[i].copy()
        for i, final_info in infos:
            info = self._add_info(info, {"final_info": final_info}, i)
        return self._output(), self._rewards.copy(), terminations, truncations, info

    def _output(self) -> np.ndarray:
        return self._observations.copy() if self.copy else self._observations

    def _run(self, method: str, arguments: list | None) -> list:
        """Call a method of every share and return what each returned."""
        if self.closed:
            raise gym.error.ClosedEnvironmentError("the vector environment is closed")
        if self._share is not None:
            try:
                return [getattr(self._share, method)(*(arguments[0] if arguments else ()))]
            except Exception:
                where = f"environment {self._share.current} of {self._name()}"
                raise WorkerError(f"{where} failed:\n{traceback.format_exc()}") from None
        for k, connection in enumerate(self._connections):
            with contextlib.suppress(OSError):  # the worker is dead; _receive says so
                connection.send_bytes(pickle.dumps((method, arguments[k])) if arguments else b"")
        return self._receive_all()

    def _receive_all(self) -> list:
        try:
            return [self._receive(k) for k in range(len(self._connections))]
        except BaseException:  # KeyboardInterrupt as well: answers that nobody reads may be left in the pipes
            self.close()
            raise

    def _receive(self, k: int) -> list:
        """The answer of worker k. Raises WorkerError where it, or the worker that died first, failed."""
        try:
            answer = self._connections[k].recv_bytes()
        except (EOFError, OSError):
            self._watcher.join(timeout=2)
            k = self._died[0] if self._died else k
            answer = self._last_words(k)
        answer = pickle.loads(answer) if answer else []
        if isinstance(answer, _Failure):
            raise WorkerError(f"worker {k}, environment {answer.env} of {self._name()} failed:\n{answer.traceback}")
        return answer

    def _last_words(self, k: int) -> bytes:
        """The failure that a dead worker reported. Raises WorkerError where it could not."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                answer = self._connections[k].recv_bytes()
                if answer and isinstance(pickle.loads(answer), _Failure):
                    return answer
        self._workers[k].join(timeout=1)
        where = f"worker {k} (environments {self._shares[k][0]} to {self._shares[k][-1]} of {self._name()})"
        raise WorkerError(f"{where} died with exit code {self._workers[k].exitcode}")

    def _name(self) -> str:
        return self.spec.id if self.spec is not None else "an unregistered environment"

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments and end the workers; one that does not end by itself within 2 s is killed."""
        if self._share is not None:
            self._share.close()
        self._stop_workers()


class _Failure:
    """What a worker sends when an environment raised: its index and the traceback as text."""

    def __init__(self, env: int, traceback: str) -> None:
        self.env, self.traceback = env, traceback


class _Memory:
    """Shared memory for one step of all environments. Anonymous, so that no exit of any process can leak it."""

    def __init__(self, n_envs: int, observation_space: gym.Space, action_space: gym.Space, final_info: bool) -> None:
        self.observation_space, self.final_info = observation_space, final_info
        observations = (n_envs, *observation_space.shape), observation_space.dtype
        actions = (n_envs, *action_space.shape), action_space.dtype
        flags = (n_envs,), np.dtype(np.bool_)
        self.layout = [observations, observations, actions, ((n_envs,), np.dtype(np.float64)), flags, flags]
        self.raw = [RawArray("B", max(1, math.prod(shape) * dtype.itemsize)) for shape, dtype in self.layout]

    def arrays(self) -> list[np.ndarray]:
        """Observations, final observations, actions, rewards, terminations and truncations, (n_envs, ...) each."""
        return [
            np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)
            for raw, (shape, dtype) in zip(self.raw, self.layout, strict=True)
        ]


class _Share:
    """The environments of one worker, and the part of the shared memory that they write."""

    def __init__(self, share: range, memory: _Memory) -> None:
        self.share, self.current = share, share[0]  # `current` says where an exception came from
        self.envs, self.space, self.final_info = [], memory.observation_space, memory.final_info
        arrays = [array[share.start : share.stop] for array in memory.arrays()]
        self.observations, self.final_observations, self.actions = arrays[:3]
        self.rewards, self.terminations, self.truncations = arrays[3:]

    def make(self, env_fns: Sequence[Callable[[], gym.Env]]) -> list:
        for self.current, env_fn in zip(self.share, env_fns, strict=True):
            self.envs.append(env_fn())
        return []

    def reset(self, seeds: list[int | None], options: dict[str, Any] | None) -> list:
        observations = []
        for self.current, env, seed in zip(self.share, self.envs, seeds, strict=True):
            observations.append(env.reset(seed=seed, options=options)[0])
        self._write(observations)
        return []

    def step(self) -> list[tuple[int, dict]]:
        """Step every environment; returns (index, final info) of those that ended and have one to give."""
        ended, observations, rewards, terminations, truncations = [], [], [], [], []
        for i, (env, action) in enumerate(zip(self.envs, self.actions.copy(), strict=True)):
            self.current = self.share[i]
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                self.final_observations[i] = obs
                if info and self.final_info:
                    ended.append((self.current, info))
                obs, _ = env.reset()
            observations.append(obs)
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
        self.rewards[:], self.terminations[:], self.truncations[:] = rewards, terminations, truncations
        if self.terminations.any() or self.truncations.any():
            self._check_finite("final observation", self.final_observations)
        self._check_finite("reward", self.rewards)
        self._write(observations)
        return ended

    def _write(self, observations: list) -> None:
        concatenate(self.space, observations, self.observations)
        self._check_finite("observation", self.observations)

    def _check_finite(self, what: str, array: np.ndarray) -> None:
        """A NaN in one environment would make every parameter NaN at the next update."""
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
            self.current = self.share[int(bad.argmax())]
            raise FloatingPointError(f"the {what} is not finite: {array[bad.argmax()]}")

    def close(self) -> None:
        for env in self.envs:
            close_env(env)


def _work(
    env_fns: CloudpickleWrapper,
    share: range,
    memory: _Memory,
    awake: float,
    connection: multiprocessing.connection.Connection,
) -> None:
    """A worker's life: make the environments, then step or reset them until the pipe ends.

    It waits `awake` seconds for the next request before it falls asleep.
    """
    enter_worker()
    environments = _Share(share, memory)
    try:
        answer = environments.make(env_fns.fn)
        while (request := _exchange(connection, answer, awake)) is not None:
            if request:
                method, arguments = pickle.loads(request)
                answer = getattr(environments, method)(*arguments)
            else:
                answer = environments.step()
    except Exception:
        failure = _Failure(environments.current, traceback.format_exc())
        with contextlib.suppress(ConnectionError):  # the parent has heard of another one by now
            connection.send_bytes(pickle.dumps(failure))
    finally:
        environments.close()


def _exchange(connection: multiprocessing.connection.Connection, answer: Any, awake: float) -> bytes | None:
    """Send an answer and wait for the next request; None where the parent has closed the pipe, or is gone."""
    try:
        connection.send_bytes(pickle.dumps(answer) if answer else b"")
        asleep = time.perf_counter() + awake
        while time.perf_counter() < asleep and not connection.poll():
            os.sched_yield()  # whoever else needs the core goes first
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        return None


def _watch(workers: list, died: list[int], closing: threading.Event) -> None:
    """When one worker dies, end the others: the parent may be waiting for one that is busy for long."""
    sentinels = [worker.sentinel for worker in workers]
    first = multiprocessing.connection.wait(sentinels)[0]
    if not closing.is_set():
        died.append(sentinels.index(first))
        for worker in workers:
            worker.kill()


def _stop(workers: list, connections: list, closing: threading.Event) -> None:
    """End the workers: the end of the pipe tells them. Whoever is still busy after 2 s is killed."""
    closing.set()
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + 2
    for worker in workers:
        worker.join(timeout=max(0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def env_seed(*key: int) -> int:
    """A seed for a vector environment, which adds i for environment i; other keys lead far away from it.

    Keys that differ in zeros at the end are the same key.
    """
    return int(np.random.SeedSequence(key).generate_state(1)[0]) >> 2  # ALE takes 31 bits


def make_vec_env(env_id: str, n_envs: int, n_workers: int = 0, env_kwargs: dict | None = None) -> VectorEnv:
    """A vector environment for any Gymnasium id, reset in the step that ends an episode (SAME_STEP).

    Atari ids: ALE's vector environment with `n_workers` threads, one at least. All others: `VecEnv` with `n_workers`
    processes (0: none) and without `final_info`, each environment made by `make_env`.

    Raises:
        gymnasium.error.Error, ImportError: no such environment. ValueError: a space that trainers cannot take,
            or options that the environment does not know.
    """
    spec = find_spec(env_id)
    if is_atari(spec):
        return make_atari_vec_env(spec.id, n_envs, max(n_workers, 1), env_kwargs)
    return VecEnv([functools.partial(make_env, spec, env_kwargs)] * n_envs, n_workers, final_info=False)
