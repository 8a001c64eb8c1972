"""The Keras face: `distribute` places a Keras optimizer's variables and slots on the shards.

    model.compile(optimizer=psd.distribute(model, keras.optimizers.SGD(0.1)), loss=...)     # model.fit as usual

The result is a keras.optimizers.Optimizer: Keras calls it like any other, and instead of the update it does one push_pull.
It keeps two of Keras's numbers: `learning_rate`, which is sent with each push, and so may be a schedule or be changed by
callbacks; and `iterations`, which is the worker's clock. given.py reads what it is given, one model and optimizer or several;
options.py says which rule an optimizer corresponds to, declaration.py what a model declares; on_tensorflow.py and on_torch.py
move the numbers, and only the one for the backend in use is imported (backends.py). embedding.py has the layer whose rows are
on the shards (table_rows.py); outside of a job reading.py gives it rows, and fixed_rows.py has them.

With the dtype policy "mixed_float16" Keras wraps the optimizer in a LossScaleOptimizer, which skips a step if it finds an
infinity; the other workers would then wait for a gradient that never comes. So `distribute` returns its own LossScaleOptimizer,
which never skips a step by itself, and which adapts the scale to whether the round of all workers was skipped
(nan_policy="skip").

Must not know blocks, shards or messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

import keras
from typing_extensions import Unpack

from psd.contract.errors import InvalidRequest
from psd.contract.keywords import ConnectKeywords, FaceKeywords, JobKeywords, LinkKeywords, takes
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer
from psd_client.faces import connection_of, split
from psd_client.keras.backends import backend
from psd_client.keras.declaration import TrainedPart, read_declaration
from psd_client.keras.embedding import Embedding, embeddings_in
from psd_client.keras.given import GivenKerasOptimizer, Models, OneOptimizer, check_job, models_by_name, optimizers_of
from psd_client.keras.link import Link
from psd_client.keras.reading import load_export, read_rows

__all__ = ["distribute", "DistributedOptimizer", "DistributedLossScaleOptimizer", "Embedding", "load_export", "read_rows"]


def __dir__() -> list[str]:
    return __all__


@overload
def distribute(
    model: keras.Model, optimizer: OneOptimizer, *, ps: ParameterServer | None = None, **keywords: Unpack[FaceKeywords]
) -> DistributedOptimizer | DistributedLossScaleOptimizer: ...
@overload
def distribute(
    model: Mapping[str, keras.Model],
    optimizer: Mapping[str, OneOptimizer],
    *,
    ps: ParameterServer | None = None,
    **keywords: Unpack[FaceKeywords],
) -> dict[str, DistributedOptimizer | DistributedLossScaleOptimizer]: ...
@takes(JobKeywords, LinkKeywords, ConnectKeywords)
def distribute(
    model: Models,
    optimizer: OneOptimizer | Mapping[str, OneOptimizer],
    *,
    ps: ParameterServer | None = None,
    **keywords: Unpack[FaceKeywords],
) -> DistributedOptimizer | DistributedLossScaleOptimizer | dict[str, DistributedOptimizer | DistributedLossScaleOptimizer]:
    """Declare the model's variables and return an optimizer whose steps happen on the shards.

    Several optimizers, such as those of a generator and a discriminator, are given and returned by the names of the models that
    they train. All workers step them in the same order; a step sends and fetches the variables of its optimizer alone. The
    job's clock, which is the `iterations` of each of them, counts the steps of all.

    The first worker's values become everybody's: when the call returns, the model holds the job's current ones. What is
    assigned to trained variables later, by load_weights or EarlyStopping(restore_best_weights=True), stays in this process,
    and is overwritten by the next step, unless all workers call the result's `load_parameters` after it. Non-trainable
    variables, such as BatchNormalization's moving statistics, are each worker's own.

    Args:
        model: what is trained, built already; or several models by name, with which the names of their tensors then begin.
            Frozen layers, and models without an optimizer of their name, get the same values on all workers once.
        optimizer: not stepped yet. keras.optimizers' SGD, Adagrad, Adadelta, RMSprop, Adam, AdamW, Adamax, Nadam, Ftrl, Lamb or
            Lion, or the name of one; not a subclass. Or a LossScaleOptimizer around one. All options but the learning rate are
            fixed from now on. `global_clipnorm` is clip_norm; weight_decay is there for Adam, AdamW, Nadam and Lion,
            exclude_from_weight_decay included. Or several, by name.
        ps: a connection; None connects with the keywords from `run_id` on, as psd_client.connect does.
        **keywords

    Raises:
        TypeError: an optimizer that psd does not have, or arguments that exclude each other.
        InvalidRequest, InvalidTensor: an option or a variable that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    models = models_by_name(model)
    link_type, _ = backend()
    given = optimizers_of(models, optimizer)
    job, of_connect = split(keywords)
    check_job(given, job)
    embeddings = {name: embeddings_in(one) for name, one in models.items()}
    declaration = read_declaration(models, {one.name: one.rule for one in given}, embeddings)
    with connection_of(ps, of_connect) as connection:
        link = link_type(declaration, connection, job)
        link.load()
    link.models = [weakref.ref(one) for one in models.values()]
    for one in models.values():
        one.supports_jit = False  # XLA cannot compile a call of Python: with jit_compile="auto" Keras does without
    made = {one.name: _made(one, link, part) for one, part in zip(given, declaration.parts, strict=True)}
    if not isinstance(optimizer, Mapping):
        return made[given[0].name]
    link.optimizers = list(made.values())
    return made


def _made(given: GivenKerasOptimizer, link: Link, part: TrainedPart) -> DistributedOptimizer | DistributedLossScaleOptimizer:
    result = DistributedOptimizer(given.optimizer, link, part, is_scaled=given.is_scaled)
    if not given.is_scaled:
        return result
    scaler = given.scaler or keras.optimizers.LossScaleOptimizer(given.optimizer)
    return DistributedLossScaleOptimizer(result, link, scaler)


def _trained(link: Link, part: TrainedPart) -> list[Any]:
    return link.declaration.variables[part.trained.start : part.trained.stop]


class _Distributed:
    """Properties and methods of distributed optimizers beyond those of Keras."""

    _link: Link
    iterations: Any

    @property
    def ps(self) -> ParameterServer:
        """The connection, for barriers, the clock and the rank."""
        return self._link.ps

    @property
    def batch_size(self) -> float:
        """Number of samples behind the gradients of the next step; 1 unless the program sets it. Workers with batches of
        different sizes set it before each step, so that the mean over all samples is right."""
        return self._link.batch_size

    @batch_size.setter
    def batch_size(self, value: float) -> None:
        self._link.batch_size = weight_of(value, "batch_size")

    @property
    def error(self) -> BaseException | None:
        """The error that the last step has raised, or None. In graph mode TensorFlow raises a tf.errors.OpError instead."""
        return self._link.error

    def pull(self) -> None:
        """Fetch the current parameters into the model, without pushing; for evaluation in async and ssp."""
        self._link.worker.pull_flat()
        self._link.load()
        for optimizer in self._link.optimizers or [self]:
            optimizer.iterations.assign(self._link.ps.clock)  # which goes back with the job to a checkpoint

    def load_parameters(self) -> None:
        """Set the job's parameters to the values that the model's variables have now, as after model.load_weights.

        All workers call this at the same step, with the same values: see ParameterServer.load_parameters, also for the errors.
        """
        self._link.set_parameters()

    def reset_slots(self) -> None:
        """Reset the rule's slots to their initial values, as ParameterServer.reset_slots does. `iterations` stays."""
        self._link.ps.reset_slots()

    def stop(self) -> int:
        """End the job for all workers at one step: ParameterServer.stop, which says how. `fit` then ends on each, after that
        step's batch, as by EarlyStopping; a loop of your own looks at `optimizer.ps.is_over`. Returns the step."""
        return self._link.ps.stop()

    def close(self) -> None:
        """Finish: no other worker waits for this one any more. The end of the program does the same."""
        self._link.close()


@keras.saving.register_keras_serializable(package="psd")
class DistributedOptimizer(_Distributed, keras.optimizers.Optimizer):
    """A Keras optimizer whose variables and slots live on the shards; made by `distribute`.

    `iterations` is the worker's clock: if a worker joins a running job or continues from a checkpoint, its schedules continue,
    too. A saved model contains the given optimizer, without slots, not this one. A program that loads it must have imported
    psd_client.keras, or pass compile=False.
    """

    def __init__(self, given: Any, link: Link, part: TrainedPart, *, is_scaled: bool) -> None:
        rate = given._learning_rate  # noqa: SLF001 - the schedule itself; the property gives its value
        super().__init__(
            learning_rate=float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else rate,
            name=given.name,
            loss_scale_factor=given.loss_scale_factor,
        )
        self._given = given
        self._link = link
        self._part = part
        self._is_scaled = is_scaled
        self.build(_trained(link, part))
        self._iterations.assign(link.ps.clock)

    @property
    def loss_scale_factor(self) -> float | None:
        """A fixed factor, as in Keras. Only `distribute` may set it to None; a LossScaleOptimizer around this is refused."""
        return self._loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if value is None and not getattr(self, "_is_scaled", True):
            raise InvalidRequest(
                "LossScaleOptimizer: it would skip steps that the other workers wait for; set the dtype policy, or pass "
                'the LossScaleOptimizer to distribute(), with nan_policy="skip"'
            )
        self._loss_scale_factor = value

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """Push and pull instead of Keras's update. The gradients have been unscaled by a fixed loss_scale_factor."""
        indices = [self._part.trained[self._get_variable_index(variable)] for variable in trainable_variables]
        optimizers = self._link.optimizers
        rates = [optimizer.learning_rate for optimizer in optimizers or [self]]
        clock = self._link.exchange(self._part, rates, indices, grads)
        for optimizer in optimizers:
            optimizer.iterations.assign(clock)
        self._iterations.assign(clock - 1)  # Keras adds 1 when this returns

    def get_config(self) -> dict[str, Any]:
        """The config of the given optimizer, with the current learning rate, for saved models."""
        config = keras.optimizers.serialize(self._given)
        config["config"]["learning_rate"] = super().get_config()["learning_rate"]
        return {"given": config}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the given optimizer, not a distributed one: a connection cannot be saved."""
        return keras.optimizers.deserialize(config["given"], custom_objects=custom_objects)


@keras.saving.register_keras_serializable(package="psd")
class DistributedLossScaleOptimizer(_Distributed, keras.optimizers.LossScaleOptimizer):
    """A DistributedOptimizer with dynamic loss scaling: a step with an infinity on any worker is skipped on all of them.

    Args:
        scaler: the LossScaleOptimizer whose options are used, and which is saved with a model.
    """

    def __init__(self, inner: DistributedOptimizer, link: Link, scaler: keras.optimizers.LossScaleOptimizer) -> None:
        super().__init__(inner, initial_scale=scaler.initial_scale, dynamic_growth_steps=scaler.dynamic_growth_steps)
        self._given = scaler
        self._link = link
        self.build(_trained(link, inner._part))  # noqa: SLF001 - of its own module

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply gradients as Keras does, but push infinities, too: the shards find them and skip the round."""
        ops = keras.ops
        scale = ops.convert_to_tensor(self.dynamic_scale)
        unscaled = [None if gradient is None else ops.divide(gradient, scale) for gradient in grads]
        self.inner_optimizer.apply(unscaled, trainable_variables)
        is_skipped = ops.convert_to_tensor(self._link.is_skipped, dtype="bool")
        count = ops.convert_to_tensor(self.step_counter) + 1
        grows = ops.logical_and(count >= self.dynamic_growth_steps, ops.logical_not(is_skipped))
        self.step_counter.assign(ops.where(ops.logical_or(is_skipped, grows), ops.zeros_like(count), count))
        self.dynamic_scale.assign(ops.where(is_skipped, scale * 0.5, ops.where(grows, scale * 2.0, scale)))

    def get_config(self) -> dict[str, Any]:
        """The config of an ordinary LossScaleOptimizer around the given optimizer."""
        config = keras.optimizers.serialize(self._given)
        config["config"]["inner_optimizer"] = self.inner_optimizer.get_config()["given"]
        return {"given": config}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the given optimizer, as DistributedOptimizer.from_config does."""
        return keras.optimizers.deserialize(config["given"], custom_objects=custom_objects)
