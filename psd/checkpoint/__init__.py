"""Checkpoints as files: one consistent cut of a job, independent of the number of shards.

    <url>/timeline-00000-step-000000001200-7f3a/
        shard-00000-of-00002.chunks    one shard's numbers: of blocks, of tables' rows, of vectors (chunks.py)
        shard-00000-of-00002.json      its own manifest: each chunk's kind, place and CRC-32; clocks, client states
        shard-00001-of-00002.chunks
        shard-00001-of-00002.json
        manifest.json                  written last, and only then is the checkpoint valid: the job spec, the cut, SHA-256
                                       of the parts' manifests, clocks, client states

A checkpoint of a job with tables may *build on* another one: of some tables it has what has changed since. It is valid as long
as that one is there, which is itself whole, and is kept for it.

What is stored are runs of the job's flat spaces, which depend on the job spec alone, so a checkpoint of two shards is read by
five. The `.json` files are for people, too, one chunk or tensor to a line, and end with a checksum of themselves (sealing.py).

    cut.py          what a cut is, and the names of files
    chunks.py, blocks.py, tables.py, vectors.py    a part's file, and what can be in it: each kind of chunk
    sealing.py, manifest.py    the JSON documents
    storage.py      local directories and object stores: whole files or none
    writing.py, loading.py, reading.py, row_reading.py, row_values.py, export.py, importing.py    the verbs
    notes.py        what shards tell each other here
    ends.py         what they hold at the end of a job
    directory.py    CheckpointDirectory, the one class that others use
    plain.py, safetensors.py, parquet.py    files as other programs write them
    parameters.py   parameters alone, of any job's checkpoint or of a plain safetensors file, for another job to begin with

A layer between contract and state: knows neither the blocks in a shard's memory nor when a checkpoint is due.
"""

from psd.checkpoint.blocks import BlockPart, RestoredBlock
from psd.checkpoint.cut import CheckpointInfo, CheckpointState, Cut
from psd.checkpoint.directory import CheckpointDirectory
from psd.checkpoint.ends import EndNote, common_cut, read_ends, to_settle, write_end
from psd.checkpoint.importing import import_table
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.parameters import ParameterSource, directory_at, open_parameters, parameter_blocks, table_values
from psd.checkpoint.plain import ValueRows
from psd.checkpoint.row_reading import StoredTable
from psd.checkpoint.vectors import VectorsPart

__all__ = [
    "CheckpointDirectory",
    "ParameterSource",
    "directory_at",
    "open_parameters",
    "parameter_blocks",
    "table_values",
    "Cut",
    "BlockPart",
    "Manifest",
    "RestoredBlock",
    "StoredTable",
    "ValueRows",
    "VectorsPart",
    "CheckpointInfo",
    "CheckpointState",
    "EndNote",
    "common_cut",
    "read_ends",
    "to_settle",
    "write_end",
    "import_table",
]
