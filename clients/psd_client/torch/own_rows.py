"""The rows that a model itself has, as load_state_dict sets them, for a model that is in no job: lookups, and what is loaded.

An export has the rows of a table once, under the name of one module, though several may look them up. Torch hands each module
what is under its own name; so modules of one table find each other by the list of missing names, which all calls for one
load_state_dict share. Must not know connections, nor modules beyond their rows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from psd.contract.tables import SparseTableSpec
from psd_client.row_places import RowPlaces
from psd_client.torch.tables import Lookup, Wanted
from psd_core.table import initial_rows


class Holder(Protocol):
    """An embedding, as this module sees it.

    Attributes:
        ids: (n,) int64. rows: (n, dim), in the same order. None: it has none.
    """

    spec: SparseTableSpec
    handle: torch.nn.Parameter
    ids: torch.Tensor | None
    rows: torch.Tensor | None

    def take_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Look up these rows from now on."""


class OwnRows:
    """The rows of one embedding as the source of its lookups. Rows of other ids are what a job has for those that nobody has
    trained: their initial values.

    Attributes:
        index_of: see RowSource. is_trained: likewise.
    """

    is_trained = False

    def __init__(self, holder: Holder) -> None:
        assert holder.ids is not None
        self.index_of = {holder.spec.name: 0}
        self._holder = holder
        self._places = RowPlaces(holder.ids.cpu().numpy())

    def pull(self, lookups: Sequence[Lookup]) -> list[torch.Tensor]:
        """The distinct rows (k, dim) of some lookups, on the device and in the dtype of the rows."""
        return [self._rows_of(place) for _, place in lookups]

    def prefetch(self, lookups: Sequence[Lookup]) -> None:
        """Do nothing: the rows are there."""

    def _rows_of(self, place: Wanted) -> torch.Tensor:
        rows, spec = self._holder.rows, self._holder.spec
        assert rows is not None
        ids = place.distinct.ids.view(np.int64)
        places, is_there = self._places.find(ids)
        found = rows.index_select(0, torch.from_numpy(places).to(rows.device))
        if not is_there.all():
            known, found = found, rows.new_empty((len(ids), spec.dim))
            fresh = initial_rows(spec.name, spec.dim, spec.init, spec.seed, ids[~is_there])
            found[torch.from_numpy(is_there).to(rows.device)] = known
            found[torch.from_numpy(~is_there).to(rows.device)] = torch.from_numpy(fresh).to(rows)
        if place.padding is not None:
            found[place.padding] = 0
        return found


class Given(NamedTuple):
    """Part of a state_dict that is of an embedding: names and tensors of ids and rows; None for one that is not there."""

    names: tuple[str, str]
    ids: torch.Tensor | None
    rows: torch.Tensor | None


def rows_in(state: Mapping[str, Any], prefix: str, table: str) -> Given:
    """The ids and rows in a state_dict of the embedding with this prefix. A model that is itself an embedding has no name in
    it; its rows are also found under the table's."""
    places = [prefix] if prefix or "ids" in state or "rows" in state else ["", f"{table}."]
    for place in places:
        names = f"{place}ids", f"{place}rows"
        given = Given(names, *(state.get(name) for name in names))
        if given.ids is not None or given.rows is not None:
            break
    return given


def load(holder: Holder, given: Given, *, assigns: bool) -> str:
    """Set an embedding's rows to given ones; return what is wrong with these, in words, or "".

    assigns: True: keep the tensors themselves; else copies on the handle's device and in its dtype, as torch has it.
    """
    (of_ids, of_rows), ids, rows = given
    if ids is None or rows is None:
        return f"{of_ids} and {of_rows} are one table, and only one of them is there"
    if ids.dtype == torch.uint64:
        ids = ids.view(torch.int64)
    if ids.dtype != torch.int64 or ids.dim() != 1:
        return f"{of_ids}: must be ids, (n,) int64, got {tuple(ids.shape)} {ids.dtype}"
    shape = (len(ids), holder.spec.dim)
    if tuple(rows.shape) != shape or not rows.is_floating_point():
        return f"{of_rows}: must be rows, {shape} floating, got {tuple(rows.shape)} {rows.dtype}"
    if len(torch.unique(ids)) != len(ids):
        return f"{of_ids}: an id comes twice"
    if not assigns:
        handle = holder.handle
        ids = ids.to(handle.device, copy=True)
        rows = rows.detach().to(handle.device, handle.dtype, copy=True)
    holder.take_rows(ids, rows)
    return ""


class OneLoad:
    """The modules that have met in one call of load_state_dict: those of one table get the same rows, given under one name.

    Attributes:
        missing: the names that are missing, a list that torch makes anew for each call.
    """

    _latest = threading.local()

    def __init__(self, missing: list[str]) -> None:
        self.missing = missing
        self._loaded: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by table
        self._waiting: list[tuple[weakref.ref[Any], tuple[str, str]]] = []

    @classmethod
    def of(cls, missing: list[str]) -> OneLoad:
        """The call with this list of missing names."""
        latest: OneLoad | None = getattr(cls._latest, "load", None)
        if latest is None or latest.missing is not missing:
            latest = cls._latest.load = cls(missing)
        return latest

    def has_loaded(self, holder: Holder) -> None:
        """Give an embedding's rows to those of the same table that lack theirs, before it and after it."""
        self._loaded[holder.spec.name] = holder
        for waiting, names in self._waiting:
            other = waiting()
            if other is not None and other.spec.name == holder.spec.name:
                self.missing[:] = [name for name in self.missing if name not in names]
                _share(holder, other)

    def lacks(self, holder: Holder, names: tuple[str, str]) -> None:
        """Take the rows of another module, or wait for one. Without any, those that the embedding has are old: its names
        are then missing."""
        other = self._loaded.get(holder.spec.name)
        if other is not None:
            _share(other, holder)
            return
        self._waiting.append((weakref.ref(holder), names))
        if holder.rows is not None:
            self.missing.extend(names)


def _share(holder: Holder, other: Holder) -> None:
    if other is not holder:  # else it is one module under two names
        assert holder.ids is not None
        assert holder.rows is not None
        other.take_rows(holder.ids, holder.rows)


def has_same(state: Mapping[str, Any], ids: torch.Tensor) -> bool:
    """True if a state_dict has the table with these ids already, by another module or another name of this one."""
    return len(ids) > 0 and any(
        name.endswith("ids") and isinstance(value, torch.Tensor) and value.data_ptr() == ids.data_ptr()
        for name, value in state.items()
    )
