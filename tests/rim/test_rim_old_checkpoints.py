"""A store that takes checkpoints, and does not let old ones go."""

from __future__ import annotations

import logging

from raw_client import TIMEOUT_S, RawWorker, spec

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import CheckpointFailed
from psd.v1 import control_pb2


def test_a_checkpoint_after_which_old_ones_cannot_be_removed_is_stored_all_the_same(
    cluster, dial, tmp_path, monkeypatch, caplog
):
    """Who has asked for it gets its name, and the log says what is wrong; the next one removes all that is old."""
    running = cluster(1, checkpoint_dir=str(tmp_path), checkpoint_keep=1).shards[0]
    worker = RawWorker(dial(running.address), 0, 1)
    worker.declare(spec(1, mode="async"))

    def take(clock):
        worker.push(clock, [[1.0] * 3])
        return worker.control.Checkpoint(control_pb2.CheckpointRequest(), timeout=TIMEOUT_S).name

    def refuse(*_):
        raise CheckpointFailed("cannot remove x: Operation not permitted")

    first = take(0)
    with monkeypatch.context() as context, caplog.at_level(logging.WARNING):
        context.setattr(CheckpointDirectory, "_remove", refuse)
        second = take(1)
    assert f"what is older than checkpoint {second} could not be removed: cannot remove x" in caplog.text
    assert worker.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S).checkpoint_error == ""
    assert {info.name for info in CheckpointDirectory(str(tmp_path)).checkpoints()} == {first, second}

    third = take(2)
    assert [info.name for info in CheckpointDirectory(str(tmp_path)).checkpoints()] == [third]
