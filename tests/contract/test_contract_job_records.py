"""Records of running jobs: who is listed, who is not believed, and what is swept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psd.contract.job_records import JobEntry, JobRecord, new_record, run_id_of, running_jobs
from psd_core.private_files import NotOurs

SERVERS = ("127.0.0.1:7000", "127.0.0.1:7001")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the records; it is not there yet."""
    monkeypatch.setenv("PSD_JOBS_DIR", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def job(name: str = "train-1", **more: Any) -> JobRecord:
    return new_record(name, SERVERS, 4, ("train.py", "--epochs", "3"), **more)


@pytest.fixture
def rewritten(directory: Path) -> Callable[..., Path]:
    """rewritten(field=value, ...) -> the only record, with other values."""

    def change(**fields: Any) -> Path:
        (path,) = directory.iterdir()
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return path

    return change


def test_a_job_is_listed_as_it_was_recorded_until_it_is_removed(directory: Path) -> None:
    """Nothing of it is left then, and a second removal does nothing."""
    record = job(log_dir="/logs", tls_ca="/ca.crt", token_file="/token")
    entry = JobEntry(record)

    assert running_jobs() == [record]
    assert record.directory == str(Path.cwd())

    entry.change(dashboard="http://127.0.0.1:8265/")
    (changed,) = running_jobs()
    assert changed.dashboard == "http://127.0.0.1:8265/"

    entry.remove()
    entry.remove()
    assert running_jobs() == []
    assert list(directory.iterdir()) == []


def test_only_the_user_can_open_records(directory: Path) -> None:
    """Whatever the umask, and the directory may have been made by an earlier job."""
    before = os.umask(0)
    try:
        for name in ("train-1", "train-2"):
            JobEntry(job(name))
    finally:
        os.umask(before)

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_secrets_in_urls_are_not_recorded(directory: Path) -> None:
    """The rest of the command is."""
    JobEntry(new_record("train-1", SERVERS, 1, ("train.py", "--data", "s3://anna:tea@box/run?sig=abc")))

    (path,) = directory.iterdir()
    assert "tea" not in path.read_text()
    assert "abc" not in path.read_text()
    assert running_jobs()[0].command[2] == "s3://box/run?***"


def test_where_no_job_has_run_there_is_none_and_nothing_is_made(directory: Path) -> None:
    """To look changes nothing."""
    assert running_jobs() == []
    assert not directory.exists()


def test_the_oldest_comes_first_and_several_psd_runs_of_a_job_count_once(directory: Path) -> None:
    """Two nodes of a job may be one machine."""
    for name, workers in (("b", 2), ("a", 2), ("b", 7)):
        JobEntry(new_record(name, SERVERS, workers, ("train.py",)))

    assert [(record.name, record.workers) for record in running_jobs()] == [("b", 2), ("a", 2)]


@pytest.mark.process
def test_a_record_of_a_killed_process_is_swept_also_by_the_next_job(directory: Path) -> None:
    """Also while nobody has waited for it, so that its id is still taken."""
    code = (
        "from psd.contract.job_records import JobEntry, new_record\n"
        "JobEntry(new_record('ghost', ('h:1',), 1, ('train.py',)))\n"
        "print('there', flush=True)\n"
        "input()"
    )

    def begin() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        return child

    with begin() as child:
        assert [record.name for record in running_jobs()] == ["ghost"]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert running_jobs() == [], "it has ended, and only its parent has not been told"
    assert list(directory.iterdir()) == []

    with begin() as child:
        child.kill()
    JobEntry(job())
    assert len(list(directory.iterdir())) == 1


def test_a_record_whose_process_id_has_been_given_to_another_process_is_swept(
    directory: Path, rewritten: Callable[..., Path]
) -> None:
    """This process lives, but has not been living since then."""
    JobEntry(job())
    path = rewritten(life="a boot of long ago 12345")

    assert running_jobs() == []
    assert not path.exists()


@pytest.mark.parametrize("pid", [-1, 0, 2**40, "1", None, True])
def test_a_record_of_no_process_is_swept(pid: Any, directory: Path, rewritten: Callable[..., Path]) -> None:
    """Whatever stands there in place of a process id."""
    JobEntry(job())
    path = rewritten(pid=pid)

    assert running_jobs() == []
    assert not path.exists()


def test_a_record_of_another_container_is_left_alone(directory: Path, rewritten: Callable[..., Path]) -> None:
    """Containers may share /dev/shm; the ids of their processes, and loopback addresses, mean nothing here."""
    JobEntry(job())
    path = rewritten(processes="pid:[1]", pid=2**21)

    assert running_jobs() == []
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b"[" * 100_000, b"{}"])
def test_what_is_no_record_is_not_listed_and_swept(content: bytes, directory: Path) -> None:
    """Records are written whole, under another name, so that this is nobody's."""
    record = job()
    JobEntry(record)
    (directory / "garbage.json").write_bytes(content)

    assert running_jobs() == [record]
    assert len(list(directory.iterdir())) == 1


def test_a_record_that_is_cut_off_anywhere_is_not_listed(directory: Path) -> None:
    """No part of a record passes for one."""
    JobEntry(job())
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        path.chmod(0o600)
        assert running_jobs() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"servers": []},
        {"servers": ["nowhere"]},
        {"servers": 7},
        {"workers": "4"},
        {"command": "train.py"},
        {"command": [1]},
        {"started_at": float("nan")},
        {"started_at": None},
        {"dashboard": None},
        {"name": 1},
    ],
)
def test_a_record_of_another_form_is_not_listed_and_stays_while_its_process_lives(
    fields: dict[str, Any], directory: Path, rewritten: Callable[..., Path]
) -> None:
    """Another version of psd may have written it."""
    JobEntry(job())
    path = rewritten(**fields)

    assert running_jobs() == []
    assert path.exists()


def test_what_a_later_version_adds_to_records_is_left_out(directory: Path, rewritten: Callable[..., Path]) -> None:
    """Jobs of two versions of psd may run side by side."""
    record = job()
    JobEntry(record)
    rewritten(colour="red")

    assert running_jobs() == [record]


def test_a_file_that_was_not_completed_is_removed_when_it_is_old(directory: Path) -> None:
    """A young one may be one that is just being written."""
    JobEntry(job())
    old, young = directory / "old.new", directory / "young.new"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))

    running_jobs()

    assert not old.exists()
    assert young.exists()


def test_a_directory_that_others_can_open_is_not_used(directory: Path) -> None:
    """Neither read nor written to, though it is this user's."""
    directory.mkdir()
    directory.chmod(0o755)

    with pytest.raises(NotOurs, match="can be opened by other users; chmod 700"):
        running_jobs()
    with pytest.raises(NotOurs, match="can be opened by other users; chmod 700"):
        JobEntry(job())
    assert list(directory.iterdir()) == []


def test_a_directory_of_another_user_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes first to a directory that all can write to, such as /dev/shm, could else list jobs of his own there."""
    directory.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)

    with pytest.raises(NotOurs, match=f"belongs to user {user}, and this process is user {user + 1}'s"):
        running_jobs()
    with pytest.raises(NotOurs, match=f"belongs to user {user}"):
        JobEntry(job())


def test_a_link_in_place_of_the_directory_is_not_followed(directory: Path, tmp_path: Path) -> None:
    """Not even to a directory that would do."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)

    with pytest.raises(NotOurs, match="is not a directory"):
        running_jobs()
    with pytest.raises(NotOurs, match="is not a directory"):
        JobEntry(job())
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_place_of_a_record_is_not_followed(directory: Path, tmp_path: Path) -> None:
    """Nor is it removed: nobody knows whose it is."""
    JobEntry(job())
    (path,) = directory.iterdir()
    path.rename(tmp_path / "record")
    path.symlink_to(tmp_path / "record")

    assert running_jobs() == []
    assert path.is_symlink()


@pytest.mark.process
def test_a_forked_child_does_not_remove_its_parents_record(directory: Path) -> None:
    """As a data loader would that ends."""
    entry = JobEntry(job())
    child = os.fork()
    if child == 0:
        entry.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert len(running_jobs()) == 1


@pytest.mark.process
def test_without_a_working_directory_a_job_is_listed_all_the_same(directory: Path, tmp_path: Path) -> None:
    """Somebody has removed it under the program."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys\n"
        "from psd.contract.job_records import JobEntry, new_record, running_jobs\n"
        "os.rmdir(os.getcwd())\n"
        "JobEntry(new_record('train-1', ('h:1',), 1, ('train.py',)))\n"
        "assert running_jobs()[0].directory == ''"
    )

    subprocess.run([sys.executable, "-c", code], cwd=gone, check=True, timeout=100)


def test_names_of_runs_have_their_programs_name() -> None:
    """A script's, a module's, or none; each run another one."""
    assert run_id_of("/somewhere/my train.py").startswith("my-train-")
    assert run_id_of("my.package.train").startswith("my.package-")
    assert run_id_of("").startswith("job-")
    assert run_id_of("train.py") != run_id_of("train.py")


def test_jobs_of_a_session_are_found_in_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory depends on the user alone: not on what a login, cron or sudo sets."""
    from psd.contract.environment import jobs_directory

    there = jobs_directory({})

    assert there == jobs_directory({"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/nowhere", "PSD_JOBS_DIR": ""})
    assert str(os.geteuid()) in there.name
