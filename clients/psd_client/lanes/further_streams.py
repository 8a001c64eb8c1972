"""Opens the further sockets of a bulk connection, which carry parts of large payloads. Must not know calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2
from psd_client.lanes.silence_deadline import PAUSE_S


def greeting(stream: Stream, ticket: bytes, strand: int) -> Stream:
    """Send the greeting of a further socket; return its stream. strand: its number, from 1."""
    stream.send(Kind.HELLO, bulk_pb2.BulkHello(ticket=ticket, strand=strand).SerializeToString())
    return stream


def join_further(
    first: Stream, further: Sequence[Callable[[], Stream]], on_pause: Callable[[], None], welcomed: Callable[[Stream], object]
) -> None:
    """Open streams, and let the first one of the connection use them; whatever fails, it closes them.

    Args:
        on_pause: as of Stream.set_patience. welcomed: waits for the answer to a greeting.
    """
    joined: list[Stream] = []
    try:
        for opened in further:
            joined.append(opened())
            joined[-1].set_patience(PAUSE_S, on_pause)
        for stream in joined:
            welcomed(stream)
    finally:
        first.join(joined)
