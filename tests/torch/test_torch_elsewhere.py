"""Models on a device that is not the CPU: the same numbers as on the CPU, and `.grad` where torch's users expect it.

Not the same bits: torch's own depend on the device, and on the CPU on the processor and on where a tensor begins in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elsewhere import device  # noqa: E402
from helpers_torch import assert_close, backward, batch, part, scaled_backward, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient  # noqa: E402

HERE = torch.device("cpu")
STEPS = 4


@pytest.fixture(scope="module", name="there")
def _there() -> Iterator[torch.device]:
    with device() as found:
        yield found


def model_on(place: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model with what models on a GPU have: channels_last, BatchNorm, a tied weight, one frozen, one transposed."""
    layers = [nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator)
    model.to(place, dtype, memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    model[5].weight = model[4].weight
    model[4].bias.requires_grad_(False)
    return model


def differentiate(model: nn.Sequential, step: int, rank: int) -> None:
    x = torch.randn((6, 3, 2, 2), generator=torch.Generator().manual_seed(10 * step + rank))
    model(x.to(model[0].weight.device, model[0].weight.dtype)).float().square().mean().backward()


def train(ps: Any, place: torch.device, dtype: torch.dtype, **options: Any) -> list[Any]:
    model = model_on(place, dtype)
    rule = AdamW(model.parameters(), lr=0.01, eps=0.01)  # by so large an eps, the rounding of a gradient of 0 stays small
    optimizer = psd.distribute(model, rule, ps=ps, **options)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 2)
        differentiate(model, step, ps.rank)
        optimizer.step()
        optimizer.pull()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in tensors} == {place}
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {place}
    return [tensor.detach().to(HERE) for tensor in tensors]


@pytest.mark.parametrize(
    ("options", "dtype", "relative"),
    [
        ({"buffers": "mean"}, torch.float32, 1e-5),
        ({"clip_norm": 0.01, "overlap": True}, torch.bfloat16, 0.02),
        ({"overlap": True}, torch.float16, 0.003),
        ({"consistency": "async", "overlap": "forward"}, torch.float32, 1e-5),
    ],
    ids=str,
)
def test_training_elsewhere_has_the_numbers_of_the_cpu(run_workers, there, options, dtype, relative):
    workers = 1 if "consistency" in options else 2
    here, away = (
        run_workers(workers, 2, lambda ps, place=place: train(ps, place, dtype, **options)) for place in (HERE, there)
    )
    for expected, actual in zip(here, away, strict=True):
        assert_close(actual, expected, relative)


def test_what_the_program_sets_or_spoils_elsewhere_is_noticed(run_workers, there):
    def worker(ps):
        model = model_on(there)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        differentiate(model, 0, 0)
        model[0].weight.grad.fill_(float("nan"))
        with pytest.raises(NonFiniteGradient, match=r"'0\.weight'"):
            optimizer.step()
        optimizer.zero_grad()
        differentiate(model, 0, 0)
        optimizer.step()
        optimizer.load_parameters(first)
        assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
        optimizer.load_parameters({name: tensor.to(HERE) for name, tensor in first.items()})
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        with pytest.raises(InvalidRequest, match=r"'0\.weight' was changed by the program"):
            optimizer.step()

    run_workers(1, 2, worker)


def test_a_scaler_elsewhere_skips_the_rounds_of_the_cpu(run_workers, there):
    def worker(ps, place):
        model, scaler, scales = small_model().to(place), torch.amp.GradScaler(place.type, 2.0**10, growth_interval=2), []
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, nan_policy="skip")
        for step in range(STEPS):
            x, y = (tensor.to(place) for tensor in part(step, ps.rank, 2))
            scaled_backward(scaler, model, x, y, is_bad=(step, ps.rank) in ((1, 0), (2, 1)))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [value.to(HERE) for value in values(model)]

    here, away = (run_workers(2, 2, lambda ps, place=place: worker(ps, place)) for place in (HERE, there))
    for (scales, tensors), (right_scales, right) in zip(away, here, strict=True):
        assert scales == right_scales
        assert_close(tensors, right)


class Rated(nn.Module):
    """Rows and bags of rows, weighted, by ids."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.rows = psd.Embedding("rows", dim=4, init=psd_client.Normal(0.1), padding_idx=3)
        self.bags = psd.EmbeddingBag("bags", dim=4, optimizer=psd_client.Adagrad(lr=0.1), mode="sum")
        self.top = nn.Linear(8, 1)
        nn.init.constant_(self.top.weight, 0.1)
        nn.init.zeros_(self.top.bias)
        self.to(place)

    def forward(self, ids: torch.Tensor, items: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.rows(ids), self.bags(items, None, weights)], 1))


@pytest.mark.parametrize("overlap", [False, True])
def test_embeddings_then_take_ids_and_weights_from_any_device(run_workers, there, overlap):
    def worker(ps, place, place_of_ids):
        model = Rated(place)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=overlap)
        generator, outputs = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):
            ids, items = (torch.randint(9, shape, generator=generator) for shape in ((6,), (6, 3)))
            given = [tensor.to(place_of_ids) for tensor in (ids, items, torch.rand((6, 3), generator=generator))]
            model.rows.prefetch(given[0])
            optimizer.zero_grad()
            output = model(*given)
            assert output.device == place
            output.square().mean().backward()
            optimizer.step()
            outputs.append(output.detach().to(HERE))
        return torch.cat(outputs)

    expected, *others = (
        run_workers(1, 2, lambda ps, places=places: worker(ps, *places))[0]
        for places in ((HERE, HERE), (there, there), (there, HERE), (HERE, there))
    )
    assert_close(others, [expected] * 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_is_moved_after_distribute_trains_there(run_workers, there, monkeypatch, overlap):
    """As by `model.cuda()`: the parameters stay the same objects, with their hooks, and the buffers do not."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    def train(model, optimizer, place):
        x, y = (tensor.to(place) for tensor in batch(0))
        backward(model, x, y)
        optimizer.step()
        return [tensor.detach().to(HERE) for tensor in (*model.parameters(), *model.buffers())]

    def worker(ps):
        model = with_statistics()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=overlap)
        model.to(there)
        for parameter in model.parameters():  # torch loses track of hooks in a swap, and not in a move to a GPU
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        return train(model, optimizer, there)

    def with_statistics():
        return nn.Sequential(*small_model(), nn.BatchNorm1d(3))

    model = with_statistics()
    assert_close(run_workers(1, 1, worker)[0], train(model, SGD(model.parameters(), lr=0.1), HERE))


@pytest.mark.parametrize("part_of", ["weight", "running_mean"])
def test_distribute_when_a_tensor_is_on_the_meta_device_then_refuses_by_name(part_of):
    model = nn.BatchNorm1d(3)
    if part_of == "weight":
        model.weight = nn.Parameter(model.weight.detach().to("meta"))
    else:
        model.running_mean = model.running_mean.to("meta")
    with pytest.raises(InvalidTensor, match=f"'{part_of}' is on the meta device"):
        psd.distribute(model, SGD(model.parameters(), lr=0.1))
