"""The depth of a push_pull, its length and its breadth: the frames of psd from the program's call to the socket, all its calls,
and the files that it crosses."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

import psd
import psd_client
import psd_core
from psd.rim.bulk_connection import ServedConnection
from psd.rim.steps import OfferedSteps as ShardSteps
from psd_client import SGD, Table, connect
from psd_client.lanes import grpc_channel
from psd_client.lanes.daemon_threads import Crew, Task

FRAMES_MAX = 7
"""In one thread."""

CALLS_MAX = {
    (0, "shm"): (137, 145),
    (0, "tcp"): (147, 145),
    (1, "shm"): (240, 217),
    (1, "tcp"): (240, 215),
    (26, "shm"): (640, 700),
}
"""Calls of Python functions in one small step that is not armed, by number of tables and transport: on the worker, and on its
shard. They are most of its time."""

CALLS_MAX_ARMED = 42
"""On the worker, in an armed step; on its shard there are none."""

FILES_MAX = 60
"""Files with a function that a small push_pull calls, on the worker and on its shard, in a job that also has a table."""

OURS = tuple(f"{Path(path)}/" for package in (psd, psd_client, psd_core) for path in package.__path__)


class Depth:
    """The longest way that a push_pull has taken to the outside: the chain of each thread, the program's first."""

    def __init__(self) -> None:
        self.threads: list[list[str]] = []
        self._handed_over: dict[int, list[list[str]]] = {}

    def on_task(self, task: Task[Any]) -> None:
        """A thread hands a task over to another."""
        self._handed_over[id(task)] = self._chains()

    def on_sent(self) -> None:
        """Something leaves."""
        chains = self._chains()
        if chains and chains[0] and "push_pull (client.py" in chains[0][0]:
            self.threads = max(self.threads, chains, key=lambda chains: sum(map(len, chains)))

    def _chains(self) -> list[list[str]]:
        frame: FrameType | None = sys._getframe()
        before: list[list[str]] = []
        own: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(OURS):
                own.append(f"{getattr(code, 'co_qualname', code.co_name)} ({Path(code.co_filename).name}:{frame.f_lineno})")
                if code is Task.run.__code__:
                    before = self._handed_over.get(id(frame.f_locals["self"]), [])
            frame = frame.f_back
        return [*before, own[::-1]]

    def __str__(self) -> str:
        chains = [f"{len(chain)} frames\n    " + "\n    ".join(chain) for chain in self.threads]
        return "\n  handed over to another thread, ".join(chains)


class Watched(grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Between psd and gRPC."""

    def __init__(self, on_sent: Callable[[], None]) -> None:
        self._on_sent = on_sent

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        self._on_sent()
        return continuation(details, request)


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> Depth:
    """Watches sockets, gRPC's channels, and what threads hand over."""
    found = Depth()
    sendmsg, begin, open_channel = socket.socket.sendmsg, Crew.begin, grpc_channel.open_channel

    def sent(sock: socket.socket, *args: Any) -> int:
        found.on_sent()
        return sendmsg(sock, *args)

    def begun(crew: Crew, task: Task[Any]) -> None:
        found.on_task(task)
        begin(crew, task)

    monkeypatch.setattr(socket.socket, "sendmsg", sent)
    monkeypatch.setattr(Crew, "begin", begun)
    monkeypatch.setattr(
        grpc_channel, "open_channel", lambda *args: grpc.intercept_channel(open_channel(*args), Watched(found.on_sent))
    )
    return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_pull_has_few_frames_to_the_socket(cluster: Callable[..., Any], depth: Depth, transport: str, shards: int) -> None:
    """Seven at most in each thread; an error's traceback can be read, and little is done per call."""
    values = {f"w{shard}": np.zeros(16, np.float32) for shard in range(shards)}
    with connect(cluster(shards, never_armed=True).servers, 0, 1, transport=transport) as ps:
        ps.declare(values, SGD(lr=1.0), groups=[{"params": [name]} for name in values])  # a block for each shard
        ps.push_pull(values)  # shares memory, if any
        depth.threads.clear()
        ps.push_pull(values)

    assert depth.threads, "nothing was seen to leave"
    assert max(map(len, depth.threads)) <= FRAMES_MAX, f"\n  {depth}"


class Calls:
    """The calls of psd's Python functions in this thread, while it is a context."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(OURS)


@pytest.mark.parametrize(("tables", "transport"), CALLS_MAX)
def test_a_small_step_makes_few_calls(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tables: int, transport: str
) -> None:
    """What most jobs do not use costs their steps next to nothing, and many tables cost little more than one."""
    on_worker, on_shard, serve = Calls(), Calls(), ServedConnection._call

    def served(connection: ServedConnection, call: Any) -> None:
        with on_shard:
            serve(connection, call)

    values = {} if tables else {"w": np.zeros(256, np.float32)}
    ids, grads = np.arange(100), np.ones((100, 4), np.float32)
    with connect(cluster(1, never_armed=True).servers, 0, 1, transport=transport) as ps:
        ps.declare(values, SGD(lr=1.0), tables=[Table(f"t{number}", 4, SGD(lr=1.0)) for number in range(tables)])

        def step() -> None:
            for table in ps.tables.values():
                table.pull(ids)
                table.prefetch(ids)
            ps.push_pull(values, tables=dict.fromkeys(ps.tables, (ids, grads)))

        for _ in range(3):
            step()
        monkeypatch.setattr(ServedConnection, "_call", served)
        with on_worker:
            step()
        step()  # the shard has ended the call before

    worker_max, shard_max = CALLS_MAX[tables, transport]
    assert on_worker.count <= worker_max
    assert on_shard.count // 2 <= shard_max


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_armed_step_makes_fewer_calls(cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """And none on the shard, whose thread stays in C."""
    on_worker, taking, take = Calls(), [], ShardSteps.take

    def taken(steps: ShardSteps) -> None:
        taking.append("in C")
        take(steps)
        taking.append("back")

    monkeypatch.setattr(ShardSteps, "take", taken)
    values = {"w": np.zeros(256, np.float32)}
    with connect(cluster(1).servers, 0, 1, transport=transport) as ps:
        ps.declare(values, SGD(lr=1.0))
        for _ in range(4):
            ps.push_pull(values)
        before = list(taking)
        with on_worker:
            ps.push_pull(values)

        assert on_worker.count <= CALLS_MAX_ARMED
        assert taking == before
        assert taking[-1] == "in C"


class Files:
    """The files of psd's functions that are called in any thread that begins while it is a context, and in this one."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __enter__(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed has no None

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(OURS):
            self.found.add(name)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_small_push_pull_crosses_few_files(cluster: Callable[..., Any], transport: str) -> None:
    """Whoever follows it has as many files to read."""
    values, crossed, files = {"w": np.zeros(1000, np.float32)}, [], Files()
    with files, connect(cluster(1).servers, 0, 1, transport=transport) as ps:
        ps.declare(values, SGD(lr=1.0), tables=[Table("t", 4, SGD(lr=1.0), expire_steps=1000)])  # so it makes no steps
        for _ in range(3):
            ps.push_pull(values)
        for _ in range(5):
            files.found = found = set()
            ps.push_pull(values)
            ps.push_pull(values)  # the shard has ended the call before
            crossed.append(found)

    always = set.intersection(*crossed)  # a heartbeat or a tick of the shard may come between
    assert {Path(name).name for name in always} >= {"client.py", "data_plane.py", "arena.py"}
    assert len(always) <= FILES_MAX, "\n".join(sorted(always))
