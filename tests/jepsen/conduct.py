"""What must hold of the processes themselves: which errors they meet, how long they take, what they say, how they end.

A call may take as long as something is wrong, and some seconds more; everything has more time on a busy machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from counting import Failure
from history import Call, Gradient, Histories, Life
from launched import GONE_S, SIGNALS
from plan import DAMAGE, LINKS
from row_cells import SOON

SAYS_S = 6.0
"""After which a worker has said whom it waits for, and within which Ctrl-C ends it."""

AFTERWARDS_S = 3.0
NOTICED_S = 20.0
"""After which a peer that has vanished has been noticed."""

UNEXPLAINED_S = 8.0

NAMES_SOMEBODY = re.compile(r"shard \d+|worker \d+")
_ALLOWED_ERROR = r"(.*checkpoint|round \d+ cannot|the parameters stay in)"
DEFECT = re.compile(rf"Traceback|Exception ignored|Fatal Python error|CRITICAL|ERROR(?! {_ALLOWED_ERROR})")
_PREFIX = re.compile(r"^psd: worker \d+: ")

EXPIRED = "fallen silent"
"""What shards' logs say of a worker that they have given up."""

BUSY = 4.0
"""On a machine that is so much slower than an idle one, heartbeats may come too late for a short lease."""

PARTED = ("RuntimeError", "DistBackendError", "DistNetworkError")
"""What collective calls of torch.distributed raise when a rank has gone."""

PASSING = ("WaitTimeout", "BarrierTimeout", "ShardUnavailable", "Draining", "Overloaded")
"""What any call may raise while something is wrong."""


def check_conduct(histories: Histories) -> list[Failure]:
    """Everything but the numbers."""
    failures = [Failure("stuck", f"{name} did not end in time") for name in histories.outcome.stuck]
    faults = list(_fault_windows(histories))
    for life in histories.lives:
        windows = faults + [_missed(histories, other) for other in histories.lives if other is not life and _fails(other)]
        failures += _errors(histories, life, windows)
        failures += _end(histories, life)
        failures += _times(histories, life, windows)
        failures += _seen(histories, life)
    has_last = histories.plan.ends_dead or histories.plan.is_launched or histories.outcome.final is not None
    if not has_last and not histories.outcome.stuck and not _may_be_lost(histories):
        failures.append(Failure("no end", "a healthy worker that came last could not finish"))
    failures += _shards(histories)
    failures += _damage(histories)
    failures += _launches(histories)
    return failures


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors(histories: Histories, life: Life, windows: Sequence[tuple[float, float]]) -> Iterator[Failure]:
    for call in life.calls:
        if call.result in ("", "ok") or (call.result == "KeyboardInterrupt" and life.is_interrupted):
            continue
        if _is_parted(histories, life, call):
            continue
        if not call.is_psd:
            yield Failure(f"builtin {call.result}", f"{life.name}, {call.op}: {call.text}\n{call.trace}")
        elif not _may_raise(histories, life, call, windows):
            yield Failure(f"unexpected {call.result}", f"{life.name}, {call.op} at {call.begun:.2f}: {call.text}")


def _is_parted(histories: Histories, life: Life, call: Call) -> bool:
    """Another rank of the same learner has gone, so that collective calls fail; or was interrupted, and has said so."""
    mates = histories.mates(life)
    latest = call.ended + AFTERWARDS_S + histories.outcome.slack_s
    has_failed = any(_fails(other) and (other.how_at or other.ended) <= latest for other in mates)
    return has_failed and (call.result in PARTED or any(other.is_interrupted for other in mates))


def _may_raise(histories: Histories, life: Life, call: Call, windows: Sequence[tuple[float, float]]) -> bool:
    plan = histories.plan
    match call.result:
        case "SessionFenced":
            return life.superseded is not None
        case "RolledBack":
            return plan.checkpoint_steps > 0 and (bool(histories.losses) or _is_double_fault(histories))
        case "StateLost":
            return _may_be_lost(histories)
        case "OutOfSpace":
            return plan.small_disk and bool(histories.faults("disk-full"))
        case "ConfigError":
            return plan.lane == "tcp" and _overlap(call.begun, call.ended, windows) > 0
        case "WaitTimeout" | "BarrierTimeout":
            return call.ended - call.begun >= 0.9 * plan.wait_s
        case "ShardUnavailable" | "Draining" | "Overloaded":
            return _overlap(call.begun - plan.retry_s, call.ended, windows) > 0
    return False


def _is_double_fault(histories: Histories) -> bool:
    """Exact aggregation: a worker may have gone that had committed, and a shard died that had its gradient."""
    killed = histories.faults("shard-kill", "shard-terminate", "shard-lose", DAMAGE, "run-kill")
    has_gone = any(map(_fails, histories.lives)) or any(EXPIRED in log for log in histories.shard_logs)
    return histories.plan.is_exact and bool(killed) and has_gone


def _may_be_lost(histories: Histories) -> bool:
    return not histories.outcome.has_checkpoint and _is_double_fault(histories)


# -- ends --------------------------------------------------------------------------------------------------------------


def _end(histories: Histories, life: Life) -> Iterator[Failure]:
    slack_s = histories.outcome.slack_s
    if life.signalled == "SIGINT":
        took = life.ended - life.signalled_at
        patience = slack_s if histories.plan.learning is None else 10 * slack_s  # as in _end_s
        if took > SAYS_S + patience:
            yield Failure("Ctrl-C", f"{life.name} ended {took:.1f} s after it")
    elif life.how and not life.signalled and life.ended - life.how_at > _end_s(histories, life) + slack_s:
        yield Failure("slow end", f"{life.name} took {life.ended - life.how_at:.1f} s to end ({life.how})")
    elif not life.how and not life.signalled:
        said = f"{life.name} ended with status {life.status}, without a word; its log ends: {life.log[-2000:]}"
        yield Failure("ended by itself", said)
    if life.has_ended_in_order and not life.signalled and life.status != 0:
        yield Failure("exit status", f"{life.name} ended in order ({life.how}), with status {life.status}")
    for words in ("Exception ignored", "Exception in thread", "Fatal Python error", "Traceback"):
        is_told = words == "Traceback" and not life.has_ended_in_order
        if words in life.log and not is_told and life.signalled != "SIGINT":
            yield Failure("traceback of a worker", f"{life.name}: {life.log[life.log.index(words) :][:3000]}")
            break


def _end_s(histories: Histories, life: Life) -> float:
    """How long a process may take to end after its program has; one that has torch has much to let go of."""
    if histories.plan.learning is not None:
        return UNEXPLAINED_S + 10 * histories.outcome.slack_s
    return UNEXPLAINED_S + SAYS_S if life.how == "fall" else SAYS_S  # it may wait for the round of its last push


def _is_fault_of_shards_alone(histories: Histories) -> bool:
    """Every worker was there all the time, and could be heard."""
    kinds = {record["fault"]["kind"] for record in histories.of("begin")}
    return kinds <= {"shard-kill", "shard-stop", "shard-terminate", DAMAGE, "disk-full"} and not any(
        map(_fails, histories.lives)
    )


def _statuses(histories: Histories, exit_: dict[str, Any]) -> set[int]:
    """With which a shard may end: 143 if it was told twice, -15 if its program had not begun then; 74, without a last
    checkpoint, if the others went on, or a round cannot be completed any more; 65 if what is in it is lost."""
    own = [record for record in histories.timeline if record.get("name") == exit_["name"] and record["t"] <= exit_["t"]]
    life = own[max(i for i, record in enumerate(own) if record["what"] == "start") :]
    told = [record for record in life if record.get("signal") == "SIGTERM"]
    was_ready = any(record["what"] == "ready" and record["t"] <= told[0]["t"] for record in life if told)
    ends_alone = histories.plan.checkpoint_steps and (histories.faults("shard-terminate", DAMAGE) or _may_be_lost(histories))
    leaves_open = _ends_in_open_round if histories.plan.is_exact else _ends_in_mid_push
    ends_alone = ends_alone or (histories.plan.ends_dead and any(map(leaves_open, histories.lives)))
    is_damaged = any(record["what"] in ("damage", "repair") for record in own)
    return (
        {0, -9}
        | ({1} if is_damaged and not was_ready else set())
        | ({143} if len(told) > 1 else set())
        | ({-15} if told and not was_ready else set())
        | ({74} if ends_alone else set())
        | ({65} if _may_be_lost(histories) else set())
    )


def _ends_in_mid_push(life: Life) -> bool:
    """It was killed, or hung, in a push, or gave it up."""
    return bool(life.calls) and life.calls[-1].pushes and not life.calls[-1].is_ok


def _ends_in_open_round(life: Life) -> bool:
    """It ended in a push, or after one whose round it has not waited for: shard 0 alone knows what that round consists of."""
    return _ends_in_mid_push(life) or (bool(life.calls) and life.calls[-1].op == "push")


def _damage(histories: Histories) -> Iterator[Failure]:
    """What was changed is named, whether the shard starts then or not; unless it is killed before it has looked."""
    for record in histories.of("damage"):
        since = [x for x in histories.timeline if x.get("name") == record["name"] and x["t"] >= record["t"]]
        told = (x.get("signal", x["what"]) for x in since)
        if next((what for what in told if what in ("SIGKILL", "ready", "exit")), "") == "SIGKILL":
            continue
        if f"{record['file']}: " not in histories.shard_logs[int(record["name"].split()[1])]:
            yield Failure("damage not found", f"{record['name']}: byte {record['at']} of {record['file']} was changed")


def _launches(histories: Histories) -> Iterator[Failure]:
    """What psd-run has come to, each time."""
    for number, record in enumerate(histories.of("launch")):
        kind, status = record["kind"], record["status"]
        text = f"psd-run {number} ({kind or 'till the end'}) ended with status {status} in {record['took']:.1f} s"
        expected = {0} if not kind else {-9} if kind == "run-kill" else {128 + SIGNALS[kind], 74}
        if _has_second(histories, number):
            expected.add(-SIGNALS.get(kind, 0))  # it may meet a psd-run whose job has just ended, and ends the process itself
        if status not in expected:
            yield Failure("exit status of psd-run", text)
        if record["left"]:
            yield Failure("left behind", f"{text}; processes {record['left']} are there {GONE_S:g} s later")
        if status in (0, 128 + SIGNALS.get(kind, 0)) and not record["has_stored"] and not _has_second(histories, number):
            yield Failure("no last checkpoint", text)
        said = (histories.outcome.directory / f"psd-run-{number}.err").read_text(errors="replace")
        if "Traceback" in said:
            yield Failure("traceback of psd-run", f"{text}: {said[said.index('Traceback') :][:3000]}")


def _has_second(histories: Histories, number: int) -> bool:
    """It was told twice to end."""
    return sum(record["name"] == f"psd-run {number}" for record in histories.of("signal")) > 1


def _shards(histories: Histories) -> Iterator[Failure]:
    outcome = histories.outcome
    for shard, log in enumerate(histories.shard_logs):
        if EXPIRED in log and _is_fault_of_shards_alone(histories) and outcome.factor < BUSY:
            yield Failure("expired for nothing", f"shard {shard}: {log[log.index(EXPIRED) - 100 :][:500]}")
    for shard, log in enumerate(histories.shard_logs):
        found = DEFECT.search(log)
        if found is not None:
            yield Failure("traceback of a shard", f"shard {shard}: ...{log[max(0, found.start() - 300) :][:3000]}")
    for record in histories.of("exit"):
        if record["name"].startswith("shard") and record["status"] not in _statuses(histories, record):
            yield Failure("exit status of a shard", f"{record['name']} ended with status {record['status']}")


# -- times -------------------------------------------------------------------------------------------------------------


def _fault_windows(histories: Histories) -> Iterator[tuple[float, float]]:
    """When something was wrong, or may still have had effects."""
    plan, now = histories.plan, histories.now
    ends = list(histories.of("end"))
    for record in histories.of("begin"):
        fault, begun = record["fault"], record["t"]
        end = next((r["t"] for r in ends if r["fault"] == fault and r["t"] >= begun), now)
        after = AFTERWARDS_S
        if fault["kind"] in ("link-half-open", "worker-vanish"):
            end = max(end, begun + NOTICED_S)
        elif fault["kind"] in ("link-black-hole", "shard-vanish"):
            after += fault["seconds"]  # TCP sends again after as long a time as it has waited already
        if fault["kind"].startswith("worker"):
            end = max(end, begun + plan.lease_s)
        yield begun, max(end, _ready_again(histories, record)) + after


def _ready_again(histories: Histories, record: dict[str, Any]) -> float:
    """When the shard that a fault has ended served again; 0 if it has ended none."""
    fault = record["fault"]
    if fault["kind"] not in ("shard-kill", "shard-lose", "shard-terminate", DAMAGE):
        return 0.0
    ready = [r["t"] for r in histories.of("ready") if r["name"] == f"shard {fault['shard']}" and r["t"] > record["t"]]
    return float(ready[0]) if ready else 0.0


def _fails(life: Life) -> bool:
    return life.status not in (None, 0)


def _missed(histories: Histories, life: Life) -> tuple[float, float]:
    """When others may wait for a worker that has failed: until it is back, or its lease is over."""
    return life.ended - AFTERWARDS_S, life.ended + histories.plan.lease_s + AFTERWARDS_S


def _overlap(begun: float, ended: float, windows: Sequence[tuple[float, float]]) -> float:
    """Seconds from `begun` to `ended` that lie in a window."""
    total, reached = 0.0, begun
    for low, high in sorted(windows):
        low, high = max(low, reached), min(high, ended)
        if high > low:
            total += high - low
            reached = high
    return total


def _times(histories: Histories, life: Life, windows: Sequence[tuple[float, float]]) -> Iterator[Failure]:
    slack_s, plan = histories.outcome.slack_s, histories.plan
    if not life.is_lead:
        return  # it waits for rank 0, and does not know for whom that waits
    stops = [r for r in histories.of("signal") if r["name"] == life.name and r["signal"] == "SIGSTOP"]
    was_stopped = bool(stops)
    for call in life.calls:
        if call.op == "read" and _may_be_lost(histories):
            continue
        unexplained = call.ended - call.begun - _overlap(call.begun, call.ended, windows)
        if unexplained > UNEXPLAINED_S + slack_s and call.result in ("", "ok", *PASSING):
            text = f"{life.name}, {call.op} at {call.begun:.2f} took {call.ended - call.begun:.1f} s"
            yield Failure("slow", f"{text}, {unexplained:.1f} without a reason: {call.result} {call.text}")
        says_by = call.begun + SAYS_S + slack_s
        if call.ended > says_by and not was_stopped and not life.signalled and call.op != "read":
            said = [text for t, _, text in life.logs if call.begun <= t <= says_by]
            if not any(NAMES_SOMEBODY.search(_PREFIX.sub("", text)) for text in said):
                text = f"{life.name}, {call.op} at {call.begun:.2f}, for {call.ended - call.begun:.1f} s, had said: {said}"
                yield Failure("silent", text)
    joined = next((call for call in life.calls if call.op == "declare" and call.is_ok), None)
    if joined is not None and not life.name.endswith("life 0"):
        begun = life.calls[0].begun
        took = joined.ended - begun - _overlap(begun, joined.ended, _outages(histories))
        patience = slack_s if plan.learning is None else 10 * slack_s  # a learner loads torch before it declares
        if took > plan.lease_s + AFTERWARDS_S + patience:
            text = f"{life.name} took {took:.1f} s to join, beside outages; the lease is {plan.lease_s:g} s"
            yield Failure("slow successor", text)


def _outages(histories: Histories) -> list[tuple[float, float]]:
    """When a shard could not be reached, by somebody."""
    found = []
    ends = list(histories.of("end"))
    for record in histories.of("begin"):
        fault = record["fault"]
        if fault["kind"].startswith("shard") or fault["kind"] in LINKS:
            end = next((r["t"] for r in ends if r["fault"] == fault and r["t"] >= record["t"]), histories.now)
            found.append((record["t"], max(end, _ready_again(histories, record)) + AFTERWARDS_S))
    return found


# -- what a worker reads -----------------------------------------------------------------------------------------------


def _seen(histories: Histories, life: Life) -> Iterator[Failure]:
    """A worker that has pushed reads its own gradient, once."""
    last: Gradient | None = None
    for index, call in enumerate(life.calls):
        if call.pushes:
            last = histories.gradients[call.number]
        if call.seen is None or last is None:
            continue
        text = f"{life.name}, {call.op} at {call.begun:.2f} sees its gradient {last.number} {call.seen} times"
        has_heard = last.finished is not None and life.calls.index(last.finished) <= index and not last.is_dropped
        is_clean = not any(each.change.get("blocks_late") or each.result == "RolledBack" for each in last.until(call))
        if call.seen[1] > 1:
            yield Failure("counted twice", text)
        elif has_heard and is_clean and call.seen != (1, 1):
            yield Failure("own gradient not read", text)
        elif has_heard and is_clean and _between(histories, last, call) < SOON:
            for table in (name for name, counts in call.new.items() if set(counts) != {1.0}):
                yield Failure("new row not learnt", f"{text}, and its new rows of table {table!r} {call.new[table]} times")


def _between(histories: Histories, gradient: Gradient, call: Call) -> int:
    """How many gradients of others may have come between a worker's and the end of a call."""
    calls = [each for other in histories.gradients.values() if other is not gradient for each in other.calls]
    return sum(each.begun <= call.ended and each.ended >= gradient.begun for each in calls)
