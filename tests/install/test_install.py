"""What users install: sdist and wheel as `python -m build` makes them, in empty environments of the Python that runs the tests,
of the oldest and of the newest that are here; and the README's words, to the letter, in a checkout.

make test-install runs it: it builds psd for each of them, and installs what psd needs from the package index. Building takes
most of the time. So the kernels are optimised in the wheel alone, not in what is built from the sdist or in the checkout.
PyTorch is not fetched and unpacked once more: the README's words find that of the environment that runs the tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from markdown_blocks import blocks
from source_tree import ROOT, copy_tracked

OLDEST = (3, 10)
OURS = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
IS_USABLE = """
import ensurepip, pathlib, sys, sysconfig, venv
if pathlib.Path(sysconfig.get_path("include"), "Python.h").exists() and sys.prefix == sys.base_prefix:
    print(*sys.version_info[:2])
"""
PINNED = {
    **os.environ,
    "PIP_CONSTRAINT": str(ROOT / ".ci/constraints.txt"),
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_COMPILE": "0",  # Python compiles what is imported, a small part
    "PYTHONDONTWRITEBYTECODE": "",
}
BUILDING = PINNED | {"PSD_CYTHON_DEBUG": "1"}
PIP = (sys.executable, "-m", "pip", "--python")

TRAINING = """
import importlib.metadata
import numpy as np
import psd_client

assert psd_client.__version__ == importlib.metadata.version("psd")
with psd_client.connect() as ps:
    params = ps.declare({"w": np.zeros(300_000, np.float32)}, optimizer=psd_client.SGD(lr=0.5))
    for _ in range(5):
        params = ps.push_pull({"w": params["w"] - 1})
    print("trained to", params["w"][-1], *ps.transports)
"""

FAILING = """
import multiprocessing
import numpy as np
import psd_client

def work():
    global ps
    ps = psd_client.connect()
    ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=0.5))
    raise ValueError("a child's")

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""
"""Its worker fails in a child, whose end is not the same in all versions of Python."""


def interpreters():
    """Ours, the oldest and the newest, by version, of what pyenv and uv have, and what is on the path."""
    homes = [Path(os.environ.get("PYENV_ROOT", "~/.pyenv")) / "versions", Path("~/.local/share/uv/python")]
    found = [path for home in homes for path in sorted(home.expanduser().glob("*/bin/python3"))]
    found += [Path(path) for minor in range(OLDEST[1], 30) if (path := shutil.which(f"python3.{minor}"))]
    usable = {}
    for path in [OURS, *found]:
        said = subprocess.run([path, "-c", IS_USABLE], capture_output=True, text=True, check=False).stdout.split()
        if said and tuple(map(int, said)) >= OLDEST:
            usable.setdefault(tuple(map(int, said)), path)
    return {
        ".".join(map(str, version)): usable[version] for version in sorted({sys.version_info[:2], min(usable), max(usable)})
    }


def lend_torch(environment):
    """Link PyTorch into an environment of the same Python, with CUDA's libraries, if it has them; pip finds it installed."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for pattern in ("torch*", "functorch*", "nvidia*", "triton*"):
        for path in Path(sysconfig.get_path("purelib")).glob(pattern):
            (packages / path.name).symlink_to(path)


def run(*command, cwd, environ=PINNED):
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("version", "python"), interpreters().items(), ids=interpreters())
def test_install_when_the_environment_is_empty_then_everything_works(version, python, built, tmp_path):
    """The wheel where its Python is ours, else the sdist. A job is trained, stored and exported by what is installed then."""
    run(python, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    here = tmp_path / "env/bin"
    (package,) = built.glob("*.whl" if python == OURS else "*.tar.gz")

    run(*PIP, here / "python", "install", "--quiet", package, cwd=tmp_path, environ=BUILDING)

    run(*PIP, here / "python", "check", cwd=tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    options = ["--shards", "2", "--workers", "2", "--checkpoint-dir", "stored"]
    said = run(here / "psd-run", *options, "train.py", cwd=tmp_path)
    assert said.count("trained to 0.96875 shm shm") == 2, said
    (tmp_path / "fail.py").write_text(FAILING)
    said = run(here / "psd-run", "fail.py", cwd=tmp_path)
    assert "a child's" in said
    assert "all workers have left" not in said, said
    run(here / "psdctl", "export", "stored", "--to", "model.safetensors", cwd=tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 1_200_000
    assert "PsdWorkerExpired" in run(here / "psdctl", "monitoring", "alerts", cwd=tmp_path)


def test_quick_start_when_it_is_followed_to_the_letter_in_a_checkout_then_it_trains(tmp_path):
    """What the README says between Install and the other faces, in a shell whose environment is empty. Then, as its build is
    removed, what it was leaves an error that says what to do."""
    checkout = tmp_path / "psd"
    copy_tracked(checkout)
    run(OURS, "-m", "venv", "env", cwd=tmp_path)
    lend_torch(tmp_path / "env")
    shown = (block for block in blocks(ROOT / "README.md") if block.language in ("bash", "python"))
    install, script, start, *_ = (block for block in shown if not block.text.startswith("make "))
    assert install.text.startswith("pip install ")
    assert start.text.startswith("psd-run ")

    def shell(words, environ=PINNED):
        done = subprocess.run(
            ["bash", "-euc", f". {tmp_path}/env/bin/activate\n{words}"],
            cwd=checkout,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    status, said = shell(install.text, BUILDING)
    assert status == 0, said
    (checkout / script.title).write_text(script.text)
    status, said = shell(start.text)

    assert status == 0, said
    assert start.marks["prints"] in said
    assert re.search(r"step 100, [\d.]+ steps/s; 200 pushes accepted, 0 late", said), said
    assert "up to step 0" not in said
    assert "has held no part of what was trained" in said, "one of the two shards has no block of so small a model"
    status, said = shell(f"python {script.title}")
    assert status == 0, said
    assert "weights: [1.0, 1.0, 1.0, 1.0]" in said

    for built in (checkout / "psd_core").glob("*.so"):
        built.unlink()
    status, said = shell(f"python {script.title}")
    assert status == 1
    assert f"{checkout} is a checkout of psd whose kernels were not built" in said, said
