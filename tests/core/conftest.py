"""Helpers of the kernel tests."""

import ctypes
import fcntl
import hashlib
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


_VECTORS = ["-O2", "-ftree-vectorize"]  # -O3 would take half as long again to compile, and is how psd_core itself is built
VARIANTS = {
    "unoptimised": ["-O0"],
    "plain": _VECTORS,
    "fma": [*_VECTORS, "-mavx2", "-mfma"],
    "avx512f": [*_VECTORS, "-mavx512f"],
}


@pytest.fixture(scope="session", params=VARIANTS)
def library(request):
    """Return the kernels, compiled for one fixed instruction set; only anew if their source has changed."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    if request.param in ("fma", "avx512f") and request.param not in CPU_FLAGS:
        pytest.skip(f"this processor has no {request.param}")
    flags = [*_ALWAYS, *VARIANTS[request.param]]
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{request.param}-{_digest(flags)}.so"
    with (KEPT / f"{request.param}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # by all processes of all runs: it takes longer to compile than all tests with it
        if not path.exists():
            for older in KEPT.glob(f"{request.param}-*"):
                older.unlink()
            _compile(path, flags)
    return ctypes.CDLL(str(path))


SOURCES = ("kernels", "half", "content", "ranks", "codec", "vector_f", "vector_i")
"""Beginnings of the names of what has arithmetic: the stores are the same on every machine."""


KEPT = CSRC.parents[1] / "build" / "test-kernels"
_ALWAYS = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-DPSD_ONE_VERSION"]


def _digest(flags):
    """Of all that the compiler is given, and of itself."""
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout
    found = hashlib.sha256(repr((version, flags)).encode())
    for source in sorted(CSRC.glob("*.[ch]")):
        found.update(f"{source.name} {source.stat().st_size} ".encode() + source.read_bytes())
    return found.hexdigest()[:16]


def _compile(path, flags):
    """Under another name until it is whole: another run may be killed."""
    sources = sorted(str(source) for source in CSRC.glob("*.c") if source.name.startswith(SOURCES))
    partial = path.with_suffix(".part")
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, *sources, "-o", str(partial), "-lm"], check=True)
    partial.rename(path)
