"""The manifests of deploy/ as objects: reads the files that Kustomize users apply, and adapts them to one job.

    load       deploy/base and deploy/workers, with the patches of deploy/components/insecure if asked for
    named      the same under another name; shards, workers: of another size
    as_yaml    for kubectl

Only those features of Kustomize are implemented that the files use: `resources`, and `patches` in the form of JSON Patch with
the four operations below. The package jsonpatch would be another dependency, and kubectl's own Kustomize would make --dry-run
need kubectl. Decides nothing; psd/cli/kubernetes/job.py does. Must not know flags, nor kubectl.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from psd.contract.config import ConfigError

Manifest = dict[str, Any]

NAME = "psd"
"""The name of everything in deploy/."""

GRPC_PORT = 7000


def load(*, is_insecure: bool) -> list[Manifest]:
    """Read the manifests of shards and workers in deploy/.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    found = [*_resources("base"), *_resources("workers")]
    return patched(found, "components/insecure") if is_insecure else found


def patched(manifests: Iterable[Manifest], component: str) -> list[Manifest]:
    """Copies with the patches of a component, a folder of deploy/."""
    changed = copy.deepcopy(list(manifests))
    for patch in _read(component, "kustomization.yaml")[0]["patches"]:
        for manifest in changed:
            if manifest["kind"] == patch["target"]["kind"]:
                for operation in _read(component, patch["path"])[0]:
                    _apply(operation, manifest)
    return changed


def the(kind: str, manifests: Iterable[Manifest]) -> Manifest:
    """The only manifest of a kind."""
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def container(manifest: Manifest) -> Manifest:
    """The only container of a StatefulSet or a Job."""
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def servers(name: str, shards: int) -> str:
    """The shards' addresses, in the form of PSD_SERVERS."""
    return ",".join(f"{name}-{index}.{name}:{GRPC_PORT}" for index in range(shards))


def named(manifests: Iterable[Manifest], name: str, namespace: str) -> list[Manifest]:
    """Copies for a job of this name, in this namespace; empty: kubectl's default."""

    def renamed(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: renamed(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [renamed(v, key) for v in value]
        if key in _NAMES and value in _NAMED:
            return name + value.removeprefix(NAME)
        return value

    changed: list[Manifest] = [renamed(manifest) for manifest in manifests]
    config = the("ConfigMap", changed)
    config["data"]["PSD_RUN_ID"] = name
    config["data"]["PSD_SERVERS"] = servers(name, int(config["data"]["SHARDS"]))
    args = container(the("StatefulSet", changed))["args"]
    args[args.index(_ADVERTISE.format(NAME))] = _ADVERTISE.format(name)
    for manifest in changed:
        if namespace:
            manifest["metadata"]["namespace"] = namespace
    return changed


_NAMES = ("name", "serviceName", "serviceAccountName", "secretName", "app.kubernetes.io/instance")
_NAMED = (NAME, f"{NAME}-worker", f"{NAME}-tls", f"{NAME}-tokens")
_ADVERTISE = f"--advertise=$(POD_NAME).{{}}:{GRPC_PORT}"


def set_sizes(manifests: Iterable[Manifest], shards: int, workers: int) -> None:
    """Set the numbers of shards and workers."""
    manifests = list(manifests)
    stateful_set, job, config = (the(kind, manifests) for kind in ("StatefulSet", "Job", "ConfigMap"))
    stateful_set["spec"]["replicas"] = shards
    config["data"]["SHARDS"] = str(shards)
    config["data"]["PSD_SERVERS"] = servers(config["metadata"]["name"], shards)
    job["spec"]["completions"] = job["spec"]["parallelism"] = workers
    set_variable(container(job), "PSD_WORLD_SIZE", str(workers))


def set_variable(in_container: Manifest, name: str, value: str) -> None:
    """Set an environment variable of a container, in place of one of that name."""
    for variable in in_container["env"]:
        if variable["name"] == name:
            variable["value"] = value  # in its place: later ones may refer to it
            return
    in_container["env"].append({"name": name, "value": value})


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """YAML for kubectl apply -f -."""
    text: str = _yaml().safe_dump_all(manifests, sort_keys=False, width=120)
    return text


def _resources(folder: str) -> list[Manifest]:
    names = _read(folder, "kustomization.yaml")[0]["resources"]
    return [manifest for name in names for manifest in _read(folder, name)]


def _read(folder: str, name: str) -> list[Any]:
    text = (resources.files("psd.cli") / "deploy" / folder / name).read_text()
    return list(_yaml().safe_load_all(text))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("--on: kubernetes needs PyYAML, which is not installed: pip install 'psd[kubernetes]'") from None
    return yaml


def _apply(operation: Manifest, manifest: Manifest) -> None:
    """Apply one operation of JSON Patch (RFC 6902): test, add, replace or remove."""
    *parents, last = operation["path"].removeprefix("/").split("/")
    target: Any = manifest
    for part in parents:
        target = target[int(part) if isinstance(target, list) else part]
    key = int(last) if isinstance(target, list) else last
    match operation["op"]:
        case "test":
            assert target[key] == operation["value"], (operation, target[key])
        case "add" if isinstance(target, list):
            target.insert(key, operation["value"])
        case "add" | "replace":
            target[key] = operation["value"]
        case "remove":
            del target[key]
