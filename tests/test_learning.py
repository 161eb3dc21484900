"""Every trainer, with its own processes, learns a task whose larger reward comes late.

Each has a smaller task of its own in its own file, whose episodes are one step; here what follows an action has to
travel back through bootstrapped values: rollouts are two steps long, the way to the reward is four.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import gymnasium as gym
import pytest
import torch

import a3c
from tests.helpers import checkpoint, run, summary

pytestmark = pytest.mark.usefixtures("own_folder_and_handlers")

FLAGS = ["--env-id", "tests.paac_envs:Corridor-v0", "--gamma", "0.9", "--reward-scale", "1", "--seed", "1"]
GREEDY = ["--epsilon-finals", "0", "--epsilon-probs", "1", "--epsilon-steps", "4000", "--target-interval", "100"]
RANDOM = ["--epsilon", "1", "--epsilon-alpha", "0"]
CASES = {
    "paac": ["--n-workers", "0", "--total-steps", "40000", "--t-max", "2"],
    "a3c": ["--n-processes", "1", "--total-steps", "6000", "--t-max", "2"],
    "async_q": ["--n-processes", "1", "--total-steps", "6000", *GREEDY],
    "nstep_q": ["--n-processes", "1", "--total-steps", "6000", "--t-max", "2", *GREEDY],
    "sarsa": ["--n-processes", "1", "--total-steps", "6000", *GREEDY],
    "ppo_batch": ["--n-workers", "0", "--total-steps", "20000", "--t-max", "32", "--gae-lambda", "0"],
    # With the rewards of three steps, all but the first of a policy that explores, Q would not be Q*.
    "apex": ["--n-actors", "1", "--total-steps", "12000", "--n-step", "1", "--target-interval", "50", *RANDOM],
}


@pytest.mark.parametrize("name", CASES)
def test_learns_what_pays_later(name: str, tmp_path: Path) -> None:
    """The first policy earns 0.2 in four of five episodes, so about 0.36, and a short-sighted one 0.2."""
    trainer = importlib.import_module(name)
    assert run(trainer, *FLAGS, *CASES[name], "--run-dir", tmp_path / "r") == 0
    mean = summary(tmp_path / "r")["eval"]["mean"]
    assert mean > 0.9
    if hasattr(trainer, "QNetwork"):
        assert mean == 1.0  # greedily
        network = trainer.QNetwork(gym.spaces.Box(0, 1, (6,)), gym.spaces.Discrete(2), "mlp")
        network.load_state_dict(checkpoint(tmp_path / "r")["model"])
        q_values = network(torch.eye(6)[1:5])
        # Q*(s, right) = γ^(4 - s), Q*(s, left) = γ Q*(s - 1, right), but for the end
        optimal = torch.tensor([[0.2, 0.729], [0.6561, 0.81], [0.729, 0.9], [0.81, 1.0]])
        torch.testing.assert_close(q_values, optimal, atol=0.15, rtol=0)


@pytest.mark.parametrize("name", ["a3c", "async_q", "nstep_q", "sarsa"])
def test_two_processes_learn_what_pays_later(name: str, tmp_path: Path) -> None:
    """What either writes into θ does not undo what the other has learned. They race: twice the steps of one."""
    flags = [*FLAGS, *CASES[name], "--n-processes", "2", "--total-steps", "12000", "--run-dir", tmp_path / "r"]
    assert run(importlib.import_module(name), *flags) == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > 0.9


@pytest.mark.parametrize(("t_max", "steps"), [(2, 24000), (20, 12000)])
def test_lstm_learns_to_remember(t_max: int, steps: int, tmp_path: Path) -> None:
    """Without the cue of three steps ago, which with rollouts of two only the states carry on, half is the most."""
    flags = ["--lstm", "--env-id", "tests.paac_envs:Recall-v0", "--reward-scale", "1", "--seed", "1"]
    flags += ["--n-processes", "1", "--total-steps", steps, "--t-max", t_max, "--learning-rate", "4e-3"]
    assert run(a3c, *flags, "--run-dir", tmp_path / "r") == 0
    assert summary(tmp_path / "r")["eval"]["mean"] > 0.8
