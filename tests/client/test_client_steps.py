"""Armed steps at the worker: a job in which steps are made, refused, broken or given up comes to what it comes to without them."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, expire, in_threads, until
from translated_steps import TranslatedStream

import psd.rim.bulk_server
from psd.contract.errors import NonFiniteGradient, ShardUnavailable, WaitTimeout
from psd_client import SGD, ParameterServer, connect
from psd_client.lanes.steps import SteppingLanes

Start = Callable[..., Any]

VALUES = {"w": np.zeros((5, 7), np.float32), "b": np.zeros(3, np.float64), "h": np.zeros(11, np.float32)}
GROUPS = [{"params": [name]} for name in VALUES]
TRANSPORTS = ["shm", "tcp"]
STEPS = 30


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> type[TranslatedStream]:
    """The shards' ends of connections."""

    class Peer(TranslatedStream):
        pass

    monkeypatch.setattr(psd.rim.bulk_server, "Stream", Peer)
    return Peer


@pytest.fixture(autouse=True)
def took(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What has become of each step so far, of all workers: taken, None: not sent, False: finished the long way."""
    run, found = SteppingLanes.run, []

    def watched(steps: SteppingLanes, *args: Any) -> bool | None:
        found.append(False)
        found[-1] = took = run(steps, *args)
        return took

    monkeypatch.setattr(SteppingLanes, "run", watched)
    return found


def declare(ps: ParameterServer, **options: Any) -> ParameterServer:
    ps.declare(VALUES, SGD(lr=1.0), groups=GROUPS, reduce="sum", **options)
    TranslatedStream.layout = ps._worker.declared._layout
    return ps


def gradient(value: float) -> dict[str, Any]:
    return {name: np.full_like(array, value) for name, array in VALUES.items()}


def everywhere(params: dict[str, Any]) -> set[float]:
    return {value for array in params.values() for value in array.ravel().tolist()}


def make_armed(ps: ParameterServer, value: float = 0.0) -> None:
    """Push until the next push is a step."""
    for _ in range(5):
        if ps._worker.declared._steps.are_armed:
            return
        ps.push_pull(gradient(value))
    raise AssertionError("was not armed")


def of(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    made = {name: random.integers(-8, 8, value.shape).astype(value.dtype) for name, value in VALUES.items()}
    missing = random.integers(0, 8)
    return {name: value for number, (name, value) in enumerate(made.items()) if number != missing}


@pytest.mark.parametrize("again", [0.0, 0.3])
@pytest.mark.parametrize("consistency", ["async", "sync", "ssp:2"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_are_exact_whatever_becomes_of_steps(
    cluster: Start, peer: Any, took: list[Any], transport: str, shards: int, consistency: str, again: float
) -> None:
    """Refused before anything was counted, or after it; and every count of the worker is as without steps."""
    servers = cluster(shards).servers
    peer.again = peer.late_again = again

    def train(rank: int) -> tuple[dict[str, Any], dict[str, int]]:
        with connect(servers, rank, 2, transport=transport, wait_timeout=60) as ps:
            declare(ps, consistency=consistency)
            for step in range(STEPS):
                ps.push_pull(of(rank, step))
            ps.barrier("end")
            return ps.pull(), ps.stats()

    results = in_threads(*(lambda rank=rank: train(rank) for rank in range(2)))

    expected = {name: np.zeros_like(value) for name, value in VALUES.items()}
    for rank in range(2):
        for step in range(STEPS):
            for name, value in of(rank, step).items():
                expected[name] -= value
    for params, stats in results:
        assert {name: value.tolist() for name, value in params.items()} == {n: v.tolist() for n, v in expected.items()}
        assert (stats["pushes"], stats["blocks_counted"], stats["blocks_duplicate"]) == (STEPS, STEPS * len(VALUES), 0)
    assert True in took
    assert (False in took) is (again > 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_traffic_and_clocks_are_as_without_steps(cluster: Start, peer: Any, took: list[Any], transport: str) -> None:
    found = []
    for peer.offers in (False, True):
        with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
            declare(ps, consistency="async")
            for step in range(STEPS):
                ps.push_pull(of(0, step), weight=1 + step % 2)
            found.append((ps.stats(), ps.clock, {name: value.tobytes() for name, value in ps.pull().items()}))

    assert found[0] == found[1]
    assert took.count(True) > STEPS / 4


def test_a_shard_that_does_not_offer_keeps_all_on_the_long_way(cluster: Start, peer: Any, took: list[Any]) -> None:
    offers = iter([True, False])  # by connection
    peer.__init__ = lambda stream, *args: (TranslatedStream.__init__(stream, *args), setattr(stream, "offers", next(offers)))
    with connect(cluster(2).servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        for step in range(1, 6):
            assert everywhere(ps.push_pull(gradient(-1))) == {float(step)}

    assert took == []


def test_what_a_step_does_not_carry_goes_the_long_way(cluster: Start, took: list[Any]) -> None:
    """And the next push is a step again, or the one after it."""
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        make_armed(ps)
        ps.save_client_state(b"state")
        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}
        assert took == []
        ps.push_pull(gradient(-1))
        assert took == [True]

        ps.push(gradient(-1))  # none of its own, and none after it, until the shard has offered steps again
        ps.push_pull(gradient(-1))
        assert took == [True]
        assert everywhere(ps.push_pull(gradient(-1))) == {5.0}
        assert took == [True, True]
        assert everywhere(ps.pull()) == {5.0}
        assert everywhere(ps.push_pull(gradient(-1))) == {6.0}
        assert everywhere(ps.push_pull(gradient(-1))) == {7.0}
        assert took == [True, None, True]


def test_a_gradient_that_is_not_finite_has_the_same_words(cluster: Start, took: list[Any]) -> None:
    bad = gradient(1)
    bad["h"][3] = np.nan
    said = []
    with connect(cluster(1).servers, 0, 1, transport="shm") as ps:
        declare(ps)
        for _ in range(2):
            with pytest.raises(NonFiniteGradient) as raised:
                ps.push_pull(bad)
            said.append(str(raised.value).replace(str(ps.clock), "CLOCK"))
            make_armed(ps)
        assert took == [None]
        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}
        assert ps.stats()["pushes"] == ps.clock

    assert said[0] == said[1]
    assert "'h'" in said[0]


def connection_of(server: Any) -> Any:
    return server._bulk._by_rank[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_connection_that_broke_before_a_step_is_opened_again(cluster: Start, took: list[Any], transport: str) -> None:
    running = cluster(2)
    with connect(running.servers, 0, 1, transport=transport) as ps:
        declare(ps)
        for step in range(3):
            make_armed(ps)
            connection_of(running.shards[step % 2]).hang_up()
            before = ps.clock
            assert everywhere(ps.push_pull(gradient(-1))) == {float(step + 1)}
            assert ps.clock == before + 1
        assert took == [False] * 3
        stats = ps.stats()
    assert (stats["pushes_dropped"], stats["blocks_duplicate"]) == (0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_answer_that_is_lost_counts_the_step_once(cluster: Start, peer: Any, took: list[Any], transport: str) -> None:
    """Of one shard; the other one's answer has come."""
    running = cluster(2)
    with connect(running.servers, 0, 1, transport=transport) as ps:
        declare(ps)
        for shard in (0, 1):
            make_armed(ps)
            peer.dies_on_done = connection_of(running.shards[shard])._stream
            before = ps.clock
            assert everywhere(ps.push_pull(gradient(-1))) == {float(shard + 1)}
            assert (ps.clock, peer.dies_on_done) == (before + 1, None)
        assert took == [False, False]
        assert ps.stats()["blocks_duplicate"] == sum(
            len([block for block in TranslatedStream.layout.blocks_of(shard) if block.trained]) for shard in (0, 1)
        )


def test_without_retries_a_broken_connection_is_the_error_that_it_was(cluster: Start, took: list[Any]) -> None:
    running = cluster(1)
    said = []
    with connect(running.servers, 0, 1, transport="tcp", retry_timeout=0) as ps:
        declare(ps)
        for is_armed in (False, True):
            if is_armed:
                make_armed(ps)
            connection_of(running.shards[0]).hang_up()
            with pytest.raises(ShardUnavailable) as raised:
                ps.push_pull(gradient(-1))
            said.append(str(raised.value))
            ps.push_pull(gradient(-1))
        assert everywhere(ps.pull()) == {2.0}
        assert took == [False]

    assert said[0] == said[1]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_leaves_a_step_to_the_next_call(
    cluster: Start, took: list[Any], transport: str, shards: int, same: bool
) -> None:
    """Ctrl-C strikes in the call of C, while the round is open: the same call goes on with the push, another one gives it up."""
    running = cluster(shards)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: len(took) == 1 and all(shard.shard._core.waiting.open() for shard in running.shards))
        signal.pthread_kill(main, signal.SIGINT)

    with connect(running.servers, 0, 2, transport=transport) as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        while not ps._worker.declared._steps.are_armed:
            in_threads(lambda: ps.push_pull(gradient(0)), lambda: other.push_pull(gradient(0)))
        clock, interrupting = ps.clock, Thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ps.push_pull(gradient(-1))
        interrupting.result()
        assert (took, ps.clock) == ([False], clock)

        waiting = Thread(lambda: other.push_pull(gradient(-10)))
        params = ps.push_pull(gradient(-1 if same else -100))

        assert ps.clock == clock + (1 if same else 2) - (not same)
        if same:
            assert everywhere(params) == everywhere(waiting.result()) == {11.0}
            assert ps.stats()["pushes_dropped"] == 0
        else:
            assert ps.stats()["pushes_dropped"] == 1
            waiting.result()


def test_close_in_another_thread_ends_a_step(cluster: Start, took: list[Any]) -> None:
    running = cluster(1)
    with connect(running.servers, 0, 2, transport="tcp") as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        while not ps._worker.declared._steps.are_armed:
            in_threads(lambda: ps.push_pull(gradient(0)), lambda: other.push_pull(gradient(0)))
        stepping = Thread(lambda: ps.push_pull(gradient(-1)))
        until(lambda: len(took) == 1 and bool(running.shards[0].shard._core.waiting.open()))

        ps.close()

        with pytest.raises(RuntimeError, match="push_pull: this ParameterServer was closed by another thread"):
            stepping.result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_that_stays_open_has_the_same_words(cluster: Start, took: list[Any], impatient: Any, transport: str) -> None:
    said = []
    running = cluster(1)
    with connect(running.servers, 0, 2, transport=transport) as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        for is_armed in (False, True):
            while is_armed and not ps._worker.declared._steps.are_armed:
                in_threads(lambda: ps.push_pull(gradient(0)), lambda: other.push_pull(gradient(0)))
            with impatient(), pytest.raises(WaitTimeout) as raised:
                ps.push_pull(gradient(-1))
            said.append(str(raised.value).replace(f"step {ps.clock}", "step"))
            in_threads(lambda: ps.push_pull(gradient(-1)), lambda: other.push_pull(gradient(0)))
        assert everywhere(ps.pull()) == {2.0}

    assert took[:1] == [False]
    assert said[0] == said[1]


def test_a_lease_that_ran_out_is_joined_anew(cluster: Start, took: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    running = cluster(2)
    with connect(running.servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        make_armed(ps)
        for shard in running.shards:
            expire(shard, 0)

        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}

        assert ps.stats()["rejoins"] == 1
        make_armed(ps)
        assert everywhere(ps.push_pull(gradient(-1))) == {2.0}
    assert took == [False, True]


def test_an_order_reaches_an_armed_worker(cluster: Start, took: list[Any]) -> None:
    """The scale of the learning rate holds for all steps from the one that was named."""
    running = cluster(1)
    with connect(running.servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        make_armed(ps)
        begins = running.shards[0].shard.scale_learning_rate(0.5).clock
        while ps.clock < begins:
            ps.push_pull(gradient(0))
        assert everywhere(ps.push_pull(gradient(-1))) == {0.5}
    assert False in took or None in took or not took
