"""`echelon play`: what it writes and shows, and what it tells instead."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

import echelon
from echelon.cli import output
from echelon.cli.main import main
from echelon.config import replace
from echelon.evaluation import info_texts
from echelon.video import Cell, VideoConfig, compose

TINY = {"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "network.hidden": (8,)}
PPO = {"algorithm.minibatches": 2, "algorithm.epochs": 1}
DQN = {"replay.min_size": 64, "replay.batch": 16, "replay.capacity": 1000, "algorithm.epsilon_end": 1.0}


def trained(path: Path, name: str, env: str, **changes: Any) -> Path:
    """A run folder of a training that was too short to learn anything."""
    changes = {**TINY, "env.id": env, "run.dir": str(path), "evaluation.episodes": 0, "stop.steps": 100, **changes}
    echelon.train(replace(echelon.preset(name, "CartPole-v1"), **changes), output=io.StringIO())
    return path


@pytest.fixture(scope="module")
def cart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("cart") / "run", "ppo", "CartPole-v1", **PPO)


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent policy that observes a Dict."""
    core = {"network.core": "lstm", "network.core_size": 8}
    return trained(tmp_path_factory.mktemp("painted") / "run", "ppo", "toy_envs:PaintedEnv", **PPO, **core)


def played(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """Runs `echelon play`; returns what it prints as JSON."""
    assert main(["play", *map(str, words), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """Runs `echelon play`, which must end with `code` and one line; returns the line."""
    assert main(["play", *map(str, words)]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("echelon: ") and (len(lines) == 1 or code == 1), lines
    return lines[0]


def mp4_frames(path: str | Path) -> np.ndarray[Any, Any]:
    to_ppm = ["-f", "image2pipe", "-c:v", "ppm", "-"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path), *to_ppm]
    data = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=60.0).stdout
    _, size, _, _ = data.split(b"\n", 3)  # P6, width and height, 255; the header of every frame is the same
    width, height = map(int, size.split())
    frames = np.frombuffer(data, np.uint8).reshape(-1, len(data.split(b"\n255\n", 1)[0]) + 5 + 3 * width * height)
    return frames[:, -3 * width * height :].reshape(-1, height, width, 3)


def gif_frames(path: str | Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as gif:
        frames = []
        for i in range(gif.n_frames):  # type: ignore[attr-defined]
            gif.seek(i)
            frames.append(np.asarray(gif.convert("RGB")))
        return np.stack(frames)


def test_it_writes_every_step_of_the_newest_weights(cart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = played(capsys, cart, "--seed", "4")
    mp4, gif = map(Path, score["files"])
    (checkpoint,) = (cart / "checkpoints").iterdir()
    assert [mp4, gif] == [cart / "videos" / f"{checkpoint.name}-4.{kind}" for kind in ("mp4", "gif")]
    assert sorted(path.name for path in mp4.parent.iterdir()) == sorted([mp4.name, gif.name]), "nothing else is left"
    expected = echelon.evaluate(cart, episodes=1, seed=4)
    assert {name: score[name] for name in expected} == expected
    frames = mp4_frames(mp4)
    num_pictures = int(score["length_mean"]) + 1
    assert len(frames) == num_pictures and frames.shape[2] == 600 and 400 < frames.shape[1] < 520
    assert frames[0, :390, :].mean() > 200 and frames[0, 410:, :].mean() < 60, "white above the caption"
    assert imageio_ffmpeg.count_frames_and_secs(str(mp4))[1] == pytest.approx(num_pictures / 50, abs=0.03)
    small = gif_frames(gif)
    assert len(small) == -(-num_pictures // 4) and small.shape[2] == 256, "at most 15 of 50 steps per second"
    changes = np.abs(frames[1:].astype(int) - frames[:-1]).max((1, 2, 3))
    assert (changes[:-1] > 60).all(), "the step is counted in every picture"


def test_the_options_of_the_picture(painted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture of 64x40 pixels is enlarged by a whole factor, and the gif has its exact colours."""
    one = played(capsys, painted, "--no-overlay", "--output", tmp_path / "plain.gif", "--gif-width", "128")
    assert one["files"] == [str(tmp_path / "plain.gif")] and one["length_mean"] == 7
    plain = gif_frames(tmp_path / "plain.gif")
    assert plain.shape == (4, 80, 128, 3), "every second of 8 pictures"
    assert [(frame[0, :, 0] > 128).sum() for frame in plain] == [16, 48, 80, 112]
    two = played(
        capsys, painted, "--output", tmp_path / "both", "--gif-width", "128", "--gif-fps", "60", "--fps", "40",
        "--width", "320", "--episodes", "2",
    )  # fmt: skip
    assert two["files"] == [str(tmp_path / "both.mp4"), str(tmp_path / "both.gif")] and two["episodes"] == 2
    captioned = gif_frames(tmp_path / "both.gif")
    assert len(captioned) == 16 and captioned.shape[1] > 80 + 4 * 9, "four rows of text"
    assert (captioned[::2, :80][:4] == plain).all(), "the caption covers nothing"
    assert (captioned[1, 80:] != captioned[2, 80:]).any()
    frames = mp4_frames(tmp_path / "both.mp4")
    assert len(frames) == 16 and frames.shape[2] == 320
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "both.mp4"))[1] == pytest.approx(0.4, abs=0.03)


def test_a_video_of_another_environment_has_its_name(painted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [], ["--env", "toy_envs:PaintedEnv"], ["--env-kwargs", '{"length": 3}']
    own, other, short = (Path(played(capsys, painted, *words)["files"][0]) for words in changes)
    assert own.exists() and other.exists() and short.exists()
    assert [other.name, short.name] == [f"{own.stem}-{change}.mp4" for change in ("toy_envs-PaintedEnv", "length-3")]


def test_a_recurrent_policy_with_a_tree_is_played_as_it_is_evaluated(
    painted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = played(capsys, painted, "--output", tmp_path / "one.mp4")
    assert score["return_mean"] == echelon.evaluate(painted, episodes=1)["return_mean"]


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_actions_are_greedy_or_sampled(
    name: str, painted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward is the action, so the returns of 7 steps tell them apart: dqn explores with epsilon 1 here."""
    run = painted if name == "ppo" else trained(tmp_path / "run", "dqn", "toy_envs:PaintedEnv", **DQN)
    words = [run, "--output", tmp_path / "one.gif", "--episodes", "3"]
    greedy, sampled = played(capsys, *words, "--greedy"), played(capsys, *words, "--sample")
    assert greedy["return_std"] == 0.0 < sampled["return_std"]
    assert played(capsys, *words) == greedy and played(capsys, *words, "--sample") == sampled, "the seed decides"


def test_a_caption_shows_what_super_mario_bros_reports() -> None:
    info = {"x_pos": 9, "time": 380, "score": 1200, "coins": 3, "life": 2, "world": 1, "stage": 4, "flag_get": True}
    texts = {"stage": "1-4", "score": "1,200", "time": "380", "coins": "3", "life": "2", "flag": "yes"}
    assert info_texts(info) == texts
    assert info_texts({"score": np.int32(5), "time": None, "TimeLimit.truncated": True}) == {"score": "5"}


def test_a_text_that_is_too_long_stays_in_its_place() -> None:
    picture = np.zeros((10, 300, 3), np.uint8)
    short, long = (np.asarray(compose(picture, [[Cell("a", text), Cell("b", "5")]], 300)) for text in ("1", "W" * 99))
    assert (short[:, 105:] == long[:, 105:]).all() and (short != long).any()


def test_older_weights_are_played_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", "ppo", "toy_envs:PaintedEnv", **PPO, **{"run.checkpoint_interval_s": 0.0})
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert Path(played(capsys, run, "--checkpoint", names[0])["files"][0]).name == f"{names[0]}-1.mp4"
    assert Path(played(capsys, run, "--checkpoint", "weights.safetensors")["files"][0]).name == "weights-1.mp4"
    path = run / "checkpoints" / names[0]
    for words in ([path], [run, "--checkpoint", path]):
        [file] = played(capsys, *words, "--steps", "2", "--output", tmp_path / "path.gif")["files"]
        assert Path(file).is_file()
        assert main(["eval", *map(str, words), "--episodes", "1"]) == 0
        assert capsys.readouterr().out.startswith(f"{names[0]} (")
    assert "is not a run folder" in refused(capsys, path, "--checkpoint", "best")
    line = refused(capsys, run, "--checkpoint", "../checkpoints/step_9")
    assert "step_9" in line and all(name in line for name in [*names, "weights.safetensors"])


def test_eval_names_the_checkpoint_that_it_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"run.checkpoint_interval_s": 0.0, "optimizer.learning_rate": 0.1, "run.keep_checkpoints": 100}
    run = trained(tmp_path / "run", "ppo", "toy_envs:PaintedEnv", **PPO, **fields)
    first, *_, last = sorted(path.name for path in (run / "checkpoints").iterdir())

    def evaluated(*words: str) -> dict[str, Any]:
        assert main(["eval", str(run), "--episodes", "3", "--json", *words]) == 0
        score: dict[str, Any] = json.loads(capsys.readouterr().out)
        return score

    newest = evaluated()
    assert (newest["checkpoint"], newest["env_steps"]) == (last, int(last.removeprefix("step_")))
    assert evaluated("--checkpoint", "newest") == newest
    old = evaluated("--checkpoint", first)
    assert (old["checkpoint"], old["env_steps"]) == (first, int(first.removeprefix("step_")))
    assert evaluated("--checkpoint", "weights.safetensors")["return_mean"] == newest["return_mean"]
    assert main(["eval", str(run), "--checkpoint", first, "--sample"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{first} ({old['env_steps']:,} steps), sampled actions: return ") and "10 episodes" in line
    assert main(["eval", str(run), "--checkpoint", "step_9"]) == 2
    assert first in (told := capsys.readouterr().err) and "newest" in told


def test_eval_cuts_long_episodes_and_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", "ppo", "toy_envs:CounterEnv", **PPO)
    monkeypatch.setattr(output, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(output, "LINE_INTERVAL_S", 0.0)
    words = ["eval", str(run), "--episodes", "3", "--env", "toy_envs:make_one_that_ends"]
    assert main([*words, "--steps", "5", "--json"]) == 0
    shown = capsys.readouterr()
    score = json.loads(shown.out)
    assert (score["episodes"], score["length_mean"]) == (3, pytest.approx((5 + 5 + 3) / 3))
    lines = shown.err.splitlines()
    assert lines[0] == "playing: 0 of 3 episodes, 3 steps"
    assert lines[-1] == "playing: 1 of 3 episodes, 13 steps"
    assert main([*words, "--steps", "-1"]) == 2 and "steps=-1" in capsys.readouterr().err
    steps: list[tuple[int, int]] = []
    echelon.evaluate(run, episodes=2, steps=2, progress=lambda ended, total: steps.append((ended, total)))
    assert steps == [(0, 2), (0, 4)]


def test_eval_samples_as_the_policy_does_at_the_end_of_training(cart: Path) -> None:
    """Greedy actions do not depend on the seed of the sampling; sampled ones do."""
    greedy, sampled = (echelon.evaluate(cart, episodes=20, greedy=choice) for choice in (True, False))
    assert greedy["length_mean"] != sampled["length_mean"]
    assert sampled == echelon.evaluate(cart, episodes=20, greedy=False), "the seed decides"


def test_a_run_starts_from_a_checkpoint_by_its_path(tmp_path: Path, cart: Path) -> None:
    (checkpoint,) = (cart / "checkpoints").iterdir()
    fields = {"run.init_from": str(checkpoint), "optimizer.learning_rate": 1e-12}
    run = trained(tmp_path / "run", "ppo", "CartPole-v1", **PPO, **fields)
    assert echelon.evaluate(run, episodes=3)["return_mean"] == echelon.evaluate(cart, episodes=3)["return_mean"]


def test_long_episodes_are_cut(painted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = played(capsys, painted, "--steps", "3", "--episodes", "2", "--output", tmp_path / "cut.mp4")
    assert score["length_mean"] == 3 and len(mp4_frames(tmp_path / "cut.mp4")) == 8


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--episodes", "0"], "episodes=0"),
        (["--steps", "-1"], "steps=-1"),
        (["--fps", "nan"], "fps=nan"),
        (["--fps", "0"], "fps=0"),
        (["--gif-fps", "1e9"], "gif_fps=1e+09"),
        (["--width", "3"], "width=3"),
        (["--gif-width", "999999"], "gif_width=999999"),
        (["--greedy", "--sample"], "--greedy"),
        (["--output", "nowhere/file"], "nowhere/file.mp4"),
        (["--env", "MountainCar-v0"], "do not fit MountainCar-v0, which observes Box"),
        (["--env", "Pendulum-v1"], "and acts in Box(-2.0, 2.0, (1,), float32), not Discrete(2)"),
        (["--env", "MountainCar-v0"], "(--env, or env=)"),
        (["--env", "toy_envs:CounterEnv", "--env-kwargs", '{"length": 3}'], "with {'length': 3}, which observes"),
        (["--env", "toy_envs:CounterEnv", "--env-kwargs", '{"length": 3}'], "(--env and --env-kwargs, or env="),
        (["--env", "gone.mask:Masked(size=4)"], '"gone.mask:Masked(size=4)" was not found'),
        (["--env", "gone.mask:Masked(size=4)"], 'or name a file: "path/to/mask.py:Masked(size=4)"'),
        (["--env", "toy_envs:StillEnv"], "cannot be rendered"),
        (["--env", "toy_envs:UnpaintableEnv"], "no paint"),
        (["--window"], "no display"),
    ],
    ids=" ".join,
)
def test_bad_input_is_told_in_a_line(
    words: list[str], fragment: str, cart: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(cart.rglob("*"))
    assert fragment in refused(capsys, cart, *words)
    assert sorted(cart.rglob("*")) == before, "nothing is left"


@pytest.mark.parametrize(("module", "package"), [("imageio_ffmpeg", "imageio-ffmpeg"), ("PIL.Image", "pillow")])
def test_a_missing_package_is_named(
    module: str, package: str, cart: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = refused(capsys, cart)
    assert package in error and 'pip install "echelon[video]"' in error


def test_a_window_needs_pygame(cart: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":77")
    monkeypatch.setitem(sys.modules, "pygame", None)
    error = refused(capsys, cart, "--window")
    assert "pygame" in error and 'pip install "echelon[video]"' in error


@pytest.mark.parametrize(("words", "length"), [([], 7), (["--env", "toy_envs:make_closing"], 3)])
def test_a_window_shows_the_episode_until_it_is_closed(
    words: list[str],
    length: int,
    painted: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    import pygame

    shown = []
    flip = pygame.display.flip
    monkeypatch.setattr(pygame.display, "flip", lambda: (shown.append(pygame.display.get_window_size()), flip()))
    score = played(capsys, painted, "--window", "--fps", "200", "--episodes", "2", "--width", "128", *words)
    assert score["files"] == [] and score["length_mean"] == length
    assert score["episodes"] == (2 if length == 7 else 1)
    assert len(shown) == score["episodes"] * (length + 1) and {size[0] for size in shown} == {128}


def test_a_failure_leaves_nothing_half_written(
    painted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that raises, and an ffmpeg that ends at once, each leave the older video."""
    (tmp_path / "one.mp4").write_bytes(b"older")
    words = [painted, "--output", tmp_path / "one.mp4"]
    assert "burnt down" in refused(capsys, *words, "--env", "toy_envs:make_burning", code=1)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "/bin/false")
    assert "ffmpeg could not write" in refused(capsys, *words, code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["one.mp4"]
    assert (tmp_path / "one.mp4").read_bytes() == b"older"


def test_python_plays_too(painted: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    steps: list[int] = []
    video = VideoConfig(output=str(tmp_path / "one.gif"))
    score = echelon.play(painted, video, episodes=2, report=lines.append, progress=steps.append)
    assert score["files"] == [str(tmp_path / "one.gif")] and steps == list(range(1, 15))
    assert any("episode 2 of 2" in line for line in lines) and str(tmp_path / "one.gif") in lines[-1]
