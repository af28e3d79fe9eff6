"""The case table: every operator with every setting that has code of its own, and the inputs.

The tests of values, derivatives and conventions run over this table: adding an operator or a setting
adds a row here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsetopk import reference

PS = (2.0, 1.5, 4 / 3, 1.2, 3.0)
_references: dict[tuple, np.ndarray] = {}


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

    def reference(self, x, k, lam):
        """The operator by its definition, for one row; slow, so that all front-ends share it."""
        key = (str(self), x.tobytes(), k, lam)
        if key not in _references:
            _references[key] = self._reference(x, k, lam)
        return _references[key]

    def _reference(self, x, k, lam):
        if self.phi == "identity":
            y = reference.topk_mask(x, k, lam, self.p, self.two_sided)
            return x * y if self.operator == "topk" else y
        w = reference.ones_k(k, x.size)
        y = reference.permutahedron(x, w, lam, self.p, self.phi)
        if self.operator == "topk_mag" and self.options.get("debias", True):
            y = y + reference.grad_R(y, lam, self.p)  # y* + (x - u*)
        return y


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


MASKS = [Case("topk_mask", {"p": p}) for p in PS]
TWO_SIDED = [Case("topk_mask", {"p": p, "two_sided": True}) for p in PS]
PRODUCTS = [Case("topk", {"p": 2.0}), Case("topk", {"p": 1.5, "two_sided": True})]
MAGNITUDES = [Case("topk_mag", {"p": p, "debias": debias}) for p in PS for debias in (True, False)]
SIGNS = [Case("topk_sign", {"p": p}) for p in PS]
CASES = [*MASKS, *TWO_SIDED, *PRODUCTS, *MAGNITUDES, *SIGNS]

_rng = np.random.default_rng(2023)
# x, k, lam: small enough for the reference, which is cubic; of one length, as XLA compiles for each.
INPUTS: dict[str, tuple[np.ndarray, float, float]] = {
    "gaussian": (_rng.normal(size=9), 3, 1.0),
    "real k": (_rng.normal(size=9), 3.3, 0.5),
    "small lam": (_rng.normal(size=9), 4, 1e-3),
    "large lam": (_rng.normal(size=9), 2, 30.0),
    "ties": (np.array([1.0, 1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.5, 1.0]), 2, 0.7),
    "constant": (np.full(9, -0.7), 2, 0.3),
    "with zeros": (np.array([0.0, 0.0, 2.0, -1.5, 0.0, 0.3, 0.0, 0.0, 0.0]), 3, 0.4),
    "k below 1": (_rng.normal(size=9), 0.4, 0.6),
    "one entry": (np.array([0.3]), 0.5, 0.6),
    "heavy tail": (_rng.standard_cauchy(size=9), 3, 0.8),
}
