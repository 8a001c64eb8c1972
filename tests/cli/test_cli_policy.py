"""Decisions of psd-run, for each order of events, without a process: psd/cli/job/policy.py."""

from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from policies import SHARDS, WORKERS, deeds, running, said, starting

from psd.cli.job.actions import Say, Send, Start, Tell
from psd.cli.job.policy import (
    KILL_S,
    READY_REPORT_S,
    READY_TIMEOUT_S,
    SHARD_STARTS_MAX,
    SHARDS_END_S,
    SHARDS_END_S_PER_WORKER,
    SHARDS_SLACK_S,
    Phase,
)


def test_on_ready_when_all_shards_serve_then_the_workers_start():
    policy = starting()

    assert policy.on_start(0) == [Start(shard) for shard in SHARDS]
    assert policy.on_ready(SHARDS[1], 1) == []
    assert policy.on_ready(SHARDS[0], 1) == [Start(worker) for worker in WORKERS]
    assert policy.deadline is None


def test_on_exit_when_all_workers_and_then_the_shards_end_then_the_status_is_0():
    policy = running()
    for shard in SHARDS:
        policy.on_done(shard)

    actions = [policy.on_exit(name, 0, now=1) for name in (*WORKERS, *SHARDS)]

    assert actions == [[], [], [], []]
    assert (policy.phase, policy.status) == (Phase.ENDED, 0)


def test_on_exit_when_a_shard_is_done_before_the_workers_end_then_that_is_no_death():
    policy = running()
    policy.on_done(SHARDS[0])

    assert policy.on_exit(SHARDS[0], 0, now=1) == []
    assert policy.phase is Phase.RUNNING


def test_on_deadline_when_shards_outlast_the_workers_then_they_are_drained():
    policy = running()
    policy.on_exit(WORKERS[0], 0, now=1)
    policy.on_exit(WORKERS[1], 0, now=1)

    assert policy.deadline == 1 + SHARDS_END_S + 2 * SHARDS_END_S_PER_WORKER
    assert deeds(policy.on_deadline(policy.deadline)) == [Send(shard, SIGTERM) for shard in SHARDS]
    policy.on_exit(SHARDS[0], 0, now=5)
    policy.on_exit(SHARDS[1], 0, now=5)
    assert (policy.phase, policy.status) == (Phase.ENDED, 0)


@pytest.mark.parametrize(("returncode", "status"), [(3, 3), (-SIGKILL, 137)])
def test_on_exit_when_a_worker_fails_then_the_job_stops_with_its_status(returncode, status):
    policy = running()

    actions = policy.on_exit(WORKERS[1], returncode, now=1)
    after_workers = policy.on_exit(WORKERS[0], -SIGTERM, now=2)
    policy.on_exit(SHARDS[0], 0, now=3)
    policy.on_exit(SHARDS[1], 0, now=3)

    assert deeds(actions) == [Send(WORKERS[0], SIGTERM)]
    assert "worker 1" in said(actions)
    assert deeds(after_workers) == [Send(shard, SIGTERM) for shard in SHARDS]
    assert (policy.phase, policy.status) == (Phase.ENDED, status)


def test_on_exit_when_restarts_are_left_then_the_worker_starts_again_until_none_is():
    policy = running(restarts_max=2)

    first = policy.on_exit(WORKERS[0], 1, now=1)
    second = policy.on_exit(WORKERS[1], -SIGKILL, now=2)
    third = policy.on_exit(WORKERS[0], 1, now=3)

    assert deeds(first)[-1] == Start(WORKERS[0])
    assert "worker 0 ended with status 1; starting it again (1 restart left)" in said(first)
    assert deeds(second)[-1] == Start(WORKERS[1])
    assert "SIGKILL" in said(second)
    assert "no restarts left" in said(second)
    assert deeds(third) == [Send(WORKERS[1], SIGTERM)]


@pytest.mark.parametrize("last", [0, 4])
def test_on_exit_when_the_others_are_to_go_on_then_the_job_ends_with_them_and_the_first_failures_status(last):
    policy = running(restarts_max=1, on_worker_failure="continue")

    restarted = policy.on_exit(WORKERS[0], 1, now=1)
    failed = policy.on_exit(WORKERS[0], 3, now=2)
    policy.on_exit(WORKERS[1], last, now=3)

    assert deeds(restarted) == [Start(WORKERS[0])]
    assert (deeds(failed), said(failed)) == ([], "worker 0 ended with status 3; no restarts left; the others go on without it")
    assert (policy.phase, policy.status) == (Phase.WINDING_DOWN, 3)


def test_on_exit_when_a_failure_is_to_end_the_job_then_nothing_is_started_again():
    policy = running(on_worker_failure="end")

    assert deeds(policy.on_exit(WORKERS[0], 3, now=1)) == [Send(WORKERS[1], SIGTERM)]
    assert policy.status == 3


def test_on_exit_when_a_worker_fails_after_a_shard_has_ended_then_it_is_not_started_again():
    policy = running(restarts_max=2)
    policy.on_done(SHARDS[0])
    policy.on_exit(SHARDS[0], 0, now=1)

    actions = policy.on_exit(WORKERS[0], 1, now=2)

    assert deeds(actions) == [Send(WORKERS[1], SIGTERM)]
    assert "shard 0 has ended" in said(actions)


@pytest.mark.parametrize(
    ("returncode", "death"), [(-SIGKILL, "was killed by SIGKILL"), (1, "ended with status 1"), (0, "ended with status 0")]
)
def test_on_exit_when_a_shard_dies_then_it_alone_starts_again_and_the_message_says_where_its_state_is(returncode, death):
    policy = running()

    died = policy.on_exit(SHARDS[1], returncode, now=20)
    deadline = policy.deadline
    back = policy.on_ready(SHARDS[1], now=21.5)

    assert deeds(died) == [Start(SHARDS[1])]
    assert f"shard 1 {death}" in said(died)
    assert "starting it again, its state is in /state/shard-1 (9 restarts left)" in said(died)
    assert deadline == 20 + READY_REPORT_S
    assert back == [Say("shard 1 serves again, 1.5 s after its end")]
    assert (policy.phase, policy.deadline) == (Phase.RUNNING, None)


def test_on_exit_when_a_shard_dies_before_another_has_served_then_the_workers_start_when_both_do():
    policy = starting()
    policy.on_start(0)
    policy.on_ready(SHARDS[0], now=1)

    assert deeds(policy.on_exit(SHARDS[0], -SIGKILL, now=2)) == [Start(SHARDS[0])]
    assert deeds(policy.on_ready(SHARDS[1], now=3)) == []
    assert deeds(policy.on_ready(SHARDS[0], now=4)) == [Start(worker) for worker in WORKERS]


def test_on_exit_when_shards_have_used_up_their_restarts_then_the_job_stops_with_status_1():
    policy = running(shard_restarts_max=2)
    for shard in SHARDS:
        policy.on_exit(shard, -SIGKILL, now=1)
        policy.on_ready(shard, now=2)

    actions = policy.on_exit(SHARDS[0], -SIGKILL, now=3)

    assert deeds(actions) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert "shard 0 was killed by SIGKILL" in said(actions)
    assert "no restarts left (--max-shard-restarts 2); stopping the job" in said(actions)
    assert (policy.phase, policy.status) == (Phase.STOPPING, 1)


@pytest.mark.parametrize("returncode", [-SIGKILL, 1, 0])
def test_on_exit_when_shards_may_not_be_started_again_then_the_first_death_stops_the_job(returncode):
    policy = running(restarts_max=2, shard_restarts_max=0)

    actions = policy.on_exit(SHARDS[1], returncode, now=1)

    assert deeds(actions) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert "shard 1" in said(actions)
    assert (policy.phase, policy.status) == (Phase.STOPPING, 1)


def test_on_exit_when_a_shard_is_started_in_vain_too_often_in_a_row_then_the_job_stops():
    policy = running()
    deaths = [policy.on_exit(SHARDS[1], 1, now=second) for second in range(1, SHARD_STARTS_MAX + 2)]

    assert [deeds(actions) for actions in deaths[:-1]] == [[Start(SHARDS[1])]] * SHARD_STARTS_MAX
    assert deeds(deaths[-1]) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert f"ended with status 1 before it served again, {SHARD_STARTS_MAX} times in a row; stopping" in said(deaths[-1])
    assert policy.status == 1


def test_on_ready_when_a_shard_serves_after_starts_in_vain_then_they_are_forgotten():
    policy = running()
    for _ in range(3):
        for second in range(SHARD_STARTS_MAX):
            assert deeds(policy.on_exit(SHARDS[1], 1, now=second)) == [Start(SHARDS[1])]
        policy.on_ready(SHARDS[1], now=9)

    assert policy.phase is Phase.RUNNING


def test_on_deadline_when_a_shard_does_not_serve_again_in_time_then_the_job_stops():
    policy = running()
    policy.on_exit(SHARDS[0], -SIGKILL, now=10)
    policy.on_exit(SHARDS[1], -SIGKILL, now=20)

    waiting = policy.on_deadline(20 + READY_REPORT_S)
    assert policy.deadline == 10 + READY_TIMEOUT_S
    actions = policy.on_deadline(10 + READY_TIMEOUT_S)

    assert waiting == [Say("waiting for shard 0, shard 1 to be ready, for at most 3600 s")]
    assert "shard 0 was not ready" in said(actions)
    assert deeds(actions) == [Send(worker, SIGTERM) for worker in WORKERS]


def test_on_exit_when_a_worker_fails_while_a_shard_starts_again_then_it_starts_again_too():
    policy = running(restarts_max=1)
    policy.on_exit(SHARDS[0], -SIGKILL, now=1)

    assert deeds(policy.on_exit(WORKERS[0], 1, now=2)) == [Tell(SHARDS[1], "starting 0"), Start(WORKERS[0])]

    assert deeds(policy.on_ready(SHARDS[0], now=3)) == [Tell(SHARDS[0], "starting 0")], "it is told when it hears again"


@pytest.mark.parametrize(("word", "is_told"), [("wait", True), ("continue", False)])
def test_on_exit_when_a_worker_starts_again_then_shards_that_are_to_wait_for_it_are_told(word, is_told):
    """However long it takes to start. One that ends well before it has joined is not to come."""
    policy = running(restarts_max=2, on_worker_failure=word)

    first = deeds(policy.on_exit(WORKERS[0], 1, now=2))
    last = deeds(policy.on_exit(WORKERS[0], 0, now=3))

    assert first[:-1] == ([Tell(shard, "starting 0") for shard in SHARDS] if is_told else [])
    assert last == ([Tell(shard, "gone 0") for shard in SHARDS] if is_told else [])


def test_on_exit_when_a_shard_that_is_done_is_killed_then_it_is_not_started_again():
    policy = running()
    policy.on_done(SHARDS[0])

    actions = policy.on_exit(SHARDS[0], -SIGKILL, now=1)

    assert deeds(actions) == []
    assert "after all workers had ended" in said(actions)
    assert policy.phase is Phase.RUNNING


def test_on_exit_when_a_shard_dies_while_the_job_stops_then_it_is_not_started_again():
    policy = running()
    policy.on_signal(SIGTERM, now=1)

    assert policy.on_exit(SHARDS[0], -SIGKILL, now=2) == []
    assert policy.deadline == 1 + 10


def test_on_exit_when_a_shard_fails_at_its_start_then_the_others_end_and_no_worker_starts():
    policy = starting()
    policy.on_start(0)

    actions = policy.on_exit(SHARDS[0], 2, now=1)

    assert deeds(actions) == [Send(SHARDS[1], SIGTERM)]
    assert policy.on_ready(SHARDS[1], 1) == []
    policy.on_exit(SHARDS[1], -SIGTERM, now=1)
    assert (policy.phase, policy.status) == (Phase.ENDED, 1)


def test_on_deadline_when_a_shard_is_not_ready_in_time_then_the_job_stops():
    policy = starting()
    policy.on_start(0)
    policy.on_ready(SHARDS[0], 1)

    assert policy.deadline == READY_REPORT_S
    assert policy.on_deadline(READY_REPORT_S) == [Say("waiting for shard 1 to be ready, for at most 3600 s")]
    assert policy.deadline == READY_TIMEOUT_S
    actions = policy.on_deadline(READY_TIMEOUT_S)

    assert "shard 1 was not ready" in said(actions)
    assert deeds(actions) == [Send(shard, SIGTERM) for shard in SHARDS]


def test_on_signal_when_first_then_workers_end_before_shards():
    policy = running(restarts_max=2)

    actions = policy.on_signal(SIGINT, now=1)
    one = policy.on_exit(WORKERS[0], -SIGTERM, now=2)
    other = policy.on_exit(WORKERS[1], 0, now=2)

    assert deeds(actions) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert one == []
    assert other == [Send(shard, SIGTERM) for shard in SHARDS]
    assert policy.status == 130


def test_on_signal_when_second_then_everything_is_killed():
    policy = running()
    policy.on_signal(SIGTERM, now=1)

    actions = policy.on_signal(SIGTERM, now=2)

    assert deeds(actions) == [Send(name, SIGKILL) for name in (*SHARDS, *WORKERS)]
    assert policy.status == 143


def test_on_signal_when_the_job_is_failing_already_then_its_status_stays():
    policy = running()
    policy.on_exit(WORKERS[0], 3, now=1)

    assert deeds(policy.on_signal(SIGINT, now=2)) == []
    assert deeds(policy.on_signal(SIGINT, now=2)) == [Send(name, SIGKILL) for name in (*SHARDS, WORKERS[1])]
    assert policy.status == 3


def test_on_deadline_when_nothing_helps_then_the_job_ends_all_the_same():
    policy = running()
    policy.on_signal(SIGTERM, now=0)

    killed = policy.on_deadline(10)
    told = policy.on_deadline(10 + KILL_S)
    shards_end_by = policy.deadline
    all_killed = policy.on_deadline(shards_end_by)
    given_up = policy.on_deadline(shards_end_by + KILL_S)

    assert deeds(killed) == [Send(worker, SIGKILL) for worker in WORKERS]
    assert deeds(told) == [Send(shard, SIGTERM) for shard in SHARDS]
    assert shards_end_by == 10 + KILL_S + 10 + SHARDS_SLACK_S
    assert deeds(all_killed) == [Send(name, SIGKILL) for name in (*SHARDS, *WORKERS)]
    assert "worker 1" in said(given_up)
    assert (policy.phase, policy.status) == (Phase.ENDED, 143)
