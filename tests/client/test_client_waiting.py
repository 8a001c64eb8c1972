"""Waits are explained, shards that do not answer are named; both on a clock that the test moves."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from psd.contract.consistency import Consistency
from psd.contract.errors import PsdError, SessionFenced, ShardRestarted, ShardUnavailable, StateLost
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.v1 import control_pb2
from psd_client.lanes.progress import Progress
from psd_client.lanes.transport import Cancelled, Traffic
from psd_client.lanes.waiting import ShardHealth, WaitReporter, merge
from psd_client.worker.session.carried_cuts import CarriedCuts
from psd_client.worker.session.heartbeat import Heartbeats
from psd_client.worker.session.membership import JobMembership, Memberships

BEHIND = control_pb2.WorkerStatus(rank=3, state=control_pb2.WORKER_STATE_LIVE, clock=40, last_seen_s=12)
ABSENT = control_pb2.WorkerStatus(rank=1, state=control_pb2.WORKER_STATE_ABSENT, last_seen_s=-1)
ROUND = control_pb2.Wait(rank=0, kind=control_pb2.WAIT_KIND_ROUND, clock=41, missing=[BEHIND])


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reporter_at(clock: FakeClock) -> WaitReporter:
    return WaitReporter(0, 5.0, clock)


@contextmanager
def watching(reporter: WaitReporter, what: str, step: int) -> Iterator[None]:
    reporter.begin(what, step)
    yield
    reporter.end()


def test_report_when_a_worker_is_behind_then_names_it(caplog: pytest.LogCaptureFixture) -> None:
    """The message of the issue, complete in itself."""
    clock = FakeClock()
    reporter = reporter_at(clock)

    with watching(reporter, "push_pull", 41):
        clock.now = 6
        reporter.report([ROUND], [])

    assert caplog.messages == ["psd: worker 0: step 41: waiting for worker 3, last seen 12 s ago, at step 40"]
    assert caplog.records[0].levelno == logging.WARNING
    assert reporter.last_missing == [3]


def test_report_when_a_shard_is_silent_then_names_it(caplog: pytest.LogCaptureFixture) -> None:
    """A wait for a shard is told apart from a wait for a worker."""
    clock = FakeClock()
    health = ShardHealth(["h:7000", "h:7001"], clock)
    reporter = reporter_at(clock)

    with watching(reporter, "pull", 7):
        health.failed(1)
        clock.now = 7
        reporter.report([], health.silent())

    assert caplog.messages == ["psd: worker 0: shard 1 at h:7001 has not answered for 7 s"]


def test_report_when_nobody_says_why_then_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A slow network is not a silent hang either."""
    clock = FakeClock()
    reporter = reporter_at(clock)

    with watching(reporter, "pull", 7):
        clock.now = 6
        reporter.report([], [])

    assert caplog.messages == ["psd: worker 0: step 7: pull has taken 6 s; no shard reports a wait"]


def test_due_when_a_wait_goes_on_then_doubles() -> None:
    """Explained after 5 s, 10 s, 20 s and so on."""
    clock = FakeClock()
    reporter = reporter_at(clock)

    with watching(reporter, "pull", 0):
        due_at = []
        for _ in range(4):
            due_in_s = reporter.due_in_s()
            assert due_in_s is not None
            clock.now += due_in_s
            due_at.append(clock.now)
            reporter.report([], [])

    assert due_at == [5, 10, 20, 40]
    assert reporter.due_in_s() is None


def test_report_when_the_operation_has_just_ended_then_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The race between the heartbeat's answer and the operation's."""
    reporter_at(FakeClock()).report([ROUND], [])

    assert caplog.messages == []


def test_merge_when_several_shards_wait_for_the_same_round_then_is_one_wait() -> None:
    """Each missing worker is named once, in the order of ranks."""
    other = control_pb2.Wait(rank=0, kind=control_pb2.WAIT_KIND_ROUND, clock=41, missing=[ABSENT, BEHIND])

    merged = merge([ROUND, other, ROUND])

    assert [[worker.rank for worker in wait.missing] for wait in merged] == [[1, 3]]


def test_health_when_a_shard_answers_again_then_is_silent_no_more() -> None:
    """The time of an outage counts from its first failure to the next answer."""
    clock = FakeClock()
    health = ShardHealth(["h:7000"], clock)

    health.failed(0)
    clock.now = 3
    health.failed(0)
    assert health.silent() == ["shard 0 at h:7000 has not answered for 3 s"]
    health.answered(0)

    assert health.silent() == []


def test_health_when_a_worker_joins_then_a_shard_that_has_a_call_and_says_nothing_is_silent() -> None:
    """Before it has joined a worker sends no heartbeats; a suspended shard would be named by its first failure alone."""
    clock = FakeClock()
    health = ShardHealth(["a:1", "b:2"], clock)
    health.begin_asking(1)
    health.begin_asking(0)
    health.end_asking(0)
    clock.now += 5

    assert health.silent() == []
    assert health.silent(is_joining=True) == ["shard 1 at b:2 has not answered for 5 s"]
    health.end_asking(1)
    assert health.silent(is_joining=True) == []


def test_report_when_shards_answer_heartbeats_and_not_the_call_then_names_those_that_have_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection for bulk data alone may be dead."""
    clock = FakeClock()
    health, reporter = ShardHealth(["a:1", "b:2"], clock), reporter_at(clock)
    health.begin_asking(1)
    with watching(reporter, "push", 7):
        clock.now += 5
        health.answered(1)
        reporter.report([], health.silent(), health.asked())

    (message,) = caplog.messages
    assert message.endswith("push has taken 5 s; no shard reports a wait; shard 1 at b:2 has had a call for 5 s")


@dataclass
class FakeSession:
    """The part of a session that the heartbeat reads."""

    memberships: Memberships = field(default_factory=Memberships)
    cuts: CarriedCuts = field(default_factory=lambda: CarriedCuts(2))
    clock: int = 41
    reported_clock: int = 41
    world_size: int = 4
    is_leaving: bool = False
    is_cut_by_positions: bool = False
    resumed: list[int] = field(default_factory=list)
    refusal: PsdError | None = None
    hangs: FakeClock | None = None

    def resume(self, lane: Any, call: Any, error: ShardRestarted) -> None:
        self.resumed.append(lane.shard)
        if self.hangs is not None:
            self.hangs.now += call.timeout_s
        if self.refusal is not None:
            raise self.refusal


class FakeLane:
    """Answers heartbeats as the test says; the error "silence" takes until the time-out."""

    transport = "grpc"

    def __init__(self, shard: int, clock: FakeClock) -> None:
        self.shard = shard
        self.clock = clock
        self.address = f"h:{7000 + shard}"
        self.traffic = Traffic()
        self.requests: list[control_pb2.HeartbeatRequest] = []
        self.answer: PsdError | control_pb2.HeartbeatReply = control_pb2.HeartbeatReply()
        self.on_request: Callable[[], object] = lambda: None

    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        self.requests.append(request)
        self.on_request()

        def reply() -> control_pb2.HeartbeatReply:
            if isinstance(self.answer, PsdError):
                if str(self.answer) == "silence":
                    self.clock.now += timeout_s
                raise self.answer
            return self.answer

        return reply


def membership(session: int = 5, incarnations: tuple[int, ...] = (11, 22), lease_s: float = 9) -> JobMembership:
    return JobMembership(rank=0, run_id="r", session=session, incarnations=incarnations, lease_s=lease_s, timeline=0)


class Rig:
    """A heartbeat over two fake lanes."""

    def __init__(self, lease_s: float = 9) -> None:
        self.clock = FakeClock()
        self.lanes = [FakeLane(0, self.clock), FakeLane(1, self.clock)]
        self.reporter = reporter_at(self.clock)
        self.session = FakeSession()
        self.session.memberships.begin(membership(lease_s=lease_s))
        self.session.memberships.complete()
        lanes: Any = self.lanes
        session: Any = self.session
        self.health = ShardHealth([lane.address for lane in lanes], self.clock)
        self.heartbeats = Heartbeats(0, session, lanes, self.health, self.reporter, self.clock)

    def run_for(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += self.heartbeats.step()


def test_step_when_the_worker_is_idle_then_beats_three_times_a_lease() -> None:
    """Every shard hears the worker's clock and session every third of the lease."""
    rig = Rig()

    rig.run_for(9)

    assert [len(lane.requests) for lane in rig.lanes] == [3, 3]
    request = rig.lanes[1].requests[0]
    assert (request.clock, request.caller.session, request.caller.incarnation) == (41, 5, 22)


def test_step_when_a_call_moves_much_then_shard_and_log_hear_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Of the shard that has the call; afterwards there is nothing left to move."""
    spec = JobSpec(1, (TensorSpec("w", (1_000_000,), "float32", 0),), (GroupSpec("sgd", ()),), Consistency.parse("sync"))
    rig = Rig()
    traffic = rig.lanes[1].traffic
    traffic.under_way, traffic.sent_bytes = (Layout(spec, 1).blocks, None, (), 500_000, 0), 1_500_000
    rig.health.begin_asking(1)
    with watching(rig.reporter, "push", 7):
        rig.clock.now += 5
        rig.heartbeats.step()
    traffic.under_way = None
    rig.run_for(9)

    assert caplog.messages[0].endswith("shard 1 at h:7001 has had a call for 5 s: sent 1.0 of 4.0 MB, 0.2 MB/s, 15 s left")
    told = [(each.transfer_left_bytes, each.transfer_bytes_per_s) for each in rig.lanes[1].requests]
    assert (told[0], told[-1]) == ((3_000_000, 200_000.0), (0, 0.0))
    assert {each.transfer_left_bytes for each in rig.lanes[0].requests} == {0}


@pytest.mark.parametrize(("seconds", "speed"), [(0.01, "300.0 MB/s"), (1.0, "3.0 MB/s"), (40.0, "0.075 MB/s")])
def test_progress_whatever_the_speed_then_it_has_no_exponent(seconds: float, speed: str) -> None:
    assert f", {speed}, " in str(Progress(3_000_000, 4_000_000, 0, 0, seconds))


@pytest.mark.parametrize(("world_size", "beats"), [(4, 9), (64, 5), (1000, 3)])
def test_step_when_the_job_has_no_rounds_then_beats_every_second_if_the_workers_are_few(world_size: int, beats: int) -> None:
    """Or a checkpoint, or a reader, would wait for a third of a lease for whoever makes a long step."""
    rig = Rig()
    rig.session.is_cut_by_positions, rig.session.world_size = True, world_size

    rig.run_for(9)

    assert [len(lane.requests) for lane in rig.lanes] == [beats, beats]


def test_step_when_nobody_has_joined_yet_then_sends_nothing_but_reports(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that cannot connect says so, too."""
    rig = Rig()
    rig.session.memberships.end()

    with watching(rig.reporter, "connect", 0):
        rig.run_for(6)

    assert rig.lanes[0].requests == []
    assert len(caplog.messages) == 1


def test_step_when_a_wait_is_due_then_asks_the_shards_and_reports(caplog: pytest.LogCaptureFixture) -> None:
    """Between two beats, if need be: the report comes after five seconds, with fresh answers."""
    rig = Rig()
    rig.lanes[1].answer = control_pb2.HeartbeatReply(waits=[ROUND])
    rig.heartbeats.step()

    with watching(rig.reporter, "pull", 41):
        rig.run_for(5)

    assert rig.clock.now == 5
    rig.heartbeats.step()
    assert caplog.messages == []  # it has ended in the meantime
    with watching(rig.reporter, "pull", 41):
        rig.run_for(5.5)
    assert caplog.messages == ["psd: worker 0: step 41: waiting for worker 3, last seen 12 s ago, at step 40"]


def test_step_when_a_shard_does_not_answer_then_logs_once_per_outage(caplog: pytest.LogCaptureFixture) -> None:
    """An outage is one line, its end another; the other shard is still served."""
    caplog.set_level(logging.INFO)
    rig = Rig()
    rig.lanes[0].answer = ShardUnavailable("refused")
    rig.run_for(30)
    rig.lanes[0].answer = control_pb2.HeartbeatReply()
    rig.run_for(6)

    assert caplog.messages == [
        "psd: worker 0: shard 0 at h:7000 does not answer its heartbeat: refused",
        "psd: worker 0: shard 0 at h:7000 answers again",
    ]
    assert len(rig.lanes[1].requests) == 12


def test_step_when_somebody_is_no_longer_waited_for_then_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Shard 0 is asked; a heartbeat is one line at most; who has merely finished is no warning."""
    rig = Rig()
    rig.lanes[0].answer = control_pb2.HeartbeatReply(failed=[1], finished=[2])
    rig.lanes[1].answer = control_pb2.HeartbeatReply(silent=[3])
    rig.run_for(9)
    rig.lanes[0].answer = control_pb2.HeartbeatReply(finished=[2, 3])
    rig.run_for(9)
    rig.lanes[0].answer = control_pb2.HeartbeatReply(finished=[1, 2, 3])
    rig.run_for(9)

    assert caplog.messages == [
        "psd: worker 0: worker 1 has failed; worker 2 has finished: 2 of 4 workers are waited for from now on",
        "psd: worker 0: worker 1 is back; worker 3 has finished: 2 of 4 workers are waited for from now on",
    ]


def test_step_when_a_shard_falls_silent_then_it_is_named_within_six_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Whenever in a wait that happens, with whatever lease, and though each question takes its time."""
    for lease_s, silent_from in itertools.product((2, 9, 60, 600), (0, 4, 7, 33)):
        rig = Rig(lease_s)
        caplog.clear()
        with watching(rig.reporter, "pull", 41):
            rig.run_for(silent_from)
            fell_silent = rig.clock.now
            rig.lanes[1].answer = ShardUnavailable("silence")
            while not any("shard 1 at h:7001" in message for message in caplog.messages):
                rig.clock.now += rig.heartbeats.step()

        assert rig.clock.now - fell_silent <= 6, (lease_s, silent_from)


def test_report_when_a_shard_has_not_answered_then_counts_from_the_question(caplog: pytest.LogCaptureFixture) -> None:
    """And not from when its answer was given up."""
    rig = Rig()
    rig.lanes[1].answer = ShardUnavailable("silence")

    with watching(rig.reporter, "pull", 41):
        rig.run_for(5.5)

    assert "psd: worker 0: shard 1 at h:7001 has not answered for 6 s" in caplog.messages


def test_step_when_the_session_has_ended_then_leaves_it_to_the_next_operation(caplog: pytest.LogCaptureFixture) -> None:
    """Expired: the operation joins again. Superseded: worth a warning."""
    rig = Rig()
    rig.lanes[0].answer = SessionFenced("x", cause="expired")
    rig.heartbeats.step()
    assert caplog.messages == []

    rig.lanes[0].answer = SessionFenced("somebody has the rank", cause="superseded")
    rig.run_for(9)

    assert caplog.messages == ["psd: worker 0: shard 0 at h:7000 rejects its heartbeat: somebody has the rank"]


def test_step_when_a_session_is_being_made_then_keeps_it_where_it_is_known() -> None:
    """Without a clock: where it takes part nobody knows yet. The session before has ended."""
    rig = Rig()
    rig.heartbeats.step()

    rig.session.memberships.begin(membership(session=6, incarnations=(11, 0)))
    rig.run_for(7)

    assert [(r.caller.session, r.clock) for r in rig.lanes[0].requests] == [(5, 41), (6, 0), (6, 0)]
    assert [r.caller.session for r in rig.lanes[1].requests] == [5]


def test_thread_when_a_session_is_being_made_then_begins_at_once() -> None:
    """It may be in the middle of a long pause."""
    rig = Rig()
    rig.session.memberships.end()
    beaten = threading.Event()
    rig.lanes[0].on_request = beaten.set
    rig.heartbeats.start()

    rig.session.memberships.begin(membership())

    assert beaten.wait(100)
    rig.heartbeats.stop()
    rig.heartbeats.join()


def test_thread_when_a_heartbeat_fails_by_a_defect_then_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it every lease would run out, again and again."""
    monkeypatch.setattr("psd_client.worker.session.heartbeat.AFTER_DEFECT_S", 0.0)
    rig = Rig()
    beaten = threading.Event()
    step, defects = rig.heartbeats.step, [ZeroDivisionError()]

    def fail_once() -> float:
        if defects:
            raise defects.pop()
        beaten.set()
        return step()

    monkeypatch.setattr(rig.heartbeats, "step", fail_once)
    rig.heartbeats.start()

    assert beaten.wait(100)
    rig.heartbeats.stop()
    rig.heartbeats.join()
    assert "psd: worker 0: a heartbeat failed because of a defect" in caplog.messages


def test_step_when_restarted_shards_are_away_again_then_the_others_still_hear_from_the_worker() -> None:
    """Resuming takes no longer than a heartbeat may, whichever shards hang; and each has its turn."""
    rig = Rig()
    for lane in rig.lanes:
        lane.answer = ShardRestarted("another one")
    rig.session.hangs = rig.clock

    rig.run_for(30)

    assert rig.session.resumed[:4] == [0, 1, 0, 1]
    assert [len(lane.requests) for lane in rig.lanes] == [10, 10]


@pytest.mark.parametrize("refusal", [None, StateLost("lost"), SessionFenced("ended"), ShardUnavailable("gone"), Cancelled()])
def test_step_when_a_shard_was_restarted_then_resumes_there(refusal: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that computes for long must not lose its lease there. What that meets is the next operation's to raise."""
    rig = Rig()
    rig.lanes[1].answer = ShardRestarted("shard 1 is another one")
    rig.session.refusal = refusal

    rig.run_for(3)

    assert rig.session.resumed == [1]
    assert caplog.messages == []
