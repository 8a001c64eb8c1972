"""Shards that have lost what they held, and others that live on: all come onto one timeline, whoever sees to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from psd.contract.errors import CheckpointCorrupt, StateLost
from psd.v1 import control_pb2
from psd_client.worker.session.timeline import join_one_timeline


@dataclass
class FakeShard:
    """A shard as far as timelines go; `rollbacks` are those that took effect, `trained` what has been done since the last."""

    timeline: int = 0
    checkpoint: str = ""
    is_tentative: bool = False
    rollbacks: list[tuple[str, int]] = field(default_factory=list)
    error: Exception | None = None
    shard: int = 0
    incarnation: int = 1
    trained: int = 0

    def join(self) -> control_pb2.JoinReply:
        return control_pb2.JoinReply(
            run_id="r",
            incarnation=self.incarnation,
            timeline=self.timeline,
            checkpoint=self.checkpoint,
            is_tentative=self.is_tentative,
        )

    def rollback(self, request: control_pb2.RollbackRequest, call: Any) -> None:
        if self.error is not None:
            raise self.error
        is_known = self.timeline >= request.timeline and not self.is_tentative
        if is_known or request.incarnation != self.incarnation:
            return
        self.timeline, self.checkpoint, self.is_tentative = request.timeline, request.checkpoint, False
        self.incarnation += 1
        self.trained = 0
        self.rollbacks.append((request.checkpoint, request.timeline))

    def lose(self, checkpoint: str) -> None:
        """Come back without memory, with this checkpoint."""
        self.timeline, self.checkpoint, self.is_tentative, self.trained = 0, checkpoint, True, 0
        self.incarnation += 1


class FakeShards:
    """All shards of a job; `between` runs once before the first rollback of this worker reaches the shard of that index."""

    def __init__(self, shards: Sequence[FakeShard], between: tuple[int, Callable[[], object]] | None = None) -> None:
        self.shards = shards
        self._between = between
        for index, shard in enumerate(shards):
            shard.shard = index

    def run(self, operation: Callable[[Any, Any], Any], timeout_s: float) -> list[Any]:
        results = []
        for index, shard in enumerate(self.shards):
            if self._between is not None and self._between[0] == index:
                (_, action), self._between = self._between, None
                action()
            results.append(operation(shard, None))
        return results


def bring_together(shards: Sequence[FakeShard], between: tuple[int, Callable[[], object]] | None = None, known: int = 0) -> Any:
    joins = []

    def join_all() -> list[control_pb2.JoinReply]:
        joins.append(1)
        return [shard.join() for shard in shards]

    fakes: Any = FakeShards(shards, between)
    return join_one_timeline(join_all, fakes, known, uniform=lambda: -1.0), len(joins)


def places(shards: Sequence[FakeShard]) -> set[tuple[int, str, bool]]:
    return {(shard.timeline, shard.checkpoint, shard.is_tentative) for shard in shards}


def test_join_when_all_are_on_one_timeline_then_is_done_at_once() -> None:
    """The usual case costs one join and no rollback."""
    shards = [FakeShard(3, "c"), FakeShard(3, "c")]

    replies, joins = bring_together(shards)

    assert ([reply.timeline for reply in replies], joins) == ([3, 3], 1)
    assert [shard.rollbacks for shard in shards] == [[], []]


@pytest.mark.parametrize(
    ("shards", "end"),
    [
        # All begin from a checkpoint: a restored cluster.
        ([FakeShard(0, "c2", True), FakeShard(0, "c2", True)], (1, "c2", False)),
        # They found different ones: the older, which all have.
        ([FakeShard(0, "c2", True), FakeShard(0, "c1", True)], (1, "c1", False)),
        ([FakeShard(1, "c3", True), FakeShard(0, "c2", True), FakeShard(1, "c3", True)], (2, "c2", False)),
        # One has lost its memory, the others live on, further ahead, on the same timeline or a later one.
        ([FakeShard(0, "", False), FakeShard(0, "c2", True)], (1, "c2", False)),
        ([FakeShard(4, "c1", False), FakeShard(2, "c2", True), FakeShard(4, "c1", False)], (5, "c2", False)),
        # Somebody has begun to bring them together, and died; or one has followed a message that was long on its way.
        ([FakeShard(3, "c2", False), FakeShard(2, "c1", False)], (4, "c2", False)),
        # Two have done so at once, each from what it had found.
        ([FakeShard(1, "c2", False), FakeShard(1, "c1", False)], (2, "c1", False)),
        ([FakeShard(1, "c1", False), FakeShard(2, "c3", False), FakeShard(2, "c2", False)], (3, "c2", False)),
        ([FakeShard(3, "c2", False), FakeShard(2, "c1", False), FakeShard(2, "c2", True)], (4, "c2", False)),
    ],
)
def test_join_when_shards_are_mixed_then_all_go_back_to_one_checkpoint(
    shards: list[FakeShard], end: tuple[int, str, bool]
) -> None:
    """Whatever the mixture: one checkpoint, one timeline later than all, nobody tentative."""
    replies, _ = bring_together(shards)

    assert places(shards) == {end}
    assert {(reply.timeline, reply.checkpoint, reply.is_tentative) for reply in replies} == {end}


def test_join_when_all_shards_have_forgotten_a_timeline_then_a_later_one_begins() -> None:
    """Others who were on it would take a new one of its number for their own, and train on with what they had before."""
    shards = [FakeShard(0, "c1", True), FakeShard(0, "c1", True)]

    bring_together(shards, known=1)

    assert places(shards) == {(2, "c1", False)}


def test_join_when_another_worker_is_putting_it_in_order_then_leaves_it_to_it() -> None:
    """A mixture that is gone at the second look was another worker's rollback in progress."""
    shards = [FakeShard(1, "c1"), FakeShard(0, "c1", True)]
    looks = []

    def join_all() -> list[control_pb2.JoinReply]:
        looks.append(1)
        if len(looks) == 2:
            shards[1].rollback(control_pb2.RollbackRequest(checkpoint="c1", timeline=1, incarnation=1), None)
        return [shard.join() for shard in shards]

    fakes: Any = FakeShards(shards)
    join_one_timeline(join_all, fakes, uniform=lambda: -1.0)

    assert len(looks) == 2
    assert shards[0].rollbacks == []


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("tentative", [(1,), (0, 1), (0, 1, 2)])
def test_join_when_two_workers_do_it_at_once_then_they_agree(index: int, tentative: tuple[int, ...]) -> None:
    """The second one overtakes the first before any of its rollbacks: both end on the same timeline, none goes back twice."""
    shards = [FakeShard(2, "c1", i in tentative) for i in range(3)]
    second: list[Any] = []

    first, _ = bring_together(shards, (index, lambda: second.append(bring_together(shards)[0])))

    assert len(places(shards)) == 1
    assert first[0].timeline == shards[0].timeline
    assert not shards[0].is_tentative
    assert max(len(shard.rollbacks) for shard in shards) <= 2
    assert second


def test_join_when_shards_differ_that_have_gone_on_then_nobody_keeps_what_it_has_done_since() -> None:
    """The latest have been trained since their rollback: all go back once more, or two states would be mixed."""
    shards = [FakeShard(2, "c1", trained=40), FakeShard(1, "c1")]

    bring_together(shards)

    assert places(shards) == {(3, "c1", False)}
    assert [shard.trained for shard in shards] == [0, 0]


def test_join_when_a_shard_is_lost_while_its_rollback_is_on_its_way_then_all_go_back_again() -> None:
    """The message was meant for the shard as the worker had found it. Else it would seem to be where the others are."""
    shards = [FakeShard(1, "c1", trained=40), FakeShard(0, "c1", True)]

    def lose_again() -> None:
        bring_together(shards)  # another worker is faster
        for shard in shards:
            shard.trained = 7
        shards[1].lose("c1")

    bring_together(shards, (1, lose_again))

    assert len(places(shards)) == 1
    assert [shard.trained for shard in shards] == [0, 0]


def test_join_when_no_shard_names_a_checkpoint_then_says_so() -> None:
    """Shards of another version, perhaps."""
    with pytest.raises(StateLost, match="none names a checkpoint"):
        bring_together([FakeShard(0, "", True), FakeShard(0, "", False)])


def test_join_when_a_shard_cannot_read_the_checkpoint_then_says_so() -> None:
    """The error of the shard; what the others have done is put in order by the next attempt."""
    shards = [FakeShard(0, "c1", True), FakeShard(0, "c1", True, error=CheckpointCorrupt("block 3"))]

    with pytest.raises(CheckpointCorrupt, match="block 3"):
        bring_together(shards)

    shards[1].error = None
    bring_together(shards)
    assert len(places(shards)) == 1


def test_join_when_a_shard_names_a_checkpoint_instead_of_a_damaged_one_then_all_go_back_to_that() -> None:
    """Two of three cannot read what they are asked to go back to, each another one; the third would have both."""

    class Picky(FakeShard):
        damaged = "c3"

        def rollback(self, request: control_pb2.RollbackRequest, call: Any) -> None:
            if request.checkpoint == self.damaged:
                raise CheckpointCorrupt(self.damaged, instead=f"c{int(self.damaged[1]) - 1}")
            super().rollback(request, call)

    shards = [FakeShard(0, "c3", True), Picky(1, "c1"), Picky(1, "c1")]
    shards[2].damaged = "c2"  # type: ignore[attr-defined]

    bring_together(shards)

    assert {(checkpoint, is_tentative) for _, checkpoint, is_tentative in places(shards)} == {("c1", False)}
    assert len(places(shards)) == 1


def test_join_when_it_never_comes_together_then_gives_up() -> None:
    """Two jobs that restore each other's shards for ever: an error instead of a loop."""
    shards = [FakeShard(0, "c1", True), FakeShard(0, "c1", True)]

    def join_all() -> list[control_pb2.JoinReply]:
        shards[0].is_tentative = True
        return [shard.join() for shard in shards]

    fakes: Any = FakeShards(shards)
    with pytest.raises(StateLost, match="could not be brought onto one timeline"):
        join_one_timeline(join_all, fakes, uniform=lambda: -1.0)
