"""Texts of a shard cannot command the terminal of a worker: neither by the log nor by an error."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import connect_faulty

import psd_client
from psd.contract.errors import InvalidRequest

HOSTILE = "\x1b]0;owned\x07\u202e\n"


def test_error_when_a_shard_says_control_characters_then_they_are_escaped(cluster: Callable[..., Any]) -> None:
    """Over a real connection; the text is the shard's own."""
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, transport="grpc") as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        admission = running.shards[0].shard

        def refuse(*_: Any) -> None:
            error = InvalidRequest("x")
            error.args = (f"name: {HOSTILE}",)  # as a shard of another make might
            raise error

        admission.arrive = refuse
        with pytest.raises(InvalidRequest, match=r"name: \\x1b\]0;owned\\x07\\u202e\\n$") as caught:
            ps.barrier("b")

    assert str(caught.value).isprintable()


def test_log_when_a_name_has_control_characters_then_they_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    """The program's own handlers write what this library says."""
    with caplog.at_level(logging.INFO, "psd_client"):
        logging.getLogger("psd_client").warning("psd: worker %d: waits for %s", 3, HOSTILE)

    (record,) = caplog.records
    assert record.getMessage() == "psd: worker 3: waits for \\x1b]0;owned\\x07\\u202e\\n"


def test_join_when_the_machine_has_a_strange_name_then_it_is_escaped(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard would refuse it as it is."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"h{HOSTILE}")
    running = cluster(1)

    ps, _ = connect_faulty(running.servers)
    with ps:
        assert running.shards[0].shard._core.members.worker(0).host == "h\\x1b]0;owned\\x07\\u202e\\n"
