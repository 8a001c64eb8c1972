"""Flat buffers: the blocks of a buffer and the views of its tensors are the same memory, cut in two ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd_client.lanes.flat import FlatBuffers

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
tensors = st.lists(st.tuples(shapes, dtypes, st.integers(0, 1)), min_size=1, max_size=8)


def layout_of(drawn: list[tuple[tuple[int, ...], str, int]], shard_count: int) -> Layout:
    specs = tuple(TensorSpec(f"t{i}", shape, dtype, group) for i, (shape, dtype, group) in enumerate(drawn))
    return Layout(JobSpec(1, specs, (GroupSpec(), GroupSpec("static"))), shard_count)


@given(drawn=tensors, shard_count=st.integers(1, 5))
def test_blocks_when_copied_one_by_one_then_carry_every_tensor(
    drawn: list[tuple[tuple[int, ...], str, int]], shard_count: int
) -> None:
    """Cutting into blocks and joining them again is the identity, for any shapes, dtypes and shard counts."""
    layout = layout_of(drawn, shard_count)
    source, target = FlatBuffers(layout), FlatBuffers(layout)
    for index, view in enumerate(source.views):
        view[...] = np.arange(view.size).reshape(view.shape) + 1000 * index + 1

    for shard in range(shard_count):
        for block in layout.blocks_of(shard):
            target.block(block.index)[...] = source.block(block.index)

    for spec, expected, found in zip(layout.spec.tensors, source.views, target.views, strict=True):
        assert found.shape == spec.shape
        assert found.dtype == spec.master_dtype
        np.testing.assert_array_equal(found, expected)


@given(drawn=tensors, shard_count=st.integers(1, 5))
def test_pieces_when_copied_one_by_one_then_carry_every_tensor(
    drawn: list[tuple[tuple[int, ...], str, int]], shard_count: int
) -> None:
    """The pieces of all blocks are all elements of all tensors, each once, and those of the block."""
    buffers = FlatBuffers(layout_of(drawn, shard_count))
    for index, view in enumerate(buffers.views):
        view[...] = np.arange(view.size).reshape(view.shape) + 1000 * index + 1
    found = [np.zeros(view.size, view.dtype) for view in buffers.views]

    for block in buffers.layout.blocks:
        pieces = list(buffers.pieces(block.index))
        for tensor, elements in pieces:
            assert not found[tensor][elements].any()
            found[tensor][elements] = buffers.views[tensor].ravel()[elements]
        inside = np.concatenate([buffers.views[tensor].ravel()[elements] for tensor, elements in pieces])
        np.testing.assert_array_equal(inside, buffers.block(block.index))

    for expected, tensor in zip(buffers.views, found, strict=True):
        np.testing.assert_array_equal(tensor, expected.ravel())


@given(drawn=tensors, shard_count=st.integers(1, 5))
def test_spaces_when_allocated_then_are_aligned_and_zero(
    drawn: list[tuple[tuple[int, ...], str, int]], shard_count: int
) -> None:
    """Every space begins on a cache line, and nothing uninitialised can travel."""
    buffers = FlatBuffers(layout_of(drawn, shard_count))

    assert all(space.ctypes.data % 64 == 0 for space in buffers.spaces)
    assert not any(space.any() for space in buffers.spaces)


def test_blocks_when_a_tensor_is_larger_than_a_block_then_span_it() -> None:
    """A tensor of several MiB lies in several blocks, on all shards."""
    buffers = FlatBuffers(layout_of([((700_000,), "float32", 0)], 2))

    buffers.views[0][:] = np.arange(700_000)

    lengths = [buffers.block(block.index).size for block in buffers.layout.blocks]
    assert sum(lengths) == 700_000
    assert len(lengths) == 6
    assert buffers.block(1)[0] == lengths[0]


def test_first_nonfinite_when_a_tensor_holds_nan_then_names_it() -> None:
    """The name is that of the tensor which holds the number, also behind empty tensors and in the second space."""
    buffers = FlatBuffers(layout_of([((3,), "float32", 0), ((0,), "float32", 0), ((2,), "float64", 0), ((), "float64", 0)], 2))
    assert buffers.first_nonfinite() is None

    buffers.views[3][...] = np.inf
    assert buffers.first_nonfinite() == "t3"

    buffers.views[0][2] = np.nan
    assert buffers.first_nonfinite() == "t0"


@pytest.mark.parametrize("element", [0, 1_500_000, 2_999_999])
def test_first_nonfinite_when_the_space_is_large_then_finds_it_in_either_half(element: int) -> None:
    spec = JobSpec(1, (TensorSpec("large", (3_000_000,), "float32", 0),), (GroupSpec("sgd"),))
    buffers = FlatBuffers(Layout(spec, 1))
    assert buffers.first_nonfinite() is None

    buffers.spaces[0][element] = np.inf

    assert buffers._first_nonfinite(buffers.spaces[0]) == element
    assert buffers.first_nonfinite() == "large"
