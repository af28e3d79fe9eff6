"""Relaxed sorting and ranking on tensors: linear programs over a permutahedron, in which padding (-inf)
comes last, and the lam that makes ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._checks import check_exponent, check_size
from ..._core import native
from ..._maths import padding, select
from ..._types import IsotonicSolver, SolverOptions
from .._fused import isotonic as fused_isotonic
from .._fused import traced
from .._fused.kernels import check_not_onnx
from .._fused.registered import register
from .._fused.rows import cotangents, requires_grad
from .._rows.arguments import Dim, Number, Rows, compute_dtype, over_dims, without_entries
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._rows.namespace import LOOKS_NEVER
from .polytope import (
    IsotonicSetting,
    any_of_row,
    by_kernels,
    floor_of,
    lam_of_rows,
    relax_rows,
)


def _rho(rows: Rows, descending: bool = True) -> Tensor:
    """(n, ..., 1), or (1, ..., n), as (1, n), in a dtype that has these numbers: float16 has no 2049."""
    dtype = torch.float32 if rows.n < 1 << 24 else compute_dtype(rows.x)
    dtype = torch.promote_types(rows.x.dtype, dtype)
    first, last, step = (rows.n, 0, -1) if descending else (1, rows.n + 1, 1)
    return torch.arange(first, last, step, dtype=dtype, device=rows.x.device).reshape(1, -1)


@over_dims
def soft_sort(
    x: Tensor,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    dim: Dim = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Tensor:
    r"""Relaxed sort (Blondel et al., 2020), with any p.

    .. math:: \arg\max_{y \in P(x)} \langle \rho, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard sort; lam -> infinity gives the mean of x everywhere. Padding (-inf) comes
    last, in either direction, and moves nothing.

    >>> soft_sort(torch.tensor([0.1, 0.9, 0.5]), lam=0.1)
    tensor([0.9000, 0.5000, 0.1000])
    """
    return _ordered(x, lam, p, descending, dim, solver, solver_options, False)


@over_dims
def soft_rank(
    x: Tensor,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    dim: Dim = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Tensor:
    r"""Relaxed rank, from 1; rank 1 is the largest entry, or the smallest if not ``descending``.

    .. math:: \arg\max_{y \in P(\rho)} \langle -x, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard rank; lam -> infinity gives (n+1)/2 everywhere. Padding (-inf) ranks last,
    in either direction, and moves nothing: it shares the ranks after those of the m other entries.

    >>> soft_rank(torch.tensor([0.1, 0.9, 0.5]), lam=0.1)
    tensor([3., 1., 2.])
    """
    return _ordered(x, lam, p, descending, dim, solver, solver_options, True)


@over_dims
def choose_rank_lam(
    x: Tensor,
    size: float = 8.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    dim: Dim = -1,
) -> Tensor:
    """The smallest lam, per row, with which the blocks of ``soft_rank`` have at least ``size`` entries
    on average.

    Entries of a block share their ranks, and only these have a gradient: with lam -> 0 every entry is
    a block of its own (but for ties), and as lam grows blocks grow together, until all is one. At most
    all entries of a row are asked for; padding (-inf) does not count. The result has length 1 along the
    dimension and can be given as ``lam`` to ``soft_rank`` with the same p and direction; where every lam
    does, it is the scale of the row. It has no derivative,
    and the dtype in which the operators compute: float64 on the CPU.

    >>> choose_rank_lam(torch.tensor([0.1, 0.9, 0.5, 0.6]), size=2)  # with which 0.9, 0.6, 0.5 share
    tensor([0.2333], dtype=torch.float64)
    """
    x = x.detach() if isinstance(x, Tensor) else x
    rows, size = Rows.of("x", x, dim), check_size(size)
    check_exponent(p)
    if native is not None and traced.takes(x):
        return torch.ops.sparsetopk.rank_lam(x, size, float(p), bool(descending), rows.dim)
    return _rank_lam(x, size, p, descending, rows.dim)


def _rank_lam(x: Tensor, size: float, p: float, descending: bool, dim: int) -> Tensor:
    """The same for checked arguments."""
    rows, setting = Rows("x", x, dim), IsotonicSetting.of(p, "identity", "pav", None, x)
    data = rows.data.to(compute_dtype(x))
    invalid = any_of_row(~data.isfinite() & (data != -torch.inf))
    if x.numel() == 0:
        return rows.unflatten(torch.ones_like(invalid, dtype=data.dtype))
    data = torch.where(invalid, 0.0, data)
    rho = _rho(rows).to(data.dtype).expand(data.shape)

    def blocks(lam: Tensor) -> Tensor:
        z = padding.ranking(xp, data, lam, setting.exponent, descending)
        return setting.solve(z, rho, lam)[0].block

    looks = xp if setting.readable else LOOKS_NEVER
    lam = select.choose_rank_lam(looks, data, size, setting.exponent, blocks)
    return rows.unflatten(torch.where(invalid, torch.nan, lam))


def _ordered(
    x: Tensor,
    lam: Number,
    p: float,
    descending: bool,
    dim: Dim,
    solver: IsotonicSolver,
    options: SolverOptions | None,
    rank: bool,
) -> Tensor:
    """The relaxed rank, or sort, with its arguments checked."""
    rows = Rows.of("x", x, dim)
    setting, lam_rows = (
        IsotonicSetting.of(p, "identity", solver, options, x, lam),
        lam_of_rows(rows, lam),
    )
    if x.numel() == 0:
        return without_entries(x, lam)
    if native is not None and setting.rule is None and traced.takes(x, lam):
        number = 0.0 if isinstance(lam, Tensor) else float(lam)
        given = lam if isinstance(lam, Tensor) else None
        saves = torch.is_grad_enabled() and requires_grad(x, lam)
        asked = given, number, p, descending, rows.dim, rank, saves
        return torch.ops.sparsetopk.ordered(x, *asked)[0]
    return rows.restore((_ranks if rank else _sorts)(rows, lam_rows, setting, descending))


def _sorts(rows: Rows, lam: Tensor, setting: IsotonicSetting, descending: bool) -> Tensor:
    dtype, rho = rows.x.dtype, _rho(rows, descending).expand(rows.data.shape)
    y = by_kernels(rho, rows.data, lam, setting, dtype)
    if y is not None:
        return y
    data, e = rows.data.to(lam.dtype), setting.exponent
    rho, w, there = padding.sorting(xp, data, lam, e, descending)
    relaxed = relax_rows(rho, w, lam, setting, floor_of(dtype))
    return torch.where(there | relaxed.invalid, relaxed.y(), -torch.inf)


def _ranks(rows: Rows, lam: Tensor, setting: IsotonicSetting, descending: bool) -> Tensor:
    dtype, rho = rows.x.dtype, _rho(rows)
    y = by_kernels(-rows.data if descending else rows.data, rho, lam, setting, dtype)
    if y is not None:
        return y
    z = padding.ranking(xp, rows.data.to(lam.dtype), lam, setting.exponent, descending)
    return relax_rows(z, rho, lam, setting, floor_of(dtype)).y()


# As operators, which compiled graphs call: the search for lam would be thousands of nodes.
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define("rank_lam(Tensor x, float size, float p, bool descending, int dim) -> Tensor")
_ASKED = "Tensor? lam, float lam_number, float p, bool descending, int dim, bool rank"
_KEPT = "Tensor order, Tensor first, Tensor w_order, Tensor d"
_library.define(f"ordered_backward(Tensor x, Tensor g, {_ASKED}, {_KEPT}) -> (Tensor, Tensor)")


class _Asked:
    """What is asked of x, unpacked again."""

    def __init__(
        self,
        x: Tensor,
        lam: Tensor | None,
        lam_number: float,
        p: float,
        descending: bool,
        dim: int,
        rank: bool,
    ) -> None:
        self.rows, self.descending, self.rank = Rows("x", x, dim), descending, rank
        number: Number = lam_number if lam is None else lam
        self.setting = IsotonicSetting.of(p, "identity", "pav", None, x, number)
        self.lam = self.rows.per_row(number)

    def y(self) -> Tensor:
        """By whatever way there is."""
        relaxed = _ranks if self.rank else _sorts
        return self.rows.restore(relaxed(self.rows, self.lam, self.setting, self.descending))

    def program(self) -> tuple[Tensor, Tensor]:
        """The objective and the weights of the linear program, if nothing is padding."""
        rows = self.rows
        if self.rank:
            return (-rows.data if self.descending else rows.data), _rho(rows)
        return _rho(rows, self.descending).expand(rows.data.shape), rows.data


def _ordered_again(x: Tensor, *asked: Any) -> Tensor:
    return _Asked(x, *asked).y().contiguous()


def _kept(it: _Asked) -> fused_isotonic.Saved:
    """What is kept for a backward. A ``first`` of -1 says that it is of no use: rows with padding are
    solved in other ways, and again."""
    objective, weights = it.program()
    return fused_isotonic.Saved.of(objective, weights, not it.rank)


def _ordered_once(x: Tensor, *asked_and_saves: Any) -> tuple[Tensor, ...]:
    """y, and what a backward keeps of its solution: nothing, unless it is saved."""
    *asked, saves = asked_and_saves
    it = _Asked(x, *asked)
    if not saves:
        return it.y().contiguous(), *_nothing(x)
    kept, y = _kept(it), None
    if it.setting.readable and bool((it.lam > 0).all()):
        y = fused_isotonic.forward(*it.program(), it.lam, it.setting.exponent, x.dtype, kept)
    if y is None:
        kept.first.fill_(-1)
    y = it.y() if y is None else it.rows.restore(y)
    return y.contiguous(), *_tensors(kept)


def _tensors(kept: fused_isotonic.Saved) -> tuple[Tensor, ...]:
    w_order = kept.d.new_empty(0) if kept.w_order is None else kept.w_order
    return kept.order, kept.first, w_order, kept.d


def _nothing(x: Tensor) -> list[Tensor]:
    """In their place: tensors of their own, as outputs of an operator must be."""
    return [x.new_empty(0) for _ in range(4)]


def _ordered_shapes(x: Tensor, *asked_and_saves: Any) -> tuple[Tensor, ...]:
    check_not_onnx()
    *asked, saves = asked_and_saves
    kept = _tensors(_kept(_Asked(x, *asked))) if saves else _nothing(x)
    return x.new_empty(x.shape), *kept


def _ordered_backward(
    x: Tensor, g: Tensor, lam: Tensor | None, *asked_and_kept: Any
) -> tuple[Tensor, Tensor]:
    *asked, order, first, w_order, d = asked_and_kept
    if not first.numel() or first[0, 0] < 0:
        dx, dlam = _solved_again(x, g, lam, *asked)
    else:
        it = _Asked(x, lam, *asked)
        objective, weights = it.program()
        saved = fused_isotonic.Saved(
            weights.shape[0], order, first, None if it.rank else w_order, d
        )
        wanted = it.rank, not it.rank, lam is not None
        at = objective, weights, it.lam, it.rows.tangent(g), it.setting.exponent
        of_x, of_w, dlam = fused_isotonic.backward(*at, floor_of(x.dtype), wanted, saved)
        found: Any = of_x if it.rank else of_w
        dx = it.rows.restore(-found if it.rank and it.descending else found)
        dlam = None if lam is None else it.rows.sum_to(dlam, lam)
    return dx.contiguous(), x.new_empty(0) if dlam is None else dlam.contiguous()


def _solved_again(
    x: Tensor, g: Tensor, lam: Tensor | None, *asked: Any
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        lam = None if lam is None else lam.detach().requires_grad_()
        y = _ordered_again(x, lam, *asked)
        found = torch.autograd.grad(y, [x] if lam is None else [x, lam], g)
    return found[0], None if lam is None else found[1]


def _ordered_backward_shapes(
    x: Tensor, g: Tensor, lam: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if lam is None else lam.new_empty(lam.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, lam, *ctx.rest, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, lam, *output[1:])


def _derivative(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, lam, *kept = ctx.saved_tensors
    dx = dlam = None
    if g is not None and torch.is_grad_enabled():  # differentiated again, as no operator can be

        def live(x: Tensor, lam: Any) -> Tensor:
            return _ordered_again(x, lam, *ctx.rest)

        dx, dlam = cotangents(live, (x, lam), g, ctx.needs_input_grad[:2])
    elif g is not None:
        dx, dlam = torch.ops.sparsetopk.ordered_backward(x, g, lam, *ctx.rest, *kept)
    return dx, None if lam is None else dlam, *[None] * (len(ctx.rest) + 1)


def _rank_lam_shapes(x: Tensor, size: float, p: float, descending: bool, dim: int) -> Tensor:
    check_not_onnx()
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return x.new_empty(shape, dtype=compute_dtype(x))


_library.impl("rank_lam", lambda *asked: _rank_lam(*asked).contiguous(), "CPU")
_library.impl("rank_lam", _rank_lam_shapes, "Meta")
_library.impl("ordered_backward", _ordered_backward, "CPU")
_library.impl("ordered_backward", _ordered_backward_shapes, "Meta")
register(
    _library,
    "ordered",
    f"(Tensor x, {_ASKED}, bool saves) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _ordered_once,
    _ordered_shapes,
    _save,
    _derivative,
)
