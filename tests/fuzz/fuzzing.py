"""Helpers of the fuzz targets: how many examples, and protobuf messages of any kind made from their descriptors.

In the suite each target runs a few fixed examples; `make fuzz` runs many random ones, and prints how to repeat one that fails.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PSD_FUZZ_EXAMPLES", "0"))

fuzzed = settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
"""Examples for each target."""

SLACK_BYTES = 256 << 10
"""Beside a target's bound: Python's own, such as an error with its traceback."""


@contextmanager
def allocates_at_most(nbytes: int) -> Iterator[None]:
    """Fails if more memory than that, and SLACK_BYTES, is allocated at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= nbytes + SLACK_BYTES, f"{peak} bytes"


def ends_in(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> Any:
    """The result of a call, or None if it has raised one of these; any other exception passes, and fails the test."""
    try:
        return call()
    except kinds:
        return None


_NUMBERS = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(-(2**31), 2**31 - 1),
}
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    **{kind: st.integers(0, 5) | st.sampled_from([2**31, 2**32 - 1]) | whole for kind, whole in _NUMBERS.items()},
    FieldDescriptor.TYPE_ENUM: st.integers(0, 5) | st.sampled_from([-1, 2**31 - 1]),
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e300]) | st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=64),
    FieldDescriptor.TYPE_STRING: st.sampled_from(["", "sgd", "adam", "lamb", "my.module:Rule", "momentum", "lr", "../x"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}


_USUALLY = st.sampled_from([True] * 31 + [False])


def messages(kind: type[Message], known: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Messages with any fields, of any values.

    known: what usually stands there, by field, at any depth: a value; a strategy, whose None is nothing; for a message: what is
        known in it alone.
    """
    return _of(kind.DESCRIPTOR, known or {}, 4).map(lambda fields: kind(**fields))


@st.composite
def _of(draw: st.DrawFn, descriptor: Any, known: dict[str, Any], depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in descriptor.fields:
        hint = known.get(field.name)
        if not draw(st.booleans() if hint is None else _USUALLY):
            continue
        inner = hint if isinstance(hint, dict) else {}
        if hint is not None and hint is not inner and draw(_USUALLY):
            fields[field.name] = draw(hint) if isinstance(hint, st.SearchStrategy) else hint
        elif field.message_type is None or depth:
            within = {name: value for name, value in known.items() if name != field.name} | inner  # RowsPart, too, has `rows`
            one = _of(field.message_type, within, depth - 1) if field.message_type else _SCALARS[field.type]
            fields[field.name] = draw(st.lists(one, max_size=5) if field.is_repeated else one)
    return fields
