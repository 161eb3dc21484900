"""One environment of any Gymnasium id, with the observations and actions that trainers take."""

from __future__ import annotations

import importlib
import traceback

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from common.atari import SCREEN, STACK, is_atari, make_atari_env


def find_spec(env_id: str) -> EnvSpec:
    """The registered environment of an id; `module:Id` imports the module first, which registers it.

    Raises:
        gymnasium.error.Error: no such id, with the nearest one. ImportError: no such module.
    """
    if ":" in env_id:
        module, env_id = env_id.split(":", 1)
        importlib.import_module(module)
    return gym.spec(env_id)


def make_env(spec: EnvSpec, env_kwargs: dict | None = None, render_mode: str | None = None) -> gym.Env:
    """One environment as trainers want it: observations are float32 vectors or (4, 84, 84) uint8
    images, actions are Discrete from 0 or Box.

    Discrete observations become one-hot vectors, a Dict of one Box becomes that Box, images are greyed, resized
    and stacked, other arrays are flattened. Atari games: see `common.atari`.

    Raises:
        ValueError: an observation or action space of another kind.
    """
    if is_atari(spec):
        return make_atari_env(spec.id, env_kwargs, render_mode)
    options = {"render_mode": render_mode} if render_mode else {}
    try:
        env = gym.make(spec, disable_env_checker=True, **options, **(env_kwargs or {}))
    except TypeError as error:
        if not (options or env_kwargs):
            raise
        raise ValueError(f"{spec.id} does not take {options | (env_kwargs or {})}: {error}") from error
    try:
        return _adapt(env)
    except ValueError:
        env.close()
        raise


def close_env(env: gym.Env) -> None:
    """Close it; where that fails, tell of it and no more: what was done with it is done."""
    try:
        env.close()
    except Exception:
        traceback.print_exc()


def _adapt(env: gym.Env) -> gym.Env:
    """The wrappers of `make_env`. Raises ValueError where none would do."""
    space = env.observation_space
    if isinstance(space, spaces.Dict) and [type(part) for part in space.values()] == [spaces.Box]:
        (key,) = space
        space = space[key]
        env = gym.wrappers.TransformObservation(env, lambda obs: obs[key], space)
    if is_image(space):
        if space.shape[2:] == (3,):
            env = gym.wrappers.GrayscaleObservation(env)
        else:
            env = gym.wrappers.ReshapeObservation(env, space.shape[:2])
        env = gym.wrappers.ResizeObservation(env, (SCREEN, SCREEN))
        env = gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    elif isinstance(space, spaces.Box | spaces.Discrete):
        if isinstance(space, spaces.Discrete) or len(space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        if env.observation_space.dtype != np.float32:
            float32 = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)
            env = gym.wrappers.TransformObservation(env, np.float32, float32)
    else:
        raise ValueError(
            f"{env.spec.id} has the observation space {space}; Box, Discrete or a Dict of one Box is needed"
        )
    actions = env.action_space
    if not isinstance(actions, spaces.Discrete | spaces.Box):
        raise ValueError(f"{env.spec.id} has the action space {actions}; Discrete or Box is needed")
    if isinstance(actions, spaces.Box) and 0 in actions.shape:
        raise ValueError(f"{env.spec.id} has the action space {actions}, which is empty")
    if isinstance(actions, spaces.Discrete) and actions.start != 0:
        start = actions.start
        env = gym.wrappers.TransformAction(env, lambda action: action + start, spaces.Discrete(actions.n))
    return env


def is_image(space: gym.Space) -> bool:
    """Whether observations are pictures: uint8, height x width with 1 or 3 colours or none."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and (len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in (1, 3)))
    )
