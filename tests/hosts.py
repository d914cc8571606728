"""Two hosts on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from running import DEADLINE_S, wait_until

NEAR, FAR = "10.9.8.1", "10.9.8.2"


def name_of(process: subprocess.Popen[Any]) -> str:
    """What it runs: the holder of a namespace is made when it does nothing but sleep."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:  # it ended meanwhile
        return ""


def as_another_host(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)


@contextmanager
def made_hosts() -> Iterator[list[tuple[str, ...]]]:
    """What to put before a command to run it on either host, `NEAR` or `FAR`."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    holders = []
    try:
        outer = subprocess.Popen(["unshare", "-rn", "sleep", "300"], stderr=subprocess.PIPE)
        holders.append(outer)
        wait_until(lambda: outer.poll() is not None or name_of(outer) == "sleep", "it left ours and may do as it likes")
        into = ("nsenter", "-t", str(outer.pid), "-U", "--preserve-credentials", "-n")
        made = as_another_host(*into, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        if made.returncode != 0:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        inner = subprocess.Popen([*into, "unshare", "-n", "sleep", "300"])
        holders.append(inner)
        wait_until(lambda: name_of(inner) == "sleep", "there was a second one")
        far = ("nsenter", "-t", str(inner.pid), "-U", "--preserve-credentials", "-n")
        for command in (
            (*into, "ip", "link", "set", "cable1", "netns", str(inner.pid)),
            (*into, "ip", "addr", "add", f"{NEAR}/24", "dev", "cable0"),
            (*into, "ip", "link", "set", "cable0", "up"),
            (*into, "ip", "link", "set", "lo", "up"),
            (*far, "ip", "addr", "add", f"{FAR}/24", "dev", "cable1"),
            (*far, "ip", "link", "set", "cable1", "up"),
            (*far, "ip", "link", "set", "lo", "up"),
        ):
            done = as_another_host(*command)
            assert done.returncode == 0, (command, done.stderr)
        yield [into, far]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[str, ...]]]:
    with made_hosts() as hosts:
        yield hosts
