"""The mathematics of apex.py and its replay memory against numbers by hand and slow versions of the definitions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import math
from collections import deque
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

import apex
import common.replay
from common.replay import importance_weights
from tests import paac_envs

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (4, 3, 2), np.uint8)  # the memory does not mind the size
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
SPACES = {"images": SMALL_IMAGE, "vectors": VECTOR}
KINDS = ("terminated", "truncated")
N_ACTIONS = 3

each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def make_args(**changes: Any) -> apex.Args:
    constants = {"n_actors": 1, "envs_per_actor": 1, "capacity": 100, "chunk_size": 8, "gamma": 0.9}
    return dataclasses.replace(apex.Args(**apex.PRESETS["vector"]), **constants | changes)


def q_network(arch: str, n_actions: int = N_ACTIONS, seed: int = 0) -> apex.QNetwork:
    torch.manual_seed(seed)
    return apex.QNetwork(VECTOR if arch == "mlp" else IMAGE, spaces.Discrete(n_actions), arch)


def slow_mlp(params: dict[str, Tensor], obs: Any) -> Tensor:
    """Q of one observation: V + A - the mean of A over the actions."""

    def linear(name: str, x: Tensor) -> Tensor:
        return params[f"{name}.weight"].double() @ x + params[f"{name}.bias"].double()

    features = linear("trunk.0", torch.as_tensor(obs).double()).clamp(min=0)
    value, advantages = (linear(f"{s}.2", linear(f"{s}.0", features).clamp(min=0)) for s in ("value", "advantages"))
    return value + advantages - advantages.sum() / len(advantages)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic and mean + 5 standard deviations of it for as many cells less one."""
    assert expected.min() >= 5 and counts.sum() == pytest.approx(expected.sum())
    degrees = len(counts) - 1
    return float((np.square(counts - expected) / expected).sum()), degrees + 5 * math.sqrt(2 * degrees)


# ------------------------------------------------------------------------------------------------- constants


def test_constants_of_the_paper() -> None:
    args = apex.Args()
    assert (args.n_step, args.gamma, args.epsilon, args.epsilon_alpha) == (3, 0.99, 0.4, 7)
    assert (args.chunk_size, args.fetch_interval, args.learning_starts, args.trim_interval) == (50, 100, 50_000, 100)
    assert (args.priority_alpha, args.priority_beta, args.priority_eps) == (0.6, 0.4, 1e-6)
    assert (args.batch_size, args.target_interval, args.learning_rate) == (512, 2500, 0.00025 / 4)
    assert (args.max_grad_norm, args.rms_decay, args.rms_eps, args.clip_rewards) == (40, 0.95, 1.5e-7, True)
    assert apex.PRESETS["atari"] == {} and args.replay_ratio is None


# ------------------------------------------------------------------------------------------------ exploration


def ladder_of(args: apex.Args, n: int) -> list[float]:
    return [apex.epsilon_of(args.epsilon, args.epsilon_alpha, i, n) for i in range(n)]


def test_ladder_of_epsilon() -> None:
    args = apex.Args()
    by_hand = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]  # 0.4 to the powers of 1 to 8
    assert ladder_of(args, 8) == pytest.approx(by_hand, rel=1e-9)
    assert ladder_of(args, 1) == [0.4]
    assert ladder_of(args, 2) == pytest.approx([0.4, 0.00065536])
    ladder = ladder_of(args, 360)
    assert (ladder[0], ladder[-1]) == (0.4, pytest.approx(0.00065536))
    assert all(b / a == pytest.approx(0.4 ** (7 / 359)) for a, b in itertools.pairwise(ladder))
    args = dataclasses.replace(args, epsilon=0.5, epsilon_alpha=2.0)
    assert ladder_of(args, 3) == pytest.approx([0.5, 0.25, 0.125])


def test_epsilon_greedy_of_each_row() -> None:
    """The best action has ε/3 on top of 1 - ε, the other two have ε/3."""
    torch.manual_seed(0)
    n = 20_000
    q_values = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0], [0.0, 1.0, 2.0]]).repeat(n, 1)
    actions = apex.epsilon_greedy(q_values, torch.tensor([0.3, 0.0, 0.9]).repeat(n))
    assert (actions.shape, actions.dtype) == ((3 * n,), torch.int64)
    expected = [[0.1, 0.8, 0.1], [1, 0, 0], [0.3, 0.3, 0.4]]
    for row in range(3):
        frequencies = torch.bincount(actions[row::3], minlength=3) / n
        np.testing.assert_allclose(frequencies, expected[row], atol=0.0175)  # 5 standard deviations
    assert (actions[1::3] == 0).all()
    assert apex.epsilon_greedy(q_values, 0.0).tolist() == [1, 0, 2] * n


# ----------------------------------------------------------------------- episodes, and transitions by definition


@dataclasses.dataclass
class Episode:
    """T steps and what is seen after them; `frames` and `q` have T + 1 entries. An unfinished one is of no kind."""

    frames: list[np.ndarray]
    q: list[np.ndarray]
    actions: list[int]
    rewards: list[float]
    kind: str


class Transition(NamedTuple):
    obs: np.ndarray
    action: int
    returns: float
    discount: float
    next_obs: np.ndarray | None  # None where the episode has terminated
    error: float
    n_rewards: int


def seen(frames: list[np.ndarray], t: int, space: spaces.Box) -> np.ndarray:
    """What the actor sees at step t of an episode: on images the frame and the three before it, black before all."""
    if len(space.shape) == 1:
        return frames[t]
    return np.stack([frames[k] if k >= 0 else np.zeros_like(frames[0]) for k in (t - 3, t - 2, t - 1, t)])


def slow_transitions(episode: Episode, n: int, gamma: float, space: spaces.Box) -> list[Transition]:
    """G = R_{t+1} + ... + γ^{k-1} R_{t+k} + γ^k max_a Q(S_{t+k}, a), k = n or as many rewards as are left."""
    transitions = []
    last = len(episode.rewards)
    for t in range(last):
        k = min(n, last - t)
        if t + k == last and not episode.kind:
            break
        returns = 0.0
        for j in range(k):
            returns += gamma**j * episode.rewards[t + j]
        over = t + k == last and episode.kind == "terminated"
        discount = 0.0 if over else gamma**k
        error = returns + discount * max(episode.q[t + k]) - episode.q[t][episode.actions[t]]
        next_obs = None if over else seen(episode.frames, t + k, space)
        obs = seen(episode.frames, t, space)
        transitions.append(Transition(obs, episode.actions[t], returns, discount, next_obs, error, k))
    return transitions


class Player:
    """Streams of random episodes through LocalBuffers, and what their transitions are by definition."""

    def __init__(
        self, args: apex.Args, space: spaces.Box, seed: int = 0, max_length: int = 6, model: nn.Module | None = None
    ) -> None:
        self.args, self.space, self.model, self.max_length = args, space, model, max_length
        self.rng = np.random.default_rng(seed)
        n = args.n_actors * args.envs_per_actor
        self.buffers = [apex.LocalBuffer(space, args) for _ in range(n)]
        self.positions = [0] * n  # of the next step
        self.given = [0] * n  # chunks
        self.waiting: list[deque] = [deque() for _ in range(n)]
        self.expected: dict[tuple[int, int], Transition] = {}  # of stream and position
        self.ends: list[int] = []  # positions at which episodes ended

    def _frame(self) -> np.ndarray:
        if len(self.space.shape) == 3:
            return self.rng.integers(1, 256, self.space.shape[1:]).astype(np.uint8)  # none is black
        return self.rng.normal(size=self.space.shape).astype(np.float32)

    def episode(self, length: int, kind: str) -> Episode:
        frames = [self._frame() for _ in range(length + 1)]
        q = [self.rng.normal(size=N_ACTIONS).astype(np.float32) for _ in frames]
        if self.model:
            with torch.no_grad():
                q = [self.model(torch.tensor(f)[None])[0].numpy() for f in frames]
        actions = self.rng.integers(0, N_ACTIONS, length).tolist()
        return Episode(frames, q, actions, self.rng.normal(size=length).round(3).tolist(), kind)

    def play(self, stream: int, episode: Episode) -> None:
        """What the actor does with an episode."""
        buffer, last = self.buffers[stream], len(episode.rewards)
        for t, transition in enumerate(slow_transitions(episode, self.args.n_step, self.args.gamma, self.space)):
            self.expected[stream, self.positions[stream] + t] = transition
        for t in range(last + (episode.kind == "truncated")):
            age, q = min(t, 3), episode.q[t]
            if t < last:
                action, terminated = episode.actions[t], t == last - 1 and episode.kind == "terminated"
                taken = action, q[action], episode.rewards[t], terminated
                chunk = buffer.add(episode.frames[t], age, q.max(), taken)
            else:
                chunk = buffer.add(episode.frames[t], age, q.max(), None)
            self.positions[stream] += 1
            if chunk is not None:
                self.waiting[stream].append(copy.deepcopy(chunk))
        self.ends.append(self.positions[stream])

    def chunk(self, stream: int) -> tuple[apex.Chunk, list[int]]:
        """The next chunk of a stream, and the positions whose transitions it completes."""
        while not self.waiting[stream]:
            length, kind = int(self.rng.integers(1, self.max_length + 1)), str(self.rng.choice(KINDS))
            self.play(stream, self.episode(length, kind))
        end = (self.given[stream] + 1) * self.args.chunk_size - self.args.n_step
        self.given[stream] += 1
        positions = range(end - self.args.chunk_size, end)
        return self.waiting[stream].popleft(), [p for p in positions if (stream, p) in self.expected]

    def restart(self, stream: int) -> None:
        """Another actor takes over: what has not been sent is lost."""
        first = self.given[stream] * self.args.chunk_size
        for key in [key for key in self.expected if key[0] == stream and key[1] >= first - self.args.n_step]:
            del self.expected[key]
        self.buffers[stream], self.positions[stream] = apex.LocalBuffer(self.space, self.args), first
        self.waiting[stream].clear()


def every_episode(player: Player, repeats: int) -> list[Episode]:
    """Episodes of each length from 1 to 10 and of both kinds, in random order."""
    cases = [(length, kind) for length in range(1, 11) for kind in KINDS] * repeats
    return [player.episode(*cases[i]) for i in player.rng.permutation(len(cases))]


# ----------------------------------------------------------------------------------------- n-step transitions


def test_n_step_transitions_by_hand() -> None:
    """γ = 1/2, n = 3. Positions 0 to 3 terminate; 4 and 5 are truncated, 6 is what was seen then; 7, 8, 9 go on."""
    rewards = np.array([1, 2, 4, 8, 16, 32, 0, 64, 128, 256], np.float32)
    terminated = np.zeros(10, np.bool_)
    terminated[3] = True
    acted = np.ones(10, np.bool_)
    acted[6] = False
    returns, discounts, offsets = apex.n_step_transitions(rewards, terminated, acted, 3, 0.5)
    assert returns.shape == discounts.shape == offsets.shape == (7,)
    assert returns[:6].tolist() == [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8, 16 + 16, 32]
    assert discounts[:6].tolist() == [1 / 8, 0, 0, 0, 1 / 4, 1 / 2]
    assert offsets[[0, 4, 5]].tolist() == [3, 2, 1]


def test_three_rewards_and_the_cube_of_gamma() -> None:
    """Neither a fourth reward nor γ^2 or γ^4: the paper's eq. as corrected in the spec."""
    rewards = np.array([1.0, 10.0, 100.0, 1000.0, 1e4, 1e5], np.float32)
    flags = np.zeros(6, np.bool_)
    returns, discounts, offsets = apex.n_step_transitions(rewards, flags, ~flags, 3, 0.99)
    assert returns.tolist() == pytest.approx([1 + 9.9 + 98.01, 10 + 99 + 980.1, 100 + 990 + 9801])
    assert discounts.tolist() == pytest.approx([0.970299] * 3) and offsets.tolist() == [3] * 3


def test_tail_of_a_terminated_and_of_a_truncated_episode_by_hand() -> None:
    """One episode of 5 steps, n = 3, γ = 1/2: full returns, then 2 rewards, then 1."""
    args = make_args(n_step=3, gamma=0.5, chunk_size=9)
    for kind in KINDS:
        buffer = apex.LocalBuffer(VECTOR, args)
        for t, reward in enumerate([1.0, 2.0, 4.0, 8.0, 16.0]):
            frame, ended = np.full(3, t, np.float32), kind == "terminated" and t == 4
            assert buffer.add(frame, min(t, 3), 100.0 * t, (1, 0.25, reward, ended)) is None
        if kind == "truncated":
            assert buffer.add(np.full(3, 5, np.float32), 3, 500.0, None) is None
        chunk, t = None, 0
        while chunk is None:
            chunk, t = buffer.add(np.full(3, -t, np.float32), 0, 7.0, (0, 0.0, 64.0, True)), t + 1
        assert chunk["acted"].tolist()[:3] == [False] * 3  # before the first position
        taken = slice(3, 8)
        assert chunk["acted"][taken].all() and chunk["acted"].sum() == (6 if kind == "terminated" else 5)
        assert chunk["returns"][taken].tolist() == [1 + 1 + 1, 2 + 2 + 2, 4 + 4 + 4, 8 + 8, 16]
        q = [300, 400] if kind == "terminated" else [300, 400, 500, 500, 500]
        discounts = [1 / 8, 1 / 8, 0, 0, 0] if kind == "terminated" else [1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 2]
        assert chunk["discounts"][taken].tolist() == discounts
        assert chunk["offsets"][taken].tolist()[: len(q)] == [3, 3, 3, 2, 1][: len(q)]
        bootstraps = [d * x for d, x in zip(discounts, q + [0] * 3, strict=False)]
        errors = [g + b - 0.25 for g, b in zip([3, 6, 12, 16, 16], bootstraps, strict=True)]
        assert chunk["errors"][taken].tolist() == errors


@pytest.mark.parametrize("chunk_size", [1, 2, 8, 9, 13])
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_local_buffer_against_lists_of_episodes(n_step: int, chunk_size: int) -> None:
    args = make_args(n_step=n_step, chunk_size=chunk_size)
    player = Player(args, VECTOR, seed=100 * n_step + chunk_size)
    for episode in every_episode(player, repeats=5):
        player.play(0, episode)
    chunks = list(player.waiting[0])
    assert len(chunks) == player.positions[0] // chunk_size
    assert {end % chunk_size for end in player.ends} == set(range(chunk_size))  # borders at each place of an episode
    for chunk in chunks:
        for name, (shape, dtype) in apex.chunk_fields(VECTOR, chunk_size).items():
            assert chunk[name].shape == shape and (chunk[name].astype(dtype) == chunk[name]).all()

    frames, ages = (np.concatenate([chunk[name] for chunk in chunks]) for name in ("frames", "ages"))
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0] if name != "frames"}
    given = np.flatnonzero(columns["acted"]) - n_step  # the positions that transitions come from, in their order
    due = sorted(position for _, position in player.expected if position < len(chunks) * chunk_size - n_step)
    assert given.tolist() == due and len(player.expected) - len(due) <= n_step + chunk_size - 1
    for position in given:
        transition, row = player.expected[0, int(position)], {name: x[position + n_step] for name, x in columns.items()}
        assert row["returns"] == pytest.approx(transition.returns, abs=1e-5)
        assert row["discounts"] == pytest.approx(transition.discount, abs=1e-7)
        assert row["errors"] == pytest.approx(transition.error, abs=1e-5)
        assert row["actions"] == transition.action
        assert (frames[position] == transition.obs).all()
        if transition.next_obs is not None:
            assert row["offsets"] == transition.n_rewards
            assert (frames[position + row["offsets"]] == transition.next_obs).all()
    for first, end in itertools.pairwise([0, *player.ends]):
        assert ages[first:end].tolist() == [min(t, 3) for t in range(end - first)][: max(0, len(ages) - first)]


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_n_step_transitions_against_lists_of_episodes(n_step: int) -> None:
    player = Player(make_args(n_step=n_step), VECTOR, seed=n_step)
    rewards, terminated, acted, expected = [], [], [], {}
    for episode in every_episode(player, repeats=3):
        for t, transition in enumerate(slow_transitions(episode, n_step, 0.9, VECTOR)):
            expected[len(rewards) + t] = transition
        final = episode.kind == "truncated"
        rewards += episode.rewards + [99.0] * final  # nobody may count the reward of no action
        terminated += [False] * (len(episode.rewards) - 1) + [not final] + [False] * final
        acted += [True] * len(episode.rewards) + [False] * final
    arrays = np.array(rewards, np.float32), np.array(terminated), np.array(acted)
    before = copy.deepcopy(arrays)
    returns, discounts, offsets = apex.n_step_transitions(*arrays, n_step, 0.9)
    assert len(returns) == len(discounts) == len(offsets) == len(rewards) - n_step
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))
    for position, transition in expected.items():
        if position < len(returns):
            assert returns[position] == pytest.approx(transition.returns, abs=1e-5)
            assert discounts[position] == pytest.approx(transition.discount, abs=1e-7)
            assert transition.discount == 0 or offsets[position] == transition.n_rewards


# ------------------------------------------------------------------------------------------- targets and weights


def test_double_q_targets_by_hand() -> None:
    """The online network says which action, the target network what it is worth; no value after a terminal."""
    online = torch.tensor([[1.0, 5.0, 2.0], [3.0, -1.0, 0.0], [0.0, 0.0, 9.0]])
    target = torch.tensor([[70.0, 10.0, 80.0], [-4.0, 50.0, 60.0], [1e6, 1e6, 1e6]])
    returns, discounts = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 0.0])
    assert apex.double_q_targets(returns, discounts, online, target).tolist() == [1 + 5, 2 - 1, 3]


def test_importance_weights_by_hand() -> None:
    """N P = 2, 1, 1/2 to the power of -1/2 are 1/√2, 1, √2, of which √2 is the largest."""
    weights = importance_weights(np.array([0.5, 0.25, 0.125]), 4, 0.5)
    assert weights.dtype == np.float32
    assert weights.tolist() == pytest.approx([0.5, math.sqrt(0.5), 1])
    assert importance_weights(np.array([0.5, 0.25, 0.125]), 4, 0.0).tolist() == [1, 1, 1]
    assert importance_weights(np.array([0.5, 0.25, 0.125]), 4, 1.0).tolist() == [0.25, 0.5, 1]
    expected = [1, 16**-0.4, 32**-0.4]
    assert importance_weights(np.array([1 / 64, 16 / 64, 32 / 64]), 2_000_000, 0.4).tolist() == pytest.approx(expected)


def leaves(replay: apex.Replay) -> np.ndarray:
    return replay.tree[np.arange(replay.tree.capacity)]


def test_priorities_of_initial_and_of_new_errors_are_the_same_function() -> None:
    """(|δ| + 1e-6)^0.6, whoever says δ."""
    errors = np.array([0.0, 1.0, -1.0, 2.0, -32.0, 1e-6, 1e-3, 0.5], np.float32)
    by_hand = [10**-3.6, 1, 1, 2**0.6, 8, 2**0.6 * 10**-3.6, (1.001e-3) ** 0.6, 2**-0.6]
    args = make_args(n_step=1, batch_size=64)
    replay, player = apex.Replay(VECTOR, args, torch.device("cpu")), Player(args, VECTOR)
    player.play(0, player.episode(40, "terminated"))
    chunk, positions = player.chunk(0)
    assert positions == list(range(7))  # the first chunk begins before the first position
    chunk["errors"][1:] = errors[1:]
    replay.add(0, chunk)
    np.testing.assert_allclose(leaves(replay)[:7], by_hand[1:], rtol=2e-6)
    chunk, _ = player.chunk(0)
    chunk["errors"][:] = errors
    replay.add(0, chunk)
    np.testing.assert_allclose(leaves(replay)[7:15], by_hand, rtol=2e-6)
    np.testing.assert_allclose(replay._priorities(errors), by_hand, rtol=2e-6)

    initial = leaves(replay)
    batch = replay.sample()
    assert set(batch.positions) > {2, 3, 10, 11}
    of_position = np.concatenate([errors[1:], errors])
    replay.set_priorities(batch, -of_position[batch.positions])
    assert leaves(replay).tolist() == initial.tolist()
    replay.set_priorities(batch, 32 * of_position[batch.positions])
    drawn = sorted({int(p) for p in batch.positions if abs(of_position[p]) > 0.1})
    np.testing.assert_allclose(leaves(replay)[drawn], 8 * initial[drawn], rtol=1e-5)  # 32^0.6 = 8


# ---------------------------------------------------------------------------------------------------- network


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("n_actions", "count"), [(4, 3_292_837), (6, 3_293_863), (9, 3_295_402), (18, 3_300_019)])
def test_parameter_counts(n_actions: int, count: int) -> None:
    assert n_parameters(q_network("nature", n_actions)) == count
    trunk, stream = 3 * 256 + 256, 256 * 256 + 256
    assert n_parameters(q_network("mlp", n_actions)) == trunk + 2 * stream + 257 + 257 * n_actions


@pytest.mark.parametrize("arch", ["nature", "mlp"])
def test_initial_parameters_fill_their_bounds(arch: str) -> None:
    """U(±1/√fan_in), weights and biases."""
    fans = [256, 512, 576, 3136, 512, 3136, 512] if arch == "nature" else [3, 256, 256, 256, 256]
    layers = [m for m in q_network(arch, 6).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == len(fans)
    for layer, fan in zip(layers, fans, strict=True):
        for p in layer.parameters():
            assert p.abs().max() <= 1.0001 / math.sqrt(fan)
            assert p.numel() < 200 or p.std().item() == pytest.approx(1 / math.sqrt(3 * fan), rel=0.1)


def test_network_on_vectors_in_plain_sums() -> None:
    model = q_network("mlp")
    obs = torch.randn(5, 3) * 3
    expected = torch.stack([slow_mlp(model.state_dict(), x) for x in obs])
    assert (model(obs).shape, model(obs).dtype) == ((5, 3), torch.float32)
    torch.testing.assert_close(model(obs).double(), expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_near_float32() -> None:
    """A number of bfloat16 has 8 bits: the Q-values differ, by little; parameters and gradients stay float32."""
    torch.manual_seed(1)
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    exact = apex.QNetwork(IMAGE, spaces.Discrete(6), "nature")
    rough = apex.QNetwork(IMAGE, spaces.Discrete(6), "nature", bfloat16=True)
    rough.load_state_dict(exact.state_dict())
    q_values = rough(obs)
    assert q_values.dtype == torch.float32 and not torch.equal(q_values, exact(obs))
    torch.testing.assert_close(q_values, exact(obs), atol=2e-3, rtol=0.02)
    for network in (exact, rough):
        network(obs).square().sum().backward()
    for p, q in zip(exact.parameters(), rough.parameters(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32
        assert torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.99


def test_network_on_images_in_plain_functions() -> None:
    """torch.nn.functional on the input divided by 255, every observation on its own."""
    model = q_network("nature", 6)
    with torch.no_grad():
        for stream in (model.value, model.advantages):
            stream[2].weight *= 20
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    before = obs.clone()
    q_values = model(obs)
    assert torch.equal(obs, before) and q_values.std() > 0.1
    for i in range(2):
        params = iter([p.detach() for p in model.parameters()])
        x = obs[i][None].float() / 255
        for stride, size in ((4, 20), (2, 9), (1, 7)):
            x = F.relu(F.conv2d(x, next(params), next(params), stride))
            assert x.shape[2:] == (size, size)
        v, a = (
            F.linear(F.relu(F.linear(x.reshape(1, -1), next(params), next(params))), next(params), next(params))
            for _ in range(2)
        )
        torch.testing.assert_close(q_values[i], (v + a - a.sum() / 6)[0], rtol=1e-4, atol=1e-4)


def test_value_and_advantages_by_hand() -> None:
    """V = 10 and A = (1, 2, 6): their mean is 3, whatever is seen."""
    model = q_network("mlp")
    with torch.no_grad():
        for stream, biases in ((model.value, [10.0]), (model.advantages, [1.0, 2.0, 6.0])):
            stream[2].weight.zero_()
            stream[2].bias.copy_(torch.tensor(biases))
    assert model(torch.randn(2, 3)).tolist() == [[8, 9, 13]] * 2


def test_hidden_layers_of_both_streams_by_hand() -> None:
    """One unit is alive in each layer. Trunk: 2 · 3 - 1 = 5; V: 5 + 1 = 6, times 2; A: relu(-5 + 7) = 2, times a."""
    model = q_network("mlp")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.trunk[0].weight[0, 1], model.trunk[0].bias[0] = 2, -1
        model.value[0].weight[4, 0], model.value[0].bias[4] = 1, 1
        model.advantages[0].weight[9, 0], model.advantages[0].bias[9] = -1, 7
        model.value[2].weight[0, 4] = 2
        model.advantages[2].weight[:, 9] = torch.tensor([0.0, 1.5, 3.0])
    q_values = model(torch.tensor([[50.0, 3.0, 50.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]]))
    # the second: all units of the trunk are dead, so V = 2 · 1 and A = 7a; the third: 9, V = 20, relu(-9 + 7) = 0
    assert q_values.tolist() == [[12 - 3, 12, 12 + 3], [2 - 10.5, 2, 2 + 10.5], [20, 20, 20]]


def test_mean_is_over_the_actions_of_each_sample_alone() -> None:
    model, obs = q_network("mlp"), torch.randn(7, 3) * 3
    alone = torch.cat([model(x[None]) for x in obs])
    torch.testing.assert_close(model(obs), alone)
    torch.testing.assert_close(model(obs).mean(1), model.value(model.trunk(obs))[:, 0])


def test_gradient_flows_through_the_mean() -> None:
    """dQ(s, a)/dA(s, b) is 1 - 1/3 where a is b and -1/3 elsewhere; the biases of the last layer are added to A."""
    model, obs = q_network("mlp").double(), torch.randn(1, 3).double()
    bias, weight = model.advantages[2].bias, model.advantages[2].weight
    hidden = model.advantages[:2](model.trunk(obs))[0].detach()
    for action in range(3):
        of_bias, of_weight = torch.autograd.grad(model(obs)[0, action], (bias, weight))
        by_hand = [2 / 3 if b == action else -1 / 3 for b in range(3)]
        assert of_bias.tolist() == pytest.approx(by_hand)
        torch.testing.assert_close(of_weight, torch.tensor(by_hand).double()[:, None] * hidden)
        for b in range(3):
            with torch.no_grad():
                bias[b] += 1e-4
                above = model(obs)[0, action].item()
                bias[b] -= 2e-4
                below = model(obs)[0, action].item()
                bias[b] += 1e-4
            assert (above - below) / 2e-4 == pytest.approx(by_hand[b], abs=1e-6)


# -------------------------------------------------------------------------------------------------- optimiser


class SlowRMSProp:
    """Centred, one number at a time, in double precision."""

    def __init__(self, theta: np.ndarray, lr: float, decay: float, eps: float) -> None:
        self.theta, self.lr, self.decay, self.eps = [float(x) for x in theta.flat], lr, decay, eps
        self.g, self.m = [0.0] * len(self.theta), [0.0] * len(self.theta)

    def step(self, gradient: np.ndarray) -> None:
        for i, d in enumerate(gradient.flat):
            self.g[i] = self.decay * self.g[i] + (1 - self.decay) * float(d) ** 2
            self.m[i] = self.decay * self.m[i] + (1 - self.decay) * float(d)
            self.theta[i] -= self.lr * float(d) / math.sqrt(self.g[i] - self.m[i] ** 2 + self.eps)


def test_rmsprop_by_hand() -> None:
    """g = 2, m = 1, √(2 - 1 + 1.25) = 1.5; then g = 3, m = -0.5, √(3 - 0.25 + 1.25) = 2; then d = 0: nothing moves."""
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = apex.CentredRMSProp([p], lr=0.6, decay=0.5, eps=1.25)
    for gradient, expected in ((2.0, 1 - 0.6 * 2 / 1.5), (-2.0, 0.2 + 0.6 * 2 / 2), (0.0, 0.8)):
        p.grad = torch.tensor([gradient])
        optimizer.step()
        assert p.item() == pytest.approx(expected, abs=1e-6)
    assert optimizer.state[p]["square"].item() == 1.5 and optimizer.state[p]["mean"].item() == -0.25


def test_rmsprop_against_a_plain_loop() -> None:
    """The constants of the paper; gradients of very different sizes, whose means are not zero."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** np.linspace(-5, 1, 7)
    p = nn.Parameter(torch.zeros(7))
    other = nn.Parameter(torch.ones(2))  # has no gradient
    optimizer = apex.CentredRMSProp([p, other], 6.25e-5, 0.95, 1.5e-7)
    slow = SlowRMSProp(np.zeros(7), 6.25e-5, 0.95, 1.5e-7)
    for _ in range(300):
        gradient = (sizes * (rng.normal(size=7) + 0.5)).astype(np.float32)
        p.grad = torch.tensor(gradient)
        optimizer.step()
        slow.step(gradient)
        assert torch.equal(p.grad, torch.tensor(gradient))
    np.testing.assert_allclose(p.detach().numpy(), slow.theta, rtol=1e-3, atol=1e-7)
    assert abs(p[6].item()) > 6.25e-5 * 30 and other.tolist() == [1, 1]


def test_rmsprop_of_a_constant_gradient() -> None:
    """Its variance is zero but for rounding, which must not take the root of a negative number."""
    gradient = torch.tensor([0.0, 1e-3, 0.1, 1.0, 3.7, -37.3, 1e3, -1.1e4, 1e6])
    p = nn.Parameter(torch.zeros(9))
    optimizer = apex.CentredRMSProp([p], 1e-6, 0.95, 1.5e-7)
    for _ in range(1500):
        p.grad = gradient.clone()
        before = p.detach().clone()
        optimizer.step()
        assert p.isfinite().all()
        assert ((p - before).abs() <= 1e-6 * gradient.abs() / math.sqrt(1.5e-7) * 1.001 + p.abs() * 1e-6).all()
    assert torch.equal(p.sign(), -gradient.sign())


def test_rmsprop_goes_on_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 4)
    p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer, again = (apex.CentredRMSProp([x], 0.01, 0.9, 1e-3) for x in (p, q))
    for i, gradient in enumerate(gradients):
        if i == 3:
            q.data.copy_(p.data)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        p.grad = gradient
        optimizer.step()
        if i >= 3:
            q.grad = gradient
            again.step()
    assert torch.equal(p, q) and p.abs().min() > 0


# ----------------------------------------------------------------------------------------------------- update


def random_batch(rng: np.random.Generator, n: int, d: int, scale: float = 1.0) -> apex.Batch:
    floats = {name: torch.tensor(rng.normal(size=(n, d)), dtype=torch.float32) for name in ("obs", "next_obs")}
    floats |= {"returns": torch.tensor(scale * rng.normal(size=n), dtype=torch.float32)}
    floats |= {"discounts": torch.tensor(rng.choice([0.0, 0.81, 0.9], n), dtype=torch.float32)}
    floats |= {"weights": torch.tensor(rng.uniform(0.1, 1, n), dtype=torch.float32)}
    actions = torch.tensor(rng.integers(0, 3, n))
    return apex.Batch(indices=np.arange(n), positions=np.arange(n), actions=actions, **floats)


@pytest.mark.parametrize(("scale", "max_norm", "clipped"), [(1.0, 40.0, False), (1.0, 0.25, True), (500.0, 40.0, True)])
def test_update_of_a_linear_q_function(scale: float, max_norm: float, clipped: bool) -> None:
    """Q(s, a) = θ_a · s: dL/dθ_a is the mean over the batch of -w δ s where a was taken, all sums written out."""
    rng = np.random.default_rng(0)
    model, target_model = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    theta, theta_target = rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
    model.weight.data, target_model.weight.data = (torch.tensor(x).float() for x in (theta, theta_target))
    optimizer = apex.CentredRMSProp(model.parameters(), 0.01, 0.8, 0.05)
    slow = SlowRMSProp(theta, 0.01, 0.8, 0.05)
    own_choice = 0
    for _ in range(3):
        batch = random_batch(rng, 6, 2, scale)
        gradient, errors = np.zeros((3, 2)), []
        for i in range(6):
            theta = np.array(slow.theta).reshape(3, 2)
            obs, next_obs, action = batch.obs[i].numpy(), batch.next_obs[i].numpy(), int(batch.actions[i])
            best = max(range(3), key=lambda a: theta[a] @ next_obs)
            own_choice += best != max(range(3), key=lambda a: theta_target[a] @ next_obs)
            value = theta_target[best] @ next_obs
            error = float(batch.returns[i]) + float(batch.discounts[i]) * value - theta[action] @ obs
            gradient[action] -= float(batch.weights[i]) * error * obs / 6
            errors.append(error)
        norm = math.sqrt((gradient**2).sum())
        assert (norm > max_norm) == clipped
        slow.step(gradient * min(1, max_norm / norm))
        result, scalars = apex.update(model, target_model, optimizer, batch, max_norm)
        np.testing.assert_allclose(result, errors, rtol=1e-4, atol=1e-5)
        assert result.shape == (6,) and isinstance(result, np.ndarray)
        squares = [error**2 for error in errors]
        assert scalars["losses/td_loss"].tolist() == pytest.approx(squares, rel=1e-4)
        assert scalars["losses/grad_norm"].item() == pytest.approx(norm, rel=1e-4)
        np.testing.assert_allclose(model.weight.detach().numpy().flatten(), slow.theta, rtol=1e-4, atol=1e-6)
    assert own_choice > 3  # the two networks do not always choose alike
    np.testing.assert_allclose(target_model.weight.detach().numpy(), theta_target, rtol=1e-6)
    assert target_model.weight.grad is None


def test_update_of_the_network_against_its_formula_in_double() -> None:
    model, target_model = q_network("mlp", seed=1), q_network("mlp", seed=2)
    before, batch = copy.deepcopy(model.state_dict()), random_batch(np.random.default_rng(1), 16, 3)
    params = {name: p.double().requires_grad_() for name, p in before.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(16):
        with torch.no_grad():
            best = int(slow_mlp(params, batch.next_obs[i]).argmax())
            next_value = slow_mlp(target_model.state_dict(), batch.next_obs[i])[best]
        target = batch.returns[i].double() + batch.discounts[i].double() * next_value
        loss = loss + batch.weights[i].double() * (target - slow_mlp(params, batch.obs[i])[batch.actions[i]]) ** 2 / 32
    gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    optimizer = apex.CentredRMSProp(model.parameters(), 1e-3, 0.95, 1e-3)
    apex.update(model, target_model, optimizer, batch, 40.0)
    for name, p in model.named_parameters():
        d = gradients[name]
        expected = params[name].detach() - 1e-3 * d / (0.05 * d**2 - (0.05 * d) ** 2 + 1e-3).sqrt()
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, before[name])


NOT_FINITE = [(where, x) for where in ("returns", "obs", "next_obs") for x in (math.nan, math.inf, -math.inf)]


@pytest.mark.parametrize(("where", "number"), [*NOT_FINITE, ("returns", 3e38)])
def test_update_that_is_not_finite(where: str, number: float) -> None:
    """The last case: a finite error, the norm of whose gradient overflows."""
    model = q_network("mlp")
    before, batch = copy.deepcopy(model.state_dict()), random_batch(np.random.default_rng(0), 4, 3)
    getattr(batch, where)[2], batch.discounts[2] = number, 0.9
    with pytest.raises(FloatingPointError):
        apex.update(model, q_network("mlp"), apex.CentredRMSProp(model.parameters(), 0.1, 0.9, 0.1), batch, 40.0)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("n_step", [1, 3])
def test_initial_errors_are_those_of_an_update(n_step: int) -> None:
    """Where the learner has the actor's parameters twice over, each finds the same δ for a transition."""
    args = make_args(n_step=n_step, capacity=400, envs_per_actor=2, batch_size=500)
    model = q_network("mlp")
    player = Player(args, VECTOR, model=model, max_length=8)
    replay, initial = apex.Replay(VECTOR, args, torch.device("cpu")), {}
    for stream in [0, 1] * 6:
        chunk, positions = player.chunk(stream)
        replay.add(stream, chunk)
        first = player.given[stream] * args.chunk_size - args.chunk_size - n_step
        initial |= {(stream, p): chunk["errors"][p - first] for p in positions}
    optimizer = apex.CentredRMSProp(model.parameters(), 0.0, 0.95, 1.5e-7)
    batch = replay.sample()
    errors, _ = apex.update(model, copy.deepcopy(model), optimizer, batch, 40.0)
    keys = list(zip((batch.indices // replay.length).tolist(), batch.positions.tolist(), strict=True))
    assert len(set(keys)) > 0.8 * len(initial) == 0.8 * replay.size
    np.testing.assert_allclose(errors, [initial[key] for key in keys], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(errors, [player.expected[key].error for key in keys], rtol=1e-4, atol=1e-5)
    before = leaves(replay)
    replay.set_priorities(batch, errors)
    np.testing.assert_allclose(leaves(replay), before, rtol=1e-3, atol=1e-4)


# ----------------------------------------------------------------------------------------------------- replay


class SlowReplay:
    """What the memory ought to hold: a dict of stream and position, and the chunks in the order of their arrival."""

    def __init__(self, replay: apex.Replay, space: spaces.Box) -> None:
        self.replay, self.args, self.reach = replay, replay.args, 3 if len(space.shape) == 3 else 0
        self.priorities: dict[tuple[int, int], float] = {}
        self.chunks: list[list[tuple[int, int]]] = []
        self.written: dict[int, int] = {}

    def add(self, player: Player, stream: int) -> None:
        """To both memories; with errors that leave no transition much less likely than another."""
        chunk, positions = player.chunk(stream)
        first = player.given[stream] * self.args.chunk_size - self.args.chunk_size - self.args.n_step
        chunk["errors"] = player.rng.uniform(0.5, 2, self.args.chunk_size).astype(np.float32)
        assert self.replay.add(stream, chunk) == len(positions)
        keys = [(stream, p) for p in positions]
        self.priorities |= {key: (chunk["errors"][key[1] - first] + 1e-6) ** 0.6 for key in keys}
        self.chunks.append(keys)
        self.written[stream] = player.given[stream] * self.args.chunk_size
        oldest_frame = self.written[stream] - self.replay.length
        for key in [(s, p) for s, p in self.priorities if s == stream and p - self.reach < oldest_frame]:
            del self.priorities[key]

    def trim(self) -> None:
        self.replay.trim()
        while len(self.priorities) > self.args.capacity:
            for key in self.chunks.pop(0):
                self.priorities.pop(key, None)

    def write_back(self, batch: apex.Batch, errors: np.ndarray) -> None:
        self.replay.set_priorities(batch, errors)
        for index, position, error in zip(batch.indices, batch.positions, errors, strict=True):
            key = (int(index // self.replay.length), int(position))
            if key in self.priorities:
                self.priorities[key] = (abs(float(error)) + 1e-6) ** 0.6

    def check_priorities(self) -> None:
        expected = np.zeros(self.replay.tree.capacity)
        for (stream, position), priority in self.priorities.items():
            expected[stream * self.replay.length + position % self.replay.length] = priority
        np.testing.assert_allclose(leaves(self.replay), expected, rtol=1e-5)
        assert self.replay.size == len(self.priorities) == np.count_nonzero(leaves(self.replay))
        assert self.replay.tree.total == pytest.approx(sum(self.priorities.values()), rel=1e-5)

    def check_contents(self, player: Player) -> apex.Batch:
        """A batch so large that it has every transition: just these are there, and just as the actor saw them."""
        batch = self.replay.sample()
        keys = list(zip((batch.indices // self.replay.length).tolist(), batch.positions.tolist(), strict=True))
        assert set(keys) == set(self.priorities)
        check_batch(batch, [player.expected[key] for key in keys])
        return batch


def check_batch(batch: apex.Batch, expected: list[Transition]) -> None:
    assert batch.actions.dtype == torch.int64 and batch.actions.tolist() == [x.action for x in expected]
    np.testing.assert_allclose(batch.returns, [x.returns for x in expected], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batch.discounts, [x.discount for x in expected], rtol=1e-6)
    assert (batch.obs.numpy() == np.stack([x.obs for x in expected])).all()
    following = [i for i, x in enumerate(expected) if x.next_obs is not None]
    assert following
    assert (batch.next_obs[following].numpy() == np.stack([expected[i].next_obs for i in following])).all()


def memory(space: spaces.Box, **changes: Any) -> tuple[apex.Replay, Player, SlowReplay]:
    """A memory, what plays for it, and a slow one; a batch draws every transition several times."""
    args = make_args(**changes)
    replay = apex.Replay(space, args, torch.device("cpu"))
    args.batch_size = 6 * len(replay.frames)
    player = Player(args, space, seed=args.seed)
    return replay, player, SlowReplay(replay, space)


@each_space
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_stacks_are_what_the_actor_saw_over_many_laps(space: spaces.Box, n_step: int) -> None:
    replay, player, slow = memory(space, capacity=60, n_step=n_step, chunk_size=9)
    for laps in range(1, 1000):
        slow.add(player, 0)
        slow.check_contents(player)
        if laps * 9 > 6 * replay.length:
            break
    left = [player.expected[key] for key in slow.priorities]
    assert len(left) > 30 and {x.n_rewards for x in left} == set(range(1, n_step + 1))
    assert replay.frames.dtype == (torch.uint8 if space is SMALL_IMAGE else torch.float32)
    assert replay.frames.shape == (63, *(space.shape[1:] if space is SMALL_IMAGE else space.shape))


def test_frames_of_an_episode_by_hand() -> None:
    """Frames 1 to 6 of a truncated episode and 7, 8 of the next: an older frame first, 0 before an episode's first."""
    args = make_args(n_step=2, chunk_size=8, batch_size=64)
    replay, buffer = apex.Replay(SMALL_IMAGE, args, torch.device("cpu")), apex.LocalBuffer(SMALL_IMAGE, args)
    for t in range(6):
        taken = (t % 3, 0.0, 1.0, False) if t < 5 else None
        buffer.add(np.full((3, 2), t + 1, np.uint8), min(t, 3), 0.0, taken)
    buffer.add(np.full((3, 2), 7, np.uint8), 0, 0.0, (0, 0.0, 1.0, False))
    replay.add(0, buffer.add(np.full((3, 2), 8, np.uint8), 1, 0.0, (1, 0.0, 1.0, False)))
    batch, following = replay.sample(), {}
    assert set(batch.positions) == {0, 1, 2, 3, 4}
    for position, obs, next_obs in zip(batch.positions.tolist(), batch.obs, batch.next_obs, strict=True):
        assert (obs == obs[:, :1, :1]).all() and (next_obs == next_obs[:, :1, :1]).all()
        following[position] = obs[:, 0, 0].tolist(), next_obs[:, 0, 0].tolist()
    assert following == {
        0: ([0, 0, 0, 1], [0, 1, 2, 3]),
        1: ([0, 0, 1, 2], [1, 2, 3, 4]),
        2: ([0, 1, 2, 3], [2, 3, 4, 5]),
        3: ([1, 2, 3, 4], [3, 4, 5, 6]),
        4: ([2, 3, 4, 5], [3, 4, 5, 6]),
    }
    first_of_next = replay.observations(np.array([0, 0]), np.array([6, 7]))[:, :, 0, 0]
    assert first_of_next.tolist() == [[0, 0, 0, 7], [0, 0, 7, 8]]


@each_space
@pytest.mark.parametrize("spare", [1.04, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_memory_under_random_operations(
    space: spaces.Box, spare: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three environments of unequal speed, removals, draws, priorities written back late, actors that are replaced."""
    monkeypatch.setattr(common.replay, "SPARE", spare)
    replay, player, slow = memory(space, capacity=150, n_actors=3, seed=seed, n_step=(1, 3, 5)[seed])
    args = replay.args
    rng, held, most, operations = np.random.default_rng(seed), [], 0, ["add", "trim", "draw", "write", "restart"]
    for _ in range(250):
        operation = rng.choice(operations, p=[0.6, 0.12, 0.12, 0.12, 0.04])
        if operation == "add":
            slow.add(player, int(rng.choice(3, p=[0.6, 0.3, 0.1])))
            most = max(most, replay.size)
        elif operation == "trim":
            slow.trim()
            assert replay.size <= args.capacity
        elif operation == "draw" and slow.priorities:
            batch = slow.check_contents(player)
            few = rng.integers(0, args.batch_size, 20)
            held.append(batch._replace(indices=batch.indices[few], positions=batch.positions[few]))
        elif operation == "write" and held:
            batch = held.pop(int(rng.integers(len(held))))
            slow.write_back(batch, rng.uniform(0.5, 2, 20).astype(np.float32) * rng.choice([-1, 1], 20))
        elif operation == "restart":
            player.restart(int(rng.integers(3)))
        slow.check_priorities()
    assert player.given[0] * args.chunk_size > 2 * replay.length or spare > 2
    assert most > args.capacity or spare < 2


@each_space
def test_oldest_arrivals_of_all_streams_go_first(space: spaces.Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings so long that nothing is overwritten: what is left is the newest chunks, and one more would be too many."""
    monkeypatch.setattr(common.replay, "SPARE", 40.0)
    replay, player, _ = memory(space, capacity=100, n_actors=3)
    args = replay.args
    arrivals = []
    for round_ in range(25):
        for stream in [2, 1, 2, 0, 2, 1, 2, 2]:
            chunk, positions = player.chunk(stream)
            chunk["errors"][:] = 1
            replay.add(stream, chunk)
            arrivals.append({(stream, p) for p in positions})
            assert replay.size == np.count_nonzero(leaves(replay))
        if round_ % 4 == 3:
            assert replay.size > args.capacity  # nothing is refused between two removals
            replay.trim()
            kept, left = set(), list(arrivals)
            while left and len(kept) + len(left[-1]) <= args.capacity:
                kept |= left.pop()
            assert replay.size == len(kept) <= args.capacity
            batch = replay.sample()
            streams = (batch.indices // replay.length).tolist()
            assert set(zip(streams, batch.positions.tolist(), strict=True)) == kept
            replay.trim()
            assert replay.size == len(kept)
    assert max(player.given) * args.chunk_size < replay.length


def test_trimming_leaves_a_memory_within_its_capacity_alone() -> None:
    replay, player, slow = memory(VECTOR, capacity=100)
    while len(slow.priorities) <= 100 - 8 and player.given[0] < 12:
        slow.add(player, 0)
        before = leaves(replay).tolist()
        replay.trim()
        assert leaves(replay).tolist() == before and replay.size == len(slow.priorities)


@each_space
@pytest.mark.parametrize("gone", ["trimmed", "overwritten"])
def test_priorities_of_what_is_gone_are_not_written(space: spaces.Box, gone: str) -> None:
    replay, player, slow = memory(space, capacity=60, n_step=3)
    for _ in range(5):
        slow.add(player, 0)
    batch = replay.sample()
    old = set(batch.positions)
    if gone == "trimmed":
        replay.args.capacity = 20
        slow.trim()
        assert 0 < replay.size <= 20
    else:
        while player.given[0] * 8 < replay.length + 40:  # a later lap, whose first part is there by now
            slow.add(player, 0)
    there = {p for _, p in slow.priorities}
    assert old - there
    if gone == "overwritten":
        assert not old & there and {p % replay.length for p in old} & {p % replay.length for p in there}
    before = leaves(replay)
    slow.write_back(batch, np.full(len(batch.indices), 1e4, np.float32))
    slow.check_priorities()
    changed = np.flatnonzero(leaves(replay) != before)
    assert {p % replay.length for p in old & there} == set(changed.tolist())
    assert (leaves(replay)[changed] > 200).all()


def test_a_late_write_back_reaches_what_is_still_there() -> None:
    replay, player, slow = memory(VECTOR, capacity=60, n_step=3)
    for _ in range(6):
        slow.add(player, 0)
    batch = replay.sample()
    while min(p for _, p in slow.priorities) < 20:
        slow.add(player, 0)
    there = {p for _, p in slow.priorities} & set(batch.positions)
    assert there and set(batch.positions) - there
    slow.write_back(batch, batch.positions.astype(np.float32) + 3)
    slow.check_priorities()
    for position in there:
        assert leaves(replay)[position % replay.length] == pytest.approx((position + 3) ** 0.6, rel=1e-5)


def test_one_frame_a_position() -> None:
    for capacity, n_actors, envs_per_actor in ((2_000, 1, 8), (10_000, 4, 16), (100_000, 3, 1)):
        args = make_args(capacity=capacity, n_actors=n_actors, envs_per_actor=envs_per_actor)
        replay = apex.Replay(VECTOR, args, torch.device("cpu"))
        assert capacity <= len(replay.frames) <= 1.05 * capacity
        arrays = [replay.frames.numpy(), *replay.columns.values(), replay.tree.nodes]
        assert apex.replay_bytes(VECTOR, args) == sum(array.nbytes for array in arrays)
    args = make_args(capacity=1_000, envs_per_actor=4)
    replay = apex.Replay(SMALL_IMAGE, args, torch.device("cpu"))
    arrays = [replay.frames.numpy(), *replay.columns.values(), replay.tree.nodes]
    assert apex.replay_bytes(SMALL_IMAGE, args) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize(("n_actors", "envs_per_actor"), [(360, 1), (1, 16), (32, 16)])
def test_two_million_transitions_of_atari_fit_into_16_gigabytes(n_actors: int, envs_per_actor: int) -> None:
    args = make_args(capacity=2_000_000, n_actors=n_actors, envs_per_actor=envs_per_actor)
    assert 2_000_000 * 84 * 84 < apex.replay_bytes(IMAGE, args) <= 16e9
    assert 2_000_000 <= n_actors * envs_per_actor * common.replay.ring_length(args) <= 1.05 * 2_000_000


def test_frequencies_and_weights_of_draws() -> None:
    """P(i) = (|δ_i| + 1e-6)^0.6 over the sum of all, w_i = (N P(i))^-0.4 over the largest of the batch."""
    args = make_args(capacity=60, n_step=3, envs_per_actor=2, batch_size=50, priority_beta=0.4)
    replay, player = apex.Replay(VECTOR, args, torch.device("cpu")), Player(args, VECTOR)
    errors: dict[int, float] = {}
    for stream in [0, 1] * 3:
        chunk, positions = player.chunk(stream)
        chunk["errors"] = (player.rng.exponential(size=8) * player.rng.choice([-3, 0.3, 3], 8)).astype(np.float32)
        first = player.given[stream] * 8 - 8 - 3
        errors |= {stream * replay.length + p: float(chunk["errors"][p - first]) for p in positions}
        replay.add(stream, chunk)
    places = sorted(errors)
    powers = np.array([(abs(errors[i]) + 1e-6) ** 0.6 for i in places])
    probabilities = dict(zip(places, powers / powers.sum(), strict=True))
    assert 25 < len(places) == replay.size and powers.max() > 10 * powers.min()
    counts = np.zeros(len(places))
    for _ in range(600):
        batch = replay.sample()
        counts += (batch.indices[:, None] == places).sum(0)
        weights = np.array([(len(places) * probabilities[i]) ** -0.4 for i in batch.indices])
        np.testing.assert_allclose(batch.weights.numpy(), weights / weights.max(), rtol=1e-5)
    statistic, bound = chi_square(counts, 600 * 50 * powers / powers.sum())
    assert statistic < bound


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_space
@pytest.mark.parametrize("n_chunks", [3, 6, 8, 30])
def test_state_round_trip(space: spaces.Box, n_chunks: int) -> None:
    replay, player, slow = memory(space, capacity=200, envs_per_actor=2, n_step=3)  # rings of 104 positions
    args = replay.args
    for i in range(n_chunks):
        slow.add(player, int(i % 3 == 0))
    slow.write_back(replay.sample(), np.random.default_rng(0).uniform(0.5, 2, args.batch_size))
    slow.trim()
    state = round_trip(replay.state_dict())
    used = max(player.given) * args.chunk_size
    assert state["frames"].shape[:2] == (2, used if used < 52 else 104)  # less than half full: no empty room is saved
    assert state["frames"].untyped_storage().nbytes() == state["frames"].nbytes
    shared = replay.state_dict()["frames"].data_ptr() == replay.frames.data_ptr()
    assert shared == (used >= 52)  # a full memory is not copied

    again = apex.Replay(space, args, torch.device("cpu"))
    other = SlowReplay(again, space)
    for _ in range(3):  # what was there before must go
        other.add(Player(args, space, seed=99), 1)
    again.load_state_dict(state)
    slow.replay = again
    slow.check_priorities()
    again.tree.rng, replay.tree.rng = np.random.default_rng(5), np.random.default_rng(5)
    for _ in range(3):
        for a, b in zip(slow.check_contents(player), replay.sample(), strict=True):
            assert (a == b).all()
    args.capacity = 2 * replay.size // 3
    for x in (again, replay):  # and both go on alike
        x.trim()
        assert 0 < x.size <= args.capacity
    assert (leaves(again) == leaves(replay)).all()
    args.capacity = 200
    for i in range(20):
        chunk, _ = player.chunk(i % 2)
        assert again.add(i % 2, chunk) == replay.add(i % 2, chunk)
        if i % 5 == 4:
            again.trim()
            replay.trim()
        assert again.size == replay.size and (leaves(again) == leaves(replay)).all()
        for a, b in zip(again.sample(), replay.sample(), strict=True):
            assert (a == b).all()


@pytest.mark.parametrize("change", [{"capacity": 300}, {"envs_per_actor": 1}, {"envs_per_actor": 4}])
def test_state_of_another_shape_is_refused(change: dict[str, int]) -> None:
    replay, player, slow = memory(VECTOR, capacity=200, envs_per_actor=2)
    slow.add(player, 0)
    other = apex.Replay(VECTOR, make_args(**{"capacity": 200, "envs_per_actor": 2} | change), torch.device("cpu"))
    with pytest.raises(ValueError, match="another shape"):
        other.load_state_dict(round_trip(replay.state_dict()))
    assert other.size == 0 and not leaves(other).any()


def test_longest_returns() -> None:
    """An offset is one byte: 255 rewards are the most that --n-step allows."""
    _, player, slow = memory(VECTOR, capacity=2000, n_step=255, chunk_size=260)
    for length, kind in ((600, "truncated"), (300, "terminated")):
        player.play(0, player.episode(length, kind))
    for _ in range(3):
        slow.add(player, 0)
    slow.check_contents(player)
    assert max(player.expected[key].n_rewards for key in slow.priorities) == 255


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_error_that_is_not_finite_is_refused(number: float) -> None:
    replay, player, slow = memory(VECTOR)
    slow.add(player, 0)
    chunk, _ = player.chunk(0)
    chunk["errors"][5] = number
    with pytest.raises(FloatingPointError):
        replay.add(0, chunk)
    slow.check_priorities()


def test_nothing_can_be_drawn_from_an_empty_memory() -> None:
    with pytest.raises(ValueError, match="zero"):
        apex.Replay(VECTOR, make_args(), torch.device("cpu")).sample()


def test_size_where_a_priority_is_zero() -> None:
    """With ε = 0 an error of 0 has priority zero, and must not be counted when it comes: it is not when it goes."""
    replay, player, _ = memory(VECTOR, capacity=60, priority_eps=0.0)
    for _ in range(40):
        chunk, _ = player.chunk(0)
        chunk["errors"][::2] = 0
        replay.add(0, chunk)
        replay.trim()
    assert 0 < replay.size <= 60
    replay.sample()


def test_size_after_resuming_with_a_longer_return() -> None:
    """--resume with --save-replay and a larger --n-step: a new actor's first chunk reaches back over transitions."""
    replay, player, slow = memory(VECTOR, capacity=60, n_step=1)
    slow.add(player, 0)
    again, player, _ = memory(VECTOR, capacity=60, n_step=5)
    again.load_state_dict(replay.state_dict())
    again.add(0, player.chunk(0)[0])
    assert again.size == np.count_nonzero(leaves(again))


def test_state_of_a_memory_that_has_forgotten_can_be_read() -> None:
    """A checkpoint is read with weights_only=True."""
    replay, player, slow = memory(VECTOR, capacity=60)
    for _ in range(10):
        slow.add(player, 0)
    assert round_trip(replay.state_dict())["size"] == len(slow.priorities)


def test_arrivals_do_not_pile_up() -> None:
    """Where more than 4% of the positions are final observations, the rings are full before the capacity is reached:
    what is overwritten before its turn to be removed is not waited for, and the rest is removed in its turn.
    """
    replay, player, slow = memory(VECTOR, capacity=300, n_actors=3)
    for stream in [0, 2, 0, 1, 0, 0, 1, 0] * 40:
        slow.add(player, stream)
        slow.trim()
    assert len(replay.arrivals) <= len(replay.frames) / 8 + 1
    for capacity in range(replay.size - 1, 20, -9):
        replay.args.capacity = capacity
        slow.trim()
        slow.check_priorities()
        slow.check_contents(player)
        assert capacity - 8 < replay.size <= capacity


# ------------------------------------------------------------------------------------------------------ actor


class Enough(Exception):
    pass


class Learner:
    """Stands in for an actor's link: has new parameters at some steps, and ends the actor after `n_steps`."""

    def __init__(self, index: int, models: dict[int, nn.Module], n_steps: int) -> None:
        self.index, self.start, self.models, self.n_steps = index, 0, models, n_steps
        self.t, self.requests, self.reports, self.at_end = -1, [], [], contextlib.ExitStack()
        self.chunks: dict[int, list[apex.Chunk]] = {}

    def request(self) -> None:
        self.requests.append(self.t + 1)

    def fetch(self, parameters: list[Tensor]) -> bool:
        self.t += 1
        if self.t == self.n_steps:
            raise Enough
        if self.t in self.models:
            for p, new in zip(parameters, self.models[self.t].parameters(), strict=True):
                p.data.copy_(new)
        return self.t in self.models

    def send(self, stream: int, chunk: apex.Chunk) -> None:
        self.chunks.setdefault(stream, []).append(copy.deepcopy(chunk))

    def report(self, episode_return: float, length: int) -> None:
        self.reports.append((float(episode_return), int(length)))


def act(args: apex.Args, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Run an actor whose environments have the seeds 1, 2, ...; the ε that it plays with."""
    monkeypatch.setattr(apex, "env_seed", lambda *key: 1)
    epsilons, epsilon_greedy = [], apex.epsilon_greedy

    def watched(q_values: Tensor, epsilon: Tensor) -> Tensor:
        epsilons.append(np.asarray(epsilon))
        return epsilon_greedy(q_values, epsilon)

    monkeypatch.setattr(apex, "epsilon_greedy", watched)
    with pytest.raises(Enough), learner.at_end:
        apex.actor(learner, args)
    return epsilons


def slow_positions(episodes: list[Episode], args: apex.Args, space: spaces.Box) -> list[Transition | None]:
    """The transition of each position of a stream, None at a final observation."""
    positions: list[Transition | None] = []
    for episode in episodes:
        positions += slow_transitions(episode, args.n_step, args.gamma, space)
        positions += [None] * (episode.kind == "truncated")
    return positions


ENDS = [[3, "terminated"], [7, "truncated"], [2, "both"], [1, "truncated"], [6, "terminated"], [5, "truncated"]]


@pytest.mark.parametrize("clip", [True, False])
def test_actor_on_vectors(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six environments, 100 steps; the parameters change at step 37."""
    args = make_args(
        env_id="tests.paac_envs:Walk-v0",
        env_kwargs=f'{{"ends": {str(ENDS).replace(chr(39), chr(34))}}}',
        arch="mlp",
        n_actors=3,
        envs_per_actor=2,
        fetch_interval=15,
        clip_rewards=clip,
        reward_scale=0.6,
    )
    models = {0: q_network("mlp", seed=3), 37: q_network("mlp", seed=4)}
    learner = Learner(1, models, 100)
    epsilons = act(args, learner, monkeypatch)
    assert learner.requests == [0, 15, 30, 45, 60, 75, 90]
    np.testing.assert_allclose(
        epsilons, [[0.4**3.8, 0.4**5.2]] * 100, rtol=1e-5
    )  # 2 and 3 of 6: 1 + 7 · 2/5, 1 + 7 · 3/5
    assert sorted(learner.chunks) == [2, 3]
    reports, earned = [], []
    for stream, seed in ((2, 1), (3, 2)):
        walk, first, episodes = paac_envs.WALKS[seed], 0, []
        q = [slow_mlp(models[0 if t < 37 else 37].state_dict(), walk["obs"][t]).numpy() for t in range(100)]
        for t in range(100):
            kind = walk["end"][t].replace("both", "terminated")
            if kind or t == 99:
                last = slow_mlp(models[0 if t < 37 else 37].state_dict(), walk["final_obs"][t]).numpy()
                raw = walk["reward"][first : t + 1]
                earned += raw
                rewards = [min(1.0, max(-1.0, r)) if clip else 0.6 * r for r in raw]
                frames = [*walk["obs"][first : t + 1], walk["final_obs"][t]]
                actions = [int(a) for a in walk["action"][first : t + 1]]
                episodes.append(Episode(frames, [*q[first : t + 1], last], actions, rewards, kind))
                reports += [(sum(raw), len(raw))] if kind else []
                first = t + 1
        expected = slow_positions(episodes, args, VECTOR)
        chunks = learner.chunks[stream]
        columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        n_positions = 100 + sum(episode.kind == "truncated" for episode in episodes)
        assert len(columns["ages"]) == n_positions // 8 * 8
        assert not columns["acted"][:3].any()
        for position in range(len(columns["ages"]) - 3):
            transition, row = expected[position], {name: x[position + 3] for name, x in columns.items()}
            assert row["acted"] == (transition is not None)
            if transition is None:
                continue
            assert (columns["frames"][position] == transition.obs).all()
            assert row["actions"] == transition.action
            assert row["returns"] == pytest.approx(transition.returns, abs=1e-4)
            assert row["discounts"] == pytest.approx(transition.discount, abs=1e-6)
            assert row["errors"] == pytest.approx(transition.error, abs=1e-4)
            if transition.next_obs is not None:
                assert (columns["frames"][position + row["offsets"]] == transition.next_obs).all()
    np.testing.assert_allclose(sorted(learner.reports), sorted(reports), rtol=1e-4)
    assert min(earned) < -1 and max(earned) > 1  # some are clipped, at both ends, where they are


PICTURES: dict[int, dict[str, list]] = {}  # what `Pictures` showed, by the seed of its reset


class Pictures(gym.Env):
    """Noise of 84 x 84; episodes of random lengths from 1 to 6, ended in either way. A record of all in PICTURES."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(N_ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.episodes = PICTURES[seed] = []
        self.length, self.kind = int(self.np_random.integers(1, 7)), str(self.np_random.choice(KINDS))
        self.episode = Episode([self._picture()], [], [], [], "")
        self.episodes.append(self.episode)
        return self.episode.frames[-1], {}

    def _picture(self) -> np.ndarray:
        return self.np_random.integers(1, 256, (84, 84), dtype=np.uint8)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.episode.frames.append(self._picture())
        self.episode.actions.append(int(action))
        self.episode.rewards.append(len(self.episode.actions) / 8)
        end = len(self.episode.actions) == self.length
        self.episode.kind = self.kind if end else ""
        flags = end and self.kind == "terminated", end and self.kind == "truncated"
        return self.episode.frames[-1], self.episode.rewards[-1], *flags, {}


gym.register("Pictures-v0", f"{__name__}:Pictures")


def test_actor_on_images_and_the_memory_that_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environments' pictures through actor and memory to batches."""
    args = make_args(env_id="Pictures-v0", arch="nature", envs_per_actor=2, capacity=100, chunk_size=9, batch_size=400)
    args.clip_rewards, args.priority_alpha = True, 0.0  # all are drawn equally often
    learner = Learner(0, {}, 70)
    act(args, learner, monkeypatch)
    replay, positions = apex.Replay(IMAGE, args, torch.device("cpu")), []
    for episodes in (PICTURES[1], PICTURES[2]):
        for episode in episodes:
            episode.q = [np.zeros(N_ACTIONS)] * len(episode.frames)
        positions.append(slow_positions(episodes, args, IMAGE))
    for i in range(max(map(len, learner.chunks.values()))):
        for stream, chunks in learner.chunks.items():
            if i < len(chunks):
                replay.add(stream, chunks[i])
        batch = replay.sample()
        keys = list(zip((batch.indices // replay.length).tolist(), batch.positions.tolist(), strict=True))
        assert len(set(keys)) == replay.size
        check_batch(batch, [positions[stream][position] for stream, position in keys])
    assert min(map(len, learner.chunks.values())) * 9 > replay.length + 9  # more than a lap
