"""Act requests over TCP, between real processes and between two networks: answers, secrets, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import act_peers
import pytest
import zmq
from act_peers import LAYOUT, check, put

from echelon.errors import ConfigError, TransportTimeout
from echelon.transport.act_board import ActBoard
from echelon.transport.act_listener import ActListener
from echelon.transport.remote_seat import RemoteSeat
from hosts import NEAR

SECRET = "a secret of the tests"
PATIENCE_S = 60.0


class Peer:
    """One side of act requests in a process of its own."""

    def __init__(self, side: str, prefix: tuple[str, ...] = (), secret: str = "", **options: Any) -> None:
        """Without a `secret` it has that of its user."""
        command = [*prefix, sys.executable, act_peers.__file__, side, json.dumps(options)]
        environment = {**os.environ, "ECHELON_SECRET": secret}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()} and said nothing"
        return dict(json.loads(line))

    def finish(self) -> dict[str, Any]:
        """Ends a server, and returns what it counted."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        counted = self.hear()
        assert self.process.wait(PATIENCE_S) == 0
        return counted

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def start_peer(side: str, prefix: tuple[str, ...] = (), **options: Any) -> Peer:
        peers.append(Peer(side, prefix, **options))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.kill()


@pytest.fixture
def take_seat() -> Iterator[Callable[..., RemoteSeat]]:
    seats: list[RemoteSeat] = []

    def take(address: str, client: int = 0, **options: Any) -> RemoteSeat:
        seats.append(RemoteSeat(address, LAYOUT, client, **options))
        return seats[-1]

    yield take
    for seat in seats:
        seat.leave()


class TestProcesses:
    @pytest.mark.parametrize("secret", ["", SECRET])
    def test_clients_from_here_and_elsewhere_are_answered_together(
        self, start: Start, shm_dir: Path, secret: str
    ) -> None:
        server = start("server", folder=str(shm_dir), secret=secret, num_present=3)
        address = server.hear()["address"]
        remote = [start("client", address=address, client=i, num_questions=200, secret=secret) for i in (0, 1)]
        local = start("client", address=address, client=2, num_questions=200, folder=str(shm_dir))
        for client in (*remote, local):
            assert client.hear() == {"num_answers": 200, "torch": False}
        assert server.finish() == {"num_refused": 0, "num_missed": 0, "num_rounds": 200, "torch": False}

    @pytest.mark.parametrize(("ours", "theirs"), [(SECRET, SECRET + "!"), (SECRET, ""), ("", SECRET)])
    def test_another_secret_is_refused_and_the_client_is_told_what_to_set(
        self, start: Start, shm_dir: Path, ours: str, theirs: str
    ) -> None:
        server = start("server", folder=str(shm_dir), secret=ours, max_wait_us=1000.0, num_refused=1)
        address = server.hear()["address"]
        stranger = start("client", address=address, client=0, num_questions=1, secret=theirs)
        friend = start("client", address=address, client=1, num_questions=50, secret=ours)
        told = stranger.hear()
        assert told["error"] == "Refused"
        assert f"seat 0: the inference server at {address} refuses the handshake" in told["text"]
        assert "Set ECHELON_SECRET to the same value on both sides" in told["text"]
        assert friend.hear()["num_answers"] == 50
        counted = server.finish()
        assert counted["num_refused"] > 0
        assert counted["num_rounds"] == 50

    @pytest.mark.parametrize("keeps_board", [True, False], ids=["same board", "fresh board"])
    def test_a_server_that_died_is_replaced_and_the_question_answered(
        self, start: Start, shm_dir: Path, take_seat: Callable[..., RemoteSeat], keeps_board: bool
    ) -> None:
        first = start("server", folder=str(shm_dir))
        address = first.hear()["address"]
        seat = take_seat(address)
        for number in range(3):
            put(seat, number)
            assert seat.wait(PATIENCE_S)
        first.process.send_signal(signal.SIGSTOP)  # so that it cannot answer what follows
        put(seat, 3)
        assert not seat.wait(0.3)
        first.kill()
        assert not seat.wait(0.3)
        folder = shm_dir if keeps_board else shm_dir / "fresh"
        folder.mkdir(exist_ok=True)
        second = start("server", folder=str(folder), address=address)
        assert second.hear()["address"] == address
        for number in (3, 4):
            assert seat.wait(PATIENCE_S)
            check(seat, number, num_before=number if keeps_board else number - 3)
            put(seat, number + 1)
        assert seat.wait(PATIENCE_S)
        assert second.finish()["num_refused"] == 0

    def test_a_client_that_died_costs_the_others_one_wait(
        self, start: Start, shm_dir: Path, take_seat: Callable[..., RemoteSeat]
    ) -> None:
        server = start("server", folder=str(shm_dir), max_wait_us=10e6, num_present=2)
        address = server.hear()["address"]
        mortal = start("client", address=address, client=0, num_questions=1_000_000)
        survivor = take_seat(address, client=1)
        for number in range(40):
            if number == 20:
                mortal.kill()
            put(survivor, number)
            assert survivor.wait(PATIENCE_S)
            check(survivor, number, num_before=number)
        assert server.finish()["num_missed"] == 1

    def test_nobody_there(self, take_seat: Callable[..., RemoteSeat]) -> None:
        """The seat gives up when its own time is over, however long its caller would wait."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
        seat = take_seat(f"tcp://127.0.0.1:{port}", connect_timeout_s=0.5)
        put(seat, 1)
        began = time.monotonic()
        with pytest.raises(TransportTimeout, match=r"seat 0 within 0.5 s: nothing listens there .*Start it"):
            seat.wait(PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S / 2


class TestTwoHosts:
    def test_with_a_secret_they_talk_and_without_they_refuse(
        self, two_hosts: list[tuple[str, ...]], start: Start, shm_dir: Path
    ) -> None:
        near, far = two_hosts
        options = {"folder": str(shm_dir), "address": f"tcp://{NEAR}:0", "secret": SECRET}
        server = start("server", near, **options, max_wait_us=1e3, num_refused=1)
        address = server.hear()["address"]
        assert start("client", far, address=address, client=0, num_questions=100, secret=SECRET).hear()["num_answers"]
        told = start("client", far, address=address, client=1, num_questions=1).hear()
        assert told["error"] == "ConfigError"
        assert f"{address} is not on the loopback" in told["text"] and "Set ECHELON_SECRET" in told["text"]
        told = start("client", far, address=address, client=1, num_questions=1, secret=SECRET + "!").hear()
        assert told["error"] == "Refused" and "Set ECHELON_SECRET" in told["text"]
        counted = server.finish()
        assert counted["num_rounds"] == 100 and counted["num_refused"] > 0

    def test_a_door_off_the_loopback_needs_a_secret(self, shm_dir: Path) -> None:
        with pytest.raises(ConfigError, match=r"tcp://0.0.0.0:0 is not on the loopback.*Set ECHELON_SECRET"):
            ActListener(ActBoard(shm_dir, LAYOUT), 0, "tcp://0.0.0.0:0")
