"""Helpers of the kernel tests."""

import ctypes
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


VARIANTS = {"unoptimised": ["-O0"], "plain": ["-O3"], "fma": ["-O3", "-mavx2", "-mfma"], "avx512f": ["-O3", "-mavx512f"]}


@pytest.fixture(scope="session", params=VARIANTS)
def library(request, tmp_path_factory):
    """Return the kernels, compiled for one fixed instruction set."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    if request.param in ("fma", "avx512f") and request.param not in CPU_FLAGS:
        pytest.skip(f"this processor has no {request.param}")
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    sources = sorted(str(source) for source in CSRC.glob("*.c") if not source.name.startswith("table"))
    flags = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-DPSD_ONE_VERSION", *VARIANTS[request.param]]
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, *sources, "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))
