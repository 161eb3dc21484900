"""Batch PPO's mathematics against numbers worked out by hand and against slow versions written from the papers."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

import ppo_batch
from tests import paac_envs
from tests.helpers import check_bfloat16
from tests.test_paac_math import IMAGE, VECTOR, forward_sum, random_obs

KINDS = ("", "terminated", "truncated")


# ------------------------------------------------------------------------------------------------- advantages


def slow_gae(
    rewards: np.ndarray, ends: list[str], values: np.ndarray, next_values: np.ndarray, gamma: float, gae_lambda: float
) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} for one environment, each t from scratch; next_values: V of what follows each step."""
    advantages = []
    for t in range(len(rewards)):
        last = next((k for k in range(t, len(ends)) if ends[k]), len(ends) - 1)
        deltas = [rewards[k] + gamma * next_values[k] - values[k] for k in range(t, last + 1)]
        advantages.append(sum((gamma * gae_lambda) ** exponent * delta for exponent, delta in enumerate(deltas)))
    return advantages


def random_rollouts(
    ends: list[tuple[str, ...]], seed: int, gamma: float, gae_lambda: float
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """gae of random numbers in environments with these ends, one tuple each, and the numbers that it was given."""
    rng = np.random.default_rng(seed)
    kinds = np.array(ends).T
    x = {"rewards": rng.normal(size=kinds.shape), "dones": kinds != "", "values": rng.normal(size=kinds.shape) * 5}
    x["final_values"] = np.where(kinds == "truncated", rng.normal(size=kinds.shape) * 5, 0)
    x["bootstrap"] = rng.normal(size=len(ends)) * 5
    result = ppo_batch.gae(*map(torch.from_numpy, x.values()), gamma, gae_lambda)
    assert result.shape == kinds.shape and result.dtype == torch.float64
    return result, x


def check_gae(ends: list[tuple[str, ...]], gamma: float, gae_lambda: float, seed: int) -> None:
    """gae of random numbers against `slow_gae`."""
    result, x = random_rollouts(ends, seed, gamma, gae_lambda)
    for e, kinds in enumerate(ends):
        following = {"": [*x["values"][1:, e], x["bootstrap"][e]], "truncated": x["final_values"][:, e]}
        next_values = np.array([0.0 if kind == "terminated" else following[kind][t] for t, kind in enumerate(kinds)])
        expected = slow_gae(x["rewards"][:, e], list(kinds), x["values"][:, e], next_values, gamma, gae_lambda)
        np.testing.assert_allclose(result[:, e].numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("t_max", [1, 2, 3, 4])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.0, 0.9), (0.9, 0.0)])
def test_gae_with_ends_at_every_position(t_max: int, gamma: float, gae_lambda: float) -> None:
    check_gae(list(itertools.product(KINDS, repeat=t_max)), gamma, gae_lambda, seed=t_max)


@pytest.mark.parametrize("seed", range(5))
def test_gae_of_random_rollouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(KINDS, p=[0.7, 0.15, 0.15], size=(7, 6 * seed + 5))
    check_gae([tuple(row) for row in kinds], gamma=0.97, gae_lambda=0.8, seed=seed)


def test_gae_by_hand() -> None:
    rewards, values = (torch.tensor([[x] * 3 for x in column]) for column in ([1.0, 2.0, 3.0], [4.0, 2.0, 8.0]))
    dones = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    final_values = torch.tensor([[0.0] * 3, [0.0, 0.0, 4.0], [0.0] * 3])  # the third is truncated with V = 4
    # δ, the last first: 3 + 8/2 - 8 = -1; 2 + 8/2 - 2 = 4, or 2 - 2 = 0, or 2 + 4/2 - 2 = 2; 1 + 2/2 - 4 = -2
    result = ppo_batch.gae(rewards, dones, values, final_values, torch.full((3,), 8.0), gamma=0.5, gae_lambda=0.5)
    assert result.tolist() == [[-2 + 3.75 / 4, -2.0, -1.5], [3.75, 0.0, 2.0], [-1.0, -1.0, -1.0]]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_with_lambda_1_is_the_return_less_the_value(gamma: float) -> None:
    ends = list(itertools.product(KINDS, repeat=3))
    result, x = random_rollouts(ends, 0, gamma, 1.0)
    for e, kinds in enumerate(ends):
        final_values, bootstrap = x["final_values"][:, e], x["bootstrap"][e]
        returns = forward_sum(x["rewards"][:, e], list(kinds), final_values, bootstrap, gamma)
        np.testing.assert_allclose(result[:, e].numpy(), returns - x["values"][:, e], rtol=1e-12, atol=1e-12)


def test_gae_with_lambda_0_looks_one_step_ahead() -> None:
    result, x = random_rollouts([("", "terminated", "truncated", "")], 1, 0.9, 0.0)
    (r, v, final), after = (x[key][:, 0] for key in ("rewards", "values", "final_values")), x["bootstrap"][0]
    expected = [r[0] + 0.9 * v[1] - v[0], r[1] - v[1], r[2] + 0.9 * final[2] - v[2], r[3] + 0.9 * after - v[3]]
    np.testing.assert_allclose(result[:, 0].numpy(), expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------- loss


# ρ, A, then min(ρA, clip(ρ, 0.8, 1.2) A) and its derivative to log ρ, which is 0 where the clip is what counts.
REGIONS = {
    "above, good": (1.5, 2.0, 2.4, 0.0),
    "above, bad": (1.5, -2.0, -3.0, -3.0),
    "below, good": (0.5, 2.0, 1.0, 1.0),
    "below, bad": (0.5, -2.0, -1.6, 0.0),
    "inside, good": (1.1, 2.0, 2.2, 2.2),
    "inside, bad": (0.9, -2.0, -1.8, -1.8),
    "at the start": (1.0, 2.0, 2.0, 2.0),
}


def loss_of(ratios: Any, advantages: Any, errors: Any, entropies: Any, **constants: float) -> tuple[list, list]:
    """ppo_loss with ε = 0.2 in double precision: its three parts, and its gradient to log ρ, errors and entropies."""
    log_ratios = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    errors, entropies = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (errors, entropies))
    advantages = torch.tensor(advantages, dtype=torch.float64)
    coefs = {"entropy_coef": 0.01, "value_coef": 1.0} | constants
    parts = ppo_batch.ppo_loss(log_ratios, advantages, errors, entropies, 0.2, **coefs)
    gradient = torch.autograd.grad(parts[0], (log_ratios, errors, entropies))
    return [part.item() for part in parts], [g.tolist() for g in gradient]


@pytest.mark.parametrize("region", REGIONS)
def test_loss_in_each_region_of_the_clip(region: str) -> None:
    ratio, advantage, surrogate, slope = REGIONS[region]
    (total, policy, value), (to_ratio, to_error, _) = loss_of([ratio], [advantage], [0.0], [0.0])
    assert (total, policy) == (pytest.approx(-surrogate, abs=1e-12), pytest.approx(-surrogate, abs=1e-12))
    assert (value, to_error) == (0, [0])
    assert to_ratio == [pytest.approx(-slope, abs=1e-12)]


def test_loss_of_a_minibatch_is_a_mean() -> None:
    ratios, advantages, surrogates, slopes = zip(*REGIONS.values(), strict=True)
    errors, entropies = [1.0, -2.0, 3.0, 0.0, 0.5, -0.5, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    parts, gradient = loss_of(ratios, advantages, errors, entropies, entropy_coef=0.5, value_coef=3.0)
    policy = -sum(surrogates) / 7 - 0.5 * 4
    value = 3 * (1 + 4 + 9 + 0.25 + 0.25) / 7
    assert parts == pytest.approx([policy + value, policy, value])
    assert gradient[0] == pytest.approx([-slope / 7 for slope in slopes], abs=1e-12)
    assert gradient[1] == pytest.approx([3 * 2 * error / 7 for error in errors])
    assert gradient[2] == pytest.approx([-0.5 / 7] * 7)  # the loss falls as the entropy rises


def test_value_loss_is_a_plain_mean_square() -> None:
    """Weight 1, no half and no clipping; the gradient to V is 2 (V - target) / n."""
    values, targets = np.array([1.0, 2.0, -3.0, 40.0]), np.array([2.0, 0.0, -3.0, 0.0])
    parts, gradient = loss_of([1.0] * 4, [0.0] * 4, targets - values, [0.0] * 4)
    assert parts[2] == pytest.approx((1 + 4 + 0 + 1600) / 4)
    assert [-g for g in gradient[1]] == pytest.approx([2 * -1 / 4, 2 * 2 / 4, 0, 2 * 40 / 4])


def test_gaussians_one_entropy_counts_in_full() -> None:
    parts, gradient = loss_of([1.0] * 5, [0.0] * 5, [0.0] * 5, 1.7, entropy_coef=0.01)
    assert parts[1] == pytest.approx(-0.017) and gradient[2] == pytest.approx(-0.01)


def test_gradient_of_the_loss_at_random() -> None:
    rng = np.random.default_rng(0)
    ratios, advantages, errors = np.exp(rng.normal(size=200) * 0.4), rng.normal(size=200), rng.normal(size=200)
    _, gradient = loss_of(ratios, advantages, errors, np.zeros(200))
    clipped = ((ratios > 1.2) & (advantages > 0)) | ((ratios < 0.8) & (advantages < 0))
    assert 40 < clipped.sum() < 160
    np.testing.assert_allclose(gradient[0], np.where(clipped, 0, -ratios * advantages) / 200, atol=1e-12)
    np.testing.assert_allclose(gradient[1], 2 * errors / 200, atol=1e-12)


# ------------------------------------------------------------------------------------------------ minibatches


@pytest.mark.parametrize(
    ("n", "size", "epochs", "rows"),
    [(8, 4, 2, 4), (10, 4, 3, 8), (7, 7, 3, 3), (7, 3, 5, 12), (1, 1, 3, 3), (6, 5, 1, 2), (5, 4, 4, 5), (4, 1, 1, 4)],
)
def test_every_epoch_visits_each_sample_once(n: int, size: int, epochs: int, rows: int) -> None:
    torch.manual_seed(0)
    result = ppo_batch.minibatches(n, size, epochs, torch.device("cpu"))
    assert (result.shape, result.dtype) == ((rows, size), torch.int64)
    order = result.flatten().tolist()
    for epoch in range(epochs):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    surplus = order[epochs * n :]
    assert len(set(surplus)) == len(surplus) < size and set(surplus) <= set(range(n))


def test_order_of_the_samples_is_random() -> None:
    torch.manual_seed(0)
    draws = torch.stack([ppo_batch.minibatches(4, 3, 2, torch.device("cpu")).flatten() for _ in range(6000)])
    for position in range(9):  # the last one is of a third pass
        counts = torch.bincount(draws[:, position], minlength=4)
        assert counts.sum() == 6000 and (counts - 1500).abs().max() < 170  # 5 standard deviations
    again = (draws[:, :4] == draws[:, 4:8]).all(1).float().mean().item()
    assert again == pytest.approx(1 / 24, abs=0.015)  # every epoch has an order of its own


# ---------------------------------------------------------------------------------------------------- network


def actor_critic(arch: str, actions: int | gym.Space = 4, seed: int = 0) -> ppo_batch.ActorCritic:
    torch.manual_seed(seed)
    actions = spaces.Discrete(actions) if isinstance(actions, int) else actions
    return ppo_batch.ActorCritic(VECTOR if arch == "mlp" else IMAGE, actions, arch)


def gaussian(size: int) -> ppo_batch.ActorCritic:
    return actor_critic("mlp", spaces.Box(-1, 1, (size,), np.float32))


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def linear_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


@pytest.mark.parametrize(("n_actions", "count"), [(4, 1_686_693), (6, 1_687_719), (9, 1_689_258), (18, 1_693_875)])
def test_parameter_counts_of_nature(n_actions: int, count: int) -> None:
    assert n_parameters(actor_critic("nature", n_actions)) == count


def test_parameter_counts_of_two_networks_for_vectors() -> None:
    """64-64 each: d·64 + 64, 64·64 + 64 and 64·n + n; a Gaussian has a width for each dimension besides."""
    assert n_parameters(actor_critic("mlp", 4)) == (256 + 4160 + 260) + (256 + 4160 + 65)
    assert n_parameters(gaussian(2)) == (256 + 4160 + 130) + (256 + 4160 + 65) + 2
    half_cheetah = spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
    assert n_parameters(ppo_batch.ActorCritic(*half_cheetah, "mlp")) == (1152 + 4160 + 390) + (1152 + 4160 + 65) + 6
    matrix = actor_critic("mlp", spaces.Box(-1, 1, (2, 3), np.float32))
    assert matrix.log_std.shape == (6,) and matrix(torch.zeros(5, 3))[0].shape == (5, 6)


def test_initial_weights_for_images_are_normal() -> None:
    model = actor_critic("nature", actions=6)
    layers = linear_layers(model)
    stds = [1 / math.sqrt(256), 1 / math.sqrt(512), 1 / math.sqrt(576), 1 / math.sqrt(3136)]
    stds += [0.01 / math.sqrt(512), 1 / math.sqrt(512)]  # the policy's last layer, then the value's
    assert len(layers) == 6
    for layer, std in zip(layers, stds, strict=True):
        assert not layer.bias.any()
        w = layer.weight.detach().flatten().double()
        error = 5 / math.sqrt(len(w))  # five standard deviations of each estimate
        assert w.mean().item() == pytest.approx(0, abs=error * std)
        assert w.std().item() == pytest.approx(std, rel=error / math.sqrt(2))
        assert (w.abs() < std).double().mean().item() == pytest.approx(0.6827, abs=error / 2)  # uniform: 0.577
    assert not hasattr(model, "log_std")


def test_initial_weights_for_vectors_are_orthogonal() -> None:
    model = gaussian(2)
    layers = linear_layers(model)
    gains = [1, 1, 0.01, 1, 1, 1]
    assert [tuple(layer.weight.shape) for layer in layers] == [(64, 3), (64, 64), (2, 64), (64, 3), (64, 64), (1, 64)]
    for layer, gain in zip(layers, gains, strict=True):
        assert not layer.bias.any()
        w = layer.weight.detach() if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.detach().T
        torch.testing.assert_close(w @ w.T, gain**2 * torch.eye(len(w)), atol=1e-5 * gain**2, rtol=0)
    assert isinstance(model.log_std, nn.Parameter) and model.log_std.tolist() == [0, 0]
    assert not torch.equal(layers[0].weight, layers[3].weight) and not torch.equal(layers[1].weight, layers[4].weight)


def test_bfloat16_is_near_float32() -> None:
    torch.manual_seed(1)
    exact = ppo_batch.ActorCritic(IMAGE, spaces.Discrete(6), "nature")
    rough = ppo_batch.ActorCritic(IMAGE, spaces.Discrete(6), "nature", bfloat16=True)
    rough.load_state_dict(exact.state_dict())
    check_bfloat16(exact, rough)


def test_policy_starts_near_uniform() -> None:
    for arch in ("nature", "mlp"):
        logits, values = actor_critic(arch, 6)(random_obs(arch, 50))
        assert logits.softmax(-1).sub(1 / 6).abs().max() < 0.02 and logits.std(0).min() > 0
        assert values.std() > 0.01  # the value's last layer is not so small


def test_network_for_images_gives_the_numbers_of_a_plain_contiguous_one() -> None:
    model = actor_critic("nature", 6)
    for layer in linear_layers(model):
        nn.init.normal_(layer.bias, std=0.1)
    with torch.no_grad():
        model.policy.weight *= 100  # or the logits would say little
    obs = random_obs("nature", 3)
    before = obs.clone()
    logits, values = model(obs)
    assert (logits.shape, values.shape, logits.dtype) == ((3, 6), (3,), torch.float32) and torch.equal(obs, before)
    params = iter([p.detach().clone(memory_format=torch.contiguous_format) for p in model.parameters()])
    x = obs.float() / 255
    for stride, size in ((4, 20), (2, 9), (1, 7)):
        x = F.relu(F.conv2d(x, next(params), next(params), stride))
        assert x.shape[2:] == (size, size)
    x = F.relu(F.linear(x.reshape(3, -1), next(params), next(params)))
    torch.testing.assert_close(logits, F.linear(x, next(params), next(params)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, F.linear(x, next(params), next(params))[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("actions", [4, spaces.Box(-1, 1, (2,), np.float32)], ids=["discrete", "continuous"])
def test_network_for_vectors_against_numpy(actions: int | gym.Space) -> None:
    """Normalised, then two networks that share nothing, tanh between their layers, nothing after the last."""
    model = actor_critic("mlp", actions)
    for layer in linear_layers(model):
        nn.init.normal_(layer.bias, std=0.3)
    with torch.no_grad():
        model.policy[-1].weight *= 100
    model.trunk.update(torch.tensor([[1.0, 2.0, -4.0], [3.0, 2.5, 4.0]]))  # means 2, 2.25, 0; variances 1, 1/16, 16
    obs = random_obs("mlp", 7)
    p = {name: x.detach().numpy().astype(np.float64) for name, x in model.named_parameters()}
    heads = []
    for head in ("policy", "value"):
        x = (obs.numpy() - [2, 2.25, 0]) / np.sqrt([1.01, 0.0725, 16.01])
        for layer in (0, 2, 4):
            x = x.clip(-5, 5) if layer == 0 else np.tanh(x)
            x = x @ p[f"{head}.{layer}.weight"].T + p[f"{head}.{layer}.bias"]
        heads.append(x)
    outputs, values = model(obs)
    np.testing.assert_allclose(outputs.detach().numpy(), heads[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values.detach().numpy(), heads[1][:, 0], rtol=1e-4, atol=1e-5)
    value_only = torch.autograd.grad(values.sum(), list(model.policy.parameters()), allow_unused=True)
    assert value_only == (None,) * 6


# ------------------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize(("n", "n_actions"), [(1, 2), (5, 4), (33, 18), (3, 1)])
def test_categorical_log_prob_and_entropy(n: int, n_actions: int) -> None:
    model, logits = actor_critic("mlp", n_actions), torch.randn(n, n_actions) * 4
    actions = torch.randint(n_actions, (n,))
    log_probs, entropies = model.log_prob_and_entropy(logits, actions)
    expected = torch.distributions.Categorical(logits=logits)
    assert log_probs.shape == entropies.shape == (n,)
    torch.testing.assert_close(log_probs, expected.log_prob(actions), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies, expected.entropy(), rtol=1e-5, atol=1e-6)


def test_categorical_of_a_sure_policy_stays_finite() -> None:
    logits = torch.tensor([[0.0, 500.0], [0.0, 500.0]], requires_grad=True)
    log_probs, entropies = actor_critic("mlp", 2).log_prob_and_entropy(logits, torch.tensor([0, 1]))
    assert log_probs.tolist() == [-500, 0] and entropies.tolist() == [0, 0]
    (log_probs + entropies).sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(("n", "size"), [(1, 1), (5, 2), (33, 6), (4, 17)])
def test_gaussian_log_prob_and_entropy(n: int, size: int) -> None:
    model = gaussian(size)
    model.log_std.data = torch.linspace(-2, 0.7, size)
    means, actions = torch.randn(n, size) * 2, torch.randn(n, size)
    log_probs, entropy = model.log_prob_and_entropy(means, actions)
    expected = torch.distributions.Independent(torch.distributions.Normal(means, model.log_std.exp()), 1)
    assert log_probs.shape == (n,)
    torch.testing.assert_close(log_probs, expected.log_prob(actions), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.expand(n), expected.entropy(), rtol=1e-5, atol=1e-5)


def test_gradient_of_the_gaussian() -> None:
    """With z = (a - μ) / σ: d log π / dμ = z / σ, d log π / d log σ = z² - 1; the entropy grows by 1 with log σ."""
    model = gaussian(2)
    model.log_std.data = torch.tensor([math.log(0.5), math.log(2.0)])
    means = torch.tensor([[1.0, -1.0]], requires_grad=True)
    log_probs, entropy = model.log_prob_and_entropy(means, torch.tensor([[2.0, 0.0]]))  # z = 2, 0.5
    of_means, of_widths = torch.autograd.grad(log_probs.sum(), (means, model.log_std))
    torch.testing.assert_close(of_means, torch.tensor([[4.0, 0.25]]))
    torch.testing.assert_close(of_widths, torch.tensor([3.0, -0.75]))
    assert torch.autograd.grad(entropy, model.log_std)[0].tolist() == [1, 1]


def test_frequencies_of_discrete_samples() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, -2.0, 0.5], [3.0, 0.0, 0.0, -9.0]])
    samples = actor_critic("mlp").sample(logits.repeat(20_000, 1))
    assert (samples.shape, samples.dtype) == ((40_000,), torch.int64)
    for row in range(2):
        p = np.exp(logits[row].double().numpy()) / np.exp(logits[row].double().numpy()).sum()
        np.testing.assert_allclose(np.bincount(samples[row::2], minlength=4) / 20_000, p, atol=0.015)


def test_gaussian_samples_each_dimension_by_itself() -> None:
    model = gaussian(2)
    model.log_std.data = torch.tensor([-1.0, 0.5])
    torch.manual_seed(0)
    samples = model.sample(torch.tensor([3.0, -2.0]).expand(20_000, 2)).detach().numpy()
    np.testing.assert_allclose(samples.mean(0), [3, -2], atol=0.05)
    np.testing.assert_allclose(samples.std(0), np.exp([-1.0, 0.5]), rtol=0.03)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03
    within = (abs(samples - [3, -2]) < np.exp([-1.0, 0.5])).mean(0)
    np.testing.assert_allclose(within, 0.6827, atol=0.015)


# ---------------------------------------------------------------------------------------------- normalisation


def test_normaliser_has_its_constants() -> None:
    """PFRL's: ε = 0.01 under the root, clipped to ±5; before any data, mean 0 and variance 1."""
    norm = actor_critic("mlp").trunk
    x = torch.tensor([[0.5, -3.0, 2.0]])
    torch.testing.assert_close(norm(x), x / math.sqrt(1.01))
    assert norm(torch.tensor([[6.0, -6.0, 1e9]])).tolist() == [[5, -5, 5]]
    norm.update(torch.full((7, 3), 3.0))  # a constant has no variance: √0.01 is left
    torch.testing.assert_close(norm(torch.tensor([[3.0, 3.3, 2.6]])), torch.tensor([[0.0, 3.0, -4.0]]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_normaliser_merges_in_any_order(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    parts = [
        (rng.normal(size=(n, 3)) * [0.1, 1, 30] + [5, k, -100]).astype(np.float32) for k, n in enumerate((1, 40, 9))
    ]
    norm, data = actor_critic("mlp").trunk, np.concatenate(parts).astype(np.float64)
    for k in order:
        norm.update(torch.from_numpy(parts[k]))
    assert norm.count.item() == 50
    expected = ((data - data.mean(0)) / np.sqrt(data.var(0) + 0.01)).clip(-5, 5)
    np.testing.assert_allclose(norm(torch.from_numpy(data).float()).numpy(), expected, atol=5e-4)


def test_policy_of_evaluation_normalises_and_learns_nothing() -> None:
    model = actor_critic("mlp")
    model.trunk.update(torch.tensor([[1.0, 2.0, -4.0], [3.0, 2.5, 4.0]]))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.policy[-1].weight *= 200
    p = [x.detach().numpy().astype(np.float64) for x in model.policy.parameters()]
    x = (np.array([1.0, 2.5, 3.0]) - [2, 2.25, 0]) / np.sqrt([1.01, 0.0725, 16.01])
    logits = p[4] @ np.tanh(p[2] @ np.tanh(p[0] @ x + p[1]) + p[3]) + p[5]
    policy = ppo_batch.make_policy(model, ppo_batch.Args())
    actions = policy(np.tile(np.array([1, 2.5, 3], np.float32), (20_000, 1)))
    expected = np.exp(logits) / np.exp(logits).sum()
    assert expected.max() - expected.min() > 0.2
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, expected, atol=0.015)
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in ("trunk.mean", "trunk.var", "trunk.count"))


# ----------------------------------------------------------------------------------------------------- update


class Stub(nn.Module):
    """V = w x, log π = u a, H = u / 2, all by hand; x is what it was shown, and it remembers that and u."""

    def __init__(self, w: float, u: float) -> None:
        super().__init__()
        self.w, self.u = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (w, u))
        self.seen: list[list[float]] = []
        self.us: list[float] = []

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(obs.tolist())
        self.us.append(self.u.item())
        return obs, self.w * obs

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        return self.u * actions, (self.u / 2).expand(len(outputs))


def stub_batch(**columns: list[float]) -> tuple[Tensor, ...]:
    """obs, actions, old log-probabilities, advantages, value targets."""
    names = ("obs", "actions", "old", "advantages", "targets")
    return tuple(torch.tensor(columns[name], dtype=torch.float64) for name in names)


def stub_args(**constants: Any) -> ppo_batch.Args:
    return ppo_batch.Args(**{"max_grad_norm": None, "minibatch_size": 1, "update_epochs": 1} | constants)


@pytest.mark.parametrize(("n", "size", "epochs", "steps"), [(10, 4, 3, 8), (12, 3, 2, 8), (5, 5, 4, 4)])
def test_update_shows_each_sample_once_an_epoch(n: int, size: int, epochs: int, steps: int) -> None:
    model, column = Stub(0.0, 0.0), [0.0] * n
    batch = stub_batch(obs=list(range(n)), actions=column, old=column, advantages=column, targets=column)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    ppo_batch.update(model, optimizer, batch, 0.1, stub_args(minibatch_size=size, update_epochs=epochs))
    assert [len(row) for row in model.seen] == [size] * steps
    seen = list(itertools.chain(*model.seen))
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_update_takes_the_batch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages are not standardised again in each minibatch; ρ is always to the policy before the update."""
    calls, ppo_loss = [], ppo_batch.ppo_loss

    def watched(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append([x.tolist() for x in arguments[:3]])
        return ppo_loss(*arguments)

    monkeypatch.setattr(ppo_batch, "ppo_loss", watched)
    rng, model = np.random.default_rng(0), Stub(0.3, 0.2)
    columns = {name: rng.normal(size=10) for name in ("actions", "old", "advantages", "targets")} | {
        "obs": np.arange(10)
    }
    columns["advantages"] += 5
    args = stub_args(minibatch_size=4, update_epochs=3)
    ppo_batch.update(model, torch.optim.SGD(model.parameters(), 0.01), stub_batch(**columns), 0.2, args)
    assert len(calls) == 8 and len(set(model.us)) == 8 and model.us[0] == pytest.approx(0.2)
    for seen, u, (log_ratios, advantages, _) in zip(model.seen, model.us, calls, strict=True):
        rows = np.array(seen, int)
        np.testing.assert_array_equal(advantages, columns["advantages"][rows])
        np.testing.assert_allclose(log_ratios, u * columns["actions"][rows] - columns["old"][rows], rtol=1e-12)
    np.testing.assert_allclose(calls[0][2], columns["targets"][first := np.array(model.seen[0], int)] - 0.3 * first)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 100.0])
def test_update_clips_the_global_norm_of_the_gradient(max_grad_norm: float | None) -> None:
    """dL/dw = 2 (V - target) x = 2 (1 - 4) 2 = -12; dL/du = -ρ A a - β/2 = -1 · 3 · 1.5 - 0.5 = -5: norm 13."""
    model = Stub(0.5, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    batch = stub_batch(obs=[2.0], actions=[1.5], old=[1.5], advantages=[3.0], targets=[4.0])
    args = stub_args(max_grad_norm=max_grad_norm, entropy_coef=1.0)
    _, total_norm, scalars = ppo_batch.update(model, optimizer, batch, 0.2, args)
    assert scalars["losses/grad_norm"].item() == pytest.approx(13, rel=1e-6)  # before it is clipped
    assert total_norm.item() == pytest.approx(13, rel=1e-6)
    scale = 1 if max_grad_norm in (None, 100.0) else 0.5 / 13
    assert model.w.item() == pytest.approx(0.5 + 12 * scale, rel=1e-6)
    assert model.u.item() == pytest.approx(1.0 + 5 * scale, rel=1e-6)


def test_update_is_adam_by_hand() -> None:
    """Gradients about as large as ε = 1e-5 at first, so that it matters what is added, and where."""
    model, lr = Stub(0.0, 0.3), 0.01
    optimizer = torch.optim.Adam(model.parameters(), lr, eps=ppo_batch.Args().adam_eps, fused=True)
    batch = stub_batch(obs=[1.0], actions=[1.0], old=[0.3], advantages=[1e-5], targets=[1e-5])
    ppo_batch.update(model, optimizer, batch, 0.2, stub_args(entropy_coef=0.0))
    assert model.w.item() == pytest.approx(lr * 2e-5 / 3e-5, rel=1e-6)  # g = -2e-5, m̂ / (√v̂ + ε) = -2/3
    assert model.u.item() == pytest.approx(0.3 + lr * 1e-5 / 2e-5, rel=1e-6)

    args = stub_args(entropy_coef=1e-5, update_epochs=5, learning_rate=lr)
    ppo_batch.update(model, optimizer, batch, 0.2, args)
    p, m, v = [0.0, 0.3], [0.0, 0.0], [0.0, 0.0]
    for k in range(1, 7):
        beta = 0.0 if k == 1 else 1e-5
        gradient = 2 * (p[0] - 1e-5), -math.exp(p[1] - 0.3) * 1e-5 - beta / 2
        for i, g in enumerate(gradient):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
            p[i] -= lr * (m[i] / (1 - 0.9**k)) / (math.sqrt(v[i] / (1 - 0.999**k)) + 1e-5)
    assert [model.w.item(), model.u.item()] == pytest.approx(p, rel=1e-6)


def test_update_tells_what_the_last_minibatch_was_like() -> None:
    """ρ = 1, 1.05, 0.5, 1.15 with ε = 0.1: half of them are clipped; approx_kl is the mean of ρ - 1 - log ρ."""
    ratios = [1.0, 1.05, 0.5, 1.15]
    old = [0.7 - math.log(ratio) for ratio in ratios]
    columns = {"obs": [1.0, 2.0, 3.0, 4.0], "actions": [1.0] * 4, "old": old, "advantages": [1.0] * 4}
    model = Stub(1.0, 0.7)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    args = stub_args(minibatch_size=4, entropy_coef=0.1, update_epochs=2)
    batch = stub_batch(**columns, targets=[3.0] * 4)
    total_loss, total_norm, scalars = ppo_batch.update(model, optimizer, batch, 0.1, args)
    loss = scalars["losses/policy_loss"] + scalars["losses/value_loss"]
    assert total_loss.item() == pytest.approx(2 * loss.item())  # two epochs, and nothing has changed in between
    assert total_norm.item() == pytest.approx(2 * scalars["losses/grad_norm"].item())
    means = {tag: value.mean().item() for tag, value in scalars.items()}
    assert means == pytest.approx(
        {
            "losses/policy_loss": -(1 + 1.05 + 0.5 + 1.1) / 4 - 0.1 * 0.35,
            "losses/value_loss": (4 + 1 + 0 + 1) / 4,
            "losses/entropy": 0.35,
            "losses/grad_norm": (1 + 1.05 + 0.5) / 4 + 0.1 / 2,  # dL/dw = 2 (-2·1 - 1·2 + 0·3 + 1·4) / 4 = 0
            "losses/approx_kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 4,
            "losses/clip_fraction": 0.5,
        }
    )


# ---------------------------------------------------------------------------------------------------- presets


PFRL = {"n_envs": 8, "adam_eps": 1e-5, "value_coef": 1.0, "standardize_advantages": True, "bootstrap_limits": True}
PFRL |= {"anneal_clip": False, "reward_scale": 1.0}
ATARI = PFRL | {"total_steps": 10_000_000, "update_interval": 1024, "t_max": None, "minibatch_size": 256}
ATARI |= {"update_epochs": 4, "learning_rate": 2.5e-4, "anneal_lr": True, "clip_coef": 0.1, "gamma": 0.99}
ATARI |= {"gae_lambda": 0.95, "entropy_coef": 0.01, "max_grad_norm": 0.5, "clip_rewards": True}
VECTOR_TASK = PFRL | {"total_steps": 2_000_000, "update_interval": 2048, "t_max": None, "minibatch_size": 64}
VECTOR_TASK |= {"update_epochs": 10, "learning_rate": 3e-4, "anneal_lr": True, "clip_coef": 0.2, "gamma": 0.995}
VECTOR_TASK |= {"gae_lambda": 0.97, "entropy_coef": 0.0, "max_grad_norm": None, "clip_rewards": False}


@pytest.mark.parametrize(
    ("env_id", "preset", "constants", "arch"),
    [
        ("PongNoFrameskip-v4", "auto", ATARI | {"preset": "atari"}, "nature"),
        ("CartPole-v1", "auto", VECTOR_TASK | {"preset": "vector"}, "mlp"),
        ("HalfCheetah-v5", "auto", VECTOR_TASK | {"preset": "vector"}, "mlp"),
        ("PongNoFrameskip-v4", "vector", VECTOR_TASK | {"preset": "vector"}, "nature"),
        ("CartPole-v1", "atari", ATARI | {"preset": "atari"}, "mlp"),
    ],
)
def test_presets(tmp_path: Path, env_id: str, preset: str, constants: dict[str, Any], arch: str) -> None:
    args, _ = ppo_batch.parse(["--env-id", env_id, "--preset", preset, "--run-dir", str(tmp_path / "run")])
    assert {name: getattr(args, name) for name in constants} == constants
    assert args.arch == arch


def test_a_flag_overrides_the_preset(tmp_path: Path) -> None:
    flags = ["--clip-coef", "0.3", "--no-anneal-lr", "--max-grad-norm", "2", "--clip-rewards", "--gamma", "0.9"]
    args, _ = ppo_batch.parse(["--env-id", "CartPole-v1", *flags, "--run-dir", str(tmp_path / "run")])
    assert (args.clip_coef, args.anneal_lr, args.max_grad_norm, args.clip_rewards) == (0.3, False, 2.0, True)
    assert (args.gamma, args.gae_lambda, args.minibatch_size) == (0.9, 0.97, 64)
    flags = ["--max-grad-norm", "None", "--no-anneal-lr", "--no-standardize-advantages"]
    args, _ = ppo_batch.parse([*flags, "--run-dir", str(tmp_path / "run2")])
    assert (args.max_grad_norm, args.anneal_lr, args.standardize_advantages) == (None, False, False)


@pytest.mark.parametrize(
    ("flags", "t_max"),
    [
        (["--n-envs", "8"], 128),
        (["--n-envs", "3"], 342),  # 1024 / 3, rounded up
        (["--n-envs", "1000"], 2),
        (["--n-envs", "3000"], 1),
        (["--n-envs", "4", "--update-interval", "2002"], 501),
        (["--n-envs", "4", "--t-max", "77"], 77),
    ],
)
def test_steps_between_updates(tmp_path: Path, flags: list[str], t_max: int) -> None:
    args, _ = ppo_batch.parse([*flags, "--run-dir", str(tmp_path / "run")])
    assert ppo_batch.rollout_length(args) == t_max


# ------------------------------------------------------------------------------------ the algorithm, as a whole


class Watch:
    """What a run gave to `update`, and the parameters that it started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates: list[dict[str, Any]] = []
        self.initial: dict[str, Tensor] = {}
        self.rows: list[list[list[int]]] = []
        update, minibatches, model = ppo_batch.update, ppo_batch.minibatches, ppo_batch.ActorCritic
        watch = self

        class Watched(model):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                watch.initial = watch.initial or copy.deepcopy(self.state_dict())

        def watched_update(model: nn.Module, optimizer: Any, batch: tuple, clip_coef: float, args: Any) -> tuple:
            seen = {"batch": [x.clone() for x in batch], "clip_coef": clip_coef, "model": copy.deepcopy(model)}
            seen |= {"lr": optimizer.param_groups[0]["lr"]}
            self.updates.append(seen)
            result = update(model, optimizer, batch, clip_coef, args)
            seen["after"] = copy.deepcopy(model.state_dict())
            return result

        def watched_minibatches(*arguments: Any) -> Tensor:
            indices = minibatches(*arguments)
            self.rows.append(indices.tolist())
            return indices

        monkeypatch.setattr(ppo_batch, "ActorCritic", Watched)
        monkeypatch.setattr(ppo_batch, "update", watched_update)
        monkeypatch.setattr(ppo_batch, "minibatches", watched_minibatches)


class SlowPpo:
    """Batch PPO from the environments' own records, a sample at a time, in double precision."""

    def __init__(self, initial: dict[str, Tensor], args: dict[str, Any], continuous: bool) -> None:
        self.args, self.continuous = args, continuous
        self.params = {k: v.double().requires_grad_() for k, v in initial.items() if not k.startswith("trunk.")}
        self.m = {k: torch.zeros_like(p) for k, p in self.params.items()}
        self.v = {k: torch.zeros_like(p) for k, p in self.params.items()}
        self.steps = self.n_clipped = 0
        self.seen: list[np.ndarray] = []  # all that the normaliser knows
        self.norms: list[float] = []

    def network(self, head: str, obs: np.ndarray) -> Tensor:
        x = obs.astype(np.float64)
        mean, variance = (np.mean(self.seen, 0), np.var(np.array(self.seen, np.float64), 0)) if self.seen else (0, 1)
        x = torch.tensor(np.clip((x - mean) / np.sqrt(variance + 0.01), -5, 5))
        for layer in (0, 2, 4):
            x = self.params[f"{head}.{layer}.weight"] @ x + self.params[f"{head}.{layer}.bias"]
            x = torch.tanh(x) if layer < 4 else x
        return x

    def value(self, obs: np.ndarray) -> float:
        return self.network("value", obs)[0].item()

    def log_prob_and_entropy(self, obs: np.ndarray, action: np.ndarray) -> tuple[Tensor, Tensor]:
        output = self.network("policy", obs)
        if self.continuous:
            sigma = self.params["log_std"].exp()
            density = torch.exp(-(((torch.tensor(action).double() - output) / sigma) ** 2) / 2)
            density = density / (sigma * math.sqrt(2 * math.pi))
            return density.prod().log(), (0.5 * torch.log(2 * math.pi * math.e * sigma**2)).sum()
        p = output.exp() / output.exp().sum()
        return p[int(action)].log(), -(p * p.log()).sum()

    def collect(self, walks: list[dict], first: int, actions: np.ndarray) -> list[list]:
        """Observations, actions, log π_old, A and targets of steps first to first + t_max, time before environment."""
        a, n_envs = self.args, len(walks)
        last, rows = first + a["t_max"] - 1, []
        for t in range(first, last + 1):
            for e, walk in enumerate(walks):
                advantage, discount = 0.0, 1.0
                for k in range(t, last + 1):
                    kind, reward = walk["end"][k], walk["reward"][k]
                    following = walk["final_obs"][k] if kind else walk["obs"][k + 1]
                    gone_on = not kind or (kind == "truncated" and a["bootstrap_limits"])
                    reward = np.clip(reward, -1, 1) if a["clip_rewards"] else a["reward_scale"] * reward
                    target = reward + a["gamma"] * (self.value(following) if gone_on else 0)
                    advantage += discount * (target - self.value(walk["obs"][k]))
                    discount *= a["gamma"] * a["gae_lambda"]
                    if kind:
                        break
                obs, action = walk["obs"][t], actions[(t - first) * n_envs + e]
                log_prob = self.log_prob_and_entropy(obs, action)[0].item()
                rows.append([obs, action, log_prob, advantage, advantage + self.value(obs)])
        columns = [list(column) for column in zip(*rows, strict=True)]
        if a["standardize_advantages"]:
            mean = sum(columns[3]) / len(rows)
            variance = sum((x - mean) ** 2 for x in columns[3]) / len(rows)
            columns[3] = [(x - mean) / (math.sqrt(variance) + 1e-8) for x in columns[3]]
        return columns

    def update(self, batch: list[list], rows: list[list[int]], lr: float, clip_coef: float) -> None:
        """The normaliser learns, then Adam takes a step for each row of indices."""
        self.seen += batch[0]
        a = self.args
        for row in rows:
            loss = torch.zeros((), dtype=torch.float64)
            for i in row:
                obs, action, old_log_prob, advantage, target = (column[i] for column in batch)
                log_prob, entropy = self.log_prob_and_entropy(obs, action)
                ratio = (log_prob - old_log_prob).exp()
                out = ratio > 1 + clip_coef if advantage > 0 else ratio < 1 - clip_coef
                bound = 1 + clip_coef if advantage > 0 else 1 - clip_coef
                self.n_clipped += bool(out)
                value = self.network("value", obs)[0]
                loss = loss - (bound if out else ratio) * advantage - a["entropy_coef"] * entropy
                loss = loss + a["value_coef"] * (target - value) ** 2
            grads = torch.autograd.grad(loss / len(row), list(self.params.values()), materialize_grads=True)
            norm = math.sqrt(sum((g**2).sum().item() for g in grads))
            self.norms.append(norm)
            self.steps += 1
            with torch.no_grad():
                for (name, p), g in zip(self.params.items(), grads, strict=True):
                    if a["max_grad_norm"] is not None:
                        g = g * min(1.0, a["max_grad_norm"] / norm)
                    self.m[name] = 0.9 * self.m[name] + 0.1 * g
                    self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
                    m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
                    p -= lr * m / (v.sqrt() + a["adam_eps"])


CASES: dict[str, dict[str, Any]] = {
    "terminations": {"ends": [[2, "terminated"], [4, "terminated"]]},
    "truncations": {"ends": [[2, "truncated"], [4, "truncated"]]},
    "mixed": {"ends": [[1, "truncated"], [2, "terminated"], [3, "truncated"], [1, "terminated"]]},
    "limits cut": {"ends": [[1, "truncated"], [2, "terminated"], [3, "truncated"]], "bootstrap_limits": False},
    "both at once": {"ends": [[2, "both"], [3, "truncated"]]},  # a time limit reached in the step that terminates
    "both kinds at one step": {"ends": [[5, "truncated"], [5, "terminated"]]},  # of different rollouts
    "unfinished": {"ends": [[1000, "terminated"]]},
    "as on Atari": {
        "ends": [[1, "truncated"], [2, "terminated"], [6, "truncated"]],
        "max_grad_norm": 0.5,
        "clip_rewards": True,
        "anneal_lr": True,
        "anneal_clip": True,
    },
    "not standardised": {"ends": [[3, "truncated"], [2, "terminated"]], "standardize_advantages": False},
    "continuous": {"ends": [[2, "terminated"], [3, "truncated"], [7, "terminated"]], "continuous": True},
}


@pytest.mark.parametrize("case", CASES)
def test_train_is_batch_ppo(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates of train() against SlowPpo: what each batch holds, and what becomes of the parameters."""
    values = {"total_steps": 30, "t_max": 5, "n_envs": 2, "gamma": 0.9, "entropy_coef": 0.05, "learning_rate": 0.02}
    values |= {"gae_lambda": 0.8, "minibatch_size": 4, "update_epochs": 3, "clip_coef": 0.15, "adam_eps": 1e-3}
    values |= {"value_coef": 1.7, "reward_scale": 0.6, "seed": 5, "n_workers": 0, "eval_episodes": 0}
    values |= {"max_grad_norm": None, "device": "cpu"}
    switches = {"clip_rewards": False, "anneal_lr": False, "anneal_clip": False}
    switches |= {"standardize_advantages": True, "bootstrap_limits": True}
    options = dict(CASES[case])
    walk = {"ends": options.pop("ends"), "continuous": options.pop("continuous", False)}
    values |= {key: options[key] for key in values.keys() & options.keys()}
    switches |= {key: options[key] for key in switches.keys() & options.keys()}
    assert options.keys() <= values.keys() | switches.keys()
    flags = [text for k, v in values.items() for text in (f"--{k.replace('_', '-')}", str(v))]
    flags += [f"--{'' if on else 'no-'}{k.replace('_', '-')}" for k, on in switches.items()]

    watch = Watch(monkeypatch)
    monkeypatch.setattr(ppo_batch, "env_seed", lambda seed, step: seed)
    argv = ["--env-id", "tests.paac_envs:Walk-v0", "--env-kwargs", json.dumps(walk), "--run-dir", str(tmp_path / "r")]
    assert ppo_batch.main([*argv, *flags]) == 0

    walks = [paac_envs.WALKS[5], paac_envs.WALKS[6]]
    assert [len(walk["reward"]) for walk in walks] == [15, 15] and len(watch.updates) == 3
    rewards = walks[0]["reward"] + walks[1]["reward"]
    assert min(rewards) < -1 and max(rewards) > 1  # some are clipped, at both ends, where they are
    slow = SlowPpo(watch.initial, values | switches, walk["continuous"])
    for k, (seen, rows) in enumerate(zip(watch.updates, watch.rows, strict=True)):
        actions = seen["batch"][1].numpy()
        taken = np.array([walk["action"][t] for t in range(5 * k, 5 * k + 5) for walk in walks])
        expected = -3 + 2 * (actions.clip(-1, 1) + 1) if walk["continuous"] else actions  # of Box(-3, 1)
        np.testing.assert_allclose(taken, expected, atol=1e-5)
        batch = slow.collect(walks, 5 * k, actions)
        for column, theirs in zip(batch, seen["batch"], strict=True):
            assert theirs.shape[0] == 10
            np.testing.assert_allclose(theirs.numpy(), np.array(column), rtol=1e-4, atol=2e-5)
        left = 1 - k / 3
        assert seen["lr"] == pytest.approx(0.02 * (left if switches["anneal_lr"] else 1))
        assert seen["clip_coef"] == pytest.approx(0.15 * (left if switches["anneal_clip"] else 1))
        assert [len(row) for row in rows] == [4] * 8
        slow.update(batch, rows, seen["lr"], seen["clip_coef"])
        moved = 0.0
        for name, p in slow.params.items():
            torch.testing.assert_close(seen["after"][name].double(), p.detach(), rtol=1e-4, atol=2e-5)
            moved = max(moved, (seen["after"][name] - watch.initial[name]).abs().max().item())
        assert moved > 0.05
        for name, expected in (("mean", np.mean), ("var", np.var)):
            for state in (seen["model"].state_dict(), seen["after"]):  # all of this batch, and nothing after it
                np.testing.assert_allclose(state[f"trunk.{name}"].numpy(), expected(slow.seen, 0), rtol=1e-4, atol=1e-5)
    assert slow.n_clipped > 20, slow.n_clipped
    if values["max_grad_norm"]:
        assert sum(norm > 0.5 for norm in slow.norms) > 5
    group = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert (group["eps"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0)


def test_first_ratio_is_1_for_images_and_not_quite_for_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The normaliser has learned from the batch before its first minibatch, but not before log π_old."""
    firsts: list[Tensor] = []
    ppo_loss = ppo_batch.ppo_loss

    def watched(log_ratios: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        firsts.append(log_ratios.detach().clone())
        return ppo_loss(log_ratios, *arguments)

    monkeypatch.setattr(ppo_batch, "ppo_loss", watched)
    for env_id, first in (("PixelCue", 1e-5), ("VectorCue", math.inf)):
        firsts.clear()
        argv = ["--env-id", f"tests.paac_envs:{env_id}-v0", "--run-dir", str(tmp_path / env_id), "--eval-episodes", "0"]
        argv += ["--n-envs", "4", "--n-workers", "0", "--t-max", "4", "--minibatch-size", "16", "--total-steps", "16"]
        assert ppo_batch.main([*argv, "--update-epochs", "2", "--learning-rate", "0.01", "--no-anneal-lr"]) == 0
        assert len(firsts) == 2 and firsts[1].abs().max() > 1e-4
        assert (1e-5 if first == math.inf else -1) < firsts[0].abs().max() < first
