"""Python programs that a program of tests starts: its children, but forked from a process that has loaded the same as it.

A program that loaded_programs.py has forked for the test forks once more before it begins: its seed. When it starts a Python
program by subprocess, or by multiprocessing, the seed forks twice, and the first of the two ends, so that the second is the
program's own child, which it waits for and signals as it does any other. That one becomes what was to be started: arguments,
environment, streams, descriptors, session, also as the system shows them. What else is started is executed. For Linux.

Must not know which programs these are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

REQUEST_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 64
OPTIONS = ("-P", "-u")
"""Of the interpreter, which a program may have."""
HIGH = 512
"""Descriptors are moved above it, when each has to get a certain number."""

_PR_SET_CHILD_SUBREAPER = 36
_LOADED_PATH = sys.path[1:]
"""Where modules are searched for in this interpreter, without its script's folder; the first entries are of PYTHONPATH."""
_OWN_PYTHONPATH = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def become(command: Sequence[str], environ: Mapping[str, str], cwd: str, *, new_session: bool, generations: int) -> NoReturn:
    """Be `python COMMAND`, with its streams open already.

    Args:
        command: `[-P] [-u] -m module`, `-c code` or a script, and arguments.
        generations: if not 0, the Python programs that it starts are forked, too, and have one generation less.
    """
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    command, first, is_unbuffered = _parsed(command)
    _show(command, environ)
    sys.path[:] = [*first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *_without_own_pythonpath()]
    _open_streams(is_unbuffered=is_unbuffered or bool(environ.get("PYTHONUNBUFFERED")))
    if "numpy" in sys.modules:  # or all forks would draw the same
        sys.modules["numpy"].random.seed()
    if generations:
        _Seed.plant(generations - 1)
    _end(_run(command))


def _run(command: Sequence[str]) -> Any:
    """Run the program; what it has given to sys.exit, a KeyboardInterrupt, or 1 after another exception, which is shown."""
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        elif command[0] == "-m":
            sys.argv = list(command[1:])
            module = import_module(command[1])
            sys.argv[0] = module.__file__ or command[1]
            sys.exit(module.main())
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        return ending.code
    except BaseException as error:  # noqa: BLE001 - as an interpreter
        sys.excepthook(type(error), error, error.__traceback__)
        return error if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: Any) -> NoReturn:
    """End as an interpreter does, but that nothing is freed: each page of what was loaded would be copied for that."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _parsed(command: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """A command without the interpreter's options, what comes first in the path of modules, and whether -u was among them."""
    command, options = list(command), set()
    while command[0] in OPTIONS:
        options.add(command.pop(0))
    first = "" if command[0] == "-c" else str(Path.cwd() if command[0] == "-m" else Path(command[0]).resolve().parent)
    return command, [] if "-P" in options else [first], "-u" in options


def python_command(command: Sequence[str], path: str | None) -> list[str] | None:
    """A command as `become` takes it, if it is one of this interpreter's, by its name or by a script's first line; else None.

    Args:
        path: PATH, where names without a folder are looked for.
    """
    found = shutil.which(command[0], path=path) if command else None
    if found is None:
        return None
    options = list(command[1:])
    if not Path(found).samefile(sys.executable):
        with Path(found).open("rb") as file:
            return [found, *options] if file.readline(1024).strip() == b"#!" + os.fsencode(sys.executable) else None
    while options and options[0] in OPTIONS:
        options.pop(0)
    is_known = bool(options) and (options[0] in ("-m", "-c") or not options[0].startswith("-"))
    return list(command[1:]) if is_known else None


def _without_own_pythonpath() -> list[str]:
    return [entry for entry in _LOADED_PATH if entry not in _OWN_PYTHONPATH]


def _open_streams(*, is_unbuffered: bool) -> None:
    """Streams of this process's descriptors: those that are there know what the ones of the process that has forked were."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    binary = open(1, "wb", 0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(binary, "utf-8", write_through=is_unbuffered)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


ROOM = "x" * 8192
"""An argument and a variable that the first process of all has: where the system finds those of each that is forked."""


def _show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have the system show these as the process's: /proc reads them where they lay when the first process was executed."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    words = [sys.executable, *command]
    _write(arguments, arguments_end, words)
    _write(variables, variables_end, [f"{name}={value}" for name, value in environ.items()])


def _write(begin: int, end: int, words: Sequence[str]) -> None:
    data = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, data, len(data))


class _Seed:
    """The process that forks, as the one that starts programs sees it."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        self._owner = os.getpid()
        self._one_at_a_time = threading.Lock()

    @classmethod
    def plant(cls, generations: int) -> None:
        """Fork it, and have subprocess and multiprocessing ask it. It ends with this process.

        Returns also in the programs that it forks, but from another call of `become`.
        """
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            told.close()
            _grow(telling, os.getppid(), generations)
        telling.close()
        seed = cls(told)
        executed, spawned = subprocess.Popen._execute_child, util.spawnv_passfds

        def execute(
            popen: Any,
            args: Any,
            executable: Any,
            preexec_fn: Any,
            close_fds: bool,
            pass_fds: Any,
            cwd: Any,
            env: Any,
            *rest: Any,
        ) -> None:
            shell, streams, (_, gid, gids, uid, umask, new_session, *_) = rest[2], rest[3:9], rest[9:]
            plain = not shell and executable is None and (gid, gids, uid, umask) == (None, None, None, -1)
            environ = os.environ if env is None else env
            command = None
            if seed._owner == os.getpid() and plain and not isinstance(args, str | bytes):
                command = python_command([*map(os.fspath, args)], environ.get("PATH"))
            if command is None:
                executed(popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
                return
            read, written, errors = streams[0], streams[3], streams[5]
            popen.pid = seed.start(
                command,
                environ,
                str(Path.cwd()) if cwd is None else os.fspath(cwd),
                [0 if read == -1 else read, 1 if written == -1 else written, 2 if errors == -1 else errors],
                pass_fds,
                preexec_fn,
                new_session=new_session,
            )
            popen._child_created = True
            popen._close_pipe_fds(*streams)

        def spawn(path: Any, args: Any, passfds: Any) -> int:
            command = python_command([*map(os.fsdecode, args)], None) if seed._owner == os.getpid() else None
            if command is None:
                return spawned(path, args, passfds)
            return seed.start(command, os.environ, str(Path.cwd()), [0, 1, 2], passfds, None, new_session=False)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        util.spawnv_passfds = spawn

    def start(
        self,
        command: list[str],
        environ: Mapping[str, str],
        cwd: str,
        streams: list[int],
        passed: Sequence[int],
        before: Any,
        *,
        new_session: bool,
    ) -> int:
        """Start a program; its process id. before: a function that it calls first, which pickle knows by its module."""
        request = {
            "command": command,
            "environ": dict(environ),
            "cwd": cwd,
            "new_session": new_session,
            "passed": list(passed),
            "before": None if before is None else pickle.dumps(before).hex(),
            "path": sys.path,
        }
        with self._one_at_a_time:
            socket.send_fds(self._told, [json.dumps(request).encode()], [*streams, *passed])
            return int(self._told.recv(64))


def _grow(telling: socket.socket, parent: int, generations: int) -> NoReturn:
    """Fork for each request, and become what it asks for in the fork."""
    _show(["-c", "forks"], {})  # it is nobody's process, whose secrets it would show
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    while True:
        message, descriptors, *_ = socket.recv_fds(telling, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        first = os.fork()
        if first == 0:
            pid = os.fork()
            if pid == 0:
                break
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(first, 0)
        telling.send(os.read(reading, 64))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)
    while os.getppid() != parent:  # the first of the two has not ended yet
        if not Path(f"/proc/{parent}").exists():
            os._exit(1)
        os.sched_yield()
    telling.close()
    request: dict[str, Any] = json.loads(message)
    wanted = [0, 1, 2, *request.pop("passed")]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH) for descriptor in descriptors]
    os.closerange(3, HIGH)
    for descriptor, number in zip(above, wanted, strict=True):
        os.dup2(descriptor, number)
    for descriptor in above:
        os.close(descriptor)
    before, path = request.pop("before"), request.pop("path")
    if before is not None:
        sys.path[:] = path
        pickle.loads(bytes.fromhex(before))()
    become(**request, generations=generations)


def freeze() -> None:
    """Keep what is loaded out of all searches for garbage, which would have each fork copy it.

    AssertionError if there is another thread, which forks would lack.
    """
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1
