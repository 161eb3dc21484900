"""Ape-X DQN: many actors, one learner, one prioritised replay memory (Horgan et al. 2018).

Each actor plays its own environments ε-greedily. It fetches θ now and then, and sends its
transitions to the replay memory, with priorities from the Q-values that it acted on. The learner
draws batches in proportion to the priorities and writes new priorities back:

    G_t = R_{t+1} + γ R_{t+2} + γ² R_{t+3} + γ³ Q(S_{t+3}, argmax_a Q(S_{t+3}, a; θ); θ⁻),
          cut where the episode ends
    δ = G_t - Q(S_t, A_t; θ),    Q = V + A - mean_a A
    P(i) = p_i^0.6 / Σ_k p_k^0.6,    p = |δ|,    w_i = u_i / max_j u_j,    u_i = (M P(i))^-0.4
    L = mean of w_i δ_i² / 2 over 512 of the memory's M transitions
    d = ∇L with G_t held constant, scaled to a norm of at most 40
    g ← 0.95 g + 0.05 d²,    m ← 0.95 m + 0.05 d,    θ ← θ - α d / √(g - m² + ε)
    θ⁻ ← θ    every 2,500 updates
    ε_i = 0.4^(1 + 7 i/(N-1))    for environment i of N

    python apex.py                                                  # Pong from pixels
    python apex.py --env-id CartPole-v1 --total-steps 100_000       # a minute
    python apex.py --resume runs/...                                # go on after an interruption
    python apex.py --evaluate runs/... --record                     # 30 episodes and a GIF
    python apex.py --ray auto                                       # actors on a Ray cluster

Where the sources differ or are silent:
- The 400 frames between two fetches of θ are 100 steps.
- ε_i is ε where there is only one environment.
- Initial priorities use max_a Q of the actor's own θ, and the same exponent as later ones.
- A priority is (|δ| + 1e-6)^0.6; the paper does not say that anything is added.
- The weights are divided by the largest of the batch.
- One transition is drawn from each of 512 equal parts of the sum of priorities.
- New priorities come from the errors before the update, which the gradient needs anyway.
- Half the squared error, no Huber loss. The gradient into the trunk is not scaled by 1/√2, as it is
  in Wang et al. 2016. Initial weights are PyTorch's own, U(±1/√fan_in); g and m start from 0.
- An evaluated episode is played with ε = 0.001 on images and 0 on vectors.

Departures:
- A time limit does not cut the return: it bootstraps from the final observation.
- Half as many actors as cores, with a GPU or Ray all cores but one, where the paper has 360. An
  actor has 16 environments, which share one forward pass; i counts all environments.
- Atari as in common/atari.py: losing a life does not end an episode, 108,000 frames do; the paper
  has 50,000 (`--env-kwargs '{"max_num_frames_per_episode": 50000}'`). 0 to 30 no-ops, three black
  frames in the first stack.
- Each frame is stored once and not compressed; the paper has PNGs.
- Each environment has its own ring of frames, with 4 % to spare. Removal is first in, first out
  over all of them only where actors are about as fast as each other: the ring of a faster one
  overwrites its own oldest transitions.
- Batches are drawn when they are needed, not ahead.
- The learner takes transitions between two updates. An actor waits while 2 chunks for each of its
  environments have not been taken (with `--ray`: 200 steps); the paper never blocks it.
- The learner publishes θ every 10 updates, so what an actor fetches may be 10 updates old; with
  `--ray`, what it acts on for 100 steps is the θ of 100 steps earlier.
- `--replay-ratio` holds actors and learner to a ratio; in the paper both run free, at about 0.78.
- 50 million steps are 200 million frames; the paper has 22.8 billion.
- The paper has Atari alone: the MLP, the normalisation of observations and of rewards (to returns
  of size 10, see common/norm.py), `--anneal-lr` and all presets but `atari` are ours. Returns of n
  steps are divided by σ and not clipped. Initial priorities have the σ of the actor's own rewards.
- For images the convolutions run in bfloat16 on CPUs that have AVX512_BF16, unless `--bfloat16
  off`, and are TF32 on CUDA; everything else is float32.

Steps are counted when the learner receives them; chunks under way at the end are lost. A resumed
run fills its replay memory anew before it learns.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy import ndarray
from torch import Tensor, nn
from torch import multiprocessing as mp

from common.atari import STACK
from common.evaluate import evaluate
from common.norm import RewardScale, make_norm
from common.processes import check, free_memory, n_cores, start, stop
from common.run import (
    Run,
    RunArgs,
    load_checkpoint,
    parse_args,
    pick_bfloat16,
    pick_device,
    usage_error,
)
from common.sum_tree import SumTree
from common.vec_env import env_seed, make_vec_env

SPARE = 1.04  # room in the replay memory for each transition of --capacity
PUBLISH_INTERVAL = 10  # updates between two copies of θ for the actors

# What differs from Args, which has the constants for Atari.
PRESETS = {
    "atari": {},
    # Atari on two cores in half an hour, ours.
    "short": {
        "total_steps": 420_000,
        "capacity": 200_000,
        "learning_starts": 20_000,
        "replay_ratio": 8.0,
        "batch_size": 64,
        "target_interval": 500,
        "learning_rate": 1e-4,
        "rms_eps": 1e-10,
    },
    # Vectors, ours: tasks that are learned in minutes on any machine.
    "vector": {
        "total_steps": 500_000,
        "envs_per_actor": 8,
        # 0.7 to 0.002: with 0.4 and 7 Acrobot's goal was not found with 4 of 8 seeds
        "epsilon": 0.7,
        "epsilon_alpha": 16.0,
        # FrozenLake 0.15 to 0.79 with 3, CliffWalking failed with 1 (60b6480, where ε is 0.4)
        "n_step": 2,
        "capacity": 100_000,
        "learning_starts": 1_000,
        "batch_size": 64,
        "replay_ratio": 8.0,
        "target_interval": 50,
        "learning_rate": 5e-4,
        "anneal_lr": True,  # a constant α leaves to chance how well the last θ plays
        "eval_epsilon": 0.0,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "short", "vector"] = "auto"
    """constants, see PRESETS (short: images); auto: atari for images, else vector"""
    total_steps: int = 50_000_000
    """agent steps that the learner has received; 1 step = 1 action = 4 frames on Atari"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the learner's network is; auto: CUDA where there is any. Actors use the CPU"""

    ray: str | None = None
    """run the actors on a Ray cluster: auto, its address, or local for a new one on this machine"""
    n_actors: int | None = None
    """actor processes; None: with CUDA or Ray one per core but one, else half the cores"""
    envs_per_actor: int = 16
    """environments that each actor steps together"""
    bfloat16: Literal["auto", "on", "off"] = "auto"
    """images: run the convolutions in bfloat16; auto: on CPUs that have AVX512_BF16"""
    n_step: int = 3
    """n, rewards in a return"""
    epsilon: float = 0.4
    """ε of ε_i"""
    epsilon_alpha: float = 7.0
    """exponent α of ε_i"""
    eval_epsilon: float = 0.001
    """ε during evaluation"""
    chunk_size: int = 50
    """B, transitions of an environment that an actor sends at once"""
    fetch_interval: int = 100
    """steps of each environment between two fetches of θ"""
    capacity: int = 2_000_000
    """transitions in the replay memory; fewer if they do not fit into 0.8 of free memory"""
    replay_device: Literal["cpu", "cuda"] = "cpu"
    """where the frames of the replay memory are"""
    learning_starts: int = 50_000
    """transitions that the learner receives before the first update"""
    trim_interval: int = 100
    """updates between two removals of what exceeds the capacity"""
    replay_ratio: float | None = None
    """samples learned per transition added, to which learner and actors are held; None: run free"""
    priority_alpha: float = 0.6
    """exponent of the priorities"""
    priority_beta: float = 0.4
    """exponent of the importance weights"""
    batch_size: int = 512
    """transitions per update"""
    target_interval: int = 2_500
    """updates between two copies of θ to θ⁻"""
    learning_rate: float = 6.25e-5
    """α"""
    anneal_lr: bool = False
    """α falls to zero over total_steps"""
    gamma: float = 0.99
    """γ, discount per step"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm"""
    rms_decay: float = 0.95
    """decay of RMSProp's averages g and m per update"""
    rms_eps: float = 1.5e-7
    """ε inside RMSProp's root"""


# --- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class QNetwork(nn.Module):
    """Q(s, ·; θ), dueling: V(s) and the advantages A(s, ·) share a trunk (Wang et al. 2016)."""

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Discrete, bfloat16: bool = False
    ) -> None:
        super().__init__()
        self.bfloat16 = bfloat16
        self.norm = None
        if len(observation_space.shape) == 3:  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1), nn.Flatten()]
            n_features, n_hidden = 3136, 512
        else:  # (n, d) → 256
            self.norm = make_norm(observation_space)
            layers = [nn.Linear(observation_space.shape[0], 256), nn.ReLU(inplace=True)]
            n_features = n_hidden = 256
        self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster
        self.value, self.advantages = (
            nn.Sequential(
                nn.Linear(n_features, n_hidden),
                nn.ReLU(inplace=True),
                nn.Linear(n_hidden, n_outputs),
            )
            for n_outputs in (1, action_space.n)
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (n, 4, 84, 84) uint8 or (n, d) float → (n, n_actions)."""
        if obs.dtype == torch.uint8:
            dtype = torch.bfloat16 if self.bfloat16 else torch.float32
            obs = obs.to(dtype, memory_format=torch.channels_last).div_(255)
            with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
                features = self.trunk(obs)
            features = features.float()
        else:
            features = self.trunk(self.norm(obs) if self.norm else obs)
        advantages = self.advantages(features)
        return self.value(features) + advantages - advantages.mean(1, keepdim=True)


# --- mathematics


def epsilons_of(epsilon: float, alpha: float, indices: Tensor, n: int) -> Tensor:
    """ε_i = ε^(1 + α i/(N-1)) of environments i of N, constants (sec. 4.1); ε where N is 1."""
    return epsilon ** (1 + alpha * indices / max(n - 1, 1))


def epsilon_greedy(q_values: Tensor, epsilon: float | Tensor) -> Tensor:
    """The best action, or with probability ε any: (n, n_actions) and a number or (n,) → (n,)."""
    random = torch.randint(q_values.shape[1], (len(q_values),))
    return torch.where(torch.rand(len(q_values)) < epsilon, random, q_values.argmax(1))


def n_step_transitions(
    rewards: ndarray, terminated: ndarray, acted: ndarray, n_step: int, gamma: float
) -> tuple[ndarray, ...]:
    """What follows each of the first m of m + n frames of an environment, episode after episode.

    Args: (m + n,) each:
        rewards: of the action at each frame.
        terminated: whether that action ended the episode.
        acted: False at the final observation of a truncated episode, which has a frame of its own.
    Returns: (m,) each:
        Σ_k γ^k R_{t+k+1} over up to n rewards, as many as the episode has.
        The factor of Q of the state after them: γ^k, or 0 where the episode has terminated.
        k, the number of these rewards: that state is k frames later.
    """
    m = len(rewards) - n_step
    returns = np.zeros(m)
    n_rewards = np.zeros(m, int)
    over = np.zeros(m, bool)
    going = acted[:m]
    for k in range(n_step):
        returns += gamma**k * rewards[k : k + m] * going
        n_rewards += going
        over |= going & terminated[k : k + m]
        going = going & ~over & acted[k + 1 : k + 1 + m]
    return returns, np.where(over, 0, gamma**n_rewards), n_rewards


def importance_weights(probabilities: ndarray, size: int, beta: float) -> ndarray:
    """w = (M P)^-β, divided by the largest of the batch, (n,); M is `size`."""
    weights = (size * probabilities) ** -beta
    return (weights / weights.max()).astype(np.float32)


def double_q_targets(
    returns: Tensor, discounts: Tensor, next_q_values: Tensor, next_target_q_values: Tensor
) -> Tensor:
    """G = return + discount Q(S', argmax_a Q(S', a; θ); θ⁻) (sec. 3.1), (n,).

    Args: returns and discounts (n,), Q-values of S' by θ and by θ⁻, (n, n_actions).
    """
    best = next_q_values.argmax(1, keepdim=True)
    return returns + discounts * next_target_q_values.gather(1, best).squeeze(1)


def linear_decay(initial: float, step: int, total_steps: int) -> float:
    """The value at `step` of a line from `initial` at step 0 to zero at `total_steps`."""
    return initial * max(0.0, 1 - step / total_steps)


class CentredRMSProp(nn.Module):
    """g ← decay g + (1 - decay) d²; m ← decay m + (1 - decay) d; θ ← θ - lr d / √(g - m² + eps).

    torch.optim.RMSprop has eps outside the root.
    g - m² is a variance, which rounding may leave below zero.
    """

    zero_grad = None  # nn.Module's would do nothing here: use the network's

    def __init__(self, params: Any, decay: float, eps: float) -> None:
        super().__init__()
        self.params, self.decay, self.eps = list(params), decay, eps
        for i, p in enumerate(self.params):
            self.register_buffer(f"square_{i}", torch.zeros_like(p))
            self.register_buffer(f"mean_{i}", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for i, p in enumerate(self.params):
            square, mean = self.get_buffer(f"square_{i}"), self.get_buffer(f"mean_{i}")
            square.mul_(self.decay).addcmul_(p.grad, p.grad, value=1 - self.decay)
            mean.lerp_(p.grad, 1 - self.decay)
            variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
            p.addcdiv_(p.grad, variance.add_(self.eps).sqrt_(), value=-lr)


# --- replay memory

# A transition beside its observations: S' is n_rewards frames after S. The action is -1 where there
# is none: at the final observation of a truncated episode, and before an environment's first frame.
TRANSITION = np.dtype([("action", "i8"), ("return", "f4"), ("discount", "f4"), ("n_rewards", "i8")])


class Chunk(NamedTuple):
    """B frames of one environment, and the B transitions that they complete, n frames earlier."""

    env: int  # among all environments
    episodes: list  # that have ended: raw return and length in agent steps
    frames: ndarray  # (B, 84, 84) uint8 or (B, d) float32
    n_earlier: ndarray  # (B,) frames of the same episode before each of them
    transitions: ndarray  # (B,) TRANSITION
    priorities: ndarray  # (B,) of the transitions, 0 where there is none
    reward_sums: ndarray  # of a `RewardScale`, since the actor's last chunk


class Batch(NamedTuple):
    """n transitions of the replay memory, (n,) or (n, ...) each."""

    indices: ndarray
    obs: Tensor
    next_obs: Tensor
    actions: Tensor
    returns: Tensor
    discounts: Tensor  # factor of Q(next_obs)
    weights: Tensor


def priorities_of(errors: ndarray, args: Args) -> ndarray:
    """p^α with p = |δ| + 1e-6, for the errors of actors and of the learner alike."""
    return (np.abs(errors) + 1e-6) ** args.priority_alpha


class Replay:
    """Prioritised replay memory (sec. 3). Each frame lies once; stacks are made when drawn.

    Each environment has a ring of `length` frames, a whole number of chunks. A transition has the
    index of the last frame of S. Where there is none, or none any more, the priority is zero.
    """

    def __init__(self, space: spaces.Box, args: Args, device: torch.device, seed: int) -> None:
        self.args, self.device = args, device
        self.stack = STACK if len(space.shape) == 3 else 1
        n_envs = args.n_actors * args.envs_per_actor
        n_chunks = math.ceil(SPARE * args.capacity / n_envs / args.chunk_size)
        self.length = n_chunks * args.chunk_size
        n_frames = n_envs * self.length
        self.frames = torch.empty(
            (n_frames, *space.shape[-2:]),
            dtype=getattr(torch, space.dtype.name),
            device=args.replay_device,
        )
        self.n_earlier = np.zeros(n_frames, np.int32)
        self.transitions = np.zeros(n_frames, TRANSITION)
        self.tree = SumTree(n_frames, seed)
        self.size = 0  # transitions
        self.next = np.arange(0, n_frames, self.length)  # where each environment's next frame goes
        self.chunks = OrderedDict()  # their first frames, as they arrived

    def later(self, indices: ndarray, n_frames: ndarray | int) -> ndarray:
        """The indices of the frames that come n_frames later in the same rings."""
        return indices - indices % self.length + (indices + n_frames) % self.length

    def add(self, chunk: Chunk) -> int:
        """Add a chunk, in a full ring in place of the oldest. Returns its number of transitions."""
        n, B = self.args.n_step, self.args.chunk_size
        first = self.next[chunk.env]
        self.next[chunk.env] = self.later(first, B)
        self.frames[first : first + B] = torch.from_numpy(chunk.frames)
        self.n_earlier[first : first + B] = chunk.n_earlier
        indices = self.later(first, np.arange(-n, B + self.stack - 1))
        self.transitions[indices[:B]] = chunk.transitions
        # 0 for the last n, whose S' has not come, and for the stack - 1 oldest that are left, whose
        # first frames are overwritten
        self.set_priorities(indices, np.pad(chunk.priorities, (0, n + self.stack - 1)))
        self.chunks[first] = None
        self.chunks.move_to_end(first)
        return int(np.count_nonzero(chunk.priorities))

    def set_priorities(self, indices: ndarray, priorities: ndarray | float) -> None:
        """Set the priorities of transitions and count those that are there."""
        self.size += np.count_nonzero(priorities) - np.count_nonzero(self.tree[indices])
        self.tree.update(indices, priorities)

    def trim(self) -> None:
        """Remove the oldest chunks of all environments, first in, first out, down to capacity."""
        while self.size > self.args.capacity:
            first, _ = self.chunks.popitem(last=False)
            indices = self.later(first, np.arange(self.args.chunk_size) - self.args.n_step)
            self.set_priorities(indices, 0.0)

    def sample(self) -> Batch:
        """Draw a batch of transitions in proportion to their priorities."""
        indices, probabilities = self.tree.sample(self.args.batch_size)
        weights = importance_weights(probabilities, self.size, self.args.priority_beta)
        rows = self.transitions[indices]
        columns = rows["action"], rows["return"], rows["discount"], weights
        tensors = (torch.as_tensor(column, device=self.device) for column in columns)
        obs = self.observations(indices)
        next_obs = self.observations(self.later(indices, rows["n_rewards"]))
        return Batch(indices, obs, next_obs, *tensors)

    def observations(self, indices: ndarray) -> Tensor:
        """What the actor saw, (n, 4, 84, 84) uint8 or (n, d) float32, on the learner's device."""
        back = np.arange(self.stack)[::-1]  # older frames first
        stacks = self.later(indices[:, None], -back)
        flat = torch.as_tensor(stacks.ravel(), device=self.frames.device)
        # index_select is faster than self.frames[indices]
        frames = self.frames.index_select(0, flat).to(self.device).unflatten(0, stacks.shape)
        frames[np.nonzero(back > self.n_earlier[indices, None])] = 0  # before the first frame
        return frames.squeeze(1)  # which changes vectors only


# --- actor


class Row(NamedTuple):
    """A frame, and what was done there: nothing at the final observation of a truncated episode."""

    frame: ndarray | None
    n_earlier: int  # frames of the same episode before it
    q_max: float  # max_a Q(S_t, a)
    action: int = -1  # A_t
    q_taken: float = 0.0  # Q(S_t, A_t)
    reward: float = 0.0  # R_{t+1}
    terminated: bool = False


class LocalBuffer:
    """The last frames of one environment, until their transitions are complete."""

    def __init__(self, env: int, args: Args, reward_scale: RewardScale) -> None:
        self.env, self.args, self.reward_scale = env, args, reward_scale
        self.episodes = []
        self.rows = [Row(None, 0, 0.0)] * args.n_step  # nothing was done before the first frame

    def chunks(self) -> Iterator[Chunk]:
        """Take out the chunks of B transitions that are complete, with priorities."""
        n, B = self.args.n_step, self.args.chunk_size
        while len(self.rows) >= n + B:
            frames, *columns = zip(*self.rows[: n + B], strict=True)
            n_earlier, q_max, actions, q_taken, rewards, terminated = map(np.array, columns)
            acted = actions >= 0
            returns, discounts, n_rewards = n_step_transitions(
                rewards, terminated, acted, n, self.args.gamma
            )
            reward_sums = self.reward_scale.update()  # since the last chunk, for the learner's σ
            bootstraps = discounts * q_max[np.arange(B) + n_rewards]
            errors = returns / self.reward_scale.sigma + bootstraps - q_taken[:B]
            yield Chunk(
                self.env,
                self.episodes,
                np.stack(frames[n:]),
                n_earlier[n:],
                np.rec.fromarrays([actions[:B], returns, discounts, n_rewards], TRANSITION),
                priorities_of(errors, self.args) * acted[:B],
                reward_sums,
            )
            self.rows = self.rows[B:]
            self.episodes = []


def actor(index: int, args: Args, first_step: int, fetch: Callable) -> Iterator[list[Chunk]]:
    """Algorithm 1: yields, after each step, the chunks for the replay memory that are complete.

    `fetch` returns a network of the actor's own with the learner's θ. Whoever iterates carries the
    chunks to the learner; close() closes the environments.
    """
    n = args.envs_per_actor
    torch.manual_seed(env_seed(args.seed, first_step, index))
    envs = RecordEpisodeStatistics(make_vec_env(args.env_id, n, 0, args.env_kwargs))
    with contextlib.closing(envs):
        reward_scale = RewardScale(args, size=10.0)
        indices = index * n + torch.arange(n)  # among all environments
        buffers = [LocalBuffer(i, args, reward_scale) for i in indices.tolist()]
        epsilons = epsilons_of(args.epsilon, args.epsilon_alpha, indices, args.n_actors * n)
        obs, _ = envs.reset(seed=env_seed(args.seed, first_step, index, 1))
        n_earlier = np.zeros(n, int)
        newest = np.s_[..., -1, :, :] if obs.ndim == 4 else ...  # of the frames in a stack
        for t in itertools.count():
            if t % args.fetch_interval == 0:
                model = fetch()  # θ ← Learner.Parameters()
                # the learner's is for its own device
                model.bfloat16 = pick_bfloat16(args.bfloat16, torch.device("cpu"))
            q_values = model(torch.from_numpy(obs))
            actions = epsilon_greedy(q_values, epsilons).numpy()  # a ← π(s; θ)
            q_values = q_values.numpy()
            next_obs, reward, terminated, truncated, info = envs.step(actions)
            columns = (
                obs[newest],
                n_earlier,
                q_values.max(1),
                actions,
                q_values[np.arange(n), actions],
                reward_scale(reward) if reward_scale.how == "clip" else reward,
                terminated,
            )
            reward_scale.see(reward, terminated)
            for buffer, row in zip(buffers, map(Row, *columns), strict=True):
                buffer.rows.append(row)  # LocalBuffer.Add((s, a, r, γ))
            n_earlier += 1
            for i in np.flatnonzero(terminated | truncated):
                if not terminated[i]:  # a time limit ends the episode but not the return
                    final_obs = info["final_obs"][i]
                    final_q = model(torch.from_numpy(final_obs[None])).max().item()
                    buffers[i].rows.append(Row(final_obs[newest], n_earlier[i], final_q))
                buffers[i].episodes.append((info["episode"]["r"][i], info["episode"]["l"][i]))
                n_earlier[i] = 0
            obs = next_obs
            # τ ← LocalBuffer.Get(B), p ← ComputePriorities(τ), Replay.Add(τ, p)
            yield [chunk for buffer in buffers for chunk in buffer.chunks()]


# --- transport


class Actors:
    """The actors as processes on this machine: the learner receives chunks and publishes θ.

    θ lies in shared memory without a lock. An actor may fetch a mixture of two publications, which
    does no harm. The learner may take long to come for a chunk, so its frames wait in one of the
    actor's slots in shared memory; the rest goes through a pipe, and the slot's number comes back.
    With pipes alone Pong has 14 % fewer steps/s while the learner updates.
    """

    def __init__(self, args: Args, first_step: int, space: spaces.Box, model: QNetwork) -> None:
        self.model = copy.deepcopy(model).cpu().requires_grad_(False).share_memory()
        shape = (args.n_actors, 2 * args.envs_per_actor, args.chunk_size, *space.shape[-2:])
        memory = torch.from_numpy(np.zeros(shape, space.dtype)).share_memory_()
        self.processes, self.slots = [], {}
        for i, slots in enumerate(memory):
            ours, theirs = mp.Pipe()
            process = start(f"actor {i}", act, i, args, first_step, self.model, slots, theirs)
            self.processes.append(process)
            self.slots[ours] = slots.numpy()
            theirs.close()

    def publish(self, model: QNetwork) -> None:
        """Let the actors fetch these parameters."""
        self.model.load_state_dict(model.state_dict())

    def receive(self, timeout: float) -> Iterator[Chunk]:
        """Chunks that have arrived; each is valid until the next one is asked for.

        With timeout 0 all of them. Else, after up to `timeout` seconds, one of each actor at most.

        Raises: WorkerError: an actor died.
        """
        check(self.processes)  # a process that an environment has forked may keep the pipe open
        for connection in wait(self.slots, timeout):
            with contextlib.suppress(EOFError, ConnectionError):  # it has died: `check` will say so
                while connection.poll():
                    slot, chunk = connection.recv()
                    yield chunk._replace(frames=self.slots[connection][slot])
                    connection.send(slot)
                    if timeout:
                        break

    def close(self) -> None:
        for connection in self.slots:
            connection.close()  # which asks the actors to end
        stop(self.processes)


def act(
    index: int, args: Args, first_step: int, model: QNetwork, slots: Tensor, learner: Any
) -> None:
    """An actor's process: acts and sends chunks until the learner closes the pipe or is gone."""
    free_slots = list(range(len(slots)))
    with contextlib.closing(actor(index, args, first_step, lambda: copy.deepcopy(model))) as steps:
        for chunks in steps:
            try:
                while learner.poll():
                    free_slots.append(learner.recv())
                for chunk in chunks:
                    # waits for the learner where there is none
                    slot = free_slots.pop() if free_slots else learner.recv()
                    slots[slot] = torch.from_numpy(chunk.frames)
                    learner.send((slot, chunk._replace(frames=None)))
            except (EOFError, ConnectionError):
                return


# --- learner


def update(
    model: QNetwork,
    target_model: QNetwork,
    optimizer: CentredRMSProp,
    lr: float,
    batch: Batch,
    sigma: float,
    max_grad_norm: float,
) -> tuple[ndarray, dict[str, Tensor]]:
    """One update of θ. Returns the errors δ before it, (n,), and what to log.

    Raises: RuntimeError: the gradient is not finite; θ is as before.
    """
    with torch.no_grad():
        next_q_values = model(batch.next_obs), target_model(batch.next_obs)
    q_values = model(batch.obs).gather(1, batch.actions[:, None]).squeeze(1)
    targets = double_q_targets(batch.returns / sigma, batch.discounts, *next_q_values)
    errors = targets - q_values
    squares = errors.square()
    loss = (batch.weights * squares / 2).mean()
    model.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm, error_if_nonfinite=True)
    errors = errors.detach().cpu().numpy()
    optimizer.step(lr)
    return errors, {"td_loss": squares, "q_values": q_values, "grad_norm": grad_norm}


def train(
    args: Args,
    run: Run,
    space: spaces.Box,
    model: QNetwork,
    target_model: QNetwork,
    optimizer: CentredRMSProp,
    reward_scale: RewardScale,
    device: torch.device,
    make_actors: Callable,
) -> None:
    """Algorithm 2, the learner, from `run.step` on."""
    step = run.step
    free_running = args.replay_ratio is None  # actors and learner do not wait for each other
    learning_start = step + args.learning_starts
    if learning_start >= args.total_steps:
        print(f"nothing is learned before step {learning_start:,}: see --learning-starts")
    learned = 0  # samples
    losses = {}
    replay = Replay(space, args, device, env_seed(args.seed, step))
    with contextlib.closing(make_actors(args, step, space, model)) as actors:
        while not (run.complete or run.stopped):
            due = step > learning_start
            if not free_running:
                due &= learned + args.batch_size <= args.replay_ratio * (step - learning_start)
            if free_running or not due:  # at a ratio, what is due is learned before more is taken
                for chunk in actors.receive(0 if due else 0.1):
                    step += replay.add(chunk)
                    reward_scale.add(chunk.reward_sums)
                    if model.norm:
                        model.norm.update(torch.from_numpy(chunk.frames).to(device))
                    for episode in chunk.episodes:
                        run.log_episode(*episode)
            if not due:
                run.log_step(step, **losses)
                continue
            batch = replay.sample()  # id, τ ← Replay.Sample()
            lr = args.learning_rate
            if args.anneal_lr:
                lr = linear_decay(lr, step, args.total_steps)
            # l ← ComputeLoss(τ; θ), θ ← UpdateParameters(l; θ), p ← ComputePriorities()
            errors, losses = update(
                model, target_model, optimizer, lr, batch, reward_scale.sigma, args.max_grad_norm
            )
            priorities = priorities_of(errors, args)
            replay.set_priorities(batch.indices, priorities)  # Replay.SetPriority(id, p)
            learned += args.batch_size
            losses["replay_ratio"] = learned / (step - learning_start)  # 0.78 in the paper
            run.log_update(step, **losses)
            if run.updates % args.trim_interval == 0:
                replay.trim()  # Replay.RemoveToFit()
            if run.updates % args.target_interval == 0:
                target_model.load_state_dict(model.state_dict())  # θ⁻ ← θ
            if run.updates % PUBLISH_INTERVAL == 0:
                actors.publish(model)


# --- main


def pick_preset(args: Args, observations: gym.Space, actions: gym.Space) -> str:
    return "atari" if len(observations.shape) == 3 else "vector"


def pick_capacity(args: Args, space: spaces.Box) -> int:
    """--capacity, or as many transitions as fit into 0.8 of the free memory."""
    free = torch.cuda.mem_get_info()[0] if args.replay_device == "cuda" else free_memory()
    n_bytes = math.prod(space.shape[-2:]) * space.dtype.itemsize + 60  # frame, transition, sum tree
    capacity = min(args.capacity, int(0.8 * free / SPARE / n_bytes))
    least = args.n_actors * args.envs_per_actor * (args.chunk_size + args.n_step + STACK)
    if capacity < least:
        usage_error(f"a capacity of {capacity:,}: {least:,} are needed with these flags")
    if capacity < args.capacity:
        print(f"there is memory for {capacity:,} transitions, not for {args.capacity:,}")
    return capacity


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate alone. Returns the exit status."""
    args, observations, actions = parse_args("apex", argv, Args(), __doc__, PRESETS, pick_preset)
    if not isinstance(actions, spaces.Discrete):
        usage_error(f"--env-id {args.env_id}: Discrete actions are needed, it has {actions}")
    device = pick_device(args.device)
    make_actors = Actors
    if args.ray and not args.evaluate:
        from common.cluster import connect

        make_actors = connect(args, actor)
    if args.n_actors is None:
        args.n_actors = max(1, n_cores() - 1 if device.type == "cuda" else n_cores() // 2)
    if len(observations.shape) == 1:
        torch.set_num_threads(1)  # two threads are twice as slow for so small a network

    torch.manual_seed(args.seed)
    model = QNetwork(observations, actions, pick_bfloat16(args.bfloat16, device)).to(device)  # θ
    target_model = copy.deepcopy(model)  # θ⁻
    optimizer = CentredRMSProp(model.parameters(), args.rms_decay, args.rms_eps)
    reward_scale = RewardScale(args, size=10.0)

    if args.evaluate:
        load_checkpoint("apex", args.run_dir, model=model)
    else:
        pick_device(args.replay_device)  # or an error
        args.capacity = pick_capacity(args, observations)
        with Run(
            "apex",
            args,
            model=model,
            target_model=target_model,
            optimizer=optimizer,
            reward_scale=reward_scale,
        ) as run:
            train(
                args,
                run,
                observations,
                model,
                target_model,
                optimizer,
                reward_scale,
                device,
                make_actors,
            )
        if not run.complete:
            return 128 + run.signal

    @torch.no_grad()
    def policy(obs: ndarray) -> ndarray:
        q_values = model(torch.from_numpy(obs).to(device))
        return epsilon_greedy(q_values.cpu(), args.eval_epsilon).numpy()

    evaluate(args, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
