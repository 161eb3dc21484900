"""Environments for the tests, at module level so that spawned workers can import them."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

OBSERVATION_SPACES = {
    "float": spaces.Box(-1.0, 1.0, (3, 2), np.float32),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "discrete": spaces.Discrete(11, start=-3),
    "multi_discrete": spaces.MultiDiscrete([3, 5, 7]),
    "multi_binary": spaces.MultiBinary(6),
}
ACTION_SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
}


class RandomEnv(gym.Env):
    """Every observation depends on the seed and on all actions so far; episodes terminate and are truncated."""

    def __init__(self, observation_space: str = "float", action_space: str = "discrete", infos: bool = False) -> None:
        self.observation_space = OBSERVATION_SPACES[observation_space]
        self.action_space = ACTION_SPACES[action_space]
        self.infos = infos
        self.spec = EnvSpec("Random-v0")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.length, self.past = 0, int((options or {}).get("past", 0))
        return self._observe(self._generator()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.length += 1
        self.past = (31 * self.past + int(1000 * np.abs(action).sum())) % 1_000_003
        rng = self._generator()
        observation, reward, terminated = self._observe(rng), rng.normal(), bool(rng.random() < 0.05)
        info = {"length": self.length, "name": f"episode of {self.length}"} if self.infos else {}
        return observation, reward, terminated, self.length == 15, info

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng((self.past, int(self.np_random.integers(1_000_000))))

    def _observe(self, rng: np.random.Generator) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return int(rng.integers(space.n) + space.start)
        if isinstance(space, spaces.MultiDiscrete):
            return rng.integers(space.nvec)
        if isinstance(space, spaces.MultiBinary):
            return rng.integers(0, 2, space.shape).astype(space.dtype)
        if space.dtype == np.uint8:
            return rng.integers(0, 256, space.shape).astype(np.uint8)
        return rng.uniform(-1, 1, space.shape).astype(np.float32)


class CountingEnv(gym.Env):
    """Observes 10 for each earlier episode and 1 for each step, in one buffer; an episode ends after 3 steps."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 99, (1,), np.float32), spaces.Discrete(2)
        self.buffer = np.full(1, -10, np.float32)
        self.spec = EnvSpec("Counting-v0")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.buffer[0] = self.buffer[0] // 10 * 10 + 10
        return self.buffer, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.buffer[0] += 1
        return self.buffer, 1.0, bool(self.buffer[0] % 10 == 3), False, {}


class FailingEnv(CountingEnv):
    """Raises in `where`: "init", "reset", "autoreset" or "step"; nowhere where that is None."""

    ERROR: type[Exception] = RuntimeError

    def __init__(self, where: str | None = None) -> None:
        super().__init__()
        self.where, self.resets = where, 0
        self.spec = EnvSpec("Failing-v0")
        self._fail("init")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise self.ERROR("broken in " + where)  # put together, so that no source line holds the whole

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._fail("reset" if self.resets == 0 else "autoreset")
        self.resets += 1
        return super().reset()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._fail("step")
        return super().step(action)


class LostEnv(FailingEnv):
    """A connection of its own, to a simulator for one, ends."""

    ERROR = BrokenPipeError


class LateEnv(FailingEnv):
    """Fails when its parent has heard of another one."""

    def _fail(self, where: str) -> None:
        if where == self.where:
            time.sleep(0.5)
        super()._fail(where)


class NotFiniteEnv(CountingEnv):
    """Gives one number that is not finite: in the observation, the final observation or the reward."""

    def __init__(self, where: str | None = None) -> None:
        super().__init__()
        self.where = where
        self.spec = EnvSpec("NotFinite-v0")

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, _, _, info = super().step(action)
        truncated = self.where == "final observation"
        if self.where in ("observation", "final observation"):
            observation = np.full(1, np.nan, np.float32)
        return observation, np.inf if self.where == "reward" else reward, False, truncated, info


class SlowEnv(CountingEnv):
    """A step takes `seconds`."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.spec = EnvSpec("Slow-v0")

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.seconds)
        return super().step(action)


class NativeEnv(SlowEnv):
    """A step is native code that keeps the interpreter's lock for `seconds`, so that no other thread runs."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        ctypes.PyDLL(None).sleep(int(self.seconds))
        return CountingEnv.step(self, action)


class SimulatorEnv(CountingEnv):
    """A program that is gone in step `fails_at`, and cannot be closed after a step.

    Observations are float64 where float32 is announced; the infos of two of them fit into no common array.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    made = closed = 0

    def __init__(self, fails_at: int = 10**9, render_mode: str | None = None) -> None:
        super().__init__()
        self.fails_at, self.steps, self.render_mode = fails_at, 0, render_mode
        SimulatorEnv.made += 1
        self.winner = 0 if SimulatorEnv.made % 2 else None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return super().reset()[0].astype(np.float64), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise ConnectionError("the simulator is gone")
        obs, *rest, _ = super().step(action)
        return obs.astype(np.float64), *rest, {"winner": self.winner}

    def render(self) -> np.ndarray:
        return np.zeros((20, 20, 3), np.uint8)

    def close(self) -> None:
        SimulatorEnv.closed += 1
        if self.steps:
            raise BrokenPipeError("the simulator cannot be told to quit")


class SpaceEnv(CountingEnv):
    """Observations and actions of given spaces, sampled; the reward is the action that arrived."""

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, render_mode: str | None = None) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


class PictureEnv(SpaceEnv):
    """An RGB picture, 96 high and 120 wide: left half red on even steps, all of it blue on odd ones."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(spaces.Box(0, 255, (96, 120, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32))

    def _picture(self) -> np.ndarray:
        picture = np.zeros((96, 120, 3), np.uint8)
        if self.steps % 2 == 0:
            picture[:, :60, 0] = 255
        else:
            picture[..., 2] = 255
        return picture

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.steps = 0
        return self._picture(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        return self._picture(), 0.0, False, False, {}


_BOX = spaces.Box(-1, 1, (4,), np.float32)
_OBSERVATIONS = {
    "OneBoxDict": spaces.Dict(screen=_BOX),
    "TwoBoxDict": spaces.Dict(screen=_BOX, sound=_BOX),
    "TwoTuple": spaces.Tuple((_BOX, _BOX)),
    "Matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "GreyPicture": spaces.Box(0, 255, (50, 60), np.uint8),
    "OneColourPicture": spaces.Box(0, 255, (50, 60, 1), np.uint8),
    "Vector": _BOX,
    "Double": spaces.Box(-1, 1, (1,), np.float64),
    "Memory": spaces.Box(0, 255, (128,), np.uint8),
}
_ACTIONS = {"": spaces.Discrete(3), "StartAt5": spaces.Discrete(3, start=5), "TupleAction": spaces.Tuple((_BOX,))}
_ACTIONS["NoAction"] = spaces.Box(-1, 1, (0,), np.float32)

gym.register("Simulator-v0", f"{__name__}:SimulatorEnv")
gym.register("Picture-v0", f"{__name__}:PictureEnv")
for _observation, _space in _OBSERVATIONS.items():
    for _action, _action_space in _ACTIONS.items():
        _spaces = {"observation_space": _space, "action_space": _action_space}
        gym.register(f"{_observation}{_action}-v0", f"{__name__}:SpaceEnv", kwargs=_spaces)
