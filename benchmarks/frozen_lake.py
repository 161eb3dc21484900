"""What FrozenLake-v1's optimal policy earns: its mean, and over the episodes that score a run.

python benchmarks/frozen_lake.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium as gym
import numpy as np
import tyro

from common.evaluate import play
from common.run import RunArgs


def q_values(transitions: dict, values: np.ndarray, gamma: float) -> np.ndarray:
    """Σ p (r + γ V(s')), (n_states, n_actions), from P[s][a] = [(p, s', r, over), ...]."""
    return np.array(
        [
            [
                sum(p * (r + gamma * values[s] * (not over)) for p, s, r, over in ways)
                for ways in row
            ]
            for row in (list(actions.values()) for actions in transitions.values())
        ]
    )


def main(seeds: tuple[int, ...] = (1, 2, 3, 4, 5)) -> None:
    env = gym.make("FrozenLake-v1")
    transitions = env.unwrapped.P
    values = np.zeros(len(transitions))
    for _ in range(2_000):  # value iteration
        values = q_values(transitions, values, 0.99).max(1)
    policy = q_values(transitions, values, 0.99).argmax(1)
    earned = np.zeros(len(transitions))
    for _ in range(env.spec.max_episode_steps):
        earned = q_values(transitions, earned, 1.0)[np.arange(len(policy)), policy]
    print(f"mean: {earned[0]:.3f}")
    for seed in seeds:
        args = RunArgs(env_id="FrozenLake-v1")
        args.seed = seed
        print(f"seed {seed}: {play(args, lambda obs: policy[obs.argmax(1)], 100).mean()}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
