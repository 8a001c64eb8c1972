"""Configurations of tables, as torchrec's programs write them, and the arguments of psd's embeddings that follow from one.

Takes torchrec's own, too, by their attributes. Must not know features or modules.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from psd.contract.arguments import refuse, whole_number
from psd.contract.errors import InvalidRequest
from psd_core.initial import Initial, Uniform


class PoolingType(Enum):
    """Ways to make one row of a bag: the sum of its rows, or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass(kw_only=True)
class EmbeddingConfig:
    """A table of rows by id, and the features whose ids it has; as torchrec.EmbeddingConfig.

    Args:
        num_embeddings: number of ids that are expected. It is no limit: it sets the bounds of initial values, as in torchrec.
        embedding_dim: length of a row.
        name: name of the table.
        feature_names: features that look up rows in it; empty: one that is called as the table.
        weight_init_min, weight_init_max: initial values are uniform between these; None: -1 / sqrt(num_embeddings) and
            1 / sqrt(num_embeddings).
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None


@dataclass(kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """A table whose rows are pooled; as torchrec.EmbeddingBagConfig.

    Args:
        pooling: PoolingType.SUM or PoolingType.MEAN. A bag without ids is zeros.
        others: as in EmbeddingConfig.
    """

    pooling: PoolingType = PoolingType.SUM


def mode_of(config: Any, *, is_weighted: bool) -> str:
    """The mode of psd's EmbeddingBag, "sum" or "mean".

    Raises:
        InvalidRequest: another pooling, or a mean of weighted rows, which torch does not have.
    """
    pooling = getattr(config.pooling, "value", config.pooling)
    if pooling not in ("SUM", "MEAN"):
        refuse(InvalidRequest, f"table {config.name!r}: pooling", "PoolingType.SUM or PoolingType.MEAN", config.pooling)
    if is_weighted and pooling == "MEAN":
        raise InvalidRequest(f"table {config.name!r}: pooling: features with weights are summed; it is {config.pooling}")
    return str(pooling).lower()


def check_tables(tables: Sequence[Any], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that tables have names of their own, and that the options are those of tables. Without features, fill in one.

    Raises:
        InvalidRequest: there is no table, two have one name, or options are for a table that is not there.
    """
    if not tables:
        raise InvalidRequest("tables: there must be at least one")
    names = Counter(config.name for config in tables)
    for name, count in names.items():
        if count > 1:
            raise InvalidRequest(f"tables: {count} have the name {name!r}; features may share one")
    for name in options:
        if name not in names:
            raise InvalidRequest(f"options: there is no table {name!r}; there are {', '.join(names)}")
    for config in tables:
        if not config.feature_names:
            config.feature_names = [config.name]  # in torchrec, too, where models read it


def arguments_of(config: Any, options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of psd's embedding for a table.

    Args:
        options: those of this table, such as {"admit_after": 3}. others: what holds where these say nothing.

    Raises:
        InvalidRequest: the configuration has what the rows of a table cannot have.
    """
    data_type = getattr(config, "data_type", None)
    if getattr(data_type, "value", "FP32") != "FP32":
        raise InvalidRequest(
            f"table {config.name!r}: data_type: rows are float32; for bfloat16 leave it off, and give the collection "
            f"options={{{config.name!r}: {{'dtype': 'bfloat16'}}}}"
        )
    found = {**others, **options}
    if "init" not in found:
        found["init"] = _initial_of(config)
    return found


def _initial_of(config: Any) -> Initial:
    """The initial values that torchrec gives a table."""
    function = getattr(config, "init_fn", None)
    of_torchrec = isinstance(function, functools.partial) and function.func is torch.nn.init.uniform_
    if function is not None and not of_torchrec:
        raise InvalidRequest(
            f"table {config.name!r}: init_fn: fills a table, and no table is ever whole; give the collection "
            f"options={{{config.name!r}: {{'init': psd_client.Normal(0.1)}}}}, or the like"
        )
    what = f"table {config.name!r}: num_embeddings"
    count = whole_number(InvalidRequest, what, config.num_embeddings)
    if count < 1:
        raise InvalidRequest(f"{what}: must be at least 1, got {count}")
    bound = (1 / count) ** 0.5
    low, high = config.weight_init_min, config.weight_init_max
    return Uniform(-bound if low is None else low, bound if high is None else high)


def names_of_outputs(tables: Sequence[Any]) -> list[list[str]]:
    """Names of the outputs of each table's features: feature, or feature@table where several tables have it."""
    uses = Counter(feature for config in tables for feature in config.feature_names)
    return [
        [feature if uses[feature] == 1 else f"{feature}@{config.name}" for feature in config.feature_names] for config in tables
    ]
