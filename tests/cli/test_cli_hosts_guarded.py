"""psd-run on several hosts with certificates and tokens: between the psd-runs, and between workers and shards."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from certificates import Authority
from commands import Process, processes

WORKER = """
import os
import numpy as np
import psd_client

with psd_client.connect(transport="tcp") as ps:
    params = ps.declare({"w": np.zeros(100, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    for _ in range(5):
        params = ps.push_pull({"w": np.full(100, ps.rank + 1, np.float32)})
    print("trained to", params["w"][0], "with", os.environ["PSD_TOKEN_FILE"].rpartition("/")[2], flush=True)
"""


class Hosts:
    """Commands of one job's hosts on this machine, with an authority, a certificate and tokens."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
        self._folder = folder
        self._started: list[Process] = []
        (folder / "train.py").write_text(WORKER)
        authority = Authority("ours")
        (folder / "ca").write_bytes(authority.pem)
        (folder / "other-ca").write_bytes(Authority("theirs").pem)
        self._certificate = authority.issue("127.0.0.1").write(folder, "host")
        for name, text in {"tokens": "worker " + "w" * 16, "token": "w" * 16, "other-tokens": "worker " + "x" * 16}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)

    def start(self, ca: str = "ca", tokens: str = "tokens", *, is_guarded: bool = True) -> Process:
        """Start psd-run as on one of two hosts."""
        options = ["--nnodes", "2", "--rendezvous", self._rendezvous, "--shards", "2", "--workers", "2"]
        environ = {"PSD_TLS_CA": str(self._folder / ca), "PSD_TOKEN_FILE": str(self._folder / "token")}
        if is_guarded:
            options += [f"--{name.replace('_', '-')}={path}" for name, path in self._certificate.items()]
            options += ["--token-file", str(self._folder / tokens)]
        self._started.append(Process("psd.cli.run", *options, str(self._folder / "train.py"), environ=environ))
        return self._started[-1]

    def close(self) -> None:
        """End all of them."""
        for process in self._started:
            process.close()


@pytest.fixture
def hosts(tmp_path):
    found = Hosts(tmp_path)
    yield found
    found.close()


@pytest.mark.process
def test_nodes_when_there_are_certificates_and_tokens_then_they_train_and_nobody_else_joins(hosts):
    leader = hosts.start()
    leader.line("waiting at 127.0.0.1")
    refused = {
        "has ended the connection at once: is it the psd-run of node 0?; if it has --tls-cert": hosts.start(is_guarded=False),
        "the certificate of node 0 is refused: unable to get local issuer certificate": hosts.start(ca="other-ca"),
        "this host was refused: its --token-file has other tokens": hosts.start(tokens="other-tokens"),
    }
    for why, node in refused.items():
        assert node.end() == 1
        assert why in node.output

    node = hosts.start()

    run_id = leader.line(r"\[psd-run\] +run (\S+);")[1]
    assert (leader.end(), node.end()) == (0, 0)
    assert leader.output.count("trained to -7.5 with token") == 2
    assert leader.output.count("refused 127.0.0.1: its --token-file has other tokens") == 1
    assert processes(run_id) == {}
