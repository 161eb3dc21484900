"""Every trainer learns a task whose larger reward comes late.

Rollouts are two steps long and the way to the reward is four, so that what follows an action has to
travel back through bootstrapped values.
"""

import importlib

import pytest
import torch
from gymnasium import spaces

import common.evaluate
from tests.helpers import checkpoint, run, summary

FLAGS = ["--env-id", "tests.simulators:Run-Corridor-v0", "--gamma", "0.9"]
SYNC = ["--n-workers", "0", "--total-steps"]
HOGWILD = ["--n-processes", "2", "--total-steps", "6000"]
A3C = ["--n-processes", "2", "--total-steps", "15000"]
GREEDY = ["--epsilon-finals", "0", "--epsilon-probs", "1", "--epsilon-steps", "4000"]
GREEDY += ["--target-interval", "100"]
# Of a policy that acts at random the returns of three steps would not lead to Q*.
APEX = ["--n-actors", "1", "--n-step", "1", "--epsilon", "1", "--target-interval", "50"]
CASES = {
    "paac": [*SYNC, "40000", "--t-max", "2", "--n-envs", "16"],
    # with λ = 0 and returns of size 10, π settles on the nearer reward before V is learned
    "ppo_batch": [*SYNC, "16000", "--t-max", "32", "--gae-lambda", "0", "--rewards", "raw"],
    # β keeps it from the smaller reward, which is nearer
    "a3c": [*A3C, "--t-max", "2", "--learning-rate", "1e-3", "--entropy-coef", "0.2"],
    "async_q": [*HOGWILD, *GREEDY],
    "nstep_q": [*HOGWILD, *GREEDY, "--t-max", "2"],
    "sarsa": [*HOGWILD, *GREEDY],
    "apex": [*APEX, "--total-steps", "12000"],
}


@pytest.mark.parametrize("name", CASES)
def test_learns_what_pays_later(name, tmp_path, monkeypatch):
    """A random policy earns 0.36 and a short-sighted one 0.2, where 1 is the most."""
    monkeypatch.setattr(common.evaluate, "n_cores", lambda: 0)
    assert run(name, *FLAGS, *CASES[name], "--run-dir", tmp_path) == 0
    mean = summary(tmp_path)["eval"]["mean"]
    assert mean > 0.8
    if name in ("async_q", "nstep_q", "sarsa", "apex"):
        assert mean == 1  # greedily
        trainer = importlib.import_module(name)
        arch = [] if name == "apex" else ["mlp"]
        network = trainer.QNetwork(spaces.Box(0, 1, (6,)), spaces.Discrete(2), *arch)
        network.load_state_dict(checkpoint(tmp_path)["model"])
        # Q*(s, right) = γ^(4 - s), Q*(s, left) = γ Q*(s - 1, right), but for the left end
        optimal = torch.tensor([[0.2, 0.729], [0.6561, 0.81], [0.729, 0.9], [0.81, 1.0]])
        n, squares = checkpoint(tmp_path)["reward_scale"]["sums"]
        found = (squares / n).sqrt() / 10 * network(torch.eye(6)[1:5])  # rewards were divided by σ
        torch.testing.assert_close(found, optimal, atol=0.2, rtol=0, check_dtype=False)
