"""Rewards and observations of any size."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import apex
from common.norm import RewardScale, RunningNorm, make_norm
from common.vec_env import env_spaces


def reward_scale(gamma, rewards="scale", env_id="", size=1.0):
    return RewardScale(SimpleNamespace(rewards=rewards, gamma=gamma, env_id=env_id), size)


def test_reward_scale_by_hand():
    """G is 1 + 2/2, 2 and, in a new episode, 4; in the other environment -1 - 1/2, -2 - 1, -2."""
    scale = reward_scale(0.5)
    for rewards, terminated in (([1, 0], [0, 0]), ([2, -2], [1, 0]), ([4, -2], [0, 0])):
        scale.see(np.array(rewards, float), np.array(terminated, bool))
    assert scale.sigma == 1  # until they are added
    assert scale.update().tolist() == [6, 4 + 4 + 16 + 2.25 + 9 + 4]
    sigma = math.sqrt(39.25 / 6)
    assert scale.sigma == pytest.approx(sigma)
    assert scale(torch.tensor([3.0, 99.0])).tolist() == pytest.approx([3 / sigma, 10])
    scale.add(np.array([2, 4.0]))  # of another process
    assert scale.sigma == pytest.approx(math.sqrt(43.25 / 8))
    for rewards, learned in (("clip", [0.5, -1]), ("raw", [0.5, -700]), ("scale", [0.1, -50])):
        other = reward_scale(0.5, rewards, size=5.0)
        other.add(np.array([4, 2500.0]))  # σ = 25 / 5
        assert other(np.array([0.5, -700.0])).tolist() == learned
    for env_id, how in (("ALE/Pong-v5", "clip"), ("CartPole-v1", "scale")):
        assert reward_scale(0.5, "auto", env_id).how == how


def test_zero_and_what_is_not_finite():
    scale = reward_scale(0.9)
    scale.see(np.zeros(2), np.zeros(2, bool))
    scale.update()
    assert scale(np.zeros(2)).tolist() == [0, 0]
    scale.see(np.array([1, math.nan]), np.zeros(2, bool))
    with pytest.raises(FloatingPointError):
        scale.update()
    assert scale.sums.tolist() == [2, 0]
    norm = RunningNorm(spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(FloatingPointError):
        norm.update(torch.tensor([[1, math.inf]]))
    assert not norm.sums.any() and norm.mean.isfinite().all()


def test_what_a_process_overwrites_costs_little():
    """Observations of 300 ± 1, and one update in ten is lost in one of the sums."""
    norm, rng = RunningNorm(spaces.Box(-np.inf, np.inf, (1,))), np.random.default_rng(0)
    for i in range(1000):
        before = norm.sums[i % 3].clone()
        norm.update(torch.from_numpy(rng.normal(300, 1, size=(5, 1))))
        if i % 10 == 0:
            norm.sums[i % 3] = before
    assert abs(norm.mean.item() - 300) < 0.2
    assert abs(norm.std.item() - 1) < 0.2


@pytest.mark.parametrize("task", ["FrozenLake-v1", "CartPole-v1", "benchmarks.tasks:CatchCells-v0"])
def test_observations_within_one_stay_as_they_are_or_get_one_scale(task):
    observations, normalised = env_spaces(task)[0], task == "CartPole-v1"
    assert (make_norm(observations) is not None) == normalised
    assert bool(apex.QNetwork(observations, spaces.Discrete(2)).norm) == normalised
    norm, one_hot = RunningNorm(observations), torch.eye(observations.shape[0])
    norm.update(one_hot[[0, 1, 1]])  # mean 1/3 and 2/3, deviation √(2/9); or √size long, or 10
    expected = [-(0.5**0.5), 0.5**0.5, 0] if normalised else [0, min(10, len(one_hot) ** 0.5), 0]
    assert norm(one_hot[1]).tolist()[:3] == pytest.approx(expected)
