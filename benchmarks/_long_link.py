"""A long link between two hosts of one Linux machine: whatever travels over it arrives later by half a round trip.

The hosts are network namespaces, each with a TUN device, and a process takes packets from one to the other. tc's netem would do
the same, but many kernels lack it. Needs root, iproute2 and /dev/net/tun. Of what runs on the hosts it knows nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from _network import NetworkError, run

_PREFIX = "psdlong"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 9000
"""Bytes of a packet, as in networks with large frames: fewer of them cost the process that moves them less."""


class LongLink:
    """Two hosts, a and b, that see only each other.

    Args:
        stack: which takes the link down. rtt_s: the round trip, in seconds.

    Raises:
        NetworkError: not root, or a tool or a device is missing.
    """

    def __init__(self, stack: ExitStack, rtt_s: float) -> None:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            raise NetworkError("a long link needs root and /dev/net/tun")
        ends = []
        for host in ("a", "b"):
            name = self._namespace(host)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, check=False)
            run("ip", "netns", "add", name)
            device = f"{_PREFIX}{host}{os.getpid()}"[:15]
            end = os.open("/dev/net/tun", os.O_RDWR)
            stack.callback(os.close, end)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            run("ip", "link", "set", device, "netns", name)
            peer = self.address("b" if host == "a" else "a")
            run("ip", "-n", name, "address", "add", self.address(host), "peer", peer, "dev", device)
            for each in (("lo", "up"), (device, "mtu", str(_MTU), "txqueuelen", "10000", "up")):
                run("ip", "-n", name, "link", "set", *each)
            ends.append(end)
        command = [sys.executable, __file__, *map(str, ends), str(rtt_s / 2)]
        carrier = subprocess.Popen(command, pass_fds=ends)
        stack.callback(carrier.wait)
        stack.callback(carrier.kill)

    def prefix(self, host: str) -> list[str]:
        """The beginning of a command line that runs on the host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def address(self, host: str) -> str:
        """The host's IP address."""
        return f"10.78.0.{1 + 'ab'.index(host)}"

    def _namespace(self, host: str) -> str:
        return f"{_PREFIX}{os.getpid()}-{host}"


def carry(ends: Sequence[int], delay_s: float) -> None:
    """Take packets from each end to the other, each after the delay, until killed."""
    for end in ends:
        os.set_blocking(end, False)
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        due = min((queue[0][0] for queue in under_way if queue), default=None)
        select.select(ends, [], [], None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for number, end in enumerate(ends):
            with contextlib.suppress(BlockingIOError):
                while True:
                    under_way[number].append((now + delay_s, os.read(end, _MTU)))
        for number, queue in enumerate(under_way):
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # full: the packet is lost, as on any link
                    os.write(ends[1 - number], queue.popleft()[1])


if __name__ == "__main__":
    carry([int(sys.argv[1]), int(sys.argv[2])], float(sys.argv[3]))
