"""Around the training loop: flags, and the run directory with checkpoint, curves and progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm

from common.processes import WorkerError, keep_freed_memory, on_signals
from common.vec_env import env_spaces

LOG_SECONDS = 2  # between two points of the curves
PRINT_SECONDS = 30  # between two lines, where there is no terminal for a progress bar
SAVE_SECONDS = 600  # between two checkpoints at most, where steps are slow


@dataclasses.dataclass
class RunArgs:
    """The flags of every trainer."""

    env_id: str = "PongNoFrameskip-v4"
    """any Gymnasium id, `module:Id` included"""
    env_kwargs: str = "{}"
    """JSON: keyword arguments for the environment"""
    seed: int = 1
    """of environments, parameters and actions; runs in which processes race differ nevertheless"""
    rewards: Literal["auto", "clip", "scale", "raw"] = "auto"
    """learn from rewards clipped to [-1, 1], divided by the size of returns (common/norm.py), or as
    they are; auto: clip on Atari, else scale"""
    run_dir: str | None = None
    """a new folder; None: runs/<env-id>__<script>__<seed>__<time>-<process>"""
    checkpoint_interval: int = 250_000
    """agent steps between checkpoints; and one at least every ten minutes"""
    resume: str | None = None
    """run directory to go on from; flags given beside it override the run's own"""
    evaluate: str | None = None
    """run directory to evaluate; trains nothing"""
    eval_episodes: int = 30
    """episodes to evaluate, after training or with --evaluate, all in parallel and cut after 27,000
    steps; 0: none"""
    record: bool = False
    """write agent.gif of one more episode into the run directory"""


def usage_error(message: str) -> NoReturn:
    """End with exit status 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def parse_args(
    script: str,
    argv: list[str] | None,
    default: Any,
    description: str,
    presets: dict[str, dict],
    pick_preset: Callable,
) -> tuple[Any, gym.Space, gym.Space]:
    """The flags, and the spaces of observations and of actions that they lead to.

    A flag that is not given has the value of the run of --resume or --evaluate, or of the preset.

    Args:
        default: an instance of the trainer's dataclass.
        description: its docstring, whose first line --help shows.
        pick_preset: (args, observations, actions) → the preset of --preset auto.
    """
    keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and script not in ("paac", "ppo_batch"):
        usage_error(f"{script}.py does not run under torchrun; paac.py and ppo_batch.py do")
    argv = plain_flags(sys.argv[1:] if argv is None else argv)
    title = description.splitlines()[0]
    args = tyro.cli(type(default), args=argv, default=default, description=title)
    folder = args.resume or args.evaluate
    if folder:
        path = Path(folder) / "args.json"
        if not path.exists():
            usage_error(f"{folder} is no run directory: there is no {path}")
        past = json.loads(path.read_text())
        if args.preset not in ("auto", past.get("preset")):
            usage_error("--preset is for a new run: leave it out with --resume and --evaluate")
        past |= {"run_dir": folder, "resume": None, "evaluate": None, "record": False}
        if args.evaluate:
            past["eval_episodes"] = default.eval_episodes  # it may have been 0 after training
        past = {
            name: tuple(x) if isinstance(x, list) else x
            for name, x in past.items()
            if name in vars(default)
        }
        args = tyro.cli(type(default), args=argv, default=dataclasses.replace(default, **past))
    elif args.run_dir is None:
        started = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        name = f"{args.env_id}__{script}__{args.seed}__{started}"
        args.run_dir = f"runs/{name.replace('/', '-').replace(':', '-')}"
    elif (Path(args.run_dir) / "checkpoint.pt").exists():
        usage_error(
            f"--run-dir {args.run_dir} holds a run; --resume {args.run_dir} goes on with it"
        )
    if folder and args.run_dir != folder:
        usage_error("--run-dir is for a new run: leave it out with --resume and --evaluate")
    run_dir = os.path.abspath(args.run_dir)  # before an environment can change the directory
    try:
        observations, actions = env_spaces(args.env_id, args.env_kwargs)
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        frames = walk_tb((error.__cause__ or error).__traceback__)
        modules = {frame.f_globals["__name__"].split(".")[0] for frame, _ in frames}
        if modules - {"common", "gymnasium", "importlib", "json"}:
            raise  # a mistake in the environment: its traceback says where
        usage_error(f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}: {error}")
    if not folder:
        if args.preset == "short" and len(observations.shape) != 3:
            usage_error(f"--preset short is for images, {args.env_id} has vectors: leave it out")
        preset = pick_preset(args, observations, actions) if args.preset == "auto" else args.preset
        default = dataclasses.replace(default, **presets[preset])
        args = tyro.cli(type(default), args=argv, default=default)
        args.preset = preset
    for name, value in vars(args).items():
        if isinstance(value, int | float) and value < 0:
            usage_error(f"--{name.replace('_', '-')} {value} is below zero")
    args.run_dir = run_dir
    return args, observations, actions


def plain_flags(argv: list[str]) -> list[str]:
    """`--total-steps 1e6` as 1000000."""
    number = re.compile(r"^(--[\w-]+=)?(\d+(?:\.\d+)?e\d+)$")
    return [number.sub(lambda m: f"{m[1] or ''}{float(m[2]):.15g}", word) for word in argv]


def pick_device(name: str) -> torch.device:
    """The device of --device; auto: CUDA where there is any; under torchrun each rank's own."""
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if name == "cuda":
        usage_error("cuda: PyTorch finds no such device")
    return torch.device("cpu")


def pick_bfloat16(choice: str, device: torch.device) -> bool:
    """Whether to compute in bfloat16, by --bfloat16; auto: on CPUs that are faster at it."""
    faster = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return choice == "on" or (choice == "auto" and faster)


def load_checkpoint(script: str, folder: str, **parts: Any) -> dict[str, Any]:
    """Load the states of the parts from a run directory, and return the whole checkpoint.

    Code that a checkpoint may hold is not run.
    """
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        usage_error(f"{folder} was stopped before its first checkpoint")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if checkpoint["script"] != script:
        usage_error(f"{path} was written by {checkpoint['script']}.py, not by {script}.py")
    for name, part in parts.items():
        try:
            part.load_state_dict(checkpoint[name])
        except (KeyError, RuntimeError, ValueError) as error:
            usage_error(f"{path}: its {name} does not fit these flags: {error}")
    return checkpoint


class Run:
    """A run directory with args.json, curves, checkpoint.pt and summary.json; a context.

    SIGINT and SIGTERM set `stopped`; a second one, later than a second after it, ends at once. When
    the context ends the last checkpoint is written, also after a failure.

    Args:
        parts: what checkpoints hold, by name, a `model` among it. --resume loads it.
    """

    def __init__(self, script: str, args: Any, **parts: Any) -> None:
        self.script, self.args, self.parts = script, args, parts
        self.step = self.updates = self.episodes = self.signal = 0
        self.stopped_at = math.inf
        self.started = time.monotonic()  # moved back by the time of earlier parts of the run
        self.returns: deque[float] = deque(maxlen=100)
        self.finished: list[tuple[float, int]] = []  # episodes since the last point of the curves
        if args.resume:
            checkpoint = load_checkpoint(script, args.run_dir, **parts)
            self.step, self.updates = checkpoint["step"], checkpoint["updates"]
            self.episodes, self.returns = checkpoint["episodes"], deque(checkpoint["returns"], 100)
            self.started -= checkpoint["wall_seconds"]
            if self.complete:
                done = f"{args.run_dir} has {self.step:,} steps"
                usage_error(f"{done}: --resume needs more --total-steps, --evaluate plays episodes")
        self.first_time = 0.0  # of the first step, which speeds count from
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self._open(args)

    def _open(self, args: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, which no worker needs

        self.dir = Path(args.run_dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        write_json(self.dir / "args.json", dataclasses.asdict(args))
        self.writer = SummaryWriter(args.run_dir, purge_step=self.step + 1)
        print(f"run directory: {self.dir}", flush=True)
        self.bar = tqdm(
            total=args.total_steps,
            initial=self.step,
            unit="step",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    @property
    def complete(self) -> bool:
        return self.step >= self.args.total_steps

    def __enter__(self) -> Run:
        self.handling = on_signals(self._stop)
        self.handling.__enter__()
        return self

    def _stop(self, number: int) -> None:
        if time.monotonic() - self.stopped_at > 1:  # `timeout` sends each signal twice
            sys.exit(128 + number)
        first = not self.signal
        self.signal, self.stopped_at = number, time.monotonic()
        if first:
            with contextlib.suppress(OSError):  # a pipe's reader may be gone
                os.write(2, b"\nstopping after this update; a later signal ends without saving\n")

    def log_episode(self, episode_return: float, length: int) -> None:
        """Count an episode: its raw return, and its length in agent steps."""
        self.episodes += 1
        self.finished.append((float(episode_return), int(length)))
        self.returns.append(self.finished[-1][0])

    def log_update(self, step: int, **losses: Any) -> None:
        """Count an update, after which `step` agent steps have been taken."""
        self.updates += 1
        self.log_step(step, **losses)

    def log_step(self, step: int, **losses: Any) -> None:
        """Count agent steps; now and then draw a point of the curves, and save."""
        self.time = time.monotonic()
        if not self.first_time and step > self.step:
            self.first_step = self.logged_step = step
            self.first_time = self.logged = self.printed = self.time
        self.bar.update(step - self.step)
        self.step = step
        if self.first_time and self.time - self.logged > LOG_SECONDS:
            self._log(**losses)
        late = self.time - self.saved_at > SAVE_SECONDS
        if step - self.saved_step >= self.args.checkpoint_interval or late:
            self.save()

    def _log(self, **losses: Any) -> None:
        speed = (self.step - self.logged_step) / (self.time - self.logged)
        scalars = {f"losses/{name}": mean(x) for name, x in losses.items()}
        scalars["charts/SPS"] = speed
        if self.finished:
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(
                self.finished, axis=0
            )
            self.finished.clear()
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.step)
        self.logged, self.logged_step = self.time, self.step
        progress = f"return {np.mean(self.returns):.2f}" if self.returns else "no episode yet"
        self.bar.set_postfix_str(progress)
        if self.bar.disable and self.time - self.printed > PRINT_SECONDS:
            left = tqdm.format_interval((self.args.total_steps - self.step) / max(speed, 1e-3))
            steps = f"step {self.step:,} of {self.args.total_steps:,}, {speed:,.0f} steps/s"
            print(f"{steps}, {progress}, {left} left", flush=True)
            self.printed = self.time

    def save(self) -> None:
        """Write checkpoint.pt beside the old one and rename it: a kill leaves a whole one.

        Raises: FloatingPointError: the network has numbers that are not finite; nothing is written.
        """
        # of a copy, as x may differ from itself while other processes write it
        if not all(x.clone().isfinite().all() for x in self.parts["model"].state_dict().values()):
            raise FloatingPointError("the network has numbers that are not finite; it is not saved")
        state = {
            **{name: getattr(self, name) for name in ("script", "step", "updates", "episodes")},
            "wall_seconds": time.monotonic() - self.started,
            "returns": list(self.returns),
            **{name: part.state_dict() for name, part in self.parts.items()},
        }
        torch.save(state, self.dir / "checkpoint.tmp")
        os.replace(self.dir / "checkpoint.tmp", self.dir / "checkpoint.pt")
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        try:
            if error is None or isinstance(error, Exception):
                self._finish("completed" if self.complete else "failed" if error else "interrupted")
        finally:
            self.writer.close()
            self.handling.__exit__(None, None, None)
        if isinstance(error, WorkerError):
            if self.signal:  # to the whole group, which may end workers, too
                return True
            print(f"{self.script}.py: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        return False

    def _finish(self, status: str) -> None:
        speed = 0.0
        if self.first_time and self.time > self.first_time:
            speed = (self.step - self.first_step) / (self.time - self.first_time)
            if self.time > self.logged:
                self._log()
        self.save()
        content = {
            "script": self.script,
            "env_id": self.args.env_id,
            "seed": self.args.seed,
            "steps": self.step,
            "episodes": self.episodes,
            "wall_seconds": time.monotonic() - self.started,
            "steps_per_second": round(speed, 1),
            "return_last_100": float(np.mean(self.returns)) if self.returns else None,
            "status": status,
        }
        write_json(self.dir / "summary.json", content)
        self.bar.close()
        if status != "completed":
            print(f"stopped at step {self.step:,}; --resume {self.dir} goes on from there")


def mean(x: Any) -> float:
    return torch.as_tensor(x).detach().float().mean().item()


def write_json(path: Path, content: dict) -> None:
    """Write the file beside the old one and rename it: a kill leaves a whole one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)
