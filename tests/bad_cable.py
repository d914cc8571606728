"""A cable between two TAP devices that delays every packet and loses some: `bad_cable.py TAP TAP DELAY_MS LOSS`.

Packets, not streams, are lost, so TCP really retransmits. It runs in the namespace of one host until SIGTERM; the other
device may be moved to another namespace. Then it prints what it has done.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_BYTES = 65_536
MOST_WAITING = 2_000  # packets in each direction, as many as the queue of an interface


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(first: int, second: int, delay_s: float, loss: float) -> None:
    rng, order = random.Random(0), itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []  # when to deliver it, a number, to which device, the packet
    num_packets = num_lost = 0
    try:
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for device in select.select([first, second], [], [], timeout_s)[0]:
                try:
                    packet = os.read(device, MAX_BYTES)
                except OSError:  # it is not up yet
                    time.sleep(0.01)
                    continue
                num_packets += 1
                if rng.random() < loss or len(waiting) >= 2 * MOST_WAITING:
                    num_lost += 1
                    continue
                other = second if device == first else first
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                try:
                    os.write(device, packet)
                except OSError:  # it is down or its queue is full
                    num_lost += 1
    except KeyboardInterrupt:
        print(f"the cable carried {num_packets:,} packets and lost {num_lost:,} of them", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    devices = [open_tap(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(devices[0], devices[1], float(sys.argv[3]) / 1000, float(sys.argv[4]))
