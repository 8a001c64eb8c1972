"""Embeddings whose rows are on the shards: modules in the manner of torch.nn.Embedding and torch.nn.EmbeddingBag.

A forward pass pulls the distinct rows of its ids, and back-propagation collects a gradient for each. `distribute` finds the
modules and joins them to the job; the optimizer that it returns pushes the collected gradients in `step()`. Outside of a job a
module has the rows that load_state_dict gives it, or reads a running job's (`read_rows`); these are fixed.

Must not know connections or rounds (tables.py), where loaded rows are found (own_rows.py), nor how gradients are kept
(row_gradients.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from psd.contract.arguments import whole_number
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared
from psd_client.tables import Table
from psd_client.torch import own_rows
from psd_client.torch.own_rows import OneLoad, OwnRows
from psd_client.torch.row_gradients import CollectedGradients, Ids, Numbers, Tracked, in_numpy
from psd_client.torch.tables import Rows, RowSource, Wanted, wanted
from psd_client.torch.uncompiled import uncompiled
from psd_core.initial import Initial, Normal
from psd_core.optimizer import Optimizer
from psd_core.rules import SGD

MODES = ("sum", "mean", "max")


class TableModule(torch.nn.Module):
    """Base class of the modules that look up rows in one table.

    Attributes:
        spec: the table's declaration. optimizer: the table's rule; None: that of the handle's param_group.
        handle: a scalar parameter that represents the table in the model. Its param_group sets the table's options, if the
            table has no optimizer of its own. The output has its device and dtype, and is tracked if it requires_grad. Its
            `.grad` has a row for each distinct id whose gradient was collected, see row_gradients.py.
        ids, rows: buffers: the rows that the module itself has, outside of a job, (n,) int64 and (n, dim); else None.
        padding_idx: id whose row is zeros and has no gradient, or None.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        optimizer: Optimizer | None = None,
        *,
        init: Initial = Normal(1.0),  # noqa: B008 - it is frozen
        seed: int = 0,
        padding_idx: int | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        # Without an optimizer of its own the table's rule is known when `distribute` is called; all else is checked here.
        self.spec = Table(name, dim, SGD(lr=0.0) if optimizer is None else optimizer, init=init, seed=seed, **options).spec(0)
        self.optimizer = optimizer
        self.padding_idx = None if padding_idx is None else whole_number(InvalidRequest, "padding_idx", padding_idx)
        if not -(1 << 63) <= (self.padding_idx or 0) < 1 << 63:
            raise InvalidRequest(f"padding_idx: must be an id of int64, got {padding_idx}")
        self.handle = torch.nn.Parameter(torch.zeros(1, dim, device=device))
        self.gradients = CollectedGradients(self.spec.name)
        self.ids: torch.Tensor | None
        self.rows: torch.Tensor | None
        self.register_buffer("ids", None)
        self.register_buffer("rows", None)
        self._source: RowSource | None = None
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    @property
    def is_tracked(self) -> bool:
        """True if back-propagation may compute gradients for looked-up rows; also in evaluation mode, as in torch."""
        return torch.is_grad_enabled() and self.handle.requires_grad and self.source.is_trained

    @property
    def is_learning(self) -> bool:
        """True if a lookup counts as a use of its rows. In evaluation mode, only a push of their gradients does."""
        return self.training and self.is_tracked

    @property
    def is_in_job(self) -> bool:
        """True if its rows are trained on the shards of a job in which this process is a worker."""
        return self._source is not None and self._source.is_trained

    @property
    def source(self) -> RowSource:
        """The place at which it looks up rows.

        Raises:
            NotDeclared: the module belongs to no job, and has no rows of its own.
        """
        if self._source is None and self.rows is not None:
            self._source = OwnRows(self)
        if self._source is None:
            raise NotDeclared(
                f"embedding {self.spec.name!r}: its rows are on the shards, and it is not joined to them: call "
                "psd_client.torch.distribute(model, optimizer) with the model that holds it; a copy of a model is not joined. "
                "Outside of a job, load an export into the model, or call psd_client.torch.read_rows(model, reader)"
            )
        return self._source

    def join(self, source: RowSource) -> None:
        """Look up rows there from now on; called by `distribute` and `read_rows`."""
        self._source = source
        self.ids = self.rows = None
        self.handle.grad = None
        self.gradients = CollectedGradients(self.spec.name)
        if self._hook is not None:
            self._hook.remove()
        if self.handle.requires_grad and source.is_trained:
            self._hook = self.handle.register_hook(self.gradients.refuse_others)  # type: ignore[no-untyped-call]

    def leave(self, source: RowSource) -> None:
        """Look up no more rows there; called when the job's connection is closed."""
        if self._source is source:
            self._source = None

    def take_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Look up these rows from now on: ids (n,) int64, each of them once, and rows (n, dim)."""
        self._source = None
        self.ids, self.rows = ids, rows

    @uncompiled
    def prefetch(self, ids: torch.Tensor) -> None:
        """Fetch the rows of the next step's batch in the background, while the program does other things.

        If the next step looks up exactly these ids, it finds their rows here; else the lookup pulls its rows, as without
        prefetch. In synchronous and ssp jobs the rows are pulled as soon as the next `step()` has its parameters, so that they
        are the same to the bit; in asynchronous jobs they are pulled at once, and may be one step older. Outside of a job this
        does nothing.

        Args:
            ids: as in the forward pass.
        """
        self.source.prefetch([(self, self.wanted(ids))])

    def wanted(self, ids: torch.Tensor) -> Wanted:
        """The rows that a lookup of these ids needs.

        Raises:
            TypeError, InvalidTensor: no tensor of ids.
        """
        name = self.spec.name
        if not isinstance(ids, torch.Tensor):
            raise TypeError(f"embedding {name!r}: ids: expected a tensor, got {type(ids).__name__}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise InvalidTensor(f"embedding {name!r}: ids: dtype must be torch.int64 or torch.int32, got {ids.dtype}")
        flat = ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()
        return wanted(self.source.index_of[name], self.spec.dim, flat, self.padding_idx)

    def tracked(self, rows: torch.Tensor, found: Wanted, *, is_expanded: bool) -> torch.Tensor:
        """The rows on the handle's device and in its dtype, connected so that their gradients are collected.

        is_expanded: True if there is a row for each id of the batch; else for each distinct id.
        """
        rows = rows.to(self.handle.device, self.handle.dtype)
        if not self.is_tracked:
            return rows
        dim = self.spec.dim

        def sums(gradient: torch.Tensor) -> tuple[Ids, Numbers]:
            values = in_numpy(gradient, dim)
            if is_expanded:  # to memory of its own: others may have that of the gradient
                values = found.distinct.sum(values, np.empty((len(found.distinct.ids), dim), np.float32))
            return found.without_padding(values)

        return cast(torch.Tensor, Tracked.apply(self.handle, (rows,), self.gradients, sums))  # type: ignore[no-untyped-call]

    def output(self, rows: Rows | torch.Tensor, found: Wanted, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        """The output of the module, computed from the distinct rows. more: the other arguments of the forward pass."""
        raise NotImplementedError

    def check(self, ids: torch.Tensor, *more: Any) -> None:
        """Raise TypeError or InvalidTensor if the arguments of the forward pass do not fit together."""

    @override
    def extra_repr(self) -> str:
        shown = f"{self.spec.name!r}, {self.spec.dim}"
        return shown if self.padding_idx is None else f"{shown}, padding_idx={self.padding_idx}"

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy: joined to no job, with no collected gradients. Rows of its own are copied."""
        return {**self.__dict__, "_source": None, "gradients": CollectedGradients(self.spec.name), "_hook": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the rows that the module itself has, of a table once; in a job nothing, for they are on the shards."""
        is_there = self.ids is not None and own_rows.has_same(destination, self.ids)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("handle", "ids", "rows") if is_there else ("handle",):
            del destination[f"{prefix}{name}"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *more: Any) -> None:
        """Load rows, if there are any: as an export of a job has them, or the state_dict of a model with rows of its own."""
        strict, missing, unexpected, errors = more
        given = own_rows.rows_in(state_dict, prefix, self.spec.name)
        rest = {name: value for name, value in state_dict.items() if name not in given.names}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        missing[:] = [name for name in missing if name not in (f"{prefix}handle", f"{prefix}ids", f"{prefix}rows")]
        if given.ids is None and given.rows is None:
            OneLoad.of(missing).lacks(self, given.names)
        elif self.is_in_job:
            errors.append(
                f"embedding {self.spec.name!r}: its rows are on the shards of its job, and load_state_dict cannot set them; "
                "leave them out, or load into a copy of the model, or call close() of the optimizer before"
            )
        elif problem := own_rows.load(self, given, assigns=metadata.get("assign_to_params_buffers", False)):
            errors.append(f"embedding {self.spec.name!r}: {problem}")
        else:
            OneLoad.of(missing).has_loaded(self)


class Embedding(TableModule):
    """Rows by id, as torch.nn.Embedding has them, from a table on the shards that grows by id.

    The table is declared when `distribute` is called with the model. Embeddings of the same name share one table, and must be
    declared alike.

        embedding = psd.Embedding("user", dim=64, optimizer=psd_client.Adagrad(lr=0.05))
        rows = embedding(ids)  # (..., 64)

    In training a lookup counts as a use of its rows, for expiry and eviction. In evaluation mode and under torch.no_grad() it
    does not; under the latter nothing is tracked, as in torch. In a job the module adds nothing to the model's state_dict: the
    shards' checkpoints have the rows. A model that is in no job takes the rows of an export by load_state_dict, or reads a
    running job's by `read_rows`. They are then fixed: no gradient reaches them. Other ids have the values of `init`.

    Args:
        name: name of the table.
        dim: length of a row.
        optimizer: the update rule of the rows, such as psd_client.Adagrad(lr=0.05). None: the rule of the optimizer given to
            `distribute`; the rows then follow the learning rate and schedule of the param_group that has the module's
            parameter.
        init: values of rows that nobody has trained; by default as in torch.nn.Embedding. They depend only on seed, name and
            id.
        padding_idx: id whose row is zeros, is not on the shards, and has no gradient.
        device: device of the output; `to(device)` changes it.
        options: other options of psd_client.Table: dtype, updates, admit_after and so on.
    """

    @uncompiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (..., dim) of ids (...), int64 or int32.

        Raises:
            TypeError, InvalidTensor: no tensor of ids.
            NotDeclared: `distribute` has not been called, and no rows were loaded.
            PsdError: what the shards or the connection refuse.
        """
        return look_up([(self, (ids,))])[0]

    @override
    def output(self, rows: Rows | torch.Tensor, found: Wanted, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            expanded = rows.index_select(0, torch.from_numpy(found.distinct.inverse).to(rows.device))
            expanded = expanded.view(*ids.shape, self.spec.dim)
        else:
            expanded = torch.from_numpy(found.distinct.expand(rows).reshape(*ids.shape, self.spec.dim))
        return self.tracked(expanded, found, is_expanded=True)


class EmbeddingBag(TableModule):
    """Sums, means or maxima of rows, as in torch.nn.EmbeddingBag, from a table on the shards that grows by id.

    All that is said of the table in Embedding holds here, too.

    Args:
        mode: "sum", "mean" or "max".
        include_last_offset: True if the last of the offsets is the number of ids.
        name, dim, more: as in Embedding. In a bag, ids equal to padding_idx are left out.
    """

    def __init__(
        self, name: str, dim: int, optimizer: Optimizer | None = None, *, mode: str = "mean", include_last_offset: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, dim, optimizer, **more)
        if mode not in MODES:
            raise InvalidRequest(f"mode: must be one of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    @uncompiled
    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One row for each bag of ids: (bags, dim).

        Args:
            ids: int64 or int32, (bags, n); or (n,) with offsets.
            offsets: (bags,), the index in `ids` at which each bag begins.
            per_sample_weights: factors for the rows, of the shape of ids; only with mode="sum".

        Raises:
            as Embedding.
        """
        return look_up([(self, (ids, offsets, per_sample_weights))])[0]

    @override
    def check(self, ids: torch.Tensor, *more: Any) -> None:
        offsets, weights = (*more, None, None)[:2]
        where = f"embedding {self.spec.name!r}"
        if ids.dim() not in (1, 2):
            raise InvalidTensor(f"{where}: ids: must have 1 or 2 dimensions, got {ids.dim()}")
        if (offsets is None) != (ids.dim() == 2):
            raise InvalidTensor(f"{where}: offsets: ids of 1 dimension need them, ids of 2 have none")
        if offsets is not None and offsets.dtype not in (torch.int64, torch.int32):
            raise InvalidTensor(f"{where}: offsets: dtype must be torch.int64 or torch.int32, got {offsets.dtype}")
        if offsets is not None and not _are_offsets(offsets, len(ids)):
            raise InvalidTensor(f"{where}: offsets: must be (bags,), rise from 0, and be at most {len(ids)}, the number of ids")
        if weights is not None and self.mode != "sum":
            raise InvalidRequest(f'{where}: per_sample_weights: only with mode="sum", and it is {self.mode!r}')
        if weights is not None and weights.shape != ids.shape:
            raise InvalidTensor(
                f"{where}: per_sample_weights: shape must be {tuple(ids.shape)}, as that of ids, got {tuple(weights.shape)}"
            )

    @override
    def output(self, rows: Rows | torch.Tensor, found: Wanted, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        offsets, weights = (*more, None, None)[:2]
        places = torch.from_numpy(found.distinct.inverse).view(ids.shape).to(self.handle.device)
        return functional.embedding_bag(
            places,
            self.tracked(torch.as_tensor(rows), found, is_expanded=False),
            None if offsets is None else offsets.to(places.device, places.dtype),
            mode=self.mode,
            per_sample_weights=None if weights is None else weights.to(places.device, self.handle.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding,
        )

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _are_offsets(offsets: torch.Tensor, ids: int) -> bool:
    """True if these are valid beginnings of bags. With some invalid ones torch itself reads beyond its memory."""
    if offsets.dim() != 1 or not len(offsets):
        return offsets.dim() == 1 and ids == 0
    begins = offsets.cpu()
    return bool(begins[0] == 0 and begins[-1] <= ids and (begins[1:] >= begins[:-1]).all())


class EmbeddingCollection(torch.nn.ModuleDict):
    """Embeddings by name of a feature. They are looked up together, in one round trip per shard for all of their tables.

        embeddings = psd.EmbeddingCollection({"user": psd.Embedding("user", 64), "seen": psd.EmbeddingBag("item", 64)})
        rows = embeddings({"user": users, "seen": (items, offsets)})  # {"user": (n, 64), "seen": (n, 64)}

    Args:
        modules: an Embedding or EmbeddingBag for each feature; features may share a module, or a table.
    """

    def __init__(self, modules: Mapping[str, TableModule]) -> None:
        for feature, module in modules.items():
            if not isinstance(module, TableModule):
                raise TypeError(f"modules[{feature!r}]: expected an Embedding or an EmbeddingBag, got {module!r}")
        super().__init__(modules)

    @uncompiled
    def forward(self, ids: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The outputs by feature. ids: ids by feature; for a bag also a tuple, such as (ids, offsets).

        Raises:
            InvalidRequest: there is no such feature. Other errors as Embedding.
        """
        return dict(zip(ids, look_up(self._lookups(ids)), strict=True))

    @uncompiled
    def prefetch(self, ids: Mapping[str, Any]) -> None:
        """Fetch the rows of the next forward pass in the background. ids: as in the forward pass."""
        found = [(module, module.wanted(arguments[0])) for module, arguments in self._lookups(ids)]
        for source, numbers in _by_source(found):
            source.prefetch([found[number] for number in numbers])

    def _lookups(self, ids: Mapping[str, Any]) -> list[tuple[TableModule, tuple[Any, ...]]]:
        for feature in ids:
            if feature not in self:
                raise InvalidRequest(f"ids: there is no feature {feature!r}; there are {', '.join(self)}")
        return [
            (cast(TableModule, self[feature]), given if isinstance(given, tuple) else (given,))
            for feature, given in ids.items()
        ]


def look_up(lookups: Sequence[tuple[TableModule, tuple[Any, ...]]]) -> list[torch.Tensor]:
    """The outputs of some modules for their arguments; all rows of a job are pulled in one round trip."""
    found = []
    for module, (ids, *more) in lookups:
        found.append((module, module.wanted(ids)))
        module.check(ids, *more)
    pulled: dict[int, Rows | torch.Tensor] = {}
    for source, numbers in _by_source(found):
        pulled.update(zip(numbers, source.pull([found[number] for number in numbers]), strict=True))
    return [
        module.output(pulled[number], place, *arguments)
        for number, ((module, arguments), (_, place)) in enumerate(zip(lookups, found, strict=True))
    ]


def _by_source(lookups: Sequence[tuple[TableModule, Wanted]]) -> list[tuple[RowSource, list[int]]]:
    """The sources of some lookups' rows, each with the numbers of its lookups."""
    found: dict[int, tuple[RowSource, list[int]]] = {}
    for number, (module, _) in enumerate(lookups):
        found.setdefault(id(module.source), (module.source, []))[1].append(number)
    return list(found.values())


def table_modules(model: torch.nn.Module) -> list[TableModule]:
    """The embeddings in a model."""
    return [module for module in model.modules() if isinstance(module, TableModule)]
