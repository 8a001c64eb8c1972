"""Kustomize's output for a folder of deploy/, as far as those folders go: resources, and components with JSON patches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from source_tree import ROOT

from psd.cli.kubernetes import manifests

DEPLOY = ROOT / "deploy"
UNDERSTOOD = {"apiVersion", "kind", "resources", "components"}


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The objects of a base or an overlay."""
    (settings,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    assert set(settings) <= UNDERSTOOD, f"{folder}: this renderer does not know {set(settings) - UNDERSTOOD}"
    found: list[dict[str, Any]] = []
    for name in settings["resources"]:
        path = folder / name
        found += kustomized(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in settings.get("components", []):
        found = manifests.patched(found, os.path.relpath(folder / name, DEPLOY))
    return found
