"""Requests that are wrong in one way, or mangled, made from a seed.

`wrong_request` changes one field of a valid request and says which error must name it; `mangled_request` changes bytes, and may
by chance make something valid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from malformed_target import FOREIGN, LAYOUT, LENGTH, ME, SPEC, STATIC, TRAINED, WORLD, Request, Target

from psd.contract.integers import INTEGER_MAX
from psd.v1 import control_pb2, data_pb2, job_pb2


def _data(name: str) -> str:
    return f"/psd.v1.DataService/{name}"


def _control(name: str) -> str:
    return f"/psd.v1.ControlService/{name}"


def good_push(target: Target) -> data_pb2.PushFrame:
    gradient = np.ones(LENGTH, np.float32).tobytes()
    return data_pb2.PushFrame(push=target.header(ME, 2), block=TRAINED, last=True, payload=gradient)


def good_requests(target: Target) -> list[tuple[str, Any]]:
    """One valid request of each kind, as a message."""
    caller = target.callers[ME]
    init = data_pb2.InitializeFrame(
        caller=caller, layout_digest=LAYOUT.digest, choice=target.choice, block=TRAINED, payload=bytes(4 * LENGTH)
    )
    return [
        (_data("Push"), good_push(target)),
        (_data("PushPull"), good_push(target)),
        (_data("PushPullSmall"), data_pb2.SmallPush(frames=[good_push(target)])),
        (_data("Pull"), data_pb2.PullRequest(caller=caller, clock=2, layout_digest=LAYOUT.digest, blocks=[TRAINED, STATIC])),
        (_data("Initialize"), init),
        (_data("StoreBuffers"), data_pb2.BuffersRequest(caller=caller, layout_digest=LAYOUT.digest, clock=2)),
        (_data("Read"), data_pb2.ReadRequest(layout_digest=LAYOUT.digest, cut=data_pb2.Cut(id="c", step=2))),
        (_data("SetParameters"), data_pb2.ParametersRequest(caller=caller, layout_digest=LAYOUT.digest, clock=2, seq=1)),
        (_control("Join"), control_pb2.JoinRequest(shard_count=2, rank=ME, world_size=WORLD, host="h", pid=9)),
        (_control("Describe"), control_pb2.DescribeRequest(shard_count=2)),
        (_control("Commit"), control_pb2.CommitRequest(caller=caller, clock=2)),
        (_control("Measure"), control_pb2.MeasureRequest(caller=caller, clock=2, round=1)),
        (_control("Counted"), control_pb2.CountedRequest(caller=caller, layout_digest=LAYOUT.digest, clock=1)),
        (_control("Rollback"), control_pb2.RollbackRequest(checkpoint="step-0")),
        (_control("Declare"), control_pb2.DeclareRequest(caller=caller, spec=SPEC.to_message())),
        (_control("Heartbeat"), control_pb2.HeartbeatRequest(caller=caller, clock=2)),
        (_control("Leave"), control_pb2.LeaveRequest(caller=caller)),
        (_control("Barrier"), control_pb2.BarrierRequest(caller=caller, name="epoch", seq=1)),
        (
            _control("Barrier"),
            control_pb2.BarrierRequest(
                caller=caller, name="loss", seq=2, numbers=[control_pb2.Number(name="loss", real=0.5)], reduction=1
            ),
        ),
        (_control("Stop"), control_pb2.StopRequest(caller=caller)),
        (_control("Load"), control_pb2.LoadRequest(caller=caller, clock=2, seq=1, digest=bytes(16))),
        (_control("Status"), control_pb2.StatusRequest()),
        (_control("Curves"), control_pb2.CurvesRequest()),
        (
            _control("Log"),
            control_pb2.LogRequest(caller=caller, names=["loss"], series=[0], steps=[2], values=[0.5], ago_s=[0.1]),
        ),
    ]


def wrong_caller(rng: random.Random, caller: job_pb2.Caller) -> tuple[tuple[str, ...], str]:
    """Spoil one field of a caller; returns the reasons and the word."""
    kind = rng.randrange(4)
    if kind == 0:
        caller.run_id = rng.choice(("", "x", caller.run_id + "x", "ü" * rng.randrange(1, 200)))
        return ("ForeignRun",), "run_id"
    if kind == 1:
        caller.incarnation += rng.choice((-1, 1, 1 << 40))
        return ("ShardRestarted",), "incarnation"
    if kind == 2:
        caller.rank = rng.choice((WORLD, WORLD + 1, 1 << 31, (1 << 32) - 1))
        return ("InvalidRequest",), "rank"
    caller.session = rng.choice((0, 1, caller.session - 1, caller.session + 1, (1 << 64) - 1))
    return ("SessionFenced",), "session"


def wrong_decisions(rng: random.Random, decisions: Any) -> tuple[tuple[str, ...], str]:
    if rng.random() < 0.5:
        decisions.add(round=rng.randrange(5), members=rng.choice((b"\x08", b"\xff", b"\0\1", bytes(100) + b"\1")))
        return ("InvalidRequest",), "decisions.members"
    for _ in range(rng.randrange(9, 40)):
        decisions.add(round=2, members=b"\x07")
    return ("InvalidRequest",), "decisions"


def wrong_header(rng: random.Random, push: data_pb2.PushHeader) -> tuple[tuple[str, ...], str]:
    kind = rng.randrange(10)
    if kind == 0:
        return wrong_caller(rng, push.caller)
    if kind == 9:
        push.part = rng.choice((1, 7, (1 << 32) - 1))
        push.answered.extend(rng.choice(((), (0,), ((1 << 32) - 1, 7, 7))))
        return ("PartsDisagree",), "part"
    if kind == 8:
        push.scale = rng.choice((-1.0, 0.0, 0.5, 1.0, float("nan")))
        return ("InvalidRequest",), "scale"
    if kind == 6:
        return wrong_decisions(rng, push.decisions)
    if kind == 7:
        for _ in range(rng.choice((1, 1, 9))):
            push.cuts.add(id=rng.choice(("", "a/b", "x" * 65, "é")), step=rng.choice((0, 3, (1 << 64) - 1)))
        return ("InvalidRequest",), "cuts"
    if kind == 1:
        if rng.random() < 0.3:
            push.since = rng.choice((push.clock + 2, 1 << 40, (1 << 64) - 1))
            return ("InvalidRequest",), "since"
        push.clock = rng.choice((2 + 1025, 5000, 1 << 40, (1 << 64) - 1))
        return ("InvalidRequest",), "clock"
    if kind == 2:
        push.weight = rng.choice((-1.0, float("nan"), float("inf"), -float("inf"), 1e-12, 1e16, 5e-324, 1e308))
        return ("InvalidRequest",), "weight"
    if kind == 3:
        push.layout_digest = rng.choice((b"", b"x", LAYOUT.digest[:-1], LAYOUT.digest + b"\0", rng.randbytes(16)))
        return ("LayoutMismatch",), "layout_digest"
    if kind == 4:
        if rng.random() < 0.5:
            del push.scalars[rng.randrange(3)]
        else:
            push.scalars.add()
        return ("InvalidRequest",), "scalars"
    values = push.scalars[0].values
    if rng.random() < 0.3:
        values[rng.choice((0, 3))] = 0.25
        return ("ScalarsDisagree",), "scalars[0]"
    if rng.random() < 0.3:
        values.append(1.0)
    else:
        values[rng.randrange(4)] = rng.choice((float("nan"), float("inf"), -float("inf"), 1e39))
    return ("InvalidRequest",), "scalars[0]"


def wrong_block(rng: random.Random, frame: Any) -> tuple[tuple[str, ...], str]:
    """Spoil a frame's block or numbers."""
    kind = rng.randrange(5)
    payload = np.frombuffer(frame.payload, np.float32).copy()
    if kind == 0:
        frame.block = rng.choice((FOREIGN, 3, 4, 1 << 20, (1 << 32) - 1))
        return ("BlockOutOfRange",), "block"
    if kind in (1, 2):
        payload[rng.randrange(LENGTH)] = rng.choice((np.nan, np.inf, -np.inf))
        frame.payload = payload.tobytes()
        return ("NonFiniteGradient",), "payload"
    if kind == 3:
        size = rng.choice((0, 1, 4, 4 * LENGTH - 1, 4 * LENGTH + 1, 4 * LENGTH + 4, 8 * LENGTH, 10_000))
        frame.payload = rng.randbytes(size)
        return ("InvalidTensor",), "payload"
    frame.payload = frame.payload[: rng.randrange(4 * LENGTH)]
    return ("InvalidTensor",), "payload"


def wrong_push(rng: random.Random, target: Target) -> Request:
    frame = good_push(target)
    method = _data(rng.choice(("Push", "PushPull", "PushPullSmall")))
    frames = [frame]
    kind = rng.randrange(10)
    if kind < 4:
        reasons, word = wrong_header(rng, frame.push)
    elif kind < 7:
        reasons, word = wrong_block(rng, frame)
    elif kind == 7:
        reasons, word = ("InvalidRequest",), "present"
        frame.present = rng.randbytes(rng.choice((2, 3, 100)))
    elif kind == 8:
        frame.present = rng.choice((b"\x00", b"\x01", b"\x02"))
        reasons, word = ("InvalidTensor",), "payload"
    else:
        how = rng.randrange(4)
        reasons, word = ("InvalidRequest",), ("push", "block", "block", "push")[how]
        if how == 0:
            frame.ClearField("push")
        elif how == 1:
            frame.ClearField("block")
        elif how == 2:
            frame.block = STATIC
            frame.payload = bytes(12)
        else:
            frames = [data_pb2.PushFrame(push=frame.push), frame]
    messages = [data_pb2.SmallPush(frames=frames)] if method.endswith("Small") else frames
    return Request(method, [m.SerializeToString() for m in messages], reasons, word)


def wrong_pull(rng: random.Random, target: Target) -> Request:
    pull = data_pb2.PullRequest(caller=target.callers[ME], clock=2, layout_digest=LAYOUT.digest, blocks=[TRAINED])
    kind = rng.randrange(6)
    if kind == 0:
        reasons, word = wrong_caller(rng, pull.caller)
    elif kind == 5:
        pull.verdict.CopyFrom(job_pb2.Verdict(round=rng.randrange(4), scale=rng.random(), is_final=rng.random() < 0.5))
        reasons, word = ("InvalidRequest",), "verdict"
    elif kind == 1:
        pull.clock = rng.choice((2 + 1025, 1 << 30, (1 << 64) - 1))
        reasons, word = ("InvalidRequest",), "clock"
    elif kind == 2:
        pull.layout_digest = rng.choice((b"", rng.randbytes(16), rng.randbytes(40)))
        reasons, word = ("LayoutMismatch",), "layout_digest"
    elif kind == 3:
        reasons, word = wrong_decisions(rng, pull.decisions)
    elif rng.random() < 0.5:
        pull.blocks[:] = [rng.choice((FOREIGN, 3, (1 << 32) - 1))]
        reasons, word = ("BlockOutOfRange",), "block"
    elif rng.random() < 0.5:
        pull.slot = rng.choice((9, 1 << 31, (1 << 32) - 1))
        reasons, word = ("InvalidRequest",), "slot"
    else:
        pull.blocks[:] = [TRAINED] * rng.randrange(3, 50)
        reasons, word = ("InvalidRequest",), "blocks"
    return Request(_data("Pull"), [pull.SerializeToString()], reasons, word)


def wrong_read(rng: random.Random, target: Target) -> Request:
    read = data_pb2.ReadRequest(layout_digest=LAYOUT.digest, cut=data_pb2.Cut(id="c", step=2))
    kind = rng.randrange(6)
    if kind == 4:
        read.blocks[:] = [STATIC, TRAINED, STATIC]
        reasons, word = ("InvalidRequest",), "blocks"
    elif kind == 5:
        read.blocks[:] = [TRAINED, rng.choice((FOREIGN, 3, (1 << 32) - 1))]
        reasons, word = ("BlockOutOfRange",), "block"
    elif kind == 0:
        read.run_id = rng.choice(("x", "ü" * 200))
        reasons, word = ("ForeignRun",), "run_id"
    elif kind == 1:
        read.layout_digest = rng.choice((b"", rng.randbytes(16), rng.randbytes(40)))
        reasons, word = ("LayoutMismatch",), "layout_digest"
    elif kind == 2:
        read.cut.id = rng.choice(("", "a/b", "x" * 65))
        reasons, word = ("InvalidRequest",), "cuts.id|cut.id"
    else:
        read.cut.step = rng.randrange(2)
        reasons, word = ("CutMissed",), "cut.step"
    return Request(_data("Read"), [read.SerializeToString()], reasons, word)


def wrong_initialize(rng: random.Random, target: Target) -> Request:
    frame = data_pb2.InitializeFrame(
        caller=target.callers[ME],
        layout_digest=LAYOUT.digest,
        choice=target.choice,
        block=TRAINED,
        payload=np.ones(LENGTH, np.float32).tobytes(),
    )
    frames = [frame]
    kind = rng.randrange(5)
    if kind == 0:
        reasons, word = wrong_caller(rng, frame.caller)
    elif kind == 1:
        frame.layout_digest = rng.randbytes(rng.choice((0, 15, 16)))
        reasons, word = ("LayoutMismatch",), "layout_digest"
    elif kind == 2:
        reasons, word = wrong_block(rng, frame)
    elif kind == 3:
        frame.ClearField("block")
        reasons, word = ("InvalidRequest",), "block"
    else:
        frames = rng.choice(([], [frame, frame], [data_pb2.InitializeFrame(block=TRAINED, payload=frame.payload)]))
        reasons, word = ("InvalidRequest",), "caller"
    return Request(_data("Initialize"), [f.SerializeToString() for f in frames], reasons, word)


def wrong_store(rng: random.Random, target: Target) -> Request:
    """Of buffers, or of parameters."""
    sets = rng.random() < 0.5
    kind_of = data_pb2.ParametersRequest if sets else data_pb2.BuffersRequest
    request: Any = kind_of(caller=target.callers[ME], layout_digest=LAYOUT.digest, clock=2)
    kind = rng.randrange(4)
    if kind == 0:
        reasons, word = wrong_caller(rng, request.caller)
    elif kind == 1:
        request.layout_digest = rng.randbytes(rng.choice((0, 15, 16)))
        reasons, word = ("LayoutMismatch",), "layout_digest"
    elif kind == 2:
        request.clock = rng.choice((1100, 1 << 63))
        reasons, word = ("InvalidRequest",), "clock"
    elif not sets:
        request.buffers.add(block=rng.choice((TRAINED, STATIC)), payload=bytes(4 * LENGTH))
        reasons, word = ("InvalidRequest",), "buffers"
    elif rng.random() < 0.3:
        reasons, word = ("InvalidRequest",), "seq"
    elif rng.random() < 0.4:
        request.seq = 1
        wrong = rng.choice(({"slot": 9}, {"slot": (1 << 32) - 1}, {"steps": [0]}, {"steps": [1 << 63] * 1000}))
        request.parameters.add(block=TRAINED, payload=bytes(4 * LENGTH), **wrong)
        reasons, word = ("InvalidRequest",), "slot" if "slot" in wrong else "steps"
    else:
        request.seq = 1
        request.parameters.add(block=TRAINED, payload=rng.choice((b"", bytes(4), bytes(4 * LENGTH + 1))))
        reasons, word = ("InvalidTensor",), "block"
    return Request(_data("SetParameters" if sets else "StoreBuffers"), [request.SerializeToString()], reasons, word)


def wrong_join(rng: random.Random, target: Target) -> Request:
    join = control_pb2.JoinRequest(shard_count=2, rank=ME, world_size=WORLD, host="h")
    field, value, reasons, word = rng.choice(
        (
            ("run_id", "other", ("ForeignRun",), "run_id"),
            ("run_id", "r" * 129, ("InvalidRequest",), "run_id"),
            ("shard_index", rng.choice((1, 2, 1 << 31)), ("WrongShard",), "shard 0/2"),
            ("shard_count", rng.choice((0, 1, 3, 1 << 31)), ("WrongShard",), "shard 0/2"),
            ("rank", rng.choice((WORLD, 1 << 31)), ("InvalidRequest",), "rank"),
            ("world_size", rng.choice((0, 9, 1 << 31)), ("InvalidRequest",), "world_size"),
            ("world_size", rng.choice((2, 4, 8)), ("SpecMismatch",), "world_size"),
            ("session", rng.choice((1, 1 << 63, (1 << 64) - 1)), ("InvalidRequest",), "session"),
            ("host", "h" * rng.randrange(257, 5000), ("InvalidRequest",), "host"),
            ("resume", True, ("InvalidRequest",), "session"),
        )
    )
    setattr(join, field, value)
    if rng.random() < 0.1:
        join = control_pb2.JoinRequest(
            shard_count=2, rank=ME, world_size=WORLD, session=target.callers[ME].session, resume=True
        )
        if rng.random() < 0.5:
            join.timeline, reasons, word = rng.choice((1, 1 << 63)), ("RolledBack",), "checkpoint"
        else:
            join.session = rng.choice((1, join.session - 1, join.session + 1, (1 << 64) - 1))
            reasons, word = ("SessionFenced",), "session"
    return Request(_control("Join"), [join.SerializeToString()], reasons, word)


def wrong_declare(rng: random.Random, target: Target) -> Request:
    request = control_pb2.DeclareRequest(caller=target.callers[ME], spec=SPEC.to_message())
    spec = request.spec
    if rng.random() < 0.2:
        reasons, word = wrong_caller(rng, request.caller)
        return Request(_control("Declare"), [request.SerializeToString()], reasons, word)
    tensor, group = spec.tensors[rng.randrange(4)], spec.groups[0]
    changes: Sequence[tuple[Callable[[], Any], str, str]] = (
        (
            lambda: setattr(spec, "world_size", rng.choice((0, 2, 9, 1 << 31))),
            "InvalidRequest SpecMismatch",
            "world_size|quorum",
        ),
        (lambda: setattr(spec, "quorum", rng.choice((1, 2))), "SpecMismatch", "quorum"),
        (lambda: setattr(spec, "quorum", rng.choice((4, 1 << 31))), "InvalidRequest", "quorum"),
        (lambda: setattr(spec, "mode", rng.choice((0, 7, -1))), "InvalidRequest", "mode"),
        (lambda: setattr(spec, "mode", rng.choice((2, 3))), "InvalidRequest SpecMismatch", "consistency|quorum"),
        (lambda: setattr(spec, "staleness_bound", rng.choice((1, 1 << 31))), "InvalidRequest", "staleness_bound"),
        (lambda: setattr(spec, "reduction", rng.choice((0, 9))), "InvalidRequest", "reduction"),
        (lambda: setattr(spec, "reduction", 2), "SpecMismatch", "reduce:"),
        (lambda: setattr(spec, "clip_norm", rng.choice((-1.0, math.nan, math.inf, 1.0))), "InvalidRequest", "clip_norm"),
        (lambda: setattr(spec, "nan_policy", rng.choice((2, 9))), "InvalidRequest", "nan_policy"),
        (lambda: setattr(spec, "nan_policy", 3), "SpecMismatch", "nan_policy"),
        (lambda: spec.groups.extend([group] * 1100), "InvalidRequest", "groups"),
        (lambda: spec.ClearField("groups"), "InvalidRequest", "groups"),
        (lambda: spec.groups.add(rule="sgd"), "SpecMismatch", "groups"),
        (lambda: setattr(group, "rule", rng.choice(("", "adamw", "x" * 9000))), "InvalidRequest", "groups.rule"),
        (lambda: group.flags.extend(["momentum"]), "InvalidRequest", "groups.flags"),
        (lambda: group.constants.extend([rng.choice((0.0, -1.0, math.nan))]), "InvalidRequest", "groups.constants"),
        (lambda: group.flags.extend([rng.choice(("nestero", "z" * 4000, "ü"))]), "InvalidRequest", "groups.flags"),
        (lambda: group.flags.extend(["nesterov"]), "SpecMismatch", "nesterov of parameter group 0"),
        (lambda: setattr(tensor, "name", rng.choice(("", "n" * 257, "ß" * 200))), "InvalidTensor", "name"),
        (lambda: setattr(tensor, "name", "fresh"), "SpecMismatch", "parameter"),
        (lambda: tensor.shape.extend([2]), "SpecMismatch", "parameter"),
        (lambda: tensor.shape.extend([1] * 100), "InvalidTensor", "shape"),
        (lambda: tensor.shape.extend([1 << 60, 1 << 60]), "InvalidTensor", "elements"),
        (lambda: setattr(tensor, "dtype", rng.choice((0, 5, 1000))), "InvalidTensor", "dtype"),
        (lambda: setattr(tensor, "group", rng.choice((3, 1 << 31))), "InvalidTensor", "group"),
        (lambda: spec.tensors.extend([spec.tensors[0]]), "InvalidTensor", "twice"),
        (lambda: spec.ClearField("tensors"), "InvalidTensor", "tensors"),
        (
            lambda: spec.tensors.extend([job_pb2.TensorSpec(name=f"n{i}", dtype=1) for i in range(60)]),
            "InvalidTensor",
            "--max-tensors",
        ),
    )
    change, reasons, word = rng.choice(changes)
    change()
    return Request(_control("Declare"), [request.SerializeToString()], tuple(reasons.split()), word)


def wrong_control(rng: random.Random, target: Target) -> Request:
    caller = target.callers[ME]
    kind = rng.randrange(11)
    request: Any
    if kind == 10:
        number = control_pb2.Number(name=rng.choice(("", "n" * 257)), real=1.0)
        numbers, reduction, word = rng.choice((([number], 1, "name"), ([], 1, "numbers"), ([number] * 300, 2, "numbers")))
        request = control_pb2.BarrierRequest(caller=caller, name="b", seq=1, numbers=numbers, reduction=reduction)
        name, reasons = "Barrier", ("InvalidRequest",)
    elif kind == 8:
        name, request = "Measure", control_pb2.MeasureRequest(caller=caller, clock=2, round=rng.choice((0, 2, 1 << 63)))
        reasons, word = ("InvalidRequest",), "round"
    elif kind == 9:
        request = control_pb2.LogRequest(caller=caller, series=[rng.choice((0, 7))], names=rng.choice(([], [""], ["a"] * 65)))
        name, reasons, word = "Log", ("InvalidRequest",), ""
    elif kind == 5:
        name, request = "Commit", control_pb2.CommitRequest(caller=caller, clock=rng.choice((0, 2, 1 << 63)))
        reasons, word = ("InvalidRequest",), "clock"
    elif kind == 6:
        name, request = "Describe", control_pb2.DescribeRequest(shard_count=rng.choice((0, 1, 3)))
        reasons, word = ("WrongShard",), "shard 0/2"
    elif kind == 7:
        request = control_pb2.RollbackRequest(checkpoint="none", incarnation=caller.incarnation)
        name, request.timeline = "Rollback", rng.choice((1, INTEGER_MAX, (1 << 64) - 1))
        reasons, word = ("CheckpointFailed",), "checkpoint"
        if request.timeline > INTEGER_MAX:
            reasons, word = ("InvalidRequest",), "timeline"
    elif kind == 0:
        name, request = "Barrier", control_pb2.BarrierRequest(caller=caller, seq=1, name=rng.choice(("", "b" * 257)))
        reasons, word = ("InvalidRequest",), "name"
    elif kind == 1:
        name, request = "Barrier", control_pb2.BarrierRequest(caller=caller, name="b")
        reasons, word = ("InvalidRequest",), "seq"
    elif kind == 2:
        name, request = "Heartbeat", control_pb2.HeartbeatRequest(caller=caller, clock=rng.choice((1100, 1 << 63)))
        reasons, word = ("InvalidRequest",), "clock"
    else:
        name = rng.choice(("Barrier", "Heartbeat"))
        request = (
            control_pb2.BarrierRequest(caller=caller, name="b", seq=1)
            if name == "Barrier"
            else control_pb2.HeartbeatRequest(caller=caller, clock=2)
        )
        reasons, word = wrong_caller(rng, request.caller)
    return Request(_control(name), [request.SerializeToString()], reasons, word)


KINDS = (
    wrong_push,
    wrong_push,
    wrong_push,
    wrong_pull,
    wrong_read,
    wrong_initialize,
    wrong_store,
    wrong_join,
    wrong_declare,
    wrong_control,
)


def wrong_request(rng: random.Random, target: Target) -> Request:
    """A request with one wrong field."""
    return rng.choice(KINDS)(rng, target)


def mangled_request(rng: random.Random, target: Target) -> Request:
    """A valid request with changed, missing or added bytes."""
    method, message = rng.choice(good_requests(target))
    data = bytearray(message.SerializeToString())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind, at = rng.randrange(6), rng.randrange(len(data) + 1)
        if kind <= 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
        elif kind == 4:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = data[max(0, at - rng.randrange(1, 60)) : at]
    if rng.random() < 0.02:
        data = bytearray(rng.randbytes(rng.randrange(300)))
    if rng.random() < 0.02:
        data = bytearray(b"\x7a\x00") * rng.randrange(1, 3000)  # many empty payloads
    return Request(method, [bytes(data)])
