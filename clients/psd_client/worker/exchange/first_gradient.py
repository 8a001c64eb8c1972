"""Compares the first gradients of workers, by digest: if two have the same bits, both workers train on the same samples.

Programs that read the same data in the same order on all workers run without an error, but learn no faster than one process.
Must not know shards or frameworks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from itertools import chain

from psd.contract.rows import TableRows
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.exchange.sent_push import SentPush

logger = logging.getLogger("psd_client")

LOOKED_AT_BYTES = 64 << 20
"""Most bytes of the gradient that are hashed: that takes a tenth of a second, once."""


class FirstGradient(Rider):
    """The first gradient of one worker of several.

    Args:
        gradients: the buffers that still hold it when its push has ended.
    """

    def __init__(self, rank: int, gradients: FlatBuffers) -> None:
        self._rank = rank
        self._gradients = gradients
        self._is_awaited = True
        self._digest = b""

    def write(self, sent: SentPush) -> None:
        """Write the digest into the second push, unless the gradient was zero; write nothing into others."""
        if self._digest:
            sent.header.first_gradient, self._digest = self._digest, b""

    def hear(self, sent: SentPush) -> None:
        """Hash the gradient, rows of tables included, if this was the first push. Warn if shards have seen the same one."""
        if self._is_awaited:
            self._is_awaited = False
            self._look(sent.tables)
        replies = sent.replies.values()
        same = [reply.same_gradient_as for reply in replies if reply.HasField("same_gradient_as")]
        if same:
            logger.warning(
                "psd: worker %d: its first gradient has the same bits as worker %d's. If both train on the same samples, the "
                "job learns no faster than one process: give each worker its own, by its rank and world_size",
                self._rank,
                same[0],
            )

    def _look(self, tables: Iterable[Sequence[TableRows]]) -> None:
        digest, left, is_zero = hashlib.blake2b(digest_size=16), LOOKED_AT_BYTES, True
        for space in self._gradients.spaces:
            seen = space[: left // space.itemsize]
            digest.update(seen.data)
            is_zero = is_zero and not seen.any()
            left -= seen.nbytes
        for _, ids, values in chain.from_iterable(tables):
            digest.update(ids.data)
            digest.update(values.data)
            is_zero = is_zero and not values.any()
        self._digest = b"" if is_zero else digest.digest()
