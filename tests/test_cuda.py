"""On a GPU, CUDA graphs change no number. As a script: test_cuda.py TRAINER FLAGS, without them."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "--n-envs 4 --n-workers 0 --t-max 10 --total-steps 200 --eval-episodes 0 --device cuda"


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")
@pytest.mark.parametrize("name", ["paac", "ppo_batch"])
@pytest.mark.parametrize("task", ["PongNoFrameskip-v4", "CartPole-v1", "Pendulum-v1"])
def test_cuda_graphs_change_nothing(name, task, tmp_path):
    models = []
    for script in (ROOT / f"{name}.py", Path(__file__)):
        argv = [sys.executable, str(script), *([] if script.stem == name else [name])]
        argv += [*FLAGS.split(), "--env-id", task, "--run-dir", str(tmp_path / script.stem)]
        subprocess.run(argv, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, check=True)
        with open(tmp_path / script.stem / "checkpoint.pt", "rb") as file:
            models.append(torch.load(file, map_location="cpu", weights_only=True)["model"])
    torch.testing.assert_close(*models, rtol=0, atol=1e-5)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    trainer = importlib.import_module(sys.argv[1])
    pytest.MonkeyPatch().setattr(trainer, "cuda_graph", lambda model, obs: model)
    sys.exit(trainer.main(sys.argv[2:]))
