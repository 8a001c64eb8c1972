"""The life cycle of a shard: its table, the page that shows it, and the ways out of what is meant to be passed through."""

from __future__ import annotations

import pytest
from shard_driver import Driver
from source_tree import ROOT
from stored_job import begun, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import CheckpointFailed, InternalError, StateLost
from psd.state.life import TRANSITIONS, Life, LifeCycle
from psd.v1 import control_pb2


def test_what_is_not_in_the_table_is_a_defect_that_names_both_states():
    """It changes nothing."""
    life = LifeCycle()
    life.to(Life.UNREAD)

    with pytest.raises(InternalError, match="a shard that is UNREAD cannot become TENTATIVE"):
        life.to(Life.TENTATIVE)

    assert life.now is Life.UNREAD
    assert not life.try_to(Life.LOST)


def test_every_state_is_in_the_table_and_has_a_way_in_and_a_way_out():
    """No state is forgotten, and a shard can be brought out of each."""
    ways_in = {following for ways in TRANSITIONS.values() for following in ways}

    assert set(TRANSITIONS) == ways_in == set(Life)
    assert all(set(ways) - {state} for state, ways in TRANSITIONS.items())


def test_the_states_are_those_of_the_protocol():
    """By name and number."""
    ours = {f"LIFE_CYCLE_{each.name}": each.value for each in Life}

    assert {name: value for name, value in control_pb2.LifeCycle.items() if value} == ours


def test_the_page_on_durability_shows_the_table():
    """If it does not: the table that belongs there is in the message."""
    rows = [
        f"| {state.name if index == 0 else ''} | {following.name} | {when} |"
        for state, ways in TRANSITIONS.items()
        for index, (following, when) in enumerate(ways.items())
    ]
    table = "\n".join(["| from | to | when |", "|---|---|---|", *rows])

    assert f"\n{table}\n" in (ROOT / "docs" / "design" / "durability.md").read_text(), f"expected there:\n{table}"


@pytest.fixture
def stranded(tmp_path, monkeypatch):
    """A shard that had to go back, and whose store did not answer just then; and the checkpoint that is there."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("exact", 2, 1), directory)
    (driver,) = begun(directory, name, "exact", 2, 1)
    driver.declare(driver.join(0))

    def newest():
        raise CheckpointFailed("no network")

    with monkeypatch.context() as context:
        context.setattr(directory, "newest", newest)
        assert lose_a_round(driver)
        driver.advance(1)
    assert driver.core.life.now is Life.STRANDED
    assert not lose_a_round(driver), "whoever waits for the round is told"
    return driver, name


def lose_a_round(driver: Driver) -> bool:
    """True if the shard hopes to go back."""
    return driver.core._on_lost(StateLost("worker 0's"))


def test_a_shard_that_could_not_go_back_tries_again_when_workers_come_anew(stranded):
    """An operator has repaired the store, and started the workers again."""
    driver, name = stranded

    driver.join(0)
    assert lose_a_round(driver)
    driver.advance(1)

    assert (driver.core.life.now, driver.core.restored_from) == (Life.TENTATIVE, name)


def test_a_shard_that_was_brought_back_by_a_worker_may_go_back_by_itself_the_next_time(stranded):
    """Its failure was that of the store on that day."""
    driver, name = stranded

    driver.rollback(name, 2)
    driver.declare(driver.join(0), spec_of("exact", 2))

    assert lose_a_round(driver)
    driver.advance(1)
    assert driver.core.life.now is Life.TENTATIVE
