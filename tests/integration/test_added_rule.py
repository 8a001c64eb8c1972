"""A rule is added by one C header and one class of psd_core/rules.py, and an operation on vectors by a row and a loop.

In a copy of psd_core, built as it is always built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

HEADER = """
#define DRIFT_STEPS_ALIKE_FROM 2
typedef struct { real lr, friction; int first, counted; } FN(drift);

PSD_PREPARE(drift)
{
    k->lr = h->lr;
    k->friction = h->friction;
    k->first = step == 1;
    k->counted = h->is.counted;
}

PSD_TILE(drift)
{
    const FN(drift) c = *k;
    for (intptr_t i = 0; i < n; i++) {
        const real trace = c.friction * slots_in[SLOT_DRIFT_TRACE][i] + g_in[i];
        slots_out[SLOT_DRIFT_TRACE][i] = trace;
        if (c.counted)
            slots_out[SLOT_DRIFT_COUNT][i] = c.first ? 1 : slots_in[SLOT_DRIFT_COUNT][i] + 1;
        p_out[i] = p_in[i] - c.lr * (c.counted ? trace / slots_out[SLOT_DRIFT_COUNT][i] : trace);
    }
}
"""

ROW = '''
@dataclass(frozen=True)
class Drift(Optimizer):
    """A rule with something of everything."""

    rule: ClassVar[str] = "drift"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("trace", start="initial_trace"), Slot("count", "counted"))

    lr: Positive
    friction: Share = 0.5
    initial_trace: Number = 0.0
    counted: bool = False


'''

OPERATION = '''
    @change(99, reads_out=True)
    def approach(self, x: Operand, share: float) -> None:
        """Move y towards x: y = y + share * (x - y)."""


'''

LOOP = """
    case PSD_V_APPROACH: EACH(ADD(x[i], MUL(a, SUB(y[i], x[i]))));
"""

BATCH = """
import inspect
import numpy as np
import psd_client
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer

shards = [ShardServer(ServerConfig(shard_index=i, shard_count=2, listen="127.0.0.1:0")) for i in range(2)]
for shard in shards:
    shard.start()
x, y = np.linspace(-1, 1, 9000), np.linspace(3, 7, 9000)
with psd_client.connect(",".join(shard.address for shard in shards), 0, 1) as ps:
    ours, its, whole = ps.vector("x", 9000), ps.vector("y", 9000), ps.vector("whole", 5, "int64")
    ours.put(x)
    its.put(y)
    ours.approach(its, share=0.25)
    with ps.batch() as b:
        b.approach(ours, its, 0.25)
        total = b.sum(ours)
    for _ in range(2):
        x = x + 0.25 * (y - x)
    assert ours.pull().tobytes() == x.tobytes()
    assert abs(float(total) - x.sum()) < 1e-6
    for wrong in (lambda: whole.approach(whole, 0.5), lambda: ours.approach(whole, 0.5), lambda: ours.approach(its)):
        try:
            wrong()
        except (psd_client.InvalidRequest, TypeError) as error:
            print(error)
for shard in shards:
    shard.stop()
for owner in (psd_client.Vector, psd_client.Batch):
    print(f"{owner.approach.__qualname__}{inspect.signature(owner.approach)}", owner.approach.__doc__)
"""

JOB = """
import numpy as np
import psd_client, psd_core
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer

shards = [ShardServer(ServerConfig(shard_index=i, shard_count=2, listen="127.0.0.1:0")) for i in range(2)]
for shard in shards:
    shard.start()
start, grad = np.arange(5000.0), np.linspace(-1, 1, 5000)
rule = psd_client.Drift(lr=0.25, initial_trace=2, counted=True)
with psd_client.connect(",".join(shard.address for shard in shards), 0, 1) as ps:
    params = ps.declare({"w": start, "v": start.astype(np.float32)}, rule)
    for _ in range(3):
        params = ps.push_pull({"w": grad, "v": grad.astype(np.float32)})
for shard in shards:
    shard.stop()

for name, dtype in (("w", np.float64), ("v", np.float32)):
    expected, trace = start.astype(dtype), np.full(5000, 2, dtype)
    for count in (1, 2, 3):
        trace = dtype(0.5) * trace + grad.astype(dtype)
        expected = expected - dtype(0.25) * (trace / dtype(count))
    assert params[name].tobytes() == expected.tobytes(), name
for options in ({"lr": 0}, {"lr": 1, "friction": 2}, {"lr": 1, "counted": 1}, {}):
    try:
        psd_client.Drift(**options)
    except (TypeError, ValueError) as error:
        print(error)
print(psd_core.__file__)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with psd_core, the rule and the operation; extensions that have kernels of them are built, the others copied."""
    folder = tmp_path_factory.mktemp("added_rule")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    setup = (ROOT / "setup.py").read_text()
    setup, count = re.subn("(?m)^EXTENSIONS = .*", "EXTENSIONS = [kernels, block, table, vector]", setup)
    assert count == 1
    # What Cython has made is there, newer than its sources.
    setup, count = re.subn('(?m)^BUILD_EXT = {"force": True', 'BUILD_EXT = {"force": False', setup)
    assert count == 1
    (folder / "setup.py").write_text(setup)
    ignored = shutil.ignore_patterns("_kernels.*.so", "_block.*.so", "_table.*.so", "_vector.*.so", "__pycache__")
    shutil.copytree(ROOT / "psd_core", folder / "psd_core", ignore=ignored)
    (folder / "psd_core/csrc/rule_drift.h").write_text(HEADER)
    table = folder / "psd_core/rules.py"
    names, rows = table.read_text().replace("__all__ = [", '__all__ = ["Drift", ').split("RULES = {")
    table.write_text(f"{names}{ROW}RULES = {{{rows}")
    operations = folder / "psd_core/vector_operations.py"
    rows, rest = operations.read_text().split("\n\nROWS: ")
    operations.write_text(f"{rows}{OPERATION}ROWS: {rest}")
    loops = folder / "psd_core/csrc/vector_elementwise.h"
    before, after = loops.read_text().split("    case PSD_V_MAP: FN(map)")
    loops.write_text(f"{before}{LOOP}    case PSD_V_MAP: FN(map){after}")
    built = python(folder, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel", "2")
    assert built.returncode == 0, built.stderr
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where psd_core is the copy; what it builds is not optimised."""
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "clients")))
    environment = {**os.environ, "PYTHONPATH": path, "PSD_CYTHON_DEBUG": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_rule_of_one_header_and_one_row_trains(copy):
    """Shards apply it with its slots, their initial values and its flags, and a worker names it and is told what is wrong."""
    done = python(copy, "-c", JOB)

    assert done.returncode == 0, done.stderr
    *refusals, origin = done.stdout.splitlines()
    assert Path(origin).is_relative_to(copy)
    assert refusals == [
        "lr: must be > 0, also as a float32, got 0.0",
        "friction: must be >= 0 and <= 1, got 2.0",
        "counted: expected True or False, got 1",
        "Drift.__init__() missing 1 required positional argument: 'lr'",
    ]


@pytest.mark.slow
def test_an_operation_of_one_row_and_one_loop_runs_on_vectors(copy):
    """Shards run it, and it is a method of vectors and of batches, which tells a program what it takes."""
    done = python(copy, "-c", BATCH)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "approach: share (vector 'whole' is int64): expected a whole number, got 0.5",
        "approach: x: expected 9000 of float64, as 'x' has, got 'whole' with 5 of int64",
        "missing a required argument: 'share'",
        "Vector.approach(self, x: 'Vector', share: 'float') -> 'None' Move y towards x: y = y + share * (x - y).",
        "Batch.approach(self, y: 'Vector', x: 'Vector', share: 'float') -> 'None' Move y towards x: y = y + share * (x - y).",
    ]


@pytest.mark.slow
def test_kernels_of_another_table_are_not_used(copy, tmp_path):
    """Else a number that has moved in the table would be taken for another."""
    other = shutil.copytree(copy, tmp_path / "other")
    table = other / "psd_core/rules.py"
    table.write_text(table.read_text().replace("    friction: Share = 0.5\n", ""))

    done = python(other, "-c", "from psd_core import step_block")

    assert "ImportError: psd_core: its kernels were built with another rules.py" in done.stderr
