"""PAAC: parallel advantage actor-critic (Clemente, Castejon and Chandra 2017), batched on CPU or CUDA.

One policy acts in n_e environments at once. After t_max steps of all of them, one synchronous update of θ:

    R_t = r_t + γ R_{t+1},    R_{t_max+1} = V(s_{t_max+1}; θ)                                      (Alg. 1, l. 12-15)
    L = 1/n_e Σ_e Σ_t [ -log π(a_t|s_t; θ) (R_t - v_t) - β H(π(s_t; θ)) + 0.25 (R_t - V(s_t; θ))² ]  (eq. 10, 11)
    g ← 0.99 g + 0.01 ∇L²,    θ ← θ - α ∇L / √(g + ε),    α = 0.0007 n_e (1 - N / N_max)

    python paac.py --n-envs 32                                      # Pong from pixels
    python paac.py --env-id CartPole-v1 --total-steps 200_000       # half a minute
    python paac.py --resume runs/...                                # go on after an interruption
    python paac.py --evaluate runs/... --record                     # 30 episodes and a GIF

Where the paper and its released code (github.com/Alfredvc/paac) differ or are silent, this file reads:
- the loss is a sum over t_max (the code's mean times 5), so that α = 0.0007 n_e is A3C's step for each environment;
- the value loss has the code's coefficient 0.25; eq. (11) has 1;
- the return is cut at every step where an episode ends (the code), not only at the last one (Alg. 1);
- RMSProp has ε inside the root and starts from g = 1, as TensorFlow's, which the code used;
- α falls to zero over N_max (the code; the paper does not say);
- N_max, β and the clipping threshold are the paper's with `--preset paper`, the code's with `--preset code`.
Departures: a time limit does not cut the return, it bootstraps from V of the final observation; games start with
0 to 30 no-ops (the code), the paper says 1 to 30. The paper has no vectors and no continuous actions: the MLP, its
running normalisation, the Gaussian and the presets `vector` and `continuous` are ours.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # OpenMP's threads would go on spinning between forward passes, on the environments' cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import ctypes
import dataclasses
import io
import itertools
import json
import math
import re
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common.atari import is_atari
from common.vec_env import WorkerError, find_spec, make_env, make_vec_env

SCRIPT = "paac"
LOG_INTERVAL = 100  # updates between two points in TensorBoard

# Which constants hold for which kind of task; a flag overrides any of them.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {  # sec. 5.1, Atari
        "total_steps": 115_000_000,  # N_max
        "n_envs": 32,  # n_e
        "t_max": 5,
        "learning_rate_per_env": 0.0007,  # α = 0.0007 n_e
        "gamma": 0.99,
        "entropy_coef": 0.01,  # β
        "value_coef": 0.25,
        "max_grad_norm": 40.0,
        "rms_decay": 0.99,
        "rms_eps": 0.1,  # ε
        "clip_rewards": True,  # to [-1, 1], for learning only
        "reward_scale": 1.0,
    }
}
# What the paper's released code sets otherwise.
PRESETS["code"] = PRESETS["paper"] | {"total_steps": 80_000_000, "entropy_coef": 0.02, "max_grad_norm": 3.0}
# Vectors, ours: the paper's, but for rewards of any size and tasks that are learned in minutes.
PRESETS["vector"] = PRESETS["paper"] | {
    "total_steps": 1_000_000,
    "n_envs": 16,
    "clip_rewards": False,
    "reward_scale": 0.1,
}
# Box actions: the weight of a Gaussian's entropy is that of Mnih et al. 2016, sec. 9; γ found on Pendulum.
PRESETS["continuous"] = PRESETS["vector"] | {"entropy_coef": 1e-4, "gamma": 0.97}


@dataclass
class Args:
    env_id: str = "PongNoFrameskip-v4"
    """any Gymnasium id, `module:Id` included"""
    env_kwargs: str = "{}"
    """JSON: keyword arguments for the environment"""
    preset: Literal["auto", "paper", "code", "vector", "continuous"] = "auto"
    """constants of the algorithm, see PRESETS; auto: continuous for Box actions, else paper for images or vector"""
    total_steps: int | None = None
    """N_max: agent steps of all environments together; 1 = 1 action = 4 frames on Atari (default: preset)"""
    seed: int = 1
    """of environments, initial parameters and action sampling"""
    run_dir: str | None = None
    """must not exist yet; default: runs/<env-id>__paac__<seed>__<time>"""
    checkpoint_interval: int = 250_000
    """agent steps between checkpoints"""
    resume: str | None = None
    """run directory to go on from, with new episodes; flags given beside it override the run's own"""
    evaluate: str | None = None
    """run directory to evaluate; trains nothing"""
    eval_episodes: int = 30
    """episodes to evaluate when training ends, all in parallel; 0: none"""
    record: bool = False
    """write agent.gif of one more episode into the run directory"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network is; auto: CUDA where there is any"""

    n_envs: int | None = None
    """n_e: environments (default: preset)"""
    n_workers: int | None = None
    """n_w: threads (Atari) or processes (the rest) that step them; 0: no processes; default: 8 or the cores"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    t_max: int | None = None
    """rollout length in steps (default: preset)"""
    learning_rate: float | None = None
    """initial α (default: preset, times n_e)"""
    gamma: float | None = None
    """γ, discount per step (default: preset)"""
    entropy_coef: float | None = None
    """β, weight of the entropy (default: preset)"""
    value_coef: float | None = None
    """weight of the squared value error (default: preset)"""
    max_grad_norm: float | None = None
    """threshold of the global gradient norm (default: preset)"""
    rms_decay: float | None = None
    """decay of RMSProp's mean square per update (default: preset)"""
    rms_eps: float | None = None
    """ε inside RMSProp's root (default: preset)"""
    clip_rewards: bool | None = None
    """learn from rewards clipped to [-1, 1] (default: preset)"""
    reward_scale: float | None = None
    """learn from rewards times this (default: preset)"""


# ---------------------------------------------------------------------------------------------------- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


def mlp(n_inputs: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs))


class RunningNorm(nn.Module):
    """(x - mean) / std over every vector seen so far, clipped to ±10: for vectors what /255 is for images.

    The statistics change only in `update` and belong to the state that checkpoints save.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
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
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Images: one trunk, two linear heads. Vectors: normalised, then two MLPs.

    Initial weights are PyTorch's own, U(±1/√fan_in): the same as Torch7's, which PAAC and A3C used.
    """

    def __init__(self, observation_space: spaces.Box, action_space: gym.Space, arch: str) -> None:
        super().__init__()
        self.discrete = isinstance(action_space, spaces.Discrete)
        n_outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
            layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
            layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
        elif arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
        if arch == "mlp":
            n_inputs = observation_space.shape[0]
            self.trunk, self.policy, self.value = RunningNorm(n_inputs), mlp(n_inputs, n_outputs), mlp(n_inputs, 1)
        else:
            self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # 1.6 times faster on CPU
            self.policy = nn.Linear(layers[-2].out_features, n_outputs)
            self.value = nn.Linear(layers[-2].out_features, 1)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 4, 84, 84) uint8 or (n, d) float → logits (n, n_actions) or means (n, action_dim), values (n,)."""
        if obs.dtype == torch.uint8:
            obs = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
        hidden = self.trunk(obs)
        return self.policy(hidden), self.value(hidden).squeeze(-1)

    def distribution(self, outputs: Tensor) -> torch.distributions.Distribution:
        """π for the first output of `forward`, of any leading shape."""
        if self.discrete:
            return torch.distributions.Categorical(logits=outputs, validate_args=False)
        normal = torch.distributions.Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)


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
            params = [p for p in group["params"] if p.grad is not None]
            grads, squares = [p.grad for p in params], [self.state[p]["square"] for p in params]
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, grads, grads, 1 - group["decay"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            torch._foreach_addcdiv_(params, grads, roots, -group["lr"])


def to_env(actions: Tensor, space: gym.Space) -> np.ndarray:
    """Sampled actions as the environment takes them: a Gaussian's [-1, 1] is stretched to the bounds of the space."""
    actions = actions.cpu().numpy()
    if isinstance(space, spaces.Discrete):
        return actions
    actions = actions.reshape(-1, *space.shape)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    actions = np.where(bounded, low + (actions.clip(-1, 1) + 1) / 2 * (high - low), actions)
    return actions.clip(space.low, space.high).astype(space.dtype)


# --------------------------------------------------------------------------------------------------- training


def train(args: Args, checkpoint: dict | None = None) -> int:
    """Algorithm 1, from the start or from a checkpoint. Returns the exit status.

    Raises: WorkerError: an environment failed. FloatingPointError: the loss or its gradient is not finite.
    """
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    envs = make_vec_env(args.env_id, args.n_envs, args.n_workers, json.loads(args.env_kwargs))
    model = ActorCritic(envs.single_observation_space, envs.single_action_space, args.arch).to(device)
    optimizer = RMSProp(model.parameters(), args.learning_rate, args.rms_decay, args.rms_eps, initial_square=1.0)
    run = Run(args, model, optimizer, checkpoint)
    step = run.step
    shape = (args.t_max, args.n_envs)
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    obs = to_device(envs.reset(seed=args.seed + step)[0], device)
    while step < args.total_steps and not run.stopped:  # l. 3, 20
        observations, outputs, values, actions = [], [], [], []
        final_values = torch.zeros(shape, device=device)
        for t in range(args.t_max):  # l. 4
            # θ does not change within a rollout: this forward pass is kept and serves the backward pass as well
            output, value = model(obs)  # l. 6
            action = model.distribution(output.detach()).sample()  # l. 5
            observations.append(obs)
            outputs.append(output)
            values.append(value)
            actions.append(action)
            obs, reward, terminated, truncated, info = envs.step(to_env(action, envs.single_action_space))  # l. 7-10
            obs = to_device(obs, device)
            rewards[t] = np.clip(reward, -1, 1) if args.clip_rewards else reward * args.reward_scale
            dones[t] = terminated | truncated
            cut = truncated & ~terminated
            if cut.any():  # a time limit ends the episode but not the return
                with torch.no_grad():
                    final_obs = to_device(np.stack(info["final_obs"][cut]), device)
                    final_values[t, to_device(cut, device)] = model(final_obs)[1]
            run.count_episodes(reward, dones[t])
        with torch.no_grad():
            bootstrap = model(obs)[1]  # l. 12
        R = n_step_returns(to_device(rewards, device), to_device(dones, device), final_values, bootstrap, args.gamma)
        policy = model.distribution(torch.stack(outputs))
        log_probs, entropies = policy.log_prob(torch.stack(actions)), policy.entropy()
        loss, policy_loss, value_loss = paac_loss(
            log_probs, entropies, torch.stack(values), R, args.entropy_coef, args.value_coef
        )
        optimizer.zero_grad()
        loss.backward()  # l. 16, 17
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(f"step {step}: the loss is {loss.item()}, its gradient's norm {grad_norm.item()}")
        step += args.n_envs * args.t_max  # l. 19
        optimizer.param_groups[0]["lr"] = linear_decay(args.learning_rate, step, args.total_steps)
        optimizer.step()  # l. 18
        if isinstance(model.trunk, RunningNorm):
            model.trunk.update(torch.stack(observations))
        run.count_update(
            step,
            {
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropies.mean(),
                "losses/grad_norm": grad_norm,
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
            },
        )
    envs.close()
    return run.finish()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


# ------------------------------------------------------------------------------- run directory and evaluation


class UsageError(Exception):
    """Wrong arguments: one line for the user, exit status 2."""


class Run:
    """What surrounds the algorithm: run directory, TensorBoard, checkpoints, summary, progress and signals."""

    def __init__(self, args: Any, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, which no worker process needs to spend

        self.args, self.model, self.optimizer, self.dir = args, model, optimizer, Path(args.run_dir)
        self.step = self.updates = self.episodes = 0
        self.wall_seconds, self.returns = 0.0, deque(maxlen=100)  # of the last 100 episodes
        if checkpoint:
            load_model(model, checkpoint)
            groups = optimizer.state_dict()["param_groups"]  # the flags' constants, not the checkpoint's
            optimizer.load_state_dict(checkpoint["optimizer"] | {"param_groups": groups})
            torch.set_rng_state(checkpoint["torch_rng"])
            if checkpoint["cuda_rng"] is not None and args.device == "cuda":
                torch.cuda.set_rng_state(checkpoint["cuda_rng"])
            self.step, self.updates, self.episodes = (checkpoint[key] for key in ("step", "updates", "episodes"))
            self.wall_seconds = checkpoint["wall_seconds"]
            self.returns.extend(checkpoint["returns"])
        self.finished: list[tuple[float, int]] = []  # (return, length) of episodes since the last point
        self.running_return, self.running_length = np.zeros(args.n_envs), np.zeros(args.n_envs, np.int64)
        self.first_step = self.saved_step = self.logged_step = self.printed_step = self.step
        self.started = self.logged_time = self.printed_time = time.monotonic()
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        write_json(self.dir / "args.json", dataclasses.asdict(args))
        self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1 if checkpoint else None)
        self.bar = tqdm(
            total=args.total_steps,
            initial=self.step,
            unit="step",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number  # training stops after this update and saves; a second signal ends it at once
        signal.signal(number, signal.SIG_DFL)

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    def count_episodes(self, rewards: np.ndarray, dones: np.ndarray) -> None:
        """Take note of one step of all environments: raw rewards, and where an episode ended."""
        self.running_return += rewards
        self.running_length += 1
        for i in np.flatnonzero(dones):
            self.finished.append((float(self.running_return[i]), int(self.running_length[i])))
            self.returns.append(self.finished[-1][0])
            self.episodes += 1
            self.running_return[i] = self.running_length[i] = 0

    def count_update(self, step: int, scalars: dict[str, Any]) -> None:
        """Take note of an update; now and then show the progress, log the scalars and write a checkpoint."""
        self.bar.update(step - self.step)
        self.step, self.updates = step, self.updates + 1
        if self.updates % LOG_INTERVAL == 0 or step >= self.args.total_steps:
            now = time.monotonic()
            scalars["charts/SPS"] = (step - self.logged_step) / (now - self.logged_time)
            self.logged_step, self.logged_time = step, now
            if self.finished:
                scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(self.finished, axis=0)
                self.finished.clear()
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value.item() if isinstance(value, Tensor) else value, step)
            mean = f"{np.mean(self.returns):.2f}" if self.returns else "-"
            self.bar.set_postfix_str(f"return {mean}", refresh=False)
            if self.bar.disable and now - self.printed_time > 30:
                speed = (step - self.printed_step) / (now - self.printed_time)
                left = tqdm.format_interval((self.args.total_steps - step) / speed)
                print(
                    f"step {step:,} of {self.args.total_steps:,}, {speed:,.0f} steps/s, return {mean}, {left} left",
                    flush=True,
                )
                self.printed_step, self.printed_time = step, now
        if step - self.saved_step >= self.args.checkpoint_interval:
            self.save()

    def save(self) -> None:
        """Write checkpoint.pt beside the old one and rename it, so that a kill at any instant leaves a whole one."""
        state = {
            "script": SCRIPT,
            "args": dataclasses.asdict(self.args),
            "step": self.step,
            "updates": self.updates,
            "episodes": self.episodes,
            "returns": list(self.returns),
            "wall_seconds": self.wall_seconds + time.monotonic() - self.started,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.args.device == "cuda" else None,
        }
        temporary = self.dir / "checkpoint.pt.tmp"
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.dir / "checkpoint.pt")
        self.saved_step = self.step

    def finish(self) -> int:
        """Save, evaluate, write summary.json and return the exit status: 0, or 128 + the signal that stopped it."""
        self.bar.close()
        self.save()
        seconds, result = time.monotonic() - self.started, None
        if not self.stopped and self.args.eval_episodes:
            result = evaluate(self.args, self.model, lambda: self.stopped)
        if result is not None:
            self.writer.add_scalar("eval/return_mean", result["mean"], self.step)
        self.writer.close()
        summary = {"script": SCRIPT, "env_id": self.args.env_id, "seed": self.args.seed, "steps": self.step}
        summary |= {"episodes": self.episodes, "wall_seconds": round(self.wall_seconds + seconds, 1)}
        summary |= {"steps_per_second": round((self.step - self.first_step) / seconds, 1)}
        summary |= {"return_last_100": float(np.mean(self.returns)) if self.returns else None}
        write_json(
            self.dir / "summary.json",
            summary | {"status": "interrupted" if self.stopped else "completed", "eval": result},
        )
        if self.args.record and not self.stopped:
            record(self.args, self.model, lambda: self.stopped)
        return 128 + self.signal if self.stopped else 0


def write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def load_checkpoint(flag: str, run_dir: str) -> dict:
    """The checkpoint of a run directory of this script; runs no code that the file may hold.

    Raises:
        UsageError: there is none, it is damaged, or another script wrote it.
    """
    path = Path(run_dir) / "checkpoint.pt"
    if not path.is_file():
        raise UsageError(f"{flag} {run_dir}: it holds no checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"script", "args", "step", "model", "optimizer", "torch_rng"} - checkpoint.keys()
    except Exception as error:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt is damaged or not a checkpoint") from error
    if checkpoint.get("script", SCRIPT) != SCRIPT:
        raise UsageError(
            f"{flag} {run_dir}: checkpoint.pt was written by {checkpoint['script']}.py, not by {SCRIPT}.py"
        )
    if missing:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt is not whole, it lacks {', '.join(sorted(missing))}")
    return checkpoint


def load_model(model: nn.Module, checkpoint: dict) -> None:
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise UsageError("the checkpoint holds another network: --arch or the environment has changed") from error


@torch.no_grad()
def evaluate(args: Any, model: nn.Module, stopped: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """Play `eval_episodes` episodes in parallel, one per environment, with sampled actions; their raw returns.

    Starts are seeded apart from those of training. None when stopped.
    """
    n, device = args.eval_episodes, torch.device(args.device)
    envs = make_vec_env(args.env_id, n, min(args.n_workers, n), json.loads(args.env_kwargs))
    obs, returns, running = envs.reset(seed=args.seed + 1_000_000_000)[0], np.zeros(n), np.ones(n, np.bool_)
    while running.any() and not stopped():
        action = model.distribution(model(to_device(obs, device))[0]).sample()
        obs, reward, terminated, truncated, _ = envs.step(to_env(action, envs.single_action_space))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    if running.any():
        return None
    result = {"episodes": n} | {name: float(getattr(returns, name)()) for name in ("mean", "std", "min", "max")}
    print("{episodes} episodes: {mean:.2f} ± {std:.2f}, from {min:.2f} to {max:.2f}".format(**result), flush=True)
    return result


@torch.no_grad()
def record(args: Any, model: nn.Module, stopped: Callable[[], bool] = lambda: False, max_frames: int = 3000) -> None:
    """Play one episode with sampled actions and write its first frames as agent.gif into the run directory."""
    env = make_env(find_spec(args.env_id), json.loads(args.env_kwargs), render_mode="rgb_array")
    obs, done, frames, score = env.reset(seed=args.seed + 1_000_000_000)[0], False, [], 0.0
    while not done and not stopped():
        if len(frames) < max_frames:
            frames.append(Image.fromarray(env.render()))
        action = model.distribution(model(to_device(obs[None], torch.device(args.device)))[0]).sample()
        obs, reward, terminated, truncated, _ = env.step(to_env(action, env.action_space)[0])
        score, done = score + float(reward), terminated or truncated
    fps = 15 if is_atari(env.spec) else env.metadata.get("render_fps", 30)  # an Atari step is 4 frames of 60 a second
    env.close()
    path = Path(args.run_dir) / "agent.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
    print(f"{path}: an episode of return {score:.2f}", flush=True)


def evaluate_run(args: Args, checkpoint: dict) -> int:
    """--evaluate: the result goes into the run's summary.json."""
    torch.manual_seed(args.seed)
    env = make_env(find_spec(args.env_id), json.loads(args.env_kwargs))
    model = ActorCritic(env.observation_space, env.action_space, args.arch).to(args.device)
    env.close()
    load_model(model, checkpoint)
    path = Path(args.run_dir) / "summary.json"
    if args.eval_episodes:
        result = evaluate(args, model)
        summary = json.loads(path.read_text()) if path.exists() else {"script": SCRIPT, "env_id": args.env_id}
        write_json(path, summary | {"eval": result})
    if args.record:
        record(args, model)
    return 0


# ------------------------------------------------------------------------------------------------------- main


def read_flags(argv: list[str] | None, default: Args) -> Args:
    """The command line by tyro; the first sentence of its box where it refuses one."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(Args, args=argv, default=default, description=__doc__)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        lines = [line.strip("│ ") for line in output.getvalue().splitlines()[1:]]
        raise UsageError(" ".join(itertools.takewhile(lambda line: line.strip("─"), lines))) from None


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises:
        UsageError: an argument that cannot work. Nothing has been started or written by then.
    """
    args, checkpoint = read_flags(argv, Args()), None
    if args.resume and args.evaluate:
        raise UsageError("--resume and --evaluate exclude each other")
    if folder := args.resume or args.evaluate:
        flag = "--resume" if args.resume else "--evaluate"
        checkpoint = load_checkpoint(flag, folder)
        own = {"run_dir": folder, "record": False, "resume": None, "evaluate": None, "device": "auto"}
        try:
            past = Args(**checkpoint["args"] | own)
        except TypeError as error:
            raise UsageError(f"{flag} {folder}: it is from another version of {SCRIPT}.py: {error}") from error
        args = read_flags(argv, past)  # flags that are given override the run's own
        for name in ("env_id", "run_dir", "preset", "arch"):
            if (value := getattr(args, name)) != (its := getattr(past, name)):
                raise UsageError(f"--{name.replace('_', '-')} {value}: {flag} {folder} has {its}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is available")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        env_kwargs = json.loads(args.env_kwargs)
    except ValueError:
        env_kwargs = None
    if not isinstance(env_kwargs, dict):
        raise UsageError(f"--env-kwargs {args.env_kwargs}: a JSON object is needed")
    try:
        env = make_env(find_spec(args.env_id), env_kwargs, "rgb_array" if args.record else None)
    except Exception as error:
        raise UsageError(f"--env-id {args.env_id}: {error}") from error
    if args.record:
        try:
            env.reset()
            Image.fromarray(env.render())
        except Exception as error:
            raise UsageError(
                f"--record: {args.env_id} cannot be drawn here: {error or type(error).__name__}"
            ) from error
    env.close()

    images = len(env.observation_space.shape) == 3
    if args.preset == "auto":
        continuous = isinstance(env.action_space, spaces.Box)
        args.preset = "continuous" if continuous else "paper" if images else "vector"
    if args.arch == "auto":
        args.arch = "nips" if images else "mlp"
    if (args.arch == "mlp") == images:
        raise UsageError(f"--arch {args.arch} does not fit the observations of {args.env_id}: {env.observation_space}")
    for name, value in PRESETS[args.preset].items():
        if hasattr(args, name) and getattr(args, name) is None:
            setattr(args, name, value)
    if args.learning_rate is None:
        args.learning_rate = PRESETS[args.preset]["learning_rate_per_env"] * args.n_envs
    if args.n_workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        args.n_workers = max(0, min(8, cores, args.n_envs))
    for names, low, high in (
        ("total_steps checkpoint_interval n_envs t_max", 1, math.inf),
        ("eval_episodes learning_rate entropy_coef value_coef max_grad_norm rms_eps reward_scale", 0, math.inf),
        ("gamma rms_decay", 0, 1),
        ("seed", 0, 1_000_000_000),
        ("n_workers", 0, args.n_envs),
    ):
        for name in names.split():
            if not (math.isfinite(getattr(args, name)) and low <= getattr(args, name) <= high):
                raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must lie in [{low}, {high}]")
    if checkpoint is None:
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        args.run_dir = args.run_dir or str(Path("runs") / re.sub(r"[^\w.-]", "-", name))
        try:
            Path(args.run_dir).mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--run-dir {args.run_dir}: {error.strerror}") from error
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc would return freed memory to the system at each step, and page it in again
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 28)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with the arguments is said in one line
            args, checkpoint = parse(argv)
        return evaluate_run(args, checkpoint) if args.evaluate else train(args, checkpoint)
    except (UsageError, WorkerError, FloatingPointError) as error:
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # before training has begun, or while --evaluate plays
        return 130
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
