"""Output of the commands: text of peers is made printable, so that it cannot control a terminal."""

from __future__ import annotations

import sys

from google.protobuf.message import Message

from psd.contract.printable import printable, printable_lines


def show(text: str, *, is_error: bool = False) -> None:
    """Print lines, on standard output or standard error."""
    print(printable_lines(text), file=sys.stderr if is_error else sys.stdout, flush=True)


def make_printable(message: Message) -> None:
    """Make every text in a peer's message printable, and so one line each."""
    for field, value in message.ListFields():
        is_text = field.type == field.TYPE_STRING
        if isinstance(value, str):
            setattr(message, field.name, printable(value))
        elif isinstance(value, Message):
            make_printable(value)
        elif is_text:
            value[:] = map(printable, value)
        elif field.message_type is not None:
            for item in value:
                make_printable(item)
