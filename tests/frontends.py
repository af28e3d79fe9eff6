"""The front-ends behind one face: the names and conventions of the NumPy one, arrays in and out.

Tests that take the fixture ``st`` run over all. The adaptors get ``_jvp`` from forward mode, ``_vjp``
from reverse mode and ``_jacobian`` from rows of reverse mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetopk

# NumPy alone has the hard operators and the conjugate.
_NUMPY_ONLY = ("argsort", "sort", "rank", "conjugate")


class NumpyFrontend:
    """The package itself."""

    name = "numpy"
    solvers = ("threshold", "pav", "dykstra", "bca")
    # how far the output may be from the rounded float64 result, in roundings of the dtype of x
    roundings = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(sparsetopk, name)


class TorchFrontend:
    """``sparsetopk.torch``, which says dim and takes tensors."""

    name = "torch"
    solvers = ("threshold", "pav", "dykstra")
    roundings = 16  # the compiled kernels round t = (x - tau)/lam, here 10 times x, to float32

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.module = pytest.importorskip("sparsetopk.torch")

    def __getattr__(self, name: str) -> Any:
        if name in _NUMPY_ONLY:
            return getattr(sparsetopk, name)
        for suffix in ("_jvp", "_vjp", "_jacobian"):
            if name.endswith(suffix):
                operator = getattr(self.module, name.removesuffix(suffix))
                if name == "topk_loss_vjp":
                    return self._loss_vjp
                rule = getattr(self, suffix)
                return lambda *args, **options: rule(operator, *args, **options)
        operator = getattr(self.module, name)
        return lambda *args, **options: self._call(operator, *args, **options)

    def _tensor(self, value: Any) -> Any:
        return self.torch.from_numpy(np.array(value))

    def _number(self, value: Any) -> Any:
        """Python numbers stay what they are."""
        return value if isinstance(value, (int, float)) else self._tensor(value)

    def _real(self, value: Any) -> Any:
        return self._tensor(np.asarray(value, dtype=np.float64))

    def _call(self, operator: Any, x: Any, *args: Any, **options: Any) -> Any:
        args = tuple(self._number(value) for value in args)
        options = {name: self._number_option(name, v) for name, v in options.items()}
        result = operator(self._tensor(x), *args, **self._options(options))
        if isinstance(result, tuple):
            return type(result)(*(part.numpy() for part in result))
        return result.numpy()

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        where = options.get("where")
        return _with_dim(options | ({} if where is None else {"where": self._tensor(where)}))

    def _number_option(self, name: str, value: Any) -> Any:
        return self._number(value) if name in ("k", "lam") else value

    def _jvp(
        self,
        operator: Any,
        x: Any,
        k: Any,
        lam: Any = 0.1,
        *,
        dx: Any = None,
        dk: Any = None,
        dlam: Any = None,
        **options: Any,
    ) -> np.ndarray:
        at = (self._tensor(x), self._real(k), self._real(lam))
        tangents = tuple(
            self.torch.zeros_like(v)
            if d is None
            else self._tensor(np.broadcast_to(np.asarray(d, v.numpy().dtype), v.shape))
            for v, d in zip(at, (dx, dk, dlam), strict=True)
        )
        options = self._options(options)
        return self.torch.func.jvp(lambda *a: operator(*a, **options), at, tangents)[1].numpy()

    def _vjp(
        self, operator: Any, x: Any, k: Any, lam: Any = 0.1, *, dy: Any, **options: Any
    ) -> sparsetopk.TopKCotangents:
        at = [v.requires_grad_() for v in (self._tensor(x), self._real(k), self._real(lam))]
        y = operator(*at, **self._options(options))
        dy = self._tensor(np.asarray(dy)).to(y.dtype)
        found = self.torch.autograd.grad(y, at, dy, materialize_grads=True)
        return sparsetopk.TopKCotangents(*(part.numpy() for part in found))

    def _jacobian(
        self, operator: Any, x: Any, k: Any, lam: Any = 0.1, *, axis: int = -1, **options: Any
    ) -> np.ndarray:
        rows, *per_row = _as_rows(x, k, lam, axis)
        at = [self._tensor(v) for v in (rows.reshape(-1, rows.shape[-1]), *per_row)]
        one = self.torch.func.jacrev(lambda *a: operator(*a, **options))
        return self.torch.vmap(one)(*at).numpy().reshape(*rows.shape, rows.shape[-1])

    def _loss_vjp(self, logits: Any, *args: Any, dy: Any = 1.0, **options: Any) -> np.ndarray:
        x = self._tensor(logits).requires_grad_()
        loss = self.module.topk_loss(x, *(self._number(v) for v in args), **options)
        dy = self._tensor(np.broadcast_to(np.asarray(dy, loss.detach().numpy().dtype), loss.shape))
        return self.torch.autograd.grad(loss, x, dy)[0].numpy()


class JaxFrontend:
    """``sparsetopk.jax``, which takes its arrays; float64 is on."""

    name = "jax"
    solvers = ("threshold", "pav", "dykstra")
    roundings = 16

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        self.module = pytest.importorskip("sparsetopk.jax")
        self.rules: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _NUMPY_ONLY:
            return getattr(sparsetopk, name)
        for suffix in ("_jvp", "_vjp", "_jacobian"):
            if name.endswith(suffix):
                operator = getattr(self.module, name.removesuffix(suffix))
                if name == "topk_loss_vjp":
                    return self._loss_vjp
                rule = getattr(self, suffix)
                return lambda *args, **options: rule(operator, *args, **options)
        operator = getattr(self.module, name)
        return lambda *args, **options: self._call(operator, *args, **options)

    def _array(self, value: Any) -> Any:
        return self.jax.numpy.asarray(np.array(value))

    def _number(self, value: Any) -> Any:
        """Python numbers stay what they are."""
        return value if isinstance(value, (int, float)) else self._array(value)

    def _call(self, operator: Any, x: Any, *args: Any, **options: Any) -> Any:
        args = tuple(self._number(value) for value in args)
        options = {n: self._number(v) if n in ("k", "lam") else v for n, v in options.items()}
        result = operator(self._array(x), *args, **options)
        if isinstance(result, tuple):
            return type(result)(*map(np.asarray, result))
        return np.asarray(result)

    def _compiled(self, name: str, rule: Any, operator: Any, options: dict[str, Any]) -> Any:
        """``rule`` of the operator with these options, traced once and not in every test."""
        key = (name, operator, repr(sorted(options.items())))
        if key not in self.rules:
            f = lambda *at: operator(*at, **options)  # noqa: E731
            self.rules[key] = self.jax.jit(lambda *args: rule(f, *args))
        return self.rules[key]

    def _at(self, x: Any, k: Any, lam: Any) -> tuple[Any, ...]:
        return tuple(self._array(v) for v in (x, np.asarray(k, float), np.asarray(lam, float)))

    def _jvp(
        self,
        operator: Any,
        x: Any,
        k: Any,
        lam: Any = 0.1,
        *,
        dx: Any = None,
        dk: Any = None,
        dlam: Any = None,
        **options: Any,
    ) -> np.ndarray:
        rows = _Filled(x, k, lam, options)
        at = self._at(*rows.at)
        tangents = tuple(
            self._array(
                np.broadcast_to(np.asarray(rows.fill(0.0 if d is None else d), v.dtype), v.shape)
            )
            for v, d in zip(at, (dx, dk, dlam), strict=True)
        )
        rule = lambda f, at, tangents: self.jax.jvp(f, at, tangents)[1]  # noqa: E731
        return rows.cut(self._compiled("jvp", rule, operator, options)(at, tangents))

    def _vjp(
        self, operator: Any, x: Any, k: Any, lam: Any = 0.1, *, dy: Any, **options: Any
    ) -> sparsetopk.TopKCotangents:
        def rule(f: Any, at: tuple[Any, ...], dy: Any) -> Any:
            y, pull = self.jax.vjp(f, *at)
            return pull(dy.astype(y.dtype))

        rows = _Filled(x, k, lam, options)
        compiled = self._compiled("vjp", rule, operator, options)
        found = compiled(self._at(*rows.at), self._array(rows.fill(dy)))
        return sparsetopk.TopKCotangents(*map(rows.cut, found))

    def _jacobian(
        self, operator: Any, x: Any, k: Any, lam: Any = 0.1, *, axis: int = -1, **options: Any
    ) -> np.ndarray:
        """Every row as often as it is long, each time with another entry of y pulled back."""
        rows, *per_row = _as_rows(x, k, lam, axis)
        n = rows.shape[-1]
        at = (np.repeat(v.reshape(-1, v.shape[-1]), n, axis=0) for v in (rows, *per_row))
        basis = np.tile(np.eye(n), (rows.size // n, 1))
        return self._vjp(operator, *at, dy=basis, **options).x.reshape(*rows.shape, n)

    def _loss_vjp(self, logits: Any, *args: Any, dy: Any = 1.0, **options: Any) -> np.ndarray:
        args = tuple(self._number(v) for v in args)
        f = lambda x: self.module.topk_loss(x, *args, **options)  # noqa: E731
        loss, pull = self.jax.vjp(f, self._array(logits))
        return np.asarray(pull(self._array(np.broadcast_to(dy, loss.shape)).astype(loss.dtype))[0])


class _Filled:
    """Rows (m, n), each with its k and lam (m, 1), with the last one repeated up to 64, or 128, ...: XLA
    compiles for every shape, and so tests with rows of one length share what it compiled. Anything else
    is left as it is."""

    def __init__(self, x: Any, k: Any, lam: Any, options: dict[str, Any]) -> None:
        x, k, lam = (np.asarray(v) for v in (x, k, lam))
        self.rows = len(x) if x.ndim == 2 and k.shape == lam.shape == (len(x), 1) else None
        if options.get("axis", -1) != -1:
            self.rows = None
        self.at = tuple(self.fill(v) for v in (x, k, lam))

    def fill(self, value: Any) -> Any:
        if self.rows is None or np.ndim(value) < 2:
            return value
        return np.pad(value, ((0, -self.rows % 64), (0, 0)), mode="edge")

    def cut(self, value: Any) -> np.ndarray:
        value = np.asarray(value)
        return value if self.rows is None else value[: self.rows]


def _as_rows(x: Any, k: Any, lam: Any, axis: int) -> tuple[np.ndarray, ...]:
    """x with its axis last, and k and lam as a column of one per row."""
    x = np.asarray(x)
    per_row = (*x.shape[:axis], 1, *x.shape[axis:][1:])
    k, lam = (np.broadcast_to(np.asarray(v, float), per_row).reshape(-1, 1) for v in (k, lam))
    return np.moveaxis(x, axis, -1), k, lam


def _with_dim(options: dict[str, Any]) -> dict[str, Any]:
    return {"dim" if name == "axis" else name: value for name, value in options.items()}


def needs_solver(st: Any, solver: str) -> None:
    """Skip what a front-end does not have."""
    if solver not in st.solvers:
        pytest.skip(f"the {st.name} front-end has no solver {solver!r}")


FRONTENDS = {"numpy": NumpyFrontend, "torch": TorchFrontend, "jax": JaxFrontend}
