"""ALE's vector environment under our settings against Gymnasium's wrappers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import common.atari
from common.vec_env import make_env, make_vec_env

GAMES = [("Breakout", 4, 300, None), ("SpaceInvaders", 6, 500, None), ("Pong", 6, 60, 102)]


@pytest.fixture
def no_noops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two draw their no-ops from different generators; without any they start alike."""
    monkeypatch.setattr(common.atari, "NOOP_MAX", 0)


@pytest.mark.parametrize(("game", "n_actions", "steps", "max_frames"), GAMES)
def test_frame_by_frame(no_noops: Any, game: str, n_actions: int, steps: int, max_frames: Any):
    """Observations, last observations, raw rewards and ends, across episodes of both ends."""
    limit = {"max_num_frames_per_episode": max_frames} if max_frames else {}
    env_id = f"{game}NoFrameskip-v4"
    envs, env = make_vec_env(env_id, 2, 1, json.dumps(limit)), make_env(env_id, limit)
    assert envs.single_observation_space == env.observation_space
    assert envs.single_action_space.n == env.action_space.n == n_actions
    got, want = [envs.reset(seed=5)[0]], [env.reset(seed=5)[0]]
    rng, ends, rewards = np.random.default_rng(1), [], []
    for step in range(1, steps + 1):
        action = int(rng.integers(n_actions))
        obs, reward, terminated, truncated, info = envs.step(np.full(2, action))
        expected, *numbers, _ = env.step(action)
        assert [reward[0], terminated[0], truncated[0]] == numbers
        rewards.append(reward[0])
        assert ("final_obs" in info) == any(numbers[1:])
        if any(numbers[1:]):
            ends.append((step, terminated[0]))
            np.testing.assert_array_equal(info["final_obs"][0], expected)
            expected, _ = env.reset()
        got.append(obs)
        want.append(expected)
    envs.close()
    # Compared in the end: later steps must leave observations as they were, rollouts keep them.
    np.testing.assert_array_equal(np.stack(got), np.stack([want, want], 1))
    if max_frames:
        assert ends == [(26, False), (52, False)]  # ceil(102 / 4) = 26
    else:
        assert ends and all(terminated for _, terminated in ends)
        assert max(rewards) > (1 if game == "SpaceInvaders" else 0)  # an invader gives 5 to 30


def test_0_to_30_noops_equally_often() -> None:
    envs = make_vec_env("PongNoFrameskip-v4", 8, 2)
    numbers = [envs.reset(seed=0)[1]["episode_frame_number"]]
    numbers += [envs.reset()[1]["episode_frame_number"] for _ in range(60)]
    envs.close()
    counts = np.bincount(np.concatenate(numbers))
    assert len(counts) == 31 and (counts > 0).all() and counts.max() < 4 * counts.mean()


@pytest.mark.parametrize(("env_id", "sticky"), [("PongNoFrameskip-v4", 0), ("ALE/Pong-v5", 1)])
def test_sticky_actions_as_the_id_says(no_noops: Any, env_id: str, sticky: int) -> None:
    """With them games of different seeds differ under the same actions."""
    envs = make_vec_env(env_id, 3, 1)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(6, size=60)
    obs = np.stack([envs.step(np.full(3, action))[0] for action in actions])
    envs.close()
    assert (obs != obs[:, :1]).any() == sticky
