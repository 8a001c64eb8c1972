"""psd-run: a trainer that publishes, and readers beside it, as one job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Job

pytestmark = pytest.mark.process

ROLLOUTS = """
import os, pathlib, sys, threading
import numpy as np
import psd_client

place, rank = pathlib.Path(sys.argv[1]), int(os.environ["PSD_RANK"])
if rank == 0:
    with psd_client.publish() as store:
        for step in range(1, 4):
            version = store.put({"w": np.full(100_000, step, np.float32)}, {"step": step})
        print("put", version, flush=True)
        while len(list(place.glob("read-*"))) < 2:
            threading.Event().wait(0.01)
else:
    with psd_client.connect(role="reader") as reader:
        weights = reader.pull(newer_than=2)
        print("read", weights.version, weights.meta, sorted(set(weights["w"].tolist())), flush=True)
    (place / f"read-{rank}").touch()
"""


def test_job_with_a_publisher_and_readers_then_all_of_them_end(job: Callable[..., Job], tmp_path: Path) -> None:
    """PSD_SERVERS alone says where the store is; the rank that psd-run gives means nothing to it."""
    run = job(ROLLOUTS, "--workers", "3", args=(str(tmp_path),))
    assert run.end() == 0
    assert len(re.findall(r"worker 0\D.*put 3", run.output)) == 1
    assert len(re.findall(r"read 3 \{'step': 3\} \[3\.0\]", run.output)) == 2
    run.assert_nothing_left()
