"""A directory of checkpoints: writes parts, completes checkpoints, finds the newest reliable one, deletes old ones.

The order of writing makes a checkpoint valid at one instant, by one rename or put:

    every shard    its numbers, then its part's document    write_part
    any shard      the manifest, once all parts are there            complete

and the order of deleting makes it invalid at one instant: the manifest goes first. Nothing here waits, knows the time or keeps
state: what is true is what the files say. Several shards may call anything at once. Errors of the file system surface as
CheckpointFailed and leave what was valid valid. Must not know shards, blocks in memory, or when to store.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from psd.checkpoint import writing
from psd.checkpoint.blocks import BlockPart, RestoredBlock
from psd.checkpoint.cut import MANIFEST, WHOLE_KEPT, CheckpointInfo, CheckpointState, Cut, CutName, part_file
from psd.checkpoint.export import ExportProgress, export_tensors
from psd.checkpoint.loading import Incomplete, load
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.notes import ShardNotes
from psd.checkpoint.reading import read_chunk, restored_blocks, restored_vectors
from psd.checkpoint.row_reading import StoredTable, restored_table
from psd.checkpoint.storage import CrashPoint, no_crash, open_storage
from psd.checkpoint.tables import ROWS, TablePart
from psd.checkpoint.vectors import VectorsPart
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, CheckpointUnsupported
from psd.contract.layout import Layout
from psd.contract.orders import scale_at
from psd.v1.job_pb2 import LearningRateScale
from psd_core.vector import Piece

logger = logging.getLogger(__name__)


def _ignore(done: int, total: int) -> None:
    pass


class CheckpointDirectory:
    """The checkpoints at one URL.

    Attributes:
        location: the URL without credentials, for messages. storage: its files. notes: that shards leave there for each other.
    """

    def __init__(self, url: str, *, keep: int = 3, crash_point: CrashPoint = no_crash, only: str = "") -> None:
        """Store the arguments; nothing is read or written yet.

        Args:
            url: a local path, or whatever fsspec takes.
            keep: how many valid checkpoints `collect_garbage` leaves.
            crash_point: for tests, see storage.py.
            only: name of the one checkpoint that counts; empty: all do.

        Raises:
            ConfigError: fsspec does not know such URLs, or lacks the package for them.
        """
        if keep < 1:
            raise ValueError(f"keep: must be at least 1, got {keep}")
        self._keep = keep
        self._only = only
        self.storage = open_storage(url, crash_point)
        self.location = self.storage.location
        self.notes = ShardNotes(self.storage)

    # -- writing -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """List the directory; write a small file there, durably, read it back and remove it. Makes the directory if need be.

        Raises:
            CheckpointFailed: one of these is not possible, so that no checkpoint would be.
        """
        self.storage.directories()  # of what is no directory it has the clearer words
        name, content = f"psd-check-{secrets.token_hex(8)}", secrets.token_bytes(64)
        self.storage.write("", name, [content])
        try:
            found = self.storage.read("", name)
        except FileNotFoundError:
            found = b""
        self.storage.remove("", name)
        if found != content:
            raise CheckpointFailed(f"a file that was written to {self.location} is not read back as it was")

    def write_part(
        self,
        cut: Cut,
        shard_index: int,
        blocks: Iterable[BlockPart],
        *,
        worker_clocks: Mapping[int, int] | None = None,
        client_states: Mapping[int, bytes] | None = None,
        learning_rates: Sequence[LearningRateScale] = (),
        tables: Sequence[TablePart] = (),
        base: str = "",
        vectors: VectorsPart | None = None,
    ) -> int:
        """Store one shard's part of a cut, durably. A part that is there already is left as it is.

        Args:
            blocks: exactly the shard's blocks, in the order of the layout; taken one at a time, and done with when the next is
                asked for, so that a generator can give a page back as soon as it is written.
            worker_clocks: by rank; the manifest has the smallest of all shards'. client_states: opaque bytes by rank, if this
                shard has any; where several have, the first shard's hold.
            learning_rates: scales of the learning rate at this step and later, on shard 0.
            vectors: a snapshot of the server-side vectors, if there are any.
            tables: snapshots of exactly the job's tables. base: the valid checkpoint that those build on that are not full.

        Returns:
            Bytes written.

        Raises:
            CheckpointFailed: the file system refused something, or the blocks are not of one cut. The part does not exist.
        """
        return writing.write_part(
            self.storage,
            cut,
            shard_index,
            blocks,
            worker_clocks or {},
            client_states or {},
            learning_rates,
            tables,
            base,
            vectors,
        )

    def named(self, cut_id: str) -> list[str]:
        """Names of the checkpoints of a cut's id, newest first, whatever is there of them."""
        return [name for name in self._names() if _cut_name(name).cut_id == cut_id]

    def stored(self, cut: Cut, shard_index: int) -> Cut | None:
        """The cut of that id of which a shard's part is stored, with what its name and that part say of it."""
        for name in self.named(cut.cut_id):
            its = _cut_name(name)
            if its.is_final and its.timeline != cut.timeline:  # each timeline may have one
                continue
            there = dataclasses.replace(cut, timeline=its.timeline, step=its.step, order=its.order)
            if (found := writing.as_written(self.storage, there, shard_index)) is not None:
                return found
        return None

    def has_later(self, cut: Cut) -> bool:
        """True if a checkpoint of a cut that was announced after this one is valid."""
        times = (info.created_at for info in self.checkpoints() if info.state is CheckpointState.VALID)
        return any(time is not None and time > cut.created_at for time in times)

    def complete(self, cut: Cut) -> bool:
        """Write the manifest if all parts are there. Any shard may, at any time, also several at once.

        Returns:
            True if the checkpoint is valid now, False if parts are missing.

        Raises:
            CheckpointCorrupt: a part that is there is damaged.
            CheckpointFailed: the file system refused something.
        """
        return writing.complete(self.storage, cut)

    # -- finding -------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, newest first, with their states. Reads documents and sizes, not the numbers."""
        return [self._inspect(name) for name in self._names()]

    def newest(self, *, before: str | None = None) -> Manifest | None:
        """The newest valid checkpoint, or the newest before the one of that name; None if there is none.

        Newer ones that are not valid are logged as errors, with the file and the reason. Reads documents and sizes; the numbers
        are checked when they are read: if that raises CheckpointCorrupt, go on with `before=` its name.

        Raises:
            CheckpointUnsupported: it is whole, but another version of psd has written it. It is not passed over: who went on
                from an older one would lose what this one holds.
        """
        limit = None if before is None else _cut_name(before)
        for name in self._names():
            if limit is not None and _cut_name(name) >= limit:
                continue
            try:
                return load(self.storage, name, self.storage.files(name))
            except (CheckpointCorrupt, Incomplete) as error:
                logger.error(  # noqa: TRY400 - the reason says it all
                    "checkpoint %s in %s cannot be used, going back to the one before: %s", name, self.location, error
                )
        return None

    def load(self, name: str) -> Manifest:
        """One checkpoint by its name; CheckpointCorrupt if it is damaged, incomplete or not there."""
        files = self.storage.files(name) if CutName.of(name) else {}
        if not files:
            raise CheckpointCorrupt(f"there is no checkpoint {name!r} in {self.location}")
        try:
            return load(self.storage, name, files)
        except Incomplete as error:
            raise CheckpointCorrupt(str(error)) from None

    def _names(self) -> list[str]:
        """Names of the checkpoints, newest first; other entries of the directory are ignored."""
        names = [name for name in self.storage.directories() if CutName.of(name) and self._only in ("", name)]
        return sorted(names, key=_cut_name, reverse=True)

    def has(self, name: str) -> bool:
        """True if there are files of a checkpoint of that name."""
        return bool(CutName.of(name) and self.storage.files(name))

    def _inspect(self, name: str) -> CheckpointInfo:
        timeline, step = _cut_name(name).timeline, _cut_name(name).step
        files = self.storage.files(name)
        nbytes = sum(files.values())
        try:
            manifest = load(self.storage, name, files)
        except Incomplete as error:
            return CheckpointInfo(name, timeline, step, CheckpointState.INCOMPLETE, nbytes, reason=str(error))
        except CheckpointCorrupt as error:
            return CheckpointInfo(name, timeline, step, CheckpointState.DAMAGED, nbytes, reason=str(error))
        except CheckpointUnsupported as error:
            return CheckpointInfo(name, timeline, step, CheckpointState.UNSUPPORTED, nbytes, reason=str(error))
        return CheckpointInfo(
            name,
            timeline,
            step,
            CheckpointState.VALID,
            nbytes,
            manifest.created_at,
            manifest.shard_count,
            rows=manifest.row_count if manifest.spec.tables else None,
            base=manifest.base.name if manifest.base else "",
            learning_rate_scale=scale_at(manifest.learning_rates, step),
        )

    # -- deleting ------------------------------------------------------------------------------------------------------

    def collect_garbage(self) -> list[str]:
        """Remove what is no longer needed, once its replacement is durable; return the names.

        Left are the newest `keep` valid checkpoints, those that they build on, and all that is newer; of jobs with tables also
        the newest WHOLE_KEPT that build on no other. Unfinished ones go when a newer one is valid, damaged ones when there are
        `keep` newer valid ones. If nothing is valid, nothing is removed.
        """
        found = self.checkpoints()
        kept = [info for info in found if info.state is CheckpointState.VALID][: self._keep]
        if not kept:
            return []
        whole = [i.name for i in found if i.state is CheckpointState.VALID and i.rows is not None and not i.base]
        bases = {info.base for info in kept} | {*whole[:WHOLE_KEPT]}
        doomed = []
        for info in found:
            successor = kept[0] if info.state is CheckpointState.INCOMPLETE else kept[-1]
            has_successors = info.state is CheckpointState.INCOMPLETE or len(kept) == self._keep
            if has_successors and _cut_name(info.name) < _cut_name(successor.name) and info.name not in bases:
                doomed.append(info)
        if doomed:
            for info in kept:
                self.storage.sync(info.name)
        for info in sorted(doomed, key=lambda info: (not info.base, _cut_name(info.name))):
            self._remove(info.name)
        return [info.name for info in doomed]

    def discard(self, cut: Cut) -> bool:
        """Remove the remains of a cut that this shard could not complete, to free the disk.

        Returns:
            False if the checkpoint is valid, because another shard has completed it; then it stays.
        """
        if self._inspect(cut.name).state is CheckpointState.VALID:
            return False
        file = part_file(0, cut.shard_count)
        try:
            document = self.storage.read(cut.name, file)
        except FileNotFoundError:
            document = b""
        self.storage.remove(cut.name, file)  # without it nobody completes the checkpoint from here on
        if document and MANIFEST in self.storage.files(cut.name):
            self.storage.write(cut.name, file, [document])
            if self._inspect(cut.name).state is CheckpointState.VALID:
                return False
        self._remove(cut.name)
        return True

    def discard_unfinished(self, timeline: int, but: str = "") -> None:
        """Remove what is unfinished of a timeline to which nobody writes any more, except the checkpoint `but`."""
        for info in self.checkpoints():
            if info.state is CheckpointState.INCOMPLETE and info.timeline == timeline and info.name != but:
                self._remove(info.name)

    def _remove(self, name: str) -> None:
        files = self.storage.files(name)
        if MANIFEST in files:
            self.storage.remove(name, MANIFEST)
            self.storage.sync(name)  # from here on it is not valid, also after a power failure
        for file in sorted(files.keys() - {MANIFEST}):
            self.storage.remove(name, file)
        self.storage.remove_directory(name)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_blocks(self, manifest: Manifest, layout: Layout, shard_index: int) -> Iterator[RestoredBlock]:
        """Yield the blocks of one shard of `layout`, in order; the layout may have any number of shards.

        Only a few blocks are in memory at a time, and every byte is checked before it is used.

        Raises:
            CheckpointCorrupt: a byte has changed.
            CheckpointFailed: a file cannot be read.
            SpecMismatch: the tensors or the groups of the layout's job are not those that were stored.
        """
        return restored_blocks(self.storage, manifest, layout, shard_index)

    def read_table(self, manifest: Manifest, layout: Layout, shard_index: int, table: int) -> StoredTable:
        """The rows of a table that belong to one shard of `layout`. Raises what `read_blocks` does, iterating it likewise."""
        return restored_table(self.storage, manifest, layout, shard_index, table)

    def read_vectors(self, manifest: Manifest, shard_index: int = 0, shard_count: int = 1) -> Iterator[Piece]:
        """The elements of all vectors that belong to one of any number of shards. Raises what `read_blocks` does."""
        return restored_vectors(self.storage, manifest, shard_index, shard_count)

    def verify(self, name: str, progress: Callable[[int, int], None] = _ignore) -> list[str]:
        """Read every byte of a checkpoint, and of the rows of the one that it builds on; return its problems in words.
        `progress`: bytes read, of all."""
        try:
            manifest = self.load(name)
        except (CheckpointCorrupt, CheckpointUnsupported) as error:
            return [str(error)]
        wanted = [(manifest, chunk) for part in manifest.parts for chunk in part.chunks]
        if manifest.base is not None:
            of_base = [chunk for part in manifest.base.parts for chunk in part.chunks if chunk.kind == ROWS.name]
            wanted += [(manifest.base, chunk) for chunk in of_base]
        done, total, problems = 0, sum(chunk.nbytes for _, chunk in wanted), []
        for one, chunk in wanted:
            try:
                read_chunk(self.storage, one, chunk)
            except (CheckpointCorrupt, CheckpointFailed) as error:
                problems.append(str(error))
            done += chunk.nbytes
            progress(done, total)
        return problems

    def export(self, manifest: Manifest, path: str, progress: ExportProgress = _ignore, table: str = "") -> None:
        """Write parameters and tables as named tensors to a safetensors file at a path or URL; see export.py.

        Args:
            table: write this one alone, which may also be to a Parquet file.

        Raises:
            CheckpointCorrupt: a byte of the checkpoint has changed; the file is not written.
            CheckpointFailed: a file cannot be read or written, or there is no such table. ConfigError: pyarrow is not there.
        """
        export_tensors(self.storage, manifest, path, progress, table)


def _cut_name(name: str) -> CutName:
    found = CutName.of(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return found
