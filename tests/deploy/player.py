"""A cluster on one machine: plays the StatefulSets and Jobs that it is given, and answers to the kubectl commands of psd-run.

Controllers as simple as they can be: a pod of a StatefulSet that is deleted comes back with its number and its volume, at
another address; the pods of an Indexed Job that fail are started again, as often as each index may.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from name_server import NameServer
from pods import Pod, decoded

JOB_INDEX = "batch.kubernetes.io/job-completion-index"
POD_INDEX = "apps.kubernetes.io/pod-index"


class Cluster:
    """One namespace.

    Attributes:
        objects: what was applied, by kind and name. pods: those that there are, by name (a Job's: without the random end).
        failures: of each pod of a Job, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.failures: dict[str, int] = {}
        self.dns = NameServer()
        self._directory = directory
        self._names_file = directory / "names.json"
        self._numbers = itertools.count(2)
        self._jobs: dict[str, threading.Thread] = {}
        self._publish()

    def close(self) -> None:
        self.objects.clear()
        for pod in list(self.pods.values()):
            pod.close()
        for thread in self._jobs.values():
            thread.join(100)
        self.dns.close()

    @property
    def claims(self) -> Path:
        """Directory of the volumes that outlive pods."""
        return self._made("claims")

    # -- controllers ---------------------------------------------------------------------------------------------------

    def apply(self, text: str) -> list[str]:
        """Apply manifests like kubectl apply; existing objects are only replaced. Returns the names."""
        found = [item for document in yaml.safe_load_all(text) for item in document.get("items", [document])]
        for item in found:
            self.objects[item["kind"], item["metadata"]["name"]] = item
        for item in found:
            if item["kind"] == "StatefulSet":
                for index in range(item["spec"]["replicas"]):
                    self._start_shard(item, index)
            elif item["kind"] == "Job":
                self._start_job(item)
        return [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in found]

    def _start_shard(self, stateful_set: Mapping[str, Any], index: int) -> Pod:
        name = f"{stateful_set['metadata']['name']}-{index}"
        claims = {
            claim["metadata"]["name"]: self._made("claims", f"{claim['metadata']['name']}-{name}")
            for claim in stateful_set["spec"]["volumeClaimTemplates"]
        }
        pod = self._start(stateful_set["spec"]["template"], name, {POD_INDEX: str(index)}, claims, {}, restarts=True)
        self.dns.names[f"{name}.{stateful_set['spec']['serviceName']}"] = pod.address
        self._publish()
        return pod

    def _start_job(self, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        assert job["spec"]["completions"] == job["spec"]["parallelism"], "a worker would never be started"
        starting = threading.Event()
        self._jobs[name] = threading.Thread(target=self._keep_job, args=(job, starting), daemon=True)
        self._jobs[name].start()
        assert starting.wait(100)

    def _keep_job(self, job: dict[str, Any], started: threading.Event) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        final = {rule["onExitCodes"]["values"][0] for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"}
        left = {f"{name}-{index}": spec["backoffLimitPerIndex"] for index in range(spec["completions"])}
        for pod_name in left:
            self._start_worker(job, pod_name)
        started.set()
        condition = "Complete"
        while left and self.objects.get(("Job", name)) is job:
            for pod_name in list(left):
                pod = self.pods[pod_name]
                if not pod.ended.wait(0.05):
                    continue
                if pod.statuses[-1] == 0:
                    del left[pod_name]
                elif pod.statuses[-1] in final or not left[pod_name]:
                    left, condition = {}, "Failed"
                    break
                elif self.objects.get(("Job", name)) is job:
                    left[pod_name] -= 1
                    self.failures[pod_name] = self.failures.get(pod_name, 0) + 1
                    self._start_worker(job, pod_name)
        job["status"] = {"conditions": [{"type": condition, "status": "True"}]}

    def _start_worker(self, job: Mapping[str, Any], name: str) -> Pod:
        index = name.rpartition("-")[2]
        environ = {"JOB_COMPLETION_INDEX": index, "PSD_TRANSPORT": "tcp"}  # pods have no memory in common
        return self._start(job["spec"]["template"], name, {JOB_INDEX: index}, {}, environ, restarts=False)

    def _start(
        self,
        template: dict[str, Any],
        name: str,
        labels: Mapping[str, str],
        claims: Mapping[str, Path],
        environ: Mapping[str, str],
        *,
        restarts: bool,
    ) -> Pod:
        number = next(self._numbers)
        volumes = {volume["name"]: self._volume(volume, f"{name}-{number}") for volume in template["spec"]["volumes"]}
        self.pods[name] = Pod(
            template,
            name=name,
            labels={**template["metadata"]["labels"], **labels},
            address=f"127.{os.getpid() % 200 + 20}.{number // 250}.{number % 250}",
            volumes={**volumes, **claims},
            configs=lambda config: self.objects["ConfigMap", config]["data"],
            names={"CLUSTER_DNS": str(self.dns.port), "CLUSTER_NAMES": str(self._names_file)},
            log=self._made("logs") / f"{name}.log",
            environ=environ,
            restarts=restarts,
        )
        return self.pods[name]

    def _volume(self, volume: Mapping[str, Any], pod: str) -> Path:
        directory = self._made("volumes", pod, volume["name"])
        contents: Mapping[str, str] = {}
        if "secret" in volume:
            contents = decoded(self.objects["Secret", volume["secret"]["secretName"]])
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in contents]
            contents = {item["path"]: contents[item["key"]] for item in items}
        elif "configMap" in volume:
            contents = self.objects["ConfigMap", volume["configMap"]["name"]]["data"]
        for name, text in contents.items():
            (directory / name).write_text(text)
        return directory

    def _made(self, *names: str) -> Path:
        path = self._directory.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _publish(self) -> None:
        new = self._names_file.with_suffix(".new")
        new.write_text(json.dumps(self.dns.names))
        new.replace(self._names_file)

    # -- what happens to pods ------------------------------------------------------------------------------------------

    def delete_shard(self, name: str) -> float:
        """Delete a pod like kubectl delete pod: it ends, and comes back. Returns the seconds from the deletion until it is
        ready again."""
        set_name, _, index = name.rpartition("-")
        took_s = self.pods[name].delete()
        stateful_set = self.objects["StatefulSet", set_name]
        del self.dns.names[f"{name}.{stateful_set['spec']['serviceName']}"]
        self._publish()
        pod = self._start_shard(stateful_set, int(index))
        pod.wait_for("readinessProbe")
        return took_s

    def delete_all(self) -> None:
        """Delete the workload like kubectl delete statefulset,job: all pods are told at once, and none comes back."""
        self.objects = {key: found for key, found in self.objects.items() if key[0] not in ("StatefulSet", "Job")}
        pods, self.pods = self.pods, {}
        with ThreadPoolExecutor(len(pods)) as pool:
            list(pool.map(Pod.delete, pods.values()))
        for thread in self._jobs.values():
            thread.join(100)
        self._jobs.clear()

    def has_ended(self, name: str) -> bool:
        """True if a Job has ended, in either way."""
        return not self._jobs[name].is_alive()

    def wait_job(self, name: str, timeout_s: float = 200) -> str:
        """The condition with which a Job has ended."""
        self._jobs[name].join(timeout_s)
        logs = "\n".join(pod.log.read_text() for pod in self.pods.values())
        assert not self._jobs[name].is_alive(), f"job {name} has not ended in time; logs:\n{logs[-20000:]}"
        return str(self.objects["Job", name]["status"]["conditions"][0]["type"])

    # -- kubectl -------------------------------------------------------------------------------------------------------

    def kubectl(self, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """In the place of subprocess.run."""
        verb, *args = command[1:]
        words = [arg for arg in args if not arg.startswith("--")]
        if verb == "get":
            found = self.objects.get((_KINDS[words[0]], words[1]))
            return _done("" if found is None else json.dumps(found))
        if verb == "apply":
            return _done("\n".join(f"{name} created" for name in self.apply(how["input"])))
        if verb == "exec":
            return self.pods[words[0]].execute(list(command[command.index("--") + 1 :]))
        assert verb == "delete", command
        if words[0] == "pvc":
            shutil.rmtree(self.claims)
        elif words[0] == "pod":
            selected = dict(pair.split("=") for pair in next(a for a in args if "selector" in a).partition("=")[2].split(","))
            (grace_s,) = (float(arg.partition("=")[2]) for arg in args if arg.startswith("--grace-period"))
            self._end([pod for pod in self.pods.values() if selected.items() <= pod.labels.items()], grace_s)
        else:
            self.objects.pop((_KINDS[words[0]], words[1]), None)
            if words[0] == "job" and words[1] in self._jobs:
                self._jobs.pop(words[1]).join(100)
            if "--cascade=foreground" in args:
                self._end(pod for pod in self.pods.values() if pod.name.rpartition("-")[0] == words[1])
        return _done("")

    def _end(self, pods: Iterable[Pod], grace_s: float | None = None) -> None:
        for pod in list(pods):
            del self.pods[pod.name]
            pod.delete(grace_s)


_KINDS = {"statefulset": "StatefulSet", "job": "Job", "configmap": "ConfigMap", "secret": "Secret"}


def _done(output: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 0, output, "")
