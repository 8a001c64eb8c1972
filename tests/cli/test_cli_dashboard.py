"""psdctl dashboard: its options, what it prints, how it ends."""

import asyncio
import json
import signal
import socket
import sys

import aiohttp
import pytest

from psd.cli.ctl.dashboard import announcement
from psd.cli.psdctl import main
from psd.watch import dashboard
from psd.watch.dashboard import server
from psd.watch.dashboard.admission import is_loopback

TOKEN = "a-token-of-the-dashboard"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "65536"], "--port: expected 0 to 65535, got 65536"),
        (["--interval", "0"], "--interval: expected 0.1 to 3600 seconds, got 0"),
        (["--https-cert", "a"], "--https-cert, --https-key: expected both or none"),
        (["--access-token-file", "/nowhere"], "--access-token-file: cannot read /nowhere"),
    ],
)
def test_a_wrong_option_is_said_in_one_line(options, message, refusal):
    assert message in refusal(main, ["dashboard", "--servers", "127.0.0.1:1", *options])


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("psd.watch.dashboard.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(dashboard, name.rpartition(".")[2])
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    assert main(["dashboard", "--servers", "127.0.0.1:1"]) == 1

    assert "psdctl dashboard: error: aiohttp is not installed: pip install 'psd[ui]'" in capsys.readouterr().err


def test_beyond_loopback_the_address_has_a_token_and_without_https_a_warning():
    """The token is made up, and stands after the #, a part that browsers do not send."""
    with server.listen("127.0.0.1", 0, is_firm=True) as listener:
        port = listener.getsockname()[1]
        lines = announcement("host.example", server.DashboardPlace(listener, "secret", is_token_new=True, tls=None), 0)

    assert lines[0] == f"dashboard: http://host.example:{port}/#token=secret"
    assert "without --https-cert" in lines[1]
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0", "host", "10.0.0.1")] == [
        *[True] * 4,
        *[False] * 3,
    ]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_on_all_addresses_it_is_reached_by_the_hosts_name(host):
    """Whichever kind of address that stands for."""
    with server.listen(host, 0, is_firm=True) as listener:
        port = listener.getsockname()[1]
        (line, _) = announcement(host, server.DashboardPlace(listener, "secret", is_token_new=True, tls=None), 0)
        with socket.create_connection(("127.0.0.1", port)):
            pass

    assert line == f"dashboard: http://{socket.gethostname()}:{port}/#token=secret"


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(capsys):
    """Only --any-port, which psd-run gives, takes another one."""
    with server.listen("127.0.0.1", 0, is_firm=True) as listener:
        port = listener.getsockname()[1]
        assert main(["dashboard", "--servers", "127.0.0.1:1", "--port", f"{port}"]) == 1
        assert "--host, --port: cannot listen on 127.0.0.1: Address already in use" in capsys.readouterr().err
        with server.listen("127.0.0.1", port, is_firm=False) as other:
            place = server.DashboardPlace(other, None, is_token_new=False, tls=None)
            taken = other.getsockname()[1]
            assert announcement("127.0.0.1", place, port) == [f"dashboard: http://127.0.0.1:{taken}/ (port {port} is not free)"]


@pytest.mark.process
def test_ctrl_c_ends_it_at_once_while_a_page_is_open(start, tmp_path):
    """Its output has no trace of the token."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    process = start("psd.cli.psdctl", "dashboard", "--servers", "127.0.0.1:1", "--port", "0", "--access-token-file", str(file))
    address = process.line(r"dashboard: (http://127.0.0.1:\d+)/$")[1]

    async def watch():
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            async with session.post(f"{address}/api/enter", data=json.dumps({"token": TOKEN})) as reply:
                assert reply.status == 200
            async with session.get(f"{address}/api/stream") as reply:
                first = await reply.content.readline()
                process.signal(signal.SIGINT)
                return first, await reply.content.read()

    first, last = asyncio.run(watch())
    assert first == b"event: job\n"
    assert last.endswith(b"event: end\ndata: {}\n\n"), "the page says that it has ended, not that the connection was lost"
    assert process.end() == 0
    assert TOKEN not in process.output
    assert len(process.lines) == 1
