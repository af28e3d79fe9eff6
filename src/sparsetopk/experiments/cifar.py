"""CIFAR-100 (Krizhevsky, 2009), and scikit-learn's digits as small images in its place."""

from __future__ import annotations

import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import at_hand, find
from .runs import Options

ARCHIVE = "cifar-100-python.tar.gz"
ARCHIVE_URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
ARCHIVE_SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
# The same images, one lossless WebP mosaic for each class.
MOSAICS = "cifar100_webp.npz"
MOSAICS_SHA256 = "028142cdac423678bfc3489a2ac080c332bb2452439f13641522904ccf80847b"
CLASSES, PIXELS = 100, 32


@dataclass(frozen=True)
class Split:
    """Images ``[n, channels, height, width]`` of bytes, and their classes."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Split:
        return Split(self.x[index], self.y[index])


@dataclass(frozen=True)
class Images:
    """All in an order of no meaning. The validation images are none of the training images."""

    name: str
    classes: int
    train: Split
    validation: Split
    test: Split
    flips: bool  # whether a mirrored image is of the same class


def load(options: Options) -> Images:
    """CIFAR-100; the digits in the quick form, unless a directory is given that has CIFAR-100."""
    if options.full or (options.data is not None and _at_hand(options)):
        return cifar100(options)
    return digits()


def _at_hand(options: Options) -> bool:
    return any(at_hand(name, options) is not None for name in (MOSAICS, ARCHIVE))


def cifar100(options: Options) -> Images:
    """48,000 images to train with, 2,000 for validation and the 10,000 of the test set."""
    if at_hand(MOSAICS, options) is not None:
        train, test = _from_mosaics(find(MOSAICS, [MOSAICS_SHA256], options))
    else:
        train, test = _from_archive(find(ARCHIVE, [ARCHIVE_SHA256], options, ARCHIVE_URL))
    return _images("CIFAR-100", CLASSES, train, test, validation=2000, flips=True)


def digits() -> Images:
    """Of 1,797: 1,197 to train with, 240 for validation, 360 to test; 8 x 8 pixels, one channel."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy((found.images * 15).astype(np.uint8)).unsqueeze(1)
    every = Split(x, torch.from_numpy(found.target.astype(np.int64)))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    test, train = every.take(order[:360]), every.take(order[360:])
    return _images("digits", 10, train, test, validation=240, flips=False)


def _images(
    name: str, classes: int, train: Split, test: Split, *, validation: int, flips: bool
) -> Images:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    held, rest = train.take(order[:validation]), train.take(order[validation:])
    shuffled = torch.randperm(len(test), generator=torch.Generator().manual_seed(2))
    return Images(name, classes, rest, held, test.take(shuffled), flips)


def _from_mosaics(path: Path) -> tuple[Split, Split]:
    with np.load(path) as file:
        return tuple(  # type: ignore[return-value]
            _split([_cut(file[f"{part}_{c:02d}"]) for c in range(CLASSES)])
            for part in ("train", "test")
        )


def _cut(data: Any) -> Any:
    """The images of a mosaic, [n, 32, 32, 3], row by row."""
    from PIL import Image

    mosaic = np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB"))
    rows, columns = mosaic.shape[0] // PIXELS, mosaic.shape[1] // PIXELS
    tiles = mosaic.reshape(rows, PIXELS, columns, PIXELS, 3).swapaxes(1, 2)
    return tiles.reshape(-1, PIXELS, PIXELS, 3)


def _split(by_class: list[Any]) -> Split:
    y = np.repeat(np.arange(len(by_class)), [len(x) for x in by_class])
    x = np.concatenate(by_class).transpose(0, 3, 1, 2)
    return Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y))


def _from_archive(path: Path) -> tuple[Split, Split]:
    with tarfile.open(path) as archive:
        train, test = (_batch(archive, name) for name in ("train", "test"))
    return train, test


def _batch(archive: tarfile.TarFile, name: str) -> Split:
    file = archive.extractfile(f"cifar-100-python/{name}")
    assert file is not None
    content = pickle.load(file, encoding="bytes")  # the hash of the archive is known
    x = np.asarray(content[b"data"], np.uint8).reshape(-1, 3, PIXELS, PIXELS)
    return Split(torch.from_numpy(x), torch.tensor(content[b"fine_labels"]))
