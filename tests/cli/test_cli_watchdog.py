"""The watchdog's protocol; what it does is tested with psd-run."""

import io
from pathlib import Path

import pytest

from psd.cli.processes.watchdog import Left, watch


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (b"", Left(set(), [])),
        (b"+4711\n+4712\n-4711\n", Left({4712}, [])),
        (b"=/dev/shm/a%20b%0A%FF\n+1\n", Left({1}, [Path("/dev/shm/a b\n\udcff")])),
        (b"+4711\n=/dev/sh", Left({4711}, [])),
        (b"+4711\nend\n", None),
    ],
)
def test_watch_when_psd_run_ends_then_it_knows_what_is_left(text, left):
    assert watch(io.BytesIO(text)) == left
