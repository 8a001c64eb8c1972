"""Tables at cuts: the rows of the version that was announced, taken while training goes on, and one snapshot at a time."""

from __future__ import annotations

import pytest
from shard_driver import Driver, tables_spec

from psd.checkpoint.cut import FINAL_ID, name_of
from psd.v1 import data_pb2


def started(mode="sync", **fields):
    """A shard that trains, and the queue of what is to be stored."""
    driver = Driver(tables_spec(1, mode=mode, **fields))
    done = driver.shard.cuts.take_part()
    return driver, *driver.start(), done


def cut(id_, step, base=""):
    return data_pb2.Cut(id=id_, step=step, created_at=5.0, base=base)


def push(driver, seat, clock):
    driver.push_rows(seat, clock, {0: ([1, 10 + clock], [1.0, 1.0])}, client_state=b"at %d" % clock)


def stored(snapshot):
    """The first numbers of the rows of the first table, by id."""
    return {int(h["id"]): float(row[0]) for batch in snapshot.tables[0] for h, row in zip(*batch, strict=True)}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("blocks", [0, 1])
def test_a_cut_has_the_rows_of_its_version_and_what_counts_with_them(mode, blocks):
    """Updates that come while they are copied leave them alone; the worker's state is the one that came with them."""
    driver, seat, done = started(mode, blocks=blocks)
    if mode == "sync":
        driver.learn_cuts([cut("c1", 2)])
    for clock in range(2):
        push(driver, seat, clock)
    if mode == "async":
        driver.learn_cuts([cut("c1", 2)])
        driver.choose(cut("c1", 2))
    push(driver, seat, 2)

    snapshot = done.get_nowait()

    assert snapshot.why_missed == ""
    assert stored(snapshot) == {1: -2.0, 10: -1.0, 11: -1.0}
    assert snapshot.client_states == {0: b"at 1"}
    assert len(snapshot.pages) == blocks
    driver.shard.cuts.release(snapshot)
    assert driver.rows(0, [1]) == [-3.0]


def test_a_cut_has_what_has_changed_since_the_checkpoint_that_it_names():
    """All shards hear the same name, so that their parts fit together; one that does not remember it stores all rows."""
    driver, seat, done = started()
    names = ["", *(name_of(0, step, f"c{step}") for step in (1, 2))]
    stored_ids = []
    for clock, base in enumerate([names[0], names[0], names[1], names[2], name_of(0, 2, "another")]):
        driver.learn_cuts([cut(f"c{clock + 1}", clock + 1, base)])
        push(driver, seat, clock)
        snapshot = done.get_nowait()
        stored_ids.append(sorted(stored(snapshot)))
        driver.core.job.tables.bases |= {name_of(0, clock + 1, f"c{clock + 1}"): [table.mark for table in snapshot.tables]}
        driver.shard.cuts.release(snapshot)

    assert stored_ids == [[1, 10], [1, 10, 11], [1, 11, 12], [1, 12, 13], [1, 10, 11, 12, 13, 14]]


def test_a_cut_builds_on_no_other_than_the_last_whole_ones():
    """Earlier ones are removed as soon as those are stored, which this shard may learn late."""
    driver, _seat, _done = started(mode="async")
    tables, bases = driver.core.job.tables, {}
    for cut_id, known in [("a", ""), ("b", "a"), ("c", ""), ("d", "a"), ("e", ""), ("f", "a"), ("g", "e"), ("h", "c")]:
        tables.base = name_of(0, 0, known) if known else ""
        driver.shard.schedule.announce(cut_id)
        bases[cut_id] = driver.shard.cuts.latest()[-1].base[-1:]

    assert bases == {"a": "", "b": "a", "c": "", "d": "a", "e": "", "f": "", "g": "e", "h": ""}


def test_a_cut_that_comes_while_another_is_written_is_missed_and_the_last_one_waits():
    """A table copies one snapshot at a time; of the end of a job there is to be one."""
    driver, seat, done = started(blocks=1)
    driver.learn_cuts([cut("c1", 1), cut("c2", 2)])
    for clock in range(3):
        push(driver, seat, clock)
    first, second = done.get_nowait(), done.get_nowait()
    assert (first.why_missed, second.why_missed[:32]) == ("", "earlier ones are not written yet")
    driver.leave(seat)
    driver.shard.cuts.take_final(driver.core.job, cut(FINAL_ID, 3))
    assert done.empty()

    driver.shard.cuts.release(first)

    last = done.get_nowait()
    assert stored(last)[1] == -3.0
    driver.shard.cuts.release(last)
    assert driver.shard.cuts.unwritten == 0
    assert all(p.store._snapshot.is_closed for p in driver.core.job.tables.partitions)


def test_the_last_cut_that_lacks_memory_is_missed_and_the_one_before_it_is_stored(monkeypatch):
    """That one is released, once, whoever does it again; nothing of a table is left under way."""
    driver, seat, done = started(blocks=1)
    driver.learn_cuts([cut("c1", 1)])
    push(driver, seat, 0)
    first = done.get_nowait()
    driver.leave(seat)
    driver.shard.cuts.take_final(driver.core.job, cut(FINAL_ID, 1))
    *_, second_table = (partition.store for partition in driver.core.job.tables.partitions)

    def no_memory(_since):
        raise MemoryError("no memory")

    monkeypatch.setattr(second_table, "snapshot", no_memory)
    driver.shard.cuts.release(first)
    driver.shard.cuts.release(first)

    last = done.get_nowait()
    assert (done.qsize(), last.is_final, last.why_missed) == (0, True, "no memory")
    assert driver.shard.cuts.unwritten == 0
    assert not driver.shard.cuts.is_storing
    assert all(p.store._snapshot.is_closed for p in driver.core.job.tables.partitions)


def test_a_job_that_ends_before_a_cut_gives_its_snapshots_back():
    """Also one whose blocks have not come."""
    driver, seat, done = started(blocks=1)
    driver.learn_cuts([cut("c1", 1)])
    whole = driver.begin_push(seat, 0)
    driver.push_tables(whole, {0: ([1], 1.0)})
    driver.shard.cuts.forget(driver.core.job)

    assert done.get_nowait().why_missed
    assert all(p.store._snapshot.is_closed for p in driver.core.job.tables.partitions)
