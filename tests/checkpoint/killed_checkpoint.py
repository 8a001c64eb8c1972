"""A program for test_checkpoint_torture.py: kills a child at each file operation of storing a cut and deleting older ones.

python killed_checkpoint.py DIRECTORY; ends with status 0 and the number of operations, or with what was wrong. It is a process
of its own because it forks, which a process with threads must not.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from helpers_checkpoint import check_restored, cut_of, files_of, store

from psd.checkpoint import CheckpointDirectory
from psd.contract.jobspec import JobSpec, TensorSpec
from psd.contract.layout import Layout

SPEC = JobSpec(1, (TensorSpec("w", (9000,)),))
OLDEST, OLDER, NEW, NEXT = (cut_of(SPEC, 2, step) for step in (1, 2, 3, 4))


class KilledAt:
    """A crash point that ends the process at its n-th call."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, step: str) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def dies_at(n: int, root: Path) -> bool:
    """True if a child that stores NEW, keeping only it, gets as far as its n-th operation."""
    pid = os.fork()
    if pid == 0:
        directory = CheckpointDirectory(str(root), keep=1, crash_point=KilledAt(n))
        store(directory, NEW)
        directory.collect_garbage()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(root: Path) -> None:
    os.fsync = lambda _: None  # a kill, unlike a power failure, loses nothing that was written
    template = root / "template"
    for cut in (OLDEST, OLDER):
        store(CheckpointDirectory(str(template)), cut)
    n, used = 0, []
    is_dead = True
    while is_dead:
        n += 1
        place = root / f"{n}"
        shutil.copytree(template, place)
        is_dead = dies_at(n, place)
        directory = CheckpointDirectory(str(place), keep=1)
        manifest = directory.newest()
        assert manifest is not None, n
        used.append(manifest.step)
        assert directory.verify(manifest.name) == [], n
        check_restored(directory, {2: OLDER, 3: NEW}[manifest.step], Layout(SPEC, 3))
        store(directory, NEXT)
        directory.collect_garbage()
        assert {path.parent.name for path in files_of(place)} == {NEXT.name}, n
        assert all(path.suffix in (".json", ".safetensors") for path in files_of(place)), n
    assert used == sorted(used), used  # once it is valid, it stays the newest
    assert set(used) == {2, 3}
    sys.stdout.write(f"{n - 1}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
