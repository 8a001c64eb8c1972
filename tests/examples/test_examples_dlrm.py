"""The example DLRM: synchronous training equals one process with torch's own EmbeddingBag; files of Criteo's are read."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

torch = pytest.importorskip("torch")
psd = pytest.importorskip("psd_client.torch")
torchrec = pytest.importorskip("psd_client.torchrec")

DIM, ROWS = 4, 400


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("world_size", "shards"), [(1, 1), (2, 2)])
def test_dlrm_synchronously_ends_where_one_process_does(example, run_workers, world_size, shards):
    """Dense layers, and the rows of 26 tables, by torch's Adagrad; a tenth of the bags are empty."""
    dlrm, sparse_data = example("dlrm"), example("sparse_data")
    data = example("criteo").generated(ROWS)
    every = data.batch(slice(None))[1]
    alone = dlrm.DLRM(dlrm.KnownIds(every, DIM), DIM)

    def rows(model):
        """Pooled rows of all samples, each of one id or none."""
        with torch.no_grad():
            return model.embeddings(every).values().clone()

    def rule(model):
        """Without an initial sum, first steps are of full size also where a gradient is nothing but rounding."""
        return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=1e-4)

    def layers(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items() if "arch" in name}

    def train(ps):
        model = dlrm.DLRM(torchrec.EmbeddingBagCollection(dlrm.tables(DIM)), DIM)
        model.load_state_dict(begin)
        optimizer = psd.distribute(model, rule(model), ps=ps)
        start = rows(model.eval())
        model.train()
        batches = sparse_data.batches(data.training_rows, 32 // world_size, 2, ps.rank, world_size)
        steps, _ = dlrm.fit(model, optimizer, data, batches, shows=False)
        return steps, start, rows(model.eval()), layers(model)

    begin = layers(alone)
    (steps, start, end, trained), *others = run_workers(world_size, shards, train)
    assert all(torch.equal(end, other[2]) for other in others)

    with torch.no_grad():
        for number, (key, bag) in enumerate(alone.embeddings.bags.items()):
            places = torch.searchsorted(alone.embeddings.known[key], every[key].values())
            bag.weight[places] = start[every[key].lengths() == 1, number * DIM : (number + 1) * DIM]
    optimizer = rule(alone)
    batches = sparse_data.batches(data.training_rows, 32, 2, 0, 1)
    assert dlrm.fit(alone, optimizer, data, batches, shows=False)[0] == steps == 20

    assert (end - start).abs().max() > 0.05
    torch.testing.assert_close(end, rows(alone), rtol=1e-5, atol=1e-6)
    for name, value in layers(alone).items():
        assert (value - begin[name]).abs().max() > 0.01
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def line_of(label: int, counts: dict[int, int], categories: dict[int, str]) -> str:
    """A line of a log with what it has; all else is missing."""
    columns = [str(label), *(str(counts.get(n, "")) for n in range(13)), *(categories.get(n, "") for n in range(26))]
    return "\t".join(columns) + "\n"


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteos_files_are_read_as_they_are(example, tmp_path, name):
    """Missing counts and negative ones are 0; a missing category is an empty bag; lines beyond the wanted ones stay unread."""
    lines = [line_of(0, {0: 3, 12: -2}, {0: "68fd1e64", 25: "00000000"}), line_of(1, {}, {1: "ffffffff"})]
    text = "".join([*lines, "no log\n"]).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)

    clicks = example("criteo").clicks(path, 2)

    dense, features, labels = clicks.batch(np.array([1, 0]))
    assert labels.tolist() == [1, 0]
    assert dense.count_nonzero() == 1
    assert dense[1, 0] == pytest.approx(np.log(4))
    bags = {key: [ids.tolist() for ids in features[key].to_dense()] for key in features.keys()}  # noqa: SIM118 - no dict
    assert bags["cat_0"] == [[], [0x68FD1E64]]
    assert bags["cat_1"] == [[0xFFFFFFFF], []]
    assert bags["cat_25"] == [[], [0]]
    assert all(bags[f"cat_{number}"] == [[], []] for number in range(2, 25))
    with pytest.raises(ValueError, match=r"is no log of Criteo's: expected label, 13 counts, 26 categories a line"):
        example("criteo").clicks(path, 3)
