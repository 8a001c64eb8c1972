"""Sparse tables in the dict face: their declaration, their rows by id, and hashed ids for strings and bytes.

Checks all names, ids, shapes and dtypes before anything is sent. Must not know shards, sessions or stores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.arguments import refuse, whole_number
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.tables import SparseTableSpec
from psd_client.param_groups import ParamGroups
from psd_client.tensors import as_array
from psd_client.worker.exchange.sent_push import WorkerGradient
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.rows import Gradients
from psd_core.initial import Constant, Normal, TruncatedNormal, Uniform, Zeros
from psd_core.optimizer import Optimizer
from psd_core.row_rules import RowwiseAdagrad
from psd_core.table_options import TableOptions

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
class Table(TableOptions):
    """Declaration of a sparse table: any number of rows of `dim` numbers, each with a 64-bit id.

    The row of an id that nobody has trained has its initial values and takes no memory.

    Args:
        name: unique among the job's tables; determines the initial values, together with `seed`.
        dim: length of a row.
        optimizer: the update rule: an elementwise rule, RowwiseAdagrad, or CustomRule. Tables with the same optimizer object
            share one entry of `param_groups`.
        init: initial values: Zeros(), Constant(value), Uniform(low, high), Normal(std, mean=0) or TruncatedNormal(std).
        seed: from 0 to 2**64 - 1.
        dtype: dtype of stored values: "float32", or "bfloat16" with stochastic rounding.
        updates: "lazy": a row does not change in steps that do not touch it; or "catch_up": weight decay, momentum and the like
            have the same effect as under the dense rule.
        admit_after: an id gets a row with this number of gradients; the gradients before are counted and dropped.
        admit_probability: chance that a gradient counts for `admit_after`, above 0 and at most 1.
        expire_steps, expire_seconds: a row that nobody has used for this long is removed; 0: never. Set only one of the two.
            Without rounds, as many pushes as there are workers make a step. Seconds are those of each shard's clock, so two
            runs differ in their bits, even with aggregation="exact".
        max_rows: limit of the rows on all shards together; 0: as many as the shards' memory allows.
        at_limit: "evict": the rows unused for longest make room; or "refuse": gradients for new rows are counted and dropped.

    Raises:
        InvalidRequest: a value is wrong; the message names it.
        TypeError: `optimizer` is not a rule of psd_client.
    """

    optimizer: Optimizer

    @override
    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            refuse(TypeError, f"table {self.name!r}: optimizer", "one of psd_client's, such as Adagrad(lr=...)", self.optimizer)
        self.spec(0)

    def spec(self, group: int) -> SparseTableSpec:
        """The table's declaration in the job spec. group: index of the group that has its rule."""
        return SparseTableSpec.of(self, group=group)


class DeclaredTable:
    """A table of the job, with which a worker reads and trains rows; an item of `ParameterServer.tables`.

    Attributes:
        name: the declared name. dim: length of a row.
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
        """The table's entry in `param_groups`: `ps.tables["user"].group["lr"] = 0.01` takes effect at the next push."""
        return self._groups.groups[self._spec.group]

    def pull(self, ids: Any, *, counts_no_use: bool = False) -> NDArray[np.float32]:
        """Fetch the rows of ids; in a synchronous job, wait first for the round of this worker's last push.

        Args:
            ids: an array of any shape, int64 or uint64; narrower integers and lists are converted. An int64 id is the same as
                the uint64 id with the same bits. Each distinct id travels once.
            counts_no_use: for evaluation: do not mark the rows as used (for expiry and eviction).

        Returns:
            A new float32 array of shape `(*ids.shape, dim)`. No row is made: one that does not exist has its initial values.

        Raises:
            InvalidTensor: the ids are not whole numbers.
            WaitTimeout, ShardUnavailable, SessionFenced, ShardRestarted: as `ParameterServer.pull`.
        """
        return self._worker.pull_rows({self._index: as_row_ids("ids", ids)}, counts_no_use=counts_no_use)[self._index]

    def prefetch(self, ids: Any) -> None:
        """Fetch the rows of ids, such as those of the next batch, in the round trip of the next `push_pull`.

        A `pull` of the same ids after that `push_pull` returns them without another round trip, as they were when it ended.
        Rows that do not fit, and all rows with exact aggregation, are fetched by `pull` as usual. This call sends nothing.

        Args:
            ids: as in `pull`.

        Raises:
            InvalidTensor: the ids are not whole numbers.
        """
        self._worker.prefetch_rows({self._index: as_row_ids("ids", ids)})

    def push(self, ids: Any, grads: Any, weight: float = 1) -> None:
        """Send gradients of rows. This is a whole step of this worker: no other table and no tensor has a gradient in it.

        `ParameterServer.push_pull(grads, tables={...})` puts several tables and tensors into one step.

        Args:
            ids: as in `pull`; gradients of repeated ids are summed.
            grads: `(*ids.shape, dim)`, float32 or float16; float16 is sent as it is.
            weight: number of samples behind the gradients, for `reduce="mean"`. If a worker sends no gradient for a row, its
                gradient counts as zero there.

        Raises:
            InvalidTensor, NonFiniteGradient, InvalidRequest: an argument is wrong; nothing was sent.
            WaitTimeout, ShardUnavailable, SessionFenced, ShardRestarted: as `ParameterServer.push`.
        """
        rows = {self._index: _row_gradients("ids", "grads", self._spec, ids, grads)}
        with self._worker.operation("push"):
            self._worker.declared.confirm()
            present = np.zeros(len(self._worker.gradients.views), np.bool_)
            self._worker.declared.push(WorkerGradient(self._groups.scalars(), weight, present, rows))


_IDS = (np.dtype(np.int64), np.dtype(np.uint64))
_GRADIENTS = (np.dtype(np.float32), np.dtype(np.float16))


def gradients_of(specs: Sequence[SparseTableSpec], tables: Any) -> Gradients:
    """Check {name: (ids, gradients)}; return the gradients of rows by index of the table.

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
    """Ids as an int64 or uint64 array of the same shape. Raises InvalidTensor unless they are 64-bit whole numbers."""
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

    An id is the 8-byte BLAKE2b digest of the bytes, or of the string in UTF-8, read as a little-endian number. The salt is the
    seed as 16 bytes, little-endian. Among 100 million strings, two have the same id with a probability of 0.03 %.

    Args:
        values: a string or bytes; or a list, tuple or array of them.
        seed: from 0 to 2**64 - 1.

    Returns:
        An array of uint64: (n,) for a list, the shape of an array, () for one value.

    Raises:
        InvalidTensor: a value is neither a string nor bytes. InvalidRequest: the seed is out of range.
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
