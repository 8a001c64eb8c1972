"""Parameters in the form in which workers get them, where a job's pulls are compressed.

Where workers pull differences, a block has, beside its parameters, a copy of them as all workers have it: the *shown*
parameters. They follow by encoded differences, one for each update, and what these lack is in the next one; so the copy never
drifts away, and all who have a version have the same bits of it. It changes with the parameters, in one page. A difference is
kept in memory until the next one: who holds neither the version before nor this one, or has to do with a shard's next process,
gets the copy as it is.

Must not know blocks, pages or how they are sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd_core import codecs


def payload_of(values: NDArray[Any], codec: str) -> NDArray[Any]:
    """The form in which (n,) values travel: in the codec if there is one, and they are finite; else as they are."""
    return codecs.encoded_if_finite(codec, values) if codec else values


def write_rounded(values: NDArray[Any], codec: str, target: NDArray[Any]) -> None:
    """Write the values to `target` as the receiver of the payload would have them."""
    payload = payload_of(values, codec)
    if payload is values:
        np.copyto(target, payload)
    else:
        codecs.decode(codec, payload, target)


_SAME: NDArray[np.uint8] = np.empty(0, np.uint8)


class Shown(NamedTuple):
    """The way by which a block's shown parameters came to be what they are.

    Attributes:
        since: the first version that has them; later ones, up to the block's, have not changed them.
        before: the first version that has those before; `since` if they are of no use to anybody.
        difference: from those to these, encoded; None: it has no form.
    """

    since: int
    before: int
    difference: NDArray[np.uint8] | None = None

    @classmethod
    def anew(cls, version: int) -> Shown:
        """The parameters of a version that nobody holds otherwise."""
        return cls(version, version)

    def difference_for(self, held: int, version: int) -> NDArray[np.uint8] | None:
        """The difference that a worker with version `held` lacks of `version`, empty if none; None: all numbers."""
        if not self.before <= held <= version or version < self.since:
            return None
        return _SAME if held >= self.since else self.difference


def follow(codec: str, parameter: NDArray[Any], shown: NDArray[Any], following: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Write to `following` what workers have after an update, and return the difference. parameter: (n,) float32, after the
    update. shown: what they have before. None: a number is not finite, and they get the parameters as they are."""
    difference = codecs.follow(codec, parameter, shown, following)
    if difference is None:
        np.copyto(following, parameter)
    return difference
