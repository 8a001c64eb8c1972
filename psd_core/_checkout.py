"""The error for a checkout that was not built: programs that run in it import it instead of an installed psd."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent

if (_ROOT / "setup.py").is_file() and not any((_HERE / f"_kernels{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
    raise ImportError(
        f"{_ROOT} is a checkout of psd whose kernels were not built for Python {sys.version_info[0]}.{sys.version_info[1]}. "
        f"Build them in place: pip install -e {_ROOT}. If psd is installed already, what runs in this directory finds the "
        "checkout first: run it elsewhere"
    )
