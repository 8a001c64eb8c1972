"""The frames that follow a CALL on a bulk connection, and the messages in heads. Must not know what the fields mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from psd.contract.bounds import UNCOUNTED_BYTES, check_parts
from psd.contract.errors import InvalidRequest
from psd.contract.wire import Kind, Stream
from psd.rim.calls import Frame

MessageT = TypeVar("MessageT", bound=Message)


class CallFrames:
    """The frames that follow a CALL.

    Args:
        scratch: memory for a payload; overwritten by the next one's. kind: of the frames.

    Attributes:
        is_last: True once the last frame has been read.
    """

    def __init__(self, stream: Stream, scratch: memoryview, kind: type[Message]) -> None:
        self._stream = stream
        self._scratch = scratch
        self._kind = kind
        self._unread = 0  # payload bytes of the latest frame that were not read yet
        self.is_last = False

    def frames(self) -> Iterator[Frame]:
        """Receive the frames."""
        while not self.is_last:
            head, nbytes = self._next(), self._unread
            if nbytes > len(self._scratch):
                raise InvalidRequest(f"payload: has {nbytes} bytes, the limit is {len(self._scratch)}")
            payload = self._scratch[:nbytes]
            if nbytes:
                self._stream.read_into(payload)
                self._unread = 0
            yield Frame(head, payload, is_own=self.is_last)

    def skip_rest(self) -> None:
        """Read the rest of a refused call, which the worker is still sending."""
        self._stream.skip(self._unread)
        while not self.is_last:
            self._next()
            self._stream.skip(self._unread)

    def _next(self) -> Any:
        kind, head, self._unread = self._stream.receive()
        if kind is not Kind.FRAME:
            raise InvalidRequest(f"kind: expected a FRAME of a call, got {kind.name}")
        self.is_last = True  # a message that cannot be parsed is the last one, too
        message: Any = parsed(self._kind, head)
        self.is_last = message.last
        return message


def parsed(kind: type[MessageT], head: bytes) -> MessageT:
    """The message in a head; InvalidRequest if it is none, or has too many parts."""
    if len(head) > UNCOUNTED_BYTES:
        check_parts(head, kind.DESCRIPTOR)
    try:
        return kind.FromString(head)
    except DecodeError as error:
        raise InvalidRequest(f"{kind.__name__}: not a valid message: {error}") from None
