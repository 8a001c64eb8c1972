"""A headless Chromium for tests, spoken to by its DevTools protocol: pages, what they show, what they say on the console."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--remote-debugging-port=0",
]

_POLL_S = 0.05


class Chromium:
    """A browser with one page.

    Attributes:
        console: what the page has said: messages, exceptions, requests that have failed, resources from elsewhere.
    """

    def __init__(self) -> None:
        self.console: list[str] = []
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._count = 0

    async def __aenter__(self) -> Chromium:
        self._profile = tempfile.TemporaryDirectory(prefix="psd-chromium-", ignore_cleanup_errors=True)
        assert PATH is not None
        command = [PATH, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        ports = Path(self._profile.name) / "DevToolsActivePort"
        await until(lambda: ports.exists() and ports.read_text().count("\n") >= 1, 60)
        port = ports.read_text().splitlines()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as reply:
            (page,) = [each for each in await reply.json() if each["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()
        self._process.terminate()
        self._process.wait()
        self._profile.cleanup()

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._replies.pop(found["id"]).set_result(found)
                continue
            kind, params = found["method"], found["params"]
            if kind == "Runtime.consoleAPICalled":
                self.console.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
            elif kind == "Runtime.exceptionThrown":
                self.console.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            elif kind == "Log.entryAdded":
                self.console.append(f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> Any:
        """Make a call of the protocol; its result."""
        self._count += 1
        reply = self._replies[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        found = await asyncio.wait_for(reply, 60)
        assert "error" not in found, found
        return found["result"]

    async def open(self, address: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a page in a window of this size, with this preference of colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=address)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30) -> Any:
        """Wait until a JavaScript expression is true; its value."""
        end = time.monotonic() + timeout_s
        while not (found := await self.value(expression)):
            assert time.monotonic() < end, f"{expression}; the page shows: {await self.value('document.body.innerText')}"
            await asyncio.sleep(_POLL_S)
        return found

    async def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def picture(self, path: Path, *, is_whole: bool = False) -> None:
        """Save what is seen, or the whole page, as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(found["data"]))


async def until(is_so: Any, timeout_s: float) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(_POLL_S)
