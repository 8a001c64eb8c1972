"""The protocol between a benchmark and its processes: one JSON object per line on standard input and output, in turns.

A process says {"ready": true, ...} when it can begin, or {"refused": why}. A worker then answers {"steps": n} with when each
step began and ended (seconds of the clock that all processes of a machine share) and how much processor time its process used,
and {"pushes": [per rank]} with what is wrong with the parameters after that many. At the end of its input every process ends,
so that none outlives the benchmark.

The standard library alone: peers import it under interpreters that know nothing of psd.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Turns:
    """The process's side of the protocol. Makes standard output the benchmark's alone: what libraries print goes to standard
    error."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **facts: Any) -> None:
        """Write one line to the benchmark."""
        self._out.write(json.dumps(facts) + "\n")

    def serve(self, **facts: Any) -> None:
        """Report that a server is ready, with facts such as its address; return when the benchmark has ended."""
        self.say(ready=True, **facts)
        sys.stdin.read()

    def serve_each(self, serve: Callable[[socket.socket], None]) -> None:
        """Serve TCP at the given address: `serve` is called with each connection, in its own thread."""
        host, port = self.arguments["listen"].rsplit(":", 1)
        listener = socket.create_server((host, int(port)))

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        self.serve(address=f"{host}:{listener.getsockname()[1]}")

    def end_with_input(self, **facts: Any) -> None:
        """Report a server whose main thread is busy: when the input ends, so does the process, at once."""
        self.say(ready=True, **facts)

        def watch() -> None:
            sys.stdin.read()
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()

    def answer(self, answered: Callable[[dict[str, Any]], dict[str, Any]], **facts: Any) -> None:
        """Report readiness, and answer each request in turn until the benchmark has ended."""
        self.say(ready=True, **facts)
        for line in sys.stdin:
            self.say(**answered(json.loads(line)))

    def work(
        self,
        step: Callable[[], None],
        verify: Callable[[list[int]], str],
        prepare: Callable[[], None] | None = None,
        **facts: Any,
    ) -> None:
        """Report that a worker is ready, and work on request until the benchmark has ended.

        Args:
            step: one whole step.
            verify: what is wrong with the parameters after so many pushes of each rank; empty: nothing.
            prepare: before each step, and outside of its time.
        """

        def run(steps: int) -> list[tuple[float, float]]:
            times = []
            for _ in range(steps):
                if prepare is not None:
                    prepare()
                begun = time.monotonic()
                step()
                times.append((begun, time.monotonic()))
            return times

        self.work_in_runs(run, verify, **facts)

    def work_in_runs(
        self, run: Callable[[int], Iterable[Sequence[float]]], verify: Callable[[list[int]], str], **facts: Any
    ) -> None:
        """Do as `work` does, for a worker that makes many steps at a time: `run` says when each began and ended."""
        self.say(ready=True, **facts)
        for line in sys.stdin:
            request = json.loads(line)
            if "pushes" in request:
                self.say(wrong=verify(request["pushes"]))
                continue
            before = time.process_time()
            times = run(request["steps"])
            cpu_s = time.process_time() - before
            self.say(times=[tuple(pair) for pair in times], cpu_s=cpu_s)
