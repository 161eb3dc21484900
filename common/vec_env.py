"""n_envs environments stepped by n_workers processes: PAAC's n_e and n_w (Clemente et al. 2017).

Every worker steps its share of the environments. Observations, actions, rewards and flags lie in
shared memory; a pipe to each worker carries only what to do. Atari ids go to ALE's vector
environment, which has threads of its own.

    envs = make_vec_env("HalfCheetah-v5", n_envs=32, n_workers=2)
    envs = VecEnv([lambda: gym.make("CartPole-v1")] * 32, n_workers=2)

Workers import the script, so one that uses them needs `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import itertools
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space
from torch import multiprocessing as mp

from common.atari import SCREEN, STACK, is_atari, make_atari_env, make_atari_vec_env
from common.processes import check, n_cores, start, stop

# How long, in seconds, a worker with a core of its own waits awake: to wake it takes as long as
# many cheap steps. 32 CartPoles with 2 workers make 1.2 times the steps/s, 32 HalfCheetahs 1.0.
AWAKE = 0.001

EnvFns = Sequence[Callable[[], gym.Env]]


class VecEnv(VectorEnv):
    """A vector environment with the numbers of `gymnasium.vector.SyncVectorEnv`, seed for seed.

    An environment that ends is reset in the same step (`AutoresetMode.SAME_STEP`): the returned
    observation is the next episode's first, and the last one is `info["final_obs"][i]`. The
    environments' own infos are not passed on.

    Args:
        env_fns: one function per environment, which makes it.
        n_workers: processes that share the environments; 0 steps all of them in this process.
        single_spaces: observations and actions of one environment. Where workers have the
            environments and this is None, one more is made to ask for them.

    Raises: WorkerError: a worker has failed; here and in every call.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        n_workers: int = 0,
        single_spaces: tuple[gym.Space, gym.Space] | None = None,
    ) -> None:
        self._share = None if n_workers else Share(env_fns)
        if single_spaces is None:
            env = env_fns[0]() if n_workers else self._share.envs[0]
            single_spaces = env.observation_space, env.action_space
            if n_workers:
                env.close()
        self.single_observation_space, self.single_action_space = single_spaces
        obs_space, action_space = single_spaces
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = n = len(env_fns)
        self.observation_space = batch_space(obs_space, n)
        self.action_space = batch_space(action_space, n)

        obs = (n, *obs_space.shape), obs_space.dtype
        actions = (n, *action_space.shape), action_space.dtype
        layout = [obs, obs, actions, ((n,), np.float64), ((n,), np.bool_), ((n,), np.bool_)]
        shared = [torch.from_numpy(np.zeros(*array)).share_memory_() for array in layout]
        arrays = [tensor.numpy() for tensor in shared]
        self._obs, self._final_obs, self._actions = arrays[:3]
        self._rewards, self._terminations, self._truncations = arrays[3:]

        if self._share:
            self._share.attach(shared, slice(0, n))
        self._workers, self._connections = [], []
        # ends the workers also where close() is forgotten, before Python waits for them at its end
        self._end = Finalize(self, _end, (self._workers, self._connections), exitpriority=1)
        awake = AWAKE if n_workers <= n_cores() else 0.0
        bounds = np.linspace(0, n, n_workers + 1).astype(int).tolist()
        for first, last in itertools.pairwise(bounds):
            ours, theirs = mp.Pipe()
            name = f"vec-env worker {len(self._workers)} (environments {first} to {last - 1})"
            fns = CloudpickleWrapper(env_fns[first:last])
            part = slice(first, last)
            self._workers.append(start(name, work, fns, shared, part, theirs, awake))
            self._connections.append(ours)
            theirs.close()
        self._wait()  # until every environment is made

    def reset(self, *, seed=None, options=None) -> tuple:
        """Reset all environments, environment i with seed + i."""
        self._run("reset", seed, options)
        return self._obs.copy(), {}

    def step(self, actions: np.ndarray) -> tuple:
        """Step all with actions (n_envs, ...); rewards are (n_envs,) float64, flags bool."""
        self._actions[...] = actions
        self._run("step")
        terminations, truncations = self._terminations.copy(), self._truncations.copy()
        dones = terminations | truncations
        ended = {"final_obs": self._final_obs.copy(), "_final_obs": dones} if dones.any() else {}
        return self._obs.copy(), self._rewards.copy(), terminations, truncations, ended

    def _run(self, method: str, *args: Any) -> None:
        if self._share:
            getattr(self._share, method)(*args)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # its worker has died; _wait says so
                connection.send((method, args))
        self._wait()

    def _wait(self) -> None:
        """Until every worker is done."""
        for worker, connection in zip(self._workers, self._connections, strict=True):
            # A process that an environment has forked may keep the pipe open when the worker dies.
            while not select.select([connection], [], [], 1)[0]:
                check([worker])
            try:
                connection.recv()
            except (EOFError, OSError):
                worker.join(1)
                check([worker])
                raise

    def close_extras(self, **kwargs: Any) -> None:
        if self._share:
            self._share.close()
        self._end()


class Share:
    """The environments of one worker, and the part of the shared arrays that they write."""

    def __init__(self, env_fns: EnvFns) -> None:
        self.envs: list[gym.Env] = []
        try:
            for env_fn in env_fns:
                self.envs.append(env_fn())
        except BaseException:
            self.close()
            raise

    def attach(self, shared: list, part: slice) -> None:
        self.first = part.start
        arrays = [tensor.numpy()[part] for tensor in shared]
        self.obs, self.final_obs, self.actions = arrays[:3]
        self.rewards, self.terminations, self.truncations = arrays[3:]

    def reset(self, seed, options) -> None:
        for i, env in enumerate(self.envs):
            own_seed = None if seed is None else seed + self.first + i
            self.obs[i], _ = env.reset(seed=own_seed, options=options)

    def step(self) -> None:
        for i, (env, action) in enumerate(zip(self.envs, self.actions.copy(), strict=True)):
            obs, self.rewards[i], terminated, truncated, _ = env.step(action)
            self.terminations[i] = terminated
            self.truncations[i] = truncated
            if terminated or truncated:
                self.final_obs[i] = obs
                obs, _ = env.reset()
            self.obs[i] = obs

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all of them, even where one fails
            for env in self.envs:
                stack.callback(env.close)


def work(
    env_fns: CloudpickleWrapper, shared: list, part: slice, connection: Any, awake: float
) -> None:
    """A worker's life: do what the pipe says, until it ends."""
    with contextlib.closing(Share(env_fns.fn)) as share:
        share.attach(shared, part)
        while True:
            try:
                connection.send(None)  # done
                asleep = time.perf_counter() + awake
                while time.perf_counter() < asleep and not connection.poll():
                    os.sched_yield()
                method, args = connection.recv()
            except (EOFError, ConnectionError):
                return
            getattr(share, method)(*args)


def _end(workers: list, connections: list) -> None:
    for connection in connections:
        connection.close()  # which asks the workers to end
    stop(workers)


def env_seed(*key: int) -> int:
    """A seed made of several numbers. A vector environment adds i for environment i."""
    return int(np.random.SeedSequence(key).generate_state(1)[0]) >> 2  # ALE takes 31 bits


def find_spec(env_id: str) -> EnvSpec:
    """The registered environment of an id; `module:Id` imports the module, which registers it.

    Raises: ValueError: there is no such id; names those that may be meant. ImportError: no module.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gym.registry:
        close = difflib.get_close_matches(
            name.replace("Deterministic", "NoFrameskip"), gym.registry, cutoff=0.5
        )
        yours = "" if module else f" (one of your own is module:{name})"
        raise ValueError(f"there is no {name}{yours}; similar names: {', '.join(close)}")
    return gym.spec(name)


def make_env(env_id: str, env_kwargs: dict, render_mode: str | None = None) -> gym.Env:
    """One environment with observations (4, 84, 84) uint8 or (d,) float32.

    Pictures, uint8 of height x width with 1 or 3 colours or none, are greyed, resized and stacked.
    Everything else becomes a vector, grids with both sides below 16 too; Discrete observations are
    one-hot, a Dict of one Box is that Box. Actions are the environment's own, Discrete or a Box.

    Raises: ValueError: other spaces, or a uint8 Box of three dimensions that is no picture.
    """
    spec = find_spec(env_id)
    if is_atari(spec):
        return make_atari_env(spec, env_kwargs, render_mode)
    if render_mode:
        env_kwargs = env_kwargs | {"render_mode": render_mode}
    env = gym.make(spec, **env_kwargs)
    space = env.observation_space
    if isinstance(space, spaces.Dict) and [type(x) for x in space.values()] == [spaces.Box]:
        (key,) = space
        space = space[key]
        env = gym.wrappers.TransformObservation(env, lambda obs: obs[key], space)
    for needed in (space, env.action_space):
        if not isinstance(needed, spaces.Box | spaces.Discrete):
            env.close()
            raise ValueError(f"{env_id}: {needed} is no Box, Discrete or Dict of one Box")
    if space.dtype == np.uint8 and len(space.shape) in (2, 3) and max(space.shape[:2]) >= 16:
        if space.shape[2:] not in ((), (1,), (3,)):
            env.close()
            raise ValueError(f"{env_id}: {space} is no picture: height x width, 1 or 3 colours")
        if space.shape[2:] == (3,):
            env = gym.wrappers.GrayscaleObservation(env)
        env = gym.wrappers.ReshapeObservation(env, space.shape[:2])
        env = gym.wrappers.ResizeObservation(env, (SCREEN, SCREEN))
        return gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    if isinstance(space, spaces.Discrete) or len(space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if env.observation_space.dtype != np.float32:
        box = env.observation_space
        vector = spaces.Box(np.float32(box.low), np.float32(box.high), dtype=np.float32)
        env = gym.wrappers.TransformObservation(env, np.float32, vector)
    return env


def make_vec_env(env_id: str, n_envs: int, n_workers: int, env_kwargs: str = "{}") -> VectorEnv:
    """Atari ids: ALE's vector environment with `n_workers` threads. Others: `VecEnv`.

    Takes actions as policies give them, see `env_actions`; env_kwargs is JSON.
    """
    spec, kwargs = find_spec(env_id), json.loads(env_kwargs)
    if is_atari(spec):
        return make_atari_vec_env(spec, n_envs, max(n_workers, 1), kwargs)
    env_fns = [functools.partial(make_env, env_id, kwargs)] * n_envs
    envs = VecEnv(env_fns, n_workers, env_spaces(env_id, env_kwargs) if n_workers else None)
    space = envs.single_action_space
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return envs
    return gym.wrappers.vector.TransformAction(envs, functools.partial(env_actions, space=space))


@functools.cache
def env_spaces(env_id: str, env_kwargs: str = "{}") -> tuple[gym.Space, gym.Space]:
    """Observations and actions of an environment, which is made and closed for them, once."""
    with contextlib.closing(make_env(env_id, json.loads(env_kwargs))) as env:
        return env.observation_space, env.action_space


def env_actions(actions: np.ndarray, space: gym.Space) -> np.ndarray:
    """A policy's actions, (n,) from 0 or (n, action_dim), as elements of the environment's space.

    Where a Box has bounds, [-1, 1] is stretched to them, and what lies outside is clipped.
    """
    if isinstance(space, spaces.Discrete):
        return (actions + space.start).astype(space.dtype)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    actions = actions.reshape(-1, *space.shape).astype(np.float64)
    with np.errstate(invalid="ignore"):
        stretched = low + (actions.clip(-1, 1) + 1) / 2 * (high - low)
    actions = np.where(np.isfinite(high - low), stretched, actions).clip(low, high)
    return (actions.round() if space.dtype.kind in "iu" else actions).astype(space.dtype)
