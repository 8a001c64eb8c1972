"""The layout as a message, for programs that do not compute it: the blocks of one shard, and the names of rules' numbers.

psd's own clients compute the layout themselves (layout.py). Must not know the programs that ask.
"""

from __future__ import annotations

import numpy as np

from psd.contract.jobspec import BUFFER_DTYPES
from psd.contract.layout import Block, Layout
from psd.v1 import job_pb2


def layout_message(layout: Layout, shard: int) -> job_pb2.ShardLayout:
    """Describe one shard's part of a job."""
    spec = layout.spec
    return job_pb2.ShardLayout(
        blocks=[_block(layout, block) for block in layout.blocks_of(shard)],
        tables_block=layout.tables_block(shard),
        groups=[
            job_pb2.RuleNames(
                flags=sorted(group.info.flags),
                constants=group.info.constants,
                scalars=group.info.scalars,
                slots=group.info.slots(group.flags),
            )
            for group in spec.groups
        ],
    )


def _block(layout: Layout, block: Block) -> job_pb2.Block:
    tensors = layout.spec.tensors
    first = tensors[int(block.segment_tensors[0])]
    space = layout.spaces[block.space]
    begun = int(space.starts[space.starts.searchsorted(block.offset, side="right") - 1])  # the first segment's tensor
    return job_pb2.Block(
        index=block.index,
        group=block.group,
        dtype=BUFFER_DTYPES[first.master_dtype],
        gradient_dtype=BUFFER_DTYPES[first.dtype],
        is_trained=block.trained,
        tensors=block.segment_tensors.tolist(),
        starts=[block.offset - begun, *[0] * (len(block.segment_tensors) - 1)],
        lengths=np.diff(block.segment_ends, prepend=0).tolist(),
        codec=block.codec,
        pull_codec=block.pull_codec,
    )
