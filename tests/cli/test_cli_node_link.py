"""Connections between psd-runs: psd/cli/hosts/link.py."""

import socket
import ssl
import threading

from certificates import Authority

from psd.cli.hosts import rendezvous
from psd.cli.hosts.link import CROWDED_BYTES, SILENCE_S, NodeLink


def test_link_when_the_other_side_is_silent_then_it_is_lost_but_not_before():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = NodeLink(ours.fileno(), ours.fileno())
        began_at = link._heard_at

        beat_at = link.beat_at()
        link.flush()
        assert link.beat_at() == beat_at, "nothing was sent, so that the other side still waits for a sign of life"
        assert link.beat(beat_at)
        assert NodeLink(theirs.fileno(), theirs.fileno()).receive() == [{}], "a sign of life"
        assert link.beat(began_at + SILENCE_S - 1)
        assert not link.beat(began_at + SILENCE_S)


def test_link_when_this_side_was_held_up_then_what_has_come_meanwhile_counts():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = NodeLink(ours.fileno(), ours.fileno())
        NodeLink(theirs.fileno(), theirs.fileno()).send({})

        assert link.beat(link._heard_at + 10 * SILENCE_S)
        assert link.receive() == [{}]


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
