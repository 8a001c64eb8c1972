"""The declaration of a table's partition, and the superblock that keeps it: what never changes in the file.

Owns the checks of a declaration, where a rule's slots lie in a row, and the superblock; csrc/table.h has the rest.
Must not open, map or lock anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from psd_core import _arena
from psd_core._arena_format import BYTE_ORDER_MARK, ArenaCorrupt, check_front
from psd_core.initial import INITIALS, Initial, Zeros
from psd_core.optimizer import RuleFacts, Slot
from psd_core.rules import RULES

MAGIC = b"PSDTABLE"
FORMAT_VERSION = 5
SUPERBLOCK_BYTES = 4096
_FRONT = struct.Struct("<8sIIQQ")  # magic, format, byte order mark, bytes of text, checksum of all with this 0

ROWWISE_ADAGRAD = "rowwise_adagrad"
"""The rule that only tables have: Adagrad with one sum a row."""
OWN = "own"
"""A rule of the caller's, which comes with each push."""
OWN_SLOTS_MAX = 64
DIM_MAX = 1 << 16
NAME_BYTES_MAX = 256
ROWS_MAX = 1 << 31
PUSH_MAX = 1 << 24
"""Largest number of ids that a push may have."""
OVERHEAD_BYTES = 45
"""Largest number of bytes that a row takes beside value and slots: head, and index entry at the lowest load after growth."""
AT_LIMIT = ("evict", "refuse")
UPDATES = ("lazy", "catch_up")
DTYPES = ("float32", "bfloat16")


class RowLayout(NamedTuple):
    """Positions in a row, in floats: `slots` are offsets by the kernel's slots, -1 for one that is not kept.

    Where rows catch up, the last two numbers' bits are those of a uint64: the step that the row is at.
    """

    slots: tuple[int, ...]
    starts: tuple[float, ...]
    width: int


@dataclass(frozen=True)
class TableSpec:
    """The declaration of a table's partition.

    Attributes:
        name: of the table; with `seed`, it determines initial values.
        dim: numbers of a value.
        rule: a key of RULES, not layer-wise, or ROWWISE_ADAGRAD, or OWN. flags: of the rule.
        constants: what slots begin with, by the rule's names for that.
        own_slots: under OWN, what each slot begins with.
        init: values of rows that nobody has trained.
        seed: from 0 to 2**64 - 1.
        max_bytes: memory for rows, heads and index.
        admit_after: an id gets a row with the gradient that is its n-th; those before are counted and dropped.
        admit_probability: share of the gradients that count for that, by chance that follows from seed, id and step.
        at_limit: "evict": rows that were not used for long make room; "refuse": gradients for new rows are counted and dropped.
        push_max: largest number of ids in a push.
        notes: number of words that the caller keeps beside the rows, such as a dedup window.
        updates: "lazy": a row that a step does not touch stays as it is, as under torch's SparseAdam. "catch_up": when it is
            next touched or read, it is brought to where a dense tensor would be: the rule is applied with a gradient of zeros
            and the scalars of that time, for each step that it has missed. The bits are the dense tensor's. It costs a kernel
            for each such step. See docs/design/tables.md.
        dtype: how values are stored, "float32" or "bfloat16"; slots are float32, and so is what comes and goes. A value is
            computed in float32, then rounded to bfloat16 stochastically, by chance that follows from seed, id and step.

    Raises:
        ValueError, TypeError: naming the field and its limit.
    """

    name: str
    dim: int
    rule: str
    flags: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    init: Initial = Zeros()  # noqa: RUF009 - it is frozen
    seed: int = 0
    max_bytes: int = 1 << 30
    admit_after: int = 1
    admit_probability: float = 1.0
    at_limit: str = "evict"
    push_max: int = PUSH_MAX
    notes: int = 0
    updates: str = "lazy"
    dtype: str = "float32"
    own_slots: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"name: expected 1 to {NAME_BYTES_MAX} bytes, got {self.name!r}")
        for name, low, high in (
            ("dim", 1, DIM_MAX),
            ("seed", 0, (1 << 64) - 1),
            ("notes", 0, 1 << 24),
            ("push_max", 1, PUSH_MAX),
            ("admit_after", 1, 255),
        ):
            if not isinstance(getattr(self, name), int) or not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {getattr(self, name)!r}")
        if not 0 < self.admit_probability <= 1:
            raise ValueError(f"admit_probability: must be > 0 and <= 1, got {self.admit_probability}")
        names = [name for name, facts in RULES.items() if not facts.row.is_layerwise] + [ROWWISE_ADAGRAD, OWN]
        if self.rule not in names:
            raise ValueError(f"rule: expected one of {', '.join(names)}, got {self.rule!r}")
        if len(self.own_slots) > (OWN_SLOTS_MAX if self.rule == OWN else 0):
            raise ValueError(f"own_slots: expected at most {OWN_SLOTS_MAX}, and none but under {OWN!r}, got {self.own_slots}")
        if self.rule == OWN and self.catches_up:
            raise ValueError("updates: expected lazy, because rows catch up by psd's own rules alone, got 'catch_up'")
        facts = self.facts
        for flag in self.flags:
            if flag not in facts.flags:
                raise ValueError(f"flags: expected some of {', '.join(facts.flags) or 'none'}, got {flag!r}")
        if set(self.constants) - set(facts.constants):
            raise ValueError(
                f"constants: expected some of {', '.join(facts.constants) or 'none'}, got {sorted(self.constants)}"
            )
        for name, value in self.constants.items():
            problem = facts.ranges[name].problem(value)
            if problem:
                raise ValueError(f"constants: {name} {problem}")
        if not isinstance(self.init, Initial):
            raise TypeError(f"init: expected one of {', '.join(INITIALS)}, got {self.init!r}")
        for name, words in (("at_limit", AT_LIMIT), ("updates", UPDATES), ("dtype", DTYPES)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name}: expected one of {', '.join(words)}, got {getattr(self, name)!r}")
        if self.max_bytes < self.row_bytes:
            raise ValueError(f"max_bytes: expected at least {self.row_bytes}, room for one row, got {self.max_bytes}")

    @cached_property
    def facts(self) -> RuleFacts:
        """Those of the rule whose arithmetic is used."""
        if self.rule == OWN:
            names = [f"slot{number}" for number in range(len(self.own_slots))]
            return RuleFacts(OWN, constants=tuple(names), all_slots=tuple(Slot(name, start=name) for name in names))
        return RULES["adagrad" if self.rule == ROWWISE_ADAGRAD else self.rule]

    @cached_property
    def layout(self) -> RowLayout:
        """Positions of value and slots in a row."""
        facts, at = self.facts, self.dim
        kept = facts.slots(self.flags)
        constants = dict(self.constants)
        constants.update(zip(facts.constants, self.own_slots, strict=False))
        places, starts = [], []
        for slot in facts.all_slots:
            places.append(at if slot.name in kept else -1)
            starts.append(float(constants.get(slot.start, 0.0)))
            at += 0 if slot.name not in kept else 1 if self.rule == ROWWISE_ADAGRAD else self.dim
        return RowLayout(tuple(places), tuple(starts), at + 2 * self.catches_up)

    @property
    def catches_up(self) -> bool:
        """True if `updates` says so."""
        return self.updates == "catch_up"

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes at most, everything counted."""
        saved = self.dim // 2 if self.dtype == "bfloat16" else 0
        return 4 * (self.layout.width - saved) + OVERHEAD_BYTES

    @property
    def rows_max(self) -> int:
        """Number of rows at the limit."""
        return min(self.max_bytes // self.row_bytes, ROWS_MAX)

    def pack(self) -> bytes:
        """The superblock."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {"init": self.init.to_json(), "constants": dict(self.constants)}
        text = json.dumps(fields).encode()
        if _FRONT.size + len(text) > SUPERBLOCK_BYTES:
            raise ValueError(
                f"name, flags and constants: at most {SUPERBLOCK_BYTES - _FRONT.size} bytes together, got {len(text)}"
            )

        def block(check: int) -> bytes:
            return (_FRONT.pack(MAGIC, FORMAT_VERSION, BYTE_ORDER_MARK, len(text), check) + text).ljust(SUPERBLOCK_BYTES, b"\0")

        return block(_arena.checksum(block(0)))


def unpack(superblock: bytes) -> TableSpec:
    """The inverse of TableSpec.pack. Raises ArenaCorrupt."""
    if len(superblock) < SUPERBLOCK_BYTES:
        raise ArenaCorrupt(f"superblock: the file has {len(superblock)} bytes, fewer than {SUPERBLOCK_BYTES}: truncated")
    magic, version, order, nbytes, check = _FRONT.unpack_from(superblock)
    check_front((magic, version, order), MAGIC, FORMAT_VERSION, "a table")
    unsigned = bytearray(superblock)
    _FRONT.pack_into(unsigned, 0, magic, version, order, nbytes, 0)
    if nbytes > SUPERBLOCK_BYTES - _FRONT.size or _arena.checksum(unsigned) != check:
        raise ArenaCorrupt(f"superblock: it does not have the checksum {check:#x}")
    fields: dict[str, Any] = json.loads(superblock[_FRONT.size : _FRONT.size + nbytes])
    init = fields.pop("init")
    kind = INITIALS[init.pop("name")]
    tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("flags", "own_slots") if name in fields}
    return TableSpec(**{**fields, **tuples, "init": kind(**init)})
