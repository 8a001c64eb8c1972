"""Helpers of the checkpoint tests: jobs with known numbers, stored whole, and the files of a directory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
from hypothesis import strategies as st

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.consistency import Consistency
from psd.contract.jobspec import DTYPES, GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Block, Layout, Space
from psd.contract.rules import rule_info

CREATED_AT = 1_700_000_000.5

_counter = itertools.count()


def small_spec(world_size: int = 2, **fields) -> JobSpec:
    """Two groups, four dtypes, a scalar and an empty tensor; every space is smaller than a block."""
    return JobSpec(
        world_size=world_size,
        tensors=(
            TensorSpec("embedding.weight", (301, 33)),
            TensorSpec("scale", ()),
            TensorSpec("nothing", (0, 7)),
            TensorSpec("head.weight", (5, 7), "float64"),
            TensorSpec("head.bias", (7,), "bfloat16", group=1),
            TensorSpec("head.gain", (3,), "float16", group=1),
        ),
        groups=(GroupSpec("sgd", ("momentum",)), GroupSpec("sgd")),
        **fields,
    )


def cut_of(spec: JobSpec, shard_count: int, step: int = 7, timeline: int = 0, cut_id: str = "a1") -> Cut:
    return Cut(cut_id, step, timeline, "run-1", CREATED_AT, Layout(spec, shard_count))


def numbers(space: Space, index: int, kind: int) -> np.ndarray:
    """All of a space's parameters (kind 0) or of its slot `kind - 1`, the same however it is cut."""
    return _numbers(space.size, space.dtype, 0.6180339887 + index + 0.1 * kind)


@functools.lru_cache(16)
def _numbers(size: int, dtype: np.dtype, factor: float) -> np.ndarray:
    # Exactly rounded operations only, so that the golden checksums hold everywhere and forever.
    values = (np.arange(1, size + 1) * factor % 1.0 - 0.5).astype(dtype)
    values.flags.writeable = False
    return values


def steps_of(cut: Cut, block: Block) -> np.ndarray:
    """Differs by tensor, not by piece."""
    return (cut.step * 1000 + block.segment_tensors).astype(np.uint64)


def block_part(cut: Cut, block: Block) -> BlockPart:
    spec = cut.spec
    space = cut.layout.spaces[block.space]
    run = slice(block.offset, block.offset + block.length)
    group = spec.groups[block.group]
    return BlockPart(
        space=block.space,
        offset=block.offset,
        length=block.length,
        version=cut.step if block.trained else 0,
        parameter=numbers(space, block.space, 0)[run],
        slots={
            name: numbers(space, block.space, 1 + i)[run] for i, name in enumerate(rule_info(group.rule).slots(group.flags))
        },
        steps=steps_of(cut, block),
        sessions=np.arange(spec.world_size, dtype=np.uint64) + 10 * block.index,
        clocks=np.full(spec.world_size, cut.step, np.uint64),
    )


def parts(cut: Cut, shard_index: int) -> Iterator[BlockPart]:
    return (block_part(cut, block) for block in cut.layout.blocks_of(shard_index))


def store(directory: CheckpointDirectory, cut: Cut) -> str:
    """Store all of a cut; its name."""
    for index in range(cut.shard_count):
        directory.write_part(
            cut,
            index,
            parts(cut, index),
            worker_clocks=dict.fromkeys(range(cut.spec.world_size), cut.step + index),
            client_states={0: b"\0position 7"} if index == 0 else {},
        )
    assert directory.complete(cut)
    return cut.name


def check_restored(directory: CheckpointDirectory, cut: Cut, layout: Layout) -> None:
    """Restore the cut to another layout and compare every number."""
    manifest = directory.load(cut.name)
    seen: list[int] = []
    for shard_index in range(layout.shard_count):
        for restored in directory.read_blocks(manifest, layout, shard_index):
            block = restored.block
            expected = block_part(Cut(cut.cut_id, cut.step, 0, "", 0.0, layout), block)
            seen.append(block.index)
            assert restored.version == expected.version
            np.testing.assert_array_equal(restored.parameter, expected.parameter)
            assert restored.parameter.dtype == block.dtype
            assert list(restored.slots) == list(expected.slots)
            for name, slot in restored.slots.items():
                np.testing.assert_array_equal(slot, expected.slots[name])
            np.testing.assert_array_equal(restored.steps, expected.steps)
            twin = [b for b in cut.layout.blocks if (b.space, b.offset, b.length) == (block.space, block.offset, block.length)]
            assert (restored.sessions is not None) == bool(twin)
            if twin:
                stored = block_part(cut, twin[0])
                np.testing.assert_array_equal(restored.sessions, stored.sessions)
                np.testing.assert_array_equal(restored.clocks, stored.clocks)
    assert sorted(seen) == list(range(len(layout.blocks)))


def valid_names(directory: CheckpointDirectory) -> list[str]:
    return [info.name for info in directory.checkpoints() if info.state.value == "valid"]


def memory_url() -> str:
    """A fresh place in fsspec's memory file system."""
    return f"memory://checkpoints-{next(_counter)}"


def clear_memory() -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def files_of(root: Path) -> Sequence[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


ASYNC = Consistency("async")

SHARD_COUNTS = st.sampled_from([1, 2, 3, 5])


@st.composite
def specs(draw):
    """Any dtypes and groups; sizes from none to a few blocks."""
    groups = draw(
        st.lists(
            st.sampled_from(
                [GroupSpec("sgd"), GroupSpec("adam", ("amsgrad",)), GroupSpec("adagrad", (), (0.5,)), GroupSpec("static")]
            ),
            min_size=1,
            max_size=3,
        )
    )
    shapes = st.one_of(
        st.just(()),
        st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
        st.integers(8_000, 60_000).map(lambda n: (n,)),
        st.sampled_from([(300_000,), (513, 1027)]),
    )
    tensors = draw(
        st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES)), st.integers(0, len(groups) - 1)), min_size=1, max_size=6)
    )
    return JobSpec(
        world_size=draw(st.integers(1, 5)),
        tensors=tuple(TensorSpec(f"layer.{i}", *rest) for i, rest in enumerate(tensors)),
        groups=tuple(groups),
    )
