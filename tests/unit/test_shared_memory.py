"""Segments, doorbells, the slot ring and the weights board."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon import train
from echelon.bench.processes import Processes
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError, TransportError
from echelon.presets import dqn
from echelon.schema import Spaces, TrajectorySchema
from echelon.transport.segments import create_segment, join_segment, open_segment
from echelon.transport.shared_memory import Doorbell, SlotRing, WeightsBoard
from echelon.transport.store_order import check_platform
from echelon.world import World, launch
from running import TESTS, wait_until

BOARD_BYTES = 1 << 16
MOVES = ("grant", "write", "write", "write", "die", "read")


@pytest.fixture
def schema() -> TrajectorySchema:
    return TrajectorySchema(Spaces(gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Discrete(2)), 4, 2)


@pytest.fixture
def writer(shm_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that publishes weights in a loop; every weight of a version equals the version number."""
    code = f"""
import sys
from pathlib import Path
import numpy as np
from echelon.transport.shared_memory import WeightsBoard
board = WeightsBoard(Path(sys.argv[1]), {BOARD_BYTES})
version = 0
while True:
    version += 1
    board.publish([np.full({BOARD_BYTES} // 8, version, np.int64)], version)
"""
    path = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    WeightsBoard(shm_dir, BOARD_BYTES)
    process = subprocess.Popen([sys.executable, "-c", code, str(shm_dir)], env={**os.environ, "PYTHONPATH": path})
    yield process
    process.kill()
    process.wait()


def test_a_segment_is_zeros_and_shared_by_name(shm_dir: Path) -> None:
    made = create_segment(shm_dir / "one", 100)
    assert made.nbytes == 100 and not made.any()
    joined = open_segment(shm_dir / "one")
    made[7] = 42
    assert joined[7] == 42
    assert (shm_dir / "one").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_segment(shm_dir / "one", 100)


def test_whoever_comes_at_once_shares_one_segment(shm_dir: Path) -> None:
    num, together = 8, threading.Barrier(8)
    joined = dict[tuple[int, int], Any]()

    def come(me: int) -> None:
        for turn in range(50):
            together.wait(60.0)
            joined[turn, me] = join_segment(shm_dir / str(turn), 4096)
            joined[turn, me][me] = 1 + me
            Doorbell(shm_dir / f"bell-{turn}").close()

    threads = [threading.Thread(target=come, args=(me,), daemon=True) for me in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for (turn, _), memory in joined.items():
        assert memory[:num].tolist() == list(range(1, num + 1)), turn
    names = [f"{kind}{turn}" for kind in ("", "bell-") for turn in range(50)]
    assert len(joined) == 50 * num and sorted(os.listdir(shm_dir)) == sorted(names)


def test_a_segment_that_is_not_there_says_so(shm_dir: Path) -> None:
    with pytest.raises(TransportError, match="cannot be opened: No such file or directory; its run has ended"):
        open_segment(shm_dir / "none")


def test_a_segment_that_finds_no_room_leaves_nothing(shm_dir: Path) -> None:
    with pytest.raises(TransportError, match=r"cannot reserve .* MiB at .*one"):
        create_segment(shm_dir / "one", 1 << 60)
    assert not list(shm_dir.iterdir())


def test_another_layout_is_refused(shm_dir: Path, schema: TrajectorySchema) -> None:
    SlotRing(shm_dir, schema, 2, 3).close()
    with pytest.raises(TransportError, match=r"bytes where .* are expected"):
        SlotRing(shm_dir, schema, 2, 4)
    WeightsBoard(shm_dir, 64)
    with pytest.raises(TransportError, match=r"bytes where .* are expected"):
        WeightsBoard(shm_dir, 128)


SHARERS: dict[str, Callable[[Path], object]] = {  # everything that starts or joins processes that share memory
    "train": lambda folder: train(config_in(folder, "local")),
    "launch": lambda folder: launch(do_nothing, 2),
    "a world by hand": lambda folder: World("m0", 0, 1),
    "a world at an address": lambda folder: World("m0", 0, 1, "tcp://127.0.0.1:0"),
    "bench": lambda folder: Processes(folder),
}


def do_nothing(world: World) -> None:
    """The target of a launch."""


def config_in(folder: Path, engine: str) -> TrainConfig:
    run = {"run.dir": str(folder / "run"), "evaluation.episodes": 0, "stop.steps": 64}
    return replace(dqn("CartPole-v1"), **{"engine": engine, "shm_dir": str(folder), **run})


@pytest.mark.parametrize("sharer", SHARERS)
def test_a_processor_that_reorders_stores_is_refused(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, sharer: str
) -> None:
    check_platform()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"processor is aarch64, and only x86-64 .*--engine inline"):
        SHARERS[sharer](shm_dir)
    assert not list(shm_dir.iterdir()) and not list(Path("/dev/shm").glob(f"echelon-{os.getpid()}-*"))


def test_one_process_may_reorder_stores(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    config = replace(config_in(shm_dir, "inline"), **{"replay.min_size": 32, "replay.batch": 8})
    assert train(config, output=io.StringIO()).status == "finished"


class TestDoorbell:
    def test_a_ring_wakes_and_is_kept_until_cleared(self, shm_dir: Path) -> None:
        sleeper, ringer = Doorbell(shm_dir / "bell"), Doorbell(shm_dir / "bell")
        assert not sleeper.wait(0.0)
        ringer.ring()
        ringer.ring()
        assert sleeper.wait(0.0) and sleeper.wait(0.0)
        sleeper.clear()
        assert not sleeper.wait(0.0)
        sleeper.clear()  # no ring to discard: it does not block
        sleeper.close()
        ringer.close()

    def test_it_wakes_a_sleeper(self, shm_dir: Path) -> None:
        bell, woken = Doorbell(shm_dir / "bell"), threading.Event()
        sleeper = threading.Thread(target=lambda: bell.wait(60.0) and woken.set())
        sleeper.start()
        bell.ring()
        sleeper.join(60.0)
        assert woken.is_set()
        bell.close()

    def test_a_full_pipe_never_blocks_the_ringer(self, shm_dir: Path) -> None:
        bell = Doorbell(shm_dir / "bell")
        for _ in range(70_000):  # a pipe holds 65,536
            bell.ring()
        bell.clear()
        assert not bell.wait(0.0)
        bell.close()

    def test_rings_outlive_the_sleeper(self, shm_dir: Path) -> None:
        dead, ringer = Doorbell(shm_dir / "bell"), Doorbell(shm_dir / "bell")
        dead.close()
        ringer.ring()
        successor = Doorbell(shm_dir / "bell")
        assert successor.wait(0.0)
        successor.close()
        ringer.close()


class TestSlotRing:
    def test_a_slot_is_seen_when_committed(self, shm_dir: Path, schema: TrajectorySchema) -> None:
        actor, learner = (SlotRing(shm_dir, schema, 2, 3) for _ in range(2))
        assert not actor.may_begin(1)
        learner.grant(1, 3)
        assert actor.free[1].wait(0.0) and not actor.free[0].wait(0.0)
        assert actor.may_begin(1) and not actor.may_begin(0)
        actor.writable(1)["reward"][...] = 5.0
        assert learner.num_ready(1) == 0 and not learner.ready.wait(0.0)
        actor.commit(1)
        assert learner.num_ready(1) == 1 and learner.ready.wait(0.0)
        assert (learner.readable(1)["reward"] == 5.0).all()
        assert learner.num_ready(0) == 0
        for ring in (actor, learner):
            ring.close()

    def test_a_successor_begins_again_at_head(self, shm_dir: Path, schema: TrajectorySchema) -> None:
        learner, dead = (SlotRing(shm_dir, schema, 1, 3) for _ in range(2))
        learner.grant(0, 3)
        dead.writable(0)["reward"][...] = 1.0
        dead.commit(0)
        dead.writable(0)["reward"][:2] = 7.0  # and dies here
        dead.close()
        successor = SlotRing(shm_dir, schema, 1, 3)
        assert learner.num_ready(0) == 1
        successor.writable(0)["reward"][...] = 2.0
        successor.commit(0)
        assert [float(learner.readable(0, ahead)["reward"].mean()) for ahead in (0, 1)] == [1.0, 2.0]
        for ring in (successor, learner):
            ring.close()

    def test_a_new_learner_reads_on(self, shm_dir: Path, schema: TrajectorySchema) -> None:
        actor, dead = (SlotRing(shm_dir, schema, 1, 3) for _ in range(2))
        dead.grant(0, 3)
        for value in (1.0, 2.0, 3.0):
            actor.writable(0)["reward"][...] = value
            actor.commit(0)
        dead.release(0)
        dead.close()
        learner = SlotRing(shm_dir, schema, 1, 3)
        assert learner.num_ready(0) == 2 and float(learner.readable(0)["reward"].mean()) == 2.0
        assert not actor.may_begin(0)
        learner.grant(0, 3)
        assert actor.may_begin(0)
        for ring in (actor, learner):
            ring.close()

    def test_a_grant_that_changes_nothing_rings_nobody(self, shm_dir: Path, schema: TrajectorySchema) -> None:
        ring = SlotRing(shm_dir, schema, 1, 3)
        ring.grant(0, 2)
        ring.free[0].clear()
        ring.grant(0, 2)
        assert not ring.free[0].wait(0.0)
        ring.close()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 1)), max_size=80))
    def test_any_sequence_keeps_the_order(self, tmp_path_factory: Any, moves: list[tuple[str, int]]) -> None:
        """Compared with plain lists: no slot is lost, read twice, or overwritten unread."""
        folder = tmp_path_factory.mktemp("ring")
        spaces = Spaces(gym.spaces.Box(-1.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2))
        ring = SlotRing(folder, TrajectorySchema(spaces, 1, 1), 2, 3)
        unread: list[list[int]] = [[], []]
        admitted, written, released = [0, 0], [0, 0], [0, 0]
        for move, stream in moves:
            assert ring.may_begin(stream) == (written[stream] < admitted[stream])
            assert ring.num_ready(stream) == len(unread[stream]) <= 3
            if move == "grant":
                ring.grant(stream, 3)
                admitted[stream] = released[stream] + 3
            elif move in ("write", "die") and ring.may_begin(stream):
                ring.writable(stream)["reward"][...] = written[stream] if move == "write" else -1.0
                if move == "write":
                    ring.commit(stream)
                    unread[stream].append(written[stream])
                    written[stream] += 1
            elif move == "read" and unread[stream]:
                assert ring.readable(stream)["reward"] == unread[stream].pop(0)
                ring.release(stream)
                released[stream] += 1
            for each in range(2):
                assert [ring.readable(each, i)["reward"].item() for i in range(len(unread[each]))] == unread[each]
        ring.close()


class TestWeightsBoard:
    def test_it_holds_the_newest(self, shm_dir: Path) -> None:
        learner, actor = WeightsBoard(shm_dir, 16), WeightsBoard(shm_dir, 16)
        out = np.zeros(16, np.uint8)
        assert actor.version == 0
        for version in range(1, 8):
            learner.publish([np.full(2, version, np.float32), np.array([version])], version)
            assert actor.version == actor.read(out) == version
            assert out[:8].view(np.float32).tolist() == [version] * 2 and out[8:].view(np.int64).item() == version

    def test_versions_only_rise(self, shm_dir: Path) -> None:
        board = WeightsBoard(shm_dir, 8)
        board.publish([np.array([1])], 5)
        with pytest.raises(AssertionError, match="version 5 is not above 5"):
            board.publish([np.array([1])], 5)
        with pytest.raises(AssertionError, match="4 bytes published where the board holds 8"):
            board.publish([np.zeros(1, np.float32)], 6)

    def test_a_learner_that_dies_while_publishing_leaves_the_last_version(self, shm_dir: Path) -> None:
        board, out = WeightsBoard(shm_dir, 8), np.zeros(8, np.uint8)
        for version in range(1, 4):
            board.publish([np.array([version])], version)
        board._reserved[0] = 4  # the dead learner had reserved version 4 ...
        board._buffers[4 % board.NUM_BUFFERS][:4] = 255  # ... and written half of it
        assert board.read(out) == 3 and out.view(np.int64).item() == 3
        WeightsBoard(shm_dir, 8).publish([np.array([4])], 4)
        assert board.read(out) == 4 and out.view(np.int64).item() == 4

    def test_a_buffer_taken_while_it_is_copied_is_read_again(
        self, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        board, out, copies = WeightsBoard(shm_dir, 8), np.zeros(8, np.uint8), 0
        board.publish([np.array([1])], 1)
        copy = np.copyto

        def overtaken(target: Any, source: Any) -> None:
            nonlocal copies
            copies += 1
            if copies == 1:
                for version in (2, 3, 4):
                    board.publish([np.array([version])], version)
            copy(target, source)

        monkeypatch.setattr(np, "copyto", overtaken)
        assert board.read(out) == 4 and copies == 2
        assert out.view(np.int64).item() == 4

    def test_no_read_is_torn_under_a_writer_that_never_rests(
        self, shm_dir: Path, writer: subprocess.Popen[bytes]
    ) -> None:
        board, out, last = WeightsBoard(shm_dir, BOARD_BYTES), np.zeros(BOARD_BYTES, np.uint8), 0
        wait_until(lambda: board.version > 100, "the writer writes")
        for _ in range(3_000):
            version = board.read(out)
            values = out.view(np.int64)
            assert values[0] == version and (values == version).all()
            assert version >= last
            last = version
        assert writer.poll() is None
