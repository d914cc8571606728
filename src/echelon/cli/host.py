"""`echelon host --join HOST:PORT`: lend this host to a run that was started with --engine hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from echelon.cli.main import Parser, add_status_file
from echelon.errors import ConfigError, escaped_lines
from echelon.fields import require_address


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon host",
        description="Run actors of a run on this host, and its inference server or learner, until it is over. "
        "`echelon train PRESET ENV --hosts N` "
        "prints the address to join. On another machine, or as another user, ECHELON_SECRET must be that of the head.",
    )
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="address that the run prints")
    parser.add_argument("--name", default="", metavar="NAME", help="name of this host in the run (default: hostname)")
    parser.add_argument("--shm-dir", default="/dev/shm", metavar="DIR", help="folder for shared memory")
    add_status_file(parser)
    known = parser.parse_args(list(arguments))
    from echelon.hosts.agent import take_part

    address: str = known.join if known.join.startswith("tcp://") else f"tcp://{known.join}"
    if not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"--join {known.join} has no port. Write HOST:PORT, as the run prints it.")
    require_address(address, "--join")
    name = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--join {known.join}: the name {name} does not resolve ({error}). Check it.") from None

    def report(text: str) -> None:
        print(escaped_lines(text), flush=True)

    report(f"left: {take_part(address, known.shm_dir, report, known.name, known.status_file)}")
    return 0
