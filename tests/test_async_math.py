"""The mathematics of a3c, async_q, nstep_q and sarsa against numbers by hand and slow versions of the pseudocode."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

import a3c
import async_q
import common.hogwild
import nstep_q
import sarsa
from common.hogwild import Team, Worker
from common.vec_env import env_seed
from tests import paac_envs

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
Q_TRAINERS = (async_q, nstep_q, sarsa)
TRAINERS = (a3c, *Q_TRAINERS)

Params = dict[str, Tensor]
States = list[tuple[Tensor, Tensor]]


def name_of(value: Any) -> str | None:
    return value.__name__ if isinstance(value, ModuleType) else None


def actor_critic(arch: str, n_actions: int = 4, box: int = 0, lstm: bool = False, seed: int = 0) -> a3c.ActorCritic:
    torch.manual_seed(seed)
    actions = spaces.Box(-1, 1, (box,), np.float32) if box else spaces.Discrete(n_actions)
    return a3c.ActorCritic(VECTOR if arch == "mlp" else IMAGE, actions, arch, lstm)


def q_network(trainer: ModuleType, arch: str, n_actions: int = 4, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return trainer.QNetwork(VECTOR if arch == "mlp" else IMAGE, spaces.Discrete(n_actions), arch)


def n_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------------- constants


def test_constants_of_a3c() -> None:
    args = a3c.Args()
    assert (args.t_max, args.learning_rate, args.gamma, args.entropy_coef) == (5, 7e-4, 0.99, 0.01)
    assert (args.value_coef, args.max_grad_norm, args.rms_decay, args.rms_eps) == (0.25, 40, 0.99, 0.1)
    assert (args.optimizer, args.clip_rewards, args.total_steps) == ("shared-rmsprop", True, 80_000_000)
    assert a3c.PRESETS["continuous"]["entropy_coef"] == 1e-4  # sec. 9


@pytest.mark.parametrize(
    ("flags", "preset"),
    [
        ([], "atari"),
        (["--lstm"], "atari"),
        (["--env-id", "CartPole-v1"], "vector"),
        (["--env-id", "CartPole-v1", "--lstm"], "recurrent"),
        (["--env-id", "Pendulum-v1"], "continuous"),
        (["--env-id", "Pendulum-v1", "--lstm"], "continuous"),
        (["--env-id", "Pendulum-v1", "--preset", "vector"], "vector"),
    ],
)
def test_preset_of_a3c(flags: list[str], preset: str, tmp_path: Path) -> None:
    args, _ = a3c.parse([*flags, "--run-dir", str(tmp_path / "r")])
    constants = vars(a3c.Args()) | a3c.PRESETS[preset]
    names = ("t_max", "learning_rate", "gamma", "entropy_coef", "value_coef", "reward_scale", "rms_eps", "clip_rewards")
    assert args.preset == preset and {n: getattr(args, n) for n in names} == {n: constants[n] for n in names}


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_constants_of_the_q_methods(trainer: ModuleType) -> None:
    args = trainer.Args()
    assert (args.t_max if trainer is nstep_q else args.update_interval) == 5
    assert (args.target_interval, args.epsilon_steps) == (40_000, 4_000_000)
    assert dict(zip(args.epsilon_finals, args.epsilon_probs, strict=True)) == {0.1: 0.4, 0.01: 0.3, 0.5: 0.3}
    assert (args.learning_rate, args.gamma, args.max_grad_norm) == (7e-4, 0.99, 40)
    assert (args.rms_decay, args.rms_eps, args.optimizer) == (0.99, 0.1, "shared-rmsprop")
    assert (args.clip_rewards, args.total_steps, args.eval_epsilon) == (True, 80_000_000, 0.05)


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_preset_of_the_q_methods(trainer: ModuleType, tmp_path: Path) -> None:
    args, _ = trainer.parse(["--env-id", "CartPole-v1", "--run-dir", str(tmp_path / "r")])
    preset = trainer.PRESETS["vector"]
    assert args.preset == "vector" and {name: getattr(args, name) for name in preset} == preset


# --------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("arch", "counts"),
    [("nips", (677_429, 677_943, 678_714, 681_027)), ("nature", (1_686_693, 1_687_719, 1_689_258, 1_693_875))],
)
def test_parameter_counts_of_a3c(arch: str, counts: tuple[int, ...]) -> None:
    for n_actions, count in zip((4, 6, 9, 18), counts, strict=True):
        assert n_parameters(actor_critic(arch, n_actions)) == count
        if arch == "nips":
            assert n_parameters(actor_critic(arch, n_actions, lstm=True)) == count + 526_336
        else:  # 512 features into 256 cells, whose heads see 256 numbers
            cells = 4 * 256 * (512 + 256 + 2)
            assert n_parameters(actor_critic(arch, n_actions, lstm=True)) == 1_684_128 + cells + 257 * (n_actions + 1)


def test_parameter_counts_of_a3c_on_vectors() -> None:
    hidden, cells = 3 * 200 + 200, 4 * 128 * (200 + 128 + 2)
    assert n_parameters(actor_critic("mlp", 4)) == hidden + 201 * 5
    assert n_parameters(actor_critic("mlp", 4, lstm=True)) == hidden + cells + 129 * 5
    assert n_parameters(actor_critic("mlp", box=2)) == 2 * hidden + 201 * 3 + 201  # two networks; 2 means, 1 variance
    assert n_parameters(actor_critic("mlp", box=2, lstm=True)) == 2 * (hidden + cells) + 129 * 3 + 129


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_parameter_counts_of_q_networks(trainer: ModuleType) -> None:
    for n_actions in (4, 6, 9, 18):
        assert n_parameters(q_network(trainer, "nips", n_actions)) == 676_144 + 257 * n_actions
        assert n_parameters(q_network(trainer, "nature", n_actions)) == 1_684_128 + 513 * n_actions
        assert n_parameters(q_network(trainer, "mlp", n_actions)) == 800 + 201 * n_actions


def check_bounds(model: torch.nn.Module, bounds: list[float]) -> None:
    """Every layer's weights and biases fill U(-bound, bound)."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear | torch.nn.LSTMCell)]
    assert len(layers) == len(bounds)
    for layer, bound in zip(layers, bounds, strict=True):
        for p in layer.parameters():
            assert p.abs().max() <= bound * 1.0001
            assert p.numel() < 200 or p.abs().max() > 0.97 * bound
            assert p.numel() < 200 or p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


NIPS_BOUNDS, NATURE_BOUNDS = [0.0625, 0.0625, 0.019642], [0.0625, 0.044194, 0.041667, 0.017857]


def test_initial_parameters_fill_their_bounds() -> None:
    check_bounds(actor_critic("nips", 6), [*NIPS_BOUNDS, 0.0625, 0.0625])
    check_bounds(actor_critic("nips", 6, lstm=True), [*NIPS_BOUNDS, 0.0625, 0.0625, 0.0625])
    check_bounds(actor_critic("nature", 6), [*NATURE_BOUNDS, 0.044194, 0.044194])
    check_bounds(actor_critic("mlp", box=2), [1 / math.sqrt(3)] * 2 + [1 / math.sqrt(200)] * 2)
    for trainer in Q_TRAINERS:
        check_bounds(q_network(trainer, "nips", 6), [*NIPS_BOUNDS, 0.0625])
        check_bounds(q_network(trainer, "nature", 6), [*NATURE_BOUNDS, 0.044194])


@pytest.mark.parametrize("arch", ["nips", "nature"])
def test_networks_on_images_in_plain_functions(arch: str) -> None:
    """torch.nn.functional on the input divided by 255, every observation on its own."""

    def features(params: Iterator[Tensor], obs: Tensor) -> Tensor:
        x = obs[None].double() / 255
        for stride, size in ((4, 20), (2, 9), (1, 7))[: 2 if arch == "nips" else 3]:
            x = F.relu(F.conv2d(x, next(params), next(params), stride))
            assert x.shape[2:] == (size, size)
        return F.relu(F.linear(x.reshape(1, -1), next(params), next(params)))

    obs = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    model = actor_critic(arch, 6)
    outputs, values, states = model(obs, model.initial_states)
    assert (outputs.shape, values.shape, states) == ((2, 3, 6), (2, 3), [None])
    for i, j in np.ndindex(2, 3):
        params = iter([p.detach().double() for p in model.parameters()])
        x = features(params, obs[i, j])
        torch.testing.assert_close(
            outputs[i, j].double(), F.linear(x, next(params), next(params))[0], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            values[i, j].double(), F.linear(x, next(params), next(params))[0, 0], atol=1e-5, rtol=0
        )
    for trainer in Q_TRAINERS:
        model = q_network(trainer, arch, 6)
        q_values = model(obs[0])
        assert q_values.shape == (3, 6)
        for j in range(3):
            params = iter([p.detach().double() for p in model.parameters()])
            expected = F.linear(features(params, obs[0, j]), next(params), next(params))[0]
            torch.testing.assert_close(q_values[j].double(), expected, atol=1e-5, rtol=0)


def test_box_actions_have_two_separate_networks() -> None:
    for lstm in (False, True):
        model = actor_critic("mlp", box=2, lstm=lstm)
        outputs, values, _ = model(torch.randn(4, 1, 3), model.initial_states)
        of_policy = torch.autograd.grad(outputs.square().sum(), list(model.parameters()), allow_unused=True)
        of_value = torch.autograd.grad(values.square().sum(), list(model.parameters()), allow_unused=True)
        assert all((a is None) != (b is None) for a, b in zip(of_policy, of_value, strict=True))
        assert sum(g is not None for g in of_policy) == sum(g is not None for g in of_value) == (8 if lstm else 4)
        assert len({p.data_ptr() for p in model.parameters()}) == len(of_policy)
        assert not torch.equal(model.trunks[0].layers[0].weight, model.trunks[1].layers[0].weight)


# ------------------------------------------------------------------------------------------- returns, targets


def forward_sum(rewards: list[float], bootstrap: float, gamma: float) -> list[float]:
    """R_i = Σ_k γ^k r_{i+k} + γ^{n-i} V, each i from scratch."""
    n = len(rewards)
    return [sum(gamma ** (k - i) * rewards[k] for k in range(i, n)) + gamma ** (n - i) * bootstrap for i in range(n)]


@pytest.mark.parametrize("trainer", (a3c, nstep_q), ids=name_of)
def test_rollout_returns(trainer: ModuleType) -> None:
    assert trainer.rollout_returns([1.0, 2.0, 3.0], 4.0, 0.5).tolist() == [3.25, 4.5, 5.0]
    assert trainer.rollout_returns([1.0, 2.0, 3.0], 0.0, 0.5).tolist() == [2.75, 3.5, 3.0]
    rng = np.random.default_rng(0)
    for n, gamma in itertools.product((1, 2, 5, 20), (0.0, 0.99, 1.0)):
        rewards, bootstrap = rng.normal(size=n).tolist(), float(rng.normal() * 5)
        returns = trainer.rollout_returns(rewards, bootstrap, gamma)
        assert (returns.shape, returns.dtype) == ((n,), torch.float32)
        np.testing.assert_allclose(returns.numpy(), forward_sum(rewards, bootstrap, gamma), rtol=1e-5, atol=1e-5)


def test_one_step_target() -> None:
    q_values = torch.tensor([1.0, -2.0, 4.0, 3.0])
    assert async_q.one_step_target(0.5, False, q_values, 0.5) == 2.5
    assert async_q.one_step_target(0.5, True, q_values, 0.5) == 0.5
    assert async_q.one_step_target(-1.0, False, -q_values, 0.25) == -0.5  # the best of -1, 2, -4, -3


def test_sarsa_target() -> None:
    q_values = torch.tensor([1.0, -2.0, 4.0, 3.0])
    assert [sarsa.sarsa_target(0.5, False, q_values, a, 0.5) for a in range(4)] == [1.0, -0.5, 2.5, 2.0]
    assert [sarsa.sarsa_target(0.5, True, q_values, a, 0.5) for a in range(4)] == [0.5] * 4


# ------------------------------------------------------------------------------------------------------- loss


def test_a3c_loss_by_hand() -> None:
    """-(-1·1 + 0.1·0.5) - (-2·-2 + 0.1·0.25) = 0.95 - 4.025, and 0.25 (1² + 2²)."""
    log_probs, entropies = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])
    values, returns = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0])
    total, policy, value = a3c.a3c_loss(log_probs, entropies, values, returns, 0.1, 0.25)
    assert (policy.item(), value.item()) == (pytest.approx(-3.075), pytest.approx(1.25))
    assert total.item() == pytest.approx(-1.825)
    twice = [torch.cat([x, x]) for x in (log_probs, entropies, values, returns)]
    assert a3c.a3c_loss(*twice, 0.1, 0.25)[0].item() == pytest.approx(2 * -1.825)  # a sum, not a mean


def test_gradient_of_the_a3c_loss() -> None:
    torch.manual_seed(0)
    log_probs, entropies, values = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    returns = torch.randn(5, dtype=torch.float64) * 3
    total, policy, value = a3c.a3c_loss(log_probs, entropies, values, returns, 0.03, a3c.Args().value_coef)
    assert torch.autograd.grad(policy, values, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(value, log_probs, allow_unused=True, retain_graph=True) == (None,)
    total.backward()
    for i in range(5):
        R, v = returns[i].item(), values[i].item()
        assert log_probs.grad[i].item() == pytest.approx(v - R, abs=1e-12)
        assert entropies.grad[i].item() == pytest.approx(-0.03, abs=1e-12)
        assert values.grad[i].item() == pytest.approx(0.5 * (v - R), abs=1e-12)  # half the critic's learning rate


def test_gradient_at_the_logits_in_closed_form() -> None:
    rng, beta = np.random.default_rng(0), 0.02
    logits, advantages, actions = rng.normal(size=(4, 5)), rng.normal(size=4), rng.integers(5, size=4)
    z, values = torch.tensor(logits, requires_grad=True), torch.zeros(4, dtype=torch.float64)
    log_probs, entropies = actor_critic("mlp", 5).log_prob_and_entropy(z, torch.tensor(actions))
    a3c.a3c_loss(log_probs, entropies, values, torch.tensor(advantages), beta, 0.25)[0].backward()
    for i in range(4):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        chosen, entropy = np.arange(5) == actions[i], -(p * np.log(p)).sum()
        expected = -(chosen - p) * advantages[i] + beta * p * (np.log(p) + entropy)
        np.testing.assert_allclose(z.grad[i].numpy(), expected, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- policy


def test_discrete_policy_is_a_categorical() -> None:
    torch.manual_seed(0)
    logits, actions = torch.randn(3, 2, 6, dtype=torch.float64) * 3, torch.tensor([[0, 1], [2, 3], [4, 5]])
    log_probs, entropies = actor_critic("mlp", 6).log_prob_and_entropy(logits, actions)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs, expected.log_prob(actions))
    torch.testing.assert_close(entropies, expected.entropy())


@pytest.mark.parametrize("dims", [1, 2, 5])
def test_box_policy_is_a_normal_with_one_variance(dims: int) -> None:
    torch.manual_seed(dims)
    outputs, actions = torch.randn(3, 2, dims + 1, dtype=torch.float64) * 2, torch.randn(3, 2, dims).double()
    sigma = (torch.log1p(outputs[..., -1:].exp()) + 0.01).sqrt()  # σ² = softplus, and our floor
    expected = torch.distributions.Normal(outputs[..., :-1], sigma.expand(3, 2, dims))
    log_probs, entropies = actor_critic("mlp", box=dims).log_prob_and_entropy(outputs, actions)
    assert log_probs.shape == entropies.shape == (3, 2)
    torch.testing.assert_close(log_probs, expected.log_prob(actions).sum(-1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropies, expected.entropy().mean(-1), rtol=1e-9, atol=1e-9)  # of one dimension
    printed = 0.5 * (math.log(2 * math.pi * sigma[0, 0, 0].item() ** 2) + 1)
    assert entropies[0, 0].item() == pytest.approx(printed, abs=1e-9)


def test_box_policy_stays_finite() -> None:
    outputs = torch.tensor([[0.5, -200.0], [0.5, 1e4]], requires_grad=True)
    log_probs, entropies = actor_critic("mlp", box=1).log_prob_and_entropy(outputs, torch.tensor([[0.5], [0.5]]))
    (log_probs + entropies).sum().backward()
    assert all(x.isfinite().all() for x in (log_probs, entropies, outputs.grad))


def test_frequencies_of_discrete_samples() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.5], [0.0, 3.0, 0.0, 0.0]])
    torch.manual_seed(0)
    samples = actor_critic("mlp", 4).sample(logits.repeat(20_000, 1)).numpy()
    assert (samples.shape, samples.dtype) == ((40_000,), np.int64)
    for row in range(2):
        p = np.exp(logits[row].numpy()) / np.exp(logits[row].numpy()).sum()
        np.testing.assert_allclose(np.bincount(samples[row::2], minlength=4) / 20_000, p, atol=0.015)


def test_gaussian_samples() -> None:
    outputs = torch.tensor([3.0, -2.0, 1.3])
    variance = math.log(1 + math.exp(1.3)) + 0.01
    torch.manual_seed(0)
    samples = actor_critic("mlp", box=2).sample(outputs.expand(20_000, 3)).numpy()
    assert samples.shape == (20_000, 2)
    np.testing.assert_allclose(samples.mean(0), [3, -2], atol=0.05)
    np.testing.assert_allclose(samples.var(0), [variance, variance], rtol=0.05)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03


# ---------------------------------------------------------------------------------------------------- epsilon


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_epsilon_falls_on_a_line(trainer: ModuleType) -> None:
    steps = [0, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 4_000_001, 80_000_000]
    for final, expected in (
        (0.1, [1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]),
        (0.01, [1, 0.7525, 0.505, 0.2575, 0.01, 0.01, 0.01]),
        (0.5, [1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]),
    ):
        assert [trainer.epsilon_at(final, step, 4_000_000) for step in steps] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_final_epsilons(trainer: ModuleType) -> None:
    def frequencies(draws: list[float]) -> list[float]:
        assert set(draws) == {0.1, 0.01, 0.5}
        return [draws.count(x) / len(draws) for x in (0.1, 0.01, 0.5)]

    of_processes = [trainer.draw_epsilon_final(trainer.Args(seed=1), index) for index in range(3000)]
    of_seeds = [trainer.draw_epsilon_final(trainer.Args(seed=seed), 0) for seed in range(3000)]
    for draws in (of_processes, of_seeds):  # four standard deviations are 0.036
        np.testing.assert_allclose(frequencies(draws), [0.4, 0.3, 0.3], atol=0.036)
    torch.manual_seed(5), np.random.seed(5)
    assert [trainer.draw_epsilon_final(trainer.Args(seed=1), index) for index in range(50)] == of_processes[:50]
    args = trainer.Args(epsilon_finals=(0.25, 0.75), epsilon_probs=(0.0, 1.0))
    assert {trainer.draw_epsilon_final(args, index) for index in range(20)} == {0.75}


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_evaluation_explores_as_it_is_told(trainer: ModuleType, epsilon: float) -> None:
    torch.manual_seed(0)
    policy = trainer.make_policy(q_network(trainer, "mlp"), trainer.Args(eval_epsilon=epsilon))
    actions = policy(np.ones((8000, VECTOR.shape[0]), np.float32))
    frequencies = np.sort(np.bincount(actions, minlength=4) / len(actions))
    expected = [*3 * [epsilon / 4], 1 - 0.75 * epsilon]  # one of four actions is the best of this observation
    np.testing.assert_allclose(frequencies, expected, atol=5 * math.sqrt(0.25 / 8000) * (epsilon > 0))


@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_epsilon_greedy(trainer: ModuleType) -> None:
    q_values = torch.tensor([[0.0, 3.0, -1.0, 2.0], [-1.0, -4.0, -2.0, -0.5]]).repeat(20_000, 1)
    torch.manual_seed(0)
    for epsilon in (0.0, 0.4, 1.0):
        actions = trainer.epsilon_greedy(q_values, epsilon)
        assert (actions.shape, actions.dtype) == ((40_000,), torch.int64)
        for row, best in ((0, 1), (1, 3)):
            expected = np.full(4, epsilon / 4) + (1 - epsilon) * (np.arange(4) == best)
            np.testing.assert_allclose(np.bincount(actions[row::2], minlength=4) / 20_000, expected, atol=0.015)
    actions = trainer.epsilon_greedy(q_values, 0.4).numpy()
    explored = np.stack([actions[0::2] != 1, actions[1::2] != 3])
    assert abs(np.corrcoef(explored)[0, 1]) < 0.03  # each row by itself


# ------------------------------------------------------------------------------------------------- optimisers


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_rmsprop_by_hand(trainer: ModuleType) -> None:
    """g: 0.4; 0.36 + 0.1 = 0.46; 0.414 + 0.025 = 0.439. Under the root it is g + 0.1."""
    p, still = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    optimizer = trainer.RMSProp([p, still], lr=0.1, decay=0.9, eps=0.1, initial_square=0.0)
    assert optimizer.state[p]["square"].item() == 0  # there before the first update, so that it can be shared
    expected = 1.0
    for gradient, root in ((2.0, math.sqrt(0.5)), (-1.0, math.sqrt(0.56)), (0.5, math.sqrt(0.539))):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        expected -= 0.1 * gradient / root
        assert p.item() == pytest.approx(expected, abs=1e-14)
    assert optimizer.state[p]["square"].item() == pytest.approx(0.439, abs=1e-14)
    assert still.item() == 1


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_momentum_sgd_by_hand(trainer: ModuleType) -> None:
    """m: 0.2; 0.18 - 0.1 = 0.08; 0.072."""
    p, still = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    optimizer = trainer.MomentumSGD([p, still], lr=0.5, decay=0.9)
    for gradient, mean, expected in ((2.0, 0.2, 0.9), (-1.0, 0.08, 0.86), (0.0, 0.072, 0.824)):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert optimizer.state[p]["mean"].item() == pytest.approx(mean, abs=1e-14)
        assert p.item() == pytest.approx(expected, abs=1e-14)
    assert still.item() == 1


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_make_optimizers(trainer: ModuleType) -> None:
    model = actor_critic("mlp") if trainer is a3c else q_network(trainer, "mlp")
    for name, count, kind, statistic in (
        ("shared-rmsprop", 1, trainer.RMSProp, "square"),
        ("rmsprop", 3, trainer.RMSProp, "square"),
        ("momentum-sgd", 3, trainer.MomentumSGD, "mean"),
    ):
        args = trainer.Args(optimizer=name, n_processes=3, learning_rate=0.3, rms_decay=0.7, rms_eps=0.2)
        optimizers = trainer.make_optimizers(args, model)
        assert [type(optimizer) for optimizer in optimizers] == [kind] * count
        statistics = [optimizer.state[p][statistic] for optimizer in optimizers for p in model.parameters()]
        assert all(not s.any() for s in statistics)
        assert len({s.data_ptr() for s in statistics}) == count * len(list(model.parameters()))
        group = optimizers[-1].param_groups[0]
        assert (group["lr"], group["decay"], group.get("eps", 0.2)) == (0.3, 0.7, 0.2)


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_learning_rate_falls_to_zero(trainer: ModuleType) -> None:
    steps = [0, 20_000_000, 40_000_000, 80_000_000, 80_000_007]
    rates = [trainer.linear_decay(7e-4, step, 80_000_000) for step in steps]
    assert rates == pytest.approx([7e-4, 5.25e-4, 3.5e-4, 0, 0], abs=1e-15)


# ----------------------------------------------------------------------------------------------- the counter T


class Wire:
    """The parent's end is this list."""

    def __init__(self) -> None:
        self.messages: list[tuple] = []

    def send(self, message: tuple) -> None:
        self.messages.append(message)


def make_workers(n: int, total_steps: int = 10_000, step: int = 0) -> list[Worker]:
    team = Team(print, (), n, total_steps, step)
    workers = [Worker(index, *team.shared, total_steps) for index in range(n)]
    for worker in workers:
        worker.connect(Wire())
    return workers


def count(worker: Worker, n: int = 1) -> None:
    for _ in range(n):
        worker.count_step(0.0, False)


def test_global_step_is_the_sum_of_all_counts() -> None:
    a, b, c = make_workers(3, total_steps=20, step=5)
    assert [w.global_step for w in (a, b, c)] == [5, 5, 5]
    count(a, 3), count(b, 4)
    assert (a.global_step, b.global_step) == (8, 12)
    assert c.go_on() and not c.crossed(8) and a.crossed(8)
    count(c, 8)
    assert c.global_step == 20 and not c.go_on() and b.go_on()
    count(b)
    assert b.global_step == 21 and not b.go_on()


def test_the_end_does_not_wait_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = make_workers(1, total_steps=2)
    monkeypatch.setattr(common.hogwild, "time", None)  # nothing to sleep with
    worker.flags[common.hogwild.PAUSE] = 1
    count(worker)
    assert not worker.ended and not worker.parked[0]
    worker.flags[common.hogwild.STOP] = 1
    assert worker.ended
    worker.flags[common.hogwild.STOP] = 0
    count(worker)
    assert worker.ended and not worker.parked[0]


def test_crossing_every_multiple_once() -> None:
    (worker,) = make_workers(1)
    told = []
    for _ in range(30):
        count(worker)
        told += [worker.global_step] * worker.crossed(7)
        assert not worker.crossed(7)
    assert told == [7, 14, 21, 28]


def test_crossing_several_multiples_at_once_is_one_crossing() -> None:
    a, b = make_workers(2)
    count(a, 3)
    assert not a.crossed(10)
    count(b, 44)
    assert [b.crossed(10), b.crossed(10)] == [True, False]  # T = 47
    count(a)
    assert not a.crossed(10)  # T = 48
    count(a, 2)
    assert [a.crossed(10), a.crossed(10)] == [True, False]  # T = 50, the very next multiple


def test_one_of_two_workers_is_told_of_a_crossing() -> None:
    a, b = make_workers(2)
    count(a, 9), count(b, 2)
    count(a)  # both know of T > 10 by now, none has asked
    assert (a.global_step, b.global_step) == (12, 11)
    assert [b.crossed(10), a.crossed(10), b.crossed(10)] == [True, False, False]
    count(b, 7), count(a, 2)
    assert (a.global_step, b.global_step) == (21, 19)
    assert [b.crossed(10), a.crossed(10)] == [False, True]
    count(b)
    assert not b.crossed(10)


def test_crossing_goes_on_from_the_step_of_a_checkpoint() -> None:
    for step, expected in ((25, 30), (30, 40), (0, 10)):
        (worker,) = make_workers(1, step=step)
        assert not worker.crossed(10)
        while not worker.crossed(10):
            count(worker)
        assert worker.global_step == expected


def test_crossings_of_random_workers() -> None:
    """Whether a multiple lies between the step of the last crossing and now, by looking at every number."""
    rng = np.random.default_rng(0)
    for interval in (1, 2, 5, 9):
        workers, last, told = make_workers(3), 0, [0, 0, 0]
        for _ in range(150):
            index = int(rng.integers(3))
            count(workers[index], int(rng.choice([1, 1, 1, 4, 13])))
            T = sum(int(c) for c in workers[0].counts)
            expected = any(n % interval == 0 for n in range(last + 1, T + 1))
            assert workers[index].crossed(interval) == expected
            if expected:
                last, told[index] = T, told[index] + 1
        assert min(told) > 10


def test_episodes_are_told_with_their_raw_return() -> None:
    (worker,) = make_workers(1)
    for reward, done in ((1.5, False), (-4.0, False), (2.0, True), (7.0, True), (1.0, False)):
        worker.count_step(reward, done)
    assert worker.connection.messages == [("episode", -0.5, 3), ("episode", 7.0, 1)]


# ------------------------------------------------------------------------------- an actor-learner in this process


@dataclasses.dataclass
class Call:
    """What an action was drawn from: outputs of π and no ε, or Q-values and ε."""

    outputs: np.ndarray
    epsilon: float | None
    action: np.ndarray


@dataclasses.dataclass
class Played:
    """What a run was given and what it did."""

    args: Any
    walk: dict[str, list]
    steps: list[int]  # T after each own step
    start: int
    initial: Params
    model: torch.nn.Module
    target_model: torch.nn.Module | None
    optimizer: Any  # this process's
    others: list[Any]  # those of other processes
    calls: list[Call]
    messages: list[tuple]
    keys: list[tuple]  # that its random numbers come from
    nudges: tuple[int, ...]  # its own steps during which others change θ

    @property
    def n(self) -> int:
        return len(self.steps)

    def reward(self, k: int) -> float:
        """What is learned from."""
        raw = self.walk["reward"][k]
        return float(np.clip(raw, -1, 1)) if self.args.clip_rewards else raw * self.args.reward_scale

    def epsilon(self, T: int) -> float:
        (final,) = self.args.epsilon_finals
        return 1 + (final - 1) * min(1.0, T / self.args.epsilon_steps)


NUDGE = 1.05


class Crowd(Worker):
    """A worker among others that count `jumps[k]` steps while it takes its own step k, and in some scale θ by NUDGE."""

    jumps: dict[int, int]
    nudges: tuple[int, ...]
    shared_model: torch.nn.Module
    taken = 0

    def count_step(self, reward: float, done: bool) -> None:
        self.counts[0] += self.jumps.get(self.taken, 0)
        if self.taken in self.nudges:
            with torch.no_grad():
                torch._foreach_mul_(list(self.shared_model.parameters()), NUDGE)
        self.taken += 1
        super().count_step(reward, done)


SEED = 5  # Walk begins with episode 5 of the cycle `ends`
# From episode 5 on: 7 steps, 2, 6, 3, 7, 2, ... so that episodes end at steps 7, 9, 15, 18, 25, 27, ...
ENDS = [[3, "terminated"], [7, "truncated"], [2, "both"], [6, "terminated"]]
BASE = {"gamma": 0.9, "learning_rate": 0.02, "rms_decay": 0.8, "rms_eps": 0.05, "reward_scale": 0.6}


def play(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> Played:
    """Run one actor-learner to the end of `until` steps. Besides flags, `case` may hold what is popped first."""
    case = BASE | {"total_steps": 40, "max_grad_norm": 40.0} | case
    ends, continuous = case.pop("ends", ENDS), case.pop("continuous", False)
    until, start, jumps = case.pop("until", 24), case.pop("start", 0), case.pop("jumps", {})
    n_processes, nudges = case.pop("n_processes", 1), case.pop("nudges", ())
    index = case.pop("index", n_processes - 1)
    assert not (jumps or nudges) or n_processes > 1
    flags = ["--env-id", "tests.paac_envs:Walk-v0", "--run-dir", str(tmp_path / "run"), "--seed", str(SEED)]
    flags += ["--env-kwargs", json.dumps({"ends": ends, "continuous": continuous}), "--n-processes", str(n_processes)]
    for key, value in case.items():
        name = key.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    args = trainer.parse(flags)[0]

    keys: list[tuple] = []
    monkeypatch.setattr(trainer, "env_seed", lambda *key: keys.append(key) or key[0])
    calls: list[Call] = []
    target_model = None
    torch.manual_seed(1)
    if trainer is a3c:
        space = spaces.Box(-3, 1, (2,), np.float32) if continuous else spaces.Discrete(3)
        model = a3c.ActorCritic(VECTOR, space, "mlp", args.lstm)
        sample = a3c.ActorCritic.sample

        def watched_sample(self: a3c.ActorCritic, outputs: Tensor) -> Tensor:
            actions = sample(self, outputs)
            calls.append(Call(outputs[0].detach().numpy().copy(), None, actions[0].numpy().copy()))
            return actions

        monkeypatch.setattr(a3c.ActorCritic, "sample", watched_sample)
    else:
        model = trainer.QNetwork(VECTOR, spaces.Discrete(3), "mlp")
        target_model = copy.deepcopy(model)
        epsilon_greedy = trainer.epsilon_greedy

        def watched_epsilon_greedy(q_values: Tensor, epsilon: float) -> Tensor:
            actions = epsilon_greedy(q_values, epsilon)
            calls.append(Call(q_values[0].detach().numpy().copy(), epsilon, actions[0].numpy().copy()))
            return actions

        monkeypatch.setattr(trainer, "epsilon_greedy", watched_epsilon_greedy)

    initial = copy.deepcopy(model.state_dict())
    alone = dataclasses.replace(args, n_processes=1)
    optimizers = [trainer.make_optimizers(alone, model)[0] for _ in range(n_processes)]
    optimizers = optimizers[:1] if args.optimizer == "shared-rmsprop" else optimizers
    others = optimizers[:-1]
    team = Team(trainer.actor_learner, (), n_processes, until, start)
    worker = Crowd(index, *team.shared, until, start)
    worker.jumps, worker.nudges, worker.shared_model = jumps, nudges, model
    worker.connect(Wire())
    targets = [] if target_model is None else [target_model]
    with worker.at_end:
        trainer.actor_learner(worker, args, model, *targets, optimizers)

    steps, now = [], start
    while now < until:
        now += 1 + jumps.get(len(steps), 0)
        steps.append(now)
    walk = paac_envs.WALKS[SEED]
    assert len(walk["reward"]) == len(steps) and worker.global_step == steps[-1] == team.global_step
    messages = worker.connection.messages
    optimizer = optimizers[index % len(optimizers)]
    given = args, walk, steps, start, initial
    return Played(*given, model, target_model, optimizer, others, calls, messages, keys, nudges)


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_a_pause_waits_for_an_update(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint then holds what each counted step has taught, and no copy of θ to θ⁻ is due."""
    log, go_on, report_update = [], Worker.go_on, Worker.report_update
    monkeypatch.setattr(Worker, "go_on", lambda self: log.append("go on") or go_on(self))
    monkeypatch.setattr(Worker, "report_update", lambda self, s: log.append("update") or report_update(self, s))
    flag = "update_interval" if trainer in (async_q, sarsa) else "t_max"
    play(trainer, tmp_path, monkeypatch, {flag: 3})  # rollouts of 3, 3, 1, 2, 3, 3, 3, 3, 3 steps
    assert log == ["go on", "update"] * 9 + ["go on"]


# ----------------------------------------------------------------------- the pseudocode, slowly and in double


def leaf(params: Params) -> Params:
    return {name: p.detach().clone().double().requires_grad_() for name, p in params.items()}


def gradient(of: Tensor, params: Params) -> Params:
    grads = torch.autograd.grad(of, list(params.values()), materialize_grads=True)
    return dict(zip(params, grads, strict=True))


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    return params[f"{name}.weight"] @ x + params[f"{name}.bias"]


def slow_q(params: Params, obs: np.ndarray) -> Tensor:
    x = torch.tensor(obs, dtype=torch.float64)
    return linear(params, "layers.2", linear(params, "layers.0", x).clamp(min=0))


def slow_actor_critic(params: Params, obs: np.ndarray | Tensor, states: States) -> tuple[Tensor, Tensor, States]:
    """One observation (d,): the outputs of π, V and the states after it, the LSTM's gates written out."""
    features, after = [], []
    for j in range(2 if "trunks.1.layers.0.weight" in params else 1):
        trunk, x = f"trunks.{j}", torch.as_tensor(obs, dtype=torch.float64)
        x = linear(params, f"{trunk}.layers.0", x).clamp(min=0)
        if f"{trunk}.lstm.weight_ih" in params:
            h, c = states[j]
            w_x, b_x = params[f"{trunk}.lstm.weight_ih"], params[f"{trunk}.lstm.bias_ih"]
            w_h, b_h = params[f"{trunk}.lstm.weight_hh"], params[f"{trunk}.lstm.bias_hh"]
            gate_in, forget, cell, gate_out = (w_x @ x + b_x + w_h @ h + b_h).split(128)
            c = c / (1 + (-forget).exp()) + cell.tanh() / (1 + (-gate_in).exp())
            x = c.tanh() / (1 + (-gate_out).exp())
            after.append((x, c))
        features.append(x)
    return linear(params, "policy", features[0]), linear(params, "value", features[-1])[0], after


def zero_states() -> States:
    return [(torch.zeros(128, dtype=torch.float64), torch.zeros(128, dtype=torch.float64)) for _ in range(2)]


class Slow:
    """θ, and how a gradient is applied to it."""

    def __init__(self, played: Played) -> None:
        self.played, self.args = played, played.args
        self.theta = leaf(played.initial)
        self.statistics = {name: torch.zeros_like(p) for name, p in self.theta.items()}
        self.norms: list[float] = []  # before clipping
        self.rates: list[float] = []
        self.copies: list[int] = []  # T of every copy θ⁻ ← θ
        self.told: list[dict[str, float]] = []  # of every update: what is logged besides norm and rate
        self.target = leaf(played.initial)

    def nudge(self, k: int) -> None:
        """What others do to θ during step k."""
        if k in self.played.nudges:
            self.theta = leaf({name: p * NUDGE for name, p in self.theta.items()})

    def apply(self, grads: Params, T: int) -> None:
        a = self.args
        norm = math.sqrt(sum((g**2).sum().item() for g in grads.values()))
        lr = a.learning_rate * (1 - min(T, a.total_steps) / a.total_steps)
        self.norms.append(norm)
        self.rates.append(lr)
        for name, p in self.theta.items():
            d = grads[name] * (a.max_grad_norm / norm if norm > a.max_grad_norm else 1)
            if a.optimizer == "momentum-sgd":
                self.statistics[name] = a.rms_decay * self.statistics[name] + (1 - a.rms_decay) * d
                step = lr * self.statistics[name]
            else:
                self.statistics[name] = a.rms_decay * self.statistics[name] + (1 - a.rms_decay) * d**2
                step = lr * d / (self.statistics[name] + a.rms_eps).sqrt()
            self.theta[name] = (p.detach() - step).requires_grad_()

    def copy_target(self, before: int, T: int) -> None:
        """θ⁻ ← θ where one of the steps after `before` up to T is a multiple of I_target."""
        if any(n % self.args.target_interval == 0 for n in range(before + 1, T + 1)):
            self.target = leaf(self.theta)
            self.copies.append(T)

    def tell_q(self, learned: list[tuple[np.ndarray, int, float]], params: Params, epsilon: float | None) -> None:
        """Means over the steps (s, a, y) of an update, and the ε that was drawn with last before it."""
        values = [slow_q(params, obs)[action].item() for obs, action, _ in learned]
        squares = [(y - value) ** 2 for (*_, y), value in zip(learned, values, strict=True)]
        means = {"losses/td_loss": sum(squares) / len(squares), "losses/q_values": sum(values) / len(values)}
        self.told.append(means | {"charts/epsilon": epsilon})

    def check_call(self, call: Call, outputs: Tensor, epsilons: list[float] | None) -> None:
        """That an action was drawn from these outputs and with one of these ε."""
        np.testing.assert_allclose(call.outputs, outputs.detach().numpy(), rtol=1e-3, atol=1e-4)
        assert epsilons is None or any(call.epsilon == pytest.approx(x, abs=1e-9) for x in epsilons)


def slow_one_step(played: Played, on_policy: bool) -> Slow:
    """Algorithm 1; `on_policy`: Sarsa's target. A gradient is taken for each step, on θ as it is at the update."""
    slow, walk, calls = Slow(played), played.walk, iter(played.calls)
    waiting: list[tuple[np.ndarray, int, float]] = []  # s, a, y since the last update
    T, drawn = played.start, next(calls)
    slow.check_call(drawn, slow_q(slow.theta, walk["obs"][0]), [played.epsilon(T)])
    for k in range(played.n):
        action, end, successor = int(walk["action"][k]), walk["end"][k], walk["final_obs"][k]
        assert drawn.action == action
        y, last = played.reward(k), k == played.n - 1
        before, T = T, played.steps[k]
        slow.nudge(k)
        if on_policy:
            drawn = next(calls)  # a', with θ as it is now
            slow.check_call(drawn, slow_q(slow.theta, successor), [played.epsilon(T)])
        if end not in ("terminated", "both"):
            next_q_values = slow_q(slow.target, successor).tolist()
            if on_policy:
                executed = int(drawn.action) if end or last else int(walk["action"][k + 1])
                y += played.args.gamma * next_q_values[executed]
            else:
                y += played.args.gamma * max(next_q_values)
        waiting.append((walk["obs"][k], action, y))
        slow.copy_target(before, T)
        if (k + 1) % played.args.update_interval == 0 or end or last:
            total = {name: torch.zeros_like(p) for name, p in slow.theta.items()}
            slow.tell_q(waiting, slow.theta, drawn.epsilon)
            for obs, taken, target in waiting:
                error = (target - slow_q(slow.theta, obs)[taken]) ** 2
                for name, g in gradient(error, slow.theta).items():
                    total[name] += g
            slow.apply(total, T)
            waiting = []
        if end if on_policy else not last:
            drawn = next(calls)
            if not last:
                slow.check_call(drawn, slow_q(slow.theta, walk["obs"][k + 1]), [played.epsilon(T)])
    assert next(calls, None) is None
    return slow


def rollouts(played: Played, t_max: int) -> Iterator[range]:
    """The steps of each rollout."""
    first = 0
    while first < played.n:
        last = first
        while last + 1 < played.n and last + 1 < first + t_max and not played.walk["end"][last]:
            last += 1
        yield range(first, last + 1)
        first = last + 1


def slow_n_step_q(played: Played) -> Slow:
    """Algorithm S2."""
    slow, walk, T = Slow(played), played.walk, played.start
    for steps in rollouts(played, played.args.t_max):
        snapshot, before, last = leaf(slow.theta), T, steps[-1]
        for k in steps:
            slow.check_call(played.calls[k], slow_q(snapshot, walk["obs"][k]), [played.epsilon(T)])
            assert played.calls[k].action == walk["action"][k]
            T = played.steps[k]
            slow.nudge(k)
        over = walk["end"][last] in ("terminated", "both")
        bootstrap = 0.0 if over else max(slow_q(slow.target, walk["final_obs"][last]).tolist())
        returns = forward_sum([played.reward(k) for k in steps], bootstrap, played.args.gamma)
        total = {name: torch.zeros_like(p) for name, p in snapshot.items()}
        learned = [(walk["obs"][k], int(walk["action"][k]), R) for k, R in zip(steps, returns, strict=True)]
        slow.tell_q(learned, snapshot, played.calls[last].epsilon)
        for obs, taken, R in learned:
            error = (R - slow_q(snapshot, obs)[taken]) ** 2
            for name, g in gradient(error, snapshot).items():
                total[name] += g
        slow.apply(total, T)
        slow.copy_target(before, T)
    assert len(played.calls) == played.n
    return slow


def slow_a3c(played: Played) -> Slow:
    """Algorithm S3, with the LSTM and the Gaussian policy where the run has them."""
    slow, walk, a, states = Slow(played), played.walk, played.args, zero_states()
    for steps in rollouts(played, a.t_max):
        snapshot, last = leaf(slow.theta), steps[-1]
        states = [(h.detach(), c.detach()) for h, c in states]
        passed = []
        for k in steps:
            output, value, states = slow_actor_critic(snapshot, walk["obs"][k], states)
            slow.check_call(played.calls[k], output, None)
            passed.append((output, value, played.calls[k].action))
            slow.nudge(k)
        end = walk["end"][last]
        over = end in ("terminated", "both") or (end == "truncated" and not a.bootstrap_limits)
        bootstrap = 0.0 if over else slow_actor_critic(snapshot, walk["final_obs"][last], states)[1].item()
        returns = forward_sum([played.reward(k) for k in steps], bootstrap, a.gamma)
        loss, policy_loss, value_loss, entropies = torch.zeros((), dtype=torch.float64), 0.0, 0.0, []
        for k, R, (output, value, action) in zip(steps, returns, passed, strict=True):
            if action.ndim:  # Walk's space is Box(-3, 1)
                np.testing.assert_allclose(walk["action"][k], -3 + 2 * (action.clip(-1, 1) + 1), atol=1e-5)
                variance = (1 + output[2].exp()).log() + 0.01
                log_prob = torch.zeros((), dtype=torch.float64)
                for x, mean in zip(action.tolist(), output[:2], strict=True):
                    log_prob = log_prob - (x - mean) ** 2 / (2 * variance) - (2 * math.pi * variance).log() / 2
                entropy = 0.5 * ((2 * math.pi * variance).log() + 1)
            else:
                assert action == walk["action"][k]
                p = output.exp() / output.exp().sum()
                log_prob, entropy = p[int(action)].log(), -sum(x * x.log() for x in p)
            loss = loss - log_prob * (R - value.item()) - a.entropy_coef * entropy + a.value_coef * (R - value) ** 2
            policy_loss -= (log_prob * (R - value) + a.entropy_coef * entropy).item()
            value_loss += a.value_coef * (R - value.item()) ** 2
            entropies.append(entropy.item())
        told = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss}
        slow.told.append(told | {"losses/entropy": sum(entropies) / len(entropies)})
        slow.apply(gradient(loss, snapshot), played.steps[last])
        if end:
            states = zero_states()
    assert len(played.calls) == played.n
    return slow


def check(played: Played, slow: Slow) -> None:
    """The same θ, θ⁻, statistics, and what the parent was told."""
    changed = 0.0
    for name, p in played.model.state_dict().items():
        torch.testing.assert_close(p.double(), slow.theta[name].detach(), rtol=1e-4, atol=2e-5)
        changed = max(changed, (p - played.initial[name]).abs().max().item())
    assert changed > 0.02
    assert min(slow.norms) < played.args.max_grad_norm < max(slow.norms)  # some are clipped, others not
    assert min(played.walk["reward"]) < -1 and max(played.walk["reward"]) > 1  # so are rewards, where they are
    if played.target_model is not None:
        for name, p in played.target_model.state_dict().items():
            torch.testing.assert_close(p.double(), slow.target[name].detach(), rtol=1e-4, atol=2e-5)
    for p, statistic in zip(played.model.parameters(), slow.statistics.values(), strict=True):
        (own,) = played.optimizer.state[p].values()
        scale = statistic.abs().max().item()
        torch.testing.assert_close(own.double(), statistic.detach(), rtol=1e-3, atol=1e-4 * scale + 1e-7)
        assert all(not s.any() for other in played.others for s in other.state[p].values())
    episodes, score, length = [], 0.0, 0
    for reward, end in zip(played.walk["reward"], played.walk["end"], strict=True):
        score, length = score + reward, length + 1
        if end:
            episodes.append((pytest.approx(score), length))
            score, length = 0.0, 0
    assert [message[1:] for message in played.messages if message[0] == "episode"] == episodes
    told = [message[1] for message in played.messages if message[0] == "scalars"]
    assert len(told) >= 2  # of the first update, of the last one, and of others where they take seconds
    for k in (0, -1):
        expected = slow.told[k] | {"losses/grad_norm": slow.norms[k], "charts/learning_rate": slow.rates[k]}
        assert told[k] == pytest.approx(expected, rel=1e-3, abs=1e-5)


# ------------------------------------------------------------------------------- whole algorithms against these

A3C_CASES: dict[str, dict[str, Any]] = {
    "mixed ends": {},
    "to the end of T_max": {"total_steps": 24},
    "clipped": {"clip_rewards": True, "max_grad_norm": 20.0},
    "time limits cut the return": {"bootstrap_limits": False},
    "rollouts of 3": {"t_max": 3, "entropy_coef": 0.2, "value_coef": 1.0},
    "among others": {"n_processes": 2, "start": 3, "until": 60, "total_steps": 90, "jumps": {2: 9, 8: 1, 16: 11}},
    "others change θ": {"n_processes": 2, "nudges": (2, 3, 10, 14, 16)},
    "own RMSProp": {"n_processes": 2, "optimizer": "rmsprop"},
    "momentum": {"n_processes": 2, "optimizer": "momentum-sgd", "learning_rate": 0.05},
    "LSTM": {"lstm": True, "max_grad_norm": 10.0},
    "LSTM, long episodes": {
        "lstm": True,
        "t_max": 4,
        "ends": [[13, "truncated"], [14, "terminated"]],
        "until": 30,
        "max_grad_norm": 10.0,
    },
    "continuous": {"continuous": True, "entropy_coef": 0.05, "max_grad_norm": 100.0},  # norms from 47 to 488
    "continuous LSTM": {"continuous": True, "lstm": True},
    "whole episodes": {"continuous": True, "lstm": True, "t_max": 100, "bootstrap_limits": False},
}


@pytest.mark.parametrize("case", A3C_CASES)
def test_a3c_is_algorithm_s3(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(a3c, tmp_path, monkeypatch, {"max_grad_norm": 15.0} | A3C_CASES[case])
    slow = slow_a3c(played)
    check(played, slow)


Q_CASES: dict[str, dict[str, Any]] = {
    "copies between updates": {"target_interval": 8, "until": 26},
    "copies at updates": {"target_interval": 5, "total_steps": 28, "until": 28, "learning_rate": 0.05},
    "clipped": {"target_interval": 4, "clip_rewards": True, "max_grad_norm": 20.0},
    "among others": {
        "n_processes": 2,
        "start": 3,
        "until": 60,
        "total_steps": 90,
        "jumps": {2: 9, 8: 1, 11: 2, 16: 11},
        "target_interval": 4,
    },
    "others change θ": {"n_processes": 2, "target_interval": 8, "nudges": (2, 3, 10, 14, 16)},
    "own RMSProp": {"n_processes": 2, "optimizer": "rmsprop", "target_interval": 8},
    "momentum": {"n_processes": 2, "optimizer": "momentum-sgd", "learning_rate": 0.05, "target_interval": 3},
}


@pytest.mark.parametrize("case", Q_CASES)
@pytest.mark.parametrize("trainer", Q_TRAINERS, ids=name_of)
def test_q_methods_are_their_algorithms(
    trainer: ModuleType, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exploration = {"epsilon_finals": 0.3, "epsilon_probs": 1.0, "epsilon_steps": 20}
    exploration |= {} if trainer is nstep_q else {"update_interval": 5}
    played = play(trainer, tmp_path, monkeypatch, exploration | Q_CASES[case])
    slow = slow_n_step_q(played) if trainer is nstep_q else slow_one_step(played, trainer is sarsa)
    check(played, slow)
    assert len(slow.copies) >= 3
    if case.startswith("copies"):  # θ has changed since the last copy
        assert any((slow.theta[name] - slow.target[name]).abs().max() > 1e-3 for name in slow.theta)


@pytest.mark.parametrize("trainer", TRAINERS, ids=name_of)
def test_processes_differ(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has random streams of its own, new ones when the run goes on, and its own final ε."""
    monkeypatch.setattr(trainer, "draw_epsilon_final", lambda args, index: 0.1 * (index + 1), raising=False)
    exploration, keys = {} if trainer is a3c else {"epsilon_steps": 1}, []
    for index in range(3):
        for start in (0, 4):
            case = {"n_processes": 3, "index": index, "start": start, "until": start + 6}
            played = play(trainer, tmp_path / f"{index}_{start}", monkeypatch, exploration | case)
            keys += played.keys
            if trainer is not a3c:
                assert played.calls[-1].epsilon == pytest.approx(0.1 * (index + 1))
    assert len(keys) == 12 and len({env_seed(*key) for key in keys}) == 12


def test_a_replaced_process_starts_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    team, starts = Team(print, (), 1, total_steps=100, start=3), []
    team.counts[0] = 17
    ours, theirs = multiprocessing.Pipe()
    theirs.close()  # the process is dead
    team.connections = [ours]
    monkeypatch.setattr(team, "replace", lambda index, run: starts.append(team.new_member(index).start))
    team._receive(None)
    assert starts == [17]


@pytest.mark.parametrize(("trainer", "lstm"), [(a3c, True), *((trainer, False) for trainer in TRAINERS)], ids=name_of)
def test_pong_is_played_and_learned_from(trainer: ModuleType, lstm: bool, tmp_path: Path) -> None:
    """Three episodes of 40 steps from the screen, which a time limit ends, and part of a fourth."""
    flags = ["--lstm"] if lstm else []
    flags += ["--env-kwargs", '{"max_num_frames_per_episode": 160}', "--run-dir", str(tmp_path / "r")]
    args = trainer.parse([*flags, "--n-processes", "1", "--learning-rate", "0.01", "--seed", "2"])[0]
    models = [trainer.make_model(args) for _ in range(1 if trainer is a3c else 2)]
    before = copy.deepcopy(models[0].state_dict())
    worker = Team(trainer.actor_learner, (), 1, 130).new_member(0)
    worker.connect(Wire())
    with worker.at_end:
        trainer.actor_learner(worker, args, *models, trainer.make_optimizers(args, models[0]))
    assert [message[2] for message in worker.connection.messages if message[0] == "episode"] == [40] * 3
    for name, p in models[0].state_dict().items():
        assert p.isfinite().all() and not torch.equal(p, before[name])


def test_policy_carries_the_states_of_the_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of two episodes that are evaluated; what is sampled is what is played."""
    outputs, actions = [], [[0, 2], [1, 1], [2, 0], [0, 1]]

    def sample(self: a3c.ActorCritic, output: Tensor) -> Tensor:
        outputs.append(output)
        return torch.tensor(actions[len(outputs) - 1])

    monkeypatch.setattr(a3c.ActorCritic, "sample", sample)
    model = actor_critic("mlp", 3, lstm=True)
    policy, params = a3c.make_policy(model, a3c.Args()), leaf(model.state_dict())
    observations = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    assert [policy(obs).tolist() for obs in observations] == actions
    for i in range(2):
        states = zero_states()
        for obs, output in zip(observations, outputs, strict=True):
            expected, _, states = slow_actor_critic(params, obs[i], states)
            torch.testing.assert_close(output[i].double(), expected.detach(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- LSTM


@pytest.mark.parametrize("box", [0, 2])
@pytest.mark.parametrize("given", [False, True])
def test_lstm_against_an_unrolled_pass(box: int, given: bool) -> None:
    """Outputs, last states and the gradient of one pass over 4 steps of 2 environments."""
    model = actor_critic("mlp", 3, box, lstm=True)
    n_trunks = 2 if box else 1
    obs, of_outputs, of_values = torch.randn(4, 2, 3), torch.randn(4, 2, 3).double(), torch.randn(4, 2).double()
    initial = [(torch.randn(2, 128), torch.randn(2, 128)) for _ in range(n_trunks)] if given else model.initial_states
    outputs, values, after = model(obs, initial)
    total = (outputs * of_outputs).sum() + (values * of_values).square().sum()
    grads = torch.autograd.grad(total, list(model.parameters()))

    params, slow_total = leaf(model.state_dict()), torch.zeros((), dtype=torch.float64)
    for i in range(2):
        states = [(h[i].double(), c[i].double()) for h, c in initial] if given else zero_states()
        for t in range(4):
            output, value, states = slow_actor_critic(params, obs[t, i], states)
            torch.testing.assert_close(outputs[t, i].double(), output, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values[t, i].double(), value, rtol=1e-4, atol=1e-5)
            slow_total = slow_total + (output * of_outputs[t, i]).sum() + (value * of_values[t, i]) ** 2
        for j in range(n_trunks):
            for fast, slow in zip(after[j], states[j], strict=True):
                torch.testing.assert_close(fast[i].double(), slow, rtol=1e-4, atol=1e-5)
    for g, slow_g in zip(grads, gradient(slow_total, params).values(), strict=True):
        assert slow_g.abs().max() > 1e-3
        torch.testing.assert_close(g.double(), slow_g, rtol=1e-3, atol=1e-4)


def same_states(a: list, b: list) -> bool:
    """Where None means zeros."""
    zeros = (torch.zeros(1, 128), torch.zeros(1, 128))
    pairs = [(x or zeros, y or zeros) for x, y in zip(a, b, strict=True)]
    return all(torch.equal(h, k) and torch.equal(c, d) for (h, c), (k, d) in pairs)


@pytest.mark.parametrize("continuous", [False, True])
def test_states_of_the_lstm(continuous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carried on within an episode, also from rollout to rollout; zeros at its start; a bootstrap leaves no trace."""
    passes, forward = [], a3c.ActorCritic.forward

    def watched(self: a3c.ActorCritic, obs: Tensor, states: list) -> tuple[Tensor, Tensor, list]:
        outputs, values, after = forward(self, obs, states)
        passes.append((torch.is_grad_enabled(), obs.numpy().copy(), states, after))
        return outputs, values, after

    monkeypatch.setattr(a3c.ActorCritic, "forward", watched)
    case = {"lstm": True, "t_max": 4, "ends": [[7, "terminated"], [9, "truncated"]], "until": 30}
    played = play(a3c, tmp_path, monkeypatch, case | {"continuous": continuous})
    walk, calls = played.walk, iter(passes)
    zeros = [None] * (2 if continuous else 1)
    carried, n_bootstraps = zeros, 0
    for steps in rollouts(played, 4):
        first = carried
        for k in steps:
            learns, obs, states, after = next(calls)
            assert not learns and np.array_equal(obs[0, 0], walk["obs"][k])
            assert same_states(states, carried)
            assert not same_states(after, carried)
            carried = after
        end = walk["end"][steps[-1]]
        if end != "terminated":
            learns, obs, states, after = next(calls)
            assert not learns and np.array_equal(obs[0, 0], walk["final_obs"][steps[-1]])
            assert same_states(states, carried)
            n_bootstraps += 1
        learns, obs, states, _ = next(calls)
        assert learns and np.array_equal(obs[:, 0], [walk["obs"][k] for k in steps])
        assert same_states(states, first)
        assert not any(x.requires_grad for pair in states if pair for x in pair)
        carried = zeros if end else carried
    assert next(calls, None) is None and n_bootstraps == 9
