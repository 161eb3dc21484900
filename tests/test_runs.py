"""Run directories, resume, evaluation and flags, for every trainer."""

import json
import math
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import common.evaluate
import common.run
import common.vec_env
import paac
from common.run import Run, load_checkpoint
from tests.helpers import ROOT, TRAINERS, checkpoint, parse, run, small, summary

SUMMARY = {"script", "env_id", "seed", "steps", "episodes", "wall_seconds", "steps_per_second"}
SUMMARY |= {"return_last_100", "status", "eval"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Evaluates without processes, and draws a point of the curves after each update."""
    monkeypatch.setattr(common.evaluate, "n_cores", lambda: 0)
    monkeypatch.setattr(common.run, "LOG_SECONDS", 0)


def scalars(run_dir):
    """The curves in TensorBoard's files: (step, value) by tag."""
    events = EventAccumulator(str(run_dir)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("name", TRAINERS)
def test_train_resume_and_evaluate(name, tmp_path, capfd):
    run_dir = tmp_path / "run"
    # TensorBoard may read files of the same second in the wrong order: a run takes longer
    flags = [*small(name, 1, pace=0.003), "--total-steps", 400, "--seed", 3, "--run-dir", run_dir]
    assert run(name, *flags, "--eval-episodes", 2) == 0
    before, result = check_run(name, run_dir, 400)
    assert set(result) == SUMMARY
    assert result["eval"] == {"episodes": 2, "mean": 15, "std": 0, "min": 15, "max": 15}
    assert result["wall_seconds"] > 0 and result["steps_per_second"] > 0
    tags = set(scalars(run_dir))
    assert tags >= {"charts/episodic_return", "charts/episodic_length", "charts/SPS"}
    assert "eval/return_mean" in tags
    assert f"losses/{'replay_ratio' if name == 'apex' else 'grad_norm'}" in tags

    check_resume(name, run_dir, before)
    check_evaluation(name, run_dir)
    check_refused(name, run_dir, capfd)


def check_run(name, run_dir, total_steps):
    """Files, counts and scores of a run that is complete. Returns checkpoint and summary."""
    files = {re.sub(r"events\..*", "events", path.name) for path in run_dir.iterdir()}
    assert files == {"args.json", "checkpoint.pt", "summary.json", "events"}
    args = json.loads((run_dir / "args.json").read_text())
    assert args["total_steps"] == total_steps and args["seed"] == 3
    assert args["run_dir"] == str(run_dir) and args["learning_rate"] is not None
    state, result = checkpoint(run_dir), summary(run_dir)
    assert state["script"] == result["script"] == name and result["status"] == "completed"
    assert state["episodes"] == result["episodes"] and state["step"] == result["steps"]
    if name == "apex":  # chunks that are there are taken together
        assert 0 <= state["step"] - total_steps < 100
        assert abs(state["episodes"] - state["step"] // 5) < 20
    else:  # the episodes of all environments end after each fifth step
        assert state["step"] == total_steps and state["episodes"] == state["step"] // 5
    assert result["return_last_100"] == 15  # raw, whatever is learned from
    curves = scalars(run_dir)
    assert {value for _, value in curves["charts/episodic_return"]} == {15}
    assert {value for _, value in curves["charts/episodic_length"]} == {5}
    return state, result


def check_resume(name, run_dir, before):
    """Where α is next to nothing and gradients are scaled to 0, θ stays and statistics decay.

    By how much they decay tells the number of updates, and that they go on from the old ones.
    """
    past = len(scalars(run_dir).get("losses/learning_rate", []))
    flags = ["--learning-rate", 1e-30, "--max-grad-norm", 1e-30, "--eval-episodes", 0]
    flags += ["--target-interval", 10**6] if "target_model" in before else []
    flags += ["--adam-eps", 0.5] if name == "ppo_batch" else ["--rms-decay", 0.97]
    assert run(name, "--resume", run_dir, "--total-steps", 800, *flags) == 0
    after, result = check_run(name, run_dir, 800)
    assert after["wall_seconds"] > before["wall_seconds"] > 0
    assert result["wall_seconds"] > before["wall_seconds"] - 0.1
    for network in {"model", "target_model"} & before.keys():
        for key, tensor in before[network].items():
            if key.endswith(".sums"):
                n, now = tensor[0, 0], after[network][key][0, 0]
                if network == "model" and name != "apex":  # which counts chunks
                    assert (n, now) == (400, 800)
            elif not key.endswith((".mean", ".std")):
                assert torch.equal(tensor, after[network][key]), key
    (optimizer,) = [key for key in before if key.startswith(("optimizer", "adam"))]
    old, new = before[optimizer], after[optimizer]
    if name == "ppo_batch":
        assert new["param_groups"][0]["eps"] == 0.5
        old, new = old["state"][0], new["state"][0]
    decays = {"square": 0.97, "mean": 0.97, "exp_avg": 0.9, "exp_avg_sq": 0.999}
    n_updates = set()
    for key in old.keys() - {"step"}:
        largest = old[key].abs().argmax()
        ratio = (new[key].flatten()[largest] / old[key].flatten()[largest]).item()
        assert 0 < ratio < 1
        n_updates.add(round(math.log(ratio) / math.log(decays[re.sub(r"_\d+$", "", key)])))
        torch.testing.assert_close(new[key], old[key] * ratio, rtol=1e-3, atol=1e-30)
    if name != "apex":  # whose actors see the rewards
        assert after["reward_scale"]["sums"][0] == 800
    assert len(n_updates) == 1
    if before["updates"]:  # which nobody counts in Hogwild
        per_update = 4 if name == "ppo_batch" else 1  # minibatches
        assert n_updates == {per_update * (after["updates"] - before["updates"])}
    if name != "apex":  # α falls to zero over all steps
        curve = scalars(run_dir)["losses/learning_rate"][past:]
        assert curve and all(step > 400 for step, _ in curve)
        assert all(0 <= value <= 0.5e-30 * 1.001 for _, value in curve)


def check_evaluation(name, run_dir):
    """Three episodes and a GIF; whatever training has written stays as it is."""
    before = summary(run_dir)
    kept = {file: (run_dir / file).read_bytes() for file in ("args.json", "checkpoint.pt")}
    assert run(name, "--evaluate", run_dir, "--eval-episodes", 3, "--record") == 0
    assert summary(run_dir) == before | {"eval": summary(run_dir)["eval"]}
    assert summary(run_dir)["eval"]["episodes"] == 3
    assert scalars(run_dir)["eval/return_mean"][-1] == (before["steps"], 15)
    assert kept == {file: (run_dir / file).read_bytes() for file in kept}
    with Image.open(run_dir / "agent.gif") as picture:
        assert picture.n_frames == 5


def check_refused(name, run_dir, capfd):
    """A network of another shape, and the checkpoint of another trainer."""
    kept = (run_dir / "checkpoint.pt").read_bytes()
    other = TRAINERS[TRAINERS.index(name) - 1]
    for flag in ("--resume", "--evaluate"):
        capfd.readouterr()
        assert run(name, flag, run_dir, "--env-kwargs", '{"size": 4}') == 2
        assert "model does not fit" in capfd.readouterr().err
        assert run(other, flag, run_dir) == 2
        line = capfd.readouterr().err
        assert f"written by {name}.py, not by {other}.py" in line and line.count("\n") == 1
    assert run(name, "--resume", run_dir, "--total-steps", 300) == 2
    assert "more --total-steps" in capfd.readouterr().err
    assert json.loads((run_dir / "args.json").read_text())["total_steps"] == 800
    assert (run_dir / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--total-steps", "1e6"], "total_steps", 1_000_000),
        (["--total-steps=1e6"], "total_steps", 1_000_000),
        (["--total-steps", "1_000_000"], "total_steps", 1_000_000),
        (["--learning-rate", "1e-3"], "learning_rate", 0.001),
        (["--preset", "code", "--max-grad-norm", "5"], "max_grad_norm", 5),
    ],
)
def test_flags(flags, field, value, tmp_path):
    args = parse("paac", "--env-id", "CartPole-v1", "--run-dir", tmp_path / "run", *flags)
    assert getattr(args, field) == value


@pytest.mark.parametrize(
    ("name", "flags", "named"),
    [
        ("paac", ["--env-id", "CartPole"], "CartPole-v1"),
        ("a3c", ["--env-id", "no_such_module:Env-v0"], "no_such_module"),
        ("sarsa", ["--env-id", "CartPole-v1", "--env-kwargs", '{"sise": 3}'], "sise"),
        ("apex", ["--env-id", "Pendulum-v1"], "Discrete"),
        ("nstep_q", ["--evaluate", "no_such_run"], "no_such_run"),
        ("paac", ["--env-id", "CartPole-v1", "--run-dir", "b_run"], "--resume b_run"),
        ("paac", ["--env-id", "CartPole-v1", "--preset", "short"], "images"),
        ("paac", ["--env-id", "CartPole-v1", "--n-workers", "-1"], "--n-workers -1"),
        ("apex", ["--env-id", "CartPole-v1", "--resume", "a_run"], "checkpoint"),
        ("paac", ["--resume", "a_run", "--run-dir", "another"], "--run-dir"),
        ("paac", ["--resume", "a_run", "--preset", "short"], "--preset"),
    ],
)
def test_mistake_gets_one_line(name, flags, named, tmp_path, monkeypatch, capfd):
    """The line says what to write, and nothing is written."""
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run" / "args.json").write_text("{}")
    (tmp_path / "b_run").mkdir()
    (tmp_path / "b_run" / "checkpoint.pt").touch()
    monkeypatch.chdir(tmp_path)
    assert run(name, *flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err
    assert len(list(tmp_path.rglob("*"))) == 4


def test_a_mistake_in_an_environment_keeps_its_traceback():
    flags = "--env-id", "tests.envs:Walk-v0", "--env-kwargs", '{"observations": []}'
    with pytest.raises(TypeError, match="unhashable"):
        run("paac", *flags)


def test_environment_that_changes_the_working_directory(tmp_path, monkeypatch):
    """Everything of the run stays in --run-dir, and relative paths are those of the user."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = [*small("paac", 0, folder=str(elsewhere)), "--record", "--run-dir", "run"]
    evaluation = ["--evaluate", "run", "--eval-episodes", 1, "--record"]
    for start in ([*flags, "--total-steps", 40], evaluation, ["--resume", "run"]):
        monkeypatch.chdir(tmp_path)
        common.vec_env.env_spaces.cache_clear()  # as in a new process
        assert run("paac", *start, *(["--total-steps", 80] if start[0] == "--resume" else [])) == 0
    assert checkpoint(tmp_path / "run")["step"] == 80
    assert not list(elsewhere.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "run"}


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"returns": Path(tmp_path)}, tmp_path / "checkpoint.pt")  # any class of Python's
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint("paac", tmp_path)


def test_a_network_with_nan_is_not_saved(tmp_path):
    model = paac.mlp(2, 1)
    args = paac.Args(run_dir=str(tmp_path), total_steps=100, checkpoint_interval=10)
    with pytest.raises(FloatingPointError), Run("paac", args, model=model) as training:
        training.log_update(10)
        before = (tmp_path / "checkpoint.pt").read_bytes()
        model[0].weight.data[1, 1] = math.nan
        training.log_update(20)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert checkpoint(tmp_path)["step"] == 10 and not list(tmp_path.glob("*.tmp"))


KEPT = sorted((ROOT / "results" / "checkpoints").glob("*"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_kept_checkpoint_can_be_evaluated(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(common.evaluate, "MAX_EPISODE_STEPS", 20)
    run_dir = shutil.copytree(folder, tmp_path / "run")
    assert run(checkpoint(folder)["script"], "--evaluate", run_dir, "--eval-episodes", 1) == 0
    assert summary(run_dir)["eval"]["episodes"] == 1
