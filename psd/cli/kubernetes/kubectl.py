"""Applies the manifests of psd/cli/kubernetes/job.py to a cluster, with the kubectl command.

It uses the command, not the package kubernetes, because the command has the user's contexts, credentials and plug-ins, and only
the command can apply.

The order is: refuse if a job would be overwritten; with --rescale take a checkpoint, then remove the shards and workers of the
old size, with their volumes; make credentials if there are none; apply the manifests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from psd.cli.kubernetes import manifests
from psd.cli.kubernetes.credentials import secrets_of
from psd.cli.kubernetes.manifests import Manifest
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.locations import shown


class Kubectl:
    """The kubectl command in one namespace; empty: kubectl's default.

    Args:
        run: a function with the signature of subprocess.run.
    """

    def __init__(self, namespace: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> None:
        if shutil.which("kubectl") is None and run is subprocess.run:
            raise ConfigError("kubectl: there is no such command; --dry-run prints the manifests, for kubectl apply elsewhere")
        self.prefix = ["kubectl", *(["--namespace", namespace] if namespace else [])]
        self.namespace = namespace
        self._run = run

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output. Raises ConfigError with its error text if it fails."""
        done = self._run([*self.prefix, *args], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise ConfigError(f"{' '.join([*self.prefix, *args])}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def get(self, kind: str, name: str) -> Manifest | None:
        """Get an object; None if there is none of that name."""
        text = self("get", kind, name, "--ignore-not-found", "--output", "json")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found


def deploy(
    rendered: Sequence[Manifest],
    kubectl: Kubectl,
    *,
    name: str,
    shards: int,
    checkpoint_dir: str,
    is_rescale: bool,
    needs_credentials: bool,
) -> None:
    """Apply a job's manifests, and print what was done and how to look at it.

    Raises:
        ConfigError: kubectl has failed; or a job of that name is running, or has another number of shards, and nothing was
            changed.
    """
    stateful_set, job = kubectl.get("statefulset", name), kubectl.get("job", f"{name}-worker")
    replicas = shards if stateful_set is None else stateful_set["spec"]["replicas"]
    if replicas != shards and not (job is not None and _has_ended(job, "Complete")):  # then the volumes are empty
        if not is_rescale:
            raise ConfigError(
                f"--shards: job {name} has {replicas} shards, not {shards}; --rescale changes that, by a checkpoint"
            )
        _make_room(kubectl, name, replicas, checkpoint_dir)
    else:
        if job is not None and not _has_ended(job, "Complete", "Failed"):
            raise ConfigError(
                f"--name: job {name} is running; choose another name, or end it: "
                f"{' '.join(kubectl.prefix)} delete job {name}-worker"
            )
        if job is not None:
            _say(f"removing job {name}-worker, which has ended")
            kubectl("delete", "job", f"{name}-worker", "--cascade=foreground")
        if stateful_set is not None:
            # Shards without a job are not ready, and a rolling update would wait until they are: for the job, and amid it.
            _say("removing the shards, to start them anew; their state is on their volumes")
            kubectl("delete", "statefulset", name, "--cascade=foreground")
    if needs_credentials:
        _make_credentials(kubectl, name)
    for line in kubectl("apply", "--filename", "-", stdin=manifests.as_yaml(rendered)).splitlines():
        _say(line)
    prefix, mine = " ".join(kubectl.prefix), f"--selector app.kubernetes.io/instance={name}"
    _say(f"to follow it:    {prefix} logs --follow --prefix --max-log-requests 64 {mine},app.kubernetes.io/component=worker")
    _say(f"to look inside:  {prefix} exec {name}-0 -- psdctl status")
    _say(f"to remove all:   {prefix} delete job,statefulset,pvc,service,configmap,secret,networkpolicy,pdb,sa {mine}")


def _make_room(kubectl: Kubectl, name: str, replicas: int, checkpoint_dir: str) -> None:
    """Take a checkpoint, then remove workers, shards and volumes, whose contents are for the old number of shards."""
    config = kubectl.get("configmap", name)
    stored = config["data"].get("CHECKPOINT_DIR", "") if config is not None else ""
    if stored != checkpoint_dir:
        raise ConfigError(f"--checkpoint-dir: the running shards have {shown(stored)!r}, not {shown(checkpoint_dir)!r}")
    _say(f"taking a checkpoint of {replicas} shards in {shown(stored)}")
    checkpoint = kubectl("exec", f"{name}-0", "--container", "shard", "--", "psdctl", "checkpoint").strip()
    _say(f"stored {checkpoint}; removing workers and shards")
    kubectl("delete", "job", f"{name}-worker", "--ignore-not-found", "--cascade=foreground")
    shards = f"--selector=app.kubernetes.io/instance={name},app.kubernetes.io/component=shard"
    kubectl("delete", "statefulset", name, "--cascade=orphan")
    kubectl("delete", "pod", shards, "--grace-period=1")  # no time for another checkpoint, which would lack its workers
    kubectl("delete", "pvc", shards)


def _make_credentials(kubectl: Kubectl, name: str) -> None:
    lacking = [
        secret for secret in secrets_of(name, kubectl.namespace) if kubectl.get("secret", secret["metadata"]["name"]) is None
    ]
    if lacking:
        kubectl("apply", "--filename", "-", stdin=manifests.as_yaml(lacking))
        _say(f"made {' and '.join('secret ' + secret['metadata']['name'] for secret in lacking)}")


def _has_ended(job: Manifest, *ways: str) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(found["type"] in ways and found["status"] == "True" for found in conditions)


def _say(text: str) -> None:
    show(f"psd-run: {text}", is_error=True)
