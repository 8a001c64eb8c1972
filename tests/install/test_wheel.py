"""Contents of the wheel: everything is in it, and nothing that a server must not load."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
from source_tree import ROOT, modules


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    (wheel,) = built.glob("psd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def loaded_by(unpacked, statement):
    """Names of the top-level modules that a statement loads, in a fresh interpreter that sees the wheel and what it needs."""
    paths = [str(unpacked), *(p for p in sys.path if p.endswith("-packages"))]
    code = f"import sys; sys.path[:0] = {paths!r}; {statement}; import psd; print(psd.__file__); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    origin, names = done.stdout.splitlines()[-2:]
    assert origin.startswith(str(unpacked)), origin
    return {name.partition(".")[0] for name in names.split()}


@pytest.mark.timeout(300)
def test_the_wheel_has_every_module_the_kernels_and_the_generated_code(unpacked):
    """All hand-written modules, the compiled kernels, protobuf modules with their types, markers and console scripts are there;
    C sources and tests are not."""
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    wanted = {
        f"{name.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}.py" for name, path in modules().items()
    }

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {n for n in wanted if n in tracked or f"clients/{n}" in tracked}
    assert wanted - names == set()
    for stem in ("job", "data", "control"):
        assert {f"psd/v1/{stem}_pb2.py", f"psd/v1/{stem}_pb2.pyi"} <= names
    assert {"psd/v1/data_pb2_grpc.py", "psd/v1/control_pb2_grpc.py"} <= names
    assert {"psd/py.typed", "psd_core/py.typed", "psd_client/py.typed"} <= names
    assert any(n.startswith("psd_core/_kernels.") and n.endswith(".so") for n in names)
    libraries = [(unpacked / n).read_bytes() for n in names if n.endswith(".so")]
    assert not any(section in library for library in libraries for section in (b".symtab", b".debug_info")), (
        "a third of the size"
    )
    assert not [n for n in names if n.endswith((".c", ".h")) or n.startswith("tests/")]
    static = {p.relative_to(ROOT).as_posix() for p in (ROOT / "psd/watch/dashboard/static").iterdir()}
    assert static <= names, "the dashboard's page"
    folders = ("base", "workers", "components", "grafana", "prometheus")
    deploy = {f"psd/cli/{p.relative_to(ROOT)}" for f in folders for p in (ROOT / "deploy" / f).rglob("*.*")}
    assert deploy == {n for n in names if n.startswith("psd/cli/deploy/")}
    (entry_points,) = unpacked.glob("psd-*.dist-info/entry_points.txt")
    assert all(f"{script} = psd.cli." in entry_points.read_text() for script in ("psd-server", "psd-run", "psdctl"))


def test_the_client_shows_its_public_names_alone(unpacked):
    """Its version, too, and the faces that have been imported; none of the modules that it is made of."""
    faces_of = {"psd_client": [], "psd_client.torch": ["torch"], "psd_client.torchrec": ["torch", "torchrec"]}
    for module, faces in faces_of.items():
        shown = f"{{*psd_client.__all__, '__version__', *{faces}}}"
        loaded_by(unpacked, f"import {module}; assert set(dir(psd_client)) == {shown}, dir(psd_client)")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import psd, psd_core", {"torch", "tensorflow", "keras", "jax", "grpc", "psd_client"}),
        ("import psd.state.shard, psd.contract.environment", {"torch", "tensorflow", "grpc", "psd_client"}),
        ("import psd.rim.server, psd.cli.server, psd.cli.run", {"torch", "tensorflow", "keras", "jax", "psd_client"}),
        ("import psd_client", {"torch", "tensorflow", "keras", "jax"}),
    ],
)
def test_imports_from_the_wheel_load_no_more_than_they_need(unpacked, statement, absent):
    """Kernels and state come without gRPC, the server without a framework, the client without torch."""
    assert loaded_by(unpacked, statement) & absent == set()
