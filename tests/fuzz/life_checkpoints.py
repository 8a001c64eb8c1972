"""The checkpoints of a job over its lives: stores the cuts that come about, in this thread, and knows what must count in each.

Draws nothing. Must not know what lives do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shard_driver import Driver

from psd.checkpoint import CheckpointDirectory
from psd.rim.checkpointer import Checkpointer
from psd.rim.vector_gate import VectorGate


class LifeCheckpoints:
    """Of one job.

    Attributes:
        counts: by name, how many gradients and batches count in each that was stored, and whether all rows had room.
    """

    def __init__(self, path: Path) -> None:
        self.directory = CheckpointDirectory(str(path))
        self.counts: dict[str, tuple[int, int, bool]] = {}

    @property
    def newest(self) -> str:
        """The name of the one that a shard goes back to; empty if there is none."""
        found = self.directory.newest()
        return "" if found is None else found.name

    def begin(self, driver: Driver) -> None:
        """Take part in the cuts of a life."""
        self._driver = driver
        self._writer = Checkpointer(
            driver.shard, driver.config, self.directory, VectorGate(), now=driver.time, wall=driver.time
        )

    def settle(self, before: Callable[[int | None], int], run: int, has_room: bool) -> None:
        """Announce what is due, and store what has come about.

        Args:
            before: how many gradients count at a step; None: now. run: how many batches have run. has_room: all rows have.
        """
        shard, writer = self._driver.shard, self._writer
        shard.tick()
        self._driver.choose(*shard.cuts.latest())
        while not writer._done.empty():
            snapshot = writer._done.get()
            assert snapshot is not None
            if snapshot.why_missed:
                continue
            counts = before(None if snapshot.positions is not None else snapshot.cut.step), run, has_room
            writer._write(snapshot)
            writer._release(snapshot)
            assert writer._bases.is_settled()
            self.counts[writer.progress.last] = counts
