"""Sharing memory between a worker and a shard of its machine: the worker's segment, and the shard's planes.

Descriptors travel over the local socket, each after the other side has said that it waits for one, so that none is read
together with a message and lost. Must not know calls, or what a failure means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from psd.contract.layout import Layout
from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.mapped_planes import MappedPlanes


def attach(
    stream: Stream,
    expect: Callable[[Kind], bytes],
    parsed: Callable[[type[bulk_pb2.BulkReady], bytes], bulk_pb2.BulkReady],
    gradients: FlatBuffers | None,
    places: Sequence[FlatBuffers],
) -> bulk_pb2.BulkReady:
    """Share the segment in which buffers lie; return the shard's answer.

    Args:
        expect: returns the head of the next message, which must be of that kind. parsed: parses it.
        gradients: None for a reader.

    Raises:
        Disconnected, and what `expect` and `parsed` raise.
    """
    segment = places[0].segment
    assert segment is not None
    assert gradients is None or gradients.segment is segment
    assert all(segment is place.segment for place in places)
    message = bulk_pb2.BulkAttach(
        layout_digest=places[0].layout.digest,
        size=segment.nbytes,
        gradient_starts=gradients.starts if gradients is not None else (),
        parameter_starts=[start for place in places for start in place.starts],
        wants_planes=places[0].maps_planes,
    )
    stream.send(Kind.ATTACH, message.SerializeToString())
    expect(Kind.SEND)
    stream.send_descriptor(segment.fd)
    ready = parsed(bulk_pb2.BulkReady, expect(Kind.READY))
    if ready.planes and gradients is not None:
        for space in gradients.spaces:  # the other half of what the shard's kernels stream through
            segment.make_large(space)
    return ready


def mapped(stream: Stream, ready: bulk_pb2.BulkReady, layout: Layout) -> MappedPlanes | None:
    """Map the planes that a shard's answer offers; None if it sends none. Raises Disconnected, OSError, InternalError."""
    stream.send(Kind.SEND)
    descriptors = stream.receive_descriptors()
    try:
        return MappedPlanes(descriptors[0], ready, layout) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
