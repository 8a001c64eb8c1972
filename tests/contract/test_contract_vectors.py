"""Operations on vectors as messages, and as methods: whatever the rows of the table say, a new one included."""

from __future__ import annotations

import inspect
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psd.contract.vector_batches import IncomingBatch, OutgoingBatch, payload_bytes, payload_parts
from psd_client import Batch, Vector
from psd_core.vector import VectorError, VectorSpec
from psd_core.vector_checks import checked
from psd_core.vector_operations import (
    ANY,
    KINDS,
    NOT_FOR_WHOLE,
    NUMBERS_MAX,
    OPERANDS_MAX,
    ROWS,
    STRIPE,
    OperationKind,
    Row,
    VectorOperation,
    extent,
)  # fmt: skip

COLUMNS, SIZE = 1000, 5 * STRIPE // 1000 * 1000  # rows that two shards share
NAMES = "abc"


def drawn(source: random.Random, kind: OperationKind, like: VectorSpec) -> VectorOperation:
    """A sound operation of a kind."""
    is_whole = like.dtype == "int64"

    def number() -> float:
        return source.randrange(-9, 9) if is_whole else source.uniform(-9, 9)

    def some(count: int, least: int) -> list[str]:
        return source.choices(NAMES, k=source.randint(least, 5) if count < 0 else count)

    def array(*shape: int) -> Any:
        return np.array([number() for _ in range(int(np.prod(shape)))], like.dtype).reshape(shape)

    out, x, y = source.choice(NAMES) if kind.writes else "", some(kind.x, 1), some(kind.y, 0)
    if kind.brings == "range":
        start = source.randrange(like.size)
        return VectorOperation(kind.name, out, start=start, values=array(source.randint(0, min(like.size - start, 9000))))
    if kind.brings:
        limit, shape = (like.size // COLUMNS, [COLUMNS]) if kind.brings == "rows" else (like.size, [])
        places = np.array([source.randrange(limit) for _ in range(source.randrange(6))], np.int64)
        return VectorOperation(kind.name, out, places=places, values=array(len(places), *shape))
    functions = [name for name in kind.functions or () if not (is_whole and name in NOT_FOR_WHOLE)]
    function = source.choice(functions) if functions else "my:own" if kind.name == "custom" else ""
    count = len((kind.functions or {}).get(function, kind.numbers if kind.x >= 0 or not kind.numbers else x))
    numbers = sorted({number() for _ in range(99)})[:count]  # whatever is a bound is below what comes after it
    return VectorOperation(kind.name, out, x, y, numbers, function, source.getrandbits(64) if kind.name == "random" else 0)


def mean(*pieces: Any) -> Any:
    return sum(pieces) / len(pieces)


class HasSpec(NamedTuple):
    spec: VectorSpec


def written(operation: VectorOperation) -> Any:
    """A vector of zeros after an operation that brings an array."""
    array = np.zeros(SIZE)
    if operation.places is None:
        array[operation.start :][: len(operation.values)] = operation.values
    else:
        np.add.at(array if operation.name == "add_at" else array.reshape(-1, COLUMNS), operation.places, operation.values)
    return array


@given(seed=st.integers(0, 1 << 32), dtype=st.sampled_from(["float64", "float32", "int64"]), shards=st.integers(1, 3))
def test_shards_together_have_what_was_sent(seed: int, dtype: str, shards: int) -> None:
    """An operation of each kind comes out of the messages as it went in; of what it brings each shard has its part."""
    source = random.Random(seed)
    specs = {name: VectorSpec(name, SIZE, dtype, COLUMNS) for name in NAMES}
    vectors = {name: HasSpec(spec) for name, spec in specs.items()}
    sent = [checked(drawn(source, kind, specs["a"]), vectors) for kind in KINDS.values()]
    together = [np.zeros(SIZE) for _ in sent]
    outgoing = OutgoingBatch(sent, specs)

    for shard in range(shards):
        message, pieces = outgoing.at(shard, shards)
        payload = memoryview(b"".join(payload_parts(pieces)))
        heard = IncomingBatch(message, payload, list(specs.values()), {"my:own": mean}).operations()
        here = slice(*extent(SIZE, shard, shards))
        for mine, its, whole in zip(sent, heard, together, strict=True):
            if KINDS[mine.name].brings:
                assert (its.name, its.out) == (mine.name, mine.out)
                whole[here] = written(checked(its, vectors))[here]
            else:
                own = mine._replace(function=mean) if mine.name == "custom" else mine
                numbers = [*checked(its, vectors).numbers]
                assert its._replace(numbers=numbers) == own._replace(numbers=[*own.numbers])
        assert payload_bytes(pieces) == len(payload)

    for mine, whole in zip(sent, together, strict=True):
        if KINDS[mine.name].brings:
            np.testing.assert_array_equal(whole, written(mine), err_msg=mine.name)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_vector_or_a_number_too_many_is_refused_by_the_field(kind: OperationKind) -> None:
    """Whatever the kind takes, and by the limit that C has room for."""
    spec = VectorSpec("a", SIZE, "float64", COLUMNS)
    vectors = {name: HasSpec(spec._replace(name=name)) for name in NAMES}
    sound = checked(drawn(random.Random(1), kind, spec), vectors)

    for field in ("x", "y"):
        limit = OPERANDS_MAX if getattr(kind, field) == ANY else getattr(kind, field)
        with pytest.raises(VectorError, match=rf"^{field}: .*\b{limit}\b"):
            checked(sound._replace(**{field: ["a"] * (limit + 1)}), vectors)
        with pytest.raises(VectorError, match=rf"^{field}.*: there is no vector 'nothing'" if limit else field):
            checked(sound._replace(**{field: [*getattr(sound, field)[1:], "nothing"]}), vectors)
    if kind.writes and not kind.brings:
        with pytest.raises(VectorError, match=rf"numbers: {NUMBERS_MAX + 1} are above the limit of {NUMBERS_MAX}"):
            checked(sound._replace(numbers=[1.0] * (NUMBERS_MAX + 1)), vectors)


def test_each_kind_has_a_number_of_its_own() -> None:
    """Else a shard would take one for another; and a loop is that of a kind, which has no other one."""
    assert len({kind.number for kind in KINDS.values()}) == len(KINDS)
    assert {KINDS[kind.loop].loop for kind in KINDS.values()} == {kind.loop for kind in KINDS.values()}


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_help_says_what_the_methods_of_a_row_take(row: Row[Any]) -> None:
    """Those of batches and of vectors have the row's arguments and docstring."""
    ours, its = getattr(Batch, row.name), getattr(Vector, row.name)
    arguments = [*row.signature.parameters][1:]

    assert [*inspect.signature(ours).parameters] == ["self", "y", *arguments]
    assert [*inspect.signature(its).parameters] == ["self", *arguments]
    assert ours.__doc__ == its.__doc__ == row.doc
    assert row.doc
    assert (ours.__qualname__, its.__qualname__) == (f"Batch.{row.name}", f"Vector.{row.name}")
