"""The compiled kernels of the top-k family on contiguous CPU rows, by address."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._core import layout, native
from ..._maths.operator import Operator
from ..._maths.select import least_lam

DTYPES = {getattr(torch, name): number for name, number in layout.DTYPES.items()}
PLAIN = (Tensor, torch.nn.Parameter)


def address(t: Tensor | None, dtype: torch.dtype, count: int) -> int:
    """Where ``count`` numbers of this dtype lie one after the other in this process; 0 for None.

    Every address that the core is given comes from here: it cannot see what is there, and a tensor on
    another device or of another dtype would crash it, or be read as what it is not. (That the memory
    holds what the tensor stands for was seen before: ``arguments.is_ordinary``.)
    """
    if t is None:
        return 0
    if (
        type(t) in PLAIN
        and t.is_cpu
        and t.dtype is dtype
        and t.numel() == count
        and t.is_contiguous()
    ):
        at = t.data_ptr()
        if at or not count:
            return at
    raise ValueError(
        f"the compiled core must be given {count} numbers of {dtype} in the memory of the CPU, got a "
        f"{type(t).__name__} of {t.dtype} and shape {tuple(t.shape)} on {t.device}"
    )


def bare(t: Tensor) -> Tensor:
    """A tensor of a subclass as what it is in memory: for the operators of torch.library, which get
    subclasses that change nothing about it (those that do have been unwrapped by then)."""
    return t if type(t) in PLAIN else t.as_subclass(Tensor)


def check_not_onnx() -> None:
    """Where an exporter asks for shapes, or traces: that what is exported does not go to ONNX."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(  # torch takes NotImplementedError for a kernel that is missing
            "relaxed operators have no form in ONNX: export the hard ones, which are ordinary operators "
            "there (lam=0, or hard_eval=True in eval(); a pruned model after finalize())"
        )


def place(t: Tensor) -> int:
    """Where a tensor lies, on whatever device: to see that it was replaced, or for its device to read,
    never for the core."""
    return t.data_ptr()


class Numbers(NamedTuple):
    """k or lam in float64: where they are, how far those of two rows are apart, and what keeps them."""

    at: int
    stride: int
    keeper: Tensor

    @classmethod
    def of(cls, value: Tensor, rows: int | None) -> Numbers:
        """One for each of the rows, or (None) one for all of them."""
        return cls(address(value, torch.float64, rows or 1), 0 if rows is None else 1, value)


def has(operator: Operator) -> bool:
    """Whether there is a kernel for the operator."""
    return native is not None and operator.is_compiled


def forward(x: Tensor, k: Numbers, lam: Numbers, operator: Operator) -> tuple[Tensor, Tensor]:
    """The output, and the state (m, 2)."""
    # In float64, as k is, which takes less time than to name the dtype.
    state = k.keeper.new_empty(x.numel() // x.shape[-1], 2)
    return output(x, k, lam, operator, state), state


def output(
    x: Tensor, k: Numbers, lam: Numbers, operator: Operator, state: Tensor | None = None
) -> Tensor:
    """The output; the state is written where there is one."""
    n, count, y = x.shape[-1], x.numel(), torch.empty_like(x)
    m = count // n
    native.threshold_forward(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        address(x, x.dtype, count),
        k.at,
        k.stride,
        lam.at,
        lam.stride,
        address(state, torch.float64, 2 * m),
        address(y, x.dtype, count),
        torch.get_num_threads(),
    )
    return y


def backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    k: Numbers,
    lam: Numbers,
    operator: Operator,
    in_k: bool,
    in_lam: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The cotangents of x, and of k and lam (m) where they are wanted."""
    n = x.shape[-1]
    m = x.numel() // n
    dx = torch.empty_like(x)
    dk = state.new_empty(m) if in_k else None
    dlam = state.new_empty(m) if in_lam else None
    native.threshold_backward(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        address(x, x.dtype, m * n),
        k.at,
        k.stride,
        lam.at,
        lam.stride,
        address(state, torch.float64, 2 * m),
        address(g, x.dtype, m * n),
        address(dx, x.dtype, m * n),
        address(dk, torch.float64, m),
        address(dlam, torch.float64, m),
        torch.get_num_threads(),
    )
    return dx, dk, dlam


def loss(
    x: Tensor,
    t: Tensor | None,
    ignored: int,
    spread: bool,
    k: Numbers,
    lam: Numbers,
    operator: Operator,
    mean: bool = False,
) -> tuple[Tensor, Tensor, int, float]:
    """y - t, f(x, 1_k) - <x, t> of every row in float64, as the first of three rows (3, m), how many
    rows count, and their sum.

    ``t`` are labels (m) in int64, weights (m, n) in float64, or nothing; with ``spread``, labels are
    filled up to a sum of k, and R(t) is added. For a ``mean`` y - t is over the number of rows that
    count, unless none does. A label that is no class is reported by the number -1 - row.
    """
    n = x.shape[-1]
    m = x.numel() // n
    # The values and the states, in one: to ask for memory is a part of a short call.
    residual, found = torch.empty_like(x), k.keeper.new_empty(3, m)
    at = address(found, torch.float64, 3 * m)
    labels = t is not None and t.dtype == torch.int64
    count, total = native.threshold_loss(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        address(x, x.dtype, m * n),
        k.at,
        k.stride,
        lam.at,
        lam.stride,
        at + m * found.itemsize,
        address(t if labels else None, torch.int64, m),
        ignored,
        spread,
        address(None if labels else t, torch.float64, m * n),
        mean,
        address(residual, x.dtype, m * n),
        at,
        torch.get_num_threads(),
    )
    return residual, found, count, total


def select(y: Tensor, capacity: int) -> Tensor:
    """The indices (m, capacity) of the entries of y (m, n) with the largest magnitudes, in order."""
    m, n = y.shape
    indices = y.new_empty((m, capacity), dtype=torch.int64)
    at = address(y, y.dtype, m * n)
    slots = address(indices, torch.int64, m * capacity)
    native.select_slots(DTYPES[y.dtype], m, n, at, capacity, slots)
    return indices


def choose_lam(x: Tensor, k: Tensor, operator: Operator, fractional: int) -> Tensor:
    """lam (m, 1) of rows x (m, n) with k (m, 1) that leaves so many entries fractional."""
    m, n = x.shape
    lam = torch.empty_like(k)
    native.choose_lam(
        operator.op,
        operator.exponent,
        DTYPES[x.dtype],
        m,
        n,
        n,
        address(x, x.dtype, m * n),
        address(k, torch.float64, m),
        1,
        fractional,
        least_lam(torch, k.dtype),
        address(lam, torch.float64, m),
        torch.get_num_threads(),
    )
    return lam
