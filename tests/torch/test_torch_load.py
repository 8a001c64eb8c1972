"""Parameters that are set in the midst of a job: all workers have them, once, and training goes on as in one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, assert_close, backward, batch, part, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import BarrierTimeout, InvalidRequest, InvalidTensor, NonFiniteGradient  # noqa: E402
from psd_client.worker.exchange.loading import ParameterLoad  # noqa: E402

LOADED_AT = STEPS // 2


def other_values() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 0.25) for name, value in small_model().state_dict().items()}


def trained_alone() -> list[torch.Tensor]:
    """The slots stay: the momentum is that of before."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if step == LOADED_AT:
            model.load_state_dict(other_values())
        backward(model, *batch(step))
        optimizer.step()
    return values(model)


def trained_part(ps, **options) -> list[torch.Tensor]:
    model = small_model()
    optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.05, momentum=0.9), ps=ps, **options)
    for step in range(STEPS):
        if step == LOADED_AT:
            optimizer.load_parameters(other_values())
            assert_close(values(model), list(other_values().values()), 0)
        x, y = part(step, ps.rank, ps.world_size)
        optimizer.batch_size = len(x)
        backward(model, x, y)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("options", [{}, {"aggregation": "exact"}, {"overlap": True}], ids=str)
def test_load_parameters_then_training_goes_on_as_in_one_process(run_workers, options):
    first, second = run_workers(2, 2, lambda ps: trained_part(ps, **options))
    assert_close(first, second, 0)
    assert_close(first, trained_alone())


def test_load_parameters_without_rounds_then_all_workers_begin_again_from_there(run_workers):
    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.05), ps=ps, consistency="async")
        for step in range(3 + ps.rank):
            backward(model, *batch(step))
            optimizer.step()
        optimizer.load_parameters(other_values())
        found = values(model)
        backward(model, *batch(9))
        optimizer.step()
        return found

    for found in run_workers(3, 2, worker):
        assert_close(found, list(other_values().values()), 0)


def test_load_parameters_when_the_worker_that_sets_them_dies_in_the_middle_then_another_one_does(cluster, monkeypatch):
    set_at = ParameterLoad._set_at

    def dies_at_the_second_shard(self, lane, call, request):
        if self._rank == 0 and lane.shard == 1:
            raise RuntimeError("dies")
        set_at(self, lane, call, request)

    monkeypatch.setattr(ParameterLoad, "_set_at", dies_at_the_second_shard)
    servers = cluster(2, lease_s=60.0, on_worker_failure="continue").servers

    def worker(rank):
        model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 40))
        state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
        with psd_client.connect(servers, rank, 3, wait_timeout=120) as ps:
            psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps).load_parameters(state)
        return model.state_dict(), state

    with ThreadPoolExecutor(3) as pool:
        dead, *others = [pool.submit(worker, rank) for rank in range(3)]
        assert str(dead.exception()) == "dies"
        for other in others:
            found, expected = other.result()
            assert_close(list(found.values()), list(expected.values()), 0)


def test_load_parameters_of_other_values_than_another_worker_then_nothing_is_set(run_workers):
    both_were_told = threading.Barrier(2)

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        before = values(model)
        state = {name: value + ps.rank for name, value in other_values().items()}
        ps.barrier("begin")  # the first one waits for the other one no longer than its call may take on a busy machine
        with pytest.raises((InvalidRequest, BarrierTimeout)) as error:
            optimizer.load_parameters(state)
        both_were_told.wait(120)
        optimizer.pull()
        assert_close(values(model), before, 0)
        return str(error.value)

    assert any("was given other values" in text for text in run_workers(2, 1, worker, wait_timeout=5))


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda state: state.pop("0.bias"), InvalidRequest, "'0.bias' is missing"),
        (lambda state: state.update(extra=torch.ones(1)), InvalidRequest, "'extra' is not in the model"),
        (lambda state: state.update({"2.bias": torch.ones(4)}), InvalidTensor, r"'2.bias' has the shape \(4,\).*\(3,\)"),
        (lambda state: state["2.bias"].fill_(torch.nan), NonFiniteGradient, "'2.bias' holds NaN"),
    ],
    ids=["missing", "unexpected", "shape", "NaN"],
)
def test_load_parameters_of_what_does_not_fit_then_is_refused_and_nothing_is_set(run_workers, spoil, error, text):
    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        before, state = values(model), other_values()
        spoil(state)
        with pytest.raises(error, match=text):
            optimizer.load_parameters(state)
        with pytest.raises(InvalidRequest, match=r"state_dict: expected tensors by name, .* got 'model\.pt'"):
            optimizer.load_parameters("model.pt")
        optimizer.pull()
        assert_close(values(model), before, 0)

    run_workers(1, 1, worker)
