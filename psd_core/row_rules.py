"""Update rules that only tables have, besides those of rules.py. Must not know how a rule computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psd_core.rules import Adagrad

__all__ = ["RowwiseAdagrad"]


@dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean squares over its numbers, as in FBGEMM and TorchRec.

    So a row's slot is one number, instead of Adagrad's one for each number of the row.

    Args:
        lr, lr_decay, weight_decay, eps, initial_accumulator_value, maximize: as in Adagrad.
    """

    rule: ClassVar[str] = "rowwise_adagrad"
