"""Torch's tensors as NumPy arrays, for calls that take named values of any kind; bfloat16 as its bits.

Must not know models, jobs or names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def dtype_of(tensor: torch.Tensor) -> str:
    """Name of the tensor's dtype, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def problem_of(tensor: torch.Tensor) -> str | None:
    """Reason why a tensor has no values here that could be read as an array; None if it has."""
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}, not dense"
    if tensor.is_quantized:
        return "is quantized; publish what .dequantize() returns"
    if hasattr(tensor, "full_tensor"):
        return "is a DTensor, of which this process has a part; put .full_tensor(), or .to_local() by a name of its own"
    if tensor.is_meta:
        return "is on the meta device, and has no values"
    return None


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The values: a view of the tensor's memory if it is on the CPU, else a copy; of bfloat16 the bits, as uint16."""
    here = tensor.detach().resolve_conj().resolve_neg().cpu()
    if here.dtype == torch.bfloat16:
        return here.contiguous().view(torch.int16).numpy().view(np.uint16)
    return here.numpy()
