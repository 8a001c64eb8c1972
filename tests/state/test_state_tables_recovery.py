"""Tables of a shard that was killed: at every store of a push, rows, versions and windows are as if it had never died."""

from __future__ import annotations

import dataclasses

import pytest
from settling import bring, commit
from shard_driver import Copier, Driver, tables_spec

from psd.contract.config import ConfigError, Limits
from psd.state.core import ShardCore
from psd.state.durability.state_directory import Storage
from psd_core import _table

SMALL = Limits(table_bytes_max=1 << 19, push_ids_max=16)
"""So small that a table's file can be copied at each store."""


@pytest.fixture
def driver_of(tmp_path):
    """Makes drivers whose shards outlive their process: driver_of(spec, **arguments)."""
    return lambda spec, **arguments: Driver(spec, state_dir=str(tmp_path / "state"), limits=SMALL, **arguments)


def push(driver, seats, clock):
    """One push of each worker: row 1 of both tables, and one of its own, by 2.0 and 4.0."""
    for seat in seats:
        number = 2.0 * (seat.rank + 1)
        driver.push_rows(seat, clock, {0: ([1, 10 + seat.rank], number), 1: ([1], number)})
    if driver.core.job.is_exact:
        for seat in seats:
            commit(driver, seat, clock)
        bring(driver, seats[0], clock + 1, decisions=driver.shard.settlement.commit_reply(0, clock).decisions)


def sums(driver):
    return driver.rows(0, [1, 10, 11]), driver.rows(1, [1])


@pytest.mark.parametrize(("mode", "blocks"), [("sync", 1), ("exact", 0), ("async", 0)])
def test_a_push_to_a_shard_that_dies_at_any_store_of_it_is_counted_once(driver_of, tmp_path, mode, blocks):
    """Tables that had the push already do not take it again when it is sent again, and the others do."""
    fields = {"aggregation": "exact"} if mode == "exact" else {"mode": mode}
    driver = driver_of(tables_spec(2, blocks=blocks, reduction="sum", **fields))
    seats = driver.start()
    push(driver, seats, 0)
    deaths = 0
    while True:
        clock = deaths + 1
        copier = Copier(tmp_path / "state")
        driver.restart(*seats, crash_point=copier)
        copier.steps = deaths + 1
        push(driver, seats, clock)
        if not copier.has_copied:
            break
        deaths += 1

        driver.restart(*seats, copy=copier.copy)
        for _ in range(2):  # whoever has had no answer sends it again, in whatever order
            push(driver, seats[::-1], clock)

        assert sums(driver) == ([-6.0 * (clock + 1), -2.0 * (clock + 1), -4.0 * (clock + 1)], [-6.0 * (clock + 1)])
        assert driver.core.job.tables.version == (clock + 1) * (2 if mode == "async" else 1)
    assert deaths > 20


def test_a_round_is_empty_again_after_a_kill_and_takes_what_is_sent_again(driver_of):
    """The sums of an open round die with the process, and what had been applied is there."""
    driver = driver_of(tables_spec(2, blocks=1, reduction="sum"))
    a, b = driver.start()
    push(driver, (a, b), 0)
    push(driver, (a,), 1)

    driver.restart(a, b)
    push(driver, (b,), 1)
    assert sums(driver)[1] == [-6.0]
    push(driver, (a,), 1)

    assert sums(driver)[1] == [-12.0]


def test_a_shard_whose_tables_file_is_gone_does_not_begin_with_empty_rows(driver_of, tmp_path):
    """It says which file it lacks; the rest is left as it is."""
    driver = driver_of(tables_spec(1))
    driver.start()
    driver.shard.close(keep=True)
    (tmp_path / "state" / "table-1").unlink()

    with pytest.raises(ConfigError, match="table-1"):
        driver_of(tables_spec(1))

    assert (tmp_path / "state" / "table-0").exists()


@pytest.mark.parametrize("keep", [True, False])
def test_table_files_stay_and_go_with_the_arena(driver_of, tmp_path, keep):
    """What is to be gone on with stays; what is not leaves nothing behind."""
    driver = driver_of(tables_spec(1))
    (seat,) = driver.start()
    push(driver, (seat,), 0)

    driver.shard.close(keep=keep)

    if keep:
        assert sums(driver_of(tables_spec(1)))[1] == [-2.0]
    else:
        assert not (tmp_path / "state").exists()


def test_a_row_that_has_changed_under_a_killed_shard_lets_it_go_back_to_a_checkpoint(driver_of, tmp_path, caplog):
    """Not one number of it is believed: without a checkpoint the shard does not start, and leaves the file as it is."""
    driver = driver_of(tables_spec(1))
    push(driver, driver.start(), 0)
    table = driver.core.storage.tables[1]
    place = table._partition.places()["rows"][0]
    row_at = table._partition.regions[_table.ROWS][0] + 4 * table.spec.layout.width * place
    del table  # and with it the lock of the file
    driver.kill()
    path = tmp_path / "state" / "table-1"
    data = bytearray(path.read_bytes())
    data[row_at] ^= 1
    path.write_bytes(data)
    config = dataclasses.replace(driver.config, checkpoint_dir=str(tmp_path / "checkpoints"))

    def core(has_checkpoints):
        found = Storage(config, None)
        return ShardCore(config, found, lambda: 0.0, None, wall=lambda: 0.0, has_checkpoints=has_checkpoints)

    damage = rf"--state-dir: {path}: row of place {place}: it does not have its checksum; .*cannot go on with it"
    with pytest.raises(ConfigError, match=damage):
        core(False).recover(lambda: False)
    assert path.read_bytes() == data
    assert core(True).recover(lambda: True) is False
    assert "going back to a checkpoint" in caplog.text
    assert not path.exists()
