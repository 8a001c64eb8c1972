"""A new job that begins with --from-checkpoint: with a whole checkpoint, or with the parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import psd_client
from psd.checkpoint import CheckpointDirectory, sealing
from psd.contract.config import ConfigError
from psd_client import SGD, Adam, SpecMismatch

SHAPES = {"body.weight": (300, 40), "body.bias": (300,), "head": ()}
Cluster = Callable[..., Any]


def values(seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def trained(cluster: Cluster, url: str) -> dict[str, Any]:
    """Train three steps by Adam on two shards, and leave a checkpoint; return the parameters."""
    shards = cluster(2, checkpoint_dir=url)
    with psd_client.connect(shards.servers, 0, 1) as ps:
        ps.declare(values(1), Adam(lr=0.1))
        for seed in (2, 3, 4):
            last = ps.push_pull(values(seed))
    shards.finish()
    return last


def declare(servers: str, params: Any, optimizer: Any = None, **arguments: Any) -> tuple[Any, int]:
    with psd_client.connect(servers, 0, 1) as ps:
        return ps.declare(params, optimizer or SGD(lr=1), **arguments), ps.clock


def test_parameters_alone_begin_a_job_of_another_optimizer_and_other_groups(cluster: Cluster, tmp_path: Path) -> None:
    """By name, in another order, in other groups and other blocks; the worker's own values do not count, nor does the clock."""
    last = trained(cluster, str(tmp_path))
    shards = cluster(3, from_checkpoint=str(tmp_path), parameters_only=True)
    given = dict(reversed(values(9).items()))
    groups = [{"params": ["head"], "lr": 2.0}, {"params": ["body.weight", "body.bias"], "momentum": 0.5}]

    with psd_client.connect(shards.servers, 0, 1) as ps:
        params = ps.declare(given, SGD(lr=1), groups=groups)
        assert ps.clock == 0
        stepped = ps.push_pull({"head": np.float32(0.25)})

    assert {name: array.tobytes() for name, array in params.items()} == {n: last[n].tobytes() for n in given}
    assert stepped["head"] == last["head"] - 0.5


def test_parameters_alone_come_from_a_plain_safetensors_file(cluster: Cluster, tmp_path: Path) -> None:
    """In other dtypes, beside tensors that the job does not have, of types that psd does not train."""
    file, stored = tmp_path / "model.safetensors", values(5, np.float16)
    safetensors.numpy.save_file({**stored, "seen": np.array(7, np.int64), "mask": np.ones(3, np.bool_)}, file)
    shards = cluster(2, from_checkpoint=str(file), parameters_only=True)

    params, clock = declare(shards.servers, values(9))

    assert clock == 0
    for name, array in stored.items():
        np.testing.assert_array_equal(params[name], array.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tail": np.zeros(3, np.float32)}, "parameter 'tail': is in this worker's declaration, is not in .*model.safetensors"),
        ({"head": np.zeros(3, np.float32)}, r"shape of parameter 'head': \(\) in .*model.safetensors, \(3,\) in this worker's"),
    ],
)
def test_parameters_that_are_not_the_jobs_are_refused_and_nothing_is_declared(
    cluster: Cluster, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    safetensors.numpy.save_file(values(5), tmp_path / "model.safetensors")
    shards = cluster(1, from_checkpoint=str(tmp_path / "model.safetensors"), parameters_only=True)

    with pytest.raises(SpecMismatch, match=match):
        declare(shards.servers, values(9) | change)
    params, _ = declare(shards.servers, values(9))

    assert params["head"] == values(5)["head"]


def test_a_whole_checkpoint_of_elsewhere_is_continued_here(cluster: Cluster, tmp_path: Path) -> None:
    """With its optimizer and its clock. What is stored from then on is the next run's; another job is told how to begin."""
    last = trained(cluster, str(tmp_path / "old"))
    name = CheckpointDirectory(str(tmp_path / "old")).checkpoints()[0].name
    where = {"from_checkpoint": str(tmp_path / "old" / name), "checkpoint_dir": str(tmp_path / "new")}
    shards = cluster(1, **where)

    with pytest.raises(SpecMismatch, match=f"optimizer .*: adam in checkpoint {name}, sgd in .*--parameters-only"):
        declare(shards.servers, values(9))
    params, clock = declare(shards.servers, values(9), Adam(lr=0.1))

    assert clock == 3
    assert {name: array.tobytes() for name, array in params.items()} == {n: last[n].tobytes() for n in params}


def test_what_cannot_be_begun_with_stops_the_start(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there; or a whole checkpoint that another version of psd has written, for which no older one is taken."""
    with pytest.raises(ConfigError, match=r"--from-checkpoint: no checkpoint in .*nowhere can be read"):
        cluster(1, from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"holds parameters alone.* give --parameters-only"):
        cluster(1, from_checkpoint="model.safetensors")
    with pytest.raises(psd_client.CheckpointFailed, match=r"there is no file .*model\.safetensors"):
        cluster(1, from_checkpoint=str(tmp_path / "model.safetensors"), parameters_only=True)
    trained(cluster, str(tmp_path))
    written = sealing.FORMAT_VERSION
    monkeypatch.setattr(sealing, "FORMAT_VERSION", written + 1)
    refused = rf"version {written}, written by psd .* which reads .*, version {written + 1}"
    for whole in ({"checkpoint_dir": str(tmp_path)}, {"from_checkpoint": str(tmp_path), "parameters_only": True}):
        with pytest.raises(psd_client.CheckpointUnsupported, match=refused):
            cluster(1, **whole)
    assert [info.state.value for info in CheckpointDirectory(str(tmp_path)).checkpoints()] == ["unsupported"]
    assert CheckpointDirectory(str(tmp_path)).collect_garbage() == []
