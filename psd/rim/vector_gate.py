"""The gate that batches on vectors pass, and how shards come to one cut of them.

A batch goes to every shard. So the shards are of one moment when each has run the same batches of every worker, and no others.
For a cut each shard holds new batches back, and says beside the checkpoints which ones it has run; those that another shard has
run are let through. Nobody waits long: batches are held only when every shard is known to have come to the cut. Must not know
what a batch does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.errors import CheckpointFailed
from psd.state.vectors.desk import VectorDesk, VectorsCut

COME_S_MAX = 60.0
"""Most seconds that a shard waits until the others have come to a cut; nothing is held meanwhile."""
HELD_S_MAX = 5.0
"""Most seconds for which batches are held back."""
POLL_S = 0.02


class VectorGate:
    """Lets batches through, unless they are held back. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._let_through: Mapping[int, int] | None = None

    @contextmanager
    def passing(self, session: int, sequence: int) -> Iterator[None]:
        """Wait while this batch is held back; inside, it runs."""
        with self._condition:
            self._condition.wait_for(lambda: self._may_pass(session, sequence), COME_S_MAX)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def hold(self, let_through: Mapping[int, int]) -> None:
        """Hold batches back from now on, but those up to a number of their session; returns when none of the others runs."""
        with self._condition:
            self._let_through = let_through
            self._condition.notify_all()
            if not let_through:
                self._condition.wait_for(lambda: not self._inside)

    def open(self) -> None:
        """Hold nothing back any more."""
        with self._condition:
            self._let_through = None
            self._condition.notify_all()

    def _may_pass(self, session: int, sequence: int) -> bool:
        return self._let_through is None or sequence <= self._let_through.get(session, 0)


@contextmanager
def vectors_of_cut(
    gate: VectorGate,
    desk: VectorDesk,
    directory: CheckpointDirectory,
    cut: Cut,
    shard_index: int,
    *,
    pause: Callable[[float], object],
    now: Callable[[], float] = time.monotonic,
) -> Iterator[VectorsCut | None]:
    """The vectors of this shard, of the same moment as those of all others; None if there are none.

    Raises:
        CheckpointFailed: not all shards have come to the cut in time, or a worker's batch has not come to all of them.
    """
    if not desk.has_vectors or cut.shard_count == 1:
        with desk.snapshot() as vectors:
            yield vectors
        return

    def notes_of(stage: str, limit_s: float) -> list[dict[int, int]]:
        directory.write_batches(cut, stage, shard_index, desk.latest())
        deadline = now() + limit_s
        while (notes := directory.read_batches(cut, stage)) is None:
            if now() > deadline:
                raise CheckpointFailed(f"{cut.name}: not all shards have come to the cut of the vectors in {limit_s:g} s")
            pause(POLL_S)
        return notes

    notes_of("come", COME_S_MAX)
    try:
        gate.hold({})
        farthest: dict[int, int] = {}
        for note in notes_of("held", HELD_S_MAX):
            for session, number in note.items():
                farthest[session] = max(number, farthest.get(session, 0))
        if farthest:
            gate.hold(farthest)
        deadline = now() + HELD_S_MAX
        while lacking := [s for s, number in desk.latest_of(farthest).items() if number < farthest[s]]:
            if now() > deadline:
                batch = f"batch {farthest[lacking[0]]} of session {lacking[0]}"
                raise CheckpointFailed(f"{cut.name}: {batch}, which another shard has run, has not come")
            pause(POLL_S)
        with desk.snapshot(farthest) as vectors:
            gate.open()
            yield vectors
    finally:
        gate.open()
