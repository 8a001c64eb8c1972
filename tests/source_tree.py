"""The project's own source as text and syntax trees, for the tests that enforce its rules."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"psd": ROOT / "psd", "psd_core": ROOT / "psd_core", "psd_client": ROOT / "clients/psd_client"}


@dataclass(frozen=True)
class Import:
    """`importer` imports `module`; names that are modules themselves are given in full. `is_lazy`: not at import time."""

    importer: str
    module: str
    line: int
    is_lazy: bool


@functools.cache
def modules() -> dict[str, Path]:
    """All hand-written modules of the three packages by name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                found[name] = path
    return found


def copy_tracked(folder: Path) -> None:
    """Copy what git tracks, without the tests, into a folder: what a clone has, and none of what is built in ours."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in listed.split("\0"):
        if name and not name.startswith("tests/") and (ROOT / name).exists():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target, follow_symlinks=False)


def _walk(node: ast.AST, *, is_lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_lazy
        else:
            inside = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk(child, is_lazy=inside)


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import of every module."""
    known = modules()
    found = []
    for name, path in known.items():
        for node, is_lazy in _walk(tree(path), is_lazy=False):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f"{path}:{node.lineno}: relative import"
                assert node.module is not None
                base = node.module
                inner = [f"{base}.{alias.name}" for alias in node.names]
                targets = [i if i in known or i.startswith("psd.v1.") else base for i in inner]
            found += [Import(name, target, node.lineno, is_lazy) for target in dict.fromkeys(targets)]
    return tuple(found)


def is_within(module: str, *packages: str) -> bool:
    """True if a module is one of these packages or lies in one."""
    return any(module == package or module.startswith(package + ".") for package in packages)
