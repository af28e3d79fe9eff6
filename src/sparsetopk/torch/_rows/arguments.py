"""Argument checks for tensors, and the way between a tensor and rows; the style is that of NumPy's.

A value is looked at only where that needs no waiting: Python numbers, and plain tensors on the CPU.
Elsewhere a bad k or lam makes its rows NaN (the solvers see to it).
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..._checks import check_broadcast, check_flags, check_per_row
from .._fused.kernels import PLAIN
from .._private import (
    dispatch_modes,
    has_storage,
    in_forward_mode,
    is_tracing,
    is_transforming,
    is_zerotensor,
)

Number = float | Tensor
"""k and lam: one for all rows, or a tensor that broadcasts with length 1 along the dimension."""

Dim = int | Sequence[int] | None
"""A dimension, or several, or all (None), which then are one."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_NUMBERS = (float, int)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def is_plain(*values: object) -> bool:
    """Whether tensors among the values hold numbers that can be read at once.

    That is: on the CPU, and neither traced, nor transformed by ``torch.func``, nor in forward mode,
    nor with something still to be done to what is in memory.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    if is_transforming() or in_forward_mode() or dispatch_modes():
        return False
    for value in values:  # a loop, as this is part of every call; so is the short way for numbers
        if type(value) is float or type(value) is int:
            continue
        if isinstance(value, Tensor) and not (value.is_cpu and is_ordinary(value)):
            return False
    return True


def is_simple(x: object, k: object, lam: object, dim: object) -> bool:
    """Whether the arguments are what they are in most calls: rows behind each other in the memory of the
    CPU, and numbers. Then no check of them is left, and they are plain; each property is asked for once,
    as these questions are half of a short call."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        return False
    if is_tracing() or is_transforming() or in_forward_mode() or dispatch_modes():
        return False
    if type(k) not in _NUMBERS or type(lam) not in _NUMBERS or type(dim) is not int or dim != -1:
        return False
    x = cast(Tensor, x)
    if not (x.is_cpu and has_storage(x)) or x.is_nested or x.is_neg() or is_zerotensor(x):
        return False
    size = x.nbytes
    if not (size and x.is_contiguous() and x.untyped_storage().nbytes() == size and x.ndim):
        return False
    return x.dtype in _FLOATS and 0 <= k <= x.shape[-1] and 0 < lam < math.inf  # type: ignore[operator]


def is_simple_labels(t: object, x: Tensor) -> bool:
    """Whether these are the labels of rows of an x that ``is_simple``: int64 numbers behind each other,
    where they can be read at once."""
    if type(t) is not Tensor or t.dtype is not torch.int64 or not t.is_cpu or t.is_nested:
        return False
    if t.ndim != x.ndim - 1 or t.shape != x.shape[:-1]:
        return False
    if not (is_ordinary(t) and t.is_contiguous()):
        return False
    return bool(t.untyped_storage().nbytes() >= t.nbytes + t.itemsize * t.storage_offset())


def is_transformed() -> bool:
    """Whether ``torch.func`` is at work, or forward mode: more may be asked for than a backward."""
    return is_transforming() or in_forward_mode()


def is_ordinary(value: Tensor) -> bool:
    """Whether the memory of a tensor, on whatever device, holds what it stands for: it does not for
    subclasses, tensors that are batched, negative views, and zeros that were never written."""
    return (
        type(value) in PLAIN
        and has_storage(value)
        and not value.is_neg()
        and not is_zerotensor(value)
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 on the CPU; elsewhere it is slow, or not there, unless it was asked for."""
    if x.dtype == torch.float64 or x.device.type in ("cpu", "meta"):
        return torch.float64
    return torch.float32


def show(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of dtype {_name(value.dtype)} and shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {shape}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dense(name: str, value: Tensor) -> None:
    """That it is strided, and that its memory, where it is ours to look at, was not given back."""
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if type(value) in PLAIN and not torch.compiler.is_compiling() and has_storage(value):
        held = value.untyped_storage().nbytes()
        as_it_should = held == value.nbytes and value.is_contiguous()  # the common case, and fast
        if not as_it_should and held < _needed(value) and not is_zerotensor(value):
            raise ValueError(
                f"{name} must have memory for its entries, got a tensor whose storage has {held} bytes"
            )


def _needed(value: Tensor) -> int:
    """How many bytes there must be up to the last entry of a tensor."""
    count = value.numel()
    if count and not value.is_contiguous():
        count = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int(value.storage_offset() + count) * value.element_size() if count else 0


def without_entries(x: Tensor, *others: Number) -> Tensor:
    """x, which is empty, as a function of all that it may be differentiated in; others broadcast."""
    y = x.clone()
    for v in others:
        if isinstance(v, Tensor) and v.is_floating_point():
            y = y + v.to(x)
    return y


def check_float_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {show(value)}")
    check_dense(name, value)
    if value.dtype not in _FLOATS:
        raise TypeError(
            f"{name} must be a tensor of dtype float16, bfloat16, float32 or float64, "
            f"got {_name(value.dtype)}"
        )
    return value


def candidates(x: Tensor, where: Tensor | None, even: bool, largest: bool = True) -> Tensor:
    """x, with something that is never selected where ``where`` is False."""
    if where is None:
        return x
    check_where(where, check_float_tensor("x", x))
    return torch.where(where, x, 0.0 if even else -torch.inf if largest else torch.inf)


def check_where(where: object, x: Tensor, name: str = "where") -> Tensor:
    are_booleans = isinstance(where, Tensor) and where.dtype == torch.bool
    check_flags(name, are_booleans, show(where))
    flags = cast(Tensor, where)
    check_broadcast(name, tuple(flags.shape), tuple(x.shape))
    return flags


def check_dim(name: str, x: Tensor, dim: object) -> int:
    """The dimension, counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    ndim = x.ndim
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"dim must be in [{-ndim}, {ndim}) for {name} of shape {tuple(x.shape)}, got {dim}"
            if ndim
            else f"{name} must have at least one dimension, got a scalar"
        )
    return dim % ndim


def check_number(name: str, value: object) -> None:
    """That it is a real number, or a tensor of them."""
    if type(value) is int or type(value) is float:
        return
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name} must be a real number or a tensor of them, got {show(value)}")
    elif isinstance(value, bool) or not isinstance(
        value, (float, int, numbers.Real, torch.SymInt, torch.SymFloat)
    ):
        raise TypeError(f"{name} must be a real number or a tensor of them, got {show(value)}")


def check_k(k: Number, n: int, readable: bool) -> None:
    if isinstance(k, Tensor):
        if readable:  # in a dtype that has n: int8 has no 144
            k = k.detach().to(torch.float64)
        if readable and not bool(((k >= 0) & (k <= n)).all()):
            bad = k[~((k >= 0) & (k <= n))].flatten()[0].item()
            raise ValueError(f"k must be in [0, n] with n={n}, got {bad}")
    elif not 0 <= k <= n:
        raise ValueError(f"k must be in [0, n] with n={n}, got {k}")


def check_lam(lam: Number, readable: bool) -> None:
    if isinstance(lam, Tensor):
        if readable and lam.requires_grad:
            lam = lam.detach()
        if readable and not bool(((lam >= 0) & (lam < math.inf)).all()):
            bad = lam[~((lam >= 0) & (lam < math.inf))].flatten()[0].item()
            raise ValueError(f"lam must be finite and at least 0, got {bad}")
    elif not 0 <= lam < math.inf:
        raise ValueError(f"lam must be finite and at least 0, got {lam}")


class Rows:
    """A tensor as rows (m, n) in its own dtype, and the way back.

    An ordinary class: before torch 2.13 the compiler does not read a named tuple that has methods.
    """

    def __init__(self, name: str, x: Tensor, dim: int, simple: bool = False) -> None:
        self.name = name  # of the argument, for errors
        self.x = x  # as it came
        self.dim = dim
        self.simple = simple  # whether ``is_simple`` has said so

    @classmethod
    def of(cls, name: str, value: object, dim: Dim) -> Rows:
        x = check_float_tensor(name, value)
        return cls(name, x, check_dim(name, x, dim))

    @property
    def n(self) -> int:
        return self.x.shape[self.dim]

    @property
    def leading(self) -> tuple[int, ...]:
        shape = self.x.shape
        return (*shape[: self.dim], *shape[self.dim + 1 :])

    @property
    def _per_row(self) -> tuple[int, ...]:
        shape = self.x.shape
        return (*shape[: self.dim], 1, *shape[self.dim + 1 :])

    @property
    def data(self) -> Tensor:
        """(m, n)."""
        return self.x.movedim(self.dim, -1).reshape(math.prod(self.leading), self.n)

    def tangent(self, value: Tensor) -> Tensor:
        """A tensor of the same shape, as rows."""
        return value.movedim(self.dim, -1).reshape(math.prod(self.leading), self.n)

    def unflatten(self, rows: Tensor) -> Tensor:
        """(m, any length) back to the input's shape, with that length along the dimension."""
        return rows.reshape((*self.leading, rows.shape[-1])).movedim(-1, self.dim)

    def restore(self, rows: Tensor) -> Tensor:
        """As ``unflatten``, in the input's dtype."""
        return self.unflatten(rows).to(self.x.dtype)

    def restore_scalars(self, rows: Tensor) -> Tensor:
        """(m, 1) back to the input's shape without the dimension."""
        return rows.reshape(self.leading).to(self.x.dtype)

    def check_shape(self, name: str, value: Number) -> None:
        """That a tensor broadcasts with length 1 along the dimension."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return
        check_per_row(name, value.shape, self._per_row, self.name, f"dim {self.dim}")

    def per_row(self, value: Number, dtype: torch.dtype | None = None) -> Tensor:
        """A checked k or lam as (m, 1), by default in the dtype of the computation."""
        dtype, m = dtype or compute_dtype(self.x), math.prod(self.leading)
        if not isinstance(value, Tensor):
            return torch.full((1, 1), value, dtype=dtype, device=self.x.device).expand(m, 1)
        value = value.to(dtype=dtype, device=self.x.device)
        return value.broadcast_to(self._per_row).reshape(m, 1)

    def sum_to(self, per_row: Tensor | None, like: Number) -> Tensor | None:
        """Undo ``per_row`` for a cotangent: sum over what was broadcast from ``like``."""
        if per_row is None or not isinstance(like, Tensor):
            return None
        if like.numel() == 1:
            return per_row.sum().reshape(like.shape).to(like.dtype)
        return per_row.reshape(self._per_row).sum_to_size(like.shape).to(like.dtype)


def check_k_and_lam(rows: Rows, k: Number, lam: Number) -> None:
    plain = (type(k) is int or type(k) is float) and (type(lam) is float or type(lam) is int)
    if plain and 0 <= k <= rows.n and 0 <= lam < math.inf:  # most calls, which should be short
        return
    for name, value in (("k", k), ("lam", lam)):
        if type(value) is not float and type(value) is not int:
            check_number(name, value)
            rows.check_shape(name, value)
    check_k(k, rows.n, isinstance(k, Tensor) and is_plain(k))
    check_lam(lam, isinstance(lam, Tensor) and is_plain(lam))


class Merged:
    """Dimensions of x as one, the last, in their order."""

    def __init__(self, x: object, dim: Dim) -> None:
        whole = check_float_tensor("x", x)
        if hasattr(whole, "placements"):
            raise ValueError(f"dim must be an int for a DTensor, got {dim!r}")
        if dim is not None and not isinstance(dim, (tuple, list)):
            raise TypeError(f"dim must be an int, a tuple of ints or None, got {dim!r}")
        given = range(whole.ndim) if dim is None else [check_dim("x", whole, d) for d in dim]
        if len(set(given)) != len(given) or (dim is not None and not given):
            raise ValueError(f"dim must name dimensions, each of them once, got {dim!r}")
        if not whole.ndim:
            raise ValueError("x must have at least one dimension, got a scalar")
        self.dims, self.shape, self._whole = sorted(given), whole.shape, whole
        self.others = [d for d in range(whole.ndim) if d not in self.dims]
        self.x = self._merge(whole)

    def _merge(self, value: Tensor) -> Tensor:
        return value.permute(*self.others, *self.dims).flatten(len(self.others))

    def number(self, value: Any) -> Any:
        """k or lam, of length 1 along the dimensions."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        whole = value[(None,) * max(0, len(self.shape) - value.ndim)]
        if whole.ndim > len(self.shape) or any(whole.shape[d] != 1 for d in self.dims):
            raise ValueError(
                f"k and lam must be numbers or broadcast to {tuple(self.shape)} with length 1 along "
                f"dims {tuple(self.dims)}, got shape {tuple(value.shape)}"
            )
        return self._merge(whole)

    def flags(self, where: Tensor) -> Tensor:
        return self._merge(check_where(where, self._whole).broadcast_to(self.shape))

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    def back(self, found: Any) -> Any:
        """An output with the dimensions as they were: all entries, or one number for them. What has
        slots keeps them last, and what has none is as it is."""
        if not isinstance(found, Tensor) or found.ndim != self.x.ndim:
            return found
        lengths = [self.shape[d] if found.shape[-1] == self.n else 1 for d in self.dims]
        order = [*self.others, *self.dims]
        places = [order.index(d) for d in range(len(order))]
        return found.reshape(*found.shape[:-1], *lengths).permute(*places)


def entries(x: Tensor, dim: Dim) -> int:
    """How many a row has."""
    return x.shape[dim] if isinstance(dim, int) else Merged(x, dim).n


def over_dims(f: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function of x, k and lam, which has one ``dim``, take several or None."""

    @functools.wraps(f)
    def wrapped(x: Any, *numbers: Any, dim: Any = -1, **options: Any) -> Any:
        one: Any = f
        if isinstance(dim, int):
            return one(x, *numbers, dim=dim, **options)
        merged = Merged(x, dim)
        numbers = tuple(merged.number(value) for value in numbers)
        for name in ("k", "lam"):
            if name in options:
                options[name] = merged.number(options[name])
        if options.get("where") is not None:
            options["where"] = merged.flags(options["where"])
        return merged.back(one(merged.x, *numbers, dim=-1, **options))

    return cast(Callable[_Arguments, _Result], wrapped)
