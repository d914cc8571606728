"""The preset `mario`: its options, its counts with one actor and with four, and the log of its episodes."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.algorithms.exploration import EpsilonGreedy
from echelon.cli.learner import OPTIONS, with_address
from echelon.cli.main import main
from echelon.cli.train import make_parser, parse_config
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.presets.dqn import DqnConfig
from echelon.replay.reader import PriorityColumn
from echelon.roles.plan.replay import transition_layout
from echelon.runs.checkpoint import load_checkpoint, newest_intact
from echelon.runs.episode_log import LOG, PICTURE, EpisodeLog
from echelon.runs.metrics import read_rows
from running import Runs

MIN_SIZE, DECAY = 60, 0.99999975
SMALL = {"replay.min_size": MIN_SIZE, "replay.capacity": 4_000, "network.hidden": (8,), "stop.steps": 600}
LINE = re.compile(
    r"Episode (\d+) - Step (\d+) - Epsilon ([\d.]+) - Mean Reward ([\d.]+) - Mean Length ([\d.]+) - Mean Loss ([\d.]+) "
    r"- Mean Q Value (-?[\d.]+) - Time Delta [\d.]+ - Time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
)


def options(*arguments: str) -> TrainConfig:
    return parse_config(make_parser("echelon train", "", arguments), arguments)


def cartpole(run: Path, shm_dir: Path, *arguments: str, **changes: Any) -> TrainConfig:
    """Returns the preset with its counts, on an environment that is fast."""
    places = {"run.dir": str(run), "shm_dir": str(shm_dir)}
    return replace(options("mario", "CartPole-v1", *arguments), **{**SMALL, **places, **changes})


def test_the_world_has_one_learner_and_the_other_ranks_are_actors() -> None:
    plain, five, three = options("mario"), options("mario", "--world-size", "5"), options("mario", "--world_size=3")
    assert plain == five and plain.env.id == "SuperMarioBros-1-1" and plain.env.kwargs == {"actions": "two"}
    assert (five.actor.num_actors, five.actor.envs, five.acting.mode, five.engine) == (4, 1, "central", "local")
    assert three == replace(plain, **{"actor.num_actors": 2})
    assert plain.evaluation.episodes == 1 and options("mario", "CartPole-v1").evaluation.episodes == 10
    alone = options("mario", "SuperMarioBros-1-2", "--single-process", "--log_interval", "5")
    assert (alone.engine, alone.actor.num_actors, alone.run.log_interval) == ("inline", 1, 5)
    assert alone.env.id == "SuperMarioBros-1-2" and alone.algorithm == plain.algorithm and alone.replay == plain.replay


@pytest.mark.parametrize(("arguments", "named"), [
    (["mario", "--world-size", "1"], "--world-size 1"),
    (["mario", "--world-size", "many"], "--world-size many"),
    (["mario", "--world-size", "5", "--actors", "2"], "actor.num_actors"),
    (["mario", "--world-size", "5", "--single-process"], "--single-process"),
    (["mario", "--single-process", "--engine", "local"], "engine"),
    (["ppo"], "ENV"),
    (["mario", "--replay.samples-per-insert", "0"], "replay.exact"),
    (["mario", "--replay.transport", "tcp", "--replay.checkpoint", "false"], "replay.exact"),
    (["mario", "--algorithm.epsilon-decay", "1.5"], "epsilon_decay"),
    (["apex-dqn", "CartPole-v1", "--algorithm.epsilon-decay", "0.9"], "epsilon_ladder"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        options(*arguments)


def test_arguments_of_the_environment_are_added_to_those_of_the_preset() -> None:
    config = options("mario", "--env-kwargs", '{"noop_max": 30}')
    assert config.env.kwargs == {"actions": "two", "noop_max": 30}
    assert options("mario", "--env.kwargs", '{"actions": "right"}').env.kwargs == {"actions": "right"}


def test_workers_may_learn_with_it() -> None:
    words = with_address(["mario", "--episodes", "3"])
    config = parse_config(make_parser("echelon learner", "", words, OPTIONS), words, OPTIONS)
    assert config.has_workers and config.acting.mode == "local" and not config.replay.exact


def test_epsilon_decays_by_a_factor_at_every_step_of_the_run() -> None:
    config = preset("mario", "CartPole-v1").algorithm
    assert isinstance(config, DqnConfig)
    rule = EpsilonGreedy(config, [0, 3], 4)
    for steps, expected in ((0, 1.0), (162, 0.9999595008150458), (22_003, 0.9945143507382862), (10**8, 0.1)):
        assert config.epsilon(steps) == pytest.approx(expected, rel=1e-12)
        random = rule.at(steps).random
        assert random is not None and random.tolist() == pytest.approx([expected] * 2)


def test_the_replay_takes_little_more_than_its_frames() -> None:
    config = preset("mario", "CartPole-v1")
    from gymnasium.spaces import Box, Discrete

    from echelon.schema import Spaces

    spaces = Spaces(Box(0, 255, (4, 84, 84), "uint8"), Discrete(2))
    layout = transition_layout(replace(config, **{"replay.frames": "stacked"}), spaces)
    used = config.num_shards * (layout.nbytes + PriorityColumn.size(layout.capacity))
    assert config.num_shards * layout.capacity == 100_000 and used <= 1.1 * 100_000 * 84 * 84


@pytest.mark.parametrize("ranks", [["--single-process"], ["--world-size", "5"]])
def test_counts_follow_from_the_steps_however_many_actors_make_them(
    ranks: list[str], tmp_path: Path, shm_dir: Path
) -> None:
    config = cartpole(tmp_path / "run", shm_dir, *ranks, **{"algorithm.target_period": 50})
    summary = echelon.train(config).summary
    steps, replay, num_envs = summary["env_steps"], summary["replay"], config.actor.num_actors
    assert 600 <= steps < 600 + num_envs, "an actor makes at most the step that it has begun"
    assert 0 <= steps - replay["inserted"] <= num_envs, "the newest transition of each is stored with the next row"
    assert summary["updates"] == (replay["inserted"] - MIN_SIZE) // 3
    assert replay["sampled"] == 32 * summary["updates"] and replay["written_off"] == 0
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert all(row["epsilon"] == pytest.approx(DECAY ** row["env_steps"], rel=1e-12) for row in rows)
    assert all(row["updates"] <= max(row["replay.inserted"] - MIN_SIZE, 0) // 3 for row in rows), "never ahead"
    found = newest_intact(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert load_checkpoint(found[0])["algorithm"]["num_learned"] == summary["updates"], "copies to the target follow"


def test_the_end_waits_for_steps_that_have_begun(tmp_path: Path, shm_dir: Path) -> None:
    changes = {"env.id": "toy_envs:DawdlingEnv", "stop.steps": 90, "replay.min_size": 33}
    summary = echelon.train(cartpole(tmp_path / "run", shm_dir, "--world-size", "5", **changes)).summary
    assert summary["updates"] == (summary["replay"]["inserted"] - 33) // 3


def test_a_learner_that_was_killed_repeats_the_updates_that_it_lost(runs: Runs) -> None:
    fields = {"replay.min_size": 60, "network.hidden": "8", "run.checkpoint_interval_s": 1000, "actor.envs": 1}
    run = runs.train("mario", env="CartPole-v1", steps=4_000, **fields)
    run.until(lambda: "learning starts" in run.text(), "the learner learns")
    time.sleep(0.2)  # rows come once a second, too late for the end of the run
    run.kill("learner")
    assert run.code() == 0
    summary = run.summary()
    assert summary["restarts"] == 1 and summary["updates"] == (summary["replay"]["inserted"] - 60) // 3


def test_the_columns_of_the_log_stay_apart_however_large_its_numbers(tmp_path: Path) -> None:
    row = {"episodes": 1, "env_steps": 123_456_789, "updates": 0, "return_mean": -2e9, "length_mean": 1e16}
    log = EpisodeLog(tmp_path, options("mario"), {})
    log.note(row)
    log.note({**row, "episodes": 123_456_789})
    log.close()
    again = EpisodeLog(tmp_path, options("mario"), {"episodes": 123_456_789})
    again.close()
    assert [line.step for line in again.lines] == [123_456_789] * 2 and again.lines[1].mean_reward == -2e9


@pytest.mark.parametrize(
    ("name", "missing"), [("ppo", {"Epsilon", "MeanQValue"}), ("sac", {"Epsilon"}), ("apex-dqn", set())]
)
def test_the_log_has_no_columns_of_what_a_preset_does_not_have(name: str, missing: set[str], tmp_path: Path) -> None:
    config = replace(preset(name, "Pendulum-v1"), **{"run.log_interval": 1})
    row = {"episodes": 1, "env_steps": 200, "updates": 3, "return_mean": -5.0, "length_mean": 200.0, "loss.total": 2.0}
    log = EpisodeLog(tmp_path, config, {})
    line = log.note({**row, "epsilon": 0.5, "q_mean": 7.0})
    log.close()
    header, record = (tmp_path / LOG).read_text().splitlines()
    assert {"Epsilon", "MeanQValue"} - {*header.split()} == missing
    assert len(record.split()) == len(header.split()) == len(line.split(" - ")) and "Mean Loss 2.0" in line
    assert ("Epsilon" in line, "Mean Q Value" in line) == ("Epsilon" not in missing, "MeanQValue" not in missing)
    again = EpisodeLog(tmp_path, config, {"episodes": 1})
    again.close()
    assert (tmp_path / LOG).read_text().splitlines() == [header, record]


def test_a_log_with_more_columns_than_the_preset_has_is_continued_without_them(tmp_path: Path) -> None:
    """As an older release wrote it."""
    row = {"episodes": 1, "env_steps": 200, "updates": 0, "return_mean": -5.0, "length_mean": 200.0}
    older, config = (replace(preset(name, "CartPole-v1"), **{"run.log_interval": 1}) for name in ("dqn", "ppo"))
    log = EpisodeLog(tmp_path, older, {})
    log.note(row)
    log.close()
    again = EpisodeLog(tmp_path, config, {"episodes": 1})
    again.close()
    header, record = (tmp_path / LOG).read_text().splitlines()
    assert len(again.lines) == 1 and "MeanQValue" not in header and len(header.split()) == len(record.split())


@pytest.mark.parametrize("ranks", [["--single-process"], ["--world-size", "3"]])
def test_a_line_every_few_episodes_is_printed_and_kept(
    ranks: list[str], tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, where = tmp_path / "run", ["--shm-dir", str(shm_dir), "--replay.min-size", "60", "--network.hidden", "8"]
    train = ["train", "mario", "CartPole-v1", *ranks, *where, "--log-interval", "5", "--run-dir", str(run)]
    assert main([*train, "--episodes", "22"]) == 0
    out = capsys.readouterr().out
    before = out.partition("\nEpisode ")[0]
    assert re.findall(r"Rank (\d) start", before) == [str(rank) for rank in range(2 if "3" not in ranks else 3)]
    assert not re.search(r"\d steps/s \|", out), "the log takes the place of the status lines"
    lines = [match for line in out.splitlines() if (match := LINE.fullmatch(line))]
    first = [int(line[1]) for line in lines]
    assert first[0] < 5 and len(first) == 5 and all(a // 5 + 1 == b // 5 for a, b in pairwise(first))
    for line in lines:
        assert float(line[3]) == pytest.approx(DECAY ** int(line[2])) and line[4] == line[5], "1 per step"
        assert (float(line[6]) > 0.0) or int(line[2]) < 200, "losses once there are updates"
    header, *records = (run / LOG).read_text().splitlines()
    assert " ".join(header.split()) == "Episode Step Epsilon MeanReward MeanLength MeanLoss MeanQValue TimeDelta Time"
    assert [int(record.split()[0]) for record in records] == first
    assert (run / PICTURE).read_bytes().startswith(b"\x89PNG")
    episodes = json.loads((run / "summary.json").read_text())["episodes"]
    assert 22 <= episodes < 25
    with (run / LOG).open("a") as file:  # lines of episodes that a crash lost, and a torn one
        file.write(records[-1].replace(records[-1].split()[0], "900", 1) + "\nEpis")
    assert main(["resume", str(run), "--episodes", "40"]) == 0
    after = [int(record.split()[0]) for record in (run / LOG).read_text().splitlines()[1:]]
    assert after[:5] == first and after[5] // 5 == 5 and all(a < b for a, b in pairwise(after)) and after[-1] < 45


def test_a_short_run_prints_every_rank_before_its_first_episode(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--shm-dir", str(shm_dir), "--run-dir", str(tmp_path / "run"), "--evaluation.episodes", "0"]
    words = ["--single-process", "--steps", "60", "--replay.min-size", "40", "--network.hidden", "8", *where]
    assert main(["train", "mario", "CartPole-v1", *words]) == 0
    before, found, after = capsys.readouterr().out.partition("Episode 0 - ")
    assert found and re.findall(r"Rank (\d) start", before) == ["0", "1"] and "Rank" not in after
