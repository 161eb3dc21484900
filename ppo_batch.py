"""Batch PPO: proximal policy optimisation over N environments, as ChainerRL's batch PPO (2018).

N environments step together and never wait for each other's episodes: one that ends starts the next
at once. After T steps of all of them come K epochs over the N·T transitions, in minibatches of M
(Schulman et al. 2017):

    δ_t = r_t + γ V(s_{t+1}) - V(s_t),    V = 0 after a termination                       (eq. 12)
    A_t = δ_t + γλ A_{t+1},    A = 0 after any end;    R = A + V(s; θ_old)                (eq. 11)
    ρ = π(a|s; θ) / π(a|s; θ_old),    Â = (A - mean A) / std A over all N·T
    L = -mean min(ρ Â, clip(ρ, 1 ± ε) Â)                                                   (eq. 7)
        + mean (R - V(s; θ))² - β mean H(π(s; θ)),    θ by Adam                            (eq. 9)

    python ppo_batch.py                                             # Pong from pixels
    python ppo_batch.py --env-id CartPole-v1 --total-steps 200_000  # a minute
    python ppo_batch.py --env-id HalfCheetah-v5                     # continuous actions
    python ppo_batch.py --resume runs/...                           # go on after an interruption
    python ppo_batch.py --evaluate runs/... --record                # 30 episodes and a GIF
    torchrun --nproc-per-node 2 ppo_batch.py                        # two processes, or GPUs

This is the PPO of ChainerRL's code and of PFRL, its successor in PyTorch:
- A termination cuts the return; the blog of 2018 keeps the value of the last step.
- V and log π of θ_old are kept from acting; PFRL computes them again after the rollout.
- Advantages are standardised once, over the whole batch; the value loss is a mean square, weight 1.
- Where M does not divide N·T, a minibatch holds the end of one epoch and the start of the next.
- On vectors, the statistics that normalise observations change between the rollout and its epochs,
  so even the first ρ is not exactly 1.
- The presets `atari` and `continuous` are PFRL's, but for two changes in `continuous`: 8
  environments, where its example has 1, and α falls to zero, as in ChainerRL's batch example, where
  PFRL's is constant (`--no-anneal-lr`). `vector`, the same with an entropy bonus that falls to
  zero, and `short`, with the smaller network, are ours.
- ChainerRL's constants, but for its LeCun weights, are `--preset continuous --gamma 0.99
  --gae-lambda 0.95 --no-standardize-advantages --n-envs 1 --total-steps 1e6 --no-bootstrap-limits
  --rewards raw` in an environment that multiplies rewards by 0.01. Those of Table 5 of Schulman et
  al. are `--update-epochs 3 --anneal-clip`.

Departures:
- Rewards are divided so that returns have size 10 on vectors and 1 on images, but for Atari, where
  they are clipped; PFRL has `--rewards raw` on MuJoCo. Vectors whose bounds are within ±1 are
  divided by one number (see common/norm.py).
- A time limit does not cut the return: it bootstraps from V of the final observation. PFRL's MuJoCo
  example cuts it (`--no-bootstrap-limits`; σ of the rewards stays uncut).
- α and ε are those of the rollout's first step, as in the code of Schulman et al. PFRL's are those
  of its last step, so that α is next to nothing in a run's last update.
- Atari as in common/atari.py: losing a life does not end an episode, 0 to 30 no-ops, three black
  frames in the first stack.
- Box actions are mapped from [-1, 1] to their bounds and clipped there.
- No recurrent networks. Gaussians for images are ours.
- Under torchrun a minibatch has equally many transitions of each process.
- For images the trunk runs in bfloat16 on CPUs that have AVX512_BF16, unless `--bfloat16 off`, and
  convolutions on CUDA are TF32.
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
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

from common.distributed import N_RANKS, RANK, Run, average_gradients, of_all_ranks
from common.evaluate import evaluate
from common.norm import RewardScale, RunningNorm
from common.processes import n_cores
from common.run import RunArgs, load_checkpoint, parse_args, pick_bfloat16, pick_device
from common.vec_env import env_seed, make_vec_env

# PFRL's MuJoCo example but for n_envs and anneal_lr, see above: π's σ shrinks as training goes on,
# and steps of a constant α may then ruin the policy.
MUJOCO = {
    "total_steps": 2_000_000,
    "update_interval": 2048,
    "minibatch_size": 64,
    "update_epochs": 10,
    "learning_rate": 3e-4,
    "clip_coef": 0.2,
    "gamma": 0.995,
    "gae_lambda": 0.97,
    "entropy_coef": 0.0,
    "max_grad_norm": None,
}
# What differs from Args, which has the constants of PFRL's Atari example, train_ppo_ale.
PRESETS = {
    "atari": {},
    # Atari on two cores in a quarter of an hour, ours.
    "short": {
        "total_steps": 2_000_000,
        "n_envs": 16,
        "arch": "nips",
        "update_interval": 2048,
        "learning_rate": 1e-3,
    },
    "continuous": MUJOCO,
    # Discrete actions; with β = 0 it fails on Taxi-v4, a constant β costs reward on FrozenLake-v1
    "vector": MUJOCO | {"entropy_coef": 0.06, "anneal_entropy": True},
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "short", "vector", "continuous"] = "auto"
    """constants, see PRESETS (short: images); auto: atari for images, else continuous for Box
    actions, else vector"""
    total_steps: int = 10_000_000
    """agent steps of all environments; 1 step = 1 action = 4 frames on Atari"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network is; auto: CUDA where there is any"""

    n_envs: int = 8
    """N: environments"""
    n_workers: int | None = None
    """threads (Atari) or processes (else; 0: none) that step them; None: one for each core"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nature for images, mlp for vectors"""
    bfloat16: Literal["auto", "on", "off"] = "auto"
    """images: run all but the heads in bfloat16; auto: on CPUs that have AVX512_BF16"""
    update_interval: int = 1024
    """N·T: transitions of an update; ignored with --t-max"""
    t_max: int | None = None
    """T: steps of each environment between updates; None: update_interval / n_envs, rounded up"""
    minibatch_size: int = 256
    """M: transitions of a gradient step"""
    update_epochs: int = 4
    """K: passes over the N·T transitions"""
    learning_rate: float = 2.5e-4
    """initial α of Adam"""
    anneal_lr: bool = True
    """α falls to zero over total_steps"""
    gamma: float = 0.99
    """γ, discount per step"""
    gae_lambda: float = 0.95
    """λ of the advantages"""
    clip_coef: float = 0.1
    """ε of the surrogate, at the start"""
    anneal_clip: bool = False
    """ε of the surrogate falls to zero over total_steps"""
    standardize_advantages: bool = True
    """to mean 0 and standard deviation 1 over the N·T transitions"""
    entropy_coef: float = 0.01
    """β, weight of the entropy"""
    anneal_entropy: bool = False
    """β falls to zero over total_steps"""
    value_coef: float = 1.0
    """weight of the squared value error"""
    max_grad_norm: float | None = 0.5
    """threshold of the global gradient norm; None or 0: no clipping"""
    adam_eps: float = 1e-5
    """Adam's ε"""
    bootstrap_limits: bool = True
    """a time limit does not cut the return"""


# --- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


def mlp(n_inputs: int, n_outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, n_outputs))


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Images: one trunk, two linear heads. Vectors: two MLPs.

    Initial weights are PFRL's: for images normal with standard deviation 1/√fan_in, for vectors
    orthogonal; biases 0. The policy's last layer has a hundredth of that, so that π starts near
    uniform, a Gaussian near N(0, 1).
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: gym.Space,
        arch: str,
        bfloat16: bool = False,
    ) -> None:
        super().__init__()
        self.discrete = isinstance(action_space, spaces.Discrete)
        self.bfloat16 = bfloat16
        n_outputs = spaces.flatdim(action_space)
        if arch == "mlp":
            n_inputs = observation_space.shape[0]
            self.trunk = RunningNorm(observation_space, eps=1e-2, clip=5.0)
            self.policy, self.value = mlp(n_inputs, n_outputs), mlp(n_inputs, 1)
        else:
            if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
                layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
                layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
            else:  # nature: (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
                layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
                layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
            size = layers[-2].out_features
            self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster
            self.policy, self.value = nn.Linear(size, n_outputs), nn.Linear(size, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.zeros_(layer.bias)
                if arch == "mlp":
                    nn.init.orthogonal_(layer.weight)
                else:
                    nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.weight[0].numel()))
        with torch.no_grad():
            (self.policy[-1] if arch == "mlp" else self.policy).weight *= 0.01
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(n_outputs))  # log of PFRL's σ

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (n, 4, 84, 84) uint8 or (n, d) float → outputs of π and values (n,).

        Outputs of π: logits (n, n_actions), or means (n, action_dim).
        """
        if obs.dtype == torch.uint8:
            dtype = torch.bfloat16 if self.bfloat16 else torch.float32
            obs = obs.to(dtype, memory_format=torch.channels_last).div_(255)
            with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
                hidden = self.trunk(obs)
            hidden = hidden.float()
        else:
            hidden = self.trunk(obs)
        return self.policy(hidden), self.value(hidden).squeeze(-1)

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


def gae(
    rewards: Tensor,
    dones: Tensor,
    values: Tensor,
    final_values: Tensor,
    bootstrap: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) - V(s_t), A_t = δ_t + γλ A_{t+1} (Schulman et al., eq. 11, 12).

    Args: time first, (t_max, n_envs) each:
        rewards.
        dones: bool, where an episode ended by termination or truncation.
        values: V(s_t).
        final_values: V(final observation) where it was truncated, 0 where it was terminated.
        bootstrap: (n_envs,), V of the observation after the last step.
    Returns: A, (t_max, n_envs).
    """
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(bootstrap)
    next_value = bootstrap
    for t in reversed(range(len(rewards))):
        next_value = torch.where(dones[t], final_values[t], next_value)
        delta = rewards[t] + gamma * next_value - values[t]
        advantage = delta + gamma * gae_lambda * torch.where(dones[t], 0.0, advantage)
        advantages[t] = advantage
        next_value = values[t]
    return advantages


def ppo_loss(
    log_ratios: Tensor,
    advantages: Tensor,
    value_errors: Tensor,
    entropies: Tensor,
    clip_coef: float,
    entropy_coef: float,
    value_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (7) and (9) of Schulman et al. 2017 as a loss, means over a minibatch.

    Args: (n,) each, log ρ first; entropies may be one number instead, a Gaussian's.
    Returns: the total, its policy part (entropy included) and its value part.
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.minimum(ratios * advantages, clipped * advantages).mean()
    policy_loss = -surrogate - entropy_coef * entropies.mean()
    value_loss = value_coef * value_errors.square().mean()
    return policy_loss + value_loss, policy_loss, value_loss


def minibatches(n: int, size: int, epochs: int, device: torch.device) -> Tensor:
    """Indices of `epochs` passes over n samples, each in its own random order, in rows of `size`.

    Returns: (⌈n epochs / size⌉, size). What the last row lacks comes from one more pass.
    """
    rows = math.ceil(n * epochs / size)
    passes = math.ceil(rows * size / n)
    orders = torch.cat([torch.randperm(n, device=device) for _ in range(passes)])
    return orders[: rows * size].view(rows, size)


def linear_decay(initial: float, step: int, total_steps: int) -> float:
    """The value at `step` of a line from `initial` at step 0 to zero at `total_steps`."""
    return initial * max(0.0, 1 - step / total_steps)


@torch.no_grad()
def flatten(model: nn.Module) -> Tensor:
    """Make parameters and gradients views of one vector and its `grad`, and return the vector.

    Clipping and Adam then take one kernel where they would take one for each parameter, which saves
    16 % of a minibatch's time with two MLPs. Gradients must be set to zero in place.
    """
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    vector = torch.cat([p.flatten() for p in parameters])
    vector.grad = torch.zeros_like(vector)
    parts = vector.split(sizes), vector.grad.split(sizes)
    for p, part, gradient in zip(parameters, *parts, strict=True):
        p.data = part.as_strided(p.shape, p.stride()).copy_(p)  # keeps its memory format
        p.grad = gradient.as_strided(p.shape, p.stride())
    return vector


# --- training


def update(
    model: ActorCritic,
    forward: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: list[Tensor],
    clip_coef: float,
    entropy_coef: float,
    args: Args,
) -> dict[str, Tensor]:
    """Optimise L with K epochs over the batch, and return what the last minibatch has to log.

    Args:
        forward: the model's forward pass of a minibatch.
        batch: observations, actions, log π(a|s; θ_old), Â and R, (N·T, ...) each.
    """
    (theta,) = optimizer.param_groups[0]["params"]  # see `flatten`
    n, device = len(batch[0]), batch[0].device
    size = args.minibatch_size // N_RANKS
    for indices in minibatches(n, size, args.update_epochs, device):
        obs, actions, old_log_probs, advantages, returns = (x[indices] for x in batch)
        outputs, values = forward(obs)
        log_probs, entropies = model.log_prob_and_entropy(outputs, actions)
        log_ratios = log_probs - old_log_probs
        loss, policy_loss, value_loss = ppo_loss(
            log_ratios,
            advantages,
            returns - values,
            entropies,
            clip_coef,
            entropy_coef,
            args.value_coef,
        )
        theta.grad.zero_()
        loss.backward()
        average_gradients([theta])
        grad_norm = nn.utils.clip_grad_norm_(
            theta, args.max_grad_norm or math.inf, error_if_nonfinite=True
        )
        optimizer.step()
    changes = log_ratios.detach().expm1()  # ρ - 1
    return {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropies,
        "grad_norm": grad_norm,
        "approx_kl": changes - log_ratios,
        "clip_fraction": (changes.abs() > clip_coef).float(),
    }


def train(
    args: Args,
    run: Run,
    model: ActorCritic,
    optimizer: torch.optim.Optimizer,
    reward_scale: RewardScale,
    device: torch.device,
) -> None:
    """Algorithm 1 of Schulman et al. 2017, from `run.step` on."""
    step = run.step
    torch.manual_seed(env_seed(args.seed, step) + RANK)
    n_envs = args.n_envs // N_RANKS  # of this process, one of several under torchrun
    envs = make_vec_env(args.env_id, n_envs, args.n_workers, args.env_kwargs)
    envs = RecordEpisodeStatistics(envs)
    t_max = args.t_max or math.ceil(args.update_interval / args.n_envs)
    shape = (t_max, n_envs)
    rewards = np.zeros(shape, np.float32)
    dones = np.zeros(shape, np.bool_)
    final_values = torch.zeros(shape)
    with contextlib.closing(envs):
        obs = to_device(envs.reset(seed=env_seed(args.seed, step) + RANK * n_envs)[0], device)
        act = learn = model
        if device.type == "cuda":
            act = cuda_graph(model, obs)
            minibatch = obs.new_zeros(args.minibatch_size // N_RANKS, *obs.shape[1:])
            learn = cuda_graph(model, minibatch)
        while step < args.total_steps and not run.stopped:  # iterations
            observations, outputs, values, actions = [], [], [], []
            final_values.zero_()
            for t in range(t_max):  # run π in all N environments for T steps
                with torch.no_grad():
                    output, value = (x.clone() for x in act(obs))  # `act` may reuse its memory
                    action = model.sample(output)
                observations.append(obs)
                outputs.append(output)
                values.append(value)
                actions.append(action)
                next_obs, reward, terminated, truncated, info = envs.step(action.cpu().numpy())
                obs = to_device(next_obs, device)  # after an episode's end the first of the next
                rewards[t] = reward
                dones[t] = terminated | truncated
                reward_scale.see(reward, terminated)
                timed_out = truncated & ~terminated
                if args.bootstrap_limits and timed_out.any():
                    with torch.no_grad():
                        final_obs = to_device(info["final_obs"][timed_out], device)
                        final_values[t, timed_out] = model(final_obs)[1].cpu()
                for i in np.flatnonzero(dones[t]):
                    run.log_episode(info["episode"]["r"][i], info["episode"]["l"][i])
            with torch.no_grad():
                bootstrap = act(obs)[1]  # unfinished episodes go on in the next batch
                actions, values = torch.stack(actions), torch.stack(values)
                log_probs, _ = model.log_prob_and_entropy(torch.stack(outputs), actions)
            reward_scale.update()
            r, ends = torch.from_numpy(reward_scale(rewards)), torch.from_numpy(dones)
            v, v_end = values.cpu(), bootstrap.cpu()  # on a GPU, gae's many small kernels are slow
            advantages = gae(r, ends, v, final_values, v_end, args.gamma, args.gae_lambda)
            advantages = advantages.to(device)  # A_1 to A_T
            returns = advantages + values
            if args.standardize_advantages:
                std, mean = torch.std_mean(of_all_ranks(advantages), unbiased=False)
                advantages = (advantages - mean) / (std + 1e-8)
            observations = torch.cat(observations)
            if observations.ndim == 4:  # images: as the convolutions want them
                observations = observations.contiguous(memory_format=torch.channels_last)
            if isinstance(model.trunk, RunningNorm):
                model.trunk.update(observations)
            left = linear_decay(1.0, step, args.total_steps)
            lr = args.learning_rate * (left if args.anneal_lr else 1)
            clip_coef = args.clip_coef * (left if args.anneal_clip else 1)
            entropy_coef = args.entropy_coef * (left if args.anneal_entropy else 1)
            optimizer.param_groups[0].update(lr=lr, eps=args.adam_eps)
            step += args.n_envs * t_max
            data = actions, log_probs, advantages, returns
            batch = [observations, *(x.flatten(0, 1) for x in data)]
            losses = update(model, learn, optimizer, batch, clip_coef, entropy_coef, args)
            run.log_update(step, **losses, learning_rate=lr)


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
    if len(observations.shape) == 3:
        return "atari"
    return "continuous" if isinstance(actions, spaces.Box) else "vector"


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate alone. Returns the exit status."""
    args, observations, actions = parse_args(
        "ppo_batch", argv, Args(), __doc__, PRESETS, pick_preset
    )
    if args.arch == "auto":
        args.arch = "nature" if len(observations.shape) == 3 else "mlp"
    if args.n_workers is None:
        args.n_workers = min(n_cores(), args.n_envs // N_RANKS)
    if args.arch == "mlp":
        torch.set_num_threads(1)  # two threads are twice as slow for so small a network

    device = pick_device(args.device)
    bfloat16 = pick_bfloat16(args.bfloat16, device)

    torch.manual_seed(args.seed)
    model = ActorCritic(observations, actions, args.arch, bfloat16).to(device)
    optimizer = torch.optim.Adam(
        [flatten(model)], args.learning_rate, eps=args.adam_eps, fused=True
    )
    # 10: see results/README.md; on images a large V would outweigh π in the trunk that they share
    reward_scale = RewardScale(args, size=10.0 if args.arch == "mlp" else 1.0)

    if args.evaluate:
        load_checkpoint("ppo_batch", args.run_dir, model=model)
    else:
        with Run("ppo_batch", args, model=model, adam=optimizer, reward_scale=reward_scale) as run:
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
