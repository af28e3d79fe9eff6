"""From tensors to launches: which block, how many rows and warps a program has, and the numbers k and
lam, which are tensors or are handed over by value."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._maths.isotonic import PHI_NAMES
from ..._maths.operator import MAGNITUDE, MASK, SIGN, Operator
from . import compute_dtype, is_long
from .backward import backward_kernel
from .forward import forward_kernel
from .lam import lam_kernel
from .pav import merge_kernel, pav_kernel
from .select import select_backward_kernel, select_kernel, slots_kernel
from .state import meta
from .value import total_kernel, value_backward_kernel, value_kernel

Number = float | Tensor

# How many entries a program has if rows are short, and a thread.
_ENTRIES, _PER_THREAD = 2048, 16
_LANES = 32  # rows of a program that has a row to every lane


class Shape(NamedTuple):
    """What a program takes."""

    block: int
    rows: int
    warps: int

    @classmethod
    def of(cls, n: int, operator: Operator, dtype: torch.dtype, light: bool = False) -> Shape:
        """For rows of n numbers that are computed with in this dtype; ``light`` kernels have room for as
        many entries in a thread whatever S takes."""
        block = max(16, triton.next_power_of_2(n))
        rows = max(1, _ENTRIES // block)
        light = dtype == torch.float32 and (light or not _needs_a_loop(operator))
        threads = block * rows // (_PER_THREAD if light else _PER_THREAD // 2)
        return cls(block, rows, min(32, max(4, threads // 32)))


def _needs_a_loop(operator: Operator) -> bool:
    """Whether S has no closed form: more registers."""
    return operator.exponent not in (1.0, 2.0, 3.0)


def is_light(operator: Operator) -> bool:
    """Whether kernels that solve are: S takes powers, and no loop, and what an entry that is
    selected whole becomes takes a loop of products at most."""
    by_products = operator.op == MAGNITUDE and operator.exponent.is_integer()
    return operator.op in (MASK, SIGN) or by_products


class Given(NamedTuple):
    """k or lam as a kernel takes it: a pointer and a stride, or the bits of a float64."""

    pointer: Tensor
    stride: int
    bits: int
    is_tensor: bool

    @classmethod
    def of(cls, value: Number, instead: Tensor) -> Given:
        if isinstance(value, Tensor):
            return cls(value, 0 if value.numel() == 1 else 1, 0, True)
        return cls(instead, 0, _bits(value), False)


def device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _bits(value: float) -> int:
    """Those of a float64: what is handed over as a number would be rounded to float32."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _settings(
    x: Tensor, k: Number, lam: Number, operator: Operator, state: Tensor, light: bool = False
) -> dict[str, Any]:
    """What all kernels are launched with for rows x (m, n); for ``light`` see ``Shape``."""
    mixed, dtype = isinstance(lam, Tensor), compute_dtype(x.dtype, operator)
    of_k, of_lam = Given.of(k, state), Given.of(lam, state)
    shape = Shape.of(x.shape[1], operator, dtype, light)
    return {
        "x_ptr": x,
        "k_ptr": of_k.pointer,
        "lam_ptr": of_lam.pointer,
        "state_ptr": state,
        "m": x.shape[0],
        "n": x.shape[1],
        "k_stride": of_k.stride,
        "lam_stride": of_lam.stride,
        "k_bits": of_k.bits,
        "lam_bits": of_lam.bits,
        "K_TENSOR": of_k.is_tensor,
        "LAM_TENSOR": of_lam.is_tensor,
        "OP": operator.op,
        "E": operator.exponent,
        "RELAXED": mixed or lam != 0,
        "HARD": mixed or lam == 0,
        "D": tl.float64 if dtype == torch.float64 else tl.float32,
        "ROWS": shape.rows,
        "BLOCK": shape.block,
        "num_warps": shape.warps,
    }


def _run(kernel: Any, settings: dict[str, Any], **more: Any) -> None:
    """Over all rows, so many a program."""
    x = settings["x_ptr"]
    with device_of(x):
        kernel[(triton.cdiv(x.shape[0], settings["ROWS"]),)](**settings, **more)


def forward(
    x: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    *,
    times: bool = False,
    write: bool = True,
    passes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the state (m, 2), or (m, 3) of long rows, of contiguous rows x (m, n); y is empty
    unless it is to be written.

    k and lam are numbers, or contiguous tensors of one number or of m; ``times`` multiplies a mask by
    x, and ``passes`` (m) is told how often a row was looked at.
    """
    y = torch.empty_like(x if write else x[:0])
    if is_long(x, operator):
        from . import launch_long

        at = launch_long.Place.of(x)
        return y, launch_long.forward(at, k, lam, operator, y if write else None, times=times)
    state = meta(x, operator)
    _run(
        forward_kernel,
        _settings(x, k, lam, operator, state, is_light(operator)),
        y_ptr=y,
        passes_ptr=state if passes is None else passes,
        DEBIAS=operator.debias,
        TIMES=times,
        WRITE=write,
        COUNT=passes is not None,
    )
    return y, state


def backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    *,
    times: bool = False,
    in_k: bool = False,
    in_lam: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of x (m, n), and of k and lam (m), which are empty where they are not wanted."""
    dx = torch.empty_like(x)
    if is_long(x, operator):
        from . import launch_long

        at, wanted = launch_long.Place.of(x), {"in_k": in_k, "in_lam": in_lam}
        return dx, *launch_long.backward(at, g, state, k, lam, operator, dx, times=times, **wanted)
    dk, dlam = (state.new_empty(len(x) if wanted else 0) for wanted in (in_k, in_lam))
    _run(
        backward_kernel,
        _settings(x, k, lam, operator, state, light=True),
        g_ptr=g,
        dx_ptr=dx,
        dk_ptr=dk,
        dlam_ptr=dlam,
        DEBIAS=operator.debias,
        TIMES=times,
        IN_K=in_k,
        IN_LAM=in_lam,
    )
    return dx, dk, dlam


class Loss(NamedTuple):
    """What is subtracted from the value of every row, and how rows are put together; all of it without
    a derivative. The numbers are those of ``value.py``."""

    t: Tensor | None = None  # labels (m) in int64, or weights (m, n)
    weight: Tensor | None = None  # of the classes (n)
    completion: int = 0
    smoothing: float = 0.0
    ignored: int = 0
    reduction: int = 2

    def settings(self, instead: Tensor) -> dict[str, Any]:
        kind = 0 if self.t is None else 1 if self.t.dtype == torch.int64 else 2
        return {
            "t_ptr": instead if self.t is None else self.t,
            "weight_ptr": instead if self.weight is None else self.weight,
            "ignored": self.ignored,
            "smoothing_bits": _bits(self.smoothing),
            "KIND": kind,
            "COMPLETION": self.completion,
            "SMOOTHED": self.smoothing != 0,
            "WEIGHTED": self.weight is not None,
            "REDUCTION": self.reduction,
        }

    @property
    def problems(self) -> int:
        """How many are solved for a row."""
        return 2 if self.completion == 2 else 1


def value(
    x: Tensor, k: Number, lam: Number, operator: Operator, loss: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """The values or losses (m) of rows x (m, n), or their sum or mean; the state; and the factor that
    the mean has."""
    state = meta(x, operator, loss.problems)
    settings = _settings(x, k, lam, operator, state, is_light(operator)) | loss.settings(state)
    reduced = loss.reduction != 2
    programs = triton.cdiv(x.shape[0], settings["ROWS"])
    result = x.new_empty(() if reduced else x.shape[0])
    parts, scale = state.new_empty((programs, 2)), state.new_empty(1 if reduced else 0)
    _run(value_kernel, settings, value_ptr=result, part_ptr=parts)
    if reduced:
        with device_of(x):
            total_kernel[(1,)](parts, result, scale, programs, loss.reduction, BLOCK=1024)
    return result, state, scale


def value_backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    scale: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    loss: Loss,
    *,
    in_k: bool = False,
    in_lam: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of x (m, n), and of k and lam (m), for that of what ``value`` returned."""
    dx = torch.empty_like(x)
    dk, dlam = (state.new_empty(len(x) if wanted else 0) for wanted in (in_k, in_lam))
    _run(
        value_backward_kernel,
        _settings(x, k, lam, operator, state, is_light(operator)) | loss.settings(state),
        g_ptr=g,
        scale_ptr=scale,
        dx_ptr=dx,
        dk_ptr=dk,
        dlam_ptr=dlam,
        g_stride=0 if g.ndim == 0 else g.stride(0),
        IN_K=in_k,
        IN_LAM=in_lam,
    )
    return dx, dk, dlam


def select(
    x: Tensor, k: Number, lam: Number, operator: Operator, capacity: int, straight: bool
) -> tuple[Tensor, ...]:
    """Values and indices (m, capacity) of the slots, what is dropped (m), which slots are of the hard
    selection; the state, and what else the backward must know."""
    slots = len(x), capacity
    state = meta(x, operator)
    values, dropped, ends = x.new_empty(slots), x.new_empty(len(x)), state.new_empty((len(x), 3))
    indices = x.new_empty(slots, dtype=torch.int64)
    chosen = x.new_empty(slots if straight else (0,), dtype=torch.bool)
    _run(
        select_kernel,
        _settings(x, k, lam, operator, state, is_light(operator)),
        value_ptr=values,
        index_ptr=indices,
        chosen_ptr=chosen.view(torch.uint8),
        dropped_ptr=dropped,
        ends_ptr=ends,
        capacity=capacity,
        DEBIAS=operator.debias,
        STRAIGHT=straight,
    )
    return values, indices, dropped, chosen, state, ends


def select_backward(
    x: Tensor,
    g: Tensor | None,
    g_dropped: Tensor | None,
    state: Tensor,
    ends: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    capacity: int,
    straight: bool,
    *,
    in_k: bool = False,
    in_lam: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of x (m, n), and of k and lam (m), for those of slots and of what is dropped."""
    dx = torch.empty_like(x)
    dk, dlam = (state.new_empty(len(x) if wanted else 0) for wanted in (in_k, in_lam))
    _run(
        select_backward_kernel,
        _settings(x, k, lam, operator, state, light=True),
        g_ptr=state if g is None else g,
        g_dropped_ptr=state if g_dropped is None else g_dropped,
        ends_ptr=ends,
        dx_ptr=dx,
        dk_ptr=dk,
        dlam_ptr=dlam,
        capacity=capacity,
        DEBIAS=operator.debias,
        STRAIGHT=straight,
        IN_SLOTS=g is not None,
        IN_DROPPED=g_dropped is not None,
        IN_K=in_k,
        IN_LAM=in_lam,
    )
    return dx, dk, dlam


def slots(y: Tensor, capacity: int) -> Tensor:
    """The indices (m, capacity) of the entries of y (m, n) that are largest in magnitude, in order."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    shape = Shape.of(y.shape[1], Operator(MASK, 1.0), dtype)
    indices = y.new_empty((len(y), capacity), dtype=torch.int64)
    with device_of(y):
        slots_kernel[(triton.cdiv(len(y), shape.rows),)](
            y,
            indices,
            *y.shape,
            capacity,
            D=tl.float64 if dtype == torch.float64 else tl.float32,
            ROWS=shape.rows,
            BLOCK=shape.block,
            num_warps=shape.warps,
        )
    return indices


def pav(
    s: Tensor, order: Tensor, w: Tensor, w_order: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    """d, block and paired of ``_solvers.pav.solve``, in the order of x, for sorted rows."""
    m, n = s.shape
    entries = s.new_empty(s.shape, dtype=torch.int32)
    d, block, paired = lam.new_empty(s.shape), torch.empty_like(order), torch.empty_like(order)
    given, found = (s, w, lam, order, w_order, entries), (d, block, paired)
    sizes, grid = (m, n, n if len(w) > 1 else 0), (triton.cdiv(m, _LANES),)
    settings = {"PHI": phi, "LANES": _LANES, "num_warps": 1}
    with device_of(s):
        if exponent == 1.0 and PHI_NAMES[phi] != "exp":
            stack = s.new_empty((m, n, 4), dtype=torch.float64)
            pav_kernel[grid](*given, stack, *found, *sizes, **settings)
        else:
            blocks = s.new_empty((2, m, n), dtype=torch.float64)
            merge_kernel[grid](*given, *blocks, *found, *sizes, E=exponent, **settings)
    return d, block, paired


def choose_lam(x: Tensor, k: Number, operator: Operator, wanted: int) -> Tensor:
    """The smallest lam (m) that leaves so many entries of rows x (m, n) fractional."""
    lam = x.new_empty(len(x), dtype=compute_dtype(x.dtype, operator))
    settings = _settings(x, k, 1.0, operator, lam, is_light(operator))
    only = {key: v for key, v in settings.items() if key in lam_kernel.arg_names}
    _run(lam_kernel, only | {"lam_ptr": lam, "num_warps": settings["num_warps"]}, wanted=wanted)
    return lam
