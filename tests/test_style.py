"""Each trainer stands alone in its file, and what two files share is word for word the same."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINERS = ("paac", "a3c", "async_q", "nstep_q", "sarsa", "ppo_batch", "apex")
COMMON = sorted((ROOT / "common").glob("*.py"))

# Blocks that each algorithm writes for itself; everything else of one name is one text.
MAY_DIFFER = {"Args", "ActorCritic", "QNetwork", "actor_learner", "train", "update", "make_model", "make_policy"}
MAY_DIFFER |= {"pick_preset", "parse"}


def blocks(source: str) -> dict[str, str]:
    """The text of every top-level class and function, decorators included."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def blocks_of_class(source: str, name: str) -> dict[str, str]:
    """The text of every method of a class."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: ast.get_source_segment(source, node) for node in found.body if isinstance(node, ast.FunctionDef)}


def differing_blocks(sources: dict[str, str], may_differ: set[str]) -> list[str]:
    """`block: file a, file b` for each block that two files have under one name with different text."""
    first: dict[str, tuple[str, str]] = {}
    differing = []
    for file, source in sources.items():
        for name, text in blocks(source).items():
            if name in may_differ:
                continue
            owner, expected = first.setdefault(name, (file, text))
            if text != expected:
                differing.append(f"{name}: {owner}, {file}")
    return differing


def flags(source: str) -> dict[str, str]:
    """The type and the help of every flag."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    fields = [(a, b) for a, b in zip(found.body, found.body[1:], strict=False) if isinstance(a, ast.AnnAssign)]
    return {a.target.id: f"{ast.unparse(a.annotation)}: {ast.literal_eval(b.value)}" for a, b in fields}


def imported(source: str) -> set[str]:
    """The first part of the name of every module that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import does not survive copying the file out"
            names.add((node.module or "").split(".")[0])
    return names


A = "import os\n\n\ndef f(x):\n    return x  # as it is\n\n\nclass C:\n    y = 1\n\n\ndef train():\n    return 1\n"


def test_comparison_passes_equal_blocks_in_any_order() -> None:
    b = "def g():\n    pass\n\n\nclass C:\n    y = 1\n\n\ndef f(x):\n    return x  # as it is\n"
    assert differing_blocks({"a": A, "b": b}, set()) == []


@pytest.mark.parametrize(
    ("old", "new", "block"),
    [
        ("return x ", "return -x ", "f"),
        ("  # as it is", "  # copied", "f"),
        ("y = 1", "y = 2", "C"),
        ("def f", "@cache\ndef f", "f"),
        ("return 1", "return 2", "train"),
    ],
)
def test_comparison_finds_a_difference(old: str, new: str, block: str) -> None:
    assert old in A
    assert differing_blocks({"a": A, "b": A.replace(old, new)}, set()) == [f"{block}: a, b"]
    assert differing_blocks({"a": A, "c": A, "b": A.replace(old, new)}, set()) == [f"{block}: a, b"]
    assert differing_blocks({"a": A, "b": A.replace(old, new)}, {block}) == []


def test_import_reader() -> None:
    source = "import a.b, c\nfrom d.e import f\n\n\ndef g():\n    from h import i\n"
    assert imported(source) == {"a", "c", "d", "h"}


def test_shared_blocks_are_the_same_in_every_trainer() -> None:
    sources = {name: (ROOT / f"{name}.py").read_text() for name in TRAINERS}
    assert differing_blocks(sources, MAY_DIFFER) == []


@pytest.mark.parametrize(
    ("names", "equal"),
    [
        (["async_q", "nstep_q", "sarsa"], {"QNetwork", "train", "parse", "make_model", "make_policy"}),
        (["paac", "ppo_batch"], {"make_model"}),
    ],
)
def test_families_have_more_in_common(names: list[str], equal: set[str]) -> None:
    sources = {name: (ROOT / f"{name}.py").read_text() for name in names}
    assert all(equal <= blocks(source).keys() for source in sources.values())
    assert differing_blocks(sources, MAY_DIFFER - equal) == []


def test_both_batched_actor_critics_sample_alike() -> None:
    """The classes differ, in their networks; these methods are the same."""
    methods = [blocks_of_class((ROOT / f"{name}.py").read_text(), "ActorCritic") for name in ("paac", "ppo_batch")]
    for name in ("forward", "sample", "log_prob_and_entropy"):
        assert methods[0][name] == methods[1][name]


def test_flags_that_mean_the_same_say_so() -> None:
    """All but those of which each algorithm has its own, in type or in meaning."""
    own = {"preset", "total_steps", "seed", "device", "n_envs", "n_workers", "arch", "bfloat16", "t_max"}
    own |= {"learning_rate", "max_grad_norm", "rms_decay", "update_interval", "target_interval"}
    found: dict[str, set[str]] = {}
    for name in TRAINERS:
        for flag, text in flags((ROOT / f"{name}.py").read_text()).items():
            found.setdefault(flag, set()).add(text)
    assert {flag for flag, texts in found.items() if len(texts) > 1} == own
    assert found["gamma"] == {"float: γ, discount per step"}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_imports_no_other_trainer(name: str) -> None:
    assert not imported((ROOT / f"{name}.py").read_text()) & {*TRAINERS, "tests", "benchmarks"}


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.name)
def test_common_imports_no_trainer(path: Path) -> None:
    assert not imported(path.read_text()) & {*TRAINERS, "tests", "benchmarks"}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(name).main)
