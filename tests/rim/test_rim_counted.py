"""Counted, and frames that leave out what a block has: a worker that errs is told so, and nothing is counted by it."""

from __future__ import annotations

import pytest
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.v1 import control_pb2, data_pb2

ONES = [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def asked(worker: RawWorker, clock: int, **other: object) -> control_pb2.CountedRequest:
    pull = worker.pull_request(clock)
    return control_pb2.CountedRequest(
        **{"caller": pull.caller, "layout_digest": pull.layout_digest, "clock": clock, **other}  # type: ignore[arg-type]
    )


@pytest.fixture(params=["sync", "async"])
def worker(request: pytest.FixtureRequest, cluster, dial) -> RawWorker:
    job = spec(1 if request.param == "async" else 2, blocks=3, mode=request.param)
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, job.world_size)
    worker.declare(job)
    return worker


def broken_push(worker: RawWorker, blocks: int) -> list[data_pb2.PushFrame]:
    """Send a push that ends too early, and return all its frames."""
    sent = worker.frames(0, ONES)
    assert reason(failure(worker.data.Push, iter(sent[:blocks]), timeout=TIMEOUT_S)) == "InvalidRequest"
    return sent


def test_the_blocks_that_have_a_push_are_named(worker):
    """Counted names the blocks that have counted, by the name of the push."""
    broken_push(worker, 2)

    assert list(worker.control.Counted(asked(worker, 0), timeout=TIMEOUT_S).blocks) == [0, 1]
    assert list(worker.control.Counted(asked(worker, 1), timeout=TIMEOUT_S).blocks) == []


def test_frames_of_counted_blocks_need_no_numbers(worker):
    """The rest of the push completes it; the frames without numbers are duplicates."""
    sent = broken_push(worker, 2)
    for frame in sent[:2]:
        frame.ClearField("payload")
        frame.already = True

    reply = worker.data.Push(iter(sent), timeout=TIMEOUT_S)

    assert (reply.blocks_counted, reply.blocks_duplicate, reply.clock) == (1, 2, 1)
    assert list(worker.control.Counted(asked(worker, 0), timeout=TIMEOUT_S).blocks) == [0, 1, 2]


def test_a_block_that_has_no_push_is_not_left_out(worker):
    """A block that has not counted the push refuses such a frame, and counts the numbers that come later."""
    sent = broken_push(worker, 1)
    sent[1].ClearField("payload")
    sent[1].already = True

    error = failure(worker.data.Push, iter(sent), timeout=TIMEOUT_S)

    assert reason(error) == "InvalidRequest"
    assert "already: a block has not counted the push of clock 0 by worker 0" in error.details()
    assert list(worker.control.Counted(asked(worker, 0), timeout=TIMEOUT_S).blocks) == [0]
    assert worker.push(0, ONES).blocks_counted == 2


@pytest.mark.parametrize("field", ["payload", "present", "in_memory", "rows", "block"])
def test_a_frame_that_leaves_a_block_out_has_nothing_else(worker, field):
    """Numbers, a bitmap, rows, memory, or no block beside `already` are refused."""
    sent = worker.frames(0, ONES)
    frame = sent[1]
    frame.already = True
    if field != "payload":
        frame.ClearField("payload")
    if field == "present":
        frame.present = b"\1"
    elif field == "in_memory":
        frame.ClearField("block")
        frame.in_memory.append(1)
    elif field == "rows":
        frame.rows.add(table=0, rows=0)
    elif field == "block":
        frame.ClearField("block")

    error = failure(worker.data.Push, iter(sent), timeout=TIMEOUT_S)

    assert reason(error) == "InvalidRequest"


def test_a_question_of_another_job_or_session_is_refused(worker):
    """Counted checks the layout and the session as a push does."""
    assert reason(failure(worker.control.Counted, asked(worker, 0, layout_digest=b"x"), timeout=TIMEOUT_S)) == "LayoutMismatch"
    assert reason(failure(worker.control.Counted, asked(worker, 0, session=2**53), timeout=TIMEOUT_S)) == "InvalidRequest"
