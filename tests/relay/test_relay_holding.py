"""The version that a relay has: its place in memory, and the calls that wait for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psd.contract.config import Limits
from psd.contract.errors import Draining, InvalidRequest, NotDeclared, WaitTimeout
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.relay.holding import HeldVersion, Holding, held_version
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.reader import WholeCopy


def version(number: int) -> HeldVersion:
    """A version of a small job, in memory of its own."""
    spec = JobSpec(world_size=1, groups=(GroupSpec("sgd"),), tensors=(TensorSpec("w", (3,)),))
    layout = Layout(spec, 1, is_gathered=True)
    buffers = FlatBuffers(layout)
    buffers.spaces[0].fill(number)
    buffers.contents[0] = 100 + number
    described = control_pb2.DescribeReply(run_id="mine", layout_digest=layout.digest)
    return held_version(WholeCopy(described, number, buffers), layout, "shards", 0.0)


def asked(step: int) -> data_pb2.ReadRequest:
    return data_pb2.ReadRequest(layout_digest=version(0).described.layout_digest, cut=data_pb2.Cut(step=step), or_newer=True)


def stays(_hang_up: Callable[[], None]) -> bool:
    """A reader that does not hang up."""
    return True


def test_the_memory_of_a_version_is_free_once_nobody_reads_it() -> None:
    """So that a relay has the parameters once, and twice while a newer version comes in."""
    first, second, third, fourth = (version(number) for number in range(4))
    holding = Holding("a relay", Limits(reads_max=2))

    assert holding.take(first) is None
    assert holding.take(second) is first.buffers
    with holding.reading(asked(0), 0, stays) as read:
        assert read is second
        assert holding.take(third) is None
        assert read.frame(0, "").endswith(np.full(3, 1, np.float32).tobytes())
    assert holding.take(fourth) is third.buffers
    assert (holding.readers.calls, second.users) == (0, 0)


def test_a_version_never_takes_the_place_of_a_later_one() -> None:
    holding = Holding("a relay", Limits(reads_max=1))
    holding.take(version(3))

    for number in (2, 3):
        with pytest.raises(AssertionError, match="never goes back"):
            holding.take(version(number))


def test_a_wait_ends_with_the_reader_the_deadline_or_the_relay() -> None:
    """And leaves nothing behind."""
    holding = Holding("a relay", Limits(reads_max=1))
    with pytest.raises(NotDeclared, match="a relay has no version yet: it has not asked yet"):
        holding.some()
    held = version(3)
    holding.take(held)

    def hang_up(callback: Callable[[], None]) -> bool:
        callback()
        return True

    with pytest.raises(InvalidRequest, match="hung up"), holding.reading(asked(4), 100, hang_up):
        pass
    with pytest.raises(InvalidRequest, match="hung up"), holding.reading(asked(4), 100, lambda _: False):
        pass
    with pytest.raises(WaitTimeout, match="a relay has version 3, and none from 4 on"), holding.reading(asked(4), 0.01, stays):
        pass
    holding.drain()
    with pytest.raises(Draining, match="a relay is shutting down"), holding.reading(asked(4), 100, stays):
        pass
    assert (holding.readers.calls, held.users) == (0, 0)
