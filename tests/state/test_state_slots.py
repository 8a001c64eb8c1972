"""Slots that are loaded or begin anew on a shard: of blocks, and of the rows of tables."""

from __future__ import annotations

import numpy as np
import pytest
from shard_driver import Driver, Seat, job_spec, tables_spec

from psd.contract.errors import InvalidRequest, NonFiniteGradient, OutOfSpace
from psd.state.tables.slots import reset_slots
from psd.v1 import control_pb2, data_pb2
from psd_core.arena import StoreFull
from psd_core.initial import Normal
from psd_core.table import TableSpec, TableStore

SCALARS = [1.0, 0.5, 0.0, 0.0]
"""Of SGD: lr, momentum, dampening, weight_decay."""


def momentum_driver(world_size: int = 1, mode: str = "sync", **config) -> tuple[Driver, list[Seat]]:
    driver = Driver(job_spec(world_size, mode=mode, flags=("momentum",)), **config)
    return driver, driver.start()


def load(driver: Driver, seat: Seat, *, clock: int, seq: int = 1, resets: bool = False, **entry) -> None:
    request = data_pb2.ParametersRequest(
        caller=seat.caller, layout_digest=driver.layout.digest, clock=clock, seq=seq, resets_slots=resets
    )
    for block in driver.layout.blocks_of(0) if entry else ():
        values = np.full(block.length, entry["value"], block.dtype)
        given = {"slot": 1, "steps": [3] * len(block.segment_ends), **entry}
        request.parameters.add(block=block.index, payload=values.tobytes(), slot=given["slot"], steps=given["steps"])
    driver.shard.parameters.set(request)


def push(driver: Driver, seat: Seat, clock: int, value: float) -> float:
    """Push, and return by how much each parameter has fallen."""
    before = driver.values()[0]
    driver.push(seat, clock, value, scalars=SCALARS)
    return before - driver.values()[0]


def test_a_slot_that_is_loaded_survives_the_shards_restart_and_is_gone_on_from(tmp_path):
    """It is as durable as an update is."""
    driver, (seat,) = momentum_driver(state_dir=str(tmp_path))
    assert push(driver, seat, 0, 1.0) == 1.0

    load(driver, seat, clock=1, value=8.0)
    load(driver, seat, clock=1, resets=True)  # what the load has not set: nothing here
    driver.restart(seat)
    assert push(driver, seat, 1, 1.0) == 0.5 * 8 + 1


def test_slots_begin_anew_once_however_often_the_call_comes():
    """Sent again late, it undoes no momentum of a step that came after it."""
    driver, (seat,) = momentum_driver()
    push(driver, seat, 0, 1.0)

    load(driver, seat, clock=1, resets=True)
    load(driver, seat, clock=1, resets=True)
    assert push(driver, seat, 1, 1.0) == 1.0
    load(driver, seat, clock=1, resets=True)
    assert push(driver, seat, 2, 1.0) == 1.5


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        ({"slot": 2}, InvalidRequest, "slot: 2, and block 0 has 1 slots"),
        ({"steps": []}, InvalidRequest, "steps: has 0 entries"),
        ({"slot": 0}, InvalidRequest, "steps: has . entries"),
        ({"steps": [1 << 60]}, InvalidRequest, "steps: .* above the limit"),
        ({"value": np.nan}, NonFiniteGradient, "block 0|'.*'"),
    ],
)
def test_a_slot_that_does_not_fit_is_refused_and_changes_nothing(entry, error, text):
    """The next step goes on from the slot that was there."""
    driver, (seat,) = momentum_driver()
    push(driver, seat, 0, 1.0)
    with pytest.raises(error, match=text):
        load(driver, seat, clock=1, **{"value": 9.0, **entry})
    assert push(driver, seat, 1, 1.0) == 1.5


ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}


def table(path, updates: str, *, push_max: int = 64) -> TableStore:
    spec = TableSpec(
        "user",
        4,
        "adam",
        ("decoupled_weight_decay",),
        init=Normal(0.5),
        seed=3,
        max_rows=40_000,
        push_max=push_max,
        updates=updates,
    )
    return TableStore.create(path, spec, salt=1)


def pushed(store: TableStore, rng: np.random.Generator, steps: int, decay: float = 0.0) -> None:
    """Steps that touch some rows each; the others catch up, or rest."""
    for _ in range(steps):
        ids = rng.permutation(40)[:8].astype(np.uint64)
        store.push(ids, rng.standard_normal((8, 4)).astype(np.float32), {**ADAM, "weight_decay": decay}, distinct=True)


@pytest.mark.parametrize(
    ("updates", "fails_after"),
    [*((updates, writes) for updates in ("lazy", "catch_up") for writes in (None, 0, 3, 5)), ("catch_up", 8)],
)
def test_rows_whose_slots_have_begun_anew_are_those_of_a_new_table_with_their_values(
    tmp_path, monkeypatch, updates, fails_after
):
    """To the bit, also where it had to be done again because there was no space in the middle of it."""
    store = table(tmp_path / "table", updates, push_max=8)
    decay = 0.1 if updates == "lazy" else 0.0  # where rows catch up, see the next test
    pushed(store, np.random.default_rng(4), 20, decay)
    ids = np.arange(40, dtype=np.uint64)
    values = store.read(ids)
    if fails_after is not None:
        write, left = TableStore.write, [fails_after]

        def failing(self, *args, **kwargs):
            if not left[0]:
                monkeypatch.setattr(TableStore, "write", write)
                raise StoreFull("no space")
            left[0] -= 1
            return write(self, *args, **kwargs)

        monkeypatch.setattr(TableStore, "write", failing)
        with pytest.raises(OutOfSpace, match="table 'user'"):
            reset_slots("user", store)
        np.testing.assert_array_equal(store.read(ids), values)

    reset_slots("user", store)
    np.testing.assert_array_equal(store.read(ids), values)
    rows, is_there = store.read_rows(ids)
    new = table(tmp_path / "new", updates)
    new.write(ids[is_there], rows[is_there], step=0)
    for each in (store, new):
        pushed(each, np.random.default_rng(5), 20, decay)
    np.testing.assert_array_equal(store.read_rows(ids)[0], new.read_rows(ids)[0])
    assert (rows[:, 4:] == 0).all()
    assert store.counters()["step"] == 20
    for each in (store, new):
        each.close(remove=True)


def test_slots_of_rows_do_not_begin_anew_where_untrained_rows_have_decayed():
    """What these are now follows from all steps that there were; nothing changes, on any shard."""
    driver = Driver(tables_spec(1, tables=1, blocks=1, table={"updates": "catch_up"}))
    (seat,) = driver.start()
    driver.push_rows(seat, 0, {0: ([1, 2], 1.0)})
    load(driver, seat, clock=1, resets=True)
    driver.push_rows(seat, 1, {0: ([1, 2], 1.0)}, scalars=[1.0, 0.0, 0.0, 0.1])
    request = control_pb2.LoadRequest(caller=seat.caller, digest=bytes(16), clock=2, seq=1, resets_slots=True)
    with pytest.raises(InvalidRequest, match="table 's0': its slots cannot begin anew"):
        driver.shard.parameters.load(request)
    with pytest.raises(InvalidRequest, match="table 's0': its slots cannot begin anew"):
        load(driver, seat, clock=2, seq=2, resets=True)
