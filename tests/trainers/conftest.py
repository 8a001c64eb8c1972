"""Programs that train with other people's trainers, alone and under psd-run; `make test-trainers` has their packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 500

Trained = Mapping[str, Any]
Train = Callable[..., list[Trained]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """train(program, batch, *ways, workers=0) -> what each worker has stored; 0 workers: one process, without psd-run.

    Keywords: directory, for runs that go on from one another; flags, of psd-run; fails_with: words of the error with which the
    run is to end.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(
        program: str,
        batch: int,
        *ways: str,
        workers: int = 0,
        directory: Path | None = None,
        flags: tuple[str, ...] = (),
        fails_with: str = "",
    ) -> list[Trained]:
        place = directory or tmp_path / f"{workers}-{'-'.join(ways)}"
        place.mkdir(exist_ok=True)
        words = [str(HERE / program), str(place), str(batch), *ways, *([] if workers else ["alone"])]
        launcher = ["-m", "psd.cli.run", "--shards", "2", "--workers", str(workers), *flags] if workers else []
        done = subprocess.run(
            [sys.executable, *launcher, *words], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.returncode != 0) == bool(fails_with), f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        if fails_with:
            assert fails_with in done.stdout + done.stderr
            return []
        return [dict(np.load(place / f"trained-{rank}.npz")) for rank in range(max(1, workers))]

    return run


def assert_equal(found: list[Trained], expected: Trained) -> None:
    """All workers have the same parameters, to the bit, and those of one process but for the order of sums.

    Adam makes steps of full size where a gradient is nothing but rounding, as that of an attention's key bias is.
    """
    for trained in found:
        assert trained.keys() >= expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(trained[name], found[0][name], name)
            np.testing.assert_allclose(trained[name], value, rtol=2e-4, atol=5e-4, err_msg=name)
