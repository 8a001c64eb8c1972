"""JSON documents whose last line is the SHA-256 of all bytes before it, so that a change of any byte is found.

    {
     "format": "psd-checkpoint",
     ...
     "checksum": "sha256:5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"
    }

The bytes are checked before they are parsed. Must not know what the documents say beyond their format's version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import psd
from psd.contract.errors import CheckpointCorrupt, CheckpointUnsupported

FORMAT = "psd-checkpoint"
FORMAT_VERSION = 7


def _seal_of(body: bytes) -> bytes:
    return f',\n "checksum": "sha256:{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


_SEAL_BYTES = len(_seal_of(b""))


def seal(document: Mapping[str, Any]) -> bytes:
    """The document as text: one line per key, one per element of a list."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + _seal_of(body)


def unseal(data: bytes, file: str) -> dict[str, Any]:
    """The document, without its checksum; CheckpointCorrupt unless it is whole, CheckpointUnsupported if this psd cannot read
    its version."""
    body, given = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if given != _seal_of(body):
        raise CheckpointCorrupt(f"{file}: is cut off or was changed: its checksum does not match")
    try:
        document: dict[str, Any] = json.loads(data)
        del document["checksum"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorrupt(f"{file}: is not such a document: {error!r}") from None
    if document.get("format") != FORMAT or document.get("format_version") != FORMAT_VERSION:
        raise CheckpointUnsupported(
            f"{file}: is of format {document.get('format')!r}, version {document.get('format_version')!r}, written by psd "
            f"{document.get('psd_version')}; this is psd {psd.__version__}, which reads "
            f"{FORMAT!r}, version {FORMAT_VERSION}"
        )
    return document
