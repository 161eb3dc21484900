"""Small environments for the tests of trainers, as `tests.paac_envs:Bandit-v0` and so on on the command line."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# What `Walk` saw, by the seed of its reset: only of use where the environments are in the test's own process.
WALKS: dict[int, dict[str, list]] = {}


class Bandit(gym.Env):
    """Episodes of one step, a constant observation, a reward that depends on the action alone: no state at all."""

    REWARDS = (0.0, 0.5, -1.0, 1.0)

    def __init__(self, continuous: bool = False, image: bool = False, render_mode: str | None = None) -> None:
        self.continuous = continuous
        self.action_space = spaces.Box(-2, 2, (2,), np.float32) if continuous else spaces.Discrete(4)
        if image:
            self.observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
            self.obs = (np.arange(84 * 84).reshape(84, 84) % 251).astype(np.uint8)
        else:
            self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
            self.obs = np.array([1, -0.5, 0.25], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -float(np.square(action - 1).sum()) if self.continuous else self.REWARDS[int(action)]
        return self.obs, reward, True, False, {}


class Talking(Bandit):
    """A bandit that prints each step."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        print("step", flush=True)
        return super().step(action)


class Exclusive(Bandit):
    """A bandit of which a process can have only one at a time."""

    open = False

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        assert not Exclusive.open, "the port is in use"
        Exclusive.open = True

    def close(self) -> None:
        Exclusive.open = False


class Plain(Bandit):
    """A bandit that takes no arguments at all, not even a render mode, as many people's environments."""

    def __init__(self) -> None:
        super().__init__()


class Steady(gym.Env):
    """Earns 1 at every step, always looks the same and never ends by itself: V = 1 / (1 - γ), whatever is done."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.obs = np.array([0.5, -1], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self.obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.obs, 1.0, False, False, {}


class Echo(gym.Env):
    """Episodes of two steps; what is seen and earned depends on the actions of the episode alone, not on any seed."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, continuous: bool = False, render_mode: str | None = None) -> None:
        self.action_space = spaces.Box(-2, 2, (2,), np.float32) if continuous else spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.heard = 0.0
        return np.array([-1, 0.5], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        first, self.heard = self.heard == 0, self.heard + 1 + float(np.sum(action) % 3)
        return np.array([1, self.heard], np.float32), float(np.cos(self.heard)), not first, False, {}


class Walk(gym.Env):
    """Deterministic, with ends where the test wants them, and a record of everything in WALKS.

    `ends` is a cycle of [length, kind] of episodes, kind one of "terminated", "truncated", "both"; the seed of the
    first reset says where in the cycle the environment begins.
    """

    observation_space = spaces.Box(-10, 10, (3,), np.float32)

    def __init__(self, ends: list, continuous: bool = False, render_mode: str | None = None) -> None:
        self.ends = ends
        self.action_space = spaces.Box(-3, 1, (2,), np.float32) if continuous else spaces.Discrete(3)

    def _obs(self, last: float) -> np.ndarray:
        x = 0.7 * self.seed + 1.3 * self.episode + 0.4 * self.length
        return np.array([2 * np.sin(x), np.cos(2 * x) + 0.3 * last, 0.1 * self.length - 1], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.seed, self.episode = seed, seed - 1
            self.walk = WALKS[seed] = {"obs": [], "action": [], "reward": [], "end": [], "final_obs": []}
        self.episode, self.length = self.episode + 1, 0
        obs = self._obs(0.0)
        self.walk["obs"].append(obs)
        return obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.length += 1
        length, kind = self.ends[self.episode % len(self.ends)]
        end = kind if self.length == length else ""
        last = float(np.sum(action))
        obs = self._obs(last)
        reward = 1.7 * np.cos(3 * last + self.length) + 0.5 * (self.seed % 5)
        if not end:
            self.walk["obs"].append(obs)
        for key, value in (("action", np.array(action)), ("reward", reward), ("end", end), ("final_obs", obs)):
            self.walk[key].append(value)
        return obs, reward, end in ("terminated", "both"), end in ("truncated", "both"), {}


class Lattice(gym.Env):
    """Takes a matrix of numbers within its bounds and nothing else; an episode is three steps."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(np.array([[-2, 0, 5]] * 2, np.float32), np.array([[6, 1, 9]] * 2, np.float32))

    def __init__(self, render_mode: str | None = None) -> None:
        self.length = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.length = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action), action
        self.length += 1
        return np.full(3, self.length / 3, np.float32), float(action.sum()), self.length == 3, False, {}


def add_byte(path: str) -> int:
    """Returns how many there were."""
    with open(path, "ab") as file:
        size = file.tell()
        file.write(b".")
    return size


class Faulty(gym.Env):
    """Goes wrong at its step `after`, where the seed of its reset was `only` (everywhere without `only`).

    Of several faults it has the k-th when an environment with the same `stamp`, a file, goes wrong for the k-th time.
    A step takes `pace` seconds. How often one was made and closed are the sizes of the files `stamp`_made and _closed,
    how many steps were taken is that of the file `count`.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        fault: str | list[str],
        after: int,
        only: int | None = None,
        stamp: str | None = None,
        pace: float = 0.0,
        count: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.faults, self.after, self.only = [fault] if isinstance(fault, str) else fault, after, only
        self.stamp, self.pace, self.count = stamp, pace, count
        self.steps, self.seed = 0, None
        self.note("made")

    def note(self, what: str) -> None:
        if self.stamp:
            add_byte(f"{self.stamp}_{what}")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seed = self.seed if seed is None else seed
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.pace)
        self.steps += 1
        if self.count:
            add_byte(self.count)
        obs, reward = np.full(2, self.steps % 3 - 1, np.float32), float(action)
        if self.steps >= self.after and self.only in (None, self.seed):
            times = 0
            if self.stamp:
                times = add_byte(self.stamp)
            fault = self.faults[times % len(self.faults)]
            if fault == "raise":
                raise ZeroDivisionError("the door is stuck")
            if fault == "nan observation":
                obs = obs * np.nan
            elif fault == "nan reward":
                reward = float("nan")
            elif fault == "huge reward":  # finite, but its square is not
                reward = 1e35
            elif fault == "hang":
                time.sleep(120)
        return obs, reward, self.steps % 7 == 0, False, {}

    def close(self) -> None:
        self.note("closed")


class TwoKeys(gym.Env):
    """A Dict observation space of two Boxes, which no trainer takes."""

    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 2, render_mode: str | None = None) -> None:
        bound = np.linspace(1, 2, size, dtype=np.float32)
        self.observation_space = spaces.Dict({"a": spaces.Box(-bound, bound), "b": spaces.Box(-bound, bound)})


class PixelCue(gym.Env):
    """A picture with a bright left or right half; the action that names the half earns 1. Episodes of one step."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        obs = np.zeros((84, 84), np.uint8)
        obs[:, self.side * 42 : self.side * 42 + 42] = 200
        return obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros((84, 84), np.uint8), float(action == self.side), True, False, {}


class VectorCue(gym.Env):
    """Two numbers; a continuous action earns the more, the nearer it is to the first. Episodes of one step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-2, 2, (1,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.cue, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.cue, -4 * float(np.square(action[0] - self.cue[0])), True, False, {}


class Corridor(gym.Env):
    """Six cells in a row, the second is the start. The left end earns 0.2 at once, the right one 1 after four steps."""

    observation_space = spaces.Box(0, 1, (6,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.cell = 1
        return np.eye(6, dtype=np.float32)[self.cell], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.cell += 1 if action == 1 else -1
        reward = {0: 0.2, 5: 1.0}.get(self.cell, 0.0)
        return np.eye(6, dtype=np.float32)[self.cell], reward, reward > 0, False, {}


class Recall(gym.Env):
    """A cue, +1 or -1, is seen at the first of four steps and zeros after it; the last action earns 1 if it fits."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        done = self.steps == 4
        return np.zeros(1, np.float32), float(done and action == self.cue), done, False, {}


class CartPolePositions(gym.ObservationWrapper):
    """CartPole-v1 without the two velocities: they can only be told from observations that lie further back."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gym.make("CartPole-v1", render_mode=render_mode))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


for env in (
    Bandit,
    Talking,
    Exclusive,
    Plain,
    Steady,
    Echo,
    Walk,
    Faulty,
    TwoKeys,
    PixelCue,
    VectorCue,
    Corridor,
    Recall,
    CartPolePositions,
    Lattice,
):
    gym.register(f"{env.__name__}-v0", f"{__name__}:{env.__name__}")
