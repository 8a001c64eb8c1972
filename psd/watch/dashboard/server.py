"""The dashboard's process: takes a snapshot of the job once an interval, serves the pages, and ends when it is told to.

Snapshots are taken in a separate thread, because they wait for shards. Everything that reads them runs in the same thread, so
no lock is needed. Earlier runs are read in another one, because their files may be long. Must not know flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web

from psd.watch.dashboard import feed
from psd.watch.dashboard.admission import Doorkeeper
from psd.watch.dashboard.pages import Pages, Streams
from psd.watch.dashboard.visitors import Visitors
from psd.watch.earlier import EarlierRuns
from psd.watch.sampler import Sampler

STUCK_S = 30.0
"""Seconds after which the connection to a browser that reads nothing, or has vanished, is closed."""

END_S = 2.0
"""Seconds that answers in progress have when the dashboard ends."""


@dataclass(frozen=True)
class DashboardPlace:
    """The address at which the dashboard is served, and who may see it.

    Attributes:
        listener: a socket that listens.
        token: the token that browsers must send; None: none is needed. is_token_new: True if it was made for this process.
        tls: None: plain HTTP.
    """

    listener: socket.socket
    token: str | None
    is_token_new: bool
    tls: ssl.SSLContext | None


def listen(host: str, port: int, *, is_firm: bool) -> socket.socket:
    """Listen at an address; if the port is taken, at another one, unless `is_firm`. Raises OSError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError:
        if is_firm:
            raise
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=both)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STUCK_S * 1000))
    return listener


async def serve(
    sampler: Sampler,
    place: DashboardPlace,
    interval_s: float,
    on_ready: Callable[[], None],
    earlier: EarlierRuns | None = None,
) -> None:
    """Take snapshots and serve pages until SIGINT or SIGTERM, or until cancelled.

    Args:
        on_ready: called when pages are served. earlier: the runs of a log directory; None: there is none.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: the caller cancels this task
            loop.add_signal_handler(signum, ended.set)
    streams = Streams()
    with ThreadPoolExecutor(1, "psd-look") as thread, ThreadPoolExecutor(1, "psd-earlier") as reader:
        in_thread = functools.partial(loop.run_in_executor, thread)
        in_reader = functools.partial(loop.run_in_executor, reader)

        def look() -> tuple[str, str]:
            sampler.look()
            return ("job", feed.whole(sampler)) if sampler.has_gone_back else ("look", feed.look(sampler))

        async def keep_looking() -> None:
            while True:
                due = loop.time() + interval_s
                streams.send(*await in_thread(look))
                await asyncio.sleep(max(0.0, due - loop.time()))

        async def whole() -> str:
            return await in_thread(feed.whole, sampler)

        def present() -> str:
            return sampler.now.run_id if sampler.now is not None else ""

        async def runs() -> str:
            return feed.runs(await in_reader(earlier.runs, await in_thread(present)) if earlier is not None else [])

        async def run(name: str) -> str | None:
            return await in_reader(earlier.curves, name, await in_thread(present)) if earlier is not None else None

        port = place.listener.getsockname()[1]
        admission = Doorkeeper(place.token)
        pages = Pages(admission, streams, whole, runs, run, is_https=place.tls is not None, cookie=f"psd-dashboard-{port}")
        async with server_of(pages) as protocols:
            looking = asyncio.create_task(keep_looking())
            ending = asyncio.create_task(ended.wait())
            visitors = Visitors(place.listener, protocols, place.tls)
            pages.on_let_in = visitors.let_in
            try:
                on_ready()
                await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
                if looking.done():
                    looking.result()  # a defect: raised here
            finally:
                looking.cancel()
                ending.cancel()
                visitors.close()
                streams.end()


@contextlib.asynccontextmanager
async def server_of(pages: Pages) -> AsyncIterator[Callable[[], asyncio.Protocol]]:
    """Yield a function that makes the protocol for a connection. At the end, answers in progress are ended."""
    # A connection that sends something other than a request gets an answer, but no line in the log.
    strangers = logging.Logger("strangers", logging.CRITICAL)
    runner = web.AppRunner(pages.app(), access_log=None, logger=strangers, handle_signals=False, shutdown_timeout=END_S)
    await runner.setup()
    try:
        assert runner.server is not None
        yield runner.server
    finally:
        await runner.cleanup()
