"""One picture from the answers of several shards: psd/cli/ctl/report.py."""

import json
import re

import pytest

from psd.cli.ctl.report import as_text
from psd.contract import facts
from psd.v1 import control_pb2 as pb
from psd.watch.merging import Answer, job_clock, merged_waits, merged_workers, problems
from psd.watch.sampler import Sampler
from psd.watch.snapshot import JobSnapshot, ShardSnapshot, as_json
from psd.watch.words import duration, size, wait_text


def worker(rank, state=pb.WORKER_STATE_LIVE, clock=40, last_seen_s=0.2, transport=""):
    return pb.WorkerStatus(
        rank=rank,
        state=state,
        clock=clock,
        last_seen_s=last_seen_s,
        host="host",
        pid=100 + rank,
        session=2**63 + rank,
        transport=transport,
    )


NUMBERS = {
    "uptime_s": 75,
    "parameter_bytes": 3 << 20,
    "slot_bytes": 0,
    "blocks": 3,
    "tensors": 4,
    "version_min": 40,
    "version_max": 41,
    "min_clock": 40,
    "pushes_accepted": 80,
    "pushes_duplicate": 0,
    "pushes_late": 0,
    "pulls": 0,
    "updates": 0,
    "received_bytes": 1 << 30,
    "sent_bytes": 0,
    "requests_refused": 0,
}


def shard(index, count=2, numbers=None, **fields):
    given = {
        "shard_index": index,
        "shard_count": count,
        "state": pb.SHARD_STATE_SERVING,
        "run_id": "mnist-1",
        "incarnation": 2**63 + 1,
        "address": f"127.0.0.1:{7000 + index}",
        "consistency": "sync",
        "reduction": "mean",
        "world_size": 2,
        "quorum": 2,
        "workers": [worker(0), worker(1)],
        **fields,
    }
    return pb.StatusReply(**given, numbers={**NUMBERS, **(numbers or {})})


class Asked:
    """Shards that have answered so."""

    def __init__(self, found):
        self.ask = lambda _timeout_s: found
        self.curves = lambda _after, _timeout_s: None


def look(found):
    """One look, as psdctl status takes it."""
    return Sampler(Asked(found), lambda: 0.0, lambda: 1e9).look()


def answers(*replies):
    return [
        Answer(f"127.0.0.1:{7000 + index}", reply, "UNAVAILABLE", "failed to connect: refused")
        for index, reply in enumerate(replies)
    ]


HOSTILE = "\x1b[2J\u202e\n\x9b"


def hostile(message):
    """A message in which every text of a peer's is hostile, however deep."""
    for field in message.DESCRIPTOR.fields:
        is_repeated = hasattr(getattr(message, field.name), "extend")
        if field.type == field.TYPE_STRING:
            if is_repeated:
                getattr(message, field.name).extend([HOSTILE] * 2)
            else:
                setattr(message, field.name, f"{field.name}{HOSTILE}")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[HOSTILE] = float("nan")
        elif field.message_type is not None and field.message_type is not message.DESCRIPTOR:
            if is_repeated:
                getattr(message, field.name).add()
                for item in getattr(message, field.name):
                    hostile(item)
            else:
                hostile(getattr(message, field.name))
    return message


def test_text_when_peers_have_chosen_control_characters_then_nothing_gets_to_the_terminal():
    """Hosts, transports, runs, barriers, addresses, errors: whatever field there is, and whatever comes to be shown of it."""
    replies = [hostile(shard(index)) for index in range(2)]
    replies[0].waits.add(kind=pb.WAIT_KIND_BARRIER, name=HOSTILE)
    found = [*answers(*replies), Answer("127.0.0.1:7002", None, "UNAVAILABLE", f"no{HOSTILE}")]

    now = look(found)
    text = as_text(now)

    assert "host\\x1b[2J\\u202e\\n\\x9b:100" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert all(HOSTILE in reply.run_id for reply in replies), "the answers themselves stay as they are"
    assert HOSTILE not in json.dumps(as_json(now), ensure_ascii=False)


def test_merged_workers_when_shards_disagree_then_the_worst_holds():
    one = shard(0, workers=[worker(0, last_seen_s=0.1)])
    other = shard(1, workers=[worker(0, pb.WORKER_STATE_EXPIRED, last_seen_s=12)])

    (merged,) = merged_workers([one, other])

    assert (merged.state, merged.last_seen_s) == (pb.WORKER_STATE_EXPIRED, 12)
    assert merged_workers([other, one]) == [merged]


def test_clocks_when_a_shard_has_no_blocks_then_are_those_of_the_shard_that_was_told():
    """A model of a few KB is one block. The other shards hear of no step."""
    blank = shard(1, workers=[worker(0, clock=0), worker(1, clock=0)], numbers={"blocks": 0, "min_clock": 0})
    for name in ("version_min", "version_max"):
        del blank.numbers[name]
    now = look(answers(shard(0, workers=[worker(0, clock=42), worker(1)]), blank))

    picture, text = as_json(now), as_text(now)

    assert (picture["clock"], [each["clock"] for each in picture["workers"]]) == (40, [42, 40])
    assert "2 workers, clock 40, 4 tensors" in text
    assert re.search(r"^ +1 .* 0     3.0 MiB    0 B        -$", text, re.MULTILINE)


def test_job_clock_when_workers_do_not_live_then_they_hold_it_back_no_longer():
    left = worker(0, pb.WORKER_STATE_FINISHED, clock=60)

    assert job_clock([left, worker(1, clock=50), worker(2, pb.WORKER_STATE_EXPIRED, clock=7)]) == 50
    assert job_clock([left, worker(1, pb.WORKER_STATE_ABSENT, clock=0)]) == 60


def test_merged_workers_when_a_shard_has_never_seen_one_then_it_counts_as_never_seen():
    one = shard(0, workers=[worker(0)])
    other = shard(1, workers=[worker(0, pb.WORKER_STATE_ABSENT, clock=0, last_seen_s=-1)])

    (merged,) = merged_workers([one, other])

    assert (merged.state, merged.last_seen_s) == (pb.WORKER_STATE_ABSENT, -1)


def test_merged_waits_when_two_shards_report_one_wait_then_it_is_shown_once_with_all_who_are_missing():
    def waiting(rank, waited_s):
        return pb.Wait(rank=0, kind=pb.WAIT_KIND_ROUND, clock=41, waited_s=waited_s, missing=[worker(rank)])

    (merged,) = merged_waits([shard(0, waits=[waiting(1, 3)]), shard(1, waits=[waiting(2, 4)])])

    assert merged.shards == (0, 1)
    assert merged.wait.waited_s == 4
    assert [missing.rank for missing in merged.wait.missing] == [1, 2]


def test_wait_text_when_a_round_is_open_then_it_says_who_where_and_for_whom():
    wait = pb.Wait(rank=0, kind=pb.WAIT_KIND_ROUND, clock=41, waited_s=12.3, missing=[worker(3, last_seen_s=12)])

    assert wait_text(wait) == "worker 0 waits in round 41 for worker 3 (last seen 12 s ago, at step 40); so far 12 s"


def test_wait_text_when_in_a_barrier_then_it_names_it_and_who_never_came():
    wait = pb.Wait(rank=0, kind=pb.WAIT_KIND_BARRIER, name="epoch-1", waited_s=1, missing=[worker(3, last_seen_s=-1)])

    assert wait_text(wait) == "worker 0 waits in barrier 'epoch-1' for worker 3 (has not joined); so far 1.0 s"


def test_as_text_when_workers_say_where_the_job_ends_then_its_progress_is_told():
    """After one look there is no speed, and so no time left."""
    said = shard(0, workers=[worker(0)])
    said.total = 160

    assert ", clock 40 (25% of 160 steps), " in as_text(look(answers(said)))


def test_as_text_when_all_is_well_then_every_part_is_there():
    tcp = "tcp (not shm: the shard is on another machine)"
    text = as_text(
        look(
            answers(
                shard(0, workers=[worker(0, transport="shm")]),
                shard(1, workers=[worker(0, transport=tcp), worker(1, last_seen_s=3)]),
            )
        )
    )

    assert text.splitlines() == [
        "run mnist-1: sync, mean, 2 workers, clock 40, 4 tensors, 6.0 MiB parameters, 0 B slots",
        "",
        "SHARD  STATE    ADDRESS         UPTIME  BLOCKS  PARAMETERS  SLOTS  VERSION",
        "    0  serving  127.0.0.1:7000    75 s       3     3.0 MiB    0 B   40..41",
        "    1  serving  127.0.0.1:7001    75 s       3     3.0 MiB    0 B   40..41",
        "",
        "RANK  STATE  CLOCK  BEHIND  AWAITED  LAST SEEN  PROCESS   TRANSPORT",
        "   0  live      40       0        -  0.2 s ago  host:100  shm, tcp (not shm: the shard is on another machine)",
        "   1  live      40       0        -  3.0 s ago  host:101  -",
        "",
        "SHARD  PUSHES ACCEPTED  DUPLICATE  LATE  PULLS  UPDATES  RECEIVED  SENT  SAVED  REFUSED",
        "    0               80          0     0      0        0   1.0 GiB   0 B      -        0",
        "    1               80          0     0      0        0   1.0 GiB   0 B      -        0",
    ]


def test_as_text_when_a_shard_is_silent_then_the_other_is_shown_and_the_trouble_named():
    text = as_text(look(answers(shard(0), None)))

    assert re.search(r"^ +0  serving    127.0.0.1:7000 ", text, re.MULTILINE)
    assert re.search(r"^ +1  no answer  127.0.0.1:7001 +-  ", text, re.MULTILINE)
    assert "problem: 127.0.0.1:7001 did not answer: UNAVAILABLE, refused" in text


def test_as_text_when_nothing_is_declared_then_it_says_so():
    text = as_text(look(answers(pb.StatusReply(shard_count=1, state=pb.SHARD_STATE_EMPTY))))

    assert "nothing declared yet" in text


def test_problems_when_the_servers_are_in_the_wrong_order_then_both_are_named():
    found = problems(answers(shard(1), shard(0)))

    assert found == [
        "127.0.0.1:7000 is shard 1/2, but was given as 0/2",
        "127.0.0.1:7001 is shard 0/2, but was given as 1/2",
    ]


def test_problems_when_the_shards_serve_two_runs_then_both_are_named():
    (found,) = problems(answers(shard(0), shard(1, run_id="other")))

    assert "'mnist-1'" in found
    assert "'other'" in found


def test_as_json_when_written_and_read_then_every_number_is_there_and_null_if_it_is_not_known():
    wait = pb.Wait(rank=0, kind=pb.WAIT_KIND_ROUND, clock=41, missing=[worker(1)])
    picture = json.loads(json.dumps(as_json(look(answers(shard(0, waits=[wait]), None)))))

    assert list(facts.by_name(facts.JOB)) == [name for name in picture if name in JobSnapshot.catalogue]
    first, silent = picture["shards"]
    assert list(facts.by_name(facts.SHARD)) == [name for name in first if name in ShardSnapshot.catalogue]
    assert list(first) == list(silent)
    assert (first["incarnation"], first["state"], first["pushes_late"]) == (f"{2**63 + 1:x}", "serving", 0)
    assert (first["updates_per_s"], first["checkpoint_age_s"], silent["pulls"]) == (None, None, None)
    assert (silent["state"], silent["error"]) == ("no answer", "UNAVAILABLE, refused")
    assert (picture["workers"][1]["rank"], picture["workers"][1]["session"]) == (1, f"{2**63 + 1:x}")
    assert (picture["waits"][0]["shards"], picture["waits"][0]["missing"]) == ([0], [1])


def test_size_and_duration_when_shown_to_people_then_three_digits_are_enough():
    assert [size(n) for n in (0, 1023, 1536, 200 << 20, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "200 MiB", "5.0 TiB"]
    assert [duration(s) for s in (0.04, 12.4, 200, 18_420)] == ["0.0 s", "12 s", "3 min 20 s", "5 h 7 min"]


def test_as_text_when_checkpoints_are_taken_then_each_shards_last_one_and_every_error_are_shown():
    stored = {
        "checkpoint_dir": "/data/checkpoints",
        "checkpoint_last": "timeline-00000-step-000000000040-ab",
        "numbers": {"checkpoint_age_s": 130, "checkpoint_bytes": 3 << 20, "checkpoint_took_s": 0.25},
    }
    full = {"checkpoint_dir": "/data/checkpoints", "checkpoint_error": "cannot write x: No space left on device"}

    text = as_text(look(answers(shard(0, **stored), shard(1, **full))))

    _, checkpoints = text.split("SHARD  CHECKPOINTS IN")
    lines = [" ".join(line.split()) for line in checkpoints.split("\n")]
    assert lines[0] == "LAST CHECKPOINT AGE CHECKPOINT CHECKPOINT TOOK"
    assert lines[1] == "0 /data/checkpoints timeline-00000-step-000000000040-ab 2 min 10 s 3.0 MiB 250 ms"
    assert lines[2] == "1 /data/checkpoints none yet - - -"
    assert checkpoints.endswith("checkpoint error of shard 1: cannot write x: No space left on device")
    assert "CHECKPOINTS" not in as_text(look(answers(shard(0), shard(1))))


def test_as_text_when_a_job_has_come_from_a_checkpoint_and_a_shard_waits_then_both_are_said():
    text = as_text(look(answers(shard(0, restored_from="step-7"), shard(1, state=pb.SHARD_STATE_RESTORING))))

    assert "slots, gone on from checkpoint step-7" in text
    assert "restoring" in text


@pytest.mark.parametrize(
    ("state", "life", "text"),
    [
        (pb.SHARD_STATE_SERVING, pb.LIFE_CYCLE_SERVING, "  serving  "),
        (pb.SHARD_STATE_SERVING, pb.LIFE_CYCLE_STRANDED, "  serving, stranded  "),
        (pb.SHARD_STATE_RESTORING, pb.LIFE_CYCLE_LOADING, "  restoring, loading  "),
        (pb.SHARD_STATE_DRAINING, pb.LIFE_CYCLE_SERVING, "  draining, serving  "),
    ],
)
def test_as_text_when_the_life_cycle_says_more_than_the_state_then_it_is_shown(state, life, text):
    assert text in as_text(look(answers(shard(0, state=state, life=life), shard(1))))


def test_as_text_when_there_are_tables_then_each_is_shown_with_all_its_shards():
    """Rows and counts are sums over the shards."""
    zeros = dict.fromkeys(facts.by_name(facts.TABLE), 0)
    user = {"rows": 10, "bytes": 2048, "reads": 40, "hits": 30, "created": 12, "evicted": 2}
    status = [
        pb.TableStatus(name="user", numbers={**zeros, **user}),
        pb.TableStatus(name="item", numbers={**zeros, "refused": 5, "unadmitted": 6}),
    ]

    lines = as_text(look(answers(shard(0, tables=status), shard(1, tables=status)))).splitlines()

    assert ", 2 tables," in lines[0]
    at = lines.index("TABLE  ROWS    BYTES  READS  HITS  CREATED  EVICTED  EXPIRED  REMOVED  REFUSED  UNADMITTED")
    assert lines[at + 1].split() == ["user", "20", "4.0", "KiB", "80", "60", "24", "4", "0", "0", "0", "0"]
    assert lines[at + 2].split() == ["item", "0", "0", "B", "0", "0", "0", "0", "0", "0", "10", "12"]


def relay(**fields):
    given = {"of": "a:1,b:2", "version": 57, "newest": 59, "age_s": 12, "heard_s": 0.5, "readers": 3, "versions": 1, **fields}
    return pb.StatusReply(
        shard_count=1, run_id="mnist-1", address="127.0.0.1:7100", state=pb.SHARD_STATE_SERVING, relay=pb.RelayStatus(**given)
    )


def test_as_text_when_relays_answer_then_each_says_what_it_follows_and_how_far_it_is():
    """Several at once are not mistaken for shards in a wrong order."""
    problem = "shard 0 at a:1 could not be reached for 5 s"
    lost = relay(problem=problem, heard_s=-1)
    lost.relay.ClearField("version")
    found = [Answer("127.0.0.1:7100", relay()), Answer("127.0.0.1:7101", lost)]

    now = look(found)
    lines = as_text(now).splitlines()

    assert lines[0] == "run mnist-1, as relays have it"
    had = "version 57, 2 behind, for 12 s; heard from them 0.5 s ago; 3 readers; 1 version fetched"
    assert f"relay 127.0.0.1:7100 of a:1,b:2: {had}" in lines
    assert any("no version yet; has not heard from them;" in line for line in lines)
    assert problems(found) == [f"127.0.0.1:7101: {problem}"]
    assert now.headline == "A relay, at version 57"
    assert as_json(now)["shards"][0]["relay"]["behind"] == 2
