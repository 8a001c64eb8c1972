"""Features and outputs as torchrec has them: tensors of rows of different lengths, and of several keys.

The classes here have the constructors and methods of torchrec's that programs and models call, and stand in for them where
torchrec is not installed. `Features` reads either. Must not know tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from psd.contract.errors import InvalidRequest, InvalidTensor

_INTEGERS = (torch.int64, torch.int32)


class JaggedTensor:
    """Rows of different lengths, one after the other.

    Args:
        values: (n, ...), the elements of all rows.
        weights: (n,), or None.
        lengths: (rows,). offsets: (rows + 1,), the index in `values` at which each row begins, and n. One of both is enough.

    Raises:
        InvalidTensor: there are neither lengths nor offsets.
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise InvalidTensor("lengths: needed, or offsets; got neither")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    def values(self) -> torch.Tensor:
        """The elements of all rows."""
        return self._values

    def weights(self) -> torch.Tensor:
        """The elements' weights.

        Raises:
            InvalidTensor: they have none.
        """
        if self._weights is None:
            raise InvalidTensor("weights: there are none")
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        """The elements' weights, or None."""
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Length of each row."""
        if self._lengths is None:
            self._lengths = torch.diff(self.offsets())
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Index at which each row begins, and the number of elements."""
        if self._offsets is None:
            self._offsets = begins_of(self.lengths())
        return self._offsets

    def device(self) -> torch.device:
        """Device of the elements."""
        return self._values.device

    def to_dense(self) -> list[torch.Tensor]:
        """The rows, as a list."""
        return list(torch.split(self._values, self.lengths().tolist()))


class KeyedJaggedTensor(JaggedTensor):
    """A batch of features: for each key, and each sample, a row of ids of any length.

        ids, lengths = torch.tensor([7, 8, 3, 3]), torch.tensor([1, 1, 0, 2])
        features = KeyedJaggedTensor(["user", "seen"], ids, lengths=lengths)  # 7 has seen nothing, 8 has seen 3 twice

    Args:
        keys: names of the features.
        values: (n,), ids: those of the first feature for each sample, then those of the second, and so on.
        weights: (n,), or None.
        lengths: (keys * samples,). offsets: (keys * samples + 1,). One of both is enough.
        stride: number of samples; None: as many as the lengths say.
    """

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = keys
        self._stride = stride

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Features of these lengths."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride)

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Features whose rows begin there."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride)

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of samples."""
        if self._stride is None:
            self._stride = self.lengths().numel() // len(self._keys) if self._keys else 0
        return self._stride

    def length_per_key(self) -> list[int]:
        """Number of ids of each feature."""
        return self.lengths().view(len(self._keys), self.stride()).sum(dim=1).tolist()

    def offset_per_key(self) -> list[int]:
        """Index at which each feature's ids begin, and the number of all ids."""
        return begins_of(torch.tensor(self.length_per_key(), dtype=torch.int64)).tolist()

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The features by name."""
        counts = self.length_per_key()
        weights: Sequence[torch.Tensor | None] = (
            [None] * len(counts) if self._weights is None else torch.split(self._weights, counts)
        )
        lengths = self.lengths().view(len(counts), self.stride())
        parts = zip(torch.split(self._values, counts), weights, lengths, strict=True)
        return {key: JaggedTensor(*part) for key, part in zip(self._keys, parts, strict=True)}

    def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same on a device."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedJaggedTensor(
            self._keys, values, moved(self._weights), moved(self._lengths), moved(self._offsets), self._stride
        )


class KeyedTensor:
    """Tensors by key, side by side in one.

    Args:
        keys: the names.
        length_per_key: size of each along `key_dim`.
        values: all of them, such as (samples, sum of the lengths).
    """

    def __init__(self, keys: list[str], length_per_key: list[int], values: torch.Tensor, key_dim: int = 1) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim

    def keys(self) -> list[str]:
        """The names."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All of them, side by side."""
        return self._values

    def key_dim(self) -> int:
        """Dimension along which they lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Size of each."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Index at which each begins, and the size of all."""
        return begins_of(torch.tensor(self._length_per_key, dtype=torch.int64)).tolist()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, dim=self._key_dim), strict=True))


def begins_of(lengths: torch.Tensor) -> torch.Tensor:
    """Index at which each of some rows begins, and where the last one ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def like(features: Any, ours: type) -> Any:
    """The class that has the name of `ours` where the features are from: torchrec's if they are torchrec's."""
    theirs = sys.modules.get("torchrec.sparse.jagged_tensor")  # loaded by whoever has made them, if they are
    if theirs is not None and isinstance(features, theirs.KeyedJaggedTensor):
        return getattr(theirs, ours.__name__)
    return ours


class Features:
    """The ids of a KeyedJaggedTensor, torchrec's or ours, on the host, checked.

    Args:
        is_weighted: True if their weights are used.

    Attributes:
        stride: number of samples.

    Raises:
        TypeError: another thing.
        InvalidRequest: samples differ in number among features.
        InvalidTensor: the lengths do not fit the ids, or weights are missing or do not.
    """

    def __init__(self, given: Any, *, is_weighted: bool = False) -> None:
        if not all(callable(getattr(given, name, None)) for name in ("keys", "values", "lengths", "weights_or_none")):
            raise TypeError(
                f"features: expected a KeyedJaggedTensor, of torchrec or of psd_client.torchrec, got {type(given).__name__}"
            )
        if getattr(given, "variable_stride_per_key", bool)():
            raise InvalidRequest("features: stride_per_key_per_rank: not supported; each feature must have the same samples")
        self._keys: dict[str, int] = {key: index for index, key in enumerate(given.keys())}
        if len(self._keys) < len(given.keys()):
            raise InvalidRequest(f"features: keys: must differ from each other, got {', '.join(given.keys())}")
        values, lengths, weights = given.values(), given.lengths(), given.weights_or_none()
        if not self._keys or lengths.dtype not in _INTEGERS or lengths.numel() % len(self._keys):
            raise InvalidTensor(
                f"features: lengths: must be whole numbers, one for each of {len(self._keys)} keys and each sample, got "
                f"{lengths.numel()} of {lengths.dtype}"
            )
        self.stride = lengths.numel() // len(self._keys)
        self._lengths: torch.Tensor = lengths.detach().to("cpu", torch.int64).view(len(self._keys), self.stride)
        counts = self._lengths.sum(dim=1).tolist()
        if values.dim() != 1 or sum(counts) != len(values) or (self._lengths < 0).any():
            raise InvalidTensor(
                f"features: lengths: must be at least 0, and add up to the number of ids; ids have the shape "
                f"{tuple(values.shape)}, and lengths the sum {sum(counts)}"
            )
        self._ids: Sequence[torch.Tensor] = torch.split(values.detach().to("cpu"), counts)
        self._weights: Sequence[torch.Tensor] | None = None
        if is_weighted:
            if weights is None or weights.shape != values.shape:
                raise InvalidTensor(
                    f"features: weights: the collection is weighted, and needs {len(values)}, one for each id; got "
                    f"{weights if weights is None else tuple(weights.shape)}"
                )
            self._weights = torch.split(weights, counts)

    def ids(self, names: Sequence[str]) -> torch.Tensor:
        """The ids of some features, one feature after the other."""
        return torch.cat([self._ids[index] for index in self._places(names)])

    def lengths(self, names: Sequence[str]) -> torch.Tensor:
        """The number of ids of each sample, (names, samples)."""
        return self._lengths[self._places(names)]

    def weights(self, names: Sequence[str]) -> torch.Tensor | None:
        """The weights of some features' ids; None if weights are not used."""
        weights = self._weights
        return None if weights is None else torch.cat([weights[index] for index in self._places(names)])

    def _places(self, names: Sequence[str]) -> list[int]:
        """Places of features among the keys."""
        for name in names:
            if name not in self._keys:
                raise InvalidRequest(f"features: there is no key {name!r}; there are {', '.join(self._keys)}")
        return [self._keys[name] for name in names]
