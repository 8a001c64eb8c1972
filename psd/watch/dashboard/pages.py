"""The URLs that the dashboard serves: the page and its parts, the job and earlier runs as JSON, the stream of snapshots, the
exchange of the token. All are read-only. Must not know shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mimetypes
from collections.abc import Awaitable, Callable, Iterator
from importlib import resources
from typing import TypeAlias

from aiohttp import web

from psd.contract.facts import CATALOGUE
from psd.watch.dashboard.admission import VISIT_S, Doorkeeper, TooManyTries

STREAMS_MAX = 64
LATE_MAX = 16
"""Snapshots kept for a browser that does not read; if there are more, its stream is ended, and it asks for a new one."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

logger = logging.getLogger("psd")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Streams:
    """The browsers to which each snapshot is sent."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def send(self, kind: str, text: str) -> None:
        """Send an event to all browsers."""
        data = event(kind, text)
        for queue in [*self._queues]:
            try:
                queue.put_nowait(data)
            except asyncio.QueueFull:
                self._end(queue)

    def end(self) -> None:
        """Tell all browsers that nothing more comes, and end their streams."""
        self.send("end", "{}")
        for queue in [*self._queues]:
            self._end(queue)

    def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queues.discard(queue)
        if queue.full():  # its browser does not read
            queue.get_nowait()
        queue.put_nowait(None)

    @contextlib.contextmanager
    def joined(self) -> Iterator[asyncio.Queue[bytes | None]]:
        """Yield a queue of events for a browser; None is the last item."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(LATE_MAX)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    @property
    def is_full(self) -> bool:
        """True if no further browser is accepted."""
        return len(self._queues) >= STREAMS_MAX


def event(kind: str, text: str) -> bytes:
    """An event in the form of a stream. The text must not have line ends."""
    return f"event: {kind}\ndata: {text}\n\n".encode()


class Pages:
    """Handlers of all requests.

    Args:
        whole: returns everything that is known of the job, as JSON.
        runs: returns the earlier runs, as JSON. run: returns the curves of one of them by its name; None: there is none.
        is_https: True if cookies are for encrypted connections only. cookie: name of the cookie.

    Attributes:
        on_let_in: called with the connection of each request that may see the job.
    """

    def __init__(
        self,
        admission: Doorkeeper,
        streams: Streams,
        whole: Callable[[], Awaitable[str]],
        runs: Callable[[], Awaitable[str]],
        run: Callable[[str], Awaitable[str | None]],
        *,
        is_https: bool,
        cookie: str,
    ) -> None:
        self._admission = admission
        self._streams = streams
        self._whole = whole
        self._earlier_runs = runs
        self._earlier_run = run
        self._is_https = is_https
        self._cookie = cookie
        self._files = _static_files()
        self.on_let_in: Callable[[asyncio.BaseTransport | None], object] = lambda _: None

    def app(self) -> web.Application:
        """The application, for aiohttp to serve."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded], client_max_size=4096)
        app.router.add_get("/", self._file)
        app.router.add_get("/static/{name}", self._file)
        app.router.add_get("/api/job", self._job)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/run", self._run)
        app.router.add_get("/api/enter", self._is_in)
        app.router.add_post("/api/enter", self._enter)
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that are not admitted. The page itself, which asks for the token, is for everybody."""
        if not self._admission.is_known_host(request.host):
            return self._refusal(403, "this address is not a name of the dashboard's machine; use 127.0.0.1 or localhost")
        is_job = request.path.startswith("/api/") and request.path != "/api/enter"
        if is_job and not self._admission.is_admitted(request.cookies.get(self._cookie)):
            return self._refusal(401, "the dashboard asks for its token")
        if is_job:
            self.on_let_in(request.transport)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return self._refusal(error.status, error.reason)
        except Exception:
            logger.exception("a page failed because of a defect in the dashboard")
            return self._refusal(500, "a defect of the dashboard; its log has the traceback")
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _refusal(self, status: int, why: str) -> web.Response:
        return web.json_response({"error": why}, status=status, headers=_HEADERS)

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound
        body, kind = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _job(self, request: web.Request) -> web.Response:
        del request
        return _compressed(await self._whole())

    async def _runs(self, request: web.Request) -> web.Response:
        del request
        return _compressed(await self._earlier_runs())

    async def _run(self, request: web.Request) -> web.Response:
        found = await self._earlier_run(request.query.get("name", ""))
        return self._refusal(404, "the log directory has no such earlier run") if found is None else _compressed(found)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send everything first, then each snapshot, until the browser goes or the dashboard ends."""
        if self._streams.is_full:
            return self._refusal(503, f"{STREAMS_MAX} pages of this dashboard are open; close one")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        with self._streams.joined() as queue:
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                await response.write(event("job", await self._whole()))
                while (data := await queue.get()) is not None:
                    await response.write(data)
        return response

    async def _is_in(self, request: web.Request) -> web.Response:
        """Tell whether the browser is admitted. A refusal would tell it, too, but leave an error on its console."""
        return web.json_response({"is_admitted": self._admission.is_admitted(request.cookies.get(self._cookie))})

    async def _enter(self, request: web.Request) -> web.Response:
        try:
            token = json.loads(await request.read()).get("token", "")
        except (ValueError, AttributeError, RecursionError, web.RequestPayloadError):
            return self._refusal(400, 'expected {"token": "..."}')
        try:
            cookie = await self._admission.enter(str(token))
        except TooManyTries:
            return self._refusal(429, "too many wrong tokens at once; try again in a moment")
        if cookie is None:
            return self._refusal(403, "this is not the dashboard's token")
        response = web.json_response({})
        response.set_cookie(self._cookie, cookie, max_age=int(VISIT_S), httponly=True, samesite="Strict", secure=self._is_https)
        return response


def _compressed(text: str) -> web.Response:
    response = web.Response(text=text, content_type="application/json")
    response.enable_compression()
    return response


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Contents and types of all files that are served, by name: they are few and small. One is the catalogue of the numbers."""
    folder = resources.files("psd.watch.dashboard") / "static"
    names = ("name", "title", "unit", "kind", "weight", "table")
    rows = {of: [{name: getattr(fact, name) for name in names} for fact in facts] for of, facts in CATALOGUE.items()}
    return {
        "facts.js": (f"export const FACTS = {json.dumps(rows)};\n".encode(), "text/javascript"),
        **{
            file.name: (file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream")
            for file in folder.iterdir()
        },
    }
