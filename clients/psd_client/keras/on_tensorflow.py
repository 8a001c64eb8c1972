"""Keras on TensorFlow: one step is one tf.numpy_function over all gradients, both in graph mode and in eager mode.

The function's inputs are arrays in TensorFlow's own memory, one for each gradient. One numpy.concatenate for each run of
neighbours copies them into the flat buffers, from which they are sent. Its outputs are views of the flat parameter buffer,
which TensorFlow copies into the variables, inside of the graph. So each number is copied once in each direction, and Python
does no work for single tensors except listing them.

XLA cannot compile a call to Python; keras/__init__.py keeps Keras from trying. Must not know shards, sessions or rules. Only
this module imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.errors import InvalidRequest
from psd_client.keras.declaration import TrainedPart
from psd_client.keras.link import Link
from psd_client.lanes.flat import FlatBuffers


class _Run(NamedTuple):
    """A run of gradients that are adjacent in a flat space: where it lies, and of how many arrays it consists."""

    space: int
    start: int
    stop: int
    arrays: int


class TensorFlowLink(Link):
    """The link of a Keras model to its job, with TensorFlow as the backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if tf.distribute.has_strategy():
            raise InvalidRequest("tf.distribute: psd takes its place; build and compile the model outside of strategy.scope()")
        super().__init__(*args, **kwargs)
        self._compiled_exchange = tf.function(self._exchange)
        self._compiled_load = tf.function(self._load)

    def _initialize(self, flat: FlatBuffers) -> None:
        for view, variable in zip(flat.views, self.declaration.variables, strict=True):
            view[...] = variable.numpy()

    @override
    def load(self) -> None:
        self._compiled_load()

    @override
    def exchange(self, part: TrainedPart, rates: Sequence[Any], indices: Sequence[int], gradients: Sequence[Any]) -> Any:
        rate = tf.stack([tf.cast(tf.convert_to_tensor(rate), tf.float64) for rate in rates])
        named = dict(zip(map(str, indices), gradients, strict=True))
        if not tf.executing_eagerly():
            clock, self.is_skipped = self._exchange(part.number, rate, named)
            return clock
        self.error = None
        try:
            clock, self.is_skipped = self._compiled_exchange(part.number, rate, named)
        except tf.errors.OpError:
            if self.error is not None:
                raise self.error from None  # in eager mode the program can be given the error itself
            raise
        return clock

    def _exchange(self, number: int, rates: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        """Run one step of a part. rates: one for each part. named: gradients by the variable's index. Traced once for each part
        and set of indices."""
        part = self.declaration.parts[number]
        gradients = {int(index): gradient for index, gradient in named.items()}
        runs, arrays = self._runs(gradients)
        trained = range(self.declaration.trained)
        missing = [index for index in trained if index not in gradients]

        def step(rates: NDArray[Any], *arrays: NDArray[Any]) -> list[Any]:
            def write(buffers: FlatBuffers) -> None:
                begin = 0
                for run in runs:
                    target = buffers.spaces[run.space][run.start : run.stop]
                    np.concatenate(arrays[begin : begin + run.arrays], out=target)
                    begin += run.arrays

            clock, is_skipped = self.push_pull(part, rates.tolist(), missing, write)
            views = self.worker.parameters.views
            return [np.int64(clock), np.bool_(is_skipped), *(views[index] for index in trained)]

        clock, is_skipped, *values = self._call(step, [rates, *arrays], [tf.int64, tf.bool], list(trained))
        self._assign(list(trained), values)
        return tf.ensure_shape(clock, ()), tf.ensure_shape(is_skipped, ())

    def _runs(self, gradients: dict[int, Any]) -> tuple[list[_Run], list[Any]]:
        """The runs, and the gradients in the order of the flat spaces: flat, and in the buffers' dtypes."""
        runs: list[_Run] = []
        arrays: list[Any] = []
        for number, space in enumerate(self.worker.gradients.layout.spaces):
            for index, start in zip(space.tensors.tolist(), space.starts.tolist(), strict=True):
                if index not in gradients:
                    continue
                # An embedding's IndexedSlices become a dense gradient here. That is what they stand for; Keras's own rules
                # differ from it where an id occurs twice in a batch: they add up the squares of its parts.
                tensor = self.declaration.tensors[index]
                flat = tf.reshape(tf.cast(tf.convert_to_tensor(gradients[index]), tensor.dtype), [-1])
                if space.gradient_dtype.name != tensor.dtype:  # the bits of bfloat16
                    flat = tf.bitcast(flat, space.gradient_dtype.name)
                stop = start + tensor.size
                if runs and runs[-1].space == number and runs[-1].stop == start:
                    runs[-1] = runs[-1]._replace(stop=stop, arrays=runs[-1].arrays + 1)
                else:
                    runs.append(_Run(number, start, stop, 1))
                arrays.append(flat)
        return runs, arrays

    def _load(self) -> None:
        everything = list(range(len(self.declaration.tensors)))
        views = self.worker.parameters.views
        self._assign(everything, self._call(lambda: [views[index] for index in everything], [], [], everything))

    def _call(self, function: Callable[..., list[Any]], inputs: list[Any], first: list[Any], indices: list[int]) -> list[Any]:
        """Call a Python function from the graph. Its results have the dtypes `first`, then those of these tensors."""
        dtypes = [tf.as_dtype(self.declaration.tensors[index].master_dtype) for index in indices]
        return list(tf.numpy_function(function, inputs, [*first, *dtypes]))

    def _assign(self, indices: list[int], values: list[Any]) -> None:
        for index, value in zip(indices, values, strict=True):
            variable = self.declaration.variables[index]
            value.set_shape(variable.shape)
            # TensorFlow takes what Python returns without copying it, and a variable likewise what it is assigned. So without
            # a copy the variable would be the buffer, and change with the next pull.
            is_master = self.declaration.tensors[index].master_dtype == variable.dtype
            variable.assign(tf.raw_ops.DeepCopy(x=value) if is_master else tf.cast(value, variable.dtype))


def look_up(
    handle: Any, ids: Any, dim: int, pull: Callable[[NDArray[Any]], Any], collect: Callable[[NDArray[Any], NDArray[Any]], Any]
) -> Any:
    """The rows (..., dim) that `pull` returns for ids (...), in float32. The handle gets the gradient that `collect` returns
    for ids and the rows' gradients. Both are called whenever the graph is run."""

    def pulled(ids: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(pull, [ids], tf.float32), (*ids.shape, dim))

    def tracked(handle: Any, ids: Any) -> tuple[Any, Callable[[Any], tuple[Any, None]]]:
        handle_shape = handle.shape

        def gradient(upstream: Any) -> tuple[Any, None]:
            return tf.ensure_shape(tf.numpy_function(collect, [ids, upstream], tf.float32), handle_shape), None

        return pulled(ids), gradient

    return tf.custom_gradient(tracked)(tf.convert_to_tensor(handle), ids)
