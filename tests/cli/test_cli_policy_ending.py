"""Decisions of psd-run at the end of a job with checkpoints, and of a job with many workers: psd/cli/job/policy.py."""

from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM

import pytest
from policies import SHARDS, WORKERS, deeds, running, said

from psd.cli.job.actions import Name, Send, Start
from psd.cli.job.policy import SAVING_SLACK_S, SHARDS_END_S, JobPolicy, Phase
from psd.cli.words.arguments import EXIT_CHECKPOINT, LAST_CHECKPOINT_SIGNAL


def test_on_signal_when_there_are_checkpoints_then_one_is_taken_before_workers_end():
    policy = running(has_checkpoints=True)

    asked = policy.on_signal(SIGINT, now=1)
    deadline = policy.deadline
    answered = policy.on_saved(now=2, is_stored=True)

    assert deeds(asked) == [Send(shard, LAST_CHECKPOINT_SIGNAL) for shard in SHARDS]
    assert "taking a last checkpoint before the job ends, within 10 s; a second signal skips it" in said(asked)
    assert deadline == 1 + 10 + SAVING_SLACK_S
    assert deeds(answered) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert policy.on_saved(now=3, is_stored=True) == []
    policy.on_exit(WORKERS[0], -SIGTERM, now=4)
    assert deeds(policy.on_exit(WORKERS[1], -SIGTERM, now=4)) == [Send(shard, SIGTERM) for shard in SHARDS]
    assert policy.status == 130


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        (lambda policy: policy.on_signal(SIGINT, now=2), 130),
        (lambda policy: policy.on_deadline(11 + SAVING_SLACK_S), 130),
        (lambda policy: policy.on_exit(SHARDS[1], -SIGKILL, now=2), EXIT_CHECKPOINT),
    ],
    ids=["a second signal", "the deadline", "a shard's death"],
)
def test_on_signal_when_the_checkpoint_does_not_come_then_the_job_is_stopped_without(happens, status):
    policy = running(shard_restarts_max=0, has_checkpoints=True)
    policy.on_signal(SIGINT, now=1)

    assert deeds(happens(policy)) == [Send(worker, SIGTERM) for worker in WORKERS]
    assert Send(WORKERS[0], SIGKILL) in deeds(policy.on_signal(SIGINT, now=14))
    assert policy.status == status


def test_on_exit_when_a_shard_dies_while_the_checkpoint_is_taken_then_it_starts_again_and_takes_part():
    policy = running(has_checkpoints=True)
    policy.on_signal(SIGINT, now=1)

    died = policy.on_exit(SHARDS[1], -SIGKILL, now=2)

    assert deeds(died) == [Start(SHARDS[1])]
    assert "starting it again, its state is in /state/shard-1 (9 restarts left)" in said(died)
    assert policy.deadline == 1 + 10 + SAVING_SLACK_S
    assert policy.on_ready(SHARDS[1], now=3) == [Send(SHARDS[1], LAST_CHECKPOINT_SIGNAL)]
    assert deeds(policy.on_saved(now=4, is_stored=True)) == [Send(worker, SIGTERM) for worker in WORKERS]


def test_on_exit_when_a_shard_dies_while_workers_end_then_it_is_told_of_the_end_when_it_serves_again():
    """Until then the signal would end it, as Python has no handler yet; what all shards hold is stored by all of them."""
    policy = running(has_checkpoints=True)
    policy.on_exit(WORKERS[0], 1, now=1)

    assert deeds(policy.on_exit(SHARDS[1], -SIGKILL, now=2)) == [Start(SHARDS[1])]
    assert deeds(policy.on_exit(WORKERS[1], -SIGTERM, now=3)) == [Send(SHARDS[0], SIGTERM)]
    assert policy.on_ready(SHARDS[1], now=4) == [Send(SHARDS[1], LAST_CHECKPOINT_SIGNAL), Send(SHARDS[1], SIGTERM)]
    assert deeds(policy.on_exit(SHARDS[1], -SIGKILL, now=5)) == [Start(SHARDS[1])]
    policy.on_exit(SHARDS[0], EXIT_CHECKPOINT, now=6)
    assert deeds(policy.on_exit(SHARDS[1], -SIGKILL, now=7)) == []
    assert (policy.phase, policy.status) == (Phase.ENDED, 1)


@pytest.mark.parametrize("is_stored", [True, False])
def test_on_exit_when_a_shard_dies_after_the_last_checkpoint_then_it_starts_again_only_if_there_is_none(is_stored):
    """The others end without it; started again, it would wait for them, and say that it could not store one."""
    policy = running(has_checkpoints=True)
    policy.on_signal(SIGINT, now=1)
    policy.on_saved(now=2, is_stored=is_stored)

    assert deeds(policy.on_exit(SHARDS[1], -SIGKILL, now=3)) == ([] if is_stored else [Start(SHARDS[1])])
    for worker in WORKERS:
        policy.on_exit(worker, -SIGTERM, now=4)
    if is_stored:
        policy.on_exit(SHARDS[0], 0, now=5)
        assert (policy.phase, policy.status) == (Phase.ENDED, 130)


def test_on_exit_when_a_shard_dies_while_it_stores_a_job_that_all_workers_have_left_then_it_starts_again():
    policy = running(has_checkpoints=True)
    policy.on_done(SHARDS[1])
    for worker in WORKERS:
        policy.on_exit(worker, 0, now=1)

    assert deeds(policy.on_exit(SHARDS[1], -SIGKILL, now=2)) == [Start(SHARDS[1])]
    assert policy.on_deadline(1 + SHARDS_END_S) == []
    assert policy.on_ready(SHARDS[1], now=5) == []
    policy.on_done(SHARDS[1])
    policy.on_done(SHARDS[0])
    for shard in SHARDS:
        policy.on_exit(shard, 0, now=6)
    assert (policy.phase, policy.status) == (Phase.ENDED, 0)


def finished(shard_restarts_max: int = 0, *, done: list[Name] = SHARDS) -> JobPolicy:
    """A job with checkpoints all of whose workers have left these shards, and have ended well."""
    policy = running(shard_restarts_max=shard_restarts_max, has_checkpoints=True)
    for shard in done:
        policy.on_done(shard)
    for worker in WORKERS:
        policy.on_exit(worker, 0, now=1)
    return policy


@pytest.mark.parametrize("done", [SHARDS, SHARDS[:1], []])
@pytest.mark.parametrize("killed", [SHARDS, SHARDS[1:]])
@pytest.mark.parametrize("restarts", [0, 1])
def test_on_exit_when_shards_die_for_good_before_their_parts_are_stored_then_the_status_says_so(done, killed, restarts):
    policy = finished(restarts, done=done)
    for shard in killed:
        while Start(shard) in policy.on_exit(shard, -SIGKILL, now=2):
            policy.on_ready(shard, now=3)
            policy.on_done(shard)
    for shard in {*SHARDS} - {*killed}:
        policy.on_exit(shard, 0, now=4)

    assert (policy.phase, policy.status) == (Phase.ENDED, EXIT_CHECKPOINT)


def test_on_exit_when_a_shard_dies_once_its_part_is_stored_then_it_is_neither_started_again_nor_missed():
    policy = finished(shard_restarts_max=10)
    policy.on_stored(SHARDS[1])

    died = policy.on_exit(SHARDS[1], -SIGKILL, now=2)
    policy.on_exit(SHARDS[0], 0, now=2)

    assert deeds(died) == []
    assert "after all workers had ended" in said(died)
    assert (policy.phase, policy.status) == (Phase.ENDED, 0)


def test_on_exit_when_shards_die_for_good_once_one_of_them_says_that_all_have_stored_it_then_nothing_is_missed():
    """The first dies before it hears so."""
    policy = running(shard_restarts_max=0, has_checkpoints=True)
    policy.on_signal(SIGTERM, now=1)
    policy.on_saved(now=2, is_stored=False)
    for worker in WORKERS:
        policy.on_exit(worker, -SIGTERM, now=3)
    policy.on_exit(SHARDS[0], -SIGKILL, now=4)
    policy.on_saved(now=5, is_stored=True)
    policy.on_exit(SHARDS[1], -SIGKILL, now=6)

    assert (policy.phase, policy.status) == (Phase.ENDED, 143)


@pytest.mark.parametrize(("has_stored", "status"), [(False, EXIT_CHECKPOINT), (True, 0)])
def test_on_lost_when_a_host_is_lost_with_a_shard_that_stores_a_finished_job_then_the_status_says_so(has_stored, status):
    policy = finished()
    if has_stored:
        policy.on_stored(SHARDS[1])
    policy.on_lost([SHARDS[1]], "node 1 was lost", now=2)
    policy.on_exit(SHARDS[0], 0, now=3)

    assert (policy.phase, policy.status) == (Phase.ENDED, status)


@pytest.mark.parametrize("ends", [lambda policy: policy.on_deadline(policy.deadline), lambda policy: []])
def test_on_deadline_when_shards_do_not_store_what_a_finished_job_has_learnt_in_time_then_the_status_says_so(ends):
    """They are killed, or end by themselves with an error."""
    policy = finished(done=SHARDS[:1])
    policy.on_exit(SHARDS[0], 0, now=2)
    policy.on_deadline(policy.deadline)
    assert policy.phase is Phase.STOPPING_SHARDS
    killed = ends(policy)
    policy.on_exit(SHARDS[1], -SIGKILL if killed else 1, now=30)

    assert (policy.phase, policy.status) == (Phase.ENDED, EXIT_CHECKPOINT)


def test_on_exit_when_a_job_without_checkpoints_loses_a_shard_at_its_end_then_nothing_is_missed():
    policy = running(shard_restarts_max=0)
    for name in (*WORKERS, SHARDS[0]):
        policy.on_exit(name, 0, now=1)
    policy.on_exit(SHARDS[1], -SIGKILL, now=1)

    assert (policy.phase, policy.status) == (Phase.ENDED, 0)


def test_on_signal_when_the_reader_of_the_output_ends_by_the_same_ctrl_c_then_the_checkpoint_is_not_skipped():
    policy = running(has_checkpoints=True)
    policy.on_signal(SIGINT, now=1)

    assert policy.on_signal(SIGPIPE, now=1) == []
    assert policy.phase is Phase.SAVING


def test_on_exit_when_all_workers_end_while_the_checkpoint_is_taken_then_shards_are_stopped():
    policy = running(has_checkpoints=True)
    policy.on_signal(SIGINT, now=1)
    policy.on_exit(WORKERS[0], 0, now=2)

    assert deeds(policy.on_exit(WORKERS[1], 0, now=2)) == [Send(shard, SIGTERM) for shard in SHARDS]


@pytest.mark.parametrize(("worker_status", "status"), [(0, EXIT_CHECKPOINT), (3, 3)])
def test_on_exit_when_a_shard_could_not_store_the_last_checkpoint_then_the_status_says_so(worker_status, status):
    policy = running(has_checkpoints=True)
    policy.on_done(SHARDS[0])

    policy.on_exit(SHARDS[0], EXIT_CHECKPOINT, now=1)
    for name, returncode in ((WORKERS[0], worker_status), (WORKERS[1], 0), (SHARDS[1], 0)):
        policy.on_exit(name, returncode, now=1)

    assert (policy.phase, policy.status) == (Phase.ENDED, status)


def test_on_exit_when_a_job_that_was_told_to_end_has_no_last_checkpoint_then_the_status_says_so():
    policy = running(has_checkpoints=True)
    policy.on_signal(SIGTERM, now=1)
    policy.on_saved(now=2, is_stored=False)
    for name, returncode in ((WORKERS[0], -SIGTERM), (WORKERS[1], -SIGTERM), (SHARDS[0], 0), (SHARDS[1], EXIT_CHECKPOINT)):
        policy.on_exit(name, returncode, now=3)

    assert (policy.phase, policy.status) == (Phase.ENDED, EXIT_CHECKPOINT)


def test_on_deadline_when_hundreds_of_workers_have_ended_then_shards_have_time_to_see_them_leave():
    policy = JobPolicy(
        state_dirs=[""],
        workers=200,
        restarts_max=0,
        shard_restarts_max=0,
        grace_s=10,
        on_worker_failure="wait",
        has_checkpoints=False,
    )
    policy.on_start(0)
    policy.on_ready(SHARDS[0], 0.5)

    for rank in range(200):
        policy.on_exit(Name("worker", rank), 0, now=1)

    assert policy.deadline >= 20
    assert "has not told that all have joined and left" in said(policy.on_deadline(policy.deadline))


def test_on_deadline_when_a_shard_has_not_heard_what_another_one_has_then_the_script_is_not_blamed():
    """Each worker tells each shard, for some seconds: a busy machine may be too slow for that."""
    policy = running()
    policy.on_done(SHARDS[0])
    policy.on_exit(SHARDS[0], 0, now=1)
    for worker in WORKERS:
        policy.on_exit(worker, 0, now=1)

    late = policy.on_deadline(policy.deadline)

    assert "shard 1 has not heard so from all of them, as shard 0 has; draining" in said(late)
    assert deeds(late) == [Send(SHARDS[1], SIGTERM)]


def test_on_deadline_when_shards_store_what_a_finished_job_has_learnt_then_they_have_the_time_that_it_takes():
    policy = running(has_checkpoints=True)
    for shard in SHARDS:
        policy.on_done(shard)
    for worker in WORKERS:
        policy.on_exit(worker, 0, now=1)

    waiting = policy.on_deadline(policy.deadline)

    assert deeds(waiting) == []
    assert "waiting for shard 0, shard 1 to store the last checkpoint" in said(waiting)
    assert policy.deadline is None
    assert deeds(policy.on_signal(SIGINT, now=99)) == [Send(shard, SIGTERM) for shard in SHARDS]
