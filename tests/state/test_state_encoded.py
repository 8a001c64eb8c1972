"""Encoded gradients at the shard: what is malformed is refused by its field, and nothing of it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from full_disk import full_disk
from full_state import Hoarder
from shard_driver import Driver, job_spec

from psd.contract.compression import Compression
from psd.contract.errors import InvalidTensor, OutOfSpace
from psd_core import codecs

SIZE = 1001
VALUES = np.linspace(-1, 1, SIZE, dtype=np.float32)


def driver(codec: str, world_size: int = 2, **fields: Any) -> Driver:
    return Driver(job_spec(world_size, size=SIZE, dtype="float32", compression=Compression(codec), **fields))


def decoded(codec: str, values: Any = VALUES) -> Any:
    out = np.empty(SIZE, np.float32)
    codecs.decode(codec, codecs.encode(codec, values), out)
    return out


def push(shard: Driver, seat: Any, clock: int, payload: Any, **lent: Any) -> Any:
    begun = shard.begin_push(seat, clock)
    assert shard.shard.exchange.push_block(begun, 0, b"", memoryview(payload), **lent) is None
    return shard.shard.exchange.end_push(begun), begun


MALFORMED = {
    "int8": [
        (slice(0, 2), b"\xff\xff", "scale: expected 0 or a number from"),
        (slice(-1, None), b"", "data: expected 1009 bytes"),
    ],
    "int4": [(slice(0, 2), b"\x01\x80", "scale: expected 0 or a number from .* in block 0")],
    "sign": [(slice(-1, None), b"\xff", "codes: expected 0 in the bits behind the last element")],
    "bf16": [(slice(6, 8), b"\x80\x7f", "value: expected a finite number, got inf at element 3")],
    "topk:0.01": [
        (slice(0, 4), b"\x0c\0\0\0", "count: expected 11 entries in all chunks, got 12"),
        (slice(-2, None), b"\xff\xff", "offset: expected at most 1000"),
    ],
}


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("codec", MALFORMED)
def test_push_when_an_encoded_block_is_malformed_then_its_field_is_named_and_nothing_counts(
    codec: str, aggregation: str
) -> None:
    """The push that is sent then counts."""
    shard = driver(codec, 1, aggregation=aggregation)
    (seat,) = shard.start()
    sound = codecs.encode(codec, VALUES).tobytes()
    for where, what, message in MALFORMED[codec]:
        wrong = bytearray(sound)
        wrong[where] = what
        with pytest.raises(InvalidTensor, match=f"block 0: payload in {codec}: {message}"):
            push(shard, seat, 0, wrong)
    assert shard.core.declared().blocks[0].counted(0, is_committed=True) == (0, 0)
    reply, _ = push(shard, seat, 0, sound)
    assert reply.blocks_counted + reply.blocks_staged == 1


@pytest.mark.parametrize("codec", MALFORMED)
@pytest.mark.parametrize("is_lent", [False, True])
def test_round_when_gradients_are_encoded_then_it_has_the_bits_of_the_sum_of_decoded_ones(codec: str, is_lent: bool) -> None:
    """The memory may be used again at once: an encoded gradient is never lent."""
    shard = driver(codec, 3)
    total = np.zeros(SIZE, np.float32)
    for rank, seat in enumerate(seats := shard.start()):
        values = VALUES * np.float32(rank + 1)
        payload = bytearray(codecs.encode(codec, values).tobytes())
        _, begun = push(shard, seat, 0, payload, is_lent=is_lent)
        payload[:] = bytes(len(payload))
        begun.loan.end()
        total += decoded(codec, values)
    block = shard.core.declared().blocks[0]

    version, page = block.read(1)
    np.testing.assert_array_equal(page.parameter, -(total * np.float32(1 / 3)))
    block.unpin(page)
    assert version == 1
    assert len(seats) == 3


def test_round_when_there_is_no_room_for_it_then_its_encoded_gradients_count_once(driver_of: Any) -> None:
    """The one that completes it is in the sum before there is an update, and is not added again."""
    shard = driver_of(job_spec(2, size=SIZE, dtype="float32", compression=Compression("int8")))
    first, second = shard.start()
    payload = codecs.encode("int8", VALUES)
    push(shard, first, 0, payload)
    with full_disk():
        hoarder = Hoarder(shard)
        push(shard, second, 0, payload)
        with pytest.raises(OutOfSpace, match="block 0: no room for its next version"):
            push(shard, second, 0, payload)
        assert shard.version() == 0
    hoarder.give_back()
    reply, _ = push(shard, second, 0, payload)

    assert (shard.version(), reply.blocks_duplicate) == (1, 1)
    np.testing.assert_array_equal(shard.pull(second, 1)[0], -decoded("int8"))
