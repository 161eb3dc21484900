"""What the tests of several trainers need: to run one, to look at what it leaves, and at the processes it starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import common.run
from common.vec_env import env_seed

ROOT = Path(__file__).parent.parent
ENDLESS = 1_000_000_000  # steps
on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")


# --------------------------------------------------------------------------------------------------- a run here


def run(trainer: ModuleType, *flags: Any) -> int:
    """The trainer's main in this process; the exit status."""
    try:
        return trainer.main([str(flag) for flag in flags])
    except SystemExit as error:
        return error.code


def faulty(fault: str, n_workers: int, run_dir: Path) -> list[str]:
    """Flags of a run whose environment 2 fails in the eighth update; 4 environments, 20 steps each."""
    kwargs = {"fault": fault, "after": 38, "only": env_seed(1, 0) + 2}
    flags = ["--env-id", "tests.paac_envs:Faulty-v0", "--env-kwargs", json.dumps(kwargs), "--seed", "1"]
    flags += ["--n-envs", "4", "--t-max", "5", "--n-workers", str(n_workers), "--checkpoint-interval", "20"]
    return [*flags, "--total-steps", str(ENDLESS), "--run-dir", str(run_dir)]


def watch_bfloat16(trainer: ModuleType, network: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each network that is made from now on, whether it computes in bfloat16."""
    made: list[bool] = []

    class Watched(getattr(trainer, network)):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.bfloat16)

    monkeypatch.setattr(trainer, network, Watched)
    return made


def stop_after(monkeypatch: pytest.MonkeyPatch, updates: int, number: int = signal.SIGINT) -> None:
    """Let a signal arrive in the midst of a run, once, after so many updates."""
    count_update = common.run.Run.count_update

    def counted(self: common.run.Run, *arguments: Any) -> None:
        count_update(self, *arguments)
        if self.updates == updates:
            signal.raise_signal(number)

    monkeypatch.setattr(common.run.Run, "count_update", counted)


# ---------------------------------------------------------------------------------------------- run directories


def checkpoint(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def saved_step(run_dir: Path) -> int:
    """The step of the last checkpoint, -1 where there is none yet."""
    return checkpoint(run_dir)["step"] if (run_dir / "checkpoint.pt").exists() else -1


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below it."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_files(run_dir: Path) -> None:
    """A finished run leaves these four files and no other."""
    names = sorted(re.sub(r"tfevents.*", "tfevents", path.name) for path in run_dir.iterdir())
    assert names == ["args.json", "checkpoint.pt", "events.out.tfevents", "summary.json"]


def same(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def squares(state: dict[str, Any], name: str = "optimizer_0") -> Tensor:
    """The statistics of an optimizer in a checkpoint as one vector."""
    return torch.cat([x.flatten() for entry in state[name]["state"].values() for x in entry.values()])


# ---------------------------------------------------------------------------------------------------- processes


def process_table() -> dict[int, tuple[int, str]]:
    """Parent and state of every process."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            table[int(path.parent.name)] = int(fields[1]), fields[0]
    return table


def is_helper(pid: int) -> bool:
    """Python's resource tracker, one a process, which outlives every run in it."""
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def descendants(pid: int) -> set[int]:
    table, found = process_table(), {pid}
    while new := {child for child, (parent, _) in table.items() if parent in found and child not in found}:
        found |= new
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    table = process_table()
    return {pid for pid in pids if pid in table and table[pid][1] not in "ZX"}


def members(process: subprocess.Popen) -> set[int]:
    """Every living process of a `script`, orphans included: they have its environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if process.mark.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def workers_of(process: subprocess.Popen) -> set[int]:
    """The processes that a script has started to act or to learn."""
    return {pid for pid in members(process) - {process.pid} if not is_helper(pid)}


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def script(name: str, *flags: Any, folder: Path = ROOT, cwd: Path | None = None) -> Iterator[subprocess.Popen]:
    """`python <name>.py` with these flags in a session of its own; nothing of it is left afterwards."""
    argv = [sys.executable, str(folder / f"{name}.py"), *map(str, flags)]
    mark, options = f"TEST_SCRIPT={uuid.uuid4()}", {"text": True, "start_new_session": True}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict([mark.split("=")])
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd, **options)
    process.mark = mark
    try:
        yield process
    finally:
        process.kill()
        for pid in members(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=20)


# ---------------------------------------------------------------------------------------------------- networks


def check_bfloat16(exact: nn.Module, rough: nn.Module) -> None:
    """Two actor-critics for images with the same numbers, the second in bfloat16, which has 8 bits.

    The outputs differ, by little; parameters and gradients stay float32.
    """
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    for ours, expected in zip(rough(obs), exact(obs), strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, expected)
        torch.testing.assert_close(ours, expected, atol=0.02 * expected.abs().max().item(), rtol=0.02)
    for network in (exact, rough):
        network(obs)[1].square().sum().backward()
    for p, q in zip(exact.trunk.parameters(), rough.trunk.parameters(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32
        assert torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.99
