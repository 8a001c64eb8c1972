"""Server-side vectors on the wire: declarations and batches as messages, and what may be in them.

Both sides say operations in the words of psd_core/vector_operations.py. Owns their message form, how a batch is cut for a
shard, and the checks that need no vectors' values. Must not know sessions, files or connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from psd.contract.config import is_rule_path
from psd.contract.errors import InvalidRequest
from psd_core import vector_operations as words
from psd_core.vector import VectorSpec


class Custom(NamedTuple):
    """out = function(piece of x[0], ..., *arguments), by a user's function that the operator of the shards has allowed."""

    out: str
    function: str
    x: Sequence[str]
    arguments: Sequence[float] = ()


Operation: TypeAlias = words.Operation | Custom

OPERANDS_MAX = 64
"""Limit of the vectors of one operation."""


def is_custom(function: str) -> bool:
    """True for the import path of a user's function, which no built-in one looks like."""
    return isinstance(function, str) and ":" in function


def check_function(kind: str, function: str, arguments: int, dtype: str) -> None:
    """Raise InvalidRequest unless a function of that name may be asked for, with so many arguments, for vectors of a dtype.

    kind: "map" or "zip".
    """
    if not isinstance(function, str):
        raise InvalidRequest(f"{kind}: expected the name of a function, got {function!r}")
    if is_custom(function):
        if not is_rule_path(function):
            raise InvalidRequest(f"{kind}: expected an import path, such as my_module:my_function, got {function[:80]!r}")
        return
    known = words.MAP_FUNCTIONS if kind == "map" else words.ZIP_FUNCTIONS
    if function not in known:
        raise InvalidRequest(f"{kind}: no function {function[:80]!r}; there are {', '.join(known)}, and import paths")
    if arguments != len(known[function]):
        expected = ", ".join(known[function]) or "none"
        raise InvalidRequest(f"{kind}: {function} takes the arguments: {expected}; got {arguments}")
    names = list(known)
    if dtype == "int64" and names.index(function) >= names.index("sqrt" if kind == "map" else "div"):
        raise InvalidRequest(f"{kind}: {function} is not for int64")


def check_alike(kind: str, specs: Sequence[VectorSpec]) -> None:
    """Raise InvalidRequest unless these vectors have one size and one dtype."""
    first = specs[0]
    for spec in specs[1:]:
        if (spec.size, spec.dtype) != (first.size, first.dtype):
            raise InvalidRequest(
                f"{kind}: {first.name!r} has {first.size} {first.dtype}, and {spec.name!r} {spec.size} {spec.dtype}; they must "
                "have the same size and dtype"
            )
