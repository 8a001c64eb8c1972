"""psdctl follow beside a job: versions as directories, the command, and what is killed meanwhile."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from commands import Job, Process, shard_pid
from waiting import wait_until

import psd_client
from psd.cli.follow.versions import FollowedDirectory, FollowedVersion
from psd.cli.psdctl import main

SIZE = 5000
ONES = {"w": np.ones(SIZE, np.float32), "b.c": np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PSD_SERVERS", "PSD_TLS_CA", "PSD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("psd.cli.follow.follower.LOOK_S", 0.3)
    monkeypatch.setattr("psd.cli.follow.follower.RECONNECT_S", 0.5)
    monkeypatch.setattr("psd.cli.follow.follower.RETRY_S", 0.1)


@pytest.fixture
def trained(cluster: Callable[..., Any]) -> Iterator[tuple[str, psd_client.ParameterServer]]:
    """A job of one worker on two shards: every element of version n is -n."""
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare({name: np.zeros_like(value) for name, value in ONES.items()}, psd_client.SGD(lr=1.0))
        yield servers, ps


class Following:
    """psdctl follow in a thread."""

    def __init__(self, *words: str) -> None:
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(["follow", *words],))
        self._thread.start()

    def _run(self, words: list[str]) -> None:
        self.status = main(words)

    def end(self) -> int | None:
        self._thread.join(100)
        assert not self._thread.is_alive()
        return self.status


def versions(place: Path) -> list[int]:
    return sorted(int(entry.name.rpartition("-")[2]) for entry in place.glob("*version-0*"))


def values(directory: Path) -> set[float]:
    found = safetensors.numpy.load_file(directory / "model.safetensors")
    return {float(value) for tensor in found.values() for value in np.unique(tensor)}


def check_all(place: Path) -> None:
    """Every version that is there holds its own values; nothing else is in the directory."""
    for version in versions(place):
        assert values(place / f"version-{version:08}") == {-float(version)}
    assert {entry.name for entry in place.iterdir() if "version-" in entry.name} == {
        f"version-{version:08}" for version in versions(place)
    }


def reached(place: Path, version: int) -> None:
    wait_until(lambda: (place / "latest").resolve().name == f"version-{version:08}", f"latest is {version}")


def test_each_new_version_becomes_a_directory_until_the_job_is_over(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The initial values too; only the newest stay; its last version is there at the end."""
    servers, ps = trained
    following = Following("--to", str(tmp_path), "--servers", servers, "--keep", "2", "--json")
    for version in range(4):
        reached(tmp_path, version)
        ps.push_pull(ONES)
    ps.close()

    assert following.end() == 0
    assert versions(tmp_path) == [3, 4]
    check_all(tmp_path)
    out, err = capfd.readouterr()
    said = [json.loads(line) for line in out.splitlines()]
    assert [each["version"] for each in said] == [0, 1, 2, 3, 4]
    assert said[0]["directory"] == str(tmp_path / "version-00000000")
    assert err == "psdctl follow: the job is over\n"


def test_some_tensors_and_every_third_version(trained: tuple[str, psd_client.ParameterServer], tmp_path: Path) -> None:
    """By a pattern; the job's last version, too."""
    servers, ps = trained
    following = Following("--to", str(tmp_path), "--servers", servers, "--every", "3", "--keep", "9", "--names", "b.*")
    reached(tmp_path, 0)
    for version in range(1, 8):
        ps.push_pull(ONES)
        if version % 3 == 0:
            reached(tmp_path, version)
    ps.close()

    assert following.end() == 0
    assert versions(tmp_path) == [0, 3, 6, 7]
    check_all(tmp_path)
    assert list(safetensors.numpy.load_file(tmp_path / "latest" / "model.safetensors")) == ["b.c"]


def test_a_job_without_rounds(cluster: Callable[..., Any], tmp_path: Path) -> None:
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare({name: np.zeros_like(value) for name, value in ONES.items()}, psd_client.SGD(lr=1.0), consistency="ssp:3")
        following = Following("--to", str(tmp_path), "--servers", servers)
        for version in range(3):
            reached(tmp_path, version)
            ps.push_pull(ONES)

    assert following.end() == 0
    assert versions(tmp_path)[-1] == 3
    check_all(tmp_path)


def command(text: str) -> list[str]:
    """A command that runs this Python."""
    return ["--", sys.executable, "-c", text]


NOTES = """
import os, pathlib, sys, threading
place = pathlib.Path(os.environ["PSD_DIR"])
assert (place / "model.safetensors").is_file()
with open({notes!r}, "a") as notes:
    notes.write(os.environ["PSD_VERSION"] + " " + place.name + "\\n")
while not os.path.exists({go!r}):
    threading.Event().wait(0.02)
    assert place.is_dir()
sys.exit(3 if os.environ["PSD_VERSION"] == "1" else 0)
"""


def test_the_command_is_told_of_the_newest_version_and_never_runs_twice_at_once(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that come meanwhile are passed over; the one that it uses stays; that it fails is said."""
    servers, ps = trained
    notes, go, place = tmp_path / "notes", tmp_path / "go", tmp_path / "versions"
    ps.push_pull(ONES)
    words = command(NOTES.format(notes=str(notes), go=str(go)))
    following = Following("--to", str(place), "--servers", servers, "--keep", "1", *words)
    wait_until(lambda: notes.exists() and notes.read_text() == "1 version-00000001\n", "the command is told")
    for version in (2, 3, 4):
        ps.push_pull(ONES)
        reached(place, version)
    assert (place / "version-00000001").is_dir()

    go.touch()
    ps.close()

    assert following.end() == 0
    assert notes.read_text().split("\n")[:-1] == ["1 version-00000001", "4 version-00000004"]
    assert versions(place) == [4]
    assert "psdctl follow: version-00000001: the command ended with status 3\n" in capfd.readouterr().err
    assert json.loads((place / ".told.json").read_text()) == {"timeline": 0, "version": 4, "status": 0}


def test_once_writes_the_newest_version_and_has_the_commands_status(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    servers, ps = trained
    where = ("follow", "--to", str(tmp_path), "--servers", servers, "--once")
    assert main([*where]) == 0
    assert main([*where]) == 0  # it is there already
    assert "version-00000000 is there already" in capfd.readouterr().err
    ps.push_pull(ONES)

    assert main([*where, *command("import sys; sys.exit(5)")]) == 1
    assert main([*where, *command("pass")]) == 0
    assert versions(tmp_path) == [0, 1]
    check_all(tmp_path)


def test_a_version_of_which_the_command_was_not_told_is_told_first(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path
) -> None:
    """The follower ended after it had written it."""
    servers, ps = trained
    place, notes = tmp_path / "versions", tmp_path / "notes"
    assert main(["follow", "--to", str(place), "--servers", servers, "--once"]) == 0

    words = command(f"import os; open({str(notes)!r}, 'a').write(os.environ['PSD_VERSION'] + ' ')")
    following = Following("--to", str(place), "--servers", servers, *words)
    wait_until(lambda: notes.exists() and notes.read_text() == "0 ", "the command is told")
    ps.push_pull(ONES)
    wait_until(lambda: notes.read_text() == "0 1 ", "the command is told")
    ps.close()
    assert following.end() == 0
    assert notes.read_text() == "0 1 "


def test_a_store_is_followed_with_its_meta(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """What a publisher has put, and nothing that was never put: no version 0."""
    servers = cluster(2).servers
    with psd_client.publish(servers) as store:
        version = store.put({name: 2 * value for name, value in ONES.items()}, meta={"step": 12})
        assert main(["follow", "--to", str(tmp_path), "--servers", servers, "--once"]) == 0
        with psd_client.connect(servers, role="reader") as reader:
            digest = reader.pull().digest
    assert versions(tmp_path) == [version]
    assert values(tmp_path / "latest") == {2.0}
    said = json.loads((tmp_path / "latest" / "version.json").read_text())
    assert (said["meta"], said["digest"]) == ({"step": 12}, digest)
    assert sorted(safetensors.numpy.load_file(tmp_path / "latest" / "model.safetensors")) == ["b.c", "w"]


def test_a_directory_has_the_versions_of_one_job(cluster: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    """Two jobs count alike, so a version's name must not stand for either."""
    for name, status in (("one", 0), ("two", 1)):
        servers = cluster(1).servers
        with psd_client.connect(servers, 0, 1, run_id=name) as ps:
            ps.declare({"w": np.zeros(3)}, psd_client.SGD(lr=1.0))
            assert main(["follow", "--to", str(tmp_path), "--servers", servers, "--once"]) == status

    assert "has versions of job 'one', and this is job 'two'; name another directory" in capsys.readouterr().err
    assert json.loads((tmp_path / "latest" / "version.json").read_text())["job"] == "one"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--every", "0"], "--every: expected 1 to"),
        (["--keep", "0"], "--keep: expected 1 to"),
        (["--format", "peft"], "--adapter-config: expected a file"),
        (["--adapter-config", "x"], "--adapter-config: only with --format peft"),
        (["--adapter", "x"], "--adapter: only with --format peft"),
        (["--format", "peft", "--adapter-config", "x", "--config", "y"], "--config: not with --format peft"),
        (["--config", "/nowhere/config.json"], "--config: cannot read /nowhere/config.json"),
        (["--", "no-such-program", "-x"], "COMMAND: there is no program 'no-such-program'"),
        (["--timeout", "0"], "--timeout: expected more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: Any, words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["follow", "--to", str(tmp_path / "place"), "--servers", "127.0.0.1:1", *words])

    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "place").exists()


def test_names_that_no_tensor_has_end_it(trained: tuple[str, psd_client.ParameterServer], tmp_path: Path, capsys: Any) -> None:
    servers, _ = trained
    assert main(["follow", "--to", str(tmp_path), "--servers", servers, "--names", "head.*"]) == 1
    assert "psdctl follow: error: names: no tensor is called 'head.*'" in capsys.readouterr().err


def test_shards_that_do_not_answer_for_too_long_end_it(
    trained: tuple[str, psd_client.ParameterServer], cluster: Callable[..., Any], tmp_path: Path, capsys: Any
) -> None:
    """It cannot know then whether the job is over."""
    servers, _ = trained
    following = Following("--to", str(tmp_path), "--servers", servers, "--timeout", "0.5")
    reached(tmp_path, 0)
    half_away = f"{servers.split(',')[0]},127.0.0.1:1"
    words = ["follow", "--to", str(tmp_path / "other"), "--servers", half_away, "--timeout", "0.5"]
    assert main(words) == 1
    assert "no answer for 0.5 s, so the job is over, or away" in capsys.readouterr().err
    assert following.status is None
    trained[1].close()
    assert following.end() == 0


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_job_that_ends_while_a_version_is_written_is_known_to_be_over(
    cluster: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, consistency: str
) -> None:
    """Its shards end with it, and nobody answers the next question; the follower waited for its --timeout, ten minutes."""
    running = cluster(2)
    is_writing, may_write = threading.Event(), threading.Event()
    write = FollowedDirectory.write

    def slowly(self: FollowedDirectory, version: FollowedVersion, *arguments: Any) -> int:
        if version.version == 1:
            is_writing.set()
            assert may_write.wait(100)
        return write(self, version, *arguments)

    monkeypatch.setattr(FollowedDirectory, "write", slowly)
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare(
            {name: np.zeros_like(value) for name, value in ONES.items()}, psd_client.SGD(lr=1.0), consistency=consistency
        )
        following = Following("--to", str(tmp_path), "--servers", running.servers)
        reached(tmp_path, 0)
        ps.push_pull(ONES)
        assert is_writing.wait(100)
    for shard in running.shards:
        assert shard.done.wait(100)
    ends = [threading.Thread(target=shard.drain, args=(100,)) for shard in running.shards]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    may_write.set()

    assert following.end() == 0
    check_all(tmp_path)
    assert versions(tmp_path)[-1] == 1
    assert "the job is over" in capsys.readouterr().err


# -- processes -----------------------------------------------------------------------------------------------------------

TRAINING = """
import pathlib, sys, threading
import numpy as np
import psd_client

go = pathlib.Path(sys.argv[1])
ones = {"w": np.ones(5000, np.float32), "b.c": np.ones(3, np.float32)}
with psd_client.connect(wait_timeout=100) as ps:
    ps.declare({name: np.zeros_like(value) for name, value in ones.items()}, optimizer=psd_client.SGD(lr=1.0))
    while True:
        wanted = int(go.read_text() or 0)
        if wanted < 0:
            break
        if ps.clock < wanted:
            ps.push_pull(ones)
        else:
            threading.Event().wait(0.02)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Job, Callable[[int], None]]]:
    """A job of psd-run, the only one on this machine, and a function that has it make steps up to one; below 0: end."""
    monkeypatch.setenv("PSD_JOBS_DIR", str(tmp_path / "jobs"))
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "go").write_text("0")

    def go(steps: int) -> None:
        (tmp_path / "new").write_text(str(steps))
        (tmp_path / "new").replace(tmp_path / "go")

    running = Job("--shards", "2", "--workers", "1", "--max-restarts", "9", str(tmp_path / "train.py"), str(tmp_path / "go"))
    try:
        running.wait_until_ready()
        yield running, go
    finally:
        running.close()


def follow(place: Path, *words: str) -> Process:
    return Process("psd.cli.psdctl", "follow", "--to", str(place), *words)


@pytest.mark.process
def test_it_takes_the_only_job_of_this_machine_and_ends_with_it(job: tuple[Job, Callable[[int], None]], tmp_path: Path) -> None:
    """Shards are killed meanwhile, and the job ends while the follower waits: psd-run's shards do not stay."""
    running, go = job
    place = tmp_path / "versions"
    following = follow(place, "--keep", "100")
    try:
        reached(place, 0)
        for step, shard in ((1, 0), (2, 1), (3, 0)):
            go(step)
            reached(place, step)
            os.kill(shard_pid(running.run_id, shard), signal.SIGKILL)
        go(4)
        reached(place, 4)
        go(-1)
        assert following.end() == 0
        assert running.end() == 0
    finally:
        following.close()
    assert versions(place) == [0, 1, 2, 3, 4]
    check_all(place)


@pytest.mark.process
def test_a_follower_that_is_killed_goes_on_where_it_was(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path
) -> None:
    """Also while its command runs, which is then not run twice at once."""
    servers, ps = trained
    place, notes = tmp_path / "versions", tmp_path / "notes"
    text = (
        f"import os, threading\nopen({str(notes)!r}, 'a').write('begin ' + os.environ['PSD_VERSION'] + ' ')\n"
        f"while not os.path.exists({str(tmp_path / 'ends')!r}): threading.Event().wait(0.02)\n"
        f"open({str(notes)!r}, 'a').write('end ')"
    )
    following = again = follow(place, "--servers", servers, *command(text))
    try:
        wait_until(lambda: notes.exists() and notes.read_text() == "begin 0 ", "the command is told")
        following.signal(signal.SIGKILL)
        ps.push_pull(ONES)
        again = follow(place, "--servers", servers, *command(text))
        reached(place, 1)
        again.line("what was started for an earlier version still runs; the command waits for its end")
        assert notes.read_text() == "begin 0 "
        (tmp_path / "ends").touch()
        wait_until(lambda: notes.read_text() == "begin 0 end begin 1 end ", "the command is told")
        ps.close()
        assert again.end() == 0
    finally:
        (tmp_path / "ends").touch()
        following.close()  # its command has its output open
        again.close()
    assert versions(place) == [0, 1]
    check_all(place)


@pytest.mark.process
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_command(
    trained: tuple[str, psd_client.ParameterServer], tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    place, notes = tmp_path / "versions", tmp_path / "notes"
    text = f"import os, signal; open({str(notes)!r}, 'w').write(str(os.getpid())); signal.pause()"
    following = follow(place, "--servers", trained[0], *command(text))
    try:
        wait_until(lambda: notes.exists() and bool(notes.read_text()), "the command runs")
        following.signal(signum)
        assert following.end() == status
    finally:
        following.close()
    assert not Path(f"/proc/{notes.read_text()}").exists()
    assert versions(place) == [0]
    check_all(place)
    assert not (place / ".told.json").exists()


@pytest.mark.process
def test_on_a_full_disk_it_says_so_and_tries_again(trained: tuple[str, psd_client.ParameterServer], tmp_path: Path) -> None:
    """Nothing of the version that found no room is seen; when there is room, the newest is written."""
    servers, ps = trained
    place = tmp_path / "versions"
    following = follow(place, "--servers", servers, "--names", "w")
    try:
        reached(place, 0)
        before = resource.prlimit(following.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        ps.push_pull(ONES)
        following.line(r"psdctl follow: cannot write .*model\.safetensors: File too large; trying again")
        ps.push_pull(ONES)
        assert versions(place) == [0]
        assert not list(place.glob(".version-*"))
        resource.prlimit(following.pid, resource.RLIMIT_FSIZE, before)
        reached(place, 2)
        ps.close()
        assert following.end() == 0
    finally:
        following.close()
    check_all(place)


@pytest.mark.process
def test_its_help_teaches(capsys: Any) -> None:
    """What is in the directory and in the command's environment; each example is one that the parser takes."""
    with pytest.raises(SystemExit):
        main(["follow", "--help"])
    said = capsys.readouterr().out
    for word in ("PSD_VERSION", "PSD_DIR", "latest", "version.json", "exit status:", "--adapter-config"):
        assert word in said
    examples = [line.split("   ")[0] for line in said.splitlines() if line.startswith("  psdctl follow ")]
    assert len(examples) >= 4
    for example in examples:
        assert shlex.split(example)[:4] == ["psdctl", "follow", "--to", shlex.split(example)[3]]
