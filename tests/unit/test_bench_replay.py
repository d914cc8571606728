"""`echelon bench replay`: its arguments, and its measurements in each mode."""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echelon.bench import replay_frames as frames
from echelon.bench import replay_writers as writers
from echelon.bench.harness import Measure
from echelon.bench.processes import Processes
from echelon.bench.replay import FACTS, ReplayBenchmark, ReplaySetting, Result
from echelon.bench.replay_buffers import (
    FILL,
    LARGEST,
    NUM_DRAWS,
    OPERATIONS,
    Chunk,
    CpprbBuffer,
    EchelonBuffer,
    Pool,
    Turns,
    checksum,
    shard_layout,
)
from echelon.cli.main import main
from echelon.errors import RunError
from echelon.replay.reader import ShardReader

Array = np.ndarray[Any, Any]
SMALL = ["--capacity", "1024", "--batch", "32", "--chunk", "16", "--seconds", "0.02", "--rounds", "2"]
TINY = ReplaySetting(capacity=1024, batch=32, chunk=16, seconds=0.02, rounds=2, peer="none")


def ignore(num_done: int, total: int) -> None:
    assert 0 <= num_done <= total


@pytest.fixture
def fake_cpprb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of cpprb's name and shape, which keeps what it is given."""
    package = tmp_path / "peer" / "cpprb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import numpy as np\n"
        "class PrioritizedReplayBuffer:\n"
        "    def __init__(self, size, env_dict, alpha):\n"
        "        self.size, self.env_dict, self.alpha, self.added, self.updated = size, env_dict, alpha, [], []\n"
        "    def add(self, *, priorities, **fields): self.added.append((priorities, fields))\n"
        "    def sample(self, batch_size, beta): return {'indexes': np.arange(batch_size), 'weights': None}\n"
        "    def update_priorities(self, indexes, priorities): self.updated.append((indexes, priorities))\n"
        "class MPPrioritizedReplayBuffer(PrioritizedReplayBuffer):\n"
        "    def __init__(self, size, env_dict, alpha, ctx): super().__init__(size, env_dict, alpha)\n"
        "    def add(self, *, priorities, **fields):\n"
        "        assert len(priorities) == len(fields['action']) and self.alpha != 0.125\n"
    )
    info = tmp_path / "peer" / "cpprb-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpprb\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(package.parent))
    import cpprb  # type: ignore[import-not-found]

    yield cpprb
    del sys.modules["cpprb"]


def test_the_defaults_are_the_ones_that_are_talked_about() -> None:
    setting = ReplaySetting()
    assert (setting.capacity, setting.batch, setting.chunk, setting.observation) == (2**20, 512, 64, 8)
    assert (setting.alpha, setting.rate, setting.peer) == (0.6, 25_000.0, "cpprb")
    assert (setting.mode, setting.num_shards) == ("process", 1)
    assert (ReplaySetting(writers=4).mode, ReplaySetting(writers=4).num_shards) == ("writers", 4)


class TestItems:
    def test_chunks_fit_the_layout_and_the_checksum_is_exact(self) -> None:
        pool = Pool(TINY, 16)
        first, second = pool.take(), pool.take()
        assert first is not second and 2 <= len(pool.chunks) <= 256
        assert set(first.fields) == {"observation", "next_observation", "action", "reward", "discount"}
        fields = first.fields | {"number": np.arange(16)}
        expected = [sum(int(x) for value in fields.values() for x in np.ravel(value[row])) for row in range(16)]
        assert checksum(fields).tolist() == expected and max(expected) < 19 * LARGEST
        assert (first.priorities > 0).all()

    def test_large_observations_make_few_chunks(self) -> None:
        assert len(Pool(ReplaySetting(observation=1 << 16), 64).chunks) == 2


class Counter:
    """A buffer whose every call takes its time on a clock of our own."""

    name = "counter"

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[str]()

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def _take(self, what: str, seconds: float) -> None:
        self.calls.append(what)
        self.now += seconds

    def insert(self, chunk: Chunk) -> None:
        self._take("insert", 0.25)

    def sample(self) -> str:
        self._take("sample", 0.5)
        return "keys"

    def update(self, keys: Any, priorities: Array) -> None:
        assert keys == "keys" and len(priorities) == TINY.batch
        self._take("update", 1.0)


class TestInOneProcess:
    def test_rates_are_items_over_the_time_of_the_operation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buffer = Counter()
        monkeypatch.setattr("echelon.bench.harness.time", buffer)
        turns = Turns(dataclasses.replace(TINY, capacity=2 * FILL), buffer)
        assert buffer.calls == ["insert", "insert"]
        assert turns.measure("insert", 2.0) == 16 / 0.25
        assert turns.measure("sample", 2.0) == 32 / 0.5
        buffer.calls.clear()
        assert turns.measure("update", 3.0) == 32 / 1.0  # what is drawn for it is not timed
        assert buffer.calls == ["sample"] * NUM_DRAWS + ["update"] * 3
        assert turns.measure("sample+update", 3.0) == 32 / 1.5
        buffer.calls.clear()
        assert turns.measure("mixed", 3.0) == 32 / 1.75
        assert buffer.calls == ["insert", "sample", "update"] * 2

    @pytest.mark.parametrize("shards", [1, 3])
    def test_our_buffer_is_full_and_takes_part_in_everything(self, shards: int) -> None:
        setting = dataclasses.replace(TINY, shards=shards)
        buffer = EchelonBuffer.alone(setting)
        turns = Turns(setting, buffer)
        assert buffer.replay.sizes == [1024 // shards] * shards
        mass, heads = buffer.replay.mass, [buffer.replay.window(shard)[1] for shard in range(shards)]
        for name in OPERATIONS:
            assert turns.measure(name, 1e-6) > 0
        assert buffer.replay.mass.total != mass.total
        after = [buffer.replay.window(shard)[1] for shard in range(shards)]
        assert sum(after) == sum(heads) + 2 * setting.chunk  # one insert alone, one of `mixed`

    def test_without_the_peer_a_line_says_so_and_the_rest_runs(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echelon.bench.replay.find_spec", lambda name: None)
        assert main(["bench", "replay", *SMALL]) == 0
        out, err = capsys.readouterr()
        assert err.startswith("cpprb is not installed") and "echelon[bench-replay]" in err
        assert all(f"{name} " in out for name in OPERATIONS) and "ratio" not in out
        assert main(["bench", "replay", *SMALL, "--peer", "none"]) == 0
        assert capsys.readouterr().err == ""

    def test_the_peer_gets_the_same_items(self, fake_cpprb: Any) -> None:
        setting = dataclasses.replace(TINY, peer="cpprb")
        peer = CpprbBuffer(setting)
        assert setting.has_peer and not TINY.has_peer and peer.name == "cpprb 1.2.3"
        assert (peer.buffer.size, peer.buffer.alpha) == (1024, 0.6)
        assert peer.buffer.env_dict["observation"] == {"shape": (8,), "dtype": np.float32}
        assert peer.buffer.env_dict["action"] == {"shape": 1, "dtype": np.int64}
        chunk = Pool(setting, 16).take()
        peer.insert(chunk)
        ((priorities, fields),) = peer.buffer.added
        assert priorities is chunk.priorities and fields == chunk.fields
        keys = peer.sample()
        peer.update(keys, np.ones(32))
        assert len(keys) == 32 and peer.buffer.updated[0][0] is keys

    def test_both_stand_in_the_table_and_the_report(
        self, fake_cpprb: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "r.json"
        assert main(["bench", "replay", *SMALL, "--output", str(path)]) == 0
        out, err = capsys.readouterr()
        assert "cpprb 1.2.3" in out and out.count("×") == 5 and f"echelon bench plot {path}" in err
        report = json.loads(path.read_text())
        assert report["bench"] == "replay" and report["setting"]["capacity"] == 1024 and report["hardware"]["cores"]
        (run,) = report["runs"]
        assert [m["name"] for m in run["measures"]] == list(OPERATIONS)
        for measure in run["measures"]:
            assert set(measure["by"]) == {"echelon", "cpprb 1.2.3"} and measure["unit"] == "items/s"
            for spread in measure["by"].values():
                assert 0 < spread["low"] <= spread["median"] <= spread["high"]


class TestWriters:
    def test_a_learner_reads_what_writers_append_and_finds_nothing_torn(
        self, shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "w.json"
        arguments = [*SMALL, "--writers", "2", "--rate", "1e5", "--shm-dir", str(shm_dir), "--output", str(path)]
        assert main(["bench", "replay", *arguments]) == 0
        (run,) = json.loads(path.read_text())["runs"]
        assert [m["name"] for m in run["measures"]] == ["insert by the writers", writers.CLOCK, writers.PROCESSOR]
        assert run["facts"]["num_torn"] == 0 and run["facts"]["num_checked"] >= 3 * 32
        assert "items torn" in capsys.readouterr().out
        assert list(shm_dir.iterdir()) == []

    def test_the_peer_is_written_by_as_many(self, fake_cpprb: Any, shm_dir: Path) -> None:
        # Rounds so long that every writer gets a core in each: to a round without an insert there is no ratio.
        setting = dataclasses.replace(TINY, writers=2, peer="cpprb", shm_dir=str(shm_dir), seconds=1.0)
        result = writers.run(setting, ignore)
        for measure in result.measures:
            assert list(measure.by) == ["echelon", "cpprb 1.2.3"] and measure.ratio is not None
        assert multiprocessing.active_children() == []

    def test_a_writer_of_the_peer_that_fails_is_told(self, fake_cpprb: Any) -> None:
        setting = dataclasses.replace(TINY, writers=1, peer="cpprb", alpha=0.125)
        with pytest.raises(RunError, match=r"a writer of cpprb 1\.2\.3 exited with code 1"):
            writers.measure_peer(setting, ignore)
        assert multiprocessing.active_children() == []

    def test_torn_items_are_counted_and_fail_the_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = Result(
            (Measure.of("sample+update", "items/s", {"echelon": [1.0]}),), {"num_checked": 9, "num_torn": 2}
        )
        monkeypatch.setattr(ReplayBenchmark, "measure", lambda self, setting, progress: result)
        assert main(["bench", "replay", *SMALL, "--writers", "1"]) == 1
        assert "2 items were torn" in capsys.readouterr().err

    def test_what_does_not_belong_together_is_torn(self, shm_dir: Path) -> None:
        setting = dataclasses.replace(TINY, writers=1)
        writer = writers.Writer({"setting": dataclasses.asdict(setting), "session": str(shm_dir), "index": 0})
        while writer.writer.head < setting.capacity:
            assert writer.step(0.0)
        layout = shard_layout(setting, checked=True)
        buffer = writers.SharedBuffer(setting, [ShardReader.at(shm_dir, 0, layout)])
        for _ in range(3):
            buffer.update(buffer.sample(), np.ones(32))
            buffer.look()
        assert buffer.num_checked == 96 and buffer.num_torn == 0
        writer.writer.shard.items.columns["next_observation"][:, 3] += 1  # as if overwritten half-way
        buffer.sample()
        buffer.look()
        assert buffer.num_checked == 128 and buffer.num_torn == 32

    def test_a_writer_fills_its_shard_and_then_keeps_its_rate(
        self, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=100.0, slept=[])
        fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.slept.append)
        monkeypatch.setattr(writers, "time", fake)
        setting = dataclasses.replace(TINY, writers=1, rate=1600.0)  # a chunk every 10 ms
        writer = writers.Writer({"setting": dataclasses.asdict(setting), "session": str(shm_dir), "index": 0})
        for _ in range(1024 // 16):
            assert writer.step(0.1)
        assert writer.step(0.1) and not writer.step(0.1)
        assert clock.slept == [pytest.approx(0.01)]
        clock.now += 0.0301  # it was kept from running: three chunks are due
        assert [writer.step(0.1) for _ in range(4)] == [True, True, True, False]
        assert writer.writer.head == 1024 + 4 * 16

    def test_a_writer_that_fails_is_told(self, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def start_writers(setting: ReplaySetting, processes: Processes) -> None:
            processes.start("writer-0", "echelon.bench.replay_writers:Writer", {"setting": {}})

        monkeypatch.setattr(writers, "start_writers", start_writers)
        with pytest.raises(RunError, match="writer-0 failed: KeyError: 'index'"):
            writers.run(dataclasses.replace(TINY, writers=1, shm_dir=str(shm_dir)), ignore)
        assert list(shm_dir.iterdir()) == []


class TestFrames:
    def test_every_frame_is_stored_once_and_the_memory_is_measured(self, shm_dir: Path) -> None:
        setting = dataclasses.replace(TINY, frames="48x64x4", capacity=10_000, shm_dir=str(shm_dir))
        result = frames.run(setting, ignore)
        facts = result.facts
        assert set(facts) <= set(FACTS) and facts["num_transitions"] == 10_000
        assert facts["num_torn"] == 0 and facts["num_checked"] == 2 * 32
        # One frame, a twentieth more of room, and the fields of the item, which count beside a frame as small as this.
        assert 1.0 < facts["frames_per_transition"] < 1.4 and facts["frames_per_unshared_transition"] == 8
        assert [m.name for m in result.measures] == ["insert", "sample+update", "memory per transition"]
        assert facts["process_resident_gb"] > facts["replay_resident_gb"] > 10_000 * 48 * 64 / 1e9
        assert list(shm_dir.iterdir()) == []

    def test_resident_memory_is_what_the_process_has_touched(self) -> None:
        before = frames.resident_bytes()
        memory = mmap.mmap(-1, 1 << 26)  # malloc might give what somebody has touched before
        untouched = frames.resident_bytes()
        np.frombuffer(memory, np.uint8)[:] = 1
        assert untouched - before < 1 << 25 < frames.resident_bytes() - untouched

    def test_stacks_that_do_not_follow_each_other_are_found(self) -> None:
        environments = frames.Environments((4, 3, 4))
        stacks = [environments.stacks.copy()]
        for _ in range(9):
            assert environments.step().all()
            stacks.append(environments.stacks.copy())
        for now, later in itertools.pairwise(stacks):  # the first ones are black but for the newest frames
            assert frames.is_whole(now, later).all()
        assert not frames.is_whole(stacks[5], stacks[7]).any()
        assert not frames.is_whole(stacks[5][:, [0, 1, 3, 2]], stacks[6]).any()
        mixed = stacks[6].copy()
        mixed[2, 1] = stacks[8][2, 1]
        assert frames.is_whole(stacks[5], mixed).tolist() == [env != 2 for env in range(frames.NUM_ENVS)]

    def test_environments_end_one_after_the_other(self) -> None:
        environments = frames.Environments((4, 3, 4))
        stepped = np.array([environments.step() for _ in range(frames.EPISODE + 1)])
        assert (~stepped).sum(0).tolist() == [1] * frames.NUM_ENVS and (~stepped).sum(1).max() == 1
