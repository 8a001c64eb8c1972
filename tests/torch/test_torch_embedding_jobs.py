"""Jobs with embeddings train as torch does in one process on the joined batch."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from torch.optim.lr_scheduler import StepLR  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, NonFiniteGradient  # noqa: E402
from psd_client import Normal  # noqa: E402
from psd_client.worker.flat_calls import FlatCalls  # noqa: E402

IDS, DIM, STEPS, BATCH = 40, 5, 8, 12


class Model(nn.Module):
    """Two embeddings, one of them of bags, and a layer above."""

    def __init__(self, user: nn.Module, item: nn.Module) -> None:
        super().__init__()
        self.user, self.item = user, item
        self.top = nn.Linear(2 * DIM, 1)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.top.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.user(users), self.item(items)], 1))


def sharded(user_rule=None, item_rule=None) -> Model:
    options = {"init": Normal(0.3), "seed": 7}
    return Model(
        psd.Embedding("user", DIM, user_rule, **options), psd.EmbeddingBag("item", DIM, item_rule, mode="sum", **options)
    )


def initial_rows(run_workers) -> list[torch.Tensor]:
    """What the tables hold for the ids, by their names and seeds."""

    def worker(ps):
        model = sharded()
        psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps)
        return rows_of(model)

    return run_workers(1, 1, worker)[0]


def rows_of(model: Model) -> list[torch.Tensor]:
    """All rows, and the layer's parameters."""
    model.eval()
    ids = torch.arange(IDS)
    with torch.no_grad():
        found = [model.user(ids), model.item(ids[:, None]), *(p.clone() for p in model.top.parameters())]
    model.train()
    return found


def torch_model(rows: list[torch.Tensor], *, sparse: bool = False) -> Model:
    user = nn.Embedding.from_pretrained(rows[0].clone(), freeze=False, sparse=sparse)
    return Model(user, nn.EmbeddingBag.from_pretrained(rows[1].clone(), freeze=False, mode="sum", sparse=sparse))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shuffled ids, many of them repeated."""
    generator = torch.Generator().manual_seed(step)
    users = torch.randint(IDS // 4, (BATCH,), generator=generator)
    items = torch.randint(IDS // 2, (BATCH, 3), generator=generator)
    return users, items, torch.randn(BATCH, 1, generator=generator)


def part(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    """A worker's share. Shares are uneven: of 12 samples, two workers get 4 and 8."""
    bounds = [0, *(4 * r for r in range(1, world_size)), BATCH]
    return tuple(tensor[bounds[rank] : bounds[rank + 1]] for tensor in batch(step))


def backward(model: Model, users, items, targets, scale: float = 1.0) -> None:
    (mse_loss(model(users, items), targets) * scale).backward()


def trained_alone(model: Model, *optimizers: torch.optim.Optimizer, after_step=lambda: None) -> list[torch.Tensor]:
    for step in range(STEPS):
        model.zero_grad()
        backward(model, *batch(step))
        for optimizer in optimizers:
            optimizer.step()
        after_step()
    return rows_of(model)


def check_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("world_size", "shards"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "Adam"])
def test_steps_are_those_of_one_process(run_workers, world_size, shards, rule):
    """Of a rule that the torch optimizer names, with a schedule; sparse ones, where Adam's rows rest that no step touches."""
    options = {"lr": 0.1} | ({"eps": 1e-14} if rule == "Adam" else {})  # SparseAdam has its eps elsewhere than Adam
    expected = torch_model(initial_rows(run_workers), sparse=True)
    dense = getattr(torch.optim, rule)(expected.top.parameters(), **options)
    rows = [*expected.user.parameters(), *expected.item.parameters()]
    sparse = (torch.optim.SparseAdam if rule == "Adam" else getattr(torch.optim, rule))(rows, **options)
    schedules = [StepLR(optimizer, 3, gamma=0.5) for optimizer in (dense, sparse)]
    result = trained_alone(expected, dense, sparse, after_step=lambda: [schedule.step() for schedule in schedules])

    def worker(ps):
        model = sharded()
        optimizer = psd.distribute(model, getattr(torch.optim, rule)(model.parameters(), **options), ps=ps)
        schedule = StepLR(optimizer, 3, gamma=0.5)
        for step in range(STEPS):
            share = part(step, ps.rank, ps.world_size)
            model.zero_grad()
            backward(model, *share)
            optimizer.step(batch_size=len(share[0]))
            schedule.step()
        return rows_of(model)

    for actual in run_workers(world_size, shards, worker):
        check_same(actual, result)


def test_a_table_has_a_rule_and_numbers_of_its_own(run_workers):
    """Beside another of the torch optimizer's, which need not know the embedding; a group's options hold for its own."""
    expected = torch_model(initial_rows(run_workers))
    optimizers = [
        torch.optim.Adagrad(expected.user.parameters(), lr=0.2),
        torch.optim.SGD(expected.item.parameters(), lr=0.03),
        torch.optim.SGD(expected.top.parameters(), lr=0.05),
    ]

    def halve() -> None:
        optimizers[0].param_groups[0]["lr"] *= 0.5

    result = trained_alone(expected, *optimizers, after_step=halve)

    def worker(ps):
        model = sharded(psd_client.Adagrad(lr=0.2))
        groups = [{"params": model.item.parameters(), "lr": 0.03}, {"params": model.top.parameters()}]
        optimizer = psd.distribute(model, torch.optim.SGD(groups, lr=0.05), ps=ps)
        for step in range(STEPS):
            share = part(step, ps.rank, 2)
            optimizer.zero_grad()
            backward(model, *share)
            optimizer.step(batch_size=len(share[0]))
            optimizer.table_groups["user"]["lr"] *= 0.5
        assert optimizer.table_groups["item"] is optimizer.param_groups[0]
        return rows_of(model)

    for actual in run_workers(2, 1, worker):
        check_same(actual, result)


@pytest.mark.parametrize("how", ["accumulated", "closure", "overlap", "overlap accumulated"])
def test_gradients_of_a_step_come_in_several_ways(run_workers, how):
    """Of two backward(); within a closure; with dense gradients that leave during back-propagation."""
    expected = torch_model(initial_rows(run_workers))
    result = trained_alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1))

    def worker(ps):
        model = sharded()
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = psd.distribute(model, given, ps=ps, overlap="overlap" in how)
        for step in range(STEPS):
            optimizer.zero_grad()
            if "accumulated" in how:
                halves = list(zip(*(tensor.chunk(2) for tensor in batch(step)), strict=True))
                with optimizer.no_sync():
                    backward(model, *halves[0], 0.5)
                backward(model, *halves[1], 0.5)
                optimizer.step()
            elif how == "closure":
                optimizer.step(lambda step=step: backward(model, *batch(step)))
            else:
                backward(model, *batch(step))
                optimizer.step()
        return rows_of(model)

    check_same(run_workers(1, 2, worker)[0], result)


def test_a_job_of_embeddings_alone_trains_and_a_step_without_lookups_is_a_step(run_workers):
    """The model has no dense parameter; one worker looks nothing up, or makes no backward(), and counts as zero."""

    def worker(ps):
        embedding = psd.Embedding("user", DIM, init=psd_client.Zeros())
        optimizer = psd.distribute(embedding, torch.optim.SGD(embedding.parameters(), lr=1.0), ps=ps)
        ids = torch.tensor([3, 3, 9])
        for step in range(3):
            optimizer.zero_grad()
            output = embedding(ids) if ps.rank == 0 or step else None
            if ps.rank == 0:
                (-output.sum()).backward()
            optimizer.step()
        assert (ps.clock, optimizer.rank) == (3, ps.rank)
        return embedding(torch.tensor([3, 9, 4]))[:, 0].tolist()

    assert run_workers(2, 2, worker) == [[3.0, 1.5, 0.0]] * 2


def test_prefetched_rows_have_the_same_bits(run_workers):
    """In sync mode they are those of the next step. Other calls of the program come in between."""

    def train(ps, *, prefetches: bool) -> list[torch.Tensor]:
        model = sharded()
        optimizer = psd.distribute(model, torch.optim.Adagrad(model.parameters(), lr=0.1), ps=ps, aggregation="exact")
        for step in range(STEPS):
            users, items, targets = part(step, ps.rank, 2)
            model.zero_grad()
            loss = mse_loss(model(users, items), targets)
            if prefetches:
                model.user.prefetch(part(step + 1, ps.rank, 2)[0])
                model.item.prefetch(part(step + 1, ps.rank, 2)[1])
            loss.backward()
            optimizer.step(batch_size=len(users))
            ps.barrier(f"after step {step}")
        return rows_of(model)

    plain, ahead = (
        run_workers(2, 2, lambda ps, prefetches=prefetches: train(ps, prefetches=prefetches)) for prefetches in (False, True)
    )
    assert all(map(torch.equal, plain[0], ahead[0]))
    assert all(map(torch.equal, ahead[0], ahead[1]))


@pytest.mark.parametrize(("overlap", "is_late"), [(False, False), ("forward", False), ("forward", True)])
def test_without_rounds_prefetching_goes_on_beside_everything_else(run_workers, monkeypatch, overlap, is_late):
    """Also if the thread of the push begins when the rows that are prefetched after it are already asked for."""
    push, pause = FlatCalls.push_pull_feed, threading.Event()

    def push_late(self, scalars, weight, feed, *arguments):
        while is_late and self.clock % 2 == 0 and self._turn is feed:  # what it leaves out, the next step waits for
            pause.wait(0.001)
        push(self, scalars, weight, feed, *arguments)

    monkeypatch.setattr(FlatCalls, "push_pull_feed", push_late)

    def worker(ps):
        model = sharded()
        optimizer = psd.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05), ps=ps, consistency="async", overlap=overlap
        )
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = mse_loss(model(*part(0, ps.rank, 2)[:2]), part(0, ps.rank, 2)[2])
            model.user.prefetch(part(0, ps.rank, 2)[0])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.pull()
        ps.barrier("end")
        return losses

    for losses in run_workers(2, 2, worker):
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("mode", "world_size", "shards"), [("sync", 2, (1, 3)), ("async", 1, (2,))])
def test_clip_norm_is_over_parameters_and_rows_as_torchs(run_workers, mode, world_size, shards):
    """As clip_grad_norm_ in one process, rows of repeated ids summed; under sync the same bits on any number of shards."""
    expected = torch_model(initial_rows(run_workers))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(expected, *batch(step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.7)))
        optimizer.step()
    assert min(norms) < 0.7 < max(norms)

    def worker(ps):
        model = sharded()
        given = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = psd.distribute(model, given, ps=ps, consistency=mode, clip_norm=0.7)
        for step in range(STEPS):
            share = part(step, ps.rank, world_size)
            optimizer.zero_grad()
            backward(model, *share)
            optimizer.step(batch_size=len(share[0]))
        return rows_of(model)

    found = [run_workers(world_size, count, worker)[0] for count in shards]
    check_same(found[0], rows_of(expected))
    assert all(map(torch.equal, found[0], found[-1]))


@pytest.mark.parametrize(
    ("mode", "options"), [("sync", {"quorum": 1}), ("sync", {"quorum": 1, "aggregation": "exact"}), ("ssp:1", {})]
)
def test_rows_have_each_gradient_once_that_their_worker_was_told_counts(run_workers, mode, options):
    """Under a quorum late ones do not; a row's value says how many did."""
    ids = torch.tensor([3, 9, 3])

    def worker(ps):
        embedding = psd.Embedding("user", DIM, init=psd_client.Zeros())
        sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
        optimizer = psd.distribute(embedding, sgd, ps=ps, consistency=mode, reduce="sum", **options)
        for _ in range(15):
            optimizer.zero_grad()
            (-embedding(ids).sum()).backward()
            optimizer.step()
        ps.barrier("end")
        with torch.no_grad():
            rows = embedding(torch.tensor([3, 9, 4]))[:, 0].tolist()
        return ps.stats()["blocks_counted"], ps.stats()["blocks_late"], rows

    found = run_workers(2, 1, worker)

    counted = sum(each[0] for each in found)
    assert counted + sum(each[1] for each in found) == 30
    assert counted >= 15 if options else counted == 30
    assert [each[2] for each in found] == [[2.0 * counted, counted, 0.0]] * 2


def test_a_scaler_skips_a_round_for_an_infinite_row_gradient_of_one_worker(run_workers):
    """On all workers alike; else the steps are those without scaling."""
    expected = torch_model(initial_rows(run_workers))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in (0, 2, 3):
        expected.zero_grad()
        backward(expected, *batch(step))
        optimizer.step()

    def worker(ps):
        model, scaler = sharded(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps, nan_policy="skip")
        for step in range(4):
            users, items, targets = part(step, ps.rank, 2)
            optimizer.zero_grad()
            loss = mse_loss(model(users, items), targets)
            if (step, ps.rank) == (1, 1):
                loss = loss + (model.user(users[:1]) * float("inf")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer, batch_size=len(users))
            scaler.update()
            assert ps.is_skipped == (step == 1)
        return rows_of(model), scaler.get_scale()

    for actual, scale in run_workers(2, 2, worker):
        check_same(actual, rows_of(expected))
        assert scale == 2.0**9


def test_a_gradient_that_is_not_finite_names_table_and_id(run_workers):
    def worker(ps):
        embedding = psd.Embedding("user", DIM)
        optimizer = psd.distribute(embedding, torch.optim.SGD(embedding.parameters(), lr=1.0), ps=ps)
        (embedding(torch.tensor([5, 77])) * torch.tensor([[1.0], [float("nan")]])).sum().backward()
        with pytest.raises(NonFiniteGradient, match="id 77 of table 'user'"):
            optimizer.step()

    run_workers(1, 1, worker)


def test_what_distribute_cannot_declare_is_named(run_workers):
    """A table of two forms, one without a rule, one in two groups, and rules that are none for tables."""

    def worker(ps):
        def refused(message, model, optimizer=None):
            given = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(InvalidRequest, match=message):
                psd.distribute(model, given, ps=ps)

        one, other = psd.Embedding("user", 4), psd.Embedding("user", 4)
        top = nn.Linear(4, 1)
        refused("'user': two modules declare the table", nn.ModuleList([one, psd.Embedding("user", 5)]))
        refused("'user': has no optimizer, and", nn.ModuleList([one, top]), torch.optim.SGD(top.parameters(), lr=0.1))
        groups = [{"params": one.parameters()}, {"params": other.parameters()}]
        refused("'user': .* several param_groups", nn.ModuleList([one, other]), torch.optim.SGD(groups, lr=0.1))
        refused("rule 'lamb' is none for tables", nn.ModuleList([one]), psd_client.LAMB())

    run_workers(1, 1, worker)
