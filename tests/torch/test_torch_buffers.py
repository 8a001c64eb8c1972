"""Buffers, such as BatchNorm's statistics, are in checkpoints, in exports and on the workers that come later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import psd_client
import psd_client.torch as psd
from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidTensor

FEATURES = 6


class Net(nn.Module):
    """BatchNorm, a tied parameter, a shared module, and buffers of other kinds; one that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.same_norm = self.norm
        self.last = nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int32))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen[int(self.norm.num_batches_tracked) % 5] = True
            self.narrow += 1
            self.scratch += 1
        return self.last(self.norm(self.first(x)))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def train(ps: psd_client.ParameterServer, *, steps: int, **options: object) -> dict[int, dict[str, torch.Tensor]]:
    """What the model was when it had been distributed, and after each step, by the clock."""
    torch.manual_seed(ps.rank)
    model = Net()
    optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps, **options)
    states = {ps.clock: state_of(model)}
    while ps.clock < steps:
        x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(100 * ps.rank + ps.clock)) + ps.rank
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        states[ps.clock] = state_of(model)
    optimizer.close()
    return states


def run(servers: str, world_size: int, **options: object) -> list[dict[int, dict[str, torch.Tensor]]]:
    def worker(rank: int) -> dict[int, dict[str, torch.Tensor]]:
        with psd_client.connect(servers, rank, world_size, wait_timeout=120) as ps:
            return train(ps, **options)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(worker, range(world_size)))


def exported(url: str, path: str, build: Callable[[], nn.Module] = Net) -> dict[int, dict[str, torch.Tensor]]:
    """The state of a model that has loaded each valid checkpoint strictly, by step."""
    directory = CheckpointDirectory(url)
    found = {}
    for info in directory.checkpoints():
        directory.export(directory.load(info.name), path)
        model = build()
        missing, unexpected = load_model(model, path, strict=False)
        assert not missing
        # Of BatchNorm under two names it refuses even a file of its own save_model: torch adds the count that is missing there.
        assert [name for name in unexpected if not name.endswith("norm.num_batches_tracked")] == []
        found[info.step] = state_of(model)
    return found


@pytest.mark.parametrize(("shards", "overlap"), [(1, False), (5, True)])
def test_checkpoints_then_have_the_first_workers_buffers_and_load_strictly(cluster, tmp_path, shards, overlap):
    """Also where some shards have buffers alone, and nobody pushes to them."""
    url = str(tmp_path / "checkpoints")
    running = cluster(shards, checkpoint_dir=url, checkpoint_steps=4, checkpoint_keep=9)
    first, second = run(running.servers, 2, steps=10, overlap=overlap)
    running.finish()

    found = exported(url, str(tmp_path / "model.safetensors"))

    assert found.keys() == {4, 8, 10}
    for step, tensors in found.items():
        assert_same(tensors, first[step])
    assert not torch.equal(first[10]["norm.running_mean"], second[10]["norm.running_mean"])


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_workers_of_a_restored_job_then_begin_with_the_buffers(cluster, tmp_path, consistency):
    """On another number of shards, by other workers, with another policy."""
    url = str(tmp_path / "checkpoints")
    running = cluster(3, checkpoint_dir=url)
    (first,) = run(running.servers, 1, steps=5, consistency=consistency)
    running.finish()

    restored = run(cluster(2, checkpoint_dir=url).servers, 2, steps=5, consistency=consistency, buffers="mean")

    for states in restored:
        assert_same(states[5], first[5])


def test_mean_of_all_workers_buffers_is_kept(cluster, tmp_path):
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_steps=4)
    states = run(running.servers, 3, steps=5, buffers="mean")
    running.finish()

    found = exported(url, str(tmp_path / "model.safetensors"))

    for step in (4, 5):
        for name in ("norm.running_mean", "norm.running_var"):
            expected = torch.stack([state[step][name] for state in states]).double().mean(0).float()
            assert torch.equal(found[step][name], expected)
        assert found[step]["norm.num_batches_tracked"] == step


def test_asynchronous_cut_then_waits_for_the_buffers(cluster, tmp_path):
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_steps=3, checkpoint_keep=9)
    (states,) = run(running.servers, 1, steps=8, consistency="async")
    running.finish()

    found = exported(url, str(tmp_path / "model.safetensors"))

    assert {3, 8} <= found.keys()
    assert found[3]["norm.num_batches_tracked"] in (3, 4)
    assert_same(found[8], states[8])


def test_checkpoint_when_a_shard_has_frozen_parameters_alone_then_is_complete(cluster, tmp_path):
    """Nobody pushes to it, and so nobody told it of cuts."""
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_steps=4)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)

    model = build()
    model[1].requires_grad_(True)
    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps)
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    running.finish()

    assert exported(url, str(tmp_path / "model.safetensors"), build).keys() == {4, 6}


def test_buffer_that_shards_cannot_keep_is_refused_by_name():
    model = Net()
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidTensor, match=r"'phases' has dtype torch.complex64.*buffers=\"local\""):
        psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Averaging(nn.Module):
    """A running mean that each forward pass assigns anew, as it is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)


def test_buffer_that_is_assigned_anew_is_stored_restored_and_checked(cluster, tmp_path):
    """Where the module has another tensor than when it was declared, that one counts."""
    url = str(tmp_path / "checkpoints")

    def begin(ps):
        model = Averaging()
        return model, psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps)

    def step(model, optimizer):
        model(torch.ones(2, FEATURES)).sum().backward()
        optimizer.step()

    running = cluster(2, checkpoint_dir=url, checkpoint_steps=2, checkpoint_keep=9)
    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        model, optimizer = begin(ps)
        step(model, optimizer)
        optimizer.load_parameters({**state_of(model), "mean": torch.ones(FEATURES)})
        assert torch.equal(model.mean, torch.ones(FEATURES))
        step(model, optimizer)
        last = state_of(model)
        for other, words in ((torch.zeros(1), r"has the shape \(1,\)"), (None, "is None")):
            model.mean = other
            with pytest.raises(InvalidTensor, match=rf"buffer 'mean' {words}, and was declared with the shape \(6,\)"):
                ps._worker.declared.buffers.fill(0)
        model.mean = last["mean"]
    running.finish()

    assert_same(exported(url, str(tmp_path / "model.safetensors"), Averaging)[2], last)
