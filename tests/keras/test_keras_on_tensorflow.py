"""Features of TensorFlow alone: graphs, XLA, tapes, IndexedSlices, and errors that come out of graphs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers_keras import STEPS, assert_close, data, distribute_in_order, fit, fit_worker, small_model, train_alone

import psd_client
import psd_client.keras as psd


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize("options", [{"steps_per_execution": 4}, {"run_eagerly": True}, {"jit_compile": "auto"}])
def test_every_way_to_execute_gives_the_same(run_workers, options):
    """Several steps in one graph, none at all; "auto" means without XLA."""

    def worker(ps):
        model = small_model()
        model.compile(optimizer=psd.distribute(model, momentum(), ps=ps), loss="mse", **options)
        fit(model)
        return model.get_weights(), model.jit_compile

    ((weights, is_compiled),) = run_workers(1, 2, worker)

    assert_close(weights, train_alone(momentum))
    assert not is_compiled


def test_xla_is_switched_off_with_a_warning(run_workers):
    """It cannot compile a call of Python."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, momentum(), ps=ps)
        with pytest.warns(UserWarning, match="Model doesn't support `jit_compile=True`"):
            model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
        return model.jit_compile

    assert run_workers(1, 1, worker) == [False]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("wrap", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_tapes_with_gradients_that_are_missing_or_sparse(run_workers, wrap):
    """An embedding's IndexedSlices, with rows that occur twice, and a layer that the loss does not depend on."""

    def build():
        table = keras.layers.Embedding(7, 3, name="table")
        unused = keras.layers.Dense(2, name="unused")
        out = keras.layers.Dense(1, name="out")
        ids = keras.layers.Input((4,), dtype="int32")
        rows = table(ids)
        model = keras.Model(ids, [out(rows), unused(rows)])
        rng = np.random.default_rng(5)
        model.set_weights([rng.normal(size=w.shape).astype(w.dtype) for w in model.get_weights()])
        return model

    def train(model, optimizer, rows, given=lambda gradient: gradient):
        rng = np.random.default_rng(6)

        @wrap
        def step(ids, targets):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(ids)[0] - targets) ** 2)
            variables = model.trainable_variables
            gradients = [g if g is None else given(g) for g in tape.gradient(loss, variables)]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        for _ in range(6):
            ids, targets = rng.integers(0, 7, (8, 4)), rng.normal(size=(8, 4, 1)).astype(np.float32)
            step(tf.constant(ids[rows], tf.int32), tf.constant(targets[rows]))
        return model.get_weights()

    def worker(ps):
        model = build()
        optimizer = distribute_in_order(ps, model, keras.optimizers.Adam(0.05))
        return train(model, optimizer, slice(4 * ps.rank, 4 * ps.rank + 4))

    expected = train(build(), keras.optimizers.Adam(0.05), slice(0, 8), tf.convert_to_tensor)
    for weights in run_workers(2, 2, worker):
        assert_close(weights, expected)


def test_variables_do_not_share_memory_with_the_buffers(run_workers):
    """TensorFlow may keep what Python returns without copying it; the next pull would then change variables by itself."""

    def worker(ps):
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, use_bias=False)])
        optimizer = psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps)
        for apply in (optimizer.apply, tf.function(optimizer.apply)):
            apply([tf.ones((64, 64))])
            before = model.get_weights()[0]
            ps._worker.parameters.views[0][...] = 99
            assert np.array_equal(model.get_weights()[0], before)
            model.weights[0].assign_add(tf.ones((64, 64)))
            assert (ps._worker.parameters.views[0] == 99).all()
        return True

    assert run_workers(1, 1, worker) == [True]


def test_errors_keep_their_type_in_eager_mode_and_are_kept_in_graph_mode(run_workers):
    """A gradient of NaN is refused, before anything is sent."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, momentum(), ps=ps)
        bad = [tf.fill(v.shape, np.nan) for v in model.trainable_variables]
        with pytest.raises(psd_client.NonFiniteGradient, match="holds NaN or infinity; nothing was sent"):
            optimizer.apply(bad)
        model.compile(optimizer=optimizer, loss="mse")
        x, y = data()
        with pytest.raises(tf.errors.OpError, match="NonFiniteGradient: worker 0: the gradient of"):
            model.train_on_batch(x[0] * np.nan, y[0])
        assert isinstance(optimizer.error, psd_client.NonFiniteGradient)
        model.train_on_batch(x[0], y[0])
        assert optimizer.error is None
        return ps.clock, int(optimizer.iterations)

    assert run_workers(1, 2, worker) == [(1, 1)]


def test_tf_distribute_is_refused():
    """psd takes its place."""
    with (
        tf.distribute.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(psd_client.InvalidRequest, match="psd takes its place"),
    ):
        psd.distribute(small_model(), momentum())


def test_a_first_epoch_that_is_stepped_in_graphs_counts_all_steps(run_workers):
    """iterations inside of a while loop of TensorFlow's."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, momentum(), ps=ps)
        model.compile(optimizer=optimizer, loss="mse", steps_per_execution=3)
        fit(model, epochs=1)
        return int(optimizer.iterations)

    assert run_workers(1, 1, worker) == [STEPS]


def test_fit_worker_on_other_transports(run_workers):
    """The buffers need not be shared memory."""
    for actual in run_workers(2, 2, fit_worker(momentum), transport="grpc"):
        assert_close(actual, train_alone(momentum))
