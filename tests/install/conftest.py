"""The sdist and the wheel that all tests of what users install have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import copy_tracked


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the tracked files, and a wheel that was built from it, for the Python that runs the tests.

    With the build tools that are installed; the tests of other Pythons let pip fetch those that pyproject.toml names.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    copy_tracked(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return out
