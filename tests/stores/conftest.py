"""The stores of these tests, by scheme; OpenSSH's server is skipped where it is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from servers import Server, gs_server, s3_server, sftp_server, sshd_command

# gcsfs asks Google itself, not the server here, which kind a bucket is; read when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

SCHEMES = ("s3", "gs", "sftp")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The servers that have been asked for, by scheme; they serve all tests."""
    found: dict[str, Server] = {}
    yield found
    for server in found.values():
        server.close()


@pytest.fixture
def server_of(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: the server of a scheme."""

    def get(scheme: str) -> Server:
        if scheme == "sftp" and sshd_command() is None:
            pytest.skip("OpenSSH's server is not installed (apt install openssh-server)")
        if scheme not in servers:
            start = {"s3": s3_server, "gs": gs_server, "sftp": sftp_server}[scheme]
            servers[scheme] = start(tmp_path_factory.mktemp(scheme))
        return servers[scheme]

    return get


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest, server_of: Any, use: Any) -> Server:
    """Each of the servers; psd's commands, and this process, reach it."""
    found = server_of(request.param)
    use(found)
    return found


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function: psd's commands, and this process, reach a server from now on."""

    def begin(server: Server) -> None:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        for scheme, settings in server.settings.items():
            monkeypatch.setitem(fsspec.config.conf, scheme, settings)

    yield begin
    for scheme in SCHEMES:
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


@pytest.fixture
def place(server: Server, tmp_path: Path) -> str:
    """A URL in the server's store where nothing is."""
    return f"{server.root}/{tmp_path.name}/run"
