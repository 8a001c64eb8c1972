"""A push that is still being computed: blocks come in the order in which they are complete, each once, to every taker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_faults import Thread

from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Block, Layout
from psd_client.lanes.overlap_feed import Aborted, Feed

SIZES = (600_000, 10, 1_200_000, 5, 80_000)


def layout_of(shard_count: int = 1) -> Layout:
    """Blocks of several tensors, tensors of several blocks; the last tensor is static."""
    tensors = tuple(TensorSpec(f"t{i}", (size,), "float32", int(i == 4)) for i, size in enumerate(SIZES))
    return Layout(JobSpec(world_size=1, tensors=tensors, groups=(GroupSpec("sgd"), GroupSpec("static"))), shard_count)


def trained(layout: Layout, shard: int = 0) -> list[Block]:
    return [block for block in layout.blocks_of(shard) if block.trained]


def taken(feed: Feed, blocks: list[Block]) -> list[tuple[int, Any]]:
    return [(block.index, None if present is None else present.tolist()) for block, present in feed.take(blocks)]


def available(feed: Feed, blocks: list[Block], count: int) -> list[int]:
    """The first `count` blocks, which are there already; asking for one more would wait."""
    blocks_in_turn = feed.take(blocks)
    return [next(blocks_in_turn)[0].index for _ in range(count)]


def test_take_when_a_tensor_is_ready_then_gives_the_blocks_that_lie_in_it_alone() -> None:
    layout = layout_of()
    feed = Feed(layout)
    blocks = trained(layout)
    inside = [block.index for block in blocks if set(block.segment_tensors.tolist()) == {2}]
    assert len(inside) > 0

    feed.ready(2)

    assert available(feed, blocks, len(inside)) == inside


def test_take_when_the_last_tensor_of_a_block_is_ready_then_gives_the_block() -> None:
    layout = layout_of()
    feed = Feed(layout)
    (last,) = [block for block in trained(layout) if 3 in block.segment_tensors]
    others = [t for t in last.segment_tensors.tolist() if t != 3]
    assert others

    for tensor in others:
        feed.ready(tensor)
    there = sum(set(block.segment_tensors.tolist()) <= set(others) for block in trained(layout))
    before = available(feed, trained(layout), there)
    feed.ready(3)

    assert last.index not in before
    assert available(feed, trained(layout), there + 1) == [*before, last.index]


def test_take_when_tensors_are_of_several_groups_and_dtypes_then_their_order_is_the_models() -> None:
    """Though the blocks of one group, and of one dtype, have neighbouring indices."""
    kinds = [("float32", 1), ("bfloat16", 0), ("float32", 0), ("float64", 1), ("bfloat16", 0)]
    tensors = tuple(TensorSpec(f"t{i}", (600_000,), *kind) for i, kind in enumerate(kinds))
    layout = Layout(JobSpec(1, tensors, (GroupSpec("sgd"), GroupSpec("sgd"))), 1)
    feed = Feed(layout)

    for tensor in reversed(range(5)):
        feed.ready(tensor)
    firsts = [int(block.segment_tensors[0]) for block, _ in feed.take(trained(layout))]

    assert firsts == sorted(firsts)
    assert set(firsts) == set(range(5))


def test_take_when_several_blocks_are_there_then_the_first_of_the_model_leaves_first() -> None:
    """The next forward pass begins with it; back-propagation has made it last."""
    layout = layout_of()
    feed = Feed(layout)
    early, late = ([b.index for b in trained(layout) if set(b.segment_tensors.tolist()) == {t}] for t in (0, 2))
    assert early
    assert len(late) > 1

    feed.ready(2)
    begun = available(feed, trained(layout), 1)
    feed.ready(0)

    assert available(feed, trained(layout), len(early) + len(late)) == [*begun, *early, *late[1:]]


@pytest.mark.parametrize("shard_count", [1, 2, 3])
def test_take_when_all_tensors_are_ready_in_any_order_then_every_shard_gets_its_blocks_once(shard_count: int) -> None:
    layout = layout_of(shard_count)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        feed = Feed(layout)
        for tensor in order:
            feed.ready(tensor)
        feed.finish(None)
        for shard in range(shard_count):
            blocks = trained(layout, shard)
            assert sorted(taken(feed, blocks)) == [(block.index, None) for block in blocks]


def test_take_when_repeated_then_gives_the_same_again() -> None:
    layout = layout_of()
    feed = Feed(layout)
    for tensor in (2, 0):
        feed.ready(tensor)
    feed.finish(np.array([True, False, True, False, False]))

    first, second = taken(feed, trained(layout)), taken(feed, trained(layout))

    assert first == second


def test_finish_then_the_rest_says_which_tensors_have_a_gradient() -> None:
    layout = layout_of()
    feed = Feed(layout)
    feed.ready(2)
    feed.finish(np.array([False, True, True, False, False]))

    blocks = {block.index: block for block in trained(layout)}
    for index, present in taken(feed, list(blocks.values())):
        tensors = blocks[index].segment_tensors.tolist()
        assert present == (None if tensors == [2] else [tensor in (1, 2) for tensor in tensors])


def test_finish_when_nothing_was_ready_then_gives_all_blocks() -> None:
    layout = layout_of()
    feed = Feed(layout)
    feed.finish(None)
    assert taken(feed, trained(layout)) == [(block.index, None) for block in trained(layout)]


def test_ready_when_a_tensor_is_static_then_nothing_is_given() -> None:
    layout = layout_of()
    feed = Feed(layout)
    feed.ready(4)
    assert feed._waiting == [[]]


def test_take_when_it_has_to_wait_then_goes_on_with_the_next_block() -> None:
    layout = layout_of()
    feed = Feed(layout)
    taker = Thread(lambda: taken(feed, trained(layout)))
    for tensor in (3, 2, 1, 0):
        feed.ready(tensor)
    feed.finish(None)
    assert len(taker.result()) == len(trained(layout))


def test_abort_when_somebody_waits_then_the_wait_ends() -> None:
    layout = layout_of()
    feed = Feed(layout)
    feed.ready(2)
    taker = Thread(lambda: taken(feed, trained(layout)))
    feed.abort()
    with pytest.raises(Aborted):
        taker.result()
    with pytest.raises(Aborted):
        taken(feed, trained(layout))
