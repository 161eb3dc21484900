"""paac.py's contract: run directory, resume, evaluation, signals, exit codes, and what bad input and faults get."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import a3c
import common.checkpoint
import common.evaluation
import common.flags
import common.run
import paac
import ppo_batch
from common.envs import find_spec, make_env
from tests import helpers
from tests.helpers import (
    ROOT,
    alive,
    check_files,
    checkpoint,
    content,
    descendants,
    faulty,
    is_helper,
    on_linux,
    same,
    stop_after,
    summary,
)

pytestmark = pytest.mark.usefixtures("own_folder_and_handlers")
BANDIT = ["--env-id", "tests.paac_envs:Bandit-v0", "--n-workers", "0", "--eval-episodes", "0"]
SMALL = ["--n-envs", "4", "--t-max", "5"]  # 20 steps an update
run = functools.partial(helpers.run, paac)


@pytest.fixture
def refused(refused: Callable[..., str]) -> Callable[..., str]:
    """Run with flags that must be refused: status 2, nothing started or written. Returns the one line of stderr."""
    return functools.partial(refused, paac)


# ---------------------------------------------------------------------------------------------- run directory


def test_run_directory_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paac, "Run", functools.partial(paac.Run, log_interval=2))
    flags = ["--n-workers", "0", *SMALL, "--total-steps", "200", "--eval-episodes", "3", "--seed", "9"]
    assert run("--env-id", "tests.paac_envs:Bandit-v0", *flags) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("tests.paac_envs-Bandit-v0__paac__9__")
    check_files(run_dir)

    args = json.loads((run_dir / "args.json").read_text())
    assert (args["seed"], args["n_envs"], args["total_steps"], args["preset"]) == (9, 4, 200, "vector")
    assert args["learning_rate"] == pytest.approx(0.0028)
    result = summary(run_dir)
    types = {"script": str, "env_id": str, "seed": int, "steps": int, "episodes": int, "wall_seconds": float}
    types |= {"steps_per_second": float, "return_last_100": float, "status": str, "eval": dict}
    assert {key: type(value) for key, value in result.items()} == types
    assert (result["script"], result["env_id"], result["seed"]) == ("paac", "tests.paac_envs:Bandit-v0", 9)
    assert (result["steps"], result["episodes"], result["status"]) == (200, 200, "completed")
    assert -1 <= result["return_last_100"] <= 1 and result["steps_per_second"] > 0
    types = {"episodes": int, "mean": float, "std": float, "min": float, "max": float}
    assert {key: type(value) for key, value in result["eval"].items()} == types
    assert result["eval"]["episodes"] == 3 and result["eval"]["min"] <= result["eval"]["mean"] <= result["eval"]["max"]

    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    charts = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"}
    charts.add("charts/return_last_100")
    losses = {"losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm"}
    assert charts | losses | {"eval/return_mean"} <= set(accumulator.Tags()["scalars"])
    lengths = accumulator.Scalars("charts/episodic_length")
    assert [(event.step, event.value) for event in lengths] == [(step, 1) for step in (40, 80, 120, 160, 200)]
    rates = [event.value for event in accumulator.Scalars("charts/learning_rate")]
    assert rates == pytest.approx([0.0028 * (1 - step / 200) for step in (40, 80, 120, 160, 200)], abs=1e-8)


def test_what_is_logged_of_a_tensor_is_its_mean() -> None:
    assert common.run.to_float(torch.tensor([1.0, 2.0, 6.0], requires_grad=True)) == 3.0
    assert common.run.to_float(torch.tensor(2.5)) == common.run.to_float(2.5) == 2.5


def test_returns_are_raw_scores(tmp_path: Path) -> None:
    """Learning from clipped and scaled rewards changes nothing in what is reported."""
    kwargs = '{"fault": "huge reward", "after": 1}'  # 1e35 a step, 7 steps an episode
    flags = [*SMALL, "--n-workers", "0", "--clip-rewards", "--total-steps", "100", "--eval-episodes", "2"]
    assert run("--env-id", "tests.paac_envs:Faulty-v0", "--env-kwargs", kwargs, *flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["return_last_100"] == pytest.approx(7e35)
    assert summary(tmp_path / "r")["eval"]["mean"] == pytest.approx(7e35)


def test_episodes_of_an_atari_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two games, each ended by the limit every 150 steps: the scores are the sums of the rewards that came."""
    rewards, learned_rewards = [], paac.learned_rewards
    monkeypatch.setattr(paac, "learned_rewards", lambda r, args: rewards.append(r.copy()) or learned_rewards(r, args))
    flags = ["--env-id", "SpaceInvadersNoFrameskip-v4", "--env-kwargs", '{"max_num_frames_per_episode": 600}']
    flags += ["--n-envs", "2", "--n-workers", "1", "--eval-episodes", "0", "--total-steps", "920"]
    assert run(*flags, "--run-dir", "r") == 0
    scores = np.array(rewards)[:450].reshape(3, 150, 2).sum(1)
    assert checkpoint(tmp_path / "r")["returns"] == scores.ravel().tolist() and len(set(scores.ravel())) > 2
    assert summary(tmp_path / "r")["episodes"] == 6 and summary(tmp_path / "r")["return_last_100"] == scores.mean()


@pytest.mark.parametrize(("cores", "n_envs", "n_workers"), [(2, 32, 2), (64, 32, 8), (64, 5, 5), (1, 1, 1)])
@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=["paac", "ppo_batch"])
def test_default_number_of_workers(
    trainer: ModuleType, cores: int, n_envs: int, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "n_cores", lambda: cores)
    args, _ = trainer.parse(["--env-id", "CartPole-v1", "--n-envs", str(n_envs)])
    assert args.n_workers == n_workers


@pytest.mark.parametrize("trainer", [paac, ppo_batch, a3c], ids=["paac", "ppo_batch", "a3c"])
def test_actions_that_are_a_matrix(trainer: ModuleType, tmp_path: Path) -> None:
    """The environment refuses whatever is not in its space; evaluation plays in it too."""
    flags = ["--n-processes", "1"] if trainer is a3c else ["--n-envs", "2", "--n-workers", "0", "--t-max", "10"]
    flags += ["--minibatch-size", "10"] if trainer is ppo_batch else []
    flags += ["--total-steps", "60", "--eval-episodes", "2", "--run-dir", "r"]
    assert helpers.run(trainer, "--env-id", "tests.paac_envs:Lattice-v0", *flags) == 0
    assert summary(tmp_path / "r")["episodes"] == 20
    assert summary(tmp_path / "r")["eval"]["min"] >= 3 * 2 * (-2 + 0 + 5)


def test_steps_and_episodes_agree_after_a_failure(tmp_path: Path) -> None:
    """What was played since the last update is lost, and is counted once when it is played again."""
    flags = [flag.replace('"after": 38', '"after": 44') for flag in faulty("raise", 0, tmp_path / "r")]
    assert run(*flags) == 1  # episodes of seven steps have ended at step 42, two after the last update
    assert [checkpoint(tmp_path / "r")[name] for name in ("step", "episodes")] == [4 * 40, 4 * 5]


def test_evaluate_adds_to_the_summary_and_touches_nothing_else(tmp_path: Path) -> None:
    assert run(*BANDIT, *SMALL, "--total-steps", "20", "--run-dir", "r") == 0
    before = summary(tmp_path / "r"), (tmp_path / "r" / "checkpoint.pt").read_bytes()
    assert before[0]["eval"] is None
    assert run("--evaluate", "r", "--eval-episodes", "7") == 0
    after = summary(tmp_path / "r")
    assert after["eval"]["episodes"] == 7 and after | {"eval": None} == before[0]
    assert -1 <= after["eval"]["min"] <= after["eval"]["mean"] <= after["eval"]["max"] <= 1
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


def test_evaluate_always_plays(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Also a run that was not evaluated when its training ended; no episodes and no GIF would be nothing at all."""
    assert run(*BANDIT, *SMALL, "--total-steps", "20", "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["eval"] is None
    assert "--eval-episodes 0" in refused("--evaluate", "r", "--eval-episodes", "0")
    assert run("--evaluate", "r") == 0
    assert summary(tmp_path / "r")["eval"]["episodes"] == 30


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.run.time, "strftime", lambda pattern: "now")
    folders = [paac.parse(BANDIT)[0].run_dir for _ in range(3)]
    name = str(Path("runs") / "tests.paac_envs-Bandit-v0__paac__1__now")
    assert folders == [name, f"{name}-2", f"{name}-3"]
    assert all((tmp_path / folder).is_dir() for folder in folders)


def test_environment_without_a_render_mode(tmp_path: Path) -> None:
    """gymnasium.make takes it, so any Gymnasium id means this one too."""
    flags = ["--n-workers", "0", "--eval-episodes", "0", *SMALL, "--total-steps", "20", "--run-dir", "r"]
    assert run("--env-id", "tests.paac_envs:Plain-v0", *flags) == 0


def test_uneven_shares(tmp_path: Path) -> None:
    flags = ["--n-envs", "33", "--n-workers", "8", "--t-max", "2", "--total-steps", "132", "--eval-episodes", "0"]
    assert run("--env-id", "tests.paac_envs:Bandit-v0", *flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["episodes"] == 132


def test_time_limits_of_atari_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """V of the last screen of a game that was cut is where its return goes on. θ stays, so that it can be looked up."""
    seen: dict[str, list] = {"final_values": [], "final_obs": []}

    class Watched(gym.vector.VectorWrapper):
        def step(self, actions: np.ndarray) -> tuple:
            obs, reward, terminated, truncated, info = self.env.step(actions)
            assert not terminated.any()
            seen["final_obs"] += [(i, info["final_obs"][i].copy()) for i in np.flatnonzero(truncated)]
            return obs, reward, terminated, truncated, info

    def watched_returns(rewards: Tensor, dones: Tensor, final_values: Tensor, *rest: Any) -> Tensor:
        assert (final_values[~dones] == 0).all()
        seen["final_values"] += [(i, final_values[t, i].item()) for t, i in dones.nonzero().tolist()]
        return returns(rewards, dones, final_values, *rest)

    returns, make = paac.n_step_returns, paac.make_vec_env
    monkeypatch.setattr(paac, "n_step_returns", watched_returns)
    monkeypatch.setattr(paac, "make_vec_env", lambda *arguments: Watched(make(*arguments)))
    kwargs = '{"max_num_frames_per_episode": 60}'
    flags = ["--n-envs", "3", "--n-workers", "1", "--total-steps", "150", "--learning-rate", "0", "--device", "cpu"]
    flags += ["--eval-episodes", "0", "--run-dir", "r"]
    assert run("--env-id", "PongNoFrameskip-v4", "--env-kwargs", kwargs, *flags) == 0
    model = paac.ActorCritic(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6), "nips")
    model.load_state_dict(checkpoint(Path("r"))["model"])
    assert len(seen["final_obs"]) >= 3
    for (i, obs), (j, value) in zip(seen["final_obs"], seen["final_values"], strict=True):
        assert i == j and value == pytest.approx(model(torch.from_numpy(obs)[None])[1].item(), abs=1e-5)
    assert len({value for _, value in seen["final_values"]}) > 1  # the games differ


def test_gif_of_an_atari_game(tmp_path: Path) -> None:
    kwargs = '{"max_num_frames_per_episode": 400}'  # 100 steps
    flags = ["--n-envs", "2", "--n-workers", "1", "--total-steps", "20", "--eval-episodes", "0"]
    assert run("--env-id", "PongNoFrameskip-v4", "--env-kwargs", kwargs, *flags, "--run-dir", "r") == 0
    assert not (tmp_path / "r" / "agent.gif").exists()
    assert run("--evaluate", "r", "--eval-episodes", "2", "--record") == 0
    with Image.open(tmp_path / "r" / "agent.gif") as image:
        assert image.size == (160, 210) and image.is_animated and image.n_frames > 30
    assert summary(tmp_path / "r")["eval"]["episodes"] == 2


SIMULATOR = ["--env-id", "tests.envs:Simulator-v0", "--n-workers", "0", *SMALL, "--checkpoint-interval", "1000"]


def test_simulator_that_cannot_be_closed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Everything else is done; its observations and infos, which are not as they should be, cost nothing either."""
    flags = [*SIMULATOR, "--total-steps", "100", "--eval-episodes", "2", "--record"]
    assert run(*flags, "--run-dir", "r") == 0
    assert (summary(tmp_path / "r")["status"], summary(tmp_path / "r")["eval"]["mean"]) == ("completed", 3)
    assert "agent.gif: 3 steps, return 3.00" in capfd.readouterr().out and (tmp_path / "r" / "agent.gif").exists()


def test_simulator_that_fails_and_cannot_be_closed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*SIMULATOR, "--env-kwargs", '{"fails_at": 28}', "--total-steps", "200"]
    assert run(*flags, "--run-dir", "r") == 1
    assert (checkpoint(tmp_path / "r")["step"], summary(tmp_path / "r")["status"]) == (100, "interrupted")
    stderr = capfd.readouterr().err
    assert "paac.py: environment 0 of Simulator-v0 failed" in stderr and "ConnectionError: the simulator" in stderr


# ----------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "flags",
    [
        ["--env-kwargs", "{}"],
        ["--env-kwargs", '{"continuous": true}'],
        ["--env-kwargs", '{"image": true}', "--n-envs", "2", "--total-steps", "60"],
    ],
    ids=["discrete", "continuous", "image"],
)
def test_resumed_run_is_the_uninterrupted_one(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*BANDIT, *SMALL, "--total-steps", "200", *flags]
    assert run(*flags, "--run-dir", "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, updates=4)
        assert run(*flags, "--run-dir", "parts") == 130
    middle, first = checkpoint(tmp_path / "parts"), summary(tmp_path / "parts")
    assert middle["updates"] == 4 and first["status"] == "interrupted" and first["steps"] == middle["step"]
    assert run("--resume", "parts") == 0
    whole, parts = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts")
    assert not same(middle["model"], parts["model"])
    for key in ("model", "optimizer", "torch_rng", "step", "updates", "episodes", "returns"):
        assert same(whole[key], parts[key]), key
    last = summary(tmp_path / "parts")
    assert (last["status"], last["steps"], last["episodes"]) == ("completed", whole["step"], whole["step"])
    assert last["return_last_100"] == summary(tmp_path / "whole")["return_last_100"]
    assert parts["wall_seconds"] > middle["wall_seconds"] > 0 and last["wall_seconds"] >= first["wall_seconds"]


def test_resume_from_a_periodic_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after SIGKILL: the run goes on from the last checkpoint, and loses only what came after it."""
    flags = [*BANDIT, *SMALL, "--total-steps", "200", "--checkpoint-interval", "60"]
    assert run(*flags, "--run-dir", "whole") == 0
    count_update = paac.Run.count_update

    def counted(self: paac.Run, *arguments: Any) -> None:
        count_update(self, *arguments)
        if self.step == 100:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(paac.Run, "count_update", counted)
        assert run(*flags, "--run-dir", "parts") == 1
    assert capfd.readouterr().err == "paac.py: out of memory\n"
    assert checkpoint(tmp_path / "parts")["step"] == 60
    assert run("--resume", "parts") == 0
    assert same(checkpoint(tmp_path / "whole")["model"], checkpoint(tmp_path / "parts")["model"])


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory stopped after 2 of 10 updates."""
    with monkeypatch.context() as patch:
        stop_after(patch, updates=2)
        assert run(*BANDIT, *SMALL, "--total-steps", "200", "--run-dir", "r") == 130
    return tmp_path / "r"


def test_flags_override_those_of_the_resumed_run(interrupted: Path) -> None:
    flags = ["--total-steps", "100", "--rms-decay", "0.5", "--rms-eps", "0.2", "--learning-rate", "0.1"]
    assert run("--resume", interrupted, *flags) == 0
    args, group = json.loads((interrupted / "args.json").read_text()), checkpoint(interrupted)["optimizer"]
    assert summary(interrupted)["steps"] == 100
    assert (args["total_steps"], args["learning_rate"], args["rms_decay"], args["rms_eps"]) == (100, 0.1, 0.5, 0.2)
    assert (group["param_groups"][0]["decay"], group["param_groups"][0]["eps"]) == (0.5, 0.2)


def test_resume_can_go_on_beyond_the_first_end(tmp_path: Path) -> None:
    assert run(*BANDIT, *SMALL, "--total-steps", "40", "--run-dir", "r") == 0
    assert run("--resume", "r", "--total-steps", "80") == 0
    assert (summary(tmp_path / "r")["steps"], summary(tmp_path / "r")["episodes"]) == (80, 80)
    assert checkpoint(tmp_path / "r")["updates"] == 4


@pytest.mark.parametrize(("preset", "code"), [("paper", 2), ("vector", 0), ("auto", 0)])
def test_a_preset_beside_resume_is_that_of_the_run(
    preset: str, code: int, interrupted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert run("--resume", interrupted, "--preset", preset, "--arch", "auto", "--total-steps", "60") == code
    args = json.loads((interrupted / "args.json").read_text())
    assert (args["preset"], args["arch"]) == ("vector", "mlp")
    assert ("--preset paper: --resume" in capfd.readouterr().err) == (code == 2)


def test_resume_of_a_complete_run_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert run(*BANDIT, *SMALL, "--total-steps", "40", "--run-dir", "r") == 0
    for flags in ([], ["--total-steps", "20"]):
        line = refused("--resume", "r", *flags)
        assert "--resume r" in line and "40" in line and "--total-steps" in line


def test_resume_with_other_environments_is_refused(interrupted: Path, refused: Callable[..., str]) -> None:
    """α = 0.0007 n_e: the run would go on with the learning rate of the old number."""
    assert "--n-envs 8" in refused("--resume", interrupted, "--n-envs", "8")


def test_resume_keeps_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, updates=2)
        assert run(*BANDIT, *SMALL, "--total-steps", "200", "--run-dir", "r", "--device", "cpu") == 130
    assert run("--resume", "r") == 0
    assert json.loads((tmp_path / "r" / "args.json").read_text())["device"] == "cpu"


def test_the_user_is_told_where_the_run_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    stop_after(monkeypatch, updates=2)
    assert run(*BANDIT, *SMALL, "--total-steps", "200", "--run-dir", "r") == 130
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "run directory: r"
    assert "step 40" in lines[1] and "--resume r" in lines[1]


def test_seeds_of_environments_do_not_overlap() -> None:
    keys = [(seed, step) for seed in range(20) for step in (0, 160, 320)] + [
        (s, 0, k) for s in range(20) for k in (1, 2)
    ]
    seeds = sorted(paac.env_seed(*key) for key in keys)
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 256
    assert seeds[0] >= 0 and seeds[-1] < 2**30 and paac.env_seed(3, 160) == paac.env_seed(3, 160)


# ---------------------------------------------------------------------------------------------------- signals


def test_signal_while_it_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training was complete by then, and the summary says so."""

    def interrupted_evaluate(args: Any, policy: Any, stopped: Callable[[], bool]) -> None:
        assert summary(tmp_path / "r")["status"] == "completed"
        signal.raise_signal(signal.SIGTERM)
        return evaluate(args, policy, stopped)

    evaluate = common.run.evaluate
    monkeypatch.setattr(common.run, "evaluate", interrupted_evaluate)
    assert run(*BANDIT, "--eval-episodes", "5", *SMALL, "--total-steps", "40", "--run-dir", "r") == 143
    assert (summary(tmp_path / "r")["status"], summary(tmp_path / "r")["eval"]) == ("completed", None)
    assert capfd.readouterr().out.endswith("training is complete, its evaluation was stopped; --evaluate r does it\n")


def test_a_terminal_that_is_closed_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # from the system and from the shell
        stop_after(monkeypatch, 2, signal.SIGHUP)
    assert run(*BANDIT, *SMALL, "--total-steps", "200", "--run-dir", "r") == 128 + signal.SIGHUP
    assert checkpoint(tmp_path / "r")["step"] == 40


def test_nohup_lets_it_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_after(monkeypatch, 2, signal.SIGHUP)
    assert run(*BANDIT, *SMALL, "--total-steps", "200", "--run-dir", "r") == 0


# ----------------------------------------------------------------------------------------------------- output


def in_a_shell(
    line: str, script: str = "paac", flags: tuple[str, ...] = (*BANDIT, *SMALL)
) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / f"{script}.py"), *flags, "--eval-episodes", "2", "--total-steps", "100"]
    return subprocess.run(
        ["bash", "-c", f"{shlex.join([*command, '--run-dir', 'r'])} {line}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("line", "stdout"),
    [
        ("| head -1 > /dev/null; exit ${PIPESTATUS[0]}", ""),  # a reader that ends
        ("> /dev/full", ""),
        (">&-", ""),
        ("2>&-", "run directory: r"),
    ],
)
def test_a_run_goes_on_where_nobody_reads_what_it_prints(line: str, stdout: str, tmp_path: Path) -> None:
    result = in_a_shell(line)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(stdout) and bool(result.stdout) == bool(stdout)
    assert summary(tmp_path / "r")["eval"]["episodes"] == 2


@pytest.mark.parametrize(
    ("script", "flags"), [("paac", [*SMALL, "--n-workers", "1"]), ("a3c", ["--n-processes", "1"])], ids=["paac", "a3c"]
)
def test_a_run_goes_on_where_nobody_reads_what_its_environments_print(
    script: str, flags: list[str], tmp_path: Path
) -> None:
    flags = ["--env-id", "tests.paac_envs:Talking-v0", *flags]
    result = in_a_shell("| head -1 > /dev/null; exit ${PIPESTATUS[0]}", script, flags)
    assert (result.returncode, result.stderr) == (0, "")
    assert summary(tmp_path / "r")["eval"]["episodes"] == 2


def test_output_that_the_terminal_lacks_letters_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = in_a_shell("")
    assert (result.returncode, result.stderr) == (0, "") and " ? " in result.stdout


def test_signal_while_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an episode is not written."""
    followed = []
    monkeypatch.setattr(common.evaluation, "follow_agent", followed.append)
    args = paac.Args(env_id="PongNoFrameskip-v4", run_dir=str(tmp_path))
    common.evaluation.record(args, lambda obs: [0] * len(obs), stopped=lambda: True)
    assert list(tmp_path.iterdir()) == [] and len(followed) == 1


@pytest.mark.parametrize(
    ("env_id", "named", "camera"),
    [("Hopper-v5", {}, 0), ("Hopper-v5", {"camera_id": 7}, 7), ("Reacher-v5", {}, -1), ("CartPole-v1", {}, None)],
)
def test_camera_follows_the_agent_where_it_can(env_id: str, named: dict, camera: int | None) -> None:
    """Hopper has one camera, `track`, Reacher none, CartPole no MuJoCo."""
    with contextlib.closing(make_env(find_spec(env_id), named, "rgb_array")) as env:
        common.evaluation.follow_agent(env)
        renderer = getattr(env.unwrapped, "mujoco_renderer", None)
        assert (renderer.camera_id if renderer else None) == camera


def test_evaluation_of_an_endless_environment_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.evaluation, "MAX_EPISODE_STEPS", 12)
    kwargs = '{"ends": [[1000000, "terminated"]]}'
    args = paac.Args(env_id="tests.paac_envs:Walk-v0", env_kwargs=kwargs, eval_episodes=2, n_workers=0)
    steps = []

    def policy(obs: Any) -> list[int]:
        steps.append(len(obs))
        return [0] * len(obs)

    assert common.evaluation.evaluate(args, policy)["episodes"] == 2 and steps == [2] * 12


# ----------------------------------------------------------------------------------------------------- faults


@on_linux
def test_loss_that_is_not_finite(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    others = descendants(os.getpid())
    assert run(*faulty("huge reward", 2, tmp_path / "r")) == 1
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1 and "loss" in stderr and "inf" in stderr
    assert not {pid for pid in alive(descendants(os.getpid()) - others) if not is_helper(pid)}
    state = checkpoint(tmp_path / "r")
    assert state["step"] == 140 and all(p.isfinite().all() for p in state["model"].values())


@pytest.mark.parametrize("env_kwargs", [{}, {"image": True}, {"continuous": True}], ids=["vector", "image", "box"])
def test_parameters_that_overflow(
    env_kwargs: dict[str, bool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A learning rate so large that the next forward pass is not finite: one line, and the last checkpoint is left."""
    flags = [*BANDIT, *SMALL, "--env-kwargs", json.dumps(env_kwargs), "--total-steps", "20", "--run-dir", "r"]
    assert run(*flags) == 0
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    assert run("--resume", "r", "--learning-rate", "1e38", "--total-steps", "100000") == 1
    stderr = capfd.readouterr().err
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert re.fullmatch(r"paac\.py: step \d\d: .*(finite|nan|inf).*\n", stderr), stderr


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Observations whose squares overflow: the update in which a checkpoint is due leaves the one before it."""
    flags = [*BANDIT, *SMALL, "--run-dir", "r"]
    assert run(*flags, "--total-steps", "20") == 0
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    update = paac.RunningNorm.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paac.RunningNorm, "update", lambda self, x: update(self, torch.rand_like(x) * 1e25))
        assert run("--resume", "r", "--total-steps", "1000", "--checkpoint-interval", "20") == 1
    assert (
        capfd.readouterr().err == "paac.py: step 40: the network has numbers that are not finite; they are not saved\n"
    )
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "r" / "checkpoint.pt.tmp").exists()


def test_a_failed_environment_is_named_where_nothing_can_be_saved_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def save(self: common.run.Run) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(common.run.Run, "save", save)
    assert run(*faulty("raise", 0, tmp_path / "r"), "--checkpoint-interval", "1000") == 1
    stderr = capfd.readouterr().err
    assert "environment 2" in stderr and stderr.endswith("the disk is full\n") and "above" not in stderr


def test_an_environment_of_another_shape_on_resume(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before any environment of the run is made."""
    flags = ["--env-id", "tests.paac_envs:Walk-v0", "--n-envs", "2", "--n-workers", "0", "--run-dir", "r"]
    ends = '"ends": [[3, "terminated"]]'
    assert run(*flags, "--env-kwargs", f"{{{ends}}}", "--total-steps", "20", "--eval-episodes", "0") == 0
    monkeypatch.setattr(paac, "make_vec_env", None)
    capfd.readouterr()
    other = ["--env-kwargs", f'{{{ends}, "continuous": true}}', "--total-steps", "40"]
    assert run("--resume", "r", *other) == 2
    assert capfd.readouterr().err.startswith("paac.py: --resume r: the checkpoint holds another model: ")


@pytest.mark.parametrize("content", ["{bad", "[1]", "3"])
def test_a_damaged_summary_is_written_anew(content: str, tmp_path: Path) -> None:
    assert run(*BANDIT, *SMALL, "--total-steps", "20", "--run-dir", "r") == 0
    (tmp_path / "r" / "summary.json").write_text(content)
    assert run("--evaluate", "r", "--eval-episodes", "2") == 0
    result = summary(tmp_path / "r")
    assert (result["script"], result["eval"]["episodes"]) == ("paac", 2)


def test_memory_of_the_gpu_that_is_exhausted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(args: paac.Args, checkpoint: dict | None) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(paac, "train", train)
    assert run(*BANDIT, "--run-dir", "r") == 1
    assert capfd.readouterr().err == "paac.py: CUDA out of memory.\n"


def test_kill_in_the_midst_of_writing_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch, paac
save, calls = torch.save, []

def dying(state, file, *arguments):
    calls.append(0)
    if len(calls) == 3:
        file.write(b"half of a checkpoint")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, file, *arguments)

torch.save = dying
paac.main(sys.argv[1:])
"""
    flags = [*BANDIT, *SMALL, "--total-steps", "200", "--checkpoint-interval", "20", "--run-dir", str(tmp_path / "r")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code, *flags], env=env, capture_output=True, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert checkpoint(tmp_path / "r")["step"] == 40
    assert run("--resume", "r") == 0
    assert summary(tmp_path / "r")["steps"] == 200


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_number_that_is_none_gets_one_line(encoding: str) -> None:
    """Around tyro's message is a box, and its help."""
    command = [sys.executable, ROOT / "paac.py", "--total-steps", "2.5e5"]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert re.fullmatch(r"paac.py: Error parsing --total-steps: [^\n-]*'2.5e5'\n", result.stderr)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--env-id", "Pogn-v4"], ["--env-id", "Pogn-v4", "Did you mean", "Pong"]),
        (["--env-id", "CartPole-v99"], ["--env-id", "CartPole-v99"]),
        (["--env-id", "no.such.module:Thing-v0"], ["--env-id", "no.such.module"]),
        (["--env-id", "tests.paac_envs:Bandit-v9"], ["--env-id"]),
        (["--env-id", "tests.paac_envs:TwoKeys-v0"], ["--env-id", "Dict"]),
        (["--env-id", "tests.paac_envs:TwoKeys-v0", "--env-kwargs", '{"size": 2000}'], ["--env-id", "Dict"]),
        (["--n-envs", "0"], ["--n-envs"]),
        (["--n-envs", "-3"], ["--n-envs"]),
        (["--n-envs", "4", "--n-workers", "5"], ["--n-workers"]),
        (["--n-workers", "-1"], ["--n-workers"]),
        (["--gamma", "2"], ["--gamma"]),
        (["--gamma", "nan"], ["--gamma"]),
        (["--t-max", "0"], ["--t-max"]),
        (["--total-steps", "0"], ["--total-steps"]),
        (["--learning-rate", "-1"], ["--learning-rate"]),
        (["--learning-rate", "inf"], ["--learning-rate"]),
        (["--reward-scale", "nan"], ["--reward-scale"]),
        (["--seed", "-1"], ["--seed"]),
        (["--eval-episodes", "-1"], ["--eval-episodes"]),
        (["--env-kwargs", "{size: 3}"], ["--env-kwargs"]),
        (["--env-kwargs", "[1, 2]"], ["--env-kwargs"]),
        (["--env-kwargs", "3"], ["--env-kwargs"]),
        (["--env-kwargs", '[["continuous", true]]'], ["--env-kwargs"]),
        (["--env-kwargs", '{"no_such": 1}'], ["no_such"]),
        (["--arch", "nips"], ["--arch"]),
        (["--env-id", "CartPole-v1", "--run-dir", ""], ["--run-dir ''"]),
        (["--resume", ""], ["--resume ''"]),
        (["--evaluate", ""], ["--evaluate ''"]),
        *(([flag, "caf\udce9"], [f"{flag} 'caf\\udce9'"]) for flag in ("--run-dir", "--resume", "--evaluate")),
        (["--env-id", "CartPole-v1", "--learning-rate", "1e300"], ["--learning-rate 1e+300", "3e+38"]),
        (["--env-id", "CartPole-v1", "--total-steps", str(2**70)], [f"--total-steps {2**70}", str(2**62)]),
        (["--env-id", "CartPole-v1", "--eval-episodes", "10001"], ["--eval-episodes 10001", "10000"]),
        (["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"game": "nogame"}'], ["--env-id PongNoFrameskip-v4"]),
        (["--env-id", "PongNoFrameskip-v4", "--arch", "mlp"], ["--arch"]),
        (["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"no_such": 1}'], ["no_such"]),
        (["--record"], ["--record"]),
        (["--resume", "a", "--evaluate", "b"], ["--resume", "--evaluate"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_refused(refused: Callable[..., str], flags: list[str], named: list[str]) -> None:
    if "--env-id" not in flags and "--resume" not in flags:
        flags = ["--env-id", "tests.paac_envs:Bandit-v0", *flags]
    line = refused(*flags)
    assert all(text in line for text in named), line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--n-envs", "many"], "--n-envs"),
        (["--gamma", "high"], "--gamma"),
        (["--arch", "resnet"], "--arch"),
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["--seed"], "--seed"),
    ],
)
def test_refused_by_type(refused: Callable[..., str], flags: list[str], named: str) -> None:
    assert named in refused("--env-id", "tests.paac_envs:Bandit-v0", *flags)


def test_a_full_disk_is_named_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch.save turns the OSError of a full disk into a RuntimeError."""
    flags = ["--env-id", "tests.paac_envs:Bandit-v0", "--n-workers", "0", "--eval-episodes", "0", "--run-dir", "r"]
    assert paac.main([*flags, "--total-steps", "400"]) == 0
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()

    def fail(state: dict, file: Any) -> None:
        file.write(b"half of a checkpoint")
        raise RuntimeError("unexpected pos 817472 vs 817364")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        assert paac.main(["--resume", "r", "--total-steps", "800"]) == 1
    assert re.search(r"^paac.py: r: the checkpoint cannot be written: unexpected pos", capfd.readouterr().err)
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert not list((tmp_path / "r").glob("*.tmp"))


def test_an_evaluation_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--env-id", "tests.paac_envs:Bandit-v0", "--n-workers", "0", "--eval-episodes", "0", "--run-dir", "r"]
    assert paac.main([*flags, "--total-steps", "400"]) == 0

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    assert paac.main(["--evaluate", "r", "--eval-episodes", "2"]) == 1
    stdout, stderr = capfd.readouterr()
    assert "2 episodes: " in stdout
    assert stderr == f"paac.py: {Path('r') / 'summary.json'} cannot be written: No space left on device\n"


@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=lambda trainer: trainer.__name__)
def test_evaluation_without_enough_memory_for_a_rollout(
    trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps none."""
    flags = [] if trainer is paac else ["--minibatch-size", "10"]
    assert helpers.run(trainer, *BANDIT, *SMALL, *flags, "--total-steps", "20", "--run-dir", "r") == 0
    monkeypatch.setattr(common.flags, "free_memory", lambda device: 100)
    assert helpers.run(trainer, "--resume", "r", "--total-steps", "40") == 2
    assert helpers.run(trainer, "--evaluate", "r", "--eval-episodes", "2") == 0
    assert summary(tmp_path / "r")["eval"]["episodes"] == 2


def test_a_checkpoint_of_somebody_else(tmp_path: Path, refused: Callable[..., str], monkeypatch: Any) -> None:
    """It is not called damaged."""

    def forbid(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert run(*BANDIT, *SMALL, "--total-steps", "20", "--run-dir", "r") == 0
    monkeypatch.setattr(common.checkpoint.zipfile, "ZipFile", forbid)
    assert "--resume r: checkpoint.pt cannot be read: Permission denied" in refused("--resume", "r")


def test_an_error_of_a_constructor_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword arguments are not to blame where none were given."""
    with pytest.raises(ValueError, match=r"Simulator-v0 does not take {.no_such.: 1}"):
        make_env(find_spec("tests.envs:Simulator-v0"), {"no_such": 1})
    monkeypatch.setattr("tests.envs.SimulatorEnv.made", None)
    with pytest.raises(TypeError, match="NoneType"):
        make_env(find_spec("tests.envs:Simulator-v0"))


@pytest.mark.parametrize(
    ("limit", "free"),
    [(None, 3000 * 1024), ("max", 3000 * 1024), ("2000000", 2_000_000 - 900_000 + 400_000), ("9000000", 3000 * 1024)],
)
def test_free_memory(limit: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system has, or less where a container may have less; its cache of files is given back."""
    files = {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:   3000 kB\n"}
    if limit:
        group = "sys/fs/cgroup/memory."
        files |= {f"{group}max": limit, f"{group}current": "900000", f"{group}stat": "anon 5\ninactive_file 400000\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(common.flags, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert common.flags.free_memory("cpu") == free


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/jobs/job_7/step_0", "jobs/job_7", ("max", "current", "inactive_file")),
        ("4:memory:/jobs/job_7", "memory/jobs", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
        ("4:memory:/elsewhere", "memory", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
    ],
)
def test_free_memory_of_a_batch_job(
    line: str, folder: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own group or one that holds it, in either version of Linux's control groups."""
    limit, usage, cache = names
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / f"memory.{limit}").write_text("2000000\n")
    (group / f"memory.{usage}").write_text("900000\n")
    (group / "memory.stat").write_text(f"anon 5\n{cache} 400000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"2:cpu:/\n{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable:   3000 kB\n")
    monkeypatch.setattr(common.flags, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert common.flags.free_memory("cpu") == 2_000_000 - 900_000 + 400_000


def test_free_memory_of_a_process_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("700 600 500 400 0 300 0\n")
    monkeypatch.setattr(common.flags, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (9_000_000, resource.RLIM_INFINITY))
    assert common.flags.free_memory("cpu") == 9_000_000 - 700 * os.sysconf("SC_PAGE_SIZE")


def test_free_memory_where_nothing_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.flags, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert common.flags.free_memory("cpu") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


@pytest.mark.parametrize(("flags", "named"), [([], "CartPole-v1: no"), (["--record"], "CartPole-v1 with --record: no")])
def test_refused_names_the_flag_that_may_be_to_blame(
    flags: list[str], named: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(common.flags, "make_env", fail)
    assert f"--env-id {named}" in refused("--env-id", "CartPole-v1", *flags)


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyError("9x9"), "KeyError('9x9')"), (KeyError(), "KeyError()"), (SystemExit(3), "SystemExit(3)")],
)
def test_refused_says_what_kind_of_error_it_was(
    error: BaseException, text: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(common.flags, "make_env", fail)
    assert refused("--env-id", "CartPole-v1").rstrip() == f"paac.py: --env-id CartPole-v1: {text}"


def test_a_run_that_another_process_goes_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*BANDIT, *SMALL, "--total-steps", "40", "--run-dir", "r"]
    assert run(*flags) == 0
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    code = "import common.checkpoint\nwith common.checkpoint.only_writer('r'): print(flush=True), input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as other:
        other.stdout.readline()
        capfd.readouterr()
        before = content(tmp_path)
        assert run("--resume", "r", "--total-steps", "80") == 2
        assert capfd.readouterr().err == "paac.py: --resume r: another process is training there\n"
        assert content(tmp_path) == before and run("--evaluate", "r", "--eval-episodes", "1") == 0
        other.kill()
    assert run("--resume", "r", "--total-steps", "80") == 0


def test_a_checkpoint_that_is_saved_while_it_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is being stopped, and resumed before it has ended."""
    assert run(*BANDIT, *SMALL, "--total-steps", "40", "--run-dir", "r") == 0
    make_model, path = paac.make_model, tmp_path / "r" / "checkpoint.pt"

    def save(args: paac.Args) -> paac.ActorCritic:
        shutil.copy(path, tmp_path / "new").replace(path)
        return make_model(args)

    monkeypatch.setattr(paac, "make_model", save)
    capfd.readouterr()
    assert run("--resume", "r", "--total-steps", "80") == 2
    assert capfd.readouterr().err == "paac.py: --resume r: another process has just saved there; try again\n"
    monkeypatch.setattr(paac, "make_model", make_model)
    assert run("--resume", "r", "--total-steps", "80") == 0


@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=lambda trainer: trainer.__name__)
def test_an_environment_that_can_be_open_only_once(trainer: ModuleType) -> None:
    flags = ["--env-id", "tests.paac_envs:Exclusive-v0", "--n-workers", "0", "--n-envs", "1", "--total-steps", "20"]
    sizes = ["--minibatch-size", "10"] if trainer is ppo_batch else []
    assert helpers.run(trainer, *flags, *sizes, "--t-max", "10", "--eval-episodes", "0") == 0


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(common.checkpoint.fcntl, "flock", flock)
    assert run(*BANDIT, *SMALL, "--total-steps", "40", "--run-dir", "r") == 0


def test_refused_without_cuda(refused: Callable[..., str]) -> None:
    assert "--device" in refused("--env-id", "tests.paac_envs:Bandit-v0", "--device", "cuda")


def test_refused_run_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "checkpoint.pt").write_bytes(b"precious")
    (tmp_path / "file").write_bytes(b"precious")
    for path in (taken, tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        line = refused("--env-id", "tests.paac_envs:Bandit-v0", "--run-dir", path)
        assert "--run-dir" in line and str(path) in line
    (tmp_path / "runs").symlink_to(tmp_path / "not mounted")
    assert "--run-dir runs/" in refused("--env-id", "tests.paac_envs:Bandit-v0")


def test_another_network_on_resume(interrupted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same environment with other actions: the parameters do not fit, and nothing is overwritten."""
    before = {path.name: path.read_bytes() for path in interrupted.iterdir()}
    assert run("--resume", interrupted, "--env-kwargs", '{"continuous": true}') == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in interrupted.iterdir()} == before


# --------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("env", "flags", "goal"),
    [
        ("PixelCue", ["--n-envs", "16", "--total-steps", "8000"], 0.8),  # chance gives 0.5, the optimum is 1
        # the first policy gets -5.3; the preset's α is for more updates than these 500
        ("VectorCue", ["--total-steps", "40000", "--t-max", "5", "--learning-rate", "0.01"], -1.0),
    ],
)
def test_learning(env: str, flags: list[str], goal: float, tmp_path: Path) -> None:
    flags = [*flags, "--n-workers", "0", "--seed", "1", "--eval-episodes", "100", "--run-dir", "r"]
    assert run("--env-id", f"tests.paac_envs:{env}-v0", *flags) == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > goal


# ------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "flags",
    [
        ["--env-id", "CartPole-v1"],
        ["--env-id", "Pendulum-v1"],
        ["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"max_num_frames_per_episode": 160}'],
        ["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"max_num_frames_per_episode": 160}', "--bfloat16"],
    ],
    ids=["discrete", "continuous", "image", "bfloat16"],
)
def test_training_on_cuda(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted and resumed there; the checkpoint then serves on the CPU."""
    flags = [*flags, *SMALL, "--n-workers", "0", "--eval-episodes", "2", "--device", "cuda"]
    with monkeypatch.context() as patch:
        stop_after(patch, updates=2)
        assert run(*flags, "--total-steps", "400", "--run-dir", "r") == 130
    before = checkpoint(tmp_path / "r")
    assert run("--resume", "r") == 0
    after = checkpoint(tmp_path / "r")
    assert (before["updates"], after["updates"]) == (2, 20) and before["cuda_rng"] is not None
    assert not same(before["model"], after["model"]) and all(x.isfinite().all() for x in after["model"].values())
    assert run("--evaluate", "r", "--device", "cpu", "--eval-episodes", "3") == 0
    assert summary(tmp_path / "r")["eval"]["episodes"] == 3
