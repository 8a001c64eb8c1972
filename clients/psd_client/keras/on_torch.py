"""Keras on torch: gradients lie in the flat buffers, as for torch's own users (torch/gradients.py).

Must not know shards, sessions or rules. The only module outside of psd_client.torch that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from typing_extensions import override

from psd_client.keras.declaration import TrainedPart
from psd_client.keras.link import Link
from psd_client.lanes.flat import FlatBuffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.gradients import Gradients
from psd_client.torch.parameters import Received, as_tensors


class TorchLink(Link):
    """The link of a Keras model to its job, with PyTorch as the backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        declared = self.declaration
        self._parameters = [variable.value for variable in declared.variables]
        self._received = Received(self.worker)
        trained = list(range(declared.trained))
        in_torch = TorchDeclaration(self._parameters, [], declared.tensors, declared.groups, trained, [])
        self._gradients = Gradients(in_torch, self.worker.gradients, None)

    @torch.no_grad()
    def _initialize(self, flat: FlatBuffers) -> None:
        torch._foreach_copy_(as_tensors(flat), [variable.value for variable in self.declaration.variables])

    @torch.no_grad()
    @override
    def load(self) -> None:
        torch._foreach_copy_(self._parameters, self._received.views)

    @torch.no_grad()
    @override
    def exchange(self, part: TrainedPart, rates: Sequence[Any], indices: Sequence[int], gradients: Sequence[Any]) -> Any:
        by_index: list[torch.Tensor | None] = [None] * self.declaration.trained
        for index, gradient in zip(indices, gradients, strict=True):
            by_index[index] = gradient
        missing = [index for index, gradient in enumerate(by_index) if gradient is None]

        def write(_: FlatBuffers) -> None:
            self._gradients.gather(by_index, None if part.job_part is None else part.trained)

        clock, self.is_skipped = self.push_pull(part, [float(rate) for rate in rates], missing, write)
        trained = self.declaration.trained
        torch._foreach_copy_(self._parameters[:trained], self._received.views[:trained])
        return clock

    @override
    def close(self) -> None:
        self._gradients.close()
        super().close()


def look_up(
    handle: Any,
    ids: torch.Tensor,
    dim: int,
    pull: Callable[[NDArray[Any]], Any],
    collect: Callable[[NDArray[Any], NDArray[Any]], Any],
) -> Any:
    """The rows (..., dim) that `pull` returns for ids (...), in float32. The handle gets the gradient that `collect` returns
    for ids and the rows' gradients."""
    del dim
    array = ids.detach().cpu().numpy()
    found = torch.from_numpy(pull(array)).to(ids.device)

    def collected(gradient: torch.Tensor) -> Any:
        return collect(array, gradient.detach().cpu().numpy())

    return _Tracked.apply(handle.value, (found,), collected)  # type: ignore[no-untyped-call]


class _Tracked(torch.autograd.Function):
    """Passes rows on, and gives their gradients to `collect` in back-propagation; its result is the handle's gradient.

    The rows come in a tuple, as in torch/row_gradients.py.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, handle: torch.Tensor, rows: tuple[torch.Tensor], collect: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        ctx.collect, ctx.handle = collect, handle
        return rows[0]

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.as_tensor(ctx.collect(gradients[0])).to(ctx.handle), None, None
