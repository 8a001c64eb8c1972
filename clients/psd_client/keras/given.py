"""The models and optimizers that were given to `distribute`, one or several by name, and what the shards need to know of them.

Must not know variables, connections or backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras

from psd.contract.arguments import identifier, refuse
from psd.contract.errors import InvalidRequest
from psd.contract.keywords import JobKeywords
from psd_client.keras.declaration import GivenRule
from psd_client.keras.options import options_of

Models: TypeAlias = "keras.Model | Mapping[str, keras.Model]"
OneOptimizer: TypeAlias = "keras.optimizers.Optimizer | str"


class GivenKerasOptimizer:
    """An optimizer that was given.

    Args:
        name: of the model that it trains; "" for the only one. model: that model.

    Attributes:
        optimizer: without a LossScaleOptimizer around it. scaler: that one, or None.
        is_scaled: the loss is scaled dynamically. rule: as the shards know it.

    Raises:
        TypeError, InvalidRequest: psd does not have it, or one of its options.
    """

    def __init__(self, name: str, optimizer: OneOptimizer, model: keras.Model) -> None:
        given: Any = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
        self.name = name
        self.scaler = given if isinstance(given, keras.optimizers.LossScaleOptimizer) else None
        self.optimizer = given = given.inner_optimizer if self.scaler is not None else given
        self.is_scaled = self.scaler is not None or model.dtype_policy.name == "mixed_float16"
        if hasattr(given, "ps"):
            raise TypeError("optimizer: is distributed already; pass the Keras optimizer that distribute() was given")
        if not isinstance(given, keras.optimizers.Optimizer):
            raise TypeError(f"optimizer: expected one of keras.optimizers, or its name, got {given!r}")
        # On torch Keras makes an instance of a subclass with torch's own kernels for the same arithmetic.
        kind = next(base for base in type(given).__mro__ if not base.__module__.startswith("keras.src.backend."))
        if getattr(keras.optimizers, kind.__name__, None) is not kind:
            raise TypeError(
                f"optimizer: {kind.__module__}.{kind.__qualname__} is not one of keras.optimizers, and the shards cannot run "
                "its code"
            )
        if int(given.iterations):
            raise InvalidRequest(
                "optimizer: it has been stepped, and its slots would be lost: the shards keep the slots themselves"
            )
        # _use_weight_decay: what exclude_from_weight_decay has left.
        self.rule = GivenRule(options_of(kind.__name__, given.get_config()), given._use_weight_decay)  # noqa: SLF001


def models_by_name(model: Models) -> dict[str, keras.Model]:
    """The models by name; one alone has the name "".

    Raises:
        TypeError: there is something else. InvalidRequest: a name that cannot begin those of tensors.
    """
    if isinstance(model, keras.Model):
        return {"": model}
    if not isinstance(model, Mapping) or not model:
        raise TypeError(f"model: expected a keras.Model, got {model!r}; several are given by name, as a dict")
    for name, one in model.items():
        identifier(InvalidRequest, "model", name)
        if not isinstance(one, keras.Model):
            raise TypeError(f"model[{name!r}]: expected a keras.Model, got {one!r}")
    return dict(model)


def optimizers_of(
    models: Mapping[str, keras.Model], optimizer: OneOptimizer | Mapping[str, OneOptimizer]
) -> list[GivenKerasOptimizer]:
    """The optimizers, in their order; each trains the model of its name.

    Raises:
        TypeError, InvalidRequest: what the message says.
    """
    if not isinstance(optimizer, Mapping):
        if "" not in models:
            refuse(TypeError, "optimizer", "the optimizer of each model, by its name", optimizer)
        return [GivenKerasOptimizer("", optimizer, models[""])]
    if "" in models:
        raise InvalidRequest("optimizer: several are for several models: pass these by the same names, as a dict")
    if not optimizer:
        raise InvalidRequest("optimizer: there is none; pass one, or several by name")
    for name in optimizer:
        if name not in models:
            raise InvalidRequest(f"optimizer: no model is named {name!r}, which it would train; there are {', '.join(models)}")
    given = [GivenKerasOptimizer(name, one, models[name]) for name, one in optimizer.items()]
    if len({id(one.optimizer) for one in given}) < len(given):
        raise InvalidRequest("optimizer: one is given under two names")
    return given


def check_job(given: list[GivenKerasOptimizer], job: JobKeywords) -> None:
    """Set the job's clip_norm to the optimizers' global_clipnorm, and check that the job can scale losses.

    Raises:
        InvalidRequest: clip_norm and the optimizers disagree, or nan_policy is not "skip".
    """
    for one in given:
        clip_norm, asked = one.rule.options.clip_norm, job.get("clip_norm")
        if clip_norm is not None and asked not in (None, clip_norm):
            raise InvalidRequest(
                f"clip_norm: is {asked}, and the optimizer's global_clipnorm {clip_norm}; pass one, for all of the job"
            )
        if clip_norm is not None:
            job["clip_norm"] = clip_norm
        if one.is_scaled and job.get("nan_policy") != "skip":
            raise InvalidRequest(
                'nan_policy: loss scaling, which Keras does with the dtype policy "mixed_float16", needs "skip"; pass '
                'nan_policy="skip" to distribute()'
            )
