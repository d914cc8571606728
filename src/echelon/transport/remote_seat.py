"""The client's side of act requests over TCP: a seat whose server is elsewhere.

Needs nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import zmq

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.layout import views_of
from echelon.transport.act_board import ActLayout, Array
from echelon.transport.act_wire import (
    HEADER,
    LIFE_BITS,
    MAGIC,
    MAX_LIFE,
    MAX_REASON_BYTES,
    Kind,
    Wire,
    Word,
)
from echelon.transport.secret import check_secret, numeric
from echelon.transport.sockets import FIRST_REPEAT_S, LINGER_MS, MAX_REPEAT_S, connect, why_silent


class RemoteSeat:
    """A seat whose server is elsewhere: a `Seat` in all but where its arrays lie.

    With `wants_state` an answer brings the recurrent state that it started from; without, it is shorter and
    `state_before` is that of the last one that did. A server that went away is waited for: `wait` says False, and the
    question is repeated until it, or its successor at the same address, answers.
    """

    wants_state = True

    def __init__(
        self,
        address: str,
        layout: ActLayout,
        client: int,
        group: int = 0,
        incarnation: int = 0,
        secret: str | None = None,
        connect_timeout_s: float = 30.0,
    ) -> None:
        """Takes the seat; a successor needs a higher `incarnation` than the process that had it before.

        `wait` raises TransportTimeout once the server has not said a word for `connect_timeout_s` from the first
        question on, and Refused when it said no.
        """
        check_secret(address, secret)
        if not 0 <= incarnation < MAX_LIFE:
            raise ConfigError(f"incarnation={incarnation} of client {client} is not in 0 to {MAX_LIFE - 1}.")
        self.address = address = numeric(address)
        self.index = seat = group * layout.num_clients + client
        wire = Wire(layout)
        self._question = np.zeros(wire.question_bytes, np.uint8)
        self._reply = np.zeros(wire.stateful_bytes, np.uint8)
        self._reply_sizes = (HEADER.size, wire.answer_bytes, wire.stateful_bytes)
        question, reply = views_of(wire.question, self._question), views_of(wire.answer, self._reply)
        self.observation = [question[f"observation.{i}"] for i in range(len(layout.observation))]
        self.first = question["first"]
        self.action, self.log_prob, self.value = reply["action"], reply["log_prob"], reply["value"]
        self._states = [reply[f"state.{i}"] for i in range(len(layout.state_shapes))]
        self._words, self._reply_words = question["words"].data, reply["words"].data
        self._count = self._answered = (incarnation + 1) << LIFE_BITS
        question["words"][:] = arrival = wire.header(Kind.ARRIVE, seat, self._count)
        self._words[Word.KIND] = Kind.ASK
        self._heard, self._connect_timeout_s, self._connect_by = False, connect_timeout_s, math.inf
        self.repeat_at, self._repeat_s = math.inf, FIRST_REPEAT_S
        self._refusal = ""
        self.socket = connect(address, secret, max(wire.stateful_bytes, HEADER.size + MAX_REASON_BYTES))
        self._receive_ms = -1
        self._send(arrival)

    def ask(self) -> None:
        """Sends the question; `observation` and `first` must be in place, and the last answer read."""
        self._count += 1
        self._words[Word.COUNT] = self._count
        self._words[Word.EXTRA] = self.wants_state
        now = time.monotonic()
        self._repeat_s = FIRST_REPEAT_S
        self.repeat_at = now + FIRST_REPEAT_S
        if not self._heard:
            self._connect_by = min(self._connect_by, now + self._connect_timeout_s)
        self._send(self._question, copy=False)  # the arrays rest until the answer is read

    @property
    def answered(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until the answer is there, at most `timeout_s`; whether it is."""
        now = time.monotonic()
        deadline = now + timeout_s
        while not self._receive(min(deadline, self.repeat_at) - now):
            now = time.monotonic()
            if now >= self.repeat_at:
                self._repeat(now)
            if now >= deadline:
                return False
        return True

    def _receive(self, timeout_s: float) -> bool:
        """Takes in what comes within `timeout_s`; whether the question is answered."""
        while self._answered != self._count:
            if self._refusal:
                raise Refused(f"the inference server at {self.address} refused seat {self.index}: {self._refusal}.")
            timeout_ms = max(0, math.ceil(timeout_s * 1000))
            if timeout_ms != self._receive_ms:
                self.socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._receive_ms = timeout_ms
            try:
                self._take(self.socket.recv())
            except zmq.Again:
                return False
        return True

    def _take(self, frame: bytes) -> None:
        """One message of the server; answers to older questions are passed over."""
        if len(frame) < HEADER.size:
            raise Refused(f"{self.address} sent {len(frame)} bytes, which is no answer: it is no inference server.")
        magic, kind, _, _, count, *_ = HEADER.unpack_from(frame)
        if magic != MAGIC or (kind != Kind.REFUSED and len(frame) not in self._reply_sizes):
            raise Refused(f"{self.address} sent {len(frame)} bytes, which is no answer: it is no inference server.")
        self._heard = True
        if kind == Kind.REFUSED and count >> LIFE_BITS == self._count >> LIFE_BITS:
            self._refusal = frame[HEADER.size :].decode(errors="replace")
        elif kind == Kind.ANSWER and count == self._count:
            self._reply[: len(frame)] = np.frombuffer(frame, np.uint8)
            self._answered = count

    def _repeat(self, now: float) -> None:
        """Sends the question again: the connection, or the server, may be a new one."""
        if not self._heard and now >= self._connect_by:
            raise TransportTimeout(self._diagnosis())
        self._repeat_s = min(2 * self._repeat_s, MAX_REPEAT_S)
        self.repeat_at = now + self._repeat_s
        self._send(self._question)  # a copy: should the first get through after all, the arrays may change meanwhile

    def _send(self, frame: Array, copy: bool = True) -> None:
        with suppress(zmq.Again):  # the queue is full of the same question
            self.socket.send(frame.data, zmq.NOBLOCK, copy=copy)

    def _diagnosis(self) -> str:
        """What kept us from the server, as far as can be seen from here."""
        what = f"the inference server at {self.address} did not answer seat {self.index} within "
        return what + f"{self._connect_timeout_s:.1f} s: {why_silent(self.address)}"

    @property
    def version(self) -> int:
        """The version of the weights that gave the last answer."""
        return int(self._reply_words[Word.EXTRA])

    def state_before(self) -> list[Array]:
        """The recurrent state that the last answer started from."""
        return self._states

    def leave(self) -> None:
        """Nobody need wait for this seat any longer."""
        self._words[Word.KIND] = Kind.LEAVE
        self._send(self._question[: HEADER.size])
        self.socket.close(linger=LINGER_MS)


def wait_any(seats: Sequence[RemoteSeat], timeout_s: float) -> bool:
    """Sleeps until one of `seats` has its answer, at most `timeout_s`; whether one has."""
    if len(seats) == 1:
        return seats[0].wait(timeout_s)
    deadline, poller = time.monotonic() + timeout_s, zmq.Poller()
    for seat in seats:
        poller.register(seat.socket, zmq.POLLIN)
    while not any(seat.answered for seat in seats):  # which takes in what came, and repeats what is due
        now = time.monotonic()
        if now >= deadline:
            return False
        until = min(deadline, *(seat.repeat_at for seat in seats))
        poller.poll(max(0, math.ceil((until - now) * 1000)))
    return True
