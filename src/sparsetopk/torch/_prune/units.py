"""What is kept or left out as a whole: single weights, blocks of them, or n of every m."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._checks import check_positive_int

Unit = str | tuple[int, int]


@dataclass(frozen=True)
class Weights:
    """Every weight by itself."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """That a parameter has such units."""

    def count(self, w: Tensor) -> int:
        """Of how many a k is kept."""
        return w.numel()

    def values(self, w: Tensor) -> Tensor:
        """What is selected by its magnitude."""
        return w

    def vectors(self, values: Tensor) -> Tensor:
        """The same as rows, of each of which k are selected."""
        return values.flatten()

    def put_back(self, w: Tensor, values: Tensor, kept: Tensor) -> Tensor:
        """The weights, from what became of the values."""
        return kept


@dataclass(frozen=True)
class Blocks(Weights):
    """Blocks of a matrix (all but its first dimension are one), by their norm; None is all there is."""

    rows: int
    columns: int | None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) < 2:
            raise ValueError(f"{name} must have rows when unit is of blocks, got shape {shape}")
        columns = self.columns or 1
        length = torch.Size(shape[1:]).numel()
        if shape[0] % self.rows or length % columns:
            raise ValueError(
                f"{name} must be made of blocks of {self.rows} x {columns}, got {shape[0]} x {length}"
            )

    def count(self, w: Tensor) -> int:
        down, _, across, _ = self._split(w).shape
        return down * across

    def values(self, w: Tensor) -> Tensor:
        return self._split(w).norm(dim=(1, 3))

    def put_back(self, w: Tensor, values: Tensor, kept: Tensor) -> Tensor:
        scale = torch.where(values > 0, kept / torch.where(values > 0, values, 1.0), 0.0)
        return (self._split(w) * scale[:, None, :, None]).reshape(w.shape)

    def _split(self, w: Tensor) -> Tensor:
        w = w.flatten(1)
        return w.unflatten(1, (-1, self.columns or w.shape[1])).unflatten(0, (-1, self.rows))


@dataclass(frozen=True)
class Pattern(Weights):
    """n of every m that follow each other in a row, as sparse tensor cores want them."""

    n: int
    m: int

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        length = torch.Size(shape[1:]).numel()
        if len(shape) < 2 or length % self.m:
            raise ValueError(
                f"{name} must have rows of a multiple of {self.m} weights when "
                f"unit='{self.n}:{self.m}', got shape {shape}"
            )

    def count(self, w: Tensor) -> int:
        return self.m

    def vectors(self, values: Tensor) -> Tensor:
        return values.reshape(-1, self.m)


def unit_of(unit: Any) -> Weights:
    """The unit that is asked for."""
    if unit == "weight":
        return Weights()
    if unit == "row":
        return Blocks(1, None)
    if isinstance(unit, tuple) and len(unit) == 2:
        return Blocks(*(check_positive_int("unit", length) for length in unit))
    if isinstance(unit, str) and (found := re.fullmatch(r"(\d+):(\d+)", unit)):
        n, m = (int(number) for number in found.groups())
        if 0 < n <= m:
            return Pattern(n, m)
    raise ValueError(
        "unit must be 'weight', 'row', the shape of a block such as (16, 16), or n of every m such as "
        f"'2:4', got {unit!r}"
    )
