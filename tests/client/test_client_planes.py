"""Workers that read their parameters where the shard of their machine has them, in its planes: nothing is copied."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, expire, in_threads, until
from short_ways import reads_planes

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import RolledBack
from psd_client import SGD, Adam, ParameterServer, connect
from psd_client.client import worker_of
from psd_core.arena import Arena, StoreFull

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shards share memory with workers on Linux")

SIZE = 300_000  # two blocks
SMALL = 100  # which no plane has
Start = Callable[..., Any]


def declare(ps: ParameterServer, rule: Any = None, **options: Any) -> dict[str, Any]:
    values = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(SMALL, np.float32)}
    groups = [{"params": ["w"]}, {"params": ["b"]}]
    return ps.declare(values, rule or SGD(lr=1), groups=groups, copy=False, reduce="sum", **options)


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32), "b": np.full(SMALL, value, np.float32)}


def both(params: dict[str, Any], value: float) -> bool:
    return bool((params["w"] == value).all() and (params["b"] == value).all())


def arena_of(running: Any) -> Arena:
    arena: Arena = running.shards[0].shard._core.job.arena
    return arena


@contextmanager
def workers(servers: str, count: int, transport: str = "shm", **options: Any) -> Iterator[list[ParameterServer]]:
    """So many declared workers of one job."""
    made = [connect(servers, rank, count, transport=transport, wait_timeout=100) for rank in range(count)]
    try:
        in_threads(*[lambda ps=ps: declare(ps, **options) for ps in made])
        yield made
    finally:
        for ps in made:
            ps.close()


@pytest.mark.parametrize(
    ("consistency", "aggregation"), [("sync", "fast"), ("sync", "exact"), ("async", "fast"), ("ssp:2", "fast")]
)
def test_push_pull_when_the_shard_is_on_this_machine_then_its_own_pages_are_read(
    cluster: Start, consistency: str, aggregation: str
) -> None:
    options = {"consistency": consistency, "aggregation": aggregation}
    with workers(cluster(1).servers, 1, **options) as (ps,):
        places = set()
        for number in range(1, 8):
            params = ps.push_pull(gradient(-1))
            assert both(params, number)
            assert reads_planes(ps)
            places.add(params["w"].ctypes.data)
        assert len(places) == 2
        assert both(ps.pull(), 7)


def test_arrays_when_they_lie_in_a_plane_then_nothing_can_write_to_them(cluster: Start) -> None:
    with workers(cluster(1).servers, 1) as (ps,):
        params = ps.push_pull(gradient(1))
        with pytest.raises(ValueError, match="read-only"):
            params["w"][0] = 3
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            params["w"].flags.writeable = True
        address, maps = params["w"].ctypes.data, Path("/proc/self/maps").read_text().splitlines()
        (line,) = [m for m in maps if (r := [int(a, 16) for a in m.split()[0].split("-")])[0] <= address < r[1]]
        assert line.split()[1] == "r--s"
        assert "/planes-" in line


def test_arrays_when_the_worker_only_pushes_then_they_stay_as_they_are_until_it_pulls(cluster: Start) -> None:
    with workers(cluster(1).servers, 1, consistency="async") as (ps,):
        params = ps.push_pull(gradient(-1))
        for _ in range(6):
            ps.push(gradient(-1))
            assert both(params, 1)
        assert both(ps.pull(), 7)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (SGD(lr=2.0**-6), {}),
        (SGD(lr=2.0**-6), {"quorum": 1}),
        (SGD(lr=2.0**-6, momentum=0.5), {"aggregation": "exact"}),
        (SGD(lr=2.0**-6, momentum=0.5), {"clip_norm": 100.0}),
        (Adam(lr=2.0**-6), {}),
        (Adam(lr=2.0**-6), {"clip_norm": 100.0, "aggregation": "exact"}),
    ],
)
def test_parameters_when_two_workers_read_planes_then_they_are_those_that_travel_over_sockets(
    cluster: Start, rule: Any, options: dict[str, Any]
) -> None:
    """To the bit."""
    found = []
    for transport in ("shm", "tcp"):
        with workers(cluster(1).servers, 2, transport, rule=rule, **options) as (ps, peer):
            for number in range(1, 6):
                gradients = gradient(number / 3)
                if "quorum" in options:  # one after the other: each is a round
                    peer.push_pull(gradients)
                    params = ps.push_pull(gradients)
                else:
                    params, _ = in_threads(lambda g=gradients: ps.push_pull(g), lambda g=gradients: peer.push_pull(g))
                assert reads_planes(ps) == (transport == "shm")
            found.append({name: array.copy() for name, array in params.items()})
            assert {name: array.tobytes() for name, array in peer.pull().items()} == {
                name: array.tobytes() for name, array in ps.pull().items()
            }

    assert (found[0]["w"] == found[1]["w"]).all()
    assert (found[0]["b"] == found[1]["b"]).all()


@pytest.mark.parametrize(("count", "shards", "consistency"), [(2, 1, "async"), (2, 1, "ssp:1"), (1, 2, "sync")])
def test_push_pull_when_workers_have_versions_of_their_own_then_each_gets_a_copy(
    cluster: Start, count: int, shards: int, consistency: str
) -> None:
    """And where several shards have a tensor's blocks."""
    running = cluster(shards)
    with workers(running.servers, count, consistency=consistency) as made:
        for ps in made:
            assert both(ps.push_pull(gradient(-1)), 1 + made.index(ps))
            assert not reads_planes(ps)
    assert arena_of(running)._blocks.planes.backed_bytes == 0


def test_a_version_when_its_worker_is_slow_then_it_stays_while_the_job_goes_on(cluster: Start) -> None:
    """A quorum of one closes rounds without it. No more memory is held than that of a few versions."""
    running = cluster(1)
    with workers(running.servers, 2, quorum=1) as (ps, peer):
        params = ps.pull()
        for number in range(1, 20):
            assert both(peer.push_pull(gradient(-1)), number)
            assert both(params, 0)
        assert arena_of(running)._blocks.planes.backed_bytes <= 3 * 4 * SIZE
        assert both(ps.pull(), 19)


def test_versions_when_a_worker_has_gone_then_they_are_held_no_more(cluster: Start) -> None:
    """However its connection ends; with the last worker that mapped the planes, their memory goes."""
    running = cluster(1)
    with workers(running.servers, 2, quorum=1) as (ps, peer):
        ps.pull()
        pinned = arena_of(running).current(0)
        for _ in range(2):
            peer.push_pull(gradient(-1))
        assert pinned.pins == 1
        connection = worker_of(ps)._shards.lanes[0]._bulk._open
        connection._stream.socket.shutdown(2)  # as the system does for a process that was killed
        until(lambda: pinned.pins == 0)
        assert both(ps.pull(), 2)
        assert reads_planes(ps)
    planes = arena_of(running)._blocks.planes
    until(lambda: planes._users == 0 and planes.idle_bytes == 0)


def test_a_worker_when_its_lease_has_ended_then_what_it_was_lent_is_free(cluster: Start) -> None:
    running = cluster(1)
    with workers(running.servers, 2, quorum=1) as (ps, peer):
        ps.pull()
        pinned = arena_of(running).current(0)
        peer.push_pull(gradient(-1))
        expire(running.shards[0], 0)
        watch = running.shards[0]._bulk._watch
        for _ in range(2):
            watch.look()
        until(lambda: pinned.pins == 0)
        assert both(ps.pull(), 1)  # it joins anew


def test_a_shard_that_is_started_again_leaves_alone_what_it_had_lent(cluster: Start, tmp_path: Path) -> None:
    """Another worker pushes to it meanwhile, many times."""
    running = Restartable(cluster, tmp_path, count=1)
    with workers(running.servers, 2, quorum=1) as (ps, peer):
        for _ in range(3):
            peer.push_pull(gradient(-1))
        params = ps.pull()
        assert both(params, 3)
        assert reads_planes(ps)
        for life in range(2):
            running.restart(0)
            for number in range(4 + 6 * life, 10 + 6 * life):
                assert both(peer.push_pull(gradient(-1)), number)
                assert both(params, 3)
        assert reads_planes(peer)
        assert both(ps.pull(), 15)
        assert reads_planes(ps)
    assert len(list(Path(arena_of(running).path.parent).glob("planes-*"))) == 1


@pytest.mark.parametrize("kind", ["push_pull", "pull"])
def test_a_call_when_its_reply_is_lost_then_the_next_attempt_has_the_parameters(cluster: Start, kind: str) -> None:
    ps, faults = connect_faulty(cluster(1).servers, transport="shm")
    with ps:
        declare(ps)
        faults.lose_reply(kind, shard=0)
        call = ps.pull if kind == "pull" else lambda: ps.push_pull(gradient(-1))
        assert both(call(), 0 if kind == "pull" else 1)
        assert both(ps.push_pull(gradient(-1)), 1 if kind == "pull" else 2)
        assert reads_planes(ps)
    faults.assert_all_fired()


def test_load_parameters_when_pages_are_lent_then_all_workers_read_the_new_ones(cluster: Start) -> None:
    with workers(cluster(1).servers, 2) as made:
        in_threads(*[lambda ps=ps: ps.push_pull(gradient(1)) for ps in made])
        new = gradient(7)
        in_threads(*[lambda ps=ps: ps.load_parameters(new) for ps in made])
        for ps in made:
            assert both(ps.pull(), 7)
        pulled = in_threads(*[lambda ps=ps: ps.push_pull(gradient(-1)) for ps in made])
        assert all(both(params, 9) for params in pulled)


def test_parameters_when_the_job_goes_back_to_a_checkpoint_then_they_are_its_and_are_lent_again(
    cluster: Start, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_steps": 5}
    running = cluster(1, state_dir=str(tmp_path / "state-0"), **settings)
    with workers(running.servers, 1) as (ps,):
        for number in range(1, 8):
            assert both(ps.push_pull(gradient(-1)), number)
        until(lambda: CheckpointDirectory(settings["checkpoint_dir"]).newest() is not None)
        running.shards[0].stop()
        cluster(1, listen=running.shards[0].address, state_dir=str(tmp_path / "state-1"), **settings)

        with pytest.raises(RolledBack):
            ps.push_pull(gradient(-1))
        for number in range(6, 10):
            assert both(ps.push_pull(gradient(-1)), number)
        assert reads_planes(ps)


def test_a_round_that_changes_nothing_leaves_the_parameters_where_they_are(cluster: Start) -> None:
    with workers(cluster(1).servers, 1, nan_policy="skip") as (ps,):
        assert both(ps.push_pull(gradient(-1)), 1)
        for _ in range(3):
            assert both(ps.push_pull(gradient(np.nan)), 1)
            assert reads_planes(ps)
        assert both(ps.push_pull(gradient(-1)), 2)


def test_push_pull_when_there_is_no_room_for_planes_then_parameters_are_copied(
    cluster: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise StoreFull("no room")

    monkeypatch.setattr(Arena, "begin_planes", refuse)
    with workers(cluster(1).servers, 1) as (ps,):
        for number in range(1, 4):
            assert both(ps.push_pull(gradient(-1)), number)
            assert not reads_planes(ps)
    assert caplog.text.count("no file for them can be made") == 1


def test_push_pull_when_the_worker_can_map_nothing_then_parameters_are_copied(
    cluster: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr("psd_client.lanes.attaching.MappedPlanes", refuse)
    with workers(cluster(1).servers, 1) as (ps,):
        for number in range(1, 4):
            assert both(ps.push_pull(gradient(-1)), number)
            assert not reads_planes(ps)
    assert "its parameters are copied: no memory" in caplog.text


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_parameters_of_other_dtypes_are_read_in_planes_too(cluster: Start, dtype: Any) -> None:
    """Of float16 the float32 master, from which the program gets a copy."""
    with connect(cluster(1).servers, 0, 1, transport="shm") as ps:
        ps.declare({"w": np.zeros(SIZE, dtype)}, SGD(lr=1), copy=False)
        for number in range(1, 5):
            params = ps.push_pull({"w": np.full(SIZE, -1, dtype)})
            assert params["w"].dtype == dtype
            assert (params["w"] == number).all()
            assert reads_planes(ps)


def test_memory_when_a_worker_reads_planes_then_it_has_no_parameters_of_its_own(cluster: Start) -> None:
    """Not even those that it has declared, or set."""
    with workers(cluster(1).servers, 1) as (ps,):
        segment = worker_of(ps).gradients.segment
        assert segment is not None

        def has_only_gradients() -> bool:
            return os.fstat(segment.fd).st_blocks * 512 < 4 * SIZE * 1.5

        ps.push_pull(gradient(-1))
        assert has_only_gradients()
        assert both(ps.push_pull(gradient(-1)), 2)
        ps.load_parameters(gradient(5))
        assert has_only_gradients()
        assert both(ps.push_pull(gradient(-1)), 6)


def test_a_reader_when_pages_lie_in_planes_then_it_gets_them(cluster: Start) -> None:
    running = cluster(1)
    with workers(running.servers, 1) as (ps,), connect(running.servers, role="reader") as reader:
        for number in range(1, 6):
            ps.push_pull(gradient(-1))
            assert both(dict(reader.pull()), number)
