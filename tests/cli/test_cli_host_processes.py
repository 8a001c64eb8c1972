"""The processes of a job on one machine: psd/cli/processes/host_processes.py."""

import contextlib
import selectors
from dataclasses import replace
from signal import SIGCHLD, signal

import pytest

from psd.cli.job.actions import Name
from psd.cli.processes.host_processes import CANNOT_START, HostProcesses
from psd.cli.run import parse


def test_start_when_a_command_cannot_be_executed_then_that_is_told_as_any_death_and_not_at_once(tmp_path):
    """While others are being started, nobody expects a death: with many restarts each would begin inside of the one before."""
    program = tmp_path / "program"
    program.write_text("#!/no/interpreter\n")
    program.chmod(0o755)
    plan = parse(["--state-dir", str(tmp_path / "state"), str(program)], {})
    exits, said, signals = [], [], []

    def restart(name, status):
        exits.append(status)
        if len(exits) < 3:
            processes.start(name, [])

    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as cleanup:
        cleanup.callback(signal, SIGCHLD, signal(SIGCHLD, lambda *_: signals.append(SIGCHLD)))
        processes = HostProcesses(plan, "127.0.0.1", selector, on_output=None, on_exit=restart, say=said.append)
        processes.start(Name("worker", 0), [])
        told = [len(exits)]
        while signals:
            signals.clear()
            processes.reap()
            told.append(len(exits))
        processes.clear_away(keep=False)

    assert told == [0, 1, 2, 3]
    assert exits == [CANNOT_START] * 3
    assert said == [f"cannot start worker 0: [Errno 2] No such file or directory: '{program}'"] * 3


@pytest.mark.parametrize(
    ("status", "options", "words"),
    [
        ("exit 0", [], "; psd-run with this --state-dir continues with them"),
        ("exit 74", [], "; psd-run with this --state-dir continues with them"),
        (
            "kill -9 $$",
            [],
            "; psd-run with this --state-dir continues with them, unless a round of exact aggregation was lost with shard 0, "
            "which did not end in order: then not at all",
        ),
        (
            "exec sleep 60",
            ["--checkpoint-dir", "/tmp/checkpoints"],
            "; psd-run with this --state-dir continues with them, unless a round of exact aggregation was lost with shard 0, "
            "which did not end in order: then with the newest checkpoint, if there is one",
        ),
        (
            "exit 65",
            [],
            ", but cannot be continued with, as a round of exact aggregation was lost; remove them before the next job",
        ),
    ],
)
def test_clear_away_when_parameters_are_kept_then_says_what_can_be_done_with_them(status, options, words, tmp_path):
    """A shard that was killed may have lost gradients of an open round that another shard has counted."""
    state = tmp_path / "state"
    plan = parse(["--state-dir", str(state), *options, "true"], {})
    plan = replace(plan, shard_command=lambda _index, _listen, path: ["sh", "-c", f"mkdir {path} && {status}"])
    said, signals = [], []

    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as cleanup:
        cleanup.callback(signal, SIGCHLD, signal(SIGCHLD, lambda *_: signals.append(SIGCHLD)))
        processes = HostProcesses(
            plan, "127.0.0.1", selector, on_output=lambda *_: None, on_exit=lambda *_: None, say=said.append
        )
        processes.start(Name("shard", 0), [])
        while not (state / "shard-0").exists() or ("sleep" not in status and processes.living):
            processes.reap()
        processes.clear_away(keep=True)

    assert said == [f"the parameters are kept in {state}{words}"]
