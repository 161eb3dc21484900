"""What becomes of a run when it is stopped, when something dies, and when a reward is NaN."""

import os
import re
import signal
import sys

import pytest
import torch

import common.run
import paac
from common.run import Run
from tests.helpers import ROOT, TRAINERS, Script, checkpoint, small, summary, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups of Linux")
every_trainer = pytest.mark.parametrize("name", TRAINERS)


class Training(Script):
    """A run without end that counts the steps of its environments in a file."""

    def __init__(self, name, n_processes, folder, *flags, env="Plain", **env_kwargs):
        self.name, self.run_dir, self.log = name, folder / "run", folder / "steps"
        env_kwargs = {"pace": 0.004, "log": str(self.log)} | env_kwargs
        flags = *small(name, n_processes, env, **env_kwargs), *flags
        flags = "--run-dir", self.run_dir, "--total-steps", 10**9, *flags
        super().__init__(ROOT / f"{name}.py", flags, folder)

    def taken(self):
        return self.log.stat().st_size if self.log.exists() else 0

    def wait_for_steps(self, n):
        goal = self.taken() + n
        wait_for(lambda: self.taken() >= goal or not self.members())
        assert self.members(), self.output()

    def check_checkpoint(self, status):
        """It is whole, its network is finite and it is that of the end."""
        state = checkpoint(self.run_dir)
        assert all(x.isfinite().all() for x in state["model"].values())
        result = summary(self.run_dir)
        assert (result["status"], result["steps"]) == (status, state["step"])
        assert not list(self.run_dir.glob("*.tmp"))
        return state

    def check_interrupted(self):
        """Every step is in the checkpoint, but for chunks that apex.py's learner has not taken."""
        state = self.check_checkpoint("interrupted")
        lost = self.taken() - state["step"]
        assert 0 <= lost <= (100 if self.name == "apex" else 0)
        assert self.output() == "\nstopping after this update; a later signal ends without saving\n"


@every_trainer
def test_ctrl_z_and_fg_and_then_sigterm_twice_as_timeout_sends_it(name, tmp_path):
    with Training(name, 1, tmp_path) as run:
        run.wait_for_steps(200)
        assert len(run.members()) == 4  # the server that starts processes, and a tracker
        run.signal(signal.SIGTSTP)
        wait_for(lambda: all(process.status() == "stopped" for process in run.members()))
        run.signal(signal.SIGCONT)
        run.wait_for_steps(50)
        run.signal(signal.SIGTERM)
        run.signal(signal.SIGTERM)
        assert run.end() == 143
        run.check_interrupted()


@every_trainer
def test_sigkill_of_the_parent(name, tmp_path):
    """Its processes end, and their environments have the time to end what they have started."""
    flags = "--checkpoint-interval", 50
    with Training(name, 1, tmp_path, *flags, env="Simulator", slow=0.2) as run:
        wait_for((run.run_dir / "checkpoint.pt").exists)
        assert len(run.members()) >= 4
        os.kill(run.pid, signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        assert checkpoint(run.run_dir)["step"] >= 50 and run.output() == ""


@every_trainer
def test_sigkill_of_a_process(name, tmp_path):
    """The other one ends too, and a line says which it was."""
    with Training(name, 2, tmp_path) as run:
        run.wait_for_steps(200)
        max(run.members(), key=lambda p: p.create_time()).kill()  # which was started last
        assert run.end() == 1
        assert run.check_checkpoint("failed")["step"] > 0
        kind = r"(vec-env worker|actor-learner|actor) [01]( \(environments \d to \d\))?"
        assert re.fullmatch(rf"{name}\.py: {kind} died with exit code -9\n", run.output())


@every_trainer
def test_nan_reward(name, tmp_path):
    """The run ends before its network is ruined."""
    n_processes = 0 if name in ("paac", "ppo_batch") else 1
    with Training(name, n_processes, tmp_path, nan_at=100) as run:
        assert run.end() == 1
        assert "finite" in run.output()
        assert 0 < run.check_checkpoint("failed")["step"] < 400


def test_a_save_that_breaks_off_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    def killed(state, path):
        path.write_bytes(b"half")
        sys.exit()  # as after a kill, nothing more is saved

    args = paac.Args(run_dir=str(tmp_path), total_steps=100)
    with pytest.raises(SystemExit), Run("paac", args, model=paac.mlp(1, 1)) as run:
        run.save()
        monkeypatch.setattr(torch, "save", killed)
        run.step = 50
        run.save()
    assert checkpoint(tmp_path)["step"] == 0


def test_signals_within_a_second_are_one(tmp_path, monkeypatch):
    """A later one ends at once, and saves nothing. Slow steps are saved every ten minutes."""
    clock = [100.0]
    monkeypatch.setattr(common.run.time, "monotonic", lambda: clock[0])
    args = paac.Args(run_dir=str(tmp_path), total_steps=1000)
    with pytest.raises(SystemExit) as end, Run("paac", args, model=paac.mlp(1, 1)) as run:
        assert not run.stopped
        for step in range(7):
            clock[0] += 150
            run.log_update(step)
        signal.raise_signal(signal.SIGTERM)
        assert run.stopped and run.signal == signal.SIGTERM
        clock[0] += 0.5
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 1.5
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143 and clock == [100 + 7 * 150 + 2]
    assert checkpoint(tmp_path)["step"] == 4


ENDINGS = [("paac", 0, "Ctrl-C"), ("paac", 2, "Ctrl-C"), ("paac", 2, "normal")]
ENDINGS += [("a3c", 2, "Ctrl-C"), ("apex", 2, "normal"), ("apex", 2, "Ctrl-C")]


@pytest.mark.parametrize(("name", "n_processes", "ending"), ENDINGS)
def test_environments_with_processes_and_programs(name, n_processes, ending, tmp_path):
    """Nothing of them is left, though each takes a second to close.

    Without workers Ctrl-C may kill what an environment needs for its next step.
    """
    flags = ["--total-steps", 100] if ending == "normal" else []
    flags += ["--n-envs", 2] if name == "paac" else []
    with Training(name, n_processes, tmp_path, *flags, env="Simulator", slow=1.0) as run:
        if ending == "Ctrl-C":
            run.wait_for_steps(40)
            run.signal(signal.SIGINT)
            assert run.end() in ((130,) if n_processes else (1, 130)), run.output()
            assert checkpoint(run.run_dir)["step"] > 0
        else:
            assert run.end() == 0, run.output()
            run.check_checkpoint("completed")
