"""Stand-in for what a store has had open: whoever still asks for it hears that the store has been closed."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from psd_core._arena_format import StoreClosed


class Closed:
    """Takes the place of a store's open partition.

    Raises:
        StoreClosed: from every attribute.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreClosed(f"{self._path} has been closed")
