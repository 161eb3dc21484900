"""Runs a trainer, here or in a process group of its own, and looks at what it leaves."""

import contextlib
import importlib
import json
import multiprocessing.forkserver
import os
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import torch

from common import processes
from common.run import parse_args

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("paac", "a3c", "async_q", "nstep_q", "sarsa", "ppo_batch", "apex")
processes.LIBRARIES += ["torch._dynamo", "torch.utils.tensorboard", "PIL.Image", "cv2"]
PATIENCE = 120  # seconds after which a test gives up

# How a trainer runs within seconds, and the flag that sets the number of its processes.
VECTOR = ["--n-envs", "4", "--t-max", "5"]
APEX = ["--envs-per-actor", "2", "--chunk-size", "10", "--capacity", "2000", "--replay-ratio", "1"]
SMALL = {
    "paac": (VECTOR, "--n-workers"),
    "ppo_batch": ([*VECTOR, "--minibatch-size", "10", "--update-epochs", "2"], "--n-workers"),
    "apex": ([*APEX, "--learning-starts", "50", "--batch-size", "16"], "--n-actors"),
    **{name: ([], "--n-processes") for name in ("a3c", "async_q", "nstep_q", "sarsa")},
}


def small(name, n_processes, env="Plain", **env_kwargs):
    """Flags of a small run in an environment of tests/simulators.py."""
    flags, number = SMALL[name]
    flags = [*flags, number, str(n_processes), "--env-id", f"tests.simulators:Run-{env}-v0"]
    return [*flags, "--env-kwargs", json.dumps(env_kwargs), "--eval-episodes", "0"]


def run(name, *flags):
    """The trainer's main in this process; its exit status."""
    try:
        return importlib.import_module(name).main([str(flag) for flag in flags])
    except SystemExit as error:
        return error.code


def parse(name, *flags):
    """The trainer's flags as it understands them."""
    trainer = importlib.import_module(name)
    argv = [str(flag) for flag in flags]
    presets, pick = trainer.PRESETS, trainer.pick_preset
    return parse_args(name, argv, trainer.Args(), trainer.__doc__, presets, pick)[0]


def checkpoint(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Script(contextlib.AbstractContextManager):
    """A script in a process group of its own, of which nothing is left after the context."""

    def __init__(self, path, flags, folder):
        """Its output goes into `stdout` and `stderr` in the folder."""
        # A server that has imported the libraries forks the script, which saves three seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(processes.LIBRARIES)
        self.folder = folder
        ready, theirs = context.Pipe(duplex=False)
        args = [str(path), *map(str, flags)], folder, {**os.environ}, theirs
        self.process = context.Process(target=run_script, args=args)
        self.process.start()
        self.pid = self.process.pid
        theirs.close()
        ready.recv()

    def __exit__(self, *error):
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.join()

    def output(self, name="stderr"):
        return (self.folder / name).read_text()

    def members(self):
        """The living processes of its group, orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                if os.getpgid(process.pid) == self.pid and process.status() != "zombie":
                    found.append(process)
        return found

    def signal(self, number):
        """As a terminal or `timeout` sends it: to the whole group."""
        os.killpg(self.pid, number)

    def end(self):
        """Wait for it; its exit status. No process of it is left."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "it goes on"
        wait_for(lambda: not self.members())
        return self.process.exitcode


def run_script(argv, folder, environ, ready):
    os.setpgid(0, 0)
    os.environ.update(environ)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    ready.send(None)
    ready.close()
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.forkserver._forkserver.__init__()  # it starts its own, as scripts do
    multiprocessing.resource_tracker._resource_tracker.__init__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.SIGNALS)
    path = Path(argv[0])
    sys.argv = argv
    sys.path = [str(path.parent), *(folder for folder in sys.path if Path(folder) != ROOT)]
    main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(compile(path.read_text(), path, "exec"), vars(main))


def returns_of(rewards, kinds, gamma):
    """Σ_k γ^k r_{t+k} of every step t, up to a termination or the last reward."""
    G, found = 0.0, []
    for reward, kind in zip(reversed(rewards), reversed(kinds), strict=True):
        found.append(G := reward + (0.0 if kind in ("terminated", "both") else gamma * G))
    return np.array(found[::-1])
