"""The parts of cuts that one shard completes: of those to be stored, which the real code writes, and of readers' copies.

Survives the shard's process, as files do. Must not know other shards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from setting import Setting, counts_in, counts_in_row
from wire import Numbers

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ServerConfig
from psd.contract.errors import CutMissed, NotDeclared
from psd.contract.layout import Layout
from psd.rim.checkpointer import Checkpointer
from psd.rim.vector_gate import VectorGate
from psd.state.cuts.snapshots import Snapshot
from psd.state.shard import Shard
from psd.v1 import data_pb2, job_pb2


class CutPart(NamedTuple):
    """One shard's part of a cut.

    Attributes:
        cut: its id; a reader's begins with r. order: see psd.checkpoint.Cut.
        positions: (rank, clock) of those that the part says to agree on. gradients: by block, that are in it. states: by rank,
            the gradient that came with what its worker has saved.
        files: number of what is stored, (name, bytes) of each file; -1: nothing is.
    """

    cut: str
    step: int
    order: int
    positions: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, tuple[int, ...]], ...]
    states: tuple[tuple[int, int], ...]
    files: int


def complete_cuts(of_shards: Sequence[Sequence[CutPart]]) -> Iterator[list[CutPart]]:
    """The parts, by shard, of each cut of which all shards have theirs, at the same positions."""
    parts: dict[str, list[CutPart]] = {}
    for part in (part for cuts in of_shards for part in cuts):
        parts.setdefault(part.cut, []).append(part)
    for found in parts.values():
        if len(found) == len(of_shards) and len({(part.step, part.order, part.positions) for part in found}) == 1:
            yield found


class _Recorded:
    """A table's snapshot, which can be read once, and what was read of it."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.rows: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table:
            self.rows += [row.copy() for row in batch.rows]
            yield batch


class CutParts:
    """Parts of one shard.

    Args:
        files: numbers for the contents of files. scratch: a directory for them, which is empty in between.

    Attributes:
        found: by the cut's id. told: by reader, the version that shard 0 has told of, and by which decision. wrong: broken
            invariants that were seen. reads, announced: how many readers have come, and cuts were announced here.
    """

    def __init__(self, setting: Setting, shard: int, files: Numbers, scratch: Path) -> None:
        self._setting = setting
        self._index = shard
        self._files = files
        self._scratch = scratch
        self.found: dict[str, CutPart] = {}
        self.told: list[tuple[int, bytes]] = []
        self.wrong: list[str] = []
        self.reads = self.announced = 0
        self._reading: list[Snapshot] = []
        self._to_store: SimpleQueue[Snapshot | None] | None = None
        self._read: SimpleQueue[Snapshot | None] = SimpleQueue()

    def begin(self, shard: Shard, config: ServerConfig) -> None:
        """Take part in the cuts of another life of the shard."""
        self._shard = shard
        self._reading, self._read = [], SimpleQueue()
        if self._setting.cuts:
            self._to_store = shard.cuts.take_part()
            self._checkpointer = Checkpointer(shard, config, CheckpointDirectory(str(self._scratch)), VectorGate())

    def announce(self) -> None:
        """This shard announces a cut. Ids do not say which is later."""
        self.announced += 1
        step = self._shard.schedule.progress + (1 if self._setting.has_rounds else 0)
        cut = data_pb2.Cut(id=f"c{10 - self.announced}", step=step, created_at=1.0)
        self._shard.cuts.learn(self._shard.declared(), [cut])

    @property
    def holds(self) -> bool:
        """True if pushes are held for a cut."""
        held = [s.positions.tickets for s in self._shard.cuts._awaiting_positions() if s.positions is not None]
        return any(not ticket.future.done() for tickets in held for ticket in tickets)

    def read(self, told: tuple[int, bytes] | None = None) -> None:
        """A reader calls this shard. told: of a publication, what it has heard at shard 0."""
        self.reads += 1
        layout = Layout(self._setting.spec, self._setting.shards)
        cut = data_pb2.Cut(id=f"r{self.reads}", created_at=1.0)
        request = data_pb2.ReadRequest(run_id="run", layout_digest=layout.digest, cut=cut)
        if self._setting.is_published:
            progress = self._shard.schedule.progress
            if told is None:
                desk = self._shard.settlement.told(self._shard.declared())
                told = progress, desk["decision"].SerializeToString() if "decision" in desk else b""
                self.told.append(told)
            request.cut.step, request.timeline = told[0], 0
            decision = job_pb2.Decision.FromString(told[1])
            if told[1] and progress <= decision.round:
                request.decision.CopyFrom(decision)
        try:
            self._reading.append(self._shard.begin_read(request, self._read))
        except (CutMissed, NotDeclared):
            return  # it asks again, which is another reader's life
        if request.HasField("decision"):
            self._check_heard(request.cut.step)

    def _check_heard(self, step: int) -> None:
        """What a reader has told, this shard knows: if it has the put, it is its version."""
        for index, block in self._shard.declared().blocks.items():
            if block.version < step and not block.missing_in(step - 1):
                self.wrong.append(f"block {index} has the put of version {step}, of which a reader has told, and stays behind")

    @property
    def can_be_read(self) -> bool:
        """True if a reader finds something here: of a publication, a version at shard 0, with which readers begin."""
        if not self._setting.is_published or self._index:
            return True
        job = self._shard._core.job
        return job is not None and self._shard._core.life.has_values and self._shard.schedule.progress > 0

    def collect(self) -> None:
        """Note what the parts hold that are complete now, and give back their pages."""
        while not self._read.empty():
            snapshot = self._read.get_nowait()
            assert snapshot is not None
            if not snapshot.why_missed:
                self._note(snapshot, self._of_pages(snapshot), -1)
            self._reading.remove(snapshot)
            self._shard.cuts.abandon(snapshot)
        while self._to_store is not None and not self._to_store.empty():
            snapshot = self._to_store.get_nowait()
            assert snapshot is not None
            if not snapshot.why_missed:
                self._store(snapshot)
                self._shard.cuts.release(snapshot)

    def _store(self, snapshot: Snapshot) -> None:
        """Note a part; have it written, and keep what is in the files, if there is a world to go on from it."""
        found, files = self._of_pages(snapshot), -1
        tables: list[Any] = [_Recorded(table) for table in snapshot.tables]
        snapshot.tables = tables
        if self._setting.restores:
            files = self._write(snapshot)
        for table in tables:
            if not self._setting.restores:
                list(table)
            counted = found.setdefault(self._setting.blocks + self._index, set())
            counted |= set(counts_in_row(-sum(table.rows)) if table.rows else ())
        self._note(snapshot, found, files)

    def _write(self, snapshot: Snapshot) -> int:
        """Number of the files that the real code writes."""
        cut = self._checkpointer._cut_of(snapshot)
        self._checkpointer._write(snapshot)
        directory = self._scratch / cut.name
        files = tuple((f"{cut.name}/{path.name}", path.read_bytes()) for path in sorted(directory.iterdir()))
        shutil.rmtree(directory)
        return self._files.of(files)

    def _note(self, snapshot: Snapshot, found: Mapping[int, set[int]], files: int) -> None:
        self.found[snapshot.cut.id] = CutPart(
            snapshot.cut.id,
            snapshot.cut.step,
            snapshot.cut.order,
            tuple(sorted(snapshot.worker_clocks.items())),
            tuple((block, tuple(sorted(gradients))) for block, gradients in sorted(found.items())),
            tuple((rank, int(state)) for rank, state in sorted(snapshot.client_states.items())),
            files,
        )

    def _of_pages(self, snapshot: Snapshot) -> dict[int, set[int]]:
        sign = 1 if self._setting.is_published else -1
        return {index: set(counts_in(sign * float(page.parameter[0]))) for index, page in snapshot.pages.items()}
