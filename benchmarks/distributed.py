"""What several processes under torchrun cost and bring, and what Ray costs beside pipes, on Pong.

    python benchmarks/distributed.py ranks     # PAAC with 1, 2 and 4 ranks, two minutes
    python benchmarks/distributed.py ray       # Ape-X's actors and memory, no learning, two minutes

`ray` also prints how long the learner takes for a transition, and for handing out θ.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import tyro

import apex
import paac
from common.distributed import N_RANKS, RANK
from common.vec_env import env_spaces

PONG = "PongNoFrameskip-v4"
SECONDS = 20


def train_as_rank() -> None:
    """Train PAAC, and print the steps/s, the ms of an all-reduce and its share of an update."""
    seconds, all_reduce = [0.0], dist.all_reduce

    def timed(x: object) -> None:
        dist.barrier()  # so that waiting for a slower rank does not count
        begin = time.perf_counter()
        all_reduce(x)
        seconds.append(time.perf_counter() - begin)

    dist.all_reduce = timed
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--preset", "short", "--total-steps", "64_000", "--eval-episodes", "0"]
        with contextlib.suppress(SystemExit):
            paac.main([*flags, "--run-dir", f"{folder}/run"])
        if RANK == 0:
            rate = json.loads(Path(folder, "run/summary.json").read_text())["steps_per_second"]
            ms = 1000 * median(seconds)
            share = ms / (1000 * 32 * 5 / rate)
            print(f"RESULT {N_RANKS} ranks: {rate:,.0f} steps/s, {ms:.1f} ms, {share:.1%}")


def ranks() -> None:
    for n in (1, 2, 4):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        command = [sys.executable, *torchrun, __file__, "rank"]
        threads = str(max(1, (os.cpu_count() or 1) // n))
        env = os.environ | {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "5000"}
        output = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
        print(*(line for line in output.stdout.splitlines() if line.startswith("RESULT")))


def ray() -> None:
    from common.cluster import connect

    observations, actions = env_spaces(PONG)
    model = apex.QNetwork(observations, actions)
    n_actors = max(1, (os.cpu_count() or 1) // 2)
    args = apex.Args(n_actors=n_actors, capacity=50_000, ray="local")
    replay = apex.Replay(observations, args, torch.device("cpu"), 0)
    for name in ("pipes", "Ray", "pipes", "Ray"):
        make_actors = apex.Actors if name == "pipes" else connect(args, apex.actor)
        with contextlib.closing(make_actors(args, 0, observations, model)) as actors:
            next(actors.receive(60))  # until they act
            n, adding, begin = 0, 0.0, time.perf_counter()
            while time.perf_counter() - begin < SECONDS:
                for chunk in actors.receive(1):
                    before = time.perf_counter()
                    n += args.chunk_size
                    replay.add(chunk)
                    adding += time.perf_counter() - before
            rate, size = n / (time.perf_counter() - begin), len(pickle.dumps(chunk))
            begin = time.perf_counter()
            for _ in range(10):
                actors.publish(model)
            ms = 100 * (time.perf_counter() - begin)
        print(f"{name}: {rate:,.0f} transitions/s, {size / args.chunk_size:,.0f} bytes each,")
        print(f"    {1e6 * adding / n:.1f} µs to add one, {ms:.1f} ms to hand out θ", flush=True)


def main(what: tyro.conf.Positional[Literal["ranks", "ray", "rank"]]) -> None:
    """Measure ranks or Ray; rank is what torchrun starts.

    Args:
        what: what to measure
    """
    {"ranks": ranks, "ray": ray, "rank": train_as_rank}[what]()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
