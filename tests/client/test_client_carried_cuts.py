"""Cuts that a worker carries, and the position that it chooses in those without rounds."""

from __future__ import annotations

import pytest

from psd.v1 import data_pb2
from psd_client.worker.session.carried_cuts import CarriedCuts


def carrier(session: int = 5) -> CarriedCuts:
    cuts = CarriedCuts(2)
    cuts.begin(session)
    return cuts


def cut(**fields: bool) -> data_pb2.Cut:
    return data_pb2.Cut(id="c", step=3, created_at=5.0, **fields)


def test_a_cut_is_carried_to_all_shards_as_soon_as_one_has_named_it() -> None:
    """Also by a worker of a job with rounds, which says no more of it."""
    cuts = carrier()

    assert not cuts.hear(0, [cut()], clock=3)  # the next push carries it

    assert list(cuts.carried()) == [cut()]
    assert not cuts.is_awaited
    other = carrier()
    assert other.hear(0, [cut()], clock=3, by_heartbeat=True)
    assert not other.hear(0, [cut()], clock=4, by_heartbeat=True)


def test_ready_is_said_when_all_shards_wait() -> None:
    """Nobody chooses before all workers can be told at once."""
    cuts = carrier()

    assert cuts.hear(0, [cut(waits=True)], clock=3)
    assert (list(cuts.carried()), cuts.is_awaited) == ([cut()], True)
    assert cuts.hear(1, [cut(waits=True)], clock=3)

    assert list(cuts.carried()) == [cut(ready=True)]


@pytest.mark.parametrize(("pushing", "position"), [(None, 3), (3, 4), (2, 3)])
def test_the_position_is_the_clock_after_the_push_in_the_midst(pushing: int | None, position: int) -> None:
    """A push that has begun may have left without it; the next one carries it."""
    cuts = carrier()
    cuts.pushing = pushing

    assert cuts.hear(0, [cut(waits=True, ready=True)], clock=3)
    cuts.pushing = 7
    assert not cuts.hear(0, [cut(waits=True, ready=True)], clock=8)

    assert [told.position for told in cuts.carried()] == [position]


def test_another_session_chooses_anew() -> None:
    """What is heard for the session before, or on the way into the job, is not heard at all."""
    cuts = carrier()
    cuts.hear(0, [cut(waits=True, ready=True)], clock=9)
    cuts.begin(0)
    assert not cuts.hear(0, [cut(waits=True, ready=True)], clock=9, session=5)
    cuts.begin(6)
    assert not cuts.hear(0, [cut(waits=True, ready=True)], clock=9, session=5)
    assert list(cuts.carried()) == []

    cuts.hear(0, [cut(waits=True, ready=True)], clock=4, session=6)

    assert [told.position for told in cuts.carried()] == [4]


def test_no_cut_waits_for_a_push_that_has_failed() -> None:
    """Its program may take its time; when it goes on, or gives the push up, the worker is ready again."""
    cuts = carrier()
    cuts.pushing = 3
    cuts.set_ready(False)
    for shard in (0, 1):
        cuts.hear(shard, [cut(waits=True)], clock=3)
    assert list(cuts.carried()) == [cut()]

    cuts.set_ready(True)

    assert list(cuts.carried()) == [cut(ready=True)]


def test_a_worker_that_is_not_ready_is_asked_again() -> None:
    """It had said that it was; the shards' word that all are to choose finds it setting parameters."""
    cuts = carrier()
    cuts.set_ready(False)
    assert cuts.hear(0, [cut(waits=True, ready=True)], clock=3)
    assert list(cuts.carried()) == [cut()]
    assert not cuts.is_held_to

    cuts.set_ready(True)
    assert cuts.hear(0, [cut(waits=True, ready=True)], clock=3)

    assert ([told.position for told in cuts.carried()], cuts.is_held_to) == ([3], True)


def test_what_one_shard_gives_up_all_are_told_of() -> None:
    """They would wait for it until their time is over, and shard 0 not try again."""
    cuts = carrier()
    cuts.hear(0, [cut(waits=True)], clock=3)
    cuts.hear(1, [cut(waits=True)], clock=3)

    assert cuts.hear(1, [cut(given_up=True)], clock=3)

    assert [told.given_up for told in cuts.carried()] == [True]


def test_a_shard_that_waits_in_vain_is_told() -> None:
    """Shard 0 has taken its part, with the position of the session before, and asks for none of this one."""
    cuts = carrier()
    cuts.hear(0, [cut(waits=True, ready=True)], clock=3)
    cuts.hear(0, [cut()], clock=3)
    cuts.hear(1, [cut(waits=True)], clock=3)
    assert [(told.position, told.given_up) for told in cuts.carried()] == [(3, False)]

    cuts.begin(session=6)
    cuts.hear(1, [cut(waits=True)], clock=3)
    assert [told.given_up for told in cuts.carried()] == [False]
    assert cuts.hear(0, [cut()], clock=3)

    assert [told.given_up for told in cuts.carried()] == [True]


def test_cuts_are_told_once_a_push_has_told_all_shards_of_them_as_they_are() -> None:
    """Until shards say something else: they go on naming the last cuts, and armed steps carry none."""
    cuts = carrier()
    cuts.hear(0, [cut()], clock=3)
    assert not cuts.are_told
    carried = cuts.carried()
    cuts.set_told([carried, None])
    assert not cuts.are_told, "the second shard has not had it"

    cuts.set_told([carried, cuts.carried()])
    assert cuts.are_told
    cuts.hear(0, [cut()], clock=4)
    assert cuts.are_told

    cuts.hear(1, [cut(waits=True)], clock=5)
    assert not cuts.are_told
    cuts.set_told([carried, carried])
    assert not cuts.are_told, "nor has any what is new"
    cuts.forget(1)
    assert not cuts.are_told
