"""Sparse tables are the rows of one dense tensor, trained by one process, whoever holds and trains them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.contract.jobspec import TensorSpec
from psd.contract.tables import SparseTableSpec
from psd_client import SGD, Adagrad, Normal, RowwiseAdagrad, Table, Zeros
from psd_client.client import worker_of
from psd_client.optimizers import scalar_values, spec_of

torch = pytest.importorskip("torch")

ROWS, DIM, STEPS = 60, 3, 12

RULES = {
    "nesterov": SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "momentum": SGD(lr=0.1, momentum=0.5, dampening=0.25),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.01, weight_decay=0.01),
    "adadelta": psd_client.Adadelta(lr=0.5, weight_decay=0.01),
    "rmsprop": psd_client.RMSprop(lr=0.01, momentum=0.5, centered=True),
    "adam": psd_client.Adam(lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": psd_client.AdamW(lr=0.01),
    "adamax": psd_client.Adamax(lr=0.01),
    "nadam": psd_client.NAdam(lr=0.01),
    "ftrl": psd_client.FTRL(lr=0.1),
    "lion": psd_client.Lion(lr=0.01, weight_decay=0.1),
}


def batch(step: int, rank: int) -> tuple[Any, Any]:
    """Shuffled ids, some of them twice; and steps that touch nothing."""
    rng = np.random.default_rng((step, rank))
    ids = rng.integers(0, ROWS, (0 if (step + rank) % 5 == 4 else 4, 5))
    return ids, rng.standard_normal((*ids.shape, DIM)).astype(np.float32)


def dense(ids: Any, grads: Any) -> Any:
    """The gradient of all rows, summed in the order in which the ids come."""
    gradient = np.zeros((ROWS, DIM), np.float32)
    np.add.at(gradient, ids.reshape(-1), grads.reshape(-1, DIM))
    return gradient


@functools.cache
def initial() -> Any:
    return np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)


def train_all_rules(ps: psd_client.ParameterServer, aggregation: str) -> tuple[Any, Any, Any]:
    """Train each rule's tensor and two tables, on the same gradients: the rows of the tensors, and those of the tables that
    catch up and that do not."""
    worker, rules = worker_of(ps), list(RULES.values())
    groups = [spec_of(rule) for rule in rules] * 2
    tensors = [TensorSpec(name, (ROWS, DIM), "float32", index) for index, name in enumerate(RULES)]
    tables = [
        SparseTableSpec(f"{name} {updates}", DIM, len(RULES) + index, init=Zeros(), updates=updates)
        for updates in ("catch_up", "lazy")
        for index, name in enumerate(RULES)
    ]
    worker.declare_tensors(tensors, groups, initial=lambda buffers: None, aggregation=aggregation, tables=tables)
    scalars = [scalar_values(spec_of(rule), rule.scalars(), 0) for rule in rules] * 2
    every_id = {index: np.arange(ROWS)[::-1] for index in range(len(tables))}
    for step in range(STEPS):
        ids, grads = batch(step, ps.rank)
        for view in worker.gradients.views:
            view[...] = dense(ids, grads)
        worker.push_pull_flat(scalars, rows=dict.fromkeys(range(len(tables)), (ids, grads)))
    rows = [found[::-1] for found in worker.pull_rows(every_id).values()]
    values = [view.copy() for view in worker.parameters.views]
    return np.stack(values), np.stack(rows[: len(RULES)]), np.stack(rows[len(RULES) :])


@pytest.mark.parametrize(
    ("world_size", "shards", "aggregation"), [(1, 1, "fast"), (2, 3, "fast"), (1, 5, "exact"), (4, 2, "exact")]
)
def test_rows_when_they_catch_up_then_have_the_bits_of_a_dense_tensor(
    run_workers: Callable[..., Any], world_size: int, shards: int, aggregation: str
) -> None:
    """Under every rule, whichever rows a step touches, and for all workers alike."""
    found = run_workers(world_size, shards, lambda ps: train_all_rules(ps, aggregation))

    for values, rows, lazy in found:
        for name, of_tensor, of_table in zip(RULES, values, rows, strict=True):
            np.testing.assert_array_equal(of_tensor, of_table, err_msg=name)
        assert not np.array_equal(rows, lazy)
        np.testing.assert_array_equal(lazy, found[0][2])


def test_rows_when_aggregation_is_exact_then_have_the_same_bits_on_any_number_of_shards(
    run_workers: Callable[..., Any],
) -> None:
    """And whatever the timing of three workers."""
    found = [run_workers(3, shards, lambda ps: train_all_rules(ps, "exact"))[0] for shards in (1, 2, 3, 5)]

    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


OPTIMIZERS: list[tuple[Any, str, Callable[..., Any], bool]] = [
    (psd_client.Adam(lr=0.05), "lazy", lambda p: torch.optim.SparseAdam(p, lr=0.05), True),
    (Adagrad(lr=0.05), "lazy", lambda p: torch.optim.Adagrad(p, lr=0.05), True),
    (SGD(lr=0.5), "lazy", lambda p: torch.optim.SGD(p, lr=0.5), True),
    (psd_client.Adam(lr=0.05, weight_decay=0.01), "catch_up", lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01), False),
    (
        RULES["nesterov"],
        "catch_up",
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        False,
    ),
]


def looks(step: int, rank: int) -> bool:
    """Whether a worker looks anything up in a step: in some only one does, and in some nobody."""
    return step % 4 == 0 or (step % 4 == 1 and rank == 0) or step % 4 == 2


def train_with_torch(world_size: int, rows: Any, optimizer: Callable[..., Any], *, is_sparse: bool) -> Any:
    """One process, torch.nn.Embedding, and the workers' batches joined."""
    embedding = torch.nn.Embedding.from_pretrained(torch.tensor(rows), freeze=False, sparse=is_sparse)
    rule = optimizer(list(embedding.parameters()))
    for step in range(STEPS):
        rule.zero_grad()
        parts = [batch(step, rank) for rank in range(world_size) if looks(step, rank)]
        if not parts:
            rule.step()
            continue
        ids, grads = (np.concatenate([part[i] for part in parts]) for i in range(2))
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch warns unless told one or the other
            (embedding(torch.tensor(ids)) * torch.tensor(grads)).sum().div(world_size).backward()
            rule.step()
    return embedding.weight.detach().numpy()


@pytest.mark.parametrize(("world_size", "shards"), [(1, 2), (3, 1)])
def test_training_equals_one_process_of_torch(run_workers: Callable[..., Any], world_size: int, shards: int) -> None:
    """Dense with `catch_up`, and sparse=True with `lazy`, with shuffled and repeated ids, and steps that look nothing up: those
    were steps of the table, for its momentum, weight decay and Adam's count, where torch rests."""

    def worker(ps: psd_client.ParameterServer) -> Any:
        tables = [
            Table(str(i), DIM, rule, init=Normal(0.5), updates=updates) for i, (rule, updates, _, _) in enumerate(OPTIMIZERS)
        ]
        assert ps.declare({}, tables=tables) == {}
        begin = [table.pull(range(ROWS)) for table in ps.tables.values()]
        for step in range(STEPS):
            names = ps.tables if looks(step, ps.rank) else ()
            assert ps.push_pull({}, tables=dict.fromkeys(names, batch(step, ps.rank))) == {}
        return begin, [table.pull(np.arange(ROWS, dtype=np.int32)) for table in ps.tables.values()]

    for begin, end in run_workers(world_size, shards, worker):
        for first, last, (rule, updates, optimizer, is_sparse) in zip(begin, end, OPTIMIZERS, strict=True):
            expected = train_with_torch(world_size, first, optimizer, is_sparse=is_sparse)
            assert np.abs(expected - first).max() > 0.1
            np.testing.assert_allclose(last, expected, rtol=1e-5, atol=5e-5, err_msg=f"{rule} {updates}")


def test_rowwise_adagrad_equals_its_definition(run_workers: Callable[..., Any]) -> None:
    """One sum a row, of the mean of the squares of the workers' gradient, as FBGEMM and TorchRec have it."""

    def worker(ps: psd_client.ParameterServer) -> Any:
        ps.declare({}, tables=[Table("t", DIM, RowwiseAdagrad(lr=0.1, eps=1e-8))])
        for step in range(STEPS):
            ps.tables["t"].push(*batch(step, ps.rank))
        return ps.tables["t"].pull(np.arange(ROWS))

    rows, sums = np.zeros((ROWS, DIM)), np.zeros((ROWS, 1))
    for step in range(STEPS):
        gradient = np.mean([dense(*batch(step, rank)) for rank in range(2)], 0, np.float64)
        sums += (gradient**2).mean(1, keepdims=True)
        rows -= 0.1 * gradient / (np.sqrt(sums) + 1e-8)
    np.testing.assert_allclose(run_workers(2, 2, worker)[0], rows, rtol=1e-5, atol=1e-6)


def whole_numbers(step: int, rank: int) -> tuple[Any, Any]:
    """Gradients whose sums are exact in any order, of which one id has most."""
    rng = np.random.default_rng((step, rank, 1))
    ids = rng.zipf(1.2, 50) % ROWS
    return ids, rng.integers(-8, 9, (50, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("consistency", "transport"), [("async", "shm"), ("async", "grpc"), ("ssp:1", "tcp"), ("sync", "grpc"), ("sync", "tcp")]
)
def test_rows_hold_the_sum_of_all_workers_gradients(run_workers: Callable[..., Any], consistency: str, transport: str) -> None:
    """Each push once, whatever the order, over each transport; steps that touch no table count like any other."""

    def worker(ps: psd_client.ParameterServer) -> Any:
        tables = [Table("a", DIM, SGD(lr=1.0)), Table("b", DIM, SGD(lr=1.0), dtype="float32")]
        ps.declare({"w": np.zeros(5)}, SGD(lr=1.0), consistency=consistency, reduce="sum", tables=tables)
        for step in range(STEPS):
            ids, grads = whole_numbers(step, ps.rank)
            if step % 3 == 0:
                ps.tables["a"].push(ids, grads)
            elif step % 3 == 1:
                params = ps.push_pull({"w": np.ones(5)}, tables={"a": (ids, grads), "b": (ids, grads)})
            else:
                ps.push({"w": np.ones(5)})
        ps.barrier("all have pushed")
        stats = ps.stats()
        assert stats["pushes"] == STEPS <= ps.clock
        assert stats["rows_pushed"] > 100
        params = ps.pull()
        return params["w"].tolist(), *(table.pull(np.arange(ROWS)) for table in ps.tables.values())

    of_a, of_b = np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM))
    for step in range(STEPS):
        for rank in range(2):
            gradient = dense(*whole_numbers(step, rank))
            of_a -= gradient * (step % 3 < 2)
            of_b -= gradient * (step % 3 == 1)
    for w, a, b in run_workers(2, 2, worker, transport=transport):
        assert set(w) == {-2.0 * STEPS * 2 / 3}
        np.testing.assert_array_equal(a, of_a)
        np.testing.assert_array_equal(b, of_b)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_rows_of_16_bits_travel_so(run_workers: Callable[..., Any], transport: str) -> None:
    """Gradients in float16 and rows stored in bfloat16, without a word about it; a reader gets the same."""

    def worker(ps: psd_client.ParameterServer) -> Any:
        tables = [Table(kind, 8, SGD(lr=1.0), dtype=kind) for kind in ("float32", "bfloat16")]
        ps.declare({}, tables=tables)
        moved = []
        for kind, dtype in (("float32", np.float32), ("bfloat16", np.float16)):
            before, table, ids = ps.stats(), ps.tables[kind], np.arange(100)
            table.push(ids, np.repeat(ids, 8).reshape(100, 8).astype(dtype))
            ps.pull()
            rows = table.pull(ids)
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, -np.repeat(ids, 8).reshape(100, 8))
            after = ps.stats()
            moved += [after[name] - before[name] for name in ("sent_bytes", "received_bytes")]
        return moved

    row, half = 100 * 8 * 4, 100 * 8 * 2
    assert run_workers(1, 2, worker, transport=transport) == [[100 * 16 + row, row, 100 * 16 + half, half]]


def test_reader_of_a_job_with_tables_reads_its_tensors_too(cluster: Callable[..., Any]) -> None:
    """Tensors at one version, rows as they are; a job of tables alone has no tensors."""
    for params in ({}, {"w": np.ones(3)}):
        servers = cluster(2).servers
        with psd_client.connect(servers, 0, 1) as ps, psd_client.connect(servers, role="reader") as reader:
            ps.declare(params, SGD(lr=1.0), tables=[Table("t", DIM, SGD(lr=1.0))])
            ps.push_pull({name: np.ones(3) for name in params}, tables={"t": ([4], np.ones((1, DIM)).tolist())})
            assert {name: value.tolist() for name, value in reader.pull().items()} == {name: [0.0] * 3 for name in params}
            assert reader.tables["t"].pull(4).tolist() == [-1.0] * DIM


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_layer_wise_rule_trains_tensors_beside_tables(cluster: Callable[..., Any], clip_norm: float | None) -> None:
    """By the norms of the tensors alone; both are clipped together. Rows of another rule move by the clipped gradient."""
    ids, rows = np.arange(40), np.full((40, DIM), 0.25, np.float32)
    gradient = np.linspace(-1, 1, 3000, dtype=np.float32)
    norm = np.sqrt(np.sum(np.square(gradient, dtype=np.float64)) + np.sum(np.square(rows, dtype=np.float64)))
    scale = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0

    def train(tables: list[Table], gradient: Any, **options: Any) -> tuple[Any, Any]:
        with psd_client.connect(cluster(2).servers, 0, 1) as ps:
            ps.declare({"w": np.ones(3000, np.float32)}, psd_client.LAMB(lr=0.1, eps=1e-3), tables=tables, **options)
            params = ps.push_pull({"w": gradient}, tables={"rows": (ids, rows)} if tables else {})
            return params["w"], ps.tables["rows"].pull(ids) if tables else None

    found, of_table = train([Table("rows", DIM, SGD(lr=1.0))], gradient, clip_norm=clip_norm)

    np.testing.assert_allclose(found, train([], gradient * np.float32(scale))[0], rtol=1e-6)
    np.testing.assert_allclose(of_table, -0.25 * scale, rtol=1e-6)
