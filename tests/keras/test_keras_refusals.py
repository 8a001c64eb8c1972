"""Refusals: whatever the shards would not do as Keras does is refused by name, before anything is declared."""

from __future__ import annotations

import keras
import pytest
from helpers_keras import small_model

import psd_client
import psd_client.keras as psd
from psd_client.keras.declaration import GivenRule, read_declaration
from psd_client.keras.options import options_of

SGD = keras.optimizers.SGD


class MySGD(SGD):
    pass


def stepped():
    optimizer = SGD(0.1)
    optimizer.iterations.assign(3)
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (keras.optimizers.Muon, TypeError, "keras.optimizers.Muon is not supported by psd; supported: SGD, Adagrad"),
        (keras.optimizers.Adafactor, TypeError, "keras.optimizers.Adafactor is not supported"),
        (lambda: MySGD(0.1), TypeError, "MySGD is not one of keras.optimizers, and the shards cannot run its code"),
        (lambda: 0.1, TypeError, "expected one of keras.optimizers, or its name, got 0.1"),
        (lambda: psd_client.SGD(lr=0.1), TypeError, "expected one of keras.optimizers"),
        (
            lambda: SGD(0.1, clipnorm=1.0),
            psd_client.InvalidRequest,
            "SGD: clipnorm=1.0 is not supported .* use global_clipnorm",
        ),
        (lambda: SGD(0.1, clipvalue=1.0), psd_client.InvalidRequest, "SGD: clipvalue=1.0 is not supported"),
        (lambda: SGD(0.1, use_ema=True), psd_client.InvalidRequest, "SGD: use_ema=True is not supported"),
        (lambda: SGD(0.1, gradient_accumulation_steps=2), psd_client.InvalidRequest, "gradient_accumulation_steps=2 is not"),
        (lambda: SGD(0.1, weight_decay=0.1), psd_client.InvalidRequest, "weight_decay=0.1 .* it is with Adam, AdamW, Nadam"),
        (lambda: keras.optimizers.Ftrl(0.1, learning_rate_power=-0.6), psd_client.InvalidRequest, "power must be -0.5 .* -0.6"),
        (lambda: keras.optimizers.Adam(beta_1=1.0), psd_client.InvalidRequest, "Adam: beta_1 must be >= 0 and < 1, got 1.0"),
        (stepped, psd_client.InvalidRequest, "it has been stepped, and its slots would be lost"),
        (lambda: "adafactor", TypeError, "Adafactor is not supported"),
    ],
)
def test_optimizers_and_options_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        psd.distribute(small_model(), make(), servers="nobody:1")


def layer(**options):
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, name="d", **options)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(2)]), "has no variables yet; give it an Input"),
        (lambda: layer(trainable=False), "has no trainable variables"),
        (lambda: layer(kernel_constraint="non_neg"), "'.*d/kernel' has the constraint NonNeg, which the shards do not apply"),
    ],
)
def test_models_are_refused_by_the_variable(make, message):
    with pytest.raises(psd_client.InvalidRequest, match=message):
        psd.distribute(make(), SGD(0.1), servers="nobody:1")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ps": object(), "servers": "x:1"}, TypeError, "pass either ps or servers"),
        ({"quorun": 1}, TypeError, r"^distribute\(\) got an unexpected keyword argument 'quorun'; did you mean 'quorum'"),
        ({"clip_norm": 2.0}, psd_client.InvalidRequest, "clip_norm: is 2.0, and the optimizer's global_clipnorm 1.0; pass one"),
        ({"staleness": "often"}, psd_client.InvalidRequest, "staleness: expected .* got 'often'"),
    ],
)
def test_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        psd.distribute(small_model(), SGD(0.1, global_clipnorm=1.0), **options)


def test_variables_of_one_path_get_names_of_their_own():
    """Keras lets two layers of a model have one name, below models of one name."""
    inner = [keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, name="d")], name="same") for _ in range(2)]
    holder = keras.layers.Input((2,))
    model = keras.Model(holder, [inner[0](holder)])
    model.second = inner[1]

    rule = GivenRule(options_of("SGD", SGD(0.1).get_config()), lambda _: True)
    declaration = read_declaration({"": model}, {"": rule}, {})

    names = [tensor.name for tensor in declaration.tensors]
    assert len(set(names)) == len(names) == 4
    assert {name.partition(":")[2] for name in names} == {"", "2"}


def test_a_learning_rate_out_of_range_is_refused(run_workers):
    """The message names the group, before anything is sent."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(0.1), ps=ps)
        optimizer.learning_rate = -1.0
        with pytest.raises(psd_client.InvalidRequest, match="must be >= 0, got -1"):
            optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables])
        return ps.clock

    assert run_workers(1, 1, worker) == [0]
