"""The declaration of a Keras model and its optimizer, checked before connecting.

Decides names and groups, and which variables are trained and which only shared. Refuses whatever the shards would not do as
Keras does. Names are the variables' paths. Imports no framework. Must not know connections, gradients or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import DTYPES, GroupSpec, TensorSpec
from psd.contract.rules import STATIC
from psd.contract.tables import SparseTableSpec
from psd_client.keras.options import KerasOptions
from psd_client.optimizers import scalar_values, spec_of


@dataclass(frozen=True, eq=False)
class KerasDeclaration:
    """The declaration of one model and optimizer.

    Attributes:
        variables: Keras variables: those that are trained, in the order of model.trainable_variables, then those of frozen
            layers. tensors: their specs, in the same order. trained: number of those that are trained.
        groups: all groups of the job. options: options of the groups that are trained, without the learning rate.
        layers: the embeddings. tables: the tables that they declare, whose groups come last. table_options: options of these
            groups, without the learning rate if it is the optimizer's.
    """

    variables: list[Any]
    tensors: list[TensorSpec]
    trained: int
    groups: list[GroupSpec]
    options: list[dict[str, Any]]
    layers: list[Any]
    tables: list[SparseTableSpec]
    table_options: list[dict[str, Any]]

    def scalars(self, learning_rate: float) -> list[list[float]]:
        """The scalars of a push, by group. Raises InvalidRequest if the learning rate is out of range."""
        static: list[dict[str, Any]] = [{}] * (len(self.groups) - len(self.options) - len(self.table_options))
        options = [*self.options, *static, *self.table_options]
        return [
            scalar_values(spec, {"lr": learning_rate, **values}, index)
            for index, (spec, values) in enumerate(zip(self.groups, options, strict=True))
        ]

    def handle_of(self, layer: Any) -> int:
        """The index of an embedding's handle among the tensors."""
        return next(index for index, variable in enumerate(self.variables) if variable is layer.handle)


def read_declaration(
    model: Any, options: KerasOptions, decays: Callable[[Any], bool], embeddings: Sequence[Any] = ()
) -> KerasDeclaration:
    """Read the declaration from a model, and check it.

    Args:
        decays: tells whether the optimizer applies its weight decay to a variable.
        embeddings: the layers of the model whose rows are on the shards.

    Raises:
        InvalidRequest, InvalidTensor: the model has no variables yet, none to train, or one that psd cannot train.
    """
    if not model.built:
        raise InvalidRequest("model: has no variables yet; give it an Input, or pass one batch through it, before distribute()")
    trained = list(model.trainable_variables)
    if not trained:
        raise InvalidRequest("model: has no trainable variables, so there is nothing to train")
    for variable in trained:
        _check_trained(variable)
    frozen = _frozen(model, trained)
    has_decay = [not options.weight_decay or decays(variable) for variable in trained]
    kinds = sorted(set(has_decay), reverse=True)
    groups = [options.group(decays=kind) for kind in kinds]
    specs = [group for group, _ in groups] + ([GroupSpec(STATIC.name)] if frozen else [])
    group_of = [kinds.index(kind) for kind in has_decay] + [len(kinds)] * len(frozen)
    variables = trained + frozen
    names = _unique(variable.path for variable in variables)
    tensors = [
        TensorSpec(name, tuple(variable.shape), _dtype(variable), group)
        for name, variable, group in zip(names, variables, group_of, strict=True)
    ]
    tables, of_tables, table_options = _tables(embeddings, options, len(specs))
    return KerasDeclaration(
        variables,
        tensors,
        len(trained),
        specs + of_tables,
        [values for _, values in groups],
        list(embeddings),
        tables,
        table_options,
    )


def _tables(
    layers: Iterable[Any], options: KerasOptions, before: int
) -> tuple[list[SparseTableSpec], list[GroupSpec], list[dict[str, Any]]]:
    """The tables of embeddings, a group for each, and the groups' options. before: number of groups before them."""
    named: dict[str, Any] = {}
    for layer in layers:
        first = named.setdefault(layer.spec.name, layer)
        if (layer.spec, layer.optimizer) != (first.spec, first.optimizer):
            raise InvalidRequest(
                f"embedding {layer.spec.name!r}: two layers declare the table of this name differently; give both the same "
                "dim, optimizer, init, seed and options, or another name to one"
            )
    tables: list[SparseTableSpec] = []
    groups: list[GroupSpec] = []
    values: list[dict[str, Any]] = []
    for layer in named.values():
        rule = layer.optimizer
        spec, numbers = options.group(decays=True) if rule is None else (spec_of(rule), rule.scalars())
        tables.append(replace(layer.spec, group=before + len(groups)))
        groups.append(spec)
        values.append(numbers)
    return tables, groups, values


def _frozen(model: Any, trained: list[Any]) -> list[Any]:
    """The variables of frozen layers: weights that could be trained but are not. Statistics, such as those of
    BatchNormalization, are not among them."""
    known = {id(variable) for variable in trained}
    frozen: dict[int, Any] = {}
    for layer in model._flatten_layers():  # noqa: SLF001 - the public ways do not tell weights from statistics
        for variable in layer._trainable_variables:  # noqa: SLF001
            if id(variable) not in known and _dtype(variable) in DTYPES:
                frozen[id(variable)] = variable
    return list(frozen.values())


def _check_trained(variable: Any) -> None:
    if _dtype(variable) not in DTYPES:
        raise InvalidTensor(f"variable {variable.path!r} has dtype {_dtype(variable)}; psd trains {', '.join(DTYPES)}")
    if variable.constraint is not None:
        raise InvalidRequest(
            f"variable {variable.path!r} has the constraint {type(variable.constraint).__name__}, which the shards do not "
            "apply; build the layer without"
        )
    if getattr(variable, "overwrite_with_gradient", False):
        raise InvalidRequest(
            f"variable {variable.path!r} is overwritten with its gradient (float8), which the shards do not do; use another "
            "dtype policy"
        )


def _dtype(variable: Any) -> str:
    return str(variable.dtype)


def _unique(paths: Iterable[str]) -> list[str]:
    """Unique paths: ":2", ":3" and so on are appended to repeated ones, since Keras lets layers share a name."""
    counts: dict[str, int] = {}
    names = []
    for path in paths:
        counts[path] = counts.get(path, 0) + 1
        names.append(path if counts[path] == 1 else f"{path}:{counts[path]}")
    return names
