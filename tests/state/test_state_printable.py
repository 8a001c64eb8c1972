"""Names with control characters are refused where workers bring them; what is only shown is made printable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import TensorSpec
from psd.v1 import control_pb2

HOSTILE = "\x1b]0;owned\x07\u202e"


def test_a_worker_whose_host_or_run_has_such_a_name_does_not_join():
    """They would be in the status, in logs, and in the errors of others."""
    driver = Driver(job_spec(2))
    request = control_pb2.JoinRequest(shard_count=1, rank=0, world_size=2, host="h", pid=1)

    for field in ("host", "run_id"):
        wrong = control_pb2.JoinRequest()
        wrong.CopyFrom(request)
        setattr(wrong, field, f"a{HOSTILE}")
        with pytest.raises(InvalidRequest, match=rf"{field}: 'a\\x1b\]0;owned\\x07\\u202e' has control characters"):
            driver.shard.admission.join(wrong)

    assert driver.core.membership is None
    assert driver.core.run_id == ""


def test_a_barrier_of_such_a_name_is_refused():
    """Whoever waits is shown with it."""
    driver = Driver(job_spec(1))
    (seat,) = driver.start()

    with pytest.raises(InvalidRequest, match=r"name: 'b\\x1b.*' has control characters"):
        driver.arrive(seat, f"b{HOSTILE}")

    assert driver.core.waiting.open() == []


def test_a_job_with_a_tensor_of_such_a_name_is_refused():
    """By the shard, whatever the worker's own library thinks."""
    driver = Driver(job_spec(1))
    seat = driver.join()
    message = replace(driver.spec, tensors=(TensorSpec("t0", (3,), "float64", 0),)).to_message()
    message.tensors[0].name = f"w{HOSTILE}"

    with pytest.raises(InvalidTensor, match=r"tensors\.name: 'w\\x1b.*' has control characters"):
        driver.shard.admission.declare(control_pb2.DeclareRequest(caller=seat.caller, spec=message))

    assert driver.core.job is None


def test_what_a_worker_says_of_its_lane_is_made_printable():
    """It is free text, of a heartbeat, which must not be refused for it."""
    driver = Driver(job_spec(1))
    (seat,) = driver.start()

    driver.shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=seat.caller, transport=f"grpc (not tcp: {HOSTILE})"))

    assert driver.worker(0).transport == "grpc (not tcp: \\x1b]0;owned\\x07\\u202e)"
