"""Every command that the README and the docstrings print, `python ...`, is one that its program takes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from benchmarks.learning import CONSTANTS, PONG, suite

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("paac", "a3c", "async_q", "nstep_q", "sarsa", "ppo_batch", "apex")
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
SOURCES = ["README.md", "results/README.md", *(f"{name}.py" for name in TRAINERS)]
SOURCES += [f"benchmarks/{name}.py" for name in BENCHMARKS]
PLACEHOLDERS = ("...", "RUN", "OUT", "my_package", "runs/")
OPTIONAL = {"CarRacing-v3": "Box2D", "vizdoom.gymnasium_wrapper:VizdoomMyWayHome-v1": "vizdoom"}


def commands(text: str) -> list[str]:
    """What stands behind `python ` at the start of a line, after `&& ` or in backquotes, up to its end or a comment."""
    found = re.findall(r"(?:^ *|&& |`)(?:\.venv/bin/)?python ((?:benchmarks/)?\w+\.py[^`\n&]*)", text, re.MULTILINE)
    return [re.split(r" +#", command)[0].strip().replace("--seed S", "--seed 1") for command in found]


def cases() -> list[tuple[str, str]]:
    found = {(source, command) for source in SOURCES for command in commands((ROOT / source).read_text())}
    return sorted(case for case in found if not any(mark in case[1] for mark in PLACEHOLDERS))


def test_commands_are_found() -> None:
    text = "Run `python a.py --x 1` or\n\n```\npython b.py   # much\npip install z && python c.py --y '{1}'\n```\n"
    text += "    python benchmarks/d.py 1 2\nnot python e.py\n"
    assert commands(text) == ["a.py --x 1", "b.py", "c.py --y '{1}'", "benchmarks/d.py 1 2"]
    assert {command.split(".py")[0] for source, command in cases() if source == "README.md"} >= set(TRAINERS)


@pytest.mark.parametrize(("source", "command"), cases())
def test_command_is_taken(
    source: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The flags exist, their values are allowed, and the environment can be made. Nothing is trained."""
    monkeypatch.chdir(tmp_path)  # the run directory
    program, *flags = shlex.split(command.replace("results/", f"{ROOT}/results/"))
    for env_id, package in OPTIONAL.items():
        if env_id in flags:
            pytest.importorskip(package)
    if "cuda" in flags:
        request.getfixturevalue("cuda")
    name = program.removesuffix(".py")
    if name in TRAINERS:
        args, _ = importlib.import_module(name).parse(flags)
        assert Path(args.run_dir).is_dir()
    else:
        tyro.cli(importlib.import_module(name.replace("/", ".")).Args, args=flags)


def test_pong_has_the_constants_of_the_suite() -> None:
    """What the README prints for two cores is what benchmarks/learning.py runs, seeds and steps aside."""
    found = commands((ROOT / "README.md").read_text())
    pong = {trainer: constants for (trainer, env_id), constants in CONSTANTS.items() if env_id == PONG}
    assert len(pong) == 6  # ppo_batch.py's own are meant for as many steps
    for trainer, constants in pong.items():
        assert any(command.startswith(f"{trainer}.py ") and constants in command for command in found), trainer


def test_cartpole_has_the_steps_of_the_suite() -> None:
    """In the README and in the trainer's own docstring: what is printed there reaches what the tables say."""
    jobs = [job for job in suite("small", (1,), 2) if job.env_id == "CartPole-v1"]
    assert {job.trainer for job in jobs} == set(TRAINERS)
    for job in jobs:
        for source in ("README.md", f"{job.trainer}.py"):
            found = commands((ROOT / source).read_text())
            start = f"{job.trainer}.py --env-id CartPole-v1 --total-steps "
            steps = [int(command.removeprefix(start).split()[0]) for command in found if command.startswith(start)]
            assert steps and set(steps) == {job.total_steps}, (job.trainer, source, steps)


def test_the_environment_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that names it."""
    (code,) = re.findall(r"```python\n# my_package.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my_package.py").write_text(code)
    (command,) = [c for c in commands((ROOT / "README.md").read_text()) if "my_package:" in c]
    program, *flags = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    flags += ["--total-steps", "160", "--n-workers", "1", "--eval-episodes", "2"]
    result = subprocess.run(
        [sys.executable, str(ROOT / program), *flags],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "2 episodes: " in result.stdout


def test_what_was_learned_can_be_loaded_as_the_readme_says() -> None:
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code += "    print(len(actions), sorted(model.state_dict()) == sorted(checkpoint['model']))\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "1 True\n"), result.stderr


@pytest.mark.parametrize("kept", sorted(path.name for path in (ROOT / "results").glob("*checkpoint")))
def test_kept_checkpoints_are_those_of_the_present_trainers(kept: str, tmp_path: Path) -> None:
    """After the `cp` that the README has beside --evaluate."""
    pattern = rf"cp -r results/{kept} runs/([\w-]+) && python (\w+)\.py --evaluate runs/([\w-]+)"
    folder, name, evaluated = re.search(pattern, (ROOT / "README.md").read_text()).groups()
    assert folder == evaluated
    shutil.copytree(ROOT / "results" / kept, tmp_path / folder)
    trainer = importlib.import_module(name)
    args, checkpoint = trainer.parse(["--evaluate", str(tmp_path / folder)])
    trainer.make_model(args).load_state_dict(checkpoint["model"])


def test_lines_of_each_trainer() -> None:
    rows = re.findall(r"^\| `(\w+)\.py` \|[^|]*\|[^|]*\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(TRAINERS)
    for name, lines in rows:
        assert abs(len((ROOT / f"{name}.py").read_text().splitlines()) - int(lines)) < 10, name


def needed(path: Path) -> set[str]:
    """The files of common/ that a file imports, and that those import."""
    names = re.findall(r"^from common\.(\w+)", path.read_text(), re.MULTILINE)
    files = {ROOT / "common" / f"{name}.py" for name in names}
    return {file.name for file in files}.union(*map(needed, files))


def test_what_each_trainer_needs_of_common() -> None:
    rows = [row.split("|")[1:3] for row in section("Copying one out").splitlines() if row.startswith("| ")][1:]
    (_, all_need), *more = [tuple(set(re.findall(r"`(\w+\.py)`", cell)) for cell in row) for row in rows]
    for name in TRAINERS:
        own = set().union(*(files for trainers, files in more if f"{name}.py" in trainers))
        assert needed(ROOT / f"{name}.py") == all_need | own, name


def test_files_that_the_readmes_name_exist() -> None:
    for source in ("README.md", "results/README.md"):
        text = (ROOT / source).read_text()
        for path in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
            r"`((?:common|benchmarks|results)/[\w/.]+)`", text
        ):
            assert (ROOT / path).exists() or (ROOT / source).parent.joinpath(path).exists(), f"{source}: {path}"


def section(title: str) -> str:
    """The text of a section of the README."""
    return (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def flags_of_table(text: str) -> set[str]:
    """The flags in the first column of the first table, as fields of Args."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    return {flag.replace("-", "_") for flag in re.findall(r"`--([a-z0-9-]+)", " ".join(rows))} - {"no_clip_rewards"}


def fields(trainer: str) -> set[str]:
    return {field.name for field in dataclasses.fields(importlib.import_module(trainer).Args)}


VALUES = {"entropy_coef", "value_coef"}  # the constants of actor-critics, which the README tells of in words


@pytest.mark.parametrize(
    ("title", "lacking"),
    [
        ("Flags", {"paac": set()}),
        (
            "The asynchronous methods",
            {"a3c": set(), "nstep_q": VALUES, "async_q": VALUES | {"t_max"}, "sarsa": VALUES | {"t_max"}},
        ),
        ("Batch PPO", {"ppo_batch": set()}),
        ("Ape-X", {"apex": VALUES}),
    ],
)
def test_flags_that_a_trainer_lacks_are_named(title: str, lacking: dict[str, set[str]]) -> None:
    """What a section's "but for" names, and `lacking`, is what its trainers lack of the first table's flags.

    The flags of the section's own table are those of one of its trainers.
    """
    first, text = flags_of_table(section("Flags")), section(title)
    assert len(first) > 20
    exceptions = re.search(r"but for (([^.;]|\.py)*)", text) if title != "Flags" else None
    named = re.findall(r"`--([a-z0-9-]+)`", exceptions[1]) if exceptions else []
    for trainer, more in lacking.items():
        assert first - fields(trainer) == {name.replace("-", "_") for name in named} | more, trainer
    assert flags_of_table(text) <= set().union(*(fields(trainer) for trainer in lacking))
