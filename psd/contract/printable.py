"""Foreign text, made safe to show: characters that would control a terminal, or end a line, are escaped.

Text that a peer has chosen (the names of hosts, tensors, runs and barriers, the texts of its errors) passes through `printable`
when it is shown or logged. Names that are declared must not need it.
"""

from __future__ import annotations

import logging
import unicodedata

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, which begin a terminal's commands; format characters, some of which reverse the
direction of the text after them; half characters; the ends of lines and paragraphs."""


def printable(text: str) -> str:
    """The text on one line, with control characters as Python writes them: \\x1b, \\n, \\u202e."""
    if text.isprintable():
        return text
    return "".join(_escaped(character) if _is_control(character) else character for character in text)


def printable_lines(text: str) -> str:
    """The text with control characters escaped as by `printable`, except that its lines stay."""
    return "\n".join(map(printable, text.split("\n")))


def is_printable(text: str) -> bool:
    """True if no character of a text must be escaped."""
    return text.isprintable() or not any(map(_is_control, text))


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8. It may have half characters, which cannot be sent: then it is refused as not printable."""
    return len(text.encode(errors="surrogatepass"))


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in _ESCAPED


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class PrintableRecords(logging.Filter):
    """A filter for a logger, whose records may reach terminals and files: makes each record one printable line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.msg, record.args = printable(record.getMessage()), ()
        return True
