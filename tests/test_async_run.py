"""The contract of a3c.py, async_q.py, nstep_q.py and sarsa.py, and what their processes share (common/hogwild.py)."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import Tensor, nn

import a3c
import async_q
import common.crew
import common.evaluation
import common.hogwild
import common.run
import nstep_q
import sarsa
from common.hogwild import Team, Worker, hand_over, share
from common.processes import WorkerError, enter_worker, start_worker
from tests.helpers import (
    ENDLESS,
    check_files,
    checkpoint,
    members,
    on_linux,
    run,
    same,
    script,
    squares,
    summary,
    wait_for,
    workers_of,
)
from tests.paac_envs import Bandit

pytestmark = pytest.mark.usefixtures("own_folder_and_handlers")

TRAINERS = [a3c, async_q, nstep_q, sarsa]
Q_LEARNERS = [async_q, nstep_q, sarsa]
each_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)
each_q_learner = pytest.mark.parametrize("trainer", Q_LEARNERS, ids=lambda trainer: trainer.__name__)

ENV = ["--env-id", "tests.paac_envs:Faulty-v0", "--env-kwargs", '{"fault": "none", "after": 1}']  # 7 steps an episode
BANDIT = ["--env-id", "tests.paac_envs:Bandit-v0"]
ONE = ["--n-processes", "1", "--eval-episodes", "0"]


@pytest.fixture(autouse=True)
def _evaluates_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.evaluation, "n_cores", lambda: 0)


class Here:
    """A stand-in for an actor-learner's process and for both ends of its connection: it lives in this process, and
    from its birth to its death while the parent looks for its first message. Starting a process takes seconds.
    """

    exitcode = 1

    def __init__(self, target: Callable, arguments: tuple) -> None:
        self.target, self.arguments, self.messages = target, arguments, deque()

    def poll(self) -> bool:
        target, self.target = self.target, None
        if target:
            target(*self.arguments, self)
        return True

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def recv(self) -> Any:
        if not self.messages:
            raise EOFError
        return self.messages.popleft()

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        pass

    kill = close = join


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one actor-learner becomes a `Here`."""

    def start(target: Callable, arguments: tuple, name: str) -> tuple[Here, Here]:
        return (stand_in := Here(target, arguments)), stand_in

    monkeypatch.setattr(common.crew, "start_worker", start)
    monkeypatch.setattr(common.crew, "enter_worker", lambda: None)


def numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Everything in a checkpoint that was learned: parameters and statistics."""
    models = {key: state[key] for key in state if key in ("model", "target_model")}
    return models | {key: state[key]["state"] for key in state if key.startswith("optimizer_")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModuleType], Path]:
    """The directory of a run of 200 steps, in a process as always; made once for each trainer, not to be changed."""

    @functools.cache
    def finish(trainer: ModuleType) -> Path:
        run_dir = tmp_path_factory.mktemp(trainer.__name__) / "r"
        flags = [*ENV, "--total-steps", "200", "--seed", "9", "--n-processes", "1", "--eval-episodes", "3"]
        flags += ["--learning-rate", "7e-4"] + ([] if trainer is a3c else ["--target-interval", "1000"])
        flags += ["--update-interval", "5"] if trainer in (async_q, sarsa) else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common.evaluation, "n_cores", lambda: 0)
            assert run(trainer, *flags, "--run-dir", run_dir) == 0
        return run_dir

    return finish


@pytest.fixture
def copied(finished: Callable[[ModuleType], Path], tmp_path: Path) -> Callable[[ModuleType], Path]:
    """A copy of a finished run, to be resumed."""
    return lambda trainer: Path(shutil.copytree(finished(trainer), tmp_path / "copy"))


# ---------------------------------------------------------------------------------------------- run directory


@each_trainer
def test_run_directory_and_summary(trainer: ModuleType, finished: Callable[[ModuleType], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = finished(trainer)
    check_files(run_dir)

    args = json.loads((run_dir / "args.json").read_text())
    expected = {"seed": 9, "total_steps": 200, "preset": "vector", "arch": "mlp", "n_processes": 1, "gamma": 0.99}
    expected |= {"learning_rate": 7e-4, "optimizer": "shared-rmsprop", "run_dir": str(run_dir), "resume": None}
    assert args | expected == args

    result = summary(run_dir)
    types = {"script": str, "env_id": str, "seed": int, "steps": int, "episodes": int, "wall_seconds": float}
    types |= {"steps_per_second": float, "return_last_100": float, "status": str, "eval": dict}
    assert {key: type(value) for key, value in result.items()} == types
    expected = {"script": trainer.__name__, "env_id": "tests.paac_envs:Faulty-v0", "seed": 9, "steps": 200}
    expected |= {"episodes": 28, "status": "completed"}
    assert result | expected == result
    assert 0 < result["return_last_100"] < 7 and result["steps_per_second"] > 0
    types = {"episodes": int, "mean": float, "std": float, "min": float, "max": float}
    assert {key: type(value) for key, value in result["eval"].items()} == types
    assert result["eval"]["episodes"] == 3
    assert 0 <= result["eval"]["min"] <= result["eval"]["mean"] <= result["eval"]["max"] <= 7

    state = checkpoint(run_dir)
    parts = {"model", "optimizer_0"} | ({"target_model"} if trainer in Q_LEARNERS else set())
    assert numbers(state).keys() == parts
    assert (state["script"], state["step"], state["episodes"], len(state["returns"])) == (trainer.__name__, 200, 28, 28)

    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    tags = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"}
    tags |= {"charts/return_last_100", "losses/grad_norm", "eval/return_mean"}
    if trainer in Q_LEARNERS:
        tags |= {"charts/epsilon", "losses/td_loss", "losses/q_values"}
    else:
        tags |= {"losses/policy_loss", "losses/value_loss", "losses/entropy"}
    assert set(accumulator.Tags()["scalars"]) == tags
    assert {event.value for event in accumulator.Scalars("charts/episodic_length")} == {7}
    assert accumulator.Scalars("charts/learning_rate")[-1].value == 0  # of the last update
    assert accumulator.Scalars("charts/SPS")[-1].step == 200
    evaluation = accumulator.Scalars("eval/return_mean")
    assert [(e.step, e.value) for e in evaluation] == [(200, pytest.approx(result["eval"]["mean"]))]


@each_trainer
def test_evaluate_adds_to_the_summary_and_touches_nothing_else(
    trainer: ModuleType, copied: Callable[[ModuleType], Path]
) -> None:
    run_dir = copied(trainer)
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert run(trainer, "--evaluate", run_dir, "--eval-episodes", "5") == 0
    after = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"summary.json"}
    old = json.loads(before["summary.json"])
    assert summary(run_dir)["eval"]["episodes"] == 5 and summary(run_dir) | {"eval": old["eval"]} == old


@each_trainer
def test_default_run_directory(trainer: ModuleType, here: None, tmp_path: Path) -> None:
    assert run(trainer, *BANDIT, *ONE, "--total-steps", "50", "--seed", "4") == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith(f"tests.paac_envs-Bandit-v0__{trainer.__name__}__4__")
    assert (summary(run_dir)["steps"], summary(run_dir)["eval"]) == (50, None)


def test_end_during_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps are taken while the parent waits for the disk: the run is complete all the same."""
    monkeypatch.setattr(os, "fsync", lambda number: wait_for(lambda: not multiprocessing.active_children(), 10))
    assert run(a3c, *ENV, *ONE, "--total-steps", "500", "--checkpoint-interval", "1", "--run-dir", "r") == 0
    assert (summary(tmp_path / "r")["steps"], summary(tmp_path / "r")["status"]) == (500, "completed")
    assert checkpoint(tmp_path / "r")["step"] == 500


# ------------------------------------------------------------------------------------------- the step counter


def count(worker: Worker, steps: int, phases: Tensor, last: Tensor) -> None:
    """Count `steps` steps at the same time as all others; then go on to the end of training."""
    phases, last = phases.numpy(), last.numpy()
    phases[worker.index] = 1
    while not (phases >= 1).all():
        time.sleep(0.001)
    for i in range(1, steps + 1):
        before = worker.global_step
        worker.count_step(0.0, False)
        if not before < worker.global_step or worker.global_step < i:
            raise AssertionError(f"{before}, {worker.global_step} after {i} steps of its own")
    last[worker.index] = worker.global_step
    phases[worker.index] = 2
    while not (phases >= 3).all():
        time.sleep(0.001)
    while worker.go_on():
        worker.count_step(0.0, False)


def test_ten_processes_count_exactly() -> None:
    n, steps = 10, 20_000
    phases, last = torch.zeros(2, n, dtype=torch.int64).share_memory_()
    with Team(count, (steps, phases, last), n, n * steps + 1007 + 5, start=5) as team:
        assert wait_for(lambda: (phases >= 2).all(), 120)
        assert team.global_step == n * steps + 5
        assert steps + 5 < last.max() <= n * steps + 5
        phases += 1
        assert wait_for(lambda: not any(process.is_alive() for process in team.processes), 30)
        assert [process.exitcode for process in team.processes] == [0] * n
        assert (
            0 <= team.global_step - team.total_steps < n
        )  # nobody begins a step when he knows that it is one too many


def test_steps_and_episodes_of_a_worker() -> None:
    """T includes what the others count; a return is the sum of raw rewards."""
    counts, parked, flags = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(3).long()
    worker, sent = Worker(1, counts, parked, flags, total_steps=10), []
    worker.connect(SimpleNamespace(send=sent.append))
    counts[0] = 4
    assert worker.global_step == 0 and worker.go_on()
    for reward, done in ((2.5, False), (-1.0, True), (8.0, True), (1.0, False)):
        worker.count_step(reward, done)
    assert sent == [("episode", 1.5, 2), ("episode", 8.0, 1)]
    assert (counts.tolist(), worker.global_step, worker.go_on()) == ([4, 4], 8, True)
    counts[0] += 1
    worker.count_step(0.0, False)
    assert (worker.global_step, worker.go_on()) == (10, False)


def test_crossing_is_noticed_once() -> None:
    counts, flags = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 0, 250])  # of a run resumed at 250
    workers = [Worker(i, counts, counts.clone(), flags, total_steps=10**9) for i in range(2)]
    counts[0] = 250
    seen = []
    for worker in workers:
        worker.connect(None)
    for _ in range(200):
        for worker in workers:
            worker.count_step(0.0, False)
            if worker.crossed(100):
                seen.append(worker.global_step)
    assert seen == [300, 400, 500, 600]


# --------------------------------------------------------------------------------------- parameters that all share

GRADIENTS = (torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[-3.0, 0.25, 0.0]]))


def step_in_turn(worker: Worker, model: nn.Module, optimizer: a3c.RMSProp, turn: Tensor, private: Tensor) -> None:
    """One step of the optimizer, first by process 0, then by process 1."""
    local = copy.deepcopy(model)
    while turn.item() < worker.index:
        time.sleep(0.001)
    private[worker.index, 0] = model.weight.grad is None  # that of the other process is not seen
    local.weight.grad = GRADIENTS[worker.index].clone()
    hand_over([local.weight], [model.weight])
    optimizer.step()
    turn += 1
    while turn.item() < 2:
        time.sleep(0.001)
    private[worker.index, 1] = torch.equal(model.weight.grad, GRADIENTS[worker.index])


def test_statistics_are_shared_and_gradients_are_not() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = a3c.RMSProp(model.parameters(), 0.1, 0.99, 0.1, 0.0)
    expected = copy.deepcopy(model)
    alone = a3c.RMSProp(expected.parameters(), 0.1, 0.99, 0.1, 0.0)
    share(model, optimizer)
    square = optimizer.state[model.weight]["square"]
    assert model.weight.is_shared() and square.is_shared()
    turn, private = torch.zeros((), dtype=torch.int64).share_memory_(), torch.zeros(2, 2).share_memory_()
    with Team(step_in_turn, (model, optimizer, turn, private), 2, 10) as team:
        assert wait_for(lambda: not any(process.is_alive() for process in team.processes), 60)
    for gradient in GRADIENTS:
        expected.weight.grad = gradient
        alone.step()
    assert torch.equal(square, alone.state[expected.weight]["square"]) and square.all()
    assert torch.equal(model.weight, expected.weight)
    assert model.weight.grad is None and private.all()


def only_the_second(trainer: str, worker: Worker, *arguments: Any) -> None:
    """Of two actor-learners the first waits until the second has done all the work."""
    if worker.index == 1:
        importlib.import_module(trainer).actor_learner(worker, *arguments)
    while int(worker.counts.sum()) < worker.total_steps:
        time.sleep(0.01)


@each_trainer
def test_each_process_moves_what_all_share(trainer: ModuleType, tmp_path: Path) -> None:
    """Another process than the first, and processes that race count and learn both."""
    args, _ = trainer.parse(["--env-id", "CartPole-v1", "--n-processes", "2", "--run-dir", str(tmp_path / "r")])
    models = [trainer.make_model(args) for _ in range(1 if trainer is a3c else 2)]
    optimizers = trainer.make_optimizers(args, models[0])
    before = copy.deepcopy(models[0].state_dict())
    share(models[0], *optimizers)
    share(models[-1])
    with Team(functools.partial(only_the_second, trainer.__name__), (args, *models, optimizers), 2, 200) as team:
        assert wait_for(lambda: team.global_step == 200 and not any(p.is_alive() for p in team.processes), 60)
        assert team.counts.tolist() == [0, 200]
    for name, p in models[0].named_parameters():
        assert not torch.equal(p, before[name]) and optimizers[0].state[p]["square"].any(), name


@each_trainer
def test_too_many_shared_statistics(
    trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, as a file is open for each."""

    def share_memory(module: nn.Module) -> None:
        raise RuntimeError("unable to open shared memory object: Too many open files (24)\nand more")

    monkeypatch.setattr(nn.Module, "share_memory", share_memory)
    assert run(trainer, "--env-id", "CartPole-v1", *ONE, "--total-steps", "100", "--run-dir", "r") == 1
    stderr = capfd.readouterr().err
    assert stderr.startswith(f"{trainer.__name__}.py: shared memory: ") and "ulimit -n" in stderr
    assert len(stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------ determinism


@each_trainer
def test_one_process_is_deterministic(trainer: ModuleType, here: None, tmp_path: Path) -> None:
    flags = ["--env-id", "CartPole-v1", *ONE, "--total-steps", "2000", "--target-interval", "300"]
    flags = flags[: -2 if trainer is a3c else None]
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert run(trainer, *flags, "--seed", seed, "--run-dir", name) == 0
    a, b, c = (checkpoint(tmp_path / name) for name in "abc")
    assert a["step"] == 2000 and same(numbers(a), numbers(b)) and a["returns"] == b["returns"]
    assert not same(a["model"], c["model"]) and a["returns"] != c["returns"]


def test_a_process_learns_what_its_stand_in_learns(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The other tests may therefore save the time that it takes to start one."""
    flags = ["--env-id", "CartPole-v1", *ONE, "--total-steps", "2000", "--run-dir"]
    assert run(nstep_q, *flags, "process") == 0
    request.getfixturevalue("here")
    assert run(nstep_q, *flags, "here") == 0
    assert same(numbers(checkpoint(tmp_path / "process")), numbers(checkpoint(tmp_path / "here")))


@each_q_learner
def test_target_parameters_begin_as_the_parameters(trainer: ModuleType, here: None, tmp_path: Path) -> None:
    flags = ["--total-steps", "50", "--learning-rate", "1e-30", "--target-interval", "1000", "--run-dir", "r"]
    assert run(trainer, *BANDIT, *ONE, *flags) == 0
    state = checkpoint(tmp_path / "r")
    assert same(state["model"], state["target_model"])


# ----------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("trainer", [a3c, sarsa], ids=["a3c", "sarsa"])
def test_resumed_state_is_what_the_processes_work_on(
    trainer: ModuleType, copied: Callable[[ModuleType], Path], tmp_path: Path
) -> None:
    """With gradients clipped to nothing θ stays as it was, g decays from what it was, and θ⁻ ← θ is the restored θ."""
    run_dir = copied(trainer)
    before, flags = checkpoint(run_dir), [] if trainer is a3c else ["--target-interval", "1"]
    if trainer is sarsa:
        assert not same(before["model"], before["target_model"])
    assert run(trainer, "--resume", run_dir, "--total-steps", "260", "--max-grad-norm", "0", *flags) == 0
    after = checkpoint(run_dir)
    assert (after["step"], summary(run_dir)["steps"], summary(run_dir)["status"]) == (260, 260, "completed")
    assert after["episodes"] == 28 + 8 and after["wall_seconds"] > before["wall_seconds"]  # 60 steps, new episodes
    assert same(after["model"], before["model"])
    if trainer is sarsa:
        assert same(after["target_model"], before["model"])
    old, new = squares(before), squares(after)
    ratio = (new[old > 1e-12] / old[old > 1e-12]).double()
    updates = ratio.log().div(torch.tensor(0.99).double().log())
    assert len(ratio) > 100 and 12 <= updates.mean() <= 60 and updates.mean() % 1 == pytest.approx(0.5, abs=0.501)
    torch.testing.assert_close(updates, updates.mean().round().expand_as(updates), atol=1e-2, rtol=0)


@each_trainer
def test_resume_without_learning_leaves_the_model(
    trainer: ModuleType, copied: Callable[[ModuleType], Path], here: None
) -> None:
    run_dir = copied(trainer)
    before = checkpoint(run_dir)
    assert run(trainer, "--resume", run_dir, "--total-steps", "300", "--learning-rate", "0") == 0
    after = checkpoint(run_dir)
    assert after["step"] == 300 and same(after["model"], before["model"])
    assert not torch.equal(squares(after), squares(before))
    if trainer in Q_LEARNERS:
        assert same(after["target_model"], before["target_model"])  # T has not come to 1,000 yet
        assert not same(after["target_model"], after["model"])


@each_trainer
def test_flags_beside_resume(trainer: ModuleType, copied: Callable[[ModuleType], Path], here: None) -> None:
    run_dir = copied(trainer)
    before, flags = checkpoint(run_dir), ["--total-steps", "300", "--rms-decay", "0.5", "--rms-eps", "0.2"]
    assert run(trainer, "--resume", run_dir, *flags, "--learning-rate", "0.01", "--eval-episodes", "2") == 0
    args, group = json.loads((run_dir / "args.json").read_text()), checkpoint(run_dir)["optimizer_0"]["param_groups"][0]
    expected = {"total_steps": 300, "rms_decay": 0.5, "rms_eps": 0.2, "learning_rate": 0.01, "seed": 9}
    assert args | expected == args and args["env_kwargs"] == ENV[3]
    assert (group["decay"], group["eps"]) == (0.5, 0.2)
    assert summary(run_dir)["steps"] == 300 and summary(run_dir)["eval"]["episodes"] == 2
    assert not same(checkpoint(run_dir)["model"], before["model"])


@each_trainer
def test_refused_resume(trainer: ModuleType, copied: Callable[[ModuleType], Path], refused: Callable[..., str]) -> None:
    run_dir = copied(trainer)
    for flags in ([], ["--total-steps", "100"]):  # it is complete
        line = refused(trainer, "--resume", run_dir, *flags)
        assert "--resume" in line and "200" in line and "--total-steps" in line
    others = [("--env-id", "CartPole-v1"), ("--optimizer", "rmsprop"), ("--preset", "atari"), ("--run-dir", "q")]
    others += [("--lstm",)] if trainer is a3c else []
    for other in others:
        assert other[0] in refused(trainer, "--resume", run_dir, "--total-steps", "300", *other)


# ------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("optimizer", ["rmsprop", "momentum-sgd"])
@each_trainer
def test_other_optimizers(trainer: ModuleType, optimizer: str, here: None, tmp_path: Path) -> None:
    flags = [*ENV, *ONE, "--optimizer", optimizer, "--learning-rate", "0.01"]
    assert run(trainer, *flags, "--total-steps", "200", "--run-dir", "r") == 0
    before, run_dir = checkpoint(tmp_path / "r"), tmp_path / "r"
    name = "square" if optimizer == "rmsprop" else "mean"
    assert {*before["optimizer_0"]["state"][0]} == {name} and squares(before).count_nonzero() > 100
    assert squares(before).min() >= 0 or optimizer == "momentum-sgd"
    assert run(trainer, "--resume", run_dir, "--total-steps", "260", "--rms-decay", "1", "--learning-rate", "0") == 0
    after = checkpoint(run_dir)
    assert after["step"] == 260
    assert same(after["model"], before["model"]) and torch.equal(squares(after), squares(before))
    assert run(trainer, "--resume", run_dir, "--total-steps", "400", "--rms-decay", "0.9", "--learning-rate", "1") == 0
    after = checkpoint(run_dir)
    assert not same(after["model"], before["model"]) and not torch.equal(squares(after), squares(before))


def test_statistics_of_each_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes save two of them, and a resumed run needs both."""
    flags = [*ENV, "--eval-episodes", "0", "--optimizer", "rmsprop", "--n-processes", "2", "--run-dir", "r"]
    assert run(a3c, *flags, "--total-steps", "20000") == 0
    state = checkpoint(tmp_path / "r")
    a, b = squares(state), squares(state, "optimizer_1")
    assert a.any() and b.any() and not torch.equal(a, b)
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    capfd.readouterr()
    assert run(a3c, "--resume", "r", "--total-steps", "30000", "--n-processes", "3") == 2
    assert "--n-processes 3" in capfd.readouterr().err
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert run(a3c, "--resume", "r", "--total-steps", "20500", "--max-grad-norm", "0") == 0
    state = checkpoint(tmp_path / "r")
    for old, new in ((a, squares(state)), (b, squares(state, "optimizer_1"))):
        ratio = new[old > 1e-12] / old[old > 1e-12]
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------------------------ checkpoints


def scribble(worker: Worker, rows: Tensor) -> None:
    """An update that takes long: one element after the other."""
    row = rows.numpy()[worker.index]
    while worker.go_on():
        for i in range(len(row)):
            row[i] += 1
            time.sleep(0.0005)
        worker.count_step(0.0, False)


def test_a_start_that_fails_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, started = torch.zeros(2, 20, dtype=torch.int64).share_memory_(), []

    def start(*arguments: Any) -> tuple[Any, Any]:
        if started:
            raise OSError("no more processes")
        started.append(start_worker(*arguments))
        return started[0]

    monkeypatch.setattr(common.crew, "start_worker", start)
    with pytest.raises(OSError, match="no more processes"), Team(scribble, (rows,), 2, 10**9):
        pass
    ((process, connection),) = started
    assert not process.is_alive() and connection.closed


def test_nobody_is_in_the_middle_of_an_update_when_it_is_quiet() -> None:
    rows = torch.zeros(2, 20, dtype=torch.int64).share_memory_()
    with Team(scribble, (rows,), 2, 10**9) as team:
        assert wait_for(lambda: (rows[:, 0] > 0).all(), 60)
        torn = 0
        for _ in range(5):
            with team.quiet():
                first = rows.clone()
                time.sleep(0.05)
                assert torch.equal(rows, first)
                assert torch.equal(first, torch.from_numpy(team.counts)[:, None].expand(2, 20))
            assert wait_for(lambda first=first: (rows[:, 0] > first[:, 0] + 1).all(), 10)
            torn += not torch.equal(rows, rows[:, :1].expand(2, 20))
        assert torn  # what it would be like without


@pytest.mark.parametrize("trainer", [a3c, async_q, nstep_q, sarsa], ids=lambda trainer: trainer.__name__)
def test_checkpoint_of_a_consistent_state(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, steps = torch.save, []

    def slow(state: dict, file: Any) -> None:
        before = copy.deepcopy(numbers(state))
        time.sleep(0.1)
        steps.append(state["step"])
        assert same(before, numbers(state))
        save(state, file)

    monkeypatch.setattr(torch, "save", slow)
    flags = ["--env-id", "CartPole-v1", "--n-processes", "2", "--eval-episodes", "0", "--run-dir", "r"]
    flags += [] if trainer is a3c else ["--target-interval", "7"]
    assert run(trainer, *flags, "--total-steps", "4000", "--checkpoint-interval", "500") == 0
    assert len([step for step in steps if 0 < step < 4000]) >= 2 and steps[-1] >= 4000
    assert checkpoint(tmp_path / "r")["step"] == steps[-1]


def fall_at_the_end(worker: Worker) -> None:
    while worker.go_on():
        worker.count_step(0.0, False)
    raise ValueError("too late")


def test_death_after_the_last_step_is_told_and_replaces_nobody() -> None:
    told = []
    run = SimpleNamespace(stopped=False, count_update=lambda step, scalars: None, event=told.append)
    with Team(fall_at_the_end, (), 2, 50) as team:
        started = list(team.processes)
        team.watch(run)
        assert team.processes == started
    assert [line.split(":")[0] for line in told] == [f"actor-learner {i} died at the end" for i in (0, 1)]
    assert all("ValueError: too late" in line for line in told)


def fall_or_play(worker: Worker) -> None:
    if worker.index == 0:
        raise ValueError("the door is stuck")
    while worker.go_on():
        time.sleep(0.005)
        worker.count_step(1.0, True)


def test_episodes_of_the_others_count_after_the_last_death() -> None:
    """Their steps do. They go on while the parent waits for the process that died, and then for them."""
    returns: list[float] = []
    run = SimpleNamespace(stopped=False, count_update=lambda step, scalars: None, event=lambda line: None)
    run.count_episodes = lambda some, lengths: returns.extend(some)
    with Team(fall_or_play, (), 2, 10**9) as team:
        with pytest.raises(WorkerError, match="actor-learner 0 died three times"):
            team.watch(run)
        assert len(returns) == team.global_step > 0


@pytest.mark.parametrize(
    ("states", "seconds"),
    [(["dead"], 0), (["dead", "parked"], 0), (["hangs", "parked"], 10), (["acts", "parked"], 28), (["acts"] * 2, 28)],
)
def test_quiet_waits_for_nobody_for_ever(states: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only sleeping turns. What acts takes two more steps of 9 s each, and hangs."""
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        for index, state in enumerate(states):
            if state == "acts":
                team.counts[index] = min(2, int((clock.now - start) / 9))
        team.parked[[state == "parked" for state in states]] = team.flags[common.hogwild.PAUSE]

    monkeypatch.setattr(common.hogwild, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    team = Team(count, (), len(states), 100)
    team.processes = [SimpleNamespace(is_alive=lambda state=state: state != "dead") for state in states]
    for _ in range(2):
        start = clock.now
        with team.quiet():
            assert team.flags[common.hogwild.PAUSE] > 0
            assert clock.now - start == pytest.approx(seconds, abs=0.01)
        assert team.flags[common.hogwild.PAUSE] == 0


# ---------------------------------------------------------------------------------------------------- signals


def start_under_interrupt(connection: Any) -> None:
    """A worker that is still in the group of the terminal when Ctrl-C comes: its signals are blocked by then."""
    os.kill(os.getpid(), signal.SIGINT)
    enter_worker()
    connection.send("it is left to the parent")


def test_interrupt_while_an_actor_learner_starts(capfd: pytest.CaptureFixture[str]) -> None:
    """No traceback of KeyboardInterrupt after Ctrl-C in the first seconds of a run or of a replacement."""
    worker, connection = start_worker(start_under_interrupt, (), "worker")
    with connection:
        worker.join(timeout=60)
        assert worker.exitcode == 0 and connection.recv() == "it is left to the parent"
    assert capfd.readouterr().err == ""


# ----------------------------------------------------------------------------------------------------- faults


def faulty(fault: str, after: int, *flags: Any) -> list[Any]:
    kwargs = json.dumps({"fault": fault, "after": after})
    return ["--env-id", "tests.paac_envs:Faulty-v0", "--env-kwargs", kwargs, *ONE, "--run-dir", "r", *flags]


def test_steps_before_the_last_death_are_counted(here: None, tmp_path: Path) -> None:
    """The checkpoint has not the step of the parent's last look, beside parameters that have seen more."""
    assert run(a3c, *faulty("raise", 10, "--total-steps", ENDLESS)) == 1
    assert checkpoint(tmp_path / "r")["step"] == summary(tmp_path / "r")["steps"] == 27  # 9 in each of three lives


@each_trainer
def test_loss_that_is_not_finite(
    trainer: ModuleType, copied: Callable[[ModuleType], Path], here: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint is the one before it, and from there the run can go on."""
    run_dir = copied(trainer)
    before = (run_dir / "checkpoint.pt").read_bytes()
    flags = ["--resume", run_dir, "--total-steps", "10000", "--env-kwargs"]
    assert run(trainer, *flags, '{"fault": "huge reward", "after": 50}', "--checkpoint-interval", "1") == 1
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1 and "norm" in stderr and "inf" in stderr and f"{trainer.__name__}.py" in stderr
    assert (run_dir / "checkpoint.pt").read_bytes() == before and not list(run_dir.glob("*.tmp"))
    assert run(trainer, *flags, ENV[3], "--total-steps", "250") == 0
    assert checkpoint(run_dir)["step"] == 250


@on_linux
def test_loss_that_is_not_finite_ends_the_script(tmp_path: Path) -> None:
    """One of two processes says so; the other is ended, and what it does meanwhile is not saved."""
    run_dir = tmp_path / "r"
    flags = faulty("huge reward", 3000, "--total-steps", ENDLESS, "--checkpoint-interval", "1", "--n-processes", "2")
    with script("a3c", *flags, "--run-dir", run_dir) as process:
        assert wait_for(lambda: workers_of(process), 60)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1 and len(stderr.splitlines()) == 1 and "inf" in stderr, stderr
        assert wait_for(lambda: not members(process), 10)
    state = checkpoint(run_dir)
    assert 0 < state["step"] < 6000
    assert all(tensor.isfinite().all() for tensor in [squares(state), *state["model"].values()])
    assert not (run_dir / "summary.json").exists() and not list(run_dir.glob("*.tmp"))


@each_trainer
def test_parameters_that_overflow(
    trainer: ModuleType, here: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A learning rate so large that the next forward pass is not finite: a clear error as well, not a crash, and the
    damaged parameters do not take the place of the last good checkpoint.
    """
    flags = ["--learning-rate", "0", "--total-steps", "50", "--run-dir", "r"]
    assert run(trainer, *BANDIT, *ONE, *flags) == 0
    before = checkpoint(tmp_path / "r")
    capfd.readouterr()
    assert run(trainer, "--resume", "r", "--learning-rate", "1e38", "--total-steps", "100000") == 1
    stderr = capfd.readouterr().err
    assert same(numbers(checkpoint(tmp_path / "r")), numbers(before))
    assert re.fullmatch(rf"{trainer.__name__}\.py: step \d+: actor-learner 0: .*(finite|nan|inf).*\n", stderr), stderr


# -------------------------------------------------------------------------------------------------- bad input


@each_q_learner
def test_refused_continuous_actions(trainer: ModuleType, refused: Callable[..., str]) -> None:
    for env_id, kwargs in (("VectorCue", "{}"), ("Bandit", '{"continuous": true, "image": true}')):
        line = refused(trainer, "--env-id", f"tests.paac_envs:{env_id}-v0", "--env-kwargs", kwargs)
        assert f"--env-id tests.paac_envs:{env_id}-v0" in line and "Box(-2.0, 2.0, " in line and "Discrete" in line


@each_trainer
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--env-id", "Pogn-v4"], ["--env-id Pogn-v4", "Pong"]),
        (["--env-id", "no.such.module:Thing-v0"], ["--env-id", "no.such.module"]),
        (["--env-id", "tests.paac_envs:Bandit-v9"], ["--env-id"]),
        (["--env-id", "tests.paac_envs:TwoKeys-v0"], ["--env-id", "Dict"]),
        (["--env-kwargs", "{size: 3}"], ["--env-kwargs"]),
        (["--n-processes", "0"], ["--n-processes 0"]),
        (["--n-processes", "-2"], ["--n-processes -2"]),
        (["--n-processes", "1025"], ["--n-processes 1025"]),
        (["--n-processes", "two"], ["--n-processes"]),
        (["--total-steps", "0"], ["--total-steps 0"]),
        (["--checkpoint-interval", "0"], ["--checkpoint-interval 0"]),
        (["--learning-rate", "nan"], ["--learning-rate"]),
        (["--max-grad-norm", "-1"], ["--max-grad-norm"]),
        (["--gamma", "1.5"], ["--gamma"]),
        (["--rms-decay", "2"], ["--rms-decay"]),
        (["--rms-eps", "-1"], ["--rms-eps"]),
        (["--optimizer", "adam"], ["--optimizer"]),
        (["--arch", "nips"], ["--arch nips"]),
        (["--n-envs", "4"], ["--n-envs"]),
        (["--resume", "nothing"], ["--resume nothing"]),
        (["--evaluate", "nothing"], ["--evaluate nothing"]),
        (["--resume", "a", "--evaluate", "b"], ["--resume", "--evaluate"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_refused(trainer: ModuleType, flags: list[str], named: list[str], refused: Callable[..., str]) -> None:
    line = refused(trainer, *([] if "--env-id" in flags else BANDIT), *flags)
    assert all(text in line for text in named), line


@each_q_learner
@pytest.mark.parametrize(
    ("finals", "probs"),
    [
        (["0.1", "0.5"], ["1"]),
        (["0.1"], ["0.5", "0.5"]),
        (["0.1", "0.5"], ["0.5", "0.6"]),
        (["0.1", "0.5"], ["1.5", "-0.5"]),
        (["1.1", "0.5"], ["0.5", "0.5"]),
        (["nan", "0.5"], ["0.5", "0.5"]),
    ],
)
def test_refused_epsilons(
    trainer: ModuleType, finals: list[str], probs: list[str], refused: Callable[..., str]
) -> None:
    line = refused(trainer, *BANDIT, "--epsilon-finals", *finals, "--epsilon-probs", *probs)
    assert "--epsilon-finals" in line and "--epsilon-probs" in line


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        *[(trainer, ["--lstm"]) for trainer in Q_LEARNERS],
        *[(trainer, ["--target-interval", "0"]) for trainer in Q_LEARNERS],
        *[(trainer, ["--epsilon-steps", "0"]) for trainer in Q_LEARNERS],
        *[(trainer, ["--eval-epsilon", "2"]) for trainer in Q_LEARNERS],
        *[(trainer, ["--preset", "continuous"]) for trainer in Q_LEARNERS],
        (a3c, ["--t-max", "0"]),
        (nstep_q, ["--t-max", "0"]),
        (async_q, ["--update-interval", "0"]),
        (sarsa, ["--update-interval", "0"]),
        (a3c, ["--update-interval", "5"]),
        (a3c, ["--entropy-coef", "-1"]),
        (a3c, ["--value-coef", "inf"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else " ".join(value),
)
def test_refused_by_one(trainer: ModuleType, flags: list[str], refused: Callable[..., str]) -> None:
    assert flags[0] in refused(trainer, *BANDIT, *flags)


# --------------------------------------------------------------------------------------------------- learning


def test_a3c_learns_the_best_action(here: None, tmp_path: Path) -> None:
    flags = ["--reward-scale", "1", "--learning-rate", "0.005", "--total-steps", "2000", "--seed", "1"]
    assert run(a3c, *BANDIT, "--n-processes", "1", "--eval-episodes", "200", *flags, "--run-dir", "r") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > 0.8  # chance gives 0.125, the optimum is 1


@each_q_learner
def test_q_learners_learn_the_value_of_each_action(trainer: ModuleType, here: None, tmp_path: Path) -> None:
    """Rewards are learned from times 0.1; an episode is one step, so that Q is the reward."""
    flags = ["--total-steps", "3000", "--epsilon-steps", "3000", "--learning-rate", "0.01", "--target-interval", "100"]
    flags += ["--n-processes", "1", "--eval-episodes", "10", "--seed", "1", "--run-dir", "r"]
    assert run(trainer, *BANDIT, *flags) == 0
    assert summary(tmp_path / "r")["eval"]["mean"] == 1.0  # greedily
    network = trainer.QNetwork(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4), "mlp")
    network.load_state_dict(checkpoint(tmp_path / "r")["model"])
    q_values = network(torch.tensor([[1, -0.5, 0.25]]))[0]
    torch.testing.assert_close(q_values, 0.1 * torch.tensor(Bandit.REWARDS), atol=0.03, rtol=0)
