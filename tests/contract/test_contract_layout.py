"""The layout tiles the parameters exactly, on any number of shards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import BLOCK_BYTES_MAX, BLOCK_ELEMENTS_MIN, BLOCK_ELEMENTS_STEP, Layout

GROUPS = (GroupSpec(), GroupSpec("sgd", ("momentum",)), GroupSpec("static"))


@st.composite
def specs(draw):
    """Jobs of a few tensors: scalars, empty ones, small ones, some larger than a block."""
    sizes = st.one_of(st.just(()), st.just((0, 3)), st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 700_000)))
    tensors = draw(
        st.lists(
            st.tuples(sizes, st.sampled_from(("float32", "float64", "bfloat16")), st.integers(0, 2)), min_size=1, max_size=8
        )
    )
    return JobSpec(1, tuple(TensorSpec(f"t{i}", *t) for i, t in enumerate(tensors)), GROUPS)


@given(specs(), st.integers(1, 7))
def test_segments_tile_every_tensor_once(spec, shards):
    """Every element of every tensor is in exactly one segment of one block of one shard; blocks are within their limit."""
    layout = Layout(spec, shards)

    covered = dict.fromkeys(range(len(spec.tensors)), 0)
    for block in layout.blocks:
        assert 0 < block.nbytes <= BLOCK_BYTES_MAX
        lengths = np.diff(block.segment_ends, prepend=np.uint32(0))
        assert lengths.min() > 0
        assert lengths.sum() == block.length
        for tensor, length in zip(block.segment_tensors.tolist(), lengths.tolist(), strict=True):
            covered[tensor] += length
            assert spec.tensors[tensor].group == block.group
            assert spec.tensors[tensor].master_dtype == block.dtype.name
            assert block.trained is not spec.groups[block.group].is_static
    assert covered == {i: t.size for i, t in enumerate(spec.tensors)}
    owners = [block.index for shard in range(shards) for block in layout.blocks_of(shard)]
    assert sorted(owners) == list(range(len(layout.blocks)))
    assert all(layout.shard_of(b.index) == shard for shard in range(shards) for b in layout.blocks_of(shard))


@given(specs(), st.integers(1, 7))
def test_elements_find_their_tensor(spec, shards):
    """The first and the last element of each segment belong to the segment's tensor."""
    layout = Layout(spec, shards)
    for block in layout.blocks:
        start = 0
        for tensor, end in zip(block.segment_tensors.tolist(), block.segment_ends.tolist(), strict=True):
            assert layout.tensor_at(block, start) == layout.tensor_at(block, end - 1) == spec.tensors[tensor].name
            start = end


@given(specs(), st.integers(1, 6))
def test_shards_of_a_large_space_are_balanced(spec, shards):
    """Where a space is large enough for a block on each shard, shards differ by no more than the rounding of block lengths."""
    layout = Layout(spec, shards)
    for space in layout.spaces:
        blocks = math.ceil(space.size * space.dtype.itemsize / BLOCK_BYTES_MAX)
        if space.size >= math.ceil(blocks / shards) * shards * BLOCK_ELEMENTS_MIN:
            loads = [sum(b.length for b in layout.blocks_of(s) if layout.spaces[b.space] is space) for s in range(shards)]
            assert max(loads) - min(loads) <= BLOCK_ELEMENTS_STEP * space.block_count


@pytest.mark.parametrize(
    ("megabytes", "shards", "blocks"),
    [(0.1, 1, 1), (1, 1, 2), (3, 1, 6), (8, 1, 8), (40, 1, 10), (6, 4, 3), (48, 8, 8)],
)
def test_a_shard_has_several_blocks_where_they_are_not_too_small(megabytes, shards, blocks):
    """Blocks of half a MiB to 4 MiB, and eight of them if there is enough."""
    spec = JobSpec(1, (TensorSpec("w", (int(megabytes * (1 << 18)),)),), (GroupSpec("sgd"),))

    assert {len(Layout(spec, shards).blocks_of(shard)) for shard in range(shards)} == {blocks}


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "group", "flags", "shards", "order"])
def test_digests_differ_where_layouts_do(change):
    """Anything that moves a parameter, or changes what a block means, changes the digest."""
    a, b = TensorSpec("a", (5,)), TensorSpec("b", (6,), "float32", 1)
    base = Layout(JobSpec(1, (a, b), GROUPS), 2)
    other = {
        "name": JobSpec(1, (TensorSpec("c", (5,)), b), GROUPS),
        "shape": JobSpec(1, (TensorSpec("a", (1, 5)), b), GROUPS),
        "dtype": JobSpec(1, (TensorSpec("a", (5,), "bfloat16"), b), GROUPS),
        "group": JobSpec(1, (TensorSpec("a", (5,), "float32", 1), b), GROUPS),
        "flags": JobSpec(1, (a, b), (GROUPS[0], GroupSpec("sgd", ("momentum", "nesterov")), GROUPS[2])),
        "shards": JobSpec(1, (a, b), GROUPS),
        "order": JobSpec(1, (b, a), GROUPS),
    }[change]

    assert Layout(other, 3 if change == "shards" else 2).digest != base.digest
    assert Layout(JobSpec(1, (a, b), GROUPS), 2).digest == base.digest
