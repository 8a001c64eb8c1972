"""Frames are the very bytes of the protobuf messages, in both directions, whatever a foreign serializer does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from golden_messages import GOLDEN, MESSAGES, wire_bytes
from hypothesis import given
from hypothesis import strategies as st

from psd.contract import frames
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.v1 import data_pb2


@st.composite
def push_frames(draw):
    """A PushFrame without payload, with any of its fields."""
    frame = data_pb2.PushFrame()
    if draw(st.booleans()):
        frame.push.clock = draw(st.integers(0, 2**64 - 1))
        frame.push.layout_digest = draw(st.binary(max_size=20))
        frame.push.caller.run_id = draw(st.text("ab\u00e9\u20ac\U0001f600", max_size=40))
    if draw(st.booleans()):
        frame.block = draw(st.integers(0, 2**32 - 1))
    frame.present = draw(st.binary(max_size=200))
    frame.last = draw(st.booleans())
    return frame


def test_every_golden_file_has_a_message_and_the_other_way_round():
    """Nothing is kept that is not compared."""
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_v1_bytes_are_written_as_ever(name):
    """What psd writes today is what it wrote when v1 was fixed, to the byte."""
    assert wire_bytes(*MESSAGES[name]) == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_v1_bytes_are_read_as_ever(name):
    """Stock protobuf and psd's own reader find the same fields in the bytes of v1."""
    head, payload = MESSAGES[name]
    data = (GOLDEN / f"{name}.bin").read_bytes()
    stock = type(head).FromString(data)

    if payload is not None:
        own, view = frames.split(data, name)
        assert view == payload == stock.payload
        parsed = type(head).FromString(own)
        parsed.ClearField("padding")
        assert parsed == head
        stock.ClearField("padding")
        stock.ClearField("payload")
    assert stock == head


@given(push_frames(), st.binary(max_size=300))
def test_join_writes_what_protobuf_writes(frame, payload):
    """A frame is SerializeToString of the same message with the same padding, for any header and payload, and stock protobuf
    reads it back; the payload starts on an 8-byte boundary."""
    data = frames.join(frame.SerializeToString(), payload)

    stock = data_pb2.PushFrame.FromString(data)
    assert stock.payload == payload
    assert stock.SerializeToString() == data
    assert not payload or (len(data) - len(payload)) % 8 == 0
    stock.ClearField("padding")
    stock.ClearField("payload")
    assert stock == frame


@given(push_frames(), st.binary(max_size=300), st.integers(0, 15))
def test_split_is_the_inverse_of_join_and_of_protobuf(frame, payload, padding):
    """Taking apart what psd or protobuf wrote gives the header and the payload."""
    foreign = data_pb2.PushFrame(payload=payload, padding=bytes(padding))
    foreign.MergeFrom(frame)

    for data in (frames.join(frame.SerializeToString(), payload), foreign.SerializeToString()):
        head, view = frames.split(data, "PushFrame")
        parsed = data_pb2.PushFrame.FromString(head)
        parsed.ClearField("padding")
        assert parsed == frame
        assert bytes(view) == payload


@given(st.lists(st.tuples(push_frames(), st.binary(max_size=300)), max_size=4), st.booleans())
def test_nested_frames_are_what_protobuf_writes_and_reads(parts, is_long):
    """A message of frames: the very bytes of the stock message, also behind one of another length; its payloads are aligned."""
    if is_long:
        parts = [*parts, (data_pb2.PushFrame(), bytes(20_000)), *parts]
    data = frames.join_nested((1, frame.SerializeToString(), (payload,)) for frame, payload in parts)

    stock = data_pb2.SmallPush.FromString(data)
    assert stock.SerializeToString() == data
    assert [frame.payload for frame in stock.frames] == [payload for _, payload in parts]
    found = [(field, *frames.split(view, "PushFrame")) for field, view in frames.split_nested(data, "SmallPush", len(parts))]
    assert [(field, bytes(payload)) for field, _, payload in found] == [(1, payload) for _, payload in parts]
    for (_, head, payload), (frame, _) in zip(found, parts, strict=True):
        parsed = data_pb2.PushFrame.FromString(head)
        parsed.ClearField("padding")
        assert parsed == frame
        assert len(payload) < 1000 or np.frombuffer(payload, np.uint8).ctypes.data % 8 == 0
    if parts:
        with pytest.raises(InvalidRequest, match="SmallPush: has more than"):
            list(frames.split_nested(data, "SmallPush", len(parts) - 1))


@given(
    st.lists(
        st.sampled_from([b"\x7a\x02ab", b"\x7a\x00", b"\x10\x05", b"\x20\x01", b"\x1a\x01x", b"\xfa\x00\x01z"]), max_size=12
    )
)
def test_fields_in_any_order_and_number_mean_what_protobuf_says(fields):
    """Serializers may order fields as they like and repeat them; psd reads the same message as protobuf."""
    data = b"".join(fields)
    stock = data_pb2.PushFrame.FromString(data)

    head, view = frames.split(data, "PushFrame")
    own = data_pb2.PushFrame.FromString(head)
    own.payload = bytes(view)

    assert own == stock


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x7a\x00" * 100_000, id="many payloads"),
        pytest.param(b"\x20\x01" * 100_000, id="many small fields"),
        pytest.param(b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", id="huge length"),
        pytest.param(b"\x7a\x05ab", id="truncated payload"),
        pytest.param(b"\x7a" + b"\xff" * 11, id="endless varint"),
        pytest.param(b"\x0b", id="group"),
        pytest.param(b"\x09\x00", id="truncated fixed64"),
        pytest.param(b"\x80", id="truncated tag"),
    ],
)
def test_what_is_no_frame_is_refused_quickly(data):
    """Bytes that are no message, or have absurdly many fields, are refused as such, without recursion or long loops."""
    with pytest.raises(InvalidRequest, match="PushFrame"):
        frames.split(data, "PushFrame")


def test_split_never_fails_in_another_way():
    """Random and mutated bytes are either split or refused."""
    good = (GOLDEN / "push_frame_first.bin").read_bytes()
    outcomes = set()
    for seed in range(3000):
        rng = random.Random(seed)
        data = bytearray(good if seed % 2 else rng.randbytes(40))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            frames.split(bytes(data), "PushFrame")
            outcomes.add("split")
        except InvalidRequest:
            outcomes.add("refused")
    assert outcomes == {"split", "refused"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", range(9))
def test_numbers_are_aligned_wherever_the_payload_starts(dtype, offset):
    """The array is aligned and read-only or a copy, and has the payload's numbers."""
    values = np.arange(5, dtype=dtype)
    buffer = bytes(offset) + values.tobytes()

    array = frames.numbers(memoryview(buffer)[offset:], np.dtype(dtype), 5, "block 3")

    assert array.flags.aligned
    assert array.tolist() == values.tolist()


def test_numbers_of_a_wrong_size_are_refused_with_both_sizes():
    """The message has the bytes that came and those that were expected."""
    with pytest.raises(InvalidTensor, match=r"block 3: payload has 7 bytes, expected 2 x 4 = 8"):
        frames.numbers(memoryview(bytes(7)), np.dtype(np.float32), 2, "block 3")


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_present_bits_round_trip(mask):
    """A bitmap says the same on both sides; all ones is the empty one; a wrong length is refused."""
    bits = frames.present_bits(np.array(mask))
    back = frames.present_mask(bits, len(mask))

    assert (back is None) == all(mask)
    if back is not None:
        assert back.astype(bool).tolist() == mask
        with pytest.raises(InvalidRequest, match=r"present: bitmap has"):
            frames.present_mask(bits + b"\0", len(mask))
