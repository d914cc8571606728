"""CURVE keys derived from the secret, the addresses that need one, and the gate that admits only its holders."""

from __future__ import annotations

import select
import socket as sockets
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from echelon.errors import ConfigError
from echelon.transport.curve import Gate, Keypair, Socket, keypair, secure_client, secure_server
from echelon.transport.secret import numeric, secret_for, user_secret
from running import wait_until

SECRET = "a secret of the tests"


class TestKeys:
    def test_the_same_secret_gives_the_same_keys_and_another_gives_others(self) -> None:
        assert keypair(SECRET, "server") == keypair(SECRET, "server")
        everybody = [keypair(secret, side) for secret in (SECRET, SECRET + "!") for side in ("server", "client")]
        assert len({pair.public for pair in everybody}) == len({pair.private for pair in everybody}) == 4

    def test_the_halves_belong_together(self) -> None:
        pair = keypair(SECRET, "client")
        assert zmq.curve_public(pair.private) == pair.public
        assert len(pair.public) == len(pair.private) == 40

    def test_the_private_half_is_not_shown(self) -> None:
        assert "private" not in repr(keypair(SECRET, "client"))

    def test_a_short_secret_is_refused_by_its_length_and_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ECHELON_SECRET", "fifteen letters")
        with pytest.raises(ConfigError, match=r"has 15 characters.* 16 .* ECHELON_SECRET") as caught:
            secret_for("tcp://127.0.0.1:0")
        assert "fifteen letters" not in str(caught.value)


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        ["tcp://127.0.0.1:0", "tcp://127.8.9.1:5555", "tcp://localhost:0"],
    )
    def test_what_only_this_machine_reaches_has_the_secret_of_the_user(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ECHELON_SECRET", "")
        assert secret_for(address) == user_secret()
        monkeypatch.setenv("ECHELON_SECRET", SECRET)
        assert secret_for(address) == SECRET

    @pytest.mark.parametrize(
        "address",
        ["tcp://10.0.0.1:1", "tcp://*:0", "tcp://0.0.0.0:1", "tcp://head:1", "tcp://localhost.net:1", "tcp://"],
    )
    def test_everything_else_needs_one_and_the_error_says_what_to_set(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ConfigError, match=r"not on the loopback.*ECHELON_SECRET") as caught:
            secret_for(address)
        assert address in str(caught.value)
        monkeypatch.setenv("ECHELON_SECRET", SECRET)
        assert secret_for(address) == SECRET

    def test_the_name_of_this_machine_is_its_number_and_other_names_stay(self) -> None:
        assert numeric("tcp://localhost:5555") == numeric("tcp://LocalHost:5555") == "tcp://127.0.0.1:5555"
        for address in ("tcp://localhost.net:1", "tcp://10.0.0.1:1", "ipc:///tmp/localhost:1", "inproc://localhost"):
            assert numeric(address) == address


class Entrance:
    """A guarded socket, and clients that connect to it."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.gate: Gate = secure_server(self.socket, SECRET)
        self.socket.bind("tcp://127.0.0.1:0")
        self.clients: list[Socket] = []
        self.heard: list[bytes] = []

    def knock(self, secure: Callable[[Socket], None], word: bytes) -> None:
        client = self.context.socket(zmq.DEALER)
        self.clients.append(client)
        client.setsockopt(zmq.RECONNECT_IVL, -1)  # connects once
        secure(client)
        client.connect(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        with suppress(zmq.Again):  # it was refused before it could send a message
            client.send(word, zmq.NOBLOCK)

    def listen(self) -> None:
        self.gate.serve()
        while self.socket.poll(0):
            self.heard.append(self.socket.recv_multipart()[1])

    def has_heard(self, word: bytes) -> bool:
        self.listen()
        return word in self.heard

    def has_refused(self) -> bool:
        self.listen()
        return self.gate.num_refused > 0

    def close(self) -> None:
        self.gate.close()
        for socket in (self.socket, *self.clients):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    entrance = Entrance()
    yield entrance
    entrance.close()


def with_secret(secret: str) -> Callable[[Socket], None]:
    return lambda socket: secure_client(socket, secret)


def with_a_key_of_its_own(socket: Socket) -> None:
    """The client has the server's public key, but not the clients' keypair."""
    own = Keypair(*zmq.curve_keypair())
    socket.setsockopt(zmq.CURVE_SERVERKEY, keypair(SECRET, "server").public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.private)


def without_keys(socket: Socket) -> None:
    assert socket.getsockopt(zmq.MECHANISM) == zmq.NULL


class TestGate:
    def test_a_holder_of_the_secret_gets_in(self, entrance: Entrance) -> None:
        entrance.knock(with_secret(SECRET), b"friend")
        wait_until(lambda: entrance.has_heard(b"friend"), "the holder of the secret was heard")
        assert entrance.gate.num_refused == 0

    @pytest.mark.parametrize("secure", [with_secret(SECRET + "!"), with_a_key_of_its_own, without_keys])
    def test_nobody_else_does_and_each_is_counted(self, entrance: Entrance, secure: Callable[[Socket], None]) -> None:
        entrance.knock(secure, b"foe")
        wait_until(entrance.has_refused, "the gate refused")
        entrance.knock(with_secret(SECRET), b"friend")
        wait_until(lambda: entrance.has_heard(b"friend"), "the holder of the secret was heard")
        assert entrance.heard == [b"friend"]
        assert entrance.gate.num_refused == 1

    def test_whoever_hangs_up_is_not_counted(self, entrance: Entrance) -> None:
        """As a probe does that looks whether anybody listens."""
        host, port = entrance.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").split(":")
        for _ in range(3):
            sockets.create_connection((host, int(port))).close()
        entrance.knock(with_secret(SECRET), b"friend")
        wait_until(lambda: entrance.has_heard(b"friend"), "the holder of the secret was heard")
        entrance.knock(without_keys, b"foe")
        wait_until(entrance.has_refused, "the gate refused")
        assert entrance.gate.num_refused == 1

    @pytest.mark.parametrize("secure", [with_secret(SECRET), without_keys])
    def test_its_descriptors_announce_who_knocks(self, entrance: Entrance, secure: Callable[[Socket], None]) -> None:
        entrance.gate.serve()
        assert not is_readable(entrance.gate, timeout_s=0.0)
        entrance.knock(secure, b"word")
        assert is_readable(entrance.gate, timeout_s=60.0)
        wait_until(lambda: entrance.has_heard(b"word") or entrance.has_refused(), "the gate decided")
        assert not is_readable(entrance.gate, timeout_s=0.0)


def is_readable(gate: Gate, timeout_s: float) -> bool:
    return any(select.select(gate.descriptors, [], [], timeout_s))
