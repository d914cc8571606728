"""The agent's bulk connection: the memory that it takes of its host."""

from __future__ import annotations

import functools
from pathlib import Path

from echelon.hosts.bulk import Bulk
from echelon.hosts.messages import Assignment
from echelon.transport.channel_client import Client
from echelon.transport.slot_wire import SlotBytes

SLOT = SlotBytes(64 << 10)


def test_a_host_has_memory_for_the_slots_of_its_own_actors_only(shm_dir: Path) -> None:
    assignment = Assignment(streams=1000, slots=2, slot=SLOT.to_wire(), weights=8)
    bulk = Bulk(shm_dir, assignment, "tcp://127.0.0.1:9", functools.partial(Client, name=b"host"))

    def taken() -> int:
        return sum(file.stat().st_blocks * 512 for file in shm_dir.iterdir())

    before = taken()
    bulk.adopt(7, 0, token=1)
    bulk.adopt(7, 0, token=1)
    assert before < 1 << 20 and 2 * SLOT.nbytes <= taken() - before <= 3 * SLOT.nbytes
    assert taken() <= Bulk.size(assignment, 1) + (1 << 20)
    bulk.close()
