"""Solved rows of NumPy arrays: their outputs, and derivatives in closed form.

Three kinds, one face: top-k by its threshold, top-k by an isotonic solver, and the permutahedron. Each
has its output ``y`` (m, n), ``tangent`` and ``cotangent``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .._maths.blocks import Blocks
from .._maths.isotonic import SolvedBlocks, blocks_of
from .._maths.operator import MAGNITUDE, Operator
from .._maths.response import Relaxed, lam_floor
from .._maths.topk_isotonic import Paired, Prepared, is_undecided, output
from .._types import Array, Bools
from . import namespace as xp

Tangents = Sequence[Array | None]


class TopK(Protocol):
    """Rows (m, n) of an operator of the top-k family."""

    @property
    def y(self) -> Array: ...

    @property
    def fractional(self) -> Bools:
        """The entries of the block."""

    def tangent(self, tangents: Tangents) -> Array:
        """Of y, for tangents of x, k and lam; None is zero."""

    def cotangent(self, g: Array) -> tuple[Array, Array, Array]:
        """Of x (m, n), and of k and lam (m, 1), for that of y."""


@dataclass(frozen=True)
class ByThreshold:
    """From one threshold per row."""

    rows: Relaxed

    @property
    def y(self) -> Array:
        with xp.quiet():
            return self.rows.y()

    @property
    def fractional(self) -> Bools:
        return self.rows.split.inside

    def tangent(self, tangents: Tangents) -> Array:
        with xp.quiet():
            return self.rows.tangent(*tangents)[1]

    def cotangent(self, g: Array) -> tuple[Array, Array, Array]:
        with xp.quiet():
            return self.rows.cotangent(g)


@dataclass(frozen=True)
class ByBlocks:
    """From the blocks of an isotonic solver; rows with lam = 0 have the given mask."""

    rows: Prepared
    solved: SolvedBlocks
    operator: Operator
    hard_mask: Array
    dtype: np.dtype[np.floating]

    @property
    def _paired(self) -> Paired:
        return Paired.of(xp, self.rows, self.solved)

    def _blocks(self, debias: bool) -> Blocks:
        rows, paired = self.rows, self._paired
        reg, phi = self.operator.reg(xp), self.operator.phi(xp)
        floor, (d, block, _) = lam_floor(xp, self.dtype, self.operator), self.solved
        blocks = blocks_of(reg, phi, rows.a, paired.w, rows.lam, d, block, floor)
        return blocks._replace(debias=debias)

    @property
    def _debias(self) -> bool:
        return self.operator.debias and self.operator.op == MAGNITUDE

    @property
    def _hard(self) -> Bools:
        return self.rows.valid & ~self.rows.soft

    @property
    def _sign(self) -> Array:
        return np.ones((1, 1)) if self.rows.sign is None else self.rows.sign

    @property
    def fractional(self) -> Bools:
        paired = self._paired
        return (paired.weight > 0) & (paired.weight < paired.size)

    @property
    def y(self) -> Array:
        with xp.quiet():
            blocks = self._blocks(debias=False)
            y = output(xp, self.rows, self._paired, self.operator, blocks.y(), blocks.d)
            magnitude = self.operator.op == MAGNITUDE
            hard = np.where(self.hard_mask > 0, self.rows.x * self.hard_mask, 0.0)
            y = np.where(self._hard, hard if magnitude else self._sign * self.hard_mask, y)
            return np.where(self.rows.valid, y, np.nan)

    @property
    def _moving(self) -> Array:
        """1 for entries whose output follows x, 0 for the others."""
        still = self.rows.overfull | (is_undecided(self.rows) & (self.operator.op == MAGNITUDE))
        return np.where(still, 0.0, 1.0)

    def tangent(self, tangents: Tangents) -> Array:
        dx, dk, dlam = tangents
        with xp.quiet():
            paired = self._paired
            da = None if dx is None else self._sign * dx * self._moving
            dweight = None
            if dk is not None:
                dweight = xp.block_sum(np.where(paired.shared, dk, 0.0), self.solved.block)
            moved = self._blocks(self._debias).tangent(da, dweight, dlam).y
            if self._debias:
                moved = np.where(paired.weight > 0, moved, 0.0)
                moved = np.where(paired.selected, 0.0 if da is None else da, moved)
            if self.operator.op == MAGNITUDE:
                moved = np.where(is_undecided(self.rows), 0.0, moved)
            hard: Array | float = 0.0
            if self.operator.op == MAGNITUDE and dx is not None:
                hard = self.hard_mask * dx
            moved = np.where(self._hard, hard, self._sign * moved)
            return np.where(self.rows.valid, moved, np.nan)

    def cotangent(self, g: Array) -> tuple[Array, Array, Array]:
        with xp.quiet():
            paired, rows = self._paired, self.rows
            of_y = self._sign * g
            if self.operator.op == MAGNITUDE:
                of_y = np.where(is_undecided(rows), 0.0, of_y)
            kept = (paired.weight > 0) if self._debias else np.ones((1, 1), dtype=bool)
            selected = paired.selected & self._debias
            found = self._blocks(self._debias).cotangent(np.where(kept & ~selected, of_y, 0.0))
            dx = self._sign * self._moving * np.where(selected, of_y, found.x)
            dk = xp.total(np.where(paired.shared, found.weight, 0.0))
            dlam = xp.total(found.lam)
            hard = self.hard_mask * g if self.operator.op == MAGNITUDE else 0.0
            nan = np.where(rows.valid, 0.0, np.nan)
            dx = np.where(self._hard, hard, dx) + nan
            return dx, np.where(self._hard, 0.0, dk) + nan, np.where(self._hard, 0.0, dlam) + nan
