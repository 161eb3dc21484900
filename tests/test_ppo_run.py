"""ppo_batch.py from its command line: batches, time limits, resume, evaluation, faults, bad input, learning."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import common.flags
import common.run
import paac
import ppo_batch
from common.flags import check_env
from common.vec_env import make_vec_env
from tests import helpers
from tests.helpers import check_files, checkpoint, faulty, same, stop_after, summary, watch_bfloat16
from tests.test_ppo_math import Watch

pytestmark = pytest.mark.usefixtures("own_folder_and_handlers")
ENV = "tests.paac_envs:{}-v0"
HERE = ["--n-workers", "0", "--eval-episodes", "0"]
SMALL = ["--n-envs", "4", "--t-max", "6", "--minibatch-size", "10", "--update-epochs", "2"]  # 24 steps an update
ECHO = ["--env-id", ENV.format("Echo"), *HERE, *SMALL]

run = functools.partial(helpers.run, ppo_batch)


@pytest.fixture
def refused(refused: Callable[..., str]) -> Callable[..., str]:
    """Run with flags that must be refused: status 2, nothing started or written. Returns the one line of stderr."""
    return functools.partial(refused, ppo_batch)


def trained(run_dir: Path) -> ppo_batch.ActorCritic:
    """The network of a run's checkpoint."""
    state = checkpoint(run_dir)
    env = check_env(args := ppo_batch.Args(**state["args"]))
    model = ppo_batch.ActorCritic(env.observation_space, env.action_space, args.arch)
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def play(model: ppo_batch.ActorCritic, obs: Tensor) -> tuple[Tensor, Tensor]:
    """The network's two outputs."""
    return model(obs)


# ---------------------------------------------------------------------------------------------- run directory


@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=lambda trainer: trainer.__name__)
@pytest.mark.parametrize(("observations", "threads"), [("Echo", 1), ("PixelCue", 2)])
def test_a_small_network_has_one_thread(trainer: ModuleType, observations: str, threads: int, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        flags = ["--n-envs", "2", "--t-max", "2", "--total-steps", "4"]
        flags += ["--minibatch-size", "4"] if trainer is ppo_batch else []
        assert (
            trainer.main(["--env-id", ENV.format(observations), *HERE, *flags, "--run-dir", str(tmp_path / "r")]) == 0
        )
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=lambda trainer: trainer.__name__)
def test_bfloat16_reaches_the_network(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_bfloat16(trainer, "ActorCritic", monkeypatch)
    flags = ["--n-envs", "2", "--t-max", "2", "--total-steps", "4", "--bfloat16"]
    flags += ["--minibatch-size", "4"] if trainer is ppo_batch else []
    folder = str(tmp_path / "r")
    assert trainer.main(["--env-id", ENV.format("PixelCue"), *HERE, *flags, "--run-dir", folder]) == 0
    assert trainer.main(["--evaluate", folder, "--eval-episodes", "1"]) == 0
    assert made == [True, True]


def test_run_directory_and_summary(tmp_path: Path) -> None:
    flags = ["--n-workers", "0", *SMALL, "--total-steps", "120", "--eval-episodes", "3", "--seed", "9"]
    assert run("--env-id", ENV.format("Echo"), *flags, "--learning-rate", "0.01") == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("tests.paac_envs-Echo-v0__ppo_batch__9__")
    check_files(run_dir)

    args = json.loads((run_dir / "args.json").read_text())
    assert (args["seed"], args["n_envs"], args["total_steps"], args["preset"]) == (9, 4, 120, "vector")
    assert (args["arch"], args["t_max"], args["gamma"]) == ("mlp", 6, 0.995)
    result = summary(run_dir)
    types = {"script": str, "env_id": str, "seed": int, "steps": int, "episodes": int, "wall_seconds": float}
    types |= {"steps_per_second": float, "return_last_100": float, "status": str, "eval": dict}
    assert {key: type(value) for key, value in result.items()} == types
    assert (result["script"], result["env_id"], result["seed"]) == ("ppo_batch", ENV.format("Echo"), 9)
    assert (result["steps"], result["episodes"], result["status"]) == (120, 60, "completed")
    assert -2 <= result["return_last_100"] <= 2 and result["steps_per_second"] > 0
    assert result["eval"]["episodes"] == 3 and result["eval"]["min"] <= result["eval"]["mean"] <= result["eval"]["max"]

    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    tags = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "return_last_100", "SPS")}
    tags |= {f"losses/{name}" for name in ("policy_loss", "value_loss", "entropy", "grad_norm")}
    tags |= {"losses/approx_kl", "losses/clip_fraction"}
    assert set(accumulator.Tags()["scalars"]) == tags | {"charts/learning_rate", "eval/return_mean"}
    points = {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
    assert points["charts/episodic_length"] == [(step, 2) for step in (24, 48, 72, 96, 120)]  # a point an update
    rates = [event.value for event in accumulator.Scalars("charts/learning_rate")]
    assert rates == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002], abs=1e-8)
    returns = [value for _, value in points["charts/episodic_return"]]  # of 12 episodes each
    means = [sum(returns[: k + 1]) / (k + 1) for k in range(5)]
    assert [value for _, value in points["charts/return_last_100"]] == pytest.approx(means, abs=1e-5)
    assert result["return_last_100"] == pytest.approx(means[-1], abs=1e-5)
    assert 1 < points["losses/entropy"][0][1] <= np.log(4) + 1e-5


def test_steps_are_rounded_up_to_whole_updates(tmp_path: Path) -> None:
    """No --t-max: 3 environments and 20 transitions make 7 steps; 21 · 3 is the first multiple of 21 from 50."""
    flags = ["--n-envs", "3", "--update-interval", "20", "--minibatch-size", "21", "--total-steps", "50"]
    assert run("--env-id", ENV.format("Bandit"), *HERE, *flags, "--run-dir", "r") == 0
    assert (summary(tmp_path / "r")["steps"], checkpoint(tmp_path / "r")["updates"]) == (63, 3)


def test_returns_are_raw_scores(tmp_path: Path) -> None:
    """Learning from clipped or scaled rewards changes nothing in what is reported."""
    flags = [*HERE, *SMALL, "--total-steps", "48", "--env-kwargs", '{"max_episode_steps": 3}', "--reward-scale", "0.1"]
    assert run("--env-id", ENV.format("Steady"), *flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["return_last_100"] == 3
    kwargs = '{"fault": "huge reward", "after": 1}'  # 1e35 a step, 7 steps an episode
    flags = [*SMALL, "--n-workers", "0", "--clip-rewards", "--total-steps", "48", "--eval-episodes", "2"]
    assert run("--env-id", ENV.format("Faulty"), "--env-kwargs", kwargs, *flags, "--run-dir", "s") == 0
    assert summary(tmp_path / "s")["return_last_100"] == pytest.approx(7e35)
    assert summary(tmp_path / "s")["eval"]["mean"] == pytest.approx(7e35)


# ---------------------------------------------------------------------------------------------------- batches


def test_learning_rate_and_clip_of_each_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the presets have them: α falls to zero, ε does not change."""
    watch = Watch(monkeypatch)
    cases = {"atari": [], "vector": [], "both": ["--preset", "atari", "--anneal-clip", "--update-epochs", "3"]}
    cases["constant"] = ["--preset", "vector", "--no-anneal-lr"]
    for name, flags in cases.items():
        flags = flags or ["--preset", name]
        assert run(*ECHO, "--total-steps", "96", *flags, "--run-dir", name) == 0
    schedule = [(seen["lr"], seen["clip_coef"]) for seen in watch.updates]
    fractions = (1.0, 0.75, 0.5, 0.25)
    assert schedule[:4] == [(pytest.approx(2.5e-4 * left), 0.1) for left in fractions]
    assert schedule[4:8] == [(pytest.approx(3e-4 * left), 0.2) for left in fractions]
    assert schedule[8:12] == [(pytest.approx(2.5e-4 * left), pytest.approx(0.1 * left)) for left in fractions]
    assert schedule[12:] == [(3e-4, 0.2)] * 4


def test_batch_of_an_atari_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The games go on from batch to batch; where a time limit cut one, V of its last screen counts. λ = 0: δ + V."""
    watch = Watch(monkeypatch)
    kwargs = {"max_num_frames_per_episode": 160}  # at most 40 steps
    flags = ["--env-id", "PongNoFrameskip-v4", "--env-kwargs", json.dumps(kwargs), "--gae-lambda", "0", *HERE[2:]]
    flags += ["--n-envs", "2", "--n-workers", "1", "--t-max", "48", "--minibatch-size", "96", "--update-epochs", "1"]
    assert run(*flags, "--total-steps", "192", "--gamma", "0.9", "--no-anneal-lr", "--run-dir", "r") == 0
    assert len(watch.updates) == 2
    envs = make_vec_env("PongNoFrameskip-v4", 2, 1, kwargs)
    obs, limits = torch.from_numpy(envs.reset(seed=ppo_batch.env_seed(1, 0))[0]), 0
    for seen in watch.updates:
        observations, actions, log_probs, advantages, targets = (x.unflatten(0, (48, 2)) for x in seen["batch"])
        assert observations.dtype == torch.uint8
        values = []
        for t in range(48):
            assert torch.equal(observations[t], obs)
            logits, value = play(seen["model"], obs)
            values.append(value)
            expected = logits.log_softmax(-1)[range(2), actions[t]]
            torch.testing.assert_close(log_probs[t], expected, rtol=1e-4, atol=1e-5)
            next_obs, reward, terminated, truncated, info = envs.step(actions[t].numpy())
            assert not terminated.any()
            obs = torch.from_numpy(next_obs.copy())
            after = play(seen["model"], obs)[1]
            for e in np.flatnonzero(truncated):
                after[e] = play(seen["model"], torch.from_numpy(info["final_obs"][e])[None])[1][0]
                limits += 1
            np.testing.assert_allclose(targets[t].numpy(), reward + 0.9 * after.numpy(), rtol=1e-3, atol=1e-4)
        raw = (targets - torch.stack(values)).numpy()
        np.testing.assert_allclose(advantages.numpy(), (raw - raw.mean()) / raw.std(), rtol=1e-2, atol=2e-3)
    envs.close()
    assert limits >= 2
    first, second = (seen["model"].state_dict()["trunk.0.weight"] for seen in watch.updates)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("flag", "low", "high"), [("--bootstrap-limits", 9.9, 10.1), ("--no-bootstrap-limits", 1.5, 3)]
)
def test_value_under_a_time_limit(flag: str, low: float, high: float, tmp_path: Path) -> None:
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10, wherever a limit cuts it. Where the limit counts as an end, that
    looks like (1 + 1.9 + 2.71) / 3 = 1.87 with λ = 1, and like 1 / (1 - 0.9 · 2/3) = 2.5 with λ = 0.
    """
    flags = ["--env-id", ENV.format("Steady"), "--env-kwargs", '{"max_episode_steps": 3}', *HERE, "--gamma", "0.9"]
    flags += ["--n-envs", "4", "--t-max", "8", "--minibatch-size", "32", "--learning-rate", "0.02", "--seed", "1"]
    assert run(*flags, "--total-steps", "1600", flag, "--run-dir", "r") == 0
    assert checkpoint(tmp_path / "r")["episodes"] == 4 * (400 // 3)
    value = trained(tmp_path / "r")(torch.tensor([[0.5, -1]]))[1].item()
    assert low < value < high


# ----------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--env-kwargs", '{"continuous": true}', "--no-anneal-lr", "--anneal-clip", "--max-grad-norm", "0.5"],
        [
            "--env-id",
            ENV.format("Bandit"),
            "--env-kwargs",
            '{"image": true, "continuous": true}',
            "--total-steps",
            "120",
        ],
    ],
    ids=["discrete", "continuous", "image"],
)
def test_resumed_run_is_the_uninterrupted_one(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, the normaliser's statistics, Adam's moments, schedules, random numbers and counts."""
    flags = [*ECHO, "--total-steps", "240", *flags]
    assert run(*flags, "--run-dir", "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, updates=3)
        assert run(*flags, "--run-dir", "parts") == 130
    middle = checkpoint(tmp_path / "parts")
    assert middle["updates"] == 3 and summary(tmp_path / "parts")["status"] == "interrupted"
    assert run("--resume", "parts") == 0
    whole, parts = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts")
    assert not same(middle["model"], parts["model"]) and not same(middle["optimizer"], parts["optimizer"])
    for key in ("model", "optimizer", "torch_rng", "step", "updates", "episodes", "returns"):
        assert same(whole[key], parts[key]), key
    if "trunk.mean" in whole["model"]:
        assert whole["model"]["trunk.count"] == 240 and whole["model"]["trunk.var"].min() > 0.1
        assert not torch.equal(middle["model"]["trunk.mean"], parts["model"]["trunk.mean"])
    last = summary(tmp_path / "parts")
    assert (last["status"], last["steps"]) == ("completed", whole["step"])


def test_other_seeds_give_other_runs(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*ECHO, "--total-steps", "48", "--seed", seed, "--run-dir", name) == 0
    models = {name: checkpoint(tmp_path / name)["model"] for name in "abc"}
    assert same(models["a"], models["b"]) and not same(models["a"], models["c"])


def test_a_resumed_run_meets_new_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    assert run("--env-id", ENV.format("VectorCue"), *HERE, *SMALL, "--total-steps", "24", "--run-dir", "r") == 0
    assert run("--resume", "r", "--total-steps", "48") == 0
    before, after = (seen["batch"][0][:4] for seen in watch.updates)  # where the four environments started
    assert not torch.isclose(before, after).any()


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory stopped after 2 of 10 updates."""
    with monkeypatch.context() as patch:
        stop_after(patch, updates=2)
        assert run(*ECHO, "--total-steps", "240", "--run-dir", "r") == 130
    return tmp_path / "r"


def test_flags_override_those_of_the_resumed_run(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    flags = ["--total-steps", "96", "--learning-rate", "0.1", "--adam-eps", "0.2", "--clip-coef", "0.7"]
    assert run("--resume", interrupted, *flags, "--t-max", "12", "--minibatch-size", "6") == 0
    (seen,) = watch.updates  # from step 48 of 96 on
    assert (seen["lr"], seen["clip_coef"], len(seen["batch"][0])) == (pytest.approx(0.05), 0.7, 48)
    assert (summary(interrupted)["steps"], checkpoint(interrupted)["updates"]) == (96, 3)
    assert checkpoint(interrupted)["optimizer"]["param_groups"][0]["eps"] == 0.2
    assert np.shape(watch.rows[0]) == (16, 6)


@pytest.mark.parametrize("trainer", [paac, ppo_batch], ids=lambda trainer: trainer.__name__)
def test_a_rollout_must_fit_into_memory(
    trainer: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 environments, 6 steps, pictures of 4x84x84 bytes, and what each needs besides.

    For paac.py the kept forward passes of arch_nips: pictures as floats, 16x20x20, 32x9x9 in both orders, 256. For
    ppo_batch.py 2 epochs of indices of 8 bytes.
    """
    kept = 4 * (4 * 84 * 84 + 16 * 20 * 20 + 2 * 32 * 9 * 9 + 256)
    need = 4 * 6 * (4 * 84 * 84 + (16 if trainer is ppo_batch else kept))
    flags = SMALL if trainer is ppo_batch else SMALL[:4]
    for free, code in ((need - 1, 2), (need, 0)):
        monkeypatch.setattr(common.flags, "free_memory", lambda device, free=free: free)
        assert trainer.main(["--env-id", ENV.format("PixelCue"), *HERE, *flags, "--total-steps", "24"]) == code
        assert ("--n-envs 4 with 6 steps between updates" in capfd.readouterr().err) == (code == 2)


def test_update_interval_beside_resume_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overrides the run's own, as every flag does."""
    flags = ["--n-envs", "4", "--update-interval", "24", "--minibatch-size", "10", "--total-steps", "24"]
    assert run("--env-id", ENV.format("Echo"), *HERE, *flags, "--run-dir", "r") == 0
    watch = Watch(monkeypatch)
    assert run("--resume", "r", "--total-steps", "72", "--update-interval", "48") == 0
    assert [len(seen["batch"][0]) for seen in watch.updates] == [48]


@pytest.mark.parametrize(("flag", "value"), [("--preset", "atari"), ("--arch", "nature")])
def test_resume_refuses_another_preset_or_network(
    flag: str, value: str, interrupted: Path, refused: Callable[..., str]
) -> None:
    assert f"{flag} {value}" in refused("--resume", interrupted, flag, value)


def test_resume_refuses_a_minibatch_larger_than_the_batch(interrupted: Path, refused: Callable[..., str]) -> None:
    assert "--minibatch-size 25" in refused("--resume", interrupted, "--minibatch-size", "25")
    assert "--minibatch-size 10" in refused("--resume", interrupted, "--t-max", "2")


def test_another_network_on_resume(interrupted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same environment with other actions: the parameters do not fit, and nothing is overwritten."""
    before = {path.name: path.read_bytes() for path in interrupted.iterdir()}
    assert run("--resume", interrupted, "--env-kwargs", '{"continuous": true}') == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in interrupted.iterdir()} == before


# ------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_twice_is_the_same_and_changes_nothing(tmp_path: Path) -> None:
    """Actions are sampled, so that equal results say something; the normaliser's statistics stay those of training."""
    flags = ["--env-id", ENV.format("VectorCue"), *HERE, *SMALL, "--total-steps", "48"]
    assert run(*flags, "--run-dir", "r") == 0
    before = summary(tmp_path / "r"), (tmp_path / "r" / "checkpoint.pt").read_bytes()
    assert before[0]["eval"] is None
    results = []
    for seed in ("1", "1", "2"):
        assert run("--evaluate", "r", "--eval-episodes", "20", "--seed", seed) == 0
        results.append(summary(tmp_path / "r")["eval"])
        assert summary(tmp_path / "r") | {"eval": None} == before[0]
        assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before[1]
    assert results[0] == results[1] != results[2] and results[0]["std"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


def test_evaluation_sees_what_the_normaliser_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics are taken from the checkpoint: none would be mean 0 and variance 1."""
    assert run(*ECHO, "--total-steps", "48", "--run-dir", "r") == 0
    states: list[dict[str, Tensor]] = []
    make_policy = ppo_batch.make_policy

    def watched(model: ppo_batch.ActorCritic, *arguments: Any) -> Any:
        states.append(model.state_dict())  # not a copy: what is left of it after the evaluation
        return make_policy(model, *arguments)

    monkeypatch.setattr(ppo_batch, "make_policy", watched)
    assert run("--evaluate", "r", "--eval-episodes", "5") == 0
    assert len(states) == 1 and same(dict(states[0]), dict(checkpoint(tmp_path / "r")["model"]))
    assert states[0]["trunk.count"] == 48 and states[0]["trunk.mean"].abs().max() > 0.1


# ----------------------------------------------------------------------------------------------------- faults


PPO = ["--minibatch-size", "10", "--update-epochs", "2"]


@pytest.mark.parametrize("flags", [[], ["--max-grad-norm", "0.5"]], ids=["unclipped", "clipped"])
def test_loss_that_is_not_finite(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A reward whose square is not finite: one line, and the last good checkpoint is left."""
    code = run(*faulty("huge reward", 0, tmp_path / "r"), *PPO, *flags, "--total-steps", "400")
    stderr = capfd.readouterr().err
    state = checkpoint(tmp_path / "r")
    moments = [x for entry in state["optimizer"]["state"].values() for x in entry.values()]
    assert all(x.isfinite().all() for x in [*state["model"].values(), *moments])
    assert code == 1 and state["step"] == 140
    assert len(stderr.splitlines()) == 1 and "finite" in stderr, stderr


def test_gradient_whose_norm_overflows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss of some 1e30 has a gradient of such numbers: finite, but not their squares. Clipping makes it zero."""
    env = ["--env-id", ENV.format("Bandit"), *HERE, *SMALL[:4], "--minibatch-size", "24", "--n-envs", "4"]
    flags = ["--max-grad-norm", "0.5", "--value-coef", "1e30"]
    assert run(*env, *flags, "--total-steps", "48", "--run-dir", "r") == 1
    stderr = capfd.readouterr().err
    found = re.fullmatch(
        r"ppo_batch\.py: step 0: the losses add up to (\S+), the norms of their gradients to inf; .*\n", stderr
    )
    assert found and math.isfinite(float(found[1])), stderr
    assert not (tmp_path / "r" / "checkpoint.pt").exists()


@pytest.mark.parametrize("epochs", [1, 10], ids=["one step", "many steps"])
@pytest.mark.parametrize("image", [False, True], ids=["vector", "image"])
def test_parameters_that_overflow(image: bool, epochs: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A learning rate so large that the next forward pass is not finite: one line, and the last checkpoint is left."""
    flags = ["--env-id", ENV.format("Bandit"), "--env-kwargs", json.dumps({"image": image}), *HERE, *SMALL[:4]]
    flags += ["--minibatch-size", "24", "--update-epochs", epochs, "--n-envs", "4", "--no-anneal-lr"]
    assert run(*flags, "--total-steps", "24", "--run-dir", "r") == 0
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    assert run("--resume", "r", "--learning-rate", "1e37", "--total-steps", "2400") == 1
    stderr = capfd.readouterr().err
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert re.fullmatch(r"ppo_batch\.py: step \d\d: .*finite.*\n", stderr), stderr


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--env-id", "CartPole-v99"], ["--env-id", "CartPole-v99"]),
        (["--env-id", ENV.format("TwoKeys")], ["--env-id", "Dict"]),
        (["--minibatch-size", "25"], ["--minibatch-size 25", "24"]),
        (["--t-max", "2"], ["--minibatch-size 10", "8"]),
        (["--minibatch-size", "0"], ["--minibatch-size 0"]),
        (["--minibatch-size", "-5"], ["--minibatch-size -5"]),
        (["--update-interval", "0"], ["--update-interval 0"]),
        (["--update-epochs", "0"], ["--update-epochs 0"]),
        (["--n-envs", "0"], ["--n-envs 0"]),
        (["--n-envs", "-1"], ["--n-envs -1"]),
        (["--n-workers", "5"], ["--n-workers 5"]),
        (["--n-workers", "-1"], ["--n-workers -1"]),
        (["--t-max", "0"], ["--t-max 0"]),
        (["--total-steps", "0"], ["--total-steps 0"]),
        (["--checkpoint-interval", "0"], ["--checkpoint-interval 0"]),
        (["--eval-episodes", "-1"], ["--eval-episodes -1"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--learning-rate", "-1"], ["--learning-rate -1"]),
        (["--learning-rate", "nan"], ["--learning-rate nan"]),
        (["--clip-coef", "-0.1"], ["--clip-coef -0.1"]),
        (["--entropy-coef", "inf"], ["--entropy-coef inf"]),
        (["--value-coef", "-1"], ["--value-coef -1"]),
        (["--reward-scale", "nan"], ["--reward-scale nan"]),
        (["--adam-eps", "0"], ["--adam-eps 0"]),
        (["--max-grad-norm", "-1"], ["--max-grad-norm -1"]),
        (["--max-grad-norm", "nan"], ["--max-grad-norm nan"]),
        (["--gamma", "1.1"], ["--gamma 1.1"]),
        (["--gae-lambda", "-0.1"], ["--gae-lambda -0.1"]),
        (["--gae-lambda", "2"], ["--gae-lambda 2"]),
        (["--preset", "paper"], ["--preset", "paper", "atari", "vector"]),
        (["--arch", "nips"], ["--arch", "nips"]),
        (["--arch", "nature"], ["--arch nature", ENV.format("Echo")]),
        (["--env-id", "PongNoFrameskip-v4", "--arch", "mlp"], ["--arch mlp", "PongNoFrameskip-v4"]),
        (["--env-kwargs", '{"no_such": 1}'], ["no_such"]),
        (["--n-processes", "4"], ["--n-processes"]),
        (["--resume", "nothing"], ["--resume nothing"]),
        (["--evaluate", "nothing"], ["--evaluate nothing"]),
        (["--resume", "a", "--evaluate", "b"], ["--resume", "--evaluate"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_refused(refused: Callable[..., str], flags: list[str], named: list[str]) -> None:
    line = refused(*ECHO, *flags)
    assert all(text in line for text in named), line


def test_refused_without_cuda(refused: Callable[..., str]) -> None:
    assert "--device cuda" in refused(*ECHO, "--device", "cuda")


def test_refused_run_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "checkpoint.pt").write_bytes(b"precious")
    assert "--run-dir taken" in refused(*ECHO, "--run-dir", "taken")


# --------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("env_id", "flags", "goal"),
    [
        # 500 is the most there is, chance gives 22
        ("CartPole-v1", ["--total-steps", "16384", "--update-interval", "512", "--no-anneal-lr"], 250),
        # 1 is the most there is, chance gives 0.5
        (ENV.format("PixelCue"), ["--total-steps", "768", "--update-interval", "128", "--minibatch-size", "32"], 0.8),
        # 0 is the most there is, the first policy gets -5.3
        (ENV.format("VectorCue"), ["--total-steps", "12000", "--update-interval", "256", "--no-anneal-lr"], -1.0),
    ],
    ids=["discrete", "image", "continuous"],
)
def test_learning(env_id: str, flags: list[str], goal: float, tmp_path: Path) -> None:
    flags = [*flags, "--n-workers", "0", "--learning-rate", "1e-3", "--seed", "1", "--eval-episodes", "40"]
    assert run("--env-id", env_id, *flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > goal


# ------------------------------------------------------------------------------------------------------- CUDA


PONG = ["--env-id", "PongNoFrameskip-v4", "--env-kwargs", '{"max_num_frames_per_episode": 160}']


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "flags",
    [
        ["--env-id", ENV.format("Echo")],
        ["--env-id", ENV.format("Echo"), "--env-kwargs", '{"continuous": true}'],
        ["--env-id", ENV.format("Steady"), "--env-kwargs", '{"max_episode_steps": 4}'],
        [*PONG, "--t-max", "48"],
        [*PONG, "--t-max", "48", "--bfloat16"],
    ],
    ids=["discrete", "continuous", "time limits", "image", "bfloat16"],
)
def test_training_on_cuda(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few updates, interrupted and resumed there; the checkpoint then serves on the CPU."""
    total = 4 * (192 if "--t-max" in flags else 24)
    watch = Watch(monkeypatch)
    flags = ["--n-workers", "0", "--eval-episodes", "2", *SMALL, *flags, "--total-steps", total, "--device", "cuda"]
    with monkeypatch.context() as patch:
        stop_after(patch, updates=2)
        assert run(*flags, "--run-dir", "r") == 130
    assert run("--resume", "r") == 0
    assert len(watch.updates) == 4 and all(x.is_cuda for seen in watch.updates for x in seen["batch"])
    state = checkpoint(tmp_path / "r")["model"]
    assert all(x.isfinite().all() for x in state.values())
    moved = [(state[name].cpu() - x.cpu()).abs().max() for name, x in watch.initial.items() if "weight" in name]
    assert max(moved) > 1e-5
    assert run("--evaluate", "r", "--device", "cpu", "--eval-episodes", "3") == 0
    assert summary(tmp_path / "r")["eval"]["episodes"] == 3
