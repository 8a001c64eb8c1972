"""The cluster's DNS, on a loopback port: answers for the names in a table that changes; other names do not exist."""

from __future__ import annotations

import socket
import struct
import threading

HOST = "127.0.0.1"
_A, _IN = 1, 1
_NO_SUCH_NAME = 3


class NameServer:
    """Answers until it is closed.

    Attributes:
        names: name -> IPv4 address; may be changed at any time. port: of UDP.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((HOST, 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(answer(query, self.names), sender)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", (HOST, self.port))
        self._thread.join()
        self._socket.close()


def answer(query: bytes, names: dict[str, str]) -> bytes:
    """A DNS message in reply to one (RFC 1035): one question, and one address or none."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    question = query[12 : at + 5]
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    address = names.get(".".join(labels).lower())
    has_answer = address is not None and kind == _A
    flags = 0x8180 | (_NO_SUCH_NAME if address is None else 0)
    header = query[:2] + struct.pack("!5H", flags, 1, int(has_answer), 0, 0)
    if not has_answer:
        return header + question
    return header + question + struct.pack("!3HIH", 0xC00C, _A, _IN, 1, 4) + socket.inet_aton(address)
