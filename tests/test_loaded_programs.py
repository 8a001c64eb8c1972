"""Programs that tests start are processes as any: what they see of themselves, and what others see of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loaded_programs import Program, completed

pytestmark = pytest.mark.process

SHOWS = """\
import json, os, sys
from pathlib import Path
seen = {name: Path(f"/proc/self/{name}").read_text().rstrip("\\0").split("\\0") for name in ("cmdline", "environ")}
print(json.dumps([sys.argv, sys.path[0], os.getppid(), os.getsid(0) == os.getpid(), seen, __name__]))
"""

STARTS = """\
import json, os, signal, subprocess, sys
reading, writing = os.pipe()
kept = subprocess.Popen([sys.executable, "-c", f"import os; os.write({writing}, b'kept')"], pass_fds=[writing])
ended = subprocess.run([sys.executable, "-u", sys.argv[1], "a", "b"], capture_output=True, text=True, start_new_session=True,
                       env={"ONLY": "this", "PYTHONPATH": "/nowhere"})
failed = subprocess.run([sys.executable, "-c", "import sys; sys.exit('why')"], stderr=subprocess.PIPE, text=True)
asleep = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
asleep.kill()
elsewhere = subprocess.run([sys.executable, "-c", "import os; print(os.getcwd())"], cwd="/", stdout=subprocess.PIPE, text=True)
echoed = subprocess.run([sys.executable, "-c", "print(input())"], input="said", stdout=subprocess.PIPE, text=True)
other = subprocess.run(["echo", "executed"], stdout=subprocess.PIPE, text=True)
print(json.dumps([os.getpid(), kept.wait(), os.read(reading, 9).decode(), json.loads(ended.stdout), failed.returncode,
                  failed.stderr, asleep.wait(), elsewhere.stdout, echoed.stdout, other.stdout]))
"""


@pytest.mark.parametrize("generations", [0, 1], ids=["executed", "forked"])
def test_children_of_programs_are_alike_whether_they_are_executed_or_forked(tmp_path, generations):
    """Parent, session, arguments, environment, descriptors, streams, folder, and end; likewise in /proc."""
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "starts.py").write_text(STARTS)

    done = completed([str(tmp_path / "starts.py"), str(tmp_path / "shows.py")], generations=generations)

    assert done.returncode == 0, done.stderr
    pid, kept, said, shown, *others = json.loads(done.stdout)
    assert (kept, said) == (0, "kept")
    assert others == [1, "why\n", -signal.SIGKILL, "/\n", "said\n", "executed\n"]
    argv, path, parent, is_leader, seen, name = shown
    assert (argv, path, name) == ([str(tmp_path / "shows.py"), "a", "b"], str(tmp_path), "__main__")
    assert (parent, is_leader) == (pid, True)
    assert [word for word in seen["cmdline"] if word != "-u"] == [sys.executable, *argv]
    assert {"ONLY=this", "PYTHONPATH=/nowhere"} <= set(seen["environ"])
    assert not any(entry.startswith(("PATH=", "HOME=")) for entry in seen["environ"])


def test_programs_end_as_their_interpreters_would(tmp_path):
    """A status, a traceback, functions for the end, and an interrupt that nobody catches."""
    ends = tmp_path / "ends.py"
    ends.write_text("import atexit, sys\natexit.register(print, 'at the end')\nraise LookupError(sys.argv[1])\n")
    waits = tmp_path / "waits.py"
    waits.write_text("import signal\nprint('ready', flush=True)\nsignal.pause()\n")

    done = completed([str(ends), "lost"])
    with Program([str(waits)], stderr=subprocess.PIPE) as waiting:
        assert waiting.stdout.readline() == "ready\n"
        waiting.send_signal(signal.SIGINT)
        status = waiting.wait(100)

    assert (done.returncode, done.stdout) == (1, "at the end\n")
    assert done.stderr.endswith("LookupError: lost\n")
    assert status == -signal.SIGINT


def test_forked_children_end_with_the_session_of_a_program_that_is_killed(tmp_path):
    """Nothing of it is left, nor what forks for it."""
    starts = tmp_path / "starts.py"
    starts.write_text(
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with Program([str(starts)], stderr=subprocess.PIPE, generations=1, start_new_session=True) as program:
        child = int(program.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        program.kill()
        assert program.stdout.read() == ""  # all that have the pipe have ended
        assert program.wait(100) == -signal.SIGKILL
