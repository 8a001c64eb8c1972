"""The systems that are measured against each other: psd over each transport, the peers, and the limits of memory and wires.

Each contender is a set of processes that do the same step when told, so that several can take turns in one run, and a noisy
machine hurts all alike. Knows how each is started; nothing of tables and limits.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from _network import Network
from _processes import Peer, ProcessFailed, Shard, all_ready, cpu_s, free_ports, start_all
from peers import work

CORES = len(os.sched_getaffinity(0))


@dataclass
class Contender:
    """One system at work.

    Attributes:
        name: in the table. workers: how many push. shards: of psd; 0: another system.
        servers: addresses of psd's shards.
        model: name of what is trained. moves: whether bytes travel between workers and servers.
        gradient_bytes: of each number that is pushed.
        seconds: of the timed steps so far. own_seconds: likewise, of each worker by itself.
        server_cpu_s, worker_cpu_s: CPU time of the servers and of the workers, over all steps. all_steps: their number.
    """

    name: str
    workers: int
    shards: int
    model: str
    peers: list[Peer]
    server_pids: list[int]
    moves: bool = True
    gradient_bytes: int = 4
    servers: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    server_cpu_s: float = 0.0
    worker_cpu_s: float = 0.0
    all_steps: int = 0

    def take_turn(self, warm_up: int, steps: int) -> None:
        """Do steps, of which the first few are not timed."""
        before = sum(map(cpu_s, self.server_pids))
        for peer in self.peers:
            peer.ask(steps=warm_up + steps)
        answers = [peer.answer() for peer in self.peers]
        times = [answer["times"] for answer in answers]
        self.worker_cpu_s += sum(answer["cpu_s"] for answer in answers)
        self.server_cpu_s += sum(map(cpu_s, self.server_pids)) - before
        self.all_steps += warm_up + steps
        for step in range(warm_up, warm_up + steps):
            # From when the last worker begins until the last one has ended: workers in step begin when the step before ends.
            self.seconds.append(max(t[step][1] for t in times) - max(t[step][0] for t in times))
            self.own_seconds += [t[step][1] - t[step][0] for t in times]

    def verify(self) -> None:
        """Raise ProcessFailed if the arithmetic is wrong."""
        for peer in self.peers:
            peer.ask(pushes=[self.all_steps] * self.workers)
        for peer in self.peers:
            wrong = peer.answer()["wrong"]
            if wrong:
                raise ProcessFailed(f"{self.name}: {wrong}")

    @property
    def bytes_per_step(self) -> int:
        """Bytes pushed and pulled by all workers per step."""
        return (self.gradient_bytes + 4) * work.size_of(self.model) * self.workers


Starter = Callable[[ExitStack], Contender]


class Tls(NamedTuple):
    """Flags of a shard, and the file by which workers trust it."""

    flags: tuple[str, ...]
    ca: str


def psd(
    transport: str,
    workers: int,
    shards: int,
    model: str,
    *,
    consistency: str = "sync",
    call: str = "flat",
    half: bool = False,
    compress: str = "",
    pull: str = "",
    network: Network | None = None,
    tls: Tls | None = None,
    flags: Sequence[str] = (),
    ranks: int = 0,
) -> Starter:
    """A contender: psd over one transport.

    Args:
        call: "flat", what the faces of frameworks use; "named", push_pull of NumPy arrays; or "push" alone.
        half: parameters are float16, and so gradients have 16 bits. compress, pull: codecs; empty: none.
        flags: further ones of the shards. ranks: of the job, if others join it beside these workers.
        network: where shard i is host s<i> and worker i is host w<i>; else all share this one.
        tls: between workers and shards; else none.
    """
    flags = ("--lease", "120", *(("--insecure",) if tls is None else tls.flags), *flags)

    def start(stack: ExitStack) -> Contender:
        servers = []
        for index in range(shards):
            host = f"s{index}"
            listen, prefix = _listen(network, host), _on(network, host)
            servers.append(Shard(*flags, index=index, count=shards, listen=listen, prefix=prefix))
        start_all(stack, servers)
        told = {
            "servers": ",".join(server.address for server in servers),
            "world_size": max(workers, ranks),
            "transport": transport,
            "consistency": consistency,
            "model": model,
            "call": call,
            "dtype": "float16" if half else "float32",
            "compress": compress,
            "pull": pull,
            "tls_ca": "" if tls is None else tls.ca,
        }
        threads = max(1, CORES // workers)
        peers = []
        for rank in range(workers):
            prefix = _on(network, f"w{rank}")
            peers.append(Peer("psd_worker", {**told, "rank": rank}, threads=threads, prefix=prefix))
        all_ready(stack, peers)
        name = f"psd {transport}{' tls' if tls is not None else ''}{' half' if half else ''}"
        name += f"{compress and ' ' + compress}{pull and ' pull ' + pull}"
        addresses = [server.address for server in servers]
        pids = [server.pid for server in servers]
        return Contender(name, workers, shards, model, peers, pids, gradient_bytes=2 if half else 4, servers=addresses)

    return start


def _on(network: Network | None, host: str) -> list[str]:
    return network.prefix(host) if network is not None else []


def _listen(network: Network | None, host: str) -> str:
    return f"{network.address(host)}:7000" if network is not None else "127.0.0.1:0"


def reference(name: str, script: str, pattern: str, workers: int, model: str, *, network: Network | None = None) -> Starter:
    """A contender of one server and its clients, both in one script of peers/; on hosts s0 and w<i> of the network, if there is
    one."""

    def start(stack: ExitStack) -> Contender:
        told = {"pattern": pattern, "model": model}
        server = Peer(script, {**told, "listen": _listen(network, "s0")}, prefix=_on(network, "s0"))
        address = all_ready(stack, [server])[0]["address"]
        peers = [Peer(script, {**told, "address": address}, prefix=_on(network, f"w{rank}")) for rank in range(workers)]
        all_ready(stack, peers)
        return Contender(name, workers, 0, model, peers, [server.pid])

    return start


def memory(name: str, pattern: str, model: str) -> Starter:
    """A contender: memory operations on one core."""

    def start(stack: ExitStack) -> Contender:
        peer = Peer("memory", {"pattern": pattern, "model": model}, threads=1)
        all_ready(stack, [peer])
        return Contender(name, 1, 0, model, [peer], [], moves=False)

    return start


def by_hand(workers: int, model: str) -> Starter:
    """A contender: a server and its workers in memory that they share, and nothing else."""

    def start(stack: ExitStack) -> Contender:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="psd-benchmark-")))
        with (place / "memory").open("wb") as file:
            file.truncate(4 * work.size_of(model) * (2 + workers))
        told = {"memory": str(place / "memory"), "address": str(place / "socket"), "world_size": workers, "model": model}
        server = Peer("shared_step", told, threads=1)
        all_ready(stack, [server])
        peers = [Peer("shared_step", {**told, "rank": rank}, threads=1) for rank in range(workers)]
        all_ready(stack, peers)
        return Contender("by hand", workers, 0, model, peers, [server.pid])

    return start


def gloo(workers: int, model: str) -> Starter:
    """A contender: all-reduce, and SGD on each worker."""

    def start(stack: ExitStack) -> Contender:
        meet = stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))
        told = {"meet": f"{meet}/store", "world_size": workers, "threads": max(1, CORES // workers), "model": model}
        peers = [Peer("gloo", {**told, "rank": rank}) for rank in range(workers)]
        all_ready(stack, peers)
        return Contender("gloo all-reduce", workers, 0, model, peers, [])

    return start


def torch_rpc(workers: int, model: str) -> Starter:
    """A contender: a parameter server on torch.distributed.rpc."""

    def start(stack: ExitStack) -> Contender:
        meet = stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))
        told = {"meet": f"{meet}/store", "world_size": workers + 1, "threads": max(1, CORES // workers), "model": model}
        server = Peer("torch_rpc", {**told, "rank": 0})
        peers = [Peer("torch_rpc", {**told, "rank": rank + 1}) for rank in range(workers)]
        all_ready(stack, [server, *peers])
        return Contender("torch rpc", workers, 0, model, peers, [server.pid])

    return start


def ray(python: str, workers: int, model: str) -> Starter:
    """A contender: Ray actors; `python` is the interpreter that has Ray."""

    def start(stack: ExitStack) -> Contender:
        peer = Peer("ray_ps", {"world_size": workers, "model": model}, python=python)
        ready = all_ready(stack, [peer])[0]
        return Contender("ray", workers, 0, model, [peer], ready["server_pids"])

    return start


def tensorflow(python: str, workers: int, model: str) -> Starter:
    """A contender: TensorFlow's parameter servers; `python` is the interpreter that has TensorFlow."""

    def start(stack: ExitStack) -> Contender:
        ports = free_ports(workers + 1)
        told = {
            "ps": f"127.0.0.1:{ports[0]}",
            "workers": [f"127.0.0.1:{port}" for port in ports[1:]],
            "model": model,
        }
        server = Peer("tensorflow_ps", told, python=python)
        peers = [Peer("tensorflow_ps", {**told, "rank": rank}, python=python) for rank in range(workers)]
        all_ready(stack, [server, *peers])
        return Contender("tensorflow", workers, 0, model, peers, [server.pid])

    return start


def interpreter_with(module: str, given: str | None) -> str | None:
    """The interpreter that the user has named, or this one if it has the module, or None."""
    if given is not None:
        return given
    found = any((Path(entry) / module).is_dir() for entry in sys.path if entry)
    return sys.executable if found else None
