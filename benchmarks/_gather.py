"""Builds the loops in C that gather and update rows at known places (_gather.c), as the kernels are built."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import psd_core


def build(directory: Path) -> Path:
    """Compile them into a shared library in the directory; return its path."""
    library = directory / "gather.so"
    source = Path(__file__).with_name("_gather.c")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    include = Path(psd_core.__file__).parent / "csrc"
    flags = ["-O3", f"-I{include}", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library
