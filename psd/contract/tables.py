"""The declaration of sparse tables: rows by 64-bit id, divided among shards by a hash of the id.

Converts a declaration to and from its message. Must not know files, values or rounds, nor the limits of options, which
psd_core/table_options.py checks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from psd.contract.errors import InvalidRequest
from psd.contract.printable import is_printable, utf8_size
from psd.v1 import job_pb2
from psd_core.initial import INITIALS, Initial
from psd_core.table_options import TableOptions, checked_by, whole

_DTYPES = {"float32": job_pb2.DTYPE_FLOAT32, "bfloat16": job_pb2.DTYPE_BFLOAT16}
_DTYPE_NAMES = {number: name for name, number in _DTYPES.items()}

MODULE_BYTES_MAX = 4096  # as of a tensor's name; shards accept 256 by default


def _modules(value: Iterable[str]) -> tuple[str, ...] | None:
    names = tuple(value)
    return names if all(1 <= utf8_size(name) <= MODULE_BYTES_MAX and is_printable(name) for name in names) else None


@dataclass(frozen=True)
class SparseTableSpec(TableOptions):
    """One sparse table of a job: its options, and the group that has its rule. Raises InvalidRequest if it is wrong.

    Attributes:
        name: printable. group: index of the group that has its rule and scalars.
        modules: names of the model's modules that look up rows in it; an export has them under the first. They may differ
            between workers.
    """

    group: int = dataclasses.field(default=0, metadata=whole(0, 1 << 31))
    modules: tuple[str, ...] = dataclasses.field(
        default=(),
        compare=False,
        repr=False,
        metadata=checked_by(_modules, f"names of 1 to {MODULE_BYTES_MAX} printable bytes"),
    )

    @override
    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if not is_printable(self.name):
            raise InvalidRequest(f"table {self.name!r}: name: must be printable")

    def differences(self, other: SparseTableSpec) -> Iterator[tuple[str, object, object]]:
        """Properties that can differ from another table, each with both values."""
        for field in dataclasses.fields(self):
            if field.compare:
                yield field.name, getattr(self, field.name), getattr(other, field.name)

    @override
    def to_json(self) -> dict[str, Any]:
        """All options by name; `modules` only if there are some."""
        return {name: value for name, value in super().to_json().items() if value or name != "modules"}

    def to_message(self) -> job_pb2.TableSpec:
        """The protobuf form."""
        return job_pb2.TableSpec(
            **{name: getattr(self, name) for name in _PLAIN},
            init=type(self.init).__name__,
            init_arguments=[float(value) for value in dataclasses.astuple(self.init)],
            dtype=_DTYPES[self.dtype],
        )

    @classmethod
    def from_message(cls, message: job_pb2.TableSpec) -> SparseTableSpec:
        """Read the protobuf form; raises as the constructor does."""
        return cls(
            **{name: getattr(message, name) for name in _PLAIN},
            init=_initial(f"table {message.name!r:.60}", message),
            dtype=_DTYPE_NAMES.get(message.dtype, f"number {message.dtype}"),
        )


_PLAIN = [field.name for field in dataclasses.fields(SparseTableSpec) if field.name not in ("init", "dtype")]
"""Fields that a message has under the same name, in the same form."""


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
