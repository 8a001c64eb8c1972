"""The collections beside TorchRec's own, with TorchRec's features and configurations, and with psd's that stand in for them."""

from __future__ import annotations

import pytest
import torch
import torchrec
from rows_in_memory import IDS, RowsInMemory, dense

import psd_client.torchrec as psd
from psd.contract.errors import InvalidRequest
from psd_client import Constant

KINDS = [pytest.param(torchrec, id="torchrec"), pytest.param(psd, id="plain")]
KEYS = ["bought", "unknown", "user", "seen"]
SAMPLES = 5


def features(kind, *, is_weighted: bool = False):
    """Bags of up to 3 ids; some of them are empty, all of a key that nobody wants, too."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, (len(KEYS) * SAMPLES,), generator=generator, dtype=torch.int32)
    lengths[SAMPLES : 2 * SAMPLES] = 0
    ids = torch.randint(IDS // 3, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if is_weighted else None
    return kind.KeyedJaggedTensor.from_lengths_sync(KEYS, ids, lengths, weights)


def configs(kind, pooling: str = "SUM"):
    """A feature has a table of its own, two share one, and one of these has another one, too."""
    pools = (torchrec.PoolingType if kind is torchrec else psd.PoolingType)[pooling]
    make = kind.EmbeddingBagConfig
    return [
        make(name="t_user", embedding_dim=4, num_embeddings=IDS, feature_names=["user"], pooling=pools),
        make(name="t_item", embedding_dim=8, num_embeddings=IDS, feature_names=["seen", "bought"], pooling=pools),
        make(name="seen", embedding_dim=4, num_embeddings=IDS, pooling=pools),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pooling", "is_weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
def test_pooled_rows_names_and_gradients_are_those_of_torchrec(kind, pooling, is_weighted):
    mine = psd.EmbeddingBagCollection(configs(kind, pooling), is_weighted)
    rows = RowsInMemory(4, 8, 4)
    job = rows.join(*mine.embedding_bags.values())
    theirs = torchrec.EmbeddingBagCollection(configs(torchrec, pooling), is_weighted)
    for number, module in enumerate(theirs.embedding_bags.values()):
        module.weight.data.copy_(rows.weight(number))

    found = mine(features(kind, is_weighted=is_weighted))
    expected = theirs(features(torchrec, is_weighted=is_weighted))

    assert type(found) is kind.KeyedTensor
    assert found.keys() == expected.keys() == ["user", "seen@t_item", "bought", "seen@seen"]
    assert found.length_per_key() == expected.length_per_key()
    assert found.offset_per_key() == expected.offset_per_key()
    assert found.key_dim() == expected.key_dim()
    torch.testing.assert_close(found.values(), expected.values())
    for key, part in expected.to_dict().items():
        torch.testing.assert_close(found[key], part)
        torch.testing.assert_close(found.to_dict()[key], part)
    for output in (found, expected):
        (output.values() * torch.arange(output.values().numel()).view_as(output.values()).sin()).sum().backward()
    for number, module in enumerate(theirs.embedding_bags.values()):
        torch.testing.assert_close(dense(job, rows.rows[number].shape[1], number), module.weight.grad)
    assert mine.is_weighted() == theirs.is_weighted()
    assert len(rows.pulls) == 1


def test_torchrecs_functions_take_the_output():
    mine = psd.EmbeddingBagCollection(configs(torchrec))
    rows = RowsInMemory(4, 8, 4)
    rows.join(*mine.embedding_bags.values())

    output = mine(features(torchrec))
    groups = torchrec.KeyedTensor.regroup([output], [["bought"], ["user", "seen@seen"]])

    torch.testing.assert_close(groups[1], torch.cat([output["user"], output["seen@seen"]], dim=1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_pooled_are_those_of_torchrec(kind):
    def tables(of):
        return [
            of.EmbeddingConfig(name="t_item", embedding_dim=4, num_embeddings=IDS, feature_names=["seen", "bought"]),
            of.EmbeddingConfig(name="seen", embedding_dim=4, num_embeddings=IDS),
        ]

    mine = psd.EmbeddingCollection(tables(kind), need_indices=True)
    rows = RowsInMemory(4, 4)
    job = rows.join(*mine.embeddings.values())
    theirs = torchrec.EmbeddingCollection(tables(torchrec), need_indices=True)
    for number, module in enumerate(theirs.embeddings.values()):
        module.weight.data.copy_(rows.weight(number))

    found, expected = mine(features(kind)), theirs(features(torchrec))

    assert list(found) == list(expected) == ["seen@t_item", "bought", "seen@seen"]
    for name, jagged in expected.items():
        assert type(found[name]) is kind.JaggedTensor
        torch.testing.assert_close(found[name].values(), jagged.values())
        assert torch.equal(found[name].weights(), jagged.weights())
        assert found[name].lengths().tolist() == jagged.lengths().tolist()
        assert [part.tolist() for part in found[name].to_dense()] == [part.tolist() for part in jagged.to_dense()]
    for output in (found, expected):
        sum(jagged.values().square().sum() for jagged in output.values()).backward()
    for number, module in enumerate(theirs.embeddings.values()):
        torch.testing.assert_close(dense(job, 4, number), module.weight.grad)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_plain_features_answer_as_torchrecs(is_weighted, by):
    given = features(torchrec, is_weighted=is_weighted)
    sizes = given.lengths() if by == "lengths" else given.offsets()

    mine, theirs = (
        getattr(kind.KeyedJaggedTensor, f"from_{by}_sync")(KEYS, given.values(), sizes, given.weights_or_none())
        for kind in (psd, torchrec)
    )

    def answers(kjt) -> list:
        found = [kjt.keys(), kjt.stride(), kjt.length_per_key(), kjt.offset_per_key(), kjt.device(), list(kjt.to_dict())]
        for jagged in (kjt, *(kjt[key] for key in KEYS)):
            weights = jagged.weights_or_none()
            found += [jagged.values().tolist(), jagged.lengths().tolist(), jagged.offsets().tolist()]
            found.append(weights if weights is None else weights.tolist())
        return [*found, [[row.tolist() for row in kjt[key].to_dense()] for key in KEYS]]

    assert answers(mine) == answers(theirs)
    assert answers(mine.to("cpu")) == answers(theirs.to("cpu"))


def test_initial_values_have_the_bounds_of_torchrecs():
    """Also where a config has its own."""
    ours, theirs = (
        [
            kind.EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=37),
            kind.EmbeddingBagConfig(name="b", embedding_dim=4, num_embeddings=9, weight_init_max=0.1, weight_init_min=-0.2),
        ]
        for kind in (psd, torchrec)
    )
    for tables in (ours, theirs):
        specs = [module.spec for module in psd.EmbeddingBagCollection(tables).embedding_bags.values()]
        assert [spec.init.low for spec in specs] == pytest.approx([config.get_weight_init_min() for config in theirs])
        assert [spec.init.high for spec in specs] == pytest.approx([config.get_weight_init_max() for config in theirs])


def test_what_a_table_cannot_have_is_refused_by_name():
    def config(**more):
        return torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, **more)

    with pytest.raises(InvalidRequest, match="table 't': data_type: rows are float32; for bfloat16 leave it off"):
        psd.EmbeddingBagCollection([config(data_type=torchrec.types.DataType.FP16)])
    with pytest.raises(InvalidRequest, match="table 't': init_fn: fills a table"):
        psd.EmbeddingBagCollection([config(init_fn=torch.nn.init.ones_)])
    filled = psd.EmbeddingBagCollection([config(init_fn=torch.nn.init.ones_)], options={"t": {"init": Constant(1.0)}})
    assert filled.embedding_bags["t"].spec.init == Constant(1.0)
    with pytest.raises(InvalidRequest, match=r"table 't': pooling: expected PoolingType\.SUM or"):
        psd.EmbeddingBagCollection([config(pooling=torchrec.PoolingType.NONE)])
    uneven = torchrec.KeyedJaggedTensor(
        ["t", "u"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int32), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(InvalidRequest, match="features: stride_per_key_per_rank: not supported"):
        psd.EmbeddingBagCollection([config()])(uneven)
