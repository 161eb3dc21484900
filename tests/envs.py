"""Environments for the tests of common/, registered as tests.envs:Name-v0."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

ACTIONS = {
    "discrete": Discrete(4),
    "int32": Discrete(3, dtype=np.int32),
    "start": Discrete(3, start=-1, dtype=np.int32),
    "bounds": Box(np.float32([-2, 0]), np.float32([2, 10])),
    "no bounds": Box(-np.inf, np.inf, (2,)),
    "half": Box(np.float32([0, -np.inf, 2]), np.float32([np.inf, 3, 6])),
    "matrix": Box(-3, 3, (2, 3)),
    "float64": Box(0, 0.1, (1,), np.float64),
    "integers": Box(-4, 8, (2,), np.int64),
    "several": MultiDiscrete([2, 3]),
}
OBSERVATIONS = {
    "vector": Box(-1, 1, (4,)),
    "matrix": Box(-1, 1, (2, 3)),
    "float64": Box(-1, 1, (3,), np.float64),
    "bytes": Box(0, 255, (128,), np.uint8),
    "grid": Box(0, 255, (7, 7, 20), np.uint8),
    "discrete": Discrete(4, start=-2),
    "dict": Dict(screen=Box(-1, 1, (4,), np.float64)),
    "grey": Box(0, 255, (50, 60), np.uint8),
    "one channel": Box(0, 255, (50, 60, 1), np.uint8),
    "colour": Box(0, 255, (50, 60, 3), np.uint8),
    "stack": Box(0, 255, (4, 84, 84), np.uint8),
    "two": Dict(screen=Box(-1, 1, (4,)), sound=Box(-1, 1, (4,))),
    "tuple": Tuple((Box(-1, 1, (4,)),)),
}


def note(log: str, what: str, number: int) -> None:
    with open(log, "a") as f:
        f.write(f"{what} {number}\n")


class Walk(gym.Env):
    """What happens depends on the seed, the options and all actions; episodes end in both ways."""

    def __init__(self, observations: str, actions: str = "discrete") -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observations], ACTIONS[actions]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.t, self.state = 0, (options or {}).get("start", 0)
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        self.state = (31 * self.state + int(1000 * np.abs(action).sum())) % 1_000_003
        terminated = self.np_random.random() < 0.1
        return self.observe(), self.np_random.normal(), terminated, self.t == 9, {"t": self.t}

    def observe(self) -> Any:
        self.observation_space.seed(self.state + int(self.np_random.integers(2**30)))
        return self.observation_space.sample()


class Picture(Walk):
    """The left half is 50 (t + 1) bright, the right half is red, or as grey as red is: 54."""

    def observe(self) -> np.ndarray:
        picture = np.full(self.observation_space.shape, 50 * (self.t + 1), np.uint8)
        picture[:, 30:] = (255, 0, 0) if picture.shape[2:] == (3,) else 54
        return picture


class Simulator(gym.Env):
    """Observes the action that arrives; notes what happens in `log` and raises where `fail` does.

    One that takes `slow` seconds to close holds a child process and a program.
    """

    def __init__(
        self, log: str = os.devnull, fail: str = "", slow: float = 0.0, actions: str = "discrete"
    ) -> None:
        self.action_space = ACTIONS[actions]
        n = int(np.prod(self.action_space.shape))
        self.observation_space = Box(-np.inf, np.inf, (n,), np.float64)
        self.log, self.fail, self.slow = log, fail, slow
        self.happens("made")
        note(log, "drew", np.random.randint(2**30))  # forks would all draw the same
        note(log, "hears", os.environ.get("WORD", 0))
        if slow:
            context = multiprocessing.get_context("fork")
            self.child = context.Process(target=time.sleep, args=(120,), daemon=True)
            self.child.start()
            self.program = subprocess.Popen(["sleep", "120"])
            for process in (self.child, self.program):
                note(log, "held", process.pid)

    def happens(self, what: str) -> None:
        if self.fail == what:
            raise RuntimeError(f"broken when {what}")
        note(self.log, what, os.getpid())

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        return np.zeros(self.observation_space.shape), {}

    def step(self, action: Any) -> tuple:
        self.happens("stepped")
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        assert action.dtype == self.action_space.dtype
        return np.ravel(action).astype(float), 0.0, False, False, {}

    def close(self) -> None:
        if self.slow:
            time.sleep(self.slow)
            self.child.terminate()
            self.child.join()
            self.program.terminate()
            self.program.wait()
        self.happens("closed")


class Film(gym.Env):
    """Episodes of `length` steps; 5 a step in the first, 1000 in later ones. Notes its seeds.

    Without a length an episode has 2 + seed % 4 steps; an even number of steps terminates, an odd
    one truncates. The picture of step t is black where t is even, else grey; column t is white.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    observation_space, action_space = Box(-1, 1, (3,)), Box(-2, 2, (1,))
    episodes = 0

    def __init__(
        self, length: int = 0, fps: Any = 30, size: Any = (9, 120), log: str = os.devnull, **_: Any
    ) -> None:
        self.length, self.size, self.log, self.render_mode = length, size, log, "rgb_array"
        self.metadata = self.metadata | {"render_fps": fps}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.t = 0
        self.episodes += 1
        if seed is not None:
            self.length = self.length or 2 + seed % 4
            note(self.log, "seed", seed)
        return np.full(3, 0.5), {}  # of another dtype than the space's

    def step(self, action: Any) -> tuple:
        assert self.action_space.contains(action)
        self.t += 1
        ends, even = self.t == self.length, self.t % 2 == 0
        reward = 5.0 if self.episodes == 1 else 1000.0
        return np.full(3, 0.5, np.float32), reward, ends and even, ends and not even, {}

    def render(self) -> np.ndarray:
        picture = np.full((*self.size, 3), 40 * (self.t % 2), np.uint8)
        picture[:, self.t] = 255
        return picture


for _env in (Walk, Picture, Simulator, Film):
    gym.register(f"{_env.__name__}-v0", _env)
