"""The declaration of Keras models and their optimizers, checked before connecting.

Decides names and groups, and which variables are trained, by which optimizer, and which only shared. Refuses whatever the
shards would not do as Keras does. Names are the variables' paths, after the name of their model if there are several. Imports
no framework. Must not know connections, gradients or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import DTYPES, GroupSpec, TensorSpec
from psd.contract.rules import STATIC
from psd.contract.tables import SparseTableSpec
from psd_client.keras.options import KerasOptions
from psd_client.optimizers import scalar_values, spec_of
from psd_client.worker.exchange.sent_push import JobPart


@dataclass(frozen=True)
class GivenRule:
    """An optimizer that was given to `distribute`, as the shards know it.

    Attributes:
        decays: tells whether the optimizer applies its weight decay to a variable.
    """

    options: KerasOptions
    decays: Callable[[Any], bool]


@dataclass(frozen=True)
class TrainedPart:
    """The part of a job that one optimizer steps.

    Attributes:
        number: from 0, in the order of the optimizers. trained: indices of its variables.
        job_part: the part of the job, for its pushes; None if it is the whole.
    """

    number: int
    trained: range
    job_part: JobPart | None


@dataclass(frozen=True, eq=False)
class KerasDeclaration:
    """The declaration of some models and optimizers.

    Attributes:
        variables: Keras variables: those that are trained, in the order of the parts and of model.trainable_variables, then
            those of frozen layers. tensors: their specs, in the same order. trained: number of those that are trained.
        groups: all groups of the job, those of tables last. options: for each of them, the number of the part by whose learning
            rate it is updated, and its options without that; with "lr" if it has one of its own.
        layers: the embeddings. tables: the tables that they declare.
        parts: what each optimizer steps, in their order.
    """

    variables: list[Any]
    tensors: list[TensorSpec]
    trained: int
    groups: list[GroupSpec]
    options: list[tuple[int, dict[str, Any]]]
    layers: list[Any]
    tables: list[SparseTableSpec]
    parts: list[TrainedPart]

    def scalars(self, rates: Sequence[float]) -> list[list[float]]:
        """The scalars of a push, by group. rates: the learning rate of each part.

        Raises:
            InvalidRequest: a learning rate is out of range.
        """
        return [
            scalar_values(spec, {"lr": rates[part], **values}, index)
            for index, (spec, (part, values)) in enumerate(zip(self.groups, self.options, strict=True))
        ]

    def handle_of(self, layer: Any) -> int:
        """The index of an embedding's handle among the tensors."""
        return next(index for index, variable in enumerate(self.variables) if variable is layer.handle)


def read_declaration(
    models: Mapping[str, Any], rules: Mapping[str, GivenRule], embeddings: Mapping[str, Sequence[Any]]
) -> KerasDeclaration:
    """Read the declaration from models, and check it.

    Args:
        models: by name; "" for the only one. rules: the optimizer of each model that is trained.
        embeddings: the layers of each model whose rows are on the shards.

    Raises:
        InvalidRequest, InvalidTensor: a model has no variables yet, or one that psd cannot train; or an optimizer has none.
    """
    named = named_variables(models, rules)
    groups: list[GroupSpec] = []
    options: list[tuple[int, dict[str, Any]]] = []
    group_of: list[int] = []
    ends: list[int] = []
    of_part: list[set[int]] = []
    for number, (name, rule) in enumerate(rules.items()):
        trained = models[name].trainable_variables
        where = f"model {name!r}" if name else "model"
        if not trained:
            raise InvalidRequest(f"{where}: has no trainable variables, so there is nothing to train")
        for variable in trained:
            _check_trained(variable)
        has_decay = [not rule.options.weight_decay or rule.decays(variable) for variable in trained]
        kinds = sorted(set(has_decay), reverse=True)
        group_of += [len(groups) + kinds.index(kind) for kind in has_decay]
        ends.append(len(group_of))
        of_part.append(set(range(len(groups), len(groups) + len(kinds))))
        for spec, values in (rule.options.group(decays=kind) for kind in kinds):
            groups.append(spec)
            options.append((number, values))
    count = len(group_of)
    group_of += [len(groups)] * (len(named) - count)
    if len(named) > count:
        groups.append(GroupSpec(STATIC.name))
        options.append((0, {}))
    tensors = [
        TensorSpec(name, tuple(variable.shape), _dtype(variable), group)
        for (name, variable), group in zip(named.items(), group_of, strict=True)
    ]
    tables = _tables(rules, embeddings, groups, options, of_part)
    parts = [
        TrainedPart(
            number,
            range(end - len(models[name].trainable_variables), end),
            JobPart(number + 1, frozenset(of_part[number])) if len(rules) > 1 else None,
        )
        for number, (name, end) in enumerate(zip(rules, ends, strict=True))
    ]
    layers = [layer for found in embeddings.values() for layer in found]
    return KerasDeclaration(list(named.values()), tensors, count, groups, options, layers, tables, parts)


def named_variables(models: Mapping[str, Any], trained: Iterable[str]) -> dict[str, Any]:
    """The variables of some models by the names that a job has for them: those that are trained, then those of frozen layers.

    Args:
        models, trained: all of them by name, and the names of those that an optimizer trains.

    Raises:
        InvalidRequest: a model has no variables yet, or two optimizers would train one.
    """
    for name, model in models.items():
        if not model.built:
            raise InvalidRequest(
                f"model{f' {name!r}' if name else ''}: has no variables yet; give it an Input, or pass one batch through it, "
                "before distribute()"
            )
    owner: dict[int, str] = {}
    variables: list[tuple[str, Any]] = []
    for name in trained:
        for variable in models[name].trainable_variables:
            if id(variable) in owner:
                raise InvalidRequest(
                    f"variable {variable.path!r} is in two models, {owner[id(variable)]!r} and {name!r}, and a variable has "
                    "one optimizer that steps it"
                )
            owner[id(variable)] = name
            variables.append((name, variable))
    for name, model in models.items():
        for variable in _frozen(model, owner):
            owner[id(variable)] = name
            variables.append((name, variable))
    names = _unique(f"{name}/{variable.path}" if name else variable.path for name, variable in variables)
    return dict(zip(names, (variable for _, variable in variables), strict=True))


def _tables(
    rules: Mapping[str, GivenRule],
    embeddings: Mapping[str, Sequence[Any]],
    groups: list[GroupSpec],
    options: list[tuple[int, dict[str, Any]]],
    of_part: list[set[int]],
) -> list[SparseTableSpec]:
    """The tables of embeddings. Adds a group for each to `groups`, its options to `options`, and its number to its part's."""
    numbers = {name: number for number, name in enumerate(rules)}
    named: dict[str, tuple[Any, str]] = {}
    for name, layers in embeddings.items():
        for layer in layers:
            table = layer.spec.name
            first, model = named.setdefault(table, (layer, name))
            if (layer.spec, layer.optimizer) != (first.spec, first.optimizer):
                raise InvalidRequest(
                    f"embedding {table!r}: two layers declare the table of this name differently; give both the same dim, "
                    "optimizer, init, seed and options, or another name to one"
                )
            if name != model:
                raise InvalidRequest(
                    f"embedding {table!r}: is in two models, {model!r} and {name!r}; a table is stepped with one of them"
                )
            if name not in rules:
                raise InvalidRequest(
                    f"embedding {table!r}: no optimizer is named {name!r}, as its model is, and so no step is its own"
                )
            if layer.own_rows is not None:
                raise InvalidRequest(
                    f"embedding {table!r}: the model has its rows, as load_export or load_model has set them, and a job takes "
                    "none from a model: begin the job with them by --from-checkpoint FILE --parameters-only, and call "
                    "distribute with a model that was made anew, without loading them"
                )
    tables: list[SparseTableSpec] = []
    for layer, name in named.values():
        rule, number = layer.optimizer, numbers[name]
        spec, values = rules[name].options.group(decays=True) if rule is None else (spec_of(rule), rule.scalars())
        tables.append(replace(layer.spec, group=len(groups)))
        of_part[number].add(len(groups))
        groups.append(spec)
        options.append((number, values))
    return tables


def _frozen(model: Any, known: Mapping[int, Any]) -> list[Any]:
    """The variables of frozen layers: weights that could be trained but are not. Statistics, such as those of
    BatchNormalization, are not among them. known: those that are not meant, by identity."""
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
