"""Parts of benchmarks/latency.py: contenders on given cores, a ping-pong in C, load by workers in C, and a busy shard.

Knows how each is started and takes its turns; nothing of tables of figures and limits.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
from _contenders import Contender, Starter, psd
from _processes import Peer, ProcessFailed, Shard, all_ready, cpu_s, pin, start_all
from peers import work

from psd.v1 import control_pb2, control_pb2_grpc

JOINS = 50
BUSY_STEPS = 100
"""Steps at a time while the shard is busy."""
BUSY_STEPS_MAX = work.STEPS_MAX * work.WORKERS_MAX
"""Steps of a single worker beyond which float32 would round."""
TENSORS = "1kb in 256"


def on_cores(cores: str, starter: Starter) -> Starter:
    """The contender on some cores: "one" for all its processes; "two", one for servers, another for workers; "free"."""

    def start(stack: ExitStack) -> Contender:
        contender = starter(stack)
        if cores != "free":
            those = sorted(os.sched_getaffinity(0))
            for peer in contender.peers:
                pin(peer.pid, those[-1])
            for pid in contender.server_pids:
                pin(pid, those[-1 if cores == "one" else 0])
        return contender

    return start


def named(name: str, starter: Starter) -> Starter:
    """The contender under another name."""

    def start(stack: ExitStack) -> Contender:
        contender = starter(stack)
        contender.name = name
        return contender

    return start


def raw_tcp(workers: int, library: str) -> Starter:
    """A contender: ping-pong of the same bytes over loopback, in C. library: with its loops."""

    def start(stack: ExitStack) -> Contender:
        server, address = _raw_server(stack, library)
        peers = [Peer("raw_calls", {"library": library, "address": address}) for _ in range(workers)]
        all_ready(stack, peers)
        return Contender("raw tcp", workers, 0, "1kb", peers, [server.pid])

    return start


def _raw_server(stack: ExitStack, library: str) -> tuple[Peer, str]:
    server = Peer("raw_calls", {"library": library, "listen": "127.0.0.1:0"})
    return server, all_ready(stack, [server])[0]["address"]


class Load(Contender):
    """Connections of one process that push as fast as they can. A turn's steps are the pushes of each connection; `seconds` has
    one entry a turn, for all of them."""

    def take_turn(self, warm_up: int, steps: int) -> None:
        """Push so often on each connection."""
        (peer,) = self.peers
        before = sum(map(cpu_s, self.server_pids))
        peer.ask(pushes=warm_up + steps)
        self.seconds.append(peer.answer()["seconds"])
        self.server_cpu_s += sum(map(cpu_s, self.server_pids)) - before
        self.all_steps += warm_up + steps

    def verify(self) -> None:
        """Raise ProcessFailed if the arithmetic is wrong."""
        (peer,) = self.peers
        peer.ask(verify=True)
        if wrong := peer.answer()["wrong"]:
            raise ProcessFailed(f"{self.name}: {wrong}")


def raw_load(connections: int, library: str) -> Starter:
    """A contender: so many ping-pongs at once."""

    def start(stack: ExitStack) -> Contender:
        server, address = _raw_server(stack, library)
        peer = Peer("raw_calls", {"library": library, "address": address, "connections": connections})
        all_ready(stack, [peer])
        return Load("raw tcp", connections, 0, "1kb", [peer], [server.pid])

    return start


def load(name: str, transport: str, consistency: str, connections: int, library: str, flags: Sequence[str] = ()) -> Starter:
    """A contender: one shard, and workers in C that send the messages of psd's workers again and again, or armed steps.

    Args:
        flags: further ones of the shard.
    """

    def start(stack: ExitStack) -> Contender:
        shard = Shard("--lease", "120", "--insecure", *flags)
        start_all(stack, [shard])
        told = {"servers": shard.address, "transport": transport, "consistency": consistency, "connections": connections}
        peer = Peer("replayed_calls", {**told, "model": "1kb", "library": library})
        stack.callback(shard.kill)  # its workers do not leave
        all_ready(stack, [peer])
        return Load(name, connections, 1, "1kb", [peer], [shard.pid])

    return start


def busy(stack: ExitStack, transport: str, calls: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure steps of an async job, 1 KB in 256 tensors, while its shard is idle otherwise and while it does something else.

    Args:
        calls: idle ones of a round. seconds: that it does something else in a round, at least.

    Returns:
        seconds of the steps while "idle", while "checkpoints" are taken, and while there are "joins"; "events": how many there
        were of the latter two.
    """
    kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))
    flags = ("--checkpoint-dir", kept, "--checkpoint-keep", "1")
    contender = psd(transport, 1, 1, TENSORS, consistency="async", call="flat", flags=flags, ranks=1 + JOINS)(stack)
    (address,) = contender.servers
    told = {"servers": address, "transport": transport, "world_size": 1 + JOINS, "model": TENSORS}
    joiner = Peer("joiner", told)
    all_ready(stack, [joiner])
    stub = control_pb2_grpc.ControlServiceStub(stack.enter_context(grpc.insecure_channel(address)))

    def checkpoints() -> int:
        stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=600)
        return 1

    def joins() -> int:
        joiner.ask(joins=JOINS)
        joiner.answer()
        return JOINS

    found: dict[str, Any] = {"transport": transport, "idle": [], "checkpoints": [], "joins": [], "events": {}}
    joins()  # all have been there once, and left: so nobody waits for one that was never there
    contender.take_turn(0, BUSY_STEPS)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds):
            for name, event in (("checkpoints", checkpoints), ("joins", joins)):
                contender.seconds.clear()
                contender.take_turn(0, calls)
                found["idle"] += contender.seconds
                contender.seconds.clear()
                under_way = pool.submit(_repeat, event, seconds)
                while not under_way.done() and contender.all_steps < BUSY_STEPS_MAX:
                    contender.take_turn(0, BUSY_STEPS)
                found[name] += contender.seconds
                found["events"][name] = found["events"].get(name, 0) + under_way.result()
    contender.verify()
    return found


def _repeat(event: Callable[[], int], seconds: float) -> int:
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        count += event()
    return count
