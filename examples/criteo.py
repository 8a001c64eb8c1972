"""Clicks as Criteo's logs have them: 13 counts and 26 categories a row, many of them missing; read from a file, or generated.

Categories keep their ids as they come: a table needs no vocabulary. No model is known here.
"""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psd_client.torchrec import KeyedJaggedTensor

DENSE, KEYS = 13, [f"cat_{number}" for number in range(26)]
TEST_SHARE = 5


class Clicks(NamedTuple):
    """Rows of a log, in the order of time; the last fifth is for testing.

    Attributes:
        labels: (n,), 1 for a click. dense: (n, 13), logarithms of counts.
        ids: (n, 26), categories. has: (n, 26), False where a row has none.
    """

    name: str
    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    has: NDArray[np.bool_]

    @property
    def training_rows(self) -> int:
        """Number of rows that are for training, which come first."""
        return len(self.labels) - len(self.labels) // TEST_SHARE

    def batch(self, rows: Any) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
        """Counts, categories and labels of some rows. A missing category is a bag without ids."""
        has, ids = self.has[rows].T, self.ids[rows].T
        lengths = torch.from_numpy(has.astype(np.int32).flatten())
        features = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.from_numpy(ids[has]), lengths)
        return torch.from_numpy(self.dense[rows]), features, torch.from_numpy(self.labels[rows])


def clicks(data: Path | None, rows: int) -> Clicks:
    """The first rows of a file of Criteo's, plain or gzipped; without a file, generated ones.

    A line has a label, 13 whole numbers and 26 categories of 8 hexadecimal digits, with tabs between them; any may be missing.
    """
    if data is None:
        return generated(rows)
    with gzip.open(data, "rt") if data.suffix == ".gz" else data.open() as file:
        lines = [line.rstrip("\n").split("\t") for line in itertools.islice(file, rows)]
    try:
        columns = np.array(lines, dtype=str).reshape(-1, 1 + DENSE + len(KEYS))
        labels = columns[:, 0].astype(np.float32)
        counts = np.where(columns[:, 1 : 1 + DENSE] == "", "0", columns[:, 1 : 1 + DENSE]).astype(np.int64)
        categories = columns[:, 1 + DENSE :]
        ids = np.array([int(text or "0", 16) for text in categories.flat], np.int64).reshape(categories.shape)
    except ValueError as error:
        raise ValueError(f"{data} is no log of Criteo's: expected label, 13 counts, 26 categories a line; {error}") from None
    return Clicks(data.name, labels, _dense(counts), ids, categories != "")


def generated(rows: int) -> Clicks:
    """A log with some to some thousands of categories in a column. Clicks depend on counts, and on columns that have few."""
    rng = np.random.default_rng(8)
    counts = rng.geometric(0.2, (rows, DENSE)) - 1
    sizes = np.geomspace(4, 4000, len(KEYS)).astype(np.int64)
    drawn = (sizes * rng.uniform(size=(rows, len(KEYS))) ** 3).astype(np.int64)
    has = rng.random((rows, len(KEYS))) > 0.1
    tastes = rng.normal(size=(len(KEYS), sizes.max())) * (sizes < 100)[:, None]
    scores = (tastes[np.arange(len(KEYS)), drawn] * has).sum(axis=1) + _dense(counts) @ rng.normal(scale=0.3, size=DENSE)
    labels = (scores - np.median(scores) + rng.logistic(size=rows) > 1).astype(np.float32)
    ids = drawn * 0x9E3779B1 % (1 << 32)  # hashes of 32 bits, as Criteo's; odd, so that no two have the same
    return Clicks("generated", labels, _dense(counts), ids, has)


def _dense(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.log1p(counts.clip(0)).astype(np.float32)
