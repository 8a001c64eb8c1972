"""The Dockerfile, as far as it can be looked at without building it; tests/install/test_wheel.py builds the wheel in it."""

from __future__ import annotations

import fnmatch
import json
import re

from kustomized import DEPLOY, kustomized
from source_tree import ROOT

from psd.cli.kubernetes import manifests

LINES = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
STAGES = [at for at, (word, _) in enumerate(STEPS) if word == "FROM"]
FINAL = STEPS[STAGES[-1] :]


def of(word: str, steps: list[tuple[str, ...]]) -> list[str]:
    return [rest for first, rest in steps if first == word]


def test_the_compiler_stays_in_the_first_stage():
    """The final stage runs nothing, and takes from the first one what that has installed."""
    assert len(STAGES) == 2
    assert of("FROM", FINAL) == ["python:${PYTHON}-slim"]
    assert of("RUN", FINAL) == []
    assert of("COPY", FINAL)[0] == "--from=build /opt/psd /opt/psd"
    assert any("gcc" in step for step in of("RUN", STEPS[: STAGES[-1]]))


def test_it_runs_as_the_user_of_the_manifests_without_a_shell():
    """A number, which runAsNonRoot can check; commands are lists, so that signals reach psd-server itself."""
    shard = manifests.the("StatefulSet", kustomized(DEPLOY / "base"))["spec"]["template"]["spec"]

    assert of("USER", FINAL) == [f"{shard['securityContext']['runAsUser']}:{shard['securityContext']['runAsGroup']}"]
    for step in [*of("CMD", FINAL), *of("RUN", STEPS)]:
        assert isinstance(json.loads(step), list), step
    assert of("ENTRYPOINT", FINAL) == []


def test_what_it_starts_and_what_it_copies_is_there():
    """Console scripts exist in pyproject.toml, paths in the repository, and .dockerignore lets them in."""
    project = (ROOT / "pyproject.toml").read_text()
    (command,) = of("CMD", FINAL)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [path for step in of("COPY", STEPS) if not step.startswith("--from") for path in step.split()[:-1]]
    (extras,) = [value for name, _, value in (arg.partition("=") for arg in of("ARG", STEPS)) if name == "EXTRAS"]

    assert re.search(rf'^{json.loads(command)[0]} = "psd\.cli\.', project, re.MULTILINE)
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path, pattern) for pattern in allowed), path
    assert set(extras.split(",")) <= set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))


def test_the_example_of_the_manifests_is_in_the_image():
    """The worker's script lies where the Dockerfile puts the examples."""
    _, _, script, *_ = manifests.container(manifests.the("Job", kustomized(DEPLOY / "overlays/mnist")))["command"]

    assert "examples /opt/psd/examples" in of("COPY", FINAL)
    assert (ROOT / script.removeprefix("/opt/psd/")).is_file()


def test_ports_are_those_of_the_shards():
    """EXPOSE is for people; it tells them the same."""
    shard = manifests.container(manifests.the("StatefulSet", kustomized(DEPLOY / "base")))

    assert of("EXPOSE", FINAL) == [" ".join(str(port["containerPort"]) for port in shard["ports"])]
