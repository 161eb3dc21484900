"""The environment of test_async.py, in a module that actor-learners can import."""

import multiprocessing
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from torch import nn


class Walk(gym.Env):
    """Deterministic, and keeps a record of its steps.

    Args:
        ends: [length, kind] of the episodes, repeated; kind: "terminated", "truncated" or "both".
        folder: where two actor-learners take turns: one of them runs while the other one is in a
            step of its environment or about to clip a gradient.
    """

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    latest = None  # the one that was reset last
    during_step = staticmethod(lambda: None)  # what others do while a step is made

    def __init__(self, ends, continuous=False, folder=None):
        self.action_space = (
            spaces.Box(-3, 1, (2,), np.float32) if continuous else spaces.Discrete(3)
        )
        self.ends, self.folder, self.episode, self.n_turns = ends, folder, -1, 0
        self.index = int(multiprocessing.current_process().name.endswith("1"))  # actor-learner 1
        # of each step; kinds: how the episode ended with it, or ""
        self.record = SimpleNamespace(obs=[], actions=[], rewards=[], kinds=[], final_obs=[])

    def observe(self, action):
        x = 0.9 * self.index + 1.3 * self.episode + 0.4 * self.length
        obs = [2 * np.sin(x), np.cos(2 * x) + 0.3 * action, 0.1 * self.length - 1]
        self.obs = np.array(obs, np.float32)
        return self.obs

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Walk.latest, self.seed = self, seed
            if self.folder:
                self.wait()
                clip = nn.utils.clip_grad_norm_
                nn.utils.clip_grad_norm_ = lambda *x, **y: self.take_turns() or clip(*x, **y)
        self.episode += 1
        self.length = 0
        return self.observe(0.0), {}

    def step(self, action):
        self.during_step()
        if self.folder:
            self.take_turns()
        self.length += 1
        length, kind = self.ends[self.episode % len(self.ends)]
        kind = kind if self.length == length else ""
        total = float(np.sum(action))
        reward = 1.7 * np.cos(3 * total + self.length) + 0.2
        row = self.obs, np.array(action), reward, kind, self.observe(total)
        for column, x in zip(vars(self.record).values(), row, strict=True):
            column.append(x)
        return self.obs, reward, kind in ("terminated", "both"), kind in ("truncated", "both"), {}

    def take_turns(self):
        self.hand_over(1)
        self.wait()

    def hand_over(self, n):
        self.n_turns += n
        with open(Path(self.folder, str(self.index)), "ab") as file:
            file.write(b"." * n)

    def wait(self):
        """For a turn. What comes after the other one's end waits until the parent has seen it."""
        turns, seen = Path(self.folder, str(1 - self.index)), Path(self.folder, "seen")
        needed, size = self.n_turns + self.index, 0
        while size < needed or (size >= 10**6 and not seen.exists()):
            time.sleep(0.001)
            size = turns.stat().st_size if turns.exists() else 0

    def close(self):
        if self.folder and self.record.obs:
            Path(self.folder, f"walk_{self.index}").write_bytes(pickle.dumps(self.record))
            self.hand_over(10**6)  # all turns that are left


gym.register("AsyncWalk-v0", f"{__name__}:Walk")
