"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..._checks import check_choice, check_exponent, check_positive_int
from ..._core import native
from ..._maths import select
from ..._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Operator
from ..._maths.response import Relaxed
from ..._maths.select import Window, check_slots, default_capacity, hard_first
from .._fused import kernels, traced
from .._rows import hard
from .._rows.arguments import (
    Dim,
    Number,
    Rows,
    candidates,
    check_dim,
    check_k_and_lam,
    is_plain,
    over_dims,
)
from .._rows.differentiable import Live
from .._rows.namespace import LOOKS_ALWAYS, LOOKS_NEVER
from .._rows.product import times
from .._solvers import ops
from .._solvers.vectorized import row_sum, split
from .._triton import selection as on_gpu
from . import lams
from .operators import topk_mag, topk_mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the dimension."""

    values: Tensor
    indices: Tensor
    dropped: Tensor


class StraightThroughSelection(NamedTuple):
    """The hard top-k in slots, followed by the entries that compete with it."""

    values: Tensor
    indices: Tensor
    dropped: Tensor
    selected: Tensor  # whether a slot is of the hard selection


@overload
def topk_select(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    largest: bool = True,
    values: Literal["mask", "x"] = "mask",
    sorted: bool = False,
    dim: Dim = -1,
    where: Tensor | None = None,
    capacity: int | None = None,
    straight_through: Literal[False] = False,
    group: ProcessGroup | None = None,
) -> Selection: ...


@overload
def topk_select(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    largest: bool = True,
    values: Literal["mask", "x"] = "mask",
    sorted: bool = False,
    dim: Dim = -1,
    where: Tensor | None = None,
    capacity: int | None = None,
    straight_through: Literal[True],
    group: ProcessGroup | None = None,
) -> StraightThroughSelection: ...


@over_dims
def topk_select(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    largest: bool = True,
    values: Literal["mask", "x"] = "mask",
    sorted: bool = False,
    dim: Dim = -1,
    where: Tensor | None = None,
    capacity: int | None = None,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> Selection | StraightThroughSelection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices with ``capacity`` slots along the dimension. Indices increase strictly,
    so that scattering the values back is safe; unused slots have value 0. A row with more nonzeros
    than slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per row. The
    default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``, and ceil(k) if lam is the number 0; it
    must be given if k is a tensor.

    The derivative of the values is that of the operator at the indices. With ``values="x"`` they are
    those of ``topk(x)``, the selected x times the mask. ``sorted=True`` has the largest values first
    (the smallest if not ``largest``, magnitudes if ``magnitude``) and unused slots last: with lam = 0
    and both, values and indices are those of ``torch.topk``. With several dimensions, or None, indices
    count the entries of all of them in their order, and slots come last.

    With ``straight_through=True`` the first ceil(k) slots are the hard selection, with the value 1 (or
    x), and those after them the entries that compete with it, with the value 0; indices increase in
    each part. All have the relaxed derivative, and ``selected`` says which slots are of the first part:
    fewer if a row has fewer than k candidates, the rest being -inf. Each of the ceil(k) must have a
    slot; ``dropped`` is what the relaxed operator gives to entries without a slot.

    With a ``group`` of processes, over which rows are sharded along ``dim``, every rank has slots for
    its own entries, and indices into its shard.

    >>> selection = topk_select(torch.tensor([3.0, -1.0, 1.0, 0.95]), k=2, capacity=3)
    >>> selection.indices
    tensor([0, 2, 3])
    """
    _check_magnitude(magnitude, two_sided, largest)
    check_choice("values", values, ("mask", "x"))
    x = candidates(x, where, magnitude, largest)
    if straight_through and sorted:
        raise ValueError("sorted must be False when straight_through=True, got True")
    operator = Operator(_op(magnitude, two_sided), check_exponent(p), magnitude)
    asked = _Asked(
        dim, capacity, straight_through, largest, values == "x" and not magnitude, sorted
    )
    slots = None if group is not None else _on_gpu(x, k, lam, operator, asked)
    return _selected(x, k, lam, p, operator, group, asked) if slots is None else slots


class _Asked(NamedTuple):
    """What ``topk_select`` is asked for, besides the operator."""

    dim: Dim
    capacity: int | None
    straight_through: bool
    largest: bool
    times_x: bool
    sorted: bool


def _on_gpu(
    x: Tensor, k: Number, lam: Number, operator: Operator, asked: _Asked
) -> Selection | StraightThroughSelection | None:
    """By one kernel, where there is one for what is asked."""
    if not asked.largest or asked.times_x or asked.sorted or hasattr(x, "placements"):
        return None
    rows = Rows.of("x", x, asked.dim)
    if not on_gpu.takes(rows, operator):
        return None
    check_k_and_lam(rows, k, lam)
    capacity = check_capacity(asked.capacity, k, rows.n, is_hard(lam))
    if asked.straight_through:
        _check_slots(rows, k, capacity)
    slots = on_gpu.evaluate(rows, k, lam, operator, capacity, asked.straight_through)
    return StraightThroughSelection(*slots) if asked.straight_through else Selection(*slots[:3])


def _selected(
    x: Tensor,
    k: Number,
    lam: Number,
    p: float,
    operator: Operator,
    group: ProcessGroup | None,
    asked: _Asked,
) -> Selection | StraightThroughSelection:
    """The slots of a whole output of the operator."""
    magnitude = operator.op == MAGNITUDE
    options: Any = {"dim": asked.dim, "group": group}
    if magnitude:
        y = topk_mag(x, k, lam, p=p, **options)
    else:
        options["largest"] = asked.largest
        y = topk_mask(x, k, lam, p=p, two_sided=operator.op == TWO_SIDED, **options)
    dim = check_dim("x", y, asked.dim)
    capacity = check_capacity(asked.capacity, k, y.shape[dim], is_hard(lam))
    if asked.straight_through:
        still, k = x.detach(), k.detach() if isinstance(k, Tensor) else k
        hard = topk_mask(still.abs() if magnitude else still, k, 0.0, **options)
        found: Any = _straight_through(y, hard, still if magnitude else None, k, capacity, dim)
    else:
        found = in_slots(y, capacity, dim)
    if asked.times_x:
        found = found._replace(values=times(x.gather(dim, found.indices), found.values))
    if not asked.sorted:
        return found
    by = found.values.abs() if magnitude else found.values if asked.largest else -found.values
    return _in_order(found, by.detach(), y.detach(), dim)


def _in_order(found: Selection, by: Tensor, y: Tensor, dim: int) -> Selection:
    """The slots with the largest ``by`` first, and those that hold nothing of y last."""
    by = torch.where(y.gather(dim, found.indices) != 0, by, -torch.inf)
    order = by.argsort(dim=dim, descending=True, stable=True)
    values, indices = (v.gather(dim, order) for v in (found.values, found.indices))
    return Selection(values, indices, found.dropped)


def _straight_through(
    y: Tensor, hard: Tensor, x: Tensor | None, k: Number, capacity: int, dim: int
) -> StraightThroughSelection:
    """Slots of the hard mask, or of x times it, with the derivative of y."""
    rows = Rows.of("y", y, dim)
    readable = _check_slots(rows, k, capacity)
    key = hard_first(LOOKS_NEVER, hard, y.detach())
    slots = select_slots(rows.tangent(key), capacity)
    selected = rows.tangent(hard).gather(-1, slots) > 0
    # The hard selection first, and each part in the order of the indices.
    order = (~selected).to(torch.uint8).argsort(dim=-1, stable=True)
    slots, selected = slots.gather(-1, order), selected.gather(-1, order)
    indices, live = rows.unflatten(slots), rows.data.gather(-1, slots)
    value = rows.tangent(hard if x is None else x * hard).gather(-1, slots)
    value = torch.where(selected, value, 0.0).to(y.dtype) + (live - live.detach())
    if not readable and capacity < rows.n:  # a k that is bad makes its row NaN
        value = torch.where(rows.per_row(k) > capacity, torch.nan, value)
    dropped = rows.restore_scalars(traced.dropped(rows.data, slots))
    return StraightThroughSelection(
        rows.unflatten(value), indices, dropped, rows.unflatten(selected)
    )


def _check_slots(rows: Rows, k: Number, capacity: int) -> bool:
    """``check_slots`` where k can be read; whether it can."""
    readable = not isinstance(k, Tensor) or is_plain(k)
    if readable and rows.x.numel():
        most = k.detach().double().max() if isinstance(k, Tensor) else k
        check_slots(capacity, float(most), rows.n)
    return readable


def in_slots(y: Tensor, capacity: int, dim: int = -1) -> Selection:
    """The entries of y with the largest magnitudes, with their derivative."""
    rows = Rows.of("y", y, dim)
    if _in_graph(y):
        return Selection(*traced.slots(y, capacity, rows.dim))
    slots = select_slots(rows.data.detach(), capacity)
    indices = rows.unflatten(slots)
    dropped = traced.dropped(rows.data, slots)
    return Selection(y.gather(dim, indices), indices, rows.restore_scalars(dropped))


def _check_magnitude(magnitude: bool, two_sided: bool, largest: bool) -> None:
    if magnitude and not largest:
        raise ValueError("largest must be True when magnitude=True, got False")
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")


def _op(magnitude: bool, two_sided: bool) -> int:
    return MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK


def is_hard(lam: Number) -> bool:
    """Whether lam is the number 0."""
    return not isinstance(lam, Tensor) and lam == 0


def check_capacity(capacity: int | None, k: Number, n: int, hard: bool = False) -> int:
    if capacity is not None:
        return check_positive_int("capacity", capacity, at_most=n) if n else capacity
    if isinstance(k, Tensor):
        raise ValueError(
            f"capacity must be given when k is a tensor, got k of shape {tuple(k.shape)}"
        )
    return default_capacity(float(k), n, hard)


def _in_graph(y: Tensor) -> bool:
    """Whether a graph is made, to run here, that may call the kernels."""
    return native is not None and y.numel() > 0 and traced.takes(y) and not hard.is_leaving()


def select_slots(y: Tensor, capacity: int) -> Tensor:
    """The indices (m, capacity) of the entries of each row with the largest magnitudes, in order.

    Of equal ones, as are the zeros that fill the slots, the lowest index comes first. NaN is like 0.
    """
    if y.numel() == 0:
        return y.new_zeros((y.shape[0], capacity), dtype=torch.int64)
    if on_gpu.takes_slots(y):
        return on_gpu.slots(y, capacity)
    if native is not None and is_plain(y):
        return kernels.select(y.contiguous(), capacity)
    if _in_graph(y):
        return traced.select(y, capacity)
    size = y.abs().nan_to_num(0.0)
    boundary = size.topk(capacity, sorted=False).values.amin(dim=-1, keepdim=True)
    left = capacity - row_sum(size > boundary)
    tied = size == boundary
    return _compact((size > boundary) | (tied & (tied.cumsum(dim=-1) <= left)), capacity)


def _compact(kept: Tensor, capacity: int) -> Tensor:
    """The indices of the kept entries, in order: (m, n) flags with ``capacity`` set in each row."""
    m, n = kept.shape
    slot = torch.where(kept, kept.cumsum(dim=-1) - 1, capacity)  # the others meet in one more slot
    index = torch.arange(n, device=kept.device).expand(m, n)
    slots = torch.zeros((m, capacity + 1), dtype=torch.int64, device=kept.device)
    return slots.scatter(-1, slot, index)[:, :capacity]


@over_dims
def choose_lam(
    x: Tensor,
    k: Number,
    fractional: int = 8,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    largest: bool = True,
    dim: Dim = -1,
    where: Tensor | None = None,
) -> Tensor:
    """The smallest lam, per row, that leaves at least ``fractional`` entries between 0 and 1.

    The number of fractional entries increases with lam from none (the hard operator) to n, and it is
    what a choice of lam decides: how many entries compete, and so receive a gradient. The result has
    length 1 along the dimension and can be given as ``lam`` to ``topk_mask`` or, with
    ``magnitude=True``, to ``topk_mag``; for ``topk_sign`` take ``choose_lam(abs(x), ...)``. Where no lam
    can do it (k = 0, k = n), it is the scale of the row. At most n entries are asked for. It has no
    derivative, and the dtype in which the operators compute: float64 on the CPU.

    Where so many entries are equal at the boundary, as happens in 16 bits, any lam leaves them
    fractional, and the smallest has slopes 1/lam beyond any use: clip it to what the entries are apart.

    >>> x = torch.linspace(0.0, 1.0, 101)
    >>> y = topk_mask(x, k=10, lam=choose_lam(x, k=10, fractional=8))
    >>> int(((y > 0) & (y < 1)).sum())
    8
    """
    _check_magnitude(magnitude, two_sided, largest)
    x = candidates(x.detach() if isinstance(x, Tensor) else x, where, magnitude, largest)
    rows, e = Rows.of("x", x if largest else -x, dim), check_exponent(p)
    k = k.detach() if isinstance(k, Tensor) else k
    check_k_and_lam(rows, k, 1.0)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    k_rows = rows.per_row(k)
    if x.numel() == 0:
        return rows.unflatten(torch.ones_like(k_rows))
    operator = Operator(_op(magnitude, two_sided), e)
    if on_gpu.takes(rows, operator):
        return rows.unflatten(on_gpu.choose_lam(rows, k, operator, fractional).to(k_rows.dtype))
    if is_plain(rows.x, k) and kernels.has(operator):
        rows_of_x, k_of_rows = rows.data.contiguous(), k_rows.contiguous()
        return rows.unflatten(kernels.choose_lam(rows_of_x, k_of_rows, operator, fractional))
    lam = _choose(rows, k_rows, None if isinstance(k, Tensor) else k, operator, fractional)
    bad = ~rows.data.isfinite() if magnitude else rows.data.isnan()
    invalid = (row_sum(bad) > 0) | ~((k_rows >= 0) & (k_rows <= rows.n))
    return rows.unflatten(torch.where(invalid, torch.nan, lam))


@over_dims
def topk_threshold(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    magnitude: bool = False,
    dim: Dim = -1,
) -> Tensor:
    """The number that entries (or with ``magnitude=True`` magnitudes) must exceed for ``topk_mask`` (or
    ``topk_mag``) to give them anything, per row; for lam = 0 the smallest that is selected.

    Its mean over batches can take the place of the top-k in inference, where an entry must not depend
    on what else is in the batch. It has length 1 along the dimension, the dtype in which the operators
    compute, and no derivative. k = 0 gives inf; where all are selected, it is below them.

    >>> topk_threshold(torch.tensor([3.0, 1.0, 0.95, -1.0]), k=2, lam=0.1)
    tensor([0.9250], dtype=torch.float64)
    """
    rows, e = Rows.of("x", x.detach() if isinstance(x, Tensor) else x, dim), check_exponent(p)
    k, lam = (v.detach() if isinstance(v, Tensor) else v for v in (k, lam))
    check_k_and_lam(rows, k, lam)
    k_rows, lam_rows = rows.per_row(k), rows.per_row(lam)
    if x.numel() == 0:
        return rows.unflatten(torch.full_like(k_rows, torch.inf))
    pivot, delta = ops.threshold(
        rows.data, k_rows, lam_rows, MAGNITUDE if magnitude else MASK, e
    ).unbind(dim=-1)
    return rows.unflatten((pivot - lam_rows[:, 0] * delta).unsqueeze(-1))


def _choose(
    rows: Rows, k: Tensor, most: float | None, operator: Operator, fractional: int
) -> Tensor:
    """lam (m, 1), for k (m, 1) of which none is above ``most``."""
    x = rows.data.abs() if operator.phi(LOOKS_ALWAYS).even else rows.data
    x = x.nan_to_num(0.0, torch.inf, -torch.inf)
    if most is None:
        s = x.sort(dim=-1, descending=True).values
    else:
        s = x.topk(min(rows.n, math.ceil(most) + fractional + 1)).values
    window = Window.of(LOOKS_ALWAYS, s, split(k), fractional)
    looks = is_plain(k)
    search = None if looks else lams.Search.of(rows.x, window)
    if search is not None:
        window = search.repeated(window)
    inside = window.k.whole.to(k.dtype) + window.k.frac
    data = window.s.to(k.dtype)

    def solved(lam: Tensor) -> Relaxed:
        state = ops.threshold(window.s, inside, lam, operator.op, operator.exponent, hard=False)
        return Live.of(data, inside, lam, state, operator, rows.x.dtype, may_be_hard=False).at

    xp, smallest = LOOKS_ALWAYS if looks else LOOKS_NEVER, search and search.smallest
    return select.choose_lam(xp, window, operator, fractional, solved, rows.x.dtype, smallest)
