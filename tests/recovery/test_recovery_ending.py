"""Programs that end right after a push, without close(), while a shard is killed that has their gradient in memory only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shard_processes import ShardProcess, servers_of

import psd_client
from psd.contract.errors import StateLost

pytestmark = pytest.mark.process

PYTHON = os.environ.get("PSD_TEST_PYTHON", sys.executable)
"""Interpreter of the program: another one than this process's has its packages, and its build of the kernels in this tree."""

SIZE = 600_000
"""Three blocks on each of two shards, too large for the buffers of a socket."""

PROGRAM = """
import sys
import numpy as np
import psd_client

servers, transport, aggregation, size = sys.argv[1:]
ps = psd_client.connect(servers, 0, 2, transport=transport, wait_timeout=200, retry_timeout=200)
ps.declare({"w": np.zeros(int(size), np.float32)}, psd_client.SGD(lr=1.0), reduce="sum", aggregation=aggregation)
ps.push({"w": np.full(int(size), -1, np.float32)})
print("pushed", flush=True)
"""


@pytest.mark.parametrize(("transport", "aggregation"), [("shm", "exact"), ("tcp", "fast"), ("grpc", "exact")])
def test_program_when_it_ends_after_a_push_and_a_shard_is_killed_then_its_gradient_counts(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, transport: str, aggregation: str
) -> None:
    """It waits for its round, as close() does, and sends again what the shard has lost, or says that it cannot."""
    shards = shard_processes(2)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [PYTHON, str(script), servers_of(shards), transport, aggregation, str(SIZE)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program,
        psd_client.connect(servers_of(shards), 1, 2, wait_timeout=200, retry_timeout=200) as ps,
    ):
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0), reduce="sum", aggregation=aggregation)
        assert program.stdout is not None
        assert program.stdout.readline() == "pushed\n"

        shards[1].kill()
        shards[1].start()
        try:
            assert set(ps.push_pull({"w": np.full(SIZE, -2, np.float32)})["w"].tolist()) == {3.0}
            is_lost = False
        except StateLost:
            is_lost = True

        assert program.stderr is not None
        assert ("that gradient is lost" in program.stderr.read()) is is_lost
        # Only if this Python starts no threads any more when it exits.
        assert not is_lost or (transport, aggregation) == ("grpc", "exact")
        assert program.wait(100) == 0
