"""Tells all workers a short text that worker 0 alone knows, such as the path of its best model. Must not know shards.

It travels as the numbers of one `all_reduce`: nothing else that is small goes from one worker to all.
"""

from __future__ import annotations

from psd_client.client import ParameterServer

_NUMBERS, _BYTES = 128, 7  # within the shards' --max-reduced-numbers; a number fits into 64 bits, with its sign
TEXT_BYTES_MAX = _NUMBERS * _BYTES


def text_of_worker_0(ps: ParameterServer, text: str) -> str:
    """Return worker 0's `text`; all workers call this, and wait for each other. "" if it has left, or its text is too long."""
    data = text.encode()
    if ps.rank or len(data) > TEXT_BYTES_MAX:
        data = b""
    parts = {
        f"psd_text_{at}": int.from_bytes(data[at * _BYTES : (at + 1) * _BYTES].ljust(_BYTES, b"\0"), "big")
        for at in range(_NUMBERS)
    }
    told = ps.all_reduce(parts, op="max")
    return b"".join(int(told[name]).to_bytes(_BYTES, "big") for name in parts).rstrip(b"\0").decode()
