"""Restores every checkpoint that a trial has left, on another number of shards, and keeps what a job would go on from.

For each a directory `restored/NAME` in the trial's: values.npz, the parameters, and found.json, the client states and what went
wrong. Shards of this process serve it to workers of the public API. Judges nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from batches import MATRIX, batches_of
from cells import CELLS, DIGITS, initial, param_groups
from numpy.typing import NDArray
from outcome import Outcome
from plan import Plan
from row_cells import TABLES, RowCells, tables

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.checkpoint.cut import CutName
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer


@dataclass(frozen=True)
class Restored:
    """What a job goes on from.

    Attributes:
        parameters: as `Counts` takes them. states: of each rank that has one, in which its program writes the number of the
            gradient that it pushes. batches: the matrix of batches, if there is one. error: why it cannot be restored, instead
            of these.
    """

    name: str
    step: int
    parameters: dict[str, NDArray[Any]]
    states: dict[int, int]
    batches: NDArray[Any] | None = None
    error: str = ""


def restore_all(outcome: Outcome) -> None:
    """All checkpoints that are valid, on one shard more or less than the trial had.

    Where no worker came last that could read the end, and all shards have ended in order, the newest one is the end.
    """
    directory = outcome.directory / "checkpoints"
    if not directory.exists():
        return
    for info in CheckpointDirectory(str(directory)).checkpoints():
        if info.state is not CheckpointState.VALID:
            continue
        try:
            found = _restore(outcome.plan, str(directory / info.name), info.step)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the trial has found
            found = Restored(info.name, info.step, {}, {}, error=f"{type(error).__name__}: {error}")
        keep(outcome.directory, found)
    newest = CheckpointDirectory(str(directory)).newest()
    if outcome.final is None and newest is not None and outcome.have_all_ended_in_order:
        place = outcome.directory / "restored" / newest.name
        outcome.final = Path(shutil.copy(place / "values.npz", outcome.directory / "final.npz"))
        if batches_of(place).exists():
            shutil.copy(batches_of(place), batches_of(outcome.directory))


def keep(trial: Path, found: Restored) -> None:
    """Write down what was restored, for `restored`."""
    place = trial / "restored" / found.name
    place.mkdir(parents=True)
    np.savez(place / "values.npz", **found.parameters)  # type: ignore[arg-type]
    if found.batches is not None:
        np.save(batches_of(place), found.batches)
    (place / "found.json").write_text(json.dumps({"step": found.step, "states": found.states, "error": found.error}))


def restored(outcome: Outcome) -> Iterator[Restored]:
    """What `restore_all` has kept, the oldest first."""
    for place in sorted((outcome.directory / "restored").glob("*"), key=lambda place: CutName.of(place.name) or (place.name,)):
        found = json.loads((place / "found.json").read_text())
        with np.load(place / "values.npz") as arrays:
            parameters = {name: arrays[name] for name in arrays.files}
        states = {int(rank): number for rank, number in found["states"].items()}
        batches = np.load(batches_of(place)) if batches_of(place).exists() else None
        yield Restored(place.name, found["step"], parameters, states, batches, found["error"])


def _restore(plan: Plan, url: str, step: int) -> Restored:
    count = plan.shards + 1 if plan.shards < 3 else plan.shards - 1
    states: dict[int, int] = {}
    with ExitStack() as stack:
        shards = [
            ShardServer(ServerConfig(index, count, listen="127.0.0.1:0", from_checkpoint=url, lease_s=600.0))
            for index in range(count)
        ]
        for shard in shards:
            shard.start()
            stack.callback(shard.stop)
        servers = ",".join(shard.address for shard in shards)
        declared = plan.declared | {"compress": None, "pull": None}  # the numbers as they are
        options = {
            "groups": param_groups(plan.codec),
            "tables": tables(DIGITS, plan.shards) if plan.has_tables else [],
            **declared,
        }
        workers = [
            stack.enter_context(psd_client.connect(servers, rank, plan.workers, wait_timeout=60.0))
            for rank in range(plan.workers)
        ]
        for ps in workers:
            values = initial(plan.size, plan.shards, plan.codec)
            found: dict[str, Any] = dict(ps.declare(values, psd_client.SGD(lr=1), **options))
            if ps.client_state:
                states[ps.rank] = int(ps.client_state)
        if plan.has_tables:
            ids = RowCells(CELLS, DIGITS, plan.shards).ids.reshape(-1)
            found |= {name: workers[0].tables[name].pull(ids) for name in TABLES}
        matrix = workers[0].vectors.get(MATRIX)
        return Restored(Path(url).name, step, found, states, None if matrix is None else matrix.pull())
