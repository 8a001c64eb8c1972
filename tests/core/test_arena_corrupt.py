"""Damage that opening an arena refuses, and what it reads."""

import re
import struct

import pytest
from arena_workload import SHAPES, WORKERS, check_places, update, versions

from psd_core import _arena
from psd_core import _arena_format as form
from psd_core import _store_file as files
from psd_core._store_format import FRONT
from psd_core.arena import Arena, ArenaCorrupt

META = b"seventeen letters"
VERSIONS = 3


@pytest.fixture
def closed(memory_path):
    """An arena file with every block published, and its front and its layout."""
    arena = Arena.create(memory_path, meta=META, shapes=SHAPES, workers=WORKERS)
    for version in range(1, VERSIONS + 1):
        for block in range(len(SHAPES)):
            update(arena, block, version)
    arena.record_decision(5, 0b101)
    arena.set_member(1, 7, 8, 9)
    pages = [arena.current(block).place.offset for block in range(len(SHAPES))]
    arena.close(remove=False)
    return memory_path / files.ARENA_NAME, arena._front, pages


def refusals(path, offsets, flip=0xFF):
    """The messages of opening the file with each of these bytes changed in turn; fails if one is accepted."""
    messages = []
    with path.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            (before,) = file.read(1)
            file.seek(offset)
            file.write(bytes([before ^ flip]))
            with pytest.raises(ArenaCorrupt) as caught:
                Arena.open(path.parent)
            file.seek(offset)
            file.write(bytes([before]))
            messages.append(str(caught.value))
    return messages


def opens_again(path):
    arena = Arena.open(path.parent)
    assert versions(arena) == [VERSIONS] * len(SHAPES)
    check_places(arena)
    arena.close(remove=True)


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_every_byte_of_superblock_shapes_and_meta_is_watched(closed, flip):
    path, front, _ = closed

    messages = refusals(path, range(len(front.fixed)), flip)

    assert all("superblock" in message for message in messages)
    assert all(str(path) in message for message in messages)
    opens_again(path)


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_every_byte_of_the_block_table_is_watched(closed, flip):
    path, front, _ = closed

    messages = refusals(path, range(front.table_at, front.table_at + 8 * len(SHAPES)), flip)

    for i, message in enumerate(messages):
        assert f"block table entry {i // 8}" in message or "not a page" in message
    opens_again(path)


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_every_byte_of_the_extent_records_is_watched(closed, flip):
    path, front, _ = closed

    messages = refusals(path, range(front.extents_at, front.extents_at + 8 * (len(front.page_sizes) + 2)), flip)

    assert all("extent" in message for message in messages)
    opens_again(path)


def test_every_byte_of_a_pages_header_window_and_steps_is_watched(closed):
    path, front, pages = closed
    head_bytes = 8 * front.layouts[1].head_words

    messages = refusals(path, range(pages[1], pages[1] + head_bytes))

    assert all("page of block 1 at byte" in message for message in messages)
    opens_again(path)


@pytest.mark.parametrize(("flip", "stride"), [(0x01, 7), (0x80, 11)])
def test_every_byte_of_a_pages_parameters_and_slots_is_watched(closed, flip, stride):
    """Each place in a word of the checksum, in all parts of the page."""
    path, front, pages = closed
    layout = front.layouts[1]
    start = pages[1] + layout.parameter_at

    messages = refusals(path, range(start, start + 8 * layout.body_words, stride), flip)

    assert all(f"page of block 1 at byte {pages[1]}, version 3: parameters and slots" in message for message in messages)
    opens_again(path)


def test_every_byte_of_a_page_without_a_body_and_of_the_body_that_it_names_is_watched(closed):
    path, front, pages = closed
    arena = Arena.open(path.parent)
    update(arena, 1, VERSIONS + 1, body=VERSIONS)
    update(arena, 2, VERSIONS + 1, body=VERSIONS)
    page, base = arena.current(1).place.offset, arena.current(1).base.place.offset
    other = arena.current(2).base.place.number
    arena.close(remove=False)
    layout = front.layouts[1]
    assert base == pages[1] != page

    heads = refusals(path, range(page, page + 8 * layout.head_words))
    bodies = refusals(path, range(base + layout.parameter_at, base + layout.parameter_at + 8 * layout.body_words, 101))

    assert all(f"page of block 1 at byte {page}" in message for message in heads)
    assert all(f"page of block 1 at byte {page}, version 4: parameters and slots" in message for message in bodies)
    for number, complaint in ((0, "names no page that has"), (1, "no page begins"), (other, "the block needs")):
        _name_body(path, front, page, number)
        with pytest.raises(ArenaCorrupt, match=complaint):
            Arena.open(path.parent)


def _name_body(path, front, page, number):
    """Let the page of block 1 name another page's body, with all checksums in order."""
    with path.open("r+b", buffering=0) as file:
        file.seek(page)
        words = list(struct.unpack(f"<{front.layouts[1].head_words}Q", file.read(8 * front.layouts[1].head_words)))
        words[7] = number
        words[0] = _arena.checksum(struct.pack(f"<{len(words) - 1}Q", *words[1:]))
        file.seek(page)
        file.write(struct.pack(f"<{len(words)}Q", *words))
        file.seek(front.table_at + 8)
        file.write(struct.pack("<Q", form.pack_entry(words[3], words[0])))


def test_places_of_words_that_have_changed_are_found(closed):
    """What a sum of words alone would not see: two words of one page, two blocks of bytes, two pages of one shape."""
    path, front, pages = closed
    whole = path.read_bytes()
    at = pages[2] + front.layouts[2].parameter_at
    for nbytes, distance in ((8, 8), (4096, 4096), (4096, 16384)):
        data = bytearray(whole)
        data[at : at + nbytes] = whole[at + distance : at + distance + nbytes]
        data[at + distance : at + distance + nbytes] = whole[at : at + nbytes]
        assert data != whole
        path.write_bytes(data)
        with pytest.raises(ArenaCorrupt, match=r"page of block 2 .* parameters and slots"):
            Arena.open(path.parent)

    path.write_bytes(whole)
    opens_again(path)


def test_a_decision_or_a_member_that_cannot_be_is_refused(closed):
    path, front, _ = closed
    decision_at = front.decisions_at + 8 * front.decision_words * 5

    messages = refusals(path, [decision_at, decision_at + 8, decision_at + 16, front.members_at + 8 * form.MEMBER_WORDS])

    assert [re.search("decision 5|member 1", message)[0] for message in messages] == ["decision 5"] * 3 + ["member 1"]
    opens_again(path)


def test_an_entry_that_names_another_blocks_page_or_an_old_one_is_refused(closed):
    path, front, pages = closed
    with path.open("r+b", buffering=0) as file:

        def entry(block, value=None):
            file.seek(front.table_at + 8 * block)
            if value is None:
                return struct.unpack("<Q", file.read(8))[0]
            return file.write(struct.pack("<Q", value))

        first, fourth = entry(0), entry(3)  # blocks of one shape
        entry(3, first)
        with pytest.raises(ArenaCorrupt, match=r"entry 3 .* belongs to block 0"):
            Arena.open(path.parent)
        entry(0, fourth)
        with pytest.raises(ArenaCorrupt, match=r"page of block 0 .* the header is of block 3"):
            Arena.open(path.parent)
        entry(3, fourth)
        entry(0, first & ~0xFFFFFF | 1)
        with pytest.raises(ArenaCorrupt, match="its check does not match its page, version 3"):
            Arena.open(path.parent)
        entry(0, first + (1 << form.TABLE_CHECK_BITS))
        with pytest.raises(ArenaCorrupt, match="no page begins"):
            Arena.open(path.parent)
        entry(0, pages[2] // form.UNIT_BYTES << form.TABLE_CHECK_BITS)
        with pytest.raises(ArenaCorrupt, match="the block needs"):
            Arena.open(path.parent)


def test_a_truncated_file_is_refused_wherever_it_ends(closed):
    path, front, _ = closed
    whole = path.read_bytes()

    for size in (0, 1, 63, len(front.fixed) - 1, front.table_at, front.size - 1, front.size, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ArenaCorrupt, match=r"truncated|fewer than"):
            Arena.open(path.parent)

    path.write_bytes(whole)
    opens_again(path)


def test_a_file_that_is_something_else_is_refused_and_can_be_replaced(memory_path):
    (memory_path / files.ARENA_NAME).write_bytes(b"# Notes\n" * 100)

    with pytest.raises(ArenaCorrupt, match="not an arena"):
        Arena.open(memory_path)

    arena = Arena.create(memory_path, meta=b"", shapes=SHAPES, workers=WORKERS, replace=True)
    arena.close(remove=True)
    assert list(memory_path.iterdir()) == []


def test_what_a_crash_left_behind_the_last_extent_is_cut_off(closed):
    path, _, _ = closed
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100_000))

    arena = Arena.open(path.parent)

    assert path.stat().st_size == arena.file_bytes == size
    arena.close(remove=True)


def test_opening_reads_the_front_and_each_published_page_once(closed):
    path, front, _ = closed
    bytes_read = []

    def read(file, nbytes, start):
        bytes_read.append(nbytes)
        return file.read(nbytes, start)

    arena = Arena.open(path.parent, read=read)

    pages = sum(8 * (layout.head_words + layout.body_words) for layout in front.layouts)
    assert sum(bytes_read) == FRONT.size + len(front.fixed) + pages
    arena.close(remove=True)
