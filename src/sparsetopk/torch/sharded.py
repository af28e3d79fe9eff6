"""The top-k family on rows that are sharded over the processes of a group, along the dimension.

The equation is that of ``vectorized``, but every sum over a row is one over all ranks, and so a
collective: there are few of them, and all rows go together. Histograms of the entries, as integers in
their order, bracket the k boundary: each narrows it to one bucket out of 256, whatever the distribution.
Where the bracket is no wider than what lam pools, Newton's method ends in the threshold. The backward
needs one collective, of the sums that the cotangents have in common.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Number, Rows, check_k, check_lam, check_number, is_plain
from .differentiable import Relaxed, from_state
from .groups import Shared
from .kernels import Operator
from .scalars import Phi, lone_response
from .vectorized import (
    MAGNITUDE,
    SIGN,
    Problem,
    Special,
    float_of,
    key_of,
    phi_of,
    regularizer,
    row_sum,
)

_BITS = 8  # of the entries, that a histogram decides
_STEEPEST = 1e280  # keeps products of slopes finite, for any lam > 0


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
        solved = _solved(rows, k, lam, operator, shared)
        ctx.save_for_backward(x, solved.state, *(v for v in (k, lam) if isinstance(v, Tensor)))
        ctx.numbers = tuple(None if isinstance(v, Tensor) else v for v in (k, lam))
        ctx.options = dim, operator, shared
        is_magnitude = operator.op == MAGNITUDE
        return rows.restore(solved.magnitude(operator.debias) if is_magnitude else solved.mask())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("there are no second derivatives over a group")
        x, state, *tensors = ctx.saved_tensors
        k, lam = (tensors.pop(0) if v is None else v for v in ctx.numbers)
        dim, operator, shared = ctx.options
        rows = Rows("x", x, dim)
        solved = _from_state(rows, k, lam, state, operator)
        dx, dk, dlam = _cotangents(solved, rows.tangent(g).to(solved.x.dtype), operator, shared)
        limit = torch.finfo(x.dtype).max
        dx = rows.restore(dx.clamp(-limit, limit))
        return dx, rows.sum_to(dk, k), rows.sum_to(dlam, lam), None, None, None


def _solved(rows: Rows, k: Number, lam: Number, operator: Operator, shared: Shared) -> Relaxed:
    # k is wide on every device: it is compared with counts
    k_rows, lam_rows = rows.per_row(k, torch.float64).detach(), rows.per_row(lam).detach()
    x = rows.data.detach()
    survey = Survey.of(x, k_rows, lam_rows, phi_of(operator.op), shared)
    check_k(k, survey.n, isinstance(k, Tensor) and is_plain(k))
    state = solve(x, k_rows, lam_rows, operator, survey, shared)
    return _from_state(rows, k, lam, _own(x, lam_rows, state, operator, shared), operator)


def _from_state(rows: Rows, k: Number, lam: Number, state: Tensor, operator: Operator) -> Relaxed:
    """Values, for this rank's shard; of what it has for derivatives only masks and t are used."""
    k_rows, lam_rows = (rows.per_row(v).detach() for v in (k, lam))
    rows = Rows(rows.name, rows.x.detach(), rows.dim)
    return from_state(rows, k_rows, lam_rows, state, operator.op, operator.exponent, True)


def _own(x: Tensor, lam: Tensor, state: Tensor, operator: Operator, shared: Shared) -> Tensor:
    """The state for the shard of this rank: at lam = 0, ties on lower ranks come first."""
    hard = (lam == 0) & state[:, :1].isfinite()
    if not bool(hard.any()):
        return state
    a = x.abs() if phi_of(operator.op).even else x
    ties = row_sum(a.to(state.dtype) == state[:, :1])
    before = shared.gather(ties)[: shared.rank].sum(dim=0)
    delta = torch.where(hard, state[:, 1:] - before, state[:, 1:])
    return torch.cat([state[:, :1], delta], dim=-1)


# ------------------------------------------------------------------------------------- the threshold


class Survey(NamedTuple):
    """Of whole rows; (m, 1)."""

    n: int
    bad: Tensor  # entries that make the row NaN
    candidates: Tensor  # entries above -inf
    infinite: Tensor  # entries at +inf

    @classmethod
    def of(cls, x: Tensor, k: Tensor, lam: Tensor, phi: Phi, shared: Shared) -> Survey:
        """By one collective, in which every rank sees whether k and lam are the same on all."""
        bad = ~x.isfinite() if phi.even else x.isnan()
        counts = [row_sum(flag) for flag in (bad, x > -torch.inf, x == torch.inf)]
        n = torch.full_like(counts[0], x.shape[-1])
        bits = [v.to(torch.float64).contiguous().view(torch.int64) for v in (k, lam)]
        # If the sums of the numbers and of their squares are those of equal ones, they are equal.
        signs = [sign for b in bits for sign in (b, b * b)]
        found = shared.sum(torch.cat([n, *counts, *signs], dim=-1))
        for name, j in (("k", 4), ("lam", 6)):
            expected = shared.size * torch.cat(signs, dim=-1)[:, j - 4 : j - 2]
            if not torch.equal(found[:, j : j + 2], expected):
                raise ValueError(f"{name} must be the same on every rank, got different ones")
        n, *counts = found[:, :4].split(1, dim=-1)
        return cls(int(n[0]), *counts)


def solve(
    x: Tensor, k: Tensor, lam: Tensor, operator: Operator, survey: Survey, shared: Shared
) -> Tensor:
    """The state (m, 2), as of ``vectorized.solve`` for the whole rows."""
    op, phi = operator.op, phi_of(operator.op)
    invalid = (survey.bad > 0) | ~((k >= 0) & (k <= survey.n) & (lam >= 0) & (lam < torch.inf))
    a = torch.where(invalid, 0.0, x.abs() if phi.even else x)
    k = torch.minimum(torch.where(invalid, 0.0, k), survey.candidates.to(k.dtype))
    hard, everything = lam == 0, (k >= survey.candidates) & (op != SIGN)
    special = Special(k, hard, invalid, everything, survey.infinite)
    at_infinity = survey.infinite >= k.ceil()  # the boundary is
    decided = invalid | everything | (k == 0) | at_infinity
    soft = ~(decided | hard)

    lam = torch.where(soft, lam, 1.0)
    reg = regularizer(op, operator.exponent)
    problem = Problem(a.to(lam.dtype), k, lam, reg, phi, True, shared.sum)
    search = _Search.start(a, k.ceil().clamp_min(1.0).to(torch.int64), decided)
    while not search.is_narrow(problem, hard):
        search = search.cut(a, shared)
    boundary, pivot = (
        v.to(lam.dtype) for v in search.ends(a, soft & (search.from_lo <= k), shared)
    )
    pivot = torch.where(at_infinity, torch.finfo(lam.dtype).max, pivot)  # above what is finite
    delta = _delta(problem, pivot, boundary, soft)
    if phi.even:
        pinned = soft & ((pivot == 0) | (delta >= pivot / lam))
        pivot, delta = torch.where(pinned, 0.0, pivot), torch.where(pinned, 0.0, delta)
    left = torch.where(at_infinity, k, k - search.over).to(lam.dtype)
    return special.state(pivot, delta, torch.where(at_infinity, torch.inf, boundary), left)


def _delta(problem: Problem, pivot: Tensor, boundary: Tensor, soft: Tensor) -> Tensor:
    """By Newton's method, in the rows that have a threshold; 0 where the gap is too wide to pool."""
    reg, phi, lam = problem.reg, problem.phi, problem.lam
    zero = torch.full_like(lam, reg.zero)
    if not bool(soft.any()):
        return zero
    alone = lone_response(boundary, torch.ones_like(lam), lam, reg, phi)
    most = alone + (pivot - boundary) / lam
    if phi.name == "abs":
        most = torch.minimum(most, pivot / lam)
    return problem.root(pivot, zero, torch.where(soft, torch.maximum(most, zero), zero))


class _Search(NamedTuple):
    """x_[i] is in [lo, hi], where so many bits of its key are open; done rows are not looked for."""

    i: Tensor
    done: Tensor
    first: Tensor  # the key of lo
    bits: int
    over: Tensor  # entries above hi
    from_lo: Tensor  # and from lo on
    lo: Tensor
    hi: Tensor

    @classmethod
    def start(cls, a: Tensor, i: Tensor, done: Tensor) -> _Search:
        info = torch.iinfo(key_of(a[:0]).dtype)
        first = torch.full_like(i, info.min)
        nothing = torch.zeros_like(i)
        return cls(i, done, first, info.bits, nothing, nothing, i, i)._with_values(a.dtype)

    def _with_values(self, dtype: torch.dtype) -> _Search:
        """Floats from the keys; x_[i] is finite, whatever the keys of the bracket are."""
        ends = torch.tensor([-1.0, 1.0], dtype=dtype, device="cpu") * torch.finfo(dtype).max
        limits = key_of(ends).tolist()
        half = 1 << self.bits >> 1  # 2^64 would be too much at once
        last = self.first + (half - 1) + half if self.bits else self.first
        lo, hi = (float_of(v.clamp(*limits), dtype) for v in (self.first, last))
        return self._replace(lo=lo, hi=hi)

    def is_narrow(self, problem: Problem, hard: Tensor) -> bool:
        """Exact; or, in a row that is relaxed, within half of what an entry alone can be pooled from."""
        if self.bits == 0:
            return True
        lam = problem.lam
        lo, hi = self.lo.to(lam.dtype), self.hi.to(lam.dtype)
        alone = lone_response(
            lo.clamp_min(0.0), torch.ones_like(lam), lam, problem.reg, problem.phi
        )
        return bool((self.done | ((hi - lo <= lam * alone / 2) & ~hard)).all())

    def ends(self, a: Tensor, split: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """x_[ceil k] or less, and x_[floor k + 1] or more, but both within what is pooled; and both
        as they are in rows that are ``split`` by the bracket: only there the gap may be wider."""
        if not bool(split.any()):
            return self.lo, self.hi
        end = torch.full_like(self.lo, torch.inf)
        above = torch.cat([torch.where(a >= self.lo, a, torch.inf), end], dim=-1)
        below = torch.cat([torch.where(a < self.lo, a, -torch.inf), -end], dim=-1)
        extremes = [-above.amin(dim=-1, keepdim=True), below.amax(dim=-1, keepdim=True)]
        above, below = shared.largest(torch.cat(extremes, dim=-1)).split(1, dim=-1)
        below = torch.where(below.isfinite(), below, 0.0)  # there is none: everything is selected
        return torch.where(split, -above, self.lo), torch.where(split, below, self.hi)

    def cut(self, a: Tensor, shared: Shared) -> _Search:
        """To one bucket of a histogram of the keys that begin as those of the bracket."""
        bits, buckets = max(self.bits - _BITS, 0), 1 << _BITS
        bucket = (key_of(a).to(torch.int64) >> bits) - (self.first >> bits)
        bucket = torch.where((bucket >= 0) & (bucket < buckets), bucket, buckets)
        counts = bucket.new_zeros((a.shape[0], buckets + 1))
        counts = shared.sum(counts.scatter_add(1, bucket, torch.ones_like(bucket))[:, :-1])
        counts = torch.cat([counts, self.over], dim=-1)
        reached = counts.flip(-1).cumsum(dim=-1).flip(-1)  # entries from each bucket on, and above
        chosen = (row_sum(reached[:, :-1] >= self.i) - 1).clamp_min(0)
        first = self.first + (chosen << bits)
        over, from_lo = reached.gather(-1, chosen + 1), reached.gather(-1, chosen)
        cut = self._replace(first=first, bits=bits, over=over, from_lo=from_lo)
        return cut._with_values(a.dtype)


# -------------------------------------------------------------------------------------- the backward


def _cotangents(
    solved: Relaxed, g: Tensor, operator: Operator, shared: Shared
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and dk and dlam (m, 1) of the whole rows.

    On the block t = (a - v)/lam, so that with rho = S'(t) and what v is to all of them

        dx_i = b g_i + rho_i/lam (g_i - mean),   mean = (sum rho g + lam b sum g)/(sum rho + lam c)

    with b = 1 for a debiased magnitude and 0 else, c = k - |whole| for magnitude and 0 else.
    """
    k, lam, reg = solved.k.detach(), solved.lam.detach(), solved.reg
    inside, above, t = solved.inside, solved.above, solved.t.detach()
    is_magnitude, b = operator.op == MAGNITUDE, float(operator.debias)
    g = solved.signed(g)
    rho = torch.where(inside, reg.slope(torch.where(inside, t, 0.5)), 0.0)
    t, in_block = torch.where(inside, t, 0.0), torch.where(inside, g, 0.0)
    in_x, in_lam = _whole(solved, operator)
    crowded = (solved.a == torch.inf) & (solved.pivot == torch.inf) & (solved.delta > 0)
    parts = (rho, rho * g, rho * t, rho * g * t, in_block, inside, above, in_lam * g)
    sums = [row_sum(v).to(torch.float64) for v in (*parts, torch.where(crowded, g, 0.0))]
    sums = list(shared.sum(torch.cat(sums, dim=-1)).split(1, dim=-1))
    count, whole = sums[5], sums[6]
    c = (k - whole if is_magnitude else torch.zeros_like(k)).to(lam.dtype)
    rho_sum, rho_g, rho_t, rho_g_t, g_sum, of_whole, of_crowded = (
        sums[i].to(lam.dtype) for i in (0, 1, 2, 3, 4, 7, 8)
    )
    pinned = (solved.pivot == 0) & (operator.op == SIGN)
    total = rho_sum + lam * c
    moves = (total > 0) & ~pinned
    total = torch.where(moves, total, 1.0)
    mean = torch.where(moves, (rho_g + lam * b * g_sum) / total, 0.0)
    alone = torch.where(moves, c * (rho_sum + lam * b) / total, 0.0)
    single = (count == 1) & moves  # g - mean would be a small difference
    dx = b * in_block + (rho / lam).clamp_max(_STEEPEST) * torch.where(inside, g - mean, 0.0)
    dx = torch.where(single, alone * in_block, dx) + in_x * g
    dlam = (mean * rho_t - rho_g_t) / lam
    d = torch.where(single & (rho_sum > 0), rho_t / torch.where(rho_sum > 0, rho_sum, 1.0), 0.0)
    dlam = torch.where(single, g_sum * d * (b - alone), dlam) + of_whole
    prime = torch.ones_like(lam)
    if (
        is_magnitude
    ):  # v, from sum_B S(t_i) = v c with S(t) = t S'(t)/e: precise also where v is tiny
        v = solved.pivot - lam * solved.delta
        prime = torch.where(c > 0, rho_t / (reg.exponent * torch.where(c > 0, c, 1.0)), v)
    left = k.to(torch.float64) - whole
    dk = torch.where((left > 0) & (left < count), prime * mean, 0.0)
    dk = dk + of_crowded / torch.where(solved.pivot == torch.inf, solved.delta, 1.0).clamp_min(1.0)
    nan = torch.where(solved.invalid, torch.nan, 0.0)
    return solved.signed(dx) + 0.0 + nan, dk + nan, dlam + nan


def _whole(solved: Relaxed, operator: Operator) -> tuple[Tensor, Tensor]:
    """The derivatives in x and lam of entries that are selected whole, and of hard rows."""
    zero = torch.zeros_like(solved.x)
    if operator.op != MAGNITUDE:
        return zero, zero
    in_x, in_lam = torch.where(solved.above, 1.0, zero), zero
    if not operator.debias:
        lam = solved.lam.detach()
        d = torch.where(solved.above, solved.alone().detach(), 1.0)
        slope = solved.reg.slope(d)
        share = torch.where(slope < _STEEPEST, slope / (slope + lam), 1.0)
        in_x, in_lam = in_x * share, torch.where(solved.above, -d * share, zero)
    if solved.hard is not None:
        in_x = torch.where(solved.hard, solved.hard_mask, in_x)
        in_lam = torch.where(solved.hard, 0.0, in_lam)
    return in_x, in_lam
