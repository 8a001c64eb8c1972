"""Each of Keras's optimizers, distributed over shards under model.fit, is the same optimizer in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from helpers_keras import (
    BATCH,
    EPOCHS,
    STEPS,
    assert_close,
    data,
    distribute_in_order,
    fit,
    fit_worker,
    small_model,
    train_alone,
)

import psd_client.keras as psd

OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, {"learning_rate": 0.1}),
    "SGD momentum": (keras.optimizers.SGD, {"learning_rate": 0.1, "momentum": 0.9}),
    "SGD Nesterov": (keras.optimizers.SGD, {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (keras.optimizers.Adagrad, {"learning_rate": 0.1, "epsilon": 1e-3}),
    "Adadelta": (keras.optimizers.Adadelta, {"learning_rate": 1.0}),
    "RMSprop": (keras.optimizers.RMSprop, {"learning_rate": 0.01, "epsilon": 1e-3}),
    "RMSprop centered": (keras.optimizers.RMSprop, {"learning_rate": 0.01, "momentum": 0.5, "centered": True}),
    "Adam": (keras.optimizers.Adam, {"learning_rate": 0.01}),
    "Adam amsgrad": (keras.optimizers.Adam, {"learning_rate": 0.01, "amsgrad": True, "epsilon": 1e-3, "weight_decay": 0.1}),
    "AdamW": (keras.optimizers.AdamW, {"learning_rate": 0.01, "weight_decay": 0.1}),
    "Adamax": (keras.optimizers.Adamax, {"learning_rate": 0.01, "epsilon": 1e-3}),
    "Nadam": (keras.optimizers.Nadam, {"learning_rate": 0.01}),
    "Ftrl": (
        keras.optimizers.Ftrl,
        {"learning_rate": 0.1, "beta": 0.5, "l1_regularization_strength": 1e-3, "l2_regularization_strength": 1e-2},
    ),
    "Lamb": (keras.optimizers.Lamb, {"learning_rate": 0.01}),
    "Lion": (keras.optimizers.Lion, {"learning_rate": 0.001, "weight_decay": 0.1}),
    "clipping": (keras.optimizers.SGD, {"learning_rate": 0.1, "momentum": 0.9, "global_clipnorm": 0.3}),
    "loss scale": (keras.optimizers.Adam, {"learning_rate": 0.01, "loss_scale_factor": 1024.0}),
}


if keras.backend.backend() == "tensorflow":  # where tracing takes seconds; which rule is which does not depend on the backend
    OPTIMIZERS = {name: OPTIMIZERS[name] for name in ("SGD", "SGD momentum", "Adam", "Adadelta", "Lamb")}


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_workers_on_two_shards_equal_one_process(run_workers, kind, options):
    """30 steps, to 1e-5, and to the same bits on both workers, which began with different values."""
    expected = train_alone(lambda: kind(**options))

    first, second = run_workers(2, 2, fit_worker(lambda: kind(**options)))

    assert_close(first, expected)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_schedule_takes_effect_on_new_gradients_alone(run_workers):
    """Keras has the learning rate inside of the velocity; and schedules follow the number of steps."""

    def make():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=3, decay_rate=0.5, staircase=True)
        return keras.optimizers.SGD(schedule, momentum=0.9)

    for actual in run_workers(2, 2, fit_worker(make)):
        assert_close(actual, train_alone(make))


def test_excluded_variables_do_not_decay(run_workers):
    """exclude_from_weight_decay makes a group of its own."""

    def make():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=1.0)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    for actual in run_workers(2, 2, fit_worker(make)):
        assert_close(actual, train_alone(make))


def test_uneven_batches_are_weighted_by_their_samples(run_workers):
    """A worker with 4 of 16 samples says so before each step."""
    x, y = data()

    def worker(ps):
        model = small_model()
        optimizer = distribute_in_order(ps, model, keras.optimizers.SGD(0.1))
        model.compile(optimizer=optimizer, loss="mse")
        mine = slice(0, 4) if ps.rank == 0 else slice(4, BATCH)
        optimizer.batch_size = len(x[0, mine])
        for _ in range(EPOCHS):
            for step in range(STEPS):
                model.train_on_batch(x[step, mine], y[step, mine])
        return model.get_weights()

    for actual in run_workers(2, 2, worker):
        assert_close(actual, train_alone(lambda: keras.optimizers.SGD(0.1)))


@pytest.mark.parametrize(
    ("consistency", "kind"),
    [("async", keras.optimizers.SGD), ("async", keras.optimizers.Adam), ("ssp:2", keras.optimizers.Adam)],
)
def test_without_rounds_the_same_task_converges(run_workers, consistency, kind):
    """To what sync reaches, roughly: stale gradients cost something."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, kind(0.02), ps=ps, consistency=consistency, staleness="lr")
        model.compile(optimizer=optimizer, loss="mse")
        fit(model, ps.rank, ps.world_size, epochs=20)
        ps.barrier("trained")
        optimizer.pull()
        x, y = data()
        return model.evaluate(x.reshape(-1, 6), y.reshape(-1, 3), verbose=0), model.get_weights()

    x, y = data()
    model = small_model()
    model.compile(loss="mse")
    before = model.evaluate(x.reshape(-1, 6), y.reshape(-1, 3), verbose=0)
    (loss, first), (_, second) = run_workers(2, 2, worker)

    assert loss < before / 2
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))  # nobody pushes any more
