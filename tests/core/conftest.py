"""Helpers of the kernel tests."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

CSRC = Path(__file__).parents[2] / "psd_core" / "csrc"
COMPILER = shutil.which("cc")
CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = CPU_INFO.read_text().split() if CPU_INFO.exists() else []


@pytest.fixture
def rng():
    """Return a generator that makes the same numbers in every run."""
    return np.random.default_rng(20240229)


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where there is one, else on disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="psd-test-", dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def no_forced_switches():
    """Keep the interpreter from switching threads: a thread runs until it gives up the GIL itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


_VECTORS = ["-O2", "-ftree-vectorize"]  # -O3 would take half as long again to compile
VARIANTS = {
    "unoptimised": ["-O0"],
    "plain": ["-O3"],
    "fma": [*_VECTORS, "-mavx2", "-mfma"],
    "avx512f": [*_VECTORS, "-mavx512f"],
}


@pytest.fixture(scope="session", params=VARIANTS)
def library(request, tmp_path_factory):
    """Return the kernels, compiled for one fixed instruction set."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    if request.param in ("fma", "avx512f") and request.param not in CPU_FLAGS:
        pytest.skip(f"this processor has no {request.param}")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all processes of this run share: it takes longer to compile than all tests with it
    path = folder / f"kernels-{request.param}.so"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path, VARIANTS[request.param])
    return ctypes.CDLL(str(path))


SOURCES = ("kernels", "half", "content", "ranks", "codec", "vector_f", "vector_i")
"""Beginnings of the names of what has arithmetic: the stores are the same on every machine."""


def _compile(path, variant):
    sources = sorted(str(source) for source in CSRC.glob("*.c") if source.name.startswith(SOURCES))
    flags = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-DPSD_ONE_VERSION", *variant]
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, *sources, "-o", str(path), "-lm"], check=True)
