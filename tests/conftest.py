"""Fixtures of all tests: real shards in this process, on free loopback ports, and threads as their workers; the long forms are
left out unless asked for."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checked_locks
import pytest
from free_ports import claimed_port
from hypothesis import HealthCheck, settings
from short_ways import Watch

import psd_client
from psd.contract.config import ServerConfig
from psd.contract.environment import memory_directory
from psd.rim.server import ShardServer
from psd_client.lanes.steps import SteppingLanes

# How long an example takes says how busy the machine is, and nothing of the code. Each run draws others; `make fuzz`, more.
settings.register_profile(
    "psd",
    max_examples=int(os.environ.get("PSD_FUZZ_EXAMPLES", "0")) or 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("psd")

checked_locks.install()


def pytest_configure() -> None:
    """Signals that this process was told to ignore, in the background or under nohup, would be ignored by the commands, too."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `chaos` take minutes: -m chaos runs them."""
    if "chaos" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("chaos") is not None]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Ten thousand tests and all modules stay to the end: no search for garbage need go through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile each process takes a file at a time, but of the docs a page: all pages are one file, the longest."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesAndPages(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, rest = nodeid.partition("::")
            return nodeid if rest.startswith("test_the_blocks_of_a_page_run[") else file

    return FilesAndPages(config, log)


@dataclass
class Cluster:
    """Running shards. `servers` is the address list that clients take."""

    shards: list[ShardServer]

    @property
    def servers(self) -> str:
        return ",".join(shard.address for shard in self.shards)

    def finish(self) -> None:
        """Have the shards of a job that ends store what they hold."""
        for shard in self.shards:
            assert shard.done.wait(100)
            shard.drain(5)


@pytest.fixture(autouse=True)
def _rules_of_locks_are_kept() -> Iterator[None]:
    """By all threads, whose errors a shard may have answered."""
    checked_locks.broken.clear()
    yield
    assert checked_locks.broken == []


@pytest.fixture(scope="session", autouse=True)
def _jobs_of_tests_are_listed_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Records of jobs are among this run's files: what else runs on the machine is not seen, nor changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSD_JOBS_DIR", str(tmp_path_factory.mktemp("jobs") / "private"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_arena_is_left() -> Iterator[None]:
    """Check, when all tests have ended, that nothing is left of the memory-backed files of this process's shards."""
    yield
    gc.collect()
    arenas = [arena.parent for arena in memory_directory().glob(f"psd-{os.getuid()}-*/arena")]
    assert [str(path) for path in arenas if _owner(path) == os.getpid()] == []


def _owner(arena: Path) -> int | None:
    """Process that has an arena, if it is still there: other processes' come and go."""
    try:
        return int((arena / "lock").read_bytes()[:16])
    except (FileNotFoundError, ValueError):
        return None


@pytest.fixture
def later_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts load torch's compiler when they compile: tests/later_compiler says how, and why."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "later_compiler"), prepend=os.pathsep)


@contextmanager
def _clusters() -> Iterator[Callable[..., Cluster]]:
    """Starts shards: cluster(shard_count, **ServerConfig fields) -> Cluster; `only`: one of them. Stopped in the end."""
    started: list[ShardServer] = []
    claims: list[socket.socket] = []

    def any_address() -> str:
        port, claim = claimed_port()
        claims.append(claim)
        return f"127.0.0.1:{port}"

    def start(shard_count: int = 1, *, only: int | None = None, listen: str = "", **config: Any) -> Cluster:
        config.setdefault("on_worker_failure", "continue")  # so that no test lets a lease pass for a session that has failed
        config.setdefault("lease_s", 60.0)  # a busy machine must not look like a dead worker
        shards = [
            ShardServer(ServerConfig(shard_index=i, shard_count=shard_count, listen=listen or any_address(), **config))
            for i in (range(shard_count) if only is None else [only])
        ]
        for shard in shards:
            shard.start()
            started.append(shard)
        return Cluster(shards)

    yield start
    for shard in started:
        shard.stop()
    for claim in claims:
        claim.close()


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """The fixture `_clusters` for one test."""
    with _clusters() as start:
        yield start


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[Callable[..., Cluster]]:
    """The fixture `_clusters` for all tests of a module: all need it, and none of them changes it."""
    with _clusters() as start:
        yield start


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What becomes of the steps of all workers of this process."""
    found = Watch()
    monkeypatch.setattr(SteppingLanes, "run", lambda *args: found.run(*args))  # noqa: PLW0108 - a method
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """`with impatient():` shards of this process end each wait that begins after 0.1 s, as if its caller's deadline were near.

    A caller's own short deadline would also end what is only slow, and on a busy machine pass before the shard's answer came.
    """

    @contextmanager
    def ending_waits() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("psd.rim.calls.WAIT_S_MAX", 0.1)
            yield

    return ending_waits


RunWorkers = Callable[..., list[Any]]


@pytest.fixture
def run_workers(cluster: Callable[..., Cluster]) -> RunWorkers:
    """run_workers(world_size, shards, worker) -> what worker(ps) returned, in the order of the ranks; options go to connect.

    Workers are threads of the test's process, each with a connection of its own to real shards.
    """

    def run(world_size: int, shards: int, worker: Callable[[psd_client.ParameterServer], Any], **options: Any) -> list[Any]:
        servers = cluster(shards).servers

        def connected(rank: int) -> Any:
            with psd_client.connect(servers, rank, world_size, **{"wait_timeout": 120, **options}) as ps:
                return worker(ps)

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(connected, range(world_size)))

    return run
