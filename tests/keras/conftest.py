"""The tests of the Keras and JAX faces, which `make test-keras` runs in its own environment, once for each backend of Keras."""

from __future__ import annotations

import os
from typing import Any

import keras
import pytest

BACKEND = keras.backend.backend()

collect_ignore = {
    "tensorflow": ["test_keras_on_torch.py"],
    # What has nothing to do with Keras's backend runs once. So do the pages: what their programs do is tested on both.
    "torch": [
        "test_keras_on_tensorflow.py",
        "test_keras_docs.py",
        "test_keras_examples.py",
        "test_keras_imports.py",
        "test_jax.py",
    ],
}[BACKEND]

if BACKEND == "tensorflow":
    import tensorflow as tf

    # Workers are threads here, and one that waits for the other one holds a thread of TensorFlow's.
    tf.config.threading.set_inter_op_parallelism_threads(8)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # each worker's graphs are called repeated tracing


def pytest_configure(config: Any) -> None:
    """Keras's own variables warn under NumPy 2 where torch is its backend."""
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation:DeprecationWarning:keras")


def pytest_report_header(config: Any) -> str:
    """Which backend these are the tests of."""
    return f"keras {keras.version()} on {BACKEND}, PID {os.getpid()}"


@pytest.fixture(autouse=True)
def _clean_names() -> None:
    """Layers are numbered by thread; the test's own thread would go on counting."""
    keras.backend.clear_session()
