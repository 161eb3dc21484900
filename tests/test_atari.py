"""ALE's vector environment under our settings against Gymnasium's wrappers, and the papers' protocol."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import common.atari
from common.atari import make_atari_env, make_atari_vec_env


@pytest.fixture
def no_noops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to make a game draw their no-ops from generators of their own; without any they start alike."""
    monkeypatch.setattr(common.atari, "NOOP_MAX", 0)


@pytest.mark.usefixtures("no_noops")
@pytest.mark.parametrize(("env_id", "steps"), [("BreakoutNoFrameskip-v4", 300), ("SpaceInvadersNoFrameskip-v4", 500)])
def test_frame_by_frame_against_gymnasium(env_id: str, steps: int) -> None:
    envs, env = make_atari_vec_env(env_id, 2, 1), make_atari_env(env_id)
    obs, _ = envs.reset(seed=5)
    expected, _ = env.reset(seed=5)
    rng = np.random.default_rng(1)
    rewards, ends, compared, since_reset = [], 0, 0, 0
    for _ in range(steps):
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, truncated, info = envs.step(np.full(2, action))
        expected, expected_reward, expected_terminated, expected_truncated, _ = env.step(action)
        since_reset += 1
        assert reward[0] == expected_reward
        assert (terminated[0], truncated[0]) == (expected_terminated, expected_truncated)
        last = info["final_obs"] if terminated[0] else obs
        if since_reset >= 4:
            np.testing.assert_array_equal(last[0], expected)
            compared += 1
        if terminated[0]:
            ends, since_reset = ends + 1, 0
            expected, _ = env.reset()
        np.testing.assert_array_equal(obs[0, -1], expected[-1])
        rewards.append(expected_reward)
    envs.close()
    env.close()
    assert ends >= 1 and compared > 200
    assert max(rewards) > (1 if "SpaceInvaders" in env_id else 0)  # raw scores: an invader gives 5 to 30


@pytest.mark.parametrize("n_envs", [1, 3])
def test_later_steps_leave_observations_as_they_were(n_envs: int) -> None:
    """Rollouts keep them without a copy."""
    envs = make_atari_vec_env("PongNoFrameskip-v4", n_envs, 1)
    envs.action_space.seed(1)
    kept = [envs.reset(seed=1)[0]]
    copies = [kept[0].copy()]
    for _ in range(40):
        kept.append(envs.step(envs.action_space.sample())[0])
        copies.append(kept[-1].copy())
    envs.close()
    assert not np.array_equal(copies[-1], copies[-2])
    np.testing.assert_array_equal(np.stack(kept), np.stack(copies))


@pytest.mark.usefixtures("no_noops")
def test_the_first_stack_is_three_black_frames_and_the_screen() -> None:
    envs, env = make_atari_vec_env("PongNoFrameskip-v4", 1, 1), make_atari_env("PongNoFrameskip-v4")
    obs, expected = envs.reset(seed=0)[0], env.reset(seed=0)[0]
    np.testing.assert_array_equal(obs[0], expected)
    assert not expected[:3].any() and expected[3].any()
    envs.close()
    env.close()


def test_starts_with_0_to_30_noops() -> None:
    envs = make_atari_vec_env("PongNoFrameskip-v4", 8, 2)
    _, info = envs.reset(seed=0)
    noops = list(info["episode_frame_number"])
    for _ in range(60):  # resets without a seed go on with the generators and cost a tenth of a seeded one
        noops += list(envs.reset()[1]["episode_frame_number"])
    envs.close()
    counts = np.bincount(noops)
    assert len(counts) == 31 and (counts > 0).all()
    assert counts.max() < 4 * np.mean(counts)  # none is favoured


def recorded_options(monkeypatch: pytest.MonkeyPatch, env_id: str, env_kwargs: dict | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {}

    def record(**kwargs: Any) -> gym.vector.VectorEnv:
        options.update(kwargs)
        return gym.vector.VectorEnv()

    monkeypatch.setattr(common.atari, "AtariVectorEnv", record)
    make_atari_vec_env(env_id, 1, env_kwargs=env_kwargs)
    return options


def test_sticky_actions_are_those_of_the_registered_id(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "repeat_action_probability"
    assert recorded_options(monkeypatch, "PongNoFrameskip-v4")[key] == 0
    assert recorded_options(monkeypatch, "ALE/Pong-v5")[key] == 0.25
    assert recorded_options(monkeypatch, "ALE/Pong-v5", {key: 0.0})[key] == 0


@pytest.mark.usefixtures("no_noops")
@pytest.mark.parametrize(("env_id", "sticky"), [("PongNoFrameskip-v4", False), ("ALE/Pong-v5", True)])
def test_sticky_actions_make_seeds_differ(env_id: str, sticky: bool) -> None:
    envs = make_atari_vec_env(env_id, 3, 1)
    envs.reset(seed=0)
    rng = np.random.default_rng(0)
    differ = False
    for _ in range(60):
        obs, *_ = envs.step(np.full(3, rng.integers(6)))
        differ |= bool((obs != obs[:1]).any())
    envs.close()
    assert differ == sticky


@pytest.mark.parametrize(("env_id", "n_actions"), [("PongNoFrameskip-v4", 6), ("BreakoutNoFrameskip-v4", 4)])
def test_minimal_action_set(env_id: str, n_actions: int) -> None:
    envs, env = make_atari_vec_env(env_id, 1, 1), make_atari_env(env_id)
    assert envs.single_action_space.n == env.action_space.n == n_actions
    envs.close()
    env.close()


@pytest.mark.usefixtures("no_noops")
def test_no_fire_on_reset() -> None:
    envs = make_atari_vec_env("BreakoutNoFrameskip-v4", 1, 1)
    _, info = envs.reset(seed=0)
    assert info["frame_number"] == [0]
    noop, fire = 0, 1
    for _ in range(100):  # a ball that nobody plays is lost within 60 steps
        *_, info = envs.step(np.array([noop]))
    assert info["lives"] == [5]
    envs.step(np.array([fire]))
    for _ in range(100):
        *_, info = envs.step(np.array([noop]))
    assert info["lives"] == [4]
    envs.close()


@pytest.mark.usefixtures("no_noops")
def test_a_lost_life_does_not_end_the_episode() -> None:
    envs = make_atari_vec_env("BreakoutNoFrameskip-v4", 1, 1)
    _, info = envs.reset(seed=0)
    lives = [int(info["lives"][0])]
    fire = 1
    for _ in range(1000):
        _, _, terminated, truncated, info = envs.step(np.array([fire]))
        assert not truncated[0]
        if terminated[0]:
            break
        lives.append(int(info["lives"][0]))
    envs.close()
    assert terminated[0]
    assert sorted(set(lives)) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("no_noops")
@pytest.mark.parametrize(("max_frames", "last_step"), [(100, 25), (102, 26)])
def test_the_frame_limit_truncates(max_frames: int, last_step: int) -> None:
    env_kwargs = {"max_num_frames_per_episode": max_frames}
    envs = make_atari_vec_env("PongNoFrameskip-v4", 2, 1, env_kwargs)
    env = make_atari_env("PongNoFrameskip-v4", env_kwargs)
    first, _ = envs.reset(seed=0)
    env.reset(seed=0)
    for step in range(1, last_step + 1):
        obs, _, terminated, truncated, info = envs.step(np.zeros(2, int))
        expected, _, expected_terminated, expected_truncated, _ = env.step(0)
        assert not terminated.any() and not expected_terminated
        assert list(truncated) == [step == last_step] * 2 == [expected_truncated] * 2
        assert ("final_obs" in info) == (step == last_step)
    np.testing.assert_array_equal(info["final_obs"][0], expected)
    np.testing.assert_array_equal(obs, first)  # three black frames and the first screen again
    assert (info["final_obs"] != obs).any()
    obs, _, _, truncated, info = envs.step(np.zeros(2, int))
    assert not truncated.any() and (info["episode_frame_number"] == 4).all()
    envs.close()
    env.close()


def test_the_limit_is_half_an_hour_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id in ("PongNoFrameskip-v4", "ALE/Pong-v5"):
        assert recorded_options(monkeypatch, env_id)["max_num_frames_per_episode"] == 30 * 60 * 60
