"""Builds what benchmarks have in C, as the kernels are built: _gather.c, loops over rows, and _calls.c, small calls."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import psd_core


def build(name: str, directory: Path) -> Path:
    """Compile _<name>.c into a shared library in the directory; return its path."""
    library = directory / f"{name}.so"
    source = Path(__file__).with_name(f"_{name}.c")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    include = Path(psd_core.__file__).parent / "csrc"
    flags = ["-O3", f"-I{include}", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library
