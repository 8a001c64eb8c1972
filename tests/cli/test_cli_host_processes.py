"""The processes of a job on one machine: psd/cli/host_processes.py."""

import contextlib
import selectors
from signal import SIGCHLD, signal

from psd.cli.host_processes import CANNOT_START, HostProcesses
from psd.cli.policy import Name
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
