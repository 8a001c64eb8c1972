"""Tells how far the bulk call of a lane has come: bytes, rate, time left. Heartbeats ask, while another thread makes it.

Must not know sockets, or who waits.
"""

from __future__ import annotations

from typing import NamedTuple

from psd_client.lanes.transport import GradientPart, Traffic


class Progress(NamedTuple):
    """Bytes of a call that have been moved, and that are to be.

    Attributes:
        seconds: since its beginning.
    """

    sent: int
    to_send: int
    received: int
    to_receive: int
    seconds: float

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to be sent and received."""
        return max(0, self.to_send - self.sent) + max(0, self.to_receive - self.received)

    @property
    def bytes_per_s(self) -> float:
        """The mean speed so far, in both directions together."""
        return (self.sent + self.received) / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """Words such as "sent 3.1 of 6.5 MB, received 0.0 of 6.5 MB, 0.4 MB/s, 22 s left"; none if nothing is left."""
        if not self.left_bytes:
            return ""
        ways = ("sent", self.sent, self.to_send), ("received", self.received, self.to_receive)
        found = [f"{what} {moved / 1e6:.1f} of {whole / 1e6:.1f} MB" for what, moved, whole in ways if whole]
        if self.bytes_per_s:
            speed = self.bytes_per_s / 1e6
            found.append(f"{speed:{'.1f' if speed >= 1 else '.2g'}} MB/s, {self.left_bytes / self.bytes_per_s:.0f} s left")
        return ", ".join(found)


def progress_of(traffic: Traffic, seconds: float) -> Progress:
    """The progress of the call that a lane has been making for so many seconds; all 0 if there is none."""
    under_way = traffic.under_way  # once: the call may end meanwhile
    if under_way is None:
        return Progress(0, 0, 0, 0, seconds)
    outgoing, buffers, incoming, sent_before, received_before = under_way
    if isinstance(outgoing, GradientPart):
        new = [block for block in outgoing.blocks if block.index not in outgoing.already]
        blocks = [block for block in new if outgoing.feed is not None or outgoing.has(block)]
        to_send = sum(block.pushed_nbytes for block in blocks) + sum(rows.nbytes for rows in outgoing.tables)
    else:
        to_send = sum(block.nbytes for block in outgoing)
    known = buffers.layout.blocks if buffers is not None else ()
    to_receive = sum(known[index].pulled_nbytes for index in incoming if index < len(known))
    return Progress(traffic.sent_bytes - sent_before, to_send, traffic.received_bytes - received_before, to_receive, seconds)
