"""What a worker saves of its own program comes back if the push that it came with counts, and only then."""

from __future__ import annotations

import numpy as np
import pytest
from full_disk import full_disk
from full_state import NO_ROOM
from settling import commit, decision
from shard_driver import Driver, Fuse, Killed, Seat, job_spec

from psd.contract.config import CLIENT_STATE_BYTES_MAX
from psd.contract.errors import InvalidRequest, OutOfSpace
from psd.v1 import data_pb2


def successor(driver: Driver, rank: int) -> tuple[Seat, int, bytes]:
    """Another process of the rank: its seat, where it takes part, and what it gets back."""
    seat = driver.join(rank)
    reply, _ = driver.declare(seat)
    return seat, reply.clock, reply.client_state


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async", "ssp:1"])
def test_what_came_with_the_last_push_that_counts_comes_back(driver_of, mode, is_killed):
    """Also if the last pushes brought nothing, and the shard is another process: the files have what the pages count."""
    driver = driver_of(job_spec(2, mode=mode))
    seats = driver.start()
    for clock in range(5):
        for seat in seats:
            driver.push(seat, clock, 1.0, client_state=b"%d after %d" % (seat.rank, clock) if clock < 4 else b"")

    if is_killed:
        driver.restart()

    assert [successor(driver, rank)[2] for rank in range(2)] == [b"0 after 3", b"1 after 3"]
    assert len(list(driver.core.storage.directory.glob("client-state-*"))) <= 2 * 4


@pytest.mark.parametrize(("is_killed", "expected"), [(False, (3, b"after 2")), (True, (2, b"after 1"))])
def test_what_came_with_the_push_of_an_open_round_comes_back_as_long_as_the_round_has_it(driver_of, is_killed, expected):
    """The successor begins after that round; if the shard dies, too, that push is gone, and the successor makes it again."""
    driver = driver_of()
    a, b = driver.start()
    for clock in range(2):
        driver.push(a, clock, 1.0, client_state=b"after %d" % clock)
        driver.push(b, clock, 1.0)
    driver.push(a, 2, 1.0, client_state=b"after 2")

    if is_killed:
        driver.restart(b)

    assert successor(driver, 0)[1:] == expected


def test_what_came_with_a_push_that_came_too_late_does_not_hold(driver_of):
    """With a quorum a round may close without it: those data were not used. A later push that counts makes it hold."""
    driver = driver_of(job_spec(2, quorum=1))
    a, b = driver.start()
    driver.push(a, 0, 1.0, client_state=b"after 0")
    driver.push(b, 1, 1.0)
    assert driver.push(a, 1, 1.0, client_state=b"after 1").blocks_late == 1

    assert successor(driver, 0)[2] == b"after 0"
    a, clock, _ = successor(driver, 0)
    for later in range(clock, clock + 9):
        driver.push(b, later, 1.0)
        assert driver.push(a, later, 1.0, client_state=b"late").blocks_late == 1
    assert successor(driver, 0)[2] == b"after 0", "however many came too late"
    a, clock, _ = successor(driver, 0)
    driver.push(a, clock, 1.0)
    assert successor(driver, 0)[2] == b"after 0", "none of those is this push's own"


@pytest.mark.parametrize(("is_committed", "expected"), [(False, (0, b"")), (True, (1, b"after 0"))])
def test_with_exact_aggregation_it_holds_when_all_shards_have_the_push(driver_of, is_committed, expected):
    """Before its commit a push is as if it had not been: the successor makes it again, from what there was before."""
    driver = driver_of(job_spec(2, aggregation="exact"))
    a, b = driver.start()
    driver.push(a, 0, 1.0, client_state=b"after 0")
    if is_committed:
        commit(driver, a, 0, without_waiting=True)

    again, *found = successor(driver, 0)
    assert tuple(found) == expected
    if not is_committed:
        driver.push(again, 0, 1.0)  # with nothing of its own to save
        commit(driver, again, 0, without_waiting=True)
    driver.push(b, 0, 1.0)
    commit(driver, b, 0)
    driver.shard.exchange.begin_pull(
        data_pb2.PullRequest(caller=b.caller, clock=1, layout_digest=driver.layout.digest, decisions=[decision(0, 0, 1)])
    )
    driver.restart()
    assert successor(driver, 0)[1:] == (1, expected[1])


def test_a_push_whose_state_cannot_be_written_is_refused_whole(driver_of):
    """Or is too large. The same push succeeds later."""
    driver = driver_of(job_spec(1))
    (a,) = driver.start()
    before = driver.fingerprint()

    with full_disk(), pytest.raises(OutOfSpace, match=NO_ROOM):
        driver.push(a, 0, 1.0, client_state=b"row 7")
    with pytest.raises(InvalidRequest, match="client_state: has 1048577 bytes, the limit is 1048576"):
        driver.push(a, 0, 1.0, client_state=bytes(CLIENT_STATE_BYTES_MAX + 1))

    assert driver.fingerprint() == before
    assert driver.push(a, 0, 1.0, client_state=b"row 7").blocks_counted == 1
    assert successor(driver, 0)[1:] == (1, b"row 7")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_when_shard_and_worker_die_at_any_store_then_each_row_of_the_data_counts_once(driver_of, mode):
    """A worker goes through its rows, and saves which one comes next; each of its lives goes on from what it gets back."""
    rows_each, lives, fuse = 4, 30, Fuse()
    driver = driver_of(job_spec(1, mode=mode, size=rows_each * lives))
    driver.start()
    driver.restart(crash_point=fuse)
    one_hot, row, kills = np.eye(rows_each * lives), 0, 0
    for steps in range(1, lives):
        fuse.steps = steps
        try:
            seat, clock, state = successor(driver, 0)
            row = int(state or b"0")
            for _ in range(rows_each):
                driver.push(seat, clock, one_hot[row], client_state=b"%d" % (row + 1))
                row, clock = row + 1, clock + 1
        except Killed:
            kills += 1
            driver.restart(crash_point=fuse)
    *_, state = successor(driver, 0)

    assert kills > 20
    assert driver.values() == (-one_hot[: int(state)].sum(axis=0)).tolist()
