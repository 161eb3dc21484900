"""Atari under the papers' protocol (Mnih et al. 2013, 2015, 2016; Clemente et al. 2017).

One agent step repeats its action for 4 emulator frames and sees the per-pixel maximum of the last
two, grey, 84x84, stacked with the three before it. A game starts with 0 to 30 no-ops, ends at game
over and not with a life, and is truncated after 108,000 frames, half an hour. No fire on reset,
minimal action set, raw scores. Screens are resized by area; PAAC's code takes the nearest pixel.
Its paper says 1 to 30 no-ops, which ALE cannot draw; its code has 0 to 30.
"""

from __future__ import annotations

import ale_py
import gymnasium as gym
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

FRAME_SKIP = 4
STACK = 4
SCREEN = 84
NOOP_MAX = 30
GAME_OPTIONS = {
    "game",
    "repeat_action_probability",
    "full_action_space",
    "max_num_frames_per_episode",
}

gym.register_envs(ale_py)


def is_atari(spec: EnvSpec) -> bool:
    return spec.entry_point == "ale_py.env:AtariEnv"


def game_options(spec: EnvSpec, env_kwargs: dict) -> dict:
    """What the registered id says of the game, overridden by `env_kwargs`.

    `PongNoFrameskip-v4` has no sticky actions, `ALE/Pong-v5` has, with probability 0.25.

    Raises: ValueError: the id skips a random number of frames.
    """
    if isinstance(spec.kwargs.get("frameskip"), tuple):
        game = spec.id.rsplit("-", 1)[0]
        raise ValueError(f"{spec.id} skips a random number of frames; use {game}NoFrameskip-v4")
    return {name: value for name, value in spec.kwargs.items() if name in GAME_OPTIONS} | env_kwargs


def make_atari_vec_env(
    spec: EnvSpec, n_envs: int, n_threads: int, env_kwargs: dict
) -> AtariVectorEnv:
    """`n_envs` games stepped by ALE's own C++ threads; observations (n_envs, 4, 84, 84) uint8."""
    return AtariVectorEnv(
        num_envs=n_envs,
        num_threads=n_threads,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=SCREEN,
        img_width=SCREEN,
        stack_num=STACK,
        frameskip=FRAME_SKIP,
        noop_max=NOOP_MAX + 1,  # exclusive
        use_fire_reset=False,
        episodic_life=False,
        reward_clipping=False,
        **game_options(spec, env_kwargs),
    )


def make_atari_env(spec: EnvSpec, env_kwargs: dict, render_mode: str | None = None) -> gym.Env:
    """One game from Gymnasium's wrappers: it can be rendered, and starts with 1 to 30 no-ops."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    env = gym.make(spec, frameskip=1, render_mode=render_mode, **game_options(spec, env_kwargs))
    env = gym.wrappers.AtariPreprocessing(env, NOOP_MAX, FRAME_SKIP, SCREEN)
    env = gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    env.metadata = env.metadata | {"render_fps": 60 // FRAME_SKIP}
    return env
