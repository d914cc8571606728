"""Fuzzes a server of the channel over TCP: mutated messages of clients with its secret, and bytes of anybody else.

The server must go on, keep to its memory, and hand to its handler only valid messages of clients with the secret. This
process serves it, so that its memory is that of the server.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import time

import zmq

from echelon.errors import Refused
from echelon.transport.channel import HEADER, Delivery, Kind, Message, Service, header
from echelon.transport.channel_server import Server
from echelon.transport.curve import Socket
from echelon.transport.secret import SECRET_VARIABLE
from echelon.transport.sockets import connect
from fuzzing.frames import codec
from fuzzing.harness import Finding, Trial
from fuzzing.mutations import Frames, mutate, mutate_bytes

DEFAULT_COUNT, BLOCK = 20_000, 500
SECRET = "a secret of the fuzzer, long enough"
SERVICES = [Service("fuzz.read", Delivery.READ), Service("fuzz.record", Delivery.RECORD, layout=7)]
MAX_BYTES = 1 << 16
ARRIVAL_S = 0.1  # what libzmq itself drops never arrives
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
CURVE_GREETING = GREETING.replace(b"NULL", b"CURV").replace(b"CURV\0", b"CURVE")


class Target:
    """A server whose handler accepts what the codec accepts."""

    def __init__(self) -> None:
        self.server = Server("fuzzers", "tcp://127.0.0.1:0", MAX_BYTES, report=lambda text: None)
        self.num_handled, self.wire = 0, codec()
        for service in SERVICES:
            self.server.serve(service, self._take)
        host, _, port = self.server.address.removeprefix("tcp://").rpartition(":")
        self.place = host, int(port)

    def _take(self, message: Message) -> None:
        self.num_handled += 1
        frames = [bytes(message.frames[0][HEADER.size :]), *map(bytes, message.frames[1:])]
        self.wire.take(frames[1:] if not frames[0] else frames)  # raises Refused if they are not valid
        if not message.is_post:
            self.server.answer(message, b"taken")

    @property
    def num_seen(self) -> int:
        return self.num_handled + self.server.num_refused_messages

    def pump(self, until: int, timeout_s: float) -> bool:
        """Serves until `until` messages were seen; returns whether they were in time."""
        deadline = time.monotonic() + timeout_s
        while self.num_seen < until and (left := deadline - time.monotonic()) > 0:
            if self.server.take(100) == 0:
                self.server.sleep(min(left, 0.01))
        return self.num_seen >= until

    def message(self, chance: random.Random, *, is_whole: bool = False) -> Frames:
        """Returns a request; unless `is_whole`, it is mutated."""
        service = chance.choice(SERVICES)
        kind = chance.choice([Kind.ASK, Kind.POST]) if not is_whole else Kind.ASK
        frames = [header(kind, service, int(chance.random() * 100)), *chance.choice(self.wire.seeds)]
        if is_whole:
            return frames
        if chance.random() < 0.5:
            return [frames[0], *mutate(frames[1:], self.wire.seeds, chance)]
        return mutate(frames, self.wire.seeds, chance) or [b""]


class Client:
    """A connection with the secret, or without; the server ignores it after it was refused."""

    def __init__(self, target: Target, secret: str | None) -> None:
        self.target, self.secret = target, secret
        self.socket: Socket = connect(target.server.address, secret, MAX_BYTES)

    def renew(self) -> None:
        self.socket.close(linger=0)
        self.socket = connect(self.target.server.address, self.secret, MAX_BYTES)

    def send(self, frames: Frames) -> None:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # not connected, or nobody reads
            self.renew()


def send_member(target: Target, client: Client, chance: random.Random) -> str:
    """A client of the channel sends a mutated message; the next valid one must be answered."""
    before, refused = target.num_seen, target.server.num_refused_messages
    client.send(target.message(chance))
    arrived = target.pump(before + 1, 5.0)
    outcome = "refused" if target.server.num_refused_messages > refused else "taken" if arrived else "dropped"
    if outcome != "taken":
        client.renew()
    return outcome


def send_stranger(target: Target, client: Client, chance: random.Random) -> str:
    """A client without the secret sends a valid or mutated message: nothing of it may arrive."""
    before, refused = target.num_seen, target.server.num_refused_handshakes
    client.renew()
    client.socket.setsockopt(zmq.LINGER, 0)
    client.send(target.message(chance, is_whole=chance.random() < 0.5))
    deadline = time.monotonic() + ARRIVAL_S
    while target.server.num_refused_handshakes == refused and time.monotonic() < deadline:
        target.pump(before + 1, 0.01)
    if target.num_seen != before:
        raise Finding("a message of a client without the secret arrived", None)
    return "kept out"


def send_bytes(target: Target, client: Client, chance: random.Random) -> str:
    """Anybody sends bytes that are almost those of a client, and hangs up."""
    before, handled = target.num_seen, target.num_handled
    frames = target.message(chance, is_whole=chance.random() < 0.3)
    parts = [GREETING if chance.random() < 0.7 else CURVE_GREETING, READY]
    for place, frame in enumerate(frames):
        more = int(place < len(frames) - 1)
        size = bytes([more, len(frame)]) if len(frame) < 256 else bytes([more | 2]) + len(frame).to_bytes(8, "big")
        parts.append(size + frame)
    parts = mutate(parts, [parts], chance) if chance.random() < 0.5 else parts
    data = b"".join(parts)
    if chance.random() < 0.5:
        data = mutate_bytes(data, chance, 4 + int(chance.random() * 8))
    with socket.create_connection(target.place, timeout=5.0) as raw:
        try:
            raw.sendall(data)
            target.pump(before + 1, 0.004)
        except OSError:  # it hung up
            pass
    target.pump(before + 1, 0.002)
    if target.num_handled != handled:
        raise Finding("bytes of somebody without the secret reached the handler", data)
    return "sent"


def check_alive(target: Target, chance: random.Random) -> None:
    """Raises Finding unless a valid request of a new client is answered."""
    client = Client(target, SECRET)
    client.send(target.message(chance, is_whole=True))
    target.pump(target.num_seen + 1, 10.0)
    answered = client.socket.poll(5_000)
    client.socket.close(linger=0)
    if not answered:
        raise Finding("a valid request was not answered", None)


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def make(options: argparse.Namespace) -> Trial:
    os.environ[SECRET_VARIABLE] = SECRET
    target = Target()
    kinds = [
        ("member", send_member, Client(target, SECRET)),
        ("stranger", send_stranger, Client(target, None)),
        ("bytes", send_bytes, Client(target, None)),
    ]
    trials = 0

    def trial(chance: random.Random) -> str:
        nonlocal trials
        trials += 1
        name, send, client = chance.choices(kinds, (20, 1, 6))[0]
        try:
            outcome = send(target, client, chance)
            if trials % 100 == 0:
                check_alive(target, chance)
        except (Finding, TimeoutError):
            raise
        except (Exception, Refused) as error:
            raise Finding(f"{name} raised {type(error).__name__}", None) from error
        return f"{name}: {outcome}"

    return trial
