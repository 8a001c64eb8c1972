"""The catalogue of numbers: psd/contract/facts.py."""

import math
import re
from collections import Counter

import pytest

from psd.contract import facts
from psd.contract.facts import CATALOGUE
from psd.v1 import control_pb2 as pb

ROWS = [pytest.param(of, fact, id=f"{of}-{fact.name}") for of, rows in CATALOGUE.items() for fact in rows]


def stems(text):
    """The words of a name or a heading, without the ends of plurals."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower())}


@pytest.mark.parametrize(("of", "fact"), ROWS)
def test_a_number_is_called_the_same_everywhere(of, fact):
    """A heading has words of the name; a metric has all words of it, beside those of what it is of, and Prometheus' own."""
    assert stems(fact.title) <= stems(fact.name)
    if fact.metric.startswith("psd_"):
        units = {"byte", "second", "s", "", "share"}
        assert stems(fact.name) - units <= stems(fact.metric), "what the name says, the metric says"
        assert {"bytes": "_bytes", "s": "_seconds"}.get(fact.unit, "") in fact.metric_name
        assert fact.metric_name.endswith("_total") == (fact.kind == "total")
        assert {"worker": "rank", "table": "table"}.get(of, "") in ("", *fact.labels)
    assert re.fullmatch(r"[A-Z].*[^.]\.", fact.help)
    assert (fact.kind == "rate") == (fact.unit in ("share", "per_s", "bytes_per_s") or fact.name == "latency_s")
    assert not fact.rate_of or fact.rate_of in facts.by_name(CATALOGUE[of])


@pytest.mark.parametrize("of", CATALOGUE)
def test_a_name_and_a_series_belong_to_one_number(of):
    """No number has the name, or the metric, of another."""
    assert max(Counter(fact.name for fact in CATALOGUE[of]).values()) == 1
    assert max(Counter(fact.metric for fact in CATALOGUE[of] if fact.metric).values(), default=1) == 1


def test_numbers_travel_by_name_and_those_of_the_protocol_in_their_own_fields():
    """What a peer of another version sends beside is left out; what is not finite is no number of a shard's."""
    reply = pb.StatusReply()
    facts.write(reply, {"timeline": 3, "pulls": 2**53 - 1, "cpu_s": 0.5, "unheard_of": 1.0})
    reply.numbers["updates"] = math.nan

    assert (reply.timeline, "timeline" in reply.numbers) == (3, False)
    assert facts.read(reply, facts.SHARD) == {"cpu_s": 0.5, "pulls": 2**53 - 1, "updates": 0, "timeline": 3}
