"""A Keras model with embeddings outside of its job: it takes an export, saves and loads its rows, or reads a running job."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import psd_client
import psd_client.keras as psd
from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared

DIM, WIDE = 4, 3
SEEN, NEW = 30, 12
IDS = np.concatenate([np.arange(SEEN + NEW), [-5, 2**62, -(2**63), 2**63 - 1]])
OF_KERAS = "ignore:Skipping nested container"  # before the error that a layer could not be loaded
GOAL = np.ones((SEEN, 1), np.float32)


def model_of(**others: Any) -> keras.Model:
    """Two tables under other names than the layers', one of them looked up by two layers, of which one is called twice."""
    init = {"init": psd_client.Normal(0.3), "seed": 7}
    ids = keras.layers.Input((), dtype="int64", name="ids")
    one = psd.Embedding("item", WIDE, name="one", **init)
    rows = [
        psd.Embedding("user", DIM, psd_client.Adagrad(lr=0.2), name="who", **init)(ids),
        psd.Embedding("item", WIDE, name="other", **init)(ids),
        one(ids),
        one(keras.ops.flip(ids, 0)),
    ]
    found = keras.layers.BatchNormalization(name="norm")(keras.layers.Concatenate(name="all")(rows))
    fixed = keras.layers.Dense(2, name="fixed", trainable=False)
    tied = keras.layers.Dense(2, name="tied")
    hidden = keras.layers.Dense(2, name="hidden")(found)
    return keras.Model(ids, keras.layers.Dense(1, name="top")(tied(tied(fixed(hidden)))), name="scorer", **others)


def score(model: keras.Model, ids: Any = IDS) -> Any:
    return model.predict(ids, batch_size=len(ids), verbose=0)


def train(model: keras.Model, ps: Any, steps: int = 4) -> Any:
    optimizer = psd.distribute(model, keras.optimizers.Adam(0.1), ps=ps)
    model.compile(optimizer=optimizer, loss="mse")
    for _ in range(steps):
        model.train_on_batch(IDS[:SEEN], GOAL)
    return optimizer


class Left:
    """What a job has left: its export, the model that its worker saved, and what that worker's model gave."""

    def __init__(self, place: Path, cluster: Any, steps: int) -> None:
        self.export, self.saved = str(place / "model.safetensors"), str(place / "worker.keras")
        running = cluster(2, checkpoint_dir=str(place / "checkpoints"))
        with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
            self.model = model_of()
            optimizer = train(self.model, ps, steps)
            self.expected = score(self.model)
            self.model.save(self.saved)
            optimizer.close()
        running.finish()
        directory = CheckpointDirectory(str(place / "checkpoints"))
        directory.export(directory.newest(), self.export)


@pytest.fixture
def left(cluster: Any, tmp_path: Path) -> Any:
    return lambda steps=4: Left(tmp_path, cluster, steps)


def copy_statistics(source: keras.Model, target: keras.Model) -> None:
    target.get_layer("norm").set_weights(source.get_layer("norm").get_weights())


def test_an_export_gives_what_the_worker_gave_and_is_saved_and_loaded_as_keras_has_it(left, tmp_path):
    """Into a model that was made anew, and into one that a worker has saved, with its statistics."""
    job = left()
    made, loaded = model_of(), keras.models.load_model(job.saved, compile=False)
    copy_statistics(job.model, made)
    for model in (made, loaded):
        with pytest.raises(NotDeclared, match=r"'\w+': .* psd_client\.keras\.load_export\(model, file\)"):
            score(model)
        psd.load_export(model, job.export)
        np.testing.assert_array_equal(score(model), job.expected)
    assert made.get_layer("who").own_rows.rows.shape == (SEEN, DIM), "nothing was made for what was only asked for"
    assert made.get_layer("one").own_rows is made.get_layer("other").own_rows

    made.save(tmp_path / "scorer.keras")
    made.save_weights(tmp_path / "scorer.weights.h5")
    weights = model_of()
    weights.load_weights(tmp_path / "scorer.weights.h5")
    for model in (keras.models.load_model(tmp_path / "scorer.keras", compile=False), weights):
        np.testing.assert_array_equal(score(model), job.expected)


def test_the_model_of_a_worker_that_has_left_takes_the_export_itself(left):
    """Also where Keras keeps the graph of its predictions."""
    job = left()
    with pytest.raises(Exception, match=r"its rows are on the shards, and it is not joined"):
        score(job.model)
    psd.load_export(job.model, job.export)
    np.testing.assert_array_equal(score(job.model), job.expected)


def test_loaded_rows_are_fixed_and_what_is_above_them_trains(left):
    """Without a word from Keras that gradients are missing."""
    job = left()
    model = model_of()
    psd.load_export(model, job.export)
    before, top = model.get_layer("who").own_rows.rows.copy(), model.get_layer("top").get_weights()[0].copy()
    model.compile(optimizer=keras.optimizers.AdamW(0.1), loss="mse")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Gradients do not exist")
        model.fit(IDS[:SEEN], GOAL + 1, verbose=0)

    np.testing.assert_array_equal(model.get_layer("who").own_rows.rows, before)
    assert not np.array_equal(model.get_layer("top").get_weights()[0], top)
    assert not np.any(model.get_layer("who").get_weights()[0])


def test_an_empty_table_gives_initial_values(left):
    job = left(0)
    model = model_of()
    copy_statistics(job.model, model)
    psd.load_export(model, job.export)
    assert len(model.get_layer("who").own_rows.ids) == 0
    np.testing.assert_array_equal(score(model), job.expected)


@pytest.mark.filterwarnings(OF_KERAS)
def test_what_does_not_fit_is_named_and_the_model_stays_as_it_was(left, tmp_path):
    job = left()
    state = load_file(job.export)
    model = model_of()
    copy_statistics(job.model, model)
    psd.load_export(model, job.export)
    ids, rows = state["user.ids"], state["user.rows"]
    for change, error, message in [
        ({"user.rows": rows[:, 1:]}, InvalidTensor, r"'user': rows: must be \(30, 4\) floating, got \(30, 3\)"),
        ({"user.rows": rows.astype(np.int32)}, InvalidTensor, r"floating, got \(30, 4\) int32"),
        ({"user.ids": ids.astype(np.int32)}, InvalidTensor, r"'user': ids: must be \(n,\) int64, got \(30,\) int32"),
        ({"user.ids": np.concatenate([ids[1:], ids[1:2]])}, InvalidTensor, "'user': ids: an id comes twice"),
        ({"user.ids": None}, InvalidRequest, r"has no 'user\.ids', which the model has; it has .*give layers and models names"),
        ({"top/kernel": None}, InvalidRequest, "has no 'top/kernel', which the model has"),
        ({"top_1/kernel": state["top/kernel"]}, InvalidRequest, "'top_1/kernel' is not in the model, which has fixed/bias, "),
        ({"top/kernel": rows}, InvalidTensor, r"'top/kernel' has the shape \(30, 4\), and that of the model \(2, 1\)"),
    ]:
        file = tmp_path / "changed.safetensors"
        save_file({name: np.ascontiguousarray(value) for name, value in (state | change).items() if value is not None}, file)
        with pytest.raises(error, match=message):
            psd.load_export(model, file)
        np.testing.assert_array_equal(score(model), job.expected)
    with pytest.raises(FileNotFoundError):
        psd.load_export(model, tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="the layer has rows, and the file none"):
        model.load_weights(job.saved)  # which would leave old rows below new weights


@pytest.mark.filterwarnings(OF_KERAS)
def test_a_model_in_a_job_takes_no_rows_and_one_with_rows_joins_none(left, run_workers, tmp_path):
    job = left()
    scorer = model_of()
    psd.load_export(scorer, job.export)
    scorer.save_weights(tmp_path / "rows.weights.h5")

    def worker(ps: Any) -> None:
        with pytest.raises(
            InvalidRequest, match=r"'user': the model has its rows, .* --from-checkpoint FILE --parameters-only"
        ):
            psd.distribute(scorer, keras.optimizers.SGD(0.1), ps=ps)
        model = model_of()
        train(model, ps, 1)
        with pytest.raises(InvalidRequest, match="'user': its model is in a job, as a worker"):
            psd.load_export(model, job.export)
        with pytest.raises(ValueError, match="'user': its rows are on the shards of its job"):
            model.load_weights(tmp_path / "rows.weights.h5")

    run_workers(1, 1, worker)


def test_a_job_begins_with_what_another_has_exported(cluster, left):
    job = left()
    servers = cluster(3, from_checkpoint=job.export, parameters_only=True).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps:
        model = model_of()
        train(model, ps, 0)
        copy_statistics(job.model, model)
        np.testing.assert_array_equal(score(model), job.expected)


def test_a_model_reads_the_rows_of_a_running_job_and_takes_no_part(cluster):
    """It sees each step, and no lookup of it makes a row or counts as a use."""
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps, psd_client.connect(servers, role="reader") as reader:
        worker, model = model_of(), model_of()
        train(worker, ps, 1)
        psd.read_rows(model, reader)
        for _ in range(2):
            worker.train_on_batch(IDS[:SEEN], GOAL)
            found = reader.pull()
            for variable in model.trainable_variables:
                variable.assign(found[variable.path])
            model.get_layer("fixed").set_weights(worker.get_layer("fixed").get_weights())
            copy_statistics(worker, model)
            np.testing.assert_array_equal(score(model), score(worker))

        with pytest.raises(InvalidRequest, match="'user': its model is in a job, as a worker"):
            psd.read_rows(worker, reader)
        for layer, message in [
            (psd.Embedding("person", DIM), "'person': the job has no such table; it has user, item"),
            (psd.Embedding("user", 9), "'user': dim: is 9, and that of the job's table is 4"),
        ]:
            with pytest.raises(InvalidRequest, match=message):
                psd.read_rows(keras.Sequential([keras.layers.Input((), dtype="int64"), layer]), reader)
        with pytest.raises(TypeError, match=r"reader: expected what psd_client\.connect"):
            psd.read_rows(model, ps)
        with pytest.raises(TypeError, match=r"model: expected a keras\.Model"):
            psd.read_rows(None, reader)
