"""Episodes that are played after training: returns, summary.json and agent.gif."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import common.evaluate
from common.evaluate import evaluate, play, record
from common.vec_env import env_seed
from tests.test_vec_env import notes


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Flags of a run on Film, without workers."""
    monkeypatch.setattr(common.evaluate, "n_cores", lambda: 0)
    kwargs = json.dumps({"log": str(tmp_path / "log")})
    flags = {"env_id": "tests.envs:Film-v0", "env_kwargs": kwargs, "run_dir": str(tmp_path)}
    return SimpleNamespace(**flags, seed=3, eval_episodes=3, record=False)


def policy(obs: np.ndarray) -> np.ndarray:
    assert obs.shape[1:] == (3,) and obs.dtype == np.float32 and (obs == 0.5).all()
    return np.full((len(obs), 1), -7.0, np.float32)  # beyond the bounds of the actions


def test_play_counts_first_episodes_and_seeds_apart_from_training(args: Any) -> None:
    """Film gives 5 a step for 2 + seed % 4 steps, later 1000 a step; odd lengths truncate.

    Trainers seed with (seed, step) or (seed, step, process, 1), and 1 more for each environment.
    """
    returns = play(args, policy, 5)
    record(args, policy)
    seeds = notes(Path(args.run_dir, "log"), "seed")
    assert returns.tolist() == [5 * (2 + seed % 4) for seed in seeds[:5]]
    assert len(set(seeds)) == 6 and len(set(returns)) == 4
    training = [env_seed(3, 0), *[env_seed(3, 0, process, 1) for process in range(64)]]
    assert not set(seeds) & {first + i for first in training for i in range(256)}


@pytest.mark.parametrize("before", [{}, {"steps": 70, "status": "completed"}])
def test_summary_and_curve(before: dict, args: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Of returns 1, 2 and 6: mean 3, variance (4 + 1 + 9) / 3."""
    monkeypatch.setattr(common.evaluate, "play", lambda *args: np.array([1.0, 2.0, 6.0]))
    if before:
        (tmp_path / "summary.json").write_text(json.dumps(before))
    evaluate(args, policy)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"episodes": 3, "mean": 3, "std": pytest.approx((14 / 3) ** 0.5), "min": 1, "max": 6}
    assert summary == before | {"eval": expected}
    (point,) = EventAccumulator(str(tmp_path)).Reload().Scalars("eval/return_mean")
    assert (point.value, point.step) == (3, before.get("steps", 0))


def frames_of(gif: Image.Image) -> list[tuple[int, int]]:
    """The brightest column of each frame, and its duration in milliseconds."""
    frames = ImageSequence.Iterator(gif)
    return [(np.asarray(x.convert("L"))[0].argmax(), x.info["duration"]) for x in frames]


@pytest.mark.parametrize(("fps", "every"), [(125, 3), (67, 2), (50, 1), (30, 1), (None, 1)])
def test_a_gif_plays_in_real_time(fps: Any, every: int, args: Any, tmp_path: Path) -> None:
    """100 steps; viewers show a frame for at least 20 ms. Column t is white in step t."""
    args.env_kwargs = json.dumps({"length": 100, "fps": fps})
    args.eval_episodes, args.record = 0, True
    evaluate(args, policy)
    columns, durations = zip(*frames_of(Image.open(tmp_path / "agent.gif")), strict=True)
    assert list(columns) == list(range(0, 100, every)) and min(durations) >= 20
    seconds = 100 / (fps or 30)
    assert sum(durations) / 1000 == pytest.approx(seconds, abs=every * seconds / 100 + 0.01)


def test_the_gif_of_an_atari_game(args: Any, tmp_path: Path) -> None:
    """15 steps a second; 100 frames are 25 steps, less the no-ops at the start."""
    args.env_id, args.env_kwargs = "PongNoFrameskip-v4", '{"max_num_frames_per_episode": 100}'
    shapes = []
    record(args, lambda obs: shapes.append(obs.shape) or np.array([2]))
    gif = Image.open(tmp_path / "agent.gif")
    assert set(shapes) == {(1, 4, 84, 84)} and 17 <= len(shapes) <= 25 and gif.size == (160, 210)
    seconds = sum(duration for _, duration in frames_of(gif)) / 1000
    assert seconds == pytest.approx(len(shapes) / 15, abs=0.08)


def peak(args: Any) -> int:
    """Megabytes of this process. ru_maxrss would start from the peak of the one that started it."""
    record(args, lambda obs: np.zeros((1, 1)))
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory in /proc")
def test_memory_and_size_of_a_gif_of_large_pictures(args: Any, tmp_path: Path) -> None:
    """300 pictures of 1000 x 1000 would be 900 MB."""
    args.env_kwargs = json.dumps({"length": 300, "size": [1000, 1000]})
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(peak, args).result() < 500
    gif = Image.open(tmp_path / "agent.gif")
    assert gif.size == (512, 512) and gif.n_frames == 300
