"""Our safetensors files and the library's are each other's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from psd.checkpoint.safetensors import PREFIX_BYTES, header, header_length, lay_out, parse_header


def test_header_when_the_library_reads_the_file_then_it_finds_the_same_tensors(tmp_path):
    arrays = {
        "a": np.arange(3, dtype="<u8"),
        "b/c": np.array(2.5),
        "é": np.ones((2, 3), "<f4"),
        "none": np.empty((0, 4), "<f4"),
    }
    types = {"a": "U64", "b/c": "F64", "é": "F32", "none": "F32"}
    entries = lay_out((name, types[name], array.shape) for name, array in arrays.items())
    path = tmp_path / "ours.safetensors"

    path.write_bytes(header(entries, {"by": "psd"}) + b"".join(array.tobytes() for array in arrays.values()))

    found = safetensors.numpy.load_file(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"by": "psd"}


def test_parse_header_when_the_library_wrote_the_file_then_the_tensors_are_where_it_put_them(tmp_path):
    arrays = {"x": np.arange(6, dtype="<f4").reshape(2, 3), "y": np.arange(4, dtype="<u8"), "z": np.array(1.5)}
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"by": "them"})
    data = path.read_bytes()
    start = PREFIX_BYTES + header_length(data[:PREFIX_BYTES])

    entries, metadata = parse_header(data[PREFIX_BYTES:start])

    assert metadata == {"by": "them"}
    assert {entry.name: entry.shape for entry in entries} == {name: array.shape for name, array in arrays.items()}
    for entry in entries:
        assert data[start + entry.start : start + entry.stop] == arrays[entry.name].tobytes()


@pytest.mark.parametrize("name_length", range(9))
def test_header_when_names_have_any_length_then_the_data_start_on_a_multiple_of_8(name_length):
    assert len(header(lay_out([("n" * name_length, "U8", (1,))]), {})) % 8 == 0


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not a JSON object"),
        ({"a": 1}, "not a tensor"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "not in their place"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "not in their place"),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "element type 'F33'"),
        ({"__metadata__": ["a"]}, "__metadata__: is not an object of strings"),
        ({"__metadata__": {"a": ["b"]}}, "__metadata__: is not an object of strings"),
    ],
)
def test_parse_header_when_it_is_wrong_then_says_how(document, words):
    with pytest.raises(ValueError, match=words):
        parse_header(json.dumps(document).encode())


def test_header_length_when_it_is_absurd_then_nothing_is_allocated():
    with pytest.raises(ValueError, match="first 8 bytes"):
        header_length(b"\xff" * 8)
