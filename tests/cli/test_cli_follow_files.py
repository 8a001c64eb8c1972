"""The files and the directory of psdctl follow, without a job."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from psd.cli.follow.formats import PeftFormat, PulledVersion, SafetensorsFormat, name_in_file
from psd.cli.follow.versions import FollowedDirectory, FollowedVersion
from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointFailed

VALUES = {
    "w": np.array([[1.0, 1.00390625], [-2.5, 3e38]], np.float32),
    "half": np.array([1.0, 1e-8, 70_000.0], np.float32),
    "ids": np.array([1, -(2**62)], np.int64),
    "flag": np.array(True),
    "wide": np.array(np.pi),
    "byte": np.array([1, 255, 3], np.uint8),
}
DTYPES = {"w": "bfloat16", "half": "float16", "ids": "int64", "flag": "bool", "wide": "float64", "byte": "uint8"}


def pulled(version: int = 1200, **tensors: Any) -> PulledVersion:
    values = {name.replace("__", "."): np.asarray(value, np.float32) for name, value in tensors.items()}
    return PulledVersion("job", 0, version, values or VALUES, dict.fromkeys(values, "float32") if values else DTYPES)


def content(chunks: Any) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def test_a_file_of_tensors_is_one_that_the_library_reads_in_the_declared_dtypes() -> None:
    """As the workers' own copies: float32 masters of 16 bits are rounded to nearest even."""
    (file,) = SafetensorsFormat().files(pulled()).values()

    found = safetensors.torch.load(content(file))

    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {
        name: f"torch.{dtype}" for name, dtype in DTYPES.items()
    }
    for name, tensor in found.items():
        expected = torch.from_numpy(VALUES[name]).to(tensor.dtype)
        assert tensor.shape == VALUES[name].shape
        assert torch.equal(tensor, expected), name


def test_a_file_says_of_which_job_and_version_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content(SafetensorsFormat().files(pulled())["model.safetensors"]))

    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "psd_job": "job", "psd_version": "1200"}


@pytest.mark.parametrize(
    ("name", "adapter", "in_file"),
    [
        ("base_model.model.q.lora_A.default.weight", "default", "base_model.model.q.lora_A.weight"),
        ("base_model.model.q.lora_A.default.weight", "policy", "base_model.model.q.lora_A.default.weight"),
        ("base_model.model.default.q.lora_A.default.weight", "default", "base_model.model.default.q.lora_A.weight"),
        ("base_model.model.emb.lora_embedding_A.default", "default", "base_model.model.emb.lora_embedding_A"),
        ("base_model.model.score.modules_to_save.default.weight", "default", "base_model.model.score.weight"),
        ("base_model.model.q.lora_magnitude_vector.default.weight", "default", "base_model.model.q.lora_magnitude_vector"),
        ("base_model.model.q.weight", "default", "base_model.model.q.weight"),
    ],
)
def test_an_adapters_tensors_are_called_in_its_file_as_peft_does(name: str, adapter: str, in_file: str) -> None:
    assert name_in_file(name, adapter) == in_file


def test_an_adapter_is_written_without_the_model_that_it_belongs_to(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text('{"peft_type": "LORA", "r": 8}')
    form = PeftFormat(str(config))
    names = ["q.weight", "q.lora_A.default.weight", "q.lora_B.default.weight"]

    assert form.names(names) == {"q.lora_A.default.weight": "q.lora_A.weight", "q.lora_B.default.weight": "q.lora_B.weight"}
    assert form.names(["q.lora_A.weight"]) == {"q.lora_A.weight": "q.lora_A.weight"}  # named as in a file already
    files = form.files(pulled(q__lora_A__default__weight=[1.0], q__lora_B__default__weight=[2.0]))
    assert content(files["adapter_config.json"]) == config.read_bytes()
    found = safetensors.numpy.load(content(files["adapter_model.safetensors"]))
    assert {name: value.tolist() for name, value in found.items()} == {"q.lora_A.weight": [1.0], "q.lora_B.weight": [2.0]}
    with pytest.raises(ConfigError, match=r"--adapter: 'default': two tensors would be called 's\.weight'"):
        form.names(["s.default.weight", "s.modules_to_save.default.weight"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "--adapter-config: cannot read .*: No such file or directory"),
        ("[1]", "--adapter-config: .* holds no JSON object"),
        ("{", "--adapter-config: .* holds no JSON object"),
        ("{}", "has no peft_type, so it is no adapter_config.json"),
    ],
)
def test_a_file_that_is_no_adapters_config_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    config = tmp_path / "adapter_config.json"
    if text is not None:
        config.write_text(text)

    with pytest.raises(ConfigError, match=says):
        PeftFormat(str(config))


def write(directory: FollowedDirectory, version: int, timeline: int = 0, keep: int = 2) -> None:
    """Write one version, and do what comes after."""
    now = FollowedVersion(timeline, version)
    files = {"model.safetensors": [f"{timeline} {version}".encode() * 100]}
    directory.write(now, "job", files, {"format": "safetensors"})
    directory.link(now)
    directory.prune(keep, ())


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".") or "version" in entry.name)


def test_the_newest_versions_are_kept_and_latest_leads_to_the_last(tmp_path: Path) -> None:
    with FollowedDirectory(str(tmp_path / "a" / "b")) as directory:
        for version in (1, 2, 30):
            write(directory, version)

        assert entries(directory.path) == ["latest", "version-00000002", "version-00000030"]
        assert (directory.path / "latest").resolve().name == "version-00000030"
        said = json.loads((directory.path / "latest" / "version.json").read_text())
        assert (said["job"], said["version"], said["timeline"], said["format"]) == ("job", 30, 0, "safetensors")
        assert said["bytes"] == {"model.safetensors": 400}

        write(directory, 5, timeline=1)  # the job has gone back to a checkpoint

        assert entries(directory.path) == ["latest", "timeline-00001-version-00000005", "version-00000030"]
        assert directory.newest == FollowedVersion(1, 5)
        write(directory, 6, timeline=1, keep=1)
        assert entries(directory.path) == ["latest", "timeline-00001-version-00000006"]


def test_a_version_that_is_used_stays(tmp_path: Path) -> None:
    with FollowedDirectory(str(tmp_path)) as directory:
        write(directory, 1)
        for version in (2, 3):
            directory.write(FollowedVersion(0, version), "job", {}, {})

        directory.prune(1, ["version-00000001"])

        assert entries(tmp_path) == ["latest", "version-00000001", "version-00000003"]


def test_what_is_not_of_its_own_is_left_alone_or_refused(tmp_path: Path) -> None:
    for name in ("version-00000009", ".hidden.tmp", "notes"):
        (tmp_path / name).mkdir()
    with FollowedDirectory(str(tmp_path)) as directory:
        assert directory.newest is None
        write(directory, 1)
        with pytest.raises(ConfigError, match="another psdctl follow writes to"):
            FollowedDirectory(str(tmp_path))
        with pytest.raises(ConfigError, match="has versions of job 'job', and this is job 'other'; name another directory"):
            directory.write(FollowedVersion(0, 2), "other", {}, {})
    assert all((tmp_path / name).is_dir() for name in ("version-00000009", ".hidden.tmp", "notes"))
    with FollowedDirectory(str(tmp_path)) as directory:
        assert (directory.newest, directory.job) == (FollowedVersion(0, 1), "job")

    (tmp_path / "taken" / "latest").mkdir(parents=True)
    with pytest.raises(ConfigError, match="latest is not a link"):
        FollowedDirectory(str(tmp_path / "taken"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--to: cannot use .*file"):
        FollowedDirectory(str(tmp_path / "file"))


def assert_whole(path: Path) -> None:
    """Each version that has a name is whole, `latest` leads to one, and nothing else is left."""
    found = [entry for entry in path.iterdir() if entry.name.startswith("version-")]
    for entry in found:
        said = json.loads((entry / "version.json").read_text())
        assert entry.name == f"version-{said['version']:08}"
        assert {file: (entry / file).stat().st_size for file in said["bytes"]} == said["bytes"]
    if os.path.lexists(path / "latest"):
        assert (path / "latest").resolve() in found
    allowed = {entry.name for entry in found} | {"latest", ".lock", ".command-lock"}
    assert {entry.name for entry in path.iterdir()} <= allowed


def test_an_error_at_any_point_leaves_nothing_torn(tmp_path: Path) -> None:
    """As on a full disk: what was there stays, and the same calls succeed later."""
    point, fails_at = 0, 0

    def crash_point(_: str) -> None:
        nonlocal point
        point += 1
        if point == fails_at:
            raise OSError(28, "No space left on device")

    while True:
        place = tmp_path / str(fails_at)
        with FollowedDirectory(str(place), crash_point) as directory:
            point = 0
            fails_at += 1
            failed = 0
            for version in (1, 2, 3):
                with contextlib.suppress(CheckpointFailed, OSError):
                    write(directory, version)
                    failed -= 1
                failed += 1
                assert_whole(place)
            directory.link(FollowedVersion(0, 3)) if directory.newest == FollowedVersion(0, 3) else write(directory, 3)
            directory.prune(2, ())
            assert (place / "latest").resolve().name == "version-00000003"
            assert len(entries(place)) == 3
        if not failed:
            break
    assert fails_at > 30


KILLED = """
import os, sys
from psd.cli.follow.versions import FollowedDirectory, FollowedVersion

point, killed_at = 0, int(sys.argv[2])
def crash_point(_):
    global point
    point += 1
    if point == killed_at:
        os._exit(9)

def lives(path):
    with FollowedDirectory(path, crash_point) as directory:
        for version in (1, 2, 3):
            now = FollowedVersion(0, version)
            directory.write(now, "job", {"model.safetensors": [b"x" * version]}, {})
            directory.link(now)
            directory.prune(2, ())

for life in range(1, killed_at + 1):
    child = os.fork()
    if child == 0:
        killed_at = life
        lives(f"{sys.argv[1]}/{life}")
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_follower_that_is_killed_at_any_point_leaves_nothing_torn(tmp_path: Path) -> None:
    """The next one finds whole versions alone, removes what the other had begun, and goes on."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "60"], check=True, timeout=300)

    lives = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    last = []
    for place in lives:
        for entry in place.glob("version-*"):
            assert json.loads((entry / "version.json").read_text())["bytes"] == {"model.safetensors": int(entry.name[-1])}
        with FollowedDirectory(str(place)) as directory:
            assert_whole(place)
            last.append(directory.newest)
            write(directory, 9)
            assert (place / "latest").resolve().name == "version-00000009"
    assert last[0] is None
    assert last[-1] == FollowedVersion(0, 3)
    assert {FollowedVersion(0, version) for version in (1, 2, 3)} <= set(last)
