"""The layer whose rows are on the shards, in the manner of keras.layers.Embedding.

The layer has one trainable variable, of two numbers: its handle, which `distribute` declares like any other variable. The
handle's gradient has the norm of the rows' gradients, so that operations that scale all gradients scale these, too; operations
on single elements are noticed and refused (table_rows.py). Link.push_pull finds the factor for the rows' gradients from it, and
trains the handle with zero. Must not know connections, nor a backend (backends.py), nor where rows are (table_rows.py,
fixed_rows.py).
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared
from psd_client.keras.backends import backend
from psd_client.keras.fixed_rows import OwnedRows
from psd_client.keras.table_rows import DIRECTION, LayerRowSource
from psd_client.tables import Table
from psd_core.initial import INITIALS, Initial, Uniform
from psd_core.optimizer import Optimizer
from psd_core.row_rules import RowwiseAdagrad
from psd_core.rules import CLASSES, SGD

RULES_OF_ROWS = {kind.__name__: kind for kind in (*CLASSES, RowwiseAdagrad)}
"""Rules by the name of their class, for layers of saved models."""


@keras.saving.register_keras_serializable(package="psd")
class Embedding(keras.layers.Layer):
    """Rows by id, as in keras.layers.Embedding, from a table on the shards that grows by id.

        layer = psd.Embedding("user", dim=64, optimizer=psd_client.Adagrad(lr=0.05))

    `distribute` declares the table and joins the layer to it. Rows are trained whenever a gradient of them is computed, as in
    Keras, with or without `training`. With training=True a lookup counts as a use of its rows (for expiry and eviction);
    otherwise only a push of their gradients does. Layers that share a table must declare it alike.

    In a job the rows are on the shards, and neither weights nor saved models contain them: the shards' checkpoints do. A model
    that is in no job takes the rows of an export by `load_export`, and then saves and loads them with its weights; or it reads
    a running job's by `read_rows`. They are then fixed: no gradient reaches them. Other ids have the values of `init`.

    Args:
        table: name of the table; also the layer's name, unless `name` is given.
        dim: length of a row.
        optimizer: the update rule of the rows, such as psd_client.Adagrad(lr=0.05). None: the rule of the optimizer given to
            `distribute`, with its learning rate.
        init: values of rows that nobody has trained; by default as in keras.layers.Embedding. They depend only on seed, name
            and id.
        updates: treatment of rows that a step does not touch, under weight decay, momentum and the like. "catch_up": as in
            Keras. "lazy": they do not change, which costs less; a CustomRule allows nothing else. See psd_client.Table.
        options: other options of psd_client.Table: dtype, admit_after and so on.
    """

    def __init__(
        self,
        table: str,
        dim: int,
        optimizer: Optimizer | None = None,
        *,
        init: Initial = Uniform(-0.05, 0.05),  # noqa: B008 - it is frozen
        seed: int = 0,
        name: str | None = None,
        updates: str = "catch_up",
        **options: Any,
    ) -> None:
        super().__init__(name=name if name is not None else table, autocast=False)
        # Without an optimizer of its own the table's rule is known when `distribute` is called; all else is checked here.
        rule = SGD(lr=0.0) if optimizer is None else optimizer
        self.spec = Table(table, dim, rule, init=init, seed=seed, updates=updates, **options).spec(0)
        self.optimizer = optimizer
        self._given = {"table": table, "dim": dim, "seed": seed, "updates": updates, **options}
        self.handle = self.add_weight(shape=(len(DIRECTION),), initializer="zeros", name="handle", dtype="float32")
        self.built = True
        self.supports_jit = False  # XLA cannot compile a call of Python
        self._source: LayerRowSource | None = None

    @property
    def is_in_job(self) -> bool:
        """True if its rows are trained on the shards of a job in which this process is a worker."""
        return self._source is not None and self._source.is_trained

    @property
    def own_rows(self) -> OwnedRows | None:
        """The rows that the layer itself has, outside of a job; None: it has none."""
        return self._source if isinstance(self._source, OwnedRows) else None

    @property
    def source(self) -> LayerRowSource:
        """The place at which it looks up rows.

        Raises:
            NotDeclared: the layer belongs to no job, and has no rows of its own.
        """
        if self._source is None:
            raise NotDeclared(
                f"embedding {self.spec.name!r}: its rows are on the shards, and it is not joined to them: call "
                "psd_client.keras.distribute(model, optimizer) with the model that holds it; a copy of a model is not joined, "
                "nor is a loaded one. Outside of a job, call psd_client.keras.load_export(model, file), or read_rows(model, "
                "reader)"
            )
        return self._source

    def join(self, source: LayerRowSource) -> None:
        """Look up rows there from now on; not for programs."""
        self._source = source

    def leave(self, source: LayerRowSource) -> None:
        """Look up no more rows there; called when the job's connection is closed."""
        if self._source is source:
            self._source = None

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """The rows (..., dim) of ids (...), int64 or int32.

        Raises:
            InvalidTensor: the ids have another dtype.
            NotDeclared: `distribute` has not been called, and no rows were loaded.
        """
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if dtype not in ("int64", "int32"):
            raise InvalidTensor(
                f'embedding {self.spec.name!r}: ids: dtype must be int64 or int32, got {dtype}; give the Input dtype="int64"'
            )
        self.source  # noqa: B018 - raises before a graph is made, in which it is asked for again at each run
        _, look_up = backend()
        rows = look_up(
            self.handle,
            keras.ops.cast(ids, "int64"),
            self.spec.dim,
            lambda ids: self.source.pull(ids, counts_no_use=not training),
            lambda ids, gradients: self.source.collect(ids, gradients),  # noqa: PLW0108 - whose source it then is
        )
        return keras.ops.cast(rows, self.compute_dtype)

    def compute_output_spec(self, ids: Any, training: bool | None = None) -> keras.KerasTensor:
        """Shape and dtype of the output; calls no shard."""
        del training
        return keras.KerasTensor((*ids.shape, self.spec.dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments, for saved models."""
        rule = self.optimizer
        return {
            "name": self.name,
            "init": self.spec.init.to_json(),
            "optimizer": None if rule is None else {"name": type(rule).__name__, **rule.option_values()},
            **self._given,
        }

    def save_own_variables(self, store: Any) -> None:
        """Save the rows that the layer itself has; in a job none, for they are on the shards."""
        super().save_own_variables(store)
        if self.own_rows is not None:
            store["ids"], store["rows"] = self.own_rows.ids, self.own_rows.rows

    def load_own_variables(self, store: Any) -> None:
        """Load the rows, if there are any.

        Raises:
            InvalidRequest: there are some, and the layer is in a job; or there are none, and those that it has are old.
            InvalidTensor: they do not fit the layer.
        """
        where = f"embedding {self.spec.name!r}"
        if "ids" not in store.keys():  # noqa: SIM118 - a store has keys alone
            if self.own_rows is not None:
                raise InvalidRequest(f"{where}: the layer has rows, and the file none: make the model anew to load it")
            super().load_own_variables(store)
            return
        if self.is_in_job:
            raise InvalidRequest(
                f"{where}: its rows are on the shards of its job, and load_weights cannot set them; load into a model of no "
                "job, or call close() of the optimizer before"
            )
        source = OwnedRows(self.spec, np.asarray(store["ids"]), np.asarray(store["rows"]), where)
        self.handle.assign(store["0"])
        self.join(source)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """Make the layer of a saved model; it is joined to no job."""
        init, rule = dict(config["init"]), config["optimizer"]
        made = INITIALS[init.pop("name")](**init)
        if rule is not None:
            rule = {name: tuple(value) if isinstance(value, list) else value for name, value in rule.items()}
            rule = RULES_OF_ROWS[rule.pop("name")](**rule)
        return cls(**{**config, "init": made, "optimizer": rule})


def embeddings_in(model: keras.Model) -> list[Embedding]:
    """The embeddings in a model."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]  # noqa: SLF001 - as in declaration.py
