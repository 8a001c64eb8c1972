"""Two threads with one membership: a late answer never replaces a later session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from psd_client.lanes.transport import Cancelled
from psd_client.worker.session.membership import JobMembership, Memberships


def made(session: int, *incarnations: int) -> JobMembership:
    return JobMembership(rank=0, run_id="r", session=session, incarnations=incarnations, lease_s=9, timeline=0)


def held(session: int = 5, *incarnations: int) -> Memberships:
    memberships = Memberships()
    memberships.begin(made(session, *(incarnations or (11, 22))))
    memberships.complete()
    return memberships


def test_resume_when_the_worker_has_joined_anew_meanwhile_then_changes_nothing() -> None:
    """The heartbeats' thread had asked for the session before."""
    memberships = held()
    seen = memberships.held
    memberships.begin(made(6, 11, 23))
    memberships.complete()

    assert not memberships.on_resumed(seen, 1, 24)

    assert memberships.held == made(6, 11, 23)


def test_resume_when_another_thread_was_faster_then_changes_nothing() -> None:
    """Also if the shard has been restarted once more since: the slower one knows an older life of it."""
    memberships = held()
    seen = memberships.held

    assert memberships.on_resumed(seen, 1, 23)
    assert not memberships.on_resumed(seen, 1, 23)
    assert memberships.on_resumed(memberships.held, 1, 24)
    assert not memberships.on_resumed(seen, 1, 23)

    assert memberships.held.incarnations == (11, 24)


def test_resume_when_the_session_is_being_made_then_it_begins_with_that() -> None:
    """A shard that has let the worker in is restarted before the others have."""
    memberships = held()
    memberships.begin(made(6, 11, 0))
    assert memberships.on_resumed(_joining(memberships), 0, 12)

    memberships.on_joined(6, 1, 22, lease_s=3)
    memberships.complete()

    assert memberships.held == JobMembership(0, "r", 6, (12, 22), lease_s=3, timeline=0)


def _joining(memberships: Memberships) -> JobMembership:
    latest = memberships.latest
    assert latest is not None
    assert latest.is_joining
    return latest


def test_memberships_in_every_order_of_two_threads_then_end_with_the_later_session() -> None:
    """The steps of a join and those of a resume, interleaved in each way."""
    for places in itertools.combinations(range(6), 2):
        memberships = held()
        resume = resumed_by_another_thread(memberships)
        steps = joined_anew(memberships)
        seen = [next(resume if place in places else steps) for place in range(6)]

        (asked_for,) = [membership for membership in seen if membership is not None]
        assert memberships.held == made(6, 12 if asked_for.session == 6 else 11, 22), places
        assert memberships.latest == memberships.held


def joined_anew(memberships: Memberships) -> Iterator[None]:
    memberships.begin(made(6, 11, 0))
    yield
    memberships.on_joined(6, 1, 22, lease_s=9)
    yield
    memberships.complete()
    yield
    memberships.give_up()
    yield


def resumed_by_another_thread(memberships: Memberships) -> Iterator[JobMembership | None]:
    seen = memberships.latest
    assert seen is not None
    yield seen
    memberships.on_resumed(seen, 0, 12)
    yield None


def test_join_when_given_up_then_the_session_before_is_what_there_is() -> None:
    """A shard that could not be reached: nobody renews the leases of half a session."""
    memberships = held()
    memberships.begin(made(6, 11, 0))
    memberships.give_up()

    assert memberships.latest == memberships.held == made(5, 11, 22)


def test_end_when_a_session_is_being_made_then_each_shard_is_left_as_it_knows_the_worker() -> None:
    """Ctrl-C in the middle of a rejoin. Nothing comes after it."""
    memberships = held()
    memberships.begin(made(6, 11, 0))

    known_as = memberships.end()

    sessions = [membership.session for membership in map(known_as, (0, 1)) if membership is not None]
    assert sessions == [6, 5]
    assert memberships.latest is None
    for call in (lambda: memberships.held, memberships.complete):
        with pytest.raises(Cancelled):
            call()


def test_end_when_nothing_was_joined_then_there_is_nobody_to_tell() -> None:
    assert Memberships().end()(0) is None
