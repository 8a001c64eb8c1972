"""The Keras face: `distribute` places a Keras optimizer's variables and slots on the shards.

    model.compile(optimizer=psd.distribute(model, keras.optimizers.SGD(0.1)), loss=...)     # model.fit as usual

The result is a keras.optimizers.Optimizer: Keras calls it like any other, and instead of the update it does one push_pull.
It keeps two of Keras's numbers: `learning_rate`, which is sent with each push, and so may be a schedule or be changed by
callbacks; and `iterations`, which is the worker's clock. options.py says which rule an optimizer corresponds to, declaration.py
what a model declares; on_tensorflow.py and on_torch.py move the numbers, and only the one for the backend in use is imported.

With the dtype policy "mixed_float16" Keras wraps the optimizer in a LossScaleOptimizer, which skips a step if it finds an
infinity; the other workers would then wait for a gradient that never comes. So `distribute` returns its own LossScaleOptimizer,
which never skips a step by itself, and which adapts the scale to whether the round of all workers was skipped
(nan_policy="skip").

Must not know blocks, shards or messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import Unpack

from psd.contract.errors import InvalidRequest
from psd.contract.keywords import LOCAL_STEPS_ELSEWHERE, ConnectKeywords, FaceKeywords, JobKeywords, LinkKeywords, takes
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer
from psd_client.faces import connection_of, split
from psd_client.keras.declaration import read_declaration
from psd_client.keras.embedding import Embedding, embeddings_in
from psd_client.keras.link import Link
from psd_client.keras.options import KerasOptions, options_of

__all__ = ["distribute", "DistributedOptimizer", "DistributedLossScaleOptimizer", "Embedding"]


def __dir__() -> list[str]:
    return __all__


@takes(JobKeywords, LinkKeywords, ConnectKeywords, elsewhere=LOCAL_STEPS_ELSEWHERE)
def distribute(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str,
    *,
    ps: ParameterServer | None = None,
    **keywords: Unpack[FaceKeywords],
) -> DistributedOptimizer | DistributedLossScaleOptimizer:
    """Declare the model's variables and return an optimizer whose steps happen on the shards.

    The first worker's values become everybody's: when the call returns, the model holds the job's current ones. What is
    assigned to trained variables later, by load_weights or EarlyStopping(restore_best_weights=True), stays in this process,
    and is overwritten by the next step, unless all workers call the result's `load_parameters` after it. Non-trainable
    variables, such as BatchNormalization's moving statistics, are each worker's own.

    Args:
        model: what is trained, built already. Its frozen layers get the same values on all workers once.
        optimizer: not stepped yet. keras.optimizers' SGD, Adagrad, Adadelta, RMSprop, Adam, AdamW, Adamax, Nadam, Ftrl, Lamb or
            Lion, or the name of one; not a subclass. Or a LossScaleOptimizer around one. All options but the learning rate are
            fixed from now on. `global_clipnorm` is clip_norm; weight_decay is there for Adam, AdamW, Nadam and Lion,
            exclude_from_weight_decay included.
        ps: a connection; None connects with the keywords from `run_id` on, as psd_client.connect does.
        **keywords

    Raises:
        TypeError: an optimizer that psd does not have, or arguments that exclude each other.
        InvalidRequest, InvalidTensor: an option or a variable that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model: expected a keras.Model, got {model!r}")
    link_type = _link_type()
    given = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    scaler = given if isinstance(given, keras.optimizers.LossScaleOptimizer) else None
    given = scaler.inner_optimizer if scaler is not None else given
    options = _options(given)
    if options.clip_norm is not None:
        asked = keywords.get("clip_norm")
        if asked not in (None, options.clip_norm):
            raise InvalidRequest(f"clip_norm: is {asked}, and the optimizer's global_clipnorm {options.clip_norm}; pass one")
        keywords["clip_norm"] = options.clip_norm
    job, of_connect = split(keywords)
    is_scaled = scaler is not None or model.dtype_policy.name == "mixed_float16"
    if is_scaled and job.get("nan_policy") != "skip":
        raise InvalidRequest(
            'nan_policy: loss scaling, which Keras does with the dtype policy "mixed_float16", needs "skip"; pass '
            'nan_policy="skip" to distribute()'
        )
    decays = given._use_weight_decay  # noqa: SLF001 - what exclude_from_weight_decay has left
    declaration = read_declaration(model, options, decays, embeddings_in(model))
    with connection_of(ps, of_connect) as connection:
        link = link_type(declaration, connection, job)
        link.load()
    link.model = weakref.ref(model)
    model.supports_jit = False  # XLA cannot compile a call of Python: with jit_compile="auto" Keras does without
    result = DistributedOptimizer(given, link)
    link.is_scaled = is_scaled
    if not is_scaled:
        return result
    return DistributedLossScaleOptimizer(result, link, scaler or keras.optimizers.LossScaleOptimizer(given))


def _link_type() -> type[Link]:
    name = keras.backend.backend()
    if name == "tensorflow":
        from psd_client.keras.on_tensorflow import TensorFlowLink

        return TensorFlowLink
    if name == "torch":
        from psd_client.keras.on_torch import TorchLink

        return TorchLink
    raise InvalidRequest(
        f"keras: psd does not support the backend {name!r}; use tensorflow or torch (for JAX see psd_client.jax)"
    )


def _options(given: Any) -> KerasOptions:
    if isinstance(given, _Distributed):
        raise TypeError("optimizer: is distributed already; pass the Keras optimizer that distribute() was given")
    if not isinstance(given, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer: expected one of keras.optimizers, or its name, got {given!r}")
    # On torch Keras makes an instance of a subclass with torch's own kernels for the same arithmetic.
    kind = next(base for base in type(given).__mro__ if not base.__module__.startswith("keras.src.backend."))
    if getattr(keras.optimizers, kind.__name__, None) is not kind:
        raise TypeError(
            f"optimizer: {kind.__module__}.{kind.__qualname__} is not one of keras.optimizers, and the shards cannot run its "
            "code"
        )
    if int(given.iterations):
        raise InvalidRequest(
            "optimizer: it has been stepped, and its slots would be lost: the shards keep the slots themselves"
        )
    return options_of(kind.__name__, given.get_config())


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
        self.iterations.assign(self._link.ps.clock)  # which goes back with the job to a checkpoint

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

    def __init__(self, given: Any, link: Link) -> None:
        rate = given._learning_rate  # noqa: SLF001 - the schedule itself; the property gives its value
        super().__init__(
            learning_rate=float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else rate,
            name=given.name,
            loss_scale_factor=given.loss_scale_factor,
        )
        self._given = given
        self._link = link
        self.build(link.declaration.variables[: link.declaration.trained])
        self._iterations.assign(link.ps.clock)

    @property
    def loss_scale_factor(self) -> float | None:
        """A fixed factor, as in Keras. Only `distribute` may set it to None; a LossScaleOptimizer around this is refused."""
        return self._loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if value is None and getattr(self, "_link", None) is not None and not self._link.is_scaled:
            raise InvalidRequest(
                "LossScaleOptimizer: it would skip steps that the other workers wait for; set the dtype policy, or pass "
                'the LossScaleOptimizer to distribute(), with nan_policy="skip"'
            )
        self._loss_scale_factor = value

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """Push and pull instead of Keras's update. The gradients have been unscaled by a fixed loss_scale_factor."""
        indices = [self._get_variable_index(variable) for variable in trainable_variables]
        clock = self._link.exchange(self.learning_rate, indices, grads)
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
        self.build(link.declaration.variables[: link.declaration.trained])

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
