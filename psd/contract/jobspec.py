"""The job spec: the workers' declaration, as frozen values that are checked when they are made.

Converts it to and from its message, and names the first difference between two specs. Must not know limits of shards
(spec_limits.py), where tensors are stored (layout.py) or how rules compute (psd/state/aggregation/rules.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from psd.contract.compression import NONE, Compression
from psd.contract.consistency import SYNC, Consistency
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.merges import HELOCO, RDA, check_merges
from psd.contract.printable import is_printable, utf8_size
from psd.contract.publications import check_terms
from psd.contract.rules import BUFFERS, PUBLISHED, STATIC, TABLE_RULES, RuleInfo, rule_info
from psd.contract.staleness import check_staleness
from psd.contract.tables import SparseTableSpec
from psd.v1 import job_pb2
from psd_core.optimizer import FLOAT32_MAX

NAME_BYTES_MAX = 4096  # highest --max-name-bytes; shards accept 256 by default
GROUPS_MAX = 1024
GROUP_ENTRIES_MAX = 64  # flags, constants, slots or scalars of one group
DIMENSIONS_MAX = 64  # NumPy's own limit

DTYPES = {
    "float32": job_pb2.DTYPE_FLOAT32,
    "float64": job_pb2.DTYPE_FLOAT64,
    "float16": job_pb2.DTYPE_FLOAT16,
    "bfloat16": job_pb2.DTYPE_BFLOAT16,
}
BUFFER_DTYPES = DTYPES | {
    "int64": job_pb2.DTYPE_INT64,
    "int32": job_pb2.DTYPE_INT32,
    "int16": job_pb2.DTYPE_INT16,
    "int8": job_pb2.DTYPE_INT8,
    "uint8": job_pb2.DTYPE_UINT8,
    "bool": job_pb2.DTYPE_BOOL,
}
_DTYPE_NAMES = {number: name for name, number in BUFFER_DTYPES.items()}
_MASTER_DTYPES = {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}

REDUCTIONS = {"mean": job_pb2.REDUCTION_MEAN, "sum": job_pb2.REDUCTION_SUM}
_REDUCTION_NAMES = {number: name for name, number in REDUCTIONS.items()}

AGGREGATIONS = {"fast": job_pb2.AGGREGATION_FAST, "exact": job_pb2.AGGREGATION_EXACT}
_AGGREGATION_NAMES = {number: name for name, number in AGGREGATIONS.items()} | {job_pb2.AGGREGATION_UNSPECIFIED: "fast"}

NAN_POLICIES = {"refuse": job_pb2.NAN_POLICY_REFUSE, "skip": job_pb2.NAN_POLICY_SKIP, "allow": job_pb2.NAN_POLICY_ALLOW}
_NAN_POLICY_NAMES = {number: name for name, number in NAN_POLICIES.items()} | {job_pb2.NAN_POLICY_UNSPECIFIED: "refuse"}

_WORDS = {
    "world_size": "world_size",
    "consistency": "consistency",
    "quorum": "quorum",
    "reduction": "reduce",
    "aggregation": "aggregation",
    "grace": "grace",
    "sample": "sample",
    "clip_norm": "clip_norm",
    "nan_policy": "nan_policy",
    "compression": "compression",
}
"""Names of the fields of a JobSpec in workers' programs."""


@dataclass(frozen=True)
class TensorSpec:
    """One dense named tensor.

    Attributes:
        dtype: a key of DTYPES; for buffers and published tensors, of BUFFER_DTYPES. group: index of its group.
        aliases: other names, which an export lists. They may differ between workers.
        merge: how a round's gradients of it become one: as the job's reduction says, "", by norm and direction, "rda", or
            corrected by the rule's momentum, "heloco".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: int = 0
    aliases: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    merge: str = ""

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar, 0 if any dimension is 0."""
        return math.prod(self.shape)

    @property
    def master_dtype(self) -> str:
        """The dtype of its values on shards and in frames: float32 for a dtype of 16 bits, uint8 for bool."""
        return _MASTER_DTYPES.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class GroupSpec:
    """Tensors updated by one rule.

    Attributes:
        rule: name of a rule, or import path of a user's own. flags: sorted. constants: in the order of RuleInfo.constants.
        slots, scalars: names, only for a user's own rule, whose constants are the initial values of the slots.
        staleness: how the age of gradients counts in async and ssp: "lr"; or not at all: "".
    """

    rule: str = "sgd"
    flags: tuple[str, ...] = ()
    constants: tuple[float, ...] = ()
    slots: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    staleness: str = ""

    @functools.cached_property
    def info(self) -> RuleInfo:
        """Facts of the rule; InvalidRequest if there is no such rule."""
        return rule_info(self.rule, slots=self.slots, scalars=self.scalars)

    def differences(self, other: GroupSpec) -> Iterator[tuple[str, object, object]]:
        """Properties that can differ from another group, each with both values; the optimizer comes first."""
        yield "optimizer", self.rule, other.rule
        for flag in sorted({*self.flags, *other.flags}):
            yield flag, "on" if flag in self.flags else "off", "on" if flag in other.flags else "off"
        for field in ("slots", "scalars", "staleness"):
            yield field, getattr(self, field) or "none", getattr(other, field) or "none"
        yield from zip(self.info.constants, self.constants, other.constants, strict=True)

    @property
    def is_static(self) -> bool:
        """True if nobody ever pushes to the group."""
        return self.rule in (STATIC.name, BUFFERS.name)

    @property
    def is_of_buffers(self) -> bool:
        """True if workers compute the group's values themselves; these may be of any dtype, and NaN."""
        return self.rule == BUFFERS.name

    @property
    def is_published(self) -> bool:
        """True if each push sets the group's values, which may be of any dtype."""
        return self.rule == PUBLISHED.name

    @property
    def is_layerwise(self) -> bool:
        """True if an update depends on norms over whole tensors."""
        return self.info.row.is_layerwise


@dataclass(frozen=True)
class JobSpec:
    """The declaration of a job: tensors, rules, workers, consistency. Raises InvalidRequest or InvalidTensor if it is wrong.

    Attributes:
        consistency, reduction, quorum, aggregation, clip_norm, nan_policy: as JobKeywords say, but the quorum of a job with
            rounds is always a number, and a clip_norm of 0 is none.
        grace: seconds for which a round waits on after its quorum; infinity: as JobKeywords say of "auto".
        sample: share of the workers present that takes part in a round; 0: all of them.
        tables: sparse tables; a group has either tensors or tables.
        compression: how numbers travel.
    """

    world_size: int
    tensors: tuple[TensorSpec, ...]
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    consistency: Consistency = SYNC
    reduction: str = "mean"
    quorum: int = 0
    aggregation: str = "fast"
    clip_norm: float = 0.0
    nan_policy: str = "refuse"
    grace: float = 0.0
    sample: float = 0.0
    tables: tuple[SparseTableSpec, ...] = ()
    compression: Compression = NONE

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidRequest(f"world_size: must be at least 1, got {self.world_size}")
        if self.quorum and not self.consistency.has_rounds:
            raise InvalidRequest(f"quorum: is {self.quorum}, but only sync has rounds; the mode is {self.consistency}")
        if not 0 <= self.quorum <= self.world_size:
            raise InvalidRequest(f"quorum: must be 1 to world_size ({self.world_size}), got {self.quorum}")
        if self.consistency.has_rounds and self.quorum == 0:
            object.__setattr__(self, "quorum", self.world_size)
        if self.reduction not in REDUCTIONS:
            raise InvalidRequest(f"reduction: must be one of {sorted(REDUCTIONS)}, got {self.reduction!r}")
        if self.aggregation not in AGGREGATIONS:
            raise InvalidRequest(f"aggregation: must be one of {sorted(AGGREGATIONS)}, got {self.aggregation!r}")
        if self.aggregation == "exact" and not self.consistency.has_rounds:
            raise InvalidRequest(f"aggregation: exact needs rounds, and only sync has them; the mode is {self.consistency}")
        if not (1 <= len(self.groups) <= GROUPS_MAX or self.is_empty):
            raise InvalidRequest(f"groups: there must be 1 to {GROUPS_MAX}, got {len(self.groups)}")
        for group in self.groups:
            rule = group.info
            check_staleness(group.staleness, rule)
            rule.check_flags(group.flags)
            rule.check_constants(group.constants)
            if group.staleness and self.consistency.has_rounds:
                raise InvalidRequest(
                    f"groups.staleness: is {group.staleness!r}, but under sync no gradient is stale; it is for async and ssp"
                )
        self._check_norms()
        self._check_grace()
        self._check_sample()
        if self.is_publication:
            check_terms(self)
        if not self.tensors and not self.tables and not self.is_empty:
            raise InvalidTensor("tensors: there must be at least one parameter, or a table")
        seen: set[str] = set()
        for tensor in self.tensors:
            self._check_tensor(tensor)
            for name in (tensor.name, *tensor.aliases):
                if name in seen:
                    raise InvalidTensor(f"tensors: the name {name!r} is given twice")
                seen.add(name)
        self._check_tables()
        check_merges(self)

    @property
    def is_publication(self) -> bool:
        """True if each round sets all tensors (publications.py): those of a group to the values of the worker whose rank is the
        group's index, modulo the number of workers."""
        return any(group.is_published for group in self.groups)

    @property
    def is_empty(self) -> bool:
        """True if nothing is trained: the workers use vectors, and have declared nothing so far."""
        return not self.groups and not self.tensors and not self.tables

    def _check_tables(self) -> None:
        of_tensors = {tensor.group for tensor in self.tensors}
        seen: set[str] = set()
        for table in self.tables:
            where = f"table {table.name!r}"
            if table.name in seen:
                raise InvalidRequest(f"tables: the name {table.name!r} is given twice")
            seen.add(table.name)
            if not 0 <= table.group < len(self.groups):
                raise InvalidRequest(f"{where}: group {table.group} is not below {len(self.groups)}")
            if table.group in of_tensors:
                raise InvalidRequest(f"{where}: group {table.group} has tensors; a group has either tensors or tables")
            group = self.groups[table.group]
            if group.is_static or group.is_layerwise:
                why = "it needs the norm of a whole tensor, and a table has rows that nobody has stored; " * group.is_layerwise
                raise InvalidRequest(f"{where}: rule {group.rule!r} is none for tables: {why}elementwise ones are")
            if group.info.is_custom and table.updates != "lazy":
                raise InvalidRequest(f"{where}: updates: must be lazy with a rule of your own, got {table.updates!r}")
        for tensor in self.tensors:
            if self.groups[tensor.group].rule in TABLE_RULES:
                raise InvalidTensor(f"tensor {tensor.name!r}: rule {self.groups[tensor.group].rule!r} is for tables only")

    @property
    def stored_groups(self) -> tuple[GroupSpec, ...]:
        """The groups without what may differ from a checkpoint's: the staleness, and which worker's buffers are kept."""
        return tuple(
            dataclasses.replace(group, staleness="", flags=() if group.is_of_buffers else group.flags) for group in self.groups
        )

    def _check_norms(self) -> None:
        if not 0 <= self.clip_norm <= FLOAT32_MAX:  # also refuses NaN
            raise InvalidRequest(f"clip_norm: must be finite and >= 0 (0: no clipping), got {self.clip_norm}")
        if self.nan_policy not in NAN_POLICIES:
            raise InvalidRequest(f"nan_policy: must be one of {sorted(NAN_POLICIES)}, got {self.nan_policy!r}")
        if self.compression.push and self.nan_policy == "allow":
            raise InvalidRequest("nan_policy: allow, but compress has no form for NaN; use refuse or skip")
        self.compression.check_mode(self.consistency)
        layerwise = next((group.rule for group in self.groups if group.is_layerwise), "")
        if layerwise and not self.consistency.has_rounds:
            raise InvalidRequest(
                f"groups.rule: {layerwise} needs the norms of whole tensors, which shards know for rounds only; the mode is "
                f"{self.consistency}, not sync"
            )
        norms = "clip_norm" if self.clip_norm else f"groups.rule: {layerwise}" if layerwise else ""
        if norms and self.nan_policy == "allow":
            raise InvalidRequest(f"nan_policy: allow, but {norms} needs norms, and NaN has none; use refuse or skip")
        why = norms or ("nan_policy: skip" if self.nan_policy == "skip" else "")
        if why and self.consistency.has_rounds and self.aggregation != "exact":
            raise InvalidRequest(
                f"{why} needs aggregation exact, by which all shards agree on a round's members; it is {self.aggregation}"
            )

    def _check_grace(self) -> None:
        if not self.grace >= 0:  # also refuses NaN
            raise InvalidRequest(f"grace: must be seconds >= 0, or auto, got {self.grace}")
        if self.grace and self.aggregation != "exact":
            raise InvalidRequest(
                f"grace: is {self.grace}, but only rounds that shard 0 decides (aggregation exact) wait after their quorum"
            )

    def _check_sample(self) -> None:
        if not 0 <= self.sample <= 1:  # also refuses NaN
            raise InvalidRequest(f"sample: must be a share above 0 and at most 1, or 0 for all workers, got {self.sample}")
        if self.sample and self.aggregation != "exact":
            raise InvalidRequest(
                f"sample: is {self.sample}, but only for rounds that shard 0 decides (aggregation exact) are workers chosen"
            )

    @property
    def has_verdicts(self) -> bool:
        """True if applying a round depends on the whole gradient; see psd/contract/verdicts.py."""
        return self.consistency.has_rounds and (self.clip_norm > 0 or bool(self.ratio_tensors))

    @property
    def has_plain_tables(self) -> bool:
        """True if armed steps know all tables: psd's own rules, and rows of float32 that do not expire. Also without any."""
        return not any(
            table.expire_steps or table.expire_seconds or table.dtype != "float32" or self.groups[table.group].info.is_custom
            for table in self.tables
        )

    @cached_property
    def layerwise_tensors(self) -> tuple[int, ...]:
        """Indices of the tensors that a layer-wise rule updates."""
        return tuple(i for i, t in enumerate(self.tensors) if self.groups[t.group].is_layerwise)

    @cached_property
    def directed_tensors(self) -> tuple[int, ...]:
        """Indices of the tensors that are merged by norm and direction."""
        return tuple(i for i, t in enumerate(self.tensors) if t.merge == RDA)

    @cached_property
    def corrected_tensors(self) -> tuple[int, ...]:
        """Indices of the tensors whose gradients are corrected by the momentum."""
        return tuple(i for i, t in enumerate(self.tensors) if t.merge == HELOCO)

    @property
    def ratio_tensors(self) -> tuple[int, ...]:
        """Indices of the tensors of each of which a verdict has numbers. A job has them of one kind only."""
        return self.directed_tensors or self.corrected_tensors or self.layerwise_tensors

    def _check_tensor(self, tensor: TensorSpec) -> None:
        for field, name in (("name", tensor.name), *(("aliases", alias) for alias in tensor.aliases)):
            name_bytes = utf8_size(name)
            if not 1 <= name_bytes <= NAME_BYTES_MAX:
                raise InvalidTensor(f"tensors.{field}: must have 1 to {NAME_BYTES_MAX} bytes, got {name_bytes}: {name[:40]!r}")
            if not is_printable(name):
                raise InvalidTensor(f"tensors.{field}: {name!r} has control characters")
        if len(tensor.shape) > DIMENSIONS_MAX:
            raise InvalidTensor(
                f"tensor {tensor.name!r}: shape has {len(tensor.shape)} dimensions, the limit is {DIMENSIONS_MAX}"
            )
        if any(n < 0 for n in tensor.shape):
            raise InvalidTensor(f"tensor {tensor.name!r}: shape {tensor.shape} has a negative dimension")
        if not 0 <= tensor.group < len(self.groups):
            raise InvalidTensor(f"tensor {tensor.name!r}: group {tensor.group} is not below {len(self.groups)}")
        group = self.groups[tensor.group]
        dtypes = BUFFER_DTYPES if group.is_of_buffers or group.is_published else DTYPES
        if tensor.dtype not in dtypes:
            raise InvalidTensor(f"tensor {tensor.name!r}: dtype must be one of {sorted(dtypes)}, got {tensor.dtype!r}")

    def to_message(self) -> job_pb2.JobSpec:
        """The protobuf form."""
        message = job_pb2.JobSpec(
            world_size=self.world_size,
            quorum=self.quorum,
            reduction=REDUCTIONS[self.reduction],
            aggregation=AGGREGATIONS[self.aggregation],
            clip_norm=self.clip_norm,
            grace_s=self.grace,
            sample=self.sample,
            nan_policy=NAN_POLICIES[self.nan_policy] if self.nan_policy != "refuse" else None,  # as before the field existed
            compression=self.compression.to_message(),
        )
        self.consistency.fill(message)
        for group in self.groups:
            message.groups.add(**dataclasses.asdict(group))
        for t in self.tensors:
            dtype = BUFFER_DTYPES[t.dtype]
            message.tensors.add(name=t.name, shape=t.shape, dtype=dtype, group=t.group, aliases=t.aliases, merge=t.merge)
        message.tables.extend(table.to_message() for table in self.tables)
        return message

    @classmethod
    def from_message(cls, message: job_pb2.JobSpec) -> JobSpec:
        """Read the protobuf form; raises as the constructor does."""
        tensors = []
        for t in message.tensors:
            if t.dtype not in _DTYPE_NAMES:
                raise InvalidTensor(f"tensor {t.name!r}: unknown dtype number {t.dtype}")
            if len(t.shape) > DIMENSIONS_MAX:
                raise InvalidTensor(f"tensor {t.name!r}: shape has {len(t.shape)} dimensions, the limit is {DIMENSIONS_MAX}")
            tensors.append(TensorSpec(t.name, tuple(t.shape), _DTYPE_NAMES[t.dtype], t.group, tuple(t.aliases), t.merge))
        if message.reduction not in _REDUCTION_NAMES:
            raise InvalidRequest(f"reduction: must be mean or sum, got {message.reduction}")
        if message.aggregation not in _AGGREGATION_NAMES:
            raise InvalidRequest(f"aggregation: must be fast or exact, got {message.aggregation}")
        if message.nan_policy not in _NAN_POLICY_NAMES:
            raise InvalidRequest(f"nan_policy: must be refuse, skip or allow, got {message.nan_policy}")
        return cls(
            world_size=message.world_size,
            tensors=tuple(tensors),
            groups=tuple(
                GroupSpec(g.rule, tuple(g.flags), tuple(g.constants), tuple(g.slots), tuple(g.scalars), g.staleness)
                for g in message.groups
            ),
            consistency=Consistency.from_message(message),
            reduction=_REDUCTION_NAMES[message.reduction],
            quorum=message.quorum,
            aggregation=_AGGREGATION_NAMES[message.aggregation],
            clip_norm=message.clip_norm,
            nan_policy=_NAN_POLICY_NAMES[message.nan_policy],
            grace=message.grace_s,
            sample=message.sample,
            tables=tuple(map(SparseTableSpec.from_message, message.tables)),
            compression=Compression.from_message(message.compression),
        )

    def difference(self, other: JobSpec) -> str | None:
        """The first difference between this spec, the job's, and a worker's, worded for workers; None if they are equal."""
        words = [(word, _word(getattr(self, field)), _word(getattr(other, field))) for field, word in _WORDS.items()]
        merges = (
            (f"merge of parameter {one.name!r}", one.merge or "none", another.merge or "none")
            for one, another in zip(self.tensors, other.tensors, strict=True)
        )
        stored = self._stored_differences(other, self.groups, other.groups)
        return _first_difference(chain(words, stored, merges), "the job")

    def difference_from_stored(self, other: JobSpec, checkpoint: str) -> str | None:
        """The first difference between this spec, a checkpoint's, and a worker's that is not allowed; None if there is none."""
        found = self._stored_differences(other, self.stored_groups, other.stored_groups)
        return _first_difference(found, f"checkpoint {checkpoint}")

    def _stored_differences(
        self, other: JobSpec, groups: Sequence[GroupSpec], groups_there: Sequence[GroupSpec]
    ) -> Iterator[tuple[str, object, object]]:
        """Properties of tensors, tables and groups that can differ, each with both values."""
        mine, theirs = ({tensor.name: tensor for tensor in spec.tensors} for spec in (self, other))
        for name in [*mine, *theirs]:
            yield f"parameter {name!r}", "is" if name in mine else "is not", "is" if name in theirs else "is not"
        for name, tensor in mine.items():
            for field in ("shape", "dtype"):
                yield f"{field} of parameter {name!r}", getattr(tensor, field), getattr(theirs[name], field)
        for index, (tensor, tensor_there) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            yield f"name of parameter number {index}", tensor.name, tensor_there.name
        tables, theirs_of_tables = ({table.name: table for table in spec.tables} for spec in (self, other))
        for name in [*tables, *theirs_of_tables]:
            yield f"table {name!r}", "is" if name in tables else "is not", "is" if name in theirs_of_tables else "is not"
        yield "order of the tables", list(tables), list(theirs_of_tables)
        for name, table in tables.items():
            for what, value, value_there in table.differences(theirs_of_tables[name]):
                yield f"{what} of table {name!r}", value, value_there
        yield "number of parameter groups", len(groups), len(groups_there)
        of_tables = {table.group: f"table {name!r}" for name, table in tables.items()}
        for index, (group, group_there) in enumerate(zip(groups, groups_there, strict=True)):
            for what, value, value_there in group.differences(group_there):
                yield f"{what} of {of_tables.get(index, f'parameter group {index}')}", value, value_there
        for name, tensor in mine.items():
            yield f"group of parameter {name!r}", tensor.group, theirs[name].group


def _word(value: object) -> object:
    return "none" if value == NONE else value or "none"


def _first_difference(pairs: Iterable[tuple[str, object, object]], where: str) -> str | None:
    for what, value, value_there in pairs:
        if value != value_there:
            return f"{what}: {value} in {where}, {value_there} in this worker's declaration"
    return None
