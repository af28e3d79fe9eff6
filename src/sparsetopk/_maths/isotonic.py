"""The operators over the permutahedron, from the blocks that a solver of the isotonic problem found.

    min_{v_1 >= ... >= v_n}  sum_i R*(s_i - v_i) + w_i phi(v_i),   s and w sorted in decreasing order,

to which Propositions 5 and 6 reduce them. Solvers give d_i = (s_i - v_i)/lam, and ids of the blocks on
which v is constant: they are never recovered from v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .blocks import Blocks
from .scalars import Phi, PhiName, PNorm, Regularizer

Array = Any

# phi by the numbers of csrc/isotonic.hpp
PHI_NAMES: tuple[PhiName, ...] = ("identity", "half_square", "abs", "exp")


class SolvedBlocks(NamedTuple):
    """What a solver found, (..., n) in the order of x. No derivatives."""

    d: Array  # (x - u)/lam
    block: Array
    paired: Array  # the index of the entry of w that an entry of x is paired with


def blocks_of(
    reg: Regularizer, phi: Phi, x: Array, w: Array, lam: Array, d: Array, block: Array, floor: float
) -> Blocks:
    """Of solved rows x, |x| for even phi, each entry beside the w that it is paired with; lam > 0.

    ``floor`` is the least lam that slopes, which are S'/lam, are taken with.
    """
    xp = reg.xp

    def totals(values: list[Array], linear: bool = False) -> list[Array]:
        return [xp.block_sum(v, block) for v in values]

    weight = xp.block_sum(w, block)
    u = x - lam * d
    pinned = xp.zeros_like(d, dtype=bool)
    if phi.name == "abs":
        pinned = lam * d >= x * (1.0 - 4.0 * float(xp.finfo(x.dtype).eps))
        # An entry at 0 that has no weight is left out, unless the threshold of its row is held at 0.
        pinned = pinned & ((weight > 0) | (xp.total(pinned & (d > 0)) > 0))
        u = xp.where(pinned, 0.0, u)
    if phi.name == "half_square":  # sum_B S(d_i) = u sum_B w_i: precise also where u is tiny
        shared = weight > 0
        u = xp.where(
            shared, xp.block_sum(reg.response(d), block) / xp.where(shared, weight, 1.0), u
        )
    return Blocks.of(
        reg,
        phi,
        totals,
        lam=lam,
        d=d,
        u=u,
        weight=weight,
        size=xp.block_sum(xp.ones_like(d), block),
        pinned=pinned,
        floor=floor,
    )


def permutahedron_value(blocks: Blocks, x: Array, w: Array) -> Array:
    """R*(x - u) + sum_i w_i phi(u_i), (..., 1)."""
    xp, reg, phi = blocks.xp, blocks.reg, blocks.phi
    assert isinstance(reg, PNorm)
    terms = blocks.lam * reg.conjugate(blocks.d) + w * phi.value(blocks.u)
    if phi.straight:  # an entry with y = w
        terms = xp.where(blocks.whole & blocks.alone, x * w - blocks.lam * reg.penalty(w), terms)
    return xp.total(terms)


def value_tangent(
    blocks: Blocks, y: Array, dx: Array | None, dw: Array | None, dlam: Array | None
) -> Array:
    """The gradient of the value in x is y, in w phi(u), in lam -R(y)/lam; None is zero."""
    moved = blocks.xp.zeros_like(blocks.d)
    if dx is not None:
        moved = moved + y * dx
    if dw is not None:
        moved = moved + blocks.phi.value(blocks.u) * dw
    if dlam is not None:
        moved = moved - blocks.reg.penalty(y) * dlam
    return blocks.xp.total(moved)


def truncate(
    xp: Any, s: Array, lam: Array, d: Array, start: Array, v: Array
) -> tuple[Array, Array]:
    """For phi = |.|: v = max(v, 0); what is moved to 0 stands alone there.

    Without v >= 0 the problem is that of the identity (Nemeth & Nemeth, 2012). ``start`` are the entries
    that are the first of a block.
    """
    below = v < 0
    return xp.where(below, s / lam, d), start | below


def block_ids(xp: Any, start: Array) -> Array:
    """0, 1, ... from which entries are the first of a block."""
    return xp.cumsum(start, axis=-1) - 1
