"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check_positive_int
from ..core import native
from ..selection import default_capacity
from . import kernels
from .arguments import Number, Rows, check_exponent, check_k_and_lam, is_plain
from .differentiable import relax
from .operators import topk_mag, topk_mask
from .vectorized import MAGNITUDE, MASK, TWO_SIDED, row_sum

# The search for lam: by this factor up and down from the scale of the row, so often, within these
# bounds; then bisections of its logarithm.
_STEP, _STEPS, _BISECTIONS = 16.0, 40, 30
_SMALLEST = {torch.float64: 1e-300, torch.float32: 1e-36}


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the dimension."""

    values: Tensor
    indices: Tensor
    dropped: Tensor


def topk_select(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    dim: int = -1,
    capacity: int | None = None,
) -> Selection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices with ``capacity`` slots along the dimension. Indices increase strictly,
    so that scattering the values back is safe; unused slots have value 0. A row with more nonzeros
    than slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per row. The
    default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``; it must be given if k is a tensor.

    The derivative of the values is that of the operator at the indices.

    >>> selection = topk_select(torch.tensor([3.0, -1.0, 1.0, 0.95]), k=2, capacity=3)
    >>> selection.indices
    tensor([0, 2, 3])
    """
    _check_magnitude(magnitude, two_sided)
    if magnitude:
        y = topk_mag(x, k, lam, p=p, dim=dim)
    else:
        y = topk_mask(x, k, lam, p=p, two_sided=two_sided, dim=dim)
    return in_slots(y, check_capacity(capacity, k, y.shape[dim]), dim)


def in_slots(y: Tensor, capacity: int, dim: int = -1) -> Selection:
    """The entries of y with the largest magnitudes, with their derivative."""
    rows = Rows.of("y", y, dim)
    slots = select_slots(rows.data.detach(), capacity)
    indices = rows.unflatten(slots)
    dropped = _dropped(rows.data, slots)
    return Selection(y.gather(dim, indices), indices, rows.restore_scalars(dropped))


def _dropped(y: Tensor, slots: Tensor) -> Tensor:
    """The sum of the magnitudes that are in no slot, (m, 1); NaN for a row that is."""
    kept = y.gather(-1, slots)
    if is_plain(y) and y.detach().count_nonzero() == kept.detach().count_nonzero():
        return kept.clamp(0, 0).abs().sum(dim=-1, keepdim=True)  # 0 with a derivative of 0, or NaN
    rest = y.scatter(-1, slots, 0.0).abs().sum(dim=-1, keepdim=True)
    return torch.where(kept.detach().isnan().any(dim=-1, keepdim=True), torch.nan, rest)


def _check_magnitude(magnitude: bool, two_sided: bool) -> None:
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")


def check_capacity(capacity: int | None, k: Number, n: int) -> int:
    if capacity is not None:
        return check_positive_int("capacity", capacity, at_most=n) if n else capacity
    if isinstance(k, Tensor):
        raise ValueError(
            f"capacity must be given when k is a tensor, got k of shape {tuple(k.shape)}"
        )
    return default_capacity(float(k), n)


def select_slots(y: Tensor, capacity: int) -> Tensor:
    """The indices (m, capacity) of the entries of each row with the largest magnitudes, in order.

    Of equal ones, as are the zeros that fill the slots, the lowest index comes first. NaN is like 0.
    """
    if y.numel() == 0:
        return y.new_zeros((y.shape[0], capacity), dtype=torch.int64)
    if native is not None and is_plain(y):
        return kernels.select(y.contiguous(), capacity)
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


def choose_lam(
    x: Tensor,
    k: Number,
    fractional: int = 8,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    dim: int = -1,
) -> Tensor:
    """The smallest lam, per row, that leaves at least ``fractional`` entries between 0 and 1.

    The number of fractional entries increases with lam from none (the hard operator) to n, and it is
    what a choice of lam decides: how many entries compete, and so receive a gradient. The result has
    length 1 along the dimension and can be given as ``lam`` to ``topk_mask`` or, with
    ``magnitude=True``, to ``topk_mag``; for ``topk_sign`` take ``choose_lam(abs(x), ...)``. Where no lam
    can do it (k = 0, k = n), it is the scale of the row. At most n entries are asked for. It has no
    derivative, and the dtype in which the operators compute: float64 on the CPU.

    >>> x = torch.linspace(0.0, 1.0, 101)
    >>> y = topk_mask(x, k=10, lam=choose_lam(x, k=10, fractional=8))
    >>> int(((y > 0) & (y < 1)).sum())
    8
    """
    _check_magnitude(magnitude, two_sided)
    rows, e = Rows.of("x", x.detach() if isinstance(x, Tensor) else x, dim), check_exponent(p)
    k = k.detach() if isinstance(k, Tensor) else k
    check_k_and_lam(rows, k, 1.0)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    k_rows = rows.per_row(k)
    if x.numel() == 0:
        return rows.unflatten(torch.ones_like(k_rows))
    op = MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK
    most = None if isinstance(k, Tensor) else math.ceil(k)
    window, k_window = _window(
        rows.data.abs() if magnitude else rows.data, k_rows, fractional, most
    )
    open_rows = Rows("x", window, 1)

    margin = 64 * torch.finfo(k_rows.dtype).eps * k_rows.clamp_min(1.0)

    def enough(lam: Tensor) -> Tensor:
        solved = relax(open_rows, k_window, lam, op, e)
        counted = solved.inside
        if not magnitude:  # what is fractional in the dtype of x
            y = solved.mask()
            counted = counted & (y < 1 - margin)  # a rounding of the threshold must not decide
            y = y.to(rows.x.dtype)
            counted = counted & (y > 0) & (y < 1)
        return row_sum(counted) >= fractional

    lam = (1 + 1e-9) * _smallest(enough, _scale(window, k_window, p, magnitude))
    invalid = row_sum(~rows.data.isfinite() if magnitude else rows.data.isnan()) > 0
    invalid = invalid | ~((k_rows >= 0) & (k_rows <= rows.n))
    return rows.unflatten(torch.where(invalid, torch.nan, lam))


def _window(x: Tensor, k: Tensor, fractional: int, most: int | None) -> tuple[Tensor, Tensor]:
    """The entries within ``fractional`` ranks of the boundary, and the part of k that is theirs.

    Fewer than that many are open below the lam that is looked for: those outside are not among them.
    """
    n = x.shape[-1]
    length = min(n, 2 * fractional + 2)
    if most is None:
        s = x.nan_to_num(0.0, torch.inf, -torch.inf).sort(dim=-1, descending=True).values
    else:
        s = x.nan_to_num(0.0, torch.inf, -torch.inf).topk(min(n, most + fractional + 1)).values
    first = (k.nan_to_num(0.0).ceil() - fractional - 1).clamp(0, max(s.shape[-1] - length, 0))
    at = first.to(torch.int64) + torch.arange(min(length, s.shape[-1]), device=x.device)
    return s.gather(-1, at), k - first


def _scale(window: Tensor, k: Tensor, p: float, magnitude: bool) -> Tensor:
    """The scale of lam at the boundary, by the scaling laws.

    From the distance over the window, and not from the whole row, which may have outliers. For
    magnitude, lam g^(p-1) is such a distance, g the size at the boundary.
    """
    s, limit = window.to(k.dtype), torch.finfo(k.dtype).max
    s = s.clamp(-limit, limit)
    distance = s[:, :1] / 2 - s[:, -1:] / 2
    if magnitude:
        at = (k.nan_to_num(0.0).ceil() - 1).clamp(0, s.shape[-1] - 1).to(torch.int64)
        g = s.gather(-1, at)
        distance = distance / torch.where(g > 0, g, 1.0) ** (p - 1.0)
    least = _SMALLEST[k.dtype]
    return torch.where(distance > 0, distance, 1.0).clamp(least, 1.0 / least)


def _smallest(enough: Callable[[Tensor], Tensor], scale: Tensor) -> Tensor:
    """The smallest lam for which ``enough`` holds, row by row; ``scale`` where none was found."""
    least = _SMALLEST[scale.dtype]
    readable = is_plain(scale)
    found = missed = scale
    for factor, looking_for in ((_STEP, True), (1.0 / _STEP, False)):
        lam = scale
        for _ in range(_STEPS):  # up until it is enough, down until it is not
            holds = enough(lam)
            found, missed = torch.where(holds, lam, found), torch.where(holds, missed, lam)
            done = holds if looking_for else ~holds
            if readable and bool(done.all()):
                break
            lam = torch.where(done, lam, (lam * factor).clamp(least, 1.0 / least))
    possible = enough(found)
    lo, hi = torch.minimum(missed, found).log(), found.log()
    for _ in range(_BISECTIONS):
        middle = (lo + hi) / 2
        holds = enough(middle.exp())
        lo, hi = torch.where(holds, lo, middle), torch.where(holds, middle, hi)
    return torch.where(possible, hi.exp(), scale)
