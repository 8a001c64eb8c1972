"""Relays: what readers of them get, and when; what happens as relays and shards come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from relayed_job import INITIAL, StartRelay, assert_is_of, declare, step
from waiting import wait_until

import psd_client
from psd.contract.config import ConfigError
from psd.relay.server import RelayServer
from psd.v1 import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc
from psd_client.lanes.shard_lane import ShardLane

WAIT_S = 100.0


def reading(servers: str, **settings: Any) -> psd_client.Reader:
    return psd_client.connect(servers, role="reader", **{"wait_timeout": WAIT_S, **settings})


def version_of(relay: RelayServer) -> int:
    """The version that a relay has; -1: none."""
    held = relay.holding.held
    return -1 if held is None else held.version


@pytest.fixture
def job(cluster: Callable[..., Any]) -> Iterator[tuple[psd_client.ParameterServer, str]]:
    """The worker of a job on three shards, at version 0, and the shards' addresses."""
    servers = cluster(3).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=WAIT_S) as ps:
        declare(ps)
        yield ps, servers


class Background:
    """A call in another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._found.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._errors.append(error)

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the call hangs"
        if self._errors:
            raise self._errors[0]
        return self._found[0]


# -- what a reader gets ----------------------------------------------------------------------------------------------------


def test_a_reader_gets_from_a_relay_what_the_shards_have(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay
) -> None:
    """All of three shards at one address: everything, by name, and into given arrays; with the shards' version."""
    ps, servers = job
    step(ps)
    with reading(relay(servers).address) as reader:
        found = reader.pull()
        assert_is_of(1, found)
        assert found.version == 1
        assert_is_of(1, reader.pull(names=["head", "*.b"]), ("encoder.b", "head"))
        out = {"head": np.zeros((2, 3), np.float32)}
        assert reader.pull(out=out)["head"] is out["head"]
        np.testing.assert_array_equal(out["head"], INITIAL["head"] - 1)
        with pytest.raises(psd_client.InvalidRequest, match="names: no tensor is called 'tail'"):
            reader.pull(names=["tail"])


def test_blocks_that_a_reader_does_not_name_do_not_travel(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay
) -> None:
    _, servers = job
    server = relay(servers)
    with reading(server.address) as reader:
        reader.pull(names=["encoder.b"])
        assert 0 < server.holding.counters.sent_bytes < 1000


@pytest.mark.parametrize("consistency", ["async", "ssp:2"])
def test_a_relay_of_a_job_without_rounds_serves_one_cut(
    cluster: Callable[..., Any], relay: StartRelay, consistency: str
) -> None:
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1) as ps:
        declare(ps, consistency=consistency)
        with reading(relay(servers).address) as reader:
            assert_is_of(0, reader.pull())
            waiting = Background(lambda: reader.pull(newer_than=0))
            for _ in range(3):
                step(ps)
            found = waiting.result()
            pushes = 1 - int(found["head"][0, 0])
            assert_is_of(pushes, found)
            assert 1 <= found.version <= pushes <= 3  # its number is how far the slowest worker was when it was asked for
            assert_is_of(3, reader.pull(newer_than=2))


def test_a_relay_of_a_half_precision_job_serves_its_masters(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """Also where workers pull bfloat16: readers get what they would get from the shards."""
    servers = cluster(2).servers
    values = {"h": np.linspace(-1, 1, 9_000, dtype=np.float16), "flag": np.array([True, False])}
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare({"h": values["h"]}, psd_client.SGD(lr=0.1))
        ps.push_pull({"h": np.full(9_000, 1 / 3, np.float16)})
        with reading(servers) as direct, reading(relay(servers).address) as reader:
            assert reader.pull()["h"].tobytes() == direct.pull()["h"].tobytes()


def test_a_reader_waits_at_a_relay_for_a_newer_version(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, which also takes a version that is further ahead than it was asked for."""
    ps, servers = job
    server = relay(servers)
    asked: list[tuple[int, bool]] = []
    read = ShardLane.read

    def note(lane: ShardLane, request: Any, *arguments: Any) -> Any:
        if lane.address == server.address:
            asked.append((request.cut.step, request.or_newer))
        return read(lane, request, *arguments)

    monkeypatch.setattr(ShardLane, "read", note)
    with reading(server.address) as reader:
        assert_is_of(0, reader.pull())
        with pytest.raises(psd_client.WaitTimeout, match="newer_than: there is no version above 0 yet"):
            reader.pull(newer_than=0, timeout=0.3)
        asked.clear()
        waiting = Background(lambda: reader.pull(newer_than=0))
        wait_until(lambda: server.holding.readers.calls == 1, "a reader waits")
        step(ps)
        assert_is_of(1, waiting.result())
        assert asked == [(1, True)]
        for _ in range(3):
            step(ps)
        wait_until(lambda: version_of(server) == 4, "the relay follows")
        assert_is_of(4, reader.pull(newer_than=2))


def test_relays_follow_relays(job: tuple[psd_client.ParameterServer, str], relay: StartRelay) -> None:
    """A chain of three, and a tree: the first one has two below it. The shards send each version once."""
    ps, servers = job
    first = relay(servers)
    second, third = relay(first.address), relay(first.address)
    last = relay(second.address)
    with reading(last.address) as at_end, reading(third.address) as beside:
        for version in range(3):
            newer_than = version - 1 if version else None
            assert_is_of(version, at_end.pull(newer_than=newer_than))
            assert_is_of(version, beside.pull(newer_than=newer_than))
            step(ps)


def test_a_slow_reader_keeps_the_version_that_it_began_with(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """It has one version throughout, however many come meanwhile; others have the newest at once."""
    servers = cluster(1).servers
    size = 8_000_000  # more than gRPC sends ahead
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=1.0))
        server = relay(servers)
        with reading(server.address) as reader, grpc.insecure_channel(server.address) as channel:
            assert not reader.pull()["w"].any()
            described = control_pb2_grpc.ControlServiceStub(channel).Describe(
                control_pb2.DescribeRequest(shard_count=1), timeout=WAIT_S
            )
            request = data_pb2.ReadRequest(run_id=described.run_id, layout_digest=described.layout_digest, or_newer=True)
            slow = data_pb2_grpc.DataServiceStub(channel).Read(request, timeout=WAIT_S)
            frames = [next(slow)]
            for version in range(1, 5):
                ps.push_pull({"w": np.ones(size, np.float32)})
                assert (reader.pull(newer_than=version - 1)["w"] == -version).all()
            frames += slow
            assert {frame.version for frame in frames} == {0}
            assert sum(len(frame.payload) for frame in frames) == 4 * size
            assert not any(frame.payload.count(b"\0") < len(frame.payload) for frame in frames)


# -- who comes and goes ----------------------------------------------------------------------------------------------------


def test_a_relay_that_has_nothing_yet_makes_its_readers_wait(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """It never answers with an empty or a made-up version."""
    servers = cluster(2).servers
    server = relay(servers)
    with reading(server.address) as reader, psd_client.connect(servers, 0, 1) as ps:
        with pytest.raises(psd_client.NotDeclared, match=r"a relay of 127.0.0.1:\d+,127.0.0.1:\d+ has no version yet: "):
            reader.pull(timeout=0.3)
        waiting = Background(reader.pull)
        declare(ps)
        assert_is_of(0, waiting.result())


def test_a_reader_goes_to_the_next_relay_when_one_ends(job: tuple[psd_client.ParameterServer, str], relay: StartRelay) -> None:
    """In the midst of a wait, too, and back again; it says so of none of it."""
    ps, servers = job
    first, second = relay(servers), relay(servers)
    with reading(f"{first.address}|{second.address}") as reader:
        assert_is_of(0, reader.pull())
        waiting = Background(lambda: reader.pull(newer_than=0))
        wait_until(lambda: first.holding.readers.calls == 1, "a reader waits")
        first.drain(5)
        wait_until(lambda: second.holding.readers.calls == 1, "it waits at the other one")
        step(ps)
        assert_is_of(1, waiting.result())


def test_a_reader_takes_no_older_version_from_another_relay(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay
) -> None:
    """The second relay has lost what it follows, and is behind the first."""
    ps, servers = job
    first, lost = relay(servers), relay(servers)
    second = relay(lost.address)
    wait_until(lambda: version_of(second) == 0, "the second one has a version")
    lost.stop()
    step(ps)
    with reading(f"{first.address}|{second.address}", retry_timeout=5) as reader:
        assert_is_of(1, reader.pull(newer_than=0))
        first.stop()
        with pytest.raises(psd_client.WaitTimeout):
            reader.pull(timeout=1)


def test_a_reader_does_not_stay_at_a_relay_that_is_cut_off(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay lives, but what it follows is lost: after a while without news readers, and relays, ask the next one."""
    monkeypatch.setattr("psd_client.reader.NEWEST_PATIENCE_S", 1.0)
    ps, servers = job
    lost, other = relay(servers), relay(servers)
    cut_off = relay(lost.address)
    below = relay(f"{cut_off.address}|{other.address}")
    wait_until(lambda: version_of(below) == 0, "the last one has a version")
    lost.stop()
    with reading(f"{cut_off.address}|{other.address}") as reader, reading(below.address) as last:
        reader.pull()
        step(ps)
        assert_is_of(1, reader.pull(newer_than=0))
        assert_is_of(1, last.pull(newer_than=0))


def test_a_relay_serves_what_it_has_when_its_shards_are_lost_and_says_so(
    cluster: Callable[..., Any], relay: StartRelay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And follows them again when they are back."""
    caplog.set_level("INFO", "psd.relay")
    shards = cluster(1, state_dir=str(tmp_path / "state")).shards
    ps = psd_client.connect(shards[0].address, 0, 1, wait_timeout=WAIT_S)
    with ps:
        declare(ps)
        step(ps)
        server = relay(shards[0].address)
        with reading(server.address) as reader:
            assert_is_of(1, reader.pull())
            shards[0].stop()
            wait_until(lambda: "serves version 1" in caplog.text, "the relay says that it has lost its shards")
            assert_is_of(1, reader.pull())
            status = server.service.status(control_pb2.StatusRequest(), None).relay
            assert (status.of, status.version) == (shards[0].address, 1)
            assert "could not be reached" in status.problem

            cluster(1, listen=shards[0].address, state_dir=str(tmp_path / "state"))
            step(ps)
            assert_is_of(2, reader.pull(newer_than=1))
            wait_until(lambda: "again" in caplog.text, "the relay says that they are back")
            assert server.service.status(control_pb2.StatusRequest(), None).relay.problem == ""


def test_a_version_on_a_relay_never_goes_back(
    cluster: Callable[..., Any], relay: StartRelay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the shards have come back without their state: what is older is not taken, and said to be."""
    monkeypatch.setattr("psd.relay.following.FOLLOW_S", 1.0)
    shards = cluster(1, run_id="mine").shards
    with psd_client.connect(shards[0].address, 0, 1) as ps:
        declare(ps)
        for _ in range(3):
            step(ps)
        server = relay(shards[0].address)
        with reading(server.address) as reader:
            assert_is_of(3, reader.pull())
    shards[0].stop()
    cluster(1, run_id="mine", listen=shards[0].address)
    with psd_client.connect(shards[0].address, 0, 1) as ps, reading(server.address) as reader:
        declare(ps)
        step(ps)
        wait_until(lambda: "are at version 1, older than 3, which stays" in caplog.text, "the relay says so")
        assert_is_of(3, reader.pull())
        for _ in range(3):
            step(ps)
        assert_is_of(4, reader.pull(newer_than=3))


def test_a_relay_keeps_to_its_run(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """Another run at the shards' addresses is not handed out as if it were the same."""
    shards = cluster(1, run_id="mine").shards
    with psd_client.connect(shards[0].address, 0, 1) as ps:
        declare(ps)
        server = relay(shards[0].address)
        wait_until(lambda: version_of(server) == 0, "the relay has a version")
    shards[0].stop()
    cluster(1, run_id="another", listen=shards[0].address)
    with psd_client.connect(shards[0].address, 0, 1) as ps:
        declare(ps)
        step(ps)
        wait_until(lambda: "'another'" in server.service.status(control_pb2.StatusRequest(), None).relay.problem)
    with reading(server.address) as reader:
        assert_is_of(0, reader.pull())
    with reading(server.address, run_id="another") as reader, pytest.raises(psd_client.ForeignRun, match="serves 'mine'"):
        reader.pull()


# -- what a relay refuses --------------------------------------------------------------------------------------------------


def test_a_relay_refuses_what_changes_the_job(job: tuple[psd_client.ParameterServer, str], relay: StartRelay) -> None:
    """By name, and says where to go."""
    _, servers = job
    server = relay(servers)
    words = f"a relay of {servers} serves readers alone; connect to the shards of the job"
    with pytest.raises(psd_client.InvalidRequest, match=f"Join: {words}"):
        psd_client.connect(server.address, 0, 1)
    with reading(server.address) as reader, pytest.raises(psd_client.InvalidRequest, match="does not have server-side vectors"):
        _ = reader.vectors
    with grpc.insecure_channel(server.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        data = data_pb2_grpc.DataServiceStub(channel)
        calls: list[Callable[[], Any]] = [
            lambda: stub.Barrier(control_pb2.BarrierRequest(), timeout=WAIT_S),
            lambda: stub.Drain(control_pb2.DrainRequest(), timeout=WAIT_S),
            lambda: stub.OpenBulk(control_pb2.OpenBulkRequest(), timeout=WAIT_S),
            lambda: stub.OpenReads(control_pb2.OpenReadsRequest(), timeout=WAIT_S),
            lambda: data.Push(iter([data_pb2.PushFrame()]), timeout=WAIT_S),
            lambda: list(data.Pull(data_pb2.PullRequest(), timeout=WAIT_S)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError, match=words):
                call()


def test_a_relay_has_no_rows_of_tables(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """It has the job's tensors, and the names of its tables."""
    servers = cluster(1).servers
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare(
            {"w": np.zeros(3, np.float32)},
            psd_client.SGD(lr=1.0),
            tables=[psd_client.Table("items", 4, psd_client.SGD(lr=0.1))],
        )
        with reading(relay(servers).address) as reader:
            assert reader.pull()["w"].tolist() == [0.0] * 3
            with pytest.raises(psd_client.InvalidRequest, match=r"ReadRows: a relay of .* does not have rows of tables"):
                reader.tables["items"].pull(np.array([1]))


def test_no_version_of_a_job_of_tables_alone_is_made_up(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """A version that has no blocks to wait for is there when the shards have told of it, and not before."""
    servers = cluster(1).servers
    rows = {"items": (np.array([1]), np.ones((1, 4), np.float32))}
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare({}, psd_client.SGD(lr=1.0), tables=[psd_client.Table("items", 4, psd_client.SGD(lr=0.1))])
        server = relay(servers)
        with reading(servers) as direct, reading(server.address) as reader:
            for each in (direct, reader):
                assert each.pull() == {}
                with pytest.raises(psd_client.WaitTimeout, match="newer_than: there is no version above 0 yet"):
                    each.pull(newer_than=0, timeout=0.5)
            ps.push_pull({}, tables=rows)
            for each in (direct, reader):
                found = each.pull(newer_than=0)
                assert (found, found.version) == ({}, 1)


def test_addresses_of_relays_are_given_as_alternatives(job: tuple[psd_client.ParameterServer, str], relay: StartRelay) -> None:
    _, servers = job
    first, second = relay(servers).address, relay(servers).address
    with reading(f"{first},{second}") as reader, pytest.raises(psd_client.WrongShard, match=r'as alternatives, "A\|B"'):
        reader.pull()
    with pytest.raises(ConfigError, match="names relays to choose from, which serve readers; a worker needs the shards"):
        psd_client.connect(f"{first}|{second}", 0, 1)
    with pytest.raises(ConfigError, match="an address is given twice"):
        reading(f"{first}|{first}")
    with pytest.raises(ConfigError, match="servers: expected HOST:PORT"):
        reading(f"{first}|")


def test_a_relay_does_not_follow_itself(relay: StartRelay) -> None:
    with pytest.raises(ConfigError, match=r"--relay-of: 127.0.0.1:7100 is this relay's own address"):
        relay("127.0.0.1:7100|127.0.0.1:7101", listen="127.0.0.1:7100")


def test_readers_beyond_the_limit_are_refused(job: tuple[psd_client.ParameterServer, str], relay: StartRelay) -> None:
    """They go to another relay, if they know one."""
    ps, servers = job
    server, other = relay(servers, reads=1), relay(servers)
    with reading(server.address) as first, reading(server.address, retry_timeout=0) as second:
        first.pull()
        waiting = Background(lambda: first.pull(newer_than=0))
        wait_until(lambda: server.holding.readers.calls == 1, "a reader waits")
        with pytest.raises(psd_client.ShardUnavailable, match=r"Read: 1 readers are served already .*; its --max-reads"):
            second.pull()
        with reading(f"{server.address}|{other.address}") as third:
            assert_is_of(0, third.pull())
        step(ps)
        waiting.result()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"run_id": "other"}, "run_id: this relay serves"),
        ({"layout_digest": b"0" * 16}, "layout_digest: is not this job's"),
        ({"blocks": [0, 0]}, "blocks: one of these 2 is named twice"),
        ({"blocks": [99]}, "blocks: 99 is no block of the job, which has"),
        ({"cut": data_pb2.Cut(step=2**60)}, "cut.step: 1152921504606846976 is above the limit"),
        ({"cut": data_pb2.Cut(step=0), "or_newer": False}, "cut.step: .* has version 1, beyond 0"),
    ],
)
def test_a_wrong_request_is_refused(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay, changed: dict[str, Any], words: str
) -> None:
    ps, servers = job
    step(ps)
    server = relay(servers)
    wait_until(lambda: version_of(server) == 1, "the relay has a version")
    held = server.holding.held
    assert held is not None
    request = {
        "run_id": held.described.run_id,
        "layout_digest": held.described.layout_digest,
        "cut": data_pb2.Cut(step=1),
        "or_newer": True,
        **changed,
    }
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError, match=words):
        list(data_pb2_grpc.DataServiceStub(channel).Read(data_pb2.ReadRequest(**request), timeout=WAIT_S))
    assert server.holding.readers.calls == 0
    assert held.users == 0


def test_a_shard_does_not_choose_the_version(cluster: Callable[..., Any]) -> None:
    """A request that was made for a relay names no version of a shard's."""
    servers = cluster(1).servers
    with psd_client.connect(servers, 0, 1) as ps, grpc.insecure_channel(servers) as channel:
        declare(ps)
        described = control_pb2_grpc.ControlServiceStub(channel).Describe(
            control_pb2.DescribeRequest(shard_count=1), timeout=WAIT_S
        )
        request = data_pb2.ReadRequest(run_id=described.run_id, layout_digest=described.layout_digest, or_newer=True)
        with pytest.raises(grpc.RpcError, match="or_newer: this is a shard"):
            list(data_pb2_grpc.DataServiceStub(channel).Read(request, timeout=WAIT_S))


def test_a_relay_that_says_it_has_the_blocks_of_no_shards_is_not_believed(
    job: tuple[psd_client.ParameterServer, str], relay: StartRelay
) -> None:
    _, servers = job
    server = relay(servers)
    with reading(server.address) as reader:
        reader.pull()
        held = server.holding.held
        assert held is not None
        assert held.described.relayed_shards == 3
        assert [block.index for block in held.described.layout.blocks] == sorted(held.blocks)
        for wrong in (0, 10_001):
            held.described.relayed_shards = wrong
            words = f"relayed_shards: .* {wrong};"
            with reading(server.address) as other, pytest.raises(psd_client.InternalError, match=words):
                other.pull()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_relays_readers_are_served_by_grpc(cluster: Callable[..., Any], relay: StartRelay, transport: str) -> None:
    """What a relay offers is what a reader takes, whatever it would rather have."""
    servers = cluster(1).servers
    with psd_client.publish(servers) as store:
        store.put({"w": np.ones(3, np.float32)}, {"step": 1})
        with psd_client.connect(relay(servers).address, role="reader", transport=transport, wait_timeout=60) as reader:
            assert reader.pull().meta == {"step": 1}
            assert reader.transports == ["grpc (a relay)"]
