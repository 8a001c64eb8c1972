"""A shard answers over the network while it reads a checkpoint from a store that does not answer."""

from __future__ import annotations

import pytest
from blocked_store import BlockedStore
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.state.life import Life
from psd.v1 import control_pb2, data_pb2


def stored_by(*workers: RawWorker) -> str:
    """A checkpoint for which they choose their positions, by heartbeats; its name."""
    asked = workers[0].control.Checkpoint.future(control_pb2.CheckpointRequest(), timeout=TIMEOUT_S)
    told: dict[int, list[data_pb2.Cut]] = {}
    while not asked.done():
        for worker in workers:
            said = told.get(worker.caller.rank, [])
            reply = worker.control.Heartbeat(control_pb2.HeartbeatRequest(caller=worker.caller, cuts=said), timeout=TIMEOUT_S)
            position = 0 if worker.caller.rank else 1
            told[worker.caller.rank] = [
                data_pb2.Cut(id=cut.id, ready=True, position=position if cut.ready else None) for cut in reply.cuts
            ]
    return asked.result().name


@pytest.mark.parametrize("reads", ["to check it", "to load it"])
def test_who_asks_during_a_rollback_is_answered_while_the_store_is_silent(cluster, dial, tmp_path, reads):
    """Heartbeats, OpenBulk, refusals, the status, health."""
    running = cluster(1, checkpoint_dir=str(tmp_path), lease_s=600.0).shards[0]
    a, b = (RawWorker(dial(running.address), rank) for rank in range(2))
    for worker in (a, b):
        worker.declare(spec(mode="async"))
    a.push(0, [[1.0] * 3])
    name = stored_by(a, b)
    life = running.shard._core.life
    is_checked = reads == "to check it"
    store = BlockedStore(running.shard.restoration._directories[0], lambda: is_checked or life.now is Life.LOADING)
    rollback = control_pb2.RollbackRequest(checkpoint=name, timeline=1, incarnation=a.caller.incarnation)

    with store.while_reading(lambda: a.control.Rollback(rollback, timeout=TIMEOUT_S)):
        status = b.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)
        assert status.life == (control_pb2.LIFE_CYCLE_SERVING if is_checked else control_pb2.LIFE_CYCLE_LOADING)
        health = health_pb2_grpc.HealthStub(b.channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        heartbeat, open_bulk = control_pb2.HeartbeatRequest(caller=b.caller), control_pb2.OpenBulkRequest(caller=b.caller)
        if is_checked:
            b.control.Heartbeat(heartbeat, timeout=TIMEOUT_S)
            b.control.OpenBulk(open_bulk, timeout=TIMEOUT_S)
            b.push(0, [[1.0] * 3])
        else:
            assert reason(failure(b.control.Heartbeat, heartbeat, timeout=TIMEOUT_S)) == "ShardRestarted"
            assert reason(failure(b.control.OpenBulk, open_bulk, timeout=TIMEOUT_S)) == "ShardRestarted"
            pushed = failure(b.push, 0, [[1.0] * 3])
            assert reason(pushed) == "ShardRestarted"

    assert b.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S).life == control_pb2.LIFE_CYCLE_RESTORED
