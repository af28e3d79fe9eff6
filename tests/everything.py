"""Every operator and its derivatives on the case table, as named arrays, for whatever core is installed.

    python everything.py out.npz [without-core]

With ``without-core`` the compiled core is hidden first. Prints what the import warns of, and the file
that the package came from.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np


def topk_family(st: Any) -> dict[str, np.ndarray]:
    from cases import CASES, ROWS

    x, k, lam = ROWS
    k = k - 1 / 64  # at integers the derivative in k may have two values
    dy = np.tile(np.cos(np.arange(x.shape[1])), (len(x), 1))
    found = {}
    for case in CASES:
        found[f"{case}"] = case.function(st)(x, k, lam)
        found[f"{case} hard"] = case.function(st)(x, k, 0.0)
        for part, value in zip("xkl", case.function(st, "_vjp")(x, k, lam, dy=dy), strict=True):
            found[f"{case} d{part}"] = value
    return found


def others(st: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 20)), np.sort(rng.normal(size=20))[::-1].copy()
    found: dict[str, Any] = {"value": st.topk_value(x, 3, 0.5)}
    for p in (2.0, 1.5, 3.0):
        found[f"soft_sort {p}"] = st.soft_sort(x, 0.5, p=p)
        found[f"soft_rank {p}"] = st.soft_rank(x, 0.5, p=p)
        found[f"permutahedron {p}"] = st.permutahedron(x, w, 0.5, p=p)
    selection = st.topk_select(x, 3, 0.5)
    found["select"], found["selected"] = selection.values, selection.indices
    found["lam"] = st.choose_lam(x, 3)
    found["loss"] = st.topk_loss(x, np.array([1, 2, 3]), 3)
    found["loss dx"] = st.topk_loss_vjp(x, np.array([1, 2, 3]), 3, dy=2.0)
    for name in ("argsort", "sort", "rank"):
        found[name] = getattr(st, name)(x)
    return found


def sorting_derivatives() -> dict[str, np.ndarray]:
    """Gradients of the sorting operators, which the two front-ends spell differently."""
    import torch

    import sparsetopk
    import sparsetopk.torch as st

    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, 3, 20))
    found = {}
    for name in ("soft_sort", "soft_rank"):
        for p in (2.0, 1.5, 3.0):
            cotangents = getattr(sparsetopk, f"{name}_vjp")(x, 0.5, dy=dy, p=p)
            at = torch.tensor(x, requires_grad=True)
            getattr(st, name)(at, 0.5, p=p).backward(torch.tensor(dy))
            found[f"numpy {name} {p}"], found[f"torch {name} {p}"] = cotangents[0], at.grad.numpy()
    return found


def on_jax() -> dict[str, np.ndarray]:
    """One call of each solver: what JAX does without the core has tests of its own (test_jax.py)."""
    import jax

    import sparsetopk.jax as st

    jax.config.update("jax_enable_x64", True)
    x = np.random.default_rng(2).normal(size=(3, 20))
    return {"jax topk_mag": st.topk_mag(x, 3, 0.5), "jax soft_rank": st.soft_rank(x, 0.5)}


def everything() -> dict[str, np.ndarray]:
    from frontends import NumpyFrontend, TorchFrontend

    found = sorting_derivatives() | on_jax()
    for frontend in (NumpyFrontend(), TorchFrontend()):
        for part in (topk_family, others):
            found |= {f"{frontend.name} {key}": v for key, v in part(frontend).items()}
    return {name: np.asarray(value) for name, value in found.items()}


if __name__ == "__main__":
    if "without-core" in sys.argv:
        sys.modules["sparsetopk._core._native"] = None  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import sparsetopk
        import sparsetopk.torch
    for warning in caught:
        if "sparsetopk" in str(warning.message):
            print(warning.category.__name__, warning.message)
    print(sparsetopk.__file__)
    np.savez(sys.argv[1], **everything())
