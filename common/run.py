"""What every trainer has around its algorithm: the command line, the run, its progress and its end.

`script` is the name of a trainer, `args` its flags (see `flags.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import json
import os
import re
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from common.checkpoint import (
    COUNTS,
    Remembering,
    all_finite,
    file_number,
    load_checkpoint,
    load_part,
    only_writer,
    write_json,
)
from common.evaluation import Policy, evaluate, record
from common.flags import RANGES, UsageError, check_env, check_range, flag_and_value, read_flags
from common.processes import STOP_SIGNALS, Lasting, WorkerError

PRINT_INTERVAL = 30  # seconds between two lines where there is no terminal for a progress bar


# ------------------------------------------------------------------------------------------------------ script


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    with contextlib.redirect_stdout(Lasting(sys.stdout)), contextlib.redirect_stderr(Lasting(sys.stderr)):
        try:
            yield
        finally:  # what Python itself cannot write at its end is an error
            sys.stdout.flush()
            sys.stderr.flush()


@lasting_output()
def run_script(
    script: str,
    argv: list[str] | None,
    parse: Callable[[list[str] | None], tuple[Any, dict | None]],
    train: Callable[[Any, dict | None], int],
    make_model: Callable[[Any], nn.Module],
    make_policy: Callable[[nn.Module, Any], Policy],
) -> int:
    """Run the command line: train, or evaluate what was learned. Returns the exit status."""
    keep_freed_memory()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with the arguments is said in one line
            args, checkpoint = parse(argv)
        if checkpoint:  # or refuse it, before anything is started
            load_part("model", model := make_model(args), checkpoint, args)
        if args.evaluate:
            torch.manual_seed(args.seed)
            evaluate_run(script, args, functools.partial(make_policy, model, args))
            return 0
        model = None  # training makes its own
        with only_writer(args.run_dir):
            if checkpoint and checkpoint["file"] != file_number(args.run_dir):
                raise UsageError(f"--resume {args.run_dir}: another process has just saved there; try again")
            return train(args, checkpoint)
    except (UsageError, WorkerError, FloatingPointError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        usage, text = isinstance(error, UsageError), str(error) or "out of memory"
        print(f"{script}.py: {' '.join(text.split()) if usage else text}", file=sys.stderr)
        return 2 if usage else 1
    except KeyboardInterrupt:  # before training has begun, or while --evaluate plays
        return 130


# ------------------------------------------------------------------------------------------------------ flags


def read_args(
    script: str,
    argv: list[str] | None,
    default: Any,
    description: str,
    presets: dict[str, dict[str, Any]],
    auto: Callable[[Any, gym.Env], str],
    fixed: tuple[str, ...] = (),
) -> tuple[Any, dict | None, gym.Env]:
    """The flags, each in its range, with the constants of a preset where none is given beside it.

    Args:
        default: an instance of the trainer's dataclass.
        auto: names the preset that fits the flags and the environment, for --preset auto.
        fixed: flags that stay as they are in the run that --resume or --evaluate names, besides preset and arch.

    Returns: the flags, the checkpoint of --resume or --evaluate, and the environment, closed, for its spaces.

    Raises:
        UsageError: one of them cannot be used.
    """
    args, checkpoint = read_flags(argv, default, description), None
    if args.resume or args.evaluate:
        args, checkpoint = read_run(script, argv, args, ("preset", "arch", *fixed))
    env = check_env(args)
    if checkpoint is None:  # the flags again, on top of the constants of the preset
        preset = auto(args, env) if args.preset == "auto" else args.preset
        args = read_flags(argv, type(args)(**presets[preset]), description)
        args.preset = preset
    for bounds, names in RANGES.items():
        check_range(args, " ".join(n for n in names.split() if getattr(args, n, None) is not None), *bounds)
    return args, checkpoint, env


def read_run(script: str, argv: list[str] | None, args: Any, fixed: tuple[str, ...]) -> tuple[Any, dict]:
    """The flags and the checkpoint of the run that --resume or --evaluate names; flags in `argv` override its own.

    Raises:
        UsageError: the run cannot be used, or a flag of `fixed` is not as the run has it.
    """
    if args.resume and args.evaluate:
        raise UsageError("--resume and --evaluate exclude each other")
    flag, folder = ("--resume", args.resume) if args.resume else ("--evaluate", args.evaluate)
    checkpoint = load_checkpoint(script, flag, folder)
    own = {"run_dir": folder, "record": False, "resume": None, "evaluate": None}
    try:
        past = type(args)(**checkpoint["args"] | own)
    except TypeError as error:
        raise UsageError(f"{flag} {folder}: it is from another version of {script}.py: {error}") from error
    if args.evaluate and not past.eval_episodes:
        past.eval_episodes = type(args).eval_episodes
    args = read_flags(argv, past, "")
    if args.evaluate and not (args.eval_episodes or args.record):
        raise UsageError("--eval-episodes 0: without --record there is nothing to do")
    for name in ("env_id", "run_dir", *fixed):
        if getattr(args, name) == "auto":  # what it was when the run began
            setattr(args, name, getattr(past, name))
        if getattr(args, name) != getattr(past, name):
            raise UsageError(f"{flag_and_value(args, name)}: {flag} {folder} has {getattr(past, name)}")
    if args.resume and not all(checkpoint[key] for key in checkpoint if key.startswith("optimizer")):
        raise UsageError(f"--resume {folder}: its checkpoint holds a network alone, for --evaluate")
    if args.resume and checkpoint["step"] >= args.total_steps:
        done = f"it has done {checkpoint['step']:,} of {args.total_steps:,} steps"
        raise UsageError(f"--resume {folder}: {done}; a larger --total-steps goes on from there")
    return args, checkpoint


def keep_freed_memory() -> None:
    """Let glibc keep memory that is freed: it would return it to the system at each step, and page it in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 28)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)


# --------------------------------------------------------------------------------------------------------- run


def make_run_dir(script: str, args: Any) -> None:
    """Make the new folder `args.run_dir`, named after the run where that is None.

    Raises:
        UsageError: it exists or cannot be made.
    """
    name = f"{args.env_id}__{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    default, given, tries = str(Path("runs") / re.sub(r"[^\w.-]", "-", name)), args.run_dir, 1
    while True:
        args.run_dir = given or (default if tries == 1 else f"{default}-{tries}")
        try:
            return Path(args.run_dir).mkdir(parents=True)
        except OSError as error:
            if given or not Path(args.run_dir).exists():
                raise UsageError(f"--run-dir {args.run_dir}: {error.strerror}") from error
        tries += 1  # another run was started in the same second


def to_float(value: Any) -> float:
    """A number, or the mean of a tensor: taken only where it is logged, not at every update."""
    return float(value.detach().mean() if isinstance(value, Tensor) else value)


class Run:
    """A context around training: counts and logs, saves when it should, and evaluates at the end.

    Args:
        parts: what a checkpoint saves, by name: model, optimizer and whatever else has a state_dict.
        make_policy: makes, of the model and the flags, the policy that is evaluated when training is complete.
        checkpoint: where to go on; None starts afresh.
        quiet: makes a context in which nobody changes the parts, and that gives the step they are at, or None.
        log_interval: updates between two points in TensorBoard.
    """

    def __init__(
        self,
        script: str,
        args: Any,
        parts: dict[str, Any],
        make_policy: Callable[[nn.Module, Any], Policy],
        checkpoint: dict | None,
        quiet: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        log_interval: int = 100,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, which no worker process needs to spend

        self.script, self.args, self.dir = script, args, Path(args.run_dir)
        self.parts, self.quiet, self.log_interval = parts, quiet, log_interval
        self.new_policy = functools.partial(make_policy, parts["model"], args)
        self.step = self.updates = self.episodes = self.signal = 0
        self.wall_seconds, self.returns = 0.0, deque(maxlen=100)  # of the last 100 episodes
        self.scalars: dict[str, Any] = {}  # of the last update
        self.uncounted: list[tuple[float, float]] = []  # (return, length) of episodes of steps that are not counted yet
        self.finished: list[tuple[float, float]] = []  # of those since the last point
        if checkpoint:
            self._restore(checkpoint)
        self.first_step = self.saved_step = self.logged_step = self.step
        self.started = self.logged_time = self.printed_time = time.monotonic()
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # nohup
        self.handlers = {n: signal.signal(n, self._on_signal) for n in numbers}
        write_json(self.dir / "args.json", dataclasses.asdict(args))
        self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1 if checkpoint else None)
        print(f"run directory: {self.dir}", flush=True)
        options = {"unit": "step", "unit_scale": True, "dynamic_ncols": True, "disable": not sys.stderr.isatty()}
        self.bar = tqdm(total=args.total_steps, initial=self.step, **options)

    def _restore(self, checkpoint: dict) -> None:
        for name, part in self.parts.items():
            load_part(name, part, checkpoint, self.args)
        torch.set_rng_state(checkpoint["torch_rng"])
        if checkpoint["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(checkpoint["cuda_rng"])
        for name in COUNTS:
            setattr(self, name, checkpoint[name])
        self.returns.extend(checkpoint["returns"])

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number  # training stops after this update and saves; a second signal ends it at once
        hangup = number == signal.SIGHUP  # which the system sends, and then the shell once more
        signal.signal(number, signal.SIG_IGN if hangup else signal.SIG_DFL)

    @property
    def stopped(self) -> bool:
        return self.signal != 0

    @property
    def exit_status(self) -> int:
        return 128 + self.signal if self.signal else 0

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, earlier parts included."""
        return self.wall_seconds + time.monotonic() - self.started

    def count_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Take note of episodes that ended: their raw returns and their lengths in agent steps.

        They count with the next update or `advance`, so that a failure before it leaves steps and episodes in accord.
        """
        self.uncounted.extend(zip(returns.tolist(), lengths.tolist(), strict=True))

    def count_update(self, step: int, scalars: dict[str, Any]) -> None:
        """Take note of an update; now and then log the scalars, show the progress and write a checkpoint."""
        self._advance(step)
        self.updates += 1
        self.scalars = scalars
        if self.updates % self.log_interval == 0 and step > self.logged_step:  # several updates may have one step
            self._log()
        self._save_if_due()

    def advance(self, step: int) -> None:
        """Take note of steps without an update; now and then show the progress and write a checkpoint."""
        self._advance(step)
        if step > self.logged_step and time.monotonic() - self.logged_time > PRINT_INTERVAL:
            self._log()  # no update has done so
        self._save_if_due()

    def _save_if_due(self) -> None:
        if self.step - self.saved_step >= self.args.checkpoint_interval:
            self.save()

    def _advance(self, step: int) -> None:
        self.bar.update(step - self.step)
        self.step = step
        self.episodes += len(self.uncounted)
        self.returns.extend(episode_return for episode_return, _ in self.uncounted)
        self.finished += self.uncounted
        self.uncounted.clear()

    def _log(self) -> None:
        now, total = time.monotonic(), self.args.total_steps
        speed = (self.step - self.logged_step) / max(now - self.logged_time, 1e-9)
        self.logged_step, self.logged_time = self.step, now
        scalars = self.scalars | {"charts/SPS": speed}
        if self.finished:
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(self.finished, axis=0)
            self.finished.clear()
            scalars["charts/return_last_100"] = np.mean(self.returns)
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, to_float(value), self.step)
        mean = f"return {np.mean(self.returns):.2f}" if self.returns else "no episode yet"
        self.bar.set_postfix_str(mean, refresh=False)
        if self.bar.disable and now - self.printed_time > PRINT_INTERVAL:
            left = tqdm.format_interval((total - self.step) / max(speed, 1e-3))
            print(f"step {self.step:,} of {total:,}, {speed:,.0f} steps/s, {mean}, {left} left", flush=True)
            self.printed_time = now

    def event(self, text: str) -> None:
        """Print something worth knowing and put it into TensorBoard."""
        tqdm.write(text)
        self.writer.add_text("events", text, self.step)

    def save(self) -> None:
        """Write checkpoint.pt beside the old one and rename it, so that a kill at any instant leaves a whole one.

        Raises: OSError: it cannot be written. FloatingPointError: there is something in it that is not finite.
        The old one is still there then.
        """
        temporary = self.dir / "checkpoint.pt.tmp"
        try:
            self._write(temporary)
            temporary.replace(self.dir / "checkpoint.pt")
        except (OSError, RuntimeError) as error:
            raise OSError(f"{self.dir}: the checkpoint cannot be written: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        self.saved_step = self.step

    def _write(self, temporary: Path) -> None:
        with Remembering(io.FileIO(temporary, "wb")) as file:
            with self.quiet() as step:
                if step is not None:
                    self._advance(step)
                state = {"script": self.script, "args": dataclasses.asdict(self.args)}
                state |= {"step": self.step, "updates": self.updates, "episodes": self.episodes}
                state |= {"wall_seconds": self.seconds, "returns": list(self.returns)}
                state |= {"torch_rng": torch.get_rng_state()}
                state |= {"cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}
                states = {name: part.state_dict() for name, part in self.parts.items()}
                learned = (nn.Module, torch.optim.Optimizer)  # but no memory, parts of which may never be read
                if not all(all_finite(states[name]) for name, part in self.parts.items() if isinstance(part, learned)):
                    raise FloatingPointError("the network has numbers that are not finite; they are not saved")
                try:
                    torch.save(state | states, file)
                except RuntimeError as error:
                    raise file.error or error from None
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, FloatingPointError):
            error.args = (f"step {self.step:,}: {error}",)
        try:
            if kind is None or issubclass(kind, WorkerError):  # after any other failure the parameters may be damaged
                self._finish()
        except (FloatingPointError, OSError) as last:  # the checkpoint could not be written
            if error is None:
                raise
            raise WorkerError(f"{error}\n{last}") from error
        finally:
            self.bar.close()
            self.writer.close()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def _finish(self) -> None:
        if self.step > self.logged_step or self.finished:
            self._log()
        self.bar.close()
        self.save()
        complete = self.step >= self.args.total_steps
        speed = (self.step - self.first_step) / (self.seconds - self.wall_seconds)
        summary = {"script": self.script, "env_id": self.args.env_id, "seed": self.args.seed, "steps": self.step}
        summary |= {"episodes": self.episodes, "wall_seconds": round(self.seconds, 1)}
        summary |= {"steps_per_second": round(speed, 1)}
        summary |= {"return_last_100": float(np.mean(self.returns)) if self.returns else None}
        summary |= {"status": "completed" if complete else "interrupted", "eval": None}
        write_json(self.dir / "summary.json", summary)
        if not complete:
            cause = f" by {signal.Signals(self.signal).name}" if self.signal else ""
            print(f"stopped{cause} at step {self.step:,}; --resume {self.dir} goes on from there", flush=True)
        elif result := evaluate_run(self.script, self.args, self.new_policy, lambda: self.stopped):
            self.writer.add_scalar("eval/return_mean", result["mean"], self.step)
        elif self.stopped:
            print(f"training is complete, its evaluation was stopped; --evaluate {self.dir} does it", flush=True)


# -------------------------------------------------------------------------------------------------- evaluation


def evaluate_run(
    script: str, args: Any, new_policy: Callable[[], Policy], stopped: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Evaluate and record as --eval-episodes and --record say; the result goes into the run's summary.json."""
    result, path = None, Path(args.run_dir) / "summary.json"
    if args.eval_episodes and (result := evaluate(args, new_policy(), stopped)):
        print("{episodes} episodes: {mean:.2f} ± {std:.2f}, from {min:.2f} to {max:.2f}".format(**result), flush=True)
        summary = {"script": script, "env_id": args.env_id}
        with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or what somebody made of it
            summary |= json.loads(path.read_text())
        write_json(path, summary | {"eval": result})
    if args.record:
        record(args, new_policy(), stopped)
    return result
