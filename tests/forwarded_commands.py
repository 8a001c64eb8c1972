"""Commands of shells: `python`, `psd-run` and psd's others by their names, forked from a process that has loaded psd and torch.

A folder for the front of PATH has a small program for each name. It asks this process for a Program with its arguments,
environment, folder and output, hands on the signals that it gets, and ends as that does; if it is killed, that is, too. What
Program cannot be, such as `python -V`, it executes. For Linux.

Must not know what the commands do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
from pathlib import Path

from forked_children import REQUEST_BYTES_MAX, python_command
from loaded_programs import WITH_TORCH, Program

NAMES = ("python", "psd-run", "psd-server", "psdctl")

ASKING = """\
#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect({address!r})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asking.send(b"%d" % number))
    command = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    request = {{"command": command, "environ": dict(os.environ), "cwd": os.getcwd()}}
    socket.send_fds(asking, [json.dumps(request).encode()], [1, 2])
    answer = asking.recv(64)
if answer == b"execute":
    os.execv(os.path.join({binaries!r}, command[0]), command)
status = int(answer)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class ForwardedCommands:
    """The folder and what answers. A context manager: in the end, nothing is started any more.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(folder / "asked"))
        self._listening.listen()
        binaries = Path(sys.executable).parent
        for name in NAMES:
            asking = folder / name
            asking.write_text(ASKING.format(python=sys.executable, address=str(folder / "asked"), binaries=str(binaries)))
            asking.chmod(0o755)
        self._answering: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Path:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        for thread in self._answering:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                asked, _ = self._listening.accept()
            except OSError:
                return
            self._answering.append(threading.Thread(target=self._answer, args=(asked,), daemon=True))
            self._answering[-1].start()

    def _answer(self, asked: socket.socket) -> None:
        with asked, contextlib.suppress(ConnectionError):  # whoever asked may be gone
            message, descriptors, *_ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 2)
            if not message:
                return
            output, errors = descriptors
            try:
                program = self._program(json.loads(message), output, errors)
            finally:
                os.close(output)
                os.close(errors)
            if program is None:
                asked.send(b"execute")
                return
            with program:
                waiting = select.poll()
                waiting.register(program.fileno(), select.POLLIN)
                waiting.register(asked.fileno(), select.POLLIN)
                while program.poll() is None:
                    if asked.fileno() in dict(waiting.poll()):
                        number = asked.recv(64)
                        program.send_signal(int(number)) if number else program.kill()
                        if not number:
                            return
                asked.send(str(program.returncode).encode())

    def _program(self, request: dict[str, object], output: int, errors: int) -> Program | None:
        environ = dict(request["environ"])  # type: ignore[call-overload]
        path = [entry for entry in environ["PATH"].split(os.pathsep) if entry != str(self._folder)]
        environ["PATH"] = os.pathsep.join(path)
        name, *arguments = request["command"]  # type: ignore[misc]
        found = shutil.which(name, path=environ["PATH"])
        command = python_command([found, *arguments], None) if found else None
        if command is None:
            return None
        cwd = Path(str(request["cwd"]))
        return Program(command, stdout=output, stderr=errors, env=environ, cwd=cwd, loads=WITH_TORCH, generations=2)
