"""Embeddings whose rows are on the shards, as keras.layers.Embedding in one process; on either backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from helpers_keras import assert_close

import psd_client
import psd_client.keras as psd
from psd.contract.errors import InvalidRequest, NotDeclared

IDS, DIM, BATCH, STEPS = 30, 4, 16, 6
BACKEND = keras.backend.backend()


def model_of(user, item):
    inputs = keras.layers.Input((), dtype="int64"), keras.layers.Input((3,), dtype="int32")
    rows = keras.layers.concatenate([user(inputs[0]), keras.layers.Flatten()(item(inputs[1]))])
    model = keras.Model(inputs, keras.layers.Dense(1, name="top")(rows))
    rng = np.random.default_rng(1)
    top = model.get_layer("top")
    top.set_weights([rng.uniform(-0.4, 0.4, weight.shape) for weight in top.get_weights()])
    return model


def data(rank=0, world_size=1):
    """This worker's share of each batch, ids repeated."""
    rng = np.random.default_rng(2)
    arrays = (
        rng.integers(IDS // 3, size=(STEPS, BATCH)),
        rng.integers(IDS, size=(STEPS, BATCH, 3)),
        rng.normal(size=(STEPS, BATCH, 1)),
    )
    users, items, targets = (array[:, rank::world_size].reshape(-1, *array.shape[2:]) for array in arrays)
    return [users.astype(np.int64), items.astype(np.int32)], targets.astype(np.float32)


def fit(model, rank=0, world_size=1):
    model.fit(*data(rank, world_size), batch_size=BATCH // world_size, shuffle=False, verbose=0)


def outputs(model):
    return model.predict([np.arange(IDS), np.arange(3 * IDS).reshape(IDS, 3) % IDS], verbose=0, batch_size=IDS)


@pytest.mark.parametrize("options", [{}, {"loss_scale_factor": 128.0}])
def test_fit_trains_rows_as_one_process_does(run_workers, options):
    """Of a rule of its own, and of the optimizer's, by whose learning rate; gradients that Keras scales are unscaled."""

    def worker(ps):
        tables = psd.Embedding("user", DIM, seed=3), psd.Embedding("item", DIM, psd_client.SGD(lr=0.2), seed=3)
        model = model_of(*tables)
        if ps.rank:
            ps.barrier("declared")
        optimizer = psd.distribute(model, keras.optimizers.SGD(0.2, **options), ps=ps)
        if not ps.rank:
            ps.barrier("declared")
        model.compile(optimizer=optimizer, loss="mse")
        rows = [table(np.arange(IDS)) for table in tables]
        rows = [keras.ops.convert_to_numpy(values).copy() for values in rows]
        ps.barrier("begin")
        fit(model, ps.rank, 2)
        return rows, outputs(model), ps.clock

    (rows, first, clock), (_, second, _) = run_workers(2, 2, worker)
    alone = model_of(*(keras.layers.Embedding(IDS, DIM, name=name) for name in ("user", "item")))
    for name, values in zip(("user", "item"), rows, strict=True):
        alone.get_layer(name).set_weights([values])
    alone.compile(optimizer=keras.optimizers.SGD(0.2), loss="mse")
    fit(alone)
    assert clock == STEPS
    assert_close([first, second], [outputs(alone)] * 2)


def step(model, optimizer, change=lambda gradients: gradients, **call):
    """One step of a loop of one's own, on the first batch. change: what is done to the gradients."""
    ids, targets = data()
    inputs = [array[:BATCH] for array in ids]
    variables = model.trainable_variables
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, **call) - targets[:BATCH]))
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
    else:
        import torch

        model.zero_grad()
        (model(inputs, **call) - torch.from_numpy(targets[:BATCH])).square().mean().backward()
        gradients = [variable.value.grad for variable in variables]
    optimizer.apply_gradients(zip(change(gradients), variables, strict=True))


def pair(ps, make):
    """A model with psd's embeddings and its optimizer, and one with Keras's own, of the same values."""
    tables = psd.Embedding("user", DIM, seed=3), psd.Embedding("item", DIM, seed=3)
    mine, theirs = model_of(*tables), model_of(*(keras.layers.Embedding(IDS, DIM, name=name) for name in ("user", "item")))
    optimizer = psd.distribute(mine, make(), ps=ps)
    for table in tables:
        theirs.get_layer(table.name).set_weights([keras.ops.convert_to_numpy(table(np.arange(IDS))).copy()])
    return (mine, optimizer), (theirs, make())


@pytest.mark.parametrize("call", [{}, {"training": False}, {"training": True}], ids=str)
def test_a_loop_of_ones_own_trains_rows_as_keras_does(run_workers, call):
    """Keras's embedding knows of no `training`: whoever takes its gradient trains it."""

    def worker(ps):
        pairs = pair(ps, lambda: keras.optimizers.SGD(0.5))
        for model, optimizer in pairs:
            for _ in range(3):
                step(model, optimizer, **call)
        return [outputs(model) for model, _ in pairs]

    ((mine, theirs),) = run_workers(1, 1, worker)
    assert_close([mine], [theirs])


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_rows_that_a_step_does_not_touch_go_on_as_keras_own_do(run_workers, name):
    """By momentum, and by moments that die out: users of the second batch were in the first."""

    def worker(ps):
        options = {"Adam": {}, "SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}[name]
        pairs = pair(ps, lambda: getattr(keras.optimizers, name)(0.05, **options))
        for model, optimizer in pairs:
            model.compile(optimizer=optimizer, loss="mse")
            rng = np.random.default_rng(4)
            for _ in range(12):  # no id twice in a batch, where Keras on TensorFlow would add up the squares of the parts
                ids = rng.permutation(IDS)[:8], rng.permutation(IDS)[:24].reshape(8, 3).astype(np.int32)
                model.train_on_batch(ids, rng.normal(size=(8, 1)).astype(np.float32))
        return [outputs(model) for model, _ in pairs]

    ((mine, theirs),) = run_workers(1, 1, worker)
    assert_close([mine], [theirs], 1e-4)


def test_what_is_done_to_each_element_of_all_gradients_is_refused(run_workers):
    """The rows' are not there to be clipped; what multiplies all of them is right."""
    ops = keras.ops

    def worker(ps):
        (model, optimizer), (alone, theirs) = pair(ps, lambda: keras.optimizers.SGD(0.5))
        for change in (
            lambda gradients: [ops.clip(gradient, -1e-3, 1e-3) for gradient in gradients],
            lambda gradients: [ops.sign(gradient) for gradient in gradients],
            lambda gradients: [gradient + 0.1 for gradient in gradients],
        ):
            with pytest.raises(InvalidRequest, match=r"embedding '\w+': the gradient of its handle"):
                step(model, optimizer, change)
        assert ps.clock == 0
        for each in ((model, optimizer), (alone, theirs)):
            step(*each, lambda gradients: [gradient * 0.25 for gradient in gradients])
        return outputs(model), outputs(alone)

    ((mine, theirs),) = run_workers(1, 1, worker)
    assert_close([mine], [theirs])


def test_a_frozen_layer_keeps_its_rows(run_workers):
    """As Keras's own does, while the others are trained."""

    def worker(ps):
        tables = psd.Embedding("user", DIM, seed=3), psd.Embedding("item", DIM, seed=3)
        tables[0].trainable = False
        model = model_of(*tables)
        model.compile(optimizer=psd.distribute(model, keras.optimizers.SGD(0.5), ps=ps), loss="mse")
        before = [keras.ops.convert_to_numpy(table(np.arange(IDS))).copy() for table in tables]
        fit(model)
        after = [keras.ops.convert_to_numpy(table(np.arange(IDS))) for table in tables]
        return [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]

    assert run_workers(1, 1, worker) == [[True, False]]


def test_without_distribute_and_with_two_declarations_the_error_says_what_to_do(run_workers):
    layer = psd.Embedding("user", DIM)
    with pytest.raises(NotDeclared, match=r"embedding 'user': .* call psd_client\.keras\.distribute"):
        layer(np.array([1, 2]))

    def worker(ps):
        model = model_of(layer, psd.Embedding("user", DIM, seed=1, name="other"))
        with pytest.raises(InvalidRequest, match="'user': two layers declare"):
            psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps)

    run_workers(1, 1, worker)


def test_a_saved_model_has_the_layer_without_its_rows(run_workers, tmp_path):
    """It loads as a model that can be declared again."""
    rule = psd_client.Adam(lr=0.5, betas=(0.8, 0.9))
    model = model_of(psd.Embedding("user", DIM, rule, init=psd_client.Normal(0.2)), psd.Embedding("item", DIM, max_rows=9))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for name in ("user", "item"):
        before, after = model.get_layer(name), loaded.get_layer(name)
        assert (after.spec, after.optimizer) == (before.spec, before.optimizer)

    def worker(ps):
        psd.distribute(loaded, keras.optimizers.SGD(0.1), ps=ps)
        return outputs(loaded).shape

    assert run_workers(1, 1, worker) == [(IDS, 1)]
