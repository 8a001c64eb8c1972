"""Update rules that only tables have, beside those of rules.py. Must not know how a rule computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psd_core.rules import Adagrad

__all__ = ["RowwiseAdagrad"]


@dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum of squares a row, the mean over its numbers, as FBGEMM and TorchRec have it.

    A row then takes one number of slots, where Adagrad takes as many as the row has.

    Args:
        lr, lr_decay, weight_decay, eps, initial_accumulator_value, maximize: see Adagrad.
    """

    rule: ClassVar[str] = "rowwise_adagrad"
