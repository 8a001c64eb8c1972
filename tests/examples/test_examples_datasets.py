"""The examples' data: MNIST's file format, and what is taken where there is no MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """examples/datasets.py, with a cache of its own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import datasets

    monkeypatch.setattr(datasets, "CACHE", tmp_path / "cache")
    return datasets


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_mnist(directory: Path, names: list[str]) -> None:
    rng = np.random.default_rng(0)
    for name, count in zip(names, (7, 7, 3, 3), strict=True):
        shape = (count, 28, 28) if "images" in name else (count,)
        write_idx(directory / name, rng.integers(0, 10, shape, dtype=np.uint8))


def test_mnist_is_read_from_its_four_files(datasets, tmp_path):
    write_mnist(tmp_path, list(datasets.FILES))

    data = datasets.load(str(tmp_path))

    assert data.name == "MNIST"
    assert data.train_images.shape == (7, 1, 28, 28)
    assert data.test_images.shape == (3, 1, 28, 28)
    assert data.train_images.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    pixels = np.random.default_rng(0).integers(0, 10, (7, 28, 28), dtype=np.uint8)
    assert torch.allclose(data.train_images[:, 0] * 0.3081 + 0.1307, torch.from_numpy(pixels / np.float32(255)), atol=1e-6)


def test_file_of_another_format_is_refused(datasets, tmp_path):
    write_mnist(tmp_path, list(datasets.FILES))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))

    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz is not an IDX file"):
        datasets.load(str(tmp_path))


def test_program_says_which_file_is_missing(datasets, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["mnist.py", "--data", str(tmp_path)])
    import mnist

    with pytest.raises(SystemExit, match=r"does not have train-images-idx3-ubyte\.gz\nFor example: psd-run"):
        mnist.main()


def test_without_a_network_scikit_learns_digits_are_taken_and_said(datasets, monkeypatch, capsys):
    def offline(*_args, **_options):
        raise OSError("no network")

    monkeypatch.setattr(datasets.urllib.request, "urlopen", offline)

    data = datasets.load(None)

    assert data.name == "scikit-learn's digits"
    assert data.train_images.shape == (1437, 1, 28, 28)
    assert data.test_images.shape == (360, 1, 28, 28)
    assert sorted(set(data.test_labels.tolist())) == list(range(10))
    assert "no network" in capsys.readouterr().err


def test_download_that_is_not_the_published_file_is_refused(datasets, monkeypatch, tmp_path):
    (tmp_path / "forged").write_bytes(b"forged")
    monkeypatch.setattr(datasets.urllib.request, "urlopen", lambda *_args, **_options: (tmp_path / "forged").open("rb"))

    with pytest.raises(OSError, match="is not the published file"):
        datasets.download()
    assert list(datasets.CACHE.iterdir()) == []


def test_small_digits_are_those_of_scikit_learn(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import small_digits

    sklearn_datasets = pytest.importorskip("sklearn.datasets")

    for ours, theirs in zip(small_digits.load(), sklearn_datasets.load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
