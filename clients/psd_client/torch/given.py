"""The models and optimizers that were given to `distribute`, one or several by name, as one model and a list of optimizers.

Must not know groups, tensors or connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from psd.contract.arguments import identifier, refuse
from psd.contract.errors import InvalidRequest
from psd_client.optimizers import spec_of
from psd_client.torch.declaration import GivenOptimizer, Options, check_optimizer
from psd_client.torch.embedding import table_modules
from psd_client.torch.local import Local
from psd_core.optimizer import Optimizer

Models: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module]"
OneOptimizer: TypeAlias = "torch.optim.Optimizer | Optimizer"
Params: TypeAlias = "Iterable[Any] | Mapping[str, Iterable[Any]] | None"


def whole_model(model: Models) -> torch.nn.Module:
    """The model itself, or one of all that were given by name.

    Raises:
        TypeError: there is something else. InvalidRequest: a name that cannot begin those of tensors.
    """
    if isinstance(model, torch.nn.Module):
        return model
    if not isinstance(model, Mapping) or not model:
        raise TypeError(f"model: expected a torch.nn.Module, got {model!r}; several are given by name, as a dict")
    for name, module in model.items():
        identifier(InvalidRequest, "model", name)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"model[{name!r}]: expected a torch.nn.Module, got {module!r}")
    return torch.nn.ModuleDict(dict(model))


def given_optimizers(
    models: Models, whole: torch.nn.Module, optimizer: OneOptimizer | Mapping[str, OneOptimizer], params: Params
) -> list[GivenOptimizer]:
    """The optimizers, in their order; also handles of embeddings that have a rule of their own are in one of them then.

    Args:
        models: as given. whole: all of them. params: as of `distribute`.

    Raises:
        TypeError: an optimizer that psd does not have, or `params` for one of torch's.
        InvalidRequest: what the message says.
    """
    if not isinstance(optimizer, Mapping):
        given = [_given("", optimizer, params, whole)]
    else:
        if not optimizer:
            raise InvalidRequest("optimizer: there is none; pass one, or several by name")
        if params is not None and not isinstance(params, Mapping):
            refuse(TypeError, "params", "the parameters of each optimizer, by its name", params)
        of_name = dict(params or {})
        for name in of_name:
            if name not in optimizer:
                raise InvalidRequest(f"params: no optimizer is named {name!r}; there are {', '.join(optimizer)}")
        given = []
        for name, one in optimizer.items():
            identifier(InvalidRequest, "optimizer", name)
            module = models.get(name) if isinstance(models, Mapping) else None
            given.append(_given(name, one, of_name.get(name), module))
    if len({id(one.optimizer) for one in given}) < len(given):
        raise InvalidRequest("optimizer: one is given under two names")
    _add_handles(whole, given)
    return given


def given_fragments(model: torch.nn.Module, optimizer: Any, local: Local) -> list[GivenOptimizer]:
    """The outer rule over each fragment of what a program's own optimizer steps, in the place of that optimizer.

    Raises:
        TypeError: this is no optimizer of torch. InvalidRequest: a table in the model; or what Local.split says.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse(TypeError, "optimizer", "one of torch's, which steps in this process", optimizer)
    if hasattr(optimizer, "ps"):
        raise TypeError("optimizer: is distributed already; pass the one that distribute() was given")
    for embedding in table_modules(model):
        raise InvalidRequest(
            f"embedding {embedding.spec.name!r}: its rows are on the shards, where local steps do not reach them; use "
            "torch.nn.Embedding, or leave `local` out"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        raise InvalidRequest("optimizer: none of its parameters has requires_grad=True, so there is nothing to train")
    rule, template = local.outer, spec_of(local.outer)
    fragments = local.split(model, trained)
    return [
        GivenOptimizer(f"fragment {n}", Options(rule, members), template, rule.always) for n, members in enumerate(fragments)
    ]


def _given(name: str, optimizer: OneOptimizer, params: Any, module: torch.nn.Module | None) -> GivenOptimizer:
    """One optimizer. module: whose parameters a rule that torch does not have updates, unless there are `params`."""
    where = f"[{name!r}]" if name else ""
    if not isinstance(optimizer, Optimizer):
        if params is not None:
            raise TypeError(f"params{where}: torch's optimizers have theirs already; it is for psd_client's rules")
        always, template = check_optimizer(optimizer)
        return GivenOptimizer(name, optimizer, template, always)
    if params is None:
        if module is None:
            raise InvalidRequest(
                f"params{where}: is missing: no model is named {name!r}, whose parameters the rule would update"
            )
        params = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return GivenOptimizer(name, Options(optimizer, params), spec_of(optimizer), optimizer.always)


def _add_handles(model: torch.nn.Module, given: list[GivenOptimizer]) -> None:
    """Add the handles of embeddings with their own rule to the param_groups: zero_grad and a GradScaler look there."""
    known = {id(parameter) for one in given for group in one.optimizer.param_groups for parameter in group["params"]}
    for embedding in table_modules(model):
        if embedding.optimizer is None or id(embedding.handle) in known:
            continue
        if len(given) > 1:
            raise InvalidRequest(
                f"embedding {embedding.spec.name!r}: is in none of the optimizers, and so no step is its own; give its "
                "parameters to the one with which it is stepped. Its rule stays its own"
            )
        given[0].optimizer.param_groups[0]["params"].append(embedding.handle)
        known.add(id(embedding.handle))
