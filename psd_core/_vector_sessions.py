"""The senders whose batches a store knows: the session of each, in its slot of the log, and which answers are kept there.

Must not know what a batch does, nor who a sender is.
"""

from __future__ import annotations

from typing import NamedTuple

from psd_core import _vector
from psd_core._vector_format import BatchForgotten, VectorError

WINDOW = _vector.ENTRIES - 1
"""Number of a session's latest batches whose answers are kept."""


class BatchName(NamedTuple):
    """The identity of a batch.

    Attributes:
        session: >= 1, and growing for each sender: one that begins ends the one before.
        sequence: >= 1, and growing; the last WINDOW ones of a session are known.
        sender: whose session it is, from 0.
    """

    session: int
    sequence: int
    sender: int = 0


class Claim(NamedTuple):
    """The place where the answers of a batch will be kept; all 0 for one without a name."""

    slot: int = 0
    session: int = 0
    sequence: int = 0


class VectorSessions:
    """The sessions of a log, whose slots are the senders'. Needs the store's lock."""

    def __init__(self, core: _vector.Vectors) -> None:
        self._core = core
        self.read()

    def read(self) -> None:
        """Read from the log which sessions there are."""
        self._of_sender = list(self._core.sessions())

    def of_sender(self, sender: int) -> int:
        """The latest session of a sender; 0: none is known."""
        return self._of_sender[sender] if 0 <= sender < len(self._of_sender) else 0

    def kept(self, name: BatchName | None) -> bytes | None:
        """Answers of a batch that was run, or None. Raises VectorError, BatchForgotten."""
        if name is None:
            return None
        for field, value in zip(BatchName._fields[:2], name, strict=False):
            if not isinstance(value, int) or not 1 <= value < 1 << 63:
                raise VectorError(f"{field}: expected a whole number from 1 to 2**63 - 1, got {value!r}")
        if not 0 <= name.sender < len(self._of_sender):
            raise VectorError(f"sender: expected 0 to {len(self._of_sender) - 1}, got {name.sender}")
        known = self._of_sender[name.sender]
        if name.session < known:
            raise BatchForgotten(f"session: {name.session} has ended; the latest one of its sender is {known}")
        if name.session > known:
            return None
        sequences = self._core.sequences(name.sender)
        if name.sequence in sequences:
            return self._core.kept(name.sender, name.sequence)
        if name.sequence <= max(sequences) - WINDOW:
            raise BatchForgotten(f"sequence: {name.sequence} is too old; the latest one of its session is {max(sequences)}")
        return None

    def claim(self, name: BatchName | None) -> Claim:
        """The place for a batch's answers, which `kept` has not found; it is taken with `note`."""
        if name is None:
            return Claim()
        if name.session != self._of_sender[name.sender]:
            self._core.clear_session(name.sender)
            self._of_sender[name.sender] = 0
        return Claim(name.sender, name.session, name.sequence)

    def note(self, claim: Claim) -> None:
        """Note that a batch was run."""
        if claim.session:
            self._of_sender[claim.slot] = claim.session

    def latest(self) -> dict[int, int]:
        """The sessions, and the largest sequence number of each."""
        return {session: max(self._core.sequences(slot)) for slot, session in enumerate(self._of_sender) if session}
