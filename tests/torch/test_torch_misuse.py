"""Programs that do by themselves what the shards do are told so, instead of training something else without a word."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import backward, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD, Adam  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402


@pytest.mark.parametrize("given_of", [lambda model: SGD(model.parameters(), lr=0.1), lambda model: Adam(model.parameters())])
def test_step_of_the_given_optimizer_then_is_refused_and_trains_nothing(run_workers, given_of):
    """Each worker would go on alone, with other weights than the others."""

    def worker(ps):
        model = small_model()
        given = given_of(model)
        result = psd.distribute(model, given, ps=ps)
        before = values(model)
        backward(model, *batch(0))
        with pytest.raises(InvalidRequest, match=r"optimizer = psd\.distribute"):
            given.step()
        assert all(map(torch.equal, before, values(model)))
        result.step()
        assert ps.clock == 1

    run_workers(1, 1, worker)


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.fill_(1.0)


def replace(model: nn.Module) -> None:
    model[0].weight.data = torch.ones(8, 6)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [fill, replace, load])
@pytest.mark.parametrize("overlap", [False, True])
def test_step_when_the_program_has_changed_parameters_then_is_refused(run_workers, change, overlap):
    """The step would undo it, on this worker as on all others."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=overlap)
        backward(model, *batch(0))
        optimizer.step()
        change(model)
        with pytest.raises(InvalidRequest, match=r"'0\.weight' was changed .*load_parameters\(state_dict\)"):
            backward(model, *batch(1))
            optimizer.step()
        assert ps.clock == 1

        optimizer.pull()
        backward(model, *batch(1))
        optimizer.step()
        assert ps.clock == 2

    run_workers(1, 1, worker)


def test_step_when_parameters_were_changed_and_have_their_values_again_then_goes_on(run_workers):
    """As after an evaluation with averaged weights, or a move to another device."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        kept = copy.deepcopy(model.state_dict())
        load(model)
        model.load_state_dict(kept)
        model[0].weight.data = model[0].weight.data.clone()
        backward(model, *batch(0))
        optimizer.step()
        assert ps.clock == 1

    run_workers(1, 1, worker)


@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("overlap", [False, True])
def test_step_when_workers_read_the_same_samples_then_one_is_told_once(run_workers, caplog, consistency, overlap):
    def worker(ps, shares):
        model = small_model()
        options = {"consistency": consistency, "overlap": overlap}
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, **options)
        assert (optimizer.rank, optimizer.world_size) == (ps.rank, 2)
        ps.barrier("the same parameters")
        backward(model, *batch(ps.rank * shares))
        optimizer.step()
        for step in range(3):
            backward(model, *batch(step))
            optimizer.step()

    run_workers(2, 2, lambda ps: worker(ps, shares=1))
    assert "first gradient" not in caplog.text
    run_workers(2, 2, lambda ps: worker(ps, shares=0))
    told = [record.message for record in caplog.records if "first gradient" in record.message]
    assert len(set(told)) == len(told) in (1, 2)
    assert all("by its rank and world_size" in text for text in told)
