"""PAAC against numbers worked out by hand and a slow version written from the paper."""

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
from gymnasium import spaces
from torch import Tensor, nn

import a3c
import apex
import async_q
import nstep_q
import paac
import ppo_batch
import sarsa
from common.norm import RewardScale
from common.vec_env import env_seed
from tests.helpers import returns_of

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
BOX_ACTIONS = spaces.Box(-np.inf, np.inf, (2,), np.float32)  # no bounds: given on as they are
KINDS = ("", "terminated", "truncated")  # how a step may end
ENDS = [(1, "truncated"), (2, "terminated"), (3, "truncated"), (1, "terminated")]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
BOTH = pytest.mark.parametrize("trainer", [paac, ppo_batch])
Q_TRAINERS = [async_q, nstep_q, sarsa]


# --- for the slow versions: environment, run and agent


class Walk(gym.Env):
    """Deterministic, with ends where a test wants them; `walks` has all that happened to each.

    Episode k has the length and the kind of end `ends[k]`, repeated; the seed says where to begin.
    """

    walks: list[dict[str, Any]]

    def __init__(self, ends: list, continuous: bool = False, image: bool = False) -> None:
        self.ends, self.image = ends, image
        self.action_space = BOX_ACTIONS if continuous else spaces.Discrete(3)
        self.observation_space = spaces.Box(0, 255, (84, 84), np.uint8) if image else VECTOR

    def look(self, last: float) -> np.ndarray:
        x = 0.7 * (self.seed % 100) + 1.3 * self.episode + 0.4 * self.length
        if self.image:
            return (np.arange(84 * 84).reshape(84, 84) * math.sin(x) % 256).astype(np.uint8)
        numbers = 3 + 2.5 * math.sin(x), math.cos(2 * x) + 0.3 * last, 0.1 * self.length - 1
        return np.array(numbers, np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if seed is not None:
            self.seed, self.episode = seed, seed % len(self.ends) - 1
            self.walk = {key: [] for key in ("obs", "action", "reward", "end", "final_obs")}
            Walk.walks.append(self.walk | {"seed": seed})
        self.episode, self.length = self.episode + 1, 0
        self.walk["obs"].append(self.look(0.0))
        return self.walk["obs"][-1], {}

    def step(self, action: Any) -> tuple:
        self.length += 1
        length, kind = self.ends[self.episode % len(self.ends)]
        end = kind if self.length == length else ""
        last = float(np.sum(action))
        obs = self.look(last)
        reward = 2 * math.cos(3 * self.episode + self.length) + 0.1 * math.tanh(last)
        if not end:
            self.walk["obs"].append(obs)
        happened = np.array(action), reward, end, obs
        for key, x in zip(("action", "reward", "end", "final_obs"), happened, strict=True):
            self.walk[key].append(x)
        return obs, reward, end in ("terminated", "both"), end in ("truncated", "both"), {}


gym.register("PaacWalk-v0", f"{__name__}:Walk")


class StubRun:
    """What `train` needs of a Run. It keeps what it is given, and all numbers after each update."""

    def __init__(self, model: nn.Module, optimizer: Any, step: int) -> None:
        self.model, self.optimizer, self.step, self.stopped = model, optimizer, step, False
        self.episodes: list[tuple[float, int]] = []
        self.history: list[tuple[dict, dict, dict]] = []  # losses, θ, the optimiser's

    def log_episode(self, episode_return: float, length: int) -> None:
        self.episodes.append((float(episode_return), int(length)))

    def log_update(self, step: int, **losses: Any) -> None:
        losses = {key: torch.as_tensor(x).double().mean().item() for key, x in losses.items()}
        moments = getattr(self.optimizer, "state", {}).values()  # Adam's
        states = list(moments) or [{"square": x} for x in self.optimizer.buffers()]
        optimizer = {key: torch.cat([x[key].flatten() for x in states]) for key in states[0]}
        now = losses | {"step": step}, self.model.state_dict(), optimizer
        self.history.append(copy.deepcopy(now))
        self.stopped = len(self.history) == 3


def run_train(trainer: Any, args: Any, model: nn.Module, optimizer: Any, t_max: int, step: int = 0):
    """Three updates of `train` in two Walks, from a step on."""
    run = StubRun(model, optimizer, step)
    Walk.walks = walks = []
    reward_scale = RewardScale(args)
    trainer.train(args, run, model, optimizer, reward_scale, torch.device("cpu"))
    assert [walk["seed"] - env_seed(args.seed, step) for walk in walks] == [0, 1]
    assert [len(walk["reward"]) for walk in walks] == [3 * t_max] * 2
    rewards = walks[0]["reward"] + walks[1]["reward"]
    assert min(rewards) < -1 and max(rewards) > 1  # so that it matters whether they are clipped
    episodes, earned = [], [[], []]  # raw returns, and lengths
    for t, e in np.ndindex(3 * t_max, 2):
        earned[e].append(walks[e]["reward"][t])
        if walks[e]["end"][t]:
            episodes.append((pytest.approx(sum(earned[e]), abs=1e-5), len(earned[e])))
            earned[e] = []
    assert run.episodes == episodes
    return run, walks


class SlowAgent:
    """The network for vectors, an observation at a time in double precision."""

    def __init__(self, model: nn.Module, args: Any, eps: float, clip: float) -> None:
        self.discrete, self.args, self.eps, self.clip = model.discrete, args, eps, clip
        parameters = model.named_parameters()
        self.params = {name: p.detach().double().requires_grad_() for name, p in parameters}
        self.seen: list[np.ndarray] = []  # the observations that the normalisation knows

    def network(self, head: str, obs: np.ndarray) -> Tensor:
        seen = np.array(self.seen or [[-1.0] * 3, [1.0] * 3], np.float64)  # mean 0, variance 1
        x = (obs.astype(np.float64) - seen.mean(0)) / np.sqrt(seen.var(0) + self.eps)
        x = torch.tensor(np.minimum(np.maximum(x, -self.clip), self.clip))
        for layer in (0, 2, 4):
            x = self.params[f"{head}.{layer}.weight"] @ x + self.params[f"{head}.{layer}.bias"]
            x = torch.tanh(x) if layer < 4 else x
        return x

    def value(self, obs: np.ndarray) -> float:
        return self.network("value", obs).item()

    def log_prob_and_entropy(self, obs: np.ndarray, action: np.ndarray) -> tuple[Tensor, Tensor]:
        output = self.network("policy", obs)
        if self.discrete:
            p = output.exp() / output.exp().sum()
            return p[int(action)].log(), -(p * p.log()).sum()
        sigma = self.params["log_std"].exp()
        density = torch.exp(-(((torch.tensor(action).double() - output) / sigma) ** 2) / 2)
        density = density / (sigma * math.sqrt(2 * math.pi))
        return density.prod().log(), (0.5 * torch.log(2 * math.pi * math.e * sigma**2)).sum()

    def learned_rewards(self, walk: dict, walks: list[dict], end: int) -> list[float]:
        """What stands for the rewards of a walk before step `end`."""
        if self.args.rewards == "clip":
            return [min(max(r, -1.0), 1.0) for r in walk["reward"][:end]]
        G = [returns_of(x["reward"][:end], x["end"][:end], self.args.gamma) for x in walks]
        sigma = math.sqrt(np.square(G).mean())
        return [min(max(r / sigma, -10.0), 10.0) for r in walk["reward"][:end]]

    def clipped_gradient(self, loss: Tensor) -> tuple[dict[str, Tensor], float]:
        """By parameter, and the norm that it had before."""
        grads = torch.autograd.grad(loss, list(self.params.values()), materialize_grads=True)
        norm = math.sqrt(sum(g.square().sum() for g in grads))
        scale = min(1.0, (self.args.max_grad_norm or math.inf) / norm)
        return {name: g * scale for name, g in zip(self.params, grads, strict=True)}, norm

    def check(self, state: dict, optimizer: dict, **statistics: dict[str, Tensor]) -> None:
        """θ, the optimiser's statistics, and mean and variance of the observations."""
        for name, p in self.params.items():
            torch.testing.assert_close(state[name].double(), p.detach(), **CLOSE)
        for key, x in statistics.items():
            x = torch.cat([x[name].flatten() for name in self.params])
            torch.testing.assert_close(optimizer[key].double(), x, **CLOSE)
        seen = np.array(self.seen, np.float64)
        np.testing.assert_allclose(state["trunk.mean"].numpy(), seen.mean(0), **CLOSE)
        std = np.sqrt(seen.var(0) + self.eps)
        np.testing.assert_allclose(state["trunk.std"].numpy(), std, **CLOSE)


def actor_critic(trainer: Any, arch: str, actions: int | gym.Space = 4, **flags: Any) -> nn.Module:
    torch.manual_seed(0)
    actions = spaces.Discrete(actions) if isinstance(actions, int) else actions
    return trainer.ActorCritic(VECTOR if arch == "mlp" else IMAGE, actions, arch, **flags)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


# --- network


COUNTS = {"nips": 677_429, "nature": 1_684_128 + 513 * 5, "mlp": 9_157}
BOUNDS = {
    "nips": [0.0625, 0.0625, 0.019642, 0.0625, 0.0625],
    "nature": [0.0625, 0.044194, 0.041667, 0.017857, 0.044194, 0.044194],
    "mlp": [3**-0.5, 0.125, 0.125] * 2,
}


@pytest.mark.parametrize("arch", BOUNDS)
def test_initial_parameters_are_uniform_within_their_bounds_or_orthogonal(arch: str) -> None:
    model = actor_critic(paac, arch)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[arch]
    for layer, bound in zip(layers_of(model), BOUNDS[arch], strict=True):
        assert 0.9 * bound < layer.weight.abs().max() <= 1.0001 * bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
        assert 0.001 * bound < layer.bias.abs().max() <= 1.0001 * bound
    four = spaces.Box(-1, 1, (4,))  # four means; two trunks
    orthogonal = layers_of(actor_critic(a3c, arch, four, lstm=False, orthogonal_init=True))
    orthogonal += layers_of(actor_critic(paac, arch, orthogonal_init=True)) * (arch != "mlp")
    for trainer in Q_TRAINERS:
        space = VECTOR if arch == "mlp" else IMAGE
        orthogonal += layers_of(trainer.QNetwork(space, spaces.Discrete(4), arch, True))
    for layer in orthogonal:
        assert not layer.bias.any()
        gain = {4: 0.01, 1: 1.0}.get(len(layer.weight), math.sqrt(2))  # outputs of π or Q; V
        stretches = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        assert stretches.numpy() == pytest.approx(gain, rel=1e-4)


@pytest.mark.parametrize("trainer", [paac, ppo_batch, apex])
def test_bfloat16_is_close_to_float32(trainer: Any) -> None:
    network = apex.QNetwork if trainer is apex else trainer.ActorCritic
    task = IMAGE, spaces.Discrete(6), *([] if trainer is apex else ["nips"])
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    on, off = network(*task, bfloat16=True), network(*task, bfloat16=False)
    on.load_state_dict(off.state_dict())
    for found, expected in zip(on(obs), off(obs), strict=True):
        assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_means_of_bounded_actions_lie_within_their_bounds() -> None:
    obs, bounds = torch.randn(5, 3), spaces.Box(-2, 2, (2,))  # mapped from ±1
    bounded, free = (actor_critic(paac, "mlp", x)(obs)[0] for x in (bounds, BOX_ACTIONS))
    torch.testing.assert_close(bounded, free.tanh())


@BOTH
def test_log_prob_and_entropy_against_torch_distributions(trainer: Any) -> None:
    logits, actions = torch.randn(5, 2, 6) * 3, torch.randint(6, (5, 2))
    log_probs, entropies = actor_critic(trainer, "mlp", 6).log_prob_and_entropy(logits, actions)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs, expected.log_prob(actions))
    torch.testing.assert_close(entropies, expected.entropy())
    model = actor_critic(trainer, "mlp", BOX_ACTIONS)
    model.log_std.data = torch.tensor([-1.0, 0.5])
    means, actions = torch.randn(2, 5, 2, 2)
    log_probs, entropy = model.log_prob_and_entropy(means, actions)
    expected = torch.distributions.Normal(means, model.log_std.exp())
    torch.testing.assert_close(log_probs, expected.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy.expand(5, 2), expected.entropy().sum(-1))


@BOTH
def test_frequencies_of_samples(trainer: Any) -> None:
    p = [0.1, 0.2, 0.3, 0.4]
    samples = actor_critic(trainer, "mlp").sample(torch.tensor(p).log().expand(20_000, 4))
    assert (torch.bincount(samples) / 20_000).tolist() == pytest.approx(p, abs=0.02)
    model = actor_critic(trainer, "mlp", BOX_ACTIONS)
    model.log_std.data = torch.tensor([-1.0, 0.5])
    samples = model.sample(torch.tensor([3.0, -2.0]).expand(20_000, 2)).detach().numpy()
    found = samples.mean(0), samples.std(0)
    np.testing.assert_allclose(found, ([3, -2], np.exp([-1.0, 0.5])), atol=0.05)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03


@BOTH
def test_running_norm_against_numpy_over_all_data(trainer: Any) -> None:
    eps, clip = (1e-8, 10) if trainer is paac else (1e-2, 5)
    norm = actor_critic(trainer, "mlp").trunk
    data = np.random.default_rng(0).normal(size=(460, 3)) * [0.1, 0, 30] + [5, 1, -100]
    for part in np.split(data.astype(np.float32), [1, 40, 49, 380]):
        norm.update(torch.from_numpy(part.reshape(-1, 1, 3)))  # (t_max, n_envs, size)
    far = data[:50] * [1, 1, -2] + [0, 3 * math.sqrt(eps), 0]  # the second was always 1
    expected = ((far - data.mean(0)) / np.sqrt(data.var(0) + eps)).clip(-clip, clip)
    np.testing.assert_allclose(norm(torch.from_numpy(far).float()), expected, atol=5e-3)


# --- mathematics


def test_returns_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    dones = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    final_values = torch.tensor([[0.0] * 3, [0.0, 0.0, 4.0], [0.0] * 3])  # truncated where V = 4
    returns = paac.n_step_returns(rewards, dones, final_values, torch.full((3,), 8.0), 0.5)
    assert returns.tolist() == [[3.75, 2.0, 3.0], [5.5, 2.0, 4.0], [7.0, 7.0, 7.0]]


def discounted_sum(rewards: Any, ends: Any, final_values: Any, bootstrap: float, gamma: float):
    """Σ γ^k r_k + γ^n V of one environment, up to its first end."""
    total = 0.0
    for k, end in enumerate(ends):
        total += gamma**k * rewards[k]
        if end:
            return total + gamma ** (k + 1) * final_values[k] * (end == "truncated")
    return total + gamma ** len(ends) * bootstrap


def test_returns_with_ends_at_every_step() -> None:
    ends = np.array(list(itertools.product(KINDS, repeat=3))).T
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, *ends.shape))
    bootstrap = rng.normal(size=ends.shape[1])
    arrays = rewards, ends != "", np.where(ends == "truncated", values, 0), bootstrap
    returns = paac.n_step_returns(*map(torch.from_numpy, arrays), 0.9)
    for t, e in np.ndindex(ends.shape):
        columns = rewards[t:, e], ends[t:, e], values[t:, e]
        assert returns[t, e] == pytest.approx(discounted_sum(*columns, bootstrap[e], 0.9))


def test_loss_by_hand() -> None:
    """Advantages 1, -1 and 1, 2; Σ log π A = -10; Σ H = 3; Σ (R - V)² = 7; two environments."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    entropies = torch.tensor([[1.0, 0.5], [0.5, 1.0]], requires_grad=True)
    values = torch.tensor([[1.0, 1.0], [0.0, 1.0]], requires_grad=True)
    returns = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    parts = paac.paac_loss(log_probs, entropies, values, returns, 0.1, paac.Args().value_coef)
    assert torch.stack(parts).tolist() == pytest.approx([5.725, (10 - 0.1 * 3) / 2, 0.25 * 7 / 2])
    parts[0].backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-0.5, 0.5], [-0.5, -1.0]]))
    torch.testing.assert_close(entropies.grad, torch.full((2, 2), -0.05))
    torch.testing.assert_close(values.grad, torch.tensor([[-0.25, 0.25], [-0.25, -0.5]]))
    one = torch.tensor(0.75)  # a Gaussian's entropy, the same at every step
    assert paac.paac_loss(log_probs, one, values, returns, 0.1, 0.25)[1].item() == parts[1].item()


PAAC = {"t_max": 5, "rms_decay": 0.99, "arch": "nips", "orthogonal_init": False}
PAAC |= {"anneal_entropy": False}
PAPER = PAAC | {"total_steps": 115_000_000, "entropy_coef": 0.01, "max_grad_norm": 40}
CODE = PAAC | {"total_steps": 80_000_000, "entropy_coef": 0.02, "max_grad_norm": 3}
PFRL = {"total_steps": 10_000_000, "n_envs": 8, "update_interval": 1024, "arch": "nature"}
PFRL |= {"minibatch_size": 256, "update_epochs": 4, "clip_coef": 0.1, "max_grad_norm": 0.5}
PFRL |= {"gae_lambda": 0.95, "entropy_coef": 0.01, "standardize_advantages": True}
PFRL_MUJOCO = {"total_steps": 2_000_000, "update_interval": 2048, "minibatch_size": 64}
PFRL_MUJOCO |= {"update_epochs": 10, "clip_coef": 0.2, "gamma": 0.995, "gae_lambda": 0.97}
PFRL_MUJOCO |= {"entropy_coef": 0, "max_grad_norm": None, "standardize_advantages": True}
MNIH = {"total_steps": 80_000_000, "max_grad_norm": 40, "rms_decay": 0.99, "arch": "nips"}
MNIH |= {"orthogonal_init": False}
MNIH_Q = MNIH | {"target_interval": 40_000, "epsilon_steps": 4_000_000, "eval_epsilon": 0.05}
PRESETS = [  # trainer, flags, constants, initial α, ε of the optimiser
    (paac, "", PAPER, 0.0224, 0.1),
    (paac, "--preset short --learning-rate 0.5", {"orthogonal_init": True}, 0.5, 1e-10),
    (paac, "--preset code --n-envs 8", CODE, 0.0056, 0.1),  # α = 0.0007 n_e
    (ppo_batch, "", PFRL, 2.5e-4, 1e-5),
    (ppo_batch, "--preset continuous", PFRL_MUJOCO, 3e-4, 1e-5),
    (a3c, "", MNIH | {"t_max": 5, "entropy_coef": 0.01, "anneal_entropy": False}, 7e-4, 0.1),
    (nstep_q, "", MNIH_Q | {"t_max": 5}, 7e-4, 0.1),
    *[(x, "", MNIH_Q | {"update_interval": 5}, 7e-4, 0.1) for x in (async_q, sarsa)],
    *[(x, "--preset short", {"orthogonal_init": True}, 7e-4, 1e-5) for x in (a3c, *Q_TRAINERS)],
    *[(x, "--preset vector", {"epsilon_steps": 500_000}, 2e-3, 1e-3) for x in Q_TRAINERS],
]


def test_preset_of_a_task() -> None:
    """Of vectors and of images, with Discrete actions and with a Box."""
    kinds = spaces.Discrete(2), BOX_ACTIONS
    tasks = [(observations, actions) for actions in kinds for observations in (VECTOR, IMAGE)]
    for trainer, names in (
        (paac, ["vector", "paper", "continuous", "continuous"]),
        (a3c, ["vector", "atari", "continuous", "continuous"]),
        (ppo_batch, ["vector", "atari", "continuous", "atari"]),
        (apex, ["vector", "atari"]),
    ):
        assert [trainer.pick_preset(trainer.Args(), *x) for x in tasks[: len(names)]] == names
    # the weight of the entropy of sec. 9
    assert {x.PRESETS["continuous"]["entropy_coef"] for x in (paac, a3c)} == {1e-4}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_main_trains_on_atari(preset: tuple, tmp_path: Path, monkeypatch: Any) -> None:
    trainer, flags, constants, lr, eps = preset

    def train(args: Any, run: Any, model: nn.Module, *rest: Any) -> None:
        expected = {"gamma": 0.99} | constants
        assert {key: getattr(args, key) for key in expected} == expected
        assert trainer is ppo_batch or [*model.parameters()][-1].any() != args.orthogonal_init
        optimizer = rest[0][0] if trainer is a3c else rest[trainer in Q_TRAINERS]
        assert args.learning_rate == pytest.approx(lr)
        assert (optimizer.defaults["eps"] if trainer is ppo_batch else optimizer.eps) == eps
        square = trainer is paac or (trainer in (async_q, sarsa) and "short" in flags)
        assert trainer is ppo_batch or all((x == square).all() for x in optimizer.buffers())
        run.step = args.total_steps

    def evaluate(args: Any, policy: Any) -> None:  # it samples its actions
        screens = np.zeros((100, 4, 84, 84), np.uint8)
        assert trainer in Q_TRAINERS or len(set(policy(screens).tolist())) > 1

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(trainer, "evaluate", evaluate)
    assert trainer.main(f"{flags} --run-dir {tmp_path}/run".split()) == 0


@BOTH
def test_a_gradient_that_is_not_finite_ends_the_run(
    trainer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Before θ changes: the checkpoint that is then saved must be finite."""
    log_prob_and_entropy = trainer.ActorCritic.log_prob_and_entropy

    def not_finite(*args: Any) -> tuple:
        log_probs, entropies = log_prob_and_entropy(*args)
        return math.nan * log_probs, entropies

    monkeypatch.setattr(trainer.ActorCritic, "log_prob_and_entropy", not_finite)
    flags = f"--env-id CartPole-v1 --n-workers 0 --total-steps 4000 --run-dir {tmp_path}/run"
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.main(flags.split())


# --- Algorithm 1 as a whole


class SlowPaac(SlowAgent):
    """Algorithm 1 from what the environments remember, a sample at a time."""

    def __init__(self, model: nn.Module, args: paac.Args, step: int) -> None:
        super().__init__(model, args, eps=1e-8, clip=10)
        self.step = step
        self.squares = {name: torch.ones_like(p) for name, p in self.params.items()}

    def update(self, walks: list[dict], first: int) -> dict[str, float]:
        """The update after steps `first` to first + t_max; what is to be logged of it."""
        a, n_e, end = self.args, len(walks), first + self.args.t_max
        policy_gain, squared_error, entropies, seen = 0, 0, [], []
        entropy_coef = a.entropy_coef * (
            1 - min(2 * self.step / a.total_steps, 1) * a.anneal_entropy
        )
        for walk in walks:
            rewards = self.learned_rewards(walk, walks, end)
            bootstrap = self.value(walk["obs"][end])
            for t in range(first, end):
                finals = [self.value(obs) for obs in walk["final_obs"][t:end]]
                R = discounted_sum(rewards[t:], walk["end"][t:end], finals, bootstrap, a.gamma)
                obs = walk["obs"][t]
                log_prob, entropy = self.log_prob_and_entropy(obs, walk["action"][t])
                V = self.network("value", obs)[0]
                policy_gain = policy_gain + log_prob * (R - V.item()) + entropy_coef * entropy
                squared_error = squared_error + (R - V) ** 2
                entropies.append(entropy.item())
                seen.append(obs)
        policy_loss, value_loss = -policy_gain / n_e, a.value_coef * squared_error / n_e
        grads, norm = self.clipped_gradient(policy_loss + value_loss)
        self.step += n_e * a.t_max
        lr = a.learning_rate * (a.total_steps - self.step) / a.total_steps
        with torch.no_grad():
            for name, p in self.params.items():
                d, g = grads[name], self.squares[name]
                self.squares[name] = g = a.rms_decay * g + (1 - a.rms_decay) * d**2
                p -= lr * d / (g + a.rms_eps).sqrt()
        self.seen += seen
        logged = {"step": self.step, "learning_rate": lr, "grad_norm": norm}
        logged |= {"policy_loss": policy_loss.item(), "value_loss": value_loss.item()}
        return logged | {"entropy": np.mean(entropies)}


CASES: dict[str, dict[str, Any]] = {
    "the clip does not bind": {},
    "the clip binds": {"rewards": "clip", "max_grad_norm": 0.7, "anneal_entropy": True},
    "both at once": {"ends": [(2, "both"), (3, "truncated")], "total_steps": 18},  # α ends at 0
    "continuous": {"learning_rate": 0.02, "value_coef": 1.5},
    "resumed": {"ends": [(3, "truncated"), (3, "terminated")], "step": 12},
}


@pytest.mark.parametrize("case", CASES)
def test_train_is_algorithm_1(case: str) -> None:
    """Three updates, with ends of episodes inside the rollouts, against SlowPaac."""
    options = {"n_envs": 2, "n_workers": 0, "t_max": 3, "total_steps": 36, "gamma": 0.9, "seed": 5}
    options |= {"entropy_coef": 0.05, "learning_rate": 0.3, "rms_decay": 0.8, "rms_eps": 0.05}
    options |= {"rewards": "scale", "ends": ENDS} | CASES[case]
    step, continuous = options.pop("step", 0), case == "continuous"
    kwargs = json.dumps({"ends": options.pop("ends"), "continuous": continuous})
    args = paac.Args("tests.test_paac:PaacWalk-v0", kwargs, **options)
    model = actor_critic(paac, "mlp", BOX_ACTIONS if continuous else 3)
    optimizer = paac.RMSProp(model.parameters(), args.rms_decay, args.rms_eps, 1.0)
    slow = SlowPaac(model, args, step)
    run, walks = run_train(paac, args, model, optimizer, args.t_max, step)
    for k, (logged, state, statistics) in enumerate(run.history):
        expected = slow.update(walks, 3 * k)
        assert (expected["grad_norm"] > args.max_grad_norm) == (case == "the clip binds")
        assert logged == pytest.approx(expected, rel=1e-3, abs=1e-5)
        slow.check(state, statistics, square=slow.squares)
