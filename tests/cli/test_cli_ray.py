"""psd-run --on ray as far as no cluster is needed: what is sent, what is said of room, lives of a worker, and what shards hear
of them."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from psd.cli.ray import shards
from psd.cli.ray.room import shortage
from psd.cli.ray.shards import ShardProcess
from psd.cli.ray.worker import WorkerProcess
from psd.cli.run import main, parse


@pytest.mark.parametrize(
    ("bundles", "free", "words"),
    [
        ([{"CPU": 1}] * 7, {"CPU": 6}, "CPU: 7 wanted, 6 free of 8"),
        ([{"CPU": 1}, {"CPU": 2, "GPU": 1}, {"GPU": 1}], {"CPU": 2}, "CPU: 3 wanted, 2 free of 8; GPU: 2 wanted, 0 free of 0"),
        (
            [{"CPU": 4}, {"CPU": 1}],
            {"CPU": 8},
            "there is enough in all, but not on single nodes, each of which must have all of one of these: CPU: 1; CPU: 4",
        ),
    ],
)
def test_shortage_when_a_job_waits_then_names_what_is_missing(bundles, free, words):
    """The cluster has eight CPUs, and is busy otherwise."""
    assert shortage(bundles, {"CPU": 8.0}, free) == words


def test_parse_when_a_script_imports_files_beside_it_then_they_are_sent_with_it(tmp_path, monkeypatch, capsys):
    """The nodes have none of them, unless the path is absolute. Not all that a folder holds can be sent."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "data.py", "notes.txt"):
        (tmp_path / name).write_text(name)

    sent = parse(["--on", "ray", "train.py"], {}).script
    assert sent == {"train.py": b"train.py", "data.py": b"data.py"}
    assert parse(["--on", "ray", str(tmp_path / "train.py")], {}).script == {}

    (tmp_path / "big.py").write_bytes(bytes(10 << 20))
    with pytest.raises(SystemExit):
        main(["--on", "ray", "train.py"])
    assert "the Python files beside it have 10,485,775 bytes; at most 10,485,760 are sent" in capsys.readouterr().err


def test_worker_when_calls_overtake_each_other_then_only_the_newest_life_runs(tmp_path):
    """Its program must not run twice: both would be the same worker."""
    worker = WorkerProcess(0)
    environ = {"PSD_RUN_ID": f"ray-lives-{time.monotonic_ns()}"}

    def run(life: int, *command: str) -> int:
        return worker.run(life, command, {}, environ, None)

    worker.stop(1, 0.0)
    assert run(1, "touch", str(tmp_path / "begun")) == -signal.SIGTERM
    assert not (tmp_path / "begun").exists(), "it was stopped before it began"

    ends = []
    earlier = threading.Thread(target=lambda: ends.append(run(2, "sleep", "60")))
    earlier.start()
    while worker._process is None:
        assert earlier.is_alive()
    assert run(3, "true") == 0
    earlier.join()
    assert ends in ([-signal.SIGTERM], [-signal.SIGKILL])


LISTENING_SHARD = """
import sys
assert "--heed-launcher" in sys.argv
with open(__file__ + ".heard", "a", buffering=1) as heard:
    print("psd-server: shard 0/1 ready at 127.0.0.1:4000", flush=True)
    for line in sys.stdin:
        heard.write(line)
"""


def test_shard_when_it_is_started_again_then_it_hears_once_more_of_workers(tmp_path, monkeypatch):
    """By its standard input. A worker that was started long ago has joined, or will not."""
    program = tmp_path / "listening.py"
    program.write_text(LISTENING_SHARD)
    heard = tmp_path / "listening.py.heard"
    monkeypatch.setattr(shards, "python_command", lambda _: [sys.executable, str(program)])
    node = SimpleNamespace(get_node_id=lambda: "a" * 12)
    here = SimpleNamespace(get_runtime_context=lambda: node, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    monkeypatch.setattr(shards, "load", lambda: here)

    def hears(*lines):
        while heard.read_text().splitlines() != list(lines):
            assert shard._runner.is_alive()

    shard = ShardProcess(0, 1, f"ray-hears-{time.monotonic_ns()}", ["--heed-launcher"], {}, {})
    try:
        assert shard.address() == "127.0.0.1:4000"
        for rank in (1, 2, 3):
            shard.tell(rank, f"starting {rank}")
        shard.tell(4, "gone 2")
        hears("starting 1", "starting 2", "starting 3", "gone 2")
        shard._told["starting 3"] = 3, time.monotonic() - 3600.0
        heard.write_text("")
        shard._process.kill()

        hears("starting 1", "gone 2")
        shard.tell(5, "starting 4")
        hears("starting 1", "gone 2", "starting 4")
    finally:
        shard.stop(0.0)
