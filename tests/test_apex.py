"""Ape-X against numbers worked out by hand and slow versions that keep whole episodes."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

import apex
from tests.helpers import returns_of

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (4, 3, 2), np.uint8)  # the memory takes frames of any size
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
KINDS = "terminated", "truncated"
WALK = "tests.test_apex:ApexWalk-v0"


SIGMA = 2.0  # what rewards are divided by


def make_args(**changes):
    constants = {"n_actors": 1, "envs_per_actor": 1, "capacity": 100, "chunk_size": 8, "gamma": 0.9}
    return dataclasses.replace(apex.Args(**apex.PRESETS["vector"]), **constants | changes)


def test_constants_of_the_paper():
    """Horgan et al. 2018, for Atari."""
    expected = {"n_step": 3, "chunk_size": 50, "fetch_interval": 100, "capacity": 2_000_000}
    expected |= {"learning_starts": 50_000, "trim_interval": 100, "target_interval": 2500}
    expected |= {"priority_alpha": 0.6, "priority_beta": 0.4, "batch_size": 512, "gamma": 0.99}
    expected |= {"epsilon": 0.4, "epsilon_alpha": 7, "eval_epsilon": 0.001, "replay_ratio": None}
    expected |= {"learning_rate": 0.00025 / 4, "max_grad_norm": 40}
    expected |= {"rms_decay": 0.95, "rms_eps": 1.5e-7}
    assert expected.items() <= vars(apex.Args()).items() and apex.PRESETS["atari"] == {}


def slow_transitions(episode, n, gamma, sigma=1.0):
    """One for each frame; None at a truncated episode's last. An episode that goes on has no kind.

    Observations and Q-values include the final ones, `next_obs` is None where it counts nothing.
    """
    found, length = [], len(episode.actions)
    for t, action in enumerate(episode.actions):
        if not episode.kind and t + n >= length:
            return found  # what follows is not complete
        rewards = episode.rewards[t : t + n]
        end = t + len(rewards)
        x = SimpleNamespace(obs=episode.obs[t], action=action, discount=0.0, next_obs=None)
        x.returns = sum(gamma**k * reward for k, reward in enumerate(rewards))
        x.error = x.returns / sigma - episode.q_values[t][action]
        if end < length or episode.kind == "truncated":
            x.discount, x.next_obs = gamma ** len(rewards), episode.obs[end]
            x.error += x.discount * max(episode.q_values[end])
        found.append(x)
    return found + [None] * (episode.kind == "truncated")


def check(x, returns, discount):
    assert float(returns) == pytest.approx(x.returns, rel=1e-4, abs=1e-5)
    assert float(discount) == pytest.approx(x.discount, rel=1e-5)


def stacked(frames, image):
    padded = [np.zeros_like(frames[0])] * 3 + list(frames)
    return [np.stack(padded[t : t + 4]) for t in range(len(frames))] if image else frames


def played(env, args, space, seed):
    """Chunks of a LocalBuffer in random episodes, and the transitions that they should have."""
    rng, sums = np.random.default_rng((seed, env)), args.chunk_size * np.array([1, 100 * SIGMA**2])
    buffer = apex.LocalBuffer(env, args, SimpleNamespace(sigma=SIGMA, update=lambda: sums))
    stream = [None] * args.n_step  # there are none before the first frame
    while True:
        length, kind = int(rng.integers(1, 12)), rng.choice(KINDS)
        x = SimpleNamespace(rewards=rng.normal(size=length), kind=kind)
        x.actions, x.q_values = rng.integers(3, size=length), rng.normal(size=(length + 1, 3))
        frames = rng.integers(1, 256, (length + 1, *space.shape[-2:])).astype(space.dtype)
        x.obs = stacked(frames, len(space.shape) == 3)
        for t, (q, a) in enumerate(zip(x.q_values, x.actions, strict=False)):
            terminated = kind == "terminated" and t == length - 1
            buffer.rows.append(apex.Row(frames[t], t, max(q), a, q[a], x.rewards[t], terminated))
        if kind == "truncated":
            buffer.rows.append(apex.Row(frames[length], length, max(x.q_values[length])))
        buffer.episodes.append((sum(x.rewards), length))
        stream += slow_transitions(x, args.n_step, args.gamma, SIGMA)
        for chunk in buffer.chunks():
            yield chunk, [stream.pop(0) for _ in range(args.chunk_size)]


class SlowReplay:
    """Keeps transitions whole, in the order of arrival."""

    def __init__(self, args, space):
        self.args = args
        self.stack = 4 if len(space.shape) == 3 else 1
        n_envs = args.n_actors * args.envs_per_actor
        self.room = math.ceil(1.04 * args.capacity / n_envs / args.chunk_size) * args.chunk_size
        self.n_frames = defaultdict(int)
        self.arrivals = []

    def add(self, env, transitions, priorities):
        first = self.n_frames[env] - self.args.n_step
        self.arrivals.append([x for x in transitions if x is not None])
        for t, x in enumerate(transitions, first):
            if x is not None:
                x.env, x.t, x.priority = env, t, priorities[t - first]
        self.n_frames[env] += self.args.chunk_size

    def rows(self):
        """What is there: the frames that it needs are among the latest of its environment."""
        for rows in self.arrivals:
            rows[:] = [x for x in rows if x.t - self.stack + 1 >= self.n_frames[x.env] - self.room]
        return list(itertools.chain(*self.arrivals))

    def trim(self):
        while len(self.rows()) > self.args.capacity:
            self.arrivals.pop(0)

    def found(self, batch):
        there = {x.obs.tobytes(): x for x in self.rows()}
        return [there[obs.tobytes()] for obs in batch.obs.numpy()]


def check_priorities(priorities, expected):
    errors = [0.0 if x is None else abs(x.error) + 1e-6 for x in expected]
    np.testing.assert_allclose(priorities ** (1 / 0.6), errors, rtol=1e-3, atol=1e-5)
    assert [p > 0 for p in priorities] == [x is not None for x in expected]


def check_batch(batch, rows, slow):
    everything = slow.rows()
    total = sum(x.priority for x in everything)
    weights = [(len(everything) * x.priority / total) ** -slow.args.priority_beta for x in rows]
    np.testing.assert_allclose(batch.weights, np.array(weights) / max(weights), rtol=1e-4)
    for i, x in enumerate(rows):
        check(x, batch.returns[i], batch.discounts[i])
        assert batch.actions[i] == x.action and torch.equal(batch.obs[i], torch.from_numpy(x.obs))
        assert x.next_obs is None or torch.equal(batch.next_obs[i], torch.from_numpy(x.next_obs))


@pytest.mark.parametrize("space", [SMALL_IMAGE, VECTOR], ids=["images", "vectors"])
@pytest.mark.parametrize(("n_step", "chunk_size"), [(3, 7), (1, 4), (5, 3)])
def test_memory_and_buffers_under_random_operations(space, n_step, chunk_size):
    args = make_args(n_actors=2, envs_per_actor=2, capacity=150, batch_size=40)
    args.n_step, args.chunk_size = n_step, chunk_size
    rng = np.random.default_rng(n_step)
    players = [played(env, args, space, n_step) for env in range(4)]
    replay, slow = apex.Replay(space, args, torch.device("cpu"), 0), SlowReplay(args, space)
    args.capacity = 80  # less than it was made for, so that both trimming and rings remove
    for _ in range(500):
        operation = rng.choice(["add", "trim", "learn"], p=[0.6, 0.05, 0.35])
        if operation == "add":
            env = rng.choice(4, p=[0.55, 0.25, 0.15, 0.05])
            chunk, expected = next(players[env])
            check_priorities(chunk.priorities, expected)
            assert replay.add(chunk) == sum(x is not None for x in expected)
            chunk.frames[...] = 77  # the sender may use it again
            slow.add(env, expected, chunk.priorities)
        elif operation == "trim":
            replay.trim()
            slow.trim()
        elif slow.rows():
            batch = replay.sample()
            rows = slow.found(batch)
            check_batch(batch, rows, slow)
            priorities = rng.uniform(size=len(rows))
            replay.set_priorities(batch.indices, priorities)
            for row, priority in zip(rows, priorities, strict=True):
                row.priority = priority  # of one drawn twice the last counts
        rows = slow.rows()
        assert replay.size == len(rows)
        assert replay.tree.total == pytest.approx(sum(x.priority for x in rows), rel=1e-9)
    assert slow.n_frames[0] > 3 * slow.room


ENDS = [(1, "truncated"), (2, "terminated"), (9, "truncated"), (1, "terminated"), (4, "both")]


class Walk(gym.Env):
    """Deterministic; `walks` has the episodes of each environment, in the order of their resets."""

    walks: ClassVar[list] = []
    action_space = spaces.Discrete(3)

    def __init__(self, image=False):
        self.image = image
        self.observation_space = spaces.Box(0, 255, (84, 84), np.uint8) if image else VECTOR

    def observe(self, last):
        rng = np.random.default_rng((self.seed, len(self.walk), self.length, last))
        if self.image:
            return rng.integers(1, 256, (84, 84), np.uint8)
        return np.array([*rng.normal(size=2), self.length], np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed, self.walk = seed, []
            Walk.walks.append(self.walk)
        self.length = 0
        self.walk.append(SimpleNamespace(obs=[self.observe(0)], actions=[], rewards=[], kind=""))
        return self.walk[-1].obs[0], {}

    def step(self, action):
        episode = self.walk[-1]
        self.length += 1
        length, kind = ENDS[(len(self.walk) + self.seed) % len(ENDS)]
        ends = [self.length == length and kind in (x, "both") for x in KINDS]
        reward = 2 * math.cos(3 * len(self.walk) + self.length) + 0.1 * action
        episode.obs.append(self.observe(int(action)))
        episode.actions.append(int(action))
        episode.rewards.append(reward)
        episode.kind = "terminated" if ends[0] else "truncated" if ends[1] else ""
        return episode.obs[-1], reward, *ends, {}


gym.register("ApexWalk-v0", f"{__name__}:Walk")


def q_of(version, obs):
    """Q of one observation by the `version`-th network that an actor fetches."""
    x = obs.reshape(len(obs), -1).mean(1) / (255 if obs.ndim == 3 else 1)
    return [math.sin(2 * version + (a + 1) * (x @ np.arange(1, len(x) + 1))) for a in range(3)]


def run_actor(index, args, n_steps):
    """The chunks of each environment and their σ; the episodes are in Walk.walks."""
    Walk.walks.clear()
    versions, models = itertools.count(), []

    def fetch():
        version = next(versions)
        models.append(lambda obs: torch.tensor([q_of(version, x) for x in obs.numpy()]))
        return models[-1]

    chunks, sums = defaultdict(list), np.zeros(2)
    with contextlib.closing(apex.actor(index, args, 0, fetch)) as steps:
        for chunk in itertools.chain(*itertools.islice(steps, n_steps)):
            sums += chunk.reward_sums
            sigma = math.sqrt(sums[1] / sums[0]) / 10 if args.rewards == "scale" else 1.0
            chunks[chunk.env].append((chunk, sigma))
    assert next(versions) == math.ceil(n_steps / args.fetch_interval)
    assert all(model.bfloat16 == (args.bfloat16 == "on") for model in models)
    return chunks


@pytest.mark.parametrize("epsilon", [0.4, 0.0])
@pytest.mark.parametrize("image", [True, False], ids=["images", "vectors"])
def test_actor_against_whole_episodes(image, epsilon):
    args = make_args(env_id=WALK, n_actors=2, envs_per_actor=2, epsilon=epsilon)
    args.rewards, args.bfloat16 = ("clip", "on") if image else ("scale", "off")
    args.env_kwargs, args.fetch_interval = json.dumps({"image": image}), 7
    args.capacity, args.batch_size = 1000, 100
    n_steps = 60 if image else 200
    space = IMAGE if image else VECTOR
    replay, slow = apex.Replay(space, args, torch.device("cpu"), 0), SlowReplay(args, space)
    sent = run_actor(1, args, n_steps)
    assert len(sent) == 2
    for env, walk in enumerate(Walk.walks, 2):
        chunks, sigmas = zip(*sent[env], strict=True)
        t, stream, frames, greedy = 0, [None] * args.n_step, [], []
        for episode in walk:
            learned = [max(-1, min(1, x)) if image else x for x in episode.rewards]
            obs = stacked(episode.obs, image)
            times = [*range(t, t + len(episode.actions)), t + len(episode.actions) - 1]
            t += len(episode.actions)
            q_values = [q_of(k // 7, x) for k, x in zip(times, obs, strict=True)]
            whole = {"obs": obs, "rewards": learned, "q_values": q_values}
            whole = SimpleNamespace(**vars(episode) | whole)
            stream += slow_transitions(whole, args.n_step, args.gamma)
            frames += episode.obs if episode.kind == "truncated" else episode.obs[:-1]
            greedy += [q[a] == max(q) for q, a in zip(q_values, episode.actions, strict=False)]
        assert t == n_steps and len(chunks) == len(frames) // 8
        assert all(greedy) or epsilon
        assert np.array_equal(np.concatenate([x.frames for x in chunks]), frames[: 8 * len(chunks)])
        episodes = [x for chunk in chunks for x in chunk.episodes]
        expected = [(sum(x.rewards), len(x.actions)) for x in walk if x.kind][: len(episodes)]
        np.testing.assert_allclose(episodes, expected, rtol=1e-5)
        assert len(episodes) > len(walk) - 6
        for k, chunk in enumerate(chunks):
            transitions = stream[8 * k : 8 * k + 8]
            for x in filter(None, transitions):
                x.error += x.returns / sigmas[k] - x.returns
            check_priorities(chunk.priorities, transitions)
            replay.add(chunk)
            slow.add(chunk.env, transitions, chunk.priorities)
    n, squares = sum(chunk.reward_sums for chunks in sent.values() for chunk, _ in chunks)
    G = []
    for walk in Walk.walks:
        steps = [
            (r, x.kind * (t == len(x.rewards))) for x in walk for t, r in enumerate(x.rewards, 1)
        ]
        steps = steps[: int(n) // 2]
        G.extend(returns_of(*zip(*steps, strict=True), args.gamma))
    assert n > 2 * n_steps - 20 and squares == pytest.approx(np.square(G).sum(), rel=1e-4)
    batch = replay.sample()
    check_batch(batch, slow.found(batch), slow)
    assert replay.size == len(slow.rows())


def test_epsilons(monkeypatch):
    """Those of spec.md, and the second of two actors has the smaller ones."""
    expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    assert apex.epsilons_of(0.4, 7.0, torch.arange(8), 8).tolist() == pytest.approx(expected)
    assert apex.epsilons_of(0.4, 7.0, torch.arange(1), 1).tolist() == pytest.approx([0.4])
    seen, act = [], apex.epsilon_greedy
    monkeypatch.setattr(apex, "epsilon_greedy", lambda q, e: seen.append(e) or act(q, e))
    papers = {"epsilon": 0.4, "epsilon_alpha": 7.0, "bfloat16": "off"}
    run_actor(1, make_args(env_id=WALK, n_actors=2, envs_per_actor=4, **papers), 3)
    np.testing.assert_allclose(torch.stack(seen), [expected[4:]] * len(seen), rtol=1e-5)
    torch.manual_seed(0)
    epsilons = torch.tensor([0.0, 0.3, 1.0])  # now one for each column
    q_values = torch.tensor([[0.0, 2, 1]]).expand(30_000, 3)
    actions = apex.epsilon_greedy(q_values, epsilons.repeat(10_000)).view(-1, 3)
    for a, expected in enumerate([epsilons / 3, 1 - 2 * epsilons / 3, epsilons / 3]):
        np.testing.assert_allclose((actions == a).float().mean(0), expected, atol=0.02)


def test_weights_and_targets_by_hand():
    weights = apex.importance_weights(np.array([0.25, 0.0625, 0.5625]), 4, 0.5)
    np.testing.assert_allclose(weights, [1 / 2, 1, 1 / 3], rtol=1e-6)
    # θ picks the action, θ⁻ says what it is worth
    next_q, target_q = torch.tensor([[1.0, 3, 2]] * 2), torch.tensor([[10.0, -4, 30]] * 2)
    returns, discounts = torch.tensor([1.0, 2]), torch.tensor([0.5, 0])
    assert apex.double_q_targets(returns, discounts, next_q, target_q).tolist() == [-1, 2]


def slow_rmsprop(theta, gradients, lr, decay, eps):
    g = m = 0.0
    for d in gradients:
        g = decay * g + (1 - decay) * d**2
        m = decay * m + (1 - decay) * d
        theta = theta - lr * d / (g - m**2 + eps) ** 0.5
    return theta


def test_rmsprop_against_a_slow_loop():
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(2, 3)), [rng.normal(size=(2, 3)) * 0.01 for _ in range(30)]
    p = torch.nn.Parameter(torch.tensor(start))
    optimizer = apex.CentredRMSProp([p], 0.9, 1e-4)
    for d in gradients:
        p.grad = torch.tensor(d)
        optimizer.step(0.1)
    expected = slow_rmsprop(start, gradients, 0.1, 0.9, 1e-4)
    np.testing.assert_allclose(p.detach(), expected, rtol=1e-9)
    # where the gradient does not change, rounding leaves g - m² below zero, by far more than ε
    p = torch.nn.Parameter(torch.zeros(1000))
    optimizer = apex.CentredRMSProp([p], 0.95, 1.5e-7)
    p.grad = torch.linspace(1e3, 1e4, 1000)
    for _ in range(500):
        optimizer.step(1e-3)
    assert p.isfinite().all()


def network(space=VECTOR, n_actions=3, seed=0):
    torch.manual_seed(seed)
    return apex.QNetwork(space, spaces.Discrete(n_actions))


def same(a, b):
    return all(torch.equal(x, b[name]) for name, x in a.items())


def doubled(model):
    return {k: x.detach().double().requires_grad_() for k, x in model.named_parameters()}


def slow_q(params, obs):
    """Q of one observation, in float64: V + A - the mean of A over the actions."""

    def linear(name, x):
        return params[f"{name}.weight"] @ x + params[f"{name}.bias"]

    x = obs.double()
    if obs.ndim == 3:
        x = x[None] / 255
        for layer, stride in (("trunk.0", 4), ("trunk.2", 2), ("trunk.4", 1)):
            weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
            x = F.conv2d(x, weight, bias, stride).clamp(min=0)
    else:
        x = linear("trunk.0", x).clamp(min=0)
    x = x.flatten()
    value, advantages = (
        linear(f"{name}.2", linear(f"{name}.0", x).clamp(min=0)) for name in ("value", "advantages")
    )
    return value[0] + advantages - sum(advantages) / len(advantages)


@pytest.mark.parametrize("space", [IMAGE, VECTOR], ids=["images", "vectors"])
def test_dueling_network_and_its_gradient(space):
    if space is IMAGE:
        for n_actions, size in {4: 3_292_837, 6: 3_293_863, 18: 3_300_019}.items():
            assert sum(p.numel() for p in network(space, n_actions).parameters()) == size
    model = network(space)
    obs = torch.rand(3, 4, 84, 84).mul(255).byte() if space is IMAGE else torch.randn(3, 3)
    params = doubled(model)
    expected = torch.stack([slow_q(params, x) for x in obs])
    q_values = model(obs)
    np.testing.assert_allclose(q_values.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    chosen = torch.arange(3), torch.tensor([2, 0, 1])
    q_values[chosen].square().sum().backward()
    expected[chosen].square().sum().backward()
    for name, p in model.named_parameters():
        scale = params[name].grad.abs().max().item()
        np.testing.assert_allclose(p.grad, params[name].grad, rtol=1e-3, atol=1e-4 * scale)


def random_batch(n, scale):
    torch.manual_seed(3)
    obs, next_obs = torch.randn(2, n, 3)
    returns, weights = scale * torch.randn(n), torch.rand(n) + 0.1
    discounts, actions = 0.9 * torch.randint(2, (n,)), torch.randint(3, (n,))
    return apex.Batch(None, obs, next_obs, actions, returns, discounts, weights)


@pytest.mark.parametrize(("scale", "clipped"), [(1.0, False), (100.0, True)])
def test_update_against_its_formula(scale, clipped):
    model, target_model = network(seed=1), network(seed=2)
    n, batch = 32, random_batch(32, scale)
    params, target_params = doubled(model), doubled(target_model)
    errors, loss = [], 0.0
    for i in range(n):
        best = slow_q(params, batch.next_obs[i]).argmax()
        worth = slow_q(target_params, batch.next_obs[i])[best].detach()
        G = batch.returns[i].double() / SIGMA + batch.discounts[i] * worth
        delta = G - slow_q(params, batch.obs[i])[batch.actions[i]]
        errors.append(delta.item())
        loss = loss + batch.weights[i].double() * 0.5 * delta**2 / n
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in params.values()) ** 0.5
    max_norm = norm / 3 if clipped else norm * 3
    optimizer = apex.CentredRMSProp(model.parameters(), 0.95, 1e-3)
    found, losses = apex.update(model, target_model, optimizer, 0.01, batch, SIGMA, max_norm)
    np.testing.assert_allclose(found, errors, rtol=1e-3, atol=1e-4)
    assert float(losses["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    for name, p in model.named_parameters():
        d = params[name].grad / (3 if clipped else 1)
        expected = slow_rmsprop(params[name].detach(), [d], 0.01, 0.95, 1e-3)
        np.testing.assert_allclose(p.detach(), expected, rtol=1e-3, atol=1e-5)


def test_an_error_that_is_not_finite_changes_nothing():
    model, batch = network(), random_batch(4, 1.0)
    before = copy.deepcopy(model.state_dict())
    batch.returns[2] = math.inf
    with pytest.raises(RuntimeError):
        optimizer = apex.CentredRMSProp(model.parameters(), 0.95, 1e-3)
        apex.update(model, model, optimizer, 0.01, batch, 1.0, 40.0)
    assert same(model.state_dict(), before)


class Watch:
    """Stands for apex.Actors, without processes, and notes what the learner does."""

    def __init__(self, monkeypatch):
        self.events, self.models, self.targets = [], [], []  # θ and θ⁻ before each update
        monkeypatch.setattr(apex, "Actors", self.begin)
        do_update, set_priorities, trim = apex.update, apex.Replay.set_priorities, apex.Replay.trim

        def update(model, target_model, optimizer, lr, batch, sigma, norm):
            assert sigma == SIGMA
            left = max(0, 1 - (self.first_step + self.n) / self.args.total_steps)
            left = left if self.args.anneal_lr else 1
            assert lr == pytest.approx(self.args.learning_rate * left)
            self.events.append("update")
            assert len(self.models) < 1000, "it goes on without new transitions"
            self.models.append(copy.deepcopy(dict(model.named_parameters())))
            self.targets.append(copy.deepcopy(dict(target_model.named_parameters())))
            self.batch = batch
            self.errors, losses = do_update(model, target_model, optimizer, lr, batch, sigma, norm)
            return self.errors, losses

        def set_them(replay, indices, priorities):
            if self.events[-1:] == ["update"]:  # not those of `add` and `trim`
                assert indices is self.batch.indices
                assert priorities == pytest.approx((np.abs(self.errors) + 1e-6) ** 0.6)
                self.events.append("priorities")
            set_priorities(replay, indices, priorities)

        monkeypatch.setattr(apex, "update", update)
        monkeypatch.setattr(apex.Replay, "set_priorities", set_them)
        monkeypatch.setattr(apex.Replay, "trim", lambda x: self.events.append("trim") or trim(x))
        self.publish = lambda model: self.events.append("publish")
        self.close = lambda: self.events.append("close")

    def begin(self, args, first_step, space, model):
        self.first_step, self.n, self.n_episodes, self.n_updates = first_step, 0, 0, []
        self.args = args
        self.played = [played(env, args, space, first_step) for env in range(4)]
        self.events.clear()
        return self

    def receive(self, timeout):
        assert self.events[-1:] != ["update"]  # priorities come before anything is added
        self.n_updates.append((self.n, self.events.count("update")))
        for env in np.random.default_rng(self.n).permutation(4)[:2]:
            chunk, transitions = next(self.played[env])
            self.n_episodes += len(chunk.episodes)
            self.n += sum(x is not None for x in transitions)
            yield chunk
            chunk.frames[...] = 0


def train(folder, *flags):
    sizes = "--n-actors 2 --envs-per-actor 2 --chunk-size 10 --capacity 150 --batch-size 16"
    intervals = "--learning-starts 80 --target-interval 7 --trim-interval 5"
    always = f"--env-id {WALK} {sizes} {intervals} --eval-episodes 0".split()
    return apex.main([*always, *map(str, folder), *map(str, flags)])


def test_learner_and_resume(monkeypatch, tmp_path):
    watch, folder = Watch(monkeypatch), tmp_path / "run"
    assert train(["--run-dir", folder], "--total-steps", 720, "--replay-ratio", 1.5) == 0
    for n, n_updates in watch.n_updates:  # all that was due was learned before more was taken
        assert n_updates == max(0, int(1.5 * (n - 80) / 16))
    n_updates = watch.events.count("update")
    assert n_updates > 40 and watch.events[-1] == "close"
    for what, every in (("priorities", 1), ("trim", 5), ("publish", 10)):
        places = [i for i, event in enumerate(watch.events) if event == what]
        after = [watch.events[:i].count("update") for i in places]  # so many updates
        assert after == [*range(every, n_updates + 1, every)]
    for k, target in enumerate(watch.targets):
        assert same(target, watch.models[k - k % 7])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == watch.n >= 720 > watch.n_updates[-1][0]
    assert summary["episodes"] == watch.n_episodes > 20
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["updates"] == n_updates and same(watch.targets[-1], state["target_model"])
    assert state["model"]["norm.sums"][0, 0] >= summary["steps"]
    watch.models.clear(), watch.targets.clear()
    assert train(["--resume", folder], "--total-steps", 1200, "--replay-ratio", 1.5) == 0
    assert watch.first_step == summary["steps"]
    for n, n_new in watch.n_updates:  # learning begins when the memory has been filled anew
        assert n_new == max(0, int(1.5 * (n - 80) / 16))
    assert same(watch.models[0], state["model"]) and same(watch.targets[0], state["target_model"])
    for k, target in enumerate(watch.targets):
        assert same(target, watch.targets[k - 1]) == ((n_updates + k) % 7 != 0) or k == 0
    assert torch.load(folder / "checkpoint.pt")["step"] == watch.first_step + watch.n >= 1200
    # without a ratio it looks for chunks between two updates
    flags = "--total-steps", 400, "--replay-ratio", None, "--no-anneal-lr"
    assert train(["--run-dir", tmp_path / "2"], *flags) == 0
    for (n, after), (_, before) in zip(watch.n_updates[1:], watch.n_updates, strict=False):
        assert after - before in ((0,) if n < 80 else (0, 1))
    assert watch.n_updates[-1][1] > 5


def test_actors_in_processes():
    """Chunks of all environments arrive whole and in order; a published θ reaches all actors."""
    args = make_args(env_id=WALK, n_actors=2, envs_per_actor=2, epsilon=0.0, fetch_interval=5)
    model = network()
    last = model.advantages[-1]
    last.weight.data.zero_()
    last.bias.data.copy_(torch.tensor([0, 1, 0]))
    actors = apex.Actors(args, 0, VECTOR, model)
    frames, actions = defaultdict(list), defaultdict(list)
    deadline = time.monotonic() + 120

    def receive_until(done):
        while not (len(frames) == 4 and all(map(done, actions.values()))):
            assert time.monotonic() < deadline, "it did not happen"
            for chunk in actors.receive(0.1):
                frames[chunk.env] += zip(chunk.frames[:, 2].tolist(), chunk.n_earlier, strict=True)
                actions[chunk.env] += chunk.transitions["action"][chunk.priorities > 0].tolist()

    try:
        receive_until(lambda x: len(x) > 100)
        assert {x for taken in actions.values() for x in taken} == {1}
        last.bias.data[2] = 2
        actors.publish(model)
        receive_until(lambda x: x[-1] == 2)
    finally:
        actors.close()
    assert all(process.exitcode == 0 for process in actors.processes)
    for rows in frames.values():  # the third number of an observation is its time in the episode
        assert all(shown == t for shown, t in rows)
        assert all(b[1] in (0, a[1] + 1) for a, b in itertools.pairwise(rows))


def test_capacity_is_what_fits(monkeypatch):
    """No more than 0.8 of what is free, and no fewer than rings of full chunks need."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1e11))
    files = {"memory.max": 2_100_000_000, "memory.current": 1_050_000_000}  # of the cgroup
    files["memory.stat"] = [["anon", "50000000"], ["inactive_file", "1000000000"]]
    monkeypatch.setattr("numpy.loadtxt", lambda path, dtype=float: files[path.split("/")[-1]])
    args = make_args(n_actors=2, envs_per_actor=2, capacity=10**9)
    args.capacity = apex.pick_capacity(args, VECTOR) // 100
    assert apex.pick_capacity(args, VECTOR) == args.capacity
    memory = apex.Replay(VECTOR, args, torch.device("cpu"), 0)
    arrays = memory.frames.numpy(), memory.n_earlier, memory.transitions, memory.tree.nodes
    assert 0.5 < 100 * sum(x.nbytes for x in arrays) / 2_050_000_000 < 0.8
    files["memory.max"] = 50_001_000
    with pytest.raises(SystemExit, match="2"):
        apex.pick_capacity(args, VECTOR)
