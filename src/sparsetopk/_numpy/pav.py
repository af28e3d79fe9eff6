"""Pool adjacent violators (Best et al., 2000): exact for any p, phi and w.

The compiled core has it in csrc/pav.hpp; the loop here stands in where that could not be built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._core import native
from .._maths.isotonic import PHI_NAMES
from .._types import Array, Bools, Ints
from .isotonic import Isotonic
from .namespace import bracketed_root


class Block(NamedTuple):
    """Neighbouring entries that share the threshold g."""

    start: int
    size: int
    offset: float  # sum over the block of (s_i - s_start)/lam
    weight: float  # sum over the block of w_i
    delta: float  # (s_start - g)/lam


def solve(problem: Isotonic) -> tuple[Array, Bools]:
    """d, and which entries are the first of their block.

    Neighbouring blocks are merged while v increases from one to the next. A merged block solves
    sum_B S((s_i - g)/lam) = phi'(g) sum_B w_i: in closed form for p = 2 with phi identity, abs or
    half_square, else by safeguarded Newton to float resolution.
    """
    d, first = (_loop if native is None else _compiled)(problem)
    return d, first == np.arange(first.shape[-1])


def _compiled(problem: Isotonic) -> tuple[Array, Ints]:
    """d, and the first entry of the block of every entry."""
    s, w, lam = (np.ascontiguousarray(a) for a in (problem.s, problem.w, problem.lam))
    d, first = np.empty_like(s), np.empty(s.shape, dtype=np.int64)
    native.solve_isotonic(
        PHI_NAMES.index(problem.phi.name),
        problem.exponent,
        s.shape[0],
        s.shape[1],
        s.ctypes.data,
        w.ctypes.data,
        lam.ctypes.data,
        d.ctypes.data,
        first.ctypes.data,
    )
    return d, first


def _loop(problem: Isotonic) -> tuple[Array, Ints]:
    """The same, block by block in Python."""
    d = np.empty_like(problem.s)
    first = np.empty(d.shape, dtype=np.int64)
    for row in range(len(d)):
        blocks = _pool(problem, row)
        size = [block.size for block in blocks]
        first[row] = np.repeat([block.start for block in blocks], size)
        delta = np.repeat([block.delta for block in blocks], size)
        d[row] = (problem.s[row] - problem.s[row, first[row]]) / problem.lam[row] + delta
    return d, first


def _pool(problem: Isotonic, row: int) -> list[Block]:
    blocks: list[Block] = []
    s, lam = problem.s[row].tolist(), float(problem.lam[row, 0])
    for i, (w, delta) in enumerate(
        zip(problem.w[row].tolist(), problem.alone[row].tolist(), strict=True)
    ):
        blocks.append(Block(i, 1, 0.0, w, delta))
        while len(blocks) > 1:
            left, right = blocks[-2:]
            gap = (s[left.start] - s[right.start]) / lam
            if (
                left.delta - right.delta <= gap
            ):  # the left threshold is the higher one, as it should
                break
            blocks[-2:] = [_merge(problem, row, left, right, gap)]
    return blocks


def _merge(problem: Isotonic, row: int, left: Block, right: Block, gap: float) -> Block:
    offset = left.offset + right.offset - right.size * gap
    block = Block(
        left.start, left.size + right.size, offset, left.weight + right.weight, delta=np.nan
    )
    phi = problem.phi.name
    if problem.exponent == 1.0 and phi == "identity":
        delta = (block.weight - offset) / block.size
    elif problem.exponent == 1.0 and phi == "half_square":
        lam, s = float(problem.lam[row, 0]), float(problem.s[row, block.start])
        delta = (s * block.weight - offset) / (block.size + lam * block.weight)
    else:  # the new threshold lies between the two old ones
        delta = _newton(problem, row, block, right.delta + gap, left.delta)
    return block._replace(delta=delta)


def _newton(problem: Isotonic, row: int, block: Block, lo: float, hi: float) -> float:
    reg, phi = problem.reg, problem.phi
    lam, first = problem.lam[row], problem.s[row, block.start]
    t = (problem.s[row, block.start : block.start + block.size] - first) / lam
    weight = np.array([block.weight])

    def equation(delta: Array) -> tuple[Array, Array, Array]:
        g = first - lam * delta
        value = reg.response(t + delta).sum() - phi.prime(g) * weight
        slope = reg.slope(t + delta).sum() + lam * phi.curvature(g, weight)
        return value, -value / slope, np.zeros_like(value)

    # The root may be any double, 0 among them: enough halvings of the bracket to reach it.
    return float(bracketed_root(equation, np.array([lo]), np.array([hi]), limit=4 * 1200)[0])
