"""The module for the backend that Keras uses in this process; only that one is imported. Must not know models or jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from psd.contract.errors import InvalidRequest
from psd_client.keras.link import Link


def backend() -> tuple[type[Link], Callable[..., Any]]:
    """The link of a model to its job, and `look_up` of rows.

    Raises:
        InvalidRequest: Keras uses another backend.
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from psd_client.keras import on_tensorflow

        return on_tensorflow.TensorFlowLink, on_tensorflow.look_up
    if name == "torch":
        from psd_client.keras import on_torch

        return on_torch.TorchLink, on_torch.look_up
    raise InvalidRequest(
        f"keras: psd does not support the backend {name!r}; use tensorflow or torch (for JAX see psd_client.jax)"
    )
