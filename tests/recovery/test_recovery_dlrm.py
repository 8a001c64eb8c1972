"""A DLRM on torchrec's collection trains while shards are killed: the same bits as without all that."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos import assert_same_bits, final_state, run_disturbed, steps_for
from numpy.typing import NDArray
from shard_processes import ShardProcess

import psd_client

torch = pytest.importorskip("torch")
import psd_client.torch as psd  # noqa: E402
from psd_client.torchrec import EmbeddingBagCollection  # noqa: E402

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD_SIZE, DIM, ROWS, BATCH = 2, 4, 300, 16


def train(servers: str, rank: int, on_step: Callable[[], object], *, transport: str, steps: int) -> dict[str, NDArray[Any]]:
    """Synchronous, exact; ids wait to be admitted, and rows expire. Returns the dense values, and the rows of all samples."""
    torch.set_num_threads(1)
    dlrm, criteo = importlib.import_module("dlrm"), importlib.import_module("criteo")
    data = criteo.generated(ROWS)
    configs = dlrm.tables(DIM)
    options = {config.name: {"seed": 3} for config in configs}
    options["t_cat_20"] |= {"expire_steps": 5}
    options["t_cat_21"] |= {"admit_after": 2, "optimizer": psd_client.RowwiseAdagrad(lr=0.1)}
    model = dlrm.DLRM(EmbeddingBagCollection(configs, options=options), DIM)
    generator = torch.Generator().manual_seed(1)  # not torch's global seed, which is one for all threads
    for name, parameter in model.named_parameters():
        if "arch" in name:
            torch.nn.init.uniform_(parameter, -0.3, 0.3, generator)
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        given = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = psd.distribute(model, given, ps=ps, consistency="sync", aggregation="exact")
        for step in range(steps):
            begin = (2 * step + rank) * BATCH % (ROWS - BATCH)
            dense, features, labels = data.batch(slice(begin, begin + BATCH))
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels).backward()
            optimizer.step()
            on_step()
        with torch.no_grad():
            rows = model.eval().embeddings(data.batch(slice(None))[1]).values().numpy()
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters() if "arch" in name} | {"rows": rows}


@pytest.mark.parametrize(
    ("kills", "seed"),
    [pytest.param(3, 60, id="short"), pytest.param(30, 61, id="long", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])],
)
def test_training_when_shards_are_killed_then_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, seed: int
) -> None:
    """By kill -9 at any instant of a step; 26 tables, two of which have a life of their own, and Adam's moments of rows."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    ends = []
    for name, count in {"undisturbed": 0, "disturbed": kills}.items():
        url = str(tmp_path / name)
        shards = shard_processes(2, "--checkpoint-dir", url, "--lease", "60")
        work = functools.partial(train, steps=steps_for(kills, 0))
        found = run_disturbed(shards, WORLD_SIZE, work, transport="shm", seed=seed, kills=count, faults=0)
        ends.append((found, final_state(shards, url)))

    (undisturbed_models, undisturbed), (disturbed_models, disturbed) = ends
    assert_same_bits(undisturbed, disturbed)
    for one, other in zip(undisturbed_models, disturbed_models, strict=True):
        assert_same_bits(one, undisturbed_models[0])
        assert_same_bits(one, other)
