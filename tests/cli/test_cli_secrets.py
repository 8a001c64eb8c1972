"""Passwords and keys in URLs: in nothing that a job writes, and in nothing that the system shows of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import completed

from psd.cli import run
from psd.cli.job import summary
from psd.cli.processes import own_arguments
from psd.cli.processes.state_directories import StateDirectory
from psd.cli.words.arguments import location

SECRET = f"pl4nted-s3cret-{os.getpid()}"
QUERY = f"pl4nted-sign4ture-{os.getpid()}"
VARIABLE = f"pl4nted-v4riable-{os.getpid()}"
URL = f"memory://anna:{SECRET}@host/run?sig={QUERY}"

SCRIPT = """
import os, pathlib, sys
import numpy as np, psd_client
ps = psd_client.connect()
ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
for step in range(3):
    ps.push_pull({"w": np.ones(5, np.float32)})
mine, found = os.environ["PSD_RUN_ID"], []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        environ, words = ((process / name).read_bytes() for name in ("environ", "cmdline"))
    except OSError:
        continue
    where = [(words, name) for name in ("SECRET", "QUERY", "VARIABLE")]
    where += [(environ, name) for name in ("SECRET", "QUERY")] if mine.encode() in environ else []
    found += [(process.name, name) for text, name in where if bytes.fromhex(os.environ["HEX_" + name]) in text]
print("seen in /proc:", found, flush=True)
"""


@pytest.fixture
def planted():
    """The environment of psd-run: a key in a variable, and, for the script alone, how to find the secrets."""
    named = {"SECRET": SECRET, "QUERY": QUERY, "VARIABLE": VARIABLE}
    return {"AWS_SECRET_ACCESS_KEY": VARIABLE, **{f"HEX_{name}": value.encode().hex() for name, value in named.items()}}


@pytest.mark.process
def test_job_when_its_url_has_secrets_then_they_are_nowhere(job, planted, tmp_path):
    """Not in its output, its logs, ps, the environment of its processes, nor in what it leaves."""
    logs, state = tmp_path / "logs", tmp_path / "state"

    done = job(
        SCRIPT,
        *("--checkpoint-dir", URL, "--checkpoint-steps", "1", "--log-level", "debug"),
        *("--log-dir", str(logs), "--state-dir", str(state)),
        environ=planted,
    )

    assert done.end() == 0, done.output
    assert "seen in /proc: []" in done.output
    assert "checkpoints: memory://host/run?***" in done.output
    said = done.output + "".join(path.read_text() for path in logs.rglob("*") if path.is_file())
    assert not [secret for secret in (SECRET, QUERY, VARIABLE) if secret in said]
    assert list(state.iterdir()) == []


@pytest.mark.process
def test_job_when_psd_run_is_killed_then_no_secret_stays_in_its_state_directory(job, tmp_path):
    """The directory is the user's, and stays."""
    state = tmp_path / "state"
    run = job("import signal; print('here', flush=True); signal.pause()", "--checkpoint-dir", URL, "--state-dir", str(state))
    run.line("here")
    assert [path.read_text() for path in state.glob("url-*")] == [URL]

    run.signal(signal.SIGKILL)

    assert run.end() == -signal.SIGKILL
    assert "psd-run was killed; ending the processes of" in run.output
    assert list(state.glob("url-*")) == []


@pytest.mark.process
def test_shard_when_its_store_fails_then_the_secrets_of_its_url_are_not_said():
    """Nor those of the error of the package that dials."""
    url = f"ftp://anna:{SECRET}@127.0.0.1:1/run?sig={QUERY}"
    place = ["--shard", "0/1", "--listen", "127.0.0.1:0", "--checkpoint-dir", url]

    done = completed("psd.cli.server", *place)

    assert done.returncode == 1
    assert "checkpoint directory ftp://127.0.0.1:1/run?***: " in done.stderr
    assert not [secret for secret in (SECRET, QUERY) if secret in done.stderr + done.stdout]


@pytest.mark.process
@pytest.mark.parametrize("module", ["psd.cli.server", "psd.cli.run", "psd.cli.psdctl"])
def test_command_when_a_url_is_misplaced_then_its_secrets_are_not_repeated(module):
    done = completed(module, "--checkpointdir", URL)

    assert done.returncode == 2
    assert SECRET not in done.stderr + done.stdout
    assert QUERY not in done.stderr + done.stdout


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_arguments_when_one_is_a_url_with_a_secret_then_ps_shows_it_without(tmp_path):
    code = "from psd.cli.processes import own_arguments; own_arguments.hide_secrets(); print(open('/proc/self/cmdline').read())"

    found = subprocess.run([sys.executable, "-c", code, f"--dir={URL}", "last"], capture_output=True, text=True, check=True)

    assert SECRET not in found.stdout
    assert QUERY not in found.stdout
    words = found.stdout.rstrip("\n").split("\0")
    assert [word.rstrip() for word in words[-3:]] == ["--dir=memory://host/run?***", "last", ""]
    own_arguments.hide_secrets()  # of a process that has none, it changes nothing


def test_location_when_it_names_a_file_then_it_is_what_the_file_holds(tmp_path, refusal):
    (tmp_path / "url").write_text(f"{URL}\n")

    assert location(f"@{tmp_path / 'url'}") == URL
    assert location("/a/path") == "/a/path"
    message = refusal(run.main, ["--checkpoint-dir", f"@{tmp_path / 'nowhere'}", "x.py"])
    assert "nowhere: No such file or directory" in message


def test_manifests_when_a_url_has_a_secret_then_are_refused(tmp_path, refusal):
    (tmp_path / "train.py").touch()
    common = ["--on", "kubernetes", "--image", "psd", "--dry-run"]
    url = f"s3://key:{SECRET}@bucket/run"

    for option in ("--checkpoint-dir", "--from-checkpoint"):
        message = refusal(run.main, [*common, option, url, str(tmp_path / "train.py")])
        assert f"{option}: s3://bucket/run is given with a password or key" in message
        assert SECRET not in message


def test_state_directory_when_the_run_ends_then_no_url_is_left_in_it(tmp_path):
    """Also where the shards' state is kept."""
    directory = StateDirectory(tmp_path / "state", "run-1", 1, is_private=False, urls={"url-checkpoint-dir": URL})
    (tmp_path / "state" / "shard-0").mkdir()
    file = tmp_path / "state" / "url-checkpoint-dir"

    assert file.read_text() == URL
    assert file.stat().st_mode & 0o777 == 0o600
    assert directory.close(keep=True)
    assert not file.exists()


def test_summary_when_the_place_has_a_password_then_it_is_not_among_the_last_lines():
    assert summary.Summary(checkpoint_dir=URL).lines(1.0)[-1] == "checkpoints: memory://host/run?***"


@pytest.mark.process
def test_tokens_when_they_are_taken_and_refused_then_are_in_no_output(start, tmp_path):
    """Of the shard, on its most talkative level, nor of psdctl; nor among arguments, since files are named there."""
    known, unknown = f"pl4nted-t0ken-{SECRET}", f"pl4nted-str4nger-{SECRET}"
    for name, text in {"tokens": f"reader {known}\n", "known": known, "unknown": unknown}.items():
        (tmp_path / name).write_text(text)
    server = start(
        "psd.cli.server",
        *("--shard", "0/1", "--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "tokens"), "--log-level", "debug"),
    )
    address = server.line(r"ready at (\S+)")[1]

    said = []
    for name, status in {"known": 0, "unknown": 1}.items():
        done = completed("psd.cli.psdctl", "status", "--servers", address, "--token-file", str(tmp_path / name))
        assert done.returncode == status, done.stderr
        said += [done.stdout, done.stderr]
    server.signal(signal.SIGTERM)
    server.end()

    assert "refused a call of " in server.output
    assert not [token for token in (known, unknown) if token in "".join([*said, server.output])]
