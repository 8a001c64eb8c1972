"""Armed steps at the worker: a job in which steps are made, refused, broken or given up comes to what it does without them."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_faults import Thread, expire, in_threads, until
from safetensors.numpy import load_file
from short_ways import Watch

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidRequest, NonFiniteGradient, ShardUnavailable, WaitTimeout
from psd.v1 import control_pb2, control_pb2_grpc
from psd_client import SGD, Drained, ParameterServer, connect
from psd_client.lanes import steps

Start = Callable[..., Any]

VALUES = {
    **{name: np.zeros(size, np.float32) for name, size in (("w", (5, 7)), ("h", 11), ("v", 2))},
    "b": np.zeros(3, np.float64),
}
GROUPS = [{"params": ["w", "h"]}, {"params": ["b"]}, {"params": ["v"]}]
BLOCKS = len(GROUPS)
TRANSPORTS = ["shm", "tcp"]
STEPS = 40
CHECKPOINT_STEPS = 4096
"""Of each worker, at most: their sums are exact in float32."""


def declare(ps: ParameterServer, **options: Any) -> ParameterServer:
    ps.declare(VALUES, SGD(lr=1.0), groups=GROUPS, reduce="sum", **options)
    return ps


def gradient(value: float) -> dict[str, Any]:
    return {name: np.full_like(array, value) for name, array in VALUES.items()}


def everywhere(params: dict[str, Any]) -> set[float]:
    return {value for array in params.values() for value in array.ravel().tolist()}


def make_armed(ps: ParameterServer, *others: ParameterServer) -> None:
    """Push until the next push is a step."""
    for _ in range(100):
        if ps._worker.declared._steps.are_armed:
            return
        in_threads(*(lambda each=each: each.push_pull(gradient(0)) for each in (ps, *others)))
    raise AssertionError("was never armed")


def some(rank: int, step: int) -> dict[str, Any]:
    """A gradient of whole numbers; now and then a tensor has none: part of a block, or all of it."""
    random = np.random.default_rng([rank, step])
    made = {name: random.integers(-8, 8, value.shape).astype(value.dtype) for name, value in VALUES.items()}
    missing = random.integers(0, 12)
    return {name: value for number, (name, value) in enumerate(made.items()) if number != missing}


@pytest.mark.parametrize("workers", [1, 2])
def test_push_pull_when_the_job_has_other_workers_then_steps_sleep_at_once(
    cluster: Start, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Nobody looks for answers on a core that others may want."""
    looks, made = [], steps.WorkerSteps

    def noted(*args: Any, looks_out: bool, **how: Any) -> Any:
        looks.append(looks_out)
        return made(*args, looks_out=looks_out, **how)

    monkeypatch.setattr(steps, "WorkerSteps", noted)
    with connect(cluster(1).servers, 0, workers, transport="tcp") as ps:
        make_armed(declare(ps, consistency="async"))
        ps.push_pull(gradient(1))

    assert set(looks) == {workers == 1}


@pytest.mark.parametrize(
    ("transport", "shards", "consistency", "revokes"),
    [
        ("shm", 3, "async", True),
        ("tcp", 1, "async", True),
        ("tcp", 3, "async", False),
        ("shm", 1, "sync", True),
        ("tcp", 3, "sync", True),
        ("shm", 3, "sync", False),
        ("tcp", 1, "ssp:2", True),
        ("shm", 3, "ssp:2", True),
        ("shm", 1, "ssp:2", False),
    ],
)
def test_sums_are_exact_whatever_becomes_of_steps(
    cluster: Start, watch: Watch, transport: str, shards: int, consistency: str, revokes: bool
) -> None:
    """Refused before anything was counted, between two blocks, while they wait; and every count of the worker is as ever."""
    running = cluster(shards)
    desks = [shard.shard.steps for shard in running.shards]
    is_over, count = threading.Event(), itertools.count()

    def revoke_before() -> None:
        if next(count) % 5 == 0:
            desks[-1].revoke(0)

    def revoke_always() -> None:
        while not is_over.wait(0.001):
            for desk in desks:
                desk.revoke(1)

    def train(rank: int) -> tuple[dict[str, Any], dict[str, int]]:
        with connect(running.servers, rank, 2, transport=transport, wait_timeout=100) as ps:
            declare(ps, consistency=consistency)
            for step in range(STEPS):
                ps.push_pull(some(rank, step))
            ps.barrier("end")
            return ps.pull(), ps.stats()

    if revokes:
        watch.before = revoke_before
    revoking = Thread(revoke_always if revokes else lambda: None)
    try:
        results = in_threads(*(lambda rank=rank: train(rank) for rank in range(2)))
    finally:
        is_over.set()
    revoking.result()

    expected = {name: np.zeros_like(value) for name, value in VALUES.items()}
    for rank in range(2):
        for step in range(STEPS):
            for name, value in some(rank, step).items():
                expected[name] -= value
    for params, stats in results:
        assert {name: value.tolist() for name, value in params.items()} == {n: v.tolist() for n, v in expected.items()}
        assert (stats["pushes"], stats["blocks_counted"], stats["blocks_duplicate"]) == (STEPS, STEPS * BLOCKS, 0)
    assert (not revokes) in watch.took  # on a slow machine none may come between two revocations


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_traffic_counts_and_clocks_are_as_without_steps(cluster: Start, watch: Watch, transport: str) -> None:
    found = []
    for never_armed in (True, False):
        with connect(cluster(2, never_armed=never_armed).servers, 0, 1, transport=transport) as ps:
            declare(ps, consistency="async")
            for step in range(STEPS):
                ps.push_pull(some(0, step), weight=1 + step % 2)
            found.append((ps.stats(), ps.clock, {name: value.tobytes() for name, value in ps.pull().items()}))

    assert found[0] == found[1]
    assert watch.took.count(True) > STEPS / 4


@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_checkpoint_amid_steps_is_one_cut_of_all_blocks(
    cluster: Start, watch: Watch, tmp_path: Path, transport: str, consistency: str
) -> None:
    """Of each worker it has as many gradients in every block, on both shards; and steps go on after it."""
    running = cluster(2, checkpoint_dir=str(tmp_path))
    counts, last = [0, 0], [CHECKPOINT_STEPS]

    def train(rank: int) -> None:
        with connect(running.servers, rank, 2, transport=transport, wait_timeout=100) as ps:
            declare(ps, consistency=consistency)
            while counts[rank] < last[0]:
                ps.push_pull(gradient(CHECKPOINT_STEPS**rank))
                counts[rank] += 1

    def store() -> str:
        try:
            until(lambda: watch.took.count(True) > STEPS)
            with grpc.insecure_channel(running.shards[0].address) as channel:
                request = control_pb2.CheckpointRequest()
                name: str = control_pb2_grpc.ControlServiceStub(channel).Checkpoint(request, timeout=100).name
            before = watch.took.count(True)
            until(lambda: watch.took.count(True) > before)
            return name
        finally:
            last[0] = min(last[0], max(counts) + 10)

    *_, name = in_threads(lambda: train(0), lambda: train(1), store)

    directory = CheckpointDirectory(str(tmp_path))
    directory.export(directory.load(name), str(tmp_path / "stored.safetensors"))
    stored = load_file(tmp_path / "stored.safetensors")
    (value,) = {number for key in VALUES for number in stored[key].ravel().tolist()}
    second, first = divmod(-value, CHECKPOINT_STEPS)
    assert 0 < first <= counts[0]
    assert 0 < second <= counts[1]
    assert first == second or consistency == "async"


def test_a_shard_that_does_not_offer_keeps_all_on_the_long_way(cluster: Start, watch: Watch) -> None:
    first, second = cluster(2, only=0), cluster(2, only=1, never_armed=True)
    with connect(f"{first.servers},{second.servers}", 0, 1, transport="tcp") as ps:
        declare(ps)
        for step in range(1, 9):
            assert everywhere(ps.push_pull(gradient(-1))) == {float(step)}

    assert watch.took == []


def test_what_a_step_does_not_carry_goes_the_long_way(cluster: Start, watch: Watch) -> None:
    """So does what comes next, until the shard has offered steps again."""
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        make_armed(ps)
        ps.save_client_state(b"state")
        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}
        assert watch.took == []
        make_armed(ps)
        ps.push_pull(gradient(-1))
        assert watch.took == [True]

        ps.push(gradient(-1))  # none of its own
        assert everywhere(ps.pull()) == {3.0}
        assert everywhere(ps.push_pull(gradient(-1))) == {4.0}
        assert watch.took == [True, None]
        make_armed(ps)
        with pytest.raises(InvalidRequest, match="weight: must be 0, or 1e-09 to 1e\\+15, got -1"):
            ps.push_pull(gradient(-1), weight=-1)
        assert everywhere(ps.push_pull(gradient(-1), weight=2)) == {5.0}
        assert watch.took == [True, None, True]


def test_a_gradient_that_is_not_finite_has_the_same_words(cluster: Start, watch: Watch) -> None:
    bad = gradient(1)
    bad["h"][3] = np.nan
    said = []
    with connect(cluster(1).servers, 0, 1, transport="shm") as ps:
        declare(ps)
        for is_armed in (False, True):
            if is_armed:
                make_armed(ps)
            with pytest.raises(NonFiniteGradient) as raised:
                ps.push_pull(bad)
            said.append(str(raised.value).replace(f"step {ps.clock}", "step"))
        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}
        assert ps.stats()["pushes"] == ps.clock

    assert watch.took == [None, True]
    assert said[0] == said[1]
    assert "'h'" in said[0]


def connection_of(server: Any) -> Any:
    return server._bulk._by_rank[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_connection_that_broke_before_a_step_is_opened_again(cluster: Start, watch: Watch, transport: str) -> None:
    running = cluster(2)
    with connect(running.servers, 0, 1, transport=transport) as ps:
        declare(ps)
        for step in range(4):
            make_armed(ps)
            connection_of(running.shards[step % 2]).hang_up()
            before = ps.clock
            assert everywhere(ps.push_pull(gradient(-1))) == {float(step + 1)}
            assert ps.clock == before + 1
        stats = ps.stats()
    assert watch.took == [False] * 4
    assert (stats["pushes_dropped"], stats["pushes"]) == (0, ps.clock)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_whose_answer_is_lost_counts_once(cluster: Start, watch: Watch, transport: str) -> None:
    """The shard has counted it, and hangs up while its round is open."""
    running = cluster(2)
    with connect(running.servers, 0, 2, transport=transport) as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        for shard in (0, 1):
            make_armed(ps, other)
            stepping = Thread(lambda: ps.push_pull(gradient(-1)))
            blocks = [block for block in running.shards[shard].shard.job.blocks.values() if block.is_trained]
            until(lambda blocks=blocks: all(block._core.contributors for block in blocks))
            connection_of(running.shards[shard]).hang_up()
            params = other.push_pull(gradient(-10))
            assert everywhere(stepping.result()) == everywhere(params) == {11.0 * (shard + 1)}
        assert (ps.clock, ps.stats()["pushes_dropped"]) == (other.clock, 0)
    assert watch.took == [False, False]


def test_without_retries_a_broken_connection_is_the_error_that_it_was(cluster: Start, watch: Watch) -> None:
    running = cluster(1)
    said = []
    with connect(running.servers, 0, 1, transport="tcp", retry_timeout=0) as ps:
        declare(ps)
        ps.push_pull(gradient(0))
        for is_armed in (False, True):
            if is_armed:
                make_armed(ps)
            else:
                ps.pull()
            connection_of(running.shards[0]).hang_up()
            with pytest.raises(ShardUnavailable) as raised:
                ps.push_pull(gradient(-1))
            said.append(str(raised.value))
            ps.push_pull(gradient(-1))
        assert everywhere(ps.pull()) == {2.0}

    assert watch.took == [None, False]
    assert said[0] == said[1]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_leaves_a_step_to_the_next_call(
    cluster: Start, watch: Watch, transport: str, shards: int, same: bool
) -> None:
    """Ctrl-C strikes in the call of C: the same call then goes on with the push, another one completes it first."""
    running = cluster(shards)
    main = threading.main_thread().ident
    assert main is not None
    with connect(running.servers, 0, 1, transport=transport) as ps:
        declare(ps)
        make_armed(ps)
        clock = ps.clock
        blocks = [block for block in running.shards[-1].shard.job.blocks.values() if block.is_trained]

        def interrupt() -> None:
            with blocks[0].lock:  # the shard cannot answer
                is_held.set()
                until(lambda: len(watch.took) == 1)
                signal.pthread_kill(main, signal.SIGINT)
                assert watch.after.wait(100)

        is_held = threading.Event()
        interrupting = Thread(interrupt)
        assert is_held.wait(100)
        with pytest.raises(KeyboardInterrupt):
            ps.push_pull(gradient(-1))
        interrupting.result()
        assert (watch.took, ps.clock) == ([False], clock)

        params = ps.push_pull(gradient(-1 if same else -100))

        stats = ps.stats()
        assert everywhere(params) == {1.0 if same else 101.0}
        assert (stats["pushes_dropped"], ps.clock) == (0, clock + (1 if same else 2))
        make_armed(ps)
        assert everywhere(ps.push_pull(gradient(0))) == everywhere(params)


def test_close_in_another_thread_ends_a_step(cluster: Start, watch: Watch) -> None:
    running = cluster(1)
    with connect(running.servers, 0, 2, transport="tcp") as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        make_armed(ps, other)
        stepping = Thread(lambda: ps.push_pull(gradient(-1)))
        until(lambda: len(watch.took) == 1)

        ps.close()

        with pytest.raises(RuntimeError, match="push_pull: this ParameterServer was closed by another thread"):
            stepping.result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_that_stays_open_has_the_same_words(cluster: Start, watch: Watch, impatient: Any, transport: str) -> None:
    said = []
    running = cluster(1)
    with connect(running.servers, 0, 2, transport=transport) as ps, connect(running.servers, 1, 2, transport="grpc") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        for is_armed in (False, True):
            if is_armed:
                make_armed(ps, other)
            with impatient(), pytest.raises(WaitTimeout) as raised:
                ps.push_pull(gradient(-1))
            said.append(str(raised.value).replace(f"step {ps.clock}", "step"))
            in_threads(lambda: ps.push_pull(gradient(-1)), lambda: other.push_pull(gradient(0)))
        assert everywhere(ps.pull()) == {2.0}

    assert watch.took[:1] == [False]
    assert said[0] == said[1]


def test_a_lease_that_ran_out_is_joined_anew(cluster: Start, watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    running = cluster(2)
    with connect(running.servers, 0, 1, transport="tcp") as ps:
        declare(ps, consistency="async")
        make_armed(ps)
        for shard in running.shards:
            expire(shard, 0)

        assert everywhere(ps.push_pull(gradient(-1))) == {1.0}

        assert ps.stats()["rejoins"] == 1
        make_armed(ps)
        assert everywhere(ps.push_pull(gradient(-1))) == {2.0}
    assert watch.took == [False, True]


def test_an_order_reaches_an_armed_worker(cluster: Start, watch: Watch) -> None:
    """The scale of the learning rate holds from the step on that was named, for both workers alike."""
    running = cluster(1)
    with connect(running.servers, 0, 2, transport="tcp") as ps, connect(running.servers, 1, 2, transport="shm") as other:
        in_threads(lambda: declare(ps), lambda: declare(other))
        make_armed(ps, other)
        begins = running.shards[0].shard.scale_learning_rate(0.5).clock
        while ps.clock < begins:
            in_threads(lambda: ps.push_pull(gradient(0)), lambda: other.push_pull(gradient(0)))
        params = in_threads(lambda: ps.push_pull(gradient(-1)), lambda: other.push_pull(gradient(-1)))
        assert [everywhere(each) for each in params] == [{1.0}, {1.0}]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_orders_hold_for_steps(cluster: Start, watch: Watch, transport: str) -> None:
    """A scale of the learning rate from its clock on, and the end of the job at its own; and steps go on in between."""
    found = []
    for never_armed in (True, False):
        running = cluster(2, never_armed=never_armed)
        with connect(running.servers, 0, 1, transport=transport) as ps:
            declare(ps)
            for step in range(STEPS):
                if step in (10, 15):
                    running.shards[0].shard.scale_learning_rate(1 / step)
                if step == 30:
                    running.shards[0].shard.end_job()
                if step == 20:
                    watch.took.clear()
                try:
                    params = ps.push_pull(some(0, step))
                except Drained as ended:
                    found.append((str(ended), ps.clock, {name: value.tobytes() for name, value in params.items()}))
                    break

    assert len(found) == 2
    assert found[0] == found[1]
    assert watch.took.count(True) > 5


def test_a_shard_that_finishes_a_step_names_cuts_and_orders_as_before(cluster: Start, watch: Watch, tmp_path: Path) -> None:
    """Its reply is none of its own: another shard has refused the step, and the push is made there the long way."""
    running = cluster(2, checkpoint_dir=str(tmp_path))
    with connect(running.servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        ps.push_pull(gradient(0))
        running.shards[0].shard.scale_learning_rate(0.5)
        running.shards[0].shard.schedule.announce("c")
        for _ in range(10):
            ps.push_pull(gradient(0))
        before = everywhere(ps.push_pull(gradient(0)))
        assert watch.took[-1] is True
        session = ps._worker._session
        known = [cut.id for cut in session.cuts.named_by(0)], session.orders.heard
        running.shards[1].shard.steps.revoke(0)

        assert everywhere(ps.push_pull(gradient(-2))) == {value + 1 for value in before}

        assert watch.took[-1] is False
        assert ([cut.id for cut in session.cuts.named_by(0)], session.orders.heard) == known
        assert known[0] == ["c"]
        assert session.orders.are_given
        ps.push_pull(gradient(0))
        assert not session.cuts.are_untold
