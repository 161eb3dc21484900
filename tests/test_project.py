"""Commands in the texts are understood; copies are copies; the results are whole."""

import ast
import csv
import importlib.util
import itertools
import os
import random
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

import common.run
from tests.helpers import ROOT, TRAINERS, Script, parse

BENCHMARKS = sorted(path for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text())


def commands():
    """Every command of a trainer in README.md and in the trainers' docstrings: name and flags."""
    found = []
    for source in ("README.md", *(f"{name}.py" for name in TRAINERS)):
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = ast.get_docstring(ast.parse(text))
        names = "|".join(TRAINERS)
        found += re.findall(rf"(?:^|[ `])python ({names})\.py([^\n`#&|]*)", text, re.MULTILINE)
    return sorted({(name, flags.strip()) for name, flags in found})


def test_every_trainer_has_commands():
    assert {name for name, _ in commands()} == set(TRAINERS)


@pytest.mark.parametrize(("name", "flags"), commands())
def test_command_is_understood(name, flags, tmp_path, monkeypatch):
    """Its flags exist and their values are allowed; nothing is trained."""
    words = shlex.split(flags.replace("...", "a_run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    for flag, folder in itertools.pairwise(words):
        if flag in ("--resume", "--evaluate") and not folder.startswith("results/"):
            Path(folder).mkdir(parents=True)
            Path(folder, "args.json").write_text("{}")
    if any(word.startswith("my_") for word in words):  # not installed
        known = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
        monkeypatch.setattr(common.run, "env_spaces", lambda env_id, env_kwargs: known)
    parse(name, *words)


def differing(names):
    """Functions and classes that several of these trainers have, but not word for word the same."""
    found = {}
    for name in names:
        source = (ROOT / f"{name}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min(x.lineno for x in (node, *node.decorator_list))
                text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
                found.setdefault(node.name, set()).add(text)
    return {block for block, texts in found.items() if len(texts) > 1}


def test_copies_are_word_for_word():
    own = {"Args", "ActorCritic", "QNetwork", "train", "actor_learner", "update", "pick_preset"}
    assert differing(TRAINERS) <= own | {"main"}
    own = {"Args", "actor_learner", "main"}
    assert differing(("async_q", "nstep_q", "sarsa")) <= own


@pytest.mark.parametrize("name", TRAINERS)
def test_import_has_no_side_effect(name, tmp_path, monkeypatch, capfd):
    def state():
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        draws = [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]
        threads = [torch.get_num_threads(), threading.active_count(), torch.is_grad_enabled()]
        return [dict(os.environ), os.getcwd(), sys.path[:], *signals, *draws, *threads]

    monkeypatch.chdir(tmp_path)
    before = state()
    spec = importlib.util.spec_from_file_location("imported", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "imported", module)
    spec.loader.exec_module(module)
    assert state() == before
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_answers_help(path, tmp_path):
    with Script(path, ["--help"], tmp_path) as script:
        assert script.end() == 0, script.output()
        assert "--help" in script.output("stdout")


def test_runs_are_whole():
    """Every curve exists and is named; every score is a number, unless the run was stopped."""
    with open(ROOT / "results" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["trainer"] in TRAINERS
        assert np.isfinite(float(row["score"] or "nan")) or row["note"].startswith("stopped"), row
    curves = {row["curve"] for row in rows if row["curve"]}
    assert curves == {f"curves/{path.name}" for path in (ROOT / "results" / "curves").iterdir()}
