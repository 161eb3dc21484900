"""Small tasks in which what matters comes late, or is large or small.

    python a3c.py --env-id benchmarks.tasks:Corridor-v0 --total-steps 300_000

| id | best | at random | episode |
|---|---|---|---|
| CatchCells-v0 | 1 | -0.4 | a falling ball is to be caught |
| Corridor-v0 | 1 | 0.4 | ten cells in a row, a reward in the last one, 50 steps at most |
| Memory-v0 | 1 | 0 | a sign shown once is to be named eight steps later |
| Fork-v0 | 1.2 | 1.4 | 1 now and 0.3 a step, or 0.6 a step; a time limit of three steps |
| CartPole0.01-v1, CartPole100-v1 | 5, 50,000 | 0.2, 2,200 | CartPole-v1 with other rewards |
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CELLS = 12  # rows and columns of Catch

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Catch(gym.Env):
    """A ball falls through 12 rows of 12 columns, over a paddle of three, which moves or stays.

    The last of 11 steps earns 1 where the ball meets the paddle, else -1. The idea is that of Mnih
    et al. 2014 (Recurrent Models of Visual Attention).
    """

    observation_space = spaces.Box(0, 1, (CELLS, CELLS), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(CELLS)), CELLS // 2
        return self._cells(), {}

    def step(self, action: int) -> Step:
        self.paddle = min(max(self.paddle + int(action) - 1, 1), CELLS - 2)  # its middle
        self.row += 1
        ended = self.row == CELLS - 1
        reward = (1.0 if abs(self.ball - self.paddle) <= 1 else -1.0) if ended else 0.0
        return self._cells(), reward, ended, False, {}

    def _cells(self) -> np.ndarray:
        cells = np.zeros((CELLS, CELLS), np.float32)
        cells[self.row, self.ball] = 1
        cells[-1, self.paddle - 1 : self.paddle + 2] = 1
        return cells


class Corridor(gym.Env):
    """From the first of ten cells, actions 0 and 1 go left and right; the last cell earns 1."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.cell = 0
        return self.cell, {}

    def step(self, action: int) -> Step:
        self.cell = max(0, self.cell + 2 * int(action) - 1)
        ended = self.cell == 9
        return self.cell, float(ended), ended, False, {}


class Memory(gym.Env):
    """The first observation is a sign, ±1, the next seven are 0; the last action has to name it."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)  # sign, whether to name it now
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.sign, self.t = 2 * int(self.np_random.integers(2)) - 1, 0
        return np.array([self.sign, 0], np.float32), {}

    def step(self, action: int) -> Step:
        self.t += 1
        ended = self.t == 8
        reward = float(self.sign * (2 * int(action) - 1)) if ended else 0.0
        return np.array([0, self.t == 7], np.float32), reward, ended, False, {}


class Fork(Corridor):
    """From cell 0, action 0 earns 1 and leads to cell 1, 0.3 a step; 1 leads to cell 2, 0.6 a step.

    It never ends. A time limit of three steps cuts it, after which 0 has earned more, 1.6 to 1.2.
    """

    observation_space = spaces.Discrete(3)

    def step(self, action: int) -> Step:
        if self.cell:
            return self.cell, 0.3 * self.cell, False, False, {}
        self.cell = 1 + int(action)
        return self.cell, 1.0 - int(action), False, False, {}


def cart_pole(factor: float, render_mode: str | None = None) -> gym.Env:
    env = gym.make("CartPole-v1", render_mode=render_mode)
    return gym.wrappers.TransformReward(env, lambda reward: factor * reward)


gym.register("CatchCells-v0", Catch)
gym.register("Corridor-v0", Corridor, max_episode_steps=50)
gym.register("Memory-v0", Memory)
gym.register("Fork-v0", Fork, max_episode_steps=3)
gym.register("CartPole0.01-v1", cart_pole, kwargs={"factor": 0.01})
gym.register("CartPole100-v1", cart_pole, kwargs={"factor": 100})
