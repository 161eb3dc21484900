"""The files of a run directory: written whole or not at all, and read without running what they may hold."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.flags import UsageError

COUNTS = ("step", "updates", "episodes", "wall_seconds")  # of a run, which go on where they were


@contextlib.contextmanager
def only_writer(run_dir: str) -> Iterator[None]:
    """A lock on a run directory, which is gone when the process is. Raises UsageError where another one has it."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"--resume {run_dir}: another process is training there") from None
        yield
    finally:
        os.close(folder)


def file_number(run_dir: str) -> int:
    """Which file the checkpoint is: each time it is saved another one, as long as somebody has the old one open."""
    return (Path(run_dir) / "checkpoint.pt").stat().st_ino


def write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:  # a full disk names no file
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


def load_checkpoint(script: str, flag: str, run_dir: str) -> dict:
    """The checkpoint of a run directory of this script; runs no code that the file may hold.

    Raises:
        UsageError: there is none, it is damaged, or another script wrote it.
    """
    path = Path(run_dir) / "checkpoint.pt"
    if not path.is_file():
        what = "it holds no checkpoint.pt" if Path(run_dir).is_dir() else "there is no such run directory"
        raise UsageError(f"{flag} {run_dir}: {what}")
    try:
        number = file_number(run_dir)
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if damaged := archive.testzip():
                raise ValueError(damaged)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        writer, keys = checkpoint["script"], set(checkpoint)
    except PermissionError as error:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt cannot be read: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt is damaged or not a checkpoint") from error
    if writer != script:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt was written by {writer}.py, not by {script}.py")
    needed = {"args", *COUNTS, "returns", "model", "torch_rng", "cuda_rng"}
    if not any(key.startswith("optimizer") for key in keys):  # one, or one for each process
        needed.add("optimizer")
    if missing := needed - keys:
        raise UsageError(f"{flag} {run_dir}: checkpoint.pt is not whole, it lacks {', '.join(sorted(missing))}")
    return checkpoint | {"file": number}


def load_part(name: str, part: Any, checkpoint: dict, args: Any) -> None:
    """Load the state of a module or an optimizer, whose constants stay those of the flags.

    Raises:
        UsageError: the checkpoint of --resume or --evaluate holds none, or one of another shape.
    """
    where = f"{'--evaluate' if args.evaluate else '--resume'} {args.run_dir}: the checkpoint holds"
    if name not in checkpoint:
        raise UsageError(f"{where} no {name}")
    try:
        state = checkpoint[name]
        if isinstance(part, torch.optim.Optimizer):
            state = state | {"param_groups": part.state_dict()["param_groups"]}
        part.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        changed = "the environment or a flag that shapes the network has changed"
        raise UsageError(f"{where} another {name}: {changed}") from error


def all_finite(state: Any) -> bool:
    """Whether every number in the tensors of a state, dicts and lists within dicts and lists, is finite."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(state.isfinite().all())
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return all(all_finite(child) for child in children)


class Remembering(io.BufferedWriter):
    """A file that keeps why a write failed: where the disk is full, torch.save says only that something went wrong."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise
