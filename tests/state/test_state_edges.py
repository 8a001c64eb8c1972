"""A job far in its life: steps, versions and clocks beyond 31, 32 and 53 bits are counted, kept, stored and sent as ever."""

from __future__ import annotations

import pytest
from settling import bring, commit
from shard_driver import Driver, tables_spec

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.errors import CheckpointCorrupt

EDGES = [2**31 - 2, 2**32 - 2, 2**53 - 2, 2**56 - 6]


def stored_at(directory, spec, step):
    """The name of a checkpoint of a job at this step, which has trained one."""
    driver = Driver(spec, run_id="mine", directory=directory)
    seats = driver.start()
    step_of_all(driver, seats, 0)
    for block in driver.core.job.blocks.values():
        block.version = step
    cut = Cut("a1", step, 0, "mine", 5.0, driver.core.job.layout)
    driver.write_part(directory, cut, tables=[partition.store.snapshot() for partition in driver.core.job.tables.partitions])
    assert directory.complete(cut)
    return cut.name


def step_of_all(driver, seats, clock):
    for seat in seats:
        driver.push_rows(seat, clock, {0: ([1, 2 + seat.rank], 1.0)})
    if driver.core.job.is_exact:
        for seat in seats:
            commit(driver, seat, clock)
        bring(driver, seats[0], clock + 1, decisions=driver.shard.settlement.commit_reply(0, clock).decisions)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("mode", ["sync", "exact", "async", "ssp:2"])
def test_a_job_goes_on_beyond_any_step(mode, edge, tmp_path):
    """From a checkpoint of that step, over kills: each push counts once, and rows expire."""
    fields = {"aggregation": "exact"} if mode == "exact" else {"mode": mode}
    spec = tables_spec(2, tables=1, blocks=1, reduction="sum", table={"expire_steps": 2}, **fields)
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = stored_at(directory, spec, edge)
    driver = Driver(spec, directory=directory, state_dir=str(tmp_path / "state"))
    driver.rollback(name, 1)
    seats = [driver.join(rank) for rank in range(2)]
    for seat in seats:
        driver.declare(seat)
    for clock in range(edge, edge + 4):
        step_of_all(driver, seats, clock)
        step_of_all(driver, seats, clock)
        driver.restart()
        for seat in seats:
            driver.resume(seat, timeline=1)

    tables = driver.core.job.tables
    assert [worker.clock for worker in driver.core.members.workers] == [edge + 4] * 2
    assert tables.version == (edge + 4 if mode in ("sync", "exact") else edge + 8)
    assert driver.version() == tables.version
    assert driver.rows(0, [1, 2, 3]) == [-10.0, -5.0, -5.0]
    assert tables.partitions[0].store.counters()["step"] == (5 if mode in ("sync", "exact") else 10)


def test_a_checkpoint_of_a_step_that_no_clock_can_have_is_refused_by_name(tmp_path):
    """A shard would fail with no word that helps, at each start."""
    spec = tables_spec(2, tables=1, blocks=1, mode="async")
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    with pytest.raises(
        CheckpointCorrupt, match=r"manifest\.json: step: expected 0 to 72057594037927935, got 72057594037927936"
    ):
        stored_at(directory, spec, 2**56)

    assert not Driver(spec, directory=directory).shard.restored_from
