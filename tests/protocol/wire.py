"""What travels between workers and shards here: requests and outcomes as values, known by number.

A number stands for a content: whoever sends the same content again sends the same number, so that states which differ by their
past alone are equal.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from psd.contract.errors import PsdError, error_from


class Request(NamedTuple):
    """A call as it is sent.

    Attributes:
        kind: the lane's method. body: the message. blocks: of a push: index, the frame without its payload, payload; or of
            initial values: index, nothing, payload.
        process: of a bulk call in a world with armed steps, by whose connection it comes; of others -1. wants_steps: it asks
            for an offer. A step has its whole message as `body`.
    """

    kind: str
    body: bytes
    blocks: tuple[tuple[int, bytes, bytes], ...] = ()
    process: int = -1
    wants_steps: bool = False


class Outcome(NamedTuple):
    """How a call has ended at the shard.

    Attributes:
        body: the reply, if it has one. versions: of the blocks in the answer. reason, text, detail: of the error, as on the
        wire. offer: of steps, beside the reply to a push_pull. Of a step the body is the whole message.
    """

    body: bytes = b""
    versions: tuple[tuple[int, int], ...] = ()
    reason: str = ""
    text: str = ""
    detail: str = "{}"
    offer: bytes = b""

    @classmethod
    def of_error(cls, error: PsdError) -> Outcome:
        """The outcome that a refusal has. Its words, which name times, decide nothing."""
        return cls(reason=error.reason, text="", detail=json.dumps(error.detail, sort_keys=True))

    def error(self, shard: int) -> PsdError | None:
        """As a client raises it."""
        if not self.reason:
            return None
        return error_from(self.reason, self.reason, {"shard": shard} | json.loads(self.detail))


class Numbers:
    """Gives each content a number."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self.contents: list[Any] = []

    def of(self, content: Any) -> int:
        number = self._known.setdefault(content, len(self.contents))
        if number == len(self.contents):
            self.contents.append(content)
        return number

    def __getitem__(self, number: int) -> Any:
        return self.contents[number]


UNREACHED = Outcome(reason="ShardUnavailable")
"""No connection, or one that broke."""
