"""psd-run --on kubernetes: what is sent, what is refused, and what kubectl is told. tests/deploy plays the result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from psd.cli import run
from psd.cli.kubernetes import credentials, manifests
from psd.cli.kubernetes.job import SCRIPT_BYTES_MAX
from psd.cli.kubernetes.kubectl import Kubectl
from psd.contract.config import ConfigError
from psd.contract.environment import client_config

ON = ("--on", "kubernetes", "--image", "registry/psd:1")


@pytest.fixture(autouse=True)
def _beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)


def deployment(*words: str) -> run.Deployment:
    plan = run.parse([*ON, *words], {})
    assert isinstance(plan, run.Deployment)
    return plan


def job_of(*words: str) -> dict[str, Any]:
    return manifests.container(manifests.the("Job", deployment(*words).render()))


class FakeKubectl:
    """Answers `get` with `objects`, by name, and notes all other commands."""

    def __init__(self, **objects: dict[str, Any]) -> None:
        self.objects = {name.replace("_", "-"): found for name, found in objects.items()}
        self.done: list[str] = []

    def __call__(self, command: list[str], *, input: str | None, **_: Any) -> subprocess.CompletedProcess[str]:  # noqa: A002
        if "get" in command:
            found = self.objects.get(command[command.index("get") + 2])
            return subprocess.CompletedProcess(command, 0, "" if found is None else json.dumps(found), "")
        self.done.append(" ".join(command[1:]))
        return subprocess.CompletedProcess(command, 1 if "exec" in command else 0, "", "no checkpoint")


def test_a_script_of_this_machine_is_sent_along():
    """It is in a ConfigMap, which the workers have as a file; their arguments reach it as they are."""
    plan = deployment("train.py", "--epochs", "3", "$(HOME)")

    script, *rendered = plan.render()
    worker = manifests.container(manifests.the("Job", rendered))

    assert script["data"] == {"train.py": "print('hello')\n"}
    assert worker["command"] == ["python", "-u", "/etc/psd/script/train.py", "--epochs", "3", "$$(HOME)"]
    assert worker["volumeMounts"][-1]["mountPath"] == "/etc/psd/script"
    assert manifests.the("Job", rendered)["spec"]["template"]["spec"]["volumes"][-1]["configMap"]["name"] == "psd-script"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/app/train.py", "--fast"], ["python", "-u", "/app/train.py", "--fast"]),
        (["-m", "my.train", "-x"], ["python", "-u", "-m", "my.train", "-x"]),
        (["--", "torchrun", "train.py"], ["torchrun", "train.py"]),
    ],
)
def test_what_lies_in_the_image_is_only_named(words, command):
    """An absolute path, a module, another command: nothing is sent, and nothing is looked for here."""
    assert job_of(*words)["command"] == command
    assert deployment(*words).script is None


def test_options_reach_shards_and_workers():
    """Those of the training are the workers' environment, those of the shards their arguments."""
    plan = deployment(
        *["--workers", "3", "--consistency", "ssp:2", "--lease", "20", "--grace", "90", "--rule", "m:R", "--max-restarts", "4"],
        *["--log-level", "debug"],
        *["--from-checkpoint", "s3://b/m.safetensors", "--parameters-only"],
        *["--checkpoint-dir", "s3://b/r", "--checkpoint-steps", "7", "--name", "mine", "--namespace", "ours", "train.py"],
    )

    rendered = plan.render()
    stateful_set, job = manifests.the("StatefulSet", rendered), manifests.the("Job", rendered)
    args = manifests.container(stateful_set)["args"]
    variables = {variable["name"]: variable.get("value") for variable in manifests.container(job)["env"]}

    assert {"--lease=20", "--grace=90", "--checkpoint-steps=7", "--rule=m:R", "--log-level=debug"} <= set(args)
    assert {"--from-checkpoint=s3://b/m.safetensors", "--parameters-only"} <= set(args)
    assert sum(arg.startswith("--grace") for arg in args) == 1
    assert stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 110
    assert (variables["PSD_CONSISTENCY"], variables["PSD_WORLD_SIZE"]) == ("ssp:2", "3")
    assert job["spec"]["backoffLimitPerIndex"] == 4
    assert {found["metadata"]["namespace"] for found in rendered} == {"ours"}
    assert {found["metadata"]["name"] for found in rendered} == {"mine", "mine-worker", "mine-script"}
    assert {manifests.container(owner)["image"] for owner in (stateful_set, job)} == {"registry/psd:1"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "kubernetes", "train.py"], "--image: expected an image"),
        ([*ON, "missing.py"], "there is no script 'missing.py' here"),
        ([*ON, "--name", "Mine", "train.py"], "--name: expected at most 41 small letters"),
        ([*ON, "--namespace", "a_b", "train.py"], "--namespace: expected"),
        ([*ON, "--state-dir", "/x", "train.py"], "--state-dir: not with --on kubernetes"),
        ([*ON, "--max-shard-restarts", "0", "train.py"], "--max-shard-restarts: not with --on kubernetes"),
        ([*ON, "--transport", "shm", "train.py"], "--transport: shm is for one machine"),
        (["--streams", "33", "train.py"], "--streams: expected 1 to 32, got 33"),
        (
            ["--streams", "2", "--transport", "grpc", "train.py"],
            "--streams: are of the tcp lane; expected 1 with --transport grpc, got 2",
        ),
        ([*ON, "--checkpoint-dir", "/data", "train.py"], "--checkpoint-dir: '/data' would be a different place in each pod"),
        ([*ON, "--from-checkpoint", "/data", "train.py"], "--from-checkpoint: '/data' would be a different place in each pod"),
        ([*ON, "--rescale", "train.py"], "--rescale: needs --checkpoint-dir"),
        (["--dry-run", "train.py"], "--dry-run: is for --on kubernetes"),
        (["--image", "psd", "train.py"], "--image: is for --on kubernetes"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(words, says, capsys):
    """With status 2, and one line."""
    with pytest.raises(SystemExit) as ended:
        run.parse(words, {})

    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_script_that_is_too_large_is_refused(tmp_path, capsys):
    """The error names the limit of 1 MiB, and what to do."""
    (tmp_path / "train.py").write_text("#" * SCRIPT_BYTES_MAX)

    assert deployment("--dry-run", "train.py").run() == 1
    assert "at most 1 MiB in a ConfigMap; put it into the image" in capsys.readouterr().err


def test_a_dry_run_prints_and_does_nothing(monkeypatch, capsys):
    """Without kubectl, and without credentials."""
    monkeypatch.setenv("PATH", "")

    assert run.main([*ON, "--dry-run", "train.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n---\n") == 8
    assert "kind: Secret" not in printed.out
    assert printed.err == ""


def test_without_kubectl_it_says_what_to_do(monkeypatch, capsys):
    """Status 1, and the way without it."""
    monkeypatch.setenv("PATH", "")

    assert run.main([*ON, "train.py"]) == 1
    assert "kubectl: there is no such command; --dry-run prints the manifests" in capsys.readouterr().err


def test_credentials_are_made_where_there_are_none(capsys):
    """A Secret that is there is left alone."""
    kubectl = FakeKubectl(psd_tls={"kind": "Secret"})

    assert deployment("train.py").run(Kubectl("ours", run=kubectl)) == 0
    assert kubectl.done == ["--namespace ours apply --filename -"] * 2
    assert "made secret psd-tokens\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objects", "words", "says"),
    [
        ({"psd": {"spec": {"replicas": 2}}}, ["--shards", "3"], "job psd has 2 shards, not 3; --rescale changes that"),
        (
            {"psd_worker": {"status": {}}},
            [],
            "choose another name, or end it: kubectl delete job psd-worker",
        ),
        (
            {"psd": {"spec": {"replicas": 2}, "data": {"CHECKPOINT_DIR": "s3://b/other"}}},
            ["--rescale", "--checkpoint-dir", "s3://b/r"],
            "--checkpoint-dir: the running shards have 's3://b/other', not 's3://b/r'",
        ),
        (
            {"psd": {"spec": {"replicas": 2}, "data": {"CHECKPOINT_DIR": "s3://b/r"}}},
            ["--rescale", "--checkpoint-dir", "s3://b/r"],
            "psdctl checkpoint: no checkpoint",
        ),
    ],
)
def test_what_is_running_is_not_touched_by_mistake(objects, words, says, capsys):
    """Nothing is applied or deleted; a rescaling whose checkpoint fails ends there."""
    kubectl = FakeKubectl(**objects)

    assert deployment("--insecure", *words, "train.py").run(Kubectl("", run=kubectl)) == 1
    assert says in capsys.readouterr().err
    assert [command for command in kubectl.done if not command.startswith("exec")] == []


@pytest.mark.parametrize(("condition", "replicas"), [("Complete", 1), ("Failed", 1), ("Complete", 5)])
def test_a_job_that_has_ended_makes_room_for_the_next(condition, replicas):
    """Its template cannot be changed, so it is removed first. Its shards, which are not ready, would not be updated."""
    ended = {"status": {"conditions": [{"type": condition, "status": "True"}]}}
    kubectl = FakeKubectl(psd_worker=ended, psd={"spec": {"replicas": replicas}})

    assert deployment("--insecure", "train.py").run(Kubectl("", run=kubectl)) == 0
    assert kubectl.done == [
        "delete job psd-worker --cascade=foreground",
        "delete statefulset psd --cascade=foreground",
        "apply --filename -",
    ]


def test_a_rank_comes_from_the_indexed_job_unless_given():
    """JOB_COMPLETION_INDEX is the default of PSD_RANK."""
    pod = {"PSD_SERVERS": "psd-0.psd:7000", "PSD_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "3"}

    assert client_config(environ=pod).rank == 3
    assert client_config(environ=pod | {"PSD_RANK": "1"}).rank == 1
    assert client_config(environ=pod, rank=2).rank == 2
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX: expected a whole number"):
        client_config(environ=pod | {"JOB_COMPLETION_INDEX": "x"})


def test_credentials_are_for_these_shards_alone():
    """Each token has its role in the shards' file, and is the only thing in its own; keys are made anew each time."""
    tls, tokens = (secret["stringData"] for secret in credentials.secrets_of("mine", shards=2))
    other, _ = (secret["stringData"] for secret in credentials.secrets_of("mine", shards=2))

    lines = dict(line.split() for line in tokens["tokens"].splitlines())
    assert lines == {role: tokens[role].strip() for role in ("worker", "reader", "admin")}
    assert len(set(lines.values())) == 3
    assert tls["ca.crt"] == tls["tls.crt"] != other["tls.crt"]
    assert tls["tls.key"].startswith("-----BEGIN PRIVATE KEY-----")


def test_without_openssl_credentials_say_so(monkeypatch, capsys):
    """psdctl credentials: status 1."""
    from psd.cli import psdctl

    monkeypatch.setenv("PATH", "")

    assert psdctl.main(["credentials"]) == 1
    assert "openssl: there is no such command" in capsys.readouterr().err
