"""A3C: asynchronous advantage actor-critic (Mnih et al. 2016), feed-forward, LSTM and continuous.

Hogwild: every process plays its own environment with a snapshot θ′ of the shared parameters θ, for
up to t_max steps or to the end of the episode, and then applies its gradient to θ without a lock
(Algorithm S3):

    R_i = r_i + γ R_{i+1},    R = 0 after a termination, else V(s_t; θ′)
    L = Σ_i [ -log π(a_i|s_i; θ′) (R_i - v_i) - β H(π(s_i; θ′)) + 0.25 (R_i - V(s_i; θ′))² ]
    d = ∇L with R_i and v_i = V(s_i; θ′) held constant, scaled to a norm of at most 40
    g ← 0.99 g + 0.01 d²,    θ ← θ - η d / √(g + ε),    η = 0.0007 (1 - T / T_max)     (eq. S2, S3)

RMSProp's g is shared as well.

    python a3c.py                                                   # Pong from pixels, 80M steps
    python a3c.py --preset short                                    # Pong on few cores
    python a3c.py --lstm                                            # with 256 LSTM cells
    python a3c.py --env-id CartPole-v1 --total-steps 300_000        # half a minute to two
    python a3c.py --env-id Pendulum-v1                              # continuous actions
    python a3c.py --resume runs/...                                 # go on after an interruption
    python a3c.py --evaluate runs/... --record                      # 30 episodes and a GIF

Where the sources differ or are silent:
- The network is the small one of the supplement (sec. 8). The main text has the larger one of Mnih
  et al. 2015 for its 57 games (`--arch nature`).
- t_max = 5 is the supplement's; the author told others 20. η = 0.0007, ε = 0.1 and the clipping
  threshold of 40 are not in the paper: reproductions cite the author's e-mail. g starts from 0.
- The squared value error has the coefficient 0.25, where the formulas have 1: reproductions halve
  the square, and the author halved the critic's learning rate.
- The loss has the entropy of sec. 4, which Algorithm S3 leaves out. Gradients are summed
  over the rollout, not averaged.
- η falls to zero over T_max by the global step.
- A Gaussian's entropy is the one that sec. 9 prints, of one dimension.
- On Atari, rewards are clipped to [-1, 1]; public reproductions differ.

Departures:
- A time limit does not cut the return: it bootstraps from V of the final observation. Sec. 9 learns
  from whole episodes and never bootstraps.
- Sec. 9 always has an LSTM; here it needs `--lstm`. Networks for pictures are Atari's.
- With Box actions σ² is the softplus of one parameter and starts at 0.17; in sec. 9 it is that of
  an output of the network. μ starts near 0. Where all actions are bounded, it is a tanh; in sec. 9
  it is linear. The coefficient of the value error is 1, g starts from 1. Actions are mapped from
  [-1, 1] to their bounds and clipped.
- Atari as in common/atari.py: losing a life does not end an episode, 108,000 frames do.
- One process a core, where the paper has 16.
- `--preset short` has the initial weights of OpenAI's baselines, orthogonal, but for an LSTM's.
- Vectors with Discrete actions, the normalisation of observations and of rewards (see
  common/norm.py), `--anneal-entropy` and all presets but `atari` are ours.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn import functional as F

from common.evaluate import evaluate
from common.norm import RewardScale, RunningNorm
from common.processes import check, n_cores, start, stop
from common.run import Run, RunArgs, load_checkpoint, parse_args
from common.vec_env import env_seed, make_vec_env

# What differs from Args, which has the constants for Atari.
PRESETS = {
    "atari": {},
    # Atari on few cores, ours.
    "short": {"total_steps": 8_000_000, "orthogonal_init": True, "t_max": 20, "rms_eps": 1e-5},
    # Vectors, ours. With a small ε each weight's step comes to about η, whatever the size of
    # gradients. β is zero in the second half, where the falling η sharpens the policy.
    "vector": {
        "total_steps": 1_000_000,
        "t_max": 20,
        "learning_rate": 1.4e-3,
        "entropy_coef": 0.05,
        "anneal_entropy": True,
        "rms_eps": 1e-5,
    },
    # Vectors with --lstm: gradients through 20 steps, as the author used on Atari.
    "recurrent": {
        "total_steps": 1_000_000,
        "t_max": 20,
        "learning_rate": 2e-3,
    },
    # Box actions, ours, found on Pendulum and HalfCheetah; β is that of sec. 9. With g from 0, long
    # first steps may drive μ to its bounds for good.
    "continuous": {
        "total_steps": 1_000_000,
        "t_max": 20,
        "entropy_coef": 1e-4,
        "value_coef": 1.0,
        "rms_eps": 4e-5,
        "rms_initial_square": 1.0,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "short", "vector", "recurrent", "continuous"] = "auto"
    """constants, see PRESETS (short: images); auto: continuous for Box actions, atari for images,
    recurrent for vectors with --lstm, else vector"""
    total_steps: int = 80_000_000
    """T_max: agent steps of all processes; 1 step = 1 action = 4 frames on Atari"""

    n_processes: int | None = None
    """actor-learners; None: one per core"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    lstm: bool = False
    """an LSTM after the last hidden layer: 256 cells for images, 128 for vectors"""
    orthogonal_init: bool = False
    """initial weights, but for an LSTM's, are orthogonal, gain √2, in the last layers of π 0.01 and
    of V 1, biases 0; else U(±1/√fan_in)"""
    t_max: int = 5
    """longest rollout, in steps; the end of an episode or of training ends it, too"""
    optimizer: Literal["shared-rmsprop", "rmsprop", "momentum-sgd"] = "shared-rmsprop"
    """the three optimisers of sec. 4; the statistics of the last two belong to each process"""
    learning_rate: float = 7e-4
    """initial η"""
    gamma: float = 0.99
    """γ, discount per step"""
    entropy_coef: float = 0.01
    """β, weight of the entropy"""
    anneal_entropy: bool = False
    """β falls to zero over the first half of total_steps"""
    value_coef: float = 0.25
    """weight of the squared value error"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm"""
    rms_decay: float = 0.99
    """decay of RMSProp's mean square g per update, and of momentum SGD's mean gradient"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""
    rms_initial_square: float = 0.0
    """g at the start; from 0, with a small rms_eps, the first steps are up to 10 times as large"""


# --- network

State = tuple[Tensor, Tensor] | None  # (h, c), (1, n, cells) each; None: zeros
States = Sequence[State]  # of each trunk


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class Trunk(nn.Module):
    """Observations → features: convolutions or one hidden layer, then an LSTM with --lstm."""

    def __init__(self, observation_space: spaces.Box, arch: str, lstm: bool, box: bool) -> None:
        super().__init__()
        if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
            layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
            layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
        elif arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
        else:  # (n, d) → 200: ReLU for Box actions (sec. 9), ELU, ours, for Discrete ones
            activation = nn.ReLU(inplace=True) if box else nn.ELU()
            layers = [nn.Linear(observation_space.shape[0], 200), activation]
        self.layers = nn.Sequential(*layers)
        self.size = layers[-2].out_features
        self.lstm = None
        if lstm:
            n_features = self.size
            self.size = 128 if arch == "mlp" else 256
            self.lstm = nn.LSTM(n_features, self.size)

    def forward(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Observations (t, n, ...) and (h, c) before them → (t, n, size) and (h, c) after them."""
        x = obs.flatten(0, 1)
        if x.dtype == torch.uint8:
            x = x.to(torch.float32, memory_format=torch.channels_last).div_(255)
        hidden = self.layers(x).unflatten(0, obs.shape[:2])
        if self.lstm is None:
            return hidden, None
        return self.lstm(hidden, state)  # None: zeros


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Discrete actions: one trunk. Box actions: two networks (sec. 9).

    Initial weights are PyTorch's own, U(±1/√fan_in), as were Torch7's, or orthogonal; an LSTM's are
    U(±1/√cells). With Box actions PyTorch's for π's last layer are divided by ten, its bias is 0.
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: gym.Space,
        arch: str,
        lstm: bool,
        orthogonal_init: bool = False,
    ) -> None:
        super().__init__()
        self.norm = RunningNorm(observation_space) if arch == "mlp" else None
        self.discrete = isinstance(action_space, spaces.Discrete)
        # Means beyond the bounds would no longer learn, as actions are clipped there.
        self.squash = not self.discrete and action_space.is_bounded()
        n_trunks = 1 if self.discrete else 2
        trunks = [Trunk(observation_space, arch, lstm, not self.discrete) for _ in range(n_trunks)]
        self.trunks = nn.ModuleList(trunks)
        self.policy = nn.Linear(trunks[0].size, spaces.flatdim(action_space))
        self.value = nn.Linear(trunks[0].size, 1)
        if not self.discrete:
            # σ² before the softplus. As an output of the network σ would change as fast as μ does,
            # and shrink before μ is any good.
            self.variance = nn.Parameter(torch.tensor(-1.7))
            with torch.no_grad():  # μ starts near 0, as its tanh does not learn far from there
                self.policy.weight.mul_(0.1)
                self.policy.bias.zero_()
        self.initial_states = [None] * n_trunks
        if orthogonal_init:
            gains = {self.policy: 0.01, self.value: 1.0}
            for layer in self.modules():
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
                    nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)  # faster; orthogonal_ refuses it

    def forward(self, obs: Tensor, states: States) -> tuple[Tensor, Tensor, States]:
        """Observations (t, n, ...) and states before them → outputs of π, values (t, n), states.

        Outputs of π: logits (t, n, n_actions), or means (t, n, action_dim), within ±1 if bounded.
        """
        if self.norm:
            obs = self.norm(obs)
        passed = [trunk(obs, state) for trunk, state in zip(self.trunks, states, strict=True)]
        features, states = zip(*passed, strict=True)
        outputs = self.policy(features[0])
        if self.squash:
            outputs = outputs.tanh()
        return outputs, self.value(features[-1]).squeeze(-1), states

    def sample(self, outputs: Tensor) -> Tensor:
        """Actions of π: (n, n_actions) → (n,) int64, or (n, action_dim) → (n, action_dim)."""
        if self.discrete:
            return torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
        return outputs + F.softplus(self.variance).sqrt() * torch.randn_like(outputs)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π(a|s) and H(π(s)), (...,) each.

        For a Gaussian, sec. 9 prints H = ½ (log 2πσ² + 1), the entropy of one dimension.
        """
        if self.discrete:
            log_probs = outputs.log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropies
        variance = F.softplus(self.variance)
        log_2_pi_variance = (2 * math.pi * variance).log()
        log_probs = -((actions - outputs).square() / variance + log_2_pi_variance).sum(-1) / 2
        return log_probs, ((log_2_pi_variance + 1) / 2).expand_as(log_probs)


# --- mathematics


def rollout_returns(rewards: list[float], R: float, gamma: float) -> Tensor:
    """R_i = r_i + γ R_{i+1} backwards from the bootstrap value R (Alg. S2, S3), (len(rewards),)."""
    returns = []
    for reward in reversed(rewards):
        R = reward + gamma * R
        returns.append(R)
    return torch.tensor(returns[::-1])


def a3c_loss(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    returns: Tensor,
    entropy_coef: float,
    value_coef: float,
) -> tuple[Tensor, Tensor]:
    """Algorithm S3's accumulated gradients as a loss: sums over the rollout; all (t,).

    Returns: the part of the policy, entropy included, and that of the value; their sum is the loss.
    """
    advantages = returns - values.detach()
    policy_loss = -(log_probs * advantages + entropy_coef * entropies).sum()
    value_loss = value_coef * (returns - values).square().sum()
    return policy_loss, value_loss


def linear_decay(initial: float, step: int, total_steps: int) -> float:
    """The value at `step` of a line from `initial` at step 0 to zero at `total_steps`."""
    return initial * max(0.0, 1 - step / total_steps)


class RMSProp(nn.Module):
    """g ← decay g + (1 - decay) d²; θ ← θ - lr d / √(g + eps).

    torch.optim.RMSprop has eps outside the root.
    `initial_square` is g at the start: 1 in TensorFlow and PAAC, 0 in A3C.
    """

    zero_grad = None  # nn.Module's would do nothing here: use the network's

    def __init__(self, params: Any, decay: float, eps: float, initial_square: float) -> None:
        super().__init__()
        self.params, self.decay, self.eps = list(params), decay, eps
        for i, p in enumerate(self.params):
            self.register_buffer(f"square_{i}", torch.full_like(p, initial_square))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, square in zip(self.params, self.buffers(), strict=True):
            square.mul_(self.decay).addcmul_(p.grad, p.grad, value=1 - self.decay)
            p.addcmul_(p.grad, (square + self.eps).rsqrt_(), value=-lr)


class MomentumSGD(nn.Module):
    """m ← decay m + (1 - decay) d; θ ← θ - lr m (supplement, Optimization Details)."""

    zero_grad = None  # as in RMSProp

    def __init__(self, params: Any, decay: float) -> None:
        super().__init__()
        self.params, self.decay = list(params), decay
        for i, p in enumerate(self.params):
            self.register_buffer(f"mean_{i}", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, mean in zip(self.params, self.buffers(), strict=True):
            p.sub_(mean.lerp_(p.grad, 1 - self.decay), alpha=lr)


def make_optimizer(args: Args, model: nn.Module) -> RMSProp | MomentumSGD:
    if args.optimizer == "momentum-sgd":
        return MomentumSGD(model.parameters(), args.rms_decay)
    return RMSProp(model.parameters(), args.rms_decay, args.rms_eps, args.rms_initial_square)


# --- training


def actor_learner(
    index: int,
    args: Args,
    first_step: int,
    model: ActorCritic,
    optimizer: RMSProp | MomentumSGD,
    reward_scale: RewardScale,
    counts: Tensor,
    ending: Tensor,
    parent: Any,
) -> None:
    """Algorithm S3, one process of it, to the end of training.

    Args:
        first_step: T when the processes were started.
        model, optimizer, reward_scale: θ and the statistics, shared by all processes, but for
            the optimizer's where --optimizer says so.
        counts: (n_processes,) int64, shared: steps of each process, whose sum is T. counts[0]
            starts at the steps of earlier parts of the run.
        ending: (1,) bool, shared: all processes are to end.
        parent: connection for reports of episodes and losses.
    """
    counts, ending = counts.numpy(), ending.numpy()
    parameters = list(model.parameters())
    torch.manual_seed(env_seed(args.seed, first_step, index))
    envs = make_vec_env(args.env_id, 1, 0, args.env_kwargs)  # one environment: n = 1 from here on
    local_model = copy.deepcopy(model)
    local_parameters = list(local_model.parameters())  # θ′
    shared_state, local_state = (list(m.state_dict().values()) for m in (model, local_model))
    with contextlib.closing(envs):
        obs = to_sequence(envs.reset(seed=env_seed(args.seed, first_step, index, 1))[0])
        states = local_model.initial_states
        T = first_step
        episode_length = 0
        episode_return = reported = 0.0
        while T < args.total_steps and not ending[0]:
            sync(local_state, shared_state)  # θ′ ← θ
            observations, actions, rewards = [], [], []
            first_states = states
            for _ in range(args.t_max):
                with torch.no_grad():
                    output, _, states = local_model(obs, states)
                    action = local_model.sample(output[0])  # a_t by π(a_t|s_t; θ′)
                observations.append(obs)
                actions.append(action)
                next_obs, reward, terminated, truncated, info = envs.step(action.numpy())
                rewards.append(reward[0])
                done = terminated | truncated
                reward_scale.see(reward, terminated)
                obs = to_sequence(next_obs)
                counts[index] += 1  # T ← T + 1
                T = int(counts.sum())
                episode_return += reward[0]
                episode_length += 1
                if done or T >= args.total_steps or ending[0]:
                    break
            R = 0.0  # for a terminal s_t, else V(s_t; θ′)
            if not terminated[0]:
                last_obs = to_sequence(info["final_obs"]) if done else obs
                with torch.no_grad():
                    # discard the LSTM state: the next rollout starts from s_t again
                    R = local_model(last_obs, states)[1].item()
            reward_scale.update()
            r = reward_scale(np.array(rewards)).tolist()
            returns = rollout_returns(r, R, args.gamma)  # R ← r_i + γ R
            # θ′ has not changed: a pass over the rollout gives what was acted on, with gradients
            outputs, values, _ = local_model(torch.cat(observations), first_states)
            log_probs, entropies = local_model.log_prob_and_entropy(
                outputs[:, 0], torch.cat(actions)
            )
            entropy_coef = args.entropy_coef
            if args.anneal_entropy:
                entropy_coef = linear_decay(entropy_coef, 2 * T, args.total_steps)
            policy_loss, value_loss = a3c_loss(
                log_probs, entropies, values[:, 0], returns, entropy_coef, args.value_coef
            )
            local_model.zero_grad()
            (policy_loss + value_loss).backward()  # dθ, summed over the rollout
            grad_norm = nn.utils.clip_grad_norm_(
                local_parameters, args.max_grad_norm, error_if_nonfinite=True
            )
            for p, local in zip(parameters, local_parameters, strict=True):
                p.grad = local.grad  # which belongs to this process alone
            lr = linear_decay(args.learning_rate, T, args.total_steps)
            optimizer.step(lr)  # asynchronous update of θ
            if model.norm:
                model.norm.update(torch.cat(observations))
            if done:
                parent.send((episode_return, episode_length))
                episode_return = 0.0
                episode_length = 0
                states = local_model.initial_states
            if time.monotonic() - reported > 1:
                losses = {
                    "policy_loss": policy_loss.item(),
                    "value_loss": value_loss.item(),
                    "entropy": entropies.mean().item(),
                    "grad_norm": grad_norm.item(),
                    "learning_rate": lr,
                }
                parent.send(losses)
                reported = time.monotonic()


def train(
    args: Args,
    run: Run,
    model: ActorCritic,
    optimizers: list[RMSProp | MomentumSGD],
    reward_scale: RewardScale,
) -> None:
    """The parent: starts the actor-learners and follows them to the end; it trains nothing.

    Without locks, a checkpoint may hold half of an update, as every snapshot θ′ may.
    """
    counts = torch.zeros(args.n_processes, dtype=torch.int64)
    counts[0] = run.step
    ending = torch.tensor([False])
    processes, connections, losses = [], [], {}
    try:
        for i in range(args.n_processes):
            ours, theirs = mp.Pipe(duplex=False)
            connections.append(ours)
            name = f"actor-learner {i}"
            # their tensors move into shared memory when a process gets them
            shared = model, optimizers[i % len(optimizers)], reward_scale, counts, ending
            processes.append(start(name, actor_learner, i, args, run.step, *shared, theirs))
            theirs.close()
        while not run.complete and not run.stopped:
            time.sleep(0.05)
            losses = receive(connections, run) or losses
            run.log_step(int(counts.sum()), **losses)
            check(processes)
    finally:
        ending[0] = True
        stop(processes)
    receive(connections, run)
    run.log_step(int(counts.sum()))


def receive(connections: list[Any], run: Run) -> dict[str, float]:
    """Count the episodes that actor-learners report, and return the losses that came last."""
    losses = {}
    for connection in connections:
        with contextlib.suppress(EOFError):
            while connection.poll():
                report = connection.recv()
                if isinstance(report, dict):
                    losses = report
                else:
                    run.log_episode(*report)
    return losses


def sync(state: list[Tensor], source: list[Tensor]) -> None:
    """Copy a network's parameters and statistics of observations, without a lock."""
    torch._foreach_copy_(state, source)


def to_sequence(obs: np.ndarray) -> Tensor:
    """(n, ...) → (1, n, ...): one point in time."""
    return torch.from_numpy(obs)[None]


# --- main


def pick_preset(args: Args, observations: gym.Space, actions: gym.Space) -> str:
    if isinstance(actions, spaces.Box):
        return "continuous"
    if len(observations.shape) == 3:
        return "atari"
    return "recurrent" if args.lstm else "vector"


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate alone. Returns the exit status."""
    args, observations, actions = parse_args("a3c", argv, Args(), __doc__, PRESETS, pick_preset)
    if args.arch == "auto":
        args.arch = "nips" if len(observations.shape) == 3 else "mlp"
    if args.n_processes is None:
        args.n_processes = n_cores()

    torch.manual_seed(args.seed)
    model = ActorCritic(observations, actions, args.arch, args.lstm, args.orthogonal_init)  # θ
    # one whose statistics all processes share, or one for each process
    n_optimizers = 1 if args.optimizer == "shared-rmsprop" else args.n_processes
    optimizers = [make_optimizer(args, model) for _ in range(n_optimizers)]
    reward_scale = RewardScale(args)

    if args.evaluate:
        load_checkpoint("a3c", args.run_dir, model=model)
    else:
        parts = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        with Run("a3c", args, model=model, reward_scale=reward_scale, **parts) as run:
            train(args, run, model, optimizers, reward_scale)
        if not run.complete:
            return 128 + run.signal

    states = {}  # of the LSTM, carried on from zeros, for each number of environments

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:  # samples its actions, as in training
        before = states.get(len(obs), model.initial_states)
        outputs, _, states[len(obs)] = model(to_sequence(obs), before)
        return model.sample(outputs[0]).numpy()

    evaluate(args, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
