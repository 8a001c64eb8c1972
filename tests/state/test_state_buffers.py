"""Buffers on one shard: what is kept, what is refused, when a cut takes them."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest
from shard_driver import SGD, Driver, Seat

from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest, InvalidTensor, PsdError
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.state.cuts.snapshots import Snapshot
from psd.v1 import data_pb2

WEIGHT, MEAN, COUNT = 0, 1, 2


def driver_of(mode: str = "sync", *, flags: tuple[str, ...] = (), world_size: int = 2, **config) -> Driver:
    tensors = TensorSpec("w", (3,), "float64"), TensorSpec("mean", (2,), "float64", 1), TensorSpec("count", (), "int64", 1)
    groups = GroupSpec("sgd"), GroupSpec("buffers", flags)
    return Driver(JobSpec(world_size, tensors, groups, Consistency.parse(mode)), **config)


def store(
    driver: Driver, seat: Seat, value: float, *cuts: data_pb2.Cut, blocks=((MEAN, np.float64), (COUNT, np.int64))
) -> None:
    request = data_pb2.BuffersRequest(caller=seat.caller, layout_digest=driver.layout.digest, cuts=cuts)
    for index, dtype in blocks:
        length = driver.layout.blocks[index].length
        request.buffers.add(block=index, payload=np.full(length, value, dtype).tobytes())
    driver.shard.buffers.store(request)


def push(driver: Driver, seat: Seat, clock: int) -> data_pb2.PushReply:
    header = driver.header(seat, clock)
    del header.scalars[:]
    header.scalars.extend([data_pb2.GroupScalars(values=SGD), data_pb2.GroupScalars()])
    pushing = driver.shard.exchange.begin_push(header)
    assert driver.push_block(pushing, WEIGHT, 1.0) is None
    return driver.shard.exchange.end_push(pushing)


def taken(done: SimpleQueue[Snapshot | None]) -> list[float] | None:
    """The buffers of the cut that is complete; None if none is."""
    if done.empty():
        return None
    snapshot = done.get()
    assert snapshot is not None
    assert not snapshot.why_missed
    return snapshot.pages[MEAN].parameter.tolist()


def test_store_then_the_values_survive_the_shards_restart_and_have_any_numbers(tmp_path):
    """They are a block like any other, but NaN is no error in them."""
    driver = driver_of(state_dir=str(tmp_path))
    first, _ = seats = driver.start()
    store(driver, first, 7)
    store(driver, first, np.nan, blocks=((MEAN, np.float64),))

    driver.restart(*seats)

    assert np.isnan(driver.values(MEAN)).all()
    assert driver.values(COUNT) == [7]


def test_store_when_all_are_wanted_then_holds_the_mean_of_those_that_have_not_died():
    """Of integers there is no mean: those of the lowest rank."""
    driver = driver_of(flags=("mean",), world_size=3)
    seats = driver.start()
    assert all(push(driver, seat, 0).wants_buffers for seat in seats)

    for seat, value in zip(seats, (1, 2, 6), strict=True):
        store(driver, seat, value)
    assert (driver.values(MEAN), driver.values(COUNT)) == ([3, 3], [1])

    driver.leave(seats[0])  # its values stay
    driver.leave(seats[1], failed=True)
    store(driver, seats[2], 9)
    assert driver.values(MEAN) == [5, 5]


def test_push_then_the_reply_asks_the_first_worker_that_is_there():
    """The others send nothing; when it has left, the next one does."""
    driver = driver_of("async")
    first, second = driver.start()
    assert [push(driver, seat, 0).wants_buffers for seat in (first, second)] == [True, False]
    driver.leave(first)
    assert push(driver, second, 1).wants_buffers


@pytest.mark.parametrize(
    ("blocks", "error", "word"),
    [
        (((WEIGHT, np.float64),), InvalidRequest, "not one of buffers"),
        (((MEAN, np.float32),), InvalidTensor, "block 1"),
        (((MEAN, np.float64), (COUNT, np.int64), (MEAN, np.float64)), InvalidRequest, "limit is 2"),
    ],
)
def test_store_of_what_is_not_a_buffer_then_is_refused_and_changes_nothing(blocks, error: type[PsdError], word):
    """Nobody changes a parameter by this call."""
    driver = driver_of()
    first, _ = driver.start()
    before = driver.fingerprint()
    with pytest.raises(error, match=word):
        store(driver, first, 5.0, blocks=blocks)
    assert driver.fingerprint() == before


def test_cut_with_rounds_then_has_the_buffers_that_were_stored_before_its_last_round_closed():
    """What is stored for a later step is not in it."""
    driver = driver_of()
    first, second = driver.start()
    done = driver.shard.cuts.take_part()
    driver.learn_cuts([data_pb2.Cut(id="c", step=1)])
    store(driver, first, 1)
    push(driver, first, 0)
    push(driver, second, 0)
    store(driver, first, 2)

    assert taken(done) == [1, 1]


def test_cut_without_rounds_then_waits_for_the_buffers_but_not_for_ever():
    """Their worker may be busy, or gone: then the cut has those that there are."""
    driver = driver_of("async")
    first, second = driver.start()
    done = driver.shard.cuts.take_part()
    cut, later = (data_pb2.Cut(id=name, step=1) for name in ("c", "d"))
    driver.learn_cuts([cut])
    driver.choose(cut)
    assert taken(done) is None
    store(driver, first, 3, cut)
    assert taken(done) == [3, 3]

    driver.learn_cuts([later])
    driver.choose(later)
    driver.expire(first, keep=[second])
    assert taken(done) == [3, 3]


def test_cut_that_the_buffers_complete_at_the_moment_of_its_positions_then_is_handed_over_once_and_whole():
    """Another thread brings them while the first one still notes what workers have saved; a third one writes it at once."""
    driver = driver_of("async", world_size=1)
    (only,) = driver.start()
    done, cut = driver.shard.cuts.take_part(), data_pb2.Cut(id="c", step=1)
    describe, written = driver.shard.cuts._surroundings, []

    def write():
        while not done.empty():
            snapshot = done.get()
            written.append((snapshot.why_missed, dict(snapshot.worker_clocks), sorted(snapshot.pages)))
            snapshot.pages.clear()

    def describe_late(*args):
        store(driver, only, 3, cut)
        write()
        describe(*args)

    driver.shard.cuts._surroundings = describe_late
    driver.learn_cuts([cut])
    driver.choose(cut)
    write()

    assert written == [("", {0: 0}, [WEIGHT, MEAN, COUNT])]
