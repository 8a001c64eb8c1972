"""An API server that is not ours for the tests of psd-run --on kubernetes: kmock, with the real kubectl in front of it.

kmock keeps objects, and has no controllers: what a controller or a kubelet would do to them, a test does, by kubectl. Here is
added what kubectl needs and kmock lacks: the core group's name, schemas that say that the server checks fields, and selectors.
kmock checks no fields; tests/deploy does, by the schemas of five versions of Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from free_ports import free_port
from kmock import KubernetesEmulator, Server

TIMEOUT_S = 100.0
NAMESPACE = "jobs"


class Emulator(KubernetesEmulator):
    """kmock's, as kubectl takes it."""

    async def _serve_version(self, request: Any) -> Any:
        found = await super()._serve_version(request)
        return {**found, "groupVersion": found["groupVersion"].lstrip("/")}

    async def _serve_list(self, request: Any) -> Any:
        found = await super()._serve_list(request)
        wanted = dict(term.split("=", 1) for term in request.params.get("labelSelector", "").split(",") if term)
        chosen = [item for item in found["items"] if wanted.items() <= item["metadata"].get("labels", {}).items()]
        return {**found, "kind": "List", "apiVersion": "v1", "items": chosen}

    def serve_schemas(self) -> None:
        """Say of each kind that patches take fieldValidation, which is all that kubectl wants to know."""
        groups = defaultdict(list)
        for resource, info in self.resources.items():
            groups[(resource.group, resource.version)].append((resource.plural, info.kind))
        places = {}
        for (group, version), kinds in groups.items():
            base = f"apis/{group}/{version}" if group else f"api/{version}"
            places[base] = {"serverRelativeURL": f"/openapi/v3/{base}"}
            paths = {
                f"/{base}/namespaces/{{namespace}}/{plural}/{{name}}": {
                    "patch": {
                        "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                        "responses": {},
                    }
                }
                for plural, kind in kinds
            }
            schema = {"openapi": "3.0.0", "info": {"title": "kmock", "version": "1"}, "paths": paths}
            self[f"get /openapi/v3/{base}"] << schema
        self["get /openapi/v3"] << {"paths": places}


class Cluster:
    """The server, in a thread of its own, and a kubectl that uses it.

    Attributes:
        environ: variables with which kubectl, and so psd-run, uses it. server: kmock's, for answers of one's own.
    """

    def __init__(self, folder: Path) -> None:
        self.server: Emulator
        port = free_port()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(port),), daemon=True)
        self._thread.start()
        assert self._is_up.wait(TIMEOUT_S), "kmock does not start"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "namespace": NAMESPACE}}],
            "current-context": "here",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        self.environ = {"KUBECONFIG": str(folder / "kubeconfig"), "KUBECACHEDIR": str(folder / "cache")}

    async def _serve(self, port: int) -> None:
        async with Emulator() as self.server, Server(self.server, host="127.0.0.1", port=port):
            self.server.resources.load_bundled()
            self.server.serve_schemas()
            self._is_up.set()
            await self._end.wait()

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl; what it prints."""
        done = subprocess.run(
            ["kubectl", *words],
            env={**os.environ, **self.environ},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, what: str) -> dict[str, Any] | None:
        """An object, such as job/psd-worker; None if there is none."""
        text = self.kubectl("get", what, "--ignore-not-found", "--output", "json")
        return json.loads(text) if text.strip() else None

    def names(self) -> set[str]:
        """All that is of a job of psd, as kind/name."""
        kinds = "configmap,networkpolicy,pdb,pod,pvc,secret,service,serviceaccount,statefulset,job"
        return set(self.kubectl("get", kinds, "--output", "name").split())

    def end_job(self, condition: str) -> None:
        """What the controller of jobs does when all workers have ended."""
        status = {"status": {"conditions": [{"type": condition, "status": "True"}]}}
        self.kubectl("patch", "job", "psd-worker", "--subresource=status", "--type=merge", "--patch", json.dumps(status))

    def close(self) -> None:
        """End the server, if it runs."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(TIMEOUT_S)
            self._loop.close()
