"""Lines of many processes as one stream: psd/cli/processes/output.py."""

from psd.cli.processes.output import LINE_BYTES_MAX, Lines, Prefixes


def test_feed_when_a_line_arrives_in_pieces_then_it_is_shown_once_and_whole():
    lines = Lines()

    assert lines.feed(b"step 1", now=0) == []
    assert lines.feed(b"0 loss 0.5\nstep 11", now=0) == [b"step 10 loss 0.5"]
    assert lines.feed(b"\n\n", now=0) == [b"step 11", b""]


def test_feed_when_lines_end_like_on_windows_then_the_carriage_return_goes():
    lines = Lines()

    assert lines.feed(b"one\r\ntwo\r\n\r\n", now=0) == [b"one", b"two", b""]
    assert lines.feed(b"three\r", now=0) + lines.feed(b"\nfour\r\n", now=0) == [b"three", b"four"]


def test_feed_when_a_progress_bar_redraws_then_one_state_a_second_and_the_last_are_shown():
    lines = Lines()

    assert lines.feed(b"\r10%", now=0.0) == []
    assert lines.feed(b"\r20%", now=0.1) == [b"10%"]
    assert lines.feed(b"\r30%\r40%", now=0.2) == []
    assert lines.feed(b"\r50%", now=1.2) == [b"40%"]
    assert lines.feed(b"\r100%\n", now=1.3) == [b"100%"]


def test_feed_when_a_progress_bar_wipes_itself_out_then_its_last_state_is_shown():
    lines = Lines()

    assert lines.feed(b"\r10%\r", now=0.0) == []
    assert lines.feed(b"\r90%", now=0.1) == [b"10%"]
    assert lines.feed(b"\r    \r\n", now=0.2) == [b"90%"]
    assert lines.feed(b"next\n", now=0.3) == [b"next"]


def test_feed_when_the_last_state_was_shown_already_then_the_end_of_the_line_shows_nothing():
    lines = Lines()

    assert lines.feed(b"100%\r\r", now=0.0) == [b"100%"]
    assert lines.feed(b" \n", now=5.0) == []


def test_flush_when_a_line_has_no_end_then_it_is_shown_and_not_again():
    lines = Lines()
    lines.feed(b"loading ...", now=1.0)

    assert lines.quiet_at() == 3.0
    assert lines.flush() == [b"loading ..."]
    assert lines.flush() == []
    assert lines.quiet_at() is None


def test_feed_when_a_line_never_ends_then_it_is_cut():
    lines = Lines()

    (line,) = lines.feed(b"x" * (LINE_BYTES_MAX + 1), now=0)

    assert len(line) == LINE_BYTES_MAX
    assert lines.flush() == [b"x"]


def test_tail_when_there_were_many_lines_then_the_last_are_kept():
    lines = Lines()

    lines.feed(b"\n".join(b"%d" % number for number in range(100)) + b"\n", now=0)

    assert lines.tail[0] == b"92"
    assert lines.tail[-1] == b"99"


def test_rows_when_the_reader_sees_them_then_no_state_of_a_bar_becomes_a_line_but_the_last():
    lines = Lines(is_live=True)

    assert lines.feed(b"\r10%", now=0.0) == []
    assert lines.rows == [b"10%"]
    assert lines.feed(b"\r20%", now=5.0) == []
    assert (lines.rows, lines.quiet_at()) == ([b"20%"], None)
    assert lines.feed(b"\r100%\nloading ...", now=5.1) == [b"100%"]
    assert lines.rows == [b"loading ..."]
    assert (lines.end(), lines.rows) == ([b"loading ..."], [])


def test_rows_when_bars_are_nested_then_there_is_one_for_each():
    """As tqdm draws them: down to the inner bar, and up again."""
    lines = Lines(is_live=True)

    def inner(text):
        return b"\n\r" + text + b"\x1b[A"

    assert lines.feed(b"\repoch 0/3" + inner(b"batch 0/9"), now=0.0) == [b"epoch 0/3"]  # nobody could know that it is one
    assert lines.feed(inner(b"batch 9/9") + b"\repoch 1/3", now=0.1) == []
    assert lines.rows == [b"epoch 1/3", b"batch 9/9"]
    assert lines.feed(inner(b"         \r") + inner(b"batch 1/9"), now=0.2) == []
    assert lines.rows == [b"epoch 1/3", b"batch 1/9"]
    assert lines.feed(b"\n\rbatch 2/9\x1b", now=0.3) + lines.feed(b"[A\repoch 2/3", now=0.3) == []
    assert lines.rows == [b"epoch 2/3", b"batch 2/9"]
    assert lines.feed(inner(b"         \r") + b"\r         \rloss 0.5\n", now=0.4) == []
    assert lines.feed(b"done\nend\n", now=0.5) == [b"loss 0.5", b"done", b"end"]


def test_flush_when_a_nested_bar_has_ended_then_it_is_shown():
    lines = Lines(is_live=True)
    lines.feed(b"\x1b[A\rbatch 9/9\n", now=1.0)

    assert lines.quiet_at() == 1.1
    assert (lines.flush(), lines.quiet_at()) == ([b"batch 9/9"], None)


def test_prefixes_when_names_differ_in_length_then_texts_are_aligned():
    prefixes = Prefixes(["psd-run", "shard 0", "worker 10"], colour=False)

    assert prefixes.line("shard 0", b"ready") == b"[shard 0]   ready\n"
    assert prefixes.line("worker 10", b"") == b"[worker 10]\n"


def test_prefixes_when_coloured_then_the_text_is_not():
    prefixes = Prefixes(["worker 0"], colour=True)

    assert prefixes.line("worker 0", b"text") == b"\x1b[36m[worker 0]\x1b[0m text\n"
