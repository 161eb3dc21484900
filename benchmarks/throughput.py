"""Steps per second of the trainers against the ceiling that the vector environment alone sets, in one run.

    python benchmarks/throughput.py                                # PAAC on Pong, nips and nature, 32 environments
    python benchmarks/throughput.py --trainer all --sb3 --pfrl     # all seven, beside the peers that are installed
    python benchmarks/throughput.py --n-envs 32 64 128 256 --device cuda
    python benchmarks/throughput.py --sb3                          # stable-baselines3's A2C beside it, if installed
    python benchmarks/throughput.py --trainer ppo_batch --sb3      # Pong, 8 environments, beside its PPO
    python benchmarks/throughput.py --trainer ppo_batch --env-id HalfCheetah-v5 --sb3

The contenders take turns, `rounds` times `seconds` each; the table shows medians. The split is the trainer's wall
time by what it went into, as Figure 2 of the PAAC paper: environment steps, acting (forward passes), learning,
copying observations to the device. PAAC's forward passes serve both acting and learning and count as acting. The
asynchronous four have as many processes as there are cores, and no split: benchmarks/hogwild.py has more of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

if "--sb3-worker" not in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import shlex
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

import apex
import paac
import ppo_batch
from benchmarks import hogwild
from benchmarks.learning import HOGWILD, TRAINERS, Trainer
from common.atari import is_atari
from common.processes import n_cores
from common.run import keep_freed_memory
from common.vec_env import make_vec_env

N_ENVS = {"paac": 32, "ppo_batch": 8}  # of those that have the flag
PEERS = {"paac": "SB3's A2C", "ppo_batch": "SB3's PPO", "a3c": "PFRL's A3C"}
WARM_UP = 3_000  # steps before measuring begins
APEX_FLAGS = ["--learning-starts", "2000", "--capacity", "100000"]  # so that it learns while it is measured


@dataclass
class Args:
    trainer: Literal[Trainer, "all"] = "paac"
    """what to measure"""
    env_id: str = "PongNoFrameskip-v4"
    """environment"""
    n_envs: tuple[int, ...] = ()
    """numbers of environments to measure; none: 32 for paac, 8 for ppo_batch, the only ones that take this flag"""
    archs: tuple[str, ...] = ()
    """networks to measure; none: nips and nature for paac on Pong, else the default; for paac, ppo_batch and apex"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the network is"""
    seconds: float = 20.0
    """measured time of one contender in one round"""
    rounds: int = 3
    """rounds"""
    flags: str = ""
    """more flags for the trainer, such as --bfloat16; for paac, ppo_batch and apex"""
    sb3: bool = False
    """beside paac and ppo_batch stable-baselines3's A2C and PPO, on images with our network, in their own processes"""
    pfrl: bool = False
    """beside a3c PFRL's A3C with the same network, in processes of its own"""
    sb3_worker: bool = False
    """print the steps/s of stable-baselines3 and nothing else: what --sb3 starts"""


def environment_rate(args: Args, n_envs: int) -> float:
    """Steps/s of the vector environment alone, with random actions."""
    cores = n_cores()
    envs = make_vec_env(args.env_id, n_envs, min(8, cores, n_envs) if args.device == "cpu" else cores)
    envs.reset(seed=0)
    actions, steps, start = envs.action_space, 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        envs.step(actions.sample())
        steps += n_envs
    rate = steps / (time.perf_counter() - start)
    envs.close()
    return rate


class Timer:
    """Adds up the time spent in functions, waiting for the GPU at the end of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed


def trainer_rate(args: Args, name: str, n_envs: int, arch: str, split: bool) -> tuple[float, dict[str, float]]:
    """Steps/s of the trainer's `train` after its first steps, and with `split` the share of each part."""
    trainer: ModuleType = {"paac": paac, "ppo_batch": ppo_batch, "apex": apex}[name]
    timer, marks = Timer(), []  # (time, step) when measuring began, and when it ended

    class TimedRun(trainer.Run):
        def _advance(self, step: int) -> None:
            super()._advance(step)
            now = time.perf_counter()
            if not marks and step >= WARM_UP:
                marks.append((now, step))
                timer.seconds.clear()
            elif len(marks) == 1 and now - marks[0][0] > args.seconds:
                marks.append((now, step))
                self.signal = 1  # stop

        def _finish(self) -> None:
            pass

    def timed_vec_env(*vec_args: Any) -> Any:
        envs = make_vec_env(*vec_args)
        envs.step = timer.wrap("environment", envs.step)
        return envs

    changes = {"Run": TimedRun}
    if split:
        changes |= {"make_vec_env": timed_vec_env, "to_device": timer.wrap("copying", trainer.to_device)}
        if trainer is paac:

            class TimedActorCritic(paac.ActorCritic):
                forward = timer.wrap("acting", paac.ActorCritic.forward)

            changes["ActorCritic"] = TimedActorCritic
        else:
            changes["update"] = timer.wrap("learning", trainer.update)
    originals, threads = {key: getattr(trainer, key) for key in changes}, torch.get_num_threads()
    try:
        for key, changed in changes.items():
            setattr(trainer, key, changed)
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--env-id", args.env_id, "--run-dir", f"{folder}/run", "--arch", arch, "--device", args.device]
            flags += APEX_FLAGS if trainer is apex else ["--n-envs", str(n_envs)]
            with contextlib.redirect_stdout(io.StringIO()):
                status = trainer.train(trainer.parse([*flags, *shlex.split(args.flags)])[0])
    finally:
        torch.set_num_threads(threads)
        for key, original in originals.items():
            setattr(trainer, key, original)
    if len(marks) < 2 and status:  # a signal that was meant for this program
        sys.exit(status)
    if len(marks) < 2:
        raise RuntimeError(f"{name} ended before {args.seconds:g} s could be measured; marks: {marks}")
    (start, first), (end, last) = marks
    shares = {part: seconds / (end - start) for part, seconds in timer.seconds.items()}
    shares["learning" if trainer is paac else "acting"] = 1 - sum(shares.values())
    return (last - first) / (end - start), shares


def sb3_rate(args: Args, name: str, n_envs: int) -> float:
    """Steps/s of stable-baselines3's A2C or PPO: Atari on the same ALE vector environment, the rest on its own.

    The networks are its own, but for A2C on images one of PAAC's size, where that is asked for.
    """
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env as sb3_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecEnv as SB3VecEnv

    class Adapter(SB3VecEnv):
        def __init__(self) -> None:
            self.envs = make_vec_env(args.env_id, n_envs, min(8, os.cpu_count(), n_envs))
            super().__init__(n_envs, self.envs.single_observation_space, self.envs.single_action_space)

        def reset(self) -> np.ndarray:
            return self.envs.reset(seed=0)[0]

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple:
            obs, rewards, terminated, truncated, _ = self.envs.step(self.actions)
            return obs, np.clip(rewards, -1, 1).astype(np.float32), terminated | truncated, [{} for _ in range(n_envs)]

        def close(self) -> None:
            self.envs.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list:
            return [None] * n_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list:
            return [None] * n_envs

        def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
            return [False] * n_envs

    class Nips(BaseFeaturesExtractor):
        def __init__(self, observation_space: gym.spaces.Box) -> None:
            super().__init__(observation_space, 256)
            model = paac.ActorCritic(observation_space, gym.spaces.Discrete(1), "nips")
            self.trunk = model.trunk.to(memory_format=torch.contiguous_format)  # as stable-baselines3's own

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return self.trunk(obs)  # already in [0, 1]

    marks, warm_up = [], 5 if name == "paac" else 2  # rollouts

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            marks.append((time.perf_counter(), self.num_timesteps))

        def _on_step(self) -> bool:
            return len(marks) <= warm_up or marks[-1][0] - marks[warm_up][0] < args.seconds

    atari = is_atari(gym.spec(args.env_id))
    policy, envs = ("CnnPolicy", Adapter()) if atari else ("MlpPolicy", sb3_vec_env(args.env_id, n_envs))
    if name == "paac":
        network = {"features_extractor_class": Nips} if atari and args.archs != ("nature",) else {}
        model = A2C(policy, envs, n_steps=5, device=args.device, policy_kwargs=network)
    else:
        preset = ppo_batch.Args(**ppo_batch.PRESETS["atari" if atari else "vector"])
        constants = {"batch_size": preset.minibatch_size, "n_epochs": preset.update_epochs}
        model = PPO(policy, envs, n_steps=preset.update_interval // n_envs, device=args.device, **constants)
    model.learn(10**9, callback=Clock())
    return (marks[-1][1] - marks[warm_up][1]) / (marks[-1][0] - marks[warm_up][0])


def sb3_process_rate(args: Args, name: str, n_envs: int, arch: str) -> float:
    """`sb3_rate` as its users run it: without the OMP_WAIT_POLICY that this script and paac.py set for themselves."""
    flags = ["--trainer", name, "--env-id", args.env_id, "--n-envs", str(n_envs)]
    flags += ["--device", args.device, "--seconds", str(args.seconds), "--archs", arch]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    command = [sys.executable, os.path.abspath(__file__), "--sb3-worker", *flags]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def contenders(args: Args, name: str, n_envs: int, arch: str) -> dict[str, Callable[[], float]]:
    """What measures the steps/s of a trainer with a network, and last those of its peer, by what to call them."""
    if name in HOGWILD:
        own = hogwild.Args(env_id=args.env_id, seconds=args.seconds)
        found = {name: lambda: hogwild.trainer_rate(own, name, n_cores())}
        if args.pfrl and name == "a3c":
            found[PEERS[name]] = lambda: hogwild.pfrl_process_rate(own, n_cores())
        return found
    found = {f"{name} {arch}".removesuffix(" auto"): lambda: trainer_rate(args, name, n_envs, arch, False)[0]}
    if args.sb3 and name in N_ENVS:
        found[f"{PEERS[name]} {arch}".removesuffix(" auto")] = lambda: sb3_process_rate(args, name, n_envs, arch)
    return found


def compare(args: Args, n_envs: int, groups: list[dict[str, Callable[[], float]]]) -> None:
    """Measure the environment alone and all contenders in turn, and print a line each; peers are within a group."""
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        rates["environment alone"].append(environment_rate(args, n_envs))
        for group in groups:
            for label, measure in group.items():
                rates[label].append(measure())
    ceiling = median(rates["environment alone"])
    print(f"{'environment alone':20} {ceiling:9,.0f} steps/s with {n_envs} environments", flush=True)
    for group in groups:
        peer = list(group)[1] if len(group) > 1 else None
        for label in group:
            rate = median(rates[label])
            line = f"{label:20} {rate:9,.0f} steps/s  {rate / ceiling:5.2f} of the environment alone"
            if peer:
                line += f"  {rate / median(rates[peer]):5.2f} of {peer}"
            print(line, flush=True)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.sb3_worker:
        print(sb3_rate(args, args.trainer, args.n_envs[0]))
        return
    takers = {"n_envs": [*N_ENVS], "archs": [*N_ENVS, "apex"], "flags": [*N_ENVS, "apex"]}
    for flag, trainers in takers.items():
        if getattr(args, flag) and args.trainer not in trainers:
            sys.exit(f"throughput.py: --{flag.replace('_', '-')}: not with --trainer {args.trainer}")
    keep_freed_memory()  # as the trainers' main does
    threads = torch.get_num_threads()
    gpu = f", {torch.cuda.get_device_name()}" if args.device == "cuda" else ""
    print(
        f"{args.env_id}, torch {torch.__version__} with {threads} threads{gpu}; {args.rounds} x {args.seconds} s each"
    )
    if args.trainer == "all":
        compare(args, 32, [contenders(args, name, N_ENVS.get(name, 0), "auto") for name in TRAINERS])
        return
    archs = args.archs or (("nips", "nature") if args.trainer == "paac" and args.env_id == Args.env_id else ("auto",))
    for n_envs in args.n_envs or (N_ENVS.get(args.trainer, 32),):
        compare(args, n_envs, [contenders(args, args.trainer, n_envs, arch) for arch in archs])
        for arch in archs if args.trainer in N_ENVS else ():
            shares = trainer_rate(args, args.trainer, n_envs, arch, True)[1]
            text = ", ".join(f"{part} {share:.0%}" for part, share in sorted(shares.items()))
            print(f"{args.trainer} {arch}: {text}", flush=True)


if __name__ == "__main__":
    main()
