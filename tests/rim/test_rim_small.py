"""PushPullSmall with stock stubs: what a stream would answer, in one message each way."""

from __future__ import annotations

import numpy as np
import pytest
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.v1 import data_pb2


def test_a_small_push_pull_is_answered_as_on_a_stream(cluster, dial):
    """One message each way, with the frames that a stream would carry, also where a tensor has no gradient."""
    job = spec(1, blocks=3)
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(job)
    frames = worker.frames(0, [[1.0] * 3, [2.0] * 3, [0.0] * 3])
    frames[2].present, frames[2].payload = b"\0", b""

    answer = worker.data.PushPullSmall(data_pb2.SmallPush(frames=frames), timeout=TIMEOUT_S).frames

    assert [(f.block, f.version) for f in answer[:-1]] == [(0, 1), (1, 1), (2, 1)]
    assert [np.frombuffer(f.payload, np.float32).tolist() for f in answer[:-1]] == [[-1.0] * 3, [-2.0] * 3, [0.0] * 3]
    assert (answer[-1].push.clock, answer[-1].push.blocks_counted) == (1, 3)


@pytest.mark.parametrize("field", ["frames", "last", "missing last", "nothing"])
def test_a_small_push_pull_that_is_no_push_is_refused_by_field(cluster, dial, field):
    """More frames than blocks, a last one in the middle, and none at all: refused before a block has counted."""
    shard = cluster(1).shards[0]
    worker = RawWorker(dial(shard.address), 0, 1)
    worker.declare(spec(1, blocks=2))
    frames = worker.frames(0, [[1.0] * 3, [2.0] * 3])
    if field == "frames":
        frames.append(frames[1])
    elif field == "last":
        frames[0].last = True
    elif field == "missing last":
        frames[1].last = False
    else:
        frames = []

    error = failure(worker.data.PushPullSmall, data_pb2.SmallPush(frames=frames), timeout=TIMEOUT_S)

    assert reason(error) == "InvalidRequest"
    assert error.details().startswith({"frames": "frames: has more than 2"}.get(field, "last:"))
    assert worker.pull(0) == {0: [0.0] * 3, 1: [0.0] * 3}
