"""TLS and tokens on both sides of a relay: those of its readers, and what it shows the shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from relayed_job import StartRelay, assert_is_of, declare, step
from waiting import wait_until

import psd_client

HOST = "127.0.0.1"
TOKENS = {
    "worker": "worker-token-number-1",
    "reader": "reader-token-number-1",
    "relays": "relays-own-readers-token",
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Two authorities, the shards' and the relay's; each side's tokens; what clients of each show."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.touch(0o600)
        path.write_text(text)
        return str(path)

    found: dict[str, Any] = {}
    for side in ("shards", "relays"):
        authority = Authority(side)
        found[side] = authority.issue(HOST).write(tmp_path, side)
        found[f"{side}_ca"] = write(f"{side}.pem", authority.pem.decode())
    found["shards"]["token_file"] = write("shard-tokens", f"worker {TOKENS['worker']}\nreader {TOKENS['reader']}\n")
    found["relays"]["token_file"] = write("relay-tokens", f"reader {TOKENS['relays']}\n")
    for name, token in TOKENS.items():
        found[f"{name}_token"] = write(f"{name}.token", f"{token}\n")
    return found


def test_each_side_has_certificates_and_tokens_of_its_own(
    cluster: Callable[..., Any], relay: StartRelay, files: dict[str, Any]
) -> None:
    """The relay shows the shards a reader's token; its own readers need not know of the shards' authority."""
    servers = cluster(2, **files["shards"]).servers
    of_shards = {"tls_ca": files["shards_ca"], "token_file": files["reader_token"]}
    at_relay = {"tls_ca": files["relays_ca"], "token_file": files["relays_token"]}
    with psd_client.connect(servers, 0, 1, tls_ca=files["shards_ca"], token_file=files["worker_token"]) as ps:
        declare(ps)
        server = relay(servers, upstream=of_shards, **files["relays"])
        with psd_client.connect(server.address, role="reader", wait_timeout=100, **at_relay) as reader:
            assert_is_of(0, reader.pull())
            step(ps)
            assert_is_of(1, reader.pull(newer_than=0))

        with (
            psd_client.connect(server.address, role="reader", tls_ca=files["relays_ca"]) as stranger,
            pytest.raises(psd_client.Unauthenticated, match="requires a token"),
        ):
            stranger.pull()
        known_elsewhere = {"tls_ca": files["relays_ca"], "token_file": files["reader_token"]}
        with (
            psd_client.connect(server.address, role="reader", **known_elsewhere) as other,
            pytest.raises(psd_client.Unauthenticated, match="does not know the token"),
        ):
            other.pull()
        with (
            psd_client.connect(server.address, role="reader", retry_timeout=1, tls_ca=files["shards_ca"]) as deceived,
            pytest.raises(psd_client.TlsFailed),
        ):
            deceived.pull()


def test_a_relay_that_the_shards_do_not_admit_says_so(
    cluster: Callable[..., Any], relay: StartRelay, files: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In its log, and to its readers."""
    servers = cluster(1, **files["shards"]).servers
    server = relay(servers, upstream={"tls_ca": files["shards_ca"], "token_file": files["relays_token"]})
    wait_until(lambda: "this shard does not know the token" in caplog.text, "the relay says why")
    with (
        psd_client.connect(server.address, role="reader") as reader,
        pytest.raises(psd_client.NotDeclared, match=r"has no version yet: .* does not know the token"),
    ):
        reader.pull(timeout=0.2)
