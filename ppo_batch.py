"""Batch PPO: proximal policy optimisation over N environments (Schulman et al. 2017; ChainerRL's batch PPO, 2018).

N environments step together and never wait for each other's episodes: one that ends starts the next at once. After T
steps of all of them, K epochs over the N·T transitions, in minibatches of M:

    δ_t = r_t + γ V(s_{t+1}) - V(s_t)    (V = 0 after a termination),    A_t = δ_t + γλ A_{t+1}    (A = 0 after any end)
    R = A + V(s; θ_old),    ρ = π(a|s; θ) / π(a|s; θ_old),    Â = (A - mean A) / std A over all N·T
    L = -mean min(ρ Â, clip(ρ, 1 ± ε) Â) + mean (R - V(s; θ))² - β mean H(π(s; θ)),    θ by Adam

    python ppo_batch.py                                             # Pong from pixels
    python ppo_batch.py --env-id CartPole-v1 --total-steps 200_000  # a minute
    python ppo_batch.py --env-id HalfCheetah-v5                     # continuous actions
    python ppo_batch.py --resume runs/...                           # go on after an interruption
    python ppo_batch.py --evaluate runs/... --record                # 30 episodes and a GIF

It follows the code of ChainerRL and of PFRL, its successor in PyTorch:
- a termination cuts the return, where the blog of 2018 keeps the value of the last step;
- V and log π of θ_old are those of acting; PFRL computes them again before the epochs, with the same θ;
- the whole batch's advantages are standardised once; the value loss is a plain mean square with weight 1;
- a minibatch may hold the end of one epoch and the start of the next, where M does not divide N·T;
- on vectors, the statistics that normalise observations change after the rollout and before its epochs, so that
  even the first ρ is not exactly 1;
- the presets are PFRL's, but for 8 environments on vectors where its example has 1, and α falling to zero there as in
  ChainerRL's batch example, where PFRL's is constant (`--no-anneal-lr`). The constants of ChainerRL's are `--gamma 0.99
  --gae-lambda 0.95 --no-standardize-advantages --reward-scale 0.01 --n-envs 1 --total-steps 1_000_000
  --no-bootstrap-limits` on top of `vector` (its initial weights are LeCun's), those of Table 5 of Schulman et al.
  `--update-epochs 3 --anneal-clip` on top of `atari`.

Departures from it: a time limit does not cut the return, it bootstraps from V of the final observation (its MuJoCo
example cuts there: `--no-bootstrap-limits`); α and ε are those of the rollout's first step, as in the code of Schulman
et al., where PFRL's are those of its last, so that the update that ends a run does next to nothing; losing a life does
not end an episode; 0 to 30 no-ops, not 1 to 30; the first stack of a game has three black frames; a Gaussian's [-1, 1]
is stretched to the bounds of the actions and clipped there; no recurrent networks. PFRL's examples have Discrete
actions for images and a Gaussian for vectors; the other two pairs, made of the same parts, are ours. On CUDA
PyTorch computes convolutions in TF32 unless told otherwise.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # OpenMP's threads would go on spinning between forward passes, on the environments' cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import json
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

from common.evaluation import Policy, to_env
from common.flags import RunArgs, atari_or_vector, check_env, check_range, check_rollout, pick_arch, pick_device
from common.processes import n_cores
from common.run import Run, make_run_dir, read_args, run_script
from common.vec_env import env_seed, make_vec_env

SCRIPT = "ppo_batch"

# Which constants hold for which kind of task: what differs from Args, which has the Atari ones, PFRL's train_ppo_ale.
PRESETS: dict[str, dict[str, Any]] = {
    "atari": {},
    # Vectors: PFRL's reproduction of PPO on MuJoCo, but for n_envs, where it has 1, and anneal_lr, where it has False:
    # σ shrinks as training goes on, and steps of a constant α then ruin the policy now and then (results/README.md).
    "vector": {
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
        "clip_rewards": False,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "vector"] = "auto"
    """constants of the algorithm, see PRESETS; auto: atari for images, else vector"""
    total_steps: int = 10_000_000
    """agent steps of all environments together; 1 step = 1 action = 4 frames on Atari"""
    seed: int = 1
    """of environments, initial parameters, actions and minibatches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network is; auto: CUDA where there is any"""

    n_envs: int = 8
    """N: environments"""
    n_workers: int | None = None
    """threads (Atari; at least 1) or processes (else; 0: none) that step them; None: 8, or fewer cores or N"""
    arch: Literal["auto", "nature", "mlp"] = "auto"
    """network; auto: nature for images, mlp for vectors"""
    bfloat16: bool = False
    """images: run all but the last layer in bfloat16, faster where the processor has it; parameters stay float32"""
    update_interval: int = 1024
    """N·T: transitions of an update; ignored with --t-max"""
    t_max: int | None = None
    """T: steps of each environment between two updates; None: update_interval / n_envs, rounded up"""
    minibatch_size: int = 256
    """M: transitions of a gradient step, at most N·T"""
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
    value_coef: float = 1.0
    """weight of the squared value error"""
    max_grad_norm: float | None = 0.5
    """threshold of the global gradient norm; None: no clipping; 0 leaves no gradient"""
    adam_eps: float = 1e-5
    """Adam's ε"""
    bootstrap_limits: bool = True
    """a time limit does not cut the return"""
    clip_rewards: bool = True
    """learn from rewards clipped to [-1, 1]"""
    reward_scale: float = 1.0
    """learn from rewards times this, where they are not clipped"""


# ---------------------------------------------------------------------------------------------------- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


def mlp(n_inputs: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs))


class RunningNorm(nn.Module):
    """(x - mean) / √(var + eps) over all vectors acted on, clipped to ±clip: for vectors what /255 is for images.

    The statistics change only in `update` and belong to the state that checkpoints save.
    """

    def __init__(self, size: int, eps: float, clip: float) -> None:
        super().__init__()
        self.eps, self.clip = eps, clip
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        """Merge the vectors x, (..., size), into the mean and the (population) variance."""
        x = x.flatten(0, -2)
        total = self.count + len(x)
        weight, delta = (len(x) / total).float(), x.mean(0) - self.mean
        self.var += weight * (x.var(0, unbiased=False) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / (self.var + self.eps).sqrt()).clamp(-self.clip, self.clip)


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Images: one trunk, two linear heads. Vectors: normalised, then two MLPs.

    Initial weights are PFRL's: for images normal with standard deviation 1/√fan_in, for vectors orthogonal; biases 0.
    The weights of the policy's last layer are a hundredth of that: π starts near uniform, a Gaussian near N(0, 1).
    """

    def __init__(
        self, observation_space: spaces.Box, action_space: gym.Space, arch: str, bfloat16: bool = False
    ) -> None:
        super().__init__()
        self.action_space, self.discrete = action_space, isinstance(action_space, spaces.Discrete)
        self.bfloat16 = bfloat16
        n_outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        if arch == "mlp":
            n_inputs = observation_space.shape[0]
            self.trunk = RunningNorm(n_inputs, eps=1e-2, clip=5.0)
            self.policy, self.value = mlp(n_inputs, n_outputs), mlp(n_inputs, 1)
        else:  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
            self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster on CPU
            self.policy, self.value = nn.Linear(512, n_outputs), nn.Linear(512, 1)
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
            self.log_std = nn.Parameter(torch.zeros(n_outputs))  # PFRL's variance is exp(2p), p = log_std

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 4, 84, 84) uint8 or (n, d) float → logits (n, n_actions) or means (n, action_dim), values (n,)."""
        if obs.dtype == torch.uint8:
            obs = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
            with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
                hidden = self.trunk(obs)
            hidden = hidden.float()
        else:
            hidden = self.trunk(obs)
        return self.policy(hidden), self.value(hidden).squeeze(-1)

    def sample(self, outputs: Tensor) -> Tensor:
        """Actions of π: (n, n_actions) → (n,) int64, or (n, action_dim) → (n, action_dim).

        Raises: FloatingPointError: the outputs, or the actions that they give, are not finite.
        """
        numbers = outputs if self.discrete else outputs + self.log_std.exp() * torch.randn_like(outputs)
        if not numbers.isfinite().all():
            raise FloatingPointError("the outputs of the network are not finite")
        return torch.multinomial(numbers.softmax(-1), 1).squeeze(-1) if self.discrete else numbers

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π(a|s) and H(π(s)), (...,) each; a Gaussian's entropy is a scalar, the same in every state."""
        if self.discrete:
            log_probs = outputs.log_softmax(-1)
            return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
        distances = ((actions - outputs) * (-self.log_std).exp()).square().sum(-1)  # in standard deviations
        entropy = (self.log_std + (1 + math.log(2 * math.pi)) / 2).sum()
        return (outputs.shape[-1] - distances) / 2 - entropy, entropy  # H = E[-log π], and E[distances] = action_dim


# ------------------------------------------------------------------------------------------------ mathematics


def gae(
    rewards: Tensor,
    dones: Tensor,
    values: Tensor,
    final_values: Tensor,
    bootstrap: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) - V(s_t), A_t = δ_t + γλ A_{t+1} (Schulman et al. 2017, eq. 11, 12).

    Args: time first, (t_max, n_envs) each: rewards; dones, bool, where an episode ended by termination or
    truncation; values, V(s_t); final_values, V(final observation) where it was truncated and 0 where it was
    terminated. bootstrap (n_envs,): V of the observation after the last step. Returns A, (t_max, n_envs).
    """
    advantages, advantage, next_value = torch.empty_like(rewards), torch.zeros_like(bootstrap), bootstrap
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * torch.where(dones[t], final_values[t], next_value) - values[t]
        advantage = delta + gamma * gae_lambda * torch.where(dones[t], 0.0, advantage)
        advantages[t], next_value = advantage, values[t]
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
    """Eq. (7) and (9) of Schulman et al. 2017 as a loss, means over a minibatch; all (n,), log ρ first.

    Entropies may be one number instead, a Gaussian's.
    Returns the total, its policy part (entropy included) and its value part.
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.minimum(ratios * advantages, clipped * advantages).mean()
    policy_loss = -surrogate - entropy_coef * entropies.mean()
    value_loss = value_coef * value_errors.square().mean()
    return policy_loss + value_loss, policy_loss, value_loss


def rollout_length(args: Args) -> int:
    """T, from --t-max or --update-interval."""
    return args.t_max or math.ceil(args.update_interval / args.n_envs)


def minibatches(n: int, size: int, epochs: int, device: torch.device) -> Tensor:
    """Indices of `epochs` passes over n samples, each in its own random order, cut into rows of `size`.

    Returns: (⌈n epochs / size⌉, size). What the last row lacks comes from the start of one more pass.
    """
    rows = math.ceil(n * epochs / size)
    passes = math.ceil(rows * size / n)
    return torch.cat([torch.randperm(n, device=device) for _ in range(passes)])[: rows * size].view(rows, size)


def linear_decay(initial: float, step: int, total_steps: int) -> float:
    """The value at `step` of a line from `initial` at step 0 to zero at `total_steps`."""
    return initial * max(0.0, 1 - step / total_steps)


# --------------------------------------------------------------------------------------------------- training


def update(
    model: ActorCritic, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], clip_coef: float, args: Args
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Optimise L with K epochs over the batch: observations, actions, log π(a|s; θ_old), Â and R, (N·T, ...) each.

    Returns the sum of all losses, that of the norms of their gradients, and the scalars to log, from the last
    minibatch. Nothing here makes the host wait for the device.
    """
    parameters = list(model.parameters())
    total_loss, total_norm = torch.zeros(2, device=batch[0].device)
    max_grad_norm = math.inf if args.max_grad_norm is None else args.max_grad_norm
    for indices in minibatches(len(batch[0]), args.minibatch_size, args.update_epochs, batch[0].device):
        obs, actions, old_log_probs, advantages, returns = (x[indices] for x in batch)
        outputs, values = model(obs)
        log_probs, entropies = model.log_prob_and_entropy(outputs, actions)
        log_ratios = log_probs - old_log_probs
        loss, policy_loss, value_loss = ppo_loss(
            log_ratios, advantages, returns - values, entropies, clip_coef, args.entropy_coef, args.value_coef
        )
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        total_loss += loss.detach()
        total_norm += grad_norm
    changes = log_ratios.detach().expm1()  # ρ - 1
    scalars = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropies,
        "losses/grad_norm": grad_norm,
        "losses/approx_kl": changes - log_ratios.detach(),
        "losses/clip_fraction": (changes.abs() > clip_coef).float(),
    }
    return total_loss, total_norm, scalars


def train(args: Args, checkpoint: dict | None = None) -> int:
    """Batch PPO, from the start or from a checkpoint. Returns the exit status.

    Raises: WorkerError: an environment failed. FloatingPointError: a loss or the network is not finite.
    """
    device = pick_device(args.device)
    torch.manual_seed(args.seed)
    if args.arch == "mlp":
        torch.set_num_threads(1)  # so small a network takes twice the time with two
    model = make_model(args)
    envs = RecordEpisodeStatistics(make_vec_env(args.env_id, args.n_envs, args.n_workers, json.loads(args.env_kwargs)))
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)
    parts = {"model": model, "optimizer": optimizer}
    t_max = rollout_length(args)
    shape = (t_max, args.n_envs)
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    final_values = torch.zeros(shape, device=device)
    observations = empty_observations(envs.single_observation_space, t_max, args.n_envs, device)
    with Run(SCRIPT, args, parts, make_policy, checkpoint, log_interval=1) as run, contextlib.closing(envs):
        step = run.step
        obs = to_device(envs.reset(seed=env_seed(args.seed, step))[0], device)
        while step < args.total_steps and not run.stopped:  # iterations
            outputs, values, actions = [], [], []
            final_values.zero_()
            for t in range(t_max):  # run π in all N environments for T steps
                observations[t] = obs
                with torch.no_grad():
                    output, value = model(observations[t])
                    action = model.sample(output)
                outputs.append(output)
                values.append(value)
                actions.append(action)
                next_obs, reward, terminated, truncated, info = envs.step(to_env(action, envs.single_action_space))
                obs = to_device(next_obs, device)  # where an episode ended: the first of the next one
                rewards[t] = learned_rewards(reward, args)
                dones[t] = terminated | truncated
                timed_out = truncated & ~terminated
                if args.bootstrap_limits and timed_out.any():  # a time limit ends the episode but not the return
                    with torch.no_grad():
                        final_obs = to_device(np.stack(info["final_obs"][timed_out]), device)
                        final_values[t, to_device(timed_out, device)] = model(final_obs)[1]
                if "episode" in info:
                    ended = info["_episode"]
                    run.count_episodes(info["episode"]["r"][ended], info["episode"]["l"][ended])
            with torch.no_grad():
                bootstrap = model(obs)[1]  # unfinished episodes are cut here and go on in the next batch
                actions, values = torch.stack(actions), torch.stack(values)
                log_probs = model.log_prob_and_entropy(torch.stack(outputs), actions)[0]
            r, ends = to_device(rewards, device), to_device(dones, device)
            advantages = gae(r, ends, values, final_values, bootstrap, args.gamma, args.gae_lambda)  # A_1 to A_T
            returns = advantages + values
            if args.standardize_advantages:
                advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
            if isinstance(model.trunk, RunningNorm):
                model.trunk.update(observations)
            lr = linear_decay(args.learning_rate, step, args.total_steps) if args.anneal_lr else args.learning_rate
            clip_coef = linear_decay(args.clip_coef, step, args.total_steps) if args.anneal_clip else args.clip_coef
            optimizer.param_groups[0]["lr"] = lr
            step += args.n_envs * t_max
            batch = tuple(x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, returns))
            total_loss, total_norm, scalars = update(model, optimizer, batch, clip_coef, args)  # K epochs
            with torch.no_grad():
                checked = [x.isfinite().all() for x in (total_loss, total_norm, *model.parameters(), *model(obs))]
            if not torch.stack(checked).all():  # not after each minibatch: looking makes a GPU wait
                raise FloatingPointError(
                    f"the losses add up to {total_loss.item()}, the norms of their gradients to "
                    f"{total_norm.item()}; where both are finite, the network is not"
                )
            run.count_update(step, scalars | {"charts/learning_rate": lr})
    return run.exit_status


def empty_observations(space: spaces.Box, t_max: int, n_envs: int, device: torch.device) -> Tensor:
    """Room for a rollout, (t_max, n_envs, ...); images lie in memory as the convolutions want them."""
    layout = torch.channels_last if len(space.shape) == 3 else torch.contiguous_format
    dtype = torch.uint8 if len(space.shape) == 3 else torch.float32
    empty = torch.empty((t_max * n_envs, *space.shape), dtype=dtype, device=device, memory_format=layout)
    return empty.unflatten(0, (t_max, n_envs))


def learned_rewards(rewards: np.ndarray, args: Args) -> np.ndarray:
    return np.clip(rewards, -1, 1) if args.clip_rewards else rewards * args.reward_scale


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def make_model(args: Args) -> ActorCritic:
    """The network of a run, with fresh parameters."""
    env = check_env(args)
    return ActorCritic(env.observation_space, env.action_space, args.arch, args.bfloat16).to(pick_device(args.device))


def make_policy(model: ActorCritic, args: Args) -> Policy:
    """How evaluation plays: actions sampled from π, as in training."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        outputs, _ = model(to_device(obs, next(model.parameters()).device))
        return to_env(model.sample(outputs), model.action_space)

    return policy


# ------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises: UsageError: an argument that cannot work; nothing has been started or written by then.
    """
    args, checkpoint, env = read_args(SCRIPT, argv, Args(), __doc__, PRESETS, atari_or_vector)
    args.arch = pick_arch(args, env.observation_space, "nature")
    if args.n_workers is None:
        args.n_workers = min(8, n_cores(), args.n_envs)
    if not args.evaluate:  # with 8 bytes for each index of all epochs
        check_rollout(args, rollout_length(args), env.observation_space, 8 * args.update_epochs)
    check_range(args, "minibatch_size", 1, args.n_envs * rollout_length(args))
    check_range(args, "n_workers", 0, args.n_envs)
    if checkpoint is None:
        make_run_dir(SCRIPT, args)
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_script(SCRIPT, argv, parse, train, make_model, make_policy)


if __name__ == "__main__":
    sys.exit(main())
