"""Traces for people: what happened, event by event, and the actions as text that can be stored and played again."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from residuals import gradients_sent
from setting import counts_in
from wire import Outcome, Request
from world import Action, State, World

from psd.contract.wire import Kind
from psd.v1 import control_pb2, data_pb2

_MESSAGES: dict[str, Any] = {
    "join": control_pb2.JoinRequest,
    "declare": control_pb2.DeclareRequest,
    "commit": control_pb2.CommitRequest,
    "measure": control_pb2.MeasureRequest,
    "barrier": control_pb2.BarrierRequest,
    "stop": control_pb2.StopRequest,
    "heartbeat": control_pb2.HeartbeatRequest,
    "leave": control_pb2.LeaveRequest,
    "rollback": control_pb2.RollbackRequest,
    "push": data_pb2.PushHeader,
    "push_pull": data_pb2.PushHeader,
    "pull": data_pb2.PullRequest,
    "initialize": data_pb2.InitializeFrame,
}
_HOW = {
    "lose": "; the connection breaks before the answer",
    "late": "; the connection breaks, and the request is still under way",
    "cut": "; the connection breaks in the middle, after {} block(s)",
    "pause": "; its thread has to wait before its lock {}",
    "timeout": "; its deadline passes",
    "unarmed": "; it offers no steps",
    "crash": "; the shard is killed at its crash point {}, and restarted",
}


_AGAIN = struct.pack("<I", Kind.AGAIN)


def dump(actions: Iterable[Action]) -> str:
    """Actions as text, one a line."""
    return "\n".join(repr(action) for action in actions)


def load(text: str) -> list[Action]:
    """What `dump` has written."""
    return [ast.literal_eval(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def play(world: World, actions: Sequence[Action]) -> Iterator[tuple[Action, State, Any]]:
    """Take the actions one after the other; each with the state before it and its result."""
    state = world.initial()
    for action in actions:
        result = world.take(state, action)
        yield action, state, result
        state = result.state


def story(world: World, actions: Sequence[Action], *, from_step: int = 0) -> Iterator[str]:
    """Lines that tell what the actions do."""
    for number, (action, state, result) in enumerate(play(world, actions)):
        if number < from_step:
            continue
        yield f"{number:3} {tell(world, state, action, result)}"
        for text in result.texts:
            yield f"        {text}"
        for before, after in zip(state.shards, result.state.shards, strict=True):
            for (block, updates), (_, were) in zip(after.view.history, before.view.history or after.view.history, strict=False):
                if updates != were:
                    yield f"        block {block} is now made of {' | '.join(str(list(update)) for update in updates)}"
        for text in result.wrong:
            yield f"        WRONG: {text}"


_OF_SHARDS = {
    "kill": "is killed and restarted",
    "outage": "is killed, and stays away",
    "restart": "is restarted",
    "blank": "is killed, and restarted without what it held",
    "announce": "announces a cut",
    "read": "is called by a reader",
    "overdue": "gives up the cuts for which it holds pushes",
    "grace": "waits no longer for more than the quorum",
    "tick": "looks after what it has lost",
    "suspend": "is suspended for two leases",
}
_OF_WORKERS = {
    "start": "is started",
    "die": "dies; it is started again",
    "stall": "does nothing from here on",
    "wake": "goes on",
}


def tell(world: World, state: State, action: Action, result: Any) -> str:
    """One action in words."""
    match action:
        case ("+late", inner):
            return tell(world, state, inner, result) + "; what it gives up is still under way"
        case ("deliver", process, slot, *variant):
            number = dict(state.workers[process].view.calls)[slot]
            how = _HOW[variant[0]].format(*variant[1:]) if variant else ""
            asked = f"{_name(world, process)} -> shard {slot[0]}: {_request(world.requests[number])}{how}"
            return f"{asked}{_answer(world, state, action)}"
        case ("go", shard, (process, _), *variant):
            lost = "; the connection breaks before that" if variant == ["lose"] else "; it offers no steps" if variant else ""
            return f"shard {shard} answers {_name(world, process)}{lost}{_answer(world, state, action)}"
        case ("long", shard, (process, _)):
            return f"shard {shard} answers {_name(world, process)} again: its step has waited"
        case ("revoke", shard, rank):
            return f"shard {shard} takes no more steps of worker {rank}"
        case ("late", shard, number):
            return f"late -> shard {shard}: {_request(world.requests[number])}"
        case ("expire", shard, rank):
            return f"shard {shard}: the lease of worker {rank} runs out"
        case ("beat", process, shard):
            number = state.workers[process].view.beats[shard]
            return f"{_name(world, process)} -> shard {shard}: {_request(world.requests[number])}"
        case (str(what), int(shard)) if what in _OF_SHARDS:
            return f"shard {shard} {_OF_SHARDS[what]}"
        case (str(what), int(process)) if what in _OF_WORKERS:
            return f"{_name(world, process)} {_OF_WORKERS[what]}"
        case ("choose", process, choice):
            return f"{_name(world, process)} decides: {state.workers[process].view.options[choice]}"
        case ("slept", process, _):
            return f"{_name(world, process)} has slept"
        case ("away", process, slot):
            return f"{_name(world, process)} has tried shard {slot[0]} for as long as it does"
    return repr(action)


def _name(world: World, process: int) -> str:
    is_successor = process >= len(world.setting.programs)
    return f"worker {world.ranks[process]}{chr(39) if is_successor else ''}" if process < len(world.ranks) else "nobody"


def _answer(world: World, state: State, action: Action) -> str:
    """What the shard says, as far as the worker hears it."""
    if action[0] == "deliver" and len(action) == 3:
        _, process, (shard, thread) = action
        number = dict(state.workers[process].view.calls)[shard, thread]
        _, told = world.shards[shard].step(state.shards[shard], ("call", (process, thread), number, None))
    elif action[0] == "go" and len(action) == 3:
        _, shard, key = action
        _, told = world.shards[shard].step(state.shards[shard], ("go", key))
    else:
        return ""
    if not told.replies:
        return " ... waits"
    outcome: Outcome = world.outcomes[told.replies[0][1]]
    if outcome.reason:
        return f" = {outcome.reason} {outcome.detail if outcome.detail != '{}' else ''}".rstrip()
    offer = ", and offers steps" if outcome.offer else ""
    if outcome.body[:4] == _AGAIN:
        return " = again"
    return f" = versions {dict(outcome.versions)}{offer}" if outcome.versions else " = done"


def _gradients(payload: bytes) -> Iterable[int]:
    return counts_in(struct.unpack("<d", payload)[0]) if len(payload) == 8 else gradients_sent(payload)


def _step(message: bytes) -> str:
    _, head_bytes, _, epoch, session, clock = struct.unpack_from("<IIQQQQ", message)
    (value,) = struct.unpack_from("<d", message, 16 + head_bytes)
    gradients = ", ".join(map(str, counts_in(value)))
    return f"step gradient {gradients} clock {clock} (session {session}, epoch {epoch % 256} of {epoch >> 8})"


def _request(request: Request) -> str:
    if request.kind == "step":
        return _step(request.body)
    message = _MESSAGES[request.kind].FromString(request.body)
    words = [request.kind]
    if request.kind in ("push", "push_pull"):
        numbers = [payload for _, head, payload in request.blocks if payload and not data_pb2.PushFrame.FromString(head).rows]
        found = {g for payload in numbers for g in _gradients(payload)}
        words.append(f"gradient {', '.join(map(str, sorted(found)))}")
    fields = message.DESCRIPTOR.fields_by_name
    words += [f"{name} {getattr(message, name)}" for name in ("clock", "round") if name in fields and request.kind != "leave"]
    flags = ("resume", "only_wait", "without_waiting", "versions_only", "leaving", "failed")
    words += [name for name in flags if name in fields and getattr(message, name)]
    caller = message.caller if "caller" in message.DESCRIPTOR.fields_by_name else message
    own = getattr(message, "session", 0) if "session" in message.DESCRIPTOR.fields_by_name else 0
    session = getattr(caller, "session", 0)
    words.append(f"(session {session}{f', pushed as {own}' if own and own != session else ''})")
    return " ".join(words)
