"""Measures what checkpoints and recovery cost, on this machine, with a real psd-server.

    python benchmarks/checkpoints.py [--megabytes 256] [--recovery-megabytes 1000] [--rows 5000000] [--directory DIR]

slow-down   one worker trains; its step times while checkpoints are written, against those of the same run while none is
bandwidth   of those checkpoints, against a plain write and fsync of as many bytes to the same directory, in turns
recovery    a shard is killed with SIGKILL and started again: until it serves, and until a worker has all parameters again; and
            how much of its arena it has touched when it serves
table       one worker trains random rows of a table of dim 8 under Adagrad while a checkpoint of all rows is written: its step
            times against those before, and the shard's memory. Rows that are changed before they are written are kept meanwhile

Sizes are of parameters and momentum together, in MB (10^6 bytes). Every number that is stored or pulled is checked. Ratios
within one run are the figures to compare; seconds are this machine's. State directories lie in memory, as by default.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _report
import numpy as np
from _processes import Shard, cleanly, resident_bytes
from numpy.typing import NDArray

import psd_client
from psd.checkpoint import CheckpointDirectory
from psd.contract.environment import memory_directory
from psd.contract.layout import Layout

LR, MOMENTUM = 0.5, 0.5
ROW_DIM, STEP_IDS, FILLED_IDS, QUIET_ROW_STEPS = 8, 5_000, 500_000, 100
QUIET_STEPS_MIN = 3
"""Steps between two checkpoints."""


def connected(shard: Shard, size: int) -> psd_client.ParameterServer:
    """Connect as the only worker."""
    ps = psd_client.connect(shard.address, 0, 1, retry_timeout=60)
    ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=LR, momentum=MOMENTUM))
    return ps


def after(steps: int) -> tuple[float, float]:
    """Each parameter and its momentum after steps with gradients of one, to the bit."""
    value = momentum = np.float32(0)
    for _ in range(steps):
        momentum = np.float32(MOMENTUM) * momentum + np.float32(1)
        value = value - np.float32(LR) * momentum
    return float(value), float(momentum)


def check(values: NDArray[Any], expected: float, what: str) -> None:
    """Check every parameter."""
    assert np.all(values == expected), f"{what}: not all are {expected}"


def measure_checkpoints(stack: ExitStack, megabytes: int, count: int, directory: Path, memory: Path) -> dict[str, Any]:
    """Measure slow-down and bandwidth."""
    size = megabytes * 10**6 // 8
    url = directory / "checkpoints"
    shard = Shard("--state-dir", str(memory / "state"), "--checkpoint-dir", str(url), "--checkpoint-keep", "1")
    stack.callback(shard.end)
    shard.start()
    shard.wait_ready()
    gradient = {"w": np.ones(size, np.float32)}
    steps: list[tuple[float, float]] = []
    done = threading.Event()

    def train() -> None:
        with connected(shard, size) as ps:
            while not done.is_set():
                begun = time.monotonic()
                ps.push_pull(gradient)
                steps.append((begun, time.monotonic()))

    def wait_steps(number: int) -> None:
        until = len(steps) + number
        while len(steps) < until and worker.is_alive():
            done.wait(0.005)

    worker = threading.Thread(target=train)
    worker.start()
    wait_steps(5)
    writing: list[tuple[float, float]] = []
    rates: list[float] = []
    plain: list[float] = []
    for _ in range(count):
        wait_steps(QUIET_STEPS_MIN)
        name = shard.checkpoint()
        status = shard.status().numbers
        ended = time.monotonic() - status["checkpoint_age_s"]
        writing.append((ended - status["checkpoint_took_s"], ended))
        rates.append(status["checkpoint_bytes"] / status["checkpoint_took_s"])
        verify(url, name)
        wait_steps(QUIET_STEPS_MIN)
        # Against a plain write under the same load: the job trains here, too.
        nbytes = int(status["checkpoint_bytes"])
        plain.append(nbytes / plain_write_s(directory / "plain", nbytes))
    done.set()
    worker.join()
    shard.end()
    during = [end - begun for begun, end in steps if any(begun < to and end > since for since, to in writing)]
    quiet = [end - begun for begun, end in steps[5:] if all(begun >= to or end <= since for since, to in writing)]
    took = statistics.median(to - since for since, to in writing)
    return {
        "parameters_and_slots_bytes": 8 * size,
        "checkpoints": count,
        "checkpoint_s": took,
        "steps_during": len(during),
        "steps_quiet": len(quiet),
        "step_s_quiet_median": statistics.median(quiet),
        "step_s_during_median": statistics.median(during),
        "slow_down_ratio": statistics.median(during) / statistics.median(quiet),
        "checkpoint_bytes_per_s": statistics.median(rates),
        "plain_bytes_per_s": statistics.median(plain),
        "bandwidth_ratio": statistics.median(rates) / statistics.median(plain),
    }


def verify(url: Path, name: str) -> None:
    """Check that everything stored is from that step."""
    directory = CheckpointDirectory(str(url))
    manifest = directory.load(name)
    value, momentum = after(manifest.step)
    for stored in directory.read_blocks(manifest, Layout(manifest.spec, 1), 0):
        check(stored.parameter, value, name)
        check(stored.slots["momentum"], momentum, name)


def plain_write_s(path: Path, nbytes: int) -> float:
    """Seconds for writing and syncing as many bytes, in pieces of 1 MiB that are not all equal."""
    piece = np.arange(1 << 18, dtype=np.uint32)
    begun = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, 1 << 20):
            piece += 1
            file.write(memoryview(piece).cast("B")[: min(1 << 20, nbytes - start)])
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    path.unlink()
    return seconds


def measure_recovery(stack: ExitStack, megabytes: int, count: int, memory: Path) -> dict[str, Any]:
    """Measure from kill -9 to the ready line, and to the first pull."""
    size = megabytes * 10**6 // 8
    shard = Shard("--state-dir", str(memory / "recovered"), "--lease", "120")
    stack.callback(shard.end)
    begun = time.monotonic()
    shard.start()
    shard.wait_ready()
    empty_s, empty_bytes = time.monotonic() - begun, resident_bytes(shard.pid)
    gradient = {"w": np.ones(size, np.float32)}
    pull_s, ready_s, pulled_s, touched = [], [], [], []
    with connected(shard, size) as ps:
        for step in range(1, count + 1):
            check(ps.push_pull(gradient)["w"], after(step)[0], f"step {step}")
            begun = time.monotonic()
            ps.pull()
            pull_s.append(time.monotonic() - begun)
            begun = time.monotonic()
            shard.kill()
            shard.start()
            shard.wait_ready()
            ready_s.append(time.monotonic() - begun)
            touched.append(resident_bytes(shard.pid) - empty_bytes)
            values = ps.pull()["w"]
            pulled_s.append(time.monotonic() - begun)
            check(values, after(step)[0], f"recovery {step}")
    shard.end()
    return {
        "parameters_and_slots_bytes": 8 * size,
        "kills": count,
        "start_of_an_empty_shard_s": empty_s,
        "kill_to_ready_s_median": statistics.median(ready_s),
        "kill_to_ready_s_max": max(ready_s),
        "kill_to_first_pull_s_median": statistics.median(pulled_s),
        "undisturbed_pull_s_median": statistics.median(pull_s),
        "bytes_touched_when_ready_max": max(touched),
    }


def measure_table(stack: ExitStack, rows: int, directory: Path) -> dict[str, Any]:
    """Measure steps and memory while the rows of a table are written."""
    url = directory / "rows"
    shard = Shard("--checkpoint-dir", str(url), "--max-table-rows", str(2 * rows), "--max-table-bytes", str(400 * rows))
    stack.callback(shard.end)
    shard.start()
    shard.wait_ready()
    during: list[float] = []
    memory: list[int] = []
    with psd_client.connect(shard.address, 0, 1, retry_timeout=60) as ps, ThreadPoolExecutor(1) as pool:
        ps.declare({}, tables=[psd_client.Table("t", ROW_DIM, psd_client.Adagrad(lr=0.1))], consistency="async")
        gradients, rng = np.ones((FILLED_IDS, ROW_DIM), np.float32), np.random.default_rng(0)
        for begin in range(0, rows, FILLED_IDS):
            ids = np.arange(begin, min(rows, begin + FILLED_IDS))
            ps.tables["t"].push(ids, gradients[: len(ids)])

        def step() -> float:
            ids = rng.integers(0, rows, STEP_IDS)
            begun = time.monotonic()
            ps.tables["t"].pull(ids)
            ps.tables["t"].push(ids, gradients[:STEP_IDS])
            return time.monotonic() - begun

        quiet = [step() for _ in range(QUIET_ROW_STEPS)]
        before = resident_bytes(shard.pid)
        written = pool.submit(shard.checkpoint)
        while not memory or not written.done():
            during.append(step())
            memory.append(resident_bytes(shard.pid))
        checkpoints = CheckpointDirectory(str(url))
        name = written.result()
        assert checkpoints.verify(name) == []
        assert checkpoints.load(name).row_count == rows
    return {
        "rows": rows,
        "checkpoint_bytes": sum(path.stat().st_size for path in url.rglob("*") if path.is_file()),
        "steps_during": len(during),
        "step_s_quiet_median": statistics.median(quiet),
        "step_s_quiet_max": max(quiet),
        "step_s_during_median": statistics.median(during),
        "step_s_during_max": max(during),
        "memory_bytes": before,
        "memory_ratio": max(memory) / before,
    }


def table(checkpoints: dict[str, Any], recovery: dict[str, Any], rows: dict[str, Any]) -> str:
    """A table of the figures."""
    c, r, t = checkpoints, recovery, rows
    return "\n".join(
        [
            f"checkpoints of {c['parameters_and_slots_bytes'] / 1e6:.0f} MB, {c['checkpoints']} of them, while a worker trains",
            f"  step while none is written    {1e3 * c['step_s_quiet_median']:9.1f} ms   ({c['steps_quiet']} steps)",
            f"  step while one is written     {1e3 * c['step_s_during_median']:9.1f} ms   ({c['steps_during']} steps)",
            f"  slow-down                     {c['slow_down_ratio']:9.2f}",
            f"  from the cut to its end       {c['checkpoint_s']:9.2f} s",
            f"  bandwidth                     {c['checkpoint_bytes_per_s'] / 1e6:9.0f} MB/s",
            f"  plain write and fsync         {c['plain_bytes_per_s'] / 1e6:9.0f} MB/s",
            f"  ratio                         {c['bandwidth_ratio']:9.2f}",
            f"recovery of a shard of {r['parameters_and_slots_bytes'] / 1e6:.0f} MB, killed {r['kills']} times",
            f"  start of an empty shard       {r['start_of_an_empty_shard_s']:9.2f} s",
            f"  kill -9 to ready              {r['kill_to_ready_s_median']:9.2f} s    (at most {r['kill_to_ready_s_max']:.2f})",
            f"  kill -9 to first pull         {r['kill_to_first_pull_s_median']:9.2f} s",
            f"  the same pull, undisturbed    {r['undisturbed_pull_s_median']:9.2f} s",
            f"  touched when ready            {r['bytes_touched_when_ready_max'] / 1e6:9.1f} MB",
            f"checkpoint of {t['rows']} rows, {t['checkpoint_bytes'] / 1e6:.0f} MB, {STEP_IDS} trained a step",
            *(
                f"  step {when}    {1e3 * t[f'step_s_{key}_median']:9.1f} ms   (at most {1e3 * t[f'step_s_{key}_max']:.1f})"
                for key, when in (("quiet", "while none is written"), ("during", "while it is written  "))
            ),
            f"  memory meanwhile / before     {t['memory_ratio']:9.3f}      ({t['memory_bytes'] / 1e6:.0f} MB before)",
        ]
    )


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of the job whose checkpoints are measured")
    parser.add_argument("--recovery-megabytes", type=int, default=1000, help="of the shard that is killed")
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the table whose checkpoint is measured")
    parser.add_argument("--count", type=int, default=5, help="checkpoints, and kills")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (default: the system's temporary one)")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.directory, prefix="psd-benchmark-") as directory,
        tempfile.TemporaryDirectory(dir=memory_directory(), prefix="psd-benchmark-") as memory,
        cleanly() as stack,
    ):
        checkpoints = measure_checkpoints(stack, args.megabytes, args.count, Path(directory), Path(memory))
        recovery = measure_recovery(stack, args.recovery_megabytes, args.count, Path(memory))
        rows = measure_table(stack, args.rows, Path(directory))
    print(table(checkpoints, recovery, rows))
    _report.write_json(args.json, {"checkpoints": checkpoints, "recovery": recovery, "table": rows}, [])


if __name__ == "__main__":
    main()
