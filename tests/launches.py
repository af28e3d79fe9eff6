"""What an operator launches on a device, found without one: tensors on the device "meta" have no
numbers, so that a read by the host is an error, and every operation on them is counted."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsetopk.torch._triton import state

# Operations that launch nothing: they make views, or ask for memory.
FREE = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "movedim",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unfold",
    "unsqueeze",
    "view",
    "_unsafe_view",
    "_reshape_alias",
}


_NONE = 2  # the reduction that leaves the losses of the rows as they are: else they are summed


class Counting(TorchDispatchMode):
    """Counts what is launched, by name, and the bytes of what is handed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        result = func(*args, **(kwargs or {}))
        if name not in FREE:
            self.counts[name] += 1
            self.bytes += sum(_size(v) for v in tree_leaves((args, kwargs, result)))
        if name == "rows_value" and args[-1] != _NONE:
            self.counts["total"] += 1
        return result


def _size(value: object) -> int:
    """In bytes, of what a tensor has in memory: an expanded one is read from a cache."""
    if not isinstance(value, torch.Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


class Holding(TorchDispatchMode):
    """The bytes that tensors made meanwhile have at the peak, without what a sort takes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self.held:
                storage = value.untyped_storage()
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
        if not func._schema.name.endswith("::sort"):
            self.peak = max(self.peak, sum(self.held.values()))
        return result


def launches(
    f: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, int], dict[str, int]]:
    """Of f on tensors of these shapes, forward, and backward in all of them, on a device that the Triton
    kernels serve."""
    forward, backward = counted(f, *shapes, dtype=dtype)
    return dict(forward.counts), dict(backward.counts)


def counted(
    f: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Counting, Counting]:
    """The same with the bytes that are moved."""
    inputs = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    with mock.patch.object(state, "is_served", lambda x: x.is_meta):
        with Counting() as forward:
            y = f(*inputs)
        g = torch.empty_like(y)
        with Counting() as backward:
            torch.autograd.grad(y, inputs, g)
    return forward, backward


@contextlib.contextmanager
def kernels_run() -> Iterator[list[str]]:
    """The names of the Triton kernels that are run meanwhile, interpreted or on a device."""
    from sparsetopk.torch._triton import launch, launch_long

    names: list[str] = []
    kernels = {
        name: kernel
        for module in (launch, launch_long)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    hooks = {name: lambda *_, name=name, **__: names.append(name) for name in kernels}
    for name, kernel in kernels.items():
        kernel.add_pre_run_hook(hooks[name])
    try:
        yield names
    finally:
        for name, kernel in kernels.items():
            kernel.pre_run_hooks.remove(hooks[name])


def main() -> None:
    """The table of docs/gpu.md: launches, and bytes in those of x, forward and backward."""
    import sparsetopk.torch as st

    labels = torch.zeros(64, dtype=torch.int64, device="meta")
    rows: dict[str, Callable[..., Any]] = {
        "topk_mask": lambda x: st.topk_mask(x, 64, 0.1),
        "topk_mask, two-sided, p = 3/2": lambda x: st.topk_mask(x, 64, 0.1, p=1.5, two_sided=True),
        "topk_mask, lam = 0": lambda x: st.topk_mask(x, 64, 0.0),
        "topk": lambda x: st.topk(x, 64, 0.1),
        "topk_mag": lambda x: st.topk_mag(x, 64, 0.1),
        "topk_sign": lambda x: st.topk_sign(x, 64, 0.1),
        "topk_select": lambda x: st.topk_select(x, 64, 0.1)[0],
        "topk_select, straight through": lambda x: st.topk_select(
            x, 64, 0.1, straight_through=True
        )[0],
        "topk_value": lambda x: st.topk_value(x, 64, 0.1),
        'topk_loss, reduction="none"': lambda x: st.topk_loss(x, labels, 5, reduction="none"),
        "topk_loss": lambda x: st.topk_loss(x, labels, 5),
        'topk_loss, completion="best"': lambda x: st.topk_loss(x, labels, 5, completion="best"),
        "soft_rank": lambda x: st.soft_rank(x),
        "soft_sort": lambda x: st.soft_sort(x),
    }
    m, n = 64, 4096
    print(f"| {m} rows of {n}, float32 | launches forward | backward | bytes forward | backward |")
    print("|---|---|---|---|---|")
    for name, f in rows.items():
        both = counted(f, (m, n))
        launched = " | ".join(str(sum(v.counts.values())) for v in both)
        moved = " | ".join(f"{v.bytes / (4 * m * n):.2g}" for v in both)
        print(f"| {name} | {launched} | {moved} |")


if __name__ == "__main__":
    main()
