"""Values stored on S shards reach S' shards, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers_checkpoint import (
    ASYNC,
    SHARD_COUNTS,
    block_part,
    check_restored,
    clear_memory,
    cut_of,
    memory_url,
    parts,
    small_spec,
    specs,
    store,
)
from hypothesis import given, settings

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import SpecMismatch
from psd.contract.jobspec import JobSpec, TensorSpec
from psd.contract.layout import Layout


@settings(deadline=None, max_examples=15)
@given(spec=specs(), stored_on=SHARD_COUNTS, restored_on=SHARD_COUNTS)
def test_read_blocks_when_the_shard_count_differs_then_every_number_is_as_it_was(spec, stored_on, restored_on):
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(spec, stored_on)

    store(directory, cut)

    check_restored(directory, cut, Layout(spec, restored_on))
    assert directory.verify(cut.name) == []
    clear_memory()


@pytest.mark.parametrize("stored_on", [1, 2, 3, 5])
@pytest.mark.parametrize("restored_on", [1, 2, 3, 5])
def test_read_blocks_when_files_are_local_then_every_number_is_as_it_was(tmp_path, stored_on, restored_on):
    directory = CheckpointDirectory(str(tmp_path / "deep" / "down"))
    cut = cut_of(small_spec(), stored_on)

    store(directory, cut)

    check_restored(directory, cut, Layout(cut.spec, restored_on))


def test_newest_when_stored_then_it_knows_all_that_was_said(tmp_path):
    directory = CheckpointDirectory(f"file://{tmp_path}")
    cut = cut_of(small_spec(world_size=3), 2, step=41, timeline=2)

    store(directory, cut)

    manifest = directory.newest()
    assert manifest is not None
    assert manifest.spec == cut.spec
    assert (manifest.run_id, manifest.timeline, manifest.step, manifest.shard_count) == ("run-1", 2, 41, 2)
    assert manifest.worker_clocks == {0: 41, 1: 41, 2: 41}  # the smaller of the two shards'
    assert manifest.client_states == {0: b"\0position 7"}
    assert manifest.created_at == cut.created_at
    assert manifest.nbytes == sum(path.stat().st_size for path in (tmp_path / cut.name).iterdir())


def test_write_part_when_the_next_block_is_asked_for_then_the_one_before_may_be_given_back():
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(small_spec(), 1)

    def lent():
        for block in cut.layout.blocks:
            part = block_part(cut, block)
            page = part._replace(parameter=part.parameter.copy(), steps=part.steps.copy())
            yield page
            page.parameter.fill(np.nan)
            page.steps.fill(0)

    directory.write_part(cut, 0, lent())
    assert directory.complete(cut)

    check_restored(directory, cut, Layout(cut.spec, 1))


def test_read_blocks_when_pieces_of_a_tensor_saw_different_numbers_of_updates_then_the_largest_holds():
    """Under async each block counts alone; after a re-cut a segment may be made of pieces that differ."""
    spec = JobSpec(world_size=1, tensors=(TensorSpec("a", (20_000,)), TensorSpec("b", (20_000,))), consistency=ASYNC)
    cut = cut_of(spec, 5)
    directory = CheckpointDirectory(memory_url())
    for shard_index in range(5):
        uneven = (
            part._replace(version=10 + shard_index, steps=part.steps * 0 + np.uint64(shard_index))
            for part in parts(cut, shard_index)
        )
        directory.write_part(cut, shard_index, uneven)
    directory.complete(cut)

    (restored,) = directory.read_blocks(directory.load(cut.name), Layout(spec, 1), 0)

    assert [b.segment_tensors.tolist() for b in cut.layout.blocks] == [[0], [0], [0, 1], [1], [1]]
    assert restored.steps.tolist() == [2, 4]
    assert restored.version == 14
    assert restored.sessions is None


def test_read_blocks_when_the_world_size_differs_then_the_window_is_left_behind():
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(small_spec(world_size=2), 2)
    store(directory, cut)
    layout = Layout(dataclasses.replace(cut.spec, world_size=4, quorum=3), 2)

    restored = list(directory.read_blocks(directory.load(cut.name), layout, 0))

    assert restored
    assert all(block.sessions is None and block.clocks is None for block in restored)


def test_read_blocks_when_the_tensors_differ_then_the_first_difference_is_named():
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(small_spec(), 2)
    store(directory, cut)
    other = dataclasses.replace(cut.spec, tensors=(*cut.spec.tensors[:-1], TensorSpec("head.gain", (4,), "float16", 1)))

    with pytest.raises(SpecMismatch, match=r"^shape of parameter 'head.gain': \(3,\) in checkpoint .*, \(4,\) in this worker"):
        list(directory.read_blocks(directory.load(cut.name), Layout(other, 2), 0))
