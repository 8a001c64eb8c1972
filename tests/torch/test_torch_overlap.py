"""overlap=True: gradients leave during back-propagation, the results are the same, and what would be wrong is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, part, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402
from torch.optim.lr_scheduler import StepLR  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient  # noqa: E402
from psd_client import Drained, connect  # noqa: E402

TRANSPORTS = ("shm", "tcp", "grpc")
STEPS = 5


class Mixed(nn.Module):
    """A model with all kinds of gradients: many blocks, channels_last, bfloat16, a scalar, a parameter of some steps only, a
    frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(256, 1200)
        self.narrow = nn.Linear(1200, 500)
        self.gate = nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Parameter(torch.zeros(500))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        generator = torch.Generator().manual_seed(1)
        for parameter in (*self.conv.parameters(), *self.wide.parameters(), *self.narrow.parameters()):
            nn.init.uniform_(parameter, -0.1, 0.1, generator)

    def forward(self, x: Any, step: int) -> Any:
        hidden = torch.tanh(self.narrow(torch.tanh(self.wide(self.conv(x).flatten(1))))) * self.gate.float() * self.scale
        return hidden + self.sometimes if step % 2 else hidden


def mixed_loss(model: nn.Module, step: int, rank: int) -> Any:
    x = torch.randn((6, 4, 4, 4), generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, step).square().mean()


def train(ps: Any, *, overlap: bool, **options: Any) -> list[Any]:
    model = Mixed()
    groups = [{"params": [*model.conv.parameters(), model.gate], "lr": 0.05}, {"params": [model.sometimes, model.scale]}]
    groups.append({"params": [*model.wide.parameters(), *model.narrow.parameters()], "weight_decay": 0.01})
    given = SGD(groups, lr=0.1, momentum=0.9)
    scheduler = StepLR(given, 2, 0.5)
    optimizer = psd.distribute(model, given, ps=ps, overlap=overlap, **options)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 2)
        optimizer.batch_size = 1 + ps.rank
        mixed_loss(model, step, ps.rank).backward()
        optimizer.step()
        scheduler.step()
    optimizer.close()
    return values(model)


def distributed(ps: Any, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    model = small_model() if model is None else model
    return model, psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), ps=ps, overlap=True, **options)


def alone(run_workers: Any, body: Any) -> Any:
    """Run `body(ps)` on a single worker with two shards; return its result."""
    return run_workers(1, 2, body)[0]


@pytest.mark.parametrize(
    ("transport", "options"),
    [*((transport, {}) for transport in TRANSPORTS), ("tcp", {"aggregation": "exact"}), ("grpc", {"clip_norm": 0.01})],
    ids=str,
)
def test_train_when_overlapped_then_the_bits_are_the_same(run_workers, transport, options):
    def both(overlap):
        return run_workers(2, 2, lambda ps: train(ps, overlap=overlap, **options), transport=transport)

    (first, second), (plain, _) = both(overlap=True), both(overlap=False)

    for mine, others, right in zip(first, second, plain, strict=True):
        assert torch.equal(mine, right)
        assert torch.equal(others, right)


@pytest.mark.parametrize("consistency", ["async", "ssp:1"])
def test_train_without_rounds_when_overlapped_then_the_bits_are_the_same(run_workers, consistency):
    overlapped, plain = (
        alone(run_workers, lambda ps, o=overlap: train(ps, overlap=o, consistency=consistency)) for overlap in (True, False)
    )
    assert all(torch.equal(mine, right) for mine, right in zip(overlapped, plain, strict=True))


def count_ready(feed):
    return sum(len(blocks) for blocks in (*feed._given, *feed._waiting))


def test_gradients_leave_before_back_propagation_has_ended(run_workers):
    """While the first layers' gradients are still to come, the shards have those of the last ones."""

    def body(ps):
        model = Mixed()
        _, optimizer = distributed(ps, model)
        feeds = []
        hidden = model.conv(torch.ones(2, 4, 4, 4)).flatten(1)
        hidden.register_hook(lambda _: feeds.append(count_ready(optimizer._gradients._push.feed)))
        model.narrow(model.wide(hidden)).sum().backward()
        optimizer.step()
        return feeds

    (count,) = alone(run_workers, body)
    assert count > 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync_when_gradients_are_accumulated_then_equals_one_process(run_workers, world_size):
    def worker(ps):
        model, optimizer = distributed(ps, reduce="sum")
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for micro in range(2):
                    nn.functional.mse_loss(model(part(step, ps.rank, ps.world_size)[0]), _target(step, micro, ps)).backward()
            nn.functional.mse_loss(model(part(step, ps.rank, ps.world_size)[0]), _target(step, 2, ps)).backward()
            optimizer.step()
        return values(model)

    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            x, y = part(step, rank, world_size)
            for micro in range(3):
                nn.functional.mse_loss(model(x), y * micro).backward()
        optimizer.step()

    for result in run_workers(world_size, 2, worker):
        assert_close(result, values(model))


def _target(step: int, micro: int, ps: Any) -> Any:
    return part(step, ps.rank, ps.world_size)[1] * micro


def test_no_sync_when_no_back_propagation_follows_then_step_sends_the_sums(run_workers):
    def body(ps):
        model, optimizer = distributed(ps)
        with optimizer.no_sync():
            backward(model, *batch(0))
        optimizer.step()
        return values(model)

    expected = small_model()
    backward(expected, *batch(0))
    SGD(expected.parameters(), lr=0.1).step()
    assert_close(alone(run_workers, body), values(expected))


def test_step_when_a_worker_has_no_more_data_then_it_contributes_nothing(run_workers):
    """batch_size=0 without a backward(), then a changed learning rate: neither is mistaken for what was sent before."""

    def worker(ps):
        model, optimizer = distributed(ps)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            if ps.rank == 0:
                backward(model, *batch(step))
                optimizer.step()
            else:
                optimizer.step(batch_size=0)
        return values(model)

    expected = small_model()
    optimizer = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        backward(expected, *batch(step))
        optimizer.step()
    for result in run_workers(2, 2, worker):
        assert_close(result, values(expected))


def test_step_when_given_a_closure_and_a_batch_size_then_that_one_is_sent(run_workers):
    def worker(ps):
        model, optimizer = distributed(ps)
        x, y = part(0, ps.rank, ps.world_size)

        def closure():
            backward(model, x, y)
            return 0.0

        optimizer.step(closure, batch_size=len(x))
        return values(model)

    expected = small_model()
    backward(expected, *batch(0))
    SGD(expected.parameters(), lr=0.1).step()
    for result in run_workers(2, 1, worker):
        assert_close(result, values(expected))


# -- refused -----------------------------------------------------------------------------------------------------------


def change_by_clipping(model: Any, _: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def change_by_replacing(model: Any, _: Any) -> None:
    model[0].weight.grad = model[0].weight.grad.clone()


def change_by_clearing(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def change_by_adding(model: Any, optimizer: Any) -> None:
    with optimizer.no_sync():
        model(batch(0, model[0].weight.dtype)[0]).sum().backward()


@pytest.mark.parametrize("change", [change_by_clipping, change_by_replacing, change_by_clearing, change_by_adding])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_when_a_gradient_was_changed_after_it_was_sent_then_refuses(run_workers, change, dtype):
    def body(ps):
        model, optimizer = distributed(ps, small_model(dtype))
        backward(model, *batch(0, dtype))
        change(model, optimizer)
        with pytest.raises(InvalidRequest, match="was changed after it had been sent"):
            optimizer.step()
        with pytest.raises(InvalidRequest, match="given up halfway"):
            optimizer.step()
        return True

    assert alone(run_workers, body)


def test_backward_when_it_is_the_second_without_no_sync_then_refuses(run_workers):
    def body(ps):
        model, optimizer = distributed(ps)
        backward(model, *batch(0))
        with pytest.raises(InvalidRequest, match=r"second gradient in one step.*no_sync"):
            model(batch(1)[0]).sum().backward()
        optimizer.close()
        return True

    assert alone(run_workers, body)


@pytest.mark.parametrize("what", ["attribute", "argument", "lr"])
def test_step_when_what_was_sent_first_has_changed_since_then_refuses(run_workers, what):
    def body(ps):
        model, optimizer = distributed(ps)
        backward(model, *batch(0))
        if what == "attribute":
            optimizer.batch_size = 12
        elif what == "lr":
            optimizer.param_groups[0]["lr"] = 0.2
        with pytest.raises(InvalidRequest, match=r"batch_size were changed.*before backward"):
            optimizer.step(batch_size=12 if what == "argument" else None)
        return True

    assert alone(run_workers, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_when_a_gradient_is_not_finite_then_refuses_names_the_tensor_and_goes_no_further(run_workers, dtype):
    def body(ps):
        model, optimizer = distributed(ps, small_model(dtype))
        model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
        backward(model, *batch(0, dtype))
        with pytest.raises(NonFiniteGradient, match=r"worker 0 at step 0 .*'0\.weight'.*cannot take part"):
            optimizer.step()
        with pytest.raises(InvalidRequest, match="given up halfway"):
            backward(model, *batch(0, dtype))
        return True

    assert alone(run_workers, body)


def test_backward_when_a_gradient_is_sparse_then_refuses_and_gives_the_push_up(run_workers):
    def body(ps):
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        _, optimizer = distributed(ps, model)
        with pytest.raises(InvalidTensor, match="sparse"):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.close()
        return True

    assert alone(run_workers, body)


@pytest.mark.parametrize(
    ("overlap", "options"),
    [(True, {}), (True, {"aggregation": "exact"}), (True, {"consistency": "ssp:1"}), ("forward", {"consistency": "async"})],
    ids=["sync", "exact", "ssp", "forward"],
)
def test_backward_when_the_job_is_drained_then_ends_the_program_in_order_before_anything_of_the_step_is_sent(
    cluster, overlap, options
):
    """With rounds all workers end before the same step, with the same model."""
    started = cluster(2, lease_s=60.0)

    def train(rank):
        with pytest.raises(Drained) as ended, connect(started.servers, rank, 2) as ps:
            model = small_model()
            optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=overlap, **options)
            for step in range(60):
                if rank == 1 and step == 4:
                    started.shards[0].shard.end_job()
                backward(model, *part(step, rank, 2))
                optimizer.step()
        return ended.value.code, ended.value.clock == ps.clock, step, values(model)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(train, range(2)))

    assert [result[:2] for result in results] == [(0, True)] * 2
    assert all(each.shard.schedule.is_left_in_order for each in started.shards)
    (*_, steps, mine), (*_, others_steps, others) = results
    if "consistency" not in options:
        assert 4 < steps == others_steps <= 8
        assert all(torch.equal(value, other) for value, other in zip(mine, others, strict=True))


def test_distribute_when_rounds_may_be_skipped_then_refuses_overlap(run_workers):
    def body(ps):
        with pytest.raises(InvalidRequest, match="overlap"):
            distributed(ps, nan_policy="skip")
        return True

    assert alone(run_workers, body)
