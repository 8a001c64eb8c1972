"""psdctl dashboard in headless Chromium, beside a real job: make test-browser. Skipped where there is no Chromium.

With PSD_PICTURES=DIR it saves what it sees there, as the pictures in docs/images were made.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PATH, Chromium

from psd.contract.config import parse_servers
from psd.contract.credentials import Credentials
from psd.contract.scalars import LoggedScalars
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler
from psd.watch.top.app import TopApp
from psd_client.worker.scalars.scalar_files import ScalarFiles

pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium on this machine")

TRAINING = Path(__file__).with_name("training.py")
EARLIER = "training-before"
MARKS = 4
"""Checkpoints that a picture is to have."""

SHOWN_S = 3.0
"""Seconds within which a killed shard is shown."""


class Job:
    """psd-run with two shards, three workers, checkpoints, a log directory in which a run was before, and the dashboard.

    Attributes:
        address: of the dashboard. servers: of the shards.
    """

    def __init__(self, folder: Path) -> None:
        files = ScalarFiles(0, str(folder / "logs"), "")
        files.write([LoggedScalars(1e9 + step, EARLIER, 0, step, {"loss": 2 * 0.99**step}) for step in range(1, 400)])
        files.close()
        flags = ["--shards", "2", "--workers", "3", "--dashboard", "--dashboard-port", "0"]
        flags += ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-secs", "5", "--log-dir", str(folder / "logs")]
        command = [sys.executable, "-m", "psd.cli.run", *flags, str(TRAINING), "20000"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.servers = self.line(r"psdctl status --servers (\S+)")
        self.address = self.line(r"dashboard: (http://\S+)/$")

    def line(self, pattern: str) -> str:
        """Wait for a line of psd-run's output; what the pattern's group is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"psd-run ended without {pattern!r}")

    def shard_pids(self) -> list[int]:
        """Process ids of the shards, in their order."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and b"psd.cli.server" in b" ".join(words):
                found[words[words.index(b"--shard") + 1]] = int(entry.name)
        return [found[name] for name in sorted(found)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    yield started
    started.process.send_signal(signal.SIGINT)
    started.process.communicate(timeout=60)
    assert started.process.returncode == 130


def status(servers: str) -> Any:
    """The job as psdctl status shows it."""
    command = [sys.executable, "-m", "psd.cli.psdctl", "status", "--json", "--servers", servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


CUT = """
(() => {
  const cut = [];
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect(), drawing = e.tagName === 'text' ? e.closest('svg').getBoundingClientRect() : null;
    if (!e.checkVisibility() || e.closest('.skip, .unseen')) continue;
    const isBeyond = box.right > innerWidth + 0.5 || box.left < -0.5;
    const isHidden = getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1;
    const isOff = drawing && (box.left < drawing.left - 0.5 || box.right > drawing.right + 0.5);
    if (isBeyond || isHidden || isOff) cut.push(`${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`);
  }
  return cut;
})()
"""
"""Elements that are not seen whole: beyond the page's edge, scrolled or shortened in their place, or beyond their drawing."""

ROW = "[...document.querySelectorAll('section[aria-label={}] tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"


async def look(job: Job, pictures: Path | None) -> None:
    """Everything that a person would look at, in one visit: a browser takes seconds to start."""
    async with Chromium() as page:
        await page.open(f"{job.address}/", 1280, 1180)
        await page.until("/^Training, step \\d+/.test(document.querySelector('.state')?.innerText ?? '')")
        await page.until("document.querySelectorAll('.plot path').length > 4")

        # The numbers are the job's.
        before = status(job.servers)
        least = max(worker["clock"] for worker in before["workers"])
        step = "Number(row.cells[2].innerText.replaceAll(',', ''))"
        await page.until(
            f"[...document.querySelectorAll('section[aria-label=Workers] tbody tr')].every(row => {step} > {least})"
        )
        workers, shards = await page.value(ROW.format("Workers")), await page.value(ROW.format("Shards"))
        after = status(job.servers)
        steps = [int(row[2].replace(",", "")) for row in workers]
        assert all(there <= worker["clock"] for there, worker in zip(steps, after["workers"], strict=True))
        assert [row[1] for row in shards] == ["serving", "serving"]
        assert [row[7] for row in workers] == [f"{w['host']}:{w['pid']}" for w in before["workers"]]
        assert await page.until("document.querySelector('.chips')?.innerText.startsWith('worker 1')")
        assert await page.until("document.querySelector('figure.chart figcaption').innerText.startsWith('loss')")
        await page.until("document.querySelectorAll('.mark').length > 0")  # a checkpoint
        assert re.search(
            r"^\d+% of 20,000 steps, .* left$", await page.value("document.querySelector('.progress + p').innerText")
        )
        assert " samples/s" in await page.value("document.querySelectorAll('.answer')[1].innerText")
        await look_at_curves(page)
        if pictures:
            await save(page, job, pictures)

        # On a phone nothing is cut.
        for path in ("#/shard/0", "#/worker/1", "#/"):
            await page.open("about:blank")
            await page.open(f"{job.address}/{path}", 400, 800, "dark")
            await page.until("document.querySelectorAll('.plot path').length > 2")
            assert await page.value(CUT) == [], path

        # It can be read and used by the keyboard.
        assert await page.value("document.documentElement.dataset.theme") == "dark"
        await page.press("Tab")
        assert await page.value("document.activeElement.innerText") == "Skip to the job"
        await page.press("Enter")
        assert await page.value("document.activeElement.id") == "main"
        assert await page.value("[...document.querySelectorAll('svg.plot, canvas')].every(e => e.getAttribute('aria-label'))")
        await page.value("document.querySelector('.plot').focus()")
        await page.press("ArrowLeft")
        assert " at step " in await page.value("document.querySelector('figcaption output').innerText")
        await page.value("document.querySelector('section[aria-label=Workers] tbody a').click()")
        await page.until("document.querySelector('h1').innerText === 'Worker 0'")
        await page.value("location.hash = '#/shard/1'")
        await page.until("document.querySelector('h1').innerText === 'Shard 1'")
        await page.value("location.hash = '#/'")

        # A shard that dies is shown, and that it is back.
        await page.until("document.querySelector('.state') !== null")
        os.kill(job.shard_pids()[1], signal.SIGKILL)
        events = "document.querySelector('.events').innerText"
        await page.until(f"/shard 1 (at .* does not answer|has restarted)/.test({events})", SHOWN_S)
        await page.until(f"{events}.includes('shard 1 has restarted')", 60)
        await page.until("/^Training/.test(document.querySelector('.state').innerText)", 60)
        assert page.console == []


async def look_at_curves(page: Chromium) -> None:
    """Workers' losses differ, their learning rates do not; both are drawn as a visitor wants them, also when he comes back."""
    key = "[...document.querySelectorAll('.curves figure')].map(figure => figure.querySelector('.key').innerText)"
    lines = "document.querySelectorAll('.curves figure')[0].querySelectorAll('path.line').length"
    assert await page.value("[...document.querySelectorAll('.curves figcaption > span')].map(each => each.innerText)") == [
        "loss",
        "lr",
        "validation/accuracy of the rare classes",
    ]
    assert (await page.value(key))[:2] == ["mean of 3 workers, and from the lowest to the highest", "all 3 workers alike"]
    assert await page.value("document.querySelectorAll('.curves figure')[0].querySelectorAll('path.band').length") == 1
    await page.value(
        "[...document.querySelectorAll('.controls button')].find(each => each.innerText === 'each worker').click()"
    )
    await page.until(f"{lines} === 3")
    assert (await page.value(key))[1] == "all 3 workers alike"
    ticks = "[...document.querySelectorAll('.curves figure')[0].querySelectorAll('text')].map(each => each.textContent)"
    before = await page.value(ticks)
    await page.value("document.querySelector('.curves .log').click()")
    assert await page.value("document.querySelector('.curves .plot').getAttribute('aria-label').includes('logarithmic')")
    assert await page.value(ticks) != before
    assert await page.value("document.querySelectorAll('.curves .raw').length") == 0
    await page.value("document.querySelector('.controls input').focus()")
    for _ in range(3):
        await page.press("ArrowRight")
    await page.until("document.querySelector('.controls output').innerText === '0.03'")
    await page.until("document.querySelectorAll('.curves figure')[0].querySelectorAll('path.raw').length === 3")
    await page.value("document.querySelector('.earlier summary').click()")
    await page.until(f"document.querySelector('.earlier li').innerText.startsWith('{EARLIER}')")
    await page.value("document.querySelector('.earlier input').click()")
    await page.until("document.querySelectorAll('.curves figure')[0].querySelectorAll('path.earlier').length === 1")
    assert (await page.value(key))[0].endswith(EARLIER)
    assert await page.value("document.querySelectorAll('.curves path.earlier').length") == 1, "it has no other curve"
    await page.value("location.reload()")
    await page.until(f"document.querySelector('.curves figure') && {lines} === 3")
    await page.until("document.querySelectorAll('.curves path.earlier').length === 1")
    assert await page.value("document.querySelector('.curves .log').getAttribute('aria-pressed')") == "true"
    await page.value("localStorage.clear()")
    await page.value("location.reload()")
    await page.until("document.querySelector('.curves path.band') !== null")


async def save(page: Chromium, job: Job, folder: Path) -> None:
    """Pictures for the documents, with an earlier run, and smoothed."""
    chosen = json.dumps({"smoothing": 0.6, "earlier": [EARLIER]})
    await page.value(f"localStorage.setItem('psd-curves', {json.dumps(chosen)})")
    for name, path, size, scheme in (
        ("dashboard", "/", (1280, 1000), "light"),
        ("dashboard-dark", "/#/worker/1", (1280, 860), "dark"),
        ("dashboard-phone", "/", (400, 844), "light"),
    ):
        await page.open("about:blank")
        await page.open(job.address + path, *size, scheme)
        await page.until(f"document.querySelectorAll('.events li, .mark').length >= {MARKS}", 120)
        await page.picture(folder / f"{name}.png")
    await page.value("localStorage.clear()")
    await save_top(job, folder / "top.svg")


async def save_top(job: Job, file: Path) -> None:
    """A capture of psdctl top in a terminal of 80 columns, without the fonts that it would load from elsewhere."""
    with Asker(parse_servers(job.servers), Credentials()) as asker:
        sampler = Sampler(asker)
        app = TopApp(sampler, interval_s=0.5)
        async with app.run_test(size=(80, 26)) as pilot:
            while len(sampler.history.events) < 2:
                await pilot.pause(0.1)
            drawn = app.export_screenshot(title="psdctl top")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


@pytest.mark.process
def test_the_page_shows_the_job_and_a_killed_shard_and_says_nothing_on_the_console(job: Job) -> None:
    pictures = os.environ.get("PSD_PICTURES")
    asyncio.run(look(job, Path(pictures) if pictures else None))
