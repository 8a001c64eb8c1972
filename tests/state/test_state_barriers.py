"""Barriers: generations, repeated calls, withdrawals, absentees."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import BarrierTimeout, InvalidRequest, WrongShard
from psd.state.workers import barriers
from psd.v1 import control_pb2


def test_a_barrier_opens_when_all_have_arrived_and_counts_generations():
    """Nobody passes before the last; the same name again is the next generation."""
    driver = Driver()
    a, b = driver.start()

    for generation in range(3):
        first = driver.arrive(a, seq=generation + 1)
        assert not first.future.done()
        assert [w.rank for w in driver.shard.missing_for(first)] == [1]
        second = driver.arrive(b, seq=generation + 1)
        assert (first.future.result(0).generation, second.future.result(0).generation) == (generation, generation)

    assert driver.core.waiting.open() == []


def test_a_worker_that_only_waits_to_leave_is_not_waited_for():
    """Rounds still wait for it, and so do barriers for the session that follows."""
    driver = Driver()
    a, b = driver.start()
    ticket = driver.arrive(a)

    driver.heartbeat(b, leaving=True)

    assert ticket.future.result(0).generation == 0
    driver.push(a, 0, 1.0)
    assert driver.version() == 0
    driver.join(1)
    assert not driver.arrive(a, seq=2).future.done()


def test_a_repeated_arrival_replaces_the_first_and_counts_once():
    """A call that is sent again takes the place of the one before; one worker twice opens nothing."""
    driver = Driver()
    a, b = driver.start()
    lost, again = driver.arrive(a), driver.arrive(a)

    assert isinstance(lost.future.exception(0), BarrierTimeout)
    assert not again.future.done()
    driver.arrive(b)

    assert again.future.result(0).generation == 0


def test_a_call_that_is_sent_again_after_the_opening_is_answered():
    """A worker whose answer was lost asks again with its number and gets the generation, without entering the next one."""
    driver = Driver()
    a, b = driver.start()
    driver.arrive(a, seq=7)
    driver.arrive(b, seq=3)

    assert driver.arrive(a, seq=7).future.result(0).generation == 0
    assert driver.core.barriers.missing("b") == 0b11


def test_a_repeated_call_is_not_answered_by_another_threads_barrier():
    """Two threads of one worker wait at two barriers; the opening of one does not let the repeated call of the other pass."""
    driver = Driver()
    a, b = driver.start()
    driver.arrive(a, "slow", 1)
    driver.arrive(a, "quick", 2)
    driver.arrive(b, "quick", 1)

    assert not driver.arrive(a, "slow", 1).future.done()


def test_a_withdrawn_arrival_does_not_count():
    """After a time-out the worker is absent again; withdrawing an older call of it does not take back the newer one."""
    driver = Driver()
    a, b = driver.start()
    gone = driver.arrive(a)
    gone.fail(BarrierTimeout("too late"))
    driver.shard.withdraw(gone)

    waiting = driver.arrive(b)
    assert not waiting.future.done()
    assert [w.rank for w in driver.shard.missing_for(waiting)] == [0]
    back = driver.arrive(a, seq=2)
    driver.shard.withdraw(gone)

    assert back.future.result(0).generation == waiting.future.result(0).generation == 0


@pytest.mark.parametrize("end", ["leave", "fail", "expire"])
def test_a_worker_that_is_gone_is_not_waited_for(end):
    """Barriers open when the last one that is missing leaves, fails or expires."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()
    tickets = [driver.arrive(a), driver.arrive(b)]

    driver.expire(c, keep=[a, b]) if end == "expire" else driver.leave(c, failed=end == "fail")

    assert [t.future.result(0).generation for t in tickets] == [0, 0]


def test_an_ended_session_has_not_arrived():
    """A worker that arrived, died and came back must arrive again."""
    driver = Driver()
    a, b = driver.start()
    driver.arrive(a)
    again = driver.join(0)

    waiting = driver.arrive(b)

    assert not waiting.future.done()
    driver.arrive(again)
    assert waiting.future.result(0).generation == 0


@pytest.mark.parametrize(
    ("name", "seq", "field"), [("", 1, "name"), ("x" * 257, 1, "name"), ("ä" * 129, 1, "name"), ("b", 0, "seq")]
)
def test_a_wrong_barrier_is_refused_by_field(name, seq, field):
    """An empty or long name and the number 0 are refused, and nobody has arrived."""
    driver = Driver()
    a, _b = driver.start()

    with pytest.raises(InvalidRequest, match=field):
        driver.arrive(a, name, seq)

    assert driver.core.barriers._barriers == {}
    assert driver.core.waiting.open() == []


def test_only_shard_zero_has_barriers():
    """A barrier at another shard is refused."""
    driver = Driver(shard=1, shards=2)
    seat = driver.join(0, session=1)

    with pytest.raises(WrongShard, match="shard 0"):
        driver.arrive(seat)


def test_names_are_bounded(monkeypatch):
    """A job that uses a new name each step does not make the shard grow without end; who waits is never forgotten."""
    monkeypatch.setattr(barriers, "NAMES_MAX", 100)
    driver = Driver()
    a, b = driver.start()
    waiting = driver.arrive(a, "kept", 1)
    for seq in range(2, 500):
        driver.arrive(a, f"n{seq}", seq)
        driver.arrive(b, f"n{seq}", seq)

    assert len(driver.core.barriers._barriers) <= 100
    assert set(driver.core.barriers._opened) == {0, 1}
    driver.arrive(b, "kept", 1)
    assert waiting.future.result(0).generation == 0


def test_what_is_kept_of_a_barrier_does_not_grow_with_the_calls_before(tmp_path):
    """It is written while all wait: the last call of each worker, which alone may be sent again."""
    driver = Driver(job_spec(40), state_dir=str(tmp_path / "state"))
    seats, sizes = driver.start(), []
    for seq in (*range(1, 100), 1 << 40):
        for seat in seats:
            driver.arrive(seat, seq=seq)
        sizes.append(len(driver.core.storage.load_barriers()))

    assert max(sizes) < 40 * 32
    driver.restart(*seats)
    assert [driver.arrive(seat, seq=1 << 40).future.result(0).generation for seat in seats] == [99] * 40


def test_a_call_keeps_its_number_when_its_worker_joins_anew():
    """The barrier has opened, and the worker has not heard of it when its lease runs out."""
    driver = Driver()
    a, b = driver.start()
    driver.arrive(a, "b", 5)
    driver.arrive(b, "b", 1)
    again = driver.join(0)

    def arrive(session: int) -> control_pb2.BarrierRequest:
        return control_pb2.BarrierRequest(caller=again.caller, name="b", seq=5, session=session)

    assert driver.shard.arrive(arrive(a.session)).future.result(0).generation == 0
    assert not driver.shard.arrive(arrive(0)).future.done(), "a call of its own"
    with pytest.raises(InvalidRequest, match="later than the caller's"):
        driver.shard.arrive(arrive(again.session + 1))
