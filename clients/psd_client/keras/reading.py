"""Models that take no part in a job: they take what an export has, or look up rows on a job's shards, as a reader does.

Must not know backends, or how lookups are made.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.tables import SparseTableSpec
from psd_client.faces import table_in
from psd_client.keras.declaration import named_variables
from psd_client.keras.embedding import Embedding, embeddings_in
from psd_client.keras.fixed_rows import OwnedRows, ReadRows
from psd_client.keras.given import Models, models_by_name
from psd_client.reader import Reader

NAMES = (
    "names of variables begin with those of their layers, which Keras numbers in each process: give layers and models names, "
    "or make the model as the job's program does"
)


def load_export(model: Models, path: str | os.PathLike[str]) -> None:
    """Set a model's trainable variables, and the rows of its embeddings, to those of a job, as `psdctl export` writes them.

        psd.load_export(model, "model.safetensors")
        model.save("model.keras")  # with the rows; keras.models.load_model needs no shards then

    The rows are fixed from now on: no gradient reaches them, and `save` and `save_weights` write them. Ids that have none get
    the values of `init`. Layers that look up one table share its rows in memory, while each saves its own. What is not
    trainable, such as BatchNormalization's moving statistics, is in no export, and stays.

    Args:
        model: in no job, and built; or several models by name, as they were given to `distribute`.
        path: a file that has exactly what the model has.

    Raises:
        InvalidRequest: a variable or a table is missing, or not the model's; or the model is in a job.
        InvalidTensor: one has another shape. Nothing was set.
        FileNotFoundError, safetensors.SafetensorError: the file is not there, or is no safetensors file.
        ImportError: the package safetensors is not installed.
    """
    from safetensors import safe_open

    models = models_by_name(model)
    layers = [layer for one in models.values() for layer in embeddings_in(one)]
    _check_no_job(layers)
    handles = {id(layer.handle) for layer in layers}
    variables = named_variables(models, models)
    of_rows = {f"{layer.spec.name}.{part}" for layer in layers for part in ("ids", "rows")}
    with safe_open(os.fspath(path), framework="numpy") as file:
        there = set(file.keys())
        of_handles = {name for name, variable in variables.items() if id(variable) in handles}
        wanted = variables.keys() - of_handles | of_rows
        if wanted - there:
            raise InvalidRequest(f"{path}: has no {min(wanted - there)!r}, which the model has; it has {_some(there)}; {NAMES}")
        if there - wanted - of_handles:
            raise InvalidRequest(
                f"{path}: {min(there - wanted - of_handles)!r} is not in the model, which has {_some(wanted)}; {NAMES}"
            )
        values: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in sorted(wanted)}
    for name, variable in variables.items():
        if name in values and values[name].shape != tuple(variable.shape):
            raise InvalidTensor(
                f"{path}: {name!r} has the shape {values[name].shape}, and that of the model {tuple(variable.shape)}"
            )
    rows: dict[SparseTableSpec, OwnedRows] = {}
    for layer in layers:
        spec, table = layer.spec, layer.spec.name
        if spec not in rows:
            rows[spec] = OwnedRows(spec, values[f"{table}.ids"], values[f"{table}.rows"], f"{path}: embedding {table!r}")
    for name, variable in variables.items():
        if name in values:
            variable.assign(np.asarray(values[name]))
    for layer in layers:
        layer.join(rows[layer.spec])


def read_rows(model: Models, reader: Reader) -> None:
    """Have the embeddings of a model look up rows on the shards of a running job from now on, without taking part in it.

    Each lookup gets the rows as they are at that moment. They are fixed: no gradient reaches them, and no lookup makes or keeps
    one. The model's other variables stay as they are: `reader.pull()` has the job's, by name.

    Args:
        model: a model that is in no job, or several by name. Rows that it has of its own are dropped.
        reader: made by psd_client.connect(role="reader"). Lookups end when it is closed.

    Raises:
        InvalidRequest: the job has no table of an embedding's name and dim, or the model is in a job itself.
        NotDeclared: no job, or no initial values, within the wait timeout. ShardUnavailable: a shard could not be reached.
    """
    models = models_by_name(model)
    if not isinstance(reader, Reader):
        refuse(TypeError, "reader", 'what psd_client.connect(role="reader") returns', reader)
    layers = [layer for one in models.values() for layer in embeddings_in(one)]
    tables = reader.tables
    found = [table_in(tables, layer.spec.name, layer.spec.dim) for layer in layers]
    _check_no_job(layers)
    lock = threading.Lock()
    for layer, table in zip(layers, found, strict=True):
        layer.join(ReadRows(table, lock))


def _check_no_job(layers: list[Embedding]) -> None:
    for layer in layers:
        if layer.is_in_job:
            raise InvalidRequest(
                f"embedding {layer.spec.name!r}: its model is in a job, as a worker; pass a model that was made anew, or call "
                "close() of the optimizer before"
            )


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
