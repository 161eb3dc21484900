"""Ape-X's actors on the machines of a Ray cluster. Only --ray imports this, and this alone Ray.

    pip install -r requirements-ray.txt
    python apex.py --ray local       # this machine; auto or HOST:PORT: a cluster that is there

Nothing here belongs to the algorithm.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.processes import CLOSE_SECONDS, WorkerError
from common.run import usage_error

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    usage_error("--ray needs Ray: pip install -r requirements-ray.txt")


def connect(args: Any, actor: Callable) -> Callable:
    """Join the cluster of --ray and return what makes the `RayActors`.

    Every machine gets the *.py beside common/, and common/. --n-actors None becomes the number of
    the cluster's cores but one. Comes before `Run`, as Ray takes SIGTERM.
    """
    code = {
        "working_dir": Path(__file__).parents[1],
        "excludes": ["/*", "!.", "!/*.py", "!/common"],
    }
    try:
        ray.init(args.ray, runtime_env=code)
    except (ConnectionError, ValueError) as error:
        usage_error(f"--ray {args.ray}: {error}")
    n_cores = int(ray.cluster_resources()["CPU"])
    args.n_actors = args.n_actors or n_cores - 1 or 1
    if args.n_actors > n_cores:
        usage_error(f"--n-actors {args.n_actors}: the cluster has {n_cores} cores")
    return functools.partial(RayActors, actor)


@ray.remote(num_cpus=1)
class RemoteActor:
    def __init__(self, actor: Callable, args: Any, model: Any, index: int, first_step: int) -> None:
        self.model, self.n_steps = model, args.fetch_interval
        self.steps = actor(index, args, first_step, lambda: model)

    def act(self, parameters: dict) -> list:
        """Fetch these parameters, act until the next fetch, and return the chunks."""
        self.model.load_state_dict({name: torch.tensor(x) for name, x in parameters.items()})
        return list(itertools.chain(*itertools.islice(self.steps, self.n_steps)))

    def close(self) -> None:
        self.steps.close()


class RayActors:
    """Has the methods of apex.py's `Actors`.

    An actor that dies, alone or with its machine, is replaced by one with the same index and other
    seeds as soon as a core is free; the run goes on meanwhile. Ray's own restarts would repeat the
    seeds, and might swap the chunks of two calls.
    """

    def __init__(
        self, actor: Callable, args: Any, first_step: int, space: Any, model: nn.Module
    ) -> None:
        own = ray.put(copy.deepcopy(model).cpu().requires_grad_(False))
        self.make = functools.partial(RemoteActor.remote, actor, args, own)
        self.first_step = first_step
        self.calls = {}  # an actor, the call that it is at, and the next one
        self.failures = Counter()  # in a row, of actors that have started
        self.publish(model)
        for index in range(args.n_actors):
            self._start(index)

    def _start(self, index: int) -> None:
        actor = self.make(index, self.first_step)
        self.calls[index] = actor, *(actor.act.remote(self.parameters) for _ in range(2))

    def publish(self, model: nn.Module) -> None:
        """Let the calls from now on have these parameters. A machine fetches them once."""
        self.parameters = ray.put({name: x.cpu().numpy() for name, x in model.state_dict().items()})

    def receive(self, timeout: float) -> Iterator:
        """The chunks of one call, if one is done within `timeout` seconds.

        Raises: WorkerError: an actor failed three times without a result.
        """
        first = {call: index for index, (_, call, _) in self.calls.items()}
        for call in ray.wait([*first], timeout=timeout)[0]:
            index = first[call]
            actor, _, second = self.calls.pop(index)  # goes on behind the others
            try:
                chunks = ray.get(call)
            except RayError as error:
                self.failures[index] += 1
                if self.failures[index] == 3:
                    raise WorkerError(f"actor {index} failed: {error}") from error
                print(f"actor {index} starts anew where a core is free: {error}", flush=True)
                self.first_step += 1  # for other seeds
                self._start(index)
            else:
                self.failures[index] = 0
                self.calls[index] = actor, second, actor.act.remote(self.parameters)
                for chunk in chunks:  # Ray's arrays are read-only
                    yield chunk._replace(frames=chunk.frames.copy())

    def close(self) -> None:
        closing = [self.calls[i][0].close.remote() for i, n in self.failures.items() if not n]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        ray.shutdown()
