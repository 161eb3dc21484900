"""Catch, the smallest task from pixels in which an action earns its reward later.

    python a3c.py --env-id benchmarks.catch:Catch-v0 --total-steps 100_000 --learning-rate 0.005

A ball falls through 12 rows of 12 columns; a paddle three columns wide moves one column a step or
stays. An episode has 11 steps and earns 1 at the last one where the ball meets the paddle, else -1.
Random play earns -0.5, the best 1. Minutes where Pong takes hours. The idea is that of Mnih et al.
2014 (Recurrent Models of Visual Attention).
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CELLS, PIXELS = 12, 7  # 12 x 7 = 84


class Catch(gym.Env):
    """Observations are pictures, (84, 84) uint8; actions are left, stay and right."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (CELLS * PIXELS, CELLS * PIXELS), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.row, self.ball, self.paddle = 0, 0, CELLS // 2  # the paddle's middle

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(CELLS)), CELLS // 2
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = min(max(self.paddle + int(action) - 1, 1), CELLS - 2)
        self.row += 1
        ended = self.row == CELLS - 1
        reward = (1.0 if abs(self.ball - self.paddle) <= 1 else -1.0) if ended else 0.0
        return self._picture(), reward, ended, False, {}

    def render(self) -> np.ndarray:
        return np.repeat(self._picture()[..., None], 3, axis=2)

    def _picture(self) -> np.ndarray:
        cells = np.zeros((CELLS, CELLS), np.uint8)
        cells[self.row, self.ball] = 255
        cells[-1, self.paddle - 1 : self.paddle + 2] = 255
        return cells.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


gym.register("Catch-v0", f"{__name__}:Catch")
