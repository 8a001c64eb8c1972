"""The JSON documents of a checkpoint: one for each part, and the manifest that makes the checkpoint valid.

The manifest has the size and SHA-256 of each part's document; that has the size and CRC-32 of each chunk of the part; both are
sealed (sealing.py). So every byte is checked. If tables build on another checkpoint, the manifest also has the SHA-256 of that
checkpoint's manifest. It is a pure function of the cut and the parts, so that any shard may write it, or all.

Reading is strict: wrong content raises CheckpointCorrupt, with the file's name and what is wrong; content that is whole but
unknown to this version raises CheckpointUnsupported. Must not know file systems.
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
from psd.checkpoint.blocks import BLOCK, StoredSpace, stored_spaces
from psd.checkpoint.chunks import Chunk, check_chunk, parse_chunks, tiled
from psd.checkpoint.cut import MANIFEST, STEP_MAX, Cut, part_file
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, seal, unseal
from psd.checkpoint.tables import HISTORY, REMOVED, ROWS, TableRecord, check_tables
from psd.checkpoint.vectors import ELEMENTS, difference_of
from psd.contract.errors import CheckpointCorrupt, CheckpointUnsupported, PsdError
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.v1 import job_pb2
from psd.v1.job_pb2 import LearningRateScale
from psd_core.vector import VectorSpec

_IDENTITY = ("name", "run_id", "timeline", "step", "created_at", "shard_count", "layout_digest")
"""Fields on which the manifest and all parts must agree."""

KINDS = {kind.name: kind for kind in (BLOCK, ROWS, REMOVED, HISTORY, ELEMENTS)}
"""All kinds of chunks, by name."""


@dataclass(frozen=True, eq=False)
class Part:
    """One shard's part, as its document describes it.

    Attributes:
        chunks: its chunks, in the order of their bytes.
        worker_clocks: clocks by rank, as this shard knew them. client_states: opaque bytes by rank; only some shards have any.
        learning_rates: scales of the learning rate at this step and later; only shard 0 has any.
        tables: the job's tables, in its order. base: name of the checkpoint on which those that are not full build; empty: all
            are full.
        vectors: the server-side vectors. sessions: the number of the latest batch on these, by session.
    """

    shard_index: int
    psd_version: str
    chunks: tuple[Chunk, ...]
    worker_clocks: Mapping[int, int]
    client_states: Mapping[int, bytes]
    learning_rates: tuple[LearningRateScale, ...]
    tables: tuple[TableRecord, ...]
    base: str
    vectors: tuple[VectorSpec, ...]
    sessions: Mapping[int, int]

    @property
    def data_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, eq=False)
class Manifest:
    """A checkpoint's documents, as they were read and checked.

    Attributes:
        created_at: seconds since 1970. spaces: the job's.
        runs: all chunks of each space and vector, by kind and number, in the order of their elements.
        worker_clocks: by rank, the smallest clock that any shard knew. client_states: opaque bytes by rank.
        nbytes: size of all files. base: the checkpoint on which its tables build; None: they build on none.
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
    runs: Mapping[tuple[str, int], tuple[Chunk, ...]]
    nbytes: int
    base: Manifest | None = None

    @property
    def learning_rates(self) -> tuple[LearningRateScale, ...]:
        """Scales of the learning rate that an operator has ordered for this step and later."""
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


def _head(cut: Cut, psd_version: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
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
    """The text of a part's document."""
    return seal(
        {
            **_head(cut, part.psd_version),
            "shard_index": part.shard_index,
            "worker_clocks": _by_rank(part.worker_clocks),
            "client_states": _by_rank(part.client_states),
            "learning_rates": [{"clock": rate.clock, "scale": rate.scale} for rate in part.learning_rates],
            "tables": [record._asdict() for record in part.tables],
            "base": part.base,
            "vectors": [spec._asdict() for spec in part.vectors],
            "vector_batches": _by_rank(part.sessions),
            "chunks": [chunk.to_document() for chunk in part.chunks],
        }
    )


def manifest_document(cut: Cut, parts: Sequence[Part], documents: Sequence[bytes], base: BaseEntry | None = None) -> bytes:
    """The text of the manifest, from the parts and their stored documents, in the order of the shards.

    Args:
        base: the checkpoint on which parts build, if any do.
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
            **_head(cut, parts[0].psd_version),
            "parts": [
                {
                    "file": part_file(part.shard_index, cut.shard_count),
                    "nbytes": len(document),
                    "sha256": hashlib.sha256(document).hexdigest(),
                }
                for part, document in zip(parts, documents, strict=True)
            ],
            "worker_clocks": _by_rank(clocks),
            "client_states": _by_rank(states),
            # The job in words, for people; psd reads only job_spec, a psd.v1.JobSpec.
            "job": {
                "world_size": spec.world_size,
                "consistency": str(spec.consistency),
                "quorum": spec.quorum,
                "reduction": spec.reduction,
            },
            "groups": [_group_document(group) for group in spec.groups],
            "spaces": _spaces_document(stored_spaces(spec)),
            "tensors": [_tensor_document(tensor) for tensor in spec.tensors],
            **({"tables": [table.to_json() for table in spec.tables]} if spec.tables else {}),
            **({"base": base._asdict()} if base else {}),
            "job_spec": base64.b64encode(spec.to_message().SerializeToString(deterministic=True)).decode(),
        }
    )


def _tensor_document(tensor: TensorSpec) -> dict[str, Any]:
    fields = dataclasses.asdict(tensor)
    return {name: value for name, value in fields.items() if value or name not in ("aliases", "merge")}


def _group_document(group: GroupSpec) -> dict[str, Any]:
    """The document of a group's rule; optional facts appear only if they apply."""
    fields = dataclasses.asdict(group)
    return {name: value for name, value in fields.items() if value or name in ("rule", "flags", "constants")}


def _spaces_document(spaces: Iterable[StoredSpace]) -> list[dict[str, Any]]:
    return [{"group": s.space.group, "dtype": s.space.dtype.name, "size": s.space.size, "slots": list(s.slots)} for s in spaces]


# -- reading --


def parse_part(data: bytes, file: str, identity: Mapping[str, Any], shard_index: int) -> Part:
    """Read a part's document, which must belong to the checkpoint with this identity."""
    document = unseal(data, file)
    try:
        _check_identity(document, file, {**identity, "shard_index": shard_index})
        return Part(
            shard_index=shard_index,
            psd_version=document["psd_version"],
            chunks=parse_chunks(document["chunks"], shard_index),
            worker_clocks=_clocks(document),
            client_states=_states(document),
            learning_rates=tuple(LearningRateScale(**rate) for rate in document["learning_rates"]),
            tables=tuple(TableRecord(**record) for record in document["tables"]),
            base=document["base"],
            vectors=tuple(VectorSpec(**spec) for spec in document["vectors"]),
            sessions={int(session): int(number) for session, number in document["vector_batches"].items()},
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{file}: has unexpected contents: {error!r}") from error


def identity_of(cut: Cut) -> dict[str, Any]:
    """The fields that every part of a cut must share."""
    head = _head(cut, "")
    return {key: head[key] for key in _IDENTITY}


class PartEntry(NamedTuple):
    """A part as the manifest lists it: its document's name, size and SHA-256."""

    file: str
    nbytes: int
    sha256: str


class BaseEntry(NamedTuple):
    """The checkpoint on which another one's tables build: its name, and the SHA-256 of its manifest."""

    name: str
    sha256: str


class ManifestDocument:
    """A manifest before its parts have been read.

    Attributes:
        identity: fields that each part must repeat. parts: their documents' entries, in the order of the shards.
        base: the checkpoint on which its tables build, if any.
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
        """The manifest; CheckpointCorrupt unless the parts, with their base, hold each element of the job once."""
        document = self._document
        try:
            message = job_pb2.JobSpec.FromString(base64.b64decode(document["job_spec"], validate=True))
            spec = JobSpec.from_message(message)
            spaces = tuple(stored_spaces(spec))
            clocks, states = _clocks(document), _states(document)
            is_known = document["spaces"] == _spaces_document(spaces)
            runs = self._runs(spec, spaces, parts, base) if is_known else {}
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{self.file}: {error}") from None
        except PsdError as error:  # the checksum is right, so another version of psd wrote it
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
            runs=runs,
            nbytes=self.nbytes + sum(entry.nbytes for entry in self.parts) + sum(part.data_bytes for part in parts),
            base=base,
        )

    def _runs(
        self, spec: JobSpec, spaces: Sequence[StoredSpace], parts: Sequence[Part], base: Manifest | None
    ) -> dict[tuple[str, int], tuple[Chunk, ...]]:
        """The chunks of each space and vector; CheckpointCorrupt unless the parts have the chunks that they should."""
        for part in parts:
            try:
                self._check(spec, spaces, part, base)
            except CheckpointCorrupt as error:
                raise CheckpointCorrupt(f"part {part.shard_index} {error}") from None
        if difference := difference_of([(part.vectors, part.sessions) for part in parts]):
            raise CheckpointCorrupt(f"its parts are of different moments: {difference}")
        sizes = {(BLOCK.name, index): stored.space.size for index, stored in enumerate(spaces)}
        sizes |= {(ELEMENTS.name, index): vector.size for index, vector in enumerate(parts[0].vectors if parts else ())}
        runs: dict[tuple[str, int], list[Chunk]] = {key: [] for key in sizes}
        for part in parts:
            for chunk in part.chunks:
                if KINDS[chunk.kind].is_run:
                    runs[chunk.kind, chunk.of].append(chunk)
        return {key: tiled(runs[key], size, f"{KINDS[key[0]].owner} {key[1]}") for key, size in sizes.items()}

    def _check(self, spec: JobSpec, spaces: Sequence[StoredSpace], part: Part, base: Manifest | None) -> None:
        if len(part.tables) != len(spec.tables):
            raise CheckpointCorrupt(f"has {len(part.tables)} tables of {len(spec.tables)}")
        for vector in part.vectors:
            vector.check()
        owners = {"space": spaces, "table": part.tables, "vector": part.vectors}
        for chunk in part.chunks:
            kind = KINDS[chunk.kind]
            check_chunk(kind, owners[kind.owner][chunk.of], chunk)
        check_tables(part.tables, part.chunks)
        if all(record.is_full for record in part.tables):
            return
        if base is None or part.base != base.name:
            raise CheckpointCorrupt(f"builds on checkpoint {part.base!r}, not on {base.name if base else 'none'!r}")
        there = base.parts[part.shard_index].tables if base.shard_count == self.identity["shard_count"] else ()
        if [(record.width, True) for record in part.tables] != [(record.width, record.is_full) for record in there]:
            raise CheckpointCorrupt(f"builds on checkpoint {base.name}, which has not these tables in full")


def _check_identity(document: Mapping[str, Any], file: str, identity: Mapping[str, Any]) -> None:
    for key, expected in identity.items():
        if document[key] != expected:
            raise CheckpointCorrupt(f"{file}: belongs to another checkpoint: {key} is {document[key]!r}, not {expected!r}")


def _clocks(document: Mapping[str, Any]) -> dict[int, int]:
    return {int(rank): int(clock) for rank, clock in document["worker_clocks"].items()}


def _states(document: Mapping[str, Any]) -> dict[int, bytes]:
    return {int(rank): base64.b64decode(state, validate=True) for rank, state in document["client_states"].items()}
