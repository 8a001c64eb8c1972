"""Cuts: each block's page at exactly the version that was announced, pinned while training continues, and given back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from shard_driver import Driver, job_spec

from psd.contract.config import CUTS_MAX
from psd.contract.errors import InvalidRequest
from psd.state.cuts.snapshots import check_cuts
from psd.v1 import data_pb2


class Taker:
    """Takes complete snapshots, and hears of those that cannot be had."""

    def __init__(self, driver):
        self._ready, self._missed, self.progressed = [], [], 0
        self._done = driver.shard.cuts.take_part()
        driver.shard.schedule.announce_due = self.announce_due

    def announce_due(self):
        self.progressed += 1

    def _take(self):
        while not self._done.empty():
            snapshot = self._done.get()
            if snapshot.why_missed:
                self._missed.append((snapshot.cut.id, snapshot.why_missed))
            else:
                self._ready.append(snapshot)

    @property
    def ready(self):
        self._take()
        return self._ready

    @property
    def missed(self):
        self._take()
        return self._missed


def cut(id_="c1", step=2):
    return data_pb2.Cut(id=id_, step=step, created_at=5.0)


def pins(driver):
    return [block._page.pins for block in driver.core.job.blocks.values()]


def test_a_snapshot_has_every_block_at_the_version_of_the_cut():
    """Both blocks' pages are those of version 2, and later updates leave them alone."""
    driver = Driver(job_spec(1, blocks=2))
    taker = Taker(driver)
    (a,) = driver.start()
    driver.learn_cuts([cut()])
    for clock in range(2):
        driver.push(a, clock, 1.0)
    assert [snapshot.cut.id for snapshot in taker.ready] == ["c1"]
    driver.push(a, 2, 1.0)

    (snapshot,) = taker.ready

    assert {index: page.version for index, page in snapshot.pages.items()} == {0: 2, 1: 2}
    assert [page.parameter.tolist() for page in snapshot.pages.values()] == [[-2.0] * 3] * 2
    assert (snapshot.worker_clocks, taker.progressed) == ({0: 2}, 3)
    driver.shard.cuts.release(snapshot)
    assert (pins(driver), snapshot.pages) == ([1, 1], {})


def test_a_snapshot_has_what_workers_have_saved_with_the_pushes_that_it_counts():
    """Not what comes with a push that is early for the next round, nor what came with one that was too late."""
    driver = Driver(job_spec(2, quorum=1))
    taker = Taker(driver)
    a, b = driver.start()
    driver.learn_cuts([cut()])
    driver.push(a, 0, 1.0, client_state=b"a after 0")
    assert driver.push(b, 0, 1.0, client_state=b"b after 0").blocks_late == 1
    early = driver.begin_push(b, 2, client_state=b"b after 2")
    assert driver.push_block(early, 0, 1.0) is not None

    driver.push(a, 1, 1.0, client_state=b"a after 1")

    assert [snapshot.client_states for snapshot in taker.ready] == [{0: b"a after 1"}]


def half_a_push():
    """A cut that one of two blocks has reached, and the push that goes on."""
    driver = Driver(job_spec(1, blocks=2))
    taker = Taker(driver)
    (a,) = driver.start()
    driver.learn_cuts([cut(step=1)])
    push = driver.begin_push(a, 0)
    driver.push_block(push, 0, 1.0)
    return driver, taker, push


def test_a_snapshot_is_complete_only_with_its_last_block():
    """Half a push reaches the cut with one block; the snapshot waits for the other."""
    driver, taker, push = half_a_push()
    assert taker.ready == []
    assert [c.id for c in driver.shard.cuts.open] == ["c1"]

    driver.push_block(push, 1, 1.0)

    assert [sorted(snapshot.pages) for snapshot in taker.ready] == [[0, 1]]
    assert driver.shard.cuts.open == []


def test_static_blocks_belong_to_a_cut_as_they_are():
    """They have no rounds; their page is taken when the cut is announced."""
    spec = job_spec(1, blocks=2)
    spec = type(spec)(1, spec.tensors, (spec.groups[0], type(spec.groups[0])("static")))
    driver = Driver(spec)
    taker = Taker(driver)
    seats = driver.start(value=5.0)
    driver.learn_cuts([cut(step=1)])
    header = driver.header(seats[0], 0)
    header.scalars[1].ClearField("values")

    push = driver.shard.exchange.begin_push(header)
    driver.push_block(push, 0, 1.0)

    assert {index: page.version for index, page in taker.ready[0].pages.items()} == {0: 1, 1: 0}


def in_the_second_round(blocks):
    """A job of one worker that has pushed one step, and so many blocks of the next."""
    driver = Driver(job_spec(1, blocks=2))
    taker = Taker(driver)
    (a,) = driver.start()
    driver.push(a, 0, 1.0)
    push = driver.begin_push(a, 1)
    for block in range(blocks):
        driver.push_block(push, block, 1.0)
    return driver, taker, a


@pytest.mark.parametrize("is_ahead", [1, 2])
def test_a_cut_that_comes_too_late_is_missed_and_nothing_stays_pinned(is_ahead):
    """A block that is beyond the cut's version has no page of it any more: that cut fails, by name, and training goes on."""
    driver, taker, a = in_the_second_round(is_ahead)

    driver.learn_cuts([cut(step=1)])

    assert taker.ready == []
    assert taker.missed == [("c1", "block 0 is at version 2, beyond the cut's 1")]
    driver.push(a, 1, 1.0)
    assert (pins(driver), driver.shard.cuts.open) == ([1, 1], [])


def test_workers_carry_cuts_from_shard_to_shard():
    """The reply to a push names the cuts; the next push brings them to a shard that has not heard of them."""
    first, second = Driver(job_spec(1)), Driver(job_spec(1, blocks=2), shard=1, shards=2)
    Taker(first)
    taker = Taker(second)
    (a,) = first.start()
    b = second.join(0, session=1)
    second.declare(b)
    second.initialize(b)
    first.learn_cuts([cut(step=3)])

    reply = first.push(a, 0, 1.0)
    header = second.header(b, 0)
    header.cuts.extend(reply.cuts)
    second.push_block(second.shard.exchange.begin_push(header), 1, 1.0)

    assert [c.id for c in second.shard.cuts.open] == ["c1"]
    for clock in (0, 1, 2):
        header.clock = clock
        second.push_block(second.shard.exchange.begin_push(header), 1, 1.0)
    assert [snapshot.pages[1].version for snapshot in taker.ready] == [3], "known cuts are not begun again"


def test_a_shard_without_blocks_takes_part_in_all_cuts_at_once():
    """It pins nothing. Workers that are slow bring it several in one heartbeat: no pace is too fast for it."""
    driver = Driver(job_spec(1), shard=1, shards=2)
    taker = Taker(driver)
    driver.declare(driver.join(0, session=1))

    driver.learn_cuts([cut(f"c{step}", step) for step in range(CUTS_MAX)])

    assert (len(taker.ready), taker.missed) == (CUTS_MAX, [])


def test_a_shard_that_stores_nothing_takes_no_part():
    """Without --checkpoint-dir it ignores cuts."""
    driver = Driver(job_spec(1))
    driver.start()

    driver.learn_cuts([cut()])

    assert (driver.shard.cuts.open, driver.shard.cuts.latest()) == ([], [])


@pytest.mark.parametrize("is_even", [True, False])
def test_the_final_cut_takes_blocks_as_they_are_if_all_are_at_the_end(is_even):
    """After an orderly end all blocks are at the last round; else there is no final checkpoint, and the reason is said."""
    driver, taker, a = in_the_second_round(2 if is_even else 1)
    driver.leave(a)

    driver.shard.schedule.announce_final()

    if is_even:
        assert [(s.cut.step, sorted(s.pages)) for s in taker.ready] == [(2, [0, 1])]
    else:
        assert taker.missed == [("final", "blocks are at versions [1, 2], the last round is 2")]
        assert pins(driver) == [1, 1]


def test_going_back_gives_up_open_cuts():
    """Their versions will come again, in another timeline."""
    driver, taker, push = half_a_push()

    driver.shard.cuts.forget(driver.core.job)
    driver.push_block(push, 1, 1.0)

    assert (taker.ready, driver.shard.cuts.open, driver.shard.cuts.latest()) == ([], [], [])
    assert pins(driver) == [1, 1]


def test_a_cut_whose_blocks_come_in_two_threads_is_handed_over_once():
    """The second block comes as soon as the first is noted, before its thread has looked whether that was the last."""
    driver = Driver(job_spec(1, blocks=2))
    done = driver.shard.cuts.take_part()
    (a,) = driver.start()
    driver.learn_cuts([cut(step=1)])
    cuts, push = driver.shard.cuts, driver.begin_push(a, 0)

    class Lock:
        """That of the cuts; when it is let go of for the first time, the other thread goes on."""

        def __init__(self, lock):
            self._lock = lock

        def __enter__(self):
            self._lock.__enter__()

        def __exit__(self, *error):
            self._lock.__exit__(*error)
            cuts._lock = self._lock
            with ThreadPoolExecutor(1) as other:
                assert other.submit(driver.push_block, push, 1, 1.0).result() is None

    cuts._lock = Lock(cuts._lock)
    assert driver.push_block(push, 0, 1.0) is None

    assert sorted(done.get_nowait().pages) == [0, 1]
    assert (done.qsize(), cuts.unwritten) == (0, 1)


def test_a_cut_that_completes_while_the_job_goes_back_is_handed_over_once():
    """With all its pages: whoever writes it holds them, and gives them back to the arena that they are from."""
    driver = Driver(job_spec(1, blocks=2))
    done = driver.shard.cuts.take_part()
    (a,) = driver.start()
    job, describe = driver.core.job, driver.shard.cuts._surroundings

    def go_back_meanwhile(*args):
        driver.shard.cuts.forget(job)
        describe(*args)

    driver.shard.cuts._surroundings = go_back_meanwhile
    driver.learn_cuts([cut(step=1)])
    driver.push(a, 0, 1.0)

    snapshot = done.get_nowait()
    assert (done.qsize(), snapshot.why_missed, sorted(snapshot.pages)) == (0, "", [0, 1])
    driver.shard.cuts.release(snapshot)
    assert (pins(driver), driver.shard.cuts.unwritten) == ([1, 1], 0)


def test_a_cut_that_was_given_up_and_is_abandoned_by_its_reader_gives_its_pages_back_once():
    """Its reader, whose wait has ended by that, clears up after itself: pages must not be unpinned twice."""
    driver = Driver(job_spec(1, blocks=2))
    (a,) = driver.start()
    done = SimpleQueue()
    request = data_pb2.ReadRequest(run_id=a.caller.run_id, layout_digest=driver.layout.digest, cut=cut(step=1))
    snapshot = driver.shard.begin_read(request, done)
    driver.push_block(driver.begin_push(a, 0), 0, 1.0)
    assert list(snapshot.pages) == [0]

    driver.shard.cuts.forget(driver.core.job)
    driver.shard.cuts.abandon(snapshot)

    assert (pins(driver), snapshot.pages) == ([1, 1], {})
    given_up = done.get_nowait()
    missed = [(given_up.cut.id, given_up.why_missed)]
    assert missed == [("c1", "the job goes back to a checkpoint")]
    assert [block._waits._takes for block in driver.core.job.blocks.values()] == [{}, {}]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cut_of_a_job_that_has_gone_back_meanwhile_is_missed(mode):
    """Its reader had found the job just before; nothing of it would ever come, and nothing of it is pinned."""
    driver = Driver(job_spec(1, blocks=2, mode=mode))
    taker = Taker(driver)
    driver.start()
    job = driver.core.job

    driver.shard.cuts.forget(job)
    driver.shard.cuts.learn(job, [cut(step=7)])

    assert (taker.ready, taker.missed) == ([], [("c1", "the job goes back to a checkpoint")])
    assert (driver.shard.cuts.open, pins(driver)) == ([], [1, 1])


def test_what_is_no_cut_is_refused_by_name():
    """Names end up in file names; their number in every reply."""
    for id_ in ("", "a/b", "..", "x" * 65, "é"):
        with pytest.raises(InvalidRequest, match=r"cuts\.id"):
            check_cuts([cut(id_)])
    with pytest.raises(InvalidRequest, match="cuts: 9 are above the limit of 8"):
        check_cuts([cut(f"c{i}") for i in range(9)])
    for time in (-1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(InvalidRequest, match=r"cuts\.created_at: expected seconds from 0"):
            check_cuts([data_pb2.Cut(id="c1", created_at=time)])


def test_cuts_that_workers_name_are_few():
    """Distant cuts, again and again: the oldest are given up, and their waits at the blocks with them."""
    driver = Driver(job_spec(1, blocks=2))
    taker = Taker(driver)
    driver.start()

    for number in range(100):
        driver.learn_cuts([cut(f"c{number}", step=1000 + number)])

    waits = [len(block._waits._takes) for block in driver.core.job.blocks.values()]
    assert len(driver.shard.cuts.open) == 2 * CUTS_MAX
    assert waits == [2 * CUTS_MAX] * 2
    assert [id_ for id_, _ in taker.missed] == [f"c{number}" for number in range(100 - 2 * CUTS_MAX)]
