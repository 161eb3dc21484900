"""One network trained by several processes, the ranks, which torchrun starts.

    torchrun --nproc-per-node 2 paac.py --n-envs 32

Each rank steps its share of the environments. Gradients and statistics are those of all ranks, so
every rank has the parameters that one process with all environments would have. Without torchrun
there is rank 0 alone, and every function returns at once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import common.run
from common.run import usage_error

RANK, N_RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def average_gradients(parameters: Any) -> None:
    """Replace each gradient by its mean over the ranks, all of them in one message."""
    if N_RANKS > 1:
        gradients = [p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.div_(N_RANKS).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def of_all_ranks(x: Tensor) -> Tensor:
    """x of all ranks, one after another in the first dimension."""
    if N_RANKS == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(N_RANKS)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class RankRun(common.run.Run):
    """The `Run` of a rank: all stop after the same update when one has got a signal.

    Rank 0 has the episodes of all; it alone writes files, and goes on after training.
    """

    stopped = False  # instead of the property: what all have agreed on

    def __init__(self, script: str, args: Any, **parts: Any) -> None:
        for name in ("n_envs", "minibatch_size"):
            n = getattr(args, name, 0)
            if n % N_RANKS:
                usage_error(
                    f"--{name.replace('_', '-')} {n} cannot be shared evenly by {N_RANKS} ranks"
                )
        if sys.platform == "linux":  # SIGTERM where torchrun is killed
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.own_episodes = []
        super().__init__(script, args, **parts)

    def log_episode(self, episode_return: float, length: int) -> None:
        self.own_episodes.append((episode_return, length))

    def log_update(self, step: int, **losses: Any) -> None:
        ranks = [None] * N_RANKS
        dist.all_gather_object(ranks, (self.signal, self.own_episodes))
        signals, episodes = zip(*ranks, strict=True)
        self.signal = self.signal or max(signals)
        self.stopped = any(signals)
        self.own_episodes = []
        if RANK == 0:
            for episode in itertools.chain(*episodes):
                super().log_episode(*episode)
        super().log_update(step, **losses)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        handled = super().__exit__(kind, error, traceback)
        if error is None:  # after an error the others outlive this rank, or torchrun blames them
            dist.destroy_process_group()
            if RANK:  # another status than 0 would make torchrun end rank 0, which is still saving
                sys.exit(0)
        return handled


class OtherRun(RankRun):
    """The `Run` of ranks above 0: it writes nothing."""

    def _open(self, args: Any) -> None:
        self.writer = self.bar = tqdm(disable=True)

    save = _log = _finish = lambda *args, **losses: None


Run = common.run.Run if N_RANKS == 1 else OtherRun if RANK else RankRun
