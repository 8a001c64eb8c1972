"""Looks at a job: psd/watch/sampler.py, with scripted answers and a clock that the test sets."""

import math

import pytest
from scripted_job import EXPIRED, FINISHED, LIVE, ScriptedJob, logged

from psd.v1 import control_pb2 as pb
from psd.watch import history
from psd.watch.history import EVENTS_MAX, MOMENTS_MAX, thinned
from psd.watch.sampler import RATE_S
from psd.watch.snapshot import CurvePoint, as_json
from psd.watch.top import lines


@pytest.fixture
def job():
    return ScriptedJob()


def test_a_look_at_a_job_that_trains_says_how_fast_and_by_whom(job):
    now = job.train(3)

    assert (now.state, now.clock, now.steps_per_s, now.worker_steps_per_s) == ("training", 30, 10.0, 20.0)
    assert now.headline == "Training, step 30"
    assert [(s.state, s.updates_per_s, s.cpu_share, s.received_bytes_per_s) for s in now.shards] == [
        ("serving", 20, 0.5, 10_000)
    ] * 2
    call = now.shards[0].calls[0]
    assert (call.call, call.per_s, call.mean_s) == ("push_pull", 20, pytest.approx(0.01))
    assert now.shards[0].in_calls_share == pytest.approx(0.1)
    assert now.limit == "The workers' own computing: they spend 10% of their time in calls"
    assert now.slow == ()
    assert as_json(now)["workers"][1]["rank"] == 1


def test_a_worker_that_others_wait_for_is_named_as_slow_while_it_lasts(job):
    now = job.train(4, slow=1, awaited_share=0.4)

    assert now.slow == (1,)
    assert now.limit == "Others wait for worker 1 40% of the time"
    assert now.workers[1].awaited_share == pytest.approx(0.4)
    assert job.train(int(RATE_S) + 1).slow == ()


def test_progress_and_the_time_left_follow_from_where_the_job_ends(job):
    """From workers' words; an operator's order to end comes before them. A job of which no shard answers has no time left."""
    assert not {"total_steps", "time_left_s"} & job.train(3).numbers.keys()
    job.replies[0].total = 100

    now = job.train(1)
    assert (now.total_steps, now.time_left_s) == (100, pytest.approx(6.0))
    assert lines.head_lines(now, 80)[1].endswith(" 40% of 100 steps, 6.0 s left")

    job.replies[0].ends_at = 50
    assert (job.train(1).total_steps, job.sampler.now.time_left_s) == (50, 0.0)
    job.is_silent[:] = [True, True]
    now = as_json(job.look())
    assert (now["total_steps"], now["time_left_s"]) == (50, None)


def test_the_time_left_does_not_jump_with_each_step_of_a_slow_job(job):
    """A step takes longer than the time over which rates are measured."""
    job.train(1, steps_per_s=1)
    job.replies[0].total = 20
    left = []
    for _ in range(6):
        job.train(1, steps_per_s=1)
        left += [job.look().numbers["time_left_s"] for _ in range(2 * int(RATE_S) - 1)]

    assert job.sampler.now.steps_per_s == 0
    assert left[-1] == pytest.approx(13 * 20, rel=0.25)


def test_samples_are_shown_where_programs_say_how_many_a_push_has(job):
    """By default each push has one, which says nothing."""
    assert "samples_per_s" not in job.train(12).numbers

    now = job.train(12, batch_size=32)

    assert (now.samples_per_s, now.workers[0].samples_per_s) == (640, 320)
    assert " · 640 samples/s · " in lines.head_lines(now, 200)[0]


def test_a_wait_that_is_open_counts_before_its_end(job):
    """The shards count it when the gradient has come; a worker that hangs is slow at once."""
    job.train(3)
    for seconds in range(1, 9):
        wait = pb.Wait(rank=0, kind=pb.WAIT_KIND_ROUND, clock=30, waited_s=seconds, missing=[job.replies[0].workers[1]])
        del job.replies[0].waits[:]
        job.replies[0].waits.append(wait)
        now = job.look()

    assert now.workers[1].awaited_share > 0.7
    assert now.workers[0].waits.startswith("worker 0 waits in round 30 for worker 1 (last seen")
    assert now.waiting == (now.workers[0].waits,)

    del job.replies[0].waits[:]
    job.replies[0].workers[1].numbers["awaited_s"] = 7.9
    assert job.look().workers[1].awaited_share > 0.7, "what was open is counted once"


def test_a_worker_that_waits_all_the_time_has_none_of_its_own_however_long_a_call_takes(job):
    """The shards count a call when it has ended; here none does in all the time that is looked at."""
    job.train(3)
    for seconds in range(1, 2 * int(RATE_S)):
        del job.replies[0].waits[:]
        for rank in range(2):
            job.replies[0].waits.add(rank=rank, kind=pb.WAIT_KIND_ROUND, clock=30, waited_s=seconds)
        now = job.look()

    assert now.shards[0].in_calls_share == pytest.approx(1.0)

    del job.replies[0].waits[:]
    job.replies[0].calls[0].seconds += 2 * seconds
    assert job.look().shards[0].in_calls_share > 0.8, "what was open is counted once"


def test_a_first_look_tells_what_has_left_traces_with_its_time(job):
    job.replies[0].numbers["restarts"], job.replies[0].numbers["uptime_s"] = 1, 30.0
    for reply in job.replies:
        reply.workers[1].state, reply.workers[1].last_seen_s = EXPIRED, 20.0
    job.replies[0].checkpoint_last = "timeline-00000-step-000000000020-a8"
    job.replies[0].numbers["checkpoint_age_s"] = 40.0

    job.look()

    events = [(event.at - 1e9 - job.seconds, event.text) for event in job.sampler.history.events]
    assert events == [
        (-40, "checkpoint timeline-00000-step-000000000020-a8"),
        (-30, "shard 0 has restarted"),
        (-20, "worker 1 was silent for too long, at step 0"),
    ]


def test_workers_that_wait_alike_are_told_together():
    job = ScriptedJob(workers=5)
    for rank in (0, 1, 2, 4):
        job.replies[0].waits.add(rank=rank, kind=pb.WAIT_KIND_BARRIER, name="epoch", waited_s=rank + 1)
        job.replies[0].waits[-1].missing.add(rank=3, last_seen_s=-1)

    now = job.look()

    assert now.waiting == ("workers 0-2, 4 wait in barrier 'epoch' for worker 3 (has not joined); so far 5.0 s",)
    assert now.state == "waiting"
    assert now.limit == f"W{now.waiting[0][1:]}"


def test_a_shard_that_is_silent_is_told_with_what_was_known_of_it(job):
    job.train(3)
    job.is_silent[1] = True

    now = job.look()

    assert (now.state, now.headline) == ("waiting", "Shard 1 does not answer")
    assert now.limit == "Workers wait until shard 1 is back"
    silent = now.shards[1]
    assert (silent.state, silent.error, silent.version_max, silent.updates_per_s) == (
        "no answer",
        "UNAVAILABLE, refused",
        30,
        0.0,
    )

    job.is_silent[1] = False
    job.replies[1].incarnation = 8
    job.replies[1].numbers["cpu_s"] = 0.1
    now = job.look()
    assert now.shards[1].cpu_share == 0.0, "counters that begin anew are no rate"
    assert job.told[-2:] == ["shard 1 at host:7001 does not answer", "shard 1 has restarted"]


def test_when_no_shard_answers_then_the_last_look_stays_and_says_so(job):
    job.train(3)
    job.is_silent = [True, True]

    now = job.look()

    assert (now.state, now.clock, len(now.workers), now.steps_per_s) == ("unreachable", 30, 2, 0.0)
    assert now.headline == "No shard answers: the job has ended, or they are away; last seen at step 30"
    assert ScriptedJobSilent().look().state == "unreachable"


def test_a_job_that_has_finished_stays_so_when_its_shards_have_ended_one_after_the_other(job):
    job.train(3)
    for reply in job.replies:
        for worker in reply.workers:
            worker.state = FINISHED
    job.is_silent[1] = True
    first = job.look()
    job.is_silent[0] = True
    last = job.look()

    assert (first.headline, last.headline) == ("Finished at step 30",) * 2
    assert last.problems == ()
    assert [text for text in job.told if "shard" in text] == ["shard 1 has ended", "shard 0 has ended"]


class ScriptedJobSilent(ScriptedJob):
    """A job of which nothing was ever seen."""

    def __init__(self):
        super().__init__()
        self.is_silent = [True, True]


def test_events_are_what_differs_between_two_looks(job):
    job.train(2)
    assert job.told == []
    for reply in job.replies:
        reply.workers[0].state = EXPIRED
        reply.workers[1].state = FINISHED
        reply.timeline = 1
        reply.restored_from = "step-7"
    job.replies[0].numbers["requests_refused"] = 3
    job.replies[0].checkpoint_last = "step-20"
    job.replies[1].checkpoint_error = "no room"
    job.look()
    job.replies[0].workers[0].state = job.replies[1].workers[0].state = LIVE
    job.look()

    assert job.told == [
        "the job went back to checkpoint step-7",
        "shard 0 refused 3 requests",
        "worker 0 was silent for too long, at step 20",
        "worker 1 has finished, at step 20",
        "checkpoint step-20",
        "shard 1: checkpoint: no room",
        "worker 0 is back, at step 20",
    ]
    assert {event.at for event in job.sampler.history.events} == {1e9 + 3, 1e9 + 4}


def test_an_order_is_told_when_it_is_given_and_when_it_begins_and_stays_while_shard_0_is_silent(job):
    job.train(2)
    job.replies[0].learning_rates.add(clock=21, scale=0.5)
    job.replies[0].ends_at = 90
    given = job.look()
    begun = job.train(1)
    job.is_silent[0] = True
    silent = job.look()

    assert given.orders == ("the learning rate is scaled by 0.5 from step 21 on", "the job ends at step 90")
    assert begun.orders == silent.orders == ("the learning rate is scaled by 0.5", "the job ends at step 90")
    assert job.told[:3] == [f"an operator's order: {order}" for order in (*given.orders, begun.orders[0])]
    assert "order: the job ends at step 90" in lines.head_lines(begun, 80)


def test_points_are_asked_for_once_and_anew_when_shard_0_has_restarted(job):
    job.curve_replies = [logged(7, 1, [1], [math.nan], more=True), logged(7, 2, [2], [0.5])]
    job.look()
    job.curve_replies = [logged(8, 1, [], []), logged(8, 1, [2], [0.4])]
    job.look()

    assert job.asked == [0, 1, 2, 0]
    first, second = job.sampler.history.curves["loss"]
    assert math.isnan(first.value)
    assert (second.step, second.value, second.at) == (2, 0.4, 1e9 + 1.5), "a repeated step takes the first one's place"
    assert [name for name, _ in job.sampler.points] == ["loss"]


@pytest.mark.parametrize("what", ["timeline", "run_id", "clock"])
def test_when_the_job_goes_back_then_a_worker_leaves_the_points_from_its_next_one_on(job, what):
    """The next points may come late, beside the last ones of before. A job may be another one of the same name."""
    job.curve_replies = [logged(7, 40, [*range(40)], [1.0] * 40)]
    job.train(4)
    for reply in job.replies:
        reply.timeline += what == "timeline"
        reply.run_id += "2" * (what == "run_id")
        for worker in reply.workers:
            worker.clock = 20 if what == "clock" else worker.clock
    job.curve_replies = [logged(7, 41, [40], [1.0])]
    job.look()
    assert not job.sampler.has_gone_back

    job.curve_replies = [logged(7, 43, [20, 21], [0.5, 0.5])]
    job.look()

    assert job.sampler.has_gone_back
    points = job.sampler.history.curves["loss"]
    assert [(point.step, point.value) for point in points[19:]] == [(19, 1.0), (20, 0.5), (21, 0.5)]
    job.curve_replies = [logged(7, 44, [15], [0.5])]
    job.look()
    assert len(job.sampler.history.curves["loss"]) == 22, "a program may log an earlier step"


def test_the_history_is_bounded_and_goes_back_to_the_beginning():
    job = ScriptedJob(shards=1, workers=1)
    for step in range(MOMENTS_MAX + 1000):
        job.replies[0].numbers["requests_refused"] = step
        job.look()

    moments = job.sampler.history.moments
    assert len(moments) <= MOMENTS_MAX
    assert (moments[0].at, moments[-1].at) == (1e9 + 2, 1e9 + MOMENTS_MAX + 1000)
    assert len(job.told) == EVENTS_MAX


def test_a_long_past_is_evenly_spaced_back_to_the_beginning_and_its_end_is_as_it_was_logged():
    """Of each worker, however many log; the dashboard's page keeps no more, and no less."""
    points = []
    for step in range(4000):
        points = thinned([*points, CurvePoint(0, step, 0.0, 0.0), CurvePoint(1, step, 0.0, 0.0)], 400)

    for rank in range(2):
        steps = [point.step for point in points if point.rank == rank]
        tenths = [sum(400 * tenth <= step < 400 * (tenth + 1) for step in steps) for tenth in range(9)]
        assert (steps[0], steps[-100:]) == (0, [*range(3900, 4000)])
        assert max(tenths) <= 3 * min(tenths)


def test_what_peers_have_named_is_printable(job):
    job.replies[0].run_id = job.replies[1].run_id = "a\x1b[2J"
    job.replies[0].workers[0].host = "h\n"

    now = job.look()

    assert now.run_id == "a\\x1b[2J"
    assert now.workers[0].host == "h\\n"


def test_of_many_curves_fewer_points_are_kept_so_that_all_together_are_bounded(monkeypatch):
    monkeypatch.setattr(history, "ALL_POINTS_MAX", 1000)
    monkeypatch.setattr(history, "POINTS_MIN", 10)
    seen = history.History()

    for step in range(200):
        for curve in range(20):
            seen.add_point(f"{curve}", CurvePoint(0, step, 0.5, 0.0))

    assert sum(map(len, seen.curves.values())) <= 1000
    assert {(points[0].step, points[-1].step) for points in seen.curves.values()} == {(0, 199)}
