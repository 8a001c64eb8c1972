"""The manifests of deploy/: right for Kubernetes, for each other, and for psd-server."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kustomized import DEPLOY, kustomized
from source_tree import ROOT

from psd.cli import run, server
from psd.cli.kubernetes import credentials, manifests
from psd.contract.config import ServerConfig
from psd.contract.environment import VARIABLES
from psd.rim.server import READY

OLDEST = "1.29"
"""The oldest Kubernetes that has all that the manifests use switched on; deploy/README.md says so."""

FOLDERS = ["base", "overlays/mnist", "overlays/mnist-insecure"]
SHARED_PORTS = {"grpc": 7000, "bulk": 7001, "metrics": 7002}


def rendered_by_psd_run(*options: str) -> list[dict[str, Any]]:
    words = ["--on", "kubernetes", "--image", "psd", *options, "/opt/psd/examples/mnist.py", "--data=digits"]
    plan = run.parse(words, {})
    assert isinstance(plan, run.Deployment)
    return list(yaml.safe_load_all(manifests.as_yaml(plan.render())))


OPTIONS = {
    "psd-run": ["--shards", "2", "--workers", "2"],
    "psd-run, with options": [
        *["--shards", "5", "--workers", "7", "--name", "mine", "--namespace", "ours", "--insecure", "--grace", "30"],
        *["--checkpoint-dir", "s3://bucket/run", "--checkpoint-secs", "60", "--consistency", "async", "--max-restarts", "3"],
    ],
}


@functools.cache
def rendering(name: str) -> list[dict[str, Any]]:
    """Manifests of a folder, or of psd-run with some options; made when a test needs it, not before."""
    return rendered_by_psd_run(*OPTIONS[name]) if name in OPTIONS else kustomized(DEPLOY / name)


@pytest.fixture
def rendered(request) -> list[dict[str, Any]]:
    return rendering(request.param)


every_rendering = pytest.mark.parametrize("rendered", [*FOLDERS, *OPTIONS], indirect=True)


def of(kind: str, rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for found in rendered if found["kind"] == kind]


def shards(rendered: list[dict[str, Any]]) -> dict[str, Any]:
    return manifests.the("StatefulSet", rendered)


def config_of(rendered: list[dict[str, Any]]) -> ServerConfig:
    """The configuration that psd-server makes of the arguments of the last shard."""
    stateful_set, config = shards(rendered), manifests.the("ConfigMap", rendered)["data"]
    name, last = stateful_set["metadata"]["name"], stateful_set["spec"]["replicas"] - 1
    values = {**config, "POD_INDEX": str(last), "POD_NAME": f"{name}-{last}"}
    args = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], arg) for arg in manifests.container(stateful_set)["args"]]
    return server.parse(args)[0]


@every_rendering
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_kubernetes_takes_every_field(rendered, version):
    """The OpenAPI schemas of the oldest supported version and of the newest accept each; unknown fields are refused."""
    for manifest in rendered:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_makes_the_same_of_it(folder):
    """Where kubectl is installed; elsewhere the folders are rendered by this test alone."""
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        done = subprocess.run([kubectl, "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=True)
        theirs = list(yaml.safe_load_all(done.stdout))

        def by_name(found: dict[str, Any]) -> tuple[str, str]:
            return found["kind"], found["metadata"]["name"]

        assert sorted(theirs, key=by_name) == sorted(rendering(folder), key=by_name)


def test_psd_run_applies_the_very_manifests():
    """At its defaults psd-run gives what deploy/overlays/mnist gives, and two thresholds of malloc beside."""
    ours = {(found["kind"], found["metadata"]["name"]): found for found in rendering("psd-run")}
    theirs = {(found["kind"], found["metadata"]["name"]): found for found in rendering("overlays/mnist")}
    worker = manifests.container(ours["Job", "psd-worker"])
    usual = manifests.container(theirs["Job", "psd-worker"])

    names = {variable["name"] for variable in worker.pop("env")}

    assert {name for name in names if not name.startswith("MALLOC_")} == {variable["name"] for variable in usual["env"]}
    assert {**worker, "env": usual["env"]} == usual
    worker["env"] = usual["env"]
    assert ours == theirs


@every_rendering
def test_psd_server_understands_its_arguments(rendered):
    """Every flag is one of psd-server's, with a value in range; ports, names and files are those of the other manifests."""
    config = config_of(rendered)
    stateful_set = shards(rendered)
    container = manifests.container(stateful_set)
    name, last = stateful_set["metadata"]["name"], stateful_set["spec"]["replicas"] - 1
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert (config.shard_index, config.shard_count) == (last, last + 1)
    assert config.listen == f"0.0.0.0:{ports['grpc']}"
    assert (config.bulk_port, config.metrics_port, config.health_port) == (ports["bulk"], ports["metrics"], ports["health"])
    assert config.advertise == f"{name}-{last}.{stateful_set['spec']['serviceName']}:{ports['grpc']}"
    assert config.advertise == manifests.the("ConfigMap", rendered)["data"]["PSD_SERVERS"].split(",")[-1]
    assert config.state_dir.startswith(mount_of("state", container) + "/")
    assert config.exit_when_done
    assert stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > config.grace_s + server.DRAIN_SLACK_S


def mount_of(volume: str, container: dict[str, Any]) -> str:
    (path,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume)
    return str(path)


@every_rendering
def test_shards_ask_for_certificate_and_token_unless_told_otherwise(rendered):
    """Nothing is open by accident: without the word `insecure` there are both, and they come from Secrets alone."""
    config = config_of(rendered)
    is_insecure = rendered in (rendering("overlays/mnist-insecure"), rendering("psd-run, with options"))
    files = [config.tls_cert, config.tls_key, config.token_file]

    assert config.insecure == is_insecure
    assert [bool(path) for path in files] == [not is_insecure] * 3
    for owner in [*of("StatefulSet", rendered), *of("Job", rendered)]:
        container, spec = manifests.container(owner), owner["spec"]["template"]["spec"]
        given = [*files, *(variable.get("value", "") for variable in container["env"])]
        contents = {
            f"{mount_of(volume['name'], container)}/{name}"
            for volume in spec["volumes"]
            for name in keys_of(volume.get("secret"))
        }
        assert contents or is_insecure
        used = {path for path in given if path.startswith("/etc/psd/") and not path.startswith("/etc/psd/script")}
        assert used <= contents | (set(files) if owner["kind"] == "Job" else set())
        assert ("/etc/psd/tls/tls.key" in contents) == (owner["kind"] == "StatefulSet" and not is_insecure)


def keys_of(secret: dict[str, Any] | None) -> list[str]:
    if secret is None:
        return []
    made = {found["metadata"]["name"]: found["stringData"] for found in credentials.secrets_of("psd", shards=1)}
    items = [item["key"] for item in secret.get("items", [])]
    assert set(items) <= made[secret["secretName"]].keys()
    return items or list(made[secret["secretName"]])


@every_rendering
def test_pods_are_confined(rendered):
    """No root, no capabilities, no writable root file system, no API token, for shards and workers alike."""
    for owner in [*of("StatefulSet", rendered), *of("Job", rendered)]:
        spec, container = owner["spec"]["template"]["spec"], manifests.container(owner)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] >= 10_000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"].keys() == {"memory"}
        assert spec["serviceAccountName"] == manifests.the("ServiceAccount", rendered)["metadata"]["name"]


@every_rendering
def test_selectors_find_what_they_are_meant_for(rendered):
    """Service, disruption budget, network policies and spreading select shards, or workers, by the labels that these have."""
    labels = {
        owner["metadata"]["labels"]["app.kubernetes.io/component"]: owner["spec"]["template"]["metadata"]["labels"]
        for owner in [*of("StatefulSet", rendered), *of("Job", rendered)]
    }
    selectors = [(manifests.the("Service", rendered)["spec"]["selector"], "shard")]
    selectors += [(shards(rendered)["spec"]["selector"]["matchLabels"], "shard")]
    selectors += [(manifests.the("PodDisruptionBudget", rendered)["spec"]["selector"]["matchLabels"], "shard")]
    for policy in of("NetworkPolicy", rendered):
        component = "worker" if policy["metadata"]["name"].endswith("-worker") else "shard"
        selectors.append((policy["spec"]["podSelector"]["matchLabels"], component))
    for owner in [*of("StatefulSet", rendered), *of("Job", rendered)]:
        (spread,) = owner["spec"]["template"]["spec"]["topologySpreadConstraints"]
        selectors.append((spread["labelSelector"]["matchLabels"], owner["metadata"]["labels"]["app.kubernetes.io/component"]))

    for selector, component in selectors:
        assert component not in labels or selector == labels[component], selector
    assert len({selector["app.kubernetes.io/instance"] for selector, _ in selectors}) == 1


@every_rendering
def test_ports_probes_and_policies_agree(rendered):
    """Service and policies name the ports that shards have; probes ask on a port without TLS for what psd-server answers."""
    container = manifests.container(shards(rendered))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = manifests.the("Service", rendered)["spec"]
    (policy,) = (found for found in of("NetworkPolicy", rendered) if not found["metadata"]["name"].endswith("-worker"))
    clients, scrapers = policy["spec"]["ingress"]

    assert {name: ports[name] for name in SHARED_PORTS} == SHARED_PORTS
    assert {port["name"]: ports[port["targetPort"]] for port in service["ports"]} == SHARED_PORTS
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    assert [port["port"] for port in clients["ports"]] == [ports["grpc"], ports["bulk"]]
    assert [port["port"] for port in scrapers["ports"]] == [ports["metrics"]]
    assert "namespaceSelector" not in clients["from"][0]
    probes = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {ports["health"]}
    assert [probes[kind].get("service", "") for kind in probes] == ["", READY, ""]
    annotations = shards(rendered)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


@every_rendering
def test_sizes_volumes_and_variables_agree(rendered):
    """Numbers that stand in several places are the same; volumes that are mounted are there; variables are psd's."""
    data = manifests.the("ConfigMap", rendered)["data"]
    assert int(data["SHARDS"]) == shards(rendered)["spec"]["replicas"] == len(data["PSD_SERVERS"].split(","))
    assert shards(rendered)["spec"]["podManagementPolicy"] == "Parallel"
    for owner in [*of("StatefulSet", rendered), *of("Job", rendered)]:
        container = manifests.container(owner)
        claims = [claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])]
        volumes = [volume["name"] for volume in owner["spec"]["template"]["spec"]["volumes"]]
        assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(claims + volumes)
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert {name for name in (*variables, *data) if name.startswith("PSD_")} <= VARIABLES.keys()
        if owner["kind"] == "Job":
            assert owner["spec"]["completions"] == owner["spec"]["parallelism"] == int(variables["PSD_WORLD_SIZE"])
            assert owner["spec"]["completionMode"] == "Indexed"
            assert "PSD_RANK" not in variables
            assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & variables.keys()


def test_no_secret_is_kept_here():
    """Certificates, keys and tokens are made, and never committed."""
    names = subprocess.run(["git", "ls-files", "deploy"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert not [name for name in names if re.search(r"PRIVATE KEY|kind: Secret", (ROOT / name).read_text())]
    assert names
