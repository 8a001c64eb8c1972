"""The declaration of a table's partition, and the superblock that keeps it: what never changes in the file.

Owns what a declaration has beside its options (table_options.py), where a rule's slots lie in a row, and the superblock;
csrc/table.h has the rest. Must not open, map or lock anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from typing_extensions import override

from psd_core._store_format import Superblock
from psd_core.initial import INITIALS
from psd_core.optimizer import RuleFacts, Slot
from psd_core.rules import RULES
from psd_core.table_options import TableOptions, whole

SUPERBLOCK = Superblock(b"PSDTABLE", 6, "a table", 4096)

ROWWISE_ADAGRAD = "rowwise_adagrad"
"""The rule that only tables have: Adagrad with one sum a row."""
OWN = "own"
"""A rule of the caller's, which comes with each push."""
OWN_SLOTS_MAX = 64
ROWS_MAX = 1 << 31
"""Largest number of rows of one partition."""
PUSH_MAX = 1 << 24
"""Largest number of ids that a push may have."""
OVERHEAD_BYTES = 45
"""Largest number of bytes that a row takes beside value and slots: head, and index entry at the lowest load after growth."""


class RowLayout(NamedTuple):
    """Positions in a row, in floats: `slots` are offsets by the kernel's slots, -1 for one that is not kept.

    Where rows catch up, the last two numbers' bits are those of a uint64: the step that the row is at.
    """

    slots: tuple[int, ...]
    starts: tuple[float, ...]
    width: int


@dataclass(frozen=True)
class TableSpec(TableOptions):
    """The declaration of a table's partition: its options, and what its rows are for.

    Attributes:
        rule: a key of RULES, not layer-wise, or ROWWISE_ADAGRAD, or OWN. flags: of the rule.
        constants: what slots begin with, in the rule's order, or all 0 if there are none; under OWN, one for each slot.
        max_rows: limit of the rows of this partition.
        push_max: largest number of ids in a push.
        notes: number of words that the caller keeps beside the rows, such as a dedup window.
        expire_steps, expire_seconds: for the caller, who calls TableStore.expire.

    Raises:
        ValueError: names the field and its limit.
    """

    rule: str
    flags: tuple[str, ...] = ()
    constants: tuple[float, ...] = ()
    max_rows: int = field(default=1 << 20, metadata=whole(1, ROWS_MAX), kw_only=True)
    push_max: int = field(default=PUSH_MAX, metadata=whole(1, PUSH_MAX), kw_only=True)
    notes: int = field(default=0, metadata=whole(0, 1 << 24), kw_only=True)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, facts in RULES.items() if not facts.row.is_layerwise] + [ROWWISE_ADAGRAD, OWN]
        if self.rule not in names:
            raise self.wrong("rule", f"must be one of {', '.join(names)}, got {self.rule!r}")
        facts = self.facts
        if self.rule == OWN and len(self.constants) > OWN_SLOTS_MAX:
            raise self.wrong("constants", f"must be at most {OWN_SLOTS_MAX}, one for each slot, got {len(self.constants)}")
        if len(self.constants) not in (0, len(facts.constants)):
            expected = f"{len(facts.constants)} numbers ({', '.join(facts.constants)})" if facts.constants else "none"
            raise self.wrong("constants", f"must be {expected}, got {len(self.constants)}")
        if self.rule == OWN and self.catches_up:
            raise self.wrong("updates", "must be lazy, because rows catch up by psd's own rules alone, got 'catch_up'")
        if facts.row.goes_in_turns and self.catches_up:
            raise self.wrong("updates", f"must be lazy, because updates by {self.rule} go in turns, got 'catch_up'")
        for flag in self.flags:
            if flag not in facts.flags:
                raise self.wrong("flags", f"must be some of {', '.join(facts.flags) or 'none'}, got {flag!r}")
        for name, value in zip(facts.constants, self.constants, strict=False):
            problem = facts.ranges[name].problem(value) if name in facts.ranges else None
            if problem:
                raise self.wrong("constants", f"{name} {problem}")

    @cached_property
    def facts(self) -> RuleFacts:
        """Those of the rule whose arithmetic is used."""
        if self.rule == OWN:
            names = [f"slot{number}" for number in range(len(self.constants))]
            return RuleFacts(OWN, constants=tuple(names), all_slots=tuple(Slot(name, start=name) for name in names))
        return RULES["adagrad" if self.rule == ROWWISE_ADAGRAD else self.rule]

    @cached_property
    def layout(self) -> RowLayout:
        """Positions of value and slots in a row."""
        facts, at = self.facts, self.dim
        kept = facts.slots(self.flags)
        constants = dict(zip(facts.constants, self.constants, strict=False))
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

    def pack(self) -> bytes:
        """The superblock."""
        return SUPERBLOCK.pack(json.dumps(self.to_json()).encode())


def read_spec(read: Callable[[int, int], bytes], size: int) -> TableSpec:
    """The declaration in a file of this size, as Superblock.read reads it. Raises ArenaCorrupt."""
    fields: dict[str, Any] = json.loads(SUPERBLOCK.read(read, size))
    init = fields["init"]
    fields["init"] = INITIALS[init.pop("name")](**init)
    return TableSpec(**fields | {name: tuple(fields[name]) for name in ("flags", "constants")})
