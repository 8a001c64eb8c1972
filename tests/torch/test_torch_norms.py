"""clip_norm is torch.nn.utils.clip_grad_norm_ of one process on the joined batch, alone and together with a GradScaler."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, part, scaled_backward, small_model, train_part, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402
from torch.optim import SGD, Adam, AdamW  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

STEPS = 20
CLIP_NORM = 0.5
BAD_STEPS = {3: 0, 7: 1}  # step -> the rank whose gradient is infinite there
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
}


def alone(make):
    """One process, which clips some of its gradients."""
    model, clipped = small_model(), 0
    optimizer = make(model.parameters())
    for step in range(STEPS):
        backward(model, *batch(step))
        clipped += clip_grad_norm_(model.parameters(), CLIP_NORM).item() > CLIP_NORM
        optimizer.step()
    assert 0 < clipped < STEPS
    return values(model)


@pytest.mark.parametrize(("world_size", "shards"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_clipping_equals_that_of_one_process(run_workers, world_size, shards, make):
    """PEERS: clipping per shard, or per worker, gives other numbers."""
    expected = alone(make)

    for actual in run_workers(
        world_size, shards, lambda ps: train_part(ps, lambda model: make(model.parameters()), clip_norm=CLIP_NORM)
    ):
        assert_close(actual, expected)


def test_parameters_without_a_gradient_have_no_part_in_the_norm(run_workers):
    """As in torch; nor do frozen ones."""

    def train(model, optimizer, clip, *, batches):
        model[0].bias.requires_grad_(False)
        for step in range(6):
            optimizer.zero_grad()
            hidden = model[1](model[0](batches(step)[0]))
            (nn.functional.mse_loss(model[2](hidden), batches(step)[1]) if step % 2 else hidden.square().sum()).backward()
            clip()
            optimizer.step()
        return values(model)

    model = small_model()
    expected = train(
        model, SGD(model.parameters(), lr=0.1), lambda: clip_grad_norm_(model.parameters(), CLIP_NORM), batches=batch
    )

    def worker(ps):
        model = small_model()
        model[0].bias.requires_grad_(False)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, clip_norm=CLIP_NORM)
        return train(model, optimizer, lambda: None, batches=batch)

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected)


def test_clipping_and_mixed_precision_together_equal_one_process(run_workers):
    """Each worker has a scaler of its own; a round with an infinite gradient is skipped by all."""

    def scaler_of():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    model, scaler = small_model(), scaler_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        scaled_backward(scaler, model, *batch(step), is_bad=step in BAD_STEPS)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

    def worker(ps):
        model, scaler = small_model(), scaler_of()
        given = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psd.distribute(model, given, ps=ps, clip_norm=CLIP_NORM, nan_policy="skip")
        for step in range(STEPS):
            x, y = part(step, ps.rank, 2)
            scaled_backward(scaler, model, x, y, is_bad=BAD_STEPS.get(step) == ps.rank)
            scaler.step(optimizer, batch_size=len(x))
            scaler.update()
        ps.barrier("end")
        return scaler.get_scale(), ps.stats()["rounds_skipped"], values(model)

    found = run_workers(2, 2, worker)
    for scale, skipped, trained in found:
        assert (scale, skipped) == (scaler.get_scale(), len(BAD_STEPS))
        assert_close(trained, values(model))
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_overlap_clips_in_rounds_and_is_refused_without(run_workers, mode):
    """In rounds the shards have the norm; without them the worker would have to know it before it sends anything."""
    expected = alone(OPTIMIZERS["sgd"])

    def worker(ps):
        model = small_model()
        given = OPTIMIZERS["sgd"](model.parameters())
        if mode == "async":
            with pytest.raises(InvalidRequest, match="overlap: not with clip_norm under consistency='async'"):
                psd.distribute(model, given, ps=ps, clip_norm=CLIP_NORM, overlap=True, consistency=mode)
            return []
        optimizer = psd.distribute(model, given, ps=ps, clip_norm=CLIP_NORM, overlap=True, consistency=mode)
        for step in range(STEPS):
            backward(model, *batch(step))
            optimizer.step()
        return values(model)

    (actual,) = run_workers(1, 2, worker)
    assert_close(actual, expected if mode == "sync" else [])
