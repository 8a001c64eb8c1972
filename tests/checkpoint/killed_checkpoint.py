"""A program for test_checkpoint_torture.py: kills a child at each file operation of storing a cut and deleting older ones.

The job has tables: the first cut is whole, the second builds on it, and so does the third, or it is whole, too.

python killed_checkpoint.py DIRECTORY; ends with status 0 and the number of operations, or with what was wrong. It is a process
of its own because it forks, which a process with threads must not.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from helpers_checkpoint import check_restored, files_of
from helpers_tables import ShardTables, stored

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.layout import Layout
from psd_core.table import Mark


class KilledAt:
    """A crash point that ends the process at its n-th call."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, step: str) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """Stores the cuts; a child has its own, with the same rows."""

    def __init__(self, root: Path) -> None:
        self.tables = ShardTables(root / "stores", 2)
        self.template = root / "template"
        directory = CheckpointDirectory(str(self.template))
        self.cuts: dict[int, Cut] = {}
        self.contents: dict[int, object] = {}
        self.tables.write(0, range(50), 0.5)
        self.marks: list[list[Mark]] = []
        self.marks = self.store(directory, 1)
        self.tables.write(0, range(40, 60), 1.5)
        self.store(directory, 2, base=1)
        self.tables.remove(0, range(10))

    def store(self, directory: CheckpointDirectory, step: int, base: int = 0) -> list[list[Mark]]:
        self.contents[step] = self.tables.contents(0)
        arguments = {"base": self.cuts[base].name, "since": self.marks} if base else {}
        self.cuts[step], marks = self.tables.store(directory, step, **arguments)
        return marks

    def check(self, directory: CheckpointDirectory, step: int) -> None:
        cut = self.cuts[step]
        assert directory.verify(cut.name) == []
        check_restored(directory, cut, Layout(cut.spec, 3))
        assert stored(directory, cut.name, 3, 0) == self.contents[step]

    def dies_at(self, n: int, root: Path, base: int) -> bool:
        """True if a child that stores cut 3, keeping only it, gets as far as its n-th operation."""
        pid = os.fork()
        if pid == 0:
            directory = CheckpointDirectory(str(root), keep=1, crash_point=KilledAt(n))
            self.store(directory, 3, base)
            directory.collect_garbage()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(root: Path) -> None:
    os.fsync = lambda _: None  # a kill, unlike a power failure, loses nothing that was written
    job = Job(root)
    job.store(CheckpointDirectory(str(root / "third")), 3)  # to know it
    operations = [kill_everywhere(job, root / f"on-{base}", base) for base in (0, 1)]
    sys.stdout.write(f"{min(operations)}\n")


def kill_everywhere(job: Job, root: Path, base: int) -> int:
    n, used = 0, []
    is_dead = True
    while is_dead:
        n += 1
        place = root / f"{n}"
        shutil.copytree(job.template, place)
        is_dead = job.dies_at(n, place, base)
        directory = CheckpointDirectory(str(place), keep=1)
        manifest = directory.newest()
        assert manifest is not None, n
        used.append(manifest.step)
        job.check(directory, manifest.step)
        job.store(directory, 4)
        directory.collect_garbage()
        whole = 3 if base == 0 and manifest.step == 3 else 1  # the newest before it
        assert {path.parent.name for path in files_of(place)} == {job.cuts[4].name, job.cuts[whole].name}, n
        assert all(path.suffix in (".json", ".chunks") for path in files_of(place)), n
    assert used == sorted(used), used  # once it is valid, it stays the newest
    assert set(used) == {2, 3}
    return n - 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
