"""A3C: asynchronous advantage actor-critic (Mnih et al. 2016), feed-forward, LSTM and continuous.

Hogwild: every process plays its own environment with a snapshot θ′ of the shared parameters θ for up to t_max steps,
or to the end of the episode, and then applies its gradient to θ without a lock (Algorithm S3):

    R_i = r_i + γ R_{i+1},    R = 0 after the episode's last step, else V(s_t; θ′)
    L = Σ_i [ -log π(a_i|s_i; θ′) (R_i - v_i) - β H(π(s_i; θ′)) + 0.25 (R_i - V(s_i; θ′))² ]
    d = ∇L with v_i = V(s_i; θ′) held constant, scaled to a norm of at most 40;    α = 0.0007 (1 - T / T_max)
    g ← 0.99 g + 0.01 d²,    θ ← θ - α d / √(g + ε)          (eq. S2, S3: RMSProp, its g shared as well)

    python a3c.py                                                   # Pong from pixels
    python a3c.py --lstm                                            # with 256 LSTM cells
    python a3c.py --env-id CartPole-v1 --total-steps 300_000        # half a minute to two
    python a3c.py --env-id Pendulum-v1                              # continuous actions
    python a3c.py --resume runs/...                                 # go on after an interruption
    python a3c.py --evaluate runs/... --record                      # 30 episodes and a GIF

Where the sources differ or are silent, this file does the following:
- the network is the small one of the supplement (sec. 8); the main text has the larger one of Mnih et al. 2015 for
  its 57 games (`--arch nature`);
- t_max = 5 (supplement; the author wrote 20 to others), α = 0.0007, ε = 0.1 and a clipping threshold of 40 (the
  author by e-mail, as public reproductions report it); rewards are clipped to [-1, 1], of which reports differ;
- 0.25 for the critic, where the paper's formulas have 1: the author halved the critic's learning rate, and the
  reproductions have a coefficient, which under RMSProp and with a common trunk is not the same;
- the entropy bonus of sec. 4 is in the loss, which Algorithm S3 leaves out; all sums are sums, not means;
- g starts from 0; α falls to zero over T_max by the global step;
- the differential entropy of a Gaussian is the one that sec. 9 prints, of one dimension.

Departures: a time limit does not cut the return, it bootstraps from V of the final observation (sec. 9 learns from
whole episodes and never bootstraps: `--t-max` as long as an episode and `--no-bootstrap-limits` do that); its LSTM is
there with `--lstm` only, and pictures get the networks of sec. 8; a Gaussian's [-1, 1] is stretched to the bounds of
the actions, where they have some, and clipped there; 0.01 is added to its σ²; losing a life does not end an episode of
Atari, 108,000 frames do; 0 to 30 no-ops; one process a core, where the paper has 16: with its constants two learned
nothing of Pong in 3 million steps, with others they reached 15.8 in 10 million (README).
Vectors with Discrete actions are ours, and so are the presets but for `atari`, and β of `continuous`.
Each process seeds its random stream with (seed, T at its start, its index), after --resume and a replacement as well.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from common.evaluation import Policy, to_env
from common.flags import RunArgs, check_env, pick_arch
from common.hogwild import Team, Worker, hand_over, pick_n_processes, share, sync
from common.run import Run, make_run_dir, read_args, run_script
from common.vec_env import env_seed, make_vec_env

SCRIPT = "a3c"

# Which constants hold for which kind of task: what differs from Args, which has the Atari ones.
PRESETS: dict[str, dict[str, Any]] = {
    "atari": {},
    # Vectors, ours: rewards of any size, and tasks that are learned in minutes.
    "vector": {"total_steps": 1_000_000, "learning_rate": 7e-3, "clip_rewards": False, "reward_scale": 0.1},
}
# With --lstm: gradients through 20 steps, as the author used on Atari.
PRESETS["recurrent"] = PRESETS["vector"] | {"t_max": 20, "learning_rate": 2e-3}
# Box actions: β is that of sec. 9, the rest ours, found on Pendulum. Rewards are so small that β counts for something
# beside them, or the policy is certain too early; so are the gradients then, and ε has to be smaller still.
PRESETS["continuous"] = PRESETS["vector"] | {"entropy_coef": 1e-4, "t_max": 20, "learning_rate": 3e-4, "gamma": 0.95}
PRESETS["continuous"] |= {"value_coef": 1.0, "reward_scale": 0.002, "rms_eps": 4e-5}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "vector", "recurrent", "continuous"] = "auto"
    """constants of the algorithm, see PRESETS; auto: continuous for Box actions, atari for images, recurrent
    for the rest with --lstm, else vector"""
    total_steps: int = 80_000_000
    """T_max: agent steps of all processes together; 1 step = 1 action = 4 frames on Atari"""
    seed: int = 1
    """of environments, initial parameters and actions; several processes race, so that runs differ even so"""

    n_processes: int | None = None
    """actor-learners; None: one per core"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    lstm: bool = False
    """an LSTM after the last hidden layer: 256 cells for images, 128 for vectors"""
    t_max: int = 5
    """longest rollout, in steps; the end of an episode or of training ends it, too"""
    optimizer: Literal["shared-rmsprop", "rmsprop", "momentum-sgd"] = "shared-rmsprop"
    """the three optimisers of sec. 4; the statistics of the last two belong to each process"""
    learning_rate: float = 7e-4
    """initial α"""
    gamma: float = 0.99
    """γ, discount per step"""
    entropy_coef: float = 0.01
    """β, weight of the entropy"""
    value_coef: float = 0.25
    """weight of the squared value error"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm; 0 leaves no gradient"""
    rms_decay: float = 0.99
    """decay of RMSProp's mean square g per update, and of momentum SGD's mean gradient"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""
    bootstrap_limits: bool = True
    """a time limit does not cut the return"""
    clip_rewards: bool = True
    """learn from rewards clipped to [-1, 1]"""
    reward_scale: float = 1.0
    """learn from rewards times this, where they are not clipped"""


# ---------------------------------------------------------------------------------------------------- network

States = list[tuple[Tensor, Tensor] | None]  # (h, c) of each trunk, (n, cells) each


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class Trunk(nn.Module):
    """Observations → features: convolutions or one hidden layer, and an LSTM where it is asked for."""

    def __init__(self, observation_space: spaces.Box, arch: str, lstm: bool) -> None:
        super().__init__()
        if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
            layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
            layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
        elif arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
        else:  # sec. 9: (n, d) → 200
            layers = [nn.Linear(observation_space.shape[0], 200), nn.ReLU(inplace=True)]
        self.layers, self.size = nn.Sequential(*layers), layers[-2].out_features
        self.lstm = None
        if lstm:
            cells = 128 if arch == "mlp" else 256
            self.lstm, self.size = nn.LSTMCell(self.size, cells), cells

    def forward(self, obs: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(t, n, 4, 84, 84) uint8 or (t, n, d) float and (h, c) before them → (t, n, size) and (h, c) after them."""
        x = obs.flatten(0, 1)
        hidden = self.layers(x.float() / 255 if x.dtype == torch.uint8 else x).unflatten(0, obs.shape[:2])
        if self.lstm is None:
            return hidden, None
        outputs = []
        for x in hidden:
            state = self.lstm(x, state)  # None: zeros
            outputs.append(state[0])
        return torch.stack(outputs), state


class ActorCritic(nn.Module):
    """π(a|s; θ) and V(s; θ). Discrete actions: one trunk, two heads. Box actions: two networks (sec. 9).

    Initial weights are PyTorch's own, U(±1/√fan_in), as were Torch7's; an LSTM's are U(±1/√cells).
    """

    def __init__(self, observation_space: spaces.Box, action_space: gym.Space, arch: str, lstm: bool) -> None:
        super().__init__()
        self.action_space, self.discrete = action_space, isinstance(action_space, spaces.Discrete)
        n_outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape) + 1
        n_trunks = 1 if self.discrete else 2
        self.trunks = nn.ModuleList([Trunk(observation_space, arch, lstm) for _ in range(n_trunks)])
        self.policy, self.value = nn.Linear(self.trunks[0].size, n_outputs), nn.Linear(self.trunks[0].size, 1)
        self.initial_states: States = [None] * n_trunks

    def forward(self, obs: Tensor, states: States) -> tuple[Tensor, Tensor, States]:
        """Observations (t, n, ...) and the states before them → outputs of π, values (t, n), the states after them.

        Outputs of π: logits (t, n, n_actions), or means and what the variance is made of, (t, n, action_dim + 1).
        """
        passed = [trunk(obs, state) for trunk, state in zip(self.trunks, states, strict=True)]
        features, states = [features for features, _ in passed], [state for _, state in passed]
        return self.policy(features[0]), self.value(features[-1]).squeeze(-1), states

    def sample(self, outputs: Tensor) -> Tensor:
        """Actions of π: (n, n_actions) → (n,) int64, or (n, action_dim + 1) → (n, action_dim).

        Raises: FloatingPointError: the outputs are not finite.
        """
        if not outputs.isfinite().all():
            raise FloatingPointError("the outputs of the network are not finite")
        if self.discrete:
            return torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
        mean, variance = self.gaussian(outputs)
        return mean + variance.sqrt() * torch.randn_like(mean)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π(a|s) and H(π(s)), (...,) each.

        Of a Gaussian, sec. 9 prints ½ (log 2πσ² + 1), the entropy of one dimension, however many there are.
        """
        if self.discrete:
            log_probs = outputs.log_softmax(-1)
            return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
        mean, variance = self.gaussian(outputs)
        log_2_pi_variance = (2 * math.pi * variance).log()
        log_probs = -((actions - mean).square() / variance + log_2_pi_variance).sum(-1) / 2
        return log_probs, (log_2_pi_variance.squeeze(-1) + 1) / 2

    def gaussian(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """μ, (..., action_dim), and σ², (..., 1): one for all dimensions.

        The 0.01 is ours: the gradient of log π grows as 1/σ, and one large step ruins the policy.
        """
        return outputs[..., :-1], F.softplus(outputs[..., -1:]) + 0.01


# ------------------------------------------------------------------------------------------------ mathematics


def rollout_returns(rewards: list[float], bootstrap: float, gamma: float) -> Tensor:
    """R_i = r_i + γ R_{i+1} backwards from the bootstrap value (Alg. S2, S3), (len(rewards),)."""
    returns, R = [], bootstrap
    for reward in reversed(rewards):
        R = reward + gamma * R
        returns.append(R)
    return torch.tensor(returns[::-1])


def a3c_loss(
    log_probs: Tensor, entropies: Tensor, values: Tensor, returns: Tensor, entropy_coef: float, value_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm S3's accumulated gradients as a loss: sums over the rollout; all (t,).

    Returns the total, its policy part (entropy included) and its value part.
    """
    advantages = returns - values.detach()
    policy_loss = -(log_probs * advantages + entropy_coef * entropies).sum()
    value_loss = value_coef * (returns - values).square().sum()
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


class MomentumSGD(torch.optim.Optimizer):
    """m ← decay m + (1 - decay) d; θ ← θ - lr m (sec. 4)."""

    def __init__(self, params: Any, lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p]["mean"].mul_(group["decay"]).add_(p.grad, alpha=1 - group["decay"])
                p.add_(mean, alpha=-group["lr"])


# --------------------------------------------------------------------------------------------------- training


def actor_learner(worker: Worker, args: Args, model: ActorCritic, optimizers: list[RMSProp | MomentumSGD]) -> None:
    """Algorithm S3, one process of it, to the end of training.

    Raises: WorkerError: the environment failed. FloatingPointError: the loss or its gradient is not finite.
    """
    index, start = worker.index, worker.start
    optimizer = optimizers[index % len(optimizers)]
    torch.manual_seed(env_seed(args.seed, start, index))
    envs = make_vec_env(args.env_id, 1, 0, json.loads(args.env_kwargs))  # one environment: n = 1 from here on
    worker.at_end.callback(envs.close)
    local_model = ActorCritic(envs.single_observation_space, envs.single_action_space, args.arch, args.lstm)
    local_parameters, parameters = list(local_model.parameters()), list(model.parameters())  # θ′, θ
    obs, states = to_sequence(envs.reset(seed=env_seed(args.seed, start, index, 1))[0]), local_model.initial_states
    while worker.go_on():
        sync(local_parameters, parameters)  # θ′ ← θ
        observations, actions, rewards, first_states = [], [], [], states
        while True:
            with torch.no_grad():
                output, _, states = local_model(obs, states)
                action = local_model.sample(output[0])  # a_t by π(a_t|s_t; θ′)
            observations.append(obs)
            actions.append(action)
            next_obs, reward, terminated, truncated, info = envs.step(to_env(action, envs.single_action_space))
            rewards.append(float(learned_rewards(reward, args)[0]))
            obs, done = to_sequence(next_obs), bool(terminated[0] or truncated[0])
            worker.count_step(reward[0], done)  # T ← T + 1
            if done or len(rewards) == args.t_max or worker.ended:
                break
        R = 0.0  # for a terminal s_t, else V(s_t; θ′)
        if not done or (args.bootstrap_limits and not terminated[0]):
            last_obs = to_sequence(np.stack(info["final_obs"])) if done else obs
            with torch.no_grad():
                R = local_model(last_obs, states)[1].item()  # its states are dropped: s_t will be seen again
        returns = rollout_returns(rewards, R, args.gamma)  # R ← r_i + γ R
        # θ′ has not changed: one pass over the whole rollout gives the outputs that were acted on, now with gradients
        outputs, values, _ = local_model(torch.cat(observations), first_states)
        log_probs, entropies = local_model.log_prob_and_entropy(outputs[:, 0], torch.cat(actions))
        loss, policy_loss, value_loss = a3c_loss(
            log_probs, entropies, values[:, 0], returns, args.entropy_coef, args.value_coef
        )
        local_model.zero_grad()
        loss.backward()  # dθ, summed over the rollout
        grad_norm = nn.utils.clip_grad_norm_(local_parameters, args.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(f"the loss is {loss.item()}, the norm of its gradient {grad_norm.item()}")
        hand_over(local_parameters, parameters)
        optimizer.param_groups[0]["lr"] = linear_decay(args.learning_rate, worker.global_step, args.total_steps)
        optimizer.step()  # asynchronous update of θ
        if done:
            states = local_model.initial_states
        scalars = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropies}
        scalars |= {"losses/grad_norm": grad_norm, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
        worker.report_update(scalars)


def train(args: Args, checkpoint: dict | None = None) -> int:
    """The parent: it trains nothing. Returns the exit status.

    Raises: WorkerError: an actor-learner died three times within a minute. FloatingPointError: see `actor_learner`.
    """
    torch.manual_seed(args.seed)
    model = make_model(args)
    optimizers = make_optimizers(args, model)
    parts = {"model": model} | {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    start = checkpoint["step"] if checkpoint else 0
    team = Team(actor_learner, (args, model, optimizers), args.n_processes, args.total_steps, start)
    with Run(SCRIPT, args, parts, make_policy, checkpoint, team.quiet, log_interval=20) as run:  # one a second
        share(model, *optimizers)
        with team:
            team.watch(run)
    return run.exit_status


def make_optimizers(args: Args, model: nn.Module) -> list[RMSProp | MomentumSGD]:
    """One whose statistics all processes share, or one for each process."""
    parameters = list(model.parameters())
    if args.optimizer == "momentum-sgd":
        new = functools.partial(MomentumSGD, parameters, args.learning_rate, args.rms_decay)
    else:
        new = functools.partial(RMSProp, parameters, args.learning_rate, args.rms_decay, args.rms_eps, 0.0)
    return [new() for _ in range(1 if args.optimizer == "shared-rmsprop" else args.n_processes)]


def learned_rewards(rewards: np.ndarray, args: Args) -> np.ndarray:
    return np.clip(rewards, -1, 1) if args.clip_rewards else rewards * args.reward_scale


def to_sequence(obs: np.ndarray) -> Tensor:
    """(n, ...) → (1, n, ...): one point in time."""
    return torch.from_numpy(obs)[None]


def make_model(args: Args) -> ActorCritic:
    """The network of a run, with fresh parameters."""
    env = check_env(args)
    return ActorCritic(env.observation_space, env.action_space, args.arch, args.lstm)


def make_policy(model: ActorCritic, args: Args) -> Policy:
    """How evaluation plays: actions sampled from π, the LSTM's state carried on from zeros."""
    states = model.initial_states

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        nonlocal states
        outputs, _, states = model(to_sequence(obs), states)
        return to_env(model.sample(outputs[0]), model.action_space)

    return policy


# ------------------------------------------------------------------------------------------------------- main


def pick_preset(args: Args, env: gym.Env) -> str:
    if isinstance(env.action_space, spaces.Box):
        return "continuous"
    return "atari" if len(env.observation_space.shape) == 3 else "recurrent" if args.lstm else "vector"


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises: UsageError: an argument that cannot work; nothing has been started or written by then.
    """
    args, checkpoint, env = read_args(SCRIPT, argv, Args(), __doc__, PRESETS, pick_preset, fixed=("lstm", "optimizer"))
    args.arch = pick_arch(args, env.observation_space, "nips")
    args.n_processes = pick_n_processes(args, checkpoint)
    if checkpoint is None:
        make_run_dir(SCRIPT, args)
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_script(SCRIPT, argv, parse, train, make_model, make_policy)


if __name__ == "__main__":
    sys.exit(main())
