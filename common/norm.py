"""Observations and rewards of any size, brought to a size that networks learn from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from common.atari import is_atari
from common.distributed import of_all_ranks
from common.vec_env import find_spec


class RunningNorm(nn.Module):
    """(x - mean) / √(var + eps), clipped to ±clip: normalises vectors, as /255 does images.

    Mean and (population) variance are those of all vectors that `update` has seen, since the start
    of training. The sums are of x - c, c the first vector: where x is large beside its deviation,
    the variance would be a small difference of large sums. Hogwild's processes add to them without
    a lock, so that a sum may miss a vector, which then changes little.

    Where the space's bounds are within ±1, the mean is 0 and var the mean square of all components:
    dividing one-hot components by their own deviations would enlarge states that are seldom seen.
    """

    def __init__(self, space: spaces.Box, eps: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        size = space.shape[0]
        self.eps, self.clip = eps, clip
        self.one_scale = max(-space.low.min(), space.high.max()) <= 1
        self.register_buffer("first", torch.zeros(size, dtype=torch.float64))  # c
        self.register_buffer("sums", torch.zeros(3, size, dtype=torch.float64))  # Σ1, Σx-c, Σ(x-c)²
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.full((size,), math.sqrt(1 + eps)))  # √(var + eps)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add the vectors x, (..., size), of all ranks under torchrun.

        Raises: FloatingPointError: one is not finite; nothing is added.
        """
        x = of_all_ranks(x).flatten(0, -2).double()
        if not x.isfinite().all():
            raise FloatingPointError("an observation is not finite")
        if not self.sums[0, 0]:
            self.first.copy_(x[0])
        x = x - self.first
        self.sums += torch.stack([torch.ones_like(x), x, x.square()]).sum(1)
        n, total, squares = self.sums
        mean = self.first + total / n
        variance = (squares / n - (total / n).square()).clamp(min=0)
        if self.one_scale:
            mean, variance = torch.zeros_like(mean), (variance + mean.square()).mean()
        self.mean.copy_(mean)
        self.std.copy_((variance + self.eps).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp(-self.clip, self.clip)


def make_norm(space: spaces.Box) -> RunningNorm | None:
    """For methods that learn Q: None where the bounds are within ±1, such as one-hot vectors.

    Scaled (fe4cb63), one-step Q-learning did not learn Taxi-v4. As they are, paac.py and a3c.py did
    not, so that the actor-critics take `RunningNorm` always.
    """
    norm = RunningNorm(space)
    return None if norm.one_scale else norm


class RewardScale(nn.Module):
    """Rewards to learn from, as --rewards says: r clipped to ±1, r / σ clipped to ±10·size, or r.

    σ = √(mean of G_t²) / size, over all steps t since the start of training. G_t = Σ_k γ^k r_{t+k}
    is the return from step t to a termination, or to now. A time limit does not cut it, as it does
    not cut what is learned: the next episode's rewards stand for those that would have followed.
    Gymnasium's NormalizeReward takes the return up to step t. Where the last step alone is
    rewarded, that is 0 at all steps before it, and σ too small.

    Args:
        args: a trainer's, of which `rewards`, `env_id` and `gamma` count.
        size: root mean square of the returns to learn from. A larger one makes the values that
            random weights give small beside it.
    """

    def __init__(self, args: Any, size: float = 1.0) -> None:
        super().__init__()
        self.how = args.rewards
        if self.how == "auto":
            self.how = "clip" if is_atari(find_spec(args.env_id)) else "scale"
        self.limit = {"clip": 1.0, "scale": 10 * size, "raw": math.inf}[self.how]
        self.gamma, self.size = args.gamma, size
        # of each environment, over the steps t since it terminated last
        self.sum_G: Any = 0.0  # Σ_t γ^(T-t) G_t
        self.sum_gamma: Any = 0.0  # Σ_t γ^2(T-t)
        self.seen = np.zeros(2)  # Σ1 and ΣG² since the last update
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))  # of all steps

    def see(self, rewards: np.ndarray, terminated: np.ndarray) -> None:
        """Take note of step T of all environments, (n_envs,) each.

        Each G_t grows by γ^(T-t) r, and so Σ_t G_t² by r (2 Σ_t γ^(T-t) G_t + r Σ_t γ^2(T-t)).
        """
        self.sum_G = self.gamma * self.sum_G
        self.sum_gamma = self.gamma**2 * self.sum_gamma + 1
        self.seen += rewards.size, (rewards * (2 * self.sum_G + rewards * self.sum_gamma)).sum()
        self.sum_G = (self.sum_G + rewards * self.sum_gamma) * ~terminated
        self.sum_gamma = self.sum_gamma * ~terminated

    def update(self) -> np.ndarray:
        """Add what has been seen, under torchrun by all ranks, and return what was added, (2,)."""
        sums = of_all_ranks(torch.from_numpy(self.seen)[None]).sum(0).numpy()
        self.seen = np.zeros(2)
        self.add(sums)
        return sums

    def add(self, sums: np.ndarray) -> None:
        """Raises: FloatingPointError: a reward is not finite."""
        if not np.isfinite(sums).all():
            raise FloatingPointError("a reward is not finite")
        self.sums += torch.tensor(sums)

    @property
    def sigma(self) -> float:
        n, squares = self.sums.tolist()
        return math.sqrt(max(squares / n, 1e-16)) / self.size if self.how == "scale" and n else 1.0

    def forward(self, rewards: Any) -> Any:
        """An array or a tensor of raw rewards → those to learn from."""
        return (rewards / self.sigma).clip(-self.limit, self.limit)
