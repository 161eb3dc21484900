"""PAAC's mathematics against numbers worked out by hand and against slow versions written from the paper."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

import common.run
import paac
from tests import paac_envs
from tests.helpers import check_bfloat16

ROOT = Path(__file__).parent.parent
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-10, 10, (3,), np.float32)


# ---------------------------------------------------------------------------------------------------- returns


def forward_sum(
    rewards: np.ndarray, ends: list[str], final_values: np.ndarray, bootstrap: float, gamma: float
) -> list[float]:
    """R_t = Σ_k γ^k r_{t+k} + γ^n V for one environment, each t from scratch; ends: "", "terminated", "truncated"."""
    returns = []
    for t in range(len(rewards)):
        total = 0.0
        for k, end in enumerate(ends[t:]):
            total += gamma**k * rewards[t + k]
            if end == "terminated":
                break
            if end == "truncated":
                total += gamma ** (k + 1) * final_values[t + k]
                break
        else:
            total += gamma ** (len(rewards) - t) * bootstrap
        returns.append(total)
    return returns


def check_returns(ends: list[tuple[str, ...]], gamma: float, seed: int) -> None:
    """n_step_returns on environments with these ends, one tuple each, against `forward_sum`."""
    rng = np.random.default_rng(seed)
    shape = len(ends[0]), len(ends)
    rewards, values = rng.normal(size=shape), rng.normal(size=shape) * 5
    bootstrap = rng.normal(size=shape[1]) * 5
    kinds = np.array(ends).T
    final_values = np.where(kinds == "truncated", values, 0)
    expected = [forward_sum(rewards[:, e], list(ends[e]), values[:, e], bootstrap[e], gamma) for e in range(len(ends))]
    arrays = rewards, kinds != "", final_values, bootstrap
    result = paac.n_step_returns(*(torch.from_numpy(array) for array in arrays), gamma)
    assert result.shape == shape
    np.testing.assert_allclose(result.numpy().T, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("t_max", [1, 2, 3, 4])
@pytest.mark.parametrize("gamma", [0.0, 0.99, 1.0])
def test_returns_with_ends_at_every_position(t_max: int, gamma: float) -> None:
    check_returns(list(itertools.product(["", "terminated", "truncated"], repeat=t_max)), gamma, seed=t_max)


@pytest.mark.parametrize("seed", range(5))
def test_returns_of_random_rollouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["", "terminated", "truncated"], p=[0.7, 0.15, 0.15], size=(7, 5 * seed + 5))
    check_returns([tuple(row) for row in kinds], gamma=0.9, seed=seed)


def test_returns_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    dones = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    final_values = torch.tensor([[0.0] * 3, [0.0, 0.0, 4.0], [0.0] * 3])  # the third is truncated with V = 4
    result = paac.n_step_returns(rewards, dones, final_values, torch.tensor([8.0, 8.0, 8.0]), gamma=0.5)
    assert result.tolist() == [[3.75, 2.0, 3.0], [5.5, 2.0, 4.0], [7.0, 7.0, 7.0]]


# ------------------------------------------------------------------------------------------------------- loss


def actor_critic(arch: str, continuous: bool = False, n_actions: int = 4, seed: int = 0) -> paac.ActorCritic:
    torch.manual_seed(seed)
    actions = spaces.Box(-1, 1, (2,), np.float32) if continuous else spaces.Discrete(n_actions)
    return paac.ActorCritic(VECTOR if arch == "mlp" else IMAGE, actions, arch)


def random_obs(arch: str, *shape: int) -> Tensor:
    if arch == "mlp":
        return torch.randn(*shape, 3)
    return torch.randint(0, 256, (*shape, 4, 84, 84), dtype=torch.uint8)


def log_prob_and_entropy(model: paac.ActorCritic, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """log π(a|s) and H(π(s)) of one sample, from their definitions."""
    if model.discrete:
        log_p = output - output.exp().sum().log()
        return log_p[action], -(log_p.exp() * log_p).sum()
    log_prob, entropy = torch.zeros(()), torch.zeros(())
    for mu, log_sigma, a in zip(output, model.log_std, action, strict=True):
        log_prob = log_prob - (a - mu) ** 2 / (2 * log_sigma.exp() ** 2) - log_sigma - 0.5 * math.log(2 * math.pi)
        entropy = entropy + 0.5 * (math.log(2 * math.pi) + 1) + log_sigma
    return log_prob, entropy


@pytest.mark.parametrize(("arch", "continuous"), [("mlp", False), ("mlp", True), ("nips", False)])
def test_gradient_of_the_loss_is_the_papers(arch: str, continuous: bool) -> None:
    t_max, n_envs, beta = 3, 2, 0.03
    model = actor_critic(arch, continuous)
    if continuous:
        model.log_std.data = torch.tensor([-0.5, 0.3])
    obs = random_obs(arch, t_max, n_envs)
    returns = torch.randn(t_max, n_envs) * 3
    actions = torch.randn(t_max, n_envs, 2) if continuous else torch.randint(4, (t_max, n_envs))

    outputs, values = (torch.stack(items) for items in zip(*(model(obs[t]) for t in range(t_max)), strict=True))
    log_probs, entropies = model.log_prob_and_entropy(outputs, actions)
    loss, policy_loss, value_loss = paac.paac_loss(log_probs, entropies, values, returns, beta, 0.25)
    torch.testing.assert_close(loss, policy_loss + value_loss)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params)

    expected = [torch.zeros_like(p) for p in params]
    for e in range(n_envs):
        for t in range(t_max):
            output, value = (item[0] for item in model(obs[t, e][None]))
            R, v = returns[t, e].item(), value.item()
            log_prob, entropy = log_prob_and_entropy(model, output, actions[t, e])
            options = {"retain_graph": True, "materialize_grads": True}
            of_log_prob = torch.autograd.grad(log_prob, params, **options)
            of_entropy = torch.autograd.grad(entropy, params, **options)
            of_value = torch.autograd.grad(value, params, **options)
            for total, d_log_prob, d_entropy, d_value in zip(expected, of_log_prob, of_entropy, of_value, strict=True):
                total -= ((R - v) * d_log_prob + beta * d_entropy) / n_envs  # eq. (10), ascent
                total += 0.5 * (v - R) * d_value / n_envs  # eq. (11) times 0.25
    for result, total in zip(grads, expected, strict=True):
        torch.testing.assert_close(result, total, rtol=1e-4, atol=1e-5)


def test_gradient_at_the_heads_in_closed_form() -> None:
    t_max, n_envs, n_actions, beta = 4, 3, 5, 0.02
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(t_max, n_envs, n_actions)), rng.normal(size=(t_max, n_envs))
    returns, actions = rng.normal(size=(t_max, n_envs)), rng.integers(n_actions, size=(t_max, n_envs))
    z, v = torch.tensor(logits, requires_grad=True), torch.tensor(values, requires_grad=True)
    log_probs, entropies = actor_critic("mlp", n_actions=n_actions).log_prob_and_entropy(z, torch.tensor(actions))
    loss, *_ = paac.paac_loss(log_probs, entropies, v, torch.tensor(returns), beta, 0.25)
    loss.backward()
    for t, e in np.ndindex(t_max, n_envs):
        p = np.exp(logits[t, e]) / np.exp(logits[t, e]).sum()
        entropy = -(p * np.log(p)).sum()
        advantage = returns[t, e] - values[t, e]
        chosen = np.arange(n_actions) == actions[t, e]
        d_logits = -(chosen - p) * advantage + beta * p * (np.log(p) + entropy)
        np.testing.assert_allclose(z.grad[t, e].numpy(), d_logits / n_envs, atol=1e-12)
        np.testing.assert_allclose(v.grad[t, e].numpy(), 0.5 * (values[t, e] - returns[t, e]) / n_envs, atol=1e-12)


def test_advantages_carry_no_gradient() -> None:
    log_probs, entropies, values = (torch.randn(3, 2, requires_grad=True) for _ in range(3))
    returns = torch.randn(3, 2)
    _, policy_loss, value_loss = paac.paac_loss(log_probs, entropies, values, returns, 0.01, 0.25)
    assert torch.autograd.grad(policy_loss, values, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(value_loss, log_probs, allow_unused=True) == (None,)


def test_loss_is_five_times_the_mean() -> None:
    """PAAC's released code takes 5 times the mean over all samples of a rollout of 5."""
    log_probs, entropies, values, returns = torch.randn(4, 5, 32)
    loss, *_ = paac.paac_loss(log_probs, entropies, values, returns, 0.02, 0.25)
    advantages = returns - values
    mean = (-(log_probs * advantages + 0.02 * entropies)).mean() + (0.25 * advantages**2).mean()
    torch.testing.assert_close(loss, 5 * mean)


# ------------------------------------------------------------------------------------------------------ heads


def test_categorical_head() -> None:
    model = actor_critic("mlp", n_actions=6)
    logits = np.random.default_rng(1).normal(size=(3, 2, 6)) * 3
    actions = np.array([[0, 1], [2, 3], [4, 5]])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    log_probs, entropies = model.log_prob_and_entropy(torch.tensor(logits), torch.tensor(actions))
    log_prob = np.log(np.take_along_axis(p, actions[..., None], -1)[..., 0])
    np.testing.assert_allclose(log_probs.numpy(), log_prob, atol=1e-6)
    np.testing.assert_allclose(entropies.numpy(), -(p * np.log(p)).sum(-1), atol=1e-6)
    torch.manual_seed(0)
    samples = model.sample(torch.tensor(logits[0, 0]).expand(20_000, 6))
    np.testing.assert_allclose(np.bincount(samples, minlength=6) / 20_000, p[0, 0], atol=0.015)


def test_gaussian_head() -> None:
    model = actor_critic("mlp", continuous=True)
    assert model.log_std.tolist() == [0, 0]
    model.log_std.data = torch.tensor([-1.0, 0.5])
    rng = np.random.default_rng(2)
    mu, a, sigma = rng.normal(size=(3, 2, 2)), rng.normal(size=(3, 2, 2)), np.exp([-1.0, 0.5])
    log_probs, entropies = model.log_prob_and_entropy(torch.tensor(mu).float(), torch.tensor(a).float())
    density = np.exp(-(((a - mu) / sigma) ** 2) / 2) / (sigma * np.sqrt(2 * np.pi))
    assert log_probs.shape == (3, 2)
    np.testing.assert_allclose(log_probs.detach().numpy(), np.log(density.prod(-1)), atol=1e-5)
    entropy = 0.5 * np.log(2 * np.pi * np.e * sigma**2).sum()
    np.testing.assert_allclose(entropies.item(), entropy, atol=1e-5)  # the same in every state


def test_gaussian_samples_each_dimension_by_itself() -> None:
    model = actor_critic("mlp", continuous=True)
    model.log_std.data = torch.tensor([-1.0, 0.5])
    torch.manual_seed(0)
    samples = model.sample(torch.tensor([3.0, -2.0]).expand(20_000, 2)).detach().numpy()
    np.testing.assert_allclose(samples.mean(0), [3, -2], atol=0.05)
    np.testing.assert_allclose(samples.std(0), np.exp([-1.0, 0.5]), rtol=0.03)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nothing_is_sampled_from_numbers_that_are_not_finite(continuous: bool, number: float) -> None:
    model, outputs = actor_critic("mlp", continuous), torch.zeros(3, 2 if continuous else 4)
    model.sample(outputs)
    outputs[1, 1] = number
    with pytest.raises(FloatingPointError, match="not finite"):
        model.sample(outputs)


def test_nothing_is_sampled_from_an_infinite_deviation() -> None:
    model = actor_critic("mlp", continuous=True)
    model.log_std.data[:] = 200.0
    with pytest.raises(FloatingPointError, match="not finite"):
        model.sample(torch.zeros(3, 2))


# -------------------------------------------------------------------------------------------------- optimiser


def test_rmsprop_against_three_steps_by_hand() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = paac.RMSProp([p], lr=0.1, decay=0.9, eps=0.1, initial_square=1.0)
    # g: 0.9 + 0.1 * 4 = 1.3; 1.17 + 0.1 = 1.27; 1.143 + 0.025 = 1.168. Under the root it is g + 0.1.
    expected = 1.0
    for gradient, root in ((2.0, math.sqrt(1.4)), (-1.0, math.sqrt(1.37)), (0.5, math.sqrt(1.268))):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        expected -= 0.1 * gradient / root
        assert p.item() == pytest.approx(expected, abs=1e-14)
    assert optimizer.state[p]["square"].item() == pytest.approx(1.168, abs=1e-14)


def test_rmsprop_is_not_torchs() -> None:
    """Even from the same mean square: torch adds eps to the root, which is a third as much for small gradients."""
    ours, theirs = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    a = paac.RMSProp([ours], lr=1.0, decay=0.99, eps=0.1, initial_square=0.0)
    b = torch.optim.RMSprop([theirs], lr=1.0, alpha=0.99, eps=0.1)  # starts from 0
    ours.grad, theirs.grad = torch.full((1,), 1e-3), torch.full((1,), 1e-3)
    a.step(), b.step()
    assert theirs.item() / ours.item() == pytest.approx(math.sqrt(10), rel=0.01)


def test_rmsprop_leaves_parameters_without_gradient_alone() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    q.grad = torch.ones(2)
    paac.RMSProp([p, q], lr=1.0, decay=0.9, eps=0.1, initial_square=1.0).step()
    assert p.tolist() == [1, 1] and q.tolist() != [1, 1]


def test_learning_rate_falls_to_zero() -> None:
    assert paac.linear_decay(0.0224, 0, 80_000_000) == 0.0224
    assert paac.linear_decay(0.0224, 40_000_000, 80_000_000) == pytest.approx(0.0112, abs=1e-15)
    assert paac.linear_decay(0.0224, 80_000_000, 80_000_000) == 0
    assert paac.linear_decay(0.0224, 80_000_160, 80_000_000) == 0


@pytest.mark.parametrize(
    ("preset", "total_steps", "entropy_coef", "max_grad_norm"),
    [("paper", 115_000_000, 0.01, 40.0), ("code", 80_000_000, 0.02, 3.0), ("auto", 115_000_000, 0.01, 40.0)],
)
def test_presets(tmp_path: Path, preset: str, total_steps: int, entropy_coef: float, max_grad_norm: float) -> None:
    args, _ = paac.parse(["--preset", preset, "--run-dir", str(tmp_path / "run")])
    assert (args.total_steps, args.entropy_coef, args.max_grad_norm) == (total_steps, entropy_coef, max_grad_norm)
    assert (args.n_envs, args.t_max, args.gamma, args.arch) == (32, 5, 0.99, "nips")
    assert (args.value_coef, args.rms_decay, args.rms_eps, args.clip_rewards) == (0.25, 0.99, 0.1, True)
    assert args.learning_rate == pytest.approx(0.0224, abs=1e-12)


@pytest.mark.parametrize(("env_id", "name"), [("CartPole-v1", "vector"), ("Pendulum-v1", "continuous")])
def test_presets_of_vectors(tmp_path: Path, env_id: str, name: str) -> None:
    args, _ = paac.parse(["--env-id", env_id, "--run-dir", str(tmp_path / "run")])
    preset = paac.PRESETS[name]
    assert args.preset == name and {key: getattr(args, key) for key in preset} == preset


@pytest.mark.parametrize("n_envs", [1, 16, 33, 256])
@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "CartPole-v1"])
def test_learning_rate_is_proportional_to_n_envs(tmp_path: Path, n_envs: int, env_id: str) -> None:
    args, _ = paac.parse(["--env-id", env_id, "--n-envs", str(n_envs), "--run-dir", str(tmp_path / "run")])
    assert args.learning_rate == pytest.approx(0.0007 * n_envs, rel=1e-12)


@pytest.mark.parametrize("n_envs", [1, 16, 256])
def test_constants_of_box_actions_hold_for_any_n_envs(tmp_path: Path, n_envs: int) -> None:
    """They are those of the runs in results/mujoco, as the README tells them."""
    args, _ = paac.parse(["--env-id", "Pendulum-v1", "--n-envs", str(n_envs), "--run-dir", str(tmp_path / "run")])
    assert (args.learning_rate, args.gamma, args.rms_eps, args.t_max) == (3e-3, 0.99, 1e-5, 20)
    assert (args.entropy_coef, args.value_coef, args.reward_scale, args.clip_rewards) == (1e-4, 1.0, 0.1, False)


def test_a_flag_overrides_the_preset(tmp_path: Path) -> None:
    flags = ["--entropy-coef", "0", "--learning-rate", "0.5", "--n-envs", "64", "--no-clip-rewards"]
    args, _ = paac.parse(["--preset", "code", *flags, "--run-dir", str(tmp_path / "run")])
    assert (args.entropy_coef, args.learning_rate, args.clip_rewards, args.max_grad_norm) == (0, 0.5, False, 3.0)


# ---------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("arch", "counts"),
    [("nips", (677_429, 677_943, 678_714, 681_027)), ("nature", (1_686_693, 1_687_719, 1_689_258, 1_693_875))],
)
def test_parameter_counts(arch: str, counts: tuple[int, ...]) -> None:
    for n_actions, count in zip((4, 6, 9, 18), counts, strict=True):
        assert sum(p.numel() for p in actor_critic(arch, n_actions=n_actions).parameters()) == count


@pytest.mark.parametrize(
    ("arch", "bounds"),
    [
        ("nips", [0.0625, 0.0625, 0.019642, 0.0625, 0.0625]),
        ("nature", [0.0625, 0.044194, 0.041667, 0.017857, 0.044194, 0.044194]),
    ],
)
def test_initial_parameters_fill_their_bounds(arch: str, bounds: list[float]) -> None:
    """Biases as well: of 40 networks, so that there are enough of them."""
    models = [actor_critic(arch, n_actions=6, seed=seed) for seed in range(40)]
    layers = [[m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)] for model in models]
    assert len(layers[0]) == len(bounds)
    for same_layers, bound in zip(zip(*layers, strict=True), bounds, strict=True):
        for name in ("weight", "bias"):
            p = torch.stack([getattr(layer, name) for layer in same_layers])
            assert 0.9 * bound < p.abs().max() <= bound * 1.0001
            assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)


@pytest.mark.parametrize("arch", ["nips", "nature"])
def test_network_gives_the_numbers_of_a_plain_contiguous_one(arch: str) -> None:
    """Written out in torch.nn.functional, with the input divided by 255."""
    model = actor_critic(arch, n_actions=6)
    obs = random_obs(arch, 3)
    logits, values = model(obs)
    assert (logits.shape, values.shape, logits.dtype) == ((3, 6), (3,), torch.float32)
    params = iter([p.detach().clone(memory_format=torch.contiguous_format) for p in model.parameters()])
    x = obs.float() / 255
    for stride, size in ((4, 20), (2, 9), (1, 7))[: 2 if arch == "nips" else 3]:
        x = F.relu(F.conv2d(x, next(params), next(params), stride))
        assert x.shape[2:] == (size, size)
    x = F.relu(F.linear(x.reshape(3, -1), next(params), next(params)))
    torch.testing.assert_close(logits, F.linear(x, next(params), next(params)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, F.linear(x, next(params), next(params))[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["nips", "nature"])
def test_bfloat16_is_near_float32(arch: str) -> None:
    torch.manual_seed(1)
    exact = paac.ActorCritic(IMAGE, spaces.Discrete(6), arch)
    rough = paac.ActorCritic(IMAGE, spaces.Discrete(6), arch, bfloat16=True)
    rough.load_state_dict(exact.state_dict())
    check_bfloat16(exact, rough)


def test_network_leaves_its_input_alone() -> None:
    for arch in ("nips", "mlp"):
        obs = random_obs(arch, 2)
        before = obs.clone()
        actor_critic(arch)(obs)
        assert torch.equal(obs, before)


def test_vector_network_has_its_shapes() -> None:
    for continuous, n_outputs in ((False, 4), (True, 2)):
        outputs, values = actor_critic("mlp", continuous)(random_obs("mlp", 5))
        assert (outputs.shape, values.shape) == ((5, n_outputs), (5,))


# ---------------------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize("seed", range(4))
def test_running_norm_against_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = (rng.normal(size=(400, 3)) * [0.1, 1, 30] + [5, 0, -100]).astype(np.float32)
    norm, shuffled = paac.RunningNorm(3, eps=1e-8, clip=10.0), rng.permutation(data)
    cuts = np.sort(rng.integers(1, 400, size=9))
    for part in np.split(shuffled, np.unique(cuts)):
        norm.update(torch.from_numpy(part))
    assert norm.count.item() == 400
    np.testing.assert_allclose(norm.mean.numpy(), data.mean(0, dtype=np.float64), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norm.var.numpy(), data.var(0, dtype=np.float64), rtol=1e-3)
    expected = (data - data.mean(0, dtype=np.float64)) / data.std(0, dtype=np.float64)
    np.testing.assert_allclose(norm(torch.from_numpy(data)).numpy(), expected, atol=5e-3)


def test_running_norm_takes_a_rollout_at_once() -> None:
    a, b = (paac.RunningNorm(3, eps=1e-8, clip=10.0) for _ in range(2))
    x = torch.randn(5, 4, 3)
    a.update(x)
    b.update(x.reshape(20, 3))
    assert all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))


def test_running_norm_clips_and_starts_as_identity() -> None:
    norm = actor_critic("mlp").trunk
    torch.testing.assert_close(norm(torch.tensor([[0.5, -3.0, 9.0]])), torch.tensor([[0.5, -3.0, 9.0]]))
    assert norm(torch.tensor([[1e6, -1e6, 11.0]])).tolist() == [[10, -10, 10]]
    norm.update(torch.full((7, 3), 3.0))  # a constant has no variance
    assert norm(torch.tensor([[3.0, 3.0, 3.0]])).tolist() == [[0, 0, 0]]
    assert norm(torch.tensor([[3.0005, 3.0, 2.9995]]))[0].tolist() == pytest.approx([5, 0, -5], rel=1e-3)  # / 1e-4


def test_running_norm_keeps_its_accuracy() -> None:
    """After 10,000 rollouts of 80 vectors a mean far from zero and a small variance still come out right."""
    rng, norm = np.random.default_rng(0), paac.RunningNorm(1, eps=1e-8, clip=10.0)
    data = (rng.normal(size=(10_000, 80, 1)) * 0.1 + 7).astype(np.float32)
    for part in torch.from_numpy(data):
        norm.update(part)
    assert norm.mean.item() == pytest.approx(7, abs=1e-3)
    assert norm.var.item() == pytest.approx(0.01, rel=0.02)


def test_policy_of_evaluation_samples_as_in_training() -> None:
    model = actor_critic("mlp")
    with torch.no_grad():
        model.policy[-1].weight *= 4
        logits = model(torch.ones(1, 3))[0][0].double()
    policy = paac.make_policy(model, paac.Args())
    expected = (logits.exp() / logits.exp().sum()).numpy()
    assert 0.2 < expected.max() < 0.8
    torch.manual_seed(0)
    actions = policy(np.ones((20_000, 3), np.float32))
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, expected, atol=0.015)


# ---------------------------------------------------------------------------------------------------- actions


def test_to_env_stretches_to_the_bounds() -> None:
    space = spaces.Box(np.array([-2, 0, -3]), np.array([2, 10, -1]), dtype=np.float64)
    actions = torch.tensor([[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, -0.5, 0.5], [-7.0, 7.0, 7.0]])
    result = paac.to_env(actions, space)
    assert result.dtype == np.float64
    expected = [[-2, 0, -3], [0, 5, -2], [2, 10, -1], [1, 2.5, -1.5], [-2, 10, -1]]
    np.testing.assert_allclose(result, expected)


def test_to_env_leaves_unbounded_dimensions_alone() -> None:
    space = spaces.Box(
        np.array([-np.inf, -4, 0], np.float32), np.array([np.inf, 4, np.inf], np.float32), dtype=np.float32
    )
    result = paac.to_env(torch.tensor([[-7.5, 0.5, 3.0], [7.5, -0.5, -3.0]]), space)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, [[-7.5, 2, 3], [7.5, -2, 0]])


def test_to_env_takes_the_largest_float_for_no_bound() -> None:
    bound = np.array([np.finfo(np.float32).max, 1], np.float32)
    result = paac.to_env(torch.tensor([[3.0, 3.0], [-5.0, 0.25]]), spaces.Box(-bound, bound))
    np.testing.assert_allclose(result, [[3, 1], [-5, 0.25]])


def test_to_env_stays_within_bounds_that_rounding_leaves() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        ends = np.sort(rng.normal(size=(2, 1000)).astype(dtype), axis=0)
        space = spaces.Box(*ends, dtype=dtype)
        for end in (-1.0, 1.0):
            assert space.contains(paac.to_env(torch.full((1, 1000), end), space)[0])


def test_to_env_rounds_to_integers() -> None:
    space = spaces.Box(0, 10, (4,), np.int64)
    result = paac.to_env(torch.tensor([[-1.0, 1.0, 0.18, -0.18]]), space)
    assert result.dtype == np.int64 and result.tolist() == [[0, 10, 6, 4]]  # 5.9 and 4.1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64])
def test_to_env_reaches_the_ends_of_wide_integers(dtype: type) -> None:
    info = np.iinfo(dtype)
    result = paac.to_env(torch.tensor([[-1.0], [1.0], [9.0]]), spaces.Box(info.min, info.max, (1,), dtype))
    assert result.dtype == dtype and result.ravel().tolist() == [info.min, info.max, info.max]


def test_to_env_passes_discrete_actions_on() -> None:
    result = paac.to_env(torch.tensor([0, 3, 2]), spaces.Discrete(4))
    assert result.tolist() == [0, 3, 2] and result.dtype == np.int64


# ------------------------------------------------------------------------------------- Algorithm 1, as a whole


class SlowPaac:
    """Algorithm 1 from the environments' own records, a sample at a time, in double precision."""

    def __init__(self, initial: dict[str, Tensor], args: dict, continuous: bool) -> None:
        self.args, self.continuous = args, continuous
        self.params = {k: v.double().requires_grad_() for k, v in initial.items() if not k.startswith("trunk.")}
        self.squares = {k: torch.ones_like(v) for k, v in self.params.items()}
        self.seen: list[np.ndarray] = []  # by RunningNorm before this rollout
        self.norms: list[float] = []
        self.told: list[dict[str, float]] = []  # what is logged of each update

    def network(self, head: str, obs: np.ndarray) -> Tensor:
        x = torch.tensor(obs, dtype=torch.float64)
        if self.seen:
            seen = np.array(self.seen, np.float64)
            x = ((x - torch.tensor(seen.mean(0))) / torch.tensor(seen.var(0) + 1e-8).sqrt()).clamp(-10, 10)
        for layer in (0, 2, 4):
            x = self.params[f"{head}.{layer}.weight"] @ x + self.params[f"{head}.{layer}.bias"]
            x = torch.tanh(x) if layer < 4 else x
        return x

    def value(self, obs: np.ndarray) -> Tensor:
        return self.network("value", obs)[0]

    def raw_action(self, action: np.ndarray, space: gym.Space) -> np.ndarray:
        """The inverse of to_env: the Gaussian's sample of an action that was not clipped."""
        raw = 2 * (action.astype(np.float64) - space.low) / (space.high - space.low) - 1
        assert (abs(raw) < 1).all(), "clipped: choose another seed or scale for this test"
        return raw

    def update(self, walks: list[dict], first: int, samples: list[np.ndarray] | None) -> None:
        a = self.args
        loss = torch.zeros((), dtype=torch.float64)
        new, policy_loss, value_loss, entropies = [], 0.0, 0.0, []
        for e, walk in enumerate(walks):
            for t in range(first, first + a["t_max"]):
                obs = walk["obs"][t]
                new.append(obs)
                R, discount = 0.0, 1.0
                for k in range(t, first + a["t_max"]):
                    reward = walk["reward"][k]
                    R += discount * (np.clip(reward, -1, 1) if a["clip_rewards"] else a["reward_scale"] * reward)
                    discount *= a["gamma"]
                    if walk["end"][k] == "truncated":
                        R += discount * self.value(walk["final_obs"][k]).item()
                    if walk["end"][k]:
                        break
                else:
                    R += discount * self.value(walk["obs"][first + a["t_max"]]).item()
                output, value = self.network("policy", obs), self.value(obs)
                if self.continuous:
                    sigma = self.params["log_std"].exp()
                    z = (torch.tensor(samples[t][e], dtype=torch.float64) - output) / sigma
                    log_prob = (-(z**2) / 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum()
                    entropy = (sigma.log() + 0.5 * math.log(2 * math.pi * math.e)).sum()
                else:
                    log_p = output - output.exp().sum().log()
                    log_prob, entropy = log_p[int(walk["action"][t])], -(log_p.exp() * log_p).sum()
                loss = loss - log_prob * (R - value.item()) - a["entropy_coef"] * entropy
                loss = loss + a["value_coef"] * (R - value) ** 2
                policy_loss -= (log_prob * (R - value) + a["entropy_coef"] * entropy).item() / len(walks)
                value_loss += a["value_coef"] * (R - value.item()) ** 2 / len(walks)
                entropies.append(entropy.item())
        grads = torch.autograd.grad(loss / len(walks), list(self.params.values()))
        norm = math.sqrt(sum((g**2).sum().item() for g in grads))
        self.norms.append(norm)
        step = (first + a["t_max"]) * len(walks)
        lr = a["learning_rate"] * (1 - step / a["total_steps"])
        told = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": np.mean(entropies),
        }
        self.told.append(told | {"losses/grad_norm": norm, "charts/learning_rate": lr})
        with torch.no_grad():
            for (name, p), g in zip(self.params.items(), grads, strict=True):
                g = g * min(1.0, a["max_grad_norm"] / norm)
                self.squares[name] = a["rms_decay"] * self.squares[name] + (1 - a["rms_decay"]) * g**2
                p -= lr * g / (self.squares[name] + a["rms_eps"]).sqrt()
        self.seen += new


CASES = {
    "terminations": {"ends": [[2, "terminated"], [4, "terminated"]]},
    "truncations": {"ends": [[2, "truncated"], [4, "truncated"]]},
    "mixed": {"ends": [[1, "truncated"], [2, "terminated"], [3, "truncated"], [1, "terminated"]]},
    "mixed, clipped": {
        "ends": [[1, "truncated"], [2, "terminated"], [3, "truncated"]],
        "max_grad_norm": 4.0,
        "clip_rewards": True,
    },
    "both at once": {"ends": [[2, "both"], [3, "truncated"]]},  # a time limit reached in the step that terminates
    "continuous": {"ends": [[2, "terminated"], [3, "truncated"], [7, "terminated"]], "continuous": True},
}


@pytest.mark.parametrize("case", CASES)
def test_train_is_algorithm_1(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates of train() (the last has α = 0) against SlowPaac, with ends inside the rollouts."""
    options = {"max_grad_norm": 40.0, "clip_rewards": False, "continuous": False} | CASES[case]
    values = {"total_steps": 18, "t_max": 3, "n_envs": 2, "gamma": 0.9, "entropy_coef": 0.05, "learning_rate": 0.3}
    values |= {"rms_decay": 0.8, "rms_eps": 0.05, "reward_scale": 0.6, "seed": 5, "n_workers": 0, "eval_episodes": 0}
    values |= {"value_coef": 1.5 if options["continuous"] else 0.25, "max_grad_norm": options["max_grad_norm"]}
    flags = [text for k, v in values.items() for text in (f"--{k.replace('_', '-')}", str(v))]
    values["clip_rewards"] = options["clip_rewards"]
    flags.append("--clip-rewards" if options["clip_rewards"] else "--no-clip-rewards")
    kwargs = {"ends": options["ends"], "continuous": options["continuous"]}

    initial, samples, told, count_update = {}, [], [], common.run.Run.count_update

    def watched_count_update(self: common.run.Run, step: int, scalars: dict) -> None:
        told.append({name: common.run.to_float(value) for name, value in scalars.items()})
        count_update(self, step, scalars)

    class Watched(paac.ActorCritic):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            initial.update(copy.deepcopy(self.state_dict()))

    def watched_to_env(actions: Tensor, space: gym.Space) -> np.ndarray:
        samples.append(actions.numpy().copy())
        return to_env(actions, space)

    to_env = paac.to_env
    monkeypatch.setattr(common.run.Run, "count_update", watched_count_update)
    monkeypatch.setattr(paac, "ActorCritic", Watched)
    monkeypatch.setattr(paac, "to_env", watched_to_env)
    monkeypatch.setattr(paac, "env_seed", lambda seed, step: seed)
    run_dir = str(tmp_path / "run")
    argv = ["--env-id", "tests.paac_envs:Walk-v0", "--env-kwargs", json.dumps(kwargs), "--run-dir", run_dir, *flags]
    assert paac.main(argv) == 0

    walks = [paac_envs.WALKS[5], paac_envs.WALKS[6]]
    assert [len(walk["reward"]) for walk in walks] == [9, 9]
    rewards = walks[0]["reward"] + walks[1]["reward"]
    assert min(rewards) < -1 and max(rewards) > 1  # some are clipped, at both ends, where they are
    slow = SlowPaac(initial, values, options["continuous"])
    for update in range(3):
        slow.update(walks, 3 * update, samples)
        assert told[update] == pytest.approx(slow.told[update], rel=1e-3, abs=1e-5)
    if options["max_grad_norm"] < 40:  # the threshold lies where the gradient of the mean would pass unclipped
        assert all(norm / 3 < options["max_grad_norm"] < norm for norm in slow.norms[:2]), slow.norms
    trained = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    changed = 0.0
    for name, p in slow.params.items():
        torch.testing.assert_close(trained[name].double(), p.detach(), rtol=1e-4, atol=2e-5)
        changed = max(changed, (trained[name] - initial[name]).abs().max().item())
    assert changed > 0.02
    seen = np.array(slow.seen)
    np.testing.assert_allclose(trained["trunk.mean"].numpy(), seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained["trunk.var"].numpy(), seen.var(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["nips", "nature", "mlp"])
def test_bytes_that_a_forward_pass_keeps(arch: str) -> None:
    """What autograd saves for one observation more; of vectors the normalised ones as well."""
    model, kept = actor_critic(arch, n_actions=6), []
    for n in (3, 4):
        storages: dict[int, int] = {}

        def save(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        obs = random_obs(arch, n)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            outputs = model(obs)
        kept.append(sum(storages.values()))
        del outputs
    normalised = 4 * obs[0].numel() if arch == "mlp" else 0
    assert kept[1] - kept[0] == paac.KEPT_BYTES[arch] + normalised


# ----------------------------------------------------------------------------------------------------- import


@pytest.mark.parametrize("name", ["paac", "ppo_batch"])
def test_importing_has_no_side_effect(name: str, tmp_path: Path) -> None:
    code = """
import os, random, signal, sys, threading
import ale_py, gymnasium, numpy, torch, tyro, PIL.Image, tqdm, multiprocessing

def state():
    handlers = [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    return [threads, sorted(os.listdir()), dict(os.environ), handlers, torch.get_num_threads(), random.getstate(),
            torch.get_rng_state().tolist(), torch.get_default_dtype(), str(numpy.random.get_state())]

before = state()
import TRAINER as trainer
assert state() == before
assert "OMP_WAIT_POLICY" not in os.environ
assert not [name for name in sys.modules if "tensorboard" in name]
assert callable(trainer.ActorCritic) and not multiprocessing.active_children()
"""
    code = code.replace("TRAINER", name)
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert list(tmp_path.iterdir()) == []
