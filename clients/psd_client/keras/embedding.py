"""The layer whose rows are on the shards, in the manner of keras.layers.Embedding.

The layer has one trainable variable, of two numbers: its handle. `distribute` declares it as any other. Its gradient has the
norm of the rows' gradients, so that what scales all gradients scales these; what changes each element by itself is noticed, and
refused (table_rows.py). Link.push_pull makes of it what the rows' are multiplied by, and trains the handle with zero. Must not
know connections, nor a backend (link.py).
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
    """Rows by id, as keras.layers.Embedding has them, from a table on the shards that grows by id.

        layer = psd.Embedding("user", dim=64, optimizer=psd_client.Adagrad(lr=0.05))

    The table is declared, and the layer joined to it, when `distribute` is called with the model; copies of a model, and those
    that are loaded, have no rows. Rows are trained by whatever takes a gradient of them, as Keras's are, whether `training` is
    given or not. A lookup counts as a use of its rows, for expiry and eviction, with training=True alone; else their gradient
    does. Weights and saved models have nothing of the rows: the shards' checkpoints have them. Layers of a table must declare
    it alike.

    Args:
        table: its name, and the layer's, unless `name` is given.
        dim: numbers of a row.
        optimizer: the rule of its rows, such as psd_client.Adagrad(lr=0.05); None: that of the optimizer given to `distribute`,
            whose learning rate it then follows.
        init: values of rows that nobody has trained; by default as in keras.layers.Embedding. With seed, name and id they are
            always the same.
        updates: treatment of weight decay, momentum and the like on rows that a step does not touch: "catch_up", as in Keras;
            or "lazy": they rest, which costs less, and is all that a CustomRule can do. See psd_client.Table.
        options: of psd_client.Table: dtype, admit_after and so on.
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
        self.spec = Table(table, dim, rule, init, seed, updates=updates, **options).spec(0)
        self.optimizer = optimizer
        self._given = {"table": table, "dim": dim, "seed": seed, "updates": updates, **options}
        self.handle = self.add_weight(shape=(len(DIRECTION),), initializer="zeros", name="handle", dtype="float32")
        self.built = True
        self.link: Any = None
        self.rows: Any = None

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """The rows (..., dim) of ids (...), int64 or int32.

        Raises:
            InvalidTensor: ids of another dtype. NotDeclared: `distribute` has not been called.
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
        """Shape and dtype of the output; asks no shard."""
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
        """The layer of a saved model, which is joined to no job."""
        init, rule = dict(config["init"]), config["optimizer"]
        made = INITIALS[init.pop("name")](**init)
        if rule is not None:
            rule = {name: tuple(value) if isinstance(value, list) else value for name, value in rule.items()}
            rule = RULES_OF_ROWS[rule.pop("name")](**rule)
        return cls(**{**config, "init": made, "optimizer": rule})


def embeddings_in(model: keras.Model) -> list[Embedding]:
    """The embeddings in a model."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]  # noqa: SLF001 - as in declaration.py
