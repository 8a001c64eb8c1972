"""The options of a sparse table, each said once: its default, its limits and its check.

The declarations of a table are subclasses, each with the table's rule in its own form: a worker's (psd_client/tables.py), a
job's (psd/contract/tables.py) and a store's (_table_format.py). Must not know rules, messages or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from typing_extensions import Self

from psd_core.initial import INITIALS, Initial, Zeros

NAME_BYTES_MAX = 256
DIM_MAX = 1 << 16
SEED_MAX = (1 << 64) - 1
STEPS_MAX = (1 << 31) - 1
ROWS_MAX = 1 << 40
ADMIT_AFTER_MAX = 255

UPDATES = ("lazy", "catch_up")
AT_LIMIT = ("evict", "refuse")
DTYPES = ("float32", "bfloat16")


def checked_by(check: Callable[[Any], Any], expected: str) -> dict[str, Any]:
    """Metadata of an option. `check` returns the value in the one form that is kept, or None if it is not as expected."""
    return {"check": check, "expected": expected}


def whole(low: int, high: int) -> dict[str, Any]:
    """Metadata of an option that is a whole number, also NumPy's."""

    def check(value: Any) -> int | None:
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
        return number if number is not None and low <= number <= high else None

    return checked_by(check, f"a whole number from {low} to {high}")


def word(*words: str) -> dict[str, Any]:
    """Metadata of an option that is one of some words."""
    return checked_by(
        lambda value: str(value) if isinstance(value, str) and value in words else None, f"one of {', '.join(words)}"
    )


def _name(value: Any) -> str | None:
    return str(value) if isinstance(value, str) and 1 <= len(value.encode(errors="replace")) <= NAME_BYTES_MAX else None


def _share(value: Any) -> float | None:
    return float(value) if isinstance(value, Real) and 0 < float(value) <= 1 else None


def _initial(value: Any) -> Initial | None:
    return value if isinstance(value, Initial) else None


@dataclass(frozen=True)
class TableOptions:
    """The options of a sparse table. docs/tables.md says what they are for.

    Equal options print alike, whatever kind of number or string they were given as.

    Attributes:
        name: unique among the job's tables; determines the initial values, together with `seed`.
        dim: length of a row.
        init: values of rows that nobody has trained.
        seed: of the initial values, of admission and of rounding.
        dtype: how values are stored; slots are float32, and so is what comes and goes. A value is computed in float32, then
            rounded to bfloat16 stochastically, by chance that follows from seed, id and step.
        updates: "lazy": a row that a step does not touch stays as it is, as under torch's SparseAdam. "catch_up": when it is
            next touched or read, it is brought to where a dense tensor would be: the rule is applied with a gradient of zeros
            and the scalars of that time, for each step that it has missed. The bits are the dense tensor's. It costs a kernel
            for each such step. See docs/design/tables.md.
        admit_after: an id gets a row with its n-th gradient; those before are counted and dropped.
        admit_probability: share of the gradients that count for that, by chance that follows from seed, id and step.
        expire_steps, expire_seconds: a row that nobody has used for so long is removed; 0: never. At most one is set. A step is
            a round, or without rounds as many pushes as there are workers.
        max_rows: limit for all shards together; 0: as many as the shards' memory allows.
        at_limit: "evict": rows that were not used for long make room; "refuse": gradients for new rows are counted and dropped.

    Raises:
        ValueError: names the table, the option and its limits.
    """

    name: str = field(
        metadata=checked_by(_name, f'a string of 1 to {NAME_BYTES_MAX} bytes, such as "user" (a table needs no number of rows)')
    )
    dim: int = field(metadata=whole(1, DIM_MAX))
    _: KW_ONLY
    init: Initial = field(default=Zeros(), metadata=checked_by(_initial, f"one of {', '.join(INITIALS)}"))
    seed: int = field(default=0, metadata=whole(0, SEED_MAX))
    dtype: str = field(default="float32", metadata=word(*DTYPES))
    updates: str = field(default="lazy", metadata=word(*UPDATES))
    admit_after: int = field(default=1, metadata=whole(1, ADMIT_AFTER_MAX))
    admit_probability: float = field(default=1.0, metadata=checked_by(_share, "a number > 0 and <= 1"))
    expire_steps: int = field(default=0, metadata=whole(0, STEPS_MAX))
    expire_seconds: int = field(default=0, metadata=whole(0, STEPS_MAX))
    max_rows: int = field(default=0, metadata=whole(0, ROWS_MAX))
    at_limit: str = field(default="evict", metadata=word(*AT_LIMIT))

    def __post_init__(self) -> None:
        for option in fields(self):
            if "check" in option.metadata:
                given = getattr(self, option.name)
                kept = option.metadata["check"](given)
                if kept is None:
                    raise self.wrong(option.name, f"must be {option.metadata['expected']}, got {given!r:.80}")
                object.__setattr__(self, option.name, kept)
        if self.expire_steps and self.expire_seconds:
            raise self.wrong("expire_steps", f"is {self.expire_steps}, but rows expire by time already (expire_seconds)")

    def wrong(self, option: str, problem: str) -> ValueError:
        """The error for an option."""
        return ValueError(f"table {self.name!r:.{NAME_BYTES_MAX}}: {option}: {problem}")

    @classmethod
    def of(cls, options: TableOptions, **own: Any) -> Self:
        """A declaration of this kind with the options of another, but for those in `own`."""
        return cls(**{option.name: getattr(options, option.name) for option in fields(TableOptions)} | own)

    def to_json(self) -> dict[str, Any]:
        """All options by name, and what the subclass has."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"init": self.init.to_json()}
