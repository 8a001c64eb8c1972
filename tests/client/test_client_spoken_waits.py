"""No call waits in silence: each says after `report_after` seconds what it waits for."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, connect_faulty

import psd_client
from psd.contract.errors import PsdError, ShardUnavailable
from psd_client import DeclaredTable, ParameterServer, Reader, ReadTable

NOBODY = "127.0.0.1:9"
REPORT_AFTER_S = 0.2
LIMITS = {"wait_timeout": 0.9, "retry_timeout": 0.6}
PATIENCES = (1, 5, 25)
"""Factors of these limits: on a busy machine a call may reach its limit before it finds the time to say anything."""
GRADIENT = {"w": np.ones(3, np.float32)}

NOT_WAITING = {"stats", "save_client_state", "log", "DeclaredTable.prefetch", "Reader.pull_whole"}
"""Methods that ask no shard, or leave that to another thread, or to a later call; and one for relays, which say themselves."""


def connect(servers: str, rank: int = 0) -> ParameterServer:
    return psd_client.connect(servers, rank, 2, report_after=REPORT_AFTER_S, **LIMITS)


def declared(ps: ParameterServer) -> None:
    rule = psd_client.SGD(lr=1.0)
    ps.declare({"w": np.zeros(3, np.float32)}, rule, tables=[psd_client.Table("t", 1, rule)])


@contextlib.contextmanager
def in_the_job(servers: str, *before: str) -> Any:
    """Worker 0, after these calls; worker 1 has joined and does nothing."""
    with connect(servers, 1) as idle, connect(servers) as ps:
        declared(ps)
        declared(idle)
        for name in before:
            call(ps, name)
        yield ps


def call(ps: ParameterServer, name: str) -> None:
    if name.startswith("DeclaredTable."):
        getattr(ps.tables["t"], name.partition(".")[2])(*{"DeclaredTable.push": [[1], [[1]]]}.get(name, [[1]]))
        return
    arguments: dict[str, Any] = {
        "push": GRADIENT,
        "push_pull": GRADIENT,
        "load_parameters": GRADIENT,
        "barrier": "b",
        "all_reduce": {"x": 1},
    }
    getattr(ps, name)(*([arguments[name]] if name in arguments else []))


def connecting(_: str) -> None:
    connect(NOBODY)


def declaring(servers: str) -> None:
    """The worker that is to provide the initial values does not."""
    chosen, faults = connect_faulty(servers, world_size=2)
    is_chosen, is_over = threading.Event(), threading.Event()
    faults.run_before("initialize", shard=0, action=lambda: (is_chosen.set(), is_over.wait()))
    with chosen, connect(servers, 1) as ps:
        first = Thread(lambda: declared(chosen))
        is_chosen.wait(60.0)
        try:
            declared(ps)
        finally:
            is_over.set()
            first.result()


def reading(servers: str) -> None:
    with psd_client.connect(servers, role="reader", report_after=REPORT_AFTER_S, **LIMITS) as reader:
        reader.pull()


def reading_rows(servers: str) -> None:
    with psd_client.connect(servers, role="reader", report_after=REPORT_AFTER_S, **LIMITS) as reader:
        reader.tables["t"].pull([1])


def reading_from_nobody(_: str) -> None:
    reading(NOBODY)


def cut_off(method: str, calls: Callable[[ParameterServer], object]) -> Callable[[str], None]:
    """The shard cannot be reached by calls of this method."""

    def run(servers: str) -> None:
        limits = {f"{name}_s": limit for name, limit in LIMITS.items()}
        ps, faults = connect_faulty(servers, report_after_s=REPORT_AFTER_S, **limits)
        with ps:
            for _ in range(1000):
                faults.fail(method, shard=0, error=ShardUnavailable("cut"))
            calls(ps)

    return run


def filled(ps: ParameterServer) -> None:
    vector = ps.vector("v", 3)
    with ps.batch() as batch:
        batch.fill(vector, 1.0)


def in_call(name: str, *before: str) -> Callable[[str], None]:
    def run(servers: str) -> None:
        with in_the_job(servers, *before) as ps:
            call(ps, name)

    return run


NOBODY_ANSWERS = f"shard 0 at {NOBODY} has not answered for"
WAITS: dict[str, tuple[Callable[[str], None], str]] = {
    "connect": (connecting, f"worker 0: {NOBODY_ANSWERS}"),
    "declare": (declaring, "worker 1: waiting for the initial values from worker 0"),
    "push": (in_call("push", "push"), "worker 0: step 0: waiting for worker 1"),
    "pull": (in_call("pull", "push"), "worker 0: step 0: waiting for worker 1"),
    "push_pull": (in_call("push_pull"), "worker 0: step 0: waiting for worker 1"),
    "DeclaredTable.push": (in_call("DeclaredTable.push", "push"), "worker 0: step 0: waiting for worker 1"),
    "DeclaredTable.pull": (in_call("DeclaredTable.pull", "push"), "worker 0: step 0: waiting for worker 1"),
    "barrier": (in_call("barrier"), "worker 0: barrier 'b': waiting for worker 1"),
    "all_reduce": (in_call("all_reduce"), "worker 0: barrier 'all_reduce': waiting for worker 1"),
    "load_parameters": (in_call("load_parameters"), "worker 0: barrier 'load_parameters': waiting for worker 1"),
    "reset_slots": (in_call("reset_slots"), "worker 0: barrier 'load_parameters': waiting for worker 1"),
    "close": (in_call("close", "push"), "worker 0: step 0: waiting for worker 1"),
    "stop": (cut_off("stop", lambda ps: (declared(ps), ps.stop())), "worker 0: step 0: stop has taken 0 s"),
    "vector": (cut_off("change_vectors", lambda ps: ps.vector("v", 3)), "worker 0: step 0: vector 'v' has taken 0 s"),
    "matrix": (cut_off("change_vectors", lambda ps: ps.matrix("m", 2, 3)), "worker 0: step 0: vector 'm' has taken 0 s"),
    "batch": (cut_off("run_vectors", filled), "worker 0: step 0: batch on vectors has taken 0 s"),
    "Reader.pull": (reading, "reader: pull has taken 0 s: no job has been declared on this shard yet"),
    "ReadTable.pull": (reading_rows, "reader: pull has taken 0 s: no job has been declared on this shard yet"),
    "Reader.pull, of nobody": (reading_from_nobody, f"reader: pull has taken 0 s: {NOBODY_ANSWERS}"),
}


@pytest.mark.parametrize("name", WAITS)
def test_call_when_it_waits_then_says_for_what(
    name: str, cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program without any logging of its own shows warnings."""
    wait, said = WAITS[name]

    spoken: list[str] = []
    for patience in PATIENCES:
        for limit, seconds in LIMITS.items():
            monkeypatch.setitem(LIMITS, limit, seconds * patience)
        with contextlib.suppress(PsdError):
            wait(cluster(1).servers)
        spoken += [record.message for record in caplog.records if record.name == "psd_client"]
        if any(message.startswith(f"psd: {said}") for message in spoken):
            return
        monkeypatch.undo()
    raise AssertionError(spoken)


def test_every_public_call_is_here() -> None:
    """A new one needs a line above."""
    found = {name for name, _ in inspect.getmembers(ParameterServer, inspect.isfunction)}
    for kind in (Reader, DeclaredTable, ReadTable):
        found |= {f"{kind.__name__}.{name}" for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    waiting = {name for name in found if not name.rpartition(".")[2].startswith("_")} - NOT_WAITING - {"Reader.close"}

    assert waiting == {"connect", *WAITS} - {"connect", "Reader.pull, of nobody"}
