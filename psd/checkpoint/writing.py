"""Writes one shard's part of a cut, and the manifest once all parts are there.

A shard's numbers are streamed, array by array, straight from the pages that it hands over: their sizes follow from the layout,
so the file's header comes first. The part's document follows when the numbers are durable, the manifest when all documents are.
Must not know other checkpoints, nor whose turn it is.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping

import psd
from psd.checkpoint import manifest as documents
from psd.checkpoint import safetensors
from psd.checkpoint.cut import MANIFEST, Cut, data_file, part_file
from psd.checkpoint.loading import check_size, load, read_document
from psd.checkpoint.manifest import ManifestDocument, Part
from psd.checkpoint.records import BlockPart, Field, Record, encode, stored_spaces
from psd.checkpoint.storage import Chunk, FileStore
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd.contract.layout import Block

logger = logging.getLogger(__name__)


def write_part(
    storage: FileStore,
    cut: Cut,
    shard_index: int,
    blocks: Iterable[BlockPart],
    worker_clocks: Mapping[int, int],
    client_states: Mapping[int, bytes],
) -> int:
    """See CheckpointDirectory.write_part."""
    files = storage.files(cut.name)
    if _is_written(storage, cut, shard_index, files):
        return 0
    spaces = stored_spaces(cut.spec)
    plans = [
        (plan, spaces[plan.space].fields(plan.length, len(plan.segment_ends))) for plan in cut.layout.blocks_of(shard_index)
    ]
    header = _header(cut, shard_index, plans)
    records: list[Record] = []
    storage.write(
        cut.name,
        data_file(shard_index, cut.shard_count),
        _chunks(cut, shard_index, header, plans, blocks, records),
    )
    part = Part(
        shard_index=shard_index,
        data_bytes=len(header) + sum(record.nbytes for record in records),
        header_bytes=len(header),
        header_crc32=zlib.crc32(header),
        records=tuple(records),
        worker_clocks=worker_clocks,
        client_states=client_states,
        psd_version=psd.__version__,
    )
    document = documents.part_document(cut, part)
    storage.write(cut.name, part_file(shard_index, cut.shard_count), [document])
    return part.data_bytes + len(document)


def _is_written(storage: FileStore, cut: Cut, shard_index: int, files: Mapping[str, int]) -> bool:
    """True if the part is there and whole: some object stores show the remains of an interrupted put."""
    file = part_file(shard_index, cut.shard_count)
    if file not in files:
        return False
    try:
        _read_part(cut, shard_index, read_document(storage, cut.name, file), files)
    except CheckpointCorrupt as error:
        logger.warning("a part of a checkpoint is damaged and is written again: %s", error)
        return False
    return True


def _read_part(cut: Cut, shard_index: int, document: bytes, files: Mapping[str, int]) -> Part:
    """Read a part from its document; CheckpointCorrupt unless it is this cut's, and its data file has the recorded length."""
    file = f"{cut.name}/{part_file(shard_index, cut.shard_count)}"
    part = documents.parse_part(document, file, documents.identity_of(cut), shard_index)
    check_size(cut.name, files, data_file(shard_index, cut.shard_count), part.data_bytes)
    return part


_Plans = list[tuple[Block, list[Field]]]


def _header(cut: Cut, shard_index: int, plans: _Plans) -> bytes:
    entries = safetensors.lay_out(
        (field.tensor_name(plan.space, plan.offset), field.dtype, (field.length,)) for plan, fields in plans for field in fields
    )
    try:
        return safetensors.header(entries, {"psd_checkpoint": cut.name, "shard": f"{shard_index}/{cut.shard_count}"})
    except ValueError as error:
        raise CheckpointFailed(f"{cut.name}: shard {shard_index} has too many blocks for one file: {error}") from None


def _chunks(
    cut: Cut, shard_index: int, header: bytes, plans: _Plans, blocks: Iterable[BlockPart], records: list[Record]
) -> Iterator[Chunk]:
    """Yield the data file's bytes; append to `records` the place and checksum of each block."""
    yield header
    start = len(header)
    for (plan, fields), block in zip(plans, blocks, strict=True):
        assert (block.space, block.offset, block.length) == (plan.space, plan.offset, plan.length), (block, plan)
        if cut.spec.consistency.has_rounds and plan.trained and block.version != cut.step:
            raise CheckpointFailed(f"{cut.name}: block {plan.index} is at version {block.version}, the cut at {cut.step}")
        crc32 = nbytes = 0
        for chunk in encode(block, fields):
            crc32 = zlib.crc32(chunk, crc32)
            nbytes += chunk.nbytes
            yield chunk
        records.append(
            Record(
                part=shard_index,
                space=plan.space,
                offset=plan.offset,
                length=plan.length,
                version=block.version,
                segments=len(plan.segment_ends),
                start=start,
                nbytes=nbytes,
                crc32=crc32,
            )
        )
        start += nbytes


def complete(storage: FileStore, cut: Cut) -> bool:
    """See CheckpointDirectory.complete."""
    files = storage.files(cut.name)
    if MANIFEST in files:
        try:
            load(storage, cut.name, files)
        except CheckpointCorrupt as error:
            logger.error("a checkpoint is damaged, trying to write its manifest again: %s", error)  # noqa: TRY400
        else:
            return True
    names = [(part_file(index, cut.shard_count), data_file(index, cut.shard_count)) for index in range(cut.shard_count)]
    if any(file not in files for pair in names for file in pair):
        return False
    texts = [read_document(storage, cut.name, file) for file, _ in names]
    parts = [_read_part(cut, index, text, files) for index, text in enumerate(texts)]
    manifest = documents.manifest_document(cut, parts, texts)
    ManifestDocument(manifest, cut.name).with_parts(parts)  # raises unless readers will take it
    storage.sync(cut.name)  # the other shards' files, before the word that they are there
    storage.write(cut.name, MANIFEST, [manifest])
    return True
