"""What a worker does between a round's decision and its end, call by call, for the tests of verdicts and of skipped rounds."""

from __future__ import annotations

from shard_driver import Driver, job_spec

import psd_core
from psd.v1 import control_pb2, data_pb2, job_pb2


def clipped(world_size=2, clip_norm=1.0, **fields):
    return job_spec(world_size, aggregation="exact", clip_norm=clip_norm, **fields)


def on_shard_1(spec, *, world_size=2, value=0.0, **arguments):
    """A shard that owns block 1, and its workers."""
    driver = Driver(spec, shard=1, shards=2, **arguments)
    seats = [driver.join(rank, session=rank + 1) for rank in range(world_size)]
    for seat in seats:
        driver.declare(seat)
    driver.initialize(seats[0], value)
    return driver, seats


def commit(driver, seat, clock, **fields):
    desk = driver.shard.settlement
    ticket = desk.commit(control_pb2.CommitRequest(caller=seat.caller, clock=clock, **fields))
    return ticket if ticket is not None else desk.commit_reply(seat.caller.rank, clock)


def measure(driver, seat, round_, *, clock=None, decisions=(), under=None):
    """The measure, or what it waits for."""
    return driver.shard.settlement.measure(
        control_pb2.MeasureRequest(
            caller=seat.caller,
            clock=round_ + 1 if clock is None else clock,
            round=round_,
            decisions=decisions,
            verdict=under,
        )
    )


def bring(driver, seat, clock, *, verdict=None, decisions=()):
    """What a pull does that brings a verdict."""
    driver.shard.exchange.begin_pull(
        data_pb2.PullRequest(
            caller=seat.caller, clock=clock, layout_digest=driver.layout.digest, decisions=decisions, verdict=verdict
        )
    )


def decision(round_, *ranks):
    return job_pb2.Decision(round=round_, members=bytes([sum(1 << rank for rank in ranks)]))


def verdict(round_, scale=1.0, **fields):
    return job_pb2.Verdict(round=round_, scale=scale, is_final=True, **fields)


def norm_of(reply):
    return psd_core.square_root(int.from_bytes(reply.measure.squares[0], "little"))


def settle(driver, seat, round_):
    """All that a worker does to close a decided round on a single shard; the verdict."""
    reply = commit(driver, seat, round_, without_waiting=True)
    while not (reply.HasField("verdict") and reply.verdict.is_final):
        under = reply.verdict if reply.HasField("verdict") else None
        measured = measure(driver, seat, round_, under=under)
        reply = commit(driver, seat, round_, without_waiting=True, measures=[measured.measure], verdict=under)
    bring(driver, seat, round_ + 1, verdict=reply.verdict)
    return reply.verdict


def push_all(driver, seats, clock, *values, **header):
    for seat, value in zip(seats, values, strict=True):
        driver.push(seat, clock, value, **header)
    for seat in seats:
        reply = commit(driver, seat, clock)
    return reply
