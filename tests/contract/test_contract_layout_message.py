"""What a shard tells of the layout is enough to find every element, without the function that has made it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psd.contract.consistency import Consistency
from psd.contract.jobspec import BUFFER_DTYPES, GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.layout_message import layout_message
from psd.contract.tables import SparseTableSpec
from psd.v1 import job_pb2

GROUPS = (GroupSpec(), GroupSpec("adam", ("amsgrad",)), GroupSpec("static"), GroupSpec("adagrad", constants=(0.5,)))


@st.composite
def specs(draw: Any) -> JobSpec:
    """Jobs of a few tensors, empty ones and ones larger than a block among them."""
    shapes = st.one_of(st.just(()), st.just((0, 3)), st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 700), st.just(900)))
    dtypes = st.sampled_from(("float32", "float64", "bfloat16"))
    tensors = draw(st.lists(st.tuples(shapes, dtypes, st.integers(0, 2)), min_size=1, max_size=6))
    tables = (SparseTableSpec("t", 2, 3),) if draw(st.booleans()) else ()
    return JobSpec(1, tuple(TensorSpec(f"t{i}", *t) for i, t in enumerate(tensors)), GROUPS, tables=tables)


@given(specs(), st.integers(1, 5))
def test_the_blocks_of_all_shards_have_every_element_once(spec: JobSpec, shards: int) -> None:
    """By their segments alone, with the dtypes in which they travel; and the tables' blocks come behind them."""
    layout = Layout(spec, shards)
    told = [layout_message(layout, shard) for shard in range(shards)]

    seen = [np.zeros(tensor.size, np.uint8) for tensor in spec.tensors]
    for shard in told:
        for block in shard.blocks:
            plan = layout.blocks[block.index]
            assert len(block.tensors) == len(block.starts) == len(block.lengths)
            assert sum(block.lengths) == plan.length
            assert np.cumsum(block.lengths).tolist() == plan.segment_ends.tolist()
            assert (block.group, block.is_trained) == (plan.group, plan.trained)
            for tensor, start, length in zip(block.tensors, block.starts, block.lengths, strict=True):
                assert length > 0
                seen[tensor][start : start + length] += 1
                assert start + length <= spec.tensors[tensor].size
                assert BUFFER_DTYPES[spec.tensors[tensor].dtype] == block.gradient_dtype
                assert BUFFER_DTYPES[spec.tensors[tensor].master_dtype] == block.dtype
                assert spec.tensors[tensor].group == block.group
    assert all((elements == 1).all() for elements in seen)
    assert [shard.tables_block for shard in told if shard.HasField("tables_block")] == (
        [len(layout.blocks) + shard for shard in range(shards)] if spec.tables else []
    )


def test_rules_numbers_have_their_names() -> None:
    """In the order in which they travel; slots are those that the flags ask for."""
    groups = (*GROUPS[1:], GroupSpec("my.module:Rule", (), (0.0, 1.0), ("a", "b"), ("lr", "x")), GroupSpec(staleness="lr"))
    tensors = tuple(TensorSpec(f"t{i}", (3,), group=i) for i in range(len(groups)))

    spec = JobSpec(1, tensors, groups, Consistency.parse("async"))
    told = layout_message(Layout(spec, 1), 0).groups

    assert told[0].scalars[:1] == ["lr"]
    assert "amsgrad" in told[0].flags
    assert list(told[0].slots) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert told[1] == job_pb2.RuleNames()
    assert list(told[2].constants) == ["initial_accumulator_value"]
    assert told[3] == job_pb2.RuleNames(constants=["a", "b"], scalars=["lr", "x"], slots=["a", "b"])
    assert list(told[4].scalars) == ["lr", "momentum", "dampening", "weight_decay"]
