"""The checkpoint that a world's job goes on from, and where worlds keep their files. Must not know what happens in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from setting import Setting

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.layout import Layout


def write_checkpoint(setting: Setting, directory: Path) -> str:
    """Store a job in which nothing has happened yet; where."""
    checkpoints, layout = CheckpointDirectory(str(directory)), Layout(setting.spec, setting.shards)
    cut = Cut("a1", 0, 0, "run", 5.0, layout)
    nothing = np.zeros(len(setting.programs), np.uint64)
    for shard in range(setting.shards):
        parts = [
            BlockPart(
                space=block.space,
                offset=block.offset,
                length=block.length,
                version=0,
                parameter=np.zeros(block.length, block.dtype),
                slots={},
                steps=np.zeros(len(block.segment_ends), np.uint64),
                sessions=nothing,
                clocks=nothing,
            )
            for block in layout.blocks_of(shard)
        ]
        checkpoints.write_part(cut, shard, parts, worker_clocks={}, client_states={})
    assert checkpoints.complete(cut)
    return str(directory)


def memory_directory() -> str | None:
    """A directory in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
