"""a3c.py, async_q.py, nstep_q.py and sarsa.py against numbers by hand and slow pseudocode."""

import contextlib
import copy
import functools
import itertools
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch.distributions import Categorical, Normal

import a3c
import async_q
import nstep_q
import paac
import ppo_batch
import sarsa
from common.norm import RewardScale
from tests.async_envs import Walk
from tests.helpers import returns_of

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
Q_TRAINERS = [async_q, nstep_q, sarsa]
TRAINERS = [a3c, *Q_TRAINERS]


def each(*trainers):
    return pytest.mark.parametrize("trainer", trainers, ids=lambda trainer: trainer.__name__)


def actor_critic(arch, n_actions=4, box=0, lstm=False, high=1):
    actions = spaces.Box(-high, high, (box,), np.float32) if box else spaces.Discrete(n_actions)
    return a3c.ActorCritic(VECTOR if arch == "mlp" else IMAGE, actions, arch, lstm)


def test_initial_parameters():
    """As many as there should be, uniform between ±1/√fan_in in every layer, ±1/√cells in LSTMs."""
    torch.manual_seed(0)
    nips, nature = [0.0625, 0.0625, 0.019642], [0.0625, 0.044194, 0.041667, 0.017857]
    inputs, hidden, cells = 1 / math.sqrt(3), 1 / math.sqrt(200), 1 / math.sqrt(128)
    unit, n_hidden, n_cells = spaces.Box(0, 1, (3,)), 3 * 200 + 200, 4 * 128 * (200 + 128 + 2)
    cases = [
        (actor_critic("nips", 4), 677_429, [*nips, 0.0625, 0.0625]),
        (actor_critic("nips", 4, lstm=True), 677_429 + 526_336, [*nips, 0.0625, 0.0625, 0.0625]),
        (actor_critic("nature", 18), 1_693_875, [*nature, 0.044194, 0.044194]),
        (actor_critic("mlp", lstm=True), n_hidden + n_cells + 129 * 5, [inputs, *[cells] * 3]),
        # two networks; two means and a value; the variance
        (actor_critic("mlp", box=2), 2 * n_hidden + 604, [inputs, inputs, hidden / 10, hidden]),
    ]
    assert a3c.ActorCritic(unit, spaces.Discrete(4), "mlp", False).norm.one_scale
    for trainer, n in itertools.product(Q_TRAINERS, (4, 18)):
        assert trainer.QNetwork(unit, spaces.Discrete(n), "mlp").norm is None
        for arch, space, count, bounds in (
            ("nips", IMAGE, 676_144 + 257 * n, [*nips, 0.0625]),
            ("nature", IMAGE, 1_684_128 + 513 * n, [*nature, 0.044194]),
            ("mlp", VECTOR, n_hidden + 201 * n, [inputs, hidden]),
        ):
            cases.append((trainer.QNetwork(space, spaces.Discrete(n), arch), count, bounds))
    kinds = torch.nn.Conv2d | torch.nn.Linear | torch.nn.LSTM
    for model, count, bounds in cases:
        assert sum(p.numel() for p in model.parameters()) == count
        layers = [module for module in model.modules() if isinstance(module, kinds)]
        for layer, bound in zip(layers, bounds, strict=True):
            for p in layer.parameters():
                assert p.abs().max() <= bound * 1.0001
                if p.numel() >= 200:
                    assert p.abs().max() > 0.95 * bound
                    assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)


@pytest.mark.parametrize("arch", ["nips", "nature"])
def test_networks_on_images_in_plain_functions(arch):
    """torch.nn.functional, on each observation divided by 255."""
    obs = torch.randint(0, 256, (2, 1, 4, 84, 84), dtype=torch.uint8)
    model = actor_critic(arch, 6)
    results = [(model, model(obs, model.initial_states)[:2])]
    for trainer in (paac, ppo_batch):
        model = trainer.ActorCritic(IMAGE, spaces.Discrete(6), arch)
        results.append((model, model(obs[:, 0])))
    for trainer in Q_TRAINERS:
        model = trainer.QNetwork(IMAGE, spaces.Discrete(6), arch)
        results.append((model, [model(obs[:, 0])]))
    for (model, outputs), i in itertools.product(results, range(2)):
        params = iter([p.detach().double() for p in model.parameters()])
        x = obs[i, 0].double() / 255
        for stride in (4, 2, 1)[: 2 if arch == "nips" else 3]:
            x = F.relu(F.conv2d(x, next(params), next(params), stride))
        x = F.relu(F.linear(x.flatten(), next(params), next(params)))
        for output in outputs:  # Q, or logits and V
            expected = F.linear(x, next(params), next(params))
            torch.testing.assert_close(output[i].flatten().double(), expected, atol=1e-5, rtol=0)


def test_returns_and_targets():
    for trainer in (a3c, nstep_q):
        assert trainer.rollout_returns([1.0, 2.0, 3.0], 4.0, 0.5).tolist() == [3.25, 4.5, 5.0]
    q_values = torch.tensor([1.0, -2.0, 4.0, 3.0])
    rewards, terminated = torch.full((2,), 0.5), torch.tensor([False, True])
    targets = async_q.one_step_targets(rewards, terminated, torch.stack([q_values] * 2), 0.5)
    assert targets.tolist() == [2.5, 0.5]
    assert sarsa.sarsa_targets(rewards, terminated, q_values[1:3], 0.5).tolist() == [-0.5, 0.5]


def test_a3c_loss():
    """-(-1·1 + 0.1·0.5) - (-2·-2 + 0.1·0.25) = 0.95 - 4.025, and 0.25 (1² + 2²)."""
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropies = torch.tensor([0.5, 0.25], requires_grad=True)
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    coefs = 0.1, a3c.Args().value_coef
    losses = a3c.a3c_loss(log_probs, entropies, values, torch.tensor([2.0, 1.0]), *coefs)
    assert [x.item() for x in losses] == pytest.approx([-3.075, 1.25])
    sum(losses).backward()
    assert log_probs.grad.tolist() == [-1, 2]  # v - R
    assert entropies.grad.tolist() == pytest.approx([-0.1, -0.1])
    assert values.grad.tolist() == [-0.5, 1]  # ½ (V - R), as v is a constant


def test_discrete_policy():
    torch.manual_seed(0)
    logits, actions = torch.randn(3, 2, 6) * 3, torch.tensor([[0, 1], [2, 3], [4, 5]])
    model = actor_critic("mlp", 6)
    log_probs, entropies = model.log_prob_and_entropy(logits, actions)
    torch.testing.assert_close(log_probs, Categorical(logits=logits).log_prob(actions))
    torch.testing.assert_close(entropies, Categorical(logits=logits).entropy())
    for row in logits[0]:
        samples = model.sample(row.expand(20_000, 6)).bincount(minlength=6) / 20_000
        torch.testing.assert_close(samples, row.exp() / row.exp().sum(), atol=0.015, rtol=0)


@pytest.mark.parametrize(("dims", "high"), [(1, 2), (3, np.inf)])
def test_box_policy(dims, high):
    """One σ² = softplus(-1.7) at the start; the entropy is ½ (log 2πσ² + 1) in any dimension."""
    torch.manual_seed(dims)
    model = actor_critic("mlp", box=dims, high=high).requires_grad_(False)
    model.policy.bias.fill_(3)
    outputs, actions = model(torch.randn(3, 2, 3), model.initial_states)[0], torch.randn(3, 2, dims)
    assert outputs.shape == (3, 2, dims) and (outputs.max() < 1) == (high == 2)
    variance = math.log(1 + math.exp(-1.7))
    log_probs, entropies = model.log_prob_and_entropy(outputs, actions)
    torch.testing.assert_close(log_probs, Normal(outputs, variance**0.5).log_prob(actions).sum(-1))
    assert entropies[2, 1].item() == pytest.approx(0.5 * (math.log(2 * math.pi * variance) + 1))
    samples = model.sample(outputs[0, 0].expand(20_000, -1)).numpy()
    np.testing.assert_allclose(samples.mean(0), outputs[0, 0], atol=0.06)
    np.testing.assert_allclose(np.cov(samples.T) / variance, np.eye(dims).squeeze(), atol=0.05)


@each(*Q_TRAINERS)
def test_final_epsilons(trainer):
    """0.1, 0.01 and 0.5 with 0.4, 0.3 and 0.3, whether over processes or over seeds."""
    args = trainer.Args(seed=1)
    of_processes = [trainer.draw_epsilon_final(args, index) for index in range(2000)]
    of_seeds = [trainer.draw_epsilon_final(trainer.Args(seed=seed), 0) for seed in range(2000)]
    for draws in (of_processes, of_seeds):
        shares = [draws.count(x) / len(draws) for x in (0.1, 0.01, 0.5)]
        np.testing.assert_allclose(shares, [0.4, 0.3, 0.3], atol=0.044)  # four times the deviation
    torch.manual_seed(5)  # a resumed run draws the same
    assert [trainer.draw_epsilon_final(args, index) for index in range(50)] == of_processes[:50]


@each(*Q_TRAINERS)
def test_epsilon_greedy(trainer, monkeypatch):
    torch.manual_seed(0)
    for epsilon in (0.0, 0.4, 1.0):
        q_values = torch.tensor([[0.0, 3.0, -1.0], [-1.0, -4.0, -0.5]]).repeat(20_000, 1)
        actions = trainer.epsilon_greedy(q_values, epsilon).numpy()
        for row, best in ((0, 1), (1, 2)):
            expected = np.full(3, epsilon / 3)
            expected[best] += 1 - epsilon
            shares = np.bincount(actions[row::2], minlength=3) / 20_000
            np.testing.assert_allclose(shares, expected, atol=0.015)
        policy = prepare(trainer, monkeypatch, eval_epsilon=epsilon).policy
        shares = np.bincount(policy(np.ones((20_000, 3), np.float32)), minlength=3) / 20_000
        np.testing.assert_allclose(np.sort(shares), np.sort(expected), atol=0.015)


@each(*TRAINERS)
def test_a_gradient_that_is_not_finite_raises(trainer, monkeypatch):
    monkeypatch.setattr(RewardScale, "forward", lambda self, rewards: rewards * math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        play(trainer, monkeypatch)


@each(*TRAINERS)
def test_schedules(trainer):
    rates = [trainer.linear_decay(7e-4, T, 80) for T in (0, 20, 40, 80, 81)]
    assert rates == pytest.approx([7e-4, 5.25e-4, 3.5e-4, 0, 0])
    if trainer is not a3c:
        epsilons = [trainer.epsilon_at(0.1, T, 4) for T in (0, 1, 2, 4, 80)]
        assert epsilons == pytest.approx([1, 0.775, 0.55, 0.1, 0.1])


# --- an actor-learner in this process

# Episodes end after steps 7, 9, 15, 18, 25, ...
ENDS = [[7, "truncated"], [2, "both"], [6, "terminated"], [3, "terminated"]]
CONSTANTS = {"preset": "vector", "gamma": 0.9, "learning_rate": 0.02, "rms_decay": 0.8}
CONSTANTS |= {"rms_eps": 0.05, "total_steps": 40}
EXPLORATION = {"epsilon_finals": 0.3, "epsilon_probs": 1.0, "epsilon_steps": 20}
INTERVAL = {a3c: "t_max", async_q: "update_interval", nstep_q: "t_max", sarsa: "update_interval"}
NUDGE = 1.05  # what others scale θ by


def prepare(trainer, monkeypatch, ends=ENDS, continuous=False, folder=None, **flags):
    """What `main` makes: flags, θ, what else it gives to `train`, and a policy for evaluation."""
    made = SimpleNamespace()

    def train(args, run, model, *rest):
        made.args, made.model, made.rest = args, model, rest
        made.optimizers = rest[0] if trainer is a3c else rest[1:2]
        made.target_model = model if trainer is a3c else rest[0]
        made.initial = copy.deepcopy(model.state_dict())
        made.first = vector(model.parameters())

    kwargs = json.dumps({"ends": ends, "continuous": continuous, "folder": folder})
    words = ["--env-id", "tests.async_envs:AsyncWalk-v0", "--env-kwargs", kwargs]
    constants = CONSTANTS | {INTERVAL[trainer]: 5} | ({} if trainer is a3c else EXPLORATION)
    for name, value in (constants | flags).items():
        words += [f"--{'no-' if value is False else ''}{name.replace('_', '-')}"]
        words += [] if isinstance(value, bool) else [str(value)]
    run = contextlib.nullcontext(SimpleNamespace(complete=True))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Run", lambda script, args, **parts: run)
        patch.setattr(trainer, "train", train)
        patch.setattr(trainer, "evaluate", lambda args, policy: setattr(made, "policy", policy))
        assert trainer.main(words) == 0
    return made


def vector(tensors):
    return torch.cat([x.detach().flatten().double() for x in tensors])


def vectors(made, optimizer):
    """θ, the optimiser's statistics and θ⁻ now."""
    targets = made.target_model.parameters()
    return [vector(x) for x in (made.model.parameters(), optimizer.buffers(), targets)]


def play(trainer, monkeypatch, until=24, start=0, jumps=None, nudges=(), n_processes=1, **flags):
    """Let `actor_learner`, the last process, take `until` steps from T = `start` on.

    Others count `jumps[k]` steps during its k-th step, and scale θ in its steps `nudges`.
    """
    played = prepare(trainer, monkeypatch, n_processes=n_processes, **flags)
    played.until, played.start, played.jumps, played.nudges = until, start, jumps or {}, nudges
    played.snapshots, played.calls, played.messages = [], [], []
    index = n_processes - 1
    played.optimizer = played.optimizers[index % len(played.optimizers)]
    counts, ending = torch.zeros(n_processes, dtype=torch.int64), torch.tensor([False])
    counts[0] = start

    def during_step():
        k = len(played.snapshots)
        played.snapshots.append(vectors(played, played.optimizer))
        if k in nudges:
            torch._foreach_mul_([p.data for p in played.model.parameters()], NUDGE)
        counts[0] += played.jumps.get(k, 0)
        ending[0] = k + 1 == until

    owner, name = (a3c.ActorCritic, "sample") if trainer is a3c else (trainer, "epsilon_greedy")
    draw = getattr(owner, name)

    def watched_draw(first, second):
        actions = draw(first, second)
        outputs, epsilon = (second, None) if trainer is a3c else (first, second)
        played.calls.append((outputs[0], epsilon, actions[0].numpy()))
        return actions

    played.rest = [played.optimizer if x is played.optimizers else x for x in played.rest]
    shared = [*played.rest, counts, *([] if trainer is a3c else [torch.tensor([start])]), ending]
    with monkeypatch.context() as patch:
        patch.setattr(Walk, "during_step", staticmethod(during_step))
        patch.setattr(owner, name, watched_draw)
        parent = SimpleNamespace(send=played.messages.append)
        trainer.actor_learner(index, played.args, start, played.model, *shared, parent)
    played.walk, played.T = Walk.latest.record, int(counts.sum())
    played.seeds = Walk.latest.seed, torch.initial_seed()
    return played


# --- the pseudocode, slowly and in double


class Params(dict):
    """A network's parameters by name, and mean and deviation of its observations."""

    norm = np.zeros(3), np.ones(3)


def leaf(params):
    copied = Params({n: p.detach().clone().double().requires_grad_() for n, p in params.items()})
    copied.norm = getattr(params, "norm", Params.norm)
    return copied


def normal(params, obs):
    mean, std = params.norm
    return torch.tensor(((np.asarray(obs, np.float64) - mean) / std).clip(-10, 10))


def linear(params, name, x):
    return params[f"{name}.weight"] @ x + params[f"{name}.bias"]


def slow_actor_critic(params, obs, states):
    """One observation (d,): the outputs of π, V and the states after it, gates written out."""
    features, after = [], []
    box = "trunks.1.layers.0.weight" in params
    for j in range(2 if box else 1):
        x = linear(params, f"trunks.{j}.layers.0", normal(params, obs))
        x = x.clamp(min=0) if box else torch.where(x > 0, x, x.exp() - 1)
        lstm = [p for name, p in params.items() if name.startswith(f"trunks.{j}.lstm")]
        if lstm:
            h, c = states[j]
            gates = lstm[0] @ x + lstm[1] @ h + lstm[2] + lstm[3]
            gate_in, forget, cell, gate_out = gates.split(128)
            c = c / (1 + (-forget).exp()) + cell.tanh() / (1 + (-gate_in).exp())
            x = c.tanh() / (1 + (-gate_out).exp())
            after.append((x, c))
        features.append(x)
    output = linear(params, "policy", features[0])
    return output.tanh() if box else output, linear(params, "value", features[-1])[0], after


class Slow:
    """θ, θ⁻, the optimiser's statistics and T, and how gradients are applied to them."""

    def __init__(self, args, start, initial, target=None):
        self.args, self.T, self.last_copy, self.ending = args, start, start, False
        initial, target = (
            {name: x for name, x in state.items() if "norm" not in name}
            for state in (initial, target or initial)
        )
        self.theta, self.target = leaf(initial), leaf(target)
        self.seen, self.known = [], {}  # observations; of each walk, how many rewards
        g = getattr(args, "rms_initial_square", 0.0)
        self.statistics = {name: torch.full_like(p, g) for name, p in self.theta.items()}
        self.norms, self.updates, self.copies = [], [], []  # of updates; T of updates and copies

    def q(self, params, obs):
        x = linear(params, "layers.0", normal(params, obs))
        return linear(params, "layers.2", x.tanh())

    def vectors(self):
        target = self.target if hasattr(self.args, "target_interval") else self.theta
        return [vector(x.values()) for x in (self.theta, self.statistics, target)]

    def count(self):
        """T ← T + 1. Returns T, and whether training is over."""
        self.T += 1
        return self.T, self.args.total_steps <= self.T or self.ending

    def rewards(self, walk, first, end):
        """Those of the steps `first` to `end` of a process, which are known from now on."""
        self.known[id(walk)] = walk, end
        raw = np.array(walk.rewards[first:end])
        if self.args.rewards == "clip":
            return raw.clip(-1, 1).tolist()
        size = 1 if isinstance(self.args, a3c.Args) else 10  # of returns
        return (size * (raw / math.sqrt(np.mean(self.squares()))).clip(-10, 10)).tolist()

    def squares(self):
        """G² of every step, from the rewards that are known."""
        parts = ((x.rewards[:n], x.kinds[:n], self.args.gamma) for x, n in self.known.values())
        return np.concatenate([returns_of(*part) for part in parts]) ** 2

    def check(self, call, outputs, action, steps=()):
        """An action was drawn from these outputs, with ε at one of these T, if that was watched."""
        if call is None:
            return action
        torch.testing.assert_close(call[0].double(), outputs.detach(), rtol=1e-3, atol=1e-3)
        epsilons = [1 - 0.7 * min(T / self.args.epsilon_steps, 1) for T in steps]  # to 0.3
        assert call[1] in [pytest.approx(epsilon) for epsilon in epsilons or [None]]
        expected = 2 * call[2].clip(-1, 1) - 1 if call[2].ndim else call[2]  # to Box(-3, 1)
        assert action is None or np.allclose(action, expected, atol=1e-5)
        return call[2]

    def apply(self, loss, params, T, observations):
        a = self.args
        grads = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        yield "gradient"
        norm = math.sqrt(sum((g**2).sum().item() for g in grads))
        lr = a.learning_rate * (1 - min(T, a.total_steps) / a.total_steps)
        for (name, p), d in zip(self.theta.items(), grads, strict=True):
            d = d * min(1, a.max_grad_norm / norm)
            momentum = getattr(a, "optimizer", "") == "momentum-sgd"
            averaged = d if momentum else d**2
            new = a.rms_decay * self.statistics[name] + (1 - a.rms_decay) * averaged
            step = new if momentum else d / (new + a.rms_eps).sqrt()
            self.statistics[name] = new
            self.theta[name] = (p.detach() - lr * step).requires_grad_()
        self.seen += observations
        self.theta.norm = np.mean(self.seen, 0), np.sqrt(np.var(self.seen, 0) + 1e-8)
        self.norms.append(norm)
        self.updates.append(T)

    def apply_q(self, learned, params, T):
        """The summed squares of errors over (s, a, y)."""
        loss = sum((y - self.q(params, obs)[a]) ** 2 for obs, a, y in learned)
        observations = [np.asarray(obs, np.float64) for obs, _, _ in learned]
        yield from self.apply(loss, params, T, observations)

    def copy_target(self):
        """θ⁻ ← θ where a multiple of I_target lies between the last copy and now."""
        passed = range(self.last_copy + 1, self.T + 1)
        if any(T % self.args.target_interval == 0 for T in passed):
            self.target, self.last_copy = leaf(self.theta), self.T
            self.copies.append(self.T)


def sums_of_rewards(rewards, bootstrap, gamma):
    """R_i = Σ_k γ^k r_{i+k} + γ^{n-i} V, each from scratch."""
    n, rewards = len(rewards), [*rewards, bootstrap]
    return [sum(gamma ** (k - i) * rewards[k] for k in range(i, n + 1)) for i in range(n)]


# Generators that yield in every step and before every update. `calls`: how actions were drawn.


def slow_async_q(slow, walk, calls, on_policy=False):
    """Algorithm 1; `on_policy`: with Sarsa's target."""
    k, over, kind, waiting = 0, False, "start", []
    T = before = slow.T
    while not over:
        if kind or not on_policy:  # Sarsa has drawn its next action already, within an episode
            steps = [before, T] if on_policy else [T]
            slow.check(next(calls), slow.q(slow.theta, walk.obs[k]), walk.actions[k], steps)
        yield "step"
        before = T
        T, over = slow.count()
        kind, next_obs = walk.kinds[k], walk.final_obs[k]
        if on_policy:
            executed = None if kind or over else walk.actions[k + 1]
            drawn_by = slow.q(slow.theta, next_obs)
            executed = slow.check(next(calls), drawn_by, executed, [before, T])
        bootstrap, next_q_values = 0, slow.q(slow.target, next_obs).tolist()
        if kind not in ("terminated", "both"):
            bootstrap = next_q_values[executed] if on_policy else max(next_q_values)
        waiting.append((walk.obs[k], walk.actions[k], slow.args.gamma * bootstrap))
        slow.copy_target()
        k += 1
        if k % slow.args.update_interval == 0 or kind or over:
            rewards = slow.rewards(walk, k - len(waiting), k)
            rows = [(obs, a, r + b) for (obs, a, b), r in zip(waiting, rewards, strict=True)]
            yield from slow.apply_q(rows, slow.theta, T)
            waiting = []


def slow_nstep_q(slow, walk, calls):
    """Algorithm S2."""
    k, T, over = 0, slow.T, False
    while not over:
        snapshot, first, kind = leaf(slow.theta), k, ""
        while k < first + slow.args.t_max and not kind and not over:
            slow.check(next(calls), slow.q(snapshot, walk.obs[k]), walk.actions[k], [T])
            yield "step"
            T, over = slow.count()
            kind = walk.kinds[k]
            k += 1
        terminal = kind in ("terminated", "both")
        R = 0 if terminal else max(slow.q(slow.target, walk.final_obs[k - 1]).tolist())
        returns = sums_of_rewards(slow.rewards(walk, first, k), R, slow.args.gamma)
        rows = [*zip(walk.obs[first:k], walk.actions[first:k], returns, strict=True)]
        yield from slow.apply_q(rows, snapshot, T)
        slow.copy_target()


def slow_a3c(slow, walk, calls):
    """Algorithm S3, with the LSTM and the Gaussian policy where there are any."""
    a, k, over, kind = slow.args, 0, False, "start"
    while not over:
        if kind:
            states = [(torch.zeros(128).double(), torch.zeros(128).double())] * 2
        states = [(h.detach(), c.detach()) for h, c in states]
        snapshot, first, kind, passed = leaf(slow.theta), k, "", []
        while k < first + a.t_max and not kind and not over:
            output, value, states = slow_actor_critic(snapshot, walk.obs[k], states)
            action = slow.check(next(calls), output, walk.actions[k])
            passed.append((output, value, torch.as_tensor(action)))
            yield "step"
            T, over = slow.count()
            kind = walk.kinds[k]
            k += 1
        cut = kind and kind != "truncated"
        R = 0 if cut else slow_actor_critic(snapshot, walk.final_obs[k - 1], states)[1].item()
        returns, loss = sums_of_rewards(slow.rewards(walk, first, k), R, a.gamma), 0
        for R, (output, value, action) in zip(returns, passed, strict=True):
            if action.ndim:
                sigma = (1 + snapshot["variance"].exp()).log().sqrt()
                log_prob = Normal(output, sigma).log_prob(action).sum()
                entropy = Normal(0, sigma).entropy()  # of one dimension
            else:
                log_prob = Categorical(logits=output).log_prob(action)
                entropy = Categorical(logits=output).entropy()
            entropy_coef = a.entropy_coef * (1 - min(2 * T / a.total_steps, 1) * a.anneal_entropy)
            loss = loss - log_prob * (R - value.item()) - entropy_coef * entropy
            loss = loss + a.value_coef * (R - value) ** 2
        observations = [np.asarray(obs, np.float64) for obs in walk.obs[first:k]]
        yield from slow.apply(loss, snapshot, T, observations)


SLOW = {a3c: slow_a3c, async_q: slow_async_q, nstep_q: slow_nstep_q}
SLOW[sarsa] = functools.partial(slow_async_q, on_policy=True)


def check_close(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5 * y.abs().max().item() + 1e-8)


def check_statistics(made, slow):
    """Mean and deviation of the observations with θ and θ⁻, and the size of the rewards."""
    for model, params in ((made.model, slow.theta), (made.target_model, slow.target)):
        if model is made.target_model and model is made.model:
            continue
        for x, y in zip((model.norm.mean, model.norm.std), params.norm, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    expected = len(slow.squares()), sum(slow.squares())
    np.testing.assert_allclose(made.rest[-1].sums, expected, rtol=1e-5)


def episodes(walk):
    """Raw return and length of each."""
    ends = [k + 1 for k, kind in enumerate(walk.kinds) if kind]
    return [(sum(walk.rewards[i:j]), j - i) for i, j in itertools.pairwise([0, *ends])]


def compare(trainer, played):
    """A run with the slow one, in every step. Returns the slow one."""
    slow = Slow(played.args, played.start, played.initial)
    process = SLOW[trainer](slow, played.walk, iter(played.calls))
    steps = (point for point in process if point == "step")
    for k, snapshot in enumerate(played.snapshots):
        next(steps)
        check_close(snapshot, slow.vectors())
        if k in played.nudges:
            norm = slow.theta.norm
            slow.theta = leaf({name: p * NUDGE for name, p in slow.theta.items()})
            slow.theta.norm = norm
        slow.T += played.jumps.get(k, 0)
        slow.ending = k + 1 == played.until
    assert next(steps, "over") == "over"
    assert slow.T == played.T
    check_close(vectors(played, played.optimizer), slow.vectors())
    check_statistics(played, slow)
    assert (slow.vectors()[0] - played.first).abs().max() > 0.02
    assert min(slow.norms) < played.args.max_grad_norm < max(slow.norms)  # some are clipped
    reported = [message for message in played.messages if isinstance(message, tuple)]
    np.testing.assert_allclose(reported, episodes(played.walk))
    return slow


A3C_CASES = {
    "mixed ends": {},
    "to the end of T_max": {"total_steps": 24, "until": 99},
    "clipped": {"rewards": "clip"},
    "rollouts of 3": {"anneal_entropy": False, "t_max": 3, "max_grad_norm": 12.0},
    "among others": {"n_processes": 2, "start": 3, "jumps": {2: 9, 8: 1, 16: 11}},
    "others change θ": {"n_processes": 2, "nudges": (2, 3, 10, 14, 16), "value_coef": 1.0},
    "own RMSProp": {"n_processes": 2, "optimizer": "rmsprop", "entropy_coef": 0.2},
    "momentum": {"n_processes": 2, "optimizer": "momentum-sgd", "learning_rate": 0.05},
    "LSTM": {"lstm": True, "t_max": 4, "max_grad_norm": 4.0, "rms_initial_square": 0.3},
    "continuous": {"continuous": True, "entropy_coef": 0.05, "max_grad_norm": 25.0},
    "continuous LSTM": {"continuous": True, "lstm": True, "max_grad_norm": 3.0},
}


@pytest.mark.parametrize("case", A3C_CASES)
def test_a3c_is_algorithm_s3(case, monkeypatch):
    constants = {"entropy_coef": 0.01, "max_grad_norm": 12.0, "total_steps": 90}
    played = play(a3c, monkeypatch, **constants | A3C_CASES[case])
    slow = compare(a3c, played)
    if case == "mixed ends":
        assert slow.updates == [5, 7, 9, 14, 15, 18, 23, 24]


Q_CASES = {
    "copies every 8": {"target_interval": 8},
    "copies every 5": {"target_interval": 5, "total_steps": 28, "until": 99, "learning_rate": 0.05},
    "clipped": {"target_interval": 4, "rewards": "clip"},
    "among others": {"target_interval": 4, "n_processes": 2, "start": 3}
    | {"jumps": {2: 9, 8: 1, 11: 2, 16: 11}, "total_steps": 90},
    "others change θ": {"n_processes": 2, "target_interval": 8, "nudges": (2, 3, 10, 14, 16)},
}


@pytest.mark.parametrize("case", Q_CASES)
@each(*Q_TRAINERS)
def test_q_methods_are_their_algorithms(trainer, case, monkeypatch):
    constants = {"max_grad_norm": 30.0 if case == "clipped" else 300.0}  # some are longer
    slow = compare(trainer, play(trainer, monkeypatch, **constants | Q_CASES[case]))
    assert len(slow.copies) >= 3
    if case == "copies every 8":  # Algorithm 1 counts its five steps on where an episode ends
        one_step = [5, 7, 9, 10, 15, 18, 20, 24], [8, 16, 24]
        n_step = [5, 7, 9, 14, 15, 18, 23, 24], [9, 18, 24]
        assert (slow.updates, slow.copies) == (n_step if trainer is nstep_q else one_step)


@each(*TRAINERS)
def test_processes_differ(trainer, monkeypatch):
    """In what they draw and in their environments, and again when a run goes on."""
    seeds = []
    for n_processes, start in itertools.product((1, 2, 3), (0, 4)):
        seeds += play(trainer, monkeypatch, 1, start, n_processes=n_processes).seeds
    assert len(set(seeds)) == 12


def test_statistics_that_are_not_shared(monkeypatch):
    made, given = prepare(a3c, monkeypatch, n_processes=2, optimizer="rmsprop"), []
    monkeypatch.setattr(a3c, "start", lambda *args: given.append(args[6]))
    monkeypatch.setattr(a3c, "stop", lambda processes: None)
    run = SimpleNamespace(step=0, complete=True, log_step=lambda step: None)
    a3c.train(made.args, run, made.model, *made.rest)
    assert given == made.optimizers and len(given) == 2


def test_evaluation_carries_the_states_of_the_lstm(monkeypatch):
    made = prepare(a3c, monkeypatch, lstm=True)
    monkeypatch.setattr(a3c.ActorCritic, "sample", lambda self, outputs: outputs)
    observations = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    outputs = [made.policy(obs) for obs in observations]
    for i in range(2):
        states = [(torch.zeros(128).double(), torch.zeros(128).double())]
        for obs, output in zip(observations, outputs, strict=True):
            expected, _, states = slow_actor_critic(leaf(made.initial), obs[i], states)
            np.testing.assert_allclose(output[i], expected.detach(), atol=1e-5)


@each(a3c, async_q)
def test_two_processes_share_all_but_gradients(trainer, tmp_path, monkeypatch):
    """They take turns in every step and between gradient and update, so that all can be known."""
    flags = {"n_processes": 2, "total_steps": 44, "folder": str(tmp_path)}
    flags |= {} if trainer is a3c else {"target_interval": 8}
    made = prepare(trainer, monkeypatch, **flags)
    # as in a run that goes on, θ⁻ is not θ
    torch._foreach_mul_([p.data for p in made.target_model.parameters()], NUDGE)
    slow = Slow(made.args, 9, made.model.state_dict(), made.target_model.state_dict())
    run = SimpleNamespace(step=9, complete=False, stopped=False)
    reported, started, start = [], [], trainer.start

    def log_step(step, **losses):
        run.step, run.complete = step, step >= 44
        if run.complete:
            (tmp_path / "seen").touch()

    run.log_step, run.log_episode = log_step, lambda *episode: reported.append(episode)
    monkeypatch.setattr(trainer, "start", lambda *args: started.append(args) or start(*args))
    trainer.train(made.args, run, made.model, *made.rest)
    walks = [pickle.loads((tmp_path / f"walk_{i}").read_bytes()) for i in range(2)]
    processes = [SLOW[trainer](slow, walk, itertools.repeat(None)) for walk in walks]
    while processes:
        processes = [p for p in processes if next(p, "over") != "over"]
    check_close(vectors(made, made.optimizers[0]), slow.vectors())
    check_statistics(made, slow)
    assert [(index, first_step) for _, _, index, _, first_step, *_ in started] == [(0, 9), (1, 9)]
    counts = started[0][-3 if trainer is a3c else -4]
    assert counts.tolist() == [9 + len(walks[0].obs), len(walks[1].obs)] == [27, 18]
    assert run.step == 45
    np.testing.assert_allclose(sorted(reported), sorted(episodes(walks[0]) + episodes(walks[1])))
