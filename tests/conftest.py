"""The same start for every test, whoever runs them, and the fixtures of the tests that run a trainer."""

import os
import signal

# Tiny networks gain nothing from more threads, and idle OpenMP threads spin on busy machines. Before torch is
# imported; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import common.evaluation
import common.run
from tests.helpers import content, run

# A GPU is for the tests that ask for it: others compare with numbers of the CPU.
find_cuda = torch.cuda.is_available
HAS_CUDA, VISIBLE = find_cuda(), os.environ.get("CUDA_VISIBLE_DEVICES")
torch.cuda.is_available = lambda: False

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell runs the tests in its background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one by nohup


@pytest.fixture(scope="session", autouse=True)
def no_gpu_for_subprocesses() -> None:
    """A fixture, as the workers of pytest-xdist would inherit it from what imports this file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is there; the test is skipped where there is none."""
    if not HAS_CUDA:
        pytest.skip("no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", find_cuda)
    if VISIBLE is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)


@pytest.fixture
def own_folder_and_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Default run directories go into tmp_path; a run's signal handlers end with the test.

    One thread: OpenMP's barriers make these small networks a hundred times slower on a machine with other work.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run with flags that must be refused: status 2, nothing started or written. Returns the one line of stderr."""

    def check(trainer: ModuleType, *flags: Any) -> str:
        def started(*arguments: Any) -> None:
            raise AssertionError("something was started")

        before = content(tmp_path)
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name in ("train", "Run", "Team"):
                patch.setattr(trainer, name, started, raising=name != "Team")  # not every trainer starts a team
            patch.setattr(common.run, "evaluate_run", started)
            patch.setattr(common.evaluation, "make_vec_env", started)
            code = run(trainer, *flags)
        stdout, stderr = capfd.readouterr()
        assert content(tmp_path) == before
        assert code == 2
        assert (stdout, len(stderr.splitlines())) == ("", 1), stderr
        assert stderr.startswith(f"{trainer.__name__}.py: ")
        return stderr

    return check
