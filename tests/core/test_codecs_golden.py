"""The bytes of docs/protocol.md, by which workers in other languages check what they write and read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from psd_core import codecs

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
VALUES = np.array([1, -0.75, 0.3, -0.1, 0.02, 0, -3e-5, 2.5, -2], np.float32)
ROWS = re.findall(r"^\| `([a-z0-9:.]+)` \| `([0-9a-f]+)` \| ([-0-9., ]+) \|$", PAGE, re.MULTILINE)


def test_the_page_has_each_codec_and_the_array() -> None:
    assert [name.partition(":")[0] for name, _, _ in ROWS] == [name.partition(":")[0] for name in codecs.NAMES]
    assert re.search(r"array 1, -0.75, 0.3, -0.1, 0.02, 0, -0.00003, 2.5, -2 of float32", PAGE)


@pytest.mark.parametrize(("codec", "data", "numbers"), ROWS)
def test_a_codec_writes_and_reads_the_bytes_of_the_page(codec: str, data: str, numbers: str) -> None:
    out = np.empty(len(VALUES), np.float32)
    codecs.decode(codec, bytes.fromhex(data), out)

    assert codecs.encode(codec, VALUES).tobytes() == bytes.fromhex(data)
    assert out.tolist() == [float(number) for number in numbers.split(", ")]


def test_a_difference_has_the_bytes_of_the_page_and_leads_to_its_numbers() -> None:
    found = re.search(r"holds ([-0-9., ]+), where .* is sent\n`([0-9a-f]+)`, and then has ([-0-9., ]+)\.\n", PAGE)
    assert found is not None
    before, data, numbers = found.groups()
    held, after = np.array([float(number) for number in before.split(", ")], np.float32), np.empty(9, np.float32)

    difference = codecs.follow("int8", VALUES, held, after)
    codecs.accumulate("int8", bytes.fromhex(data), held)

    assert difference is not None
    assert difference.tobytes() == bytes.fromhex(data)
    assert after.tolist() == held.tolist() == [float(np.float32(number)) for number in numbers.split(", ")]
