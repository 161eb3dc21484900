"""Asynchronous one-step Sarsa (Mnih et al. 2016, sec. 4).

Hogwild: every process acts ε-greedily in its own environment, by the shared parameters θ as they
are at that moment; it has no snapshot. After every 5 steps, and where an episode ends, it takes the
gradient of these steps' squared errors at the current θ and applies it to θ without a lock.
Only the target differs from async_q.py: a' is the action that the process takes next.

    y = r + γ Q(s', a'; θ⁻),    y = r after a termination
    L = Σ (y - Q(s, a; θ))²    over I_AsyncUpdate = 5 steps of the process
    d = ∇L, scaled to a norm of at most 40
    g ← 0.99 g + 0.01 d²,    θ ← θ - η d / √(g + ε),    η = 0.0007 (1 - T / T_max)     (eq. S2, S3)
    θ⁻ ← θ    whenever T passes a multiple of I_target

RMSProp's g is shared as well.

    python sarsa.py                                                 # Pong from pixels
    python sarsa.py --env-id CartPole-v1 --total-steps 300_000      # a minute
    python sarsa.py --resume runs/...                               # go on after an interruption
    python sarsa.py --evaluate runs/... --record                    # 30 episodes and a GIF

Where the sources differ or are silent:
- I_target = 40,000 and the 4 million frames over which ε falls are agent steps of all processes.
  If the paper counts frames of the game, type `--target-interval 10000 --epsilon-steps 1000000`.
- A process draws its final ε once, from {0.1, 0.01, 0.5} with probabilities {0.4, 0.3, 0.3}.
- The network is the small one of the supplement (sec. 8); `--arch nature` is that of Mnih et al.
  2015. On Atari, rewards are clipped to [-1, 1]; public reproductions differ.
- The error is squared as it is, without Huber loss or clipping, and summed over the steps.
- η = 0.0007, ε = 0.1 inside RMSProp's root and the clipping threshold of 40 are not in the paper.
  They are A3C's, as reproductions report them from its author. g starts from 0, with `--preset
  short` from 1.
- The count of 5 steps runs on where an episode ends, as in Algorithm 1.
- Evaluated episodes are played with ε = 0.05 on images, as in ChainerRL (0.01 with `--preset
  short`), and 0 on vectors.

Departures:
- The gradients of the 5 steps are taken together, on θ as it is at the update, not each on the θ of
  its step. With one process, which does not change θ in between, this is the same.
- A time limit does not cut the return: it bootstraps from the final observation, with an a' that is
  drawn but never taken.
- Atari as in common/atari.py: losing a life does not end an episode, 108,000 frames do.
- One process a core, where the paper has 16.
- The MLP, the normalisation of observations and of rewards (to returns of size 10, see
  common/norm.py), `--orthogonal-init` and all presets but `atari` are ours.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import multiprocessing as mp

from common.evaluate import evaluate
from common.norm import RewardScale, make_norm
from common.processes import check, n_cores, start, stop
from common.run import Run, RunArgs, load_checkpoint, parse_args, usage_error
from common.vec_env import env_seed, make_vec_env

# What differs from Args, which has the constants for Atari.
PRESETS = {
    "atari": {},
    # Atari on few cores, ours.
    "short": {
        "total_steps": 8_000_000,
        "orthogonal_init": True,
        "update_interval": 20,
        "target_interval": 10_000,
        "epsilon_finals": (0.1, 0.02),
        "epsilon_probs": (0.5, 0.5),
        "epsilon_steps": 1_000_000,
        "rms_eps": 1e-5,
        "rms_initial_square": 1.0,
        "eval_epsilon": 0.01,
    },
    # Vectors, ours: tasks that are learned in minutes.
    "vector": {
        "total_steps": 1_000_000,
        "epsilon_steps": None,
        "target_interval": 200,
        "learning_rate": 2e-3,
        "rms_eps": 1e-3,
        "eval_epsilon": 0.0,
        # with (0.1, 0.01, 0.5), both of two processes may draw 0.5 and not learn
        "epsilon_finals": (0.2,),
        "epsilon_probs": (1.0,),
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "short", "vector"] = "auto"
    """constants, see PRESETS (short: images); auto: atari for images, else vector"""
    total_steps: int = 80_000_000
    """T_max: agent steps of all processes; 1 step = 1 action = 4 frames on Atari"""

    n_processes: int | None = None
    """actor-learners; None: one per core"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    orthogonal_init: bool = False
    """initial weights are orthogonal, gain √2, in the last layer 0.01, biases 0; else
    U(±1/√fan_in)"""
    update_interval: int = 5
    """I_AsyncUpdate: a process updates after so many steps of its own, and where an episode ends"""
    target_interval: int = 40_000
    """I_target, global agent steps between two copies of θ to θ⁻"""
    epsilon_finals: tuple[float, ...] = (0.1, 0.01, 0.5)
    """each process draws its final ε from these"""
    epsilon_probs: tuple[float, ...] = (0.4, 0.3, 0.3)
    """probabilities of epsilon_finals"""
    epsilon_steps: int | None = 4_000_000
    """global agent steps over which ε falls from 1 to its final value; None: half of all"""
    eval_epsilon: float = 0.05
    """ε during evaluation"""
    learning_rate: float = 7e-4
    """initial η"""
    gamma: float = 0.99
    """γ, discount per step"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm"""
    rms_decay: float = 0.99
    """decay of RMSProp's mean square g per update"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""
    rms_initial_square: float = 0.0
    """g at the start; from 0, with a small rms_eps, the first steps are up to 10 times as large"""


# --- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class QNetwork(nn.Module):
    """Q(s, ·; θ). Initial weights: U(±1/√fan_in), PyTorch's own and Torch7's, or orthogonal."""

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        arch: str,
        orthogonal_init: bool = False,
    ) -> None:
        super().__init__()
        self.norm = make_norm(observation_space) if arch == "mlp" else None
        if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
            layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
            layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
        elif arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
        else:  # (n, d) → 200
            layers = [nn.Linear(observation_space.shape[0], 200), nn.Tanh()]
        layers.append(nn.Linear(layers[-2].out_features, int(action_space.n)))
        self.layers = nn.Sequential(*layers)
        if orthogonal_init:
            for layer in layers:
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    nn.init.orthogonal_(layer.weight, 0.01 if layer is layers[-1] else math.sqrt(2))
                    nn.init.zeros_(layer.bias)
        self.layers.to(memory_format=torch.channels_last)  # faster; orthogonal_ refuses it

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 4, 84, 84) uint8 or (n, d) float → (n, n_actions)."""
        if obs.dtype == torch.uint8:
            obs = obs.to(torch.float32, memory_format=torch.channels_last).div_(255)
        elif self.norm:
            obs = self.norm(obs)
        return self.layers(obs)


# --- mathematics


def sarsa_targets(
    rewards: Tensor, terminated: Tensor, next_q_values: Tensor, gamma: float
) -> Tensor:
    """y = r + γ Q(s', a'; θ⁻), or r after a termination (sec. 4), (t,).

    Args: (t,), (t,) bool, and (t,) Q-values of the actions a' drawn for s'.
    """
    return rewards + gamma * next_q_values * ~terminated


def draw_epsilon_final(args: Args, index: int) -> float:
    """The ε that process `index` ends with; the same after a resume."""
    rng = np.random.default_rng((args.seed, index))
    return float(rng.choice(args.epsilon_finals, p=args.epsilon_probs))


def epsilon_at(final: float, step: int, epsilon_steps: int) -> float:
    """ε at global step T: a line from 1 to its final value over `epsilon_steps`, then constant."""
    return final + linear_decay(1 - final, step, epsilon_steps)


def epsilon_greedy(q_values: Tensor, epsilon: float | Tensor) -> Tensor:
    """The best action, or with probability ε any: (n, n_actions) and a number or (n,) → (n,)."""
    random = torch.randint(q_values.shape[1], (len(q_values),))
    return torch.where(torch.rand(len(q_values)) < epsilon, random, q_values.argmax(1))


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


def actor_learner(
    index: int,
    args: Args,
    first_step: int,
    model: QNetwork,
    target_model: QNetwork,
    optimizer: RMSProp,
    reward_scale: RewardScale,
    counts: Tensor,
    target_step: Tensor,
    ending: Tensor,
    parent: Any,
) -> None:
    """Algorithm 1 with Sarsa's target, one process of it, to the end of training.

    Args:
        first_step: T when the processes were started.
        model, target_model, optimizer, reward_scale: θ, θ⁻, RMSProp's g and the size of rewards,
            shared by all processes.
        counts: (n_processes,) int64, shared: steps of each process, whose sum is T. counts[0]
            starts at the steps of earlier parts of the run.
        target_step: (1,) int64, shared: T when θ⁻ was copied last, or when the processes started.
        ending: (1,) bool, shared: all processes are to end.
        parent: connection for reports of episodes and losses.
    """
    counts, target_step, ending = counts.numpy(), target_step.numpy(), ending.numpy()
    parameters = list(model.parameters())
    state, target_state = (list(m.state_dict().values()) for m in (model, target_model))
    epsilon_final = draw_epsilon_final(args, index)
    torch.manual_seed(env_seed(args.seed, first_step, index))
    envs = make_vec_env(args.env_id, 1, 0, args.env_kwargs)  # one environment: n = 1 from here on
    with contextlib.closing(envs):
        obs = torch.from_numpy(envs.reset(seed=env_seed(args.seed, first_step, index, 1))[0])
        T = first_step
        t = episode_length = 0
        episode_return = reported = 0.0
        done = True
        while T < args.total_steps and not ending[0]:
            if done:
                epsilon = epsilon_at(epsilon_final, T, args.epsilon_steps)
                with torch.no_grad():
                    action = epsilon_greedy(model(obs), epsilon)  # the episode's first
            # since the last update
            observations, actions, rewards, next_q_values, ends = [], [], [], [], []
            while True:
                observations.append(obs)
                actions.append(action)
                next_obs, reward, terminated, truncated, info = envs.step(action.numpy())
                obs = torch.from_numpy(next_obs)
                done = bool(terminated[0] or truncated[0])
                last_obs = torch.from_numpy(info["final_obs"]) if done else obs
                epsilon = epsilon_at(epsilon_final, T, args.epsilon_steps)
                with torch.no_grad():
                    action = epsilon_greedy(model(last_obs), epsilon)  # a', by θ as it is now
                    next_q_values.append(target_model(last_obs)[0, action])
                rewards.append(float(reward[0]))
                ends.append(bool(terminated[0]))
                reward_scale.see(reward, terminated)
                t += 1
                counts[index] += 1  # T ← T + 1
                T = int(counts.sum())
                episode_return += reward[0]
                episode_length += 1
                if T // args.target_interval > target_step[0] // args.target_interval:
                    target_step[0] = T
                    sync(target_state, state)  # θ⁻ ← θ
                over = T >= args.total_steps or ending[0]
                if t % args.update_interval == 0 or done or over:
                    break
            reward_scale.update()
            r, terminations = reward_scale(torch.tensor(rewards)), torch.tensor(ends)
            targets = sarsa_targets(r, terminations, torch.cat(next_q_values), args.gamma)
            # Σ (y - Q(s, a; θ))² over the steps since the last update, on θ as it is now
            q_values = model(torch.cat(observations)).gather(1, torch.stack(actions)).squeeze(1)
            squares = (targets - q_values).square()
            model.zero_grad()
            squares.sum().backward()  # dθ, into gradients that only this process has
            grad_norm = nn.utils.clip_grad_norm_(
                parameters, args.max_grad_norm, error_if_nonfinite=True
            )
            lr = linear_decay(args.learning_rate, T, args.total_steps)
            optimizer.step(lr)  # asynchronous update of θ
            if model.norm:
                model.norm.update(torch.cat(observations))
            if done:
                parent.send((episode_return, episode_length))
                episode_return = 0.0
                episode_length = 0
            if time.monotonic() - reported > 1:
                losses = {
                    "td_loss": squares.mean().item(),
                    "q_values": q_values.mean().item(),
                    "grad_norm": grad_norm.item(),
                    "epsilon": epsilon,
                    "learning_rate": lr,
                }
                parent.send(losses)
                reported = time.monotonic()


def train(
    args: Args,
    run: Run,
    model: QNetwork,
    target_model: QNetwork,
    optimizer: RMSProp,
    reward_scale: RewardScale,
) -> None:
    """The parent: starts the actor-learners and follows them to the end; it trains nothing.

    Without locks, a checkpoint may hold half of an update; so may what a process acts on.
    """
    counts = torch.zeros(args.n_processes, dtype=torch.int64)
    counts[0] = run.step
    target_step = torch.tensor([run.step])
    ending = torch.tensor([False])
    # Their tensors move into shared memory when the first process gets them.
    shared = model, target_model, optimizer, reward_scale, counts, target_step, ending
    processes, connections, losses = [], [], {}
    try:
        for i in range(args.n_processes):
            ours, theirs = mp.Pipe(duplex=False)
            connections.append(ours)
            name = f"actor-learner {i}"
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


# --- main


def pick_preset(args: Args, observations: gym.Space, actions: gym.Space) -> str:
    return "atari" if len(observations.shape) == 3 else "vector"


def main(argv: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate alone. Returns the exit status."""
    args, observations, actions = parse_args("sarsa", argv, Args(), __doc__, PRESETS, pick_preset)
    if not isinstance(actions, spaces.Discrete):
        usage_error(f"--env-id {args.env_id}: Discrete actions are needed, it has {actions}")
    if args.arch == "auto":
        args.arch = "nips" if len(observations.shape) == 3 else "mlp"
    if args.n_processes is None:
        args.n_processes = n_cores()
    if args.epsilon_steps is None:
        args.epsilon_steps = args.total_steps // 2

    torch.manual_seed(args.seed)
    model = QNetwork(observations, actions, args.arch, args.orthogonal_init)  # θ
    target_model = copy.deepcopy(model)  # θ⁻
    optimizer = RMSProp(model.parameters(), args.rms_decay, args.rms_eps, args.rms_initial_square)
    reward_scale = RewardScale(args, size=10.0)

    if args.evaluate:
        load_checkpoint("sarsa", args.run_dir, model=model)
    else:
        parts = {"model": model, "target_model": target_model, "optimizer": optimizer}
        with Run("sarsa", args, **parts, reward_scale=reward_scale) as run:
            train(args, run, model, target_model, optimizer, reward_scale)
        if not run.complete:
            return 128 + run.signal

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        return epsilon_greedy(model(torch.from_numpy(obs)), args.eval_epsilon).numpy()

    evaluate(args, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
