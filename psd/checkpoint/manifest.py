"""The JSON documents of a checkpoint: each part's own, and the manifest that makes the checkpoint valid.

The manifest has the size and SHA-256 of each part's document; that has the size of its data file and a CRC-32 of the header
and of each record, and likewise of its rows of tables; both are sealed (sealing.py). So every byte is accounted for. A manifest
whose tables build on another checkpoint has the SHA-256 of that one's, too. The manifest is a pure function of the cut and the
parts, so that any shard may write it, or all.

Strict in what it reads: wrong content is CheckpointCorrupt, with the file's name and what is wrong; what is whole
and not known here is CheckpointUnsupported. Must not know file systems.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

import psd
from psd.checkpoint.cut import MANIFEST, STEP_MAX, Cut, data_file, part_file, rows_file, vectors_file
from psd.checkpoint.records import Record, StoredSpace, stored_spaces
from psd.checkpoint.safetensors import ITEM_BYTES
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, TABLES_VERSION, VECTORS_VERSION, seal, unseal
from psd.checkpoint.table_records import Chunk, TableRecord, problem_of
from psd.checkpoint.vector_records import VectorRun, difference_of, problem_of_vectors
from psd.contract.errors import CheckpointCorrupt, CheckpointUnsupported, PsdError
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.tables import SparseTableSpec
from psd.v1 import job_pb2
from psd.v1.job_pb2 import LearningRateScale
from psd_core.vector import VectorSpec

_IDENTITY = ("name", "run_id", "timeline", "step", "created_at", "shard_count", "layout_digest")
"""Fields on which the manifest and all parts must agree."""


@dataclass(frozen=True, eq=False)
class Part:
    """One shard's part, as its document describes it.

    Attributes:
        header_bytes: of the data file, its first 8 bytes included. records: in the order of their bytes.
        worker_clocks: by rank, as this shard knew them. client_states: opaque bytes by rank; only some shards have any.
        tables: of the job, in its order. chunks: of their rows, in the order of their bytes, `rows_bytes` in all.
        base: name of the checkpoint that those tables build on that are not full; empty: there are none.
        vectors: server-side ones. vector_runs: of their elements, in the order of the bytes, `vectors_bytes` in all.
        sessions: the number of the latest batch on these, by session.
        learning_rates: scales of the learning rate at this step and later; only shard 0 has any.
    """

    shard_index: int
    data_bytes: int
    header_bytes: int
    header_crc32: int
    records: tuple[Record, ...]
    worker_clocks: Mapping[int, int]
    client_states: Mapping[int, bytes]
    psd_version: str
    tables: tuple[TableRecord, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    rows_bytes: int = 0
    base: str = ""
    vectors: tuple[VectorSpec, ...] = ()
    vector_runs: tuple[VectorRun, ...] = ()
    vectors_bytes: int = 0
    sessions: Mapping[int, int] = dataclasses.field(default_factory=dict)
    learning_rates: tuple[LearningRateScale, ...] = ()


@dataclass(frozen=True, eq=False)
class Manifest:
    """A checkpoint, read, with its parts.

    Attributes:
        created_at: seconds since 1970. spaces: the job's. records: of each space, by offset; they tile it.
        worker_clocks: by rank, the smallest that any shard knew. client_states: opaque bytes by rank.
        nbytes: of all files. base: the checkpoint that its tables build on; None: it is whole by itself.
    """

    name: str
    run_id: str
    timeline: int
    step: int
    created_at: float
    shard_count: int
    psd_version: str
    spec: JobSpec
    worker_clocks: Mapping[int, int]
    client_states: Mapping[int, bytes]
    parts: tuple[Part, ...]
    spaces: tuple[StoredSpace, ...]
    records: tuple[tuple[Record, ...], ...]
    nbytes: int
    base: Manifest | None = None

    @property
    def learning_rates(self) -> tuple[LearningRateScale, ...]:
        """Scales of the learning rate at this step and later, as an operator has ordered."""
        return self.parts[0].learning_rates

    @property
    def row_count(self) -> int:
        """Number of rows of all tables."""
        return sum(record.rows for part in self.parts for record in part.tables)

    @property
    def vectors(self) -> tuple[VectorSpec, ...]:
        """The server-side vectors."""
        return self.parts[0].vectors


# -- writing --


def _head(cut: Cut, psd_version: str, *, has_vectors: bool = False) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VECTORS_VERSION if has_vectors else TABLES_VERSION if cut.spec.tables else FORMAT_VERSION,
        "psd_version": psd_version,
        "name": cut.name,
        "run_id": cut.run_id,
        "timeline": cut.timeline,
        "step": cut.step,
        "created_at": cut.created_at,
        "shard_count": cut.shard_count,
        "layout_digest": cut.layout.digest.hex(),
    }


def _by_rank(values: Mapping[int, Any]) -> dict[str, Any]:
    return {
        str(rank): base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for rank, value in sorted(values.items())
    }


def part_document(cut: Cut, part: Part) -> bytes:
    """The text of a part's own manifest."""
    return seal(
        {
            **_head(cut, part.psd_version, has_vectors=bool(part.vectors)),
            "shard_index": part.shard_index,
            "data": {
                "file": data_file(part.shard_index, cut.shard_count),
                "nbytes": part.data_bytes,
                "header_bytes": part.header_bytes,
                "header_crc32": part.header_crc32,
            },
            "worker_clocks": _by_rank(part.worker_clocks),
            "client_states": _by_rank(part.client_states),
            **({"learning_rates": [_rate_document(rate) for rate in part.learning_rates]} if part.learning_rates else {}),
            "blocks": [dict(zip(Record._fields[1:], record[1:], strict=True)) for record in part.records],
            **(_tables_document(cut, part) if cut.spec.tables else {}),
            **(_vectors_document(cut, part) if part.vectors else {}),
        }
    )


def _tables_document(cut: Cut, part: Part) -> dict[str, Any]:
    return {
        "base": part.base,
        "rows_file": {"file": rows_file(part.shard_index, cut.shard_count), "nbytes": part.rows_bytes},
        "tables": [record._asdict() for record in part.tables],
        "chunks": [chunk._asdict() for chunk in part.chunks],
    }


def _vectors_document(cut: Cut, part: Part) -> dict[str, Any]:
    return {
        "vectors_file": {"file": vectors_file(part.shard_index, cut.shard_count), "nbytes": part.vectors_bytes},
        "vectors": [spec._asdict() for spec in part.vectors],
        "vector_runs": [run._asdict() for run in part.vector_runs],
        "vector_batches": _by_rank(part.sessions),
    }


def _rate_document(rate: LearningRateScale) -> dict[str, Any]:
    return {"clock": rate.clock, "scale": rate.scale}


def manifest_document(cut: Cut, parts: Sequence[Part], documents: Sequence[bytes], base: BaseEntry | None = None) -> bytes:
    """The text of the manifest, from the parts and their documents as stored, in the order of the shards.

    Args:
        base: that the parts build on, if any do.
    """
    spec = cut.spec
    clocks: dict[int, int] = {}
    states: dict[int, bytes] = {}
    for part in parts:
        for rank, clock in part.worker_clocks.items():
            clocks[rank] = min(clock, clocks.get(rank, clock))
        for rank, state in part.client_states.items():
            states.setdefault(rank, state)
    return seal(
        {
            **_head(cut, parts[0].psd_version, has_vectors=bool(parts[0].vectors)),
            "parts": [
                {
                    "file": part_file(part.shard_index, cut.shard_count),
                    "nbytes": len(document),
                    "sha256": hashlib.sha256(document).hexdigest(),
                    "data_file": data_file(part.shard_index, cut.shard_count),
                    "data_bytes": part.data_bytes,
                    **({"rows_bytes": part.rows_bytes} if spec.tables else {}),
                    **({"vectors_bytes": part.vectors_bytes} if part.vectors else {}),
                }
                for part, document in zip(parts, documents, strict=True)
            ],
            "worker_clocks": _by_rank(clocks),
            "client_states": _by_rank(states),
            # The job in words, for people; what holds is job_spec, a psd.v1.JobSpec.
            "job": {
                "world_size": spec.world_size,
                "consistency": str(spec.consistency),
                "quorum": spec.quorum,
                "reduction": spec.reduction,
            },
            "groups": [_group_document(group) for group in spec.groups],
            "spaces": _spaces_document(stored_spaces(spec)),
            "tensors": [_tensor_document(tensor) for tensor in spec.tensors],
            **({"tables": [_table_document(table) for table in spec.tables]} if spec.tables else {}),
            **({"base": base._asdict()} if base else {}),
            "job_spec": base64.b64encode(spec.to_message().SerializeToString(deterministic=True)).decode(),
        }
    )


def _tensor_document(tensor: TensorSpec) -> dict[str, Any]:
    fields = dataclasses.asdict(tensor)
    return {name: value for name, value in fields.items() if value or name != "aliases"}


def _table_document(table: SparseTableSpec) -> dict[str, Any]:
    return {**dataclasses.asdict(table), "init": table.init.to_json()}


def _group_document(group: GroupSpec) -> dict[str, Any]:
    """The document of a group's rule; optional facts appear only where they apply."""
    fields = dataclasses.asdict(group)
    return {name: value for name, value in fields.items() if value or name in ("rule", "flags", "constants")}


def _spaces_document(spaces: Iterable[StoredSpace]) -> list[dict[str, Any]]:
    return [{"group": s.space.group, "dtype": s.space.dtype.name, "size": s.space.size, "slots": list(s.slots)} for s in spaces]


# -- reading --


def parse_part(data: bytes, file: str, identity: Mapping[str, Any], shard_index: int) -> Part:
    """Read a part's document, which must belong to the checkpoint with that identity."""
    document = unseal(data, file)
    try:
        _check_identity(document, file, {**identity, "shard_index": shard_index})
        return Part(
            shard_index=shard_index,
            data_bytes=document["data"]["nbytes"],
            header_bytes=document["data"]["header_bytes"],
            header_crc32=document["data"]["header_crc32"],
            records=tuple(Record(part=shard_index, **block) for block in document["blocks"]),
            worker_clocks=_clocks(document),
            client_states=_states(document),
            psd_version=document["psd_version"],
            tables=tuple(TableRecord(**record) for record in document.get("tables", ())),
            chunks=tuple(Chunk(**chunk) for chunk in document.get("chunks", ())),
            rows_bytes=document["rows_file"]["nbytes"] if "rows_file" in document else 0,
            base=document.get("base", ""),
            vectors=tuple(VectorSpec(**spec) for spec in document.get("vectors", ())),
            vector_runs=tuple(VectorRun(**run) for run in document.get("vector_runs", ())),
            vectors_bytes=document["vectors_file"]["nbytes"] if "vectors_file" in document else 0,
            sessions={int(session): int(number) for session, number in document.get("vector_batches", {}).items()},
            learning_rates=tuple(LearningRateScale(**rate) for rate in document.get("learning_rates", ())),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{file}: has unexpected contents: {error!r}") from error


def identity_of(cut: Cut) -> dict[str, Any]:
    """The fields that every part of a cut must share."""
    head = _head(cut, "")
    return {key: head[key] for key in _IDENTITY}


class PartEntry(NamedTuple):
    """A part as the manifest lists it: its document's name, size and SHA-256, its data file's name and size, the sizes
    of its rows and of its vectors."""

    file: str
    nbytes: int
    sha256: str
    data_file: str
    data_bytes: int
    rows_bytes: int | None = None
    vectors_bytes: int | None = None

    @property
    def all_bytes(self) -> int:
        """Bytes of all files of the part."""
        return self.nbytes + self.data_bytes + (self.rows_bytes or 0) + (self.vectors_bytes or 0)


class BaseEntry(NamedTuple):
    """The checkpoint that another one's tables build on: its name, and the SHA-256 of its manifest."""

    name: str
    sha256: str


class ManifestDocument:
    """A manifest before its parts have been read.

    Attributes:
        identity: what each part must say. parts: where they are, in the order of the shards.
        base: what its tables build on, if anything.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.file = f"{name}/{MANIFEST}"
        self.nbytes = len(data)
        self._document = unseal(data, self.file)
        try:
            _check_identity(self._document, self.file, {"name": name})
            if not 0 <= self._document["step"] <= STEP_MAX:
                raise CheckpointCorrupt(f"{self.file}: step: expected 0 to {STEP_MAX}, got {self._document['step']}")
            self.identity = {key: self._document[key] for key in _IDENTITY}
            self.parts = [PartEntry(**entry) for entry in self._document["parts"]]
            base = self._document.get("base")
            self.base = BaseEntry(**base) if base else None
            if len(self.parts) != self._document["shard_count"]:
                raise CheckpointCorrupt(f"{self.file}: has {len(self.parts)} parts of {self._document['shard_count']}")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{self.file}: has unexpected contents: {error!r}") from error

    def with_parts(self, parts: Sequence[Part], base: Manifest | None = None) -> Manifest:
        """The manifest; CheckpointCorrupt unless the parts, with their base, hold all of the job, each element once."""
        document = self._document
        try:
            message = job_pb2.JobSpec.FromString(base64.b64decode(document["job_spec"], validate=True))
            spec = JobSpec.from_message(message)
            spaces = tuple(stored_spaces(spec))
            clocks, states = _clocks(document), _states(document)
            is_known = document["spaces"] == _spaces_document(spaces)
            records = _tiled(self.file, spaces, parts) if is_known else ()
            for part in parts:
                self._check_tables(spec, part, base)
            self._check_vectors(parts)
        except CheckpointCorrupt:
            raise
        except PsdError as error:  # the document's checksum is right
            raise CheckpointUnsupported(
                f"{self.file}: psd {psd.__version__} does not know such a job, which psd {document['psd_version']} has stored: "
                f"{error}"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, DecodeError) as error:
            raise CheckpointCorrupt(f"{self.file}: has unexpected contents: {error!r}") from error
        if not is_known:
            raise CheckpointUnsupported(
                f"{self.file}: was written by psd {document['psd_version']}, and psd {psd.__version__} lays such a job out "
                "differently"
            )
        return Manifest(
            **{key: document[key] for key in _IDENTITY if key != "layout_digest"},
            psd_version=document["psd_version"],
            spec=spec,
            worker_clocks=clocks,
            client_states=states,
            parts=tuple(parts),
            spaces=spaces,
            records=records,
            nbytes=self.nbytes + sum(entry.all_bytes for entry in self.parts),
            base=base,
        )

    def _check_tables(self, spec: JobSpec, part: Part, base: Manifest | None) -> None:
        where = f"{self.file}: part {part.shard_index}"
        if len(part.tables) != len(spec.tables):
            raise CheckpointCorrupt(f"{where} has {len(part.tables)} tables of {len(spec.tables)}")
        if problem := problem_of(part.tables, part.chunks, part.rows_bytes):
            raise CheckpointCorrupt(f"{where} {problem}")
        if all(record.is_full for record in part.tables):
            return
        if base is None or part.base != base.name:
            raise CheckpointCorrupt(f"{where} builds on checkpoint {part.base!r}, not on {base.name if base else 'none'!r}")
        there = base.parts[part.shard_index].tables if base.shard_count == self.identity["shard_count"] else ()
        if [(record.width, True) for record in part.tables] != [(record.width, record.is_full) for record in there]:
            raise CheckpointCorrupt(f"{where} builds on checkpoint {base.name}, which has not these tables in full")

    def _check_vectors(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for spec in part.vectors:
                spec.check()
            problem = problem_of_vectors(part.vectors, part.vector_runs, part.vectors_bytes, part.shard_index, len(parts))
            if problem:
                raise CheckpointCorrupt(f"{self.file}: part {part.shard_index} {problem}")
        if difference := difference_of([(part.vectors, part.sessions) for part in parts]):
            raise CheckpointCorrupt(f"{self.file}: its parts are of different moments: {difference}")


def _check_identity(document: Mapping[str, Any], file: str, identity: Mapping[str, Any]) -> None:
    for key, expected in identity.items():
        if document[key] != expected:
            raise CheckpointCorrupt(f"{file}: belongs to another checkpoint: {key} is {document[key]!r}, not {expected!r}")


def _clocks(document: Mapping[str, Any]) -> dict[int, int]:
    return {int(rank): int(clock) for rank, clock in document["worker_clocks"].items()}


def _states(document: Mapping[str, Any]) -> dict[int, bytes]:
    return {int(rank): base64.b64decode(state, validate=True) for rank, state in document["client_states"].items()}


def _tiled(file: str, spaces: Sequence[StoredSpace], parts: Sequence[Part]) -> tuple[tuple[Record, ...], ...]:
    """The records of each space by offset, after a check that they tile the spaces, and the data files behind their headers."""
    of_space: list[list[Record]] = [[] for _ in spaces]
    for part in parts:
        end = part.header_bytes
        for record in part.records:
            stored = spaces[record.space]
            fields = stored.fields(record.length, record.segments)
            nbytes = sum(field.length * ITEM_BYTES[field.dtype] for field in fields)
            if (record.start, record.nbytes, record.segments) != (
                end,
                nbytes,
                stored.segments_in(record.offset, record.length),
            ):
                raise CheckpointCorrupt(f"{file}: part {part.shard_index} describes a block wrongly: {record}")
            end += nbytes
            of_space[record.space].append(record)
        if end != part.data_bytes:
            raise CheckpointCorrupt(f"{file}: the blocks of part {part.shard_index} end at {end}, not at {part.data_bytes}")
    for index, (stored, records) in enumerate(zip(spaces, of_space, strict=True)):
        records.sort(key=lambda record: record.offset)
        end = 0
        for record in records:
            if record.offset != end:
                break
            end += record.length
        if end != stored.space.size or sum(record.length for record in records) != end:
            raise CheckpointCorrupt(f"{file}: the parts do not hold space {index} from element {end} on exactly once")
    return tuple(map(tuple, of_space))
