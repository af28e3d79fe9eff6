"""Small pictures with ten classes, as (x_train, y_train, x_test, y_test): rows of pixels in [0, 1].

scikit-learn's digits come with it. MNIST and Fashion-MNIST are looked for as ``data`` says, and
downloaded from where Keras keeps them; the hashes are the ones that Keras states.
"""

from __future__ import annotations

import gzip
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .data import find
from .runs import Options

Array: TypeAlias = NDArray[Any]
Data: TypeAlias = tuple[Array, Array, Array, Array]

KERAS = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
MNIST = (
    "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",  # the file of Keras
    "06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64",  # the same arrays, packed anew
)
FASHION = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


def digits() -> Data:
    """1797 digits of 8 x 8 pixels; every fourth is for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = _rows(found.data, 16), found.target.astype(np.int64)
    test = np.arange(len(y)) % 4 == 3
    return x[~test], y[~test], x[test], y[test]


def mnist(options: Options) -> Data:
    """60 000 and 10 000 digits of 28 x 28 pixels."""
    with np.load(find("mnist.npz", MNIST, options, KERAS + "mnist.npz")) as file:
        x_train, y_train, x_test, y_test = (
            file[key] for key in ("x_train", "y_train", "x_test", "y_test")
        )
    return _rows(x_train), y_train.astype(np.int64), _rows(x_test), y_test.astype(np.int64)


def fashion_mnist(options: Options) -> Data:
    """60 000 and 10 000 pictures of clothes, of 28 x 28 pixels; in a directory ``fashion-mnist``,
    as its files have the names of MNIST's."""
    x_train, y_train, x_test, y_test = (
        _idx(name, sha256, options) for name, sha256 in FASHION.items()
    )
    return _rows(x_train), y_train.astype(np.int64), _rows(x_test), y_test.astype(np.int64)


def hold_out(data: Data, share: float) -> Data:
    """The training set in two: what is left, and in the place of the test set a share to choose
    settings by. The split is always the same."""
    x, y, _, _ = data
    order = np.random.default_rng(0).permutation(len(y))
    chosen, rest = np.split(order, [round(share * len(y))])
    return x[rest], y[rest], x[chosen], y[chosen]


def _rows(x: Array, largest: int = 255) -> Array:
    return (x.reshape(len(x), -1) / np.float32(largest)).astype(np.float32)


def _idx(name: str, sha256: str, options: Options) -> Array:
    """An array in the IDX format: a header of 4 bytes and 4 for every axis, then the bytes."""
    with gzip.open(find(f"fashion-mnist/{name}", [sha256], options, KERAS + name)) as file:
        content = file.read()
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
