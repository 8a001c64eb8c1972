"""Several sockets as one stream: payloads arrive whole however they are cut, and whatever is slow, late or gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from psd.contract import strands
from psd.contract.strands import CUT_BYTES_MIN
from psd.contract.wire import Disconnected, Kind, Stream

COUNT = 3
MUCH = (24 << 20) + 1
"""More than the buffers of all sockets hold."""


class GivenUp(Exception):
    """Raised by whoever is asked."""


def pair() -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return Stream(here, 1 << 20), Stream(there, 1 << 20)


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a connection of several sockets."""
    (here, there), *others = [pair() for _ in range(COUNT)]
    here.join([one for one, _ in others])
    there.join([other for _, other in others])
    yield here, there
    here.close()
    there.close()


def numbers(count: int, begin: int = 0) -> bytes:
    return bytes([(begin + i) % 251 for i in range(251)]) * (count // 251) + bytes(range(count % 251))


def in_thread(function: Any, *args: Any, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, kwargs=options, daemon=True)
    thread.start()
    return thread


def received(stream: Stream) -> tuple[Kind, bytes, bytes]:
    kind, head, nbytes = stream.receive()
    payload = bytearray(nbytes)
    stream.read_into(memoryview(payload))
    return kind, head, bytes(payload)


@pytest.mark.parametrize("nbytes", [0, 1, 2, COUNT, 250, 251, 1000])
@pytest.mark.parametrize("count", [1, 2, COUNT, 7])
def test_parts_are_the_payload_in_order_and_alike_in_size(nbytes: int, count: int) -> None:
    """However the payload is in pieces itself."""
    payload = memoryview(numbers(nbytes))
    pieces = [payload[: nbytes // 3], payload[nbytes // 3 : nbytes // 2], payload[nbytes // 2 :]]

    parts = strands.cut(pieces, nbytes, count)

    sizes = [sum(piece.nbytes for piece in part) for part in parts]
    assert len(parts) == count
    assert b"".join(piece for part in parts for piece in part) == payload
    assert max(sizes) - min(sizes) <= 1


def test_messages_of_all_sizes_arrive_in_order(ends: tuple[Stream, Stream]) -> None:
    """Small ones, some held back for the next; at the size from which payloads are cut; and larger than all buffers."""
    here, there = ends
    sizes = [0, 5, CUT_BYTES_MIN - 1, CUT_BYTES_MIN, 100, CUT_BYTES_MIN + 1, 1 << 20, 7, MUCH, 3]

    def send() -> None:
        for number, size in enumerate(sizes):
            here.send(Kind.FRAME, b"%d" % number, numbers(size, number), more=number + 1 < len(sizes))

    sending = in_thread(send)
    for number, size in enumerate(sizes):
        assert received(there) == (Kind.FRAME, b"%d" % number, numbers(size, number))
    sending.join(100)
    assert not sending.is_alive()


def test_a_payload_of_many_pieces_fills_many_targets(ends: tuple[Stream, Stream]) -> None:
    """Neither side's pieces end where parts do."""
    here, there = ends
    payload = numbers(1 << 20)
    pieces = [payload[at : at + 1000] for at in range(0, len(payload), 1000)]
    sending = in_thread(here.send, Kind.FRAME, b"", *pieces)

    _, _, nbytes = there.receive()
    targets = [memoryview(bytearray(min(70_000, nbytes - at))) for at in range(0, nbytes, 70_000)]
    there.read_into(*targets)

    sending.join(100)
    assert b"".join(targets) == payload


def test_both_sides_send_much_at_once(ends: tuple[Stream, Stream]) -> None:
    """No side waits for the other to read."""
    here, there = ends
    sending = [in_thread(end.send, Kind.FRAME, b"", numbers(MUCH, begin)) for begin, end in enumerate(ends)]
    found: dict[int, bytes] = {}
    receiving = in_thread(lambda: found.update({1: received(here)[2]}))
    found[0] = received(there)[2]
    for thread in (*sending, receiving):
        thread.join(100)
    assert found == {0: numbers(MUCH, 0), 1: numbers(MUCH, 1)}


def test_a_payload_that_nobody_wants_is_skipped_whole(ends: tuple[Stream, Stream]) -> None:
    """The next message begins where it should, on all sockets."""
    here, there = ends
    sending = in_thread(lambda: [here.send(Kind.FRAME, b"", numbers(size)) for size in (MUCH, 1 << 20, 5)])

    for _ in range(2):
        there.skip(there.receive()[2])

    assert received(there)[2] == numbers(5)
    sending.join(100)


@pytest.mark.parametrize("broken", range(COUNT))
def test_a_socket_that_is_gone_ends_the_connection(broken: int) -> None:
    """Whichever of them it is, and in both directions; what waits for a part wakes up."""
    (here, there), *others = [pair() for _ in range(COUNT)]
    here.join([one for one, _ in others])
    there.join([other for _, other in others])
    payload, errors = numbers(MUCH), []

    def send() -> None:
        try:
            while True:
                here.send(Kind.FRAME, b"", payload)
        except Disconnected as error:
            errors.append(error)

    sending = in_thread(send)
    received(there)
    [there, *(other for _, other in others)][broken].socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Disconnected):
        while True:
            received(there)
    there.shut_down(socket.SHUT_RDWR)
    sending.join(100)
    assert len(errors) == 1
    here.close()
    there.close()


@pytest.mark.parametrize("does_send", [True, False])
def test_whoever_waits_for_parts_is_asked_after_each_pause(ends: tuple[Stream, Stream], does_send: bool) -> None:
    """So a call over several sockets has its deadline, too."""
    here, there = ends
    pauses: list[int] = []

    def on_pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            raise GivenUp

    here.set_patience(0.02, on_pause)
    if does_send:
        with pytest.raises(GivenUp):
            here.send(Kind.FRAME, b"", numbers(MUCH))
        return
    # A head alone: its parts never come.
    there.socket.sendall(b"\7\0\0\0" + b"\0\0\0\0" + (1 << 20).to_bytes(8, "little"))
    with pytest.raises(GivenUp):
        received(here)


def test_progress_counts_all_sockets(ends: tuple[Stream, Stream]) -> None:
    """Else a connection whose first socket carries little would be taken for broken."""
    here, there = ends
    sending = in_thread(here.send, Kind.FRAME, b"", numbers(1 << 20))
    received(there)
    sending.join(100)
    progress = there.progress()
    assert progress is None or progress[1] >= 1 << 20
