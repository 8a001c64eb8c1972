"""Sparse tables in the dict face: their declaration, their rows by id, and ids for what is no number.

Checks names, ids, shapes and dtypes, all of them before anything is sent. Must not know shards, sessions or stores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse, whole_number
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.tables import SparseTableSpec
from psd_client.param_groups import ParamGroups
from psd_client.tensors import as_array
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.rows import Gradients
from psd_core.initial import Constant, Initial, Normal, TruncatedNormal, Uniform, Zeros
from psd_core.optimizer import Optimizer
from psd_core.row_rules import RowwiseAdagrad

__all__ = [
    "Constant",
    "DeclaredTable",
    "Normal",
    "RowwiseAdagrad",
    "Table",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "hash_ids",
]


@dataclass(frozen=True)
class Table:
    """Declaration of a sparse table: rows of `dim` numbers by 64-bit id, of which there may be any number.

    An id that nobody has trained has its initial values, and takes no memory.

    Args:
        name: unique among the job's tables; with `seed` it determines initial values.
        dim: numbers of a row.
        optimizer: the update rule: an elementwise one, RowwiseAdagrad, or CustomRule. Tables that are given the same object
            share one entry of `param_groups`.
        init: initial values: Zeros(), Constant(value), Uniform(low, high), Normal(std, mean=0) or TruncatedNormal(std).
        seed: from 0 to 2**64 - 1.
        dtype: in which values are stored: "float32", or "bfloat16", rounded stochastically.
        updates: "lazy": a row rests in steps that do not touch it; or "catch_up": weight decay, momentum and the like come out
            as under the dense rule.
        admit_after: n: an id gets a row with its n-th gradient; those before are counted and dropped.
        admit_probability: chance that a gradient counts for `admit_after`, above 0 and at most 1.
        expire_steps, expire_seconds: a row that nobody has used for so long is removed; 0: never. One of the two. Without
            rounds a step is as many pushes as there are workers. Seconds are the shards' own: no run has the bits of another,
            with aggregation="exact" neither.
        max_rows: limit of rows, of all shards together; 0: as many as the shards' memory allows.
        at_limit: "evict": rows that were not used for long make room; or "refuse": gradients for new rows are counted and
            dropped.

    Raises:
        InvalidRequest: a value is wrong; the message names it.
        TypeError: `optimizer` is not a rule of psd_client.
    """

    name: str
    dim: int
    optimizer: Optimizer
    init: Initial = Zeros()  # noqa: RUF009 - it is frozen
    seed: int = 0
    dtype: str = "float32"
    updates: str = "lazy"
    admit_after: int = 1
    admit_probability: float = 1.0
    expire_steps: int = 0
    expire_seconds: int = 0
    max_rows: int = 0
    at_limit: str = "evict"

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            refuse(TypeError, f"table {self.name!r}: optimizer", "one of psd_client's, such as Adagrad(lr=...)", self.optimizer)
        self.spec(0)

    def spec(self, group: int) -> SparseTableSpec:
        """The table as a job declares it. group: index of the group of its rule."""

        def whole(name: str) -> int:
            return whole_number(InvalidRequest, f"table {self.name!r}: {name}", getattr(self, name))

        return SparseTableSpec(
            name=self.name,
            dim=whole("dim"),
            group=group,
            init=self.init,
            seed=whole("seed"),
            dtype=self.dtype,
            updates=self.updates,
            admit_after=whole("admit_after"),
            admit_probability=self.admit_probability,
            expire_steps=whole("expire_steps"),
            expire_s=whole("expire_seconds"),
            rows_max=whole("max_rows"),
            at_limit=self.at_limit,
        )


class DeclaredTable:
    """A table of the job, through which a worker reads and trains its rows; an item of `ParameterServer.tables`.

    Attributes:
        name: as declared. dim: numbers of a row.
    """

    def __init__(self, worker: FlatCalls, index: int, spec: SparseTableSpec, groups: ParamGroups) -> None:
        """Take a declared table; not for programs."""
        self.name = spec.name
        self.dim = spec.dim
        self._worker = worker
        self._index = index
        self._spec = spec
        self._groups = groups

    @property
    def group(self) -> dict[str, Any]:
        """The table's entry of `ParameterServer.param_groups`: `ps.tables["user"].group["lr"] = 0.01` holds from the next
        push."""
        return self._groups.groups[self._spec.group]

    def pull(self, ids: Any, *, counts_no_use: bool = False) -> NDArray[np.float32]:
        """Fetch the rows of ids; in synchronous jobs after the round of this worker's last push.

        Args:
            ids: of any shape, int64 or uint64; narrower whole numbers and lists of them are converted. An id of int64 is that
                of uint64 with the same bits. Each distinct one travels once.
            counts_no_use: for evaluation: the rows are not marked as used, neither for expiry nor for eviction.

        Returns:
            A new float32 array of shape `(*ids.shape, dim)`. This makes no row: one that is not there has its initial values.

        Raises:
            InvalidTensor: the ids are no whole numbers.
            WaitTimeout, ShardUnavailable, SessionFenced, ShardRestarted: as `ParameterServer.pull`.
        """
        return self._worker.pull_rows({self._index: as_row_ids("ids", ids)}, counts_no_use=counts_no_use)[self._index]

    def prefetch(self, ids: Any) -> None:
        """Have the rows of ids come with the next `push_pull`, in its round trip: those of the next batch, say.

        `pull` of the same ids, after it, returns them without another round trip, as they were when it ended. Whatever does not
        fit, and all rows with exact aggregation, `pull` fetches as ever. Sends nothing.

        Args:
            ids: as in `pull`.

        Raises:
            InvalidTensor: the ids are no whole numbers.
        """
        self._worker.prefetch_rows({self._index: as_row_ids("ids", ids)})

    def push(self, ids: Any, grads: Any, weight: float = 1) -> None:
        """Send gradients of rows as a whole step of this worker's clock, in which no other table and no tensor has a gradient.

        `ParameterServer.push_pull(grads, tables={...})` makes one step of several.

        Args:
            ids: as in `pull`; gradients of repeated ones are summed.
            grads: `(*ids.shape, dim)` float32 or float16, which travels as it is.
            weight: samples behind them, for `reduce="mean"`. A worker that sends no gradient for a row counts as zero there.

        Raises:
            InvalidTensor, NonFiniteGradient, InvalidRequest: an argument is wrong; nothing was sent.
            WaitTimeout, ShardUnavailable, SessionFenced, ShardRestarted: as `ParameterServer.push`.
        """
        rows = {self._index: _row_gradients("ids", "grads", self._spec, ids, grads)}
        with self._worker.operation("push"):
            self._worker.declared.confirm()
            present = np.zeros(len(self._worker.gradients.views), np.bool_)
            self._worker.declared.push(self._groups.scalars(), weight, present, rows)


_IDS = (np.dtype(np.int64), np.dtype(np.uint64))
_GRADIENTS = (np.dtype(np.float32), np.dtype(np.float16))


def gradients_of(specs: Sequence[SparseTableSpec], tables: Any) -> Gradients:
    """The gradients of rows, by index, of {name: (ids, gradients)}.

    Raises:
        InvalidTensor: an unknown name, a wrong shape or a wrong dtype.
    """
    if not isinstance(tables, (dict, Mapping)):
        refuse(InvalidTensor, "tables", 'pairs by name, such as {"user": (ids, grads)}', tables)
    index = {spec.name: number for number, spec in enumerate(specs)}
    found = {}
    for name, pair in tables.items():
        if name not in index:
            raise InvalidTensor(f"tables: no table {name!r} was declared; there are {', '.join(index) or 'none'}")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            refuse(InvalidTensor, f"tables[{name!r}]", "a pair (ids, grads)", pair)
        what = f"tables[{name!r}]"
        found[index[name]] = _row_gradients(f"{what}[0]", f"{what}[1]", specs[index[name]], *pair)
    return found


def as_row_ids(what: str, ids: Any) -> NDArray[Any]:
    """Ids as an int64 or uint64 array of their shape. Raises InvalidTensor for other than whole numbers of 64 bits."""
    array = ids if type(ids) is np.ndarray else as_array(what, ids)
    if array.dtype in _IDS:
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    # NumPy makes floats of an empty list, and of a list with numbers on both sides of 2**63.
    if not hasattr(ids, "dtype") and array.dtype.kind in "fO":
        numbers = np.asarray(ids, object).reshape(-1).tolist()
        if all(isinstance(number, (int, np.integer)) and -(1 << 63) <= number < 1 << 64 for number in numbers):
            return np.array([int(number) % (1 << 64) for number in numbers], np.uint64).reshape(array.shape)
    hint = "; psd_client.hash_ids makes ids of strings" if array.dtype.kind in "SU" else ""
    raise InvalidTensor(f"{what}: dtype must be int64 or uint64, got {array.dtype}{hint}")


def _row_gradients(
    of_ids: str, of_grads: str, spec: SparseTableSpec, ids: Any, grads: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    checked = as_row_ids(of_ids, ids)
    array = grads if type(grads) is np.ndarray else as_array(of_grads, grads, np.float32)
    shape = (*checked.shape, spec.dim)
    if not array.size and not hasattr(grads, "dtype"):  # an empty list has no shape of its own
        array = array.reshape(array.shape if checked.size else shape)
    if array.shape != shape:
        raise InvalidTensor(
            f"{of_grads}: shape must be {shape}, that of the ids and the dim of table {spec.name!r}, got {array.shape}"
        )
    if array.dtype not in _GRADIENTS:
        raise InvalidTensor(f"{of_grads}: dtype must be float32 or float16, got {array.dtype}; convert it with .astype()")
    return checked, array


def hash_ids(values: Any, seed: int = 0) -> NDArray[np.uint64]:
    """64-bit ids of strings or bytes, the same on every machine.

    An id is the BLAKE2b digest of the bytes, or of the string in UTF-8, with 8 bytes, read as a little-endian number. The salt
    is the seed as 16 bytes, little-endian. Among 100 million strings some two have the same id with a probability of 0.03 %.

    Args:
        values: a string, bytes, or a list, a tuple or an array of them.
        seed: from 0 to 2**64 - 1.

    Returns:
        Array (n,) of uint64; of the array's shape; () for one value.

    Raises:
        InvalidTensor: a value is neither. InvalidRequest: the seed is out of range.
    """
    if not 0 <= whole_number(InvalidRequest, "seed", seed) < 1 << 64:
        raise InvalidRequest(f"seed: must be from 0 to 2**64 - 1, got {seed}")
    is_one = isinstance(values, (str, bytes))
    if not is_one and not isinstance(values, Iterable):
        refuse(InvalidTensor, "values", "strings or bytes", values)
    flat = [values] if is_one else values.reshape(-1).tolist() if isinstance(values, np.ndarray) else list(values)
    salt = int(seed).to_bytes(16, "little")
    digests = []
    for value in flat:
        if not isinstance(value, (str, bytes)):
            refuse(InvalidTensor, "values", "strings or bytes", value)
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        digests.append(hashlib.blake2b(data, digest_size=8, salt=salt).digest())
    ids = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    return ids.reshape(() if is_one else values.shape if isinstance(values, np.ndarray) else (len(flat),))
