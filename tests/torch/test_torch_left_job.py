"""A model with embeddings outside of its job loads an export strictly, or reads a running job, and scores as a worker does."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import safetensors.torch as safetensors  # noqa: E402
from torch import nn  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.checkpoint import CheckpointDirectory  # noqa: E402
from psd.contract.errors import InvalidRequest, NotDeclared  # noqa: E402

DIM, WIDE = 4, 3
SEEN, NEW, PADDING = 30, 12, 7
IDS = torch.cat([torch.arange(SEEN + NEW), torch.tensor([-5, 2**62, -(2**63), 2**63 - 1])])


class Model(nn.Module):
    """Two tables under other names than the modules', one of them looked up by two modules, and a layer with BatchNorm."""

    def __init__(self, mode: str = "mean", *, is_turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        init = {"init": psd_client.Normal(0.3), "seed": 7}
        made = {
            "who": psd.Embedding("user", DIM, psd_client.Adagrad(lr=0.2), padding_idx=PADDING, **init),
            "what": psd.EmbeddingBag("item", WIDE, mode=mode, **init),
            "one": psd.Embedding("item", WIDE, **init),
        }
        self.inner = nn.ModuleDict(dict(reversed(made.items())) if is_turned else made)
        self.norm = nn.BatchNorm1d(DIM + 2 * WIDE)
        self.top = nn.Linear(DIM + 2 * WIDE, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.inner["who"](ids), self.inner["what"](torch.stack([ids, ids.flip(0)], 1)), self.inner["one"](ids)
        return self.top(self.norm(torch.cat(found, 1)))


def score(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(ids)


def train(model: nn.Module, ps: Any, steps: int = 4, ids: torch.Tensor = IDS[:SEEN]) -> psd.DistributedOptimizer:
    optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), ps=ps)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids).float().square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def exported(cluster, tmp_path_factory):
    """exported(model) -> path of the export of a job that has trained it, and what it then gave there; keywords as of train."""

    def run(model: nn.Module, ids: torch.Tensor = IDS, **options: Any) -> tuple[str, torch.Tensor]:
        place = tmp_path_factory.mktemp("run")
        url, path = str(place / "checkpoints"), str(place / "model.safetensors")
        running = cluster(2, checkpoint_dir=url)
        with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
            optimizer = train(model, ps, **options)
            found = score(model, ids)
            optimizer.close()
        running.finish()
        directory = CheckpointDirectory(url)
        directory.export(directory.newest(), path)
        return path, found

    return run


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_export_loads_strictly_and_gives_what_the_worker_gave(exported, mode):
    """Under names of modules, which are not the tables'; of ids that nobody has trained, too, and of the padding."""
    path, expected = exported(Model(mode))
    state = safetensors.load_file(path)

    by_torch, by_safetensors, turned = Model(mode), Model(mode), Model(mode, is_turned=True)
    by_torch.load_state_dict(state, strict=True)
    assert safetensors.load_model(by_safetensors, path) == (set(), [])
    turned.load_state_dict(state, strict=True)  # in which the module that the file does not name comes first

    for model in (by_torch, by_safetensors, turned):
        assert torch.equal(score(model), expected)
    assert set(state) - set(nn.ModuleDict({"norm": by_torch.norm, "top": by_torch.top}).state_dict()) == {
        f"inner.{module}.{part}" for module in ("who", "what") for part in ("ids", "rows")
    }
    assert state["inner.who.rows"].shape == (SEEN - 1, DIM)  # nothing was made for what was only asked for


def test_a_collection_a_module_used_twice_and_a_model_that_is_an_embedding_load_too(exported):
    init = {"init": psd_client.Normal(0.3), "seed": 7}

    def whole() -> psd.Embedding:
        return psd.Embedding("user", DIM, psd_client.Adagrad(lr=0.2), **init)

    def collection() -> nn.Module:
        item = psd.Embedding("item", DIM, **init)
        made = {"user": whole(), "item": item, "again": item, "seen": psd.EmbeddingBag("item", DIM, mode="sum", **init)}
        return Collected(psd.EmbeddingCollection(made))

    for build in (whole, collection):
        path, expected = exported(build())

        model = build()
        model.load_state_dict(safetensors.load_file(path))
        assert torch.equal(score(model), expected)
        safetensors.load_model(model, path)
        safetensors.load_model(model.double().float(), path)  # which gives modules of one table rows of their own
        assert torch.equal(score(model), expected)


class Collected(nn.Module):
    def __init__(self, collection: psd.EmbeddingCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.collection({"user": ids, "item": ids, "again": ids.flip(0), "seen": ids[:, None]})
        return torch.cat(list(found.values()), 1)


def test_copies_pickles_and_saved_states_of_a_loaded_model_have_its_rows(exported, tmp_path):
    path, expected = exported(Model())
    model = Model()
    model.load_state_dict(safetensors.load_file(path))
    score(model)
    file, other = io.BytesIO(), str(tmp_path / "other.safetensors")
    torch.save(model, file)
    file.seek(0)
    safetensors.save_model(model, other)

    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), Model(), Model()]
    copies[3].load_state_dict(model.state_dict())
    safetensors.load_model(copies[4], other)

    with torch.no_grad():
        model.inner["who"].rows.zero_()
    for found in copies:
        assert torch.equal(score(found), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_are_of_the_models_dtype_whether_it_is_changed_before_or_after(exported, dtype):
    path, expected = exported(Model().to(dtype))
    assert expected.dtype == dtype
    before, after, kept = Model().to(dtype), Model(), Model().to(dtype)

    before.load_state_dict(safetensors.load_file(path))
    after.load_state_dict(safetensors.load_file(path))
    after.to(dtype)
    kept.load_state_dict(state := safetensors.load_file(path), assign=True)

    for model in (before, kept):
        assert torch.equal(score(model), expected)
    torch.testing.assert_close(score(after), expected, rtol=1e-5, atol=1e-6)  # its other parameters were float32 meanwhile
    assert before.inner["who"].rows.dtype == after.inner["who"].rows.dtype == dtype
    assert kept.inner["who"].rows is state["inner.who.rows"]  # of a large file nothing is copied


def test_an_empty_table_gives_initial_values(exported):
    path, expected = exported(Model(), steps=0)
    state = safetensors.load_file(path)
    assert state["inner.what.rows"].shape == (0, WIDE)

    model = Model()
    model.load_state_dict(state)

    assert torch.equal(score(model), expected)
    assert torch.equal(score(model, IDS[:0]), expected[:0])


def test_loaded_rows_are_fixed_and_what_is_above_them_trains(exported):
    model = Model()
    model.load_state_dict(safetensors.load_file(exported(Model())[0]))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    model.train()
    model.inner["who"].prefetch(IDS)
    model(IDS).square().sum().backward()
    optimizer.step()

    assert not torch.equal(model.top.weight, before["top.weight"])
    for name in ("inner.who.rows", "inner.what.rows"):
        assert torch.equal(model.state_dict()[name], before[name])


def test_what_does_not_fit_is_named_and_the_model_has_the_rows_of_before(exported):
    path, expected = exported(Model())
    state = safetensors.load_file(path)
    model = Model()
    model.load_state_dict(state)
    ids, rows = state["inner.who.ids"], state["inner.who.rows"]

    for change, message in [
        ({"inner.who.rows": rows[:, 1:]}, r"'user': inner.who.rows: must be rows, \(29, 4\) floating, got \(29, 3\)"),
        ({"inner.who.rows": rows[1:]}, r"must be rows, \(29, 4\) floating, got \(28, 4\)"),
        ({"inner.who.rows": rows.int()}, r"floating, got \(29, 4\) torch.int32"),
        ({"inner.who.ids": ids.int()}, r"inner.who.ids: must be ids, \(n,\) int64, got \(29,\) torch.int32"),
        ({"inner.who.ids": torch.cat([ids[1:], ids[1:2]])}, "inner.who.ids: an id comes twice"),
        ({"inner.who.ids": None}, "inner.who.ids and inner.who.rows are one table, and only one of them is there"),
        ({"inner.who.ids": None, "inner.who.rows": None}, r'Missing key\(s\) in state_dict: "inner.who.ids", "inner.who.rows"'),
        ({"inner.user.rows": rows}, r'Unexpected key\(s\) in state_dict: "inner.user.rows"'),
    ]:
        changed = {name: value for name, value in (state | change).items() if value is not None}
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(changed)
        assert torch.equal(score(model), expected)
    model.load_state_dict(state | {"inner.who.ids": ids.view(torch.uint64)})
    assert torch.equal(score(model), expected)


def test_a_model_in_a_job_takes_no_rows_and_one_with_rows_joins_none(run_workers, exported):
    path, expected = exported(Model())
    state = safetensors.load_file(path)
    loaded = Model()
    loaded.load_state_dict(state)

    def worker(ps):
        with pytest.raises(
            InvalidRequest, match=r"'user': the model has its rows, .* --from-checkpoint FILE --parameters-only"
        ):
            psd.distribute(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), ps=ps)
        model = Model()
        optimizer = train(model, ps)
        with pytest.raises(RuntimeError, match="'user': its rows are on the shards of its job"):
            model.load_state_dict(state)
        optimizer.pull()
        assert not any(name.startswith("inner.") for name in model.state_dict())
        optimizer.close()
        with pytest.raises(NotDeclared, match=r"'user': .* psd_client\.torch\.read_rows\(model, reader\)"):
            model(IDS)
        model.load_state_dict(state)
        return score(model)

    assert torch.equal(run_workers(1, 1, worker)[0], expected)


def test_a_job_begins_with_what_another_has_exported(cluster, exported):
    """Whose shards know the table's name, and not that of the module under which the rows are."""
    path, expected = exported(Model())
    servers = cluster(3, from_checkpoint=path, parameters_only=True).servers

    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps:
        model = Model()
        train(model, ps, steps=0)
        model.norm.load_state_dict({name[5:]: value for name, value in safetensors.load_file(path).items() if "norm." in name})
        assert torch.equal(score(model), expected)


def test_a_model_reads_the_rows_of_a_running_job_and_takes_no_part(cluster):
    """It sees each step, and no lookup of it makes a row or counts as a use."""
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps, psd_client.connect(servers, role="reader") as reader:
        worker, model = Model(), Model()
        optimizer = train(worker, ps)
        psd.read_rows(model, reader)
        for _ in range(2):
            model.load_state_dict({name: torch.from_numpy(value) for name, value in reader.pull().items()})
            model.norm.load_state_dict(worker.norm.state_dict())  # of a reader some seconds old
            before = ps.stats(), score(worker)
            assert torch.equal(score(model), before[1])
            worker.train()(IDS[:SEEN]).square().mean().backward()
            optimizer.step()
        model.train()(IDS).sum().backward()
        assert model.inner["who"].handle.grad is None
        with pytest.raises(NotDeclared):
            score(copy.deepcopy(model))

        with pytest.raises(InvalidRequest, match="'user': its model is in a job, as a worker"):
            psd.read_rows(worker, reader)
        with pytest.raises(InvalidRequest, match="'person': the job has no such table; it has user, item"):
            psd.read_rows(psd.Embedding("person", DIM), reader)
        with pytest.raises(InvalidRequest, match="'user': dim: is 9, and that of the job's table is 4"):
            psd.read_rows(psd.Embedding("user", 9), reader)
        with pytest.raises(TypeError, match=r"reader: expected what psd_client\.connect"):
            psd.read_rows(model, ps)
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
            psd.read_rows(None, reader)


def test_a_reader_gives_way_to_loaded_rows_and_these_to_a_reader(cluster, exported):
    path, expected = exported(Model())
    servers = cluster(1).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps, psd_client.connect(servers, role="reader") as reader:
        train(Model(), ps, steps=0)
        model = Model()
        psd.read_rows(model, reader)
        model.load_state_dict(safetensors.load_file(path))
        assert torch.equal(score(model), expected)
        psd.read_rows(model, reader)
        assert not torch.equal(score(model), expected)
        assert "inner.who.rows" not in model.state_dict()
