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
from psd.contract.errors import SessionFenced  # noqa: E402


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


@pytest.mark.parametrize(("merge", "delay"), [("mean", 1), ("rda", 1), ("heloco", 1), ("mean", 3), ("rda", 4)])
def test_shards_that_die_meanwhile_change_no_bit(cluster: Any, tmp_path: Path, merge: str, delay: int) -> None:
    """With exact aggregation; one in the midst of an exchange that is under way while the learners compute; or of two."""
    local = psd.Local(steps=4, outer=OUTER, fragments=2, delay=delay, merge=merge)
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


TWO = psd.Local(steps=4, outer=SUM, fragments=2, delay=3, alpha=0.0)
"""Two exchanges are under way after every other step."""


class _Cut(Exception):
    """A reply was lost, and no retry is made."""


class _Interrupted(Walker):
    """A learner that goes on after Ctrl-C in a wait, and after an exchange that has failed; both while two are under way."""

    most = interruptions = failures = 0

    def stroll(self, steps: int, *, waits: bool) -> None:
        """waits: for its exchanges after most steps, so that they are not much slower than the steps."""
        wait = self.optimizer._wait

        def interrupted(call: Any) -> None:
            if self.interruptions == 0 and len(self.optimizer._flights) == 2:
                self.interruptions += 1
                raise KeyboardInterrupt
            wait(call)

        self.optimizer._wait = interrupted
        for step in range(1, steps + 1):
            try:
                self.walk()
            except KeyboardInterrupt:
                assert self.interruptions == 1
            except _Cut:
                self.failures += 1
            flights = self.optimizer._flights
            self.most = max(self.most, len(flights))
            assert self.optimizer.local_step == step
            for call in (*flights, self.optimizer._look) if waits and step % 7 else ():
                _await(call)


@pytest.mark.parametrize("options", [{"aggregation": "exact"}, {"quorum": 1}], ids=["all", "quorum"])
def test_two_exchanges_under_way_count_once_each(cluster: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Shards die, an exchange fails for good while the next one has departed, and a learner is interrupted. The job has what
    the two learners were told that it has."""

    def cut() -> None:
        raise _Cut

    shards = Restartable(cluster, tmp_path)
    ps, faults = connect_faulty(shards.servers, 0, 2)
    turn = threading.Barrier(2)
    for call, shard in (("push", 0), ("commit", 1), ("pull", 0), ("push", 1), ("pull", 1), ("commit", 0)):
        faults.run_before(call, shard=0, action=lambda shard=shard: shards.restart(shard))

    def walk(connection: psd_client.ParameterServer, stride: int) -> tuple[_Interrupted, list[float]]:
        with connection:
            try:
                walker = _Interrupted(connection, TWO, stride=stride, reduce="sum", **options)
                turn.wait()  # a learner that comes later begins at the other's step
                if connection is ps:
                    faults.lose_reply("pull", shard=0, after=cut)
                walker.stroll(40, waits="quorum" in options)
                walker.optimizer._settle()
            except BaseException:
                turn.abort()
                raise
            turn.wait()
            walker.optimizer.pull()
            return walker, walker.place

    (first, found), (second, same) = in_threads(
        lambda: walk(ps, 1), lambda: walk(psd_client.connect(shards.servers, 1, 2), 1000)
    )

    faults.assert_all_fired()
    assert first.most == second.most == 2
    assert first.failures == first.interruptions == second.interruptions == 1
    assert all(sum(each.is_counted for each in walker.records) > 0 for walker in (first, second))
    assert found == same == [float(-first.counted(fragment) - second.counted(fragment)) for fragment in range(2)]


def test_a_learner_that_is_killed_with_two_exchanges_under_way_has_counted_what_was_committed(cluster: Any) -> None:
    """The first is, and the shards have the second, whose commit comes too late: another process has the learner's rank."""
    servers = cluster(2).servers
    ps, faults = connect_faulty(servers, 1, 2)
    reached, killed = threading.Event(), threading.Event()

    def stop_there() -> None:
        reached.set()
        assert killed.wait(60)

    options: dict[str, Any] = {"quorum": 1, "reduce": "sum", "stride": 1000}
    with psd_client.connect(servers, 0, 2) as other, ps:
        absent, struck = in_threads(lambda: Walker(other, TWO, **options), lambda: Walker(ps, TWO, **options))
        while not struck.optimizer._flights:
            struck.walk()
            _await(struck.optimizer._look)
        first = struck.optimizer._flights[0]
        _await(first)
        faults.run_before("push", shard=0, action=lambda: faults.run_before("commit", shard=0, action=stop_there))
        while len(struck.optimizer._flights) < 2:
            assert struck.optimizer._flights[0] is first, "it has not landed"
            struck.walk()
            _await(struck.optimizer._look)
        assert reached.wait(60)

        with psd_client.connect(servers, 1, 2) as again:
            walker = Walker(again, TWO, **options)
            killed.set()
            _await(struck.optimizer._flights[1])
            with pytest.raises(SessionFenced):
                struck.optimizer._settle()
            for _ in range(30):
                walker.walk()
                for call in (*walker.optimizer._flights, walker.optimizer._look):
                    _await(call)
            walker.optimizer._settle()
            walker.optimizer.pull()

    assert [record.is_counted for record in struck.records] == [True]
    assert len(walker.records) > 4
    assert walker.place == [float(-struck.counted(each) - walker.counted(each)) for each in range(2)]
    assert absent.place == [0.0, 0.0]


def test_what_a_program_saves_goes_with_the_exchange_that_departs_next(cluster: Any) -> None:
    """Though it saves more while that waits for another one: the learner would go on where the exchange departed."""
    servers = cluster(1).servers
    ps, faults = connect_faulty(servers)
    with ps:
        walker, go = Walker(ps, TWO), threading.Event()
        faults.run_before("push_pull", shard=0, action=lambda: go.wait(60))
        for step in range(1, 6):
            if step == 5:
                assert [flight.ended.is_set() for flight in walker.optimizer._flights] == [False, False]
                go.set()
            ps.save_client_state(b"step %d" % step)
            walker.walk()
        walker.optimizer._settle()

    with psd_client.connect(servers, 0, 1) as ps:
        walker = Walker(ps, TWO)
        assert walker.optimizer.local_step == 4
        assert ps.client_state == b"step 4"


def _await(call: Any) -> None:
    """Wait for the end of a call in the background, if there is one."""
    assert call is None or call.ended.wait(60)
