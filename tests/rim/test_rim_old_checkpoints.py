"""Checkpoints that were stored long ago: a store that does not let them go, and shards that hear of them again."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from raw_client import TIMEOUT_S

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.contract.config import ServerConfig
from psd.contract.errors import CheckpointFailed
from psd.rim.server import ShardServer
from psd.v1 import control_pb2, control_pb2_grpc, job_pb2


def test_a_checkpoint_after_which_old_ones_cannot_be_removed_is_stored_all_the_same(
    cluster, dial, tmp_path, monkeypatch, caplog
):
    """Who has asked for it gets its name, and the log says what is wrong; the next one removes all that is old."""
    running = cluster(1, checkpoint_dir=str(tmp_path), checkpoint_keep=1)
    control = control_pb2_grpc.ControlServiceStub(dial(running.servers))

    def refuse(*_):
        raise CheckpointFailed("cannot remove x: Operation not permitted")

    with psd_client.connect(running.servers, 0, 1) as ps, ThreadPoolExecutor(1) as pool:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0), consistency="async")

        def take():
            taking = pool.submit(control.Checkpoint, control_pb2.CheckpointRequest(), timeout=TIMEOUT_S)
            while not taking.done():  # replies to pushes name the cut; heartbeats would do so much later
                ps.push({"w": np.ones(3, np.float32)})
            return taking.result().name

        first = take()
        with monkeypatch.context() as context, caplog.at_level(logging.WARNING):
            context.setattr(CheckpointDirectory, "_remove", refuse)
            second = take()
        assert f"what is older than checkpoint {second} could not be removed: cannot remove x" in caplog.text
        assert control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S).checkpoint_error == ""
        assert {info.name for info in CheckpointDirectory(str(tmp_path)).checkpoints()} == {first, second}

        third = take()
        assert [info.name for info in CheckpointDirectory(str(tmp_path)).checkpoints()] == [third]


@pytest.mark.parametrize("mode", ["async", "sync", "vectors"])
def test_a_shard_that_was_restarted_does_not_take_cuts_again_of_its_earlier_life(tmp_path, mode):
    """Workers go on to name the latest ones for a while, all at once, also those that are removed by now; that is no failure of
    a checkpoint, nor another one."""
    where = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_keep": 1}
    first = ShardServer(ServerConfig(0, 1, listen="127.0.0.1:0", checkpoint_steps=1, **where))
    first.start()
    with psd_client.connect(first.address, 0, 1, retry_timeout=1) as ps:
        if mode == "vectors":
            x = ps.vector("x", 300)
        else:
            ps.declare({"w": np.zeros(300, np.float32)}, psd_client.SGD(lr=1.0), consistency=mode)
        directory = CheckpointDirectory(where["checkpoint_dir"])
        while first._checkpointer.progress.written < 3:
            x.fill(1.0) if mode == "vectors" else ps.push_pull({"w": np.ones(300, np.float32)})
        ps._worker._heartbeats.stop()
        cuts, session = first.shard.cuts.latest(), first.shard.status().workers[0].session
        first.stop()
        before = {info.name: info.nbytes for info in directory.checkpoints() if info.state is CheckpointState.VALID}
        cuts = [cut for cut in cuts if cut.created_at <= directory.newest().created_at]
        assert len(cuts) > len(before) == 1

        second = ShardServer(ServerConfig(0, 1, listen="127.0.0.1:0", **where))
        second.start()
        try:
            caller = job_pb2.Caller(run_id=second.shard.run_id, rank=0, session=session)
            caller.incarnation = second.shard.status().incarnation
            for cut in cuts:
                cut.position = cut.step  # as the worker has said to the first process
            second.shard.learn(caller, cuts)
            second.shard.tick()
            assert second.shard.cuts.open == []
            assert second._checkpointer.await_written(20)
        finally:
            second.stop()

    assert (second._checkpointer.progress.failed, second._checkpointer.progress.written) == (0, 0)
    assert {info.name: info.nbytes for info in directory.checkpoints()} == before
