"""The sessions whose batches a store knows: which slot of the log each has, and which answers are kept there.

Must not know what a batch does, nor who a session is.
"""

from __future__ import annotations

from typing import NamedTuple

from psd_core import _vector
from psd_core._vector_format import BatchForgotten, VectorError

WINDOW = _vector.ENTRIES - 1
"""Number of a session's latest batches whose answers are kept."""


class BatchName(NamedTuple):
    """The identity of a batch. `session`: >= 1. `sequence`: >= 1, and growing; the last WINDOW ones of a session are known."""

    session: int
    sequence: int


class Claim(NamedTuple):
    """The place where the answers of a batch will be kept; all 0 for one without a name."""

    slot: int = 0
    session: int = 0
    sequence: int = 0


class VectorSessions:
    """The sessions of a log. Needs the store's lock."""

    def __init__(self, core: _vector.Vectors) -> None:
        self._core = core
        self.read()

    def read(self) -> None:
        """Read from the log which sessions there are."""
        sessions = list(enumerate(self._core.sessions()))
        self._slots = {session: slot for slot, session in sessions if session}
        self._free = [slot for slot, session in reversed(sessions) if not session]

    def kept(self, name: BatchName | None) -> bytes | None:
        """Answers of a batch that was run, or None. Raises VectorError, BatchForgotten."""
        if name is None:
            return None
        for field, value in zip(BatchName._fields, name, strict=True):
            if not isinstance(value, int) or not 1 <= value < 1 << 63:
                raise VectorError(f"{field}: expected a whole number from 1 to 2**63 - 1, got {value!r}")
        slot = self._slots.get(name.session)
        if slot is None:
            return None
        sequences = self._core.sequences(slot)
        if name.sequence in sequences:
            return self._core.kept(slot, name.sequence)
        if name.sequence <= max(sequences) - WINDOW:
            raise BatchForgotten(f"sequence: {name.sequence} is too old; the latest one of its session is {max(sequences)}")
        return None

    def claim(self, name: BatchName | None) -> Claim:
        """The place for a batch's answers, which is taken with `note`. Raises VectorError: there is none."""
        if name is None:
            return Claim()
        slot = self._slots.get(name.session)
        if slot is None:
            if not self._free:
                raise VectorError(f"session: at most {len(self._slots)} are known, and {name.session} is not among them")
            slot = self._free[-1]
            self._core.clear_session(slot)
        return Claim(slot, *name)

    def note(self, claim: Claim) -> None:
        """Note that a batch was run."""
        if claim.session and claim.session not in self._slots:
            self._slots[claim.session] = self._free.pop()

    def latest(self) -> dict[int, int]:
        """The sessions, and the largest sequence number of each."""
        return {session: max(self._core.sequences(slot)) for session, slot in self._slots.items()}

    def forget(self, session: int) -> None:
        """Forget a session, if it is known."""
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._core.clear_session(slot)
            self._free.append(slot)
