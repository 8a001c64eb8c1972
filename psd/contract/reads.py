"""Checks of every reader's request, whether a shard or a relay answers. Must not know jobs, or what they hold."""

from __future__ import annotations

from psd.contract.errors import InvalidRequest
from psd.contract.layout import READ_CODECS
from psd.v1 import data_pb2


def check_read(request: data_pb2.ReadRequest) -> None:
    """Raise InvalidRequest if it names a block twice, asks for an unknown codec, or holds another number of blocks."""
    if len(set(request.blocks)) < len(request.blocks):
        raise InvalidRequest(f"blocks: one of these {len(request.blocks)} is named twice")
    if request.codec not in READ_CODECS:
        raise InvalidRequest(f"codec: must be empty, bf16 or fp16, got {request.codec[:80]!r}")
    if len(request.held) not in (0, len(request.blocks)):
        raise InvalidRequest(f"held: has {len(request.held)} entries for {len(request.blocks)} blocks")
