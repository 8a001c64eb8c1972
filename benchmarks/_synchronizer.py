"""The processor time that a shard takes for exchanges of a large model, compressed both ways: it decodes and adds differences,
applies the outer rule, and encodes what has changed. Knows nothing of command lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import _report
import numpy as np
from _processes import FORKS, Shard, cleanly, cpu_s, end_with_benchmark

import psd_client

OUTER = psd_client.SGD(lr=0.7, momentum=0.9, nesterov=True)
TENSORS = 16
CODEC = "int4"


def exchange(task: Mapping[str, Any], rank: int) -> dict[str, float]:
    """Make exchanges as one learner; the shard's processor seconds, and the time, for each of its own."""
    ps = psd_client.connect(task["servers"], rank, task["learners"], transport="tcp")
    elements = int(task["megabytes"] * 1e6 / 4 / TENSORS)
    names = [f"w{index}" for index in range(TENSORS)]
    ps.declare({name: np.zeros(elements, np.float32) for name in names}, OUTER, compress=CODEC, pull=CODEC)
    difference = np.random.default_rng(rank).normal(0, 1e-3, elements).astype(np.float32)
    differences = dict.fromkeys(names, difference)
    ps.push_pull(differences)
    ps.barrier("begin")
    sent, cpu, begun = ps.stats()["sent_bytes"], cpu_s(task["shard"]), time.perf_counter()
    for _ in range(task["exchanges"]):
        ps.push_pull(differences)
    ps.barrier("end")
    cpu, took, sent = cpu_s(task["shard"]) - cpu, time.perf_counter() - begun, ps.stats()["sent_bytes"] - sent
    ps.close()
    each = task["exchanges"]
    return {"cpu_s": cpu / each / task["learners"], "round_s": took / each, "sent_bytes": sent / each}


def measure(megabytes: float, learners: int, exchanges: int, memory: Path) -> dict[str, Any]:
    """One run with one shard; the first learner's figures."""
    with cleanly() as stack:
        shard = Shard("--state-dir", str(memory / "synchronizer"))
        shard.start()
        stack.callback(shard.kill)
        shard.wait_ready()
        task = {"megabytes": megabytes, "learners": learners, "exchanges": exchanges}
        told = task | {"servers": shard.address, "shard": shard.pid}
        pool = stack.enter_context(ProcessPoolExecutor(learners, FORKS, end_with_benchmark))
        jobs = [pool.submit(exchange, told, rank) for rank in range(learners)]
        found = [job.result() for job in jobs]
        return {**task, **found[0], "codec": CODEC}


def text(found: Mapping[str, Any]) -> str:
    """A table with one row."""
    cells = (f"{found['megabytes']:g}", found["learners"], f"{found['sent_bytes'] / 1e6:.0f}")
    times = (f"{found['cpu_s']:.3f}", f"{found['cpu_s'] / found['megabytes'] * 1e3:.2f}", f"{found['round_s']:.2f}")
    headers = ("MB of parameters", "learners", "MB sent", "shard's CPU s an exchange", "s for 1 GB", "s of a round")
    return _report.table(headers, [(*cells, *times)])
