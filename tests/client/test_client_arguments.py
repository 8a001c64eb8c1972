"""Mistakes of users before anything is sent: each is named, and nothing has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.contract.arguments import ByName
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd_client import SGD, ConfigError, connect
from psd_client.lanes.flat import FlatBuffers
from psd_client.optimizers import scalar_values, spec_of
from psd_client.param_groups import ParamGroups
from psd_client.tensors import NamedTensors, tensor_specs

W = {"w": np.zeros(2)}


@pytest.fixture(scope="module")
def connected(module_cluster: Any) -> Any:
    """A worker of a job of its own; one of the tests declares it."""
    with connect([module_cluster(1).shards[0].address], np.int64(0), 1) as ps:  # type: ignore[call-overload]
        yield ps


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lr": -1}, ValueError, "lr: must be >= 0, got -1"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"lr": "0.1"}, TypeError, "lr: expected a number"),
        ({"lr": True}, TypeError, "lr"),
        ({"lr": 1, "momentum": -0.1}, ValueError, "momentum"),
        ({"lr": 1, "weight_decay": float("inf")}, ValueError, "weight_decay"),
        ({"lr": 1, "dampening": float("nan")}, ValueError, "dampening: must be finite"),
        ({"lr": 1, "nesterov": True}, ValueError, "nesterov: needs momentum > 0"),
        ({"lr": 1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, ValueError, "nesterov"),
        ({"lr": 1, "maximize": 1}, TypeError, "maximize: expected True or False"),
    ],
)
def test_sgd_when_an_argument_is_wrong_then_names_it(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """The message says which argument, and what it must be."""
    with pytest.raises(error, match=match):
        SGD(**options)


def test_sgd_when_built_then_gives_flags_and_scalars() -> None:
    """What is fixed is declared; what may change travels."""
    sgd = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True, maximize=True)

    assert spec_of(sgd) == GroupSpec("sgd", ("maximize", "momentum", "nesterov"))
    assert sgd.scalars() == {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4}
    assert spec_of(SGD(lr=1)) == GroupSpec("sgd", ())
    assert SGD(lr=1, dampening=-0.5).scalars()["dampening"] == -0.5
    assert scalar_values(GroupSpec("static"), {}, 0) == []


@pytest.mark.parametrize(
    ("kind", "options", "error", "match"),
    [
        ("Adam", {"betas": (0.9, 1)}, ValueError, "^betas: beta2 must be >= 0 and < 1, got 1"),
        ("Adam", {"betas": (-0.1, 0.9)}, ValueError, "^betas: beta1 must be >= 0 and < 1"),
        ("Adam", {"betas": 0.9}, TypeError, "^betas: expected two numbers, got 0.9"),
        ("Adam", {"betas": (0.9, "x")}, TypeError, "^betas: expected a number, got 'x'"),
        ("AdamW", {"eps": -1e-8}, ValueError, "^eps: must be >= 0"),
        ("AdamW", {"amsgrad": 1}, TypeError, "^amsgrad: expected True or False, got 1"),
        ("Adagrad", {"initial_accumulator_value": -1}, ValueError, "^initial_accumulator_value: must be >= 0"),
        ("Adagrad", {"initial_accumulator_value": 1e39}, ValueError, "^initial_accumulator_value: must be finite, also as"),
        ("Adadelta", {"rho": 1.1}, ValueError, "^rho: must be >= 0 and <= 1"),
        ("RMSprop", {"alpha": 1.5}, ValueError, "^alpha: must be >= 0 and <= 1"),
        ("NAdam", {"momentum_decay": -1}, ValueError, "^momentum_decay: must be >= 0"),
        ("FTRL", {"lr": 0}, ValueError, "^lr: must be > 0"),
        ("FTRL", {"lr": 1, "l1": -1}, ValueError, "^l1: must be >= 0"),
        ("Lion", {"lr": float("nan")}, ValueError, "^lr: must be finite"),
    ],
)
def test_optimizers_when_an_argument_is_wrong_then_name_it(
    kind: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        getattr(psd_client, kind)(**options)


def test_optimizers_when_built_then_give_flags_constants_and_scalars() -> None:
    """Pairs stay pairs for the user and travel as two numbers."""
    adam = psd_client.AdamW(amsgrad=True)

    assert spec_of(adam) == GroupSpec("adam", ("amsgrad", "decoupled_weight_decay"))
    assert adam.scalars() == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    assert scalar_values(spec_of(adam), adam.scalars(), 0) == [1e-3, 0.9, 0.999, 1e-8, 1e-2]
    assert spec_of(psd_client.Adagrad(initial_accumulator_value=0.5)) == GroupSpec("adagrad", (), (0.5,))
    assert spec_of(psd_client.RMSprop(momentum=0.5, centered=True)) == GroupSpec("rmsprop", ("centered", "momentum"))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"lr": -1}, InvalidRequest, r"^param_groups\[0\].lr: must be >= 0"),
        ({"lr": float("inf")}, InvalidRequest, r"^param_groups\[0\].lr: must be finite"),
        ({"lr": None}, TypeError, r"param_groups\[0\]\['lr'\]: expected a number, got None"),
        ({"momentum": 0.5}, InvalidRequest, "declared without momentum"),
    ],
)
def test_param_groups_when_a_scalar_is_spoiled_then_the_push_names_it(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    """The user's dicts are checked at each push."""
    groups = ParamGroups(["w"], SGD(lr=1), None)
    groups.groups[0].update(change)

    with pytest.raises(error, match=match):
        groups.scalars()


def test_param_groups_when_a_scalar_is_gone_then_the_push_names_it() -> None:
    groups = ParamGroups(["w"], SGD(lr=1), None)
    del groups.groups[0]["lr"]

    with pytest.raises(KeyError, match=r"param_groups\[0\]: 'lr' is missing"):
        groups.scalars()


def test_param_groups_when_options_differ_then_each_group_has_its_own() -> None:
    """What a group does not say is the optimizer's."""
    groups = ParamGroups(
        ["a", "b"], SGD(lr=1, weight_decay=2), [{"params": ["b"], "lr": 3}, {"params": ["a"], "momentum": 0.5}]
    )

    assert groups.scalars() == [[3, 0, 0, 2], [1, 0.5, 0, 2]]
    assert groups.specs == [GroupSpec("sgd"), GroupSpec("sgd", ("momentum",))]
    assert groups.group_of == {"b": 0, "a": 1}


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"params": ["w"]}], "groups: 'b' is in no group"),
        ([{"params": ["w", "b", "w"]}], "'w' is in two groups"),
        ([{"params": ["w", "b", "x"]}], "'x' is not among the parameters"),
        ([{"params": "wb"}], r"groups\[0\]: expected a dict with 'params', a list of names"),
        ([3], r"groups\[0\]: expected a dict with 'params', a list of names, got 3"),
        ([{"params": [["w"]]}], r"groups\[0\]\['params'\]: \['w'\] is not among the parameters"),
        ([{"lr": 1}], r"groups\[0\]: expected a dict with 'params'"),
        ([{"params": ["w", "b"], "learning_rate": 1}], r"groups\[0\]: no option 'learning_rate'"),
        ([{"params": ["w", "b"], "lr": -1}], r"groups\[0\]: lr: must be"),
    ],
)
def test_param_groups_when_a_group_is_wrong_then_names_it(groups: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParamGroups(["w", "b"], SGD(lr=1), groups)


def test_param_groups_when_the_optimizer_is_something_else_then_says_what_is_expected() -> None:
    wrong: Any = 0.1
    with pytest.raises(TypeError, match=r"optimizer: expected one of psd_client's, such as psd_client.SGD\(lr=...\), got 0.1"):
        ParamGroups(["w"], wrong, None)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"w": np.zeros(2, dtype=np.int64)}, r"params\['w'\]: dtype must be one of .*got int64"),
        ({"w": np.zeros(2, dtype=np.complex64)}, "got complex64"),
        ({"w": ["a"]}, "dtype must be"),
        ({3: np.zeros(2)}, "names must be strings, got 3"),
        ([np.zeros(2)], r'params: expected arrays by name, such as \{"w": array\}, got \[array'),
        (None, "params: expected arrays by name"),
        ({"w": {"v": np.zeros(2)}}, r"params\['w'\]: expected an array, got {'v': array"),
        ({"w": [[1.0], [1.0, 2.0]]}, r"params\['w'\]: NumPy makes no array of it"),
    ],
)
def test_tensor_specs_when_a_parameter_is_wrong_then_names_it(params: Any, match: str) -> None:
    with pytest.raises(InvalidTensor, match=match):
        tensor_specs(params, {3: 0, "w": 0})


def named_tensors() -> tuple[NamedTensors, FlatBuffers]:
    specs = [TensorSpec("w", (2, 3)), TensorSpec("s", (), "float64"), TensorSpec("h", (2,), "float16"), TensorSpec("e", (0, 4))]
    dtypes = [np.dtype(spec.dtype) for spec in specs]
    return NamedTensors(specs, dtypes), FlatBuffers(Layout(JobSpec(1, tuple(specs)), 1))


@pytest.mark.parametrize(
    ("grads", "match"),
    [
        ({"w": np.ones((2, 3), np.float32), "x": np.ones(1)}, "no parameter 'x' was declared; there are w, s, h, e"),
        ({"s": 1.0, "w": np.ones((3, 2), np.float32)}, r"grads\['w'\]: shape must be \(2, 3\), got \(3, 2\)"),
        ({"s": 1.0, "w": np.float32(1)}, r"shape must be \(2, 3\), got \(\)"),
        ({"s": 1.0, "w": np.ones((2, 3))}, r"grads\['w'\]: dtype must be float32, got float64"),
        ({"s": 1.0, "w": np.ones((2, 3), np.int32)}, "got int32"),
        ([1.0], "grads: expected arrays by name"),
        ({"s": 1.0, "w": None}, r"grads\['w'\]: expected an array, got None"),
        ({"s": 1.0, "w": [[1.0], [1.0, 2.0]]}, r"grads\['w'\]: NumPy makes no array of it"),
        ({"s": 1.0, "w": np.ma.masked_equal(np.eye(2, 3, dtype=np.float32), 0)}, r"grads\['w'\]: is a masked array"),
    ],
)
def test_write_gradients_when_one_is_wrong_then_names_it_and_writes_none(grads: dict[str, Any], match: str) -> None:
    """All are checked before the first is written."""
    named, buffers = named_tensors()

    with pytest.raises(InvalidTensor, match=match):
        named.write_gradients(grads, buffers)

    assert not any(space.any() for space in buffers.spaces)


def test_write_gradients_when_arrays_are_unusual_then_takes_them() -> None:
    """Not contiguous, 0-d, a Python number, half precision for single, another byte order, empty."""
    named, buffers = named_tensors()
    grads = {
        "w": np.arange(6, dtype=">f4").reshape(3, 2).T,
        "s": 2,
        "h": np.array([1, 2], np.float16),
        "e": np.zeros((0, 4), np.float32),
    }

    assert named.write_gradients(grads, buffers) is None

    np.testing.assert_array_equal(buffers.views[0], [[0, 2, 4], [1, 3, 5]])
    assert buffers.views[1] == 2
    present = named.write_gradients({"w": np.ones((2, 3), np.float16), "s": np.float64(3)}, buffers)
    assert present is not None
    assert present.tolist() == [True, True, False, False]
    named.write_gradients({"w": [[1, 2, 3], [4.5, 5, 6]]}, buffers)  # a list has no dtype of its own
    assert buffers.views[0].tolist() == [[1, 2, 3], [4.5, 5, 6]]


def test_copies_when_made_then_are_new_arrays_of_the_declared_dtype() -> None:
    """The caller may do with them what he likes; a master beyond half precision becomes infinity."""
    named, buffers = named_tensors()
    buffers.views[2][:] = [1e6, 2]

    copies = named.results(buffers, [None] * len(buffers.views))
    copies["w"][:] = 7

    assert {name: (a.dtype.name, a.shape) for name, a in copies.items()} == {
        "w": ("float32", (2, 3)),
        "s": ("float64", ()),
        "h": ("float16", (2,)),
        "e": ("float32", (0, 4)),
    }
    assert copies["h"].tolist() == [np.inf, 2]
    assert not buffers.views[0].any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"servers": "h:1", "rank": 0}, "world_size: not given"),
        ({"servers": "h", "rank": 0, "world_size": 1}, "servers: expected HOST:PORT"),
        ({"servers": "h:1", "rank": 1, "world_size": 1}, r"rank: expected 0 to 0"),
        ({"servers": 5, "rank": 0, "world_size": 1}, "servers: expected the shards' addresses, .* or a list of them, got 5"),
        ({"servers": [], "rank": 0, "world_size": 1}, "servers: .* got an empty list"),
        ({"servers": ["h:1", None], "rank": 0, "world_size": 1}, "servers: expected the shards' addresses"),
        ({"servers": ["h:1", "h"], "rank": 0, "world_size": 1}, "servers: expected HOST:PORT .* got 'h'"),
        ({"servers": "h:1", "rank": "0", "world_size": 1}, "rank: expected a whole number, got '0'"),
        ({"servers": "h:1", "rank": True, "world_size": 1}, "rank: expected a whole number, got True"),
        ({"servers": "h:1", "rank": 0, "world_size": 1.5}, "world_size: expected a whole number, got 1.5"),
        ({"servers": "h:1", "rank": 0, "world_size": 1, "run_id": 3}, "run_id: expected a string, got 3"),
        ({"servers": "h:1", "rank": 0, "world_size": 1, "wait_timeout": "5"}, "wait_timeout: expected a number, got '5'"),
        ({"servers": "h:1", "rank": 0, "world_size": 1, "tls_ca": 3}, "tls_ca: expected a path, got 3"),
        ({"servers": "h:1", "rank": 0, "world_size": 1, "token_file": Path("/nowhere")}, "token_file: cannot read /nowhere"),
        (
            {"servers": "h:1", "rank": 0, "world_size": 1, "transport": "pigeon"},
            "transport: expected one of auto, shm, tcp, gr",
        ),
    ],
)
def test_connect_when_a_setting_is_wrong_then_names_it(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PSD_SERVERS", "PSD_RANK", "PSD_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=match):
        connect(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ps: ps.declare(W, SGD(lr=1), staleness=3), 'staleness: expected "lr" or None, got 3'),
        (lambda ps: ps.declare(W, SGD(lr=1), consistency=["sync"]), r"consistency: expected a string, got \['sync'\]"),
        (lambda ps: ps.declare(W, SGD(lr=1), reduce=[]), r"reduce: expected one of mean, sum, got \[\]"),
        (lambda ps: ps.declare({1: np.zeros(2)}, SGD(lr=1)), "params: names must be strings, got 1"),
        (
            lambda ps: ps.declare(W, SGD(lr=1), quorum=0),
            r"quorum: must be 1 to world_size \(1\), .*, got 0",
        ),
        (lambda ps: ps.declare(W, SGD(lr=1), quorum="1"), "quorum: expected a whole number, got '1'"),
        (lambda ps: ps.declare(W, SGD(lr=1), aggregation={}), "aggregation: expected one of fast, exact, got {}"),
        (lambda ps: ps.declare(W, SGD(lr=1), clip_norm="1"), "clip_norm: expected a number, got '1'"),
        (lambda ps: ps.declare(W, SGD(lr=1), nan_policy=None), "nan_policy: expected one of refuse, skip, allow, got None"),
        (lambda ps: ps.declare(W, SGD(lr=1), staleness=None) and ps.push(W, weight="2"), "weight: expected a number, got '2'"),
        (lambda ps: ps.push(W, weight=-1), r"weight: must be 0, or 1e-09 to 1e\+15, got -1"),
        (lambda ps: ps.barrier(3), "name: expected a string, got 3"),
        (lambda ps: ps.save_client_state("text"), "client state: expected bytes, got 'text'"),
    ],
)
def test_calls_when_an_argument_is_of_the_wrong_kind_then_name_it(connected: Any, call: Any, words: str) -> None:
    """Not one of them is Python's own error from somewhere below, and what None may stand for, it does."""
    with pytest.raises(InvalidRequest, match=f"^{words}"):
        call(connected)


def test_by_name_when_there_is_no_such_item_then_says_what_there_is() -> None:
    """A typo in `ps.tables["usr"]`."""
    with pytest.raises(KeyError, match="there is no table 'usr'; there are user, item"):
        ByName("table", {"user": 1, "item": 2})["usr"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("psd_client", {"torch", "tensorflow", "fsspec", "psd.rim", "psd.state", "psd.checkpoint"}),
        ("psd.rim.server", {"torch", "fsspec", "psd_client"}),
        ("psd.cli.server", {"grpc", "fsspec", "psd.rim"}),
        ("psd.cli.run", {"grpc", "fsspec", "psd.rim"}),
        ("psd.cli.psdctl", {"fsspec", "psd.rim", "psd.checkpoint", "aiohttp", "textual"}),
    ],
)
def test_package_when_imported_then_imports_nothing_that_it_may_not_need(module: str, unneeded: set[str]) -> None:
    """A NumPy user needs no framework, a shard without checkpoints no stores, `psdctl status` no checkpoints."""
    code = f"import sys, {module}; assert not (found := {unneeded!r} & set(sys.modules)), found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
