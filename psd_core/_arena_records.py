"""The small durable facts in an arena's front: named words, members, decisions. Each changes whole or not at all.

Knows the front's mapping; must not know blocks or pages. Thread-safe.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable

from psd_core import _arena
from psd_core import _arena_format as form
from psd_core._arena import Words
from psd_core._store_format import ArenaCorrupt, StoreClosed

_SET = ("loaded", "loaded_slots")
_NAMED = (
    "initialized",
    "timeline",
    "decided",
    "tentative",
    "restarts",
    "undeclared",
    *_SET,
    "given_up",
    "cut_order",
    "left_at",
)
WORDS = (*_NAMED, *(f"spare_{i}" for i in range(len(_NAMED), form.WORD_SLOTS)))
"""Names of the durable words, in file order."""

_INDEX = {name: i for i, name in enumerate(WORDS)}
_U64_MAX = (1 << 64) - 1
_CLOCK_BITS = 56
_CLOCK_MAX = (1 << _CLOCK_BITS) - 1
_STATE_MAX = 255


class Records:
    """Words, members and decisions of a mapped front."""

    def __init__(self, front: form.Front, mapping: mmap.mmap, crash_point: Callable[[str], None]) -> None:
        self._mapping, self._members_at = mapping, front.members_at
        self._workers = front.workers
        self._decision_words = front.decision_words
        self._words = Words(mapping, front.words_at, form.WORD_SLOTS)
        self._members = Words(mapping, front.members_at, form.MEMBER_WORDS * front.workers)
        self._decisions = Words(mapping, front.decisions_at, front.decision_words * form.DECISION_SLOTS)
        self._crash_point = crash_point
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Refuse changes from now on with StoreClosed; the file may soon belong to somebody else."""
        with self._lock:
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the arena has been closed")

    def verify(self) -> None:
        """Raise ArenaCorrupt for a wrong selector or a decision without its checksum."""
        for rank in range(self._workers):
            selector = self._members.load(form.MEMBER_WORDS * rank)
            if selector not in (0, 1):
                raise ArenaCorrupt(f"member {rank}: the selector is {selector}, neither 0 nor 1")
        for slot in range(form.DECISION_SLOTS):
            stamp = self._decisions.load(self._decision_words * slot)
            if stamp == 0:
                continue
            if (stamp - 1) % form.DECISION_SLOTS != slot:
                raise ArenaCorrupt(f"decision {slot} of the ring: it holds round {stamp - 1}, whose place is another")
            if self._decision_check(stamp, slot) != self._decisions.load(self._decision_words * slot + 1):
                raise ArenaCorrupt(f"decision {slot} of the ring: round {stamp - 1} does not have its checksum")

    def word(self, name: str) -> int:
        """The value of one of WORDS; 0 in a new arena."""
        return self._words.load(_INDEX[name])

    def set_word(self, name: str, value: int) -> None:
        """Set one of WORDS, to less than 2**64."""
        with self._lock:
            self._check_open()
            self._words.store(_INDEX[name], value)

    def member(self, rank: int) -> tuple[int, int, int]:
        """Session, clock and state of a rank; zeros in a new arena."""
        with self._lock:
            at = self._selected(rank)
            packed = self._members.load(at + 1)
            return self._members.load(at), packed & _CLOCK_MAX, packed >> _CLOCK_BITS

    def set_member(self, rank: int, session: int, clock: int, state: int) -> None:
        """Set all three at once: a new session is never seen with the clock or the state of the one before, nor the reverse.

        With the session unchanged one word is stored. A new session is written beside the old one, then selected by one store.

        Args:
            session: less than 2**64. clock: less than 2**56. state: less than 256.
        """
        if not 0 <= session <= _U64_MAX or not 0 <= clock <= _CLOCK_MAX or not 0 <= state <= _STATE_MAX:
            raise ValueError(
                f"member {rank}: expected a session < 2**64, a clock < 2**56 and a state < 256, got {session, clock, state}"
            )
        packed = state << _CLOCK_BITS | clock
        with self._lock:
            self._check_open()
            at = self._selected(rank)
            self._crash_point("arena.member")
            if self._members.load(at) == session:
                self._members.store(at + 1, packed)
                return
            base = form.MEMBER_WORDS * rank
            selector = 1 - self._members.load(base)
            other = base + 1 + 2 * selector
            self._members.store(other, session)
            self._crash_point("arena.member")
            self._members.store(other + 1, packed)
            self._crash_point("arena.member")
            self._members.store(base, selector)
            self._crash_point("arena.member")

    def member_word(self, rank: int) -> tuple[mmap.mmap, int]:
        """Place of the word with clock and state of a rank's present session, for whoever stores a later clock: the mapping,
        and the word's first byte. Not to be used when the arena has been closed, nor when the rank has another session.
        """
        with self._lock:
            self._check_open()
            return self._mapping, self._members_at + 8 * (self._selected(rank) + 1)

    def record_decision(self, round_: int, mask: int) -> None:
        """Remember the workers (bit per rank) of a round; the last 8 rounds are kept. Repeating it changes nothing."""
        if not 0 <= mask < 1 << self._workers:
            raise ValueError(f"mask: expected {self._workers} bits, got {mask:#x}")
        with self._lock:
            self._check_open()
            if self._decision(round_) == mask:
                return
            slot = round_ % form.DECISION_SLOTS
            at = self._decision_words * slot
            self._decisions.store(at, 0)
            self._crash_point("arena.decision")
            for i in range(self._decision_words - 2):
                self._decisions.store(at + 2 + i, mask >> (64 * i) & _U64_MAX)
                self._crash_point("arena.decision")
            self._decisions.store(at + 1, self._decision_check(round_ + 1, slot))
            self._crash_point("arena.decision")
            self._decisions.store(at, round_ + 1)
            self._crash_point("arena.decision")

    def decision(self, round_: int) -> int | None:
        """The mask recorded for a round; None: not recorded, or no longer kept."""
        with self._lock:
            return self._decision(round_)

    def _decision(self, round_: int) -> int | None:
        at = self._decision_words * (round_ % form.DECISION_SLOTS)
        if self._decisions.load(at) != round_ + 1:
            return None
        return sum(self._decisions.load(at + 2 + i) << (64 * i) for i in range(self._decision_words - 2))

    def _decision_check(self, stamp: int, slot: int) -> int:
        at = self._decision_words * slot
        masks = self._decisions.checksum(at + 2, self._decision_words - 2)
        return _arena.checksum(struct.pack("<QQ", stamp, masks))

    def _selected(self, rank: int) -> int:
        if not 0 <= rank < self._workers:
            raise IndexError(f"rank {rank} of {self._workers}")
        base = form.MEMBER_WORDS * rank
        return base + 1 + 2 * self._members.load(base)
