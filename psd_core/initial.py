"""Initial values of a table's rows, before anybody has trained them.

A value is a pure function of the table's seed and name, the row's id and the place in the row (csrc/table_initial.c), so that
it is the same on every shard and machine, and after a row has been evicted. Must not know stores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, cast

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Initial:
    """Base of the distributions. Use a subclass."""

    number: ClassVar[int]
    _arguments: ClassVar[tuple[str, str]]
    """Names of the arguments for the kernel's two numbers; "" for 0."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, Real) or isinstance(value, bool) or not abs(cast("float", value)) <= _LARGEST:
                raise ValueError(f"{name}: expected a number that is finite as a float32, got {value!r}")
            object.__setattr__(self, name, float(value))  # equal numbers of any type give equal distributions
        if getattr(self, "std", 0) < 0:
            raise ValueError(f"std: must be >= 0, got {self.std}")  # type: ignore[attr-defined]

    @property
    def numbers(self) -> tuple[float, float]:
        """The two numbers for the kernel."""
        first, second = (float(getattr(self, name)) if name else 0.0 for name in self._arguments)
        return first, second

    def to_json(self) -> dict[str, Any]:
        """Name and arguments."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Zeros(Initial):
    """Zeros everywhere."""

    number: ClassVar[int] = 0
    _arguments = "", ""


@dataclass(frozen=True)
class Constant(Initial):
    """One value everywhere.

    Args:
        value: finite as a float32.

    Raises:
        ValueError: it is not.
    """

    number: ClassVar[int] = 1
    _arguments = "value", ""

    value: float


@dataclass(frozen=True)
class Uniform(Initial):
    """Uniform distribution.

    Args:
        low, high: the bounds; finite as a float32.

    Raises:
        ValueError: a number is not finite, or `low` is above `high`.
    """

    number: ClassVar[int] = 2
    _arguments = "low", "high"

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"low: must be at most high, which is {self.high}, got {self.low}")


@dataclass(frozen=True)
class Normal(Initial):
    """Normal distribution.

    Args:
        std: standard deviation, >= 0.
        mean: the mean.

    Raises:
        ValueError: a number is not finite as a float32, or `std` is negative.
    """

    number: ClassVar[int] = 3
    _arguments = "mean", "std"

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class TruncatedNormal(Initial):
    """Normal distribution around 0, cut off at two standard deviations.

    Args:
        std: standard deviation before the cut, >= 0.

    Raises:
        ValueError: `std` is not finite as a float32, or negative.
    """

    number: ClassVar[int] = 4
    _arguments = "", "std"

    std: float


INITIALS = {kind.__name__: kind for kind in (Zeros, Constant, Uniform, Normal, TruncatedNormal)}
"""Classes by name."""
