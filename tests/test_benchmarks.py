"""The benchmarks that keep results: suites, CSVs, curves and tables."""

import csv
import importlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import common.hogwild
import common.run
from benchmarks import catch, curve, learning, plot, scaling, throughput
from tests.helpers import wait_for

HEADER = ["# command", "# commit", "# packages", "# machine"]
ROOT = Path(__file__).resolve().parent.parent
EVALUATION = {"episodes": 30, "mean": 7.5, "std": 1.0, "min": 5.0, "max": 9.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 30, 4], 3.0),  # 2 and 4 are left
        ([5], 5.0),
        ([10, 0], 5.0),
        ([1, 2, 3, 4, 100], (0.75 * 2 + 3 + 0.75 * 4) / 2.5),  # a quarter of five is one and a quarter
        ([-50, 1, 2, 3, 4, 5, 6, 700], 3.5),
    ],
)
def test_interquartile_mean(values: list[float], expected: float) -> None:
    assert plot.interquartile_mean(np.array(values, float)) == pytest.approx(expected)


def test_interquartile_mean_of_curves_is_that_of_each_point() -> None:
    curves = np.random.default_rng(0).normal(size=(7, 5))
    each = [plot.interquartile_mean(curves[:, i]) for i in range(5)]
    assert plot.interquartile_mean(curves) == pytest.approx(np.array(each))


def test_bootstrap_interval_holds_the_mean_of_many() -> None:
    """The standard error of the mean of 400 draws of N(3, 2) is 0.1: the interval is about 3 ± 0.2."""
    values = np.random.default_rng(1).normal(3, 2, size=400)
    low, high = plot.bootstrap_interval(values, lambda sample: sample.mean(axis=0))
    assert low == pytest.approx(values.mean() - 0.196, abs=0.03)
    assert high == pytest.approx(values.mean() + 0.196, abs=0.03)


def test_curve_averages_over_the_window_and_interpolates() -> None:
    x, returns = np.array([10.0, 20.0, 30.0, 100.0]), np.array([1.0, 3.0, 8.0, 0.0])
    values = plot.curve(x, returns, np.array([0.0, 10.0, 20.0, 25.0, 30.0, 65.0, 100.0]), window=15.0)
    # means at the x: 1, (1 + 3) / 2, (3 + 8) / 2, 0
    assert np.isnan(values[0])
    assert values[1:] == pytest.approx([1.0, 2.0, 3.75, 5.5, 2.75, 0.0])


def test_a_curve_goes_on_from_its_csv(tmp_path: Path) -> None:
    """The run was resumed at step 250: what the CSV has of later steps is gone; 50 steps at 5 a second are 10 s."""
    path = tmp_path / "run_1.csv"
    lines = ["# commit: a", "# by: b", "step,seconds,episodic_return,SPS", "100,20,-3,5", "200,40,-2,5", "300,60,-1,5"]
    path.write_text("\n".join(lines) + "\n")
    header, past = curve.read_csv(path)
    assert header == ["commit: a", "by: b"]
    rows = curve.continued([(250, 7.0, 1.5, 5.0), (350, 17.0, 2.0, 10.0)], past)
    assert rows == [(100, 20, -3, 5), (200, 40, -2, 5), (250, 50, 1.5, 5), (350, 60, 2, 10)]


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*_[0-9].csv")), ids=lambda path: path.stem)
def test_a_kept_curve_says_how_to_make_it_again(path: Path) -> None:
    header, rows = curve.read_csv(path)
    assert [line.split(": ")[0] for line in header][:3] == ["command", "commit", "machine"]
    assert len(rows) > 1 and all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(rows))


def test_curve_of_a_run_and_of_what_it_became(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, then the piece after its resumption at step 300, which is appended to the CSV."""
    for name, steps in (("first", (100, 200, 300)), ("second", (300, 400))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text('{"seed": 7}')
        with SummaryWriter(str(tmp_path / name)) as writer:
            for i, step in enumerate(steps):
                writer.add_scalar("charts/SPS", 10.0, step, walltime=1000 + 10 * i)
                writer.add_scalar("charts/episodic_return", step / 100, step, walltime=1000 + 10 * i)
    out, path = tmp_path / "new" / "out", tmp_path / "new" / "out_7.csv"
    flags = {"first": ["--header", "command: a"], "second": ["--append", "--header", "resumed: b"]}
    for name in flags:
        monkeypatch.setattr(sys, "argv", ["curve.py", str(tmp_path / name), "--out", str(out), *flags[name]])
        curve.main()
    header, rows = curve.read_csv(path)
    assert header == ["command: a", "resumed: b"]
    assert [row[0] for row in rows] == [100, 200, 300, 400] and [row[2] for row in rows] == [1, 2, 3, 4]
    assert rows[1][1] == 20 and out.with_suffix(".png").stat().st_size > 1000
    assert curve.continued(rows, []) == rows


def test_replace_tables_leaves_the_rest() -> None:
    text = "before\n<!-- begin small -->\nold\n<!-- end small -->\nafter\n"
    after = "before\n<!-- begin small -->\nnew\n<!-- end small -->\nafter\n"
    assert plot.replace_tables(text, {"small": "new", "scores of small": "absent"}) == after
    with pytest.raises(ValueError, match="no marks of other"):
        plot.replace_tables(text, {"other": "new"})


@pytest.mark.parametrize(
    ("path", "mark"),
    [
        ("README.md", "scores of small"),
        ("README.md", "scores of mujoco"),
        ("README.md", "atari"),
        ("results/README.md", "small"),
        ("results/README.md", "mujoco"),
        ("results/README.md", "mujoco_constant"),
    ],
)
def test_printed_tables_are_those_of_the_csvs(path: str, mark: str) -> None:
    tasks, text = plot.read_folder(ROOT / "results" / mark.split()[-1]), (ROOT / path).read_text()
    new = plot.short_table(tasks) if mark.startswith("scores") else plot.table(tasks)
    assert plot.replace_tables(text, {mark: new}) == text


@pytest.mark.parametrize("name", ["small", "pixels", "mujoco", "atari"])
@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_jobs_of_a_suite_fit_and_differ(name: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trainers take their flags, and no two write to one file."""
    monkeypatch.chdir(tmp_path)
    jobs = learning.suite(name, (1, 2), cores)
    assert len({Path(job.name).with_suffix(".json") for job in jobs}) == len(jobs)
    assert all(1 <= job.cores <= cores for job in jobs)
    for job in jobs:
        trainer = importlib.import_module(job.trainer)
        for module in (trainer, common.hogwild):
            monkeypatch.setattr(module, "n_cores", lambda: cores, raising=module is not trainer)
        args, _ = trainer.parse(job.command()[1:])
        assert (args.env_id, args.total_steps, args.seed) == (job.env_id, job.total_steps, job.seed)
        assert args.eval_episodes == (100 if name == "mujoco" else 30)
        if job.trainer in ("paac", "ppo_batch"):
            assert args.n_workers <= job.cores == 1


def test_published_scores_are_of_games_that_run() -> None:
    assert {env_id for _, env_id in plot.PUBLISHED if env_id.endswith("-v4")} == set(learning.ATARI)


def test_small_suite_has_every_trainer_on_cartpole() -> None:
    jobs = learning.suite("small", (1,), 2)
    assert {job.trainer for job in jobs if job.env_id == "CartPole-v1"} == set(learning.TRAINERS)


def small_jobs(steps: int) -> list[learning.Job]:
    return [learning.Job("paac", "CartPole-v1", steps, seed, ("--n-workers", "0")) for seed in (1, 2)]


def test_runs_are_kept_as_csv_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert learning.run_all(small_jobs(20_000), tmp_path / "runs", tmp_path, 2, 500) == 0
    result = plot.read_result(tmp_path / "paac_CartPole-v1_2.csv")
    assert result.task == ("paac", "CartPole-v1", 2)
    assert result.header["command"] == "python paac.py --env-id CartPole-v1 --total-steps 20000 --seed 2 --n-workers 0"
    assert "torch" in result.header["packages"] and "cores" in result.header["machine"]
    summary = json.loads((tmp_path / "runs" / "paac_CartPole-v1_2" / "summary.json").read_text())
    assert result.score == summary["eval"]["mean"]
    assert summary["steps"] == 20_000
    assert 10_000 < result.steps[-1] <= 20_000  # where an episode ended last
    assert (np.diff(result.steps) > 0).all() and (np.diff(result.seconds) > 0).all()
    assert ((result.returns > 0) & (result.returns <= 500)).all()
    capsys.readouterr()
    assert learning.run_all(small_jobs(20_000), tmp_path / "no-runs", tmp_path, 2, 500) == 0
    assert "2 of them done before" in capsys.readouterr().out
    assert not (tmp_path / "no-runs").exists()


def test_a_run_stopped_in_its_evaluation_is_evaluated(tmp_path: Path) -> None:
    (job,) = small_jobs(1_000)[:1]
    run_dir = tmp_path / "runs" / job.name
    process = learning.start(job, run_dir)
    assert process.wait(timeout=60) == 0
    path = run_dir / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eval": None}))
    assert learning.status(run_dir) == "completed"
    assert learning.run_all([job], tmp_path / "runs", tmp_path, 1, 500) == 0
    assert plot.read_result(tmp_path / f"{job.name}.csv").score > 0


def test_two_suites_do_not_share_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (job,) = small_jobs(1_000_000)[:1]
    process = learning.start(job, tmp_path / "runs" / job.name)
    try:
        assert learning.run_all([job], tmp_path / "runs", tmp_path, 1, 500) == 1
        assert "another process is at" in capsys.readouterr().out and process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cores", "0"], "--cores 0"),
        (["--env-ids", "Catch-v0"], "--env-ids Catch-v0: these trainers have Acrobot-v1"),
        (["--trainers", "apex", "--env-ids", "Pendulum-v1"], "--env-ids Pendulum-v1"),
    ],
)
def test_a_selection_of_nothing_is_refused(
    flags: list[str], named: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", "small", *flags])
    assert learning.main() == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_signals_that_stop_a_suite(hangup: signal.Handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT also where a shell has it ignored, for a background job; SIGHUP only where nohup has not."""
    seen = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(learning, "run_all", lambda *arguments: seen.extend(map(signal.getsignal, before)))
    monkeypatch.setattr(sys, "argv", ["learning.py", "small", "--out", str(tmp_path)])
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, hangup)
        assert learning.main() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [learning.stop, learning.stop, hangup if hangup == signal.SIG_IGN else learning.stop]


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    jobs = [learning.Job("paac", "Pogn-v4", 1000, 1), *small_jobs(2_000)[:1]]
    assert learning.run_all(jobs, tmp_path / "runs", tmp_path, 1, 500) == 1
    assert "paac_Pogn-v4_1 failed" in capsys.readouterr().out
    assert "Pogn" in (tmp_path / "runs" / "paac_Pogn-v4_1.log").read_text()
    assert [path.name for path in tmp_path.glob("*.csv")] == ["paac_CartPole-v1_1.csv"]


def test_stopped_runs_go_on_where_they_were(tmp_path: Path) -> None:
    """SIGINT stops the runs with a checkpoint each; the next call resumes them and finishes."""
    folders = f"Path({str(tmp_path / 'runs')!r}), Path({str(tmp_path)!r})"
    program = (
        "import sys; from pathlib import Path; from benchmarks import learning; from tests import test_benchmarks; "
        f"sys.exit(learning.run_all(test_benchmarks.small_jobs(60_000), {folders}, 2, 9))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    try:
        logs = [tmp_path / "runs" / f"paac_CartPole-v1_{seed}.log" for seed in (1, 2)]
        assert wait_for(lambda: all(log.exists() and "run directory" in log.read_text() for log in logs), 120)
        time.sleep(1)  # some steps
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60)
    finally:
        process.kill()
    assert all("goes on from there" in log.read_text() for log in logs)
    assert learning.run_all(small_jobs(60_000), tmp_path / "runs", tmp_path, 2, 500) == 0
    summary = json.loads((tmp_path / "runs" / "paac_CartPole-v1_1" / "summary.json").read_text())
    assert summary["steps"] == 60_000
    # 16 environments, episodes of at most 500 steps: one ends every 8,000 steps, but the stop begins them anew
    assert plot.read_result(tmp_path / "paac_CartPole-v1_1.csv").steps[-1] > 44_000
    assert (tmp_path / "runs" / "paac_CartPole-v1_1.log").read_text().count("run directory") == 2


def test_pictures_and_table(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, mean in ((1, 7.5), (2, 2.5)):
        with open(tmp_path / f"{seed}.csv", "w", newline="") as file:
            file.write(f"# task: paac Task-v0 {seed}\n# seconds: 90\n")
            file.write(f"# evaluation: {json.dumps(EVALUATION | {'mean': mean})}\n")
            csv.writer(file).writerows(
                [("step", "seconds", "episodic_return", "SPS"), (5, 1.0, 3.0, 5), (9, 2.0, 4.0, 5)]
            )
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- begin {tmp_path.name} --><!-- end {tmp_path.name} -->")
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path), "--readme", str(readme)])
    assert plot.main() == 0
    assert (tmp_path / "Task-v0.png").stat().st_size > 10_000
    assert readme.read_text().splitlines()[1:-1] == [
        "| task | trainer | steps | minutes | mean ± s.e. | each seed |",
        "|---|---|---|---|---|---|",
        "| Task-v0 | `paac.py` | 9 | 1.5 | 5.0 ± 2.5 | 7.5, 2.5 |",
    ]
    swimmer = plot.Result({"evaluation": json.dumps(EVALUATION), "seconds": "60"}, *np.ones((3, 1)))
    lower = plot.Result({"evaluation": json.dumps(EVALUATION | {"mean": 2.5})}, *np.ones((3, 1)))
    assert plot.table({"Swimmer-v5": {"ppo_batch": [swimmer]}}).endswith("| 1.0 | 7.5 | 125 (± 11); ours lower |")
    three = plot.table({"m:PongNoFrameskip-v4": {"sarsa": [swimmer] * 3}, plot.PONG: {"paac": [swimmer]}})
    assert three.splitlines()[2:] == [
        "| Pong | `sarsa.py` | 1 | 1.0 | 7.5 [7.5, 7.5] | 7.5 ± 0.0 | 7.5, 7.5, 7.5 |  |",
        "| Pong | `paac.py` | 1 | 1.0 |  |  | 7.5 | 20.6 (115M steps); ours lower; 17.3 (A2C, 10M steps); ours lower |",
    ]
    tasks = {"Swimmer-v5": {"ppo_batch": [swimmer], "a3c": [lower]}, "Task-v0": {"ppo_batch": [swimmer, lower]}}
    assert plot.short_table(tasks).splitlines() == [
        "| | Swimmer-v5 | Task-v0 |",
        "|---|---|---|",
        "| `a3c.py` | 2.5 (one seed) |  |",
        "| `ppo_batch.py` | 7.5 (one seed) | 5.0 (2 seeds, 2.5 to 7.5) |",
        "| published | 125 (± 11); ours lower |  |",
    ]
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "none")])
    assert plot.main() == 2
    assert "holds no CSV" in capsys.readouterr().err


@pytest.mark.parametrize(("n", "ends", "bands"), [(1, [10], 0), (2, [10, 20], 0), (3, [10], 1)])
def test_few_seeds_are_drawn_each_to_its_end(
    n: int, ends: list[int], bands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed i ends at 10 i; of three there is one line, to where the first of them ends, and its interval."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    x = [np.array([5.0, 10.0 * i]) for i in range(1, n + 1)]
    plot.picture("Task-v0", {"paac": [plot.Result({}, x_i, x_i, x_i) for x_i in x]}, tmp_path / "a.png", 0.05)
    for axis in pyplot.gcf().axes:
        assert [line.get_xdata()[-1] for line in axis.lines] == ends and len(axis.collections) == bands
    monkeypatch.undo()
    pyplot.close("all")


def test_catch_by_random_and_by_best_play() -> None:
    """Whoever follows the ball always catches it; random play catches one of four, for a paddle of 3 in 12 columns."""
    env = catch.Catch()

    def play(policy: Callable[[], int], seed: int) -> float:
        env.reset(seed=seed)
        for step in range(1, 12):
            obs, reward, terminated, truncated, _ = env.step(policy())
            assert obs.shape == (84, 84) and set(np.unique(obs)) == {0, 255}
            assert (terminated, truncated) == (step == 11, False) and (terminated or reward == 0)
        return reward

    rng = np.random.default_rng(0)
    assert {play(lambda: int(np.sign(env.ball - env.paddle)) + 1, seed) for seed in range(50)} == {1.0}
    assert np.mean([play(lambda: int(rng.integers(3)), seed) for seed in range(2000)]) == pytest.approx(-0.5, abs=0.06)


@pytest.mark.parametrize("trainer", ["paac", "sarsa", "ppo_batch", "apex"])
def test_throughput(trainer: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--trainer", trainer, "--env-id", "CartPole-v1", "--rounds", "1", "--seconds", "2"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags])
    throughput.main()
    head, alone, *lines = capsys.readouterr().out.splitlines()
    assert "CartPole-v1" in head and "environment alone" in alone and trainer in lines[0]
    rates = [float(line.split(" steps/s")[0].split()[-1].replace(",", "")) for line in (alone, lines[0])]
    assert min(rates) > 0
    if trainer in ("paac", "ppo_batch"):  # the split
        assert sum(int(part) for part in re.findall(r"(\d+)%", lines[1])) in range(98, 103)
    else:
        assert len(lines) == 1


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("apex", "--n-envs 8"),
        ("a3c", "--archs nature"),
        ("sarsa", "--flags=--no-such-flag"),
        ("all", "--flags=--bfloat16"),
    ],
)
def test_throughput_refuses_what_the_trainer_does_not_take(
    trainer: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--trainer", trainer, *flags.split()])
    with pytest.raises(SystemExit, match=f"{re.split('[ =]', flags)[0]}: not with --trainer {trainer}"):
        throughput.main()


@pytest.mark.parametrize("trainer", ["paac", "sarsa"])
def test_throughput_ends_with_a_signal(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the trainer that is measured gets."""

    def enter(run: common.run.Run) -> common.run.Run:
        signal.raise_signal(signal.SIGTERM)
        return run

    monkeypatch.setattr(common.run.Run, "__enter__", enter)
    monkeypatch.setattr(
        sys, "argv", ["throughput.py", "--trainer", trainer, "--env-id", "CartPole-v1", "--seconds", "1"]
    )
    with pytest.raises(SystemExit) as ended:
        throughput.main()
    assert ended.value.code == 143


def test_what_is_no_curve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing.csv").write_text("step,seconds,episodic_return,SPS\n")
    for name in ("nothing.csv", "nothing_1.csv", "nothing"):
        monkeypatch.setattr(sys, "argv", ["curve.py", str(tmp_path / name), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit, match=f"curve.py: .*{name}: "):
            curve.main()


@pytest.mark.parametrize(("trainer", "flags"), [("ppo_batch", ""), ("a3c", "--learning-rate 0"), ("apex", "")])
def test_scaling_stops_at_the_goal(trainer: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pole that is pushed at random falls after 22 steps: 15 is there with the 100th episode.

    A3C's processes race, and what they learn from so little may be worse for a while: it learns nothing here.
    """
    monkeypatch.chdir(tmp_path)
    args = scaling.Args(goal=15, out=Path("s"), trainer=trainer, max_steps=30_000, flags=flags)
    steps, seconds = scaling.to_goal(args, 2, 1)
    assert 1_500 < steps < 15_000 and 0 < seconds < 60
    assert list(tmp_path.iterdir()) == []


def test_scaling_of_a_run_that_never_gets_there() -> None:
    args = scaling.Args(goal=1000, out=Path("s"), max_steps=4_000)
    count_episodes = common.run.Run.count_episodes
    assert np.isnan(scaling.to_goal(args, 1, 1)).all()
    assert common.run.Run.count_episodes is count_episodes


@pytest.mark.parametrize(("env_id", "flags", "named"), [("Pogn-v4", "", "Pogn"), ("CartPole-v1", "--gamma 2", "gamma")])
def test_scaling_of_a_run_that_fails_is_no_measurement(
    env_id: str, flags: str, named: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.to_goal(scaling.Args(goal=1, out=Path("s"), env_id=env_id, flags=flags), 1, 1)
    assert named in capsys.readouterr().err


def test_scaling_writes_rows_and_a_picture_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(scaling, "to_goal", lambda args, count, seed: (1000.0 * seed, 8.0 / count))
    flags = ["--goal", "3", "--out", str(tmp_path / "s"), "--trainer", "a3c", "--counts", "1", "4"]
    for seeds, new in (["1"], ["1,1", "4,1"]), (["1", "2"], ["1,2", "4,2"]):
        monkeypatch.setattr(sys, "argv", ["scaling.py", *flags, "--seeds", *seeds])
        scaling.main()
        printed = capsys.readouterr().out
        assert printed.splitlines() == [
            f"--n-processes {n}, seed {seed}: {seed},000 steps, {8 / int(n):.1f} s"
            for n, seed in (x.split(",") for x in new)
        ]
    lines = (tmp_path / "s.csv").read_text().splitlines()
    rows = ["count,seed,steps,seconds", "1,1,1000.0,8.0", "4,1,1000.0,2.0", "1,2,2000.0,8.0", "4,2,2000.0,2.0"]
    assert lines[-5:] == rows and [line.split(": ")[0] for line in lines[:-5]] == HEADER
    assert "--trainer a3c" in lines[0] and "--goal 3" in lines[0]
    assert (tmp_path / "s.png").stat().st_size > 5_000
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags, "--goal", "4"])
    with pytest.raises(SystemExit, match=r"s\.csv is of another command: .*--goal 3"):
        scaling.main()
    text = (tmp_path / "s.csv").read_text().replace("# commit: ", "# commit: before ")
    (tmp_path / "s.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags, "--seeds", "3"])
    scaling.main()
    added = [line for line in (tmp_path / "s.csv").read_text().splitlines() if line not in text]
    assert added == ["# last rows, commit: " + lines[1].removeprefix("# commit: "), "1,3,3000.0,8.0", "4,3,3000.0,2.0"]
    (tmp_path / "s.csv").write_text("")
    with pytest.raises(SystemExit, match=r"s\.csv is of another command$"):
        scaling.main()
