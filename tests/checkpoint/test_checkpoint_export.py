"""The exported file is what torch takes: names, shapes, dtypes and values of the workers' own copies."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
from helpers_checkpoint import SHARD_COUNTS, clear_memory, cut_of, memory_url, numbers, specs, store  # noqa: E402
from hypothesis import given, settings  # noqa: E402

from psd.checkpoint import CheckpointDirectory, open_parameters, parameter_blocks  # noqa: E402
from psd.checkpoint.export import converted  # noqa: E402
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec  # noqa: E402
from psd.contract.layout import Layout  # noqa: E402


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
    narrow, wide = (numbers(space, index, 0) for index, space in enumerate(cut.layout.spaces))
    np.testing.assert_array_equal(model[0].weight.detach().numpy().ravel(), wide[:35])
    torch.testing.assert_close(model[1].weight.detach().float().ravel(), torch.tensor(narrow[:15]), rtol=2**-8, atol=0)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert seen[-1] == (size, size)


class Tied(torch.nn.Module):
    """A parameter and a module, each under two names, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.layer = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self.last, self.same_layer = torch.nn.Linear(4, 4), self.layer
        self.last.weight = self.first.weight


@pytest.mark.parametrize("prefers_later_names", [False, True])
def test_export_when_tensors_have_several_names_then_they_are_there_once_and_load_model_takes_them(
    tmp_path, prefers_later_names
):
    """Also by whichever of its names a worker has declared it. The other names are listed, and a job finds it by each."""
    names: dict[int, list[str]] = {}
    model = Tied()
    tensors = dict(model.state_dict(keep_vars=True))
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    ordered = [found[::-1] if prefers_later_names else found for found in names.values()]
    declared = tuple(
        TensorSpec(first, tuple(tensors[first].shape), str(tensors[first].dtype).removeprefix("torch."), group, tuple(others))
        for first, *others in ordered
        for group in [int(("norm" in first and "running" in first) or tensors[first].dtype == torch.int64)]
    )
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    cut = cut_of(JobSpec(1, declared, (GroupSpec(), GroupSpec("buffers"))), 2)
    store(directory, cut)
    path = str(tmp_path / "model.safetensors")

    directory.export(directory.load(cut.name), path)

    found = safetensors.torch.load_file(path)
    assert set(found) == {first for first, *_ in ordered}
    assert safetensors.torch.load_model(model, path) == (set(), [])
    for name, value in model.state_dict().items():
        (first,) = (group[0] for group in ordered if name in group)
        torch.testing.assert_close(value, found[first], rtol=0, atol=0)
    with safetensors.safe_open(path, "pt") as opened:
        listed = {name: first for first, *others in ordered for name in others}
        assert opened.metadata() == {**listed, "format": "pt", "psd_checkpoint": cut.name}
    untied = JobSpec(1, tuple(TensorSpec(name, tuple(value.shape)) for name, value in tensors.items() if value.dim()))
    (block,) = (values for _, values in parameter_blocks(open_parameters(path), Layout(untied, 1), 0))
    expected = torch.cat([value.flatten() for value in model.state_dict().values() if value.dim()])
    torch.testing.assert_close(torch.from_numpy(block), expected, rtol=0, atol=0)


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
