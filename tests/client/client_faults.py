"""A lane that misbehaves on demand, and other helpers of the client's tests.

    lanes, faults = faulty_lanes(cluster)
    faults.lose_reply("push", shard=1)     # the call reaches the shard, its answer does not reach the worker

A fault strikes once. `faults.assert_all_fired()` fails the test if one did not.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psd.contract.config import ClientConfig
from psd.contract.errors import PsdError, ShardUnavailable
from psd.rim.server import ShardServer
from psd_client.client import ParameterServer
from psd_client.lanes.shard_lane import ShardLane


class Faults:
    """Faults still to come: (method, shard) -> what to do around the call."""

    def __init__(self) -> None:
        self._before: list[tuple[str, int, Callable[[], object]]] = []
        self._after: list[tuple[str, int, Callable[[], object]]] = []

    def fail(self, method: str, *, shard: int, error: PsdError) -> None:
        """The call ends with an error before anything is sent."""
        self.run_before(method, shard=shard, action=lambda: _raise(error))

    def lose_reply(self, method: str, *, shard: int, after: Callable[[], object] = lambda: None) -> None:
        """The shard does what was asked; the worker does not hear of it, and something else happens."""

        def lose() -> None:
            after()
            raise ShardUnavailable("the reply was lost")

        self._after.append((method, shard, lose))

    def run_before(self, method: str, *, shard: int, action: Callable[[], object]) -> None:
        """Something else happens first."""
        self._before.append((method, shard, action))

    def assert_all_fired(self) -> None:
        assert [fault[:2] for fault in self._before + self._after] == []

    @contextmanager
    def around(self, method: str, shard: int) -> Iterator[None]:
        self._strike(self._before, method, shard)
        yield
        self._strike(self._after, method, shard)

    @staticmethod
    def _strike(faults: list[tuple[str, int, Callable[[], object]]], method: str, shard: int) -> None:
        for fault in faults:
            if fault[:2] == (method, shard):
                faults.remove(fault)
                fault[2]()
                return


def _raise(error: PsdError) -> None:
    raise error


class FaultyLane(ShardLane):
    """A lane whose calls meet the faults. It makes no armed steps, which are no calls."""

    stepping = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]

    def __init__(self, shard: int, address: str, faults: Faults, transport: str = "grpc") -> None:
        super().__init__(shard, address, transport)
        self._faults = faults


def _around(method: str) -> Callable[..., Any]:
    call = getattr(ShardLane, method)

    def among_faults(lane: FaultyLane, *args: Any, **options: Any) -> Any:
        with lane._faults.around(method, lane.shard):
            return call(lane, *args, **options)

    return among_faults


for _method in (
    *("join", "declare", "commit", "measure", "log", "barrier", "stop", "initialize", "push", "pull", "push_pull"),
    *("run_vectors", "change_vectors", "pull_rows"),
):
    setattr(FaultyLane, _method, _around(_method))


class Restartable:
    """Shards with state directories, each to be stopped and started again at its address."""

    def __init__(self, cluster: Callable[..., Any], directory: Path, count: int = 2, **config: Any) -> None:
        self._cluster = cluster
        self._count = count
        self._directory = directory
        self._config = config
        self.shards = [self._start(index, "127.0.0.1:0") for index in range(count)]

    def _start(self, index: int, address: str) -> Any:
        state_dir = str(self._directory / f"shard-{index}")
        return self._cluster(self._count, only=index, listen=address, state_dir=state_dir, **self._config).shards[0]

    @property
    def servers(self) -> str:
        return ",".join(shard.address for shard in self.shards)

    def restart(self, index: int) -> None:
        self.shards[index].stop()
        self.shards[index] = self._start(index, self.shards[index].address)

    def lose(self, index: int) -> None:
        """Start a shard again after it has lost what it held."""
        self.shards[index].stop()
        shutil.rmtree(self._directory / f"shard-{index}")
        self.shards[index] = self._start(index, self.shards[index].address)

    def version(self, index: int) -> int:
        version: int = self.shards[index].shard._core.declared().version_max
        return version


def connect_faulty(
    servers: str, rank: int = 0, world_size: int = 1, transport: str = "grpc", **config: Any
) -> tuple[ParameterServer, Faults]:
    """A worker over lanes that misbehave."""
    faults = Faults()
    addresses = tuple(servers.split(","))
    lanes = [FaultyLane(shard, address, faults, transport) for shard, address in enumerate(addresses)]
    return ParameterServer(ClientConfig(addresses, rank, world_size, **config), lanes), faults


def expire(server: ShardServer, rank: int) -> None:
    """Let a worker's lease run out now."""
    core = server.shard._core
    with core.lock:
        core.members.worker(rank).last_seen -= 1000
        assert [worker.rank for worker in server.shard.tick()] == [rank]


def until(fact: Callable[[], bool]) -> None:
    """Return once another thread has made something true."""
    deadline = time.monotonic() + 100
    pause = threading.Event()
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.002)


class Thread(threading.Thread):
    """A thread whose result, or error, `result` gives."""

    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = target
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._error = error

    def end(self) -> BaseException | None:
        """Wait for the end; the error that was raised, if any."""
        self.join(100)
        assert not self.is_alive(), "the thread hangs"
        return self._error

    def result(self) -> Any:
        if (error := self.end()) is not None:
            raise error
        return self._value


def in_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Run functions side by side; their results."""
    threads = [Thread(target) for target in targets]
    errors = [error for thread in threads if (error := thread.end()) is not None]
    if errors:  # a barrier that another thread has broken says less than why
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [thread.result() for thread in threads]
