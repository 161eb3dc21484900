"""Under torchrun two ranks do what one process does, and stop together; Gloo, on CPUs."""

import importlib
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.run

import common.distributed
import paac
import ppo_batch
from tests.deterministic import sample
from tests.helpers import ROOT, TRAINERS, Script, checkpoint, run, small, summary, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups of Linux")
TORCHRUN = Path(torch.distributed.run.__file__)
TWO_RANKS = ["--standalone", "--nproc-per-node", 2]
TASKS = {
    "CartPole-v1": ["--env-id", "CartPole-v1"],
    "Pendulum-v1": ["--env-id", "Pendulum-v1", "--env-kwargs", '{"max_episode_steps": 15}'],
}
CONSTANTS = {
    "paac": ["--learning-rate", 0.1, "--t-max", 5, "--total-steps", 200],
    "ppo_batch": ["--t-max", 10, "--total-steps", 400, "--minibatch-size", 80],
}


RUNS = [("paac", "CartPole-v1", 0.02), ("paac", "Pendulum-v1", 1e9)]  # 0.02 clips all gradients
RUNS += [("ppo_batch", "CartPole-v1", 1e9), ("ppo_batch", "Pendulum-v1", 0.02)]


@pytest.mark.parametrize(("name", "task", "max_grad_norm"), RUNS)
def test_two_ranks_are_one_process(name, task, max_grad_norm, tmp_path, monkeypatch):
    """Parameters, optimiser and statistics after five updates with all transitions."""
    flags = [name, *TASKS[task], "--preset", "vector", *CONSTANTS[name], "--n-envs", 8]
    flags += ["--max-grad-norm", max_grad_norm, "--n-workers", 0, "--eval-episodes", 1]
    monkeypatch.setattr(importlib.import_module(name).ActorCritic, "sample", sample)
    assert run(*flags, "--run-dir", tmp_path / "one") == 0
    two = [*TWO_RANKS, ROOT / "tests/deterministic.py", *flags, "--run-dir", tmp_path / "two"]
    with Script(TORCHRUN, two, tmp_path) as ranks:
        assert ranks.end() == 0, ranks.output()
    states = [checkpoint(tmp_path / folder) for folder in ("one", "two")]
    for part in ("model", "optimizer" if name == "paac" else "adam"):
        one, two = (flat(state[part]) for state in states)
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert states[1]["updates"] == 5
    assert states[0]["episodes"] == states[1]["episodes"] > 0
    assert sorted(states[0]["returns"]) == pytest.approx(sorted(states[1]["returns"]))


def flat(x):
    if isinstance(x, dict):
        return torch.cat([flat(value) for value in x.values()])
    return torch.as_tensor(x).double().flatten() if not isinstance(x, list) else torch.empty(0)


@pytest.mark.parametrize("trainer", [paac, ppo_batch])
def test_ranks_draw_differently(trainer, tmp_path, monkeypatch):
    seeds = set()
    for rank in range(2):
        monkeypatch.setattr(trainer, "RANK", rank)
        flags = *small(trainer.__name__, 0), "--total-steps", 20
        assert run(trainer.__name__, *flags, "--run-dir", tmp_path / str(rank)) == 0
        seeds.add(torch.initial_seed())
    assert len(seeds) == 2


class Ranks(Script):
    """A run without end of two ranks, each with a worker, that counts its steps in a file."""

    def __init__(self, name, folder):
        self.run_dir, self.log = folder / "run", folder / "steps"
        flags = ["--run-dir", self.run_dir, "--total-steps", 10**9]
        flags += small(name, 1, pace=0.004, log=str(self.log))
        super().__init__(TORCHRUN, [*TWO_RANKS, ROOT / f"{name}.py", *flags], folder)
        wait_for(lambda: self.log.exists() and self.log.stat().st_size > 200)
        self.processes = psutil.Process(self.pid).children(recursive=True)
        self.ranks = [
            next(p for p in self.processes if p.environ().get("RANK") == str(rank))
            for rank in range(2)
        ]

    def check(self, status):
        """Nothing is left, and every step is in the checkpoint."""
        wait_for(lambda: not any(process.is_running() for process in self.processes))
        state = checkpoint(self.run_dir)
        assert (summary(self.run_dir)["status"], state["step"]) == (status, self.log.stat().st_size)
        return state["step"]


@pytest.mark.parametrize("name", CONSTANTS)
def test_signal_to_one_rank_stops_both(name, tmp_path):
    """One process goes on with their run."""
    with Ranks(name, tmp_path) as ranks:
        os.kill(ranks.ranks[1].pid, signal.SIGTERM)
        assert ranks.end() == 1  # of torchrun; rank 0's is 143
        step = ranks.check("interrupted")
    assert run(name, "--resume", tmp_path / "run", "--total-steps", step + 40) == 0
    assert summary(tmp_path / "run")["steps"] >= step + 40


def test_sigkill_of_a_rank(tmp_path):
    with Ranks("paac", tmp_path) as ranks:
        ranks.ranks[1].kill()
        assert ranks.end() == 1
        wait_for(lambda: not any(process.is_running() for process in ranks.processes))
        assert summary(tmp_path / "run")["status"] == "failed"
        assert "local_rank: 1" in ranks.output()


def test_sigkill_of_torchrun(tmp_path):
    with Ranks("paac", tmp_path) as ranks:
        os.kill(ranks.pid, signal.SIGKILL)
        ranks.end()
        ranks.check("interrupted")


def test_what_cannot_be_shared(tmp_path, monkeypatch, capfd):
    """One line says so, and nothing is written."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in TRAINERS:
        if name not in CONSTANTS:
            assert run(name, "--run-dir", tmp_path / "run") == 2
            assert re.fullmatch(
                f"{name}.py .* paac.py and ppo_batch.py .*\n", capfd.readouterr().err
            )
    monkeypatch.setattr(common.distributed, "N_RANKS", 2)
    for flag, args in (
        ("n-envs", paac.Args(n_envs=3, run_dir=str(tmp_path / "run"))),
        ("minibatch-size", ppo_batch.Args(minibatch_size=3, run_dir=str(tmp_path / "run"))),
    ):
        with pytest.raises(SystemExit, match="2"):
            common.distributed.RankRun("paac", args)
        assert capfd.readouterr().err == f"--{flag} 3 cannot be shared evenly by 2 ranks\n"
    assert not (tmp_path / "run").exists()
