"""Uses of model.fit: callbacks, frozen layers, statistics, mixed precision, saving; on either backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from helpers_keras import (
    EPOCHS,
    STEPS,
    assert_close,
    data,
    distribute_in_order,
    fit,
    set_values,
    small_model,
    train_alone,
)

import psd_client
import psd_client.keras as psd
from psd.checkpoint import CheckpointDirectory, CheckpointState


def test_callbacks_schedule_stop_and_store(run_workers, tmp_path):
    """LearningRateScheduler changes the rate on all workers alike, ModelCheckpoint stores, EarlyStopping ends it."""

    def callbacks(rank):
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch)),
            keras.callbacks.ModelCheckpoint(str(tmp_path / f"{rank}.keras")),
            keras.callbacks.EarlyStopping(monitor="loss", mode="max", patience=1),  # which falls, so: at once
        ]

    def worker(ps):
        model = small_model()
        optimizer = distribute_in_order(ps, model, keras.optimizers.SGD(0.5, momentum=0.9))
        model.compile(optimizer=optimizer, loss="mse")
        history = fit(model, ps.rank, ps.world_size, epochs=5, callbacks=callbacks(ps.rank))
        return model.get_weights(), len(history.epoch), float(optimizer.learning_rate), int(optimizer.iterations), ps.clock

    alone = small_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.5, momentum=0.9), loss="mse")
    fit(alone, epochs=5, callbacks=callbacks("alone"))
    for weights, epochs, rate, iterations, clock in run_workers(2, 2, worker):
        assert_close(weights, alone.get_weights())
        assert (epochs, iterations, clock) == (2, 2 * STEPS, 2 * STEPS)
        assert rate == pytest.approx(0.05)
    stored = keras.models.load_model(tmp_path / "1.keras", compile=False)
    assert_close(stored.get_weights(), alone.get_weights())


def test_parameters_that_come_as_differences_are_the_same_on_all_workers(run_workers):
    def worker(ps):
        model = small_model()
        optimizer = distribute_in_order(ps, model, keras.optimizers.SGD(0.5, momentum=0.9), pull="int8")
        model.compile(optimizer=optimizer, loss="mse")
        fit(model, ps.rank, ps.world_size, epochs=3)
        return model.get_weights()

    alone = small_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.5, momentum=0.9), loss="mse")
    fit(alone, epochs=3)
    mine, other = run_workers(2, 2, worker, transport="tcp")
    for weights, theirs, exact in zip(mine, other, alone.get_weights(), strict=True):
        np.testing.assert_array_equal(weights, theirs)
        np.testing.assert_allclose(weights, exact, atol=0.02)


def test_one_worker_ends_the_training_of_all_at_one_step(run_workers):
    """Worker 1 says so in the midst of an epoch; every fit ends with the batch of that step, and the weights are the same."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.ps.rank == 1 and self.model.optimizer.ps.clock == STEPS + 3:
                assert self.model.optimizer.stop() == STEPS + 5

    def worker(ps):
        model = small_model()
        model.compile(optimizer=distribute_in_order(ps, model, keras.optimizers.SGD(0.5)), loss="mse")
        history = fit(model, ps.rank, ps.world_size, epochs=5, callbacks=[Stops()])
        assert ps.is_over
        total = ps.all_reduce({"loss": model.evaluate(*(x.reshape(-1, x.shape[-1]) for x in data()), verbose=0)}, op="mean")
        return ps.clock, int(model.optimizer.iterations), len(history.epoch), total["loss"], model.get_weights()

    first, second = run_workers(2, 2, worker)
    assert first[:4] == second[:4]
    assert first[:3] == (STEPS + 5, STEPS + 5, 2)
    assert_close(first[4], second[4], 0)


def test_a_saved_model_has_the_given_optimizer(run_workers, tmp_path):
    """It loads as one that knows nothing of psd, and trains on alone."""
    path = tmp_path / "model.keras"

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, keras.optimizers.Adam(0.01, epsilon=1e-4), ps=ps)
        model.compile(optimizer=optimizer, loss="mse")
        fit(model)
        optimizer.learning_rate = 0.002
        model.save(path)
        return model.get_weights()

    (weights,) = run_workers(1, 2, worker)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):  # Adam's slots, which the shards have
        model = keras.models.load_model(path)

    assert_close(model.get_weights(), weights, 0)
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert not isinstance(model.optimizer, psd.DistributedOptimizer)
    assert model.optimizer.epsilon == 1e-4
    assert float(model.optimizer.learning_rate) == pytest.approx(0.002)
    fit(model)


def test_frozen_layers_are_shared_and_statistics_stay_local(run_workers):
    """All workers get the first one's values of what nobody trains; BatchNormalization's means are those of its own data."""

    def build(seed):
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, name="frozen", trainable=False),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dropout(0.1, seed=1),
                keras.layers.Dense(3, name="out"),
            ]
        )
        layers = [model.get_layer(name) for name in ("frozen", "out")]
        for number, layer in enumerate(layers):
            set_values(layer, 10 * seed + number)
        return model

    def worker(ps):
        model = build(1 + ps.rank)
        model.compile(optimizer=distribute_in_order(ps, model, keras.optimizers.SGD(0.1)), loss="mse")
        fit(model, ps.rank, ps.world_size)
        norm = model.get_layer("norm")
        return model.get_layer("frozen").get_weights(), norm.get_weights()[:2], norm.get_weights()[2:]

    (frozen, trained, statistics), (frozen2, trained2, statistics2) = run_workers(2, 2, worker)

    assert_close(frozen, build(1).get_layer("frozen").get_weights(), 0)
    assert_close(frozen2, frozen, 0)
    assert_close(trained2, trained, 0)
    assert not np.allclose(statistics2[0], statistics[0])


def test_loss_scaling_skips_a_step_on_all_workers(run_workers):
    """An infinity on one worker halves all scales; without one training is that of one process."""
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, name="out", dtype=policy)], name="small")
        model.dtype_policy = policy
        set_values(model, 1)
        return model

    def worker(ps):
        x, y = data()
        model = build()
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=4)
        optimizer = distribute_in_order(ps, model, scaled, nan_policy="skip")
        model.compile(optimizer=optimizer, loss="mse")
        assert model.optimizer is optimizer  # Keras has not wrapped it
        mine = slice(8 * ps.rank, 8 * ps.rank + 8)
        scales = []
        for step in range(STEPS):
            bad = np.inf if (ps.rank, step) == (1, 6) else 1
            before = model.get_weights()
            model.train_on_batch(x[step, mine] * bad, y[step, mine])
            scales.append(float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)))
            assert (step == 6) == all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        return scales, model.get_weights(), ps.stats()["rounds_skipped"]

    (scales, weights, skipped), (scales2, weights2, _) = run_workers(2, 2, worker)

    assert scales == scales2 == [64, 64, 64, 128, 128, 128, 64, 64, 64, 64]
    assert skipped == 1
    assert_close(weights2, weights, 0)


def test_mixed_precision_by_policy_equals_one_process(run_workers):
    """With the policy alone, which has compile() scale the loss; bfloat16 needs no scaling."""

    def build(policy):
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, name="out", dtype=policy)], name="small")
        model.dtype_policy = keras.dtype_policies.DTypePolicy(policy)
        set_values(model, 1)
        return model

    def worker(ps):
        model = build("mixed_float16")
        with pytest.raises(psd_client.InvalidRequest, match='nan_policy="skip"'):
            psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps)
        model.compile(optimizer=psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps, nan_policy="skip"), loss="mse")
        fit(model)
        return model.get_weights(), type(model.optimizer)

    ((weights, kind),) = run_workers(1, 1, worker)

    assert kind is psd.DistributedLossScaleOptimizer
    assert_close(weights, train_alone(lambda: keras.optimizers.SGD(0.1), lambda: build("mixed_float16")))


def test_a_loss_scale_optimizer_around_the_result_is_refused(run_workers):
    """It would not push where it finds an infinity."""

    def worker(ps):
        optimizer = psd.distribute(small_model(), keras.optimizers.SGD(0.1, loss_scale_factor=8.0), ps=ps)
        with pytest.raises(psd_client.InvalidRequest, match="LossScaleOptimizer: it would skip steps"):
            keras.optimizers.LossScaleOptimizer(optimizer)
        return optimizer.loss_scale_factor

    assert run_workers(1, 1, worker) == [8.0]


def test_variables_of_low_precision_have_a_float32_master(run_workers):
    """Steps too small for bfloat16 add up on the shards."""

    def worker(ps):
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, name="out", dtype="bfloat16")])
        optimizer = psd.distribute(model, keras.optimizers.SGD(1e-4), ps=ps)
        model.compile(optimizer=optimizer, loss="mse")
        fit(model)
        master = ps._worker.parameters.views[0]
        return master.dtype.name, keras.ops.convert_to_numpy(keras.ops.cast(model.weights[0], "float32")), master.copy()

    ((dtype, mine, master),) = run_workers(1, 1, worker)

    assert dtype == "float32"
    assert not np.array_equal(mine, master)
    np.testing.assert_allclose(mine, master, rtol=2**-8)


def test_a_worker_that_joins_later_goes_on_at_the_clock(run_workers):
    """Its schedules, too: iterations is the clock."""

    def worker(ps):
        model = small_model()
        if ps.rank == 1:
            ps.barrier("trained")
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        optimizer = psd.distribute(model, keras.optimizers.SGD(schedule), ps=ps, consistency="async")
        start = int(optimizer.iterations)
        if ps.rank == 0:
            model.compile(optimizer=optimizer, loss="mse")
            fit(model)
            ps.barrier("trained")
        return start, float(optimizer.learning_rate), int(optimizer.iterations)

    (start, rate, iterations), (start2, _, _) = run_workers(2, 1, worker)

    assert (start, iterations) == (0, EPOCHS * STEPS)
    assert rate == pytest.approx(0.1 / 8)
    assert start2 >= 0


def test_a_worker_that_returns_to_a_synchronous_job_has_the_rates_of_its_step(cluster):
    """The schedule of the process that was started again begins at the job's clock, and has nothing that would give way."""
    servers = cluster(2, lease_s=60).servers

    def train(rank):
        keras.backend.clear_session()  # another process would name its layers so, too
        with psd_client.connect(servers, rank, 2, wait_timeout=120) as ps:
            model = small_model()
            schedule = keras.optimizers.schedules.ExponentialDecay(0.1, STEPS, 0.5, staircase=True)
            optimizer = psd.distribute(model, keras.optimizers.SGD(schedule), ps=ps, quorum=1)
            found = [ps.clock, int(optimizer.iterations), round(float(optimizer.learning_rate), 6)]
            model.compile(optimizer=optimizer, loss="mse")
            fit(model, epochs=1)
            return [*found, ps.clock, int(optimizer.iterations), ps.stats()["pushes_overruled"]]

    assert train(0) == [0, 0, 0.1, STEPS, STEPS, 0]
    assert train(1) == [STEPS, STEPS, 0.05, 2 * STEPS, 2 * STEPS, 0]


def test_fit_goes_on_from_a_checkpoint_when_the_shard_has_lost_its_memory(cluster, tmp_path):
    """The error is RolledBack; after pull() another fit ends as if nothing had happened, with a schedule of the rate, too."""
    settings = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": STEPS, "lease_s": 60}
    running = cluster(1, **settings)

    def make():
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.9)

    def lose_memory(batch, logs):
        if ps.clock != STEPS + 5:
            return
        while not any(i.state is CheckpointState.VALID for i in CheckpointDirectory(str(tmp_path)).checkpoints()):
            ps.barrier("until the checkpoint is complete")
        running.shards[0].stop()
        cluster(1, listen=running.shards[0].address, **settings)

    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        model = small_model()
        optimizer = psd.distribute(model, make(), ps=ps)
        model.compile(optimizer=optimizer, loss="mse")
        losing = keras.callbacks.LambdaCallback(on_train_batch_begin=lose_memory)
        with pytest.raises(Exception, match=f"the job went back to a checkpoint at step {STEPS}"):
            fit(model, callbacks=[losing])
        assert isinstance(optimizer.error, psd_client.RolledBack)

        optimizer.pull()

        assert int(optimizer.iterations) == ps.clock == STEPS
        fit(model, initial_epoch=1)
        assert ps.clock == EPOCHS * STEPS
    assert_close(model.get_weights(), train_alone(make))


def test_a_learning_rate_finder_leaves_nothing_behind(run_workers):
    """The usual recipe, get_weights and set_weights, needs two calls more: what is assigned alone stays in this process."""

    def worker(ps):
        model = small_model()
        optimizer = distribute_in_order(ps, model, keras.optimizers.Adam(0.01))
        model.compile(optimizer=optimizer, loss="mse")
        kept = model.get_weights()
        optimizer.learning_rate = 3.0
        fit(model, ps.rank, 2, epochs=1)
        optimizer.learning_rate = 0.01

        model.set_weights(kept)
        optimizer.load_parameters()
        optimizer.reset_slots()
        fit(model, ps.rank, 2)
        return model.get_weights()

    first, second = run_workers(2, 2, worker)
    assert_close(first, second, 0)
    assert_close(first, train_alone(lambda: keras.optimizers.Adam(0.01)))
