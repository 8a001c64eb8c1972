"""Opening an arena that another process left behind: reads it and trusts nothing.

What is read before it is trusted is read with `pread`, not through a mapping: a truncated file or a hole on a full file system
then gives an error instead of a signal. The front and each current page are read, and no other page.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from psd_core import _arena
from psd_core import _arena_format as form
from psd_core import _store_file as files
from psd_core._arena import Words
from psd_core._arena_blocks import Found
from psd_core._arena_pages import Place, Pool
from psd_core._arena_planes import Planes, Region
from psd_core._store_format import ArenaCorrupt, align

Read = Callable[[files.File, int, int], bytes]
"""A function (file, byte count, start) -> bytes, fewer at the end of the file."""

_PIECE_BYTES = 1 << 20


def read_front(file: files.File, read: Read) -> form.Front:
    """Read and check what never changes: superblock, shapes, meta. Raises ArenaCorrupt."""
    size = file.size
    front = form.read_front(lambda nbytes, start: read(file, nbytes, start), size)
    if front.size > size:
        raise ArenaCorrupt(f"front: expected {front.size} bytes before the first extent, the file has {size}: truncated")
    return front


def add_extents(file: files.File, front: form.Front, records: Words, pool: Pool) -> None:
    """Check the extent records, cut off what a crash left behind them, and map them. Raises ArenaCorrupt."""
    extents = []
    end = front.size
    for index in range(records.count):
        record = records.load(index)
        if record == 0:
            break
        kind, count = form.unpack_extent(index, record)
        if kind >= len(pool.kinds):
            raise ArenaCorrupt(f"extent {index}: page size {kind} of {len(pool.kinds)}")
        extents.append((kind, count))
        end += align(count * pool.kinds[kind].size, form.EXTENT_ALIGN_BYTES)
    for index in range(len(extents), records.count):
        if records.load(index) != 0:
            raise ArenaCorrupt(f"extent {index}: there is a record after the unused record {len(extents)}")
    size = file.size
    if end > size:
        raise ArenaCorrupt(f"extents: {len(extents)} of them end at byte {end}, the file at {size}: truncated")
    if end < size:
        file.extend(end)  # a crash between making the file longer and recording the extent
    for kind, count in extents:
        pool.add_extent(pool.kinds[kind], count, publish=False)


def read_table(file: files.File, front: form.Front, table: Words, pool: Pool, planes: Planes, read: Read) -> list[Found | None]:
    """Check each entry and its page; return what was found by block, None if never published.

    Raises:
        ArenaCorrupt: an entry outside the extents, of another size, taken twice, or a page that is not what the entry says.
    """
    owners: dict[int, int] = {}
    current: list[Found | None] = []

    def place_of(block: int, number: int, sizes: set[int], where: str) -> Place:
        place = pool.places.get(number)
        if place is None:
            raise ArenaCorrupt(f"{where}: no page begins at byte {number * form.UNIT_BYTES}")
        if place.kind.size not in sizes:
            raise ArenaCorrupt(f"{where}: a page of {place.kind.size} bytes, the block needs {max(sizes)}")
        if number in owners:
            raise ArenaCorrupt(f"{where}: its page belongs to block {owners[number]}")
        owners[number] = block
        return place

    for block, layout in enumerate(front.layouts):
        entry = table.load(block)
        if entry == 0:
            current.append(None)
            continue
        where = f"block table entry {block} ({entry:#x})"
        apart = front.apart_layouts[block]
        place = place_of(block, entry >> form.TABLE_CHECK_BITS, {layout.size, layout.head_size, apart.size}, where)
        version, check, of_body = _check_head(read(file, 8 * layout.head_words, place.offset), block, entry, place)
        where = f"page of block {block} at byte {place.offset}, version {version}"
        number, plane, file_number = form.unpack_body(of_body)
        body = layout if plane < 0 else apart
        base = place_of(block, number, {body.size}, where) if number else None
        if base is None and place.kind.size != body.size:
            raise ArenaCorrupt(f"{where}: names no page that has its parameters and slots")
        try:
            region = planes.adopt(file_number, plane, block) if plane >= 0 else None
        except ArenaCorrupt as error:
            raise ArenaCorrupt(f"{where}: its parameters: {error}") from None
        _check_body(file, body, place if base is None else base, region, read, check, where)
        current.append(Found(place, version, base, check, region))
    return current


def _check_head(head: bytes, block: int, entry: int, place: Place) -> tuple[int, int, int]:
    """Return the page's version, the checksum of its body, and the number of the page that has the body, or 0."""
    where = f"page of block {block} at byte {place.offset}"
    check, magic, owner, number, version, head_words, body_check, of_body = struct.unpack_from("<8Q", head)
    if magic != form.PAGE_MAGIC:
        raise ArenaCorrupt(f"{where}: header magic {magic:#x}: not a page")
    if _arena.checksum(memoryview(head)[8:]) != check:
        raise ArenaCorrupt(f"{where}: header, window and steps do not have the checksum {check:#x}")
    if owner != block or number != place.number or 8 * head_words != len(head):
        raise ArenaCorrupt(
            f"{where}: the header is of block {owner}, page {number} with {head_words} words, "
            f"expected page {place.number} with {len(head) // 8}"
        )
    if form.pack_entry(number, check) != entry:
        raise ArenaCorrupt(f"block table entry {block} ({entry:#x}): its check does not match its page, version {version}")
    return int(version), int(body_check), int(of_body)


def _check_body(
    file: files.File, layout: form.PageLayout, place: Place, region: Region | None, read: Read, check: int, where: str
) -> None:
    content = _arena.Content()

    def add(source: files.File, start: int, end: int) -> None:
        for at in range(start, end, _PIECE_BYTES):
            content.add(read(source, min(_PIECE_BYTES, end - at), at))

    if region is not None:
        start, nbytes = region.file.place(region.plane, region.block)
        add(region.file.file, start, start + nbytes)
    start = place.offset + layout.parameter_at
    add(file, start, start + 8 * layout.body_words)
    if content.check() != check:
        raise ArenaCorrupt(f"{where}: parameters and slots do not have the checksum {check:#x}")
