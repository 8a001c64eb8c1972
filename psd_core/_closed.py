"""Stand-in for a closed store's partition: any use of it raises StoreClosed."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from psd_core._store_format import StoreClosed


class Closed:
    """Replaces the partition of a store that was closed.

    Raises:
        StoreClosed: from every attribute.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreClosed(f"{self._path} has been closed")
