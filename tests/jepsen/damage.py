"""Which bytes of a shard's files count, so that a change of one must be found when the shard starts again."""

from __future__ import annotations

import os
import random
from pathlib import Path

from psd.state.durability import notes
from psd.state.durability.leftovers import BOOT_NAME
from psd.v1.storage_pb2 import StoredBoot
from psd_core import _arena_format as form
from psd_core._store_file import ARENA_NAME

Stretch = tuple[Path, int, int]
"""A file, the position of a first byte, and how many there are."""


def draw(state: Path, source: random.Random) -> tuple[Path, int] | None:
    """A byte that counts: of what is published, or of what a shard that has ended in order has sealed; None: there is none."""
    boot = StoredBoot.FromString(notes.read(state / BOOT_NAME))
    sealed = [(state / file.name, run.start, run.nbytes) for file in boot.files for run in file.runs]
    stretches = [*sealed, *_pages(state / ARENA_NAME)] if boot.is_closed else _pages(state / ARENA_NAME)
    by_file: dict[Path, list[Stretch]] = {}
    for stretch in stretches:
        by_file.setdefault(stretch[0], []).append(stretch)
    if not by_file:
        return None
    path, start, nbytes = source.choice(by_file[source.choice(sorted(by_file))])
    return path, start + source.randrange(nbytes)


def _pages(arena: Path) -> list[Stretch]:
    """Head and body of each page that is published."""
    if not arena.exists():
        return []
    with arena.open("rb") as file:
        front = form.read_front(lambda nbytes, start: os.pread(file.fileno(), nbytes, start), arena.stat().st_size)
        table = os.pread(file.fileno(), 8 * len(front.shapes), front.table_at)
    entries = [int.from_bytes(table[at : at + 8], "little") for at in range(0, len(table), 8)]
    pages = [(entry >> form.TABLE_CHECK_BITS) * form.UNIT_BYTES for entry in entries]
    return [
        stretch
        for start, layout in zip(pages, front.layouts, strict=True)
        if start
        for stretch in ((arena, start, 8 * layout.head_words), (arena, start + layout.parameter_at, 8 * layout.body_words))
    ]
