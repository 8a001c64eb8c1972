from typing import Any, Final

RULES_CHECKSUM: Final[int]

class InvalidArray(ValueError): ...

# Arguments are any buffers; each call checks them.
def accumulate(acc: Any, grad: Any, weight: float) -> None: ...
def scaled_copy(out: Any, grad: Any, weight: float) -> None: ...
def weigh_segments(out: Any, grad: Any, segment_ends: Any, weights: Any, add: bool) -> None: ...
def is_half(x: Any) -> bool: ...
def widen(out: Any, x: Any) -> None: ...
def first_nonfinite(x: Any) -> int: ...
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
