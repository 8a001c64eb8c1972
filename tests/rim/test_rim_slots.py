"""Slots that a worker pulls, with stock stubs: one at a time, in place of the parameters, and with the counts of steps."""

from __future__ import annotations

import numpy as np
import pytest
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.v1 import job_pb2

MOMENTUM = [1.0, 0.5, 0.0, 0.0]
"""Of SGD: lr, momentum, dampening, weight_decay."""


def with_momentum(*groups: bool) -> job_pb2.JobSpec:
    """A job of one worker whose groups, a block each, have momentum or not."""
    job = spec(1, blocks=len(groups))
    for group, has_momentum in zip(job.groups, groups, strict=True):
        group.flags[:] = ["momentum"] * has_momentum
    return job


def test_a_slot_is_pulled_as_it_is_after_the_workers_last_push(cluster, dial):
    """The payload is the slot alone; each segment says how many steps it has made."""
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(with_momentum(True, True))
    for clock, value in enumerate((1.0, 2.0)):
        frames = worker.frames(clock, [[value] * 3, [0.0] * 3], scalars=MOMENTUM)
        worker.data.Push(iter(frames), timeout=TIMEOUT_S)
    request = worker.pull_request(2)
    request.slot = 1

    found = {frame.block: frame for frame in worker.data.Pull(request, timeout=TIMEOUT_S)}

    assert [np.frombuffer(found[block].payload, np.float32).tolist() for block in (0, 1)] == [[2.5] * 3, [0.0] * 3]
    assert [(frame.version, list(frame.steps)) for frame in found.values()] == [(2, [2]), (2, [2])]
    plain = worker.data.Pull(worker.pull_request(2), timeout=TIMEOUT_S)
    assert [list(frame.steps) for frame in plain] == [[], []]


@pytest.mark.parametrize(("slot", "blocks"), [(2, [0]), ((1 << 32) - 1, [0]), (1, [1]), (1, [])])
def test_a_slot_that_a_block_has_not_is_refused(cluster, dial, slot, blocks):
    """Whether the rule has fewer, or the group has none, or all blocks are asked for and one of them has none."""
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(with_momentum(True, False))
    request = worker.pull_request(0)
    request.slot, request.blocks[:] = slot, blocks

    error = failure(worker.data.Pull, request, timeout=TIMEOUT_S)

    block, count = (0, 1) if blocks == [0] else (1, 0)
    assert reason(error) == "InvalidRequest"
    assert error.details().startswith(f"slot: {slot} is asked for, and block {block} has {count} slots")
