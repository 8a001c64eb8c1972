"""What a shard remembers of its readers."""

from __future__ import annotations

import pytest

from psd.contract.errors import InvalidRequest, Overloaded
from psd.state.readers import FORGET_S, Readers
from psd.v1 import data_pb2


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(reader_id: int = 7, name: str = "eval") -> data_pb2.ReadRequest:
    return data_pb2.ReadRequest(reader=data_pb2.ReaderNote(id=reader_id, name=name))


def test_a_reader_is_known_by_its_requests() -> None:
    """It waits, is being sent a version, and has it; a request that fails leaves it with the version before."""
    clock = Clock()
    readers = Readers(clock, 4, 16)
    with readers.asked_by(request(), "grpc") as reader:
        assert [(each.id, each.name, each.open_calls, each.version) for each in readers.all()] == [(7, "eval", 1, None)]
        clock.now += 5
        readers.begin_sending(reader)
        assert readers.all()[0].fetching_since == 105
        clock.now += 2
        readers.sent(reader, 1000)
        readers.has(reader, 12)

    (seen,) = readers.all()
    assert (seen.version, seen.got_at, seen.reads, seen.sent_bytes, seen.fetch_s) == (12, 107, 1, 1000, 2)
    assert (seen.open_calls, seen.fetching_since, seen.seen_at) == (0, None, 107)
    with pytest.raises(InvalidRequest), readers.asked_by(request(name="other"), "grpc") as reader:
        readers.begin_sending(reader)
        readers.sent(reader, 10)
        raise InvalidRequest("hung up")
    (seen,) = readers.all()
    assert (seen.name, seen.version, seen.reads, seen.sent_bytes, seen.fetching_since) == ("other", 12, 1, 1010, None)


def test_readers_are_bounded_and_silent_ones_are_forgotten() -> None:
    """One that waits is not silent."""
    clock = Clock()
    readers = Readers(clock, 2, 16)
    with readers.asked_by(request(1), "grpc"):
        with readers.asked_by(request(2), "grpc"):
            pass
        says = r"reader: 2 have asked in the last 600 s already \(the shard's --max-readers\)"
        with pytest.raises(Overloaded, match=says), readers.asked_by(request(3), "grpc"):
            pass
        with readers.asked_by(request(2), "grpc"):
            pass
        clock.now += FORGET_S + 1
        with readers.asked_by(request(3), "grpc"):
            pass
        assert [reader.id for reader in readers.all()] == [1, 3]


def test_a_reader_that_does_not_say_who_it_is_is_not_remembered() -> None:
    """Readers in other languages need not."""
    readers = Readers(Clock(), 1, 16)
    with readers.asked_by(data_pb2.ReadRequest(), "grpc") as reader:
        readers.begin_sending(reader)
        readers.has(reader, 1)
    assert readers.all() == []


@pytest.mark.parametrize(
    ("reader_id", "name", "says"),
    [
        (0, "x", "reader.id: expected 1 to"),
        (2**53, "x", "reader.id: expected 1 to"),
        (1, "x" * 257, "reader.name: expected at most 256 bytes"),
        (1, "a\nb", "reader.name: expected at most 256 bytes, printable"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused(reader_id: int, name: str, says: str) -> None:
    """By its field, and nothing is remembered of it."""
    readers = Readers(Clock(), 1, 16)
    with pytest.raises(InvalidRequest, match=says), readers.asked_by(request(reader_id, name), "grpc"):
        pass
    assert readers.all() == []
