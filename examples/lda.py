"""Find the topics of documents by latent Dirichlet allocation: counts of words by topic on the shards, and workers that sample
asynchronously. NumPy and psd_client alone.

$ psd-run --shards 2 --workers 2 examples/lda.py
$ psd-run --shards 2 --workers 2 examples/lda.py --data docword.kos.txt.gz --topics 100 --sweeps 100

Each worker has a share of the documents. It samples topics of their tokens with its own copy of the counts, then sends what has
changed, and gets what the others have changed. Every few sweeps it waits for workers that are behind. The topics of the tokens
are on the shards, too, and change with the counts, in one batch: the job goes on from a checkpoint with any number of workers.
`--plain` samples in this process, without psd.
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
from sparse_data import Array, Documents
from topic_sampler import TopicSampler, counts_of

import psd_client

APART = 5
"""Sweeps after which workers wait for each other. With the counts of one that is far behind, topics fit less well."""


class Shared:
    """Vectors on the shards: counts of words by topic, topics of the tokens, and what workers tell each other.

    A token's topic is 0 until it is drawn; the first topic is 1. Topics and counts change in one batch, so they always agree.
    """

    def __init__(self, ps: Any, data: Documents, topic_count: int) -> None:
        self._ps = ps
        self._counts = ps.matrix("lda.counts", data.word_count, topic_count, dtype="int64")
        self._topics = ps.vector("lda.topics", len(data.words), dtype="int64")
        self._sweeps = ps.vector("lda.sweeps", 1024, dtype="int64")  # by rank: how many are done
        self._likelihood = ps.vector("lda.likelihood", 1024)  # by rank

    def topics(self, share: slice) -> Array:
        """Topics of a share of the tokens; -1 where none was drawn yet."""
        return self._topics.pull(share.start, share.stop) - 1

    def counts(self) -> Array:
        """Counts of all tokens, (words, topics)."""
        return self._counts.pull()

    def sweeps(self) -> int:
        """Sweeps that all workers of an earlier run have done."""
        done = self._sweeps.pull()
        return int(done[done > 0].min(initial=1 << 40)) if done.any() else 0

    def store(self, first: int, topics: Array, changes: Array, sweep: int) -> None:
        """Set topics of the tokens from `first` on, and add (words, topics) changes to the counts."""
        where = np.nonzero(changes)
        with self._ps.batch() as b:
            b.put(self._topics, topics + 1, start=first)
            b.add(self._counts, changes[where], where)
            b.put(self._sweeps, [sweep], start=self._ps.rank)

    def perplexity(self, log_likelihood: float, tokens: int) -> float:
        """Perplexity of all workers' tokens."""
        self._likelihood.put([log_likelihood], start=self._ps.rank)
        self._ps.barrier("likelihood")
        return float(np.exp(-self._likelihood.pull(0, self._ps.world_size).sum() / tokens))


def share_of(data: Documents, rank: int, world_size: int) -> slice:
    """Tokens of a worker: whole documents, about as many tokens for each worker."""
    ends = np.searchsorted(data.documents, data.documents[len(data.words) * np.arange(1, world_size) // world_size])
    starts = [0, *ends.tolist(), len(data.words)]
    return slice(starts[rank], starts[rank + 1])


def sampler_of(data: Documents, share: slice, topics: Array, args: argparse.Namespace) -> TopicSampler:
    """A sampler of a share of the tokens."""
    words, of = data.words[share], data.documents[share]
    return TopicSampler(of, words, topics, data.word_count, args.topics, args.alpha, args.beta)


def work(ps: Any, data: Documents, args: argparse.Namespace) -> dict[str, Any]:
    """Sample as one worker of a job; returns what has come of it."""
    shared, share = Shared(ps, data, args.topics), share_of(data, ps.rank, ps.world_size)
    begin, topics = shared.sweeps(), shared.topics(share)
    fresh = topics < 0
    rng = np.random.default_rng([args.seed, ps.rank, begin])
    topics[fresh] = rng.integers(args.topics, size=np.count_nonzero(fresh))
    sampler = sampler_of(data, share, topics, args)
    if fresh.any():
        drawn = np.flatnonzero(fresh)
        changes = counts_of(data.words[share][drawn], topics[drawn], sampler.word_topic.shape)
        shared.store(share.start, topics, changes, begin)
    ps.barrier("drawn")
    sampling = exchanging = 0.0
    sampler.set_counts(shared.counts())
    for sweep in range(begin + 1, args.sweeps + 1):
        began, before = time.perf_counter(), sampler.own_counts.copy()
        sampler.sweep(rng)
        sampled = time.perf_counter()
        shared.store(share.start, sampler.topics, sampler.own_counts - before, sweep)
        if sweep % APART == 0:
            ps.barrier("sweep")
        sampler.set_counts(shared.counts())
        sampling += sampled - began
        exchanging += time.perf_counter() - sampled
        if ps.rank == 0 and sweep % args.report == 0:
            perplexity = np.exp(-sampler.log_likelihood() / len(topics))
            print(f"sweep {sweep:4d} of {args.sweeps}  perplexity of this worker's documents {perplexity:.1f}", flush=True)
    done = len(topics) * max(0, args.sweeps - begin)
    if done:
        speeds = f"{done / (sampling + exchanging):,.0f} tokens/s, {done / sampling:,.0f} without the exchange"
        print(f"worker {ps.rank} of {ps.world_size}: {speeds}", flush=True)
    ps.barrier("sampled")
    sampler.set_counts(shared.counts())
    return {
        "perplexity": round(shared.perplexity(sampler.log_likelihood(), len(data.words)), 1),
        "counted": int(sampler.word_topic.sum()),
        "is_exact": is_exact(data, shared, sampler.word_topic) if ps.rank == 0 else None,
        "tokens_per_s": round(done / (sampling + exchanging)) if done else 0,
    }


def is_exact(data: Documents, shared: Shared, counts: Array) -> bool:
    """True if each count is that of the tokens which have the topic."""
    topics = shared.topics(slice(0, len(data.words)))
    return bool((counts == counts_of(data.words, topics, counts.shape)).all())


def alone(data: Documents, args: argparse.Namespace) -> dict[str, Any]:
    """Sample in this process."""
    rng = np.random.default_rng(args.seed)
    sampler = sampler_of(data, slice(0, None), rng.integers(args.topics, size=len(data.words)), args)
    began = time.perf_counter()
    for _ in range(args.sweeps):
        sampler.sweep(rng)
    return {
        "perplexity": round(float(np.exp(-sampler.log_likelihood() / len(data.words))), 1),
        "counted": int(sampler.word_topic.sum()),
        "tokens_per_s": round(args.sweeps * len(data.words) / (time.perf_counter() - began)),
    }


def run(args: argparse.Namespace) -> None:
    """Run one worker."""
    data = sparse_data.documents(args.data)
    if args.plain:
        print(f"result {json.dumps({'data': data.name, 'tokens': len(data.words)} | alone(data, args))}")
        return
    with psd_client.connect() as ps:
        if ps.rank == 0:
            print(f"{data.name}: {data.document_count} documents, {len(data.words)} tokens for {ps.world_size} workers")
        result = work(ps, data, args)
        if ps.rank == 0:
            print(f"result {json.dumps({'data': data.name, 'tokens': len(data.words)} | result)}", flush=True)


def main() -> None:
    """Read the command line and sample."""
    parser = CommandLine("Topics of documents.")
    parser.add_argument("--data", type=Path, help="docword.*.txt.gz of UCI; without it, documents are generated")
    parser.number("--topics", 20, "number of topics")
    parser.number("--sweeps", 50, "times that each token is sampled")
    parser.number("--alpha", 0.1, "prior of the topics of a document")
    parser.number("--beta", 0.01, "prior of the words of a topic")
    parser.number("--report", 10, "sweeps between two lines of progress")
    parser.number("--seed", 1, "seed of the random numbers")
    parser.add_argument("--plain", action="store_true", help="sample in this process, without psd")
    parser.run(run)


if __name__ == "__main__":
    main()
