"""One pod of the played cluster: a process with the command, the arguments, the environment and the volumes of its manifest.

What is played and not real: paths of volumes, and of the image, are replaced by those of directories here; the pod's network is
a loopback address of its own, so that 0.0.0.0 becomes that address; names are looked up by in_pod.py; and
Python is forked from one that has psd loaded.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loaded_programs import Program
from source_tree import ROOT

COMMANDS = {"python": [], "psd-server": ["-m", "psd.cli.server"], "psdctl": ["-m", "psd.cli.psdctl"]}
IN_POD = str(Path(__file__).with_name("in_pod.py"))
IMAGE_PATHS = {"/opt/psd": str(ROOT)}
SHARED = "/mnt/shared"
"""Stands for storage outside of the cluster."""

PROBE_EVERY_S = 0.1


class Pod:
    """A pod's container, started; started again when it ends, if `restarts`.

    Args:
        template: the pod template. name, labels: of this pod. address: its own.
        volumes: directory of each volume by name. configs: data of a ConfigMap by name. names: see in_pod.py.

    Attributes:
        statuses: exit statuses of the container's lives so far. log: where all its output goes. home: its HOME, here.
        metrics_url: as its annotations tell Prometheus.
    """

    def __init__(
        self,
        template: dict[str, Any],
        *,
        name: str,
        labels: Mapping[str, str],
        address: str,
        volumes: Mapping[str, Path],
        configs: Callable[[str], Mapping[str, str]],
        names: Mapping[str, str],
        log: Path,
        environ: Mapping[str, str],
        restarts: bool,
    ) -> None:
        self.name, self.labels, self.address, self.log = name, labels, address, log
        self.statuses: list[int] = []
        self.ended = threading.Event()
        self._spec = template["spec"]
        (self.container,) = self._spec["containers"]
        mounts = {mount["mountPath"]: str(volumes[mount["name"]]) for mount in self.container["volumeMounts"]}
        self._paths = {**mounts, **IMAGE_PATHS, SHARED: str(log.parent.parent / "shared")}
        self._environ = {**self._of_the_image(names), **self._given(configs), **environ}
        scraped = {name.partition("/")[2]: value for name, value in template["metadata"].get("annotations", {}).items()}
        self.metrics_url = f"http://{address}:{scraped['port']}{scraped['path']}" if scraped else ""
        self.home = Path(self._environ["HOME"])
        self._restarts = restarts
        self._is_deleted = False
        self._lock = threading.Lock()
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    # -- what the kubelet does -----------------------------------------------------------------------------------------

    def _of_the_image(self, names: Mapping[str, str]) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": self._here("/tmp"), **names}

    def _given(self, configs: Callable[[str], Mapping[str, str]]) -> dict[str, str]:
        environ: dict[str, str] = {}
        for source in self.container["envFrom"]:
            environ |= configs(source["configMapRef"]["name"])
        for variable in self.container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environ[variable["name"]] = self._field(field) if field else _expanded(variable["value"], environ)
        return {name: self._here(value) for name, value in environ.items()}

    def _field(self, path: str) -> str:
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        return self.labels[label[1]] if label else {"metadata.name": self.name}[path]

    def _here(self, text: str) -> str:
        """With the paths of this machine."""
        insides = "|".join(map(re.escape, self._paths))
        text = re.sub(rf"(^|=|file://)({insides})(?=/|$)", lambda found: found[1] + self._paths[found[2]], text)
        return text.replace("0.0.0.0", self.address)

    def command(self, words: list[str]) -> list[str]:
        """A command as this machine can execute it. Output is never kept back, so that python -u is python."""
        first, *others = [_expanded(self._here(word), self._environ) for word in words if word != "-u"]
        return [IN_POD, *COMMANDS[first], *others]

    def _start(self) -> Program:
        words = self.command([*self.container["command"], *self.container.get("args", [])])
        with self.log.open("ab") as log:
            return Program(words, env=self._environ, stdout=log, stderr=log, cwd=self.log.parent)

    def _keep(self) -> None:
        while True:
            self.statuses.append(self._process.wait())
            with self._lock:
                self._process.close()
                if self._is_deleted or not self._restarts:
                    break
                self._process = self._start()
        self.ended.set()

    # -- what others do to it ------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Signal the container's first process, as `kill` in the pod does, or the kernel's lack of memory."""
        with self._lock:
            self._process.send_signal(number)

    def delete(self, grace_s: float | None = None) -> float:
        """End it as the kubelet does: the preStop hook, SIGTERM, and after the grace period SIGKILL. Returns when it has ended;
        the seconds that took."""
        began = time.monotonic()
        with self._lock:
            self._is_deleted = True
        if "lifecycle" in self.container and not self.ended.is_set():
            subprocess.run(
                self.container["lifecycle"]["preStop"]["exec"]["command"], env=self._environ, check=True, timeout=200
            )
        self.signal(signal.SIGTERM)
        if not self.ended.wait(self._spec["terminationGracePeriodSeconds"] if grace_s is None else grace_s):
            self.signal(signal.SIGKILL)
            assert self.ended.wait(100)
        return time.monotonic() - began

    def close(self) -> None:
        with self._lock:
            self._is_deleted = True
        self.signal(signal.SIGKILL)
        assert self.ended.wait(100)

    def execute(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command like kubectl exec."""
        command = self.command(words)
        with Program(command, env=self._environ, stderr=subprocess.PIPE) as program:
            output, errors = program.stdout.read(), program.stderr.read()
            return subprocess.CompletedProcess(command, program.wait(200), output, errors)

    def probe(self, kind: str) -> bool:
        """The answer to a probe of the manifest: startupProbe, readinessProbe or livenessProbe."""
        probe = self.container[kind]["grpc"]
        with grpc.insecure_channel(f"{self.address}:{probe['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
            timeout_s = self.container[kind].get("timeoutSeconds", 1)
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, kind: str, timeout_s: float = 200) -> None:
        """Until a probe succeeds."""
        deadline = time.monotonic() + timeout_s
        while not self.probe(kind):
            assert time.monotonic() < deadline, f"{self.name}: no {kind} in time:\n{self.log.read_text()}"
            self.ended.wait(PROBE_EVERY_S)


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes expands it; $$(NAME) is $(NAME), and what is unknown stays."""

    def value(found: re.Match[str]) -> str:
        return found[0][1:] if found[0].startswith("$$") else environ.get(found[1], found[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, text)


def decoded(secret: Mapping[str, Any]) -> dict[str, str]:
    """A Secret's contents."""
    return {
        **{key: base64.b64decode(text).decode() for key, text in secret.get("data", {}).items()},
        **secret.get("stringData", {}),
    }
