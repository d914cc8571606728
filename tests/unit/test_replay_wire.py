"""The wire format of replay requests and replies: they survive the round trip, and malformed ones are refused."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import Refused
from echelon.replay.layout import ReplayError, item_layout
from echelon.replay.limiter import LimiterRule
from echelon.replay.wire import MAX_COUNT, MAX_NEWS, ReplayReply, ReplayRequest, ReplayWire
from echelon.transport.channel import NUM_WORDS

Array = np.ndarray[Any, Any]
RULE = LimiterRule(4.0, 10, 100, batch=16, chunk=4, num_shards=3)
FIELDS: dict[str, Any] = {"number": ((), np.int64), "eye": ((2, 3), np.uint8)}
WIRE = ReplayWire(item_layout(FIELDS, 50), [0, 2], RULE)
STACKED = ReplayWire(item_layout(FIELDS, 50, {"eye": "frames"}), [0, 2], RULE)


def question(numbers: tuple[list[int], list[int]] = ([1, 2], [3])) -> ReplayRequest:
    return ReplayRequest(np.arange(5), np.array([-1, 5]), [np.array(n, np.int64) for n in numbers])


def words_of(frame: bytes | memoryview) -> Array:
    return np.frombuffer(frame, np.int64).copy()


def answer_frames(num_items: int, news: tuple[int, int] = (0, 0), wire: ReplayWire = WIRE) -> list[bytes]:
    """A reply with items 0, 1, … of the first shard, and `news` priorities of each shard."""
    words = np.array([0, 10, 5, 20, 2, 2 + news[0], 5, 5 + news[1]])
    first = words.tobytes() + np.ones(sum(news)).tobytes() + bytes([1] * num_items)
    rows = np.zeros(num_items, wire.layout.row)
    rows["number"] = np.arange(num_items)
    return [first, rows.tobytes()] if num_items else [first]


class TestQuestions:
    @given(data=st.data())
    def test_what_is_asked_is_understood(self, data: st.DataObject) -> None:
        numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8)
        asked = question(data.draw(st.tuples(numbers, numbers)))
        found = WIRE.unpack_request([WIRE.pack_request(asked)])
        assert found.counts.tolist() == [0, 1, 2, 3, 4] and found.since.tolist() == [-1, 5]
        assert [part.tolist() for part in found.numbers] == [part.tolist() for part in asked.numbers]
        assert len(WIRE.pack_request(asked)) <= WIRE.question_bytes

    @given(st.binary(max_size=8 * (NUM_WORDS + 9) - 1))
    def test_anything_shorter_is_not(self, frame: bytes) -> None:
        with pytest.raises(Refused, match="are not a request"):
            WIRE.unpack_request([frame])

    @given(place=st.integers(0, 100), value=st.sampled_from([-(2**63), -1, 1, 17, MAX_COUNT, 2**63 - 1]))
    def test_a_changed_word_harms_nobody(self, place: int, value: int) -> None:
        words = words_of(WIRE.pack_request(question()))
        words[place % len(words)] = value
        with contextlib.suppress(Refused):
            found = WIRE.unpack_request([words.tobytes()])
            assert found.counts.min() >= 0 and found.counts.max() < MAX_COUNT
            assert sum(len(part) for part in found.numbers) == 3 and len(found.numbers) == len(found.since) == 2

    def test_what_breaks_the_rules_is_told_why(self) -> None:
        good = words_of(WIRE.pack_request(question()))
        lengths = NUM_WORDS + WIRE.num_counts + 2

        def changed(place: int, value: int) -> bytes:
            words = good.copy()
            words[place] = value
            return words.tobytes()

        for frame, reason in (
            (good[:NUM_WORDS].tobytes(), "are not a request"),
            (changed(NUM_WORDS, -1), "its counts are not between 0 and"),
            (changed(NUM_WORDS + 3, MAX_COUNT), "its counts are not between 0 and"),
            (changed(lengths, -1), r"announces [-1, 1] items and lists 3"),
            (changed(lengths, 2**62), "items and lists 3"),
            (good[:-1].tobytes(), "announces [2, 1] items and lists 2"),
            (WIRE.pack_request(question(numbers=(list(range(10)), list(range(10))))), "at most 16 are allowed"),
        ):
            with pytest.raises(Refused, match=re.escape(reason)):
                WIRE.unpack_request([frame])
        with pytest.raises(Refused, match="in 2 frames are not a request"):
            WIRE.unpack_request([good.tobytes(), b""])

    def test_services_of_other_shards_are_others(self) -> None:
        others = ReplayWire(WIRE.layout, [0, 1], RULE)
        assert WIRE.items.layout != others.items.layout and WIRE.news.layout != others.news.layout

    def test_an_announcement_whose_sum_overflows_is_refused(self) -> None:
        words = words_of(WIRE.pack_request(question()))
        words[NUM_WORDS + 6 : NUM_WORDS + 8] = 2**62, -(2**62) + 3
        with pytest.raises(Refused, match="it announces"):
            WIRE.unpack_request([words.tobytes()])


class TestAnswers:
    def test_what_is_answered_is_read(self) -> None:
        answer = ReplayReply(WIRE, 99, answer_frames(3, (2, 1)), [3, 0])
        assert answer.birth == 99 and answer.windows.tolist() == [[0, 10], [5, 20]]
        assert answer.news.tolist() == [[2, 4], [5, 6]] and [len(part) for part in answer.priorities] == [2, 1]
        block = WIRE.layout.block(3)
        assert answer.into(0, block).all() and block.rows["number"].tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([b""], "0 bytes are not a reply"),
            (answer_frames(0), "do not hold the news"),
            ([answer_frames(3)[0][:-1], answer_frames(3)[1]], "do not hold the news"),
            (answer_frames(3)[:1], "a reply of 1 frames does not hold 3 items"),
            ([*answer_frames(3), b""], "a reply of 3 frames"),
            ([answer_frames(3)[0], answer_frames(2)[1]], "bytes of rows are not 3 items"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, frames: list[bytes], reason: str) -> None:
        with pytest.raises(Refused, match=reason):
            ReplayReply(WIRE, 99, frames, [3, 0])

    @pytest.mark.parametrize("news", [(-1, 0), (MAX_NEWS + 1, 0), (2**62, 2**62)])
    def test_news_of_no_size_are_refused(self, news: tuple[int, int]) -> None:
        words = words_of(answer_frames(0)[0])
        words[4:] = 0, news[0], 0, news[1]
        with pytest.raises(Refused, match="do not hold the news"):
            ReplayReply(WIRE, 99, [words.tobytes()], [0, 0])

    def test_a_priority_that_no_item_has_is_refused(self) -> None:
        frame = bytearray(answer_frames(0, (1, 0))[0])
        frame[-8:] = np.array([np.nan]).tobytes()
        with pytest.raises(ReplayError, match="priority 0 of 1 is nan"):
            ReplayReply(WIRE, 99, [bytes(frame)], [0, 0])

    def test_frames_that_the_rows_do_not_name_are_refused(self) -> None:
        frames = answer_frames(2, wire=STACKED)  # both items have frame 0, twice
        one = np.zeros(1, STACKED.stacked[0].row).tobytes()
        assert ReplayReply(STACKED, 99, [*frames, one], [2, 0]).into(0, STACKED.layout.block(2)).all()
        with pytest.raises(Refused, match="bytes of ring frames are not 1 frames"):
            ReplayReply(STACKED, 99, [*frames, one + one], [2, 0])
