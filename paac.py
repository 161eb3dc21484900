"""PAAC: parallel advantage actor-critic (Clemente, Castejon and Chandra 2017), batched on CPU or CUDA.

One policy acts in n_e environments at once. After t_max steps of all of them, one synchronous update of θ:

    R_t = r_t + γ R_{t+1},    R_{t_max+1} = V(s_{t_max+1}; θ)                                      (Alg. 1, l. 12-15)
    L = 1/n_e Σ_e Σ_t [ -log π(a_t|s_t; θ) (R_t - v_t) - β H(π(s_t; θ)) + 0.25 (R_t - V(s_t; θ))² ]  (eq. 10, 11)
    d = ∇L with v_t = V(s_t; θ) held constant, scaled to a norm of at most 40;    α = 0.0007 n_e (1 - N / N_max)
    g ← 0.99 g + 0.01 d²,    θ ← θ - α d / √(g + ε)

    python paac.py --n-envs 32                                      # Pong from pixels
    python paac.py --env-id CartPole-v1 --total-steps 200_000       # half a minute
    python paac.py --resume runs/...                                # go on after an interruption
    python paac.py --evaluate runs/... --record                     # 30 episodes and a GIF

Where the paper and its released code (github.com/Alfredvc/paac) differ or are silent, this file does the following:
- the loss is a sum over t_max where eq. (10) has a mean, so that α = 0.0007 n_e is A3C's step for each environment
  (the code has the mean times 5, which is the same with t_max = 5);
- the value loss has the code's coefficient 0.25; eq. (11) has 1;
- the return is cut at every step where an episode ends (the code), not only at the last one (Alg. 1);
- RMSProp has ε inside the root and starts from g = 1, as TensorFlow's, which the code used;
- α falls to zero over N_max (the code; the paper does not say);
- N_max, β and the clipping threshold are the paper's with `--preset paper`, the code's with `--preset code`.

Departures: a time limit does not cut the return, it bootstraps from V of the final observation. Games start after 0 to
30 no-ops (the code; the paper says 1 to 30) with three black frames in the first stack, are truncated after half an
hour, and are greyed and resized by ALE (common/atari.py). The paper has no vectors and no continuous actions: the MLP,
its running normalisation, the Gaussian (its [-1, 1] stretched to the bounds of the actions) and the presets `vector`
and `continuous` are ours. Everything is float32, but for convolutions on CUDA, which PyTorch computes in TF32 unless
told otherwise, and for `--bfloat16`.
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
from common.flags import RunArgs, check_env, check_range, check_rollout, pick_arch, pick_device
from common.processes import n_cores
from common.run import Run, make_run_dir, read_args, run_script
from common.vec_env import env_seed, make_vec_env

SCRIPT = "paac"

# Which constants hold for which kind of task: what differs from Args, which has those of the paper (sec. 5.1, Atari).
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # What the paper's released code sets otherwise.
    "code": {"total_steps": 80_000_000, "entropy_coef": 0.02, "max_grad_norm": 3.0},
    # Vectors, ours: rewards of any size, and tasks that are learned in minutes.
    "vector": {"total_steps": 1_000_000, "n_envs": 16, "clip_rewards": False, "reward_scale": 0.1},
}
# Box actions: the weight of a Gaussian's entropy is that of Mnih et al. 2016, sec. 9; value_coef was found on Pendulum,
# which is only reliable with --entropy-coef 0.01, γ, α and ε on HalfCheetah and Hopper: so small an ε makes each
# weight's step about α, whatever the size of the rewards.
PRESETS["continuous"] = PRESETS["vector"] | {"entropy_coef": 1e-4, "t_max": 20, "value_coef": 1.0}
PRESETS["continuous"] |= {"learning_rate": 3e-3, "rms_eps": 1e-5}

# Bytes that the forward pass of one observation keeps for the backward pass, in float32, besides a normalised vector.
KEPT_BYTES = {"nips": 160_256, "nature": 211_968, "mlp": 1_024}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "paper", "code", "vector", "continuous"] = "auto"
    """constants of the algorithm, see PRESETS; auto: continuous for Box actions, else paper for images or vector"""
    total_steps: int = 115_000_000
    """N_max: agent steps of all environments together; 1 step = 1 action = 4 frames on Atari"""
    seed: int = 1
    """of environments, initial parameters and actions"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network is; auto: CUDA where there is any"""

    n_envs: int = 32
    """n_e: environments"""
    n_workers: int | None = None
    """n_w: threads (Atari; at least 1) or processes (else; 0: none) that step them; None: 8, or fewer cores or n_e"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    bfloat16: bool = False
    """images: run all but the last layer in bfloat16, faster where the processor has it; parameters stay float32"""
    t_max: int = 5
    """steps of each environment between two updates"""
    learning_rate: float | None = None
    """initial α; None: 0.0007 n_e"""
    gamma: float = 0.99
    """γ, discount per step"""
    entropy_coef: float = 0.01
    """β, weight of the entropy"""
    value_coef: float = 0.25
    """weight of the squared value error"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm; 0 leaves no gradient"""
    rms_decay: float = 0.99
    """decay of RMSProp's mean square g per update"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""
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

    Initial weights are PyTorch's own, U(±1/√fan_in): the same as Torch7's, which PAAC and A3C used.
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
            self.trunk = RunningNorm(n_inputs, eps=1e-8, clip=10.0)
            self.policy, self.value = mlp(n_inputs, n_outputs), mlp(n_inputs, 1)
        else:
            if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
                layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
                layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
            else:  # nature: (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
                layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
                layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
            size = layers[-2].out_features
            self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster on CPU
            self.policy, self.value = nn.Linear(size, n_outputs), nn.Linear(size, 1)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(n_outputs))

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


def n_step_returns(rewards: Tensor, dones: Tensor, final_values: Tensor, bootstrap: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + γ R_{t+1} backwards from the bootstrap value (Alg. 1, l. 12-15).

    Args: time first, (t_max, n_envs) each: rewards; dones, bool, where an episode ended by termination or
    truncation; final_values, V(final observation) where it was truncated and 0 where it was terminated.
    bootstrap (n_envs,): V of the observation after the last step. Returns R, (t_max, n_envs).
    """
    returns, R = torch.empty_like(rewards), bootstrap
    for t in reversed(range(len(rewards))):
        R = rewards[t] + gamma * torch.where(dones[t], final_values[t], R)
        returns[t] = R
    return returns


def paac_loss(
    log_probs: Tensor, entropies: Tensor, values: Tensor, returns: Tensor, entropy_coef: float, value_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (10) and (11) as losses, summed over t_max and averaged over environments; all (t_max, n_envs).

    Entropies may be one number instead, a Gaussian's.
    Returns the total, its policy part (entropy included) and its value part.
    """
    advantages = returns - values.detach()
    policy_loss = -(log_probs * advantages + entropy_coef * entropies).sum(0).mean()
    value_loss = value_coef * (returns - values).square().sum(0).mean()
    return policy_loss + value_loss, policy_loss, value_loss


def linear_decay(initial: float, step: int, total_steps: int) -> float:
    """The value at `step` of a line from `initial` at step 0 to zero at `total_steps`."""
    return initial * max(0.0, 1 - step / total_steps)


class RMSProp(torch.optim.Optimizer):
    """g ← decay g + (1 - decay) d²; θ ← θ - lr d / √(g + eps). torch.optim.RMSprop has eps outside the root.

    `initial_square` is g at the start: 1 in TensorFlow and PAAC, 0 in A3C.
    """

    def __init__(self, params: Any, lr: float, decay: float, eps: float, initial_square: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["square"] = torch.full_like(p, initial_square)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = self.state[p]["square"].mul_(group["decay"])
                square.addcmul_(p.grad, p.grad, value=1 - group["decay"])
                p.addcdiv_(p.grad, (square + group["eps"]).sqrt_(), value=-group["lr"])


# --------------------------------------------------------------------------------------------------- training


def train(args: Args, checkpoint: dict | None = None) -> int:
    """Algorithm 1, from the start or from a checkpoint. Returns the exit status.

    Raises: WorkerError: an environment failed. FloatingPointError: the network, its loss or gradient is not finite.
    """
    device = pick_device(args.device)
    torch.manual_seed(args.seed)
    if args.arch == "mlp":
        torch.set_num_threads(1)  # so small a network takes twice the time with two
    model = make_model(args)
    envs = RecordEpisodeStatistics(make_vec_env(args.env_id, args.n_envs, args.n_workers, json.loads(args.env_kwargs)))
    optimizer = RMSProp(model.parameters(), args.learning_rate, args.rms_decay, args.rms_eps, initial_square=1.0)
    parts = {"model": model, "optimizer": optimizer}
    shape = (args.t_max, args.n_envs)
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    final_values = torch.zeros(shape, device=device)
    with Run(SCRIPT, args, parts, make_policy, checkpoint) as run, contextlib.closing(envs):
        step = run.step
        obs = to_device(envs.reset(seed=env_seed(args.seed, step))[0], device)
        while step < args.total_steps and not run.stopped:  # l. 3, 20
            observations, outputs, values, actions = [], [], [], []
            final_values.zero_()
            for t in range(args.t_max):  # l. 4
                # θ does not change within a rollout: this forward pass is kept and serves the backward pass as well
                output, value = model(obs)  # l. 6
                with torch.no_grad():
                    action = model.sample(output)  # l. 5
                observations.append(obs)
                outputs.append(output)
                values.append(value)
                actions.append(action)
                # l. 7-10
                next_obs, reward, terminated, truncated, info = envs.step(to_env(action, envs.single_action_space))
                obs = to_device(next_obs, device)
                rewards[t] = learned_rewards(reward, args)
                dones[t] = terminated | truncated
                timed_out = truncated & ~terminated
                if timed_out.any():  # a time limit ends the episode but not the return
                    with torch.no_grad():
                        final_obs = to_device(np.stack(info["final_obs"][timed_out]), device)
                        final_values[t, to_device(timed_out, device)] = model(final_obs)[1]
                if "episode" in info:
                    ended = info["_episode"]
                    run.count_episodes(info["episode"]["r"][ended], info["episode"]["l"][ended])
            with torch.no_grad():
                bootstrap = model(obs)[1]  # l. 12
            returns = n_step_returns(
                to_device(rewards, device), to_device(dones, device), final_values, bootstrap, args.gamma
            )
            log_probs, entropies = model.log_prob_and_entropy(torch.stack(outputs), torch.stack(actions))
            loss, policy_loss, value_loss = paac_loss(
                log_probs, entropies, torch.stack(values), returns, args.entropy_coef, args.value_coef
            )
            optimizer.zero_grad()
            loss.backward()  # l. 16, 17
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            if not torch.isfinite(grad_norm):
                raise FloatingPointError(f"the loss is {loss.item()}, the norm of its gradient {grad_norm.item()}")
            step += args.n_envs * args.t_max  # l. 19, before l. 18: the code's α counts the steps of this rollout
            optimizer.param_groups[0]["lr"] = linear_decay(args.learning_rate, step, args.total_steps)
            optimizer.step()  # l. 18
            if isinstance(model.trunk, RunningNorm):
                model.trunk.update(torch.stack(observations))
            scalars = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropies}
            scalars |= {"losses/grad_norm": grad_norm, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
            run.count_update(step, scalars)
    return run.exit_status


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


def pick_preset(args: Args, env: gym.Env) -> str:
    if isinstance(env.action_space, spaces.Box):
        return "continuous"
    return "paper" if len(env.observation_space.shape) == 3 else "vector"


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises: UsageError: an argument that cannot work; nothing has been started or written by then.
    """
    # n_e stays what it is in a run, whose α was made of it
    args, checkpoint, env = read_args(SCRIPT, argv, Args(), __doc__, PRESETS, pick_preset, fixed=("n_envs",))
    args.arch = pick_arch(args, env.observation_space, "nips")
    if args.learning_rate is None:
        args.learning_rate = 0.0007 * args.n_envs
    if args.n_workers is None:
        args.n_workers = min(8, n_cores(), args.n_envs)
    if not args.evaluate:
        check_rollout(args, args.t_max, env.observation_space, KEPT_BYTES[args.arch])
    check_range(args, "n_workers", 0, args.n_envs)
    if checkpoint is None:
        make_run_dir(SCRIPT, args)
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_script(SCRIPT, argv, parse, train, make_model, make_policy)


if __name__ == "__main__":
    sys.exit(main())
