"""What a put sets all tensors to: a function of its number, so that whoever reads a version sees whether it is whole.

Most elements are the same in all versions, as of a model that changes little, so that deltas travel. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_LIFE = 10_000
"""Numbers that each life of a publisher has, if it publishes alone."""

TENSORS = ("big", "half", "whole", "small")
EVERY = 16
"""Of so many elements one changes, in each of which a block of `big` has several."""

_KEPT = 97
_OF_RANKS = (("big", "half"), ("whole", "small"))


def state_of(number: int, shards: int, names: Sequence[str] = TENSORS) -> dict[str, NDArray[Any]]:
    """The tensors of a put."""
    big = (np.arange(40_000 * shards) % _KEPT).astype(np.float32)
    big[::EVERY] = number % 65_521
    values = {
        "big": big,
        "half": np.full(300, number % 2039, np.float16),
        "whole": np.full(2000 * shards, number, np.int64),
        "small": np.full((3, 2), number % 65_521, np.float32),
    }
    return {name: values[name] for name in names}


def parts_of(number: int, shards: int, ranks: int) -> list[dict[str, NDArray[Any]]]:
    """What each rank puts of it."""
    if ranks == 1:
        return [state_of(number, shards)]
    return [state_of(number, shards, names) for names in _OF_RANKS]


def meta_of(number: int) -> dict[str, int]:
    """What travels with it."""
    return {"number": number}


def wrong_in(values: Mapping[str, NDArray[Any]], meta: Any, shards: int, dtype: str | None) -> str:
    """What is wrong with a version that was read; "" if it is what one put has set, and its meta says which."""
    if not isinstance(meta, dict) or set(meta) != {"number"}:
        return f"its meta is {meta!r}"
    for name, expected in state_of(meta["number"], shards, tuple(values)).items():
        if expected.dtype == np.float32 and dtype == "bfloat16":
            bits = expected.view(np.uint32)
            rounded = bits + 0x7FFF + (bits >> 16 & 1)
            expected = (rounded & 0xFFFF0000).view(np.float32)
        found = values[name]
        if found.shape != expected.shape:
            return f"{name} has shape {found.shape}"
        differs = np.flatnonzero(found.reshape(-1) != expected.reshape(-1).astype(found.dtype))
        if differs.size:
            first = int(differs[0])
            got, wanted = found.reshape(-1)[first], expected.reshape(-1)[first]
            told = f"{differs.size} of {found.size} elements of {name} are not of put {meta['number']}"
            return f"{told}: {first} is {got}, not {wanted}"
    return ""
