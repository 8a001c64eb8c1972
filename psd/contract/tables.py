"""The declaration of sparse tables: rows by 64-bit id, divided among shards by a hash of the id.

Converts a declaration to and from its message, and checks it. Must not know files, values or rounds; a shard converts it to the
arguments of psd_core/table.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest
from psd.contract.printable import is_printable, utf8_size
from psd.v1 import job_pb2
from psd_core.initial import INITIALS, Initial, Zeros

NAME_BYTES_MAX = 256
MODULE_BYTES_MAX = 4096  # as of a tensor's name; shards accept 256 by default
DIM_MAX = 1 << 16
STEPS_MAX = (1 << 31) - 1
ROWS_MAX = 1 << 40
ADMIT_AFTER_MAX = 255

VALUE_DTYPES = {"float32": job_pb2.DTYPE_FLOAT32, "bfloat16": job_pb2.DTYPE_BFLOAT16}
_VALUE_DTYPE_NAMES = {number: name for name, number in VALUE_DTYPES.items()}
UPDATES = ("lazy", "catch_up")
AT_LIMIT = ("evict", "refuse")

_WORDS = {"expire_s": "expire_seconds", "rows_max": "max_rows"}
"""Names of the fields of a SparseTableSpec in workers' programs."""


@dataclass(frozen=True)
class SparseTableSpec:
    """One sparse table. Raises InvalidRequest if it is wrong.

    Attributes:
        name: printable, unique among the job's tables; with `seed` it determines initial values.
        dim: length of a row.
        group: index of the group that has its rule and scalars.
        init: values of rows that nobody has trained. seed: from 0 to 2**64 - 1.
        dtype: dtype of stored values: "float32", or "bfloat16", rounded stochastically.
        updates: what weight decay, momentum and the like do to rows that a step does not touch: "lazy": nothing; "catch_up":
            the same as under the dense rule.
        admit_after: an id gets a row with its n-th gradient; earlier ones are counted and dropped.
        admit_probability: share of the gradients that are counted for that.
        expire_steps, expire_s: a row that nobody has used for so many steps, or seconds, is removed; 0: never. At most one is
            set. A step is a round, or without rounds as many pushes as there are workers.
        rows_max: limit for all shards together; 0: as many as the shards' memory allows.
        at_limit: "evict": rows unused for long make room; "refuse": gradients for new rows are counted and dropped.
        modules: names of the model's modules that look up rows in it; an export has them under the first. They may differ
            between workers.
    """

    name: str
    dim: int
    group: int = 0
    init: Initial = Zeros()  # noqa: RUF009 - it is frozen
    seed: int = 0
    dtype: str = "float32"
    updates: str = "lazy"
    admit_after: int = 1
    admit_probability: float = 1.0
    expire_steps: int = 0
    expire_s: int = 0
    rows_max: int = 0
    at_limit: str = "evict"
    modules: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            refuse(InvalidRequest, "tables.name", 'a string, such as "user" (a table needs no number of rows)', self.name)
        if not 1 <= utf8_size(self.name) <= NAME_BYTES_MAX or not is_printable(self.name):
            raise InvalidRequest(f"tables.name: must have 1 to {NAME_BYTES_MAX} printable bytes, got {self.name!r:.60}")
        for field, low, high in (
            ("dim", 1, DIM_MAX),
            ("group", 0, 1 << 31),
            ("seed", 0, (1 << 64) - 1),
            ("admit_after", 1, ADMIT_AFTER_MAX),
            ("expire_steps", 0, STEPS_MAX),
            ("expire_s", 0, STEPS_MAX),
            ("rows_max", 0, ROWS_MAX),
        ):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise self._wrong(field, f"must be a whole number from {low} to {high}, got {value!r}")
        probability = self.admit_probability
        if not (isinstance(probability, Real) and 0 < probability <= 1):
            raise self._wrong("admit_probability", f"must be > 0 and <= 1, got {probability!r}")
        if self.expire_steps and self.expire_s:
            raise self._wrong("expire_steps", f"is {self.expire_steps}, but rows expire by time already (expire_seconds)")
        for field, allowed in (("dtype", tuple(VALUE_DTYPES)), ("updates", UPDATES), ("at_limit", AT_LIMIT)):
            if getattr(self, field) not in allowed:
                raise self._wrong(field, f"must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")
        for module in self.modules:
            if not 1 <= utf8_size(module) <= MODULE_BYTES_MAX or not is_printable(module):
                raise self._wrong("modules", f"must have 1 to {MODULE_BYTES_MAX} printable bytes, got {module!r:.60}")
        if not isinstance(self.init, Initial):
            raise self._wrong("init", f"must be one of {', '.join(INITIALS)}, got {self.init!r}")
        # NumPy's strings and numbers are equal to Python's, but print differently, and Layout.digest compares the text.
        for field in ("name", "dtype", "updates", "at_limit"):
            object.__setattr__(self, field, str(getattr(self, field)))
        object.__setattr__(self, "admit_probability", float(probability))

    def _wrong(self, field: str, problem: str) -> InvalidRequest:
        return InvalidRequest(f"table {self.name!r}: {_WORDS.get(field, field)}: {problem}")

    def differences(self, other: SparseTableSpec) -> Iterator[tuple[str, object, object]]:
        """Properties that can differ from another table, each with both values."""
        for field in dataclasses.fields(self):
            if field.compare:
                yield _WORDS.get(field.name, field.name), getattr(self, field.name), getattr(other, field.name)

    def to_message(self) -> job_pb2.TableSpec:
        """The protobuf form."""
        return job_pb2.TableSpec(
            name=self.name,
            dim=self.dim,
            group=self.group,
            init=type(self.init).__name__,
            init_arguments=[float(value) for value in dataclasses.astuple(self.init)],
            seed=self.seed,
            dtype=VALUE_DTYPES[self.dtype],
            catch_up=self.updates == "catch_up",
            admit_after=self.admit_after,
            admit_probability=self.admit_probability,
            expire_steps=self.expire_steps,
            expire_seconds=self.expire_s,
            rows_max=self.rows_max,
            refuse_at_limit=self.at_limit == "refuse",
            modules=self.modules,
        )

    @classmethod
    def from_message(cls, message: job_pb2.TableSpec) -> SparseTableSpec:
        """Read the protobuf form; raises as the constructor does."""
        where = f"table {message.name!r:.60}"
        if message.dtype not in _VALUE_DTYPE_NAMES:
            raise InvalidRequest(f"{where}: dtype: must be one of {', '.join(VALUE_DTYPES)}, got number {message.dtype}")
        return cls(
            name=message.name,
            dim=message.dim,
            group=message.group,
            init=_initial(where, message),
            seed=message.seed,
            dtype=_VALUE_DTYPE_NAMES[message.dtype],
            updates="catch_up" if message.catch_up else "lazy",
            admit_after=message.admit_after,
            admit_probability=message.admit_probability,
            expire_steps=message.expire_steps,
            expire_s=message.expire_seconds,
            rows_max=message.rows_max,
            at_limit="refuse" if message.refuse_at_limit else "evict",
            modules=tuple(message.modules),
        )


def _initial(where: str, message: job_pb2.TableSpec) -> Initial:
    kind = INITIALS.get(message.init)
    if kind is None:
        raise InvalidRequest(f"{where}: init: must be one of {', '.join(INITIALS)}, got {message.init!r:.60}")
    names = [field.name for field in dataclasses.fields(kind)]
    values = list(message.init_arguments)
    if len(values) != len(names) or not all(map(math.isfinite, values)):
        raise InvalidRequest(f"{where}: init: {message.init} takes {len(names)} finite numbers, got {values[:4]}")
    try:
        return kind(*values)
    except ValueError as error:
        raise InvalidRequest(f"{where}: init: {error}") from None
