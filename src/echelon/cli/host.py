"""`echelon host --join HOST:PORT`: lend this host to a run that was started with --engine hosts."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Sequence

from echelon.cli.main import Parser
from echelon.errors import ConfigError
from echelon.fields import require_address


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon host",
        description="Lend this host to a run: `echelon train PRESET ENV --engine hosts --hosts N` says where to join, "
        "and has some of its actors here until it is over. Off the loopback ECHELON_SECRET must be that of the run.",
    )
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="where the run listens for hosts")
    parser.add_argument("--name", default="", metavar="NAME", help="what the run calls this host (default: its name)")
    parser.add_argument("--shm-dir", default="/dev/shm", metavar="DIR", help="where shared memory lives")
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
    report = functools.partial(print, file=sys.stdout, flush=True)
    report(f"left: {take_part(address, known.shm_dir, report, known.name)}")
    return 0
