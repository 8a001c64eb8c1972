"""Logs of a process, as text and as JSON: one line a record, whatever peers have put into it."""

import io
import json
import logging
import re
import sys
import threading

import pytest

from psd.cli.words import logs

HOSTILE = 'a\nname\x1b[31m\x00\u2028\u202e\x9b"'


@pytest.fixture
def configure(capsys):
    """configure(is_json) -> what says; logging is as it was afterwards."""
    root, psd = logging.getLogger(), logging.getLogger("psd")
    before = root.handlers[:], root.level, psd.level, sys.excepthook, threading.excepthook

    def begin(is_json, level="info"):
        return logs.configure("psd-server", logs.Settings(level, is_json=is_json), shard=3)

    yield begin
    logging.captureWarnings(capture=False)
    root.handlers[:], level, psd.level, sys.excepthook, threading.excepthook = before
    root.setLevel(level)
    psd.setLevel(psd.level)


def test_json_when_a_record_has_fields_then_they_stand_beside_the_fixed_ones(configure, capsys):
    configure(True)

    logging.getLogger("psd.x").warning("silent", extra={"rank": 7, "shard": 9, "lag": float("nan"), "host": HOSTILE})

    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    fixed = {"level": "warning", "logger": "psd.x", "message": "silent", "shard": 3}
    assert found == {**fixed, "rank": 7, "lag": "nan", "host": HOSTILE}
    assert line.isascii()
    assert line.isprintable()


def test_json_when_an_exception_is_logged_then_its_traceback_is_a_field(configure, capsys):
    configure(True)

    try:
        int("no number")
    except ValueError:
        logging.getLogger("psd.x").exception("failed")

    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("'no number'")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_json_when_a_thread_ends_by_a_defect_then_that_is_a_record_too(configure, capsys):
    configure(True)

    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["message"]) == ("error", "a thread ended because of a defect")
    assert "ZeroDivisionError" in found["exception"]


@pytest.mark.parametrize("is_json", [False, True])
def test_say_when_the_level_is_high_then_it_is_heard_all_the_same(configure, capsys, is_json):
    say = configure(is_json, "error")

    logging.getLogger("psd.x").info("unheard")
    say("draining")

    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["message"] if is_json else line) == "draining"


@pytest.mark.parametrize("is_json", [False, True])
def test_say_when_nothing_can_be_written_then_the_process_goes_on(configure, monkeypatch, is_json):
    """A shard that is told to end says so before it takes the last checkpoint."""
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        configure(is_json, "error")("draining")


def test_text_when_a_field_has_control_characters_then_the_record_is_one_line(configure, capsys):
    configure(False)

    logging.getLogger("psd.x").warning("from %s", HOSTILE, extra={"rank": 7})

    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'psd-server: WARNING from a\\nname\\x1b[31m\\x00\\u2028\\u202e\\x9b"  rank=7'


def test_text_when_an_exception_has_control_characters_then_its_traceback_has_none(configure, capsys):
    configure(False)

    logging.getLogger("psd.x").error("failed", exc_info=RuntimeError(HOSTILE.replace("\n", "")))

    lines = capsys.readouterr().err.split("\n")
    assert lines[-2] == 'RuntimeError: aname\\x1b[31m\\x00\\u2028\\u202e\\x9b"'
    assert all(map(str.isprintable, lines))


def test_say_when_a_text_has_control_characters_then_it_is_one_line(configure, capsys):
    configure(False)(f"ready at {HOSTILE}")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
