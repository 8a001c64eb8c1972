"""Sampler of latent Dirichlet allocation: topics of tokens by Metropolis-Hastings, many at a time, in NumPy.

A topic is proposed as in LightLDA (Yuan et al. 2015): that of another token of the document, or of the word, or any one. So the
time for a token does not depend on the number of topics. A proposal is accepted by the ratio of collapsed Gibbs sampling, with
the counts as they were when the tokens of a slice were begun; a slice has a part of each document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class TopicSampler:
    """Topics of some documents' tokens.

    Args:
        documents, words: of the tokens, (n,); documents rise.
        topics: of the tokens to begin with, (n,).
        word_count: words of all documents. topic_count: topics.
        alpha, beta: parameters of the Dirichlet distributions of documents over topics and of topics over words.
        slices: parts of a sweep.

    Attributes:
        topics: of the tokens, now. word_topic: counts of all documents' tokens, (words, topics), which others may change, too.
    """

    def __init__(
        self,
        documents: Array,
        words: Array,
        topics: Array,
        word_count: int,
        topic_count: int,
        alpha: float,
        beta: float,
        slices: int = 16,
    ) -> None:
        self.topics = topics
        self.slices = slices
        self._alpha, self._beta = alpha, beta
        self._documents, self._words = documents - documents[0], words
        self._count = topic_count
        self._own = counts_of(words, topics, (word_count, topic_count))
        self._in_document = counts_of(self._documents, topics, (self._documents[-1] + 1, topic_count))
        # The tokens of a document stand together; those of a word do so in an order of their own.
        self._lengths = np.bincount(self._documents)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._by_word = np.argsort(words, kind="stable")
        self._word_lengths = np.bincount(words, minlength=word_count)
        self._word_starts = np.cumsum(self._word_lengths) - self._word_lengths
        self.set_counts(self._own)

    def sweep(self, rng: np.random.Generator) -> None:
        """Give new topics to all tokens, slice by slice."""
        for part in rng.permutation(self.slices):
            self._sample(part, rng)

    @property
    def own_counts(self) -> Array:
        """Counts of these documents' tokens, (words, topics)."""
        return self._own

    def set_counts(self, word_topic: Array) -> None:
        """Take counts of all documents' tokens, (words, topics); these documents' are among them."""
        self.word_topic = word_topic.copy()
        self._totals = word_topic.sum(axis=0)

    def _sample(self, part: int, rng: np.random.Generator) -> None:
        """Give new topics to the tokens of a slice."""
        tokens = np.arange(part, len(self.topics), self.slices)
        old, new = self.topics[tokens], self.proposed(tokens, rng)
        changed = np.flatnonzero(old != new)
        tokens, old, new = tokens[changed], old[changed], new[changed]
        of_document, of_word = self._documents[tokens] * self._count, self._words[tokens] * self._count
        for counts, row in ((self._in_document, of_document), (self._own, of_word), (self.word_topic, of_word)):
            np.add.at(counts.reshape(-1), row + new, 1)
            np.subtract.at(counts.reshape(-1), row + old, 1)
        self._totals += np.bincount(new, minlength=self._count) - np.bincount(old, minlength=self._count)
        self.topics[tokens] = new

    def proposed(self, tokens: Array, rng: np.random.Generator, rounds: int = 1) -> Array:
        """Topics of tokens after a proposal by the document and one by the word, a few rounds of both; changes nothing."""
        old = topics = self.topics[tokens]
        document, word = self._documents[tokens], self._words[tokens]
        smoothing = self._beta * len(self.word_topic)
        in_document, in_word, own = (counts.reshape(-1) for counts in (self._in_document, self.word_topic, self._own))
        of_document, of_word = document * self._count, word * self._count

        def factors(topics: Array) -> tuple[Array, Array, Array]:
            """The weight of topics without the token itself, and what each proposal would draw them with."""
            here = topics == old
            by_document = in_document[of_document + topics] + self._alpha
            at = of_word + topics
            weight = (by_document - here) * (in_word[at] + (self._beta - here)) / (self._totals[topics] + (smoothing - here))
            return weight, by_document, own[at] + self._beta

        has = factors(topics)
        for _ in range(rounds):
            for by_word in (False, True):
                if by_word:
                    places = self._word_starts[word], self._word_lengths[word]
                else:
                    places = self._starts[document], self._lengths[document]
                drawn = self._drawn(*places, self._beta if by_word else self._alpha, rng, by_word=by_word)
                would = factors(drawn)
                accepted = rng.random(len(tokens)) * has[0] * would[1 + by_word] < would[0] * has[1 + by_word]
                topics = np.where(accepted, drawn, topics)
                has = tuple(np.where(accepted, new, old) for new, old in zip(would, has, strict=True))
        return topics

    def _drawn(self, starts: Array, lengths: Array, smoothing: float, rng: np.random.Generator, *, by_word: bool) -> Array:
        """Topics drawn by how many of a run of tokens have them, plus `smoothing`: that of one of these, or any one."""
        place = rng.random(len(starts)) * (lengths + self._count * smoothing)
        is_token = place < lengths
        token = starts + np.where(is_token, place, 0).astype(np.int64)
        any_topic = ((place - lengths) / smoothing).astype(np.int64).clip(0, self._count - 1)
        return np.where(is_token, self.topics[self._by_word[token] if by_word else token], any_topic)

    def log_likelihood(self) -> float:
        """Logarithm of the tokens' probability, by the means of the topics' and the documents' distributions."""
        of_document = (self._in_document + self._alpha) / (self._lengths[:, None] + self._count * self._alpha)
        of_topic = (self.word_topic + self._beta) / (self._totals + self._beta * len(self.word_topic))
        pairs, times = np.unique(self._documents * len(self.word_topic) + self._words, return_counts=True)
        total = 0.0
        for start in range(0, len(pairs), 1 << 14):
            document, word = np.divmod(pairs[start : start + (1 << 14)], len(self.word_topic))
            probability = np.einsum("ij,ij->i", of_document[document], of_topic[word])
            total += float(times[start : start + (1 << 14)] @ np.log(probability))
        return total


def counts_of(rows: Array, topics: Array, shape: tuple[int, int]) -> Array:
    """Counts of rows by topic, (rows, topics)."""
    return np.bincount(rows * shape[1] + topics, minlength=shape[0] * shape[1]).reshape(shape)
