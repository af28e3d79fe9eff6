"""Pool adjacent violators (Best et al., 2000): exact for any p, phi and w, in O(n) merges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._types import Array, Bools
from .isotonic import Isotonic, block_ids
from .roots import increasing_root
from .rowwise import block_sum, row_max
from .solution import Solution


class Block(NamedTuple):
    """Neighbouring entries that share the threshold g."""

    start: int
    size: int
    offset: float  # sum over the block of (s_i - s_start)/lam
    weight: float  # sum over the block of w_i
    delta: float  # (s_start - g)/lam


def solve(problem: Isotonic) -> Solution:
    """Merge neighbouring blocks while v increases from one to the next.

    A merged block solves sum_B S((s_i - g)/lam) = phi'(g) sum_B w_i: in closed form for p = 2 with
    phi identity, abs or half_square, else by safeguarded Newton to float resolution. The residual is the
    largest violation of that equation over the blocks; the order of v holds by construction.
    """
    rows, n = problem.s.shape
    d = np.empty((rows, n))
    joined = np.zeros((rows, max(n - 1, 0)), dtype=bool)
    for row in range(rows):
        blocks = _pool(problem, row)
        start = np.array([block.start for block in blocks], dtype=np.intp)
        joined[row] = True
        joined[row, start[1:] - 1] = False
        size = [block.size for block in blocks]
        first = np.repeat(start, size)
        delta = np.repeat([block.delta for block in blocks], size)
        d[row] = (problem.s[row] - problem.s[row, first]) / problem.lam[row] + delta
    return problem.solution(d, joined, _residual(problem, d, joined))


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
    phi = problem.unconstrained_phi.name
    if problem.reg.exponent == 1.0 and phi == "identity":
        delta = (block.weight - offset) / block.size
    elif problem.reg.exponent == 1.0 and phi == "half_square":
        lam, s = float(problem.lam[row, 0]), float(problem.s[row, block.start])
        delta = (s * block.weight - offset) / (block.size + lam * block.weight)
    else:  # the new threshold lies between the two old ones
        delta = _newton(problem, row, block, right.delta + gap, left.delta)
    return block._replace(delta=delta)


def _newton(problem: Isotonic, row: int, block: Block, lo: float, hi: float) -> float:
    reg, phi = problem.reg, problem.unconstrained_phi
    lam, first = problem.lam[row], problem.s[row, block.start]
    t = (problem.s[row, block.start : block.start + block.size] - first) / lam
    weight = np.array([block.weight])

    def equation(delta: Array) -> tuple[Array, Array]:
        g = first - lam * delta
        value = reg.response(t + delta).sum() - phi.prime(g) * weight
        slope = reg.slope(t + delta).sum() + lam * phi.curvature(g, weight)
        return value, delta - value / slope

    with np.errstate(divide="ignore", invalid="ignore"):
        return float(increasing_root(equation, np.array([lo]), np.array([hi])).checked()[0])


def _residual(problem: Isotonic, d: Array, joined: Bools) -> Array:
    prime = problem.unconstrained_phi.prime(problem.s - problem.lam * d)
    violation = block_sum(problem.reg.response(d) - prime * problem.w, block_ids(joined))
    return row_max(np.abs(violation))
