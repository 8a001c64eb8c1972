"""psd-run on several hosts with certificates and tokens: between the psd-runs, and between workers and shards."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from certificates import Authority
from commands import Process, processes

from psd.cli import rendezvous
from psd.cli.node_link import CROWDED_BYTES, NodeLink

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


def test_link_when_the_leader_does_not_read_for_a_while_then_nothing_waits_and_nothing_is_lost(tmp_path):
    """As behind a terminal that was stopped."""
    authority = Authority("ours")
    files = authority.issue("127.0.0.1").write(tmp_path, "host")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(files["tls_cert"], files["tls_key"])
    ours = ssl.create_default_context(cadata=authority.pem.decode())
    may_read, received = threading.Event(), []

    def lead():
        with theirs.wrap_socket(listener.accept()[0], server_side=True) as leader:
            may_read.wait()
            received.append(leader.makefile().readline())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        leading = threading.Thread(target=lead)
        leading.start()
        with rendezvous._dial("127.0.0.1", listener.getsockname()[1], ours) as connection:
            link = NodeLink(connection.fileno(), connection.fileno(), connection)
            link.send({"said": "x" * (8 * CROWDED_BYTES)})
            is_crowded = link.is_crowded
            may_read.set()
            while link.has_unsent:
                link.flush()
            connection.shutdown(socket.SHUT_WR)
            leading.join()

    assert is_crowded
    assert len(received[0]) == 8 * CROWDED_BYTES + len('{"said": ""}\n')
