"""TLS sockets behave as sockets do; files are read again however they are replaced; tokens and hosts are what they say."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority

from psd.contract.config import ConfigError, is_loopback
from psd.contract.credentials import Credentials
from psd.contract.environment import client_config
from psd.contract.tls import client_files, server_files, what_is_wrong
from psd.contract.tls_socket import STEP_BYTES, TlsSocket
from psd.contract.tokens import Role, digest_of, metadata_of, parse_tokens, presented
from psd.contract.watched import Watched, read, read_secret

MUCH = 40 * STEP_BYTES
"""More than the buffers of both sides hold."""


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server called `shard`, and of a client that trusts it."""
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority("ours")
    pair = authority.issue("shard").write(directory, "shard")
    (directory / "ca.pem").write_bytes(authority.pem)
    server = server_files(pair["tls_cert"], pair["tls_key"], "").load()[1]
    return server, client_files(str(directory / "ca.pem"), "", "").load()[1]


@pytest.fixture
def ends(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends of a connection."""
    here, there = socket.socketpair()
    server, client = TlsSocket(here, contexts[0]), TlsSocket(there, contexts[1], "shard")
    shaking = threading.Thread(target=server.handshake, args=(10.0,))
    shaking.start()
    client.handshake(10.0)
    shaking.join()
    yield server, client
    server.close()
    client.close()


def received(end: TlsSocket, count: int) -> bytes:
    """So many bytes, or fewer if the other side ends."""
    buffer, filled = memoryview(bytearray(count)), 0
    while filled < count and (more := end.recv_into(buffer[filled:])):
        filled += more
    return bytes(buffer[:filled])


def test_both_sides_send_and_receive_at_once(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """Each with two threads, more than the buffers hold: nobody keeps anybody out while it waits for the network."""
    data = [os.urandom(MUCH), os.urandom(MUCH)]
    senders = [
        threading.Thread(target=end.sendmsg, args=((b"head", memoryview(sent)),)) for end, sent in zip(ends, data, strict=True)
    ]
    for sender in senders:
        sender.start()
    there: list[bytes] = []
    other = threading.Thread(target=lambda: there.append(received(ends[1], MUCH + 4)))
    other.start()

    here = received(ends[0], MUCH + 4)

    for thread in (*senders, other):
        thread.join(100)
    assert here == b"head" + data[1]
    assert there == [b"head" + data[0]]


def test_an_end_is_half_closed_as_a_socket_is(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """The other side hears of it, and what it still sends arrives; a wait in another thread ends."""
    here, there = ends
    there.sendall(b"last words")
    there.shutdown(socket.SHUT_WR)

    assert received(here, 100) == b"last words"
    here.sendall(b"answer")
    assert received(there, 6) == b"answer"
    waiting = threading.Thread(target=lambda: received(there, 1))
    waiting.start()
    there.shutdown(socket.SHUT_RD)
    waiting.join(100)
    assert not waiting.is_alive()


def test_waits_have_the_limit_that_was_set(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """It holds for receiving, and for sending to a side that does not read."""
    ends[0].set_timeout(0.05)

    with pytest.raises(TimeoutError):
        ends[0].recv_into(memoryview(bytearray(1)))
    with pytest.raises(TimeoutError):
        ends[0].sendall(bytes(MUCH))


@pytest.mark.parametrize("does_send", [True, False], ids=["send", "receive"])
def test_waits_that_have_a_listener_ask_it_and_go_on(ends: tuple[TlsSocket, TlsSocket], does_send: bool) -> None:
    """At each limit, until it raises; nothing of what was to be sent is lost or sent twice."""
    here, there = ends
    data = os.urandom(MUCH)
    asked = threading.Event()
    here.set_timeout(0.02)
    here.on_pause = asked.set
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: here.sendall(data) if does_send else found.append(received(here, MUCH)), daemon=True
    )
    thread.start()
    assert asked.wait(100)
    if does_send:
        found.append(received(there, MUCH))
    else:
        there.sendall(data)
    thread.join(100)

    assert found == [data]


def test_a_send_that_is_blocked_ends_when_the_socket_is_shut_down(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """Another thread shuts it down, as a shard does with the connection of a worker that reads no more."""
    here, _ = ends
    errors: list[OSError] = []
    blocked = threading.Event()
    here.set_timeout(0.02)
    here.on_pause = blocked.set

    def send() -> None:
        try:
            here.sendall(bytes(MUCH))
        except OSError as error:
            errors.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    assert blocked.wait(100)
    here.shutdown(socket.SHUT_RDWR)
    sending.join(100)

    assert len(errors) == 1


def test_a_handshake_has_a_limit_as_a_whole_and_says_what_was_wrong(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """With a side that says nothing, and with one that speaks something else."""
    here, there = socket.socketpair()
    silent = TlsSocket(here, contexts[1], "shard")
    with there:
        with pytest.raises(TimeoutError):
            silent.handshake(0.05)
        there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ssl.SSLError) as caught:
            silent.handshake(5.0)
    silent.close()

    assert "does not speak TLS" in str(what_is_wrong(caught.value, "shard"))


def test_a_file_is_read_again_however_it_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In place, by a rename, and as Kubernetes does it, by the link to its directory; not while it is away or wrong."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    link, path = tmp_path / "link", tmp_path / "link" / "file"
    link.symlink_to("one")
    loads = []

    def load() -> str:
        loads.append(1)
        text = read(str(path), "--x").decode()
        if text == "wrong":
            raise ConfigError("wrong")
        return text

    watched = Watched((str(path),), load)
    seen = [watched.current(), watched.current()]
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(link)
    seen.append(watched.current())
    path.write_text("in place")
    seen.append(watched.current())
    (tmp_path / "renamed").write_text("renamed")
    (tmp_path / "renamed").replace(path)
    seen.append(watched.current())
    path.unlink()
    seen += [watched.current(), watched.current()]
    path.write_text("wrong")
    seen.append(watched.current())
    path.write_text("right")
    seen.append(watched.current())

    assert seen == ["one", "one", "two", "in place", "renamed", "renamed", "renamed", "renamed", "right"]
    assert len(loads) == 7
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_secret_that_everybody_can_read_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_told: bool
) -> None:
    """The warning has the file's name, and what to do."""
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(mode)

    read_secret(str(path), "--token-file")

    assert [f"chmod 600 {path}" in record.getMessage() for record in caplog.records] == [True] * is_told


def test_tokens_have_the_roles_of_their_lines() -> None:
    """Several of a role may be listed, as in a change; what a call carries is found by its digest."""
    tokens = parse_tokens("# old\nworker aaaaaaaaaaaaaaaa\n\n  worker\tbbbbbbbbbbbbbbbb\nreader cccccccccccccccc\n", "f")

    for token, role in (("a", Role.WORKER), ("b", Role.WORKER), ("c", Role.READER), ("d", None)):
        assert tokens.role_of(digest_of(token * 16)) is role
    assert presented(metadata_of("a" * 16)) == digest_of("a" * 16)
    for text, words in (
        ("worker aaaaaaaaaaaaaaaa\nreader aaaaaaaaaaaaaaaa", "f, line 2: this token is given twice"),
        ("boss aaaaaaaaaaaaaaaa", "f, line 1: expected ROLE TOKEN"),
        ("worker a b", "f, line 1: expected ROLE TOKEN"),
        ("\n".join(f"worker {i:016}" for i in range(101)), "f: has more than 100 tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_tokens(text, "f")


@pytest.mark.parametrize(
    ("address", "is_ours_alone"),
    [("127.0.0.1:1", True), ("127.1.2.3:1", True), ("[::1]:1", True), ("LocalHost:1", True), ("0.0.0.0:1", False)]
    + [(f"{host}:1", False) for host in ("[::]", "10.0.0.1", "host-a", "localhost.example.org", "127.0.0.1.example.org")],
)
def test_only_this_machines_own_addresses_are_loopback(address: str, is_ours_alone: bool) -> None:
    """A name is not looked up: it counts as one that others reach."""
    assert is_loopback(address) is is_ours_alone


def test_credentials_without_files_show_nothing() -> None:
    """They suit a shard on this machine."""
    none = Credentials()

    assert (none.metadata(), none.pem(), none.context(), none.has_tls, none.has_token) == (None, None, None, False, False)
    assert not none.has_other_token(None)
    with pytest.raises(ConfigError, match="tls_ca: not given; a client's certificate is shown over TLS only"):
        Credentials(tls_cert="c", tls_key="k")


def test_a_token_that_was_refused_is_compared_with_the_file(tmp_path: Path) -> None:
    """Whoever looks first, all whose call carried the old one may try again; and nobody with the one that there is."""
    path = tmp_path / "token"
    path.write_text("a" * 16)
    path.chmod(0o600)
    stat = path.stat()
    credentials = Credentials(token_file=str(path))
    old = credentials.metadata()

    assert not credentials.has_other_token(old)
    path.write_text("b" * 16)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if within one tick of the file system's clock
    assert [credentials.has_other_token(old), credentials.has_other_token(old)] == [True, True]
    assert not credentials.has_other_token(credentials.metadata())


def test_credentials_come_from_arguments_or_the_environment() -> None:
    """Arguments hold; an empty one switches off what the environment says."""
    environ = {"PSD_TLS_CA": "a", "PSD_TLS_CERT": "c", "PSD_TLS_KEY": "k", "PSD_TOKEN_FILE": "t"}
    where = {"servers": "h:1", "rank": 0, "world_size": 1, "environ": environ}

    config = client_config(**where)
    other = client_config(**where, tls_ca="b", tls_cert="", tls_key="", token_file="")

    assert (config.tls_ca, config.tls_cert, config.tls_key, config.token_file) == ("a", "c", "k", "t")
    assert (other.tls_ca, other.tls_cert, other.tls_key, other.token_file) == ("b", "", "", "")
    with pytest.raises(ConfigError, match="tls_key: not given; a certificate and its key belong together"):
        client_config(**where, tls_key="")
