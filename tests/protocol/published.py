"""What has really happened to a shard's blocks, as somebody sees who misses nothing: which gradients are in which update.

Survives the shard's process, and is what the invariants are held against. Must not know calls or workers' books.
"""

from __future__ import annotations

from typing import Any

from setting import GRADIENTS_MAX, Setting, counts_in, value_of


class History:
    """Of the blocks of one shard.

    Attributes:
        updates: by block, the gradients of each update, in their order. wrong: broken invariants that were seen.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._ranks = [rank for rank, _ in setting.processes]
        self.updates: dict[int, list[tuple[int, ...]]] = {}
        self.wrong: list[str] = []

    def on_publish(self, block: int, before: Any, page: Any, version: int) -> None:
        """A block has another page."""
        if before is None:
            self.updates[block] = []
            return
        updates = self.updates.setdefault(block, [])
        if version != before.version + 1:
            self.wrong.append(f"block {block} went from version {before.version} to {version}")
        try:
            counts = counts_in(float(before.parameter[0] - page.parameter[0]))
        except AssertionError as error:
            self.wrong.append(f"block {block}, update {version}: {error}")
            return
        earlier = {gradient for update in updates for gradient in update}
        for gradient, count in counts.items():
            if count > 1 or gradient in earlier:
                self.wrong.append(f"block {block}, update {version}: gradient {gradient} counts twice")
        ranks = [self._ranks[gradient // GRADIENTS_MAX] for gradient in counts]
        if self._setting.has_rounds and len(set(ranks)) < len(ranks):
            self.wrong.append(f"block {block}, update {version}: one worker has two gradients in it, of {sorted(counts)}")
        updates.append(tuple(sorted(counts)))

    def on_read(self, block: int, version: int, values: Any, clock: int) -> None:
        """A worker at `clock` is sent a version of a block."""
        updates = self.updates.get(block, [])
        found = -sum(value_of(gradient) for update in updates[:version] for gradient in update)
        if float(values[0]) != found:
            self.wrong.append(f"block {block}: version {version} is read as {values[0]}, and is {found}")
        if self._setting.has_rounds and version < clock:
            self.wrong.append(f"block {block}: a worker at clock {clock} is sent version {version}")

    def on_blank(self) -> None:
        """The disk is gone."""
        self.updates = {}

    def summary(self) -> tuple[Any, ...]:
        """By block, what has been counted; with rounds, in which."""
        if self._setting.has_rounds:
            return tuple((block, tuple(updates)) for block, updates in sorted(self.updates.items()))
        return tuple(
            (block, (tuple(sorted(g for u in updates for g in u)),)) for block, updates in sorted(self.updates.items())
        )

    def take_wrong(self) -> tuple[str, ...]:
        """What has been seen since it was asked last."""
        wrong, self.wrong = tuple(self.wrong), []
        return wrong
