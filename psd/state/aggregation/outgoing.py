"""Parameters in the form in which workers get them, where a job's pulls are compressed.

Must not know blocks, pages or how they are sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import InvalidArray, codecs


def payload_of(values: NDArray[Any], codec: str) -> NDArray[Any]:
    """Encode (n,) float32 values; NaN and infinity have no form, so that a block with one of them is returned as it is."""
    try:
        return codecs.encode(codec, values)
    except InvalidArray:
        return values


def write_rounded(values: NDArray[Any], codec: str, target: NDArray[Any]) -> None:
    """Write the values to `target` as the receiver of the payload would have them."""
    payload = payload_of(values, codec)
    if payload is values:
        np.copyto(target, payload)
    else:
        codecs.decode(codec, payload, target)
