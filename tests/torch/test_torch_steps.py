"""The steps of a small model are armed, and end in the bits that they end in without that; so do its checkpoints."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, backward, batch, small_model, values  # noqa: E402
from torch.optim import SGD, Adam  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.checkpoint import CheckpointDirectory  # noqa: E402
from psd.contract.layout import Layout  # noqa: E402
from psd_client import connect  # noqa: E402


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_model_ends_in_the_same_bits_whether_armed_or_not(cluster, watch, transport, dtype):
    ends = []
    for never_armed in (True, False):
        with connect(cluster(2, never_armed=never_armed).servers, 0, 1, transport=transport) as ps:
            model = small_model(dtype)
            optimizer = psd.distribute(model, Adam(model.parameters(), lr=0.1), ps=ps)
            for step in range(STEPS):
                backward(model, *batch(step, dtype))
                optimizer.step()
            ends.append([value.view(torch.uint8).numpy().tobytes() for value in values(model)])
        assert (True in watch.took) is not never_armed

    assert ends[0] == ends[1]


def trained(servers, consistency, buffers, settle):
    """The state of a model with BatchNorm after some steps, for which `settle` is called before."""
    with connect(servers, 0, 1, wait_timeout=120) as ps:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        sgd = SGD(model.parameters(), lr=0.1)
        optimizer = psd.distribute(model, sgd, ps=ps, consistency=consistency, buffers=buffers)
        while ps.clock < 40:
            settle()
            optimizer.zero_grad()
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(ps.clock))
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("buffers", ["first", "mean"])
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_buffers_in_checkpoints_are_those_of_the_step(cluster, watch, tmp_path, consistency, buffers, shards):
    """They are sent before the push that reaches the cut, which is made the long way."""
    found = []
    for never_armed in (True, False):
        url = str(tmp_path / str(never_armed))
        running = cluster(shards, checkpoint_dir=url, checkpoint_steps=10, checkpoint_keep=100, never_armed=never_armed)

        def settle(running=running):
            while any(shard.shard.cuts.is_storing for shard in running.shards):
                threading.Event().wait(0.001)

        state = trained(running.servers, consistency, buffers, settle)
        running.finish()
        directory, stored = CheckpointDirectory(url), []
        for info in directory.checkpoints():
            assert not info.reason
            manifest = directory.load(info.name)
            blocks = directory.read_blocks(manifest, Layout(manifest.spec, 1), 0)
            stored.append((info.step, [(block.version, block.parameter.tolist()) for block in blocks]))
        found.append((state, sorted(stored)))

    assert found[0] == found[1]
    assert {10, 20, 30} < {step for step, _ in found[1][1]}
    assert watch.took.count(True) > 10


def test_buffers_that_readers_may_want_are_sent_now_and_then(cluster, watch, monkeypatch):
    """By a push that is made the long way."""
    with connect(cluster(1).servers, 0, 1) as ps:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        for step in range(20):
            if step == 10:
                assert watch.took.count(True) > 5
                watch.took.clear()
                monkeypatch.setattr("psd_client.worker.exchange.buffers.REFRESH_S", 0.0)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        optimizer.close()
    assert watch.took == []
