"""TorchRec's DLRM, unchanged, with psd's collection in the place of its own: trained on shards as in one process."""

from __future__ import annotations

import pytest
import torch
import torchrec
from torchrec.models.dlrm import DLRM, DLRMTrain

import psd_client.torch as psd_torch
import psd_client.torchrec as psd

DIM, DENSE, IDS, STEPS, BATCH = 8, 5, 40, 8, 12
FEATURES = ["ad", "site", "seen", "bought"]


def tables() -> list[torchrec.EmbeddingBagConfig]:
    """Two features share the last one."""
    features = {"t_ad": ["ad"], "t_site": ["site"], "t_item": ["seen", "bought"]}
    return [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=IDS, feature_names=of)
        for name, of in features.items()
    ]


def model_of(collection: torch.nn.Module) -> DLRMTrain:
    """The model of torchrec's examples, with the same values at each call, from any thread."""
    model = DLRM(collection, DENSE, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "embedding_bag" not in name:
            torch.nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    return DLRMTrain(model)


class Batch:
    """What DLRMTrain takes, of some samples of a step."""

    def __init__(self, step: int, samples: slice = slice(None)) -> None:
        generator = torch.Generator().manual_seed(step)
        self.dense_features = torch.randn(BATCH, DENSE, generator=generator)[samples]
        self.labels = torch.randint(2, (BATCH,), generator=generator)[samples]
        bags = [
            [torch.randint(IDS // 2, (int(count),), generator=generator) for count in counts][samples]
            for counts in torch.randint(4, (len(FEATURES), BATCH), generator=generator)
        ]
        flat = [bag for of_feature in bags for bag in of_feature]
        lengths = torch.tensor([len(bag) for bag in flat])
        self.sparse_features = torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(flat), lengths)


def each_id() -> torchrec.KeyedJaggedTensor:
    """A sample for each id, in all features."""
    ids = torch.arange(IDS).repeat(len(FEATURES))
    return torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, torch.ones_like(ids))


def values_of(train: DLRMTrain) -> dict[str, torch.Tensor]:
    """The dense parameters; and what the rows are, by feature."""
    found = {name: p.detach().clone() for name, p in train.named_parameters() if "embedding_bag" not in name}
    with torch.no_grad():
        return found | train.eval().model.sparse_arch.embedding_bag_collection(each_id()).to_dict()


@pytest.mark.parametrize(("world_size", "shards"), [(1, 1), (2, 2)])
def test_torchrecs_dlrm_trains_on_shards_as_torchrec_does_in_one_process(run_workers, world_size, shards):
    """Shares are uneven: of 12 samples, two workers get 4 and 8."""

    def worker(ps):
        train = model_of(psd.EmbeddingBagCollection(tables()))
        optimizer = psd_torch.distribute(train, torch.optim.Adagrad(train.parameters(), lr=0.1), ps=ps)
        start = values_of(train)
        train.train()
        bounds = [0, *(4 * rank for rank in range(1, world_size)), BATCH]
        for step in range(STEPS):
            samples = slice(bounds[ps.rank], bounds[ps.rank + 1])
            optimizer.zero_grad()
            loss, _ = train(Batch(step, samples))
            loss.backward()
            optimizer.step(batch_size=samples.stop - samples.start)
        return start, values_of(train)

    found = run_workers(world_size, shards, worker)

    alone = model_of(torchrec.EmbeddingBagCollection(tables()))
    start = found[0][0]
    for feature, table in {"ad": "t_ad", "site": "t_site", "seen": "t_item"}.items():
        weight = alone.model.sparse_arch.embedding_bag_collection.embedding_bags[table].weight
        assert weight.abs().max() <= IDS**-0.5
        assert start[feature].abs().max() <= IDS**-0.5
        weight.data.copy_(start[feature])
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = alone(Batch(step))
        loss.backward()
        optimizer.step()
    expected = values_of(alone)
    for _, end in found:
        assert end.keys() == expected.keys()
        for name, value in expected.items():
            assert (value - start[name]).abs().max() > 0.05, name
            torch.testing.assert_close(end[name], value, rtol=1e-4, atol=1e-5)
