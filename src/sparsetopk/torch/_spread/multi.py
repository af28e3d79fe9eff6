"""Top-k in magnitude over many tensors together, which are never put together.

The threshold is one number for all of them, and is found by a few passes, each of which returns sums
over the tensors (``passes``): a sample brackets the boundary, one pass over everything keeps the
undecided entries, histograms of these narrow the bracket where the relaxation pools less than it spans,
and Newton's method ends in the threshold. Two more read everything once: one writes the output, and in
the backward one adds up what the other one needs to write the cotangents.

With a group of processes the row is that of all their tensors: what a pass returns is added up over the
ranks, and every rank finds the same threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._checks import check_exponent
from ..._core import native
from ..._core.layout import BUCKETS
from ..._maths.operator import MAGNITUDE, Operator
from ..._maths.root import increasing_root
from ..._maths.scalars import Phi, PNorm, lone_response
from ..._numpy import namespace as xp
from ..._types import Array
from .._rows.arguments import (
    Number,
    Rows,
    check_float_tensor,
    check_k,
    check_lam,
    check_number,
    is_ordinary,
    is_plain,
    without_entries,
)
from .._rows.differentiable import relax
from .._solvers import ops
from .._triton import multi as on_gpu
from .groups import Shared, check_group
from .passes import (
    Block,
    Bounds,
    CompiledPasses,
    Counts,
    GroupPasses,
    Passes,
    Spread,
    State,
    TorchPasses,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# At least so many entries are looked at first, spread evenly; a row of fewer than twice as many is
# solved from them at once.
_SAMPLE = 1 << 15
# Below this share of the row, undecided entries are copied, and the output is written at once.
_FEW = 0.02
_LEAST_LAM = 2.0**-1000  # from there down 1/lam may overflow
_INVALID = State(math.nan, 0.0)
_NOTHING, _EVERYTHING = State(math.inf, 0.0), State(-math.inf, 0.0)


def topk_mag_multi(
    tensors: Sequence[Tensor],
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """``topk_mag`` over all entries of many tensors together: one k, one threshold.

    The same as of the concatenation, cut up again, to rounding; but nothing is put together, and the
    memory beyond the outputs is next to none, forward and backward. Tensors may differ in shape and
    dtype. ``k`` and ``lam`` are numbers, or tensors with one entry that may require gradients. Returns
    a list of outputs of the same shapes. Second derivatives, forward mode, ``torch.func`` and tracing go
    through the concatenation, and need its memory.

    With a ``group``, it is the top-k over the tensors of all its processes, which differ from rank to
    rank; k and lam do not. Every rank calls it with at least one tensor, which may be empty, and runs
    the backward. It gets its own part of the outputs and of the cotangents of the tensors, and those of
    k and lam whole. The lowest rank wins a tie at ``lam = 0``. First derivatives only.

    >>> topk_mag_multi([torch.tensor([3.0, -0.1]), torch.tensor([[-2.0, 0.2]])], k=2, lam=0.1)
    [tensor([3., 0.]), tensor([[-2.,  0.]])]
    """
    tensors = _check_tensors(tensors)
    e, n = check_exponent(p), sum(x.numel() for x in tensors)
    for name, value in (("k", k), ("lam", lam)):
        check_number(name, value)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must have one entry, got shape {tuple(value.shape)}")
    check_lam(lam, isinstance(lam, Tensor) and is_plain(lam))
    shared = check_group(group)
    options = _Options(e, debias, straight_through, shared)
    plain = _are_ordinary(tensors)
    if shared is None:
        check_k(k, n, isinstance(k, Tensor) and is_plain(k))
        if n == 0:
            numbers = [v.reshape(()) if isinstance(v, Tensor) else v for v in (k, lam)]
            return [without_entries(x, *numbers) for x in tensors]
        if not plain:
            return _concatenated(tensors, k, lam, options)
    elif not plain:
        raise ValueError("group must be None in torch.func, forward mode and tracing, got a group")
    return list(_Multi.apply(k, lam, options, *tensors))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Options:
    exponent: float
    debias: bool
    straight_through: bool
    shared: Shared | None

    @property
    def operator(self) -> Operator:
        return Operator(MAGNITUDE, self.exponent, self.debias)


def _check_tensors(tensors: object) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"tensors must be a sequence of tensors, got {type(tensors).__name__}")
    return [check_float_tensor(f"tensors[{i}]", x) for i, x in enumerate(tensors)]


def _concatenated(
    tensors: Sequence[Tensor], k: Number, lam: Number, options: _Options
) -> list[Tensor]:
    """In ordinary operations on the live concatenation, for every transform."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    rows = Rows("x", torch.cat([x.flatten().to(dtype) for x in tensors]), 0)
    y = relax(rows, k, lam, options.operator).y()
    if options.straight_through:
        hard = relax(rows, k, 0.0, options.operator).y()
        y = hard.detach() + (y - y.detach())
    parts = y.flatten().split([x.numel() for x in tensors])
    return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]


class _Multi(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Number, lam: Number, options: _Options, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.on_gpu = options.shared is None and on_gpu.takes(tensors)
        if ctx.on_gpu:
            straight = options.straight_through
            outs, ctx.state = on_gpu.forward(tensors, k, lam, options.operator, straight)
        else:
            outs = _solved(ctx, k, lam, options, tensors)
        ctx.save_for_backward(*tensors, *(v for v in (k, lam) if isinstance(v, Tensor)))
        ctx.numbers = tuple(None if isinstance(v, Tensor) else v for v in (k, lam))
        ctx.options = options
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing gives them out once
        tensors, numbers = saved[: len(gs)], list(saved[len(gs) :])
        k, lam = (numbers.pop(0) if v is None else v for v in ctx.numbers)
        shared = ctx.options.shared
        if torch.is_grad_enabled() or not _are_ordinary(g for g in gs if g is not None):
            if shared is not None:
                raise RuntimeError(
                    "topk_mag_multi has no second derivatives over a group, and no batched ones"
                )
            return _differentiable_backward(k, lam, tensors, gs, ctx.options, ctx.needs_input_grad)
        if ctx.on_gpu:
            outs, *of_k_and_lam = on_gpu.backward(
                tensors, gs, ctx.state, k, lam, ctx.options.operator
            )
            return (*of_k_and_lam, None, *outs)
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        cotangents = [None if g is None else _flat(g) for g in gs]
        flat = [out.view(-1) for out in outs]
        passes = _passes([_flat(x) for x in tensors], flat, shared, cotangents)
        row = ctx.row
        sums = passes.block_sums(row)
        dk, dlam = 0.0, passes.cotangents(row, sums, ctx.left)
        if math.isnan(row.state.pivot):
            dk = dlam = math.nan
        elif row.has_threshold:
            block = Block.of(row, sums)
            dk, dlam = block.dk, block.dlam
        wanted = ctx.needs_input_grad
        of_numbers = (_like(dk, k) if wanted[0] else None, _like(dlam, lam) if wanted[1] else None)
        return (*of_numbers, None, *outs)


def _solved(
    ctx: Any, k: Number, lam: Number, options: _Options, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs, by passes; ``ctx`` keeps what was found."""
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    xs, shared = [_flat(x) for x in tensors], options.shared
    survey = Survey.of(xs) if shared is None else _survey(xs, shared, float(k), float(lam))
    passes = _passes(xs, [out.view(-1) for out in outs], shared)
    e, debias, straight = options.exponent, options.debias, options.straight_through
    row = ctx.row = solve_spread(
        survey, passes, float(k), float(lam), e, debias, writes=not straight
    )
    ctx.left = _left(passes, row, shared)
    if straight:
        hard = solve_spread(survey, passes, row.k, 0.0, e, debias)
        passes.apply(hard, _left(passes, hard, shared))
    else:
        passes.apply(row, ctx.left)
    return outs


def _are_ordinary(tensors: Iterable[Tensor]) -> bool:
    return is_plain() and all(is_ordinary(x) and not x.is_meta for x in tensors)


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1)


def _like(value: float, like: Number) -> Tensor | None:
    return torch.full_like(like.detach(), value) if isinstance(like, Tensor) else None


def _passes(
    xs: list[Tensor],
    outs: list[Tensor],
    shared: Shared | None,
    gs: list[Tensor | None] | None = None,
) -> Passes:
    compiled = native is not None and all(x.is_cpu for x in xs)
    passes = (CompiledPasses if compiled else TorchPasses)(xs, outs, gs)
    return passes if shared is None else GroupPasses(passes, shared)


def _differentiable_backward(
    k: Number,
    lam: Number,
    tensors: Sequence[Tensor],
    gs: Sequence[Tensor | None],
    options: _Options,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """With a graph if one is wanted; k or lam may depend on the tensors, so derivatives are taken at
    aliases."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs: list[Any] = [
            v.view_as(v) if isinstance(v, Tensor) else v for v in (k, lam, *tensors)
        ]
        ys = _concatenated(inputs[2:], inputs[0], inputs[1], options)
        used = [(y, g) for y, g in zip(ys, gs, strict=True) if g is not None]
        flags = [*wanted[:2], *wanted[3:]]
        live = [v for v, w in zip(inputs, flags, strict=True) if w]
        outs, cotangents = [y for y, _ in used], [g for _, g in used]
        found = iter(
            torch.autograd.grad(outs, live, cotangents, create_graph=graph, allow_unused=True)
        )
    in_k, in_lam, *others = (next(found) if w else None for w in flags)
    return (in_k, in_lam, None, *others)


def _left(passes: Passes, row: Spread, shared: Shared | None) -> Array:
    """For lam = 0, the mass for the entries of each piece at the pivot, infinite if it is for all of
    them: the first ones come first."""
    if row.lam > 0 or not math.isfinite(row.state.pivot):
        return np.zeros(())
    ties = passes.at_pivot(row.state.pivot)
    left = row.state.delta - (np.cumsum(ties) - ties)
    if shared is not None:  # and the lower ranks before
        left -= float(shared.gather(torch.tensor(ties.sum(), device="cpu"))[: shared.rank].sum())
    return np.where(left >= ties, np.inf, np.maximum(left, 0.0))


# ------------------------------------------------------------------------------------- the threshold


class Survey(NamedTuple):
    """What is known of the row before any pass."""

    n: int
    sample: Tensor  # sizes at even distances
    has_doubles: bool

    @classmethod
    def of(cls, xs: list[Tensor]) -> Survey:
        n = sum(x.numel() for x in xs)
        return cls(n, _sample(xs, n, 0), _has_doubles(xs))

    @property
    def resolution(self) -> tuple[int, float]:
        """The last bits of a double that sizes do not use, and the largest size."""
        if self.has_doubles:
            return 0, float(np.finfo(np.float64).max)
        return 29, float(np.finfo(np.float32).max)


def _has_doubles(xs: list[Tensor]) -> bool:
    return any(x.dtype == torch.float64 for x in xs)


def _survey(xs: list[Tensor], shared: Shared, k: float, lam: float) -> Survey:
    """Of the tensors of all ranks, by two collectives; that k and lam fit is seen on all of them."""
    here = [sum(x.numel() for x in xs), len(xs), _has_doubles(xs), k, lam]
    found = shared.gather(torch.tensor(here, dtype=torch.float64, device="cpu"))
    sizes, lengths, doubles, ks, lams = found.T
    if not lengths.all():
        raise ValueError("tensors must have at least one tensor on every rank, got none on one")
    for name, values in (("k", ks), ("lam", lams)):
        if not torch.equal(values, values[:1].expand_as(values)):
            raise ValueError(f"{name} must be the same on every rank, got {values.tolist()}")
    n, before = int(sizes.sum()), int(sizes[: shared.rank].sum())
    check_k(k, n, readable=True)
    part = _sample(xs, n, before)
    stride = _stride(n)
    count = len(range(stride // 2, n, stride))
    sample = torch.zeros(count, dtype=torch.float64, device="cpu")
    first = len(range(stride // 2, before, stride))
    sample[first : first + part.numel()] = part
    return Survey(n, shared.sum(sample), bool(doubles.any()))


def solve_spread(
    survey: Survey,
    passes: Passes,
    k: float,
    lam: float,
    exponent: float,
    debias: bool,
    writes: bool = True,
) -> Spread:
    """The row that was surveyed, with its state, for an output that is written next."""
    lam = max(lam, _LEAST_LAM) if lam > 0 else lam
    row = Spread(exponent, debias, k, lam, _INVALID)
    if not (0 <= k <= survey.n and 0 <= lam < math.inf):
        return row
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return row._replace(state=_find(survey, passes, row, writes))


def _find(survey: Survey, passes: Passes, row: Spread, writes: bool) -> State:
    n, sample = survey.n, survey.sample
    if row.k in (0, n):
        nowhere = Bounds(math.inf, math.inf, math.inf, math.inf)
        invalid = passes.gather(nowhere, few=False).invalid
        return _INVALID if invalid else _NOTHING if row.k == 0 else _EVERYTHING
    m = sample.numel()
    guess = _solve_sample(sample, row, m / n)
    if m == n or math.isnan(guess.pivot):
        return guess
    search = _Search(passes, row, survey.resolution, *_guess(sample, row.k / n))
    if writes and (row.debias or row.lam == 0):
        low, high, *_ = search.bounds
        few = float(((sample >= low) & (sample <= high)).double().mean()) < _FEW
        search = replace(search, few=few)
    narrow = search.narrowed()
    return _INVALID if narrow is None else narrow.threshold(guess)


def _stride(n: int) -> int:
    return max(1, n // _SAMPLE)


def _sample(xs: list[Tensor], n: int, before: int) -> Tensor:
    """Sizes at even distances in the row of n entries, of which so many come before these."""
    stride = _stride(n)
    found = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    for x in xs:
        found.append(x[(stride // 2 - before) % stride :: stride].to("cpu", torch.float64))
        before += x.numel()
    return torch.cat(found).abs()


def _solve_sample(sample: Tensor, row: Spread, share: float) -> State:
    """The state of the sample, as if it were the row."""
    k, lam = (sample.new_full((1, 1), v) for v in (row.k * share, row.lam))
    state = ops.threshold(sample[None], k, lam, MAGNITUDE, row.exponent)
    return State(*state[0].tolist())


def _guess(sample: Tensor, share: float) -> tuple[float, float]:
    """The sizes of the sample that are three standard errors below and above the boundary."""
    m = sample.numel()
    margin = 3 * math.sqrt(m * share * (1 - share)) + 1
    first, last = int(share * m - margin), int(share * m + margin)
    s = np.partition(sample.numpy(), sorted({m - 1 - max(first, 0), m - 1 - min(last, m - 1)}))
    hi = s[m - 1 - first] if first >= 0 else math.inf
    return (float(s[m - 1 - last]) if last < m else 0.0), float(hi)


def _bits(a: float) -> int:
    return int(np.float64(a).view(np.int64))


def _size(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


@dataclass(frozen=True)
class _Search:
    """lo <= a_[floor k + 1] <= a_[ceil k] <= hi, and how many entries are above hi and from lo on."""

    passes: Passes
    row: Spread
    resolution: tuple[int, float]
    lo: float
    hi: float
    over: int = 0  # entries that no pass looks at any more, as they are selected whole
    over_hi: int = 0
    from_lo: int = 0
    exact: bool = False  # the ends of the bracket are the two sizes
    few: bool = False  # it is likely to leave few entries undecided, and the rest can be written

    @property
    def above(self) -> int:
        return math.ceil(self.row.k)

    @property
    def below(self) -> int:
        return math.floor(self.row.k) + 1

    def alone(self, a: float) -> float:
        """t of an entry that is selected whole and stands alone."""
        reg = PNorm(xp, self.row.exponent)
        one, lam = np.ones(1), np.array([self.row.lam])
        return float(lone_response(np.array([a]), one, lam, reg, Phi(xp, "half_square"))[0])

    @property
    def bounds(self) -> Bounds:
        """Below, no entry can be selected, and above every one is whole; a little outwards."""
        if self.row.lam == 0:
            return Bounds(self.lo, self.hi, self.lo, self.hi)
        low = self.alone(self.lo) ** self.row.exponent * (1 - 1e-14)
        high = (self.hi + self.pooled) * (1 + 1e-14)
        return Bounds(min(low, self.lo), min(high, self.resolution[1]), self.lo, self.hi)

    @property
    def pooled(self) -> float:
        """How far an entry at hi may be above the threshold, and still be in the block."""
        return float(self.row.lam * np.float64(self.hi) ** (1 / self.row.exponent))

    def narrowed(self) -> _Search | None:
        """A bracket that holds, and is as narrow as need be; None if an entry is not finite."""
        search = replace(self, hi=min(self.hi, self.resolution[1]))
        while True:  # a bracket that fails says on which side to look
            counts = search.passes.gather(search.bounds, search.few)
            if counts.invalid:
                return None
            if counts.over_hi < search.above and counts.from_lo >= search.below:
                break
            search = search.moved(counts)
        search = replace(search, over=counts.over, over_hi=counts.over_hi, from_lo=counts.from_lo)
        while not search.is_narrow:
            search = search.cut()
        return search

    def moved(self, counts: Counts) -> _Search:
        """To the side that the counts point to, and open there."""
        lo, hi = self.lo, self.hi
        if counts.over_hi >= self.above:
            lo, hi = (hi if counts.over_hi >= self.below else lo), self.resolution[1]
        if counts.from_lo < self.below:
            lo, hi = 0.0, (self.lo if counts.from_lo < self.above else hi)
        return replace(self, lo=lo, hi=hi)

    @property
    def is_narrow(self) -> bool:
        """Exact, or no wider than what is pooled in any case, and than a pivot can be off."""
        open_end = self.lo == 0 or self.hi == self.resolution[1]  # 0 is a case of its own
        if self.exact or self.row.lam == 0 or open_end:
            return self.exact
        return self.hi - self.lo <= min(2 * self.pooled, 16 * self.lo)

    def cut(self) -> _Search:
        """By a histogram of what is in the bracket."""
        first, last, finest = _bits(self.lo), _bits(self.hi), self.resolution[0]
        shift = max(finest, (last - first).bit_length() - BUCKETS.bit_length() + 1)
        counts = self.passes.histogram(first, last, shift)
        reached = self.over_hi + np.cumsum(counts[::-1])[::-1]  # from each bucket on
        bucket, lower = (int(np.flatnonzero(reached >= i)[-1]) for i in (self.above, self.below))
        start = first + (bucket << shift)
        if bucket != lower:  # the two sizes are on different sides of where the bucket starts
            hi, lo = self.passes.neighbours(_size(start))
            return replace(self, lo=lo, hi=hi, exact=True)
        end = min(last, start + (1 << shift) - (1 << finest))
        over_hi = int(reached[bucket + 1]) if bucket + 1 < BUCKETS else self.over_hi
        return replace(
            self,
            lo=_size(start),
            hi=_size(end),
            over_hi=over_hi,
            from_lo=int(reached[bucket]),
            exact=start == end,
        )

    def threshold(self, guess: State) -> State:
        """Newton's method, from the threshold of the sample."""
        row, lam = self.row, self.row.lam
        if lam == 0:  # where the two sizes differ, all entries from hi on are selected
            return State(self.hi, row.k - self.over_hi if self.lo == self.hi else row.k)
        if self.exact and self.lo == 0:
            return State(0.0, 0.0)
        pivot, boundary = (self.lo, self.hi) if self.exact else (self.hi, self.lo)
        most = self.alone(boundary) - (boundary - pivot) / lam
        if not most > 0:  # the gap is too wide to pool anything: the hard answer
            return State(pivot, 0.0)
        start = (pivot - (guess.pivot - lam * guess.delta)) / lam
        root = increasing_root(
            xp,
            self.equation(pivot, max(row.k, 1.0) * (pivot - lam * most)),
            np.zeros(1),
            np.array([most]),
            start=np.array([start if 0 < start < most else most / 2]),
            # One step more than what meets it is taken, which is exact where S is straight.
            tol=1e-15 if row.exponent != 1 or self.resolution[0] == 0 else 1e-8,
            # For p > 2 a response is as steep as it likes near 0: every digit of delta counts.
            unit=np.array([0.0 if row.exponent < 1 else most]),
            rows=np.ones(1, dtype=bool),
        )
        return State(pivot, float(root.best[0]))

    def equation(self, pivot: float, size: float) -> Any:
        """delta -> (left minus right side, the Newton step, their size), as in ``_maths.threshold``."""

        def equation(at: Array) -> tuple[Array, Array, Array]:
            delta = float(at[0])
            row = self.row._replace(state=State(pivot, delta))
            mass, slope, above = self.passes.masses(row)
            left = row.k - self.over - above
            value = mass - left * row.v
            step = -np.float64(value) / (slope + row.lam * left)
            return np.array([value]), np.array([step]), np.array([size])

        return equation
