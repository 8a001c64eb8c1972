"""The blocks that a worker pulls as differences, in memory of its own: the program may change what it was given.

A block's version is said to its shard with each request, and the shard answers with what is lacking; only to the incarnation
that has sent that version, because another one may have gone back. While a block changes, none is said: whatever breaks off
there, the next answer has all numbers. Must not know sockets, clocks or frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidTensor
from psd.contract.layout import Layout
from psd.v1 import data_pb2
from psd_core import codecs


class HeldParameters:
    """The blocks of one worker. Calls for different shards may be at work at the same time.

    Costs as much memory as the parameters that have come over a socket; shared memory has all numbers anyway.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._trained = [
            [block.index for block in layout.blocks_of(shard) if block.trained] for shard in range(layout.shard_count)
        ]
        self._values: dict[int, NDArray[Any]] = {}
        self._versions: dict[int, int] = {}  # version + 1, by block
        self._incarnations = [0] * layout.shard_count

    def say(self, shard: int, request: data_pb2.PullRequest | data_pb2.PushHeader) -> None:
        """Write into a request to a shard which versions are held. Answers to it are taken before the next one is made."""
        blocks = self._trained[shard]
        if self._incarnations[shard] != request.caller.incarnation:
            self._incarnations[shard] = request.caller.incarnation
            for index in blocks:
                self._versions.pop(index, None)
        held = [self._versions.get(index, 0) for index in blocks]
        if any(held):
            request.held.extend(held)

    def keep(self, index: int, values: NDArray[Any], version: int) -> None:
        """Note that a block has come as it is."""
        self._versions.pop(index, None)
        own = self._values.get(index)
        if own is None:
            self._values[index] = values.copy()
        else:
            np.copyto(own, values)
        self._versions[index] = version + 1

    def add(self, index: int, payload: memoryview, base: int, version: int, target: NDArray[Any]) -> None:
        """Add a difference to what is held of a block, and write the sum to `target`; see PullFrame.base.

        Raises:
            InvalidTensor: it belongs to another version, or is malformed; the message names the field.
        """
        held = self._versions.pop(index, 0)
        if held != base:
            raise InvalidTensor(f"block {index}: base: {base} was sent, and {held} is held")
        own, codec = self._values[index], self._layout.blocks[index].pull_codec
        if payload.nbytes:
            try:
                codecs.accumulate(codec, payload, own)
            except codecs.InvalidEncoding as error:
                raise InvalidTensor(f"block {index}: payload in {codec}: {error}") from None
        np.copyto(target, own)
        self._versions[index] = version + 1
