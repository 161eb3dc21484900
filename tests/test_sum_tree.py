"""The sum tree against dense arrays of the same priorities."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from common.sum_tree import SumTree


def tree_of(priorities: list[float] | np.ndarray, seed: int = 0) -> SumTree:
    tree = SumTree(len(priorities), seed)
    tree.update(np.arange(len(priorities)), np.array(priorities, np.float64))
    return tree


@pytest.mark.parametrize("capacity", [1, 2, 3, 64, 100, 1000])
def test_sums_after_random_updates(capacity: int) -> None:
    """Indices repeat, and half of the priorities are zero; the rest span 12 orders of magnitude."""
    rng, tree, dense = np.random.default_rng(capacity), SumTree(capacity), np.zeros(capacity)
    for _ in range(60):
        n = int(rng.integers(0, 2 * capacity + 2))
        indices = rng.integers(0, capacity, n)
        priorities = 10.0 ** rng.uniform(-6, 6, n) * rng.integers(0, 2, n)
        tree.update(indices, priorities)
        for index, priority in zip(indices, priorities, strict=True):
            dense[index] = priority
        assert tree[np.arange(capacity)].tolist() == dense.tolist()
        assert tree.total == pytest.approx(math.fsum(dense), rel=1e-12)
    tree.update(np.arange(capacity), np.full(capacity, 1e-9))  # nothing is left of the large ones
    assert tree.total == pytest.approx(capacity * 1e-9, rel=1e-12)


@pytest.mark.parametrize(("capacity", "n"), [(2, 1), (3, 7), (64, 1), (100, 1), (1000, 37)])
def test_frequencies_of_draws(capacity: int, n: int) -> None:
    """Chi-square with capacity - 1 degrees of freedom, its mean and 5 standard deviations."""
    priorities = np.random.default_rng(capacity).uniform(0.2, 3, capacity)
    tree, rounds = tree_of(priorities, seed=1), 100 * capacity // n + 1000
    drawn = np.concatenate([tree.sample(n)[0] for _ in range(rounds)])
    expected = n * rounds * priorities / priorities.sum()
    statistic = (np.square(np.bincount(drawn, minlength=capacity) - expected) / expected).sum()
    assert statistic < capacity - 1 + 5 * math.sqrt(2 * (capacity - 1))


@pytest.mark.parametrize(("capacity", "n"), [(1, 5), (3, 3), (64, 64), (100, 37), (10, 400)])
def test_each_of_n_equal_parts_of_the_total_gives_one_draw(capacity: int, n: int) -> None:
    """Leaf i is the part of the total from the sum of those before it to that and its own."""
    priorities = np.random.default_rng(n).exponential(size=capacity)
    ends, tree = np.cumsum(priorities), tree_of(priorities)
    for _ in range(50):
        indices, probabilities = tree.sample(n)
        np.testing.assert_allclose(probabilities, priorities[indices] / ends[-1], rtol=1e-12)
        parts = np.arange(n) * ends[-1] / n
        assert (ends[indices] > parts * (1 - 1e-12)).all()
        assert (ends[indices] - priorities[indices] < parts + ends[-1] / n * (1 + 1e-12)).all()


@pytest.mark.parametrize("priorities", [[3, 0], [0, 0.1, 0, 0.2, 0, 0.3, 0, 0, 0]])
def test_priority_zero_is_never_drawn(priorities: list[float]) -> None:
    """Nor by the largest number below 1, which may round up to the end of the total."""
    for draws in (np.random.default_rng(0).random, np.zeros, lambda n: np.full(n, 1 - 2**-53)):
        tree = tree_of(priorities)
        tree.rng = SimpleNamespace(random=draws)
        for n in (1, 3, 100, 512) * 10:
            indices, probabilities = tree.sample(n)
            assert set(indices) <= set(np.flatnonzero(priorities)) and (probabilities > 0).all()
