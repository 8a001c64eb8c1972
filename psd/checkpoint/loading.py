"""Reads a checkpoint's documents and tells whether it is reliable, as far as documents and sizes show.

The values themselves are checked when they are read (reading.py). Must not know other checkpoints.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from psd.checkpoint.cut import MANIFEST, CutName, data_file
from psd.checkpoint.manifest import Manifest, ManifestDocument, Part, parse_part
from psd.checkpoint.storage import FileStore
from psd.contract.errors import CheckpointCorrupt

_PART = re.compile(r"shard-\d+-of-(\d+)\.json")


class Incomplete(Exception):
    """Raised if a checkpoint has no manifest; the message lists its files."""


def load(storage: FileStore, name: str, files: Mapping[str, int]) -> Manifest:
    """A checkpoint with its parts.

    Args:
        files: sizes of its files by name, from the storage.

    Raises:
        Incomplete: there is no manifest.
        CheckpointCorrupt: something does not match the manifest, or is wrong with the checkpoint on which it builds.
    """
    if MANIFEST not in files:
        written = [match[1] for file in files if (match := _PART.fullmatch(file))]
        there = f"{len(written)} of {int(written[0])} parts are there" if written else "no part is there"
        raise Incomplete(f"{name}/{MANIFEST}: is missing; {there}")
    document = ManifestDocument(read_document(storage, name, MANIFEST), name)
    parts = [_load_part(storage, name, files, document, index) for index in range(len(document.parts))]
    return document.with_parts(parts, _load_base(storage, document))


def _load_base(storage: FileStore, document: ManifestDocument) -> Manifest | None:
    entry = document.base
    if entry is None:
        return None
    try:
        base, _ = load_base(storage, entry.name, entry.sha256)
    except (Incomplete, CheckpointCorrupt) as error:
        raise CheckpointCorrupt(f"{document.file}: builds on another checkpoint, which cannot be used: {error}") from None
    return base


def load_base(storage: FileStore, name: str, sha256: str = "") -> tuple[Manifest, str]:
    """A checkpoint on which others build, and the SHA-256 of its manifest, which must be `sha256` if that is given.

    Raises what `load` raises.
    """
    if CutName.of(name) is None:
        raise CheckpointCorrupt(f"{name!r} is not the name of a checkpoint")
    files = storage.files(name)
    found = hashlib.sha256(read_document(storage, name, MANIFEST)).hexdigest() if MANIFEST in files else ""
    if found and sha256 not in ("", found):  # checked before it is read, so manifests cannot form a circle
        raise CheckpointCorrupt(f"{name}/{MANIFEST}: was changed: its checksum is not the one in the other's manifest")
    return load(storage, name, files), found


def _load_part(storage: FileStore, name: str, files: Mapping[str, int], document: ManifestDocument, index: int) -> Part:
    entry = document.parts[index]
    file = entry.file
    check_size(name, files, file, entry.nbytes)
    text = read_document(storage, name, file)
    if hashlib.sha256(text).hexdigest() != entry.sha256:
        raise CheckpointCorrupt(f"{name}/{file}: was changed: its checksum is not the one in the manifest")
    part = parse_part(text, f"{name}/{file}", document.identity, index)
    check_size(name, files, data_file(index, len(document.parts)), part.data_bytes)
    return part


def read_document(storage: FileStore, name: str, file: str) -> bytes:
    """A whole small file; CheckpointCorrupt if it is missing."""
    try:
        return storage.read(name, file)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{name}/{file}: is missing") from None


def check_size(name: str, files: Mapping[str, int], file: str, nbytes: int) -> None:
    """Raise CheckpointCorrupt unless the file exists and has its recorded length."""
    if file not in files:
        raise CheckpointCorrupt(f"{name}/{file}: is missing")
    if files[file] != nbytes:
        raise CheckpointCorrupt(f"{name}/{file}: has {files[file]} bytes instead of {nbytes}")
