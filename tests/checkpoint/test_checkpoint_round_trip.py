"""What was stored on S shards is what S' shards and the exported file get, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers_checkpoint import (
    ASYNC,
    block_part,
    check_restored,
    clear_memory,
    cut_of,
    memory_url,
    numbers,
    parts,
    small_spec,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.export import converted
from psd.contract.errors import SpecMismatch
from psd.contract.jobspec import DTYPES, GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout

SHARD_COUNTS = st.sampled_from([1, 2, 3, 5])


@st.composite
def specs(draw):
    """Any dtypes and groups; sizes from none to a few blocks."""
    groups = draw(
        st.lists(
            st.sampled_from([GroupSpec("sgd", ("momentum",)), GroupSpec("sgd"), GroupSpec("static")]), min_size=1, max_size=3
        )
    )
    shapes = st.one_of(
        st.just(()),
        st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
        st.integers(8_000, 60_000).map(lambda n: (n,)),
        st.sampled_from([(300_000,), (513, 1027)]),
    )
    tensors = draw(st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES)), st.integers(0, len(groups) - 1)), max_size=6))
    return JobSpec(
        world_size=draw(st.integers(1, 5)),
        tensors=tuple(TensorSpec(f"layer.{i}", *rest) for i, rest in enumerate(tensors)),
        groups=tuple(groups),
    )


@settings(deadline=None, max_examples=40)
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

    with pytest.raises(SpecMismatch, match=r"tensor 5: .*head\.gain.*\(3,\).*\(4,\)"):
        list(directory.read_blocks(directory.load(cut.name), Layout(other, 2), 0))


# -- export ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(spec=specs(), stored_on=SHARD_COUNTS)
def test_export_when_torch_loads_it_then_tensors_have_their_names_shapes_dtypes_and_values(tmp_path_factory, spec, stored_on):
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(spec, stored_on)
    store(directory, cut)
    path = tmp_path_factory.mktemp("export") / "model.safetensors"

    directory.export(directory.load(cut.name), str(path))

    found = safetensors.torch.load_file(path)
    assert set(found) == {tensor.name for tensor in spec.tensors}
    for tensor in spec.tensors:
        assert found[tensor.name].shape == tensor.shape
        assert found[tensor.name].dtype == getattr(torch, tensor.dtype)
    for index, space in enumerate(cut.layout.spaces):
        values = torch.from_numpy(numbers(space, index, 0).copy())
        for tensor_index, start in zip(space.tensors, space.starts, strict=True):
            tensor = spec.tensors[tensor_index]
            expected = values[start : start + tensor.size].to(getattr(torch, tensor.dtype))
            assert torch.equal(found[tensor.name].flatten(), expected)
    clear_memory()


def test_export_when_a_model_loads_it_then_load_state_dict_is_content(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3).to(torch.bfloat16))
    tensors = tuple(
        TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()
    )
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    cut = cut_of(JobSpec(1, tensors), 2)
    store(directory, cut)
    seen = []

    directory.export(directory.load(cut.name), str(tmp_path / "model.safetensors"), lambda *at: seen.append(at))

    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(model[0].weight.detach().numpy().ravel(), numbers(cut.layout.spaces[0], 0, 0)[:35])
    size = (tmp_path / "model.safetensors").stat().st_size
    assert seen[-1] == (size, size)


def test_converted_when_values_are_extreme_then_rounds_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    special = np.array([0, -0.0, np.inf, -np.inf, 3.4e38, 65519, 65520, 1e-45, 1 + 2**-8, 1 + 3 * 2**-8, np.nan], np.float32)
    values = np.concatenate([bits.view(np.float32), special])
    numbers_only = values[~np.isnan(values)]

    for dtype in ("float16", "bfloat16"):
        expected = torch.from_numpy(numbers_only).to(getattr(torch, dtype)).view(torch.int16).numpy()
        np.testing.assert_array_equal(converted(numbers_only, dtype).view(np.int16), expected)
        nans = torch.from_numpy(converted(values[np.isnan(values)], dtype).view(np.int16)).view(getattr(torch, dtype))
        assert torch.isnan(nans).all()
