"""Weights: what a reader's pull returns, with the version that it is of.

Must not know how it was fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray


class Weights(dict[str, NDArray[Any]]):
    """Tensors of one version, by name: what `Reader.pull` returns.

    Attributes:
        version: of a store, what `put` has returned. Of a job, the number of closed rounds; without rounds, the clock of the
            slowest worker.
        meta: what `put` was given with it: a dict, bytes or None. None for a job that trains.
        digest: 32 hexadecimal digits that stand for what the shards hold of these tensors: equal for pulls of the same names
            of one version, whatever their `dtype`, and as good as certainly not equal for other numbers. It is of the blocks
            that hold the tensors, their optimizer's slots included, and so it is another one on another number of shards. A
            relay has that of its shards. It is no protection against forgery.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], version: int, meta: Any, digest: str) -> None:
        super().__init__(tensors)
        self.version, self.meta, self.digest = version, meta, digest


def digest_of(layout_digest: bytes, contents: Mapping[int, int]) -> str:
    """The digest of some blocks. contents: the checksum of each, by index."""
    digest = hashlib.blake2b(layout_digest, digest_size=16)
    for index in sorted(contents):
        digest.update(b"%d %d\n" % (index, contents[index]))
    return digest.hexdigest()
