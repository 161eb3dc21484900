"""Ape-X's actors on Ray: they bring the chunks that pipes bring, and may die."""

import contextlib
import dataclasses
import re
import shutil
import signal
import sys

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch

import apex
from tests.helpers import ROOT, Script, checkpoint, run, summary, wait_for

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups of Linux")

SMALL = {"n_actors": 2, "envs_per_actor": 2, "chunk_size": 10, "fetch_interval": 15}
FLAGS = "--env-id", "CartPole-v1", "--total-steps"


def chunks_of(make_actors, args, model):
    """The first six chunks of each environment; θ stays as it is."""
    found = {env: [] for env in range(4)}
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    with contextlib.closing(make_actors(args, 0, space, model)) as actors:
        while any(len(chunks) < 6 for chunks in found.values()):
            for chunk in actors.receive(10):
                found[chunk.env].append(chunk._replace(frames=chunk.frames.copy()))
    return [chunk for chunks in found.values() for chunk in chunks[:6]]


def test_chunks_are_those_of_pipes():
    from common.cluster import connect

    args = dataclasses.replace(apex.Args(**apex.PRESETS["vector"]), **SMALL, ray="local")
    args.env_id = "CartPole-v1"
    torch.manual_seed(0)
    model = apex.QNetwork(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2))
    pipes = chunks_of(apex.Actors, args, model)
    for ours, theirs in zip(chunks_of(connect(args, apex.actor), args, model), pipes, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


def actors():
    """The processes of the actors of this test's machines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RemoteActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_an_actor_and_a_machine_die(tmp_path):
    """Others take their places, and the run goes on with the steps of these alone."""
    from ray.cluster_utils import Cluster

    run_dir = tmp_path / "run"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        machine = cluster.add_node(num_cpus=1)
        flags = [*FLAGS, 10**9, "--ray", cluster.address, "--n-actors", 3, "--run-dir", run_dir]
        with Script(ROOT / "apex.py", [*flags, "--checkpoint-interval", 1000], tmp_path) as script:
            wait_for(lambda: len(actors()) == 3 and (run_dir / "checkpoint.pt").exists())
            cluster.remove_node(machine)
            wait_for(lambda: "starts anew" in script.output("stdout"))
            for process in actors():
                process.kill()
            anew = r"actor (\d) starts anew"
            wait_for(lambda: {*re.findall(anew, script.output("stdout"))} == {*"012"})
            before = checkpoint(run_dir)["step"]  # at most 3,200 more are of the killed ones
            wait_for(lambda: checkpoint(run_dir)["step"] > before + 5000)
            script.signal(signal.SIGINT)
            assert script.end() == 130, script.output()
    finally:
        cluster.shutdown()


def test_ctrl_c_in_a_copy_beside_large_files(tmp_path):
    """They are not sent."""
    shutil.copy(ROOT / "apex.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    for path in (tmp_path / "data.bin", tmp_path / "common.bin"):
        with open(path, "wb") as file:
            file.truncate(2**30)
    flags = [*FLAGS, 10**9, "--ray", "local", "--n-actors", 1, "--run-dir", tmp_path / "run"]
    with Script(tmp_path / "apex.py", [*flags, "--checkpoint-interval", 100], tmp_path) as script:
        wait_for((tmp_path / "run/checkpoint.pt").exists)
        processes = psutil.Process(script.pid).children(recursive=True)
        script.signal(signal.SIGINT)
        assert script.end() == 130, script.output()
    assert checkpoint(tmp_path / "run")["step"] == summary(tmp_path / "run")["steps"] > 0
    wait_for(lambda: not any(process.is_running() for process in processes))
    assert float(re.search(r"package '.*' \(([\d.]+)MiB\)", script.output())[1]) < 1


def test_more_actors_than_cores(tmp_path, capsys):
    flags = *FLAGS, 100, "--ray", "local", "--n-actors", 999, "--run-dir", tmp_path / "run"
    assert run("apex", *flags) == 2
    ray.shutdown()
    assert re.search(r"^--n-actors 999: the cluster has \d+ cores$", capsys.readouterr().err, re.M)


def test_an_actor_that_cannot_start(tmp_path):
    """The environment's module is not on the machines, which get the trainers and common/ alone."""
    flags = "--env-id", "tests.simulators:Run-Plain-v0", "--ray", "local", "--n-actors", 1
    with Script(ROOT / "apex.py", [*flags, "--run-dir", tmp_path / "run"], tmp_path) as script:
        assert script.end() == 1
    assert re.search("apex.py: actor 0 failed(.|\n)*No module named 'tests'", script.output())
