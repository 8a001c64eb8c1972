from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psd_core._step_block import GradientArray, RealArray

RULES_CHECKSUM: Final[int]

class InvalidArray(ValueError): ...

# Arguments are any buffers; each call checks them.
def accumulate(acc: RealArray, grad: GradientArray, weight: float = 1.0) -> None: ...
def scaled_copy(out: RealArray, grad: GradientArray, weight: float = 1.0) -> None: ...
def weigh_segments(
    out: RealArray, grad: GradientArray, segment_ends: NDArray[np.uint32], weights: NDArray[np.float64], *, add: bool
) -> None: ...
def is_half(x: Any) -> bool: ...
def widen(out: Any, x: Any) -> None: ...
def first_nonfinite(x: GradientArray) -> int: ...
def square_sum(x: Any, offset: int, width: int = 0) -> int | None: ...
def product_sum(x: Any, y: Any, offset: int) -> int | None: ...
def step_block(
    rule: int,
    param_in: Any,
    param_out: Any,
    slot_names: tuple[str, ...],
    slots_in: tuple[Any, ...],
    slots_out: tuple[Any, ...],
    acc: Any,
    grad: Any,
    weight: float,
    scale: float,
    segment_ends: Any,
    touched: Any,
    steps_in: Any,
    steps_out: Any,
    scalars: tuple[float, ...],
    flags: tuple[bool, ...],
    sums: Any,
) -> None: ...
