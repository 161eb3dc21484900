"""The sum tree of the replay memory against dense arrays of the same priorities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.sum_tree import SumTree

CAPACITIES = (1, 2, 3, 64, 100, 1000)


def tree_of(priorities: list[float] | np.ndarray, seed: int = 0) -> SumTree:
    tree = SumTree(len(priorities), seed)
    tree.update(np.arange(len(priorities)), np.array(priorities, np.float64))
    return tree


def all_priorities(tree: SumTree) -> np.ndarray:
    return tree[np.arange(tree.capacity)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic and mean + 5 standard deviations of it for as many cells less one."""
    assert expected.min() >= 5 and counts.sum() == pytest.approx(expected.sum())
    degrees = len(counts) - 1
    return float((np.square(counts - expected) / expected).sum()), degrees + 5 * math.sqrt(2 * degrees)


class Draws:
    """Stands in for the tree's generator: these numbers first, then those of a real one."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.rng = list(numbers), np.random.default_rng(0)

    def random(self, n: int) -> np.ndarray:
        taken, self.numbers = self.numbers[:n], self.numbers[n:]
        return np.append(taken, self.rng.random(n - len(taken)))


# ------------------------------------------------------------------------------------------------------ sums


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_total_and_priorities_after_random_updates(capacity: int) -> None:
    rng, tree, dense = np.random.default_rng(capacity), SumTree(capacity), np.zeros(capacity)
    assert tree.total == 0 and not all_priorities(tree).any()
    for _ in range(60):
        n = int(rng.integers(1, 2 * capacity + 2))
        indices, priorities = rng.integers(0, capacity, n), rng.exponential(size=n) * rng.integers(0, 2, n)
        tree.update(indices, priorities)
        for index, priority in zip(indices, priorities, strict=True):
            dense[index] = priority
        assert all_priorities(tree).tolist() == dense.tolist()
        assert tree.total == pytest.approx(dense.sum(), rel=1e-12)


def test_last_value_of_a_repeated_index_counts() -> None:
    tree = SumTree(5)
    tree.update(np.array([3, 1, 3, 1, 3]), np.array([8.0, 1.0, 16.0, 2.0, 4.0]))
    assert all_priorities(tree).tolist() == [0, 2, 0, 4, 0] and tree.total == 6


def test_priorities_are_read_in_any_order_and_the_rest_stay() -> None:
    tree = tree_of([1, 2, 4, 8, 16])
    tree.update(np.array([4, 0]), np.array([0.0, 32.0]))
    assert tree[np.array([4, 3, 0, 0])].tolist() == [0, 8, 32, 32] and tree.total == 46
    tree.update(np.array([], np.int64), np.array([]))
    assert tree.total == 46


def test_a_million_updates_leave_no_drift() -> None:
    """2,000 batches of 500 on 300 leaves, from 1e-8 to 1e+8; then all leaves become small."""
    rng, tree, dense = np.random.default_rng(0), SumTree(300), np.zeros(300)
    for batch in range(2000):
        indices = rng.integers(0, 300, 500)
        priorities = 10.0 ** rng.uniform(-8, 8, 500)
        tree.update(indices, priorities)
        dense[indices] = priorities
        if batch % 200 == 0:
            assert tree.total == pytest.approx(dense.sum(), rel=1e-13)
    assert tree.total == pytest.approx(dense.sum(), rel=1e-13)
    small = rng.uniform(1e-8, 2e-8, 300)
    tree.update(np.arange(300), small)
    assert tree.total == pytest.approx(small.sum(), rel=1e-13)
    tree.update(np.arange(300), np.zeros(300))
    assert tree.total == 0


# ----------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("capacity", [2, 3, 64, 100, 1000])
@pytest.mark.parametrize("n", [1, 7, 512])
def test_frequencies_of_draws(capacity: int, n: int) -> None:
    n = 37 if capacity == 1000 and n == 1 else n
    priorities, rounds = np.random.default_rng(capacity).uniform(0.2, 3, capacity), 100 * capacity // n + 1
    tree = tree_of(priorities, seed=1)
    drawn = np.concatenate([tree.sample(n)[0] for _ in range(rounds)])
    counts = np.bincount(drawn, minlength=capacity)
    statistic, bound = chi_square(counts, n * rounds * priorities / priorities.sum())
    assert statistic < bound
    if n == 1 and capacity >= 64:  # draws that do not know of each other do not agree too well either
        assert statistic > capacity - 1 - 5 * math.sqrt(2 * capacity)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_probabilities_are_shares_of_the_total(capacity: int) -> None:
    priorities = np.random.default_rng(capacity).exponential(size=capacity)
    indices, probabilities = tree_of(priorities).sample(200)
    assert indices.shape == probabilities.shape == (200,)
    np.testing.assert_allclose(probabilities, priorities[indices] / priorities.sum(), rtol=1e-12)


@pytest.mark.parametrize(("capacity", "n"), [(1, 5), (3, 3), (64, 64), (100, 100), (100, 37), (1000, 512), (10, 400)])
def test_each_part_of_the_total_gives_one_draw(capacity: int, n: int) -> None:
    """In the order of the parts: leaf i covers the totals from the sum of those before it to that sum and its own."""
    priorities = np.random.default_rng(n).exponential(size=capacity)
    ends = np.cumsum(priorities)
    tree = tree_of(priorities)
    for _ in range(50):
        indices, _ = tree.sample(n)
        parts = np.arange(n) * ends[-1] / n
        assert (ends[indices] > parts * (1 - 1e-12)).all()
        assert (ends[indices] - priorities[indices] < (parts + ends[-1] / n) * (1 + 1e-12)).all()


@pytest.mark.parametrize("n", [1, 64, 128])
def test_equal_priorities_are_drawn_equally_often(n: int) -> None:
    tree = tree_of(np.full(n, 0.25))
    for _ in range(20):
        assert tree.sample(n)[0].tolist() == list(range(n))
        assert tree.sample(3 * n)[0].tolist() == np.repeat(np.arange(n), 3).tolist()


def test_draw_within_a_part_is_uniform() -> None:
    """Of two parts of four equal leaves, each gives either of its two leaves half of the time, by itself."""
    tree = tree_of([1, 1, 1, 1])
    pairs = np.array([tree.sample(2)[0] for _ in range(4000)])
    counts = np.bincount(2 * pairs[:, 0] + pairs[:, 1] - 2, minlength=4)
    assert counts.shape == (4,) and (abs(counts - 1000) < 5 * math.sqrt(750)).all()


@pytest.mark.parametrize(
    "priorities",
    [
        [1e16, 1e-3],
        [1e16, 1e-3, 0, 0, 0],
        [0, 0, 1e-3, 1e16, 0, 0, 1e-3, 0],
        [0, 5e-324, 0, 0],
        [5e-324, 0],
        [0, 1e-323, 0, 5e-324, 0, 0, 0, 0, 0],
        [1e300, 0, 5e-324, 0],
        [0] * 99 + [1],
        [1] + [0] * 99,
        [0.1, 0, 0.2, 0, 0.3, 0, 0.7, 0, 0],
    ],
)
def test_priority_zero_is_never_drawn(priorities: list[float]) -> None:
    tree = tree_of(priorities)
    for n in (1, 2, 5, 100):
        for _ in range(100):
            indices, probabilities = tree.sample(n)
            assert ((indices >= 0) & (indices < len(priorities))).all()
            assert (np.array(priorities)[indices] > 0).all() and (probabilities > 0).all()


def test_priority_zero_is_never_drawn_among_many() -> None:
    rng, tree = np.random.default_rng(0), SumTree(1000)
    for _ in range(200):
        priorities = 10.0 ** rng.uniform(-300, 300, 1000) * (rng.random(1000) < 0.01)
        priorities[rng.integers(1000)] = 1e-3
        tree.update(np.arange(1000), priorities)
        assert (priorities[tree.sample(64)[0]] > 0).all()


def test_what_was_drawn_and_then_set_to_zero_is_not_drawn_again() -> None:
    tree, left = tree_of(np.ones(100)), set(range(100))
    while left:
        indices, _ = tree.sample(7)
        assert set(indices) <= left
        tree.update(indices, np.zeros(7))
        left -= set(indices)
    assert tree.total == 0


@pytest.mark.parametrize("priorities", [[1, 2, 0], [3, 0], [1, 1, 1, 0, 0, 0], [0.1, 0.2, 0.3, 0, 0, 0, 0, 0, 0]])
def test_draws_at_the_very_end_of_the_total(priorities: list[float]) -> None:
    """The largest number below 1 may round up to the total itself, beyond the last leaf that has a priority."""
    tree = tree_of(priorities)
    for number in (np.nextafter(1, 0), 1.0, 0.0):
        for n in (1, 3, 512):
            tree.rng = Draws(*[number] * n)
            assert (np.array(priorities)[tree.sample(n)[0]] > 0).all()


def test_draws_by_hand() -> None:
    """Of 1, 2, 0, 5 the totals [0, 1) are leaf 0's, [1, 3) leaf 1's, [3, 8) leaf 3's; two parts of 4 each."""
    tree = tree_of([1, 2, 0, 5])
    for first, second, expected in [(0, 0, [0, 3]), (0.25, 0.5, [1, 3]), (0.7, 0.9, [1, 3]), (0.75, 0, [3, 3])]:
        tree.rng = Draws(first, second)
        indices, probabilities = tree.sample(2)
        assert indices.tolist() == expected
        assert probabilities.tolist() == [[1 / 8, 2 / 8, 0, 5 / 8][i] for i in expected]


def test_same_seed_same_draws() -> None:
    priorities = np.random.default_rng(0).exponential(size=50)
    a, b, c = tree_of(priorities, 3), tree_of(priorities, 3), tree_of(priorities, 4)
    draws = [np.concatenate([tree.sample(20)[0] for _ in range(5)]).tolist() for tree in (a, b, c)]
    assert draws[0] == draws[1] != draws[2]
    assert a.sample(20)[0].tolist() != draws[0][:20]


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        SumTree(capacity)


@pytest.mark.parametrize("capacity", [1, 5, 8])
@pytest.mark.parametrize("outside", [-1, "capacity", 1000])
def test_index_outside(capacity: int, outside: int | str) -> None:
    tree = tree_of(np.ones(capacity))
    index = capacity if outside == "capacity" else outside
    with pytest.raises(IndexError):
        tree.update(np.array([0, index]), np.array([3.0, 2.0]))
    assert all_priorities(tree).tolist() == [1] * capacity and tree.total == capacity


@pytest.mark.parametrize("priority", [-1.0, -5e-324, math.nan, math.inf, -math.inf])
def test_priority_that_is_none(priority: float) -> None:
    tree = tree_of([1, 1, 1])
    with pytest.raises(ValueError, match="priority"):
        tree.update(np.array([0, 2]), np.array([3.0, priority]))
    assert all_priorities(tree).tolist() == [1, 1, 1] and tree.total == 3


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_nothing_to_draw(capacity: int) -> None:
    tree = SumTree(capacity)
    with pytest.raises(ValueError, match="zero"):
        tree.sample(1)
    tree.update(np.array([capacity - 1]), np.array([2.0]))
    assert tree.sample(3)[0].tolist() == [capacity - 1] * 3
    tree.update(np.array([capacity - 1]), np.array([0.0]))
    with pytest.raises(ValueError, match="zero"):
        tree.sample(1)
