"""What Python and the compiled core must agree on: numbers, and records that lie in memory.

Both sides write it down where they use it; ``check`` compares them when the core is imported, so that
one that was built from other sources is refused instead of reading what is not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED

#: The numbers of dtypes, and the bytes of an entry.
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
ITEMSIZES = np.array([4, 8, 2, 2])

#: A part of a row that is spread over many arrays: ``Piece`` in csrc/pieces.hpp.
PIECE = np.dtype(
    [
        ("x", np.uint64),
        ("out", np.uint64),
        ("g", np.uint64),
        ("n", np.int64),
        ("dtype", np.int64),
        ("kept", np.int64),
        ("room", np.uint64),
        ("beside", np.int64),
        ("left", np.float64),
    ]
)
BUCKETS = 1024  # of a histogram
FEWEST = 40  # so many times as many entries are decided, where the undecided ones are kept beside
BLOCK_SUMS = 8


def check(found: dict[str, Any]) -> None:
    """That the core says the same."""
    assert PIECE.fields is not None
    expected = {
        "piece": tuple(PIECE.fields[name][1] for name in PIECE.names or ()),
        "piece_size": PIECE.itemsize,
        "buckets": BUCKETS,
        "fewest": FEWEST,
        "block_sums": BLOCK_SUMS,
        "dtypes": tuple(DTYPES.values()),
        "operators": (MASK, MAGNITUDE, SIGN, TWO_SIDED),
    }
    wrong = [name for name in expected if found.get(name) != expected[name]]
    if wrong:
        raise RuntimeError(
            "the compiled core of sparsetopk was built from other sources than its Python modules, got "
            f"another {', '.join(wrong)}; install sparsetopk again"
        )
