"""The JAX face: `distribute` places a pytree of parameters and an optimizer's slots on the shards.

    params, transformation = psd.distribute(params, psd_client.Adam(lr=1e-3))
    state = transformation.init(params)
    ...
    updates, state = transformation.update(gradients, state, params)
    params = optax.apply_updates(params, updates)  # or jax.tree.map(jax.numpy.add, params, updates)

The transformation has the form of optax's, but does not need optax. Its update is a push_pull: the updates are the differences
between the shards' parameters and `params` (adding them gives the shards' values, up to rounding in the last bit). It works
under jax.jit, by an ordered io_callback. Must not know blocks, shards or messages. Only this module imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray
from typing_extensions import Unpack

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import TensorSpec
from psd.contract.keywords import LOCAL_STEPS_ELSEWHERE, OF_CONNECT, JobKeywords, takes
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer, worker_of
from psd_client.faces import connection_of
from psd_client.optimizers import scalar_values, spec_of
from psd_client.tensors import as_array, check_gradient, fill, tensor_specs, write_gradient
from psd_client.worker.flat_calls import FlatCalls
from psd_core.optimizer import Optimizer

__all__ = ["distribute", "GradientTransformation"]


def __dir__() -> list[str]:
    return __all__


Params = Any
State = Any


class GradientTransformation(NamedTuple):
    """A transformation like optax's: `init(params) -> state`, `update(gradients, state, params, batch_size=1) -> (updates,
    state)`.

    The state is the worker's clock, limited to JAX's largest integer: 2**31 - 1 without jax_enable_x64. batch_size: number of
    samples behind the gradients. Outside of jax.jit `update` raises psd's errors; inside, JAX raises an error of its own with
    their text.
    """

    init: Callable[[Params], State]
    update: Callable[..., tuple[Params, State]]


_ELSEWHERE = {
    "tables": "this face takes none; psd_client.connect().declare does, and docs/jax.md has an example",
    **LOCAL_STEPS_ELSEWHERE,
    **dict.fromkeys(OF_CONNECT, "goes into connect_args, such as connect_args={'servers': 'host:7000', 'rank': 0}"),
}


@takes(JobKeywords, elsewhere=_ELSEWHERE)
def distribute(
    params: Params,
    optimizer: Optimizer,
    *,
    learning_rate: Callable[[int], float] | None = None,
    ps: ParameterServer | None = None,
    connect_args: dict[str, Any] | None = None,
    **job: Unpack[JobKeywords],
) -> tuple[Params, GradientTransformation]:
    """Declare parameters; return the job's current values (at the start, those of the first worker) and the transformation.

    Args:
        params: a pytree of float32, float64, float16 or bfloat16 arrays.
        optimizer: one of psd_client's, such as psd_client.Adam(lr=1e-3) or CustomRule.
        learning_rate: a schedule, clock -> number, in the place of the optimizer's lr; computed outside of JAX.
        ps: a connection; None connects with `connect_args`, as psd_client.connect does, or from the environment.
        **job

    Raises:
        TypeError, InvalidRequest, InvalidTensor: an argument that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    if isinstance(optimizer, Mapping):
        raise InvalidRequest(
            "optimizer: several are not in this face; psd_client.connect().declare takes them: docs/several.md"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected one of psd_client's, such as psd_client.Adam(lr=1e-3), got {optimizer!r}")
    spec = spec_of(optimizer)
    if learning_rate is not None and "lr" not in spec.info.scalars:
        raise InvalidRequest(f"learning_rate: the rule {spec.rule!r} has none")
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    if not paths:
        raise InvalidTensor("params: has no leaves; there must be at least one parameter to train")
    leaves = [jax.numpy.asarray(leaf) for _, leaf in paths]  # in JAX's dtypes: without jax_enable_x64 none has 64 bits
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in paths]
    arrays = dict(zip(names, map(np.asarray, leaves), strict=True))
    if len(arrays) < len(paths):
        raise InvalidTensor("params: two leaves have the same path; rename a key")
    tensors = tensor_specs(arrays, dict.fromkeys(arrays, 0))
    with connection_of(ps, connect_args or {}) as connection:
        worker = worker_of(connection)
        worker.declare_tensors(tensors, [spec], initial=fill(arrays), reads_planes=True, **job)

    def scalars() -> list[float]:
        options = optimizer.option_values()
        if learning_rate is not None:
            options["lr"] = learning_rate(worker.clock)
        return scalar_values(spec, options, 0)

    pytree = _Pytree(tree, tensors, [array.dtype for array in arrays.values()], worker, scalars)
    return jax.tree.unflatten(tree, pytree.pulled(leaves)), GradientTransformation(pytree.init, pytree.update)


@dataclass(frozen=True)
class _Pytree:
    """The declared parameters, and the steps of a transformation of them. `scalars` returns those of the next push."""

    tree: Any
    tensors: list[TensorSpec]
    dtypes: list[Any]
    worker: FlatCalls
    scalars: Callable[[], list[float]]

    def init(self, params: Params) -> State:
        self._leaves(params, "params")
        return jax.numpy.asarray(self._state())

    def update(self, gradients: Params, state: State, params: Params = None, *, batch_size: Any = 1.0) -> tuple[Params, State]:
        old = [jax.numpy.asarray(leaf) for leaf in self._leaves(params, "params")]
        given = self._leaves(gradients, "gradients")
        for index, (tensor, dtype, leaf) in enumerate(zip(self.tensors, self.dtypes, given, strict=True)):
            if not hasattr(leaf, "dtype"):
                leaf = given[index] = as_array(f"gradients[{tensor.name!r}]", leaf, dtype)
            check_gradient("gradients", tensor, dtype, leaf)
        for tensor, leaf in zip(self.tensors, old, strict=True):
            if tuple(leaf.shape) != tensor.shape:
                raise InvalidTensor(f"params[{tensor.name!r}]: shape must be {tensor.shape}, got {tuple(leaf.shape)}")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*given, *old, state, batch_size)):
            clock = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.int64))
            shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.master_dtype) for tensor in self.tensors]
            state, *new = io_callback(self._step, (clock, *shapes), batch_size, *given, ordered=True)
            new = [value.astype(leaf.dtype) for value, leaf in zip(new, old, strict=True)]
        else:
            state = jax.numpy.array(self._step(batch_size, *given)[0])
            new = self.pulled(old)
        return jax.tree.unflatten(self.tree, [value - leaf for value, leaf in zip(new, old, strict=True)]), state

    def pulled(self, leaves: list[Any]) -> list[Any]:
        """Copy the shards' parameters to arrays with the dtypes of the given leaves; the next pull overwrites the buffer."""
        views = self.worker.parameters.views
        return [jax.numpy.array(view).astype(leaf.dtype) for view, leaf in zip(views, leaves, strict=True)]

    def _step(self, batch_size: Any, *gradients: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        for view, gradient in zip(self.worker.gradients.views, gradients, strict=True):
            write_gradient(view, np.asarray(gradient))
        self.worker.push_pull_flat([self.scalars()], weight_of(batch_size, "batch_size"))
        return self._state(), *self.worker.parameters.views

    def _state(self) -> NDArray[Any]:
        """The worker's clock as a JAX integer; the largest integer if the clock is greater."""
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        return np.asarray(min(self.worker.clock, np.iinfo(dtype).max), dtype)

    def _leaves(self, values: Params, what: str) -> list[Any]:
        leaves: list[Any]
        leaves, found = jax.tree.flatten(values)
        if found != self.tree:
            raise InvalidTensor(f"{what}: expected the tree that was declared, {self.tree}, got {found}")
        return leaves
