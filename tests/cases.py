"""The case table: every operator with every setting that has code of its own, and the inputs.

The tests of values, derivatives and conventions run over this table: adding an operator or a setting
adds a row here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsetopk import reference

PS = (2.0, 1.5, 4 / 3, 1.2, 3.0)


@dataclass(frozen=True)
class Case:
    """A top-k operator by name, with its keyword arguments."""

    operator: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ",".join(f"{key}={_short(value)}" for key, value in self.options.items())
        return f"{self.operator}({shown})"

    @property
    def p(self) -> float:
        return self.options.get("p", 2.0)

    @property
    def two_sided(self) -> bool:
        return self.options.get("two_sided", False)

    @property
    def phi(self) -> str:
        return {"topk_mag": "half_square", "topk_sign": "abs"}.get(self.operator, "identity")

    def function(self, frontend, suffix: str = ""):
        """The function of a front-end: the operator, or its _jvp, _vjp or _jacobian."""
        f = getattr(frontend, self.operator + suffix)
        return lambda *args, **kwargs: f(*args, **self.options, **kwargs)

    def references(self, x, k, lam) -> np.ndarray:
        """The operator by its definition, for rows x (m, n) with k and lam (m, 1)."""
        name = "topk_mask" if self.operator == "topk" else self.operator
        y = _once(Case(name, self.options), x, k, lam)
        return x * y if self.operator == "topk" else y

    def _reference(self, x, k, lam):
        if self.phi == "identity":
            return reference.topk_mask(x, k, lam, self.p, self.two_sided)
        w = reference.ones_k(k, x.size)
        y = reference.permutahedron(x, w, lam, self.p, self.phi)
        if self.operator == "topk_mag" and self.options.get("debias", True):
            y = y + reference.grad_R(y, lam, self.p)  # y* + (x - u*)
        return y


def _once(case: Case, x, k, lam) -> np.ndarray:
    """A definition takes a second for ten rows: all front-ends, in all processes of a run, share it."""
    of = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in (x, k, lam)))
    path = Path(os.environ["SPARSETOPK_TESTS"]) / f"{case}-{of.hexdigest()}.npy"
    if not path.exists():
        rows = zip(x, k[:, 0], lam[:, 0], strict=True)
        mine = path.with_suffix(f".{os.getpid()}.npy")
        np.save(mine, np.stack([case._reference(*row) for row in rows]))
        mine.replace(path)
    return np.load(path)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


MASKS = [Case("topk_mask", {"p": p}) for p in PS]
TWO_SIDED = [Case("topk_mask", {"p": p, "two_sided": True}) for p in PS]
PRODUCTS = [Case("topk", {"p": 2.0}), Case("topk", {"p": 1.5, "two_sided": True})]
MAGNITUDES = [Case("topk_mag", {"p": p, "debias": debias}) for p in PS for debias in (True, False)]
SIGNS = [Case("topk_sign", {"p": p}) for p in PS]
CASES = [*MASKS, *TWO_SIDED, *PRODUCTS, *MAGNITUDES, *SIGNS]

_rng = np.random.default_rng(2023)
# x, k, lam: small enough for the reference, which is cubic. Of one length: all are one call, ROWS.
INPUTS: dict[str, tuple[np.ndarray, float, float]] = {
    "gaussian": (_rng.normal(size=9), 3, 1.0),
    "real k": (_rng.normal(size=9), 3.3, 0.5),
    "small lam": (_rng.normal(size=9), 4, 1e-3),
    "large lam": (_rng.normal(size=9), 2, 30.0),
    "ties": (np.array([1.0, 1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.5, 1.0]), 2, 0.7),
    "constant": (np.full(9, -0.7), 2, 0.3),
    "with zeros": (np.array([0.0, 0.0, 2.0, -1.5, 0.0, 0.3, 0.0, 0.0, 0.0]), 3, 0.4),
    "k below 1": (_rng.normal(size=9), 0.4, 0.6),
    "heavy tail": (_rng.standard_cauchy(size=9), 3, 0.8),
}


def stacked(inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (m, n), k and lam (m, 1) of inputs of one length."""
    x, k, lam = (
        np.stack([np.atleast_1d(np.float64(v)) for v in part]) for part in zip(*inputs, strict=True)
    )
    return x, k, lam


ROWS = stacked(INPUTS.values())
