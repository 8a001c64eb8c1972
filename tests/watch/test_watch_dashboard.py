"""psdctl dashboard without a browser: what it sends, to whom, and how it ends."""

import asyncio
import contextlib
import json
import logging
import math
import re
import socket
import ssl
from importlib import resources

import aiohttp
import pytest
from certificates import Authority
from scripted_job import ScriptedJob, logged

from psd.contract.scalars import LoggedScalars
from psd.contract.tls import server_files
from psd.watch.dashboard import admission, server, visitors
from psd.watch.dashboard.pages import Streams
from psd.watch.dashboard.server import DashboardPlace, listen, serve
from psd.watch.earlier import EarlierRuns
from psd_client.worker.scalars.scalar_files import ScalarFiles

TOKEN = "a-token-of-the-dashboard"


@contextlib.asynccontextmanager
async def dashboard(job, token=None, tls=None, earlier=None):
    """The dashboard of a scripted job, served; its address."""
    listener = listen("127.0.0.1", 0, is_firm=True)
    ready = asyncio.Event()
    place = DashboardPlace(listener, token, False, tls)
    serving = asyncio.create_task(serve(job.sampler, place, 0.05, ready.set, earlier))
    await asyncio.wait({serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def events(reply):
    """The events of a stream, one after the other: kind and data."""
    async for line in reply.content:
        if line.startswith(b"event: "):
            kind = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield kind, json.loads(line[6:], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_browser_gets_everything_once_and_then_each_look():
    """When the job has gone back, everything anew: some points are gone."""
    job = ScriptedJob()
    job.curve_replies = [logged(7, 2, [1, 2], [math.nan, 0.5])]
    job.train(3)

    async def watch():
        async with dashboard(job) as address, aiohttp.ClientSession() as session, session.get(f"{address}/api/stream") as reply:
            stream = events(reply)
            first, second = await anext(stream), await anext(stream)
            async with session.get(f"{address}/api/job") as whole:
                found = await whole.json()
            job.replies[0].timeline = 1
            job.curve_replies = [logged(7, 3, [1], [0.7])]
            while (third := await anext(stream))[0] != "job":
                pass
            return first, second, found, third[1]

    (kind, first), (other, look), whole, anew = asyncio.run(watch())

    assert (kind, other) == ("job", "look")
    assert first["now"]["headline"].startswith("Training, step 30")
    assert [point[:3] for point in first["curves"]["loss"]] == [[1, 1, None], [1, 2, 0.5]]
    assert {len(column) for column in first["history"].values()} == {len(first["history"]["at"])}
    assert look["moment"].keys() == first["history"].keys()
    assert len(look["moment"]["worker_awaited_share"]) == 2
    assert whole.keys() == first.keys() == anew.keys()
    assert [point[:3] for point in anew["curves"]["loss"]] == [[1, 1, 0.7]]


def test_earlier_runs_are_listed_and_read_by_those_who_may_see_the_job(tmp_path):
    """The present run is none of them, and a name is no path."""
    files = ScalarFiles(0, str(tmp_path), "")
    files.write([LoggedScalars(1e9 + i, run, 0, i, {"loss": 1.0 + i}) for run in ("adam/1", "mnist-1") for i in range(2)])
    files.close()
    (tmp_path / "secret").write_text("{}")

    async def ask(earlier, token=None):
        async with dashboard(ScriptedJob(), token, earlier=earlier) as address, aiohttp.ClientSession() as session:
            found = []
            for path in ("runs", "run?name=adam/1", "run?name=mnist-1", "run?name=../secret", "run"):
                async with session.get(f"{address}/api/{path}") as reply:
                    found.append((reply.status, await reply.json() if reply.status == 200 else None))
            return found

    listed, read, *others = asyncio.run(ask(EarlierRuns(tmp_path)))
    assert listed == (200, {"runs": [{"name": "adam/1", "begun_at": 1e9}]})
    assert read == (200, {"curves": {"loss": [[0, 1.0], [1, 2.0]]}})
    assert others == [(404, None)] * 3
    assert asyncio.run(ask(None)) == [(200, {"runs": []}), *[(404, None)] * 4]
    assert asyncio.run(ask(EarlierRuns(tmp_path), TOKEN)) == [(401, None)] * 5


def test_on_loopback_only_names_of_this_machine_are_answered():
    """A page elsewhere whose name is made to point here is not let in by the browser's own address."""

    async def ask():
        async with dashboard(ScriptedJob()) as address, aiohttp.ClientSession() as session:
            found = {}
            for host in ("127.0.0.1:1", "localhost", "[::1]:9000", "evil.example", "127.0.0.1.evil.example:80"):
                async with session.get(f"{address}/api/job", headers={"Host": host}) as reply:
                    found[host] = reply.status
            return found

    assert [*asyncio.run(ask()).values()] == [200, 200, 200, 403, 403]


def test_the_token_is_exchanged_for_a_cookie_over_tls_and_logged_nowhere(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(admission, "REFUSAL_S", 0.0)
    caplog.set_level(logging.DEBUG)
    authority = Authority("test")
    paths = authority.issue("127.0.0.1").write(tmp_path, "dashboard")
    tls = server_files(paths["tls_cert"], paths["tls_key"], "").load()[1]
    trusts = ssl.create_default_context(cadata=authority.pem.decode())

    async def visit():
        jar = aiohttp.CookieJar(unsafe=True)  # which takes cookies of an address, as browsers do
        async with (
            dashboard(ScriptedJob(), TOKEN, tls) as address,
            aiohttp.ClientSession(cookie_jar=jar, connector=aiohttp.TCPConnector(ssl=trusts)) as session,
        ):

            async def status(path, body=None):
                call = session.get(address + path) if body is None else session.post(address + path, data=body)
                async with call as reply:
                    return reply.status, reply.headers.get("Set-Cookie", "")

            async def is_in():
                async with session.get(f"{address}/api/enter") as reply:
                    return await reply.json()

            return [
                await is_in(),
                await status("/"),
                await status("/api/job"),
                await status("/api/stream"),
                await status("/api/enter", json.dumps({"token": "wrong"})),
                await status("/api/enter", "[]"),
                await status("/api/job"),
                await status("/api/enter", json.dumps({"token": TOKEN})),
                await status("/api/job"),
                await is_in(),
            ]

    before, *found, after = asyncio.run(visit())

    assert (before, after) == ({"is_admitted": False}, {"is_admitted": True})
    assert [code for code, _ in found] == [200, 401, 401, 403, 400, 401, 200, 200]
    cookie = found[6][1]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Secure"))
    assert TOKEN not in cookie + caplog.text


def test_the_page_loads_nothing_from_elsewhere():
    folder = resources.files("psd.watch.dashboard") / "static"
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    named = {name for text in texts.values() for name in re.findall(r'(?:/static/|from "\./)([\w.]+)"', text)}

    assert named - {"facts.js"} | {"index.html"} == texts.keys(), "all is used, and all that is used is there"
    elsewhere = [address for text in texts.values() for address in re.findall(r"\w+://[\w./]+", text)]
    assert set(elsewhere) <= {"http://www.w3.org/2000/svg"}

    async def headers():
        async with (
            dashboard(ScriptedJob()) as address,
            aiohttp.ClientSession() as session,
            session.get(f"{address}/static/app.js") as script,
            session.get(f"{address}/static/..%2fserver.py") as other,
        ):
            return script.headers, script.content_type, other.status

    found, kind, outside = asyncio.run(headers())
    assert "default-src 'none'; script-src 'self'" in found["Content-Security-Policy"]
    assert (kind, outside) == ("text/javascript", 404)


def test_a_browser_that_does_not_read_is_hung_up_on(monkeypatch):
    """Its stream would otherwise hold all that it was to be sent for as long as the dashboard lives."""
    left = asyncio.Event()

    class Watched(Streams):
        @contextlib.contextmanager
        def joined(self):
            with contextlib.ExitStack() as stack:
                stack.callback(left.set)
                yield stack.enter_context(super().joined())

    monkeypatch.setattr(server, "STUCK_S", 0.2)
    monkeypatch.setattr(server, "Streams", Watched)

    async def stare():
        async with dashboard(ScriptedJob()) as address:
            with socket.socket() as browser:
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                browser.connect(("127.0.0.1", int(address.rpartition(":")[2])))
                browser.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.wait_for(left.wait(), 30)

    asyncio.run(stare())


def test_what_is_no_request_is_refused_and_fills_no_log(caplog, capfd):
    """Neither does who sends it need to be let in."""
    enter = b"POST /api/enter HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n%s"
    requests = {
        b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n": b"403",
        b"GET / HTTP/1.1\r\n\r\n": b"400",
        b"\x16\x03\x01\x02\x00\x01\xfc": b"400",
        enter % (b"", 4000, b"[" * 4000): b"400",
        enter % (b"Content-Encoding: gzip\r\n", 2, b"{}"): b"400",
        enter % (b"Content-Type: text/plain; charset=none\r\n", 2, b"[]"): b"400",
    }

    async def answer(address, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(request)
        status = (await reader.readline()).split()[1]
        writer.close()
        return status

    async def ask():
        async with dashboard(ScriptedJob()) as address:
            return [await answer(address, request) for request in requests]

    assert asyncio.run(ask()) == [*requests.values()]
    assert (caplog.text, capfd.readouterr().err) == ("", "")


@pytest.mark.parametrize("is_tls", [False, True])
def test_of_many_idle_connections_the_oldest_goes_and_who_looks_on_stays(tmp_path, monkeypatch, caplog, capfd, is_tls):
    """Also of those that end amid the handshake of TLS; and none of it is logged."""
    monkeypatch.setattr(visitors, "STRANGERS_MAX", 8)
    monkeypatch.setattr(visitors, "CONNECTIONS_MAX", 12)
    paths = Authority("test").issue("127.0.0.1").write(tmp_path, "dashboard")
    tls = server_files(paths["tls_cert"], paths["tls_key"], "").load()[1] if is_tls else None

    async def crowd():
        job, trusting = ScriptedJob(), aiohttp.TCPConnector(ssl=False)
        async with (
            dashboard(job, TOKEN, tls) as address,
            aiohttp.ClientSession(connector=trusting, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
        ):
            port = int(address.rpartition(":")[2])
            async with session.post(f"{address}/api/enter", json={"token": TOKEN}) as entered:
                assert entered.status == 200
            async with session.get(f"{address}/api/stream") as reply:
                stream = events(reply)
                assert (await anext(stream))[0] == "job"
                idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
                ends = [asyncio.create_task(reader.read()) for reader, _ in idle]
                await asyncio.gather(*ends[:32], return_exceptions=True)  # ended by the dashboard
                assert not any(end.done() for end in ends[-8:])
                async with session.get(f"{address}/") as page:
                    assert page.status == 200
                assert (await anext(stream))[0] == "look"
                for end in ends:
                    end.cancel()
                for _, writer in idle:
                    writer.close()

    asyncio.run(crowd())

    assert (caplog.text, capfd.readouterr().err) == ("", "")
