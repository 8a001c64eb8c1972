"""10,000 wrong requests: each is refused by name, none is a defect, and the shard is bit by bit what it was."""

from __future__ import annotations

import os
import random
import re

import grpc
import pytest
from malformed import mangled_request, wrong_request
from malformed_target import LIMITS, WORLD, Aborted, Target
from raw_client import reason

from psd.contract.errors import reasons
from psd.rim import pace

WRONG, MANGLED, OVER_SOCKETS = (int(os.environ.get("PSD_TEST_REQUESTS", "11000")) * k // 11 for k in (6, 4, 1))
ACCEPTED = {"WaitTimeout", "BarrierTimeout"}  # valid, and would wait for others
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED}


def check_refusal(request, name, code, message, seed):
    """The right status, and the field in the message."""
    where = f"seed {seed}: {request.method}: {code} {name}: {message}"
    assert code.name == reasons()[name].code, where
    assert name in request.reasons, where
    assert re.search("|".join(map(re.escape, request.word.split("|"))), message), where


def outcome(target, request):
    """The error that a request ends in, or None."""
    try:
        target.call(request)
    except Aborted as error:
        return error
    return None


def send(channel, request):
    """A request's bytes through gRPC, whatever they are."""
    match request.method.rpartition("/")[2]:
        case "Push" | "Initialize":
            channel.stream_unary(request.method)(iter(request.messages), timeout=100)
        case "PushPull":
            list(channel.stream_stream(request.method)(iter(request.messages), timeout=100))
        case "Pull" | "Read":
            list(channel.unary_stream(request.method)(request.messages[0], timeout=100))
        case _:
            channel.unary_unary(request.method)(request.messages[0], timeout=100)


def finish(target):
    """Complete the open round by the workers that it lacks; return the values that the job comes to."""
    for rank in range(1, WORLD):
        target.push(rank, 2)
    state = target.shard._core.job.blocks[0]
    return state.version, state._page.parameter.tobytes(), state._page.slots[0].tobytes()


def test_requests_with_a_wrong_field_are_refused_by_its_name():
    """Every field of every request, wrong in every way that has a rule: the rule's status, the field's name in the message, and
    nothing changed; afterwards the round closes on the numbers of a shard that was never bothered."""
    target, undisturbed = Target(), Target()
    before = target.fingerprint()

    for seed in range(WRONG):
        request = wrong_request(random.Random(seed), target)
        with pytest.raises(Aborted) as caught:
            target.call(request)
        check_refusal(request, caught.value.reason, caught.value.code, caught.value.message, seed)
        assert target.fingerprint() == before, f"seed {seed}: {request.method} changed the shard: {caught.value}"

    refused = target.shard._core.counters.requests_refused
    assert refused > 0.75 * WRONG  # fenced sessions and the like are not counted as the caller's error
    assert finish(target) == finish(undisturbed)
    target.close()
    undisturbed.close()


def test_mangled_requests_are_refused_or_valid_and_never_a_defect():
    """Flipped, lost and added bytes: a status of psd's, never INTERNAL; whoever is refused has changed nothing. What is valid
    by chance is treated as such, and counted."""
    target = Target()
    before = target.fingerprint()
    valid = 0

    for seed in range(MANGLED):
        request = mangled_request(random.Random(seed), target)
        error = outcome(target, request)
        where = f"seed {seed}: {request.method}: {error}"
        assert error is None or error.code not in NEVER, where
        # A push whose only frame lost its mark `last` has been counted: blocks are refused one by one.
        if error is not None and error.reason not in ACCEPTED and not error.message.startswith("last:"):
            assert target.fingerprint() == before, where
        elif target.fingerprint() != before:
            valid += 1
            target.close()
            target = Target()
            before = target.fingerprint()

    assert valid < MANGLED / 2
    target.close()


def test_wrong_requests_over_a_real_socket(cluster, dial, monkeypatch):
    """The same wrong requests through gRPC: status, reason and message arrive, and the shard's state stays as it was."""
    monkeypatch.setattr(pace, "BURST", OVER_SOCKETS)
    shard = cluster(2, limits=LIMITS, lease_s=600.0).shards[0]
    target, undisturbed = Target(shard.shard), Target()
    channel = dial(shard.address)
    before = target.fingerprint()

    for seed in range(OVER_SOCKETS):
        request = wrong_request(random.Random(-1 - seed), target)
        with pytest.raises(grpc.RpcError) as caught:
            send(channel, request)
        error = caught.value
        check_refusal(request, reason(error), error.code(), error.details(), -1 - seed)

    assert target.fingerprint() == before
    assert finish(target) == finish(undisturbed)
    undisturbed.close()
