"""Jobs with torchrec's collections: ids of all 64 bits, and the life of rows as each table's options say."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import psd_client  # noqa: E402
import psd_client.torch as psd_torch  # noqa: E402
import psd_client.torchrec as psd  # noqa: E402

WIDE = [-(1 << 63), (1 << 63) - 1, -1, 0, 0x5851F42D4C957F2D]
"""Ids that no array of rows could have."""


def test_ids_are_of_all_64_bits_and_rows_come_and_go_by_options_of_their_table(run_workers):
    """One table admits an id with its third gradient, one forgets it when it rests, one keeps all; features share a table."""

    def worker(ps):
        names = ["kept", "admitted", "expiring"]
        tables = [psd.EmbeddingBagConfig(name=name, embedding_dim=2, num_embeddings=10) for name in names]
        tables[0].feature_names = ["kept", "other"]
        collection = psd.EmbeddingBagCollection(
            tables,
            optimizer=psd_client.SGD(lr=1.0),
            options={
                "kept": {"init": psd_client.Constant(5.0)},
                "admitted": {"init": psd_client.Zeros(), "admit_after": 3},
                "expiring": {"init": psd_client.Zeros(), "expire_steps": 2},
            },
        )
        optimizer = psd_torch.distribute(collection, torch.optim.SGD(collection.parameters(), lr=0.5), ps=ps, reduce="sum")
        keys = ["kept", "other", "admitted", "expiring"]

        def batch(*per_key: list[int]) -> psd.KeyedJaggedTensor:
            """A sample for each id; for each feature as many."""
            ids = torch.tensor(per_key).flatten()
            return psd.KeyedJaggedTensor(keys, ids, lengths=torch.ones_like(ids))

        def step(features: psd.KeyedJaggedTensor) -> None:
            optimizer.zero_grad()
            (-collection(features).values().sum()).backward()
            optimizer.step()

        def rows(features: psd.KeyedJaggedTensor) -> dict[str, list[float]]:
            with torch.no_grad():
                return {key: part[:, 0].tolist() for key, part in collection.eval()(features).to_dict().items()}

        wide = batch(WIDE, WIDE, WIDE, WIDE)
        step(wide)
        first = rows(wide)
        step(wide)
        step(wide)
        third = rows(wide)
        collection.train()
        others = batch([1] * 5, [2] * 5, [3] * 5, [4] * 5)
        for _ in range(4):
            step(others)
        return first, third, rows(wide)

    for first, third, last in run_workers(2, 2, worker):
        assert first == {"kept": [9.0] * 5, "other": [9.0] * 5, "admitted": [0.0] * 5, "expiring": [2.0] * 5}
        assert third == {"kept": [17.0] * 5, "other": [17.0] * 5, "admitted": [2.0] * 5, "expiring": [6.0] * 5}
        assert last == third | {"expiring": [0.0] * 5}
