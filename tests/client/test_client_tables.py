"""Sparse tables before anything is sent: arguments, ids of strings, groups, and what of a batch goes to which shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psd_client
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, JobSpec
from psd.contract.layout import Layout
from psd.contract.tables import SparseTableSpec
from psd_client import SGD, Adagrad, Table
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.param_groups import ParamGroups
from psd_client.tables import as_row_ids, gradients_of
from psd_client.worker.rows import Batches, RowGradients, RowPull, is_same_rows
from psd_core.distinct import shard_of

SPECS = (SparseTableSpec("user", 2), SparseTableSpec("item", 3, dtype="bfloat16"))


def layout(shards: int) -> Layout:
    return Layout(JobSpec(1, (), (GroupSpec("sgd", ()),), tables=SPECS), shards)


def pushed(shards: int, gradients: Any) -> RowGradients:
    return RowGradients(Batches(layout(shards)), gradients, RowsMemory(None))


def pulled(shards: int, wanted: Any, ids_max: int = 1 << 20) -> RowPull:
    return RowPull(Batches(layout(shards)), wanted, RowsMemory(None), ids_max)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"optimizer": 0.1}, TypeError, r"table 'user': optimizer: expected one of psd_client's, such as Adagrad\(lr=...\)"),
        ({"dim": 0}, InvalidRequest, "table 'user': dim: must be a whole number from 1 to 65536, got 0"),
        ({"dim": 2.0}, InvalidRequest, "table 'user': dim: must be a whole number from 1 to 65536, got 2.0"),
        ({"seed": -1}, InvalidRequest, "seed"),
        ({"init": "zeros"}, InvalidRequest, "init: must be one of Zeros, Constant"),
        ({"dtype": "float16"}, InvalidRequest, "dtype: must be one of float32, bfloat16"),
        ({"expire_seconds": -1}, InvalidRequest, "table 'user': expire_seconds: must be"),
        ({"max_rows": 1 << 41}, InvalidRequest, "table 'user': max_rows: must be"),
        ({"expire_steps": 1, "expire_seconds": 1}, InvalidRequest, r"by time already \(expire_seconds\)"),
    ],
)
def test_table_when_an_argument_is_wrong_then_names_it(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Table(**({"name": "user", "dim": 2, "optimizer": SGD(lr=1)} | options))


def test_groups_when_tables_share_an_optimizer_then_they_share_an_entry_behind_the_tensors() -> None:
    """The same object is meant, not an equal one."""
    shared = Adagrad(lr=0.5)
    groups = ParamGroups(["w"], SGD(lr=1.0), None, {"a": shared, "b": Adagrad(lr=0.5), "c": shared})

    assert [group.get("params", group.get("tables")) for group in groups.groups] == [["w"], ["a", "c"], ["b"]]
    assert groups.group_of_table == {"a": 1, "b": 2, "c": 1}
    groups.groups[1]["lr"] = 0.25
    assert [values[0] for values in groups.scalars()] == [1.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.array([[1, -1]]), [[1, 2**64 - 1]]),
        (np.array([2**64 - 1], np.uint64), [2**64 - 1]),
        (np.array([3, -3], np.int32), [3, 2**64 - 3]),
        ([5, 6], [5, 6]),
        ([2**63 + 1], [2**63 + 1]),
        ([[2**64 - 1], [5], [-2]], [[2**64 - 1], [5], [2**64 - 2]]),  # NumPy makes floating-point numbers of these
        ([], []),
        (7, 7),
    ],
)
def test_ids_when_whole_numbers_of_any_shape_then_are_64_bits(ids: Any, expected: Any) -> None:
    found = as_row_ids("ids", ids)

    assert found.view(np.uint64).tolist() == expected
    assert pulled(3, {0: found}).results()[0].shape == (*found.shape, 2)


class OfTorch:
    """What NumPy sees of a tensor that requires grad."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.zeros(3), "ids: dtype must be int64 or uint64, got float64"),
        (np.zeros(3, np.bool_), "got bool"),
        (["a"], "got <U1; psd_client.hash_ids makes ids of strings"),
        (np.zeros(0), "got float64"),
        ([1, 2**64], "ids: dtype must be int64 or uint64, got"),
        ([1, 2**64 - 1, 0.5], "ids: dtype must be int64 or uint64, got float64"),
        ([[1], [2, 3]], "ids: NumPy makes no array of it: .*inhomogeneous"),
        ([True], "got bool"),
        (OfTorch(), "ids: NumPy makes no array of it: Can't call numpy"),
    ],
)
def test_ids_when_not_whole_numbers_then_says_so(ids: Any, match: str) -> None:
    with pytest.raises(InvalidTensor, match=match):
        as_row_ids("ids", ids)


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ({"users": ([1], np.zeros((1, 2)))}, "tables: no table 'users' was declared; there are user, item"),
        ({"user": [1]}, r"tables\['user'\]: expected a pair \(ids, grads\), got \[1\]"),
        ({"user": ([1, 2], np.zeros((2, 3), np.float32))}, r"tables\['user'\]\[1\]: shape must be \(2, 2\), .* got \(2, 3\)"),
        ({"user": ([1], np.zeros((1, 2)))}, r"tables\['user'\]\[1\]: dtype must be float32 or float16, got float64; convert"),
        ({"user": ([1.5], np.zeros((1, 2)))}, r"tables\['user'\]\[0\]: dtype must be int64"),
        ({"user": ([1, 2], [[1, 2], [3]])}, r"tables\['user'\]\[1\]: NumPy makes no array of it: .*inhomogeneous"),
        ([1], "tables: expected pairs by name"),
    ],
)
def test_gradients_when_wrong_then_are_refused_by_name(tables: Any, match: str) -> None:
    with pytest.raises(InvalidTensor, match=match):
        gradients_of(SPECS, tables)


def test_hash_ids_when_strings_or_bytes_then_golden_values() -> None:
    """BLAKE2b of 8 bytes, salted by the seed: whoever computes it elsewhere, as b2sum -l 64 does for seed 0, gets these."""
    assert psd_client.hash_ids(["user:1", b"user:1", "", "\u00e9"]).tolist() == [
        0x121A0CA4DD7A7BD4,
        0x121A0CA4DD7A7BD4,
        0xB4B2797457A0A6E4,
        0x2F19F3EF8BBF1ACB,
    ]
    assert int(psd_client.hash_ids("user:1", seed=7)) == 0x16DDB11E7F6F7D2E
    assert psd_client.hash_ids(np.array([["a", "b"]])).shape == (1, 2)
    assert psd_client.hash_ids([]).shape == (0,)
    with pytest.raises(InvalidTensor, match="values: expected strings or bytes, got 3"):
        psd_client.hash_ids(["a", 3])
    with pytest.raises(InvalidTensor, match="values: expected strings or bytes, got 3"):
        psd_client.hash_ids(3)
    with pytest.raises(InvalidRequest, match="seed: must be from 0"):
        psd_client.hash_ids("a", seed=-1)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_push_when_ids_come_twice_then_each_travels_once_to_its_shard(shards: int) -> None:
    ids = np.random.default_rng(shards).integers(-50, 50, (20, 10))
    grads = np.arange(400, dtype=np.float32).reshape(20, 10, 2)

    gradients = pushed(shards, {0: (ids, grads)})

    found: dict[int, list[float]] = {}
    for shard, of_shard in enumerate(gradients.by_shard):
        for table, distinct, sums in of_shard:
            assert table == 0
            assert set(shard_of(distinct, shards).tolist()) <= {shard}
            found |= dict(zip(distinct.view(np.int64).tolist(), sums.tolist(), strict=True))
    assert found == {i: grads[ids == i].sum(0).tolist() for i in np.unique(ids).tolist()}


def test_push_when_gradients_have_16_bits_then_they_travel_so() -> None:
    """Sums of repeated ids are rounded once; bfloat16 comes as its bits."""
    halves = np.array([[1, 2], [3, 4], [2**-11, 0]], np.float16)
    bits = (np.array([[1, 2, 3], [4, 5, 6], [1 + 2**-7, 2**-9, 0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    (of_shard,) = pushed(1, {0: (np.array([1, 2, 1]), halves), 1: (np.array([8, 8, 8]), bits)}).by_shard

    assert [(rows.values.dtype, rows.ids.tolist()) for rows in of_shard] == [(np.float16, [1, 2]), (np.uint16, [8])]
    assert of_shard[0].values.tolist() == [[1, 2], [3, 4]]  # 1 + 2**-11 lies between two, and goes to the even one
    assert (of_shard[1].values.astype(np.uint32) << 16).view(np.float32).tolist() == [[6, 7, 9]]


def test_push_when_the_program_changes_its_arrays_then_it_stays_as_it_is() -> None:
    ids, grads = np.array([4, 5]), np.ones((2, 2), np.float32)
    before = pushed(1, {0: (ids, grads)})
    grads[:] = 2
    after, same = (pushed(1, {0: (ids, grads)}) for _ in range(2))

    assert before.by_shard[0][0].values.tolist() == [[1, 1], [1, 1]]
    assert not is_same_rows(before.by_shard, after.by_shard)
    assert is_same_rows(after.by_shard, same.by_shard)
    assert not is_same_rows(after.by_shard, pushed(1, {}).by_shard)


def test_push_when_a_sum_is_not_finite_then_table_and_id_are_named() -> None:
    """The sum travels: two finite gradients may not have one."""
    grads = np.full((3, 2), 3e38, np.float32)

    assert pushed(2, {0: (np.array([7, 8, 9]), grads)}).first_nonfinite() is None
    assert pushed(2, {0: (np.array([7, 8, 7]), grads)}).first_nonfinite() == ("user", 7)


def test_pull_when_large_then_is_cut_into_portions() -> None:
    """Of any tables together; a shard of which nothing is wanted has none."""
    pull = pulled(1, {0: np.arange(15), 1: np.arange(9)}, ids_max=10)

    portions = [[(table, len(ids)) for table, ids, _ in portion] for portion in pull.at(0)]

    assert portions == [[(0, 10)], [(0, 5), (1, 5)], [(1, 4)]]
    for portion in pull.at(0):
        for table, ids, values in portion:
            assert values.dtype == (np.float32 if table == 0 else np.uint16)  # what is stored in 16 bits travels so
            values[:] = (ids[:, None].astype(np.float32).view(np.uint32) >> 16) if table else ids[:, None]
    assert pull.results()[0][:, 1].tolist() == list(range(15))
    assert pull.results()[1][:, 2].tolist() == list(range(9))
    assert pulled(1, {}).at(0) == []
