"""A user's own rule on rows; psd/contract/custom_rules.py says what its author can rely on. Must not know rounds or stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from psd.contract.custom_rules import ListedRule
from psd.state.aggregation.rules import check_returned
from psd_core.table import RowRule


class RowsFailed(Exception):
    """Raised when a user's own rule raises. `error`: what it raised; `path`: import path of the rule."""

    def __init__(self, error: BaseException, path: str) -> None:
        super().__init__(error, path)
        self.error = error
        self.path = path


class OwnRule:
    """A user's own rule in the form in which a table calls it, for some rows at a time."""

    def __init__(self, listed: ListedRule) -> None:
        self._path = listed.path
        self._rule = listed.kind()
        self._slots = tuple(listed.slots)

    def with_numbers(self, scalars: Mapping[str, float], age: int) -> RowRule:
        """The rule for one push, with its scalars and its age. The result raises RowsFailed."""

        def apply(param: NDArray[Any], grad: NDArray[Any], slots: list[NDArray[Any]], step: int) -> None:
            grad.flags.writeable = False
            try:
                numbers = {**scalars, "step": step, "age": age}
                check_returned(self._rule.apply(param, grad, dict(zip(self._slots, slots, strict=True)), numbers))
            except (Exception, SystemExit) as error:
                raise RowsFailed(error, self._path) from error

        return apply
