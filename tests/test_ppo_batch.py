"""Batch PPO against numbers worked out by hand and a slow version written from the papers."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ppo_batch
from tests.test_paac import BOX_ACTIONS, ENDS, KINDS, SlowAgent, actor_critic, layers_of, run_train


def test_initial_weights_for_images_are_normal() -> None:
    """Of standard deviation 1/√fan_in, a hundredth of it in the policy's head."""
    stds = [256**-0.5, 512**-0.5, 576**-0.5, 3136**-0.5, 0.01 * 512**-0.5, 512**-0.5]
    for layer, std in zip(layers_of(actor_critic(ppo_batch, "nature")), stds, strict=True):
        assert not layer.bias.any()
        w = layer.weight.detach().flatten() / std
        error = 5 / math.sqrt(len(w))  # five standard deviations of what is estimated
        found = w.mean().item(), w.std().item(), (w.abs() < 1).float().mean().item()
        assert found == pytest.approx((0, 1, 0.683), abs=error)


def test_initial_weights_for_vectors_are_orthogonal() -> None:
    model = actor_critic(ppo_batch, "mlp", BOX_ACTIONS)
    for layer, gain in zip(layers_of(model), [1, 1, 0.01, 1, 1, 1], strict=True):
        assert not layer.bias.any()
        w = layer.weight.detach() / gain
        w = w if len(w) <= w.shape[1] else w.T
        torch.testing.assert_close(w @ w.T, torch.eye(len(w)), atol=1e-5, rtol=0)
    assert model.log_std.tolist() == [0, 0]


def test_gae_by_hand() -> None:
    """With γ = λ = 1/2; the second environment terminates, the third is truncated where V = 4."""
    rewards, values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 2.0, 8.0]])[..., None].expand(2, 3, 3)
    dones = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    final_values = torch.tensor([[0.0] * 3, [0.0, 0.0, 4.0], [0.0] * 3])
    # δ: 3 + 8/2 - 8 = -1; 2 + 8/2 - 2 = 4, or 2 - 2 = 0, or 2 + 4/2 - 2 = 2; 1 + 2/2 - 4 = -2
    result = ppo_batch.gae(rewards, dones, values, final_values, torch.full((3,), 8.0), 0.5, 0.5)
    assert result.tolist() == [[-2 + 3.75 / 4, -2.0, -1.5], [3.75, 0.0, 2.0], [-1.0, -1.0, -1.0]]


def segment_advantage(rewards, ends, values, final_values, gamma: float, gae_lambda: float):
    """Σ (γλ)^k δ_k of one environment up to its first end; values has one number more."""
    total = 0.0
    for k, end in enumerate(ends):
        next_value = {"": values[k + 1], "truncated": final_values[k]}.get(end, 0.0)
        total += (gamma * gae_lambda) ** k * (rewards[k] + gamma * next_value - values[k])
        if end:
            break
    return total


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.7), (0.9, 0.0), (1.0, 1.0)])
def test_gae_with_ends_at_every_step(gamma: float, gae_lambda: float) -> None:
    ends = np.array(list(itertools.product(KINDS, repeat=3))).T
    rng = np.random.default_rng(0)
    rewards, final_values = rng.normal(size=(2, *ends.shape))
    values = rng.normal(size=(4, ends.shape[1])) * 5  # and the bootstrap
    final = np.where(ends == "truncated", final_values, 0)
    arrays = rewards, ends != "", values[:3], final, values[3]
    result = ppo_batch.gae(*map(torch.from_numpy, arrays), gamma, gae_lambda)
    for t, e in np.ndindex(ends.shape):
        columns = (x[t:, e] for x in (rewards, ends, values, final_values))
        expected = segment_advantage(*columns, gamma, gae_lambda)
        assert result[t, e].item() == pytest.approx(expected, abs=1e-12)


def test_loss_by_hand() -> None:
    """min(ρA, clip(ρ, 0.8, 1.2) A) is 2.4, -3, 1, -1.6, 2.2, -1.8; the value's weight is 1."""
    log_ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 0.9]).log().requires_grad_()
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    errors = torch.tensor([1.0, -2.0, 3.0, 0.0, 1.0, -1.0], requires_grad=True)  # squares: 16
    entropies = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)  # 21
    weight = ppo_batch.Args().value_coef
    parts = ppo_batch.ppo_loss(log_ratios, advantages, errors, entropies, 0.2, 0.5, weight)
    assert torch.stack(parts).tolist() == pytest.approx([1.05, (0.8 - 0.5 * 21) / 6, 16 / 6])
    parts[0].backward()
    slopes = torch.tensor([0.0, 3.0, -1.0, 0.0, -2.2, 1.8])  # 0 where the clip counts
    torch.testing.assert_close(log_ratios.grad, slopes / 6)
    torch.testing.assert_close(errors.grad, 2 * errors.detach() / 6)
    torch.testing.assert_close(entropies.grad, torch.full((6,), -0.5 / 6))


@pytest.mark.parametrize(("n", "size", "epochs", "rows"), [(8, 4, 2, 4), (10, 4, 3, 8)])
def test_every_epoch_visits_each_sample_once(n: int, size: int, epochs: int, rows: int) -> None:
    """Minibatches may hold the end of one epoch and the start of the next."""
    indices = ppo_batch.minibatches(n, size, epochs, torch.device("cpu"))
    assert indices.shape == (rows, size)
    orders = indices.flatten().tolist()
    epochs = [orders[k * n : (k + 1) * n] for k in range(epochs)]
    assert [sorted(order) for order in epochs] == [list(range(n))] * len(epochs)
    assert epochs[0] != epochs[1] != list(range(n))
    rest = orders[len(epochs) * n :]  # from one more epoch, for the last row
    assert len(set(rest)) == len(rest) < size


class SlowPpo(SlowAgent):
    """Batch PPO from what the environments remember, a sample at a time."""

    def __init__(self, model: nn.Module, args: ppo_batch.Args) -> None:
        super().__init__(model, args, eps=0.01, clip=5)
        self.m = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v = dict(self.m)
        self.steps = self.n_clipped = self.n_scaled = 0

    def collect(self, walks: list[dict], first: int, end: int) -> list[list]:
        """Observation, action, log π_old, A and R of each transition, time before environment."""
        a, rows = self.args, []
        for t, walk in itertools.product(range(first, end), walks):
            kinds = walk["end"][t:end]
            if not a.bootstrap_limits:
                kinds = [kind and "terminated" for kind in kinds]
            values = [self.value(obs) for obs in walk["obs"][t : end + 1]]
            final_values = [self.value(obs) for obs in walk["final_obs"][t:end]]
            rewards = self.learned_rewards(walk, walks, end)[t:]
            A = segment_advantage(rewards, kinds, values, final_values, a.gamma, a.gae_lambda)
            obs, action = walk["obs"][t], walk["action"][t]
            log_prob = self.log_prob_and_entropy(obs, action)[0].item()
            rows.append([obs, action, log_prob, A, A + values[0]])
        if a.standardize_advantages:
            A = np.array([row[3] for row in rows])
            for row in rows:
                row[3] = (row[3] - A.mean()) / (A.std() + 1e-8)  # over n, not n - 1
        return rows

    def update(self, rows: list, order: list, lr: float, eps: float, beta: float) -> dict:
        """One step of Adam for each minibatch; what is to be logged of the last."""
        a = self.args
        self.seen += [row[0] for row in rows]
        for indices in order:
            surrogate, squared_error, ratios, entropies = 0, 0, [], []
            for obs, action, old_log_prob, A, R in (rows[i] for i in indices):
                log_prob, entropy = self.log_prob_and_entropy(obs, action)
                ratio = (log_prob - old_log_prob).exp()
                bound = 1 + eps if A > 0 else 1 - eps
                out = ratio > bound if A > 0 else ratio < bound
                self.n_clipped += bool(out)
                surrogate = surrogate + (bound if out else ratio) * A + beta * entropy
                squared_error = squared_error + (R - self.network("value", obs)[0]) ** 2
                ratios.append(ratio.item())
                entropies.append(entropy.item())
            policy_loss = -surrogate / len(indices)
            value_loss = a.value_coef * squared_error / len(indices)
            grads, norm = self.clipped_gradient(policy_loss + value_loss)
            self.n_scaled += norm > (a.max_grad_norm or math.inf)
            self.steps += 1
            with torch.no_grad():
                for name, p in self.params.items():
                    self.m[name] = m = 0.9 * self.m[name] + 0.1 * grads[name]
                    self.v[name] = v = 0.999 * self.v[name] + 0.001 * grads[name] ** 2
                    m, v = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
                    p -= lr * m / (v.sqrt() + a.adam_eps)
        logged = {"policy_loss": policy_loss.item(), "value_loss": value_loss.item()}
        logged |= {"entropy": np.mean(entropies), "grad_norm": norm, "learning_rate": lr}
        logged |= {"clip_fraction": np.mean([abs(r - 1) > eps for r in ratios])}
        return logged | {"approx_kl": np.mean([r - 1 - math.log(r) for r in ratios])}


CLIPPED = {"max_grad_norm": 0.5, "rewards": "clip", "anneal_lr": True, "anneal_clip": True}
CASES: dict[str, dict[str, Any]] = {
    "time limits bootstrap": {},
    "time limits cut": {"bootstrap_limits": False},
    "both at once": {"ends": [(2, "both"), (3, "truncated")], "anneal_entropy": True},
    "all clipped": CLIPPED | {"ends": [(3, "truncated"), (2, "terminated"), (6, "truncated")]},
    "not standardised": {"ends": [(7, "truncated")], "standardize_advantages": False},
    "continuous": {"ends": [(2, "terminated"), (3, "truncated"), (7, "terminated")]},
}


@pytest.mark.parametrize("case", CASES)
def test_train_is_batch_ppo(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates, with ends of episodes inside the rollouts, against SlowPpo."""
    options = {"n_envs": 2, "n_workers": 0, "update_interval": 9, "total_steps": 40, "seed": 5}
    options |= {"gamma": 0.9, "gae_lambda": 0.8, "minibatch_size": 4, "update_epochs": 3}
    options |= {"learning_rate": 0.02, "clip_coef": 0.15, "adam_eps": 1e-3, "entropy_coef": 0.05}
    options |= {"max_grad_norm": None, "rewards": "scale"}
    options |= {"value_coef": 1.7, "anneal_lr": False, "ends": ENDS} | CASES[case]
    kwargs = json.dumps({"ends": options.pop("ends"), "continuous": case == "continuous"})
    args = ppo_batch.Args("tests.test_paac:PaacWalk-v0", kwargs, **options)
    model = actor_critic(ppo_batch, "mlp", BOX_ACTIONS if case == "continuous" else 3)
    optimizer = torch.optim.Adam([ppo_batch.flatten(model)], 99.0, eps=args.adam_eps)
    slow = SlowPpo(model, args)
    order, minibatches = [], ppo_batch.minibatches
    watched = lambda *a: order.append(minibatches(*a)) or order[-1]  # noqa: E731
    monkeypatch.setattr(ppo_batch, "minibatches", watched)
    run, walks = run_train(ppo_batch, args, model, optimizer, t_max=5)
    for k, (logged, state, moments) in enumerate(run.history):
        assert order[k].shape == (8, 4)  # 3 epochs of 10, and 2 more
        lr = 0.02 * (1 - k / 4 if args.anneal_lr else 1)
        eps = 0.15 * (1 - k / 4 if args.anneal_clip else 1)
        rows = slow.collect(walks, 5 * k, 5 * k + 5)
        beta = 0.05 * (1 - k / 4 if args.anneal_entropy else 1)
        expected = slow.update(rows, order[k].tolist(), lr, eps, beta) | {"step": 10 * (k + 1)}
        assert logged == pytest.approx(expected, rel=1e-3, abs=1e-5)
        slow.check(state, moments, exp_avg=slow.m, exp_avg_sq=slow.v)
    assert slow.n_clipped > 5 and (slow.n_scaled > 5 or case != "all clipped")


def test_first_ratio_is_1_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update sees the pictures with the actions that were taken there."""
    log_ratios, ppo_loss = [], ppo_batch.ppo_loss
    watched = lambda x, *a: log_ratios.append(x.detach()) or ppo_loss(x, *a)  # noqa: E731
    monkeypatch.setattr(ppo_batch, "ppo_loss", watched)
    kwargs = json.dumps({"ends": [(2, "truncated")], "image": True})
    args = ppo_batch.Args("tests.test_paac:PaacWalk-v0", kwargs, n_envs=2, n_workers=0, t_max=4)
    args.minibatch_size, args.update_epochs = 8, 2
    model = actor_critic(ppo_batch, "nature", 3)
    model.policy.weight.data *= 100
    optimizer = torch.optim.Adam([ppo_batch.flatten(model)])
    run_train(ppo_batch, args, model, optimizer, t_max=4)
    for first, second in zip(log_ratios[::2], log_ratios[1::2], strict=True):
        assert first.abs().max() < 1e-5 < 1e-3 < second.abs().max()
