"""PAAC: parallel advantage actor-critic (Clemente, Castejon and Chandra 2017), on CPU or CUDA.

One policy acts in n_e environments at once. After t_max steps of all of them, one update of θ:

    R_t = r_t + γ R_{t+1},    R_{t_max+1} = V(s_{t_max+1}; θ)                    (Alg. 1, l. 12-15)
    L = 1/n_e Σ_e Σ_t [ -log π(a_t|s_t; θ) (R_t - v_t) - β H(π(s_t; θ))                   (eq. 10)
                        + 0.25 (R_t - V(s_t; θ))² ]                                       (eq. 11)
    d = ∇L with R_t and v_t = V(s_t; θ) held constant, scaled to a norm of at most 40
    g ← 0.99 g + 0.01 d²,    θ ← θ - α d / √(g + ε),    α = 0.0007 n_e (1 - N / N_max)

    python paac.py --n-envs 32                                      # Pong from pixels
    python paac.py --env-id CartPole-v1 --total-steps 200_000       # less than a minute
    python paac.py --resume runs/...                                # go on after an interruption
    python paac.py --evaluate runs/... --record                     # 30 episodes and a GIF
    torchrun --nproc-per-node 2 paac.py --n-envs 32                 # two processes, or GPUs

Where the paper and its released code (github.com/Alfredvc/paac) differ or are silent:
- The loss is a sum over t_max, where eq. (10) has a mean, so that α = 0.0007 n_e is A3C's step for
  each environment. The code has five times the mean, which with t_max = 5 is the sum.
- The squared value error has the code's coefficient 0.25; eq. (11) has 1.
- The return is cut at every step where an episode ends (the code), not only at the last (Alg. 1).
- RMSProp has ε inside the root and starts from g = 1, as TensorFlow's, which the code uses.
- α falls to zero over N_max, and rewards are clipped to [-1, 1] on Atari (the code); the paper does
  not say.
- `--preset paper` has N_max, β and the clipping threshold of the paper, `--preset code` the code's.

Departures:
- A time limit does not cut the return: it bootstraps from V of the final observation.
- Atari as in common/atari.py: 0 to 30 no-ops, three black frames in the first stack, truncation
  after half an hour.
- The paper has Atari alone. The MLP, the normalisation of observations and of rewards (see
  common/norm.py), the Gaussian, `--anneal-entropy` and the presets `vector`, `continuous` and
  `short` are ours. Box actions are mapped from [-1, 1] to their bounds and clipped. Where all are
  bounded, the Gaussian's mean is a tanh.
- `--preset short` has orthogonal initial weights, those of OpenAI's baselines.
- For images the trunk runs in bfloat16 on CPUs that have AVX512_BF16, unless `--bfloat16 off`, and
  convolutions on CUDA are TF32; everything else is float32.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # An idle OpenMP thread spins for a tenth of a millisecond, then sleeps: environments need its
    # core. If it slept at once, PAAC and PPO on Pong would be 10 to 20 % slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import contextlib
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

from common.distributed import N_RANKS, RANK, Run, average_gradients
from common.evaluate import evaluate
from common.norm import RewardScale, RunningNorm
from common.processes import n_cores
from common.run import RunArgs, load_checkpoint, parse_args, pick_bfloat16, pick_device
from common.vec_env import env_seed, make_vec_env

# What differs from Args, which has the constants of the paper (sec. 5.1, Atari; value_coef: above).
PRESETS = {
    "paper": {},
    # What the paper's released code sets otherwise.
    "code": {"total_steps": 80_000_000, "entropy_coef": 0.02, "max_grad_norm": 3.0},
    # Atari on few cores, ours. 95 % of squared gradients lie below 3e-8 on Breakout, hence ε.
    "short": {
        "total_steps": 8_000_000,
        "orthogonal_init": True,
        "learning_rate": 1.4e-3,
        "rms_eps": 1e-10,
    },
    # Vectors, ours. With a small ε each weight's step comes to about α, whatever the size of
    # gradients. β is zero in the second half, where the falling α sharpens the policy.
    "vector": {
        "total_steps": 1_000_000,
        "n_envs": 4,
        "t_max": 20,
        "learning_rate": 3e-3,
        "entropy_coef": 0.1,
        "anneal_entropy": True,
        "rms_eps": 1e-5,
    },
    # Box actions, ours but for the weight of the entropy (Mnih et al. 2016, sec. 9). Found on
    # Pendulum, Reacher and Walker2d, ε on Pendulum and Hopper.
    "continuous": {
        "total_steps": 1_000_000,
        "n_envs": 4,
        "t_max": 10,
        "learning_rate": 2e-3,
        "entropy_coef": 1e-4,
        "value_coef": 1.0,
        "rms_eps": 3e-6,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "paper", "code", "short", "vector", "continuous"] = "auto"
    """constants, see PRESETS (short: images); auto: continuous for Box actions, paper for images,
    else vector"""
    total_steps: int = 115_000_000
    """N_max: agent steps of all environments; 1 step = 1 action = 4 frames on Atari"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network is; auto: CUDA where there is any"""

    n_envs: int = 32
    """n_e: environments"""
    n_workers: int | None = None
    """n_w: threads (Atari) or processes (else; 0: none) that step them; None: 8, or fewer cores"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    bfloat16: Literal["auto", "on", "off"] = "auto"
    """images: run all but the heads in bfloat16; auto: on CPUs that have AVX512_BF16"""
    orthogonal_init: bool = False
    """images: initial weights are orthogonal, gain √2, in the last layers of π 0.01 and of V 1,
    biases 0; else U(±1/√fan_in)"""
    t_max: int = 5
    """steps of each environment between two updates"""
    learning_rate: float | None = None
    """initial α; None: 0.0007 n_e"""
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
    """decay of RMSProp's mean square g per update"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""


# --- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


def mlp(n_inputs: int, n_outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, n_outputs))


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Images: one trunk, two linear heads. Vectors: two MLPs.

    Initial weights are PyTorch's own, U(±1/√fan_in), as in PAAC's code, or for images orthogonal.
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: gym.Space,
        arch: str,
        bfloat16: bool = False,
        orthogonal_init: bool = False,
    ) -> None:
        super().__init__()
        self.discrete = isinstance(action_space, spaces.Discrete)
        # Means beyond the bounds would no longer learn, as actions are clipped there.
        self.squash = not self.discrete and action_space.is_bounded()
        self.bfloat16 = bfloat16
        n_outputs = spaces.flatdim(action_space)
        if arch == "mlp":
            n_inputs = observation_space.shape[0]
            self.trunk = RunningNorm(observation_space)
            self.policy, self.value = mlp(n_inputs, n_outputs), mlp(n_inputs, 1)
        else:
            if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
                layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
                layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
            else:  # nature: (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
                layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
                layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
            size = layers[-2].out_features
            self.trunk = nn.Sequential(*layers)
            self.policy, self.value = nn.Linear(size, n_outputs), nn.Linear(size, 1)
            if orthogonal_init:
                gains = {self.policy: 0.01, self.value: 1.0}
                for layer in self.modules():
                    if isinstance(layer, nn.Linear | nn.Conv2d):
                        nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
                        nn.init.zeros_(layer.bias)
            self.trunk.to(memory_format=torch.channels_last)  # faster; orthogonal_ refuses it
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (n, 4, 84, 84) uint8 or (n, d) float → outputs of π and values (n,).

        Outputs of π: logits (n, n_actions), or means (n, action_dim), within ±1 if bounded.
        """
        if obs.dtype == torch.uint8:
            dtype = torch.bfloat16 if self.bfloat16 else torch.float32
            obs = obs.to(dtype, memory_format=torch.channels_last).div_(255)
            with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
                hidden = self.trunk(obs)
            hidden = hidden.float()
        else:
            hidden = self.trunk(obs)
        outputs = self.policy(hidden)
        return outputs.tanh() if self.squash else outputs, self.value(hidden).squeeze(-1)

    def sample(self, outputs: Tensor) -> Tensor:
        """Actions of π: (n, n_actions) → (n,) int64, or (n, action_dim) → (n, action_dim)."""
        if self.discrete:
            # the largest π(a|s) / Exp(1) is a draw from π; torch.multinomial would wait for the GPU
            return (outputs.softmax(-1) / torch.empty_like(outputs).exponential_()).argmax(-1)
        return outputs + self.log_std.exp() * torch.randn_like(outputs)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π(a|s), (...,), and H(π(s)), (...,), or one number for a Gaussian."""
        if self.discrete:
            log_probs = outputs.log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropies
        distances = ((actions - outputs) * (-self.log_std).exp()).square().sum(-1)
        log_norm = (self.log_std + math.log(2 * math.pi) / 2).sum()
        return -distances / 2 - log_norm, outputs.shape[-1] / 2 + log_norm


# --- mathematics


def n_step_returns(
    rewards: Tensor, dones: Tensor, final_values: Tensor, bootstrap: Tensor, gamma: float
) -> Tensor:
    """R_t = r_t + γ R_{t+1} backwards from the bootstrap value (Alg. 1, l. 12-15).

    Args: time first, (t_max, n_envs) each:
        rewards.
        dones: bool, where an episode ended by termination or truncation.
        final_values: V(final observation) where it was truncated, 0 where it was terminated.
        bootstrap: (n_envs,), V of the observation after the last step.
    Returns: R, (t_max, n_envs).
    """
    returns = torch.empty_like(rewards)
    R = bootstrap
    for t in reversed(range(len(rewards))):
        R = rewards[t] + gamma * torch.where(dones[t], final_values[t], R)
        returns[t] = R
    return returns


def paac_loss(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    returns: Tensor,
    entropy_coef: float,
    value_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (10) and (11) as losses, summed over t_max and averaged over environments.

    Args: (t_max, n_envs) each; entropies may be one number instead, a Gaussian's.
    Returns: the total, its policy part (entropy included) and its value part.
    """
    advantages = returns - values.detach()
    policy_loss = -(log_probs * advantages + entropy_coef * entropies).sum(0).mean()
    value_loss = value_coef * (returns - values).square().sum(0).mean()
    return policy_loss + value_loss, policy_loss, value_loss


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


# --- training


def train(
    args: Args,
    run: Run,
    model: ActorCritic,
    optimizer: RMSProp,
    reward_scale: RewardScale,
    device: torch.device,
) -> None:
    """Algorithm 1, from `run.step` on."""
    step = run.step
    torch.manual_seed(env_seed(args.seed, step) + RANK)
    n_envs = args.n_envs // N_RANKS  # of this process, one of several under torchrun
    envs = make_vec_env(args.env_id, n_envs, args.n_workers, args.env_kwargs)
    envs = RecordEpisodeStatistics(envs)
    shape = (args.t_max, n_envs)
    rewards = np.zeros(shape, np.float32)
    dones = np.zeros(shape, np.bool_)
    final_values = torch.zeros(shape, device=device)
    with contextlib.closing(envs):
        obs = to_device(envs.reset(seed=env_seed(args.seed, step) + RANK * n_envs)[0], device)
        forward = [model] * (args.t_max + 1)
        if device.type == "cuda":  # a graph for each t, as all forward passes are kept
            forward = [cuda_graph(model, obs) for _ in forward]
        while step < args.total_steps and not run.stopped:  # l. 3, 20
            observations, outputs, values, actions = [], [], [], []
            final_values.zero_()
            for t in range(args.t_max):  # l. 4
                # θ does not change within a rollout: this forward pass serves the backward pass too
                output, value = forward[t](obs)  # l. 6
                with torch.no_grad():
                    action = model.sample(output)  # l. 5
                observations.append(obs)
                outputs.append(output)
                values.append(value)
                actions.append(action)
                # l. 7-10
                next_obs, reward, terminated, truncated, info = envs.step(action.cpu().numpy())
                obs = to_device(next_obs, device)
                rewards[t] = reward
                dones[t] = terminated | truncated
                reward_scale.see(reward, terminated)
                timed_out = truncated & ~terminated
                if timed_out.any():  # a time limit ends the episode but not the return
                    with torch.no_grad():
                        final_obs = to_device(info["final_obs"][timed_out], device)
                        final_values[t, timed_out] = model(final_obs)[1]
                for i in np.flatnonzero(dones[t]):
                    run.log_episode(info["episode"]["r"][i], info["episode"]["l"][i])
            with torch.no_grad():
                bootstrap = forward[-1](obs)[1]  # l. 12
            reward_scale.update()
            r, ends = to_device(reward_scale(rewards), device), to_device(dones, device)
            returns = n_step_returns(r, ends, final_values, bootstrap, args.gamma)  # l. 13-15
            entropy_coef = args.entropy_coef
            if args.anneal_entropy:
                entropy_coef = linear_decay(entropy_coef, 2 * step, args.total_steps)
            log_probs, entropies = model.log_prob_and_entropy(
                torch.stack(outputs), torch.stack(actions)
            )
            loss, policy_loss, value_loss = paac_loss(
                log_probs,
                entropies,
                torch.stack(values),
                returns,
                entropy_coef,
                args.value_coef,
            )
            model.zero_grad()
            loss.backward()  # l. 16, 17
            average_gradients(model.parameters())
            grad_norm = nn.utils.clip_grad_norm_(
                model.parameters(), args.max_grad_norm, error_if_nonfinite=True
            )
            # l. 19, before l. 18: the α of the released code counts the steps of this rollout
            step += args.n_envs * args.t_max
            lr = linear_decay(args.learning_rate, step, args.total_steps)
            optimizer.step(lr)  # l. 18
            if isinstance(model.trunk, RunningNorm):
                model.trunk.update(torch.stack(observations))
            run.log_update(
                step,
                policy_loss=policy_loss,
                value_loss=value_loss,
                entropy=entropies,
                grad_norm=grad_norm,
                learning_rate=lr,
            )


def cuda_graph(model: nn.Module, obs: Tensor) -> nn.Module:
    """`model` for observations like these, its kernels launched at once, forward and backward.

    PAAC on Pong makes 1.4 times the steps/s with it (H200, 16 cores). What a call returns, and
    keeps for its backward pass, lasts until the next call.
    """
    forward = nn.Sequential(model)  # the model itself remains as it is
    # the graphs are captured on a stream of their own; log_std is no part of the forward pass
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with torch.cuda.device(obs.device):
        return torch.cuda.make_graphed_callables(forward, (obs.clone(),), allow_unused_input=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


# --- main


def pick_preset(args: Args, observations: gym.Space, actions: gym.Space) -> str:
    if isinstance(actions, spaces.Box):
        return "continuous"
    return "paper" if len(observations.shape) == 3 else "vector"


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate alone. Returns the exit status."""
    args, observations, actions = parse_args("paac", argv, Args(), __doc__, PRESETS, pick_preset)
    if args.arch == "auto":
        args.arch = "nips" if len(observations.shape) == 3 else "mlp"
    if args.n_workers is None:
        args.n_workers = min(8, n_cores(), args.n_envs // N_RANKS)
    if args.learning_rate is None:
        args.learning_rate = 0.0007 * args.n_envs
    if args.arch == "mlp":
        torch.set_num_threads(1)  # two threads are twice as slow for so small a network

    device = pick_device(args.device)
    bfloat16 = pick_bfloat16(args.bfloat16, device)

    torch.manual_seed(args.seed)
    model = ActorCritic(observations, actions, args.arch, bfloat16, args.orthogonal_init)
    model.to(device)
    optimizer = RMSProp(model.parameters(), args.rms_decay, args.rms_eps, initial_square=1.0)
    reward_scale = RewardScale(args)

    if args.evaluate:
        load_checkpoint("paac", args.run_dir, model=model)
    else:
        with Run("paac", args, model=model, optimizer=optimizer, reward_scale=reward_scale) as run:
            train(args, run, model, optimizer, reward_scale, device)
        if not run.complete:
            return 128 + run.signal

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:  # samples its actions, as in training
        return model.sample(model(to_device(obs, device))[0]).cpu().numpy()

    evaluate(args, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
