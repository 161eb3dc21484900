"""Asynchronous n-step Q-learning (Mnih et al. 2016, Algorithm S2).

Hogwild: every process plays its own environment ε-greedily with a snapshot θ′ of the shared parameters θ for up to
t_max steps, or to the end of the episode, and then applies its gradient to θ without a lock:

    R_i = r_i + γ R_{i+1},    R = 0 after the episode's last step, else max_a Q(s_t, a; θ⁻)
    L = Σ_i (R_i - Q(s_i, a_i; θ′))²
    d = ∇L, scaled to a norm of at most 40;    α = 0.0007 (1 - T / T_max)
    g ← 0.99 g + 0.01 d²,    θ ← θ - α d / √(g + ε)          (eq. S2, S3: RMSProp, its g shared as well)
    θ⁻ ← θ    whenever T passes a multiple of I_target

    python nstep_q.py                                               # Pong from pixels
    python nstep_q.py --env-id CartPole-v1 --total-steps 400_000    # half a minute to four
    python nstep_q.py --resume runs/...                             # go on after an interruption
    python nstep_q.py --evaluate runs/... --record                  # 30 episodes and a GIF

Where the sources differ or are silent, this file does the following:
- I_target = 40,000 and the 4 million frames over which ε falls are counted in agent steps of all processes; as frames
  of the game they are `--target-interval 10000 --epsilon-steps 1000000`;
- a process draws its final ε once, from {0.1, 0.01, 0.5} with probabilities {0.4, 0.3, 0.3};
- the error is squared as it stands, no Huber loss and no clipping of the error, not even as an option; sums are sums;
- α = 0.0007, ε = 0.1 inside the root and a clipping threshold of 40 are A3C's, by the author's e-mail, as public
  reproductions report it; g starts from 0;
- θ⁻ is copied from the shared θ, not from a snapshot;
- an evaluated episode is played with ε = 0.05 on images and greedily on vectors; the paper does not say.

Departures: a time limit does not cut the return, it bootstraps from the final observation; losing a life does not end
an episode of Atari, 108,000 frames do; 0 to 30 no-ops; one process a core, where the paper has 16: two have learned
Pong with other constants (README). The paper has no vectors: the MLP and the preset `vector` are ours.
Each process seeds its random stream with (seed, T at its start, its index), after --resume and a replacement as well.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from common.evaluation import Policy
from common.flags import RunArgs, UsageError, atari_or_vector, check_discrete, check_env, pick_arch
from common.hogwild import Team, Worker, hand_over, pick_n_processes, share, sync
from common.run import Run, make_run_dir, read_args, run_script
from common.vec_env import env_seed, make_vec_env

SCRIPT = "nstep_q"

# Which constants hold for which kind of task: what differs from Args, which has the Atari ones.
PRESETS: dict[str, dict[str, Any]] = {
    "atari": {},
    # Vectors, ours: rewards of any size, and tasks that are learned in minutes. The final ε and RMSProp's ε stay those
    # of Atari: with async_q.py's final ε, or both of its, some seeds fail on CartPole (results/README.md).
    "vector": {
        "total_steps": 1_000_000,
        "epsilon_steps": 100_000,
        "target_interval": 200,
        "learning_rate": 7e-3,
        "eval_epsilon": 0.0,
        "clip_rewards": False,
        "reward_scale": 0.1,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "vector"] = "auto"
    """constants of the algorithm, see PRESETS; auto: atari for images, else vector"""
    total_steps: int = 80_000_000
    """T_max: agent steps of all processes together; 1 step = 1 action = 4 frames on Atari"""
    seed: int = 1
    """of environments, initial parameters, final ε and actions; several processes race, so that runs differ even so"""

    n_processes: int | None = None
    """actor-learners; None: one per core"""
    arch: Literal["auto", "nips", "nature", "mlp"] = "auto"
    """network; auto: nips for images, mlp for vectors"""
    t_max: int = 5
    """longest rollout, in steps; the end of an episode or of training ends it, too"""
    target_interval: int = 40_000
    """I_target, global agent steps between two copies of θ to θ⁻"""
    epsilon_finals: tuple[float, ...] = (0.1, 0.01, 0.5)
    """each process draws its final ε from these"""
    epsilon_probs: tuple[float, ...] = (0.4, 0.3, 0.3)
    """probabilities of epsilon_finals"""
    epsilon_steps: int = 4_000_000
    """global agent steps over which ε falls from 1 to its final value"""
    eval_epsilon: float = 0.05
    """ε during evaluation"""
    optimizer: Literal["shared-rmsprop", "rmsprop", "momentum-sgd"] = "shared-rmsprop"
    """the three optimisers of sec. 4; the statistics of the last two belong to each process"""
    learning_rate: float = 7e-4
    """initial α"""
    gamma: float = 0.99
    """γ, discount per step"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm; 0 leaves no gradient"""
    rms_decay: float = 0.99
    """decay of RMSProp's mean square g per update, and of momentum SGD's mean gradient"""
    rms_eps: float = 0.1
    """ε inside RMSProp's root"""
    clip_rewards: bool = True
    """learn from rewards clipped to [-1, 1]"""
    reward_scale: float = 1.0
    """learn from rewards times this, where they are not clipped"""


# ---------------------------------------------------------------------------------------------------- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class QNetwork(nn.Module):
    """Q(s, ·; θ). Initial weights are PyTorch's own, U(±1/√fan_in), as were Torch7's."""

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete, arch: str) -> None:
        super().__init__()
        if arch == "nips":  # (n, 4, 84, 84) → 16x20x20 → 32x9x9 → 256
            layers = [*conv(4, 16, 8, 4), *conv(16, 32, 4, 2)]
            layers += [nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(inplace=True)]
        elif arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7 → 512
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1)]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(inplace=True)]
        else:  # (n, d) → 200
            layers = [nn.Linear(observation_space.shape[0], 200), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Linear(layers[-2].out_features, int(action_space.n)))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 4, 84, 84) uint8 or (n, d) float → (n, n_actions)."""
        return self.layers(obs.float() / 255 if obs.dtype == torch.uint8 else obs)


# ------------------------------------------------------------------------------------------------ mathematics


def rollout_returns(rewards: list[float], bootstrap: float, gamma: float) -> Tensor:
    """R_i = r_i + γ R_{i+1} backwards from the bootstrap value (Alg. S2, S3), (len(rewards),)."""
    returns, R = [], bootstrap
    for reward in reversed(rewards):
        R = reward + gamma * R
        returns.append(R)
    return torch.tensor(returns[::-1])


def draw_epsilon_final(args: Args, index: int) -> float:
    """The ε that process `index` ends with; the same after it was replaced or resumed."""
    draw = np.random.default_rng((args.seed, index))
    return float(draw.choice(args.epsilon_finals, p=args.epsilon_probs))


def epsilon_at(final: float, step: int, epsilon_steps: int) -> float:
    """ε at global step T: a line from 1 to its final value over `epsilon_steps`, constant afterwards."""
    return final + linear_decay(1 - final, step, epsilon_steps)


def epsilon_greedy(q_values: Tensor, epsilon: float | Tensor) -> Tensor:
    """The best action, or with probability ε, a number or (n,), any: q_values (n, n_actions) → (n,) int64."""
    random = torch.randint(q_values.shape[1], (len(q_values),))
    return torch.where(torch.rand(len(q_values)) < epsilon, random, q_values.argmax(1))


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


def actor_learner(
    worker: Worker, args: Args, model: QNetwork, target_model: QNetwork, optimizers: list[RMSProp | MomentumSGD]
) -> None:
    """Algorithm S2, one process of it, to the end of training.

    Raises: WorkerError: the environment failed. FloatingPointError: the loss or its gradient is not finite.
    """
    index, start = worker.index, worker.start
    optimizer, epsilon_final = optimizers[index % len(optimizers)], draw_epsilon_final(args, index)
    torch.manual_seed(env_seed(args.seed, start, index))
    envs = make_vec_env(args.env_id, 1, 0, json.loads(args.env_kwargs))  # one environment: n = 1 from here on
    worker.at_end.callback(envs.close)
    local_model = QNetwork(envs.single_observation_space, envs.single_action_space, args.arch)
    local_parameters, parameters = list(local_model.parameters()), list(model.parameters())  # θ′, θ
    target_parameters = list(target_model.parameters())  # θ⁻
    obs = torch.from_numpy(envs.reset(seed=env_seed(args.seed, start, index, 1))[0])
    while worker.go_on():
        sync(local_parameters, parameters)  # θ′ ← θ
        observations, actions, rewards = [], [], []
        while True:
            epsilon = epsilon_at(epsilon_final, worker.global_step, args.epsilon_steps)
            with torch.no_grad():
                action = epsilon_greedy(local_model(obs), epsilon)  # a_t by Q(s_t, a; θ′)
            observations.append(obs)
            actions.append(action)
            next_obs, reward, terminated, truncated, info = envs.step(action.numpy())
            rewards.append(float(learned_rewards(reward, args)[0]))
            obs, done = torch.from_numpy(next_obs), bool(terminated[0] or truncated[0])
            worker.count_step(reward[0], done)  # T ← T + 1
            if done or len(rewards) == args.t_max or worker.ended:
                break
        R = 0.0  # for a terminal s_t, else max_a Q(s_t, a; θ⁻)
        if not terminated[0]:
            last_obs = torch.from_numpy(np.stack(info["final_obs"])) if done else obs
            with torch.no_grad():
                R = target_model(last_obs).max().item()
        returns = rollout_returns(rewards, R, args.gamma)  # R ← r_i + γ R
        q_values = local_model(torch.cat(observations)).gather(1, torch.stack(actions)).squeeze(1)  # Q(s_i, a_i; θ′)
        squares = (returns - q_values).square()
        loss = squares.sum()
        local_model.zero_grad()
        loss.backward()  # dθ, summed over the rollout
        grad_norm = nn.utils.clip_grad_norm_(local_parameters, args.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(f"the loss is {loss.item()}, the norm of its gradient {grad_norm.item()}")
        hand_over(local_parameters, parameters)
        optimizer.param_groups[0]["lr"] = linear_decay(args.learning_rate, worker.global_step, args.total_steps)
        optimizer.step()  # asynchronous update of θ
        if worker.crossed(args.target_interval):
            sync(target_parameters, parameters)  # θ⁻ ← θ
        scalars = {"losses/td_loss": squares, "losses/q_values": q_values, "losses/grad_norm": grad_norm}
        scalars |= {"charts/epsilon": epsilon, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
        worker.report_update(scalars)


def train(args: Args, checkpoint: dict | None = None) -> int:
    """The parent: it trains nothing. Returns the exit status.

    Raises: WorkerError: an actor-learner died three times within a minute. FloatingPointError: see `actor_learner`.
    """
    torch.manual_seed(args.seed)
    model = make_model(args)
    target_model = copy.deepcopy(model)  # θ⁻
    optimizers = make_optimizers(args, model)
    parts = {"model": model, "target_model": target_model}
    parts |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    start = checkpoint["step"] if checkpoint else 0
    team = Team(actor_learner, (args, model, target_model, optimizers), args.n_processes, args.total_steps, start)
    with Run(SCRIPT, args, parts, make_policy, checkpoint, team.quiet, log_interval=20) as run:  # one a second
        share(model, *optimizers)
        share(target_model)
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


def make_model(args: Args) -> QNetwork:
    """The network of a run, with fresh parameters."""
    env = check_env(args)
    return QNetwork(env.observation_space, env.action_space, args.arch)


def make_policy(model: QNetwork, args: Args) -> Policy:
    """How evaluation plays: ε-greedily."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        return epsilon_greedy(model(torch.from_numpy(obs)), args.eval_epsilon).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises: UsageError: an argument that cannot work; nothing has been started or written by then.
    """
    args, checkpoint, env = read_args(SCRIPT, argv, Args(), __doc__, PRESETS, atari_or_vector, fixed=("optimizer",))
    check_discrete(SCRIPT, args, env)
    args.arch = pick_arch(args, env.observation_space, "nips")
    args.n_processes = pick_n_processes(args, checkpoint)
    finals, probs = args.epsilon_finals, args.epsilon_probs
    if not all(0 <= x <= 1 for x in (*finals, *probs)) or len(finals) != len(probs) or not math.isclose(sum(probs), 1):
        what = "as many probabilities as values, which add up to 1, all in [0, 1], are needed"
        raise UsageError(f"--epsilon-finals {finals} --epsilon-probs {probs}: {what}")
    if checkpoint is None:
        make_run_dir(SCRIPT, args)
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_script(SCRIPT, argv, parse, train, make_model, make_policy)


if __name__ == "__main__":
    sys.exit(main())
