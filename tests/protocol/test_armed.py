"""Armed steps in a small scope: worlds whose push_pulls travel as such, and the defects that they could have."""

from __future__ import annotations

import planted
import pytest
from check_protocol import ARMED, SETTINGS, explore
from explorer import Explorer
from setting import Setting
from test_protocol import find, told_in_order

from psd.contract.wire import Kind

pytestmark = pytest.mark.slow

STATES = 25
"""To look at in each setting; `make check-protocol` looks at all of them."""

SEEN = ("armed-quorum", "armed-stop", "armed-cuts", "armed-readers")
"""Others are left to `make check-protocol`; the three kinds of consistency alone are seen whole below."""

SMALL = Setting("planted", has_armed=True, early_steps=2, steps=3, faults=frozenset(), budget=0)
"""Whose workers are armed when the search begins, and make one step more."""

ROWS = SMALL.but(programs=("push_pull",), tables=2, blocks=1, shards=1, budget=1)
"""Of one worker, whose steps bring rows of two tables."""


def answers(explorer: Explorer, kind: Kind) -> int:
    """The number of different answers of a kind that steps had."""
    contents = explorer.world.outcomes.contents
    return sum(outcome.body[:4] == int(kind).to_bytes(4, "little") for outcome in contents)


@pytest.mark.parametrize("setting", [each for each in ARMED if each.name in SEEN], ids=lambda setting: setting.name)
def test_with_one_fault_nothing_is_found(setting: Setting) -> None:
    explorer, told = explore(setting.with_one_fault(), states_max=STATES)

    assert told == []
    assert explorer.states == STATES
    assert answers(explorer, Kind.DONE) > 0


@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:1"])
def test_steps_that_are_revoked_at_any_moment_have_no_findings(consistency: str) -> None:
    """Also between two blocks of one step: all states that there are, on one shard."""
    setting = SMALL.but(consistency=consistency, shards=1, faults=frozenset({"revoke", "unarmed", "pause"}), budget=1)

    explorer, told = explore(setting)

    assert told == []
    assert explorer.extent() == "0 faults: everything, 1 faults: everything"
    assert answers(explorer, Kind.DONE) > 0
    assert answers(explorer, Kind.AGAIN) > 0


@pytest.mark.parametrize("name", ["sync-exact", "parts", "residuals"])
def test_what_steps_do_not_know_is_never_armed(name: str) -> None:
    """Its push_pulls are made the long way also where workers ask for steps."""
    (setting,) = (each for each in SETTINGS if each.name == name)

    explorer, told = explore(setting.but(has_armed=True, faults=frozenset(), budget=0), states_max=20)

    assert told == []
    assert not any(outcome.offer for outcome in explorer.world.outcomes.contents)


@pytest.mark.parametrize(
    ("consistency", "steps", "faults"),
    [("sync", 3, {"revoke", "pause", "crash", "lose"}), ("async", 4, {"crash"})],
)
def test_steps_with_rows_have_no_findings(consistency: str, steps: int, faults: set[str]) -> None:
    """Revoked, and killed between any two stores, with rows that are there and others: all states that there are, on one shard.

    A step with rows that came after one that was given up under way ended its worker by AssertionError."""
    explorer, told = explore(ROWS.but(consistency=consistency, faults=frozenset(faults), rows_max=2, steps=steps))

    assert told == []
    assert explorer.extent() == "0 faults: everything, 1 faults: everything"
    assert answers(explorer, Kind.DONE) > 0


def test_a_step_that_needs_room_for_a_row_is_made_the_long_way() -> None:
    """The second of two new rows takes the place of the first one, and the row that all gradients have keeps their sum."""
    explorer, told = explore(ROWS.but(consistency="async", rows_max=2, steps=4, budget=0))

    assert told == []
    assert answers(explorer, Kind.DONE) > 0
    assert answers(explorer, Kind.AGAIN) > 0


def test_a_revocation_that_does_not_wait_for_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has looked at its epoch once, and counts after a cut has begun."""
    planted.no_second_look_at_the_epoch(monkeypatch)

    story = find(
        SMALL.but(consistency="async", shards=1, reads=1, programs=("push_pull",), faults=frozenset({"pause"}), budget=1)
    )

    assert story[0] == "block 1 counts a step of worker 0, though a cut is open"
    assert told_in_order(story, "its thread has to wait before its lock", "is called by a reader", "answers worker 0")


def test_a_step_that_counts_again_as_a_push_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.repeat_counted_twice(monkeypatch)

    story = find(SMALL)

    assert "gradient 2 counts twice" in story[0] or "gradient 8 counts twice" in story[0]
    assert told_in_order(story, "step gradient", "again", "push_pull gradient")


def test_a_step_that_closes_a_round_and_forgets_tickets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.close_that_forgets_tickets(monkeypatch)

    story = find(SMALL)

    assert "wait for what cannot come: push_pull at shard" in story[0]
    assert told_in_order(story, "its step has waited", "push_pull gradient", "step gradient")


def test_a_step_that_ignores_where_another_worker_begins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor takes part from the next round on, and who is armed before that round is open goes on without it."""
    planted.floor_ignored(monkeypatch)

    story = find(SMALL.but(early_steps=1, steps=4, shards=1, blocks=1, faults=frozenset({"die"}), budget=1))

    assert story[0] == "block 0, update 4: it has closed with [1], and waits for [0, 1]"
    assert told_in_order(story, "worker 0 dies", "join", "and offers steps", "step gradient", "step gradient")


def test_rows_that_count_again_in_a_push_after_their_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.rows_of_a_step_forgotten(monkeypatch)

    story = find(ROWS.but(consistency="async", faults=frozenset({"lose"})))

    assert story[0] == "table 0 of block 1, update 4: gradient 2 counts twice"
    assert told_in_order(story, "breaks before the answer", "push_pull gradient 2")


def test_rows_that_a_step_publishes_without_the_window_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.rows_without_the_window(monkeypatch)

    story = find(ROWS.but(consistency="async", faults=frozenset({"kill", "crash"})))

    assert "gradient 2 counts twice" in story[0]
    assert told_in_order(story, "step gradient 2", "push_pull gradient 2")


def test_rows_that_one_table_has_twice_after_a_kill_within_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table had its transaction when the shard died, and the other had not."""
    planted.rows_again(monkeypatch)

    story = find(ROWS.but(consistency="async", faults=frozenset({"crash"})))

    assert story[0] == "table 0 of block 1, update 4: gradient 2 counts twice"
    assert told_in_order(story, "is killed at its crash point", "push_pull gradient 2")
