"""TorchRec's collections on tables: the numbers and gradients of torch's own modules, feature by feature.

Features are of psd's own types; tests/torchrec has those of torchrec.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rows_in_memory import IDS, RowsInMemory, dense  # noqa: E402
from torch import nn  # noqa: E402

import psd_client.torchrec as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared  # noqa: E402
from psd_client import Adagrad, Constant, Normal, Uniform  # noqa: E402

SAMPLES = 5
DIMS = {"t_user": 4, "t_item": 3}


def features(*keys: str, seed: int = 0, dtype: torch.dtype = torch.int64, is_weighted: bool = False) -> psd.KeyedJaggedTensor:
    """Bags of up to 3 ids, some of them empty, and all of the last key; ids repeat, in bags and among features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(keys) * SAMPLES,), generator=generator)
    lengths[-SAMPLES:] = 0
    ids = torch.randint(IDS // 3, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = torch.rand(len(ids), generator=generator) if is_weighted else None
    return psd.KeyedJaggedTensor(list(keys), ids, weights, lengths)


def bags(name: str, *of: str, pooling: psd.PoolingType = psd.PoolingType.SUM, **more: float) -> psd.EmbeddingBagConfig:
    return psd.EmbeddingBagConfig(
        name=name, embedding_dim=DIMS[name], num_embeddings=100, feature_names=list(of), pooling=pooling, **more
    )


def joined(collection: nn.Module) -> tuple[RowsInMemory, object]:
    """Rows of the tables of a collection, which is joined to them."""
    modules = getattr(collection, "embedding_bags", None) or collection.embeddings
    rows = RowsInMemory(*(module.spec.dim for module in modules.values()))
    return rows, rows.join(*modules.values())


@pytest.mark.parametrize("pooling", psd.PoolingType)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_pooled_rows_and_their_gradients_are_those_of_torch(pooling, dtype, is_weighted):
    """Two tables of different dims, of which one has two features, in another order than the features come; empty bags."""
    if is_weighted and pooling is psd.PoolingType.MEAN:
        with pytest.raises(InvalidRequest, match="'t_user': pooling: features with weights are summed"):
            psd.EmbeddingBagCollection([bags("t_user", "user", pooling=pooling)], is_weighted=True)
        return
    tables = [bags("t_user", "user", pooling=pooling), bags("t_item", "seen", "bought", pooling=pooling)]
    collection = psd.EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    rows, job = joined(collection)
    given = features("bought", "unknown", "user", "seen", dtype=dtype, is_weighted=is_weighted)
    if is_weighted:
        given.weights().requires_grad_()

    out = collection(given)

    assert (out.keys(), out.length_per_key(), out.offset_per_key()) == (["user", "seen", "bought"], [4, 3, 3], [0, 4, 7, 10])
    assert out.values().shape == (SAMPLES, 10)
    modules = [nn.EmbeddingBag.from_pretrained(rows.weight(n), freeze=False, mode=pooling.value.lower()) for n in (0, 1)]
    weights = given.weights().detach().requires_grad_() if is_weighted else None
    theirs = psd.KeyedJaggedTensor(given.keys(), given.values(), weights, given.lengths())
    factors = torch.arange(10 * SAMPLES).reshape(SAMPLES, 10).float().sin()
    for key, module in zip(out.keys(), [modules[0], modules[1], modules[1]], strict=True):
        part = theirs[key]
        expected = module(part.values(), part.offsets()[:-1], part.weights_or_none())
        torch.testing.assert_close(out[key], expected)
        at = out.offset_per_key()[out.keys().index(key)]
        (expected * factors[:, at : at + expected.shape[1]]).sum().backward()
    (out.values() * factors).sum().backward()
    for number, dim in enumerate((4, 3)):
        torch.testing.assert_close(dense(job, dim, number), modules[number].weight.grad)
    if is_weighted:
        torch.testing.assert_close(given.weights().grad, weights.grad)


def test_all_tables_come_in_one_round_trip_and_each_distinct_id_of_a_table_once():
    """Prefetched rows serve the next lookup; in evaluation mode a lookup counts as no use."""
    collection = psd.EmbeddingBagCollection([bags("t_user", "user"), bags("t_item", "seen", "bought")])
    rows, job = joined(collection)
    given = psd.KeyedJaggedTensor(
        ["user", "seen", "bought"], torch.tensor([7, 8, 3, 3, 4, 4]), lengths=torch.tensor([1, 1, 0, 2, 2, 0])
    )

    first = collection(given)
    assert rows.pulls == [({0: [7, 8], 1: [3, 4]}, False)]
    collection.eval()(given)
    assert rows.pulls[1:] == [({0: [7, 8], 1: [3, 4]}, True)]

    collection.train().prefetch(given)
    rows.clock += 1
    job.on_step()
    assert torch.equal(collection(given).values(), first.values())
    assert len(rows.pulls) == 3


def test_a_feature_of_several_tables_has_a_name_for_each_and_a_table_without_features_one_of_its_own():
    tables = [bags("t_user", "item"), bags("t_item")]
    collection = psd.EmbeddingBagCollection([*tables, psd.EmbeddingBagConfig(
        name="third", embedding_dim=2, num_embeddings=9, feature_names=["item"])])  # fmt: skip
    rows, _ = joined(collection)

    out = collection(features("item", "t_item", "empty"))

    assert out.keys() == ["item@t_user", "t_item", "item@third"]
    assert collection.embedding_bag_configs()[1].feature_names == ["t_item"]
    assert out.length_per_key() == [part.shape[1] for part in out.to_dict().values()] == [4, 3, 2]
    ids = features("item", "t_item", "empty")["item"].to_dense()
    torch.testing.assert_close(out["item@third"][0], rows.weight(2)[ids[0]].sum(0))


@pytest.mark.parametrize("samples", [0, 3])
def test_a_batch_without_ids_has_zeros_and_no_gradient(samples):
    collection = psd.EmbeddingBagCollection([bags("t_user", "user"), bags("t_item", "seen")])
    rows, job = joined(collection)
    nothing = torch.empty(0, dtype=torch.int64)

    out = collection(psd.KeyedJaggedTensor(["user", "seen"], nothing, lengths=torch.zeros(2 * samples, dtype=torch.int32)))
    out.values().sum().backward()

    assert torch.equal(out.values(), torch.zeros(samples, 7))
    assert rows.pulls == []
    assert all(len(ids) == 0 for ids, _ in job.gradients().values())


def test_rows_that_are_not_pooled_come_for_each_id():
    config = psd.EmbeddingConfig(name="t_item", embedding_dim=3, num_embeddings=100, feature_names=["seen", "bought"])
    collection = psd.EmbeddingCollection([config], need_indices=True)
    rows, job = joined(collection)
    given = features("bought", "seen", "empty")

    out = collection(given)

    assert list(out) == ["seen", "bought"]
    for key, jagged in out.items():
        torch.testing.assert_close(jagged.values(), rows.weight()[given[key].values()])
        assert torch.equal(jagged.lengths(), given[key].lengths())
        assert torch.equal(jagged.weights(), given[key].values())
        assert [len(part) for part in jagged.to_dense()] == given[key].lengths().tolist()
    out["seen"].values().sum().backward()
    assert dense(job, 3).sum() == 3 * len(given["seen"].values())
    assert len(rows.pulls) == 1


def test_features_are_what_lengths_or_offsets_say():
    """The example of torchrec's documentation."""
    ids, lengths, offsets = torch.arange(8), torch.tensor([2, 0, 1, 1, 1, 3]), torch.tensor([0, 2, 2, 3, 4, 5, 8])
    weights = ids / 8
    for given in (
        psd.KeyedJaggedTensor.from_lengths_sync(["f1", "f2"], ids, lengths, weights),
        psd.KeyedJaggedTensor.from_offsets_sync(["f1", "f2"], ids, offsets, weights).to("cpu"),
        psd.KeyedJaggedTensor(["f1", "f2"], ids, weights, lengths, offsets, 3),
    ):
        assert (given.stride(), given.keys(), given.device()) == (3, ["f1", "f2"], torch.device("cpu"))
        assert (given.length_per_key(), given.offset_per_key()) == ([3, 5], [0, 3, 8])
        assert torch.equal(given.lengths(), lengths)
        assert torch.equal(given.offsets(), offsets)
        assert [part.tolist() for part in given["f1"].to_dense()] == [[0, 1], [], [2]]
        assert [part.tolist() for part in given["f2"].to_dense()] == [[3], [4], [5, 6, 7]]
        assert torch.equal(given["f2"].weights(), weights[3:])
        assert given["f2"].offsets().tolist() == [0, 1, 2, 5]
    assert psd.KeyedJaggedTensor(["f1", "f2"], ids, lengths=lengths)["f1"].weights_or_none() is None
    with pytest.raises(InvalidTensor, match="weights: there are none"):
        psd.JaggedTensor(ids, lengths=lengths).weights()


def test_initial_values_are_torchrecs_and_options_are_the_tables():
    """Uniform, by the number of ids that are expected, unless a config or an option says otherwise."""
    rule = Adagrad(lr=0.1)
    collection = psd.EmbeddingBagCollection(
        [bags("t_user"), bags("t_item", weight_init_min=-1.0, weight_init_max=2.0)],
        optimizer=rule,
        options={"t_item": {"admit_after": 3, "expire_steps": 10, "max_rows": 7, "optimizer": Adagrad(lr=0.2), "seed": 5}},
    )
    user, item = collection.embedding_bags.values()

    assert (user.spec.init, item.spec.init) == (Uniform(-0.1, 0.1), Uniform(-1.0, 2.0))
    assert (user.optimizer, item.optimizer) == (rule, Adagrad(lr=0.2))
    assert (user.spec.admit_after, user.spec.expire_steps) == (1, 0)
    assert (item.spec.admit_after, item.spec.expire_steps, item.spec.max_rows, item.spec.seed) == (3, 10, 7, 5)
    options = {"t_user": {"init": Normal(0.3), "dtype": "bfloat16"}}
    (user,) = psd.EmbeddingBagCollection([bags("t_user")], options=options).embedding_bags.values()
    assert (user.spec.init, user.spec.dtype) == (Normal(0.3), "bfloat16")


class _Filled(psd.EmbeddingBagConfig):
    """A table that a function is to fill."""

    init_fn = staticmethod(nn.init.zeros_)


@pytest.mark.parametrize(
    ("tables", "options", "error", "message"),
    [
        ([], {}, InvalidRequest, "tables: there must be at least one"),
        ([bags("t_user"), bags("t_user", "x")], {}, InvalidRequest, "tables: 2 have the name 't_user'"),
        ([bags("t_user")], {"user": {}}, InvalidRequest, "options: there is no table 'user'; there are t_user"),
        ([bags("t_user")], {"t_user": {"admit": 3}}, TypeError, "admit"),
        ([bags("t_user")], {"t_user": {"admit_after": 0}}, InvalidRequest, "admit_after"),
        ([bags("t_user", pooling="NONE")], {}, InvalidRequest, "'t_user': pooling: expected PoolingType.SUM or"),
        ([psd.EmbeddingBagConfig(name="a", embedding_dim=2, num_embeddings=0)], {}, InvalidRequest, "num_embeddings: must be"),
        ([_Filled(name="a", embedding_dim=2, num_embeddings=9)], {}, InvalidRequest, "'a': init_fn: fills a table"),
    ],
)  # fmt: skip
def test_wrong_declarations_are_named(tables, options, error, message):
    with pytest.raises(error, match=message):
        psd.EmbeddingBagCollection(tables, options=options)


def test_a_function_for_initial_values_is_no_matter_where_an_option_has_them():
    (bag,) = psd.EmbeddingBagCollection(
        [_Filled(name="a", embedding_dim=2, num_embeddings=9)], options={"a": {"init": Constant(1.0)}}
    ).embedding_bags.values()

    assert bag.spec.init == Constant(1.0)


def test_wrong_features_are_named_before_anything_is_pulled():
    collection = psd.EmbeddingBagCollection([bags("t_user", "user")], is_weighted=True)
    with pytest.raises(NotDeclared, match="'t_user': its rows are on the shards"):
        collection(features("user", "empty", is_weighted=True))
    rows, _ = joined(collection)
    ids, lengths = torch.tensor([1, 2]), torch.tensor([2, 0])

    def refused(error, message, *keys, values=ids, weights=None, lengths=lengths):
        with pytest.raises(error, match=message):
            collection(psd.KeyedJaggedTensor(list(keys), values, weights, lengths))

    with pytest.raises(TypeError, match=r"features: expected a KeyedJaggedTensor, of torchrec or .*, got dict"):
        collection({"user": ids})
    refused(InvalidRequest, "no key 'user'; there are item", "item", weights=torch.ones(2))
    refused(InvalidRequest, "keys: must differ from each other, got user, user", "user", "user")
    refused(InvalidTensor, "lengths: must be whole numbers, one for each of 0 keys")
    refused(InvalidTensor, "one for each of 3 keys and each sample, got 2 of torch.int64", "user", "a", "b")
    refused(InvalidTensor, "got 2 of torch.float32", "user", lengths=torch.ones(2))
    refused(InvalidTensor, r"ids have the shape \(2,\), and lengths the sum 3", "user", lengths=torch.tensor([1, 2]))
    refused(InvalidTensor, r"ids have the shape \(2,\), and lengths the sum 2", "user", lengths=torch.tensor([3, -1]))
    refused(InvalidTensor, r"ids have the shape \(2, 1\)", "user", values=ids[:, None])
    refused(InvalidTensor, "ids: dtype must be torch.int64", "user", values=ids.float(), weights=torch.ones(2))
    refused(InvalidTensor, "weighted, and needs 2, one for each id; got None", "user")
    refused(InvalidTensor, r"one for each id; got \(1,\)", "user", weights=torch.ones(1))
    with pytest.raises(InvalidTensor, match="lengths: needed, or offsets"):
        psd.KeyedJaggedTensor(["user"], ids)
    assert rows.pulls == []
