"""Runs the blocks of a page in a folder of its own: commands as processes, Python against real shards.

What a page says of other hosts, ports, buckets and sizes is replaced by what a test has, by the table below; nothing else is.
Python blocks with a title are files that commands use. Others run in this process, each with a fresh shard if it connects,
since importing a framework takes longer than all that they do.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from free_ports import free_port
from markdown_blocks import Block, blocks
from source_tree import ROOT

from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer

TIMEOUT_S = 100.0

KERAS_PAGES = ("docs/keras.md", "docs/jax.md", "docs/migrating.md")
"""Pages whose blocks need the environment of make test-keras."""

SMALLER = {
    '("sync", "ssp:5", "async"), 2.0,': '("sync", "async"), 0.3,',
    "psd_client.local(shards=1, workers=4)": "psd_client.local(shards=1, workers=2)",
    "(1_000, 30_000, 1_000_000)": "(1_000_000,)",
    "STEPS, INNER_LR = 200,": "STEPS, INNER_LR = 60,",
    "--workers 2 diloco.py each": "--workers 1 diloco.py each",
    "--workers 2 diloco.py mean": "--workers 1 diloco.py mean",
    '"127.0.0.1:7000", 150, 2_000_000': '"127.0.0.1:7000", 150, 500_000',
    "(100, 200, 300, 400)": "(100, 200)",
    "--shards 2 --workers 2 -- torchrun": "--shards 1 --workers 1 -- torchrun",
}
"""Sizes of what a page measures, draws or starts, and smaller ones that show that it runs; pictures to be kept have its own."""

TRAINING = """\
import sys
import numpy as np
import psd_client

with psd_client.connect(wait_timeout=60) as ps:
    params = ps.declare({"w": np.zeros(8, np.float32)}, optimizer=psd_client.SGD(lr=0.1))
    for step in range(5):
        params = ps.push_pull({"w": np.ones(8, np.float32)})
"""
"""train.py, where a page does not show one: a few steps, whatever its arguments."""


class PageRunner:
    """Runs a page's blocks one after the other. A context manager: what is still running in the end is ended.

    Args:
        folder: an empty one, where commands run.
        commands: a folder that comes first in PATH (forwarded_commands.py); else interpreters load what they need.
    """

    def __init__(self, folder: Path, commands: Path | None = None) -> None:
        self._folder = folder
        self._first_in_path = "" if commands is None else f"{commands}:"
        self._ports: dict[str, int] = {}
        self._commands: list[_Command] = []
        self._names: dict[str, Any] = {}
        self._shards: list[ShardServer] = []
        (folder / "train.py").write_text(TRAINING)
        (folder / "home").mkdir()

    def __enter__(self) -> PageRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_job()
        for command in self._commands:
            command.kill()

    def run_page(self, page: Path) -> int:
        """Run all blocks that are to be run; how many. AssertionError, naming the block, if one does not do what it should."""
        count = 0
        for block in blocks(page):
            if "not run" in block.marks:
                continue
            count += self.run(block)
        self._end_job()
        for command in self._commands:
            command.check_end()
        return count

    def run(self, block: Block) -> bool:
        """Run one block; False if it is one that is only shown."""
        text = self.substituted(block.text)
        if block.title:
            (self._folder / block.title).write_text(text)
            if "prints" in block.marks:
                self._run_python(block, text)
        elif block.language == "bash":
            self._run_commands(block, text)
        elif block.language == "python":
            self._run_python(block, text)
        elif block.language == "yaml":
            import yaml  # which the environment of the Keras tests does not have

            list(yaml.safe_load_all(text))
        else:
            assert block.language == "text", f"{block.where}: no test knows what to do with {block.language!r}"
            return False
        return True

    def substituted(self, text: str) -> str:
        """The text with this machine's addresses and short data."""
        for size, smaller in SMALLER.items():
            text = text.replace(size, size if "PSD_PICTURES" in os.environ else smaller)
        text = re.sub(r"0\.0\.0\.0:7000(?=.*--advertise (host-[ab]):)", r"\1:7000", text)
        text = text.replace("DNS:host-a,DNS:host-b", "IP:127.0.0.1")
        text = re.sub(r"\b(host-[ab]|127\.0\.0\.1|localhost):([79]\d{3})\b", self._address, text)
        text = re.sub(r"(--metrics-port |--bulk-port )([79]\d{3})\b", lambda m: m[1] + str(self._port("127.0.0.1", m[2])), text)
        text = re.sub(r"\bhost-[ab]\b", "127.0.0.1", text)
        text = text.replace("s3://bucket", f"{self._folder}/bucket").replace("/var/lib/psd", f"{self._folder}/state")
        text = re.sub(
            r"^(.*)examples/mnist\.py", rf"\1{ROOT}/examples/mnist.py --steps 5 --data digits", text, flags=re.MULTILINE
        )
        text = re.sub(r"(?<![\w/])examples/", f"{ROOT}/examples/", text)
        return re.sub(r"(?<![\w/])deploy/", f"{ROOT}/deploy/", text)

    def _address(self, found: re.Match[str]) -> str:
        host = "127.0.0.1" if found[1] == "localhost" else found[1]
        return f"127.0.0.1:{self._port(host, found[2])}"

    def _port(self, host: str, port: str) -> int:
        return self._ports.setdefault(f"{host}:{port}", free_port())

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PSD_") or name == "PSD_JOBS_DIR"}
        path = f"{self._first_in_path}{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        return {**kept, "PATH": path, "HOME": str(self._folder / "home"), "PSD_RETRY_TIMEOUT": "40", "NO_COLOR": "1"}

    def _run_commands(self, block: Block, text: str) -> None:
        command = _Command(block, text, self._folder, self._environment())
        self._commands.append(command)
        if "background" not in block.marks:
            command.check_end()
        elif "psd-server" in text:
            command.wait_until_ready()

    def _run_python(self, block: Block, text: str) -> None:
        if "continues" not in block.marks:
            self._end_job()
            self._names = {"__name__": "__main__"}
            if re.search(r"\b(connect|distribute)\(", text):
                shard = ShardServer(ServerConfig(0, 1, listen="127.0.0.1:0", lease_s=60.0))
                shard.start()
                self._shards.append(shard)
        address = self._shards[-1].address if self._shards else ""
        here = {"PSD_SERVERS": address, "PSD_RANK": "0", "PSD_WORLD_SIZE": "1"}
        with _process_state(self._folder, here), contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                exec(compile(text, block.where, "exec"), self._names)
            except Exception as error:
                raise AssertionError(f"{block.where}: {type(error).__name__}: {error}\n{text}") from error
        words = block.marks.get("prints", "")
        assert words in said.getvalue(), f"{block.where}: expected {words!r}:\n{said.getvalue()}"

    def _end_job(self) -> None:
        """Close what the Python blocks have opened, and the shard that they used."""
        for value in [*self._names.values()]:
            if hasattr(value, "ps") or type(value).__module__.startswith("psd_client"):
                close = getattr(value, "close", None)
                if callable(close):
                    close()
        self._names = {}
        if "keras" in sys.modules:  # as in a fresh interpreter
            sys.modules["keras"].config.set_dtype_policy("float32")
        while self._shards:
            self._shards.pop().stop()


class _Command:
    """One shell with the commands of a block, in a process group of its own; its output is read as it comes."""

    def __init__(self, block: Block, text: str, folder: Path, environment: dict[str, str]) -> None:
        self._block = block
        self._lines: list[str] = []
        self._coming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            self._coming.put(line)
        self._coming.put(None)

    def _fail(self, why: str) -> NoReturn:
        raise AssertionError(f"{self._block.where}: {why}:\n{''.join(self._lines)}")

    def wait_until_ready(self) -> None:
        """Until a shard has said that it serves."""
        while True:
            try:
                line = self._coming.get(timeout=TIMEOUT_S)
            except queue.Empty:
                self._fail(f"no shard was ready in {TIMEOUT_S:g} s")
            if line is None:
                self._fail("ended before a shard was ready")
            if " ready at " in line:
                return

    def check_end(self) -> None:
        """Wait for the end, which must be as the block's marks say."""
        try:
            status = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._fail(f"still running after {TIMEOUT_S:g} s")
        self._reader.join(TIMEOUT_S)
        fails = self._block.marks.get("fails")
        if (status != 0) != (fails is not None):
            self._fail(f"ended with status {status}")
        for words in (fails, self._block.marks.get("prints")):
            if words is not None and words not in "".join(self._lines):
                self._fail(f"expected {words!r}")

    def kill(self) -> None:
        """End it, and whatever it has started, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def _process_state(folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Within: the working directory, PSD_* variables and import path as a script in that folder has them."""
    kept, here, path = dict(os.environ), Path.cwd(), list(sys.path)
    for name in [name for name in os.environ if name.startswith("PSD_") and name != "PSD_JOBS_DIR"]:
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        os.chdir(here)
        sys.path[:] = path
