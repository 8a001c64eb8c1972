"""Lines, and unfinished ones redrawn beneath them: psd/cli/processes/display.py."""

import io
import re

import pytest

from psd.cli.processes.display import REDRAW_S, Display


class Screen(io.BytesIO):
    """A terminal that does what the display asks of one."""

    def isatty(self):
        return True

    def fileno(self):
        raise OSError

    def lines(self):
        """What is to be seen."""
        found = [b""]
        for piece in re.split(rb"(\n|\x1b\[[?\d]*\w)", self.getvalue()):
            if piece == b"\n":
                found.append(b"")
            elif up := re.fullmatch(rb"\x1b\[(\d+)F", piece):  # what is below is cleared at once
                found[-1 - int(up[1]) :] = [b""]
            elif not piece.startswith(b"\x1b"):
                found[-1] += piece
        return found[:-1]


@pytest.fixture
def rows():
    return []


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def display(screen, rows, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Display(screen, lambda: rows)


def test_write_when_there_are_rows_then_they_stay_beneath_the_lines(display, screen, rows):
    rows += [b"[0] 10%", b"[1] 20%"]
    display.redraw(0.0)
    display.write([b"[0] one\n"], 0.0)
    rows[1] = b"[1] 30%"
    display.write([b"[0] two\n"], 0.0)

    assert screen.lines() == [b"[0] one", b"[0] two", b"[0] 10%", b"[1] 30%"]
    rows.clear()
    display.write([b"end\n"], 0.0)
    assert screen.lines() == [b"[0] one", b"[0] two", b"end"]


def test_write_when_elsewhere_is_the_same_terminal_then_no_row_is_in_its_way(display, screen, rows):
    rows.append(b"10%")
    display.redraw(0.0)

    display.write([b"psd-run: news\n"], 0.0, screen)

    assert screen.lines() == [b"psd-run: news", b"10%"]


def test_redraw_when_rows_change_often_then_they_are_drawn_ten_times_a_second(display, screen, rows):
    rows.append(b"10%")
    display.redraw(0.0)
    rows[0] = b"20%"
    display.redraw(REDRAW_S / 2)

    assert (screen.lines(), display.due) == ([b"10%"], REDRAW_S)
    display.redraw(REDRAW_S)
    assert (screen.lines(), display.due) == ([b"20%"], None)


def test_rows_when_they_move_the_cursor_or_are_too_many_then_they_cannot_damage_the_picture(display, screen, rows):
    rows += [b"\x1b[31mred\x1b[2J\x07\x1b[5A"] * 50
    display.redraw(0.0)

    assert screen.getvalue().count(b"\x1b[31mred\x1b[0m\n") == 23


def test_redraw_when_the_stream_is_no_terminal_then_nothing_is_written(rows):
    file = io.BytesIO()
    rows.append(b"10%")
    display = Display(file, lambda: rows)
    display.redraw(0.0)
    display.write([b"line\n"], 0.0)

    assert (file.getvalue(), display.is_live) == (b"line\n", False)
