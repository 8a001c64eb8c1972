"""Importing one face never imports another framework, here where all of them are installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FRAMEWORKS = {"keras", "tensorflow", "torch", "jax"}


def loaded_by(modules, backend):
    environ = {**os.environ, "KERAS_BACKEND": backend}
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    return FRAMEWORKS & set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("psd, psd_core.arena, psd.cli.server, psd.cli.run, psd_client", set()),
        ("psd_client.torch", {"torch"}),
        ("psd_client.jax", {"jax"}),
    ],
)
def test_a_face_loads_its_own_framework_alone(modules, expected):
    assert loaded_by(modules, "tensorflow") == expected


@pytest.mark.parametrize(("backend", "other"), [("tensorflow", "torch"), ("torch", "tensorflow")])
def test_the_keras_face_loads_what_keras_loads(backend, other):
    """Keras by itself loads JAX, too, where it is installed."""
    loaded = loaded_by(f"psd_client.keras, psd_client.keras.on_{backend}", backend)

    assert loaded == loaded_by("keras", backend)
    assert {"keras", backend} <= loaded
    assert other not in loaded


@pytest.mark.parametrize("backend", ["jax"])
def test_another_backend_is_refused(backend):
    """With the name of what there is instead."""
    code = (
        "import keras, psd_client.keras as psd\n"
        "model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])\n"
        "psd.distribute(model, 'sgd')"
    )
    environ = {**os.environ, "KERAS_BACKEND": backend}

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)

    assert "InvalidRequest: keras: psd does not support the backend 'jax'; use tensorflow or torch" in done.stderr
