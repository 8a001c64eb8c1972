"""A store of versions: what one program puts, all readers get, whole and under its own number."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import wait_until

import psd_client
from psd.contract.publications import META_TENSOR
from psd.state.shard import Shard


def state_of(step: int) -> dict[str, Any]:
    """Tensors of many blocks and of few elements, in every kind of dtype, whose numbers say which step made them."""
    return {
        "big": np.full((700, 1000), step, np.float32),
        "double": np.full(3, step + 0.5, np.float64),
        "half": np.full(5000, step, np.float16),
        "brain": torch.full((5000,), step, dtype=torch.bfloat16),
        "counter": np.array(step, np.int64),
        "mask": torch.tensor([True, False, step % 2 == 0]),
        "torch": torch.full((2, 3), float(step), requires_grad=True),
        "none": np.zeros((0, 4), np.float32),
    }


def check(weights: psd_client.Weights, step: int) -> None:
    """All tensors are those of the step."""
    assert {name: value.dtype.name for name, value in weights.items()} == {
        "big": "float32",
        "double": "float64",
        "half": "float32",
        "brain": "float32",
        "counter": "int64",
        "mask": "bool",
        "torch": "float32",
        "none": "float32",
    }
    for name, value in state_of(step).items():
        expected = (
            value.detach().to(torch.float32 if name == "brain" else value.dtype).numpy()
            if name
            in (
                "brain",
                "mask",
                "torch",
            )
            else value
        )
        np.testing.assert_array_equal(weights[name], expected)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_what_is_put_is_read(cluster: Callable[..., Any], shards: int, transport: str) -> None:
    """The version that put returns is the one that the reader says; versions count from 1."""
    servers = cluster(shards).servers
    with (
        psd_client.publish(servers, transport=transport) as store,
        psd_client.connect(servers, role="reader", wait_timeout=60) as reader,
    ):
        for step in range(1, 4):
            assert store.put(state_of(step), meta={"step": 100 * step, "näme": ["x"]}) == step
            weights = reader.pull()

            check(weights, step)
            assert (weights.version, weights.meta) == (step, {"step": 100 * step, "näme": ["x"]})
        assert store.version == 3


def test_a_reader_waits_for_the_first_put(cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeros with which a store begins are no version: nobody gets them, or a clear error after the timeout."""
    servers = cluster(2).servers
    found: list[psd_client.Weights] = []
    is_asked = threading.Event()
    begin = Shard.begin_read
    with psd_client.connect(servers, role="reader", wait_timeout=60) as reader:
        with pytest.raises(psd_client.NotDeclared):
            reader.pull(timeout=0)
        with psd_client.publish(servers, like={"w": np.ones(4)}) as store:
            assert store.version == 0
            with pytest.raises(psd_client.WaitTimeout, match="there is no version above 0 yet"):
                reader.pull(timeout=0.1)
            monkeypatch.setattr(Shard, "begin_read", lambda *arguments: (begin(*arguments), is_asked.set())[0])
            waiting = threading.Thread(target=lambda: found.append(reader.pull()))
            waiting.start()
            assert is_asked.wait(100)

            store.put({"w": np.arange(4.0)}, b"first")

            waiting.join()
    assert (found[0].version, found[0].meta, found[0]["w"].tolist()) == (1, b"first", [0, 1, 2, 3])


def test_two_readers_agree_on_the_digest(cluster: Callable[..., Any]) -> None:
    """It stands for the weights: not for the meta, nor for the precision in which they travel."""
    servers = cluster(3).servers
    reading = {"role": "reader", "wait_timeout": 60}
    with (
        psd_client.publish(servers) as store,
        psd_client.connect(servers, **reading) as one,
        psd_client.connect(servers, **reading) as other,
    ):
        store.put(state_of(1), {"step": 1})
        first, narrow = one.pull(), other.pull(dtype="bfloat16")
        head = one.pull(names=["torch"])
        store.put(state_of(1), {"step": 2})
        again = other.pull()
        store.put(state_of(2), {"step": 2})
        second = one.pull()

    assert len(first.digest) == 32
    assert first.digest == narrow.digest == again.digest
    assert len({first.digest, head.digest, second.digest}) == 3


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_a_reader_asks_for_half_the_bytes(cluster: Callable[..., Any], dtype: str, number: torch.dtype, transport: str) -> None:
    """Numbers of float32 come rounded, as torch would; those of 16 bits travel in them always, and whole."""
    running = cluster(2)
    values = np.random.default_rng(5).standard_normal(400_000).astype(np.float32)
    with (
        psd_client.publish(running.servers) as store,
        psd_client.connect(running.servers, role="reader", wait_timeout=60, transport=transport) as reader,
    ):
        store.put({"w": values, "double": np.ones(3) / 3})
        found = reader.pull(dtype=dtype)
        narrow_bytes = received(reader)
        whole = reader.pull()
        whole_bytes = received(reader) - narrow_bytes

    np.testing.assert_array_equal(found["w"], torch.from_numpy(values).to(number).float().numpy())
    np.testing.assert_array_equal(whole["w"], values)
    assert found["w"].dtype == np.float32
    assert found["double"].tolist() == [1 / 3] * 3
    assert 0.5 < narrow_bytes / whole_bytes < 0.51


def test_weights_of_16_bits_are_not_rounded_to_others_of_16_bits(cluster: Callable[..., Any]) -> None:
    """1859 is a number of float16, and none of bfloat16; whatever a reader asks for, it gets what was put."""
    running = cluster(2)
    with (
        psd_client.publish(running.servers) as store,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        store.put({"half": np.full(300, 1859, np.float16), "brain": torch.full((3,), 2.0**100, dtype=torch.bfloat16)})
        for dtype in ("bfloat16", "float16", None):
            found = reader.pull(dtype=dtype)
            assert set(found["half"].tolist()) == {1859.0}
            assert set(found["brain"].tolist()) == {2.0**100}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_weights_of_16_bits_travel_in_them(cluster: Callable[..., Any], transport: str) -> None:
    """And come back whole, NaN included."""
    running = cluster(1)
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with (
        psd_client.publish(running.servers, nan_policy="allow") as store,
        psd_client.connect(running.servers, role="reader", wait_timeout=60, transport=transport) as reader,
    ):
        store.put({"w": values})
        np.testing.assert_array_equal(reader.pull()["w"], values.float().numpy())
        assert received(reader) < 2.1 * values.numel() + 5000
        values[7] = float("nan")
        store.put({"w": values})
        np.testing.assert_array_equal(reader.pull()["w"], values.float().numpy())


def received(reader: psd_client.Reader) -> int:
    """Bytes that a reader has received so far."""
    return sum(lane.traffic.received_bytes for lane in reader._shards.lanes)


def test_names_and_patterns(cluster: Callable[..., Any]) -> None:
    """Of a store's tensors, as of a job's; the meta comes with them, and is none of them."""
    servers = cluster(2).servers
    adapters = {f"layers.{i}.lora_{ab}": np.full(8, i, np.float32) for i in range(2) for ab in "AB"}
    with psd_client.publish(servers) as store, psd_client.connect(servers, role="reader", wait_timeout=60) as reader:
        store.put({**adapters, "layers.0.norm": np.zeros(8, np.float32)}, {"step": 7})
        found = reader.pull(names=["layers.*.lora_*"])
        assert (list(found), found.meta) == (list(adapters), {"step": 7})
        assert list(reader.pull(names=["*"])) == [*adapters, "layers.0.norm"]
        out = {"layers.1.lora_B": np.zeros(8, np.float32)}
        assert reader.pull(out=out).meta == {"step": 7}
        assert out["layers.1.lora_B"].tolist() == [1] * 8
        with pytest.raises(psd_client.InvalidRequest, match=f"no tensor is called {META_TENSOR!r}"):
            reader.pull(names=[META_TENSOR])
        with pytest.raises(psd_client.InvalidRequest, match="dtype: expected one of float32, bfloat16, float16, got 'int8'"):
            reader.pull(dtype="int8")


def test_a_put_that_is_wrong_is_refused_by_name(cluster: Callable[..., Any]) -> None:
    """And nothing is published."""
    servers = cluster(2).servers
    good = {"a": np.ones(3, np.float32), "b": torch.zeros(2, 2)}
    wrong: dict[str, Any] = {
        "state: 'b' is missing": {"a": good["a"]},
        "state: 'c' was not declared": {**good, "c": np.ones(1)},
        r"state\['a'\]: shape must be \(3,\), as declared, got \(4,\)": {**good, "a": np.ones(4, np.float32)},
        r"state\['a'\]: dtype must be float32, as declared, got float64": {**good, "a": np.ones(3)},
        r"state\['b'\]: dtype must be one of .*, got complex64": {**good, "b": torch.zeros(2, 2, dtype=torch.complex64)},
        r"state\['b'\]: is on the meta device": {**good, "b": torch.zeros(2, 2, device="meta")},
        r"state\['b'\]: is torch.sparse_coo": {**good, "b": torch.zeros(2, 2).to_sparse()},
        "state: expected tensors by name, got 3": 3,
    }
    with psd_client.publish(servers) as store, psd_client.connect(servers, role="reader", wait_timeout=60) as reader:
        for message, state in {
            "state: is empty": {},
            r"state\['psd.meta'\]: is psd's own name": {META_TENSOR: np.ones(1)},
            "names must be strings, got 1": {1: np.ones(1)},
        }.items():
            with pytest.raises(psd_client.InvalidTensor, match=message):
                store.put(state)
        store.put(good)
        for message, state in wrong.items():
            with pytest.raises(psd_client.InvalidTensor, match=message):
                store.put(state)
        with pytest.raises(psd_client.NonFiniteGradient, match="'a'"):
            store.put({**good, "a": np.array([1, np.nan, 2], np.float32)})
        for message, meta in {
            "meta: has 5000 bytes, the limit of this store is 4096": b"x" * 5000,
            "meta: JSON cannot hold it": {"a": object()},
            "meta: expected a dict for JSON, bytes or None, got 3": 3,
        }.items():
            with pytest.raises(psd_client.InvalidRequest, match=message):
                store.put(good, meta)  # type: ignore[arg-type]
        assert reader.pull().version == 1
        assert store.put(good) == 2


def test_publish_when_an_argument_is_wrong_then_says_so() -> None:
    """Before anything is connected."""
    w = {"w": np.ones(1)}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("like: parts say already", {"like": w, "parts": [w]}),
        ("parts: expected a list", {"parts": {}}),
        ("rank: must be 0 to 0, got 1", {"rank": 1}),
        ("rank: not given", {"parts": [w, w]}),
        ("meta_bytes: must be 0 to 65536, got 65537", {"meta_bytes": 65537}),
        ("nan_policy: must be refuse or allow, got 'skip'", {"nan_policy": "skip"}),
    ]
    for message, arguments in cases:
        with pytest.raises(psd_client.InvalidRequest, match=message):
            psd_client.publish("127.0.0.1:1", **arguments)


def test_the_next_publisher_goes_on_with_the_versions(cluster: Callable[..., Any]) -> None:
    """The earlier one is told that its place is taken; a store keeps its tensors."""
    servers = cluster(2).servers
    with psd_client.connect(servers, role="reader", wait_timeout=60) as reader:
        with psd_client.publish(servers) as first:
            first.put({"w": np.full(5000, 1, np.float32)})
            with psd_client.publish(servers, like={"w": np.zeros(5000, np.float32)}) as second:
                assert second.version == 1
                assert reader.pull().version == 1
                with pytest.raises(psd_client.SessionFenced):
                    first.put({"w": np.full(5000, 9, np.float32)})
                assert second.put({"w": np.full(5000, 2, np.float32)}) == 2
                assert reader.pull()["w"].tolist() == [2] * 5000
        with (
            psd_client.publish(servers) as third,
            pytest.raises(psd_client.SpecMismatch, match="parameter 'w': is in the job, is not in this worker's"),
        ):
            third.put({"v": np.zeros(2)})


def test_a_reader_of_a_job_that_trains_is_the_same_thing(cluster: Callable[..., Any]) -> None:
    """Its versions are rounds, and there is no meta."""
    servers = cluster(2).servers
    with (
        psd_client.connect(servers, 0, 1) as ps,
        psd_client.connect(servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare({"w": np.zeros(20_000, np.float32)}, psd_client.SGD(lr=1.0))
        begun = reader.pull()
        ps.push_pull({"w": np.ones(20_000, np.float32)})
        stepped = reader.pull(dtype="bfloat16")

    assert (begun.version, begun.meta, stepped.version, stepped.meta) == (0, None, 1, None)
    assert begun.digest != stepped.digest
    assert stepped["w"].tolist() == [-1] * 20_000


def test_several_processes_put_their_parts_of_one_version(cluster: Callable[..., Any]) -> None:
    """A version is there once all have put theirs; bits are those that were put, negative zeros included."""
    servers = cluster(2).servers
    parts = [{"a": np.zeros(5000, np.float32), "count": np.array(0)}, {"b": torch.zeros(300, dtype=torch.bfloat16)}]

    def put_all(rank: int) -> list[int]:
        with psd_client.publish(servers, parts=parts, rank=rank, wait_timeout=100) as store:
            versions = []
            for step in range(1, 4):
                state = {name: value - step if rank else -value for name, value in parts[rank].items()}
                versions.append(store.put(state, {"step": step}))
            met.wait(100)
            return versions

    met = threading.Barrier(3)
    with ThreadPoolExecutor(2) as pool, psd_client.connect(servers, role="reader", wait_timeout=100) as reader:
        putting = [pool.submit(put_all, rank) for rank in range(2)]
        found = reader.pull(newer_than=2)
        met.wait(100)
        assert [job.result(100) for job in putting] == [[1, 2, 3]] * 2

    assert (found.version, found.meta, list(found)) == (3, {"step": 3}, ["a", "count", "b"])
    assert found["b"].tolist() == [-3] * 300
    assert np.signbit(found["a"]).all()
    assert found["count"].tolist() == 0


def test_versions_after_a_checkpoint_never_come_again(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """A store that goes on from a checkpoint has its tensors and their meta as a later version than any that was read."""
    url = tmp_path / "checkpoints"
    state = {"w": np.arange(3000, dtype=np.int32), "v": torch.ones(5, dtype=torch.bfloat16), "is": np.array([True, False])}

    def lives(shards: int) -> tuple[Any, list[int]]:
        """One life of the store: what readers find first, and all versions that they could have."""
        running = cluster(shards, checkpoint_dir=str(url))
        with (
            psd_client.publish(running.servers, like=state, wait_timeout=100) as store,
            psd_client.connect(running.servers, role="reader", wait_timeout=100) as reader,
        ):
            begun = store.version
            found = reader.pull() if begun else None
            assert found is None or found.version == begun
            versions = [begun] + [store.put({**state, "w": state["w"] + step}, {"step": step}) for step in range(1, 4)]
            assert reader.pull().version == versions[-1]
        running.finish()
        return found, versions

    _, first = lives(2)
    kept = {path.name for path in url.iterdir()}
    found, second = lives(3)
    for path in url.iterdir():  # as if the store had been lost before they were stored
        if path.name.startswith("timeline") and path.name not in kept:
            shutil.rmtree(path)
    again, third = lives(1)

    assert first == [0, 1, 2, 3]
    assert first[-1] < second[0] < second[-1] < third[0]
    for weights in (found, again):
        assert weights.meta == {"step": 3}
        np.testing.assert_array_equal(weights["w"], state["w"] + 3)
        assert (weights["v"].tolist(), weights["is"].tolist()) == ([1.0] * 5, [True, False])


def test_parts_of_different_puts_are_not_mixed(cluster: Callable[..., Any]) -> None:
    """A process that died after it had put its part, while another had not, begins the version again, with what it now puts."""
    running = cluster(2)
    servers = running.servers
    parts = [{"a": np.zeros(3)}, {"b": np.zeros(3)}]

    def opened(rank: int) -> psd_client.Store:
        return psd_client.publish(servers, parts=parts, rank=rank, wait_timeout=100)

    with ThreadPoolExecutor(4) as pool, psd_client.connect(servers, role="reader", wait_timeout=100) as reader:
        one, other = (job.result(100) for job in [pool.submit(opened, rank) for rank in range(2)])
        with pytest.raises(psd_client.InvalidRequest, match="meta: not given"):
            one.put(parts[0])
        early = pool.submit(one.put, {"a": np.full(3, 1.0)}, {"step": 1})
        wait_until(lambda: bool(running.shards[0].shard._core.waiting.open(0)), "the part is there")
        with pytest.raises(psd_client.InvalidRequest, match="worker 0 has put its part of another version"):
            other.put({"b": np.full(3, 2.0)}, {"step": 2})
        again = opened(0)  # as a process that was started again
        with pytest.raises(psd_client.SessionFenced):
            early.result(100)
        putting = pool.submit(again.put, {"a": np.full(3, 2.0)}, {"step": 2})
        assert other.put({"b": np.full(3, 2.0)}, {"step": 2}) == putting.result(100) == 1
        found = reader.pull()
        assert (found["a"].tolist(), found["b"].tolist(), found.meta) == ([2.0] * 3, [2.0] * 3, {"step": 2})
        for store in (again, other, one):
            store.close()
