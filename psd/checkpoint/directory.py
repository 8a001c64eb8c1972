"""A directory of checkpoints: writes parts, completes checkpoints, finds the newest reliable one, deletes old ones.

A checkpoint becomes valid at one instant, by one rename or put, because it is written in this order:

    every shard    its values, then its part's document    write_part
    any shard      the manifest, once all parts exist      complete

It becomes invalid at one instant, because its manifest is deleted first. Nothing here waits, knows the time or keeps state:
only the files count. Several shards may call anything at once. Errors of the file system are raised as CheckpointFailed, and
leave valid checkpoints valid. Must not know shards, blocks in memory, or when to store.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from psd.checkpoint import writing
from psd.checkpoint.blocks import BlockPart, RestoredBlock
from psd.checkpoint.cut import MANIFEST, WHOLE_KEPT, CheckpointInfo, CheckpointState, Cut, CutName, part_file
from psd.checkpoint.export import ExportProgress, export_model, export_tensors
from psd.checkpoint.loading import Incomplete, load
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.notes import ShardNotes
from psd.checkpoint.opening import open_storage
from psd.checkpoint.reading import read_chunk, restored_blocks, restored_vectors
from psd.checkpoint.row_reading import StoredTable, restored_table
from psd.checkpoint.storage import CrashPoint, no_crash
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
        location: the URL without credentials, for messages. storage: its files. notes: the shards' notes for each other.
    """

    def __init__(self, url: str, *, keep: int = 3, crash_point: CrashPoint = no_crash, only: str = "") -> None:
        """Store the arguments; nothing is read or written yet.

        Args:
            url: a local path, or any URL that fsspec takes.
            keep: how many valid checkpoints `collect_garbage` leaves.
            crash_point: for tests; see storage.py.
            only: name of the only checkpoint to see; empty: all.

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
        """List the directory; write a small file there, durably, read it back and remove it. Creates the directory if needed.

        Raises:
            CheckpointFailed: one of these is not possible, so checkpoints are not, either.
        """
        self.storage.directories()  # it has the clearer message for a path that is no directory
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
        """Store one shard's part of a cut, durably, unless it is stored already.

        Args:
            blocks: exactly the shard's blocks, in the order of the layout. Each is used only until the next is asked for, so
                that a generator can release a page as soon as it is written.
            worker_clocks: clocks by rank; the manifest has the smallest of all shards'. client_states: opaque bytes by rank, if
                this shard has any; if several have, the first shard's count.
            learning_rates: scales of the learning rate at this step and later, on shard 0.
            vectors: a snapshot of the server-side vectors, if there are any.
            tables: snapshots of exactly the job's tables. base: the valid checkpoint on which those that are not full build.

        Returns:
            Bytes written.

        Raises:
            CheckpointFailed: the file system refused something, or the blocks are not of one cut. The part is not stored.
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
        """Names of the checkpoints with a cut's id, newest first, even if incomplete."""
        return [name for name in self._names() if _cut_name(name).cut_id == cut_id]

    def stored(self, cut: Cut, shard_index: int) -> Cut | None:
        """The cut with the same id, as its name and the shard's stored part describe it; None if there is no such part."""
        for name in self.named(cut.cut_id):
            its = _cut_name(name)
            if its.is_final and its.timeline != cut.timeline:  # each timeline may have one
                continue
            there = dataclasses.replace(cut, timeline=its.timeline, step=its.step, order=its.order)
            if (found := writing.as_written(self.storage, there, shard_index)) is not None:
                return found
        return None

    def has_later(self, cut: Cut) -> bool:
        """True if there is a valid checkpoint of a cut that was announced after this one."""
        times = (info.created_at for info in self.checkpoints() if info.state is CheckpointState.VALID)
        return any(time is not None and time > cut.created_at for time in times)

    def complete(self, cut: Cut) -> bool:
        """Write the manifest if all parts exist. Any shard may do so, at any time, also several at once.

        Returns:
            True if the checkpoint is valid now, False if parts are missing.

        Raises:
            CheckpointCorrupt: a part is damaged. CheckpointFailed: the file system refused something.
        """
        return writing.complete(self.storage, cut)

    # -- finding -------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, newest first, with their states. Reads documents and sizes, not the values."""
        return [self._inspect(name) for name in self._names()]

    def newest(self, *, before: str | None = None) -> Manifest | None:
        """The newest valid checkpoint, or the newest one before the checkpoint named `before`; None if there is none.

        Newer ones that are not valid are logged as errors, with the file and the reason. Reads documents and sizes; the values
        are checked when they are read: if that raises CheckpointCorrupt, pass its name as `before`.

        Raises:
            CheckpointUnsupported: it is whole, but another version of psd has written it. It is not skipped: a job that went on
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
        """The checkpoint with this name; CheckpointCorrupt if it is damaged, incomplete or does not exist."""
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
        """True if a checkpoint with this name has any files."""
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
        """Remove checkpoints that are no longer needed, once their replacements are durable; return the names.

        Kept are the newest `keep` valid checkpoints, those on which they build, and all newer ones; for jobs with tables also
        the newest WHOLE_KEPT that build on no other. Unfinished ones are removed once a newer one is valid, damaged ones once
        `keep` newer ones are. If none is valid, nothing is removed.
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
        """Remove the files of a cut that this shard could not complete, to free disk space.

        Returns:
            False if another shard has completed the checkpoint, so that it is valid; then it stays.
        """
        if self._inspect(cut.name).state is CheckpointState.VALID:
            return False
        file = part_file(0, cut.shard_count)
        try:
            document = self.storage.read(cut.name, file)
        except FileNotFoundError:
            document = b""
        self.storage.remove(cut.name, file)  # without it nobody completes the checkpoint from now on
        if document and MANIFEST in self.storage.files(cut.name):
            self.storage.write(cut.name, file, [document])
            if self._inspect(cut.name).state is CheckpointState.VALID:
                return False
        self._remove(cut.name)
        return True

    def discard_unfinished(self, timeline: int, but: str = "") -> None:
        """Remove unfinished checkpoints of a timeline to which nobody writes any more, except the checkpoint `but`."""
        for info in self.checkpoints():
            if info.state is CheckpointState.INCOMPLETE and info.timeline == timeline and info.name != but:
                self._remove(info.name)

    def _remove(self, name: str) -> None:
        files = self.storage.files(name)
        if MANIFEST in files:
            self.storage.remove(name, MANIFEST)
            self.storage.sync(name)  # from now on it is not valid, even after a power failure
        for file in sorted(files.keys() - {MANIFEST}):
            self.storage.remove(name, file)
        self.storage.remove_directory(name)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_blocks(self, manifest: Manifest, layout: Layout, shard_index: int) -> Iterator[RestoredBlock]:
        """Yield the blocks of one shard of `layout`, in order; the layout may have any number of shards.

        Only a few blocks are in memory at a time. Every byte is checked before it is used.

        Raises:
            CheckpointCorrupt: a byte has changed.
            CheckpointFailed: a file cannot be read.
            SpecMismatch: the tensors or the groups of the layout's job differ from the stored ones.
        """
        return restored_blocks(self.storage, manifest, layout, shard_index)

    def read_table(self, manifest: Manifest, layout: Layout, shard_index: int, table: int) -> StoredTable:
        """The rows of a table that belong to one shard of `layout`. This, and iterating it, raise what `read_blocks` raises."""
        return restored_table(self.storage, manifest, layout, shard_index, table)

    def read_vectors(self, manifest: Manifest, shard_index: int = 0, shard_count: int = 1) -> Iterator[Piece]:
        """The elements of all vectors that belong to one of any number of shards. Raises what `read_blocks` raises."""
        return restored_vectors(self.storage, manifest, shard_index, shard_count)

    def verify(self, name: str, progress: Callable[[int, int], None] = _ignore) -> list[str]:
        """Read every byte of a checkpoint, and of the rows of the one on which it builds; return its problems in words.
        progress: gets the bytes read so far and the total."""
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
            table: write only this table; then the file may also be a Parquet file.

        Raises:
            CheckpointCorrupt: a byte of the checkpoint has changed; the file is not written.
            CheckpointFailed: a file cannot be read or written, or there is no such table. ConfigError: pyarrow is missing.
        """
        export_tensors(self.storage, manifest, path, progress, table)

    def export_model(self, manifest: Manifest, path: str, config: str, progress: ExportProgress = _ignore) -> None:
        """Write all that `export` writes, and a model's config, to a directory that transformers' `from_pretrained` takes.

        Args:
            path: path or URL of the directory, which may exist. config: path or URL of the config.json.

        Raises:
            CheckpointCorrupt, CheckpointFailed: as `export`; or there is no such config. Nothing is written.
        """
        export_model(self.storage, manifest, path, config, progress)


def _cut_name(name: str) -> CutName:
    found = CutName.of(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return found
