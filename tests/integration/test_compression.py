"""Compressed pushes and pulls from workers to shards, against the same computed here: in every mode, over each transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import psd_client
from psd.contract.errors import InvalidRequest, NonFiniteGradient, SpecMismatch
from psd.rim.views import shard_status
from psd_core import codecs

STEPS = 5
SHAPES = {"a": (300, 700), "b": (901,), "c": (3,)}
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
CODECS = ("bf16", "fp16", "int8", "int4", "int4log", "sign", "topk:0.05")
TRANSPORTS = ("shm", "tcp", "grpc")


def initial() -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng([rank, step])
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def train(ps: psd_client.ParameterServer, *, steps: int = STEPS, weight: float = 1, **job: Any) -> dict[str, NDArray[Any]]:
    found = ps.declare(initial(), psd_client.SGD(lr=0.25), **job)
    for step in range(steps):
        found = ps.push_pull(gradients(ps.rank, step), weight)
    return {name: np.array(value) for name, value in found.items()}


def flat(values: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate([value.reshape(-1) for value in values.values()])


def trained_here(codec: str, world_size: int, blocks: Sequence[int], *, feedback: bool = True) -> NDArray[np.float32]:
    """What the shards should hold: the mean of what was decoded, and a residual for each worker. blocks: where they begin."""
    master = flat(initial())
    residuals = [np.zeros_like(master) for _ in range(world_size)]
    for step in range(STEPS):
        total = np.zeros_like(master)
        for rank in range(world_size):
            gradient = flat(gradients(rank, step))
            for start, end in zip(blocks, (*blocks[1:], len(master)), strict=True):
                residual = residuals[rank][start:end] if feedback else None
                data = codecs.encode(codec, gradient[start:end].copy(), residual)
                codecs.accumulate(codec, data, total[start:end])
        master -= np.float32(0.25) * (total * np.float32(1 / world_size))
    return master


def starts(ps: psd_client.ParameterServer) -> list[int]:
    return [block.offset for block in ps._worker.gradients.layout.blocks]


@pytest.mark.parametrize(("codec", "shards"), [*((codec, 3) for codec in CODECS), ("int8", 1)])
def test_steps_when_pushes_are_compressed_then_all_lanes_have_the_bits_of_the_same_sums(run_workers, codec, shards):
    found = []
    for transport, aggregation in (("shm", "fast"), ("shm", "exact"), ("tcp", "fast"), ("grpc", "exact")):
        seen: list[list[int]] = []

        def body(ps, aggregation=aggregation, seen=seen):
            trained = train(ps, compress=codec, aggregation=aggregation)
            seen.append(starts(ps))
            return trained

        mine, other = run_workers(2, shards, body, transport=transport)
        assert flat(mine).tobytes() == flat(other).tobytes()
        found.append(flat(mine))
    expected = trained_here(codec, 2, seen[0])
    for values in found:
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int4log", "sign"])
def test_steps_when_rounding_is_to_nearest_then_the_bits_do_not_depend_on_the_shards(run_workers, codec):
    one, three = (run_workers(1, shards, lambda ps: train(ps, compress=codec))[0] for shards in (1, 3))

    np.testing.assert_array_equal(flat(one), flat(three))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_step_when_compressed_then_it_sends_as_many_bytes_as_the_codec_has(run_workers, transport):
    def body(ps):
        ps.declare(initial(), psd_client.SGD(lr=0.25), compress="int8", pull="bf16")
        before = ps.stats()
        ps.push_pull(gradients(0, 0))
        after = ps.stats()
        return after["sent_bytes"] - before["sent_bytes"], after["received_bytes"] - before["received_bytes"]

    ((sent, received),) = run_workers(1, 1, body, transport=transport)

    assert sent == codecs.encoded_bytes("int8", ELEMENTS)
    assert received == ELEMENTS * (4 if transport == "shm" else 2)  # shared memory has them as float32


def test_status_when_a_job_is_compressed_then_it_says_how_and_what_that_has_saved(cluster):
    running = cluster(1)
    shard = running.shards[0]
    for transport in TRANSPORTS:
        with psd_client.connect(running.servers, 0, 1, transport=transport) as ps:
            ps.declare(initial(), psd_client.SGD(lr=0.25), compress="int8", pull="bf16")
            before = shard.shard.status().counters.lanes[transport].saved_bytes
            ps.push_pull(gradients(0, 0))
            ps.barrier("counted")
            saved = shard.shard.status().counters.lanes[transport].saved_bytes - before
        pulled = 0 if transport == "shm" else 2 * ELEMENTS
        assert saved == 4 * ELEMENTS - codecs.encoded_bytes("int8", ELEMENTS) + pulled
    assert shard_status(shard.shard, "", None).compression == "int8, pull bf16"


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_when_there_are_no_rounds_then_each_push_is_what_was_decoded(run_workers, mode, transport):
    blocks: list[list[int]] = []

    def body(ps):
        trained = train(ps, compress="int4", consistency=mode)
        blocks.append(starts(ps))
        return trained

    (found,) = run_workers(1, 2, body, transport=transport)

    np.testing.assert_array_equal(flat(found), trained_here("int4", 1, blocks[0]))


def test_steps_when_feedback_is_off_then_nothing_is_kept(run_workers):
    blocks: list[list[int]] = []

    def body(ps):
        trained = train(ps, compress="int4", error_feedback=False, rounding="nearest")
        blocks.append(starts(ps))
        return trained

    (found,) = run_workers(1, 1, body)

    np.testing.assert_array_equal(flat(found), trained_here("int4", 1, blocks[0], feedback=False))


def test_steps_when_rounding_is_at_random_then_it_is_the_same_in_every_run_and_another_for_each_worker(run_workers):
    def body(ps):
        return train(ps, compress="int4", rounding="stochastic", aggregation="exact")

    first, again = (run_workers(2, 3, body, transport=transport)[0] for transport in ("tcp", "shm"))

    np.testing.assert_array_equal(flat(first), flat(again))
    nearest = run_workers(2, 3, lambda ps: train(ps, compress="int4", aggregation="exact"))[0]
    assert not np.array_equal(flat(first), flat(nearest))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("codec", ["int8", "sign", "topk:0.05"])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_when_a_tensor_has_no_gradient_then_it_stays_and_so_does_its_residual(run_workers, codec, transport, aggregation):
    """Also where it shares a block with others."""

    def body(ps):
        ps.declare(initial(), psd_client.SGD(lr=0.25), compress=codec, aggregation=aggregation)
        before = ps.push_pull(gradients(0, 0))
        residual = ps._worker.declared.encoder._residuals
        kept = residual.views[1].copy()
        after = ps.push_pull({name: value for name, value in gradients(0, 1).items() if name != "b"})
        np.testing.assert_array_equal(residual.views[1], kept)
        return before, after, np.any(kept)

    ((before, after, has_residual),) = run_workers(1, 1, body, transport=transport)

    assert has_residual
    np.testing.assert_array_equal(before["b"], after["b"])
    assert not np.array_equal(before["a"], after["a"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pull_when_compressed_then_all_workers_have_the_same_bits_and_the_shards_keep_all(cluster, transport):
    servers = cluster(3).servers

    def train_beside_a_reader(ps):
        found = ps.declare(initial(), psd_client.SGD(lr=0.25), pull="bf16")
        declared = {name: np.array(value) for name, value in found.items()}
        for step in range(STEPS):
            found = ps.push_pull(gradients(0, step))
        with psd_client.connect(servers, role="reader", transport=transport) as reader:
            read = reader.pull()
        return declared, found, read

    with psd_client.connect(servers, 0, 1, transport=transport) as ps:
        declared, found, read = train_beside_a_reader(ps)

    master = flat(initial())
    for step in range(STEPS):
        master -= np.float32(0.25) * flat(gradients(0, step))
    np.testing.assert_array_equal(flat(read), master)
    np.testing.assert_array_equal(flat(found), rounded(master))
    np.testing.assert_array_equal(flat(declared), rounded(flat(initial())))  # of the worker that has provided them, too


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.empty_like(values)
    codecs.decode("bf16", codecs.encode("bf16", values), out)
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pull_when_a_parameter_is_infinite_then_its_block_comes_as_it_is(run_workers, transport):
    def body(ps):
        ps.declare({"w": np.full(2000, 3e38, np.float32)}, psd_client.SGD(lr=1.0), pull="fp16")
        return ps.push_pull({"w": np.full(2000, -3e38, np.float32)})

    (found,) = run_workers(1, 1, body, transport=transport)

    assert np.all(found["w"] == np.inf)


def test_push_when_dtypes_are_mixed_then_others_than_float32_are_sent_as_they_are(run_workers):
    values = {"wide": np.arange(5000.0), "half": np.ones(5000, np.float16), "single": np.ones(5000, np.float32)}

    def body(ps):
        ps.declare(values, psd_client.SGD(lr=1.0), compress="int8")
        before = ps.stats()["sent_bytes"]
        found = ps.push_pull({name: np.full(5000, 1 / 3, value.dtype) for name, value in values.items()})
        return ps.stats()["sent_bytes"] - before, found["wide"]

    ((sent, wide),) = run_workers(1, 1, body)

    assert sent == 5000 * (8 + 2) + codecs.encoded_bytes("int8", 5000)
    np.testing.assert_array_equal(wide, np.arange(5000.0) - 1 / 3)


def test_declare_when_workers_ask_for_other_codecs_then_the_second_is_refused(cluster):
    servers = cluster(1).servers
    with psd_client.connect(servers, 0, 2) as first, psd_client.connect(servers, 1, 2) as second:
        first.declare(initial(), psd_client.SGD(lr=1.0), compress="int8")
        with pytest.raises(SpecMismatch, match="compression: int8 in the job, int4, pull bf16 in this worker's declaration"):
            second.declare(initial(), psd_client.SGD(lr=1.0), compress="int4", pull="bf16")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"compress": "int3"}, "compress: expected one of bf16, .*, got 'int3'"),
        ({"compress": "topk:2"}, "compress: expected topk:SHARE with 0 < SHARE <= 1"),
        ({"compress": 8}, "compress: expected a string, got 8"),
        ({"pull": "sign"}, "pull: must be one of bf16, fp16, int8, int4, int4log, or None, got 'sign'"),
        ({"pull": "int8", "consistency": "async"}, "pull: int8 is of differences from round to round; without rounds .*async"),
        ({"pull": "int4", "consistency": "ssp:2"}, "pull: int4 is of differences .*the mode is ssp:2.* use bf16 or fp16"),
        ({"error_feedback": False}, "error_feedback: is False, but nothing is compressed"),
        ({"compress": "int8", "error_feedback": 1}, "error_feedback: expected True or False, got 1"),
        ({"compress": "sign", "rounding": "stochastic"}, "rounding: stochastic, but sign rounds nothing"),
        ({"compress": "int8", "rounding": "up"}, "rounding: must be nearest or stochastic, got 'up'"),
        ({"compress": "int8", "nan_policy": "allow"}, "nan_policy: allow, but compress has no form for NaN"),
    ],
)
def test_declare_when_the_compression_is_wrong_then_it_is_refused_by_name(run_workers, job, message):
    def body(ps):
        with pytest.raises(InvalidRequest, match=message):
            ps.declare(initial(), psd_client.SGD(lr=1.0), **job)

    run_workers(1, 1, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_push_when_the_sum_with_the_residual_overflows_then_the_error_says_so_and_training_goes_on(run_workers, transport):
    def body(ps):
        ps.declare({"w": np.zeros(5000, np.float32)}, psd_client.SGD(lr=0.0), compress="fp16")
        ps.push_pull({"w": np.full(5000, 3e38, np.float32)})  # nearly all of it stays
        with pytest.raises(NonFiniteGradient, match="cannot be compressed, in the block that begins with 'w': residual"):
            ps.push_pull({"w": np.full(5000, 3e38, np.float32)})
        ps.push_pull({"w": np.full(5000, -3e38, np.float32)})
        return ps.clock

    assert run_workers(1, 2, body, transport=transport) == [2]
