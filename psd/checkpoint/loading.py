"""Reads a checkpoint's documents and says whether it can be relied on, as far as documents and sizes tell.

The numbers themselves are checked where they are read (reading.py). Must not know other checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from psd.checkpoint.cut import MANIFEST
from psd.checkpoint.manifest import Manifest, ManifestDocument, Part, parse_part
from psd.checkpoint.storage import Storage
from psd.contract.errors import CheckpointCorrupt


class Incomplete(Exception):
    """The checkpoint has no manifest; the message says what there is."""


def load(storage: Storage, name: str, files: Mapping[str, int]) -> Manifest:
    """A checkpoint with its parts.

    Args:
        files: sizes of its files by name, from the storage.

    Raises:
        Incomplete: there is no manifest.
        CheckpointCorrupt: there is one, and something does not match it.
    """
    if MANIFEST not in files:
        parts = sum(file.startswith("shard-") and file.endswith(".json") for file in files)
        raise Incomplete(f"{name}/{MANIFEST}: is missing; {parts} parts are complete")
    document = ManifestDocument(read_document(storage, name, MANIFEST), name)
    return document.with_parts([_load_part(storage, name, files, document, index) for index in range(len(document.parts))])


def _load_part(storage: Storage, name: str, files: Mapping[str, int], document: ManifestDocument, index: int) -> Part:
    entry = document.parts[index]
    file = entry.file
    check_size(name, files, file, entry.nbytes)
    check_size(name, files, entry.data_file, entry.data_bytes)
    text = read_document(storage, name, file)
    if hashlib.sha256(text).hexdigest() != entry.sha256:
        raise CheckpointCorrupt(f"{name}/{file}: was changed: its checksum is not the one in the manifest")
    return parse_part(text, f"{name}/{file}", document.identity, index)


def read_document(storage: Storage, name: str, file: str) -> bytes:
    """A whole small file; CheckpointCorrupt if it is not there."""
    try:
        return storage.read(name, file)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{name}/{file}: is missing") from None


def check_size(name: str, files: Mapping[str, int], file: str, nbytes: int) -> None:
    """Raise CheckpointCorrupt unless the file is there and as long as it was."""
    if file not in files:
        raise CheckpointCorrupt(f"{name}/{file}: is missing")
    if files[file] != nbytes:
        raise CheckpointCorrupt(f"{name}/{file}: has {files[file]} bytes instead of {nbytes}")
