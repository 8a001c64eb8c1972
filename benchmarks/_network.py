"""A network of hosts on one Linux machine: namespaces joined by a bridge, each link with a token bucket in both directions.

All of it lies in namespaces of its own, the bridge too, so that nothing of the machine's network changes; removing them removes
everything. Needs root, iproute2, and a kernel with veth, bridge and tbf. Of what runs on the hosts it knows shards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from _processes import Shard

_PREFIX = "psdbench"
_BURST = "128kb"
_QUEUE = "30ms"
"""Queue at a link's end, as in a switch with a shallow buffer; more is dropped."""


class NetworkError(RuntimeError):
    """No network can be made here; the message says what is missing."""


def shards_on(network: Network | None, count: int) -> list[Shard]:
    """Shards, each on a host of its own, s0, s1 and so on, of the network; on this machine without one. To be started."""
    return [
        Shard(
            "--insecure",
            index=index,
            count=count,
            listen="127.0.0.1:0" if network is None else f"{network.address(f's{index}')}:7000",
            prefix=() if network is None else network.prefix(f"s{index}"),
        )
        for index in range(count)
    ]


class Network:
    """Hosts that see only each other.

    Args:
        stack: which takes the network down. hosts: their names, at most 200. mbit: of each host's link, each way, per second.

    Raises:
        NetworkError: not root, or a tool or a kernel module is missing.
    """

    def __init__(self, stack: ExitStack, hosts: Sequence[str], mbit: int) -> None:
        _check_machine()
        _remove_abandoned()
        self._hosts = list(hosts)
        switch = self._namespace("switch")
        self._add(stack, switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in self._hosts:
            name = self._namespace(host)
            self._add(stack, name)
            run("ip", "-n", switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, "link", "set", host, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            # What leaves the host, and what arrives.
            for namespace, device in ((name, "eth0"), (switch, host)):
                bucket = ("tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", _QUEUE)
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)
            self._choose_congestion_control(host)

    def prefix(self, host: str) -> list[str]:
        """The beginning of a command line that runs on the host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def address(self, host: str) -> str:
        """The host's IP address."""
        return f"10.77.0.{self._hosts.index(host) + 1}"

    def wire_bytes(self, host: str) -> int:
        """Bytes on the host's link so far, in both directions, with all headers."""
        shown = json.loads(run("ip", "-n", self._namespace(host), "-s", "-j", "link", "show", "eth0"))
        counted = shown[0]["stats64"]
        return int(counted["rx"]["bytes"]) + int(counted["tx"]["bytes"])

    def _namespace(self, host: str) -> str:
        return f"{_PREFIX}{os.getpid()}-{host}"

    def _add(self, stack: ExitStack, namespace: str) -> None:
        stack.callback(_remove, namespace)  # first, because a signal may come in between
        run("ip", "netns", "add", namespace)

    def _choose_congestion_control(self, host: str) -> None:
        """Set the same congestion control on every machine, where the kernel has it."""
        with contextlib.suppress(NetworkError):
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            run(*self.prefix(host), "sh", "-c", f"echo cubic > {setting} || echo reno > {setting}")


def _check_machine() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetworkError(f"there is no {tool!r} command; on Debian and Ubuntu: apt install iproute2")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root; try: sudo -E env PATH=$PATH python benchmarks/scale.py")


def _remove_abandoned() -> None:
    """Remove the networks of benchmarks that were killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def run(*command: str) -> str:
    """Run a command; return what it has printed. Raises NetworkError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
