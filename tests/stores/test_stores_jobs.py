"""Whole jobs with their checkpoints in each of the stores: trained, listed, continued, exported, pruned, killed, refused."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from commands import Job
from free_ports import free_port

from psd.checkpoint.opening import open_storage

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of aiohttp, that gcsfs sends bytes

SIZE = 3_000_000
"""Parameters; half of them are more than the 5 MiB that stores take as a part of a file."""

TRAINING = f"""
import sys
import numpy as np
import psd_client

with psd_client.connect(wait_timeout=100) as ps:
    params = ps.declare({{"w": np.zeros({SIZE}, np.float32)}}, optimizer=psd_client.SGD(lr=1.0))
    print("begins at step", ps.clock, "with", params["w"][0], flush=True)
    while ps.clock < int(sys.argv[1]):
        params = ps.push_pull({{"w": np.full({SIZE}, ps.rank + 1, np.float32)}})
print("trained to", params["w"][0], params["w"][-1])
"""
"""The mean gradient of two workers is 1.5, of one worker 1."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setenv("FSSPEC_S3_DEFAULT_BLOCK_SIZE", str(5 << 20))


@pytest.fixture
def run(tmp_path, place):
    """A function: psd-run with options; the job, to be ended."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    started = []

    def begin(*options, steps, url=place, **more):
        words = ["--checkpoint-dir", url, "--grace", 60, *options, script, steps]
        started.append(Job(*map(str, words), generations=0, **more))
        return started[-1]

    yield begin
    for job in started:
        job.close()


def psdctl(*words, status=0):
    """What psdctl prints."""
    command = [Path(sys.executable).with_name("psdctl"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stdout + done.stderr


def checkpoints(place, status=0):
    """Steps by state, newest first."""
    found = json.loads(psdctl("checkpoints", place, "--json", status=status))["checkpoints"]
    return [(entry["state"], entry["step"]) for entry in found]


def test_job_when_it_is_run_again_with_other_sizes_then_it_continues_from_the_store(run, place, tmp_path):
    """Trained, listed, verified, pruned, continued, exported here and into the store."""
    first = run("--shards", 2, "--workers", 2, "--checkpoint-steps", 2, "--checkpoint-keep", 2, steps=7)
    assert first.end() == 0, first.output
    assert first.output.count("trained to -10.5 -10.5") == 2
    found = checkpoints(place)
    assert found[0] == ("valid", 7)
    assert len(found) == 2, "older ones are removed"
    assert psdctl("verify", place).count("is as it was written") == 2
    store = open_storage(place)
    for name in store.directories():
        assert sorted(re.sub(r"\d", "", file) for file in store.files(name)) in (
            ["manifest.json", "shard--of-.chunks", "shard--of-.chunks", "shard--of-.json", "shard--of-.json"],
            [],
        )

    second = run("--shards", 3, "--workers", 1, steps=9)
    assert second.end() == 0, second.output
    assert "begins at step 7 with -10.5" in second.output
    assert "trained to -12.5 -12.5" in second.output

    psdctl("export", place, "--to", str(tmp_path / "model.safetensors"))
    expected = {"w": np.full(SIZE, -12.5, np.float32)}
    np.testing.assert_equal(safetensors.numpy.load_file(tmp_path / "model.safetensors"), expected)
    psdctl("export", place, "--to", f"{place}/model.safetensors")
    np.testing.assert_equal(safetensors.numpy.load(store.read("", "model.safetensors")), expected)

    third = run("--from-checkpoint", f"{place}/model.safetensors", "--parameters-only", steps=1, url=f"{place}-3")
    assert third.end() == 0, third.output
    assert "begins at step 0 with -12.5" in third.output


@pytest.mark.parametrize(
    "where", ["write shard-*.chunks:2", "put shard-*.chunks:1", "put shard-*.json:1", "put manifest.json:1"]
)
def test_job_when_shards_are_killed_in_the_middle_of_an_upload_then_what_counts_is_the_checkpoint_before(run, place, where):
    """And the job goes on from there when it is run again, and clears away what was left."""
    first = run("--shards", 2, steps=4)
    assert first.end() == 0, first.output

    killed = run("--shards", 2, "--max-shard-restarts", 0, steps=6, environ={"PSD_CRASH_POINT": where})
    killed.end()
    assert "was killed by SIGKILL" in killed.output
    found = checkpoints(place)
    assert [entry for entry in found if entry[0] == "valid"] == [("valid", 4)]
    assert {state for state, _ in found} <= {"valid", "incomplete"}

    again = run("--shards", 2, steps=6)
    assert again.end() == 0, again.output
    assert "begins at step 4 with -4.0" in again.output
    found = checkpoints(place)
    assert found[0] == ("valid", 6)
    assert {state for state, _ in found} == {"valid"}, "what was incomplete is removed"


WRONG = {
    "s3": [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE"}, "AWS_ACCESS_KEY_ID"),
    ],
    "sftp": [
        ({"FSSPEC_SFTP_KEY_FILENAME": None}, "FSSPEC_SFTP_KEY_FILENAME"),
        ({"FSSPEC_SFTP_KEY_FILENAME": "stranger"}, "FSSPEC_SFTP_KEY_FILENAME"),
        ({"FSSPEC_SFTP_KEY_FILENAME": None, "FSSPEC_SFTP_PASSWORD": "opensesame"}, "FSSPEC_SFTP_PASSWORD"),
        ({"FSSPEC_SFTP_KEY_FILENAME": "absent"}, "No such file or directory"),
    ],
}


@pytest.mark.parametrize(
    ("server", "changes", "names"),
    [(scheme, *case) for scheme, cases in WRONG.items() for case in cases],
    indirect=["server"],
)
def test_job_when_credentials_are_missing_or_wrong_then_it_does_not_begin_and_names_the_setting(
    server, run, place, changes, names, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))  # without keys
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            beside = Path(os.environ[name]).with_name(value) if name == "FSSPEC_SFTP_KEY_FILENAME" else value
            monkeypatch.setenv(name, str(beside))

    job = run("--shards", 1, steps=1)

    assert job.end() == 1
    assert re.search(rf"psd-server: error: --checkpoint-dir: .*{names}", job.output), job.output
    assert "Traceback" not in job.output
    assert "opensesame" not in job.output
    assert names in psdctl("checkpoints", place, status=2 if server.root.startswith("sftp") else 1)


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as Google does to who has no credentials."""

    def do_GET(self):
        message = "Anonymous caller does not have storage.objects.list access to the Google Cloud Storage bucket."
        body = json.dumps({"error": {"code": 401, "message": message}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_gs_when_it_refuses_a_stranger_then_names_the_setting(place, monkeypatch):
    """fake-gcs-server refuses nobody, so the refusal is played; what says it is gcsfs."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{refusing.server_port}")
        said = psdctl("checkpoints", place, status=1)
        refusing.shutdown()

    assert "Anonymous caller" in said
    assert "gs:// takes who asks from GOOGLE_APPLICATION_CREDENTIALS" in said
    assert "Traceback" not in said


def test_job_when_the_store_cannot_be_reached_then_it_does_not_begin_and_says_which(server, run, tmp_path):
    root, environ = server.elsewhere(free_port())

    job = run("--shards", 1, steps=1, url=f"{root}/{tmp_path.name}", environ=environ)

    assert job.end(300) == 1
    assert re.search(rf"psd-server: error: --checkpoint-dir: .*{tmp_path.name}.*[Cc]onnect", job.output), job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize("server", ["s3", "gs"], indirect=True)
def test_bucket_when_it_does_not_exist_then_the_job_does_not_begin(server, run):
    job = run("--shards", 1, steps=1, url=f"{server.root}-2/run")

    assert job.end(300) == 1
    assert re.search(r"psd-server: error: .*bucket-2/run", job.output), job.output
    assert "Traceback" not in job.output
