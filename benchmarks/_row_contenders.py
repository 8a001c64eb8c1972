"""The systems that benchmarks/sparse.py measures against each other: psd's tables over each transport, and references.

Knows how each is started; nothing of tables of figures and limits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _contenders import CORES, Contender, Starter
from _processes import Peer, Shard, all_ready, free_ports, start_all
from peers.rows import Shape

__all__ = ["Starter", "bare_grpc", "join", "psd", "ray", "raw_tcp", "shared_memory", "tensorflow", "torch_rpc"]


def psd(
    name: str,
    transport: str,
    workers: int,
    shards: int,
    shape: Shape,
    consistency: str,
    options: Sequence[str] = (),
    **how: bool,
) -> Starter:
    """A contender: psd over one transport. options: of its shards. how: see `join`."""

    def start(stack: ExitStack) -> Contender:
        servers = [Shard("--lease", "120", "--insecure", *options, index=index, count=shards) for index in range(shards)]
        start_all(stack, servers)
        return join(stack, name, transport, workers, servers, shape, consistency, **how)

    return start


def join(
    stack: ExitStack,
    name: str,
    transport: str,
    workers: int,
    servers: Sequence[Shard],
    shape: Shape,
    consistency: str,
    **how: bool,
) -> Contender:
    """Start psd's workers of shards that serve already.

    Args:
        how: is_distinct: workers get each distinct id once. in_one: all tables' rows are in one table. fetches_ahead=False:
            rows come in round trips of their own, and not in that of the push before.
    """
    addresses = [server.address for server in servers]
    told: dict[str, Any] = {"servers": ",".join(addresses), "transport": transport, "consistency": consistency}
    peers = _workers("psd_rows", workers, shape, told | how)
    all_ready(stack, peers)
    return Contender(name, workers, len(servers), "", peers, [server.pid for server in servers], servers=addresses)


def shared_memory(workers: int, shape: Shape, library: Path) -> Starter:
    """A contender: loops in C over shared memory. library: with these loops."""

    def start(stack: ExitStack) -> Contender:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="psd-benchmark-"))) / "rows"
        with memory.open("wb") as file:
            file.truncate(2 * 4 * shape.rows * shape.dim)
        peers = _workers("shared_rows", workers, shape, {"memory": str(memory), "library": str(library)})
        all_ready(stack, peers)
        return Contender("gather/scatter", workers, 0, "", peers, [])

    return start


def raw_tcp(workers: int, shape: Shape) -> Starter:
    """A contender: the bytes of a step over loopback."""

    def start(stack: ExitStack) -> Contender:
        server = Peer("raw_tcp_rows", {"listen": "127.0.0.1:0", "shape": shape})
        address = all_ready(stack, [server])[0]["address"]
        peers = _workers("raw_tcp_rows", workers, shape, {"address": address})
        all_ready(stack, peers)
        return Contender("raw tcp", workers, 0, "", peers, [server.pid])

    return start


def bare_grpc(workers: int, shape: Shape) -> Starter:
    """A contender: the bytes of a step in one call of Python's gRPC."""

    def start(stack: ExitStack) -> Contender:
        server = Peer("bare_grpc_rows", {"shape": shape})
        address = all_ready(stack, [server])[0]["address"]
        peers = _workers("bare_grpc_rows", workers, shape, {"address": address})
        all_ready(stack, peers)
        return Contender("bare grpc", workers, 0, "", peers, [server.pid])

    return start


def torch_rpc(workers: int, shape: Shape) -> Starter:
    """A contender: rows on a server by torch.distributed.rpc."""

    def start(stack: ExitStack) -> Contender:
        meet = stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))
        told = {"meet": f"{meet}/store", "threads": max(1, CORES // workers)}
        server = Peer("torch_rpc_rows", {**told, "rank": -1, "workers": workers, "shape": shape})
        peers = _workers("torch_rpc_rows", workers, shape, told)
        all_ready(stack, [server, *peers])
        return Contender("torch rpc", workers, 0, "", peers, [server.pid])

    return start


def ray(python: str, workers: int, shape: Shape) -> Starter:
    """A contender: rows in an actor of Ray; `python` is the interpreter that has it."""

    def start(stack: ExitStack) -> Contender:
        peer = Peer("ray_rows", {"workers": workers, "shape": shape}, python=python)
        ready = all_ready(stack, [peer])[0]
        return Contender("ray", workers, 0, "", [peer], ready["server_pids"])

    return start


def tensorflow(python: str, workers: int, shape: Shape) -> Starter:
    """A contender: rows in a variable of TensorFlow's parameter server; `python` is the interpreter that has TensorFlow."""

    def start(stack: ExitStack) -> Contender:
        ports = free_ports(workers + 1)
        told = {"ps": f"127.0.0.1:{ports[0]}", "peers": [f"127.0.0.1:{port}" for port in ports[1:]]}
        server = Peer("tensorflow_rows", {**told, "rank": -1, "workers": workers, "shape": shape}, python=python)
        peers = _workers("tensorflow_rows", workers, shape, told, python=python)
        all_ready(stack, [server, *peers])
        return Contender("tensorflow", workers, 0, "", peers, [server.pid])

    return start


def _workers(script: str, workers: int, shape: Shape, told: dict[str, Any], **how: Any) -> list[Peer]:
    common = {**told, "workers": workers, "shape": shape}
    return [Peer(script, {**common, "rank": rank}, threads=max(1, CORES // workers), **how) for rank in range(workers)]
