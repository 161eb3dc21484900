"""Small environments for the tests that run a trainer; ids `tests.simulators:Run-Name-v0`."""

import multiprocessing
import os
import subprocess
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Plain(gym.Env):
    """Episodes of five steps, 3 for each step: every return is 15.

    Args:
        size: of the observations.
        pace: seconds that a step takes.
        log: a file that becomes one byte longer with each step.
        nan_at: the step whose reward is NaN.
        folder: becomes the working directory, as simulators that run in their own one do.
    """

    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, size=3, pace=0.0, log=None, nan_at=0, folder=".", render_mode=None):
        self.observation_space = spaces.Box(-2, 2, (size,), np.float32)
        self.pace, self.log, self.nan_at, self.render_mode = pace, log, nan_at, render_mode
        self.n_steps = 0
        os.chdir(folder)

    def observation(self):
        return self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        time.sleep(self.pace)
        self.t += 1
        self.n_steps += 1
        if self.log:
            with open(self.log, "ab") as file:
                file.write(b".")
        reward = float("nan") if self.n_steps == self.nan_at else 3.0
        return self.observation(), reward, self.t == 5, False, {}

    def render(self):
        return np.full((20, 30, 3), 40 * self.t, np.uint8)


def echo(connection):
    while True:
        connection.send(connection.recv())


class Simulator(Plain):
    """Has a process of its own, which it asks in each step, and a program, and closes both.

    Args: slow: seconds that this takes.
    """

    def __init__(self, slow=0.0, **kwargs):
        super().__init__(**kwargs)
        self.slow = slow
        context = multiprocessing.get_context("fork")  # it inherits handlers, pipes and memory
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=echo, args=(theirs,), daemon=True)
        self.process.start()
        self.program = subprocess.Popen(["sleep", "600"])

    def step(self, action):
        self.connection.send("a step")
        self.connection.recv()
        return super().step(action)

    def close(self):
        time.sleep(self.slow)
        self.process.terminate()
        self.process.join()
        self.program.terminate()
        self.program.wait()


class Corridor(gym.Env):
    """Six cells. The second is the start; 0.2 at the left end, 1 at the right end, 4 steps away."""

    observation_space = spaces.Box(0, 1, (6,), np.float32)
    action_space = spaces.Discrete(2)

    def observation(self):
        return np.eye(6, dtype=np.float32)[self.cell]

    def reset(self, *, seed=None, options=None):
        self.cell = 1
        return self.observation(), {}

    def step(self, action):
        self.cell += 1 if action == 1 else -1
        reward = {0: 0.2, 5: 1.0}.get(self.cell, 0.0)
        return self.observation(), reward, reward > 0, False, {}


for env in (Plain, Simulator, Corridor):
    gym.register(f"Run-{env.__name__}-v0", env)
