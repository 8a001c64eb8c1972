"""Makes a file for --from-checkpoint from a table's ids and rows in another file, safetensors or Parquet, or in a dump.

Must not know checkpoints or jobs: a job that begins with the file checks whether the table fits.
"""

from __future__ import annotations

import numpy as np

from psd.checkpoint import parquet, plain
from psd.checkpoint.dynamicemb import DynamicEmbTable
from psd.checkpoint.opening import open_parent
from psd.contract.errors import CheckpointFailed
from psd_core import first_nonfinite


def import_table(
    source: str, to: str, name: str, *, ids: str = "", rows: str = "", dynamicemb: str = "", others: str = ""
) -> plain.ValueTable:
    """Write a table to a safetensors file; return it.

    Args:
        source: path or URL of a safetensors file, or path of a Parquet file.
        name: the table's name. ids, rows: names of the tensors or columns, if they are not the usual ones.
        dynamicemb: name of the table in a dump of dynamicemb; `source` is then path or URL of the folder that has its files.
        others: a safetensors file whose tensors and other tables are copied into the new one.

    Raises:
        CheckpointFailed: a file cannot be read or written, an id comes twice, or a number is not finite. Nothing is written.
        CheckpointCorrupt: a file is not of the type that its name says. ConfigError: pyarrow is missing.
    """
    table: plain.ValueTable
    if dynamicemb:
        table = DynamicEmbTable(source, dynamicemb)
    elif source.endswith(parquet.SUFFIX):
        table = parquet.ParquetTable(source, ids or parquet.IDS, rows or parquet.ROWS)
    else:
        table = plain.PlainTable(
            plain.PlainFile(source), ids or f"{name}{plain.IDS_SUFFIX}", rows or f"{name}{plain.ROWS_SUFFIX}"
        )
    _check(table)
    plain.write_file(*open_parent(to), table, name, plain.PlainFile(others) if others else None)
    return table


def _check(table: plain.ValueTable) -> None:
    keys = []
    for ids, values in table.rows():
        keys.append(ids)
        element = first_nonfinite(np.ascontiguousarray(values).reshape(-1))
        if element >= 0:
            raise CheckpointFailed(f"{table.location}: the row of id {ids[element // table.dim]} holds NaN or infinity")
    if not keys:
        return
    found = np.sort(np.concatenate(keys))
    twice = found[1:][found[1:] == found[:-1]]
    if len(twice):
        raise CheckpointFailed(f"{table.location}: id {twice[0]} comes twice")
