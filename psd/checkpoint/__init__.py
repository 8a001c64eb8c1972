"""Checkpoints as files: one consistent cut of a job, independent of the number of shards.

    <url>/timeline-00000-step-000000001200-7f3a/
        shard-00000-of-00002.chunks    one shard's values: blocks, tables' rows, vectors (chunks.py)
        shard-00000-of-00002.json      the part's document: each chunk's kind, place and CRC-32; clocks, client states
        shard-00001-of-00002.chunks
        shard-00001-of-00002.json
        manifest.json                  written last, and only then is the checkpoint valid: the job spec, the cut, SHA-256
                                       of the parts' documents, clocks, client states

A checkpoint of a job with tables may *build on* another one: for some tables it holds only what has changed since. It is valid
as long as the other exists, which builds on none itself, and is kept for it.

Stored are runs of the job's flat spaces, which depend only on the job spec, so five shards can read a checkpoint of two. People
can read the `.json` files, too: they have one chunk or tensor to a line, and end with a checksum of themselves (sealing.py).

    cut.py          a cut, and the names of files
    chunks.py, blocks.py, tables.py, vectors.py    a part's file, and the kinds of chunks in it
    sealing.py, manifest.py    the JSON documents
    storage.py, objects.py, opening.py    local directories, and stores that fsspec knows: whole files or none
    writing.py, loading.py, reading.py, row_reading.py, row_values.py, export.py, importing.py    the operations
    notes.py        notes that shards leave for each other here
    ends.py         notes on when shards began, and what they hold at the end of a job
    directory.py    CheckpointDirectory, the one class that others use
    plain.py, safetensors.py, parquet.py    files in other programs' formats
    parameters.py   only the parameters, from a checkpoint or a plain safetensors file, for another job to begin with

A layer between contract and state: knows neither the blocks in a shard's memory nor when a checkpoint is due.
"""

from psd.checkpoint.blocks import BlockPart, RestoredBlock
from psd.checkpoint.cut import CheckpointInfo, CheckpointState, Cut
from psd.checkpoint.directory import CheckpointDirectory
from psd.checkpoint.ends import EndNote, common_cut, read_ends, read_lives, to_settle, write_end, write_life
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
    "read_lives",
    "to_settle",
    "write_end",
    "write_life",
    "import_table",
]
