"""A device of our own, that torch takes for one that it knows nothing of: its numbers are in the memory
of the CPU, but whoever reads one on the host gets an error, as it would have to wait for a real device.

It is registered for the whole process, so that ``test_other_device.py`` has it in another one: as a
script, this prints what became of every case as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from launches import FREE

NAME = "ours"
_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "item",
    "is_nonzero",
}
# These have kernels for composites, which the fallback would not be asked about.
_COMPOSITES = ("abs", "nan_to_num", "square", "flip", "cumsum", "sgn", "sign", "clamp")
_numbers: dict[int, Tensor] = {}  # by the memory that a tensor of the device stands for
launched: Counter[str] = Counter()


class HostRead(RuntimeError):
    """Somebody has looked at a number of the device."""


def to_device(value: Tensor) -> Tensor:
    found = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    _numbers[found.untyped_storage()._cdata] = value
    return found


def from_device(value: Any) -> Any:
    """The numbers, for tests and for the operations of the device."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, Tensor) or value.device.type != NAME:
        return value
    numbers = _numbers[value.untyped_storage()._cdata]
    if numbers.dtype != value.dtype:
        numbers = numbers.contiguous().view(value.dtype)
    return numbers if numbers.shape == value.shape else numbers.reshape(value.shape)


def _check(name: str, args: Any, kwargs: Any) -> None:
    """That nothing is read by the host."""
    to = kwargs.get("device")
    if name in _READS or (name == "_to_copy" and to is not None and to.type == "cpu"):
        raise HostRead(name)
    if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
        raise HostRead("an index of booleans")


def _copy(source: Tensor, target: Tensor) -> Tensor:
    if target.device.type != NAME:
        raise HostRead("a copy to the host")
    from_device(target).copy_(from_device(source))
    return target


def _operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    schema = op._schema
    name = schema.name.split("::")[1]
    _check(name, args, kwargs)
    if name not in FREE:
        launched[name] += 1
    if name in ("_copy_from", "_copy_from_and_resize"):
        return _copy(args[0], args[1])
    if name == "copy_":
        return _copy(args[1], args[0])
    here, options = tree_map(from_device, (args, kwargs))
    options.pop("pin_memory", None)
    if name in ("view", "_reshape_alias", "_unsafe_view") and not isinstance(here[1], torch.dtype):
        return to_device(here[0].reshape(here[1]))
    if name == "as_strided":
        here = (here[0].contiguous(), *here[1:])
    found = op(*(_as_tensor(v, a) for v, a in zip(here, schema.arguments, strict=False)), **options)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if written:
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        outs = [given[name] for name in written]
        return outs[0] if len(schema.returns) == 1 else tuple(outs)
    found = tree_map(lambda v: to_device(v) if isinstance(v, Tensor) else v, found)
    return tuple(found) if isinstance(found, tuple) else found


def _as_tensor(value: Any, argument: Any) -> Any:
    """A number that came where a tensor is expected."""
    if isinstance(value, (int, float)) and str(argument.type) == "Tensor":
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return value


def _arange(*args: Any, dtype: Any = None, **_: Any) -> Tensor:
    launched["arange"] += 1
    return to_device(torch.arange(*args, dtype=dtype))


def register() -> list[torch.library.Library]:
    """What is returned must be kept."""
    _setup_privateuseone_for_python_backend(NAME)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_operation, "PrivateUse1")
    for name in _COMPOSITES:
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, lambda *a, op=op, **k: _operation(op, *a, **k), "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):
        aten.impl(name, _arange, "PrivateUse1")
    return [everything, aten]


def tensors(value: Any) -> list[Tensor]:
    return [v for v in tree_leaves(value) if isinstance(v, Tensor)]


def compare(f: Callable[[Tensor], Any], x: Tensor) -> dict[str, Any]:
    """f on the device beside f on the CPU: errors relative to the largest number, and launches."""
    on_cpu, on_device = x.clone().requires_grad_(), to_device(x.clone()).requires_grad_()
    expected = tensors(f(on_cpu))
    launched.clear()
    try:
        found = tensors(f(on_device))
        forward = sum(launched.values())
        error = max(map(_error, expected, found))
        pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a.requires_grad]
        if not pairs:
            return {"error": error, "forward": forward, "backward": 0}
        g = [torch.linspace(-1, 2, a.numel(), dtype=a.dtype).reshape(a.shape) for a, _ in pairs]
        wanted = torch.autograd.grad([a for a, _ in pairs], on_cpu, g)
        g_device = [to_device(v) for v in g]
        launched.clear()
        got = torch.autograd.grad([b for _, b in pairs], on_device, g_device)
        backward = sum(launched.values())
    except Exception as e:
        if "-v" in sys.argv:
            traceback.print_exc()
        return {"failed": f"{type(e).__name__}: {e}"[:300]}
    return {
        "error": max(error, _error(wanted[0], got[0])),
        "forward": forward,
        "backward": backward,
    }


def _error(expected: Tensor, found: Tensor) -> float:
    a, b = expected.detach().double(), from_device(found.detach()).double()
    same = (a == b) | (a.isnan() & b.isnan())
    scale = a[a.isfinite()].abs().amax().clamp_min(1e-3) if a.isfinite().any() else 1.0
    return float(torch.where(same, 0.0, (a - b).abs() / scale).max()) if a.numel() else 0.0


def cases() -> dict[str, tuple[Callable[[Tensor], Any], Tensor]]:
    import sparsetopk.torch as st
    from sparsetopk.torch._functions import losses
    from sparsetopk.torch._rows import arguments

    for module in (arguments, losses):  # the memory of these tensors is elsewhere
        module.check_dense = lambda *_: None
    torch.manual_seed(0)
    x = torch.randn(8, 200)
    labels = torch.arange(8)

    def like(x: Tensor, value: Tensor) -> Tensor:
        return value if x.is_cpu else to_device(value)

    special = x.clone()
    special[0, :3], special[1, 5:], special[2, 7] = torch.inf, -torch.inf, torch.nan
    k, lam = torch.linspace(0, 200, 8)[:, None], torch.tensor([0.0, 0.1] * 4)[:, None]
    found: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        f"topk_mask p={p:.2f} {two_sided}": (
            lambda x, p=p, t=two_sided: st.topk_mask(x, 10, 0.1, p=p, two_sided=t),
            x,
        )
        for p in (2.0, 1.5, 4 / 3, 1.2)
        for two_sided in (False, True)
    }
    for p in (2.0, 1.5, 1.2):
        found[f"topk_mag p={p}"] = (lambda x, p=p: st.topk_mag(x, 10.5, 0.1, p=p), x)
    found |= {
        "topk_mask float64": (lambda x: st.topk_mask(x, 10, 0.1), x.double()),
        "topk_mask bfloat16": (lambda x: st.topk_mask(x, 10, 0.1), x.bfloat16()),
        "topk_mask special": (lambda x: st.topk_mask(x, 2, 0.1), special),
        "topk_mask lam=0": (lambda x: st.topk_mask(x, 10, 0.0), x),
        "topk_mask dim=0": (lambda x: st.topk_mask(x, 3, 0.1, dim=0), x),
        "topk_mask tensors": (lambda x: st.topk_mask(x, like(x, k), like(x, lam)), x),
        "topk_mask bad k": (lambda x: st.topk_mask(like(x, special), like(x, k), 0.1) + 0 * x, x),
        "topk_mag not debiased": (lambda x: st.topk_mag(x, 10, 0.1, debias=False), x),
        "topk_sign": (lambda x: st.topk_sign(x, 10, 0.1), x),
        "topk": (lambda x: st.topk(x, 10, 0.1), x),
        "straight through": (lambda x: st.topk_mask(x, 10, 0.1, straight_through=True), x),
        "topk_select": (lambda x: st.topk_select(x, 10, 0.1), x),
        "topk_value": (lambda x: st.topk_value(x, 10, 0.1), x),
        "topk_loss": (lambda x: st.topk_loss(x, like(x, labels), 5), x),
        "topk_loss best": (lambda x: st.topk_loss(x, like(x, labels), 5, completion="best"), x),
        "ExpertChoice": (lambda x: tuple(st.nn.ExpertChoice(capacity_factor=1.0)(x)[:4]), x),
        "TokenChoice": (lambda x: st.moe.token_choice(x, 2, 0.3, capacity=3).weights, x),
        "topk_mask p=3": (lambda x: st.topk_mask(x, 10, 0.1, p=3.0), x[:2]),
        "topk_mag p=3": (lambda x: st.topk_mag(x, 10.5, 0.1, p=3.0), x),
        "topk_mask p=3 True": (lambda x: st.topk_mask(x, 10, 0.1, p=3.0, two_sided=True), x),
        "topk_select straight through": (
            lambda x: st.topk_select(x, 10, 0.1, straight_through=True).values,
            x,
        ),
        "topk_loss smoothed": (
            lambda x: st.topk_loss(x, like(x, labels), 5, label_smoothing=0.1, reduction="sum"),
            x,
        ),
        "topk_mask p=1.05": (lambda x: st.topk_mask(x, 10, 0.1, p=1.05), x),
        "choose_lam": (lambda x: st.choose_lam(x.detach(), 10) + 0 * x.sum(), x[:2]),
    }
    return found


def main() -> None:
    kept = register()
    found = {name: compare(f, x) for name, (f, x) in cases().items()}
    json.dump(found, sys.stdout)
    del kept


if __name__ == "__main__":
    main()
