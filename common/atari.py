"""Atari environments under the papers' protocol (Mnih et al. 2013, 2015, 2016; Clemente et al. 2017).

One agent step repeats its action for 4 emulator frames; the observation is the per-pixel maximum of the last
two, grey, 84x84, stacked with the three before it. A game starts with 0 to 30 no-op frames and ends at game
over; 108,000 frames (half an hour) truncate it. No fire on reset, the minimal action set, raw scores as rewards.

Two ways to get one: `make_atari_vec_env` steps many games in ALE's own C++ threads and is what trainers use;
`make_atari_env` builds a single game from Gymnasium's wrappers, for recording pictures and for the test that
holds the first way against the second.

ALE draws the number of no-ops below `noop_max`, so 31 gives 0 to 30. That is the range of PAAC's released code;
the paper says 1 to 30, which ALE cannot draw.
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

# What may differ from id to id and from --env-kwargs; everything else is fixed by the protocol.
_GAME_OPTIONS = {"game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"}

gym.register_envs(ale_py)


def is_atari(spec: EnvSpec) -> bool:
    """Whether a registered environment is an Atari game of the Arcade Learning Environment."""
    return spec.entry_point == "ale_py.env:AtariEnv"


def _game_options(spec: EnvSpec, env_kwargs: dict | None) -> dict:
    """The options of the registered id, overridden by `env_kwargs`.

    `PongNoFrameskip-v4` has no sticky actions, `ALE/Pong-v5` repeats the last action with probability 0.25.

    Raises:
        ValueError: the id draws a random frame skip, or an option has no place in the protocol.
    """
    if isinstance(spec.kwargs.get("frameskip"), tuple):
        game = spec.id.rsplit("-", 1)[0]
        raise ValueError(f"{spec.id} repeats an action for a random number of frames; use {game}NoFrameskip-v4")
    unknown = set(env_kwargs or {}) - _GAME_OPTIONS
    if unknown:
        raise ValueError(
            f"{spec.id} takes no {', '.join(sorted(unknown))}; it takes {', '.join(sorted(_GAME_OPTIONS))}"
        )
    return {key: value for key, value in (spec.kwargs | (env_kwargs or {})).items() if key in _GAME_OPTIONS}


def make_atari_vec_env(env_id: str, n_envs: int, n_threads: int = 0, env_kwargs: dict | None = None) -> AtariVectorEnv:
    """`n_envs` games stepped by `n_threads` C++ threads (0: one per core), reset in the step that ends them.

    Observations are (n_envs, 4, 84, 84) uint8, rewards (n_envs,) int32 raw scores. `reset(seed=s)` seeds game i
    with s + i: its no-ops, and its sticky actions where the id has them.

    Raises:
        gymnasium.error.Error: no such id. ValueError: see `_game_options`.
    """
    spec = gym.spec(env_id)
    envs = AtariVectorEnv(
        num_envs=n_envs,
        num_threads=n_threads,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=SCREEN,
        img_width=SCREEN,
        stack_num=STACK,
        frameskip=FRAME_SKIP,
        noop_max=NOOP_MAX + 1,
        use_fire_reset=False,
        episodic_life=False,
        reward_clipping=False,
        **_game_options(spec, env_kwargs),
    )
    envs.spec = spec
    return envs


def make_atari_env(env_id: str, env_kwargs: dict | None = None, render_mode: str | None = None) -> gym.Env:
    """One game with the same observations, from Gymnasium's wrappers; `render()` gives the screen in colour.

    Its no-ops are 1 to 30, and its first stack is three black frames and the screen, as ALE's is.

    Raises:
        gymnasium.error.Error: no such id. ValueError: see `_game_options`.
    """
    spec = gym.spec(env_id)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # or ALE prints its banner
    env = gym.make(env_id, frameskip=1, render_mode=render_mode, **_game_options(spec, env_kwargs))
    env = gym.wrappers.AtariPreprocessing(env, NOOP_MAX, FRAME_SKIP, SCREEN)
    return gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
