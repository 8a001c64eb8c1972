"""The protocol is enough: workers in processes of their own, with stock stubs generated from proto/ and no psd code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from generated_stubs import generate_stubs

WORKER = Path(__file__).with_name("stock_worker.py")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """A folder with freshly generated stubs, as a stranger would make them."""
    return generate_stubs(tmp_path_factory.mktemp("stubs"))


@pytest.mark.process
def test_a_worker_made_from_the_proto_files_alone_trains(cluster, stubs):
    """Two such workers join, declare, initialize, push, pull, push_pull, meet at a barrier and leave, and read the numbers that
    SGD with momentum gives by hand: weights 1 and 3, gradients 0 and 4, so that the mean is 3."""
    shard = cluster(1).shards[0]

    workers = [
        subprocess.Popen(
            [sys.executable, "-I", str(WORKER), str(stubs), shard.address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=200) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], outputs
    results = [json.loads(out) for out, _ in outputs]
    assert sorted(result["initializer"] for result in results) == [False, True]
    for result in results:
        assert result["pulls"] == [
            [[0, 0, [1.0, 2.0, 3.0, 4.0, 5.0]]],
            [[0, 1, [-0.5, 0.5, 1.5, 2.5, 3.5]]],  # minus 0.5 * 3
            [[0, 2, [-0.5, 0.5, 1.5, 2.5, -1.25]]],  # b: minus 0.5 * (0.5 * 3 + 8)
        ]
        assert result["counted"] == [1, 1]
        assert (result["duplicate"], result["waits"], result["generation"]) == (1, 0, 0)
        assert result["after_leave"] == ["ABORTED", "SessionFenced"]
    assert shard.done.wait(100)
