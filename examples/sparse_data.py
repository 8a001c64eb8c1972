"""Data of the examples with sparse tables: readers of published files, small generated sets in their place, and measures.

Features keep their ids as they come: a table needs no vocabulary. NumPy and psd_client alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import psd_client

Array = NDArray[Any]


class SparseRows(NamedTuple):
    """Rows of sparse features: row i has `ids[starts[i]:starts[i + 1]]`, and values likewise; labels are 0 or 1."""

    labels: Array
    starts: Array
    ids: Array
    values: Array

    def take(self, rows: Array) -> SparseRows:
        """Some of the rows, in their order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        return SparseRows(self.labels[rows], starts, self.ids[at], self.values[at])


class Categories(NamedTuple):
    """Ids (n, columns) of categories, a hash of column and value each; labels are 0 or 1; which rows are for testing."""

    name: str
    ids: Array
    labels: Array
    is_test: Array


class Ratings(NamedTuple):
    """Ratings of items by users; and which of these are for testing."""

    name: str
    users: Array
    items: Array
    ratings: Array
    is_test: Array


class Corpus(NamedTuple):
    """A text as numbers of words, the most frequent word being 0."""

    name: str
    words: list[str]
    text: Array


class Documents(NamedTuple):
    """Documents as bags of words: the tokens' documents, rising, and their words; and how many of both there are."""

    name: str
    documents: Array
    words: Array
    document_count: int
    word_count: int


def batches(count: int, size: int, epochs: int, rank: int, world_size: int) -> Iterator[Array]:
    """This worker's part of each batch: `size` of the numbers below `count`, shuffled anew in each epoch.

    All workers' parts together are the batch that one process with `world_size * size` would have.
    """
    rng = np.random.default_rng(1)
    whole = size * world_size
    if whole > count:
        raise ValueError(f"{world_size} workers with {size} each need {whole} training examples; there are {count}")
    for _ in range(epochs):
        order = rng.permutation(count)
        for start in range(rank * size, count - whole + rank * size + 1, whole):
            yield order[start : start + size]


def auc(labels: Array, scores: Array) -> float:
    """Area under the ROC curve: the probability that a row of label 1 has a higher score than one of label 0."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share a rank
    positive = labels == 1
    ones, zeros = np.count_nonzero(positive), np.count_nonzero(~positive)
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


# Sparse rows.


def libsvm(path: Path) -> SparseRows:
    """Rows of a libsvm file, "label id:value id:value ..." a line, plain or gzipped. Labels above 0 become 1, others 0."""
    text = _read(path)
    lengths = np.array([line.count(b":") for line in text.splitlines() if line.strip()], np.int64)
    numbers = _numbers(text.replace(b":", b" "))
    if len(numbers) != len(lengths) + 2 * lengths.sum():
        raise ValueError(f"{path} is not a libsvm file: expected lines such as '+1 3:1 17:0.5'")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    is_label = np.zeros(len(numbers), np.bool_)
    is_label[2 * starts[:-1] + np.arange(len(lengths))] = True
    pairs = numbers[~is_label].reshape(-1, 2)
    labels = (numbers[is_label] > 0).astype(np.float32)
    return SparseRows(labels, starts, pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.float32))


def sparse_rows(data: Path | None, test: Path | None) -> tuple[str, SparseRows, SparseRows]:
    """Name, rows for training and rows for testing: of two files; of one, with every fifth row for testing; or generated."""
    if data is None:
        name, rows = "generated", generated_rows()
    else:
        name, rows = data.name, libsvm(data)
    if test is not None:
        return name, rows, libsvm(test)
    is_test = np.arange(len(rows.labels)) % 5 == 0
    return name, rows.take(np.flatnonzero(~is_test)), rows.take(np.flatnonzero(is_test))


def generated_rows(count: int = 4000, features: int = 20_000, per_row: int = 40) -> SparseRows:
    """Bags of words: rare and frequent features of value 1, and labels by a linear model of the frequent ones."""
    rng = np.random.default_rng(2)
    weights = np.where(np.arange(features + 1) <= features // 100, rng.normal(scale=2, size=features + 1), 0)
    drawn = np.sort(1 + (features * rng.uniform(size=(count, per_row)) ** 3).astype(np.int64), axis=1)
    is_new = np.concatenate([np.ones((count, 1), np.bool_), np.diff(drawn) > 0], axis=1)
    scores = (weights[drawn] * is_new).sum(axis=1) + rng.logistic(size=count)
    starts = np.concatenate([[0], np.cumsum(is_new.sum(axis=1))])
    ids = drawn[is_new]
    return SparseRows((scores > 0).astype(np.float32), starts, ids, np.ones(len(ids), np.float32))


# Categories.


def categories(data: Path | None) -> Categories:
    """Rows of diabetes130 (its zip), of open-bandit (a folder with its log and item_context.csv), or generated ones."""
    if data is None:
        return generated_categories()
    return open_bandit(data) if data.is_dir() else diabetes(data)


def diabetes(path: Path) -> Categories:
    """Stays in hospital, 47 columns; label 1: readmitted within 30 days. The stays of every fifth patient are for testing."""
    with zipfile.ZipFile(path) as archive:
        table = _columns(archive.read("dataset_diabetes/diabetic_data.csv").decode())
    patients = table["patient_nbr"].astype(np.int64)
    features = {name: column for name, column in table.items() if name not in ("encounter_id", "patient_nbr", "readmitted")}
    return Categories("diabetes130", _hashed(features), _labels(table["readmitted"] == "<30"), _fifth(patients))


def open_bandit(directory: Path) -> Categories:
    """Advertisements shown to users; label 1: clicked. Every fifth row is for testing."""
    (log,) = directory.glob("*.csv.gz")
    table = _columns(_read(log).decode())
    items = _columns((directory / "item_context.csv").read_text())
    place = {item: at for at, item in enumerate(items["item_id"])}
    of_row = np.array([place[item] for item in table["item_id"]])
    features = {name: table[name] for name in table if name in ("item_id", "position") or name.startswith("user_feature")}
    features |= {name: column[of_row] for name, column in items.items() if name.startswith("item_feature")}
    name = f"open-bandit {directory.parent.name} {directory.name}"
    return Categories(name, _hashed(features), _labels(table["click"] == "1"), _fifth(np.arange(len(of_row))))


def generated_categories(count: int = 4000) -> Categories:
    """Users and advertisements with properties; whether a user clicks depends on pairs of these."""
    rng = np.random.default_rng(3)
    sizes = {"user": 300, "ad": 100, "place": 10, "hour": 24, "device": 5}
    columns = {name: (size * rng.uniform(size=count) ** 2).astype(np.int64) for name, size in sizes.items()}
    tastes = {name: rng.normal(size=(size, 4)) for name, size in sizes.items()}
    total = sum(tastes[name][columns[name]] for name in sizes)
    scores = (tastes["user"][columns["user"]] * tastes["ad"][columns["ad"]]).sum(axis=1) + total[:, 0]
    labels = _labels(scores + rng.logistic(size=count) > 1)
    return Categories("generated", _hashed({n: c.astype(str) for n, c in columns.items()}), labels, _fifth(np.arange(count)))


def _hashed(columns: dict[str, Array]) -> Array:
    """Ids (n, columns): a hash of each column's name and value, so that all columns can share a table."""
    ids = []
    for name, column in columns.items():
        values, place = np.unique(column, return_inverse=True)
        ids.append(psd_client.hash_ids([f"{name}={value}" for value in values])[place])
    return np.stack(ids, axis=1)


def _columns(text: str) -> dict[str, Array]:
    header, *rows = csv.reader(io.StringIO(text))
    return dict(zip(header, map(np.array, zip(*rows, strict=True)), strict=True))


def _labels(is_positive: Array) -> Array:
    return is_positive.astype(np.float32)


def _fifth(numbers: Array) -> Array:
    return numbers % 5 == 0


# Ratings.


def ratings(data: Path | None) -> Ratings:
    """Ratings of MovieTweetings, "user::item::rating::time" a line, or generated ones; every fifth is for testing."""
    if data is None:
        return generated_ratings()
    numbers = _numbers(_read(data).replace(b"::", b" "))
    if len(numbers) == 0 or len(numbers) % 4:
        raise ValueError(f"{data} is no file of ratings: expected lines such as '7::0111161::10::1363245118'")
    numbers = numbers.reshape(-1, 4).astype(np.int64)
    rated = numbers[:, 2].astype(np.float32)
    order = np.random.default_rng(4).permutation(len(rated))
    return Ratings(data.name, numbers[order, 0], numbers[order, 1], rated[order], _fifth(np.arange(len(rated))))


def generated_ratings(count: int = 12_000, users: int = 600, items: int = 300) -> Ratings:
    """Ratings from 0 to 10 by users and items of two hidden properties."""
    rng = np.random.default_rng(5)
    who, what = rng.integers(users, size=count), (items * rng.uniform(size=count) ** 2).astype(np.int64)
    user, item = rng.normal(size=(users, 2)), rng.normal(size=(items, 2))
    rated = 6 + (user[who] * item[what]).sum(axis=1) + item[what, 0] + 0.5 * rng.normal(size=count)
    return Ratings("generated", who, what, rated.clip(0, 10).astype(np.float32), _fifth(np.arange(count)))


# Text.


def documents(data: Path | None) -> Documents:
    """Documents in UCI's format: lines with their number, that of words, that of lines; then "document word count" a line."""
    if data is None:
        return generated_documents()
    numbers = _numbers(_read(data)).astype(np.int64)
    if len(numbers) < 3 or len(numbers) != 3 + 3 * numbers[2]:
        raise ValueError(f"{data} is no bag of words: expected three counts, then lines such as '1 61 2'")
    lines = numbers[3:].reshape(-1, 3)
    of_token = np.repeat(lines[:, :2] - 1, lines[:, 2], axis=0)
    of_token = of_token[np.argsort(of_token[:, 0], kind="stable")]
    return Documents(data.name, of_token[:, 0].copy(), of_token[:, 1].copy(), int(numbers[0]), int(numbers[1]))


def generated_documents(count: int = 400, words: int = 600, topics: int = 10, length: int = 60) -> Documents:
    """Documents of a few topics each, which have some words each."""
    rng = np.random.default_rng(7)
    of_document = rng.dirichlet(np.full(topics, 0.1), size=count)
    of_topic = rng.dirichlet(np.full(words, 0.05), size=topics)
    texts = [rng.multinomial(length, mixture @ of_topic) for mixture in of_document]
    of_token = np.concatenate([np.repeat(np.arange(words), times) for times in texts])
    return Documents("generated", np.repeat(np.arange(count), length), of_token, count, words)


def corpus(data: Path | None, min_count: int) -> Corpus:
    """A text of lower-case words, plain or gzipped, or a generated one, without the words that are rarer than `min_count`."""
    tokens = generated_text() if data is None else _read(data).decode().split()
    counts = Counter(tokens)
    words = [word for word, count in counts.most_common() if count >= min_count]
    number = {word: at for at, word in enumerate(words)}
    text = np.array([number[token] for token in tokens if token in number], np.int64)
    return Corpus("generated" if data is None else data.name, words, text)


def generated_text(sentences: int = 3000, topics: Sequence[str] = ("sea", "wood", "town", "star")) -> list[str]:
    """Sentences of twelve words, each of one topic: nearest neighbours ought to be of the same topic."""
    rng = np.random.default_rng(6)
    topic = rng.integers(len(topics), size=(sentences, 1))
    number = (25 * rng.uniform(size=(sentences, 12)) ** 2).astype(np.int64)
    return [f"{topics[t]}{n}" for t, n in zip(np.broadcast_to(topic, number.shape).flat, number.flat, strict=True)]


def _numbers(text: bytes) -> Array:
    """The numbers of a text; none if anything else stands there."""
    try:
        return np.array(text.split(), np.float64)
    except ValueError:
        return np.empty(0)


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data
