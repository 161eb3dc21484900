"""Ape-X DQN: many actor processes, one learner, one prioritised replay memory (Horgan et al. 2018).

Every actor plays its own environments ε-greedily with parameters that it fetches now and then, and sends what it saw
to the replay memory, with priorities from the Q-values that it acted on. The learner draws batches from the memory,
in proportion to their priorities, and writes new priorities back:

    G_t = R_{t+1} + γ R_{t+2} + γ² R_{t+3} + γ³ Q(S_{t+3}, argmax_a Q(S_{t+3}, a; θ); θ⁻),  cut at the episode's end
    δ = G_t - Q(S_t, A_t; θ),    Q = V + A - mean_a A
    P(i) = p_i^0.6 / Σ_k p_k^0.6,    p = |δ|,    w_i = u_i / max_j u_j,    u_i = (N P(i))^-0.4
    L = mean of w_i δ_i² / 2 over 512 transitions;    d = ∇L, scaled to a norm of at most 40
    g ← 0.95 g + 0.05 d²,    m ← 0.95 m + 0.05 d,    θ ← θ - α d / √(g - m² + ε)    (centred RMSProp)
    θ⁻ ← θ    every 2,500 updates
    ε_i = 0.4^(1 + 7 i/(N-1))    for environment i of N

    python apex.py                                                  # Pong from pixels
    python apex.py --env-id CartPole-v1 --total-steps 300_000       # one to three minutes
    python apex.py --resume runs/...                                # go on after an interruption
    python apex.py --evaluate runs/... --record                     # 30 episodes and a GIF

Where the sources differ or are silent, this file does the following:
- an actor has several environments, which share one forward pass; ε is laid out over all environments of all actors,
  and is 0.4 where there is only one;
- "400 frames" between two fetches are 100 steps, "50,000" at the start of learning are transitions;
- initial priorities use max_a Q of the actor's own θ, and the same exponent as later ones; |δ| + 1e-6 is raised to it;
- the weights are divided by the largest of the batch; one draw comes from each of 512 equal parts of the total;
- a batch's new priorities are its errors before the update, from the pass that the gradient needs anyway;
- half the squared error, no Huber loss; initial weights are PyTorch's own, U(±1/√fan_in); the trunk's
  gradient is not scaled by 1/√2 as in Wang et al. 2016;
- more than the capacity is tolerated until the next removal, every 100 updates, of the oldest transitions of all;
  each environment has a share of the memory of its own, with 4% to spare, beyond which its own oldest go at once (at
  the paper's rates, where the capacity is below 1.6 million);
- an evaluated episode is played with ε = 0.001 on images and greedily on vectors; the paper does not say;
- g and m start at zero.

Departures: a time limit does not cut the return, it bootstraps from the final observation; an episode of Atari is cut
after 108,000 frames, not 50,000; losing a life does not end one; 0 to 30 no-ops; three black frames in the first
stack; frames lie in the memory once and uncompressed, where the paper has PNGs; batches are drawn when they are
needed, not ahead; the learner takes chunks between two updates, and an actor waits while all of its slots for chunks
are full, where the paper never blocks it; 50 million steps are 200 million frames, the paper has 22.8 billion.
`--replay-ratio` holds learner and actors to a ratio, which the paper leaves to the machine (0.78 by its rates with
360 actors). The paper has no vectors: the MLP and the preset `vector` are ours. On CUDA PyTorch computes convolutions
in TF32 unless told otherwise.
Each actor seeds its random stream with (seed, step at its start, its index), after --resume and a replacement as well.
A step counts when the learner has received it; what was under way at an end or a death is lost.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

from common.actors import Actors, Chunk, Link
from common.atari import STACK
from common.evaluation import Policy
from common.flags import RunArgs, UsageError, atari_or_vector, check_discrete, check_env, pick_arch, pick_device
from common.processes import n_cores
from common.replay import Batch, Replay, check_saved_replay, chunk_fields, fit_replay, frame_space, replay_bytes
from common.run import Run, make_run_dir, read_args, run_script
from common.vec_env import env_seed, make_vec_env

SCRIPT = "apex"

# Which constants hold for which kind of task: what differs from Args, which has the Atari ones.
PRESETS: dict[str, dict[str, Any]] = {
    "atari": {},
    # Vectors, ours: rewards of any size, and tasks that are learned in minutes on any number of cores.
    "vector": {
        "total_steps": 500_000,
        "envs_per_actor": 8,
        "capacity": 100_000,
        "learning_starts": 1_000,
        "batch_size": 128,
        "replay_ratio": 8.0,
        "target_interval": 250,
        "learning_rate": 1e-3,
        "eval_epsilon": 0.0,
        "clip_rewards": False,
        "reward_scale": 0.1,
    },
}


@dataclass
class Args(RunArgs):
    preset: Literal["auto", "atari", "vector"] = "auto"
    """constants of the algorithm, see PRESETS; auto: atari for images, else vector"""
    total_steps: int = 50_000_000
    """agent steps that the learner has received of all environments; 1 step = 1 action = 4 frames on Atari"""
    seed: int = 1
    """of environments, initial parameters, actions and draws; several processes race, so that runs differ even so"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the learner's network is; auto: CUDA where there is any. Actors are on the CPU"""

    n_actors: int | None = None
    """actor processes; None: with CUDA one per core but one, without it half the cores"""
    envs_per_actor: int = 16
    """environments that each actor steps together"""
    learner_threads: int | None = None
    """threads of the learner; None: one for each core that no actor has, and one alone for the MLP"""
    arch: Literal["auto", "nature", "mlp"] = "auto"
    """network; auto: nature for images, mlp for vectors"""
    bfloat16: bool = False
    """images: run the convolutions in bfloat16, faster where the processor has it; parameters stay float32"""
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
    """steps of each environment between two fetches of parameters"""
    capacity: int | None = None
    """transitions in the replay memory; None: two million, or as many as fit into four fifths of the free memory"""
    replay_device: Literal["cpu", "cuda"] = "cpu"
    """where the frames of the replay memory are"""
    save_replay: bool = False
    """put the replay memory into the checkpoints; without it a resumed run fills it anew before it learns"""
    learning_starts: int = 50_000
    """transitions in the replay memory before the first update"""
    trim_interval: int = 100
    """updates between two removals of what exceeds the capacity"""
    replay_ratio: float | None = None
    """samples learned per transition added, to which learner and actors are held; None: both run free"""
    priority_alpha: float = 0.6
    """exponent of the priorities"""
    priority_beta: float = 0.4
    """exponent of the importance weights"""
    priority_eps: float = 1e-6
    """added to |δ|"""
    batch_size: int = 512
    """transitions per update"""
    target_interval: int = 2_500
    """updates between two copies of θ to θ⁻"""
    learning_rate: float = 6.25e-5
    """α"""
    gamma: float = 0.99
    """γ, discount per step"""
    max_grad_norm: float = 40.0
    """threshold of the global gradient norm; 0 leaves no gradient"""
    rms_decay: float = 0.95
    """decay of RMSProp's averages g and m per update"""
    rms_eps: float = 1.5e-7
    """ε inside RMSProp's root"""
    clip_rewards: bool = True
    """learn from rewards clipped to [-1, 1]"""
    reward_scale: float = 1.0
    """learn from rewards times this, where they are not clipped"""


# ---------------------------------------------------------------------------------------------------- network


def conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]


class QNetwork(nn.Module):
    """Q(s, ·; θ), dueling: V(s) and the advantages A(s, ·) are two streams that share a trunk (Wang et al. 2016)."""

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Discrete, arch: str, bfloat16: bool = False
    ) -> None:
        super().__init__()
        self.observation_space, self.bfloat16 = observation_space, bfloat16
        if arch == "nature":  # (n, 4, 84, 84) → 32x20x20 → 64x9x9 → 64x7x7
            layers = [*conv(4, 32, 8, 4), *conv(32, 64, 4, 2), *conv(64, 64, 3, 1), nn.Flatten()]
            self.trunk = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster on CPU
            n_features, n_hidden = 3136, 512
        else:  # (n, d) → 256
            n_features = n_hidden = 256
            self.trunk = nn.Sequential(nn.Linear(observation_space.shape[0], n_features), nn.ReLU(inplace=True))

        def stream(n_outputs: int) -> nn.Module:
            hidden = nn.Linear(n_features, n_hidden)
            return nn.Sequential(hidden, nn.ReLU(inplace=True), nn.Linear(n_hidden, n_outputs))

        self.value, self.advantages = stream(1), stream(int(action_space.n))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 4, 84, 84) uint8 or (n, d) float → (n, n_actions)."""
        if obs.dtype == torch.uint8:
            obs = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
            with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
                features = self.trunk(obs)
            features = features.float()
        else:
            features = self.trunk(obs)
        advantages = self.advantages(features)
        return self.value(features) + advantages - advantages.mean(1, keepdim=True)


# ------------------------------------------------------------------------------------------------ mathematics


def epsilon_of(epsilon: float, alpha: float, index: int, n: int) -> float:
    """ε_i = ε^(1 + α i/(N-1)) of environment i of N, constant in time (sec. 4.1); ε where N is 1."""
    return epsilon ** (1 + alpha * index / max(n - 1, 1))


def epsilon_greedy(q_values: Tensor, epsilon: float | Tensor) -> Tensor:
    """The best action, or with probability ε, a number or (n,), any: q_values (n, n_actions) → (n,) int64."""
    random = torch.randint(q_values.shape[1], (len(q_values),))
    return torch.where(torch.rand(len(q_values)) < epsilon, random, q_values.argmax(1))


def n_step_transitions(
    rewards: np.ndarray, terminated: np.ndarray, acted: np.ndarray, n_step: int, gamma: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What follows each of the first m of m + n positions of an environment, whose episodes follow one another.

    Args:
        rewards: (m + n,) of the action at each position.
        terminated: (m + n,) whether that action ended the episode.
        acted: (m + n,) False at the final observation of a truncated episode, which has a position of its own.

    Returns:
        Σ_k γ^k R_{t+k+1} over up to n rewards; what Q of the state after them counts: γ^k, 0 where the episode has
        terminated; and how many positions later that state is. (m,) each.
    """
    m = len(rewards) - n_step
    returns, going = np.zeros(m, np.float32), acted[:m].copy()
    discounts, offsets = np.full(m, gamma**n_step, np.float32), np.full(m, n_step)
    for k in range(n_step):
        returns += gamma**k * rewards[k : k + m] * going
        ended = going & terminated[k : k + m]
        truncated = going & ~ended & ~acted[k + 1 : k + 1 + m]
        discounts[ended], offsets[ended] = 0, 0
        discounts[truncated], offsets[truncated] = gamma ** (k + 1), k + 1
        going &= ~(ended | truncated)
    return returns, discounts, offsets


def double_q_targets(returns: Tensor, discounts: Tensor, next_q_values: Tensor, next_target_q_values: Tensor) -> Tensor:
    """G = return + discount Q(S', argmax_a Q(S', a; θ); θ⁻) (sec. 3.1), (n,); Q-values (n, n_actions)."""
    best = next_q_values.argmax(1, keepdim=True)
    return returns + discounts * next_target_q_values.gather(1, best).squeeze(1)


class CentredRMSProp(torch.optim.Optimizer):
    """g ← decay g + (1 - decay) d²; m ← decay m + (1 - decay) d; θ ← θ - lr d / √(g - m² + eps).

    torch.optim.RMSprop has eps outside the root. g - m² is a variance; rounding may leave it below zero.
    """

    def __init__(self, params: Any, lr: float, decay: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["square"], self.state[p]["mean"] = torch.zeros_like(p), torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square, mean = self.state[p]["square"], self.state[p]["mean"]
                square.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1 - group["decay"])
                mean.mul_(group["decay"]).add_(p.grad, alpha=1 - group["decay"])
                variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
                p.addcdiv_(p.grad, variance.add_(group["eps"]).sqrt_(), value=-group["lr"])


# ------------------------------------------------------------------------------------------------------ actor


class LocalBuffer:
    """The last positions of one environment: gives a chunk as soon as B transitions are complete."""

    def __init__(self, space: spaces.Box, args: Args) -> None:
        self.n_step, self.gamma, self.chunk_size = args.n_step, args.gamma, args.chunk_size
        shape, dtype = frame_space(space)
        room = self.n_step + self.chunk_size
        self.frames = np.zeros((room, *shape), dtype)
        self.ages = np.zeros(room, np.uint8)
        self.actions, self.rewards = np.zeros(room, np.int32), np.zeros(room, np.float32)
        self.terminated, self.acted = np.zeros(room, np.bool_), np.zeros(room, np.bool_)
        self.q_taken, self.q_max = np.zeros(room, np.float32), np.zeros(room, np.float32)
        self.count = self.n_step  # nothing has been done before the first position

    def add(self, frame: np.ndarray, age: int, q_max: float, taken: tuple | None) -> Chunk | None:
        """Add S_t, max_a Q(S_t, a) and what was done there: A_t, Q(S_t, A_t), R_{t+1}, and whether that ended the
        episode; None where it was truncated. Returns the chunk that is complete with it, if one is.
        """
        i = self.count
        self.frames[i], self.ages[i], self.q_max[i], self.acted[i] = frame, age, q_max, taken is not None
        self.actions[i], self.q_taken[i], self.rewards[i], self.terminated[i] = taken or (0, 0.0, 0.0, False)
        self.count += 1
        return self._chunk() if self.count == len(self.ages) else None

    def _chunk(self) -> Chunk:
        n, m = self.n_step, self.chunk_size
        returns, discounts, offsets = n_step_transitions(self.rewards, self.terminated, self.acted, n, self.gamma)
        errors = returns + discounts * self.q_max[np.arange(m) + offsets] - self.q_taken[:m]
        chunk = {"frames": self.frames[n:].copy(), "ages": self.ages[n:].copy(), "acted": self.acted[:m].copy()}
        chunk |= {"returns": returns, "discounts": discounts, "offsets": offsets, "errors": errors}
        chunk |= {"actions": self.actions[:m].copy()}
        for array in (self.actions, self.rewards, self.terminated, self.acted, self.q_taken, self.q_max):
            array[:n] = array[m:].copy()  # transitions that wait for what comes
        self.count = n
        return chunk


def actor(link: Link, args: Args) -> None:
    """Algorithm 1: acts until it is ended.

    Raises: WorkerError: the environment failed.
    """
    n, index = args.envs_per_actor, link.index
    torch.manual_seed(env_seed(args.seed, link.start, index))
    envs = RecordEpisodeStatistics(make_vec_env(args.env_id, n, 0, json.loads(args.env_kwargs)))
    link.at_end.callback(envs.close)
    space = envs.single_observation_space
    model = QNetwork(space, envs.single_action_space, args.arch, args.bfloat16)
    parameters = list(model.parameters())
    streams = range(index * n, index * n + n)  # which of all environments these are
    epsilons = torch.tensor([epsilon_of(args.epsilon, args.epsilon_alpha, i, n * args.n_actors) for i in streams])
    buffers = [LocalBuffer(space, args) for _ in streams]
    newest = (slice(None), -1) if len(space.shape) == 3 else slice(None)
    obs, ages = envs.reset(seed=env_seed(args.seed, link.start, index, 1))[0], np.zeros(n, np.uint8)
    for t in itertools.count():
        if t % args.fetch_interval == 0:
            link.request()
        link.fetch(parameters)  # θ ← Learner.Parameters()
        with torch.no_grad():
            q_values = model(torch.from_numpy(obs))
        actions = epsilon_greedy(q_values, epsilons).numpy()  # A_t by π_θ(S_t)
        q_values = q_values.numpy()
        q_taken, q_max = q_values[np.arange(n), actions], q_values.max(1)
        next_obs, reward, terminated, truncated, info = envs.step(actions)
        rewards = learned_rewards(reward, args)
        frames, next_ages = obs[newest], np.minimum(ages + 1, STACK - 1)
        for i, (stream, buffer) in enumerate(zip(streams, buffers, strict=True)):
            taken = actions[i], q_taken[i], rewards[i], terminated[i]
            if chunk := buffer.add(frames[i], ages[i], q_max[i], taken):  # LocalBuffer.Add, Get(B)
                link.send(stream, chunk)  # Replay.Add(τ, p)
            if truncated[i] and not terminated[i]:  # the return goes on with Q of the final observation
                final_obs = info["final_obs"][i][None]
                with torch.no_grad():
                    final_q = model(torch.from_numpy(final_obs)).max().item()
                if chunk := buffer.add(final_obs[newest][0], next_ages[i], final_q, None):
                    link.send(stream, chunk)
        done = terminated | truncated
        for i in np.flatnonzero(done):
            link.report(info["episode"]["r"][i], info["episode"]["l"][i])
        obs, ages = next_obs, np.where(done, 0, next_ages).astype(np.uint8)


# --------------------------------------------------------------------------------------------------- training


def update(
    model: QNetwork, target_model: QNetwork, optimizer: CentredRMSProp, batch: Batch, max_grad_norm: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """One update of Algorithm 2: the errors δ before it, (n,), and the scalars to log, td_loss the mean of δ².

    Raises: FloatingPointError: the loss or its gradient is not finite.
    """
    with torch.no_grad():
        next_q_values = model(batch.next_obs)
        targets = double_q_targets(batch.returns, batch.discounts, next_q_values, target_model(batch.next_obs))
    q_values = model(batch.obs).gather(1, batch.actions[:, None]).squeeze(1)
    errors = targets - q_values
    squares = errors.square()
    loss = (batch.weights * squares / 2).mean()
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    numbers = torch.cat([errors.detach(), grad_norm[None]]).cpu().numpy()  # the one look of the host at the device
    if not np.isfinite(numbers).all():
        raise FloatingPointError(f"the loss is {loss.item()}, the norm of its gradient {grad_norm.item()}")
    optimizer.step()
    return numbers[:-1], {"losses/td_loss": squares, "losses/q_values": q_values, "losses/grad_norm": grad_norm}


def train(args: Args, checkpoint: dict | None = None) -> int:
    """Algorithm 2, the learner, and around it the actors. Returns the exit status.

    Raises: WorkerError: an actor died three times within a minute. FloatingPointError: see `update`, `Replay.add`
    and `Actors.receive`.
    """
    device = pick_device(args.device)
    torch.manual_seed(args.seed)
    n_threads = 1 if args.arch == "mlp" else max(1, n_cores() - args.n_actors)
    torch.set_num_threads(args.learner_threads or n_threads)
    model = make_model(args)
    space = model.observation_space
    target_model = copy.deepcopy(model)  # θ⁻
    parameters = list(model.parameters())
    optimizer = CentredRMSProp(parameters, args.learning_rate, args.rms_decay, args.rms_eps)
    print(
        f"replay memory: {args.capacity:,} transitions, {replay_bytes(space, args) / 1e6:,.0f} MB when it is full; "
        f"learning begins when {args.learning_starts:,} have come"
    )
    start = checkpoint["step"] if checkpoint else 0
    replay = Replay(space, args, device, start)
    parts = {"model": model, "target_model": target_model, "optimizer": optimizer}
    parts |= {"replay": replay} if args.save_replay else {}
    fields, n_slots = chunk_fields(space, args.chunk_size), min(2 * args.envs_per_actor, 100)
    n_parameters = sum(p.numel() for p in parameters)
    actors = Actors(actor, (args,), args.n_actors, fields, n_slots, n_parameters, start)
    ratio, added, learned = args.replay_ratio, 0, 0  # the last two: transitions since learning began
    with Run(SCRIPT, args, parts, make_policy, checkpoint, log_interval=20) as run:
        step, first_step = run.step, run.step + args.learning_starts - replay.size  # a restored memory counts
        if first_step >= args.total_steps:
            print("nothing is learned in so few steps")
        actors.publish(parameters)
        with actors:
            while not run.stopped:
                learning = step >= first_step
                due = learning and (ratio is None or ratio * added - learned >= args.batch_size)
                if ratio is None or not due:  # with a ratio, what is owed is learned before more is taken
                    if step >= args.total_steps:
                        break
                    for stream, chunk in actors.receive(run, timeout=0.0 if due else 0.1):
                        if step >= args.total_steps:
                            break
                        n_added = replay.add(stream, chunk)
                        step, added = step + n_added, added + learning * n_added
                    run.advance(step)
                actors.publish(parameters)
                if not due:
                    continue
                batch = replay.sample()  # id, τ ← Replay.Sample()
                errors, scalars = update(model, target_model, optimizer, batch, args.max_grad_norm)
                replay.set_priorities(batch, errors)  # Replay.SetPriority(id, p)
                learned += args.batch_size
                if (run.updates + 1) % args.trim_interval == 0:
                    replay.trim()  # Replay.RemoveToFit()
                if (run.updates + 1) % args.target_interval == 0:
                    target_model.load_state_dict(model.state_dict())  # θ⁻ ← θ
                scalars |= {"charts/replay_size": replay.size, "charts/updates": run.updates + 1}
                if added:
                    scalars["charts/replay_ratio"] = learned / added  # 0.78 by the paper's rates
                run.count_update(step, scalars)
    return run.exit_status


def learned_rewards(rewards: np.ndarray, args: Args) -> np.ndarray:
    return np.clip(rewards, -1, 1) if args.clip_rewards else rewards * args.reward_scale


def make_model(args: Args) -> QNetwork:
    """The network of a run, with fresh parameters."""
    env = check_env(args)
    return QNetwork(env.observation_space, env.action_space, args.arch, args.bfloat16).to(pick_device(args.device))


def make_policy(model: QNetwork, args: Args) -> Policy:
    """How evaluation plays: ε-greedily."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        q_values = model(torch.from_numpy(obs).to(next(model.parameters()).device)).cpu()
        return epsilon_greedy(q_values, args.eval_epsilon).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> tuple[Args, dict | None]:
    """The arguments, complete and checked, and the checkpoint that --resume or --evaluate names.

    Raises: UsageError: an argument that cannot work; nothing has been started or written by then.
    """
    args, checkpoint, env = read_args(SCRIPT, argv, Args(), __doc__, PRESETS, atari_or_vector)
    check_discrete(SCRIPT, args, env)
    args.arch = pick_arch(args, env.observation_space, "nature")
    on_cuda = pick_device(args.device).type == "cuda"
    if args.n_actors is None:
        args.n_actors = max(1, n_cores() - 1 if on_cuda else n_cores() // 2)
    if args.chunk_size < (least := args.n_step + STACK):
        raise UsageError(
            f"--n-step {args.n_step} --chunk-size {args.chunk_size}: a chunk of {least} at least is needed"
        )
    if not args.evaluate:
        fit_replay(args, env.observation_space)
    if checkpoint and args.resume and args.save_replay:
        check_saved_replay(args, checkpoint)
    if checkpoint is None:
        make_run_dir(SCRIPT, args)
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_script(SCRIPT, argv, parse, train, make_model, make_policy)


if __name__ == "__main__":
    sys.exit(main())
