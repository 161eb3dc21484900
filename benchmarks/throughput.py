"""Steps per second of the trainers, of peers and of the environments alone, measured in one run.

    python benchmarks/throughput.py                                 # all seven on Pong
    python benchmarks/throughput.py --trainers paac ppo_batch --peers
    python benchmarks/throughput.py --trainers ppo_batch --env-id HalfCheetah-v5 --peers

Each contender is a program of its own, as its users run it. They take turns, `rounds` times
`seconds` each, so that a machine that slows down slows all of them; the table has the medians.
Peers have our network and need `pip install stable-baselines3 pfrl`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn

from common.atari import is_atari, make_atari_env
from common.processes import n_cores
from common.vec_env import find_spec, make_vec_env

ROOT = Path(__file__).resolve().parent.parent
PEERS = {"paac": "sb3_a2c", "ppo_batch": "sb3_ppo"}
PEERS |= dict.fromkeys(("a3c", "async_q", "nstep_q", "sarsa"), "pfrl_a3c")


@dataclass
class Args:
    trainers: tuple[str, ...] = (
        "paac",
        "a3c",
        "async_q",
        "nstep_q",
        "sarsa",
        "ppo_batch",
        "apex",
    )
    """what to measure"""
    env_id: str = "PongNoFrameskip-v4"
    """environment"""
    seconds: float = 20.0
    """length of a turn, from the first steps on"""
    rounds: int = 3
    """turns of each contender"""
    flags: str = ""
    """more flags for the trainers, as one word: --flags="--arch nature" """
    peers: bool = False
    """measure stable-baselines3's A2C and PPO and PFRL's A3C as well"""
    only: str = ""
    """measure this peer, or `environments`, in this process, and print its steps/s"""


def trainer_rate(args: Args, name: str) -> float:
    """Steps/s of a trainer: it is started, interrupted like by Ctrl-C, and its summary read."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / f"{name}.py"), "--env-id", args.env_id]
        command += ["--run-dir", str(run_dir), *shlex.split(args.flags)]
        if name == "apex":  # so that it learns while it is measured
            command += ["--learning-starts", "2000", "--capacity", "100_000"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, text=True, start_new_session=True, **output)
        process.stdout.readline()  # the run directory is made, environments come next
        time.sleep(args.seconds + 5)
        os.killpg(process.pid, signal.SIGINT)
        print(process.communicate()[0], file=sys.stderr)
        return json.loads((run_dir / "summary.json").read_text())["steps_per_second"]


def environments(args: Args) -> float:
    """Steps/s of 32 environments alone, with random actions."""
    envs = make_vec_env(args.env_id, 32, min(8, n_cores()))
    envs.reset(seed=0)
    actions = [envs.action_space.sample() for _ in range(64)]
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        for batch in actions:
            envs.step(batch)
        steps += 32 * len(actions)
    envs.close()
    return steps / (time.perf_counter() - begin)


def conv_layers(arch: str) -> tuple[list[nn.Module], int]:
    """The layers of our networks in PyTorch's default memory format, and the size of the last."""
    if arch == "nips":
        layers = [nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
        return [*layers, nn.Flatten(), nn.Linear(2592, 256), nn.ReLU()], 256
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()]
    return layers, 512


def sb3_rate(args: Args, name: str) -> float:
    """Steps/s of stable-baselines3's A2C or PPO with our constants, on our vector environment."""
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env as sb3_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecEnv

    n_envs, arch = (32, "nips") if name == "sb3_a2c" else (8, "nature")

    class AtariEnvs(VecEnv):
        def __init__(self) -> None:
            self.envs = make_vec_env(args.env_id, n_envs, min(8, n_cores()))
            spaces = self.envs.single_observation_space, self.envs.single_action_space
            super().__init__(n_envs, *spaces)

        def reset(self) -> np.ndarray:
            return self.envs.reset(seed=0)[0]

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple:
            obs, rewards, terminated, truncated, _ = self.envs.step(self.actions)
            rewards = np.clip(rewards, -1, 1).astype(np.float32)
            return obs, rewards, terminated | truncated, [{} for _ in range(n_envs)]

        def close(self) -> None:
            self.envs.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list:
            return [None] * n_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any):
            return [None] * n_envs

        def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
            return [False] * n_envs

    class Features(BaseFeaturesExtractor):
        def __init__(self, observation_space: gym.spaces.Box) -> None:
            layers, size = conv_layers(arch)
            super().__init__(observation_space, size)
            self.layers = nn.Sequential(*layers)

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return self.layers(obs)

    marks: list[tuple[float, int]] = []  # when rollouts began, and at which step

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            marks.append((time.perf_counter(), self.num_timesteps))

        def _on_step(self) -> bool:
            return len(marks) < 3 or marks[-1][0] - marks[2][0] < args.seconds

    atari = is_atari(find_spec(args.env_id))
    options: dict[str, Any] = {"policy": "CnnPolicy" if atari else "MlpPolicy", "device": "cpu"}
    options["env"] = AtariEnvs() if atari else sb3_vec_env(args.env_id, n_envs)
    if atari:
        options["policy_kwargs"] = {"features_extractor_class": Features}
    if name == "sb3_a2c":
        model = A2C(n_steps=5, **options)
    elif atari:
        model = PPO(n_steps=128, batch_size=256, n_epochs=4, **options)
    else:
        model = PPO(n_steps=256, batch_size=64, n_epochs=10, **options)
    model.learn(10**9, callback=Clock())
    return (marks[-1][1] - marks[2][1]) / (marks[-1][0] - marks[2][0])


class OldGym:
    """One game as PFRL wants it: `reset` gives an observation, `step` four values."""

    def __init__(self, env_id: str) -> None:
        self.env = make_atari_env(find_spec(env_id), {})

    def reset(self) -> np.ndarray:
        return self.env.reset()[0]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(np.clip(reward, -1, 1)), terminated, info | {"needs_reset": truncated}

    def close(self) -> None:
        self.env.close()


def pfrl_rate(args: Args) -> float:
    """Steps/s of PFRL's A3C as its Atari example sets it up, one process a core."""
    import pfrl
    from pfrl.agents import a3c
    from pfrl.experiments import train_agent_async
    from pfrl.optimizers import SharedRMSpropEpsInsideSqrt
    from pfrl.policies import SoftmaxCategoricalHead

    torch.set_num_threads(1)
    layers, size = conv_layers("nips")
    n_actions = int(OldGym(args.env_id).env.action_space.n)
    policy = nn.Sequential(nn.Linear(size, n_actions), SoftmaxCategoricalHead())
    model = nn.Sequential(*layers, pfrl.nn.Branched(policy, nn.Linear(size, 1)))
    optimizer = SharedRMSpropEpsInsideSqrt(model.parameters(), lr=7e-4, eps=1e-1, alpha=0.99)
    constants = {"t_max": 5, "gamma": 0.99, "beta": 1e-2, "max_grad_norm": 40.0}
    agent = a3c.A3C(model, optimizer, phi=lambda x: np.asarray(x, np.float32) / 255, **constants)
    marks = torch.zeros(4, dtype=torch.float64).share_memory_()  # first and last: time, step

    def hook(env: Any, agent: Any, step: int) -> None:
        now = time.perf_counter()
        if step >= 400 and marks[0] == 0:
            marks[0], marks[1] = now, step
        marks[2], marks[3] = now, step
        if marks[0] and now - marks[0] > args.seconds:
            os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        train_agent_async(
            folder,
            processes=n_cores(),
            make_env=lambda index, test: OldGym(args.env_id),
            steps=10**9,
            eval_interval=None,
            agent=agent,
            random_seeds=list(range(n_cores())),
            global_step_hooks=[hook],
        )
    return float((marks[3] - marks[1]) / (marks[2] - marks[0]))


def other_rate(args: Args, name: str) -> float:
    """Steps/s of a peer or of the environments, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--only", name]
    command += ["--env-id", args.env_id, "--seconds", str(args.seconds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output.split()[-1])


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.only:
        others = {"environments": environments, "pfrl_a3c": pfrl_rate}
        measure = others.get(args.only, lambda args: sb3_rate(args, args.only))
        print(measure(args))
        return
    peers = {PEERS[name] for name in args.trainers if name in PEERS} if args.peers else set()
    rates: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ("environments", *args.trainers, *sorted(peers)):
            measure = trainer_rate if name in args.trainers else other_rate
            rates.setdefault(name, []).append(measure(args, name))
    rate = {name: median(values) for name, values in rates.items()}
    print(f"{args.env_id}, {n_cores()} cores, torch {torch.__version__}")
    print("|  | steps/s | of the environments alone | of its peer |\n|---|---|---|---|")
    for name in rate:
        peer = PEERS.get(name)
        ratio = f"{rate[name] / rate[peer]:.2f} ({peer})" if peer in rate else ""
        share = f"{rate[name] / rate['environments']:.2f}"
        print(f"| {name} | {rate[name]:,.0f} | {share} | {ratio} |")


if __name__ == "__main__":
    main()
