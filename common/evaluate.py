"""What a policy earns, and what it looks like."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.processes import n_cores, on_signals
from common.run import write_json
from common.vec_env import env_actions, env_seed, make_env, make_vec_env

MAX_EPISODE_STEPS = 27_000  # where an evaluated episode is cut at the latest: half an hour of Atari
MAX_FRAMES = 3000  # of a GIF
GIF_SIZE = 512  # longest side of a GIF, in pixels

Policy = Callable[[np.ndarray], np.ndarray]  # observations (n, ...) → actions (n, ...)


def evaluate(args: Any, policy: Policy) -> None:
    """Play `eval_episodes` episodes and put statistics of their raw returns into summary.json.

    With --record one more episode is written as agent.gif.
    """
    with on_signals(lambda number: sys.exit(128 + number)):
        if args.eval_episodes:
            returns = play(args, policy, args.eval_episodes)
            save_returns(Path(args.run_dir), returns)
        if args.record:
            record(args, policy)


def play(args: Any, policy: Policy, n: int) -> np.ndarray:
    """The returns of n episodes, played in parallel, with starts apart from those of training."""
    returns, running = np.zeros(n), np.ones(n, np.bool_)
    envs = make_vec_env(args.env_id, n, min(n, n_cores()), args.env_kwargs)
    with contextlib.closing(envs):
        obs, _ = envs.reset(seed=env_seed(args.seed, 0, 1))
        for _ in range(MAX_EPISODE_STEPS):
            obs, reward, terminated, truncated, _ = envs.step(policy(obs))
            returns += reward * running
            running &= ~(terminated | truncated)
            if not running.any():
                break
    return returns


def save_returns(run_dir: Path, returns: np.ndarray) -> None:
    from torch.utils.tensorboard import SummaryWriter

    result = {name: float(getattr(returns, name)()) for name in ("mean", "std", "min", "max")}
    n = len(returns)
    line = "return of {} episodes: {mean:.2f} ± {std:.2f}, {min:.2f} to {max:.2f}"
    print(line.format(n, **result))
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, summary | {"eval": {"episodes": n} | result})
    with SummaryWriter(run_dir) as writer:
        writer.add_scalar("eval/return_mean", result["mean"], summary.get("steps"))


def record(args: Any, policy: Policy) -> None:
    """Play one episode, its first MAX_FRAMES frames at most, and write agent.gif at real speed.

    Viewers show no frame for less than 20 ms, so some frames of faster environments are left out.
    """
    env = make_env(args.env_id, json.loads(args.env_kwargs), "rgb_array")
    with contextlib.closing(env):
        milliseconds = 1000 / (env.metadata.get("render_fps") or 30)
        every = math.ceil(20 / milliseconds)
        shown = 10 * np.round(np.arange(MAX_FRAMES + 1) * every * milliseconds / 10)  # GIF's unit
        frames = render(env, policy, env_seed(args.seed, 0, 2), every)
        path = Path(args.run_dir) / "agent.gif"
        next(frames).save(
            path,
            save_all=True,
            append_images=frames,
            duration=np.diff(shown).astype(int).tolist(),
            loop=0,
        )
    print(f"wrote {path}")


def render(env: Any, policy: Policy, seed: int, every: int) -> Iterator[Image.Image]:
    """The picture of each `every`-th step of one episode."""
    obs, _ = env.reset(seed=seed)
    dtype = env.observation_space.dtype  # which the environment may not keep to
    for step in range(every * MAX_FRAMES):
        if step % every == 0:
            frame = Image.fromarray(env.render())
            frame.thumbnail((GIF_SIZE, GIF_SIZE))
            yield frame
        (action,) = env_actions(policy(np.asarray(obs, dtype)[None]), env.action_space)
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
