"""Stubs of gRPC as a stranger would make them from proto/, in a folder of their own; for programs without psd's code."""

from __future__ import annotations

from pathlib import Path

import pytest
from source_tree import ROOT


def generate_stubs(out: Path) -> Path:
    """Make the stubs, as a package `psd` that hides psd's own; return the folder."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is needed to generate stubs")
    protos = sorted(map(str, (ROOT / "proto/psd/v1").glob("*.proto")))
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--grpc_python_out={out}", *protos]) == 0
    for package in ("psd", "psd/v1"):
        (out / package / "__init__.py").touch()
    return out
