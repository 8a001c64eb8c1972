"""Encodes a worker's gradients for the way, and keeps what is lost of them for its next push (error feedback).

A block is encoded once for each push, when it is first sent, and its bytes are kept until the next push is made: whatever is
sent again, to a shard that was killed or by a later session, is the same to the bit, and takes nothing from the residual a
second time. Random rounding has a seed that follows from the job, the rank, the clock and the block. What a push has carried of
the residual shares its fate: it counts with it, or is dropped with it. But the difference of a learner stays in its parameters
if it comes late, and then residuals are what they were before. A residual ends when the job goes back to a checkpoint, since it
belongs to gradients that do not count any more, and with the process.

Must not know codecs' bytes, lanes or sessions.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import NonFiniteGradient
from psd.contract.layout import Block, Layout
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Aborted
from psd_client.worker.exchange.riders import Rider
from psd_client.worker.exchange.sent_push import SentPush
from psd_core import InvalidArray, codecs


class GradientEncoder(Rider):
    """The encoded gradients of one worker, and its residuals.

    Args:
        gradients: the buffers whose blocks are encoded; they stay as they are.

    Attributes:
        sent: memory for what travels, in the gradients' segment if that is shared; blocks without a codec lie there, too, in
            spaces that have others. Spaces without any are the gradients' own.
        push: the encoded blocks of the present push; None before the first.
    """

    def __init__(self, rank: int, gradients: FlatBuffers) -> None:
        layout = gradients.layout
        self._rank = rank
        self._gradients = gradients
        self._residuals: FlatBuffers | None = None
        if layout.spec.compression.error_feedback:
            self._residuals = FlatBuffers(layout, of_gradients=True)
        self.sent = FlatBuffers(layout, segment=gradients.segment, of_gradients=True)
        for space in {*range(len(layout.spaces))} - {block.space for block in layout.blocks if block.codec}:
            self.sent.spaces[space], self.sent.starts[space] = gradients.spaces[space], gradients.starts[space]
        self.push: EncodedPush | None = None

    def write(self, sent: SentPush) -> None:
        """Begin another push."""
        header = sent.header
        self.push = EncodedPush(self, self._gradients.layout, self._rank, header.clock, is_finite=header.is_finite)

    def forget(self) -> None:
        """Drop the residuals: the gradients of which they were lost do not count any more."""
        if self._residuals is not None:
            for space in self._residuals.spaces:
                space.fill(0)

    def take_back(self, blocks: Collection[int], since: int) -> None:
        """Undo what the present push, if it is of this clock or a later one, has done to residuals of these blocks.

        They have not counted it, and its gradient, which is still there, will be sent as a part of another.
        """
        if self._residuals is None or self.push is None or self.push.clock < since:
            return
        for block, data, present in self.push.take_back():
            if block.codec and block.index in blocks:
                decoded = np.empty(block.length, np.float32)
                codecs.decode(block.codec, data, decoded)
                residual = self._residuals.block(block.index)
                decoded += residual
                decoded -= self._gradients.block(block.index)
                np.copyto(residual, decoded, where=True if present is None else ~block.elements_without(present))

    def encode(self, block: Block, present: NDArray[np.bool_] | None, seed: int, *, is_finite: bool) -> NDArray[Any]:
        """Encode one block of the gradients into its place in `sent`, and return what travels.

        Segments that are not present keep their residuals.

        Args:
            is_finite: the gradient was looked at.

        Raises:
            InvalidArray: a number is not finite: the residual is as it was. Or it is not if the residual is added, which is
                too large then, and begins anew.
        """
        values, asked = self._gradients.block(block.index), self._gradients.layout.spec.compression
        room = self.sent.block(block.index)
        if not block.codec:
            if room is not values:
                np.copyto(room, values)
            return room
        residual = self._residuals.block(block.index) if self._residuals is not None else None
        absent = kept = None
        if residual is not None and present is not None and not present.all():
            absent = block.elements_without(present)
            kept = residual[absent]
            residual[absent] = 0
        try:
            key = seed if asked.rounding == "stochastic" else None
            out = room.view(np.uint8)[: block.pushed_nbytes]
            return codecs.encode(block.codec, values, residual, key, asked.rounding, out, is_finite=is_finite)
        except InvalidArray:
            if residual is not None and is_finite:
                residual.fill(0)
            raise
        finally:
            if absent is not None and residual is not None:
                residual[absent] = kept


class EncodedPush:
    """The encoded blocks of one push. Threads of several shards ask for their blocks, perhaps again.

    Attributes:
        clock: of the push. failure: why a block could not be encoded; None: all could.
    """

    def __init__(self, whole: GradientEncoder, layout: Layout, rank: int, clock: int, *, is_finite: bool) -> None:
        self._whole = whole
        self._layout = layout
        self._rank, self.clock, self._is_finite = rank, clock, is_finite
        self._done: dict[int, tuple[NDArray[Any], NDArray[np.bool_] | None]] = {}
        self._is_taken_back = False
        self._locks = [threading.Lock() for _ in range(layout.shard_count)]
        self.failure: NonFiniteGradient | None = None

    def block(self, block: Block, present: NDArray[np.bool_] | None) -> NDArray[Any]:
        """The bytes that travel of a block. present: (segments,) which have a gradient, at least one; None: all.

        Raises:
            Aborted: it cannot be encoded, see `failure`; or the push is over.
        """
        with self._locks[self._layout.shard_of(block.index)]:
            found = self._done.get(block.index)
            if found is not None:
                return found[0]
            if self._whole.push is not self:  # a call that was given up is still sending
                raise Aborted
            try:
                data = self._whole.encode(block, present, self._seed(block.index), is_finite=self._is_finite)
            except InvalidArray as error:
                self.failure = self._non_finite(block, error)
                raise Aborted from None
            self._done[block.index] = data, present
            return data

    def take_back(self) -> Iterator[tuple[Block, NDArray[Any], NDArray[np.bool_] | None]]:
        """The blocks, with their bytes and which segments have a gradient; once."""
        if not self._is_taken_back:
            self._is_taken_back = True
            for index, (data, present) in self._done.items():
                yield self._layout.blocks[index], data, present

    def _seed(self, block: int) -> int:
        """The seed of random rounding: the same however often the push is made, in any session and run of the job."""
        name = struct.pack("<3Q", self._rank, self.clock, block)
        return int.from_bytes(hashlib.blake2b(name, key=self._layout.digest, digest_size=8).digest(), "little")

    def _non_finite(self, block: Block, error: InvalidArray) -> NonFiniteGradient:
        tensor = self._layout.spec.tensors[int(block.segment_tensors[0])].name
        return NonFiniteGradient(
            f"worker {self._rank}: the gradient at step {self.clock} cannot be compressed, in the block that begins with "
            f"{tensor!r}: {error}",
            rank=self._rank,
            clock=self.clock,
            tensor=tensor,
        )
