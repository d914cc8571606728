"""The threads of a callee: how many are away from their line, and what two of them may do at once."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from call_peers import PATIENCE_S, Peers, fail_with
from echelon.errors import GroupKeyError
from echelon.transport import channel_callee
from echelon.transport.channel_callee import Turn, wait_for
from echelon.world.rpc_group import RpcGroup


class TestThreads:
    def test_no_more_than_a_bound_are_away_from_their_line(self, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel_callee, "_away", away := threading.BoundedSemaphore(2))
        over, at_work, counted = threading.Event(), threading.Semaphore(0), [0, 0]

        def wait() -> bool:
            counted[0] += 1
            counted[1] = max(counted)
            at_work.release()
            waited = wait_for(over, PATIENCE_S)
            counted[0] -= 1
            return waited

        futures = [peers.begin(wait) for _ in range(10)]
        for _ in range(3):  # two that handed the line over, and the third, which keeps it
            assert at_work.acquire(timeout=PATIENCE_S)
        over.set()
        assert all(future.wait() for future in futures)
        assert counted[1] == 3
        for _ in range(2):  # they are back
            assert away.acquire(timeout=PATIENCE_S)

    def test_a_line_whose_next_thread_cannot_start_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel_callee, "_away", threading.BoundedSemaphore(1))
        turn = Turn(fail_with(RuntimeError("can't start new thread")))  # type: ignore[arg-type]
        turn.end()
        turn.end()
        assert not turn.over
        turn = Turn(lambda: None)
        turn.end()
        assert turn.over

    def test_of_two_that_bind_a_key_one_is_too_late(self) -> None:
        class Slow(dict[tuple[str, str], Any]):
            def __contains__(self, key: object) -> bool:
                found = super().__contains__(key)
                with contextlib.suppress(threading.BrokenBarrierError):
                    looks.wait(0.2)  # until the other one looked, too, if it is let
                return found

        def bind(value: int) -> None:
            try:
                group.pair("key", value)
                bound.append(value)
            except GroupKeyError as error:
                assert "'key' is already paired in the group 'g', by 'm0'" in str(error)

        looks, bound, verdicts = threading.Barrier(2), [], iter([("ok", ""), ("taken", "m0")])
        world = SimpleNamespace(name="m0", control=lambda *request: next(verdicts))
        group = RpcGroup(world, "g", ["m0"])  # type: ignore[arg-type]
        group.own = Slow()
        threads = [threading.Thread(target=bind, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(bound) == 1 and list(group.own.values()) == bound
