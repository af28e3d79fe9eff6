"""The top-k family on rows that are sharded over the processes of a group, along the dimension.

It is the threshold of ``_maths``, but every sum over a row is one over all ranks, and so a collective:
all rows go together, and there are as many as there are passes. Histograms of the entries, as integers
in their order, bracket the k boundary first: each narrows it to one bucket of 2048, whatever the
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._maths import threshold
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed
from ..._maths.threshold import from_key, key
from .._rows.arguments import Number, Rows, check_k, check_lam, check_number, is_plain
from .._rows.differentiable import Live
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers.vectorized import row_sum, split
from .groups import Shared

_BITS = 11  # of the entries, that a histogram decides


def evaluate(rows: Rows, k: Number, lam: Number, operator: Operator, shared: Shared) -> Tensor:
    """The operator, for this rank's shard of the rows."""
    for name, value in (("k", k), ("lam", lam)):
        check_number(name, value)
        rows.check_shape(name, value)
    check_lam(lam, isinstance(lam, Tensor) and is_plain(lam))
    if not is_plain():
        raise ValueError("group must be None in torch.func, forward mode and tracing, got a group")
    return _Sharded.apply(rows.x, k, lam, rows.dim, operator, shared)  # type: ignore[no-untyped-call]


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Number, lam: Number, dim: int, operator: Operator, shared: Shared
    ) -> Tensor:
        rows = Rows("x", x, dim)
        # k is wide on every device: it is compared with counts
        k_rows, lam_rows = rows.per_row(k, torch.float64).detach(), rows.per_row(lam).detach()
        n = _length(rows.data, k_rows, lam_rows, shared)
        check_k(k, n, isinstance(k, Tensor) and is_plain(k))
        hard = lam_rows == 0
        is_hard = bool(hard.all()) if bool(hard.all()) == bool(hard.any()) else None
        row, count = Shards(rows.data.detach(), n, shared), split(k_rows)
        count = count._replace(frac=count.frac.to(lam_rows.dtype))
        state = threshold.state_of(xp, row, count, lam_rows, operator, is_hard)
        packed = torch.cat(list(state), dim=-1)
        kept = _Kept(shared, [])
        solved = _relaxed(rows, k_rows, lam_rows, packed, operator, kept)
        y = rows.restore(solved.y(_hard_mask(solved, kept)) + 0.0)
        ctx.kept = kept.found
        ctx.save_for_backward(x, packed, *(v for v in (k, lam) if isinstance(v, Tensor)))
        ctx.numbers = tuple(None if isinstance(v, Tensor) else v for v in (k, lam))
        ctx.options = dim, operator, shared
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("there are no second derivatives over a group")
        x, state, *tensors = ctx.saved_tensors
        k, lam = (tensors.pop(0) if v is None else v for v in ctx.numbers)
        dim, operator, shared = ctx.options
        rows = Rows("x", x, dim)
        k_rows, lam_rows = rows.per_row(k, torch.float64), rows.per_row(lam)
        kept = _Kept(shared, list(ctx.kept))
        solved = _relaxed(rows, k_rows, lam_rows, state, operator, kept)
        g = rows.tangent(g).to(solved.x.dtype)
        dx, dk, dlam = solved.cotangent(g, _hard_mask(solved, kept))
        limit = torch.finfo(x.dtype).max
        dx = rows.restore(dx.clamp(-limit, limit) + 0.0)
        return dx, rows.sum_to(dk, k), rows.sum_to(dlam, lam), None, None, None


class _Kept:
    """What the ranks have put together after the threshold was found, one number per row: the backward
    asks for the same again, in the same order, and needs no collective for it."""

    def __init__(self, shared: Shared, given: list[Tensor]) -> None:
        self._shared, self._given = shared, given
        self.rank, self.found = shared.rank, list[Tensor]()

    def sum(self, values: Tensor) -> Tensor:
        return self._next(lambda: self._shared.sum(values))

    def gather(self, values: Tensor) -> Tensor:
        return self._next(lambda: self._shared.gather(values))

    def _next(self, ask: Callable[[], Tensor]) -> Tensor:
        self.found.append(self._given.pop(0) if self._given else ask())
        return self.found[-1]


def _length(x: Tensor, k: Tensor, lam: Tensor, shared: Shared) -> int:
    """n of whole rows, by one collective, in which every rank sees whether k and lam are the same on
    all: if the sums of numbers and of their squares are those of equal ones, they are equal."""
    bits = [v.to(torch.float64).contiguous().view(torch.int64) for v in (k, lam)]
    signs = torch.cat([sign for b in bits for sign in (b, b * b)], dim=-1)
    length = torch.full_like(signs[:, :1], x.shape[-1])
    found = shared.sum(torch.cat([length, signs], dim=-1))
    for name, first in (("k", 0), ("lam", 2)):
        at = slice(first, first + 2)
        if not torch.equal(found[:, 1:][:, at], shared.size * signs[:, at]):
            raise ValueError(f"{name} must be the same on every rank, got different ones")
    return int(found[0, 0])


def _relaxed(
    rows: Rows, k: Tensor, lam: Tensor, state: Tensor, operator: Operator, shared: _Kept
) -> Relaxed:
    x = rows.data.detach().to(lam.dtype)
    sums = lambda values, linear=False: _group_sums(values, shared)  # noqa: E731
    k = k.detach().to(torch.float64)
    return Live.of(x, k, lam.detach(), state, operator, rows.x.dtype, True, sums).at


def _group_sums(values: Sequence[Tensor], shared: Shared | _Kept) -> list[Tensor]:
    """Over the shards of all ranks, by one collective."""
    sums = [row_sum(v) for v in values]
    counts = all(not v.is_floating_point() for v in sums)
    wide = torch.int64 if counts else torch.float64
    found = shared.sum(torch.cat([v.to(wide) for v in sums], dim=-1)).split(1, dim=-1)
    return [v.to(s.dtype) for v, s in zip(found, sums, strict=True)]


def _hard_mask(solved: Relaxed, shared: _Kept) -> Tensor | None:
    """Of rows with lam = 0, if there are any: ties on lower ranks come first."""
    hard = solved.split.hard
    if hard is None or not bool(hard.any()):
        return torch.zeros_like(solved.x)
    tied = (solved.a == solved.split.pivot) & (solved.a > -torch.inf)
    before = shared.gather(row_sum(tied))[: shared.rank].sum(dim=0)
    return solved.hard_mask(before + tied.cumsum(dim=-1) - tied.to(torch.int64))


@dataclass(frozen=True)
class Shards:
    """Rows of which this rank has the part x (m, any length); see ``threshold.Row``."""

    x: Tensor
    n: int
    shared: Shared

    def sums(self, f: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        return _group_sums(f(self.x), self.shared)

    is_bracketed: ClassVar[bool] = True

    def ends(self, even: bool, k: Count, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Around a_[ceil k], by histograms of the keys, until they are within half of lam."""
        last = (k.whole + (k.frac > 0)).clamp_min(1)
        limit = torch.finfo(self.x.dtype).max
        for lo, hi in self._bisected(last, even):
            lo, hi = lo.clamp(-limit, limit), hi.clamp(-limit, limit)
            if bool((hi.to(lam.dtype) - lo <= lam / 2).all()):
                break
        return lo, hi

    def nth(self, i: Tensor, dtype: torch.dtype, even: bool, wanted: Tensor) -> Tensor:
        return [lo for lo, _ in self._bisected(i, even)][-1].to(dtype)

    def _bisected(self, i: Tensor, even: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Closer and closer floats around a_[i]: each histogram narrows them to one bucket of 2048."""
        dtype = self.x.dtype
        keys = key(xp, self.x.abs() if even else self.x)
        integer, keys, size = keys.dtype, keys.to(torch.int64), torch.finfo(dtype).bits
        first, over = torch.full_like(i, torch.iinfo(integer).min), torch.zeros_like(i)
        while size:
            bits = max(size - _BITS, 0)
            first, over = self._cut(keys, i, first, over, 1 << (size - bits), bits)
            size = bits
            last = first + ((1 << bits) - 1)
            lo, hi = (from_key(xp, v.to(integer), dtype) for v in (first, last))
            yield lo.nan_to_num(-torch.inf, torch.inf, -torch.inf), hi.nan_to_num(torch.inf)

    def _cut(
        self, keys: Tensor, i: Tensor, first: Tensor, over: Tensor, buckets: int, bits: int
    ) -> tuple[Tensor, Tensor]:
        """The first key of the bucket that the i-th largest is in, and how many are above the bucket.

        There are so many buckets from ``first`` on, of 2^bits keys each.
        """
        bucket = (keys >> bits) - (first >> bits)
        bucket = torch.where((bucket >= 0) & (bucket < buckets), bucket, buckets)
        counts = bucket.new_zeros((keys.shape[0], buckets + 1))
        counts = counts.scatter_add(1, bucket, torch.ones_like(bucket))[:, :-1]
        counts = torch.cat([self.shared.sum(counts), over], dim=-1)
        reached = counts.flip(-1).cumsum(dim=-1).flip(-1)  # entries from each bucket on, and above
        chosen = (row_sum(reached[:, :-1] >= i) - 1).clamp_min(0)
        return first + (chosen << bits), reached.gather(-1, chosen + 1)
