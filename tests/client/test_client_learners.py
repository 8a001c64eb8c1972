"""Exchanges of learners while calls fail and shards are restarted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from client_faults import Restartable, connect_faulty, in_threads  # noqa: E402
from learners import OUTER, SUM, Walker, learned  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402


def test_a_failed_exchange_is_made_again_with_the_same_difference(cluster: Any) -> None:
    """The shard has counted it, and the reply is lost: once, and the local steps since are in the next."""

    def cut() -> None:
        raise RuntimeError("the reply was lost, and no retry is made")

    ps, faults = connect_faulty(cluster(1).servers)
    with ps:
        walker = Walker(ps, psd.Local(steps=2, outer=SUM))
        faults.lose_reply("push_pull", shard=0, after=cut)
        with pytest.raises(RuntimeError, match="the reply was lost"):
            walker.walk(2)
        assert walker.optimizer.local_step == 2
        walker.walk()
        faults.assert_all_fired()

        assert walker.walk(1) == [-4.0, -4.0]
        walker.optimizer.pull()
        assert walker.place == [-4.0, -4.0]


@pytest.mark.parametrize("merge", ["mean", "rda", "heloco"])
def test_shards_that_die_meanwhile_change_no_bit(cluster: Any, tmp_path: Path, merge: str) -> None:
    """With exact aggregation; one in the midst of an exchange that is under way while the learners compute."""
    local = psd.Local(steps=4, outer=OUTER, fragments=2, delay=1, merge=merge)
    steps = 12
    servers = cluster(2).servers
    expected = in_threads(*(lambda rank=rank: _alone(servers, rank, local, steps) for rank in range(2)))
    shards = Restartable(cluster, tmp_path)
    ps, faults = connect_faulty(shards.servers, 0, 2)
    for index in (0, 1):
        faults.run_before("push", shard=0, action=lambda index=index: shards.restart(index))

    def first() -> Any:
        with ps:
            return learned(ps, local, steps, aggregation="exact")

    found = in_threads(first, lambda: _alone(shards.servers, 1, local, steps))

    faults.assert_all_fired()
    for mine, right in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, right))


def _alone(servers: str, rank: int, local: psd.Local, steps: int) -> Any:
    with psd_client.connect(servers, rank, 2) as ps:
        return learned(ps, local, steps, aggregation="exact")


@pytest.mark.parametrize(("merge", "sample"), [("mean", None), ("rda", None), ("mean", 0.5)])
def test_every_step_counts_once_while_shards_die_and_nobody_waits(
    cluster: Any, tmp_path: Path, merge: str, sample: float | None
) -> None:
    """One learner of two closes a round, at its own pace, or the one that is chosen: what the job has, and what the two still
    have, is what they have made. With directions all differences are alike, and a learner's is alone in its round."""
    shards = Restartable(cluster, tmp_path)
    local = psd.Local(steps=2, outer=SUM, fragments=2, merge=merge, sample=sample)
    ps, faults = connect_faulty(shards.servers, 0, 2)
    turn = threading.Barrier(2)
    left: dict[int, list[float]] = {}
    for call, shard in (("push", 0), ("commit", 1), ("pull", 0), ("push", 1), ("pull", 1), ("commit", 0)):
        faults.run_before(call, shard=0, action=lambda shard=shard: shards.restart(shard))

    def walk(connection: psd_client.ParameterServer, strides: int) -> list[float]:
        with connection:
            walker = Walker(connection, local, quorum=None if sample else 1)
            for _ in range(6):  # one after the other, so that a round has one difference, and its mean is that difference
                turn.wait()
                if connection.rank == 0:
                    walker.walk(strides)
                turn.wait()
                if connection.rank == 1:
                    walker.walk(strides)
            left[connection.rank] = [float(walker.optimizer._base[i][0] - walker.place[i]) for i in range(2)]
            turn.wait()
            walker.optimizer.pull()
            return walker.place

    found = in_threads(lambda: walk(ps, 3), lambda: walk(psd_client.connect(shards.servers, 1, 2), 1))

    faults.assert_all_fired()
    total = 6 * (3 + 1)
    for place in found:
        assert [left[0][i] + left[1][i] - place[i] for i in range(2)] == [total, total]
