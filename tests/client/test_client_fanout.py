"""The same call to several shards: all end, or are left behind; and the threads that make them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from client_faults import Thread, until

from psd.contract.errors import ShardUnavailable
from psd_client.lanes import shards
from psd_client.lanes.daemon_threads import Crew, End, Task, can_start_threads
from psd_client.lanes.shards import RetryPolicy, Shards
from psd_client.lanes.transport import Call, Cancelled, Lane, Scope
from psd_client.lanes.waiting import ShardHealth


class FakeLane:
    """No more than a number."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def close(self) -> None:
        pass


LANES: Any = [FakeLane(0), FakeLane(1), FakeLane(2)]


@pytest.fixture
def fan() -> Iterator[Shards]:
    made = Shards(LANES, RetryPolicy(0), ShardHealth(["", "", ""]))
    yield made
    made.close()


def at(*actions: Callable[[Scope], Any]) -> Callable[[Lane, Call], Any]:
    """The action at each shard."""
    return lambda lane, call: actions[lane.shard](call.scope)


def fail(error: BaseException) -> None:
    raise error


def until_cancelled(ended: list[int]) -> Callable[[Scope], None]:
    """An action that ends when it is cancelled, and notes it."""

    def wait(scope: Scope) -> None:
        try:
            scope.sleep(60)
        except Cancelled:
            ended.append(1)
            raise

    return wait


def test_run_when_all_end_then_gives_their_results_in_order(fan: Shards) -> None:
    """Whichever is the first."""
    first = threading.Event()

    results = fan.run(at(lambda _: first.wait(100), lambda _: first.set() or 1, lambda _: 2), 60)

    assert results == [True, 1, 2]
    assert fan.run(at(), 60, []) == []


def test_run_when_one_fails_then_cancels_the_others_and_raises_the_first_cause(fan: Shards) -> None:
    """Those that were cancelled are not the cause."""
    with pytest.raises(ZeroDivisionError):
        fan.run(at(lambda scope: scope.sleep(60), lambda _: fail(ZeroDivisionError()), lambda scope: scope.sleep(60)), 60)


def test_run_when_interrupted_then_cancels_the_others(fan: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C strikes the thread that waits for them."""
    ended: list[int] = []
    wait, errors = until_cancelled(ended), [KeyboardInterrupt()]

    class Interrupted(shards.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if errors:
                raise errors.pop()
            return super().get(block, timeout)

    monkeypatch.setattr(shards, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fan.run(at(wait, wait, wait), 60)

    assert len(ended) == 3


def test_run_when_a_signal_does_not_wake_the_thread_that_waits_then_it_is_interrupted_all_the_same(fan: Shards) -> None:
    """A signal that comes just before a thread sleeps, or in another thread, wakes nobody; `make jepsen` found it with seed
    340009, on a very busy machine: Ctrl-C ended a push that waited for shards only when it could not be retried any more."""
    begun = [threading.Event() for _ in LANES]
    uninterrupted: list[int] = []

    def wait(scope: Scope, own: threading.Event) -> None:
        own.set()
        scope.sleep(30)
        uninterrupted.append(1)

    def interrupt() -> None:
        for event in begun:
            event.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # in this thread

    thread = Thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fan.run(at(*(partial(wait, own=own) for own in begun)), 120)
    thread.result()

    assert uninterrupted == []


def test_end_when_a_signal_does_not_wake_the_thread_that_waits_then_it_is_interrupted_all_the_same() -> None:
    """A call in the background, such as a learner's exchange."""
    end = End()

    def interrupt() -> None:
        until(lambda: len(end._cond._waiters) > 0)  # type: ignore[attr-defined]
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # in this thread
        threading.Event().wait(30)
        end.set()

    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt, daemon=True).start()
        end.wait()

    assert not end.is_set()


def test_run_when_lanes_may_be_interrupted_then_makes_the_first_call_itself(
    fan: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run beside it; whichever fails ends them all."""
    monkeypatch.setattr(FakeLane, "is_interruptible", True, raising=False)
    here = threading.current_thread()
    ended: list[int] = []
    wait = until_cancelled(ended)

    threads = fan.run(lambda lane, _: (lane.shard, threading.current_thread()), 60, is_bulk=True)
    assert [(shard, thread is here) for shard, thread in threads] == [(0, True), (1, False), (2, False)]
    with pytest.raises(ZeroDivisionError):
        fan.run(at(wait, lambda _: fail(ZeroDivisionError()), wait), 60, is_bulk=True)
    with pytest.raises(KeyboardInterrupt):
        fan.run(at(lambda _: fail(KeyboardInterrupt()), wait, wait), 60, is_bulk=True)
    assert len(ended) == 4


def test_run_when_the_first_attempt_fails_then_goes_on_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks then must not be interrupted."""
    monkeypatch.setattr(FakeLane, "is_interruptible", True, raising=False)
    here, patient = threading.current_thread(), Shards(LANES, RetryPolicy(30, uniform=lambda: 0.0), ShardHealth(["", "", ""]))

    def reach(_: Scope) -> bool:
        if threading.current_thread() is here:
            raise ShardUnavailable("gone", shard=0, address="")
        return True

    assert patient.run(at(reach, lambda _: 1, lambda _: 2), 60, is_bulk=True) == [True, 1, 2]
    patient.close()


def test_run_when_an_operation_does_not_end_then_goes_on_without_it(fan: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer, say; the threads that are left suffice for what comes next."""
    monkeypatch.setattr(shards, "ENDING_S", 0.05)
    hangs = threading.Event()

    with pytest.raises(ZeroDivisionError):
        fan.run(at(lambda _: hangs.wait(100), lambda _: fail(ZeroDivisionError()), lambda _: 0), 60)

    assert fan.run(at(lambda _: 1, lambda _: 2, lambda _: 3), 60) == [1, 2, 3]
    hangs.set()


def test_crew_when_tasks_come_one_after_the_other_then_one_thread_does_them() -> None:
    """A thread counts as idle before anybody hears of its task's end."""
    crew = Crew("test-crew")
    threads = set()
    for _ in range(200):
        task = Task(threading.current_thread)
        crew.begin(task)
        assert task.wait() is None
        threads.add(task.result)

    assert len(threads) == 1
    crew.close()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()


def test_crew_when_tasks_overlap_then_each_has_a_thread_and_ends_with_it() -> None:
    """None waits for another's end."""
    crew, meet = Crew("test-crew"), threading.Barrier(3)
    tasks = [Task(meet.wait) for _ in range(3)]
    for task in tasks:
        crew.begin(task)

    assert [task.wait() for task in tasks] == [None] * 3
    crew.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "test-crew"])


def test_task_when_its_function_raises_then_gives_the_error() -> None:
    """Whoever waits gets it, and whoever asks for the result."""
    crew = Crew("test-crew")
    task: Task[Any] = Task(lambda: fail(ZeroDivisionError()))
    crew.begin(task)

    assert isinstance(task.wait(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        _ = task.result
    crew.close()


def test_threads_when_the_program_runs_then_can_be_started() -> None:
    assert can_start_threads()
    assert Thread(can_start_threads).result()


ENDING = """
import atexit, threading
from psd_client.lanes.daemon_threads import Crew, End, Task, can_start_threads

def at_end():
    task = Task(lambda: print("done", flush=True))
    crew.begin(task)
    task.wait()
    if can_start_threads():
        for _ in range(2):  # more than there are
            crew.begin(Task(lambda: None))

crew = Crew("crew")
before = Task(lambda: None)
crew.begin(before)
before.wait()
hanging = Task(threading.Event().wait)
if {hangs}:
    crew.begin(hanging)
atexit.register(at_end)
"""


@pytest.mark.process
@pytest.mark.parametrize("hangs", [False, True])
def test_crew_when_the_program_ends_then_still_takes_tasks_and_is_not_waited_for(hangs: bool) -> None:
    """Unlike the threads of concurrent.futures."""
    program = [sys.executable, "-c", ENDING.format(hangs=hangs)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.wait(100) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "done\n"
