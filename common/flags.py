"""The command line of every trainer: its flags, whether they can work, and what a flag that is not given shall be.

A trainer's `Args` is a `RunArgs` that has at least preset, total_steps, seed and arch besides. `read_args`, which reads
them all, is in `run.py`, as they may come from an earlier run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
from pathlib import Path, PurePosixPath
from typing import Any

import gymnasium as gym
import torch
import tyro
from gymnasium import spaces
from PIL import Image

from common.envs import find_spec, make_env

LARGEST = 3e38  # real number that a flag may have: float32 ends at 3.4e38

# Flags of any trainer by the range that their values must lie in; None: what a tensor holds. A flag may be None, too.
RANGES = {
    (0, 2**64 - 1): "seed",
    (1, None): "total_steps checkpoint_interval n_envs t_max update_interval update_epochs epsilon_steps batch_size"
    " target_interval envs_per_actor fetch_interval learning_starts trim_interval",
    (1, 1024): "n_processes n_actors learner_threads",
    (1, 255): "n_step",
    (0, 10_000): "eval_episodes",
    (0, 1): "gamma gae_lambda rms_decay epsilon eval_epsilon priority_alpha priority_beta",
    (0, None): "learning_rate entropy_coef value_coef max_grad_norm clip_coef epsilon_alpha reward_scale",
    (1e-12, None): "rms_eps adam_eps priority_eps",
    (1e-3, None): "replay_ratio",
}


class UsageError(Exception):
    """Wrong arguments: one line for the user, exit status 2."""


@dataclasses.dataclass
class RunArgs:
    """The flags of every trainer that have nothing to do with its algorithm."""

    env_id: str = "PongNoFrameskip-v4"
    """any Gymnasium id, `module:Id` included"""
    env_kwargs: str = "{}"
    """JSON: keyword arguments for the environment"""
    run_dir: str | None = None
    """must not exist yet; None: runs/<env-id>__<script>__<seed>__<time>"""
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


def atari_or_vector(args: Any, env: gym.Env) -> str:
    """The preset for images or for vectors, as most trainers call them."""
    return "atari" if len(env.observation_space.shape) == 3 else "vector"


def read_flags(argv: list[str] | None, default: Any, description: str) -> Any:
    """The command line by tyro, into a copy of the dataclass `default`.

    Raises:
        UsageError: tyro refuses it; with the first sentence of its box. A folder has no name.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            args = tyro.cli(type(default), args=argv, default=default, description=description)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        lines = [line.strip("│ ") for line in output.getvalue().splitlines()[1:]]
        if not lines[0].strip("-"):  # below the title, where the box is drawn in ASCII
            lines.pop(0)
        raise UsageError(" ".join(itertools.takewhile(lambda line: line.strip("─-"), lines))) from None
    for name in ("run_dir", "resume", "evaluate"):
        folder = getattr(args, name)
        if folder == "":  # a variable of a shell that is not set
            raise UsageError(f"--{name.replace('_', '-')} '': a folder is needed")
        if folder and folder.encode(errors="ignore").decode() != folder:  # torch and TensorBoard fail there
            raise UsageError(f"--{name.replace('_', '-')} {folder!r}: a name in UTF-8 is needed")
    return args


def check_env(args: Any) -> gym.Env:
    """An environment that was made as the flags say and is closed again, for its spaces.

    Raises:
        UsageError: it cannot be made, or not be drawn where --record wants that.
    """
    try:
        env_kwargs = json.loads(args.env_kwargs)
    except ValueError:
        env_kwargs = None
    if not isinstance(env_kwargs, dict):
        raise UsageError(f"--env-kwargs {args.env_kwargs}: a JSON object is needed")
    try:
        env = make_env(find_spec(args.env_id), env_kwargs, "rgb_array" if args.record else None)
    except (Exception, SystemExit) as error:
        what = "--env-id {} with --record" if args.record else "--env-id {}"
        bare = isinstance(error, LookupError | SystemExit) or not str(error)  # a key or a number says nothing
        raise UsageError(f"{what.format(args.env_id)}: {repr(error) if bare else error}") from error
    with contextlib.closing(env):
        if args.record:
            try:
                env.reset()
                Image.fromarray(env.render())
            except Exception as error:
                cause = str(error) or type(error).__name__
                raise UsageError(f"--record: {args.env_id} cannot be drawn here: {cause}") from error
    return env


def check_discrete(script: str, args: Any, env: gym.Env) -> None:
    """Raises UsageError where the actions are not Discrete."""
    if not isinstance(env.action_space, spaces.Discrete):
        raise UsageError(f"--env-id {args.env_id}: {script}.py needs Discrete actions, it has {env.action_space}")


def pick_arch(args: Any, space: spaces.Box, default: str) -> str:
    """The network of --arch; auto: `default` for images, mlp for vectors.

    Raises:
        UsageError: it does not fit the observations.
    """
    images = len(space.shape) == 3
    arch = (default if images else "mlp") if args.arch == "auto" else args.arch
    if (arch == "mlp") == images:
        raise UsageError(f"--arch {arch} does not fit the observations of {args.env_id}: {space}")
    return arch


def check_range(args: Any, names: str, low: float, high: float | None = None) -> None:
    """Raises UsageError where one of the flags is not finite or lies outside [low, high]; None: what a tensor holds."""
    for name in names.split():
        value = getattr(args, name)
        most = high if high is not None else 2**62 if isinstance(value, int) else LARGEST
        if not low <= value <= most:  # refuses NaN as well
            raise UsageError(f"{flag_and_value(args, name)}: it must lie in [{low}, {most}]")


def flag_and_value(args: Any, name: str) -> str:
    return f"--{name.replace('_', '-')} {getattr(args, name)}"


def pick_device(name: str) -> torch.device:
    """The device of --device.

    Raises:
        UsageError: there is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is available")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def free_memory(device: str) -> float:
    """Bytes that may still be allocated on "cpu" or "cuda": half of all where the system does not tell."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2]
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = [int(lines["MemAvailable"].split()[0]) * 1024]
    free += group_memory()
    with contextlib.suppress(OSError, ValueError, ImportError):  # the limit of a process, `ulimit -v`
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

        if (limit := getrlimit(RLIMIT_AS)[0]) != RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            free.append(limit - used)
    return min(free)


def group_memory() -> list[float]:
    """Free bytes of the control groups of Linux that hold this process and have a limit: containers, batch jobs."""
    free, paths = [], {"": "/", "memory": "/"}  # of the hierarchies of version 2 and of version 1
    with contextlib.suppress(OSError):
        paths |= dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    version_2 = ("/sys/fs/cgroup", paths[""], "max", "current", "inactive_file")
    version_1 = ("/sys/fs/cgroup/memory", paths["memory"], "limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    for mount, path, limit, usage, cache in (version_2, version_1):
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            start = f"{mount}{group}/memory."
            with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or no limit: "max"
                used = dict(line.split() for line in Path(start + "stat").read_text().splitlines())
                given_back = int(used[cache])  # when it is needed
                free.append(int(Path(start + limit).read_text()) - int(Path(start + usage).read_text()) + given_back)
    return free


def check_rollout(args: Any, n_steps: int, space: gym.Space, more_bytes: int = 0) -> None:
    """Raises UsageError where n_steps observations of each environment, and more_bytes with each, exceed the memory."""
    need = n_steps * args.n_envs * (space.dtype.itemsize * math.prod(space.shape) + more_bytes)
    free = free_memory(pick_device(args.device).type)
    if need > free:
        what = f"{flag_and_value(args, 'n_envs')} with {n_steps:,} steps between updates"
        raise UsageError(f"{what}: it needs {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
