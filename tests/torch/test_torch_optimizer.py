"""The distributed optimizer is a torch.optim.Optimizer: closures, zero_grad, state_dict, hooks; and it ends its worker."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402


def alone(run_workers, body):
    """Run `body(ps)` on a single worker with one shard; return its result."""
    (result,) = run_workers(1, 1, body)
    return result


def test_groups_are_the_given_optimizers_own(run_workers):
    def body(ps):
        model = small_model()
        given = SGD(model.parameters(), lr=0.1)
        optimizer = psd.distribute(model, given, ps=ps)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups[0] is given.param_groups[0]
        assert optimizer.ps is ps
        return True

    assert alone(run_workers, body)


def test_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(run_workers):
    def body(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        x, y = batch(0)
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            calls.append(loss)
            return loss

        loss = optimizer.step(closure)
        assert calls == [loss]
        assert optimizer.step() is None
        return ps.clock

    assert alone(run_workers, body) == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_models_gradients(run_workers, set_to_none):
    def body(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        backward(model, *batch(0))
        optimizer.zero_grad(set_to_none=set_to_none)
        return [p.grad is None if set_to_none else bool((p.grad == 0).all()) for p in model.parameters()]

    assert alone(run_workers, body) == [True] * 4


def test_step_hooks_run(run_workers):
    def body(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        backward(model, *batch(0))
        optimizer.step(batch_size=12)
        return calls

    assert alone(run_workers, body) == ["before", "after"]


def test_state_dict_takes_the_groups_along_and_keeps_them_shared(run_workers):
    """Saved with torch.save and loaded: the options come back, in the dicts that schedulers hold. The clock is for reading."""

    def body(ps):
        model = small_model()
        given = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psd.distribute(model, given, ps=ps)
        backward(model, *batch(0))
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        optimizer.param_groups[0]["lr"] = 7.0

        optimizer.load_state_dict(state)

        assert optimizer.param_groups[0] is given.param_groups[0]
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        optimizer.step()
        return state["clock"], given.param_groups[0]["lr"], given.param_groups[0]["momentum"], ps.clock

    assert alone(run_workers, body) == (1, 0.1, 0.9, 2)


@pytest.mark.parametrize("loads", ["given", "result"])
@pytest.mark.parametrize("scheduled", ["given", "result"])
def test_a_state_that_is_loaded_into_either_optimizer_leaves_schedulers_of_both_in_force(run_workers, loads, scheduled):
    """torch gives the one that loads new dicts: then the learning rates of a scheduler on the other went nowhere."""

    def body(ps):
        model = nn.Linear(1, 1, bias=False)
        given = SGD(model.parameters(), lr=8.0, weight_decay=0.5)
        nn.init.zeros_(model.weight)
        saved = given.state_dict()
        optimizer = psd.distribute(model, given, ps=ps)
        either = {"given": given, "result": optimizer}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(either[scheduled], 0.5)
        optimizer.param_groups[0]["weight_decay"] = 0.0

        either[loads].load_state_dict(saved)

        assert optimizer.param_groups[0] is given.param_groups[0]
        assert given.param_groups[0]["params"][0] is model.weight
        given.param_groups[0]["weight_decay"] -= 0.5
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
            scheduler.step()
            found.append(model.weight.item())
        return found

    assert alone(run_workers, body) == [-8.0, -12.0, -14.0]


def test_slots_are_not_lost_by_loading_them_into_the_given_optimizer(run_workers):
    """Refused there as in the result; nothing has changed."""

    def body(ps):
        model = small_model()
        other = SGD(model.parameters(), lr=0.3, momentum=0.9)
        backward(model, *batch(0))
        other.step()
        given = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psd.distribute(model, given, ps=ps)
        with pytest.raises(InvalidRequest, match="momentum_buffer"):
            given.load_state_dict(other.state_dict())
        optimizer.step()
        return given.param_groups[0]["lr"]

    assert alone(run_workers, body) == 0.1


@pytest.mark.parametrize("replaced", ["given", "result"])
def test_groups_that_are_replaced_by_other_dicts_are_refused(run_workers, replaced):
    """What a scheduler does to the ones would not reach the others."""

    def body(ps):
        model = small_model()
        given = SGD(model.parameters(), lr=0.1)
        optimizer = psd.distribute(model, given, ps=ps)
        either = {"given": given, "result": optimizer}[replaced]
        either.param_groups = [dict(group) for group in either.param_groups]
        with pytest.raises(InvalidRequest, match="param_groups: were replaced by other dicts"):
            optimizer.step()
        return ps.clock

    assert alone(run_workers, body) == 0


def test_pull_brings_other_workers_updates(run_workers):
    """In async mode a worker that pushes nothing still sees what the others have done."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, consistency="async")
        before = values(model)
        if ps.rank == 0:
            backward(model, *batch(0))
            optimizer.step()
        ps.barrier("pushed")
        optimizer.pull()
        return before, values(model)

    (before, first), (_, second) = run_workers(2, 2, worker)
    assert_close(first, second, 0)
    assert not torch.equal(before[0], first[0])


def test_close_lets_the_others_go_on(run_workers):
    """A worker that has finished is not waited for."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        for step in range(1 if ps.rank else 4):
            backward(model, *batch(step))
            optimizer.step()
        optimizer.close()
        return step + 1

    assert run_workers(2, 1, worker) == [4, 1]
