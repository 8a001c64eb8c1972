"""psdctl top: scripted looks, as text and in a terminal that Textual's pilot plays."""

import asyncio
import dataclasses
import math
import sys

import pytest
from scripted_job import EXPIRED, ScriptedJob
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static

from psd.cli.psdctl import main
from psd.v1 import control_pb2 as pb
from psd.watch.snapshot import CurvePoint
from psd.watch.top import lines
from psd.watch.top.app import EARLY_LOOKS, EVENTS_MAX, EVENTS_MIN, EventsScreen, HelpScreen, TopApp
from psd.watch.top.columns import SORTS, sorted_workers


@pytest.fixture
def job():
    """130 workers, one of which holds the others back, and one that is gone; of whom rank 0 logs its loss."""
    job = ScriptedJob(workers=130)
    for reply in job.replies:
        reply.workers[129].state, reply.workers[129].failed = EXPIRED, True
        for worker in reply.workers:
            worker.transport = "shm"
    job.train(5, slow=7, awaited_share=0.25)
    wait = pb.Wait(rank=3, kind=pb.WAIT_KIND_ROUND, clock=50, waited_s=2.0, missing=[job.replies[0].workers[7]])
    job.replies[0].waits.append(wait)
    job.is_silent[1] = True
    job.look()
    job.is_silent[1] = False
    job.look()
    for step in range(5):
        job.sampler.history.add_point("loss", CurvePoint(0, step, 1.0 / (1 + step), 1e9 + step))
    return job


@pytest.mark.parametrize("width", [80, 200])
def test_a_picture_as_text_says_all_in_the_width_there_is(job, width):
    text = lines.as_text(job.sampler.now, job.sampler.history, "awaited", width)

    assert max(map(len, text.splitlines())) <= width
    for words in (
        "limit: Others wait for worker 7",
        "steps/s",
        "latency",
        "loss 0.2",
        "worker 3 waits in round 50 for worker 7",
    ):
        assert words in text
    assert "shard 1 at host:7001 does not answer" in text
    told = "host:7001 did not answer: UNAUTHENTICATED, this shard requires a token: pass token_file, or set PSD_TOKEN_FILE"
    head = lines.head_lines(dataclasses.replace(job.sampler.now, problems=(told,)), width)
    assert max(map(len, head)) <= width
    assert head[-1].endswith("PSD_TOKEN_FILE"), "its end says what to do"
    rows = text[text.index("RANK") :].splitlines()
    assert rows[1].split()[:2] == ["7", "live"]
    assert len(rows) > 130
    assert ("PROCESS" in rows[0], "ADDRESS" in text) == (True, width == 200)


def test_what_is_said_of_short_waits_does_not_contradict_what_limits_the_job():
    job = ScriptedJob()
    assert lines.wait_lines(job.train(4), 80) == ["nobody waits for long"]

    now = job.train(12, slow=1, awaited_share=0.57)

    assert now.limit == "Others wait for worker 1 57% of the time"
    assert lines.wait_lines(now, 80) == ["others wait for worker 1 57% of the time, at present nobody for 0.5 s"]


def test_workers_are_sorted_so_that_those_that_need_attention_come_first(job):
    workers = job.sampler.now.workers

    first = {by: sorted_workers(workers, by)[0].rank for by in SORTS}

    assert first == {"rank": 0, "state": 129, "clock": 0, "steps/s": 0, "awaited": 7, "last-seen": 0}
    assert sorted_workers(workers, "rank", is_reversed=True)[0].rank == 129


def test_a_sparkline_goes_from_the_least_to_the_largest_and_leaves_out_what_is_no_number():
    assert lines.sparkline([1, 2, math.nan, 8], 10) == "▁▂ █"
    assert lines.sparkline([5, 5], 1) == "▁"
    assert lines.sparkline([math.inf], 5) == ""


def cells(app, which, row):
    return [cell.plain for cell in app.query_one(which, DataTable).get_row_at(row)]


def words(app, which):
    return str(app.query_one(which, Static).render())


def test_top_shows_the_job_live_and_its_keys_sort_pause_and_explain(job):
    """In a terminal of 80 x 24. The test takes the looks: none comes by itself within an hour."""

    async def play():
        app = TopApp(job.sampler, interval_s=3600, early_s=3600)
        async with app.run_test(size=(80, 24)) as pilot:
            while app._seen is None:
                await pilot.pause()
            workers = app.query_one("#workers", DataTable)
            assert workers.row_count == 130
            assert sum(column.get_render_width(workers) for column in workers.ordered_columns) <= 80
            assert "Others wait for worker 7" in words(app, "#head")
            assert "worker 3 waits in round 50" in words(app, "#waits")

            for _ in range(4):
                await pilot.press("s")
            assert cells(app, "#workers", 0)[0] == "7"
            await pilot.press("r")
            assert cells(app, "#workers", 129)[0] == "7"
            await pilot.press("pagedown")
            at = workers.cursor_row
            assert at > 0

            await pilot.press("p")
            look(app)
            assert "paused" in words(app, "#head")
            step = cells(app, "#workers", 129)[2]
            await pilot.press("p")
            look(app)
            assert "paused" not in words(app, "#head")
            assert int(cells(app, "#workers", 129)[2]) > int(step)
            assert workers.cursor_row == at, "who looks at a place goes on to look there"

            assert words(app, "#events").splitlines()[0] == "EVENTS"
            assert len(words(app, "#events").splitlines()) == 1 + EVENTS_MIN
            assert app.query_one("#events").region.bottom == 23, "above the footer"
            assert app.query_one("Footer").region.bottom == 24

            for key, screen in (("question_mark", HelpScreen), ("e", EventsScreen)):
                await pilot.press(key)
                assert isinstance(app.screen, screen)
                (box,) = app.screen.query(VerticalScroll)
                assert box.max_scroll_y == 0 or screen is EventsScreen, "it is seen whole"
                assert app.screen.region.contains_region(box.region)
                shown = str(app.screen.query_one(Static).render())
                assert ("shard 1 answers" in shown) == (screen is EventsScreen)
                await pilot.press("down")
                assert isinstance(app.screen, screen), "who scrolls goes on to read"
                await pilot.press("x")
                assert not isinstance(app.screen, screen)
            await pilot.resize_terminal(200, 50)
            await pilot.pause()
            await pilot.pause()
            titles = [column.label.plain for column in app.query_one("#shards", DataTable).ordered_columns]
            assert titles[-1] == "ADDRESS"
            await pilot.press("q")
        assert app.return_code == 0

    def look(app):
        job.train(1)
        history = job.sampler.history
        app.take(job.sampler.now, history.moments, history.curves, [*history.events])

    asyncio.run(play())


def test_sparklines_are_there_at_once_whatever_the_interval():
    """The first looks follow each other faster; before there are rates, their place is there."""
    job = ScriptedJob()

    async def play():
        app = TopApp(job.sampler, interval_s=3600, early_s=0.01)
        async with app.run_test(size=(80, 24)) as pilot:
            while len(job.sampler.history.moments) < EARLY_LOOKS:
                await pilot.pause()
            while "steps/s - ▁▁" not in words(app, "#head"):
                await pilot.pause()

    asyncio.run(play())
    assert lines.spark_lines([], 80) == [f"{'steps/s -':<39}  latency -", f"{'received -':<39}  sent -"]


def test_free_lines_are_filled_with_events():
    """Few workers leave room; so does a taller terminal."""
    few = ScriptedJob()
    few.look()
    for second in range(20):
        few.is_silent[1] = second % 2 == 0
        few.look()

    async def play(size):
        app = TopApp(few.sampler, interval_s=3600, early_s=3600)
        async with app.run_test(size=size) as pilot:
            while app._seen is None:
                await pilot.pause()
            return words(app, "#events").splitlines()

    small, large = asyncio.run(play((80, 20))), asyncio.run(play((80, 24)))

    assert EVENTS_MIN < len(small) - 1 < len(large) - 1 == EVENTS_MAX
    assert small[1].endswith("shard 1 answers")
    assert small[2].endswith("shard 1 at host:7001 does not answer")


def test_a_curve_of_several_workers_is_their_mean_and_the_range():
    """Losses come first; one value that all log needs no range."""
    history = ScriptedJob().sampler.history
    for rank in range(2):
        for step in range(3):
            history.add_point("a", CurvePoint(rank, step, 0.5**step, 1e9))
            history.add_point("val_loss", CurvePoint(rank, step, 2.0 - step + rank, 1e9))
    curves = {name: history.curves[name] for name in ("a", "val_loss")}

    (line,) = lines.curve_lines(curves, 80)

    assert line == f"{'val_loss 0.5 (0 to 1) █▅▁':<39}  a 0.25 █▃▁"


def test_top_without_a_terminal_prints_one_picture_and_says_what_textual_needs(capsys, monkeypatch):
    """Standard output is a pipe here. A shard that does not answer is a picture, too."""
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0)

    assert main(["top", "--servers", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    shown = capsys.readouterr().out
    assert "No shard answers" in shown
    assert "\x1b" not in shown

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "psd.watch.top.app", None)
    with pytest.raises(SystemExit):
        main(["top", "--servers", "127.0.0.1:1"])
    assert "pip install 'psd[ui]', or use --once" in capsys.readouterr().err
