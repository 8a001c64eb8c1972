"""Word vectors by skip-gram with negative sampling (Mikolov et al. 2013), with NumPy and psd_client alone: two tables of words.

$ psd-run --shards 2 --workers 2 --consistency async examples/word2vec.py
$ psd-run --shards 2 --workers 4 --consistency async examples/word2vec.py --data text8.gz --near king,three,water

A word's row in "words" is moved towards the rows in "contexts" of the words around it, and away from those of words drawn by
chance. Workers that do not wait for each other suit that: steps seldom touch the same rows. `--plain` trains without psd, in
this process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sparse_data
from command_line import CommandLine
from one_process import OneProcess
from sparse_data import Array

import psd_client


def pairs(text: Array, window: int) -> Array:
    """All pairs (n, 2) of a word and one at most `window` places away; nearer ones are drawn with more weight."""
    rng = np.random.default_rng(1)
    reach = rng.integers(1, window + 1, size=len(text))  # as in word2vec.c: the window of each word is drawn anew
    found = []
    for distance in range(1, window + 1):
        left, right = text[:-distance], text[distance:]
        found += [np.stack([left, right], 1)[reach[:-distance] >= distance]]
        found += [np.stack([right, left], 1)[reach[distance:] >= distance]]
    return np.concatenate(found)


def without_some_frequent(text: Array, share: float) -> Array:
    """The text without most places of words whose share of it is above `share`."""
    shares = np.bincount(text) / len(text)
    return text[np.random.default_rng(2).uniform(size=len(text)) < np.sqrt(share / shares)[text]]


def gradients(words: Array, contexts: Array) -> tuple[Array, Array, Array]:
    """Losses (n,), and gradients of their mean by words (n, dim) and contexts (n, 1 + negatives, dim), the true one first."""
    products = np.einsum("nd,nkd->nk", words, contexts)
    products[:, 0] *= -1
    losses = np.logaddexp(0, products).sum(axis=1)
    slopes = 1 / (1 + np.exp(-products))
    slopes[:, 0] *= -1
    slopes /= len(words)
    return losses, np.einsum("nk,nkd->nd", slopes, contexts), slopes[:, :, None] * words[:, None]


def nearest(vectors: Array, word: int, count: int) -> Array:
    """The words whose vectors have the smallest angles to a word's."""
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.argsort(-(directions @ directions[word]))[1 : count + 1]


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    corpus = sparse_data.corpus(args.data, args.min_count)
    examples = pairs(without_some_frequent(corpus.text, args.subsample), args.window)
    noise = np.cumsum(np.bincount(corpus.text) ** 0.75)
    rule: dict[str, Any] = {"dim": args.dim, "optimizer": psd_client.Adagrad(lr=args.lr)}
    tables = [
        psd_client.Table("words", init=psd_client.Normal(std=0.5 / args.dim), seed=1, **rule),
        psd_client.Table("contexts", **rule),
    ]
    numbers = np.arange(len(corpus.words))
    with OneProcess({"words": numbers, "contexts": numbers}) if args.plain else psd_client.connect() as ps:
        ps.declare({}, optimizer=None, tables=tables)
        words, contexts = ps.tables["words"], ps.tables["contexts"]
        if ps.rank == 0:
            print(f"{corpus.name}: {len(numbers)} words, {len(examples)} pairs for {ps.world_size} workers")
        rng = np.random.default_rng(ps.rank)
        steps = args.epochs * (len(examples) // (args.batch_size * ps.world_size))
        recent, seconds = [], 0.0
        for step, rows in enumerate(
            sparse_data.batches(len(examples), args.batch_size, args.epochs, ps.rank, ps.world_size), start=1
        ):
            word, context = examples[rows].T
            drawn = np.searchsorted(noise, rng.uniform(0, noise[-1], (len(rows), args.negatives)), side="right")
            around = np.column_stack([context, drawn])
            started = time.perf_counter()
            losses, by_words, by_contexts = gradients(words.pull(word), contexts.pull(around))
            ps.push_pull({}, tables={"words": (word, by_words), "contexts": (around, by_contexts)})
            seconds += time.perf_counter() - started
            if step > 0.9 * steps:
                recent.append(losses.mean())
            if ps.rank == 0 and step % max(1, steps // 10) == 0:
                print(f"step {step:6d} of {steps}  loss {losses.mean():.4f}", flush=True)
        ps.barrier("trained")
        if ps.rank == 0:
            vectors = words.pull(numbers)
            for word in args.near or corpus.words[:4]:
                near = nearest(vectors, corpus.words.index(word), 6)
                print(f"near {word}: {' '.join(corpus.words[other] for other in near)}")
            result = {
                "data": corpus.name,
                "steps": step,
                "loss": round(float(np.mean(recent)), 4),
                "steps_per_s": round(step / seconds, 1),
            }
            print(f"result {json.dumps(result)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Word vectors by skip-gram.")
    parser.add_argument("--data", type=Path, help="text of lower-case words, plain or gzipped; without it, one is generated")
    parser.number("--min-count", 5, "words that are rarer are left out")
    parser.number("--subsample", 1e-3, "share above which words are thinned out")
    parser.number("--window", 5, "largest distance of a pair")
    parser.number("--negatives", 5, "words drawn by chance for a pair")
    parser.number("--dim", 32, "numbers of a word")
    parser.number("--epochs", 3, "passes over the data")
    parser.number("--batch-size", 1000, "pairs per worker and step")
    parser.number("--lr", 0.1, "learning rate")
    parser.add_argument("--near", type=lambda text: text.split(","), help="words to show with their nearest ones")
    parser.add_argument("--plain", action="store_true", help="train in this process, without psd")
    parser.run(train, "psd-run --shards 2 --workers 2 --consistency async")


if __name__ == "__main__":
    main()
