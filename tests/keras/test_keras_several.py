"""Several Keras models and optimizers in one job, each stepped when the program says: the numbers of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from helpers_keras import assert_close, set_values

import psd_client
import psd_client.keras as psd
from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidRequest, PartsDisagree

STEPS, BATCH = 5, 8
BACKEND = keras.backend.backend()
Models = dict[str, Any]


def gan() -> Models:
    generator, critic = (
        keras.Sequential(
            [keras.layers.Input((width,)), keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(out, name="b")],
            name=name,
        )
        for name, width, out in (("makes", 4, 3), ("judges", 3, 1))
    )
    set_values(generator, 1)
    set_values(critic, 2)
    return {"generator": generator, "critic": critic}


def rules() -> Models:
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, 3 * STEPS, 0.01)
    return {"generator": keras.optimizers.Adam(rate, beta_1=0.5), "critic": keras.optimizers.RMSprop(0.003)}


def drawn(step: int, width: int, rank: int, world_size: int) -> Any:
    """A worker's share of a step's samples."""
    return np.random.default_rng(step).normal(size=(BATCH, width)).astype(np.float32)[rank::world_size]


def gradients(variables: Any, loss: Any) -> Any:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(value, variables)]
    for variable in variables:
        variable.value.grad = None
    loss().backward()
    return [variable.value.grad for variable in variables]


def step(models: Models, optimizers: Models, name: str, loss: Any) -> None:
    variables = models[name].trainable_variables
    optimizers[name].apply_gradients(zip(gradients(variables, loss), variables, strict=True))


def train_gan(models: Models, optimizers: Models, rank: int = 0, world_size: int = 1) -> list[Any]:
    """Two steps of the critic, one of the generator, whose loss also reaches the critic."""
    ops, generator, critic = keras.ops, models["generator"], models["critic"]
    for number in range(STEPS):
        for turn in range(2):
            real = drawn(100 + 2 * number + turn, 3, rank, world_size)
            fake = ops.stop_gradient(generator(drawn(200 + 2 * number + turn, 4, rank, world_size)))
            step(
                models,
                optimizers,
                "critic",
                lambda real=real, fake=fake: ops.mean(ops.softplus(-critic(real))) + ops.mean(ops.softplus(critic(fake))),
            )
        noise = drawn(300 + number, 4, rank, world_size)
        step(models, optimizers, "generator", lambda noise=noise: ops.mean(ops.softplus(-critic(generator(noise)))))
    return generator.get_weights() + critic.get_weights()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"aggregation": "exact"}, {"consistency": "async"}], ids=str)
def test_a_gan_has_the_numbers_of_one_process(run_workers: Any, world_size: int, options: Any) -> None:
    """With a schedule of one of them, which goes by the job's clock."""
    if world_size > 1 and "consistency" in options:
        pytest.skip("without rounds, two workers have no numbers of one process")
    alone = gan()
    given = rules()
    rate = given["generator"]._learning_rate
    given["generator"] = keras.optimizers.Adam(lambda: rate(3 * int(given["generator"].iterations) + 2), beta_1=0.5)
    expected = train_gan(alone, given)

    def worker(ps: Any) -> Any:
        models = gan()
        optimizers = psd.distribute(models, rules(), ps=ps, **options)
        found = train_gan(models, optimizers, ps.rank, world_size)
        return found, ps.clock, [int(optimizer.iterations) for optimizer in optimizers.values()]

    for found, clock, counted in run_workers(world_size, 2, worker):
        assert clock == 3 * STEPS
        assert counted == [clock, clock]
        assert_close(found, expected)


class Gan(keras.Model):
    """As Keras's own examples have it: a model whose step trains two."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.generator, self.critic = models["generator"], models["critic"]

    def compile(self, optimizers: Models) -> None:
        super().compile()
        self.of_generator, self.of_critic = optimizers["generator"], optimizers["critic"]

    def call(self, noise: Any) -> Any:
        return self.critic(self.generator(noise))

    def train_step(self, data: Any) -> Any:
        noise, real = data
        models = {"generator": self.generator, "critic": self.critic}
        optimizers = {"generator": self.of_generator, "critic": self.of_critic}
        ops = keras.ops

        def of_critic() -> Any:
            fake = ops.stop_gradient(self.generator(noise))
            return ops.mean(ops.softplus(-self.critic(real))) + ops.mean(ops.softplus(self.critic(fake)))

        step(models, optimizers, "critic", of_critic)
        step(models, optimizers, "generator", lambda: ops.mean(ops.softplus(-self.critic(self.generator(noise)))))
        return {"steps": ops.cast(self.of_critic.iterations, "float32")}


def test_fit_of_a_model_whose_step_trains_two_has_the_numbers_of_one_process(run_workers: Any) -> None:
    """In TensorFlow's graph, too."""

    def fit(models: Models, optimizers: Models, rank: int = 0, of: int = 1) -> Any:
        whole = Gan(models)
        whole.compile(optimizers)
        noise, real = (np.concatenate([drawn(n + width, width, rank, of) for n in range(0, 90, 10)]) for width in (4, 3))
        whole.fit(noise, real, batch_size=BATCH // of, shuffle=False, verbose=0, epochs=2)
        return models["generator"].get_weights() + models["critic"].get_weights()

    def plain() -> Models:
        return {"generator": keras.optimizers.Adam(0.01), "critic": keras.optimizers.SGD(0.05, momentum=0.9)}

    expected = fit(gan(), plain())

    def worker(ps: Any) -> Any:
        models = gan()
        return fit(models, psd.distribute(models, plain(), ps=ps), ps.rank, 2), ps.clock

    for found, clock in run_workers(2, 2, worker):
        assert clock == 36
        assert_close(found, expected)


def test_rows_are_stepped_with_their_model_and_its_learning_rate(run_workers: Any) -> None:
    """Also those of a table with a rule of its own; a model without an optimizer is shared, and rests."""

    def built(first: Any, second: Any) -> Models:
        models = {}
        for name, layer in (("user", first), ("item", second)):
            models[name] = keras.Sequential([keras.layers.Input((), dtype="int64"), layer, keras.layers.Dense(1, name="top")])
            models[name].get_layer("top").set_weights([np.full((4, 1), 0.5), np.zeros(1)])
        return models

    ids = np.arange(6)

    def worker(ps: Any) -> None:
        models = built(psd.Embedding("user", 4, seed=3), psd.Embedding("item", 4, psd_client.SGD(lr=0.2), seed=3))
        models["fixed"] = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        fixed = models["fixed"].get_weights()
        given = {name: keras.optimizers.SGD(rate) for name, rate in (("user", 0.1), ("item", 0.2))}
        optimizers = psd.distribute(models, given, ps=ps)
        layers = [models[name].layers[0] for name in ("user", "item")]
        theirs = built(keras.layers.Embedding(6, 4), keras.layers.Embedding(6, 4))
        for name, layer in zip(("user", "item"), layers, strict=True):
            theirs[name].layers[0].set_weights([keras.ops.convert_to_numpy(layer(ids)).copy()])
        for turn in ("user", "item", "item", "user"):
            for each, by in ((models, optimizers), (theirs, given_again)):
                step(each, by, turn, lambda each=each, turn=turn: keras.ops.mean(keras.ops.square(each[turn](ids) - 1.0)))
        for name, layer in zip(("user", "item"), layers, strict=True):
            found = [keras.ops.convert_to_numpy(layer(ids)), *models[name].get_layer("top").get_weights()]
            assert_close(found, theirs[name].get_weights())
        assert_close(models["fixed"].get_weights(), fixed, 0)

    given_again = {name: keras.optimizers.SGD(rate) for name, rate in (("user", 0.1), ("item", 0.2))}
    run_workers(1, 2, worker)


def test_an_export_of_several_loads_by_their_names(cluster: Any, tmp_path: Any) -> None:
    running = cluster(2, checkpoint_dir=str(tmp_path / "run"))
    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        models = gan()
        train_gan(models, psd.distribute(models, rules(), ps=ps))
    running.finish()
    directory = CheckpointDirectory(str(tmp_path / "run"))
    directory.export(directory.newest(), str(tmp_path / "both.safetensors"))

    loaded = gan()
    psd.load_export(loaded, tmp_path / "both.safetensors")

    for name, model in models.items():
        assert_close(loaded[name].get_weights(), model.get_weights(), 0)


def test_a_worker_that_steps_another_than_the_round_is_told(run_workers: Any) -> None:
    def worker(ps: Any) -> str:
        models = gan()
        optimizers = psd.distribute(models, rules(), ps=ps)
        name = "generator" if ps.rank == 0 else "critic"
        ones = [keras.ops.ones(variable.shape) for variable in models[name].trainable_variables]
        try:
            optimizers[name].apply(ones)
        except PartsDisagree as error:
            other = next(one for one in models if one != name)
            optimizers[other].apply([keras.ops.ones(variable.shape) for variable in models[other].trainable_variables])
            return str(error)
        return ""

    told = [text for text in run_workers(2, 1, worker) if text]
    assert len(told) == 1


def same(models: Models, given: Models) -> None:
    given["critic"] = given["generator"]


def shared(models: Models, given: Models) -> None:
    models["critic"] = keras.Sequential([keras.layers.Input((4,)), models["generator"].layers[0]])


def two_norms(models: Models, given: Models) -> None:
    given["generator"] = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
    given["critic"] = keras.optimizers.SGD(0.1, global_clipnorm=2.0)


def one_table(models: Models, given: Models) -> None:
    for name in models:
        layer = psd.Embedding("word", 4, name=name)
        models[name] = keras.Sequential([keras.layers.Input((), dtype="int64"), layer, keras.layers.Dense(1)])


def rows_that_rest(models: Models, given: Models) -> None:
    models["other"] = keras.Sequential([keras.layers.Input((), dtype="int64"), psd.Embedding("word", 4)])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda models, given: models.pop("critic"), InvalidRequest, "optimizer: no model is named 'critic'"),
        (same, InvalidRequest, "one is given under two names"),
        (shared, InvalidRequest, "is in two models, 'generator' and 'critic'"),
        (two_norms, InvalidRequest, r"clip_norm: is 1\.0, and the optimizer's global_clipnorm 2\.0"),
        (one_table, InvalidRequest, "embedding 'word': is in two models, 'generator' and 'critic'"),
        (rows_that_rest, InvalidRequest, "embedding 'word': no optimizer is named 'other'"),
        (lambda models, given: models.update({"a b": models["critic"]}), InvalidRequest, "names must be words"),
        (lambda models, given: models.update(critic=None), TypeError, r"model\['critic'\]: expected a keras\.Model"),
        (lambda models, given: given.clear(), InvalidRequest, "optimizer: there is none"),
    ],
)
def test_what_cannot_be_declared_together_is_refused_by_name(change: Any, error: Any, text: str) -> None:
    models, given = gan(), rules()
    change(models, given)
    with pytest.raises(error, match=text):
        psd.distribute(models, given, servers="127.0.0.1:1")


def test_several_of_one_alone_are_refused() -> None:
    models, given = gan(), rules()
    with pytest.raises(InvalidRequest, match="several are for several models"):
        psd.distribute(models["critic"], given, servers="127.0.0.1:1")
    with pytest.raises(TypeError, match="optimizer: expected the optimizer of each model, by its name"):
        psd.distribute(models, given["critic"], servers="127.0.0.1:1")
