"""One push as it was begun, to be sent to each shard as often as it takes.

Must not know when that is, nor how it travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Block
from psd.v1 import data_pb2, job_pb2
from psd_client.feed import Feed
from psd_client.flat import FlatBuffers
from psd_client.transport import GradientPart


@dataclass
class SentPush:
    """A push. With rounds it is kept until its round is known to have closed.

    Attributes:
        session: that it belongs to; another one neither sends nor commits it again, but notes whether its round was skipped.
        header: without its caller. client_state: goes to shard 0.
        present: which tensors have a gradient; None: all. skip: the gradient is not finite, and is not in it.
        feed: gives the blocks, if they are still being computed. versions_read: by block, of the parameters that the gradients
            were computed from; None: of those that were received last.
        incarnations: by shard, of those that have it.
    """

    session: int
    header: data_pb2.PushHeader
    client_state: bytes
    present: NDArray[np.bool_] | None
    skip: bool
    feed: Feed | None
    versions_read: Sequence[int] | None = None
    incarnations: dict[int, int] = field(default_factory=dict)

    def part(
        self, shard: int, caller: job_pb2.Caller, blocks: Sequence[Block], buffers: FlatBuffers, versions: Sequence[int]
    ) -> GradientPart:
        """What one shard is sent. `versions`: of its blocks, that this worker has read; where there are no rounds."""
        own = data_pb2.PushHeader()
        own.CopyFrom(self.header)
        own.caller.CopyFrom(caller)
        if shard == 0:
            own.client_state = self.client_state
        own.versions.extend(versions)
        return GradientPart(own, blocks, buffers, self.present, self.feed)
