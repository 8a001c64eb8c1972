"""Foreign text cannot command a terminal, begin a line, or turn the direction of a text around."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import InvalidTensor, StateLost, error_from
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.printable import PrintableRecords, is_printable, printable, printable_lines

HOSTILE = {
    "clear the screen": ("\x1b[2J", "\\x1b[2J"),
    "a title, in one character": ("\x9d0;owned\x07", "\\x9d0;owned\\x07"),
    "a line of its own": ("a\nb\r\x85\u2028c", "a\\nb\\r\\x85\\u2028c"),
    "from right to left": ("user\u202egnp.exe", "user\\u202egnp.exe"),
    "isolated": ("\u2066a\u2069\u061c\u200f", "\\u2066a\\u2069\\u061c\\u200f"),
    "not seen": ("a\u200bb\ufeff\U000e0041", "a\\u200bb\\ufeff\\U000e0041"),
    "half a character": ("\ud800", "\\ud800"),
    "deleted": ("a\x7f\x00", "a\\x7f\\x00"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_more_than_text_is_escaped(text: str, shown: str) -> None:
    """Escapes are Python's, so that the text can be told."""
    assert printable(text) == shown
    assert not is_printable(text)


@pytest.mark.parametrize("text", ["", "conv1.weight", "größe", "重み", "a b\\x1b", "\U0001f600", "\u00a0\u3000"])
def test_what_is_text_is_left_alone(text: str) -> None:
    """In any script; spaces of other widths are text, too."""
    assert printable(text) == text
    assert is_printable(text)


@given(st.text(st.characters()))
def test_what_was_made_printable_is(text: str) -> None:
    """Whatever it was; and doing it again changes nothing."""
    assert is_printable(printable(text))
    assert printable(printable(text)) == printable(text)


def test_lines_stay_lines() -> None:
    """A traceback's lines, or a table's, stay."""
    assert printable_lines("a\n  \x1bb\r\n") == "a\n  \\x1bb\\r\n"


def test_the_text_of_every_error_is_printable() -> None:
    """A peer's, as it comes over the wire, and one that names what a peer has named; its facts stay as they are."""
    found = error_from("StateLost", "\x1b]0;owned\x07 on \u202ehost", {"tensor": "a\x1b"})

    assert isinstance(found, StateLost)
    assert str(found) == "\\x1b]0;owned\\x07 on \\u202ehost"
    assert found.detail == {"tensor": "a\x1b"}


@pytest.mark.parametrize("name", ["w\x1b[31m", "w\n", "\u202ew", "w\u200b", "w\udcff"])
def test_a_tensor_with_such_a_name_is_refused(name: str) -> None:
    """Both the worker itself refuses it when it is declared, and the shard."""
    with pytest.raises(InvalidTensor, match=r"tensors\.name: '.*' has control characters") as caught:
        JobSpec(1, (TensorSpec(name, (3,)),), (GroupSpec(),))

    assert is_printable(str(caught.value))


def test_a_run_with_such_a_name_is_refused() -> None:
    """It would be in every status."""
    with pytest.raises(ConfigError, match=r"--run-id: 'r\\x1b' has control characters"):
        ServerConfig(0, 1, run_id="r\x1b")
    with pytest.raises(ConfigError, match=r"--run-id: 'r\\udcff' has control characters"):
        ServerConfig(0, 1, run_id="r\udcff")  # a byte of the command line that is no text


def test_records_are_made_printable_with_their_arguments(caplog: pytest.LogCaptureFixture) -> None:
    """Records of a library's logger, which other people's handlers write."""
    logger = logging.getLogger("test_contract_printable")
    logger.addFilter(PrintableRecords())

    with caplog.at_level(logging.INFO, logger.name):
        logger.warning("worker %d at %s: 100 %%", 3, "h\x1b[2J\n")

    (record,) = caplog.records
    assert record.getMessage() == "worker 3 at h\\x1b[2J\\n: 100 %"
