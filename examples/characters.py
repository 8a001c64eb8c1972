"""A text by its characters, and a small transformer that predicts the next one: for diloco.py and benchmarks/far_apart.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)


@dataclass(frozen=True)
class Text:
    """A text as numbers of its characters: its first nine tenths to learn from, the rest to evaluate."""

    name: str
    alphabet: str
    train: torch.Tensor
    validation: torch.Tensor


def read(path: Path | None, length: int = 400_000, words: int = 300) -> Text:
    """A file's text; without one, a generated text of that length, of so many different words."""
    found = path.read_text(errors="replace") if path else generated(length, words)
    alphabet = "".join(sorted(set(found)))
    number = {character: index for index, character in enumerate(alphabet)}
    every = torch.tensor([number[character] for character in found])
    if len(every) < 10_000:
        raise ValueError(f"--data: {path} has {len(every)} characters, and a text to learn from has at least 10,000")
    cut = len(every) * 9 // 10
    return Text(path.name if path else "a generated text", alphabet, every[:cut], every[cut:])


def generated(length: int, words: int, seed: int = 1) -> str:
    """Sentences of made-up words, each of which has a few likely successors."""
    rng = np.random.default_rng(seed)
    syllables = [c + v for c in "bdfgklmnprstv" for v in "aeiou"]
    known = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(words)]
    successors = rng.integers(0, words, (words, 6))
    text, size, word = [], 0, 0
    while size < length:
        chosen = []
        for _ in range(rng.integers(4, 12)):
            word = int(successors[word, min(rng.geometric(0.5), 6) - 1])
            chosen.append(known[word])
        sentence = " ".join(chosen).capitalize() + ("? " if rng.random() < 0.2 else ". ")
        text.append(sentence)
        size += len(sentence)
    return "".join(text)[:length]


class Transformer(nn.Module):
    """A transformer over `context` characters, with attention to earlier ones alone."""

    def __init__(self, characters: int, *, context: int = 64, dim: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(characters, dim)
        self.places = nn.Embedding(context, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores (batch, length, characters) of the next characters, for a text (batch, length)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        found = self.characters(text) + self.places(torch.arange(length))
        return self.out(self.norm(self.layers(found, mask=mask, is_causal=True)))  # type: ignore[no-any-return]


def model_of(text: Text, seed: int) -> Transformer:
    """A new model, the same for the same seed."""
    torch.manual_seed(seed)
    return Transformer(len(text.alphabet))


def pieces(text: torch.Tensor, count: int, context: int, seed: int) -> torch.Tensor:
    """Pieces (count, context + 1) of a text, drawn by a seed."""
    starts = torch.randint(len(text) - context - 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(context + 1)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each character of a batch of pieces from those before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Transformer, text: Text, count: int = 256) -> float:
    """Mean loss on pieces that nobody has learned from, always the same ones."""
    return loss_of(model, pieces(text.validation, count, model.context, seed=0)).item()
