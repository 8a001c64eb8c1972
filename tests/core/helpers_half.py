"""Gradients in half precision as psd_core takes them, and blocks that are updated by them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_rules import make_block

F32 = np.float32
PATTERNS = np.arange(1 << 16, dtype=np.uint16)
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}

each_kind = pytest.mark.parametrize("kind", ["float16", "bfloat16"])


def typed(kind, bits):
    """These bits as psd_core takes this type."""
    return np.ascontiguousarray(bits, np.uint16).view(np.float16 if kind == "float16" else np.uint16)


def reference(half):
    """The same numbers as float32, by NumPy alone."""
    return half.astype(F32) if half.dtype == np.float16 else (half.astype(np.uint32) << 16).view(F32)


def finite(kind):
    """All patterns of finite numbers: of both signs, subnormal ones, zeros."""
    return PATTERNS[(PATTERNS & EXPONENTS[kind]) != EXPONENTS[kind]]


def gradient(kind, n, seed=0):
    """Finite numbers of any magnitude whose sums and squares stay finite in float32."""
    rng = np.random.default_rng(seed)
    if kind == "float16":
        return typed(kind, rng.choice(finite(kind), n))
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-30, 15, n)
    return typed(kind, (values.astype(F32).view(np.uint32) >> 16).astype(np.uint16))


def half_block(case, lengths, touched, steps, half, *, acc, weight=1.0, scale=1.0):
    """Arguments of step_block, see make_block, with this gradient."""
    block = make_block(case, lengths, touched, steps, acc=acc, grad=False)
    return block | {"grad": half, "weight": weight, "scale": scale}
