"""The layer whose rows are on the shards, in the manner of keras.layers.Embedding.

The layer has one trainable variable, of two numbers: its handle, which `distribute` declares like any other variable. The
handle's gradient has the norm of the rows' gradients, so that operations that scale all gradients scale these, too; operations
on single elements are noticed and refused (table_rows.py). Link.push_pull finds the factor for the rows' gradients from it, and
trains the handle with zero. Must not know connections, nor a backend (link.py).
"""

from __future__ import annotations

from typing import Any

import keras

from psd.contract.errors import InvalidTensor, NotDeclared
from psd_client.keras.table_rows import DIRECTION
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

    `distribute` declares the table and joins the layer to it. Copies of a model, and loaded models, have no rows. Rows are
    trained whenever a gradient of them is computed, as in Keras, with or without `training`. With training=True a lookup counts
    as a use of its rows (for expiry and eviction); otherwise only a push of their gradients does. Weights and saved models do
    not contain the rows: the shards' checkpoints do. Layers that share a table must declare it alike.

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
        self.link: Any = None
        self.rows: Any = None

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """The rows (..., dim) of ids (...), int64 or int32.

        Raises:
            InvalidTensor: the ids have another dtype. NotDeclared: `distribute` has not been called.
        """
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if dtype not in ("int64", "int32"):
            raise InvalidTensor(
                f'embedding {self.spec.name!r}: ids: dtype must be int64 or int32, got {dtype}; give the Input dtype="int64"'
            )
        if self.link is None:
            raise NotDeclared(
                f"embedding {self.spec.name!r}: its rows are on the shards, and it is not joined to them: call "
                "psd_client.keras.distribute(model, optimizer) with the model that holds it"
            )
        rows = self.link.look_up(self.handle, keras.ops.cast(ids, "int64"), self.rows, counts_no_use=not training)
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
