"""What a policy earns, and what it looks like."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from PIL import Image
from torch import Tensor

from common.atari import is_atari
from common.envs import close_env, find_spec, make_env
from common.processes import n_cores
from common.vec_env import env_seed, make_vec_env

MAX_EPISODE_STEPS = 27_000  # where an evaluated episode is cut if nothing else ends it: half an hour of Atari
MAX_FRAMES = 3000  # of a GIF

Policy = Callable[[np.ndarray], np.ndarray]  # observations (n, ...) → actions as the environments take them


def to_env(actions: Tensor, space: gym.Space) -> np.ndarray:
    """Sampled actions as the environment takes them: a Gaussian's [-1, 1] is stretched to the bounds of the space."""
    actions = actions.cpu().numpy()
    if isinstance(space, spaces.Discrete):
        return actions
    actions = actions.reshape(-1, *space.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = np.isfinite((high - low).astype(np.float32))  # the largest float as a bound means that there is none
        stretched = low + (actions.clip(-1, 1) + 1) / 2 * (high - low)
        actions = np.where(bounded, stretched, actions)
        inside = (np.rint(actions) if np.issubdtype(space.dtype, np.integer) else actions).astype(space.dtype)
    return np.where(actions <= low, space.low, np.where(actions >= high, space.high, inside))


def evaluate(args: Any, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """Play `eval_episodes` episodes in parallel, one per environment; statistics of their raw returns.

    Starts are seeded apart from those of training. None when stopped.
    """
    n, n_workers = args.eval_episodes, getattr(args, "n_workers", min(8, n_cores()))
    with contextlib.closing(make_vec_env(args.env_id, n, min(n_workers, n), json.loads(args.env_kwargs))) as envs:
        obs, returns, running = envs.reset(seed=env_seed(args.seed, 0, 1))[0], np.zeros(n), np.ones(n, np.bool_)
        for _ in range(MAX_EPISODE_STEPS):
            obs, reward, terminated, truncated, _ = envs.step(policy(obs))
            returns += reward * running
            running &= ~(terminated | truncated)
            if stopped():
                return None
            if not running.any():
                break
    return {"episodes": n} | {name: float(getattr(returns, name)()) for name in ("mean", "std", "min", "max")}


def record(args: Any, policy: Policy, stopped: Callable[[], bool] = lambda: False) -> None:
    """Play one episode and write it as agent.gif into the run directory, its first MAX_FRAMES steps at most."""
    env = make_env(find_spec(args.env_id), json.loads(args.env_kwargs), "rgb_array")
    follow_agent(env)
    with contextlib.ExitStack() as stack:
        stack.callback(close_env, env)
        obs, done, frames, score = env.reset(seed=env_seed(args.seed, 0, 2))[0], False, [], 0.0
        while not done and len(frames) < MAX_FRAMES:
            frames.append(Image.fromarray(env.render()))
            (action,) = policy(np.asarray(obs, env.observation_space.dtype)[None])
            obs, reward, terminated, truncated, _ = env.step(action)
            score, done = score + float(reward), terminated or truncated
            if stopped():
                return
    fps = 15 if is_atari(env.spec) else env.metadata.get("render_fps", 30)  # an Atari step is 4 frames of 60 a second
    path = Path(args.run_dir) / "agent.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
    print(f"{path}: {len(frames)} steps, return {score:.2f}", flush=True)


def follow_agent(env: gym.Env) -> None:
    """Draw by the camera `track` of a MuJoCo model: the one that Gymnasium takes, where none is named, stands still."""
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer and renderer.camera_id == -1:  # none named; and -1 again where the model has no `track`
        import mujoco

        renderer.camera_id = mujoco.mj_name2id(env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
