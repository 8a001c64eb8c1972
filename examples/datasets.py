"""Handwritten digits for the examples: MNIST from a folder or the network, or scikit-learn's small digits instead."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import small_digits
import torch

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "psd" / "mnist"
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {  # the published files and their SHA-256
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


class Digits(NamedTuple):
    """Images (n, 1, 28, 28), normalized, and labels (n,) from 0 to 9."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def find() -> str:
    """The best data available without asking: MNIST from the cache or the network, else "digits"."""
    try:
        return str(download())
    except OSError as error:
        print(f"MNIST cannot be downloaded ({error}); taking scikit-learn's digits instead", file=sys.stderr)
        return "digits"


def load(data: str | None) -> Digits:
    """MNIST from the folder `data`; scikit-learn's digits for "digits"; the result of `find` for None."""
    data = data or find()
    return of_scikit_learn() if data == "digits" else mnist(Path(data))


def mnist(directory: Path) -> Digits:
    """The 60,000 + 10,000 images of MNIST, from its four IDX files."""
    for name in FILES:
        if not (directory / name).exists():
            raise FileNotFoundError(f"{directory} does not have {name}")
    train_images, train_labels, test_images, test_labels = (read_idx(directory / name) for name in FILES)
    return Digits("MNIST", as_images(train_images), as_labels(train_labels), as_images(test_images), as_labels(test_labels))


def of_scikit_learn() -> Digits:
    """The 1,797 images of 8x8 that come with scikit-learn, scaled to 28x28; every fifth one is for testing."""
    pixels, labels = small_digits.load()
    small = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) * (255 / 16)
    images = as_images(torch.nn.functional.interpolate(small, (28, 28), mode="bilinear").numpy())
    labels = as_labels(labels)
    test = torch.arange(len(labels)) % 5 == 0
    return Digits("scikit-learn's digits", images[~test], labels[~test], images[test], labels[test])


def as_images(pixels: np.ndarray) -> torch.Tensor:
    """Pixels from 0 to 255 as a batch of mean 0 and deviation 1, by MNIST's figures."""
    return torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 28, 28).div_(255).sub_(0.1307).div_(0.3081)


def as_labels(labels: np.ndarray) -> torch.Tensor:
    """Labels in the form that torch's losses take."""
    return torch.from_numpy(labels.astype(np.int64))


def read_idx(path: Path) -> np.ndarray:
    """An IDX file: 0, 0, type (8: bytes), number of dimensions, then their big-endian sizes, then the elements."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape.astype(int))


def download() -> Path:
    """The folder with MNIST's files, after fetching those that are missing. OSError if there is no network."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for name, digest in FILES.items():
        path = CACHE / name
        if path.exists():
            continue
        with urllib.request.urlopen(MIRROR + name, timeout=5) as response:  # noqa: S310 (the scheme is https)
            content = response.read()
        if hashlib.sha256(content).hexdigest() != digest:
            raise OSError(f"{MIRROR}{name} is not the published file")
        part = path.with_name(f"{name}.{os.getpid()}")  # several workers may be at it
        part.write_bytes(content)
        part.replace(path)
    return CACHE
