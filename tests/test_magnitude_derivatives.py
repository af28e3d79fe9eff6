"""topk_mag and its derivative in x against the definition, also where the threshold v is tiny beside the
entries, as for p near 1 and large lam."""

import numpy as np
import pytest

import sparsetopk as st

# p and lam, from v of the size of the entries down to 1e-20 of it.
SETTINGS = [(p, lam) for p in (1.1, 1.2, 4 / 3, 1.5, 2.0) for lam in (1.0, 10.0, 100.0)]
SHAPES = [(3, 2), (7, 6), (7, 2.5), (40, 10)]  # n and k
ROWS = 100


def rows_of(n, seed=0):
    """Sizes that float32 holds too: all ways are given the same numbers."""
    x = np.abs(np.random.default_rng(seed).normal(size=(ROWS, n)))
    return x.astype(np.float32).astype(np.float64)


def bisect(lo, hi, is_below):
    """Where ``is_below`` ends between two positive numbers, to full relative precision."""
    lo, hi = np.log(lo), np.log(hi)
    for _ in range(80):
        middle = (lo + hi) / 2
        below = is_below(np.exp(middle))
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    return np.exp(hi)


class Definition:
    """v solves sum_i min(S((a_i - v)/lam), v) = k v, where S(t) = max(t, 0)^e and e = 1/(p - 1)."""

    def __init__(self, a, k, lam, p):
        self.a, self.k, self.lam, self.e = a, k, lam, 1 / (p - 1)
        # Where the top k stand alone any v will do between two entries: this is the largest.
        self.v = bisect(
            np.full_like(a[:, :1], 1e-280),
            a.max(-1, keepdims=True),
            lambda v: np.minimum(self.response(v) / v, 1.0).sum(-1, keepdims=True) >= k,
        )
        # u with S((a - u)/lam) = u: the threshold of an entry that stands alone.
        self.u = bisect(np.full_like(a, 1e-280), a, lambda u: self.response(u) > u)

    def t(self, v):
        return np.maximum((self.a - v) / self.lam, 0.0)

    def response(self, v):
        return self.t(v) ** self.e

    def slope(self, v):
        t = self.t(v)
        return np.where(t > 0, self.e * np.where(t > 0, t, 1.0) ** (self.e - 1), 0.0)

    @property
    def whole(self):
        # Beyond what bisection leaves: an entry that has v to itself is the block, or as good as that.
        return self.u > self.v * (1 + 1e-9)

    @property
    def block(self):
        return (self.t(self.v) > 0) & ~self.whole

    @property
    def reach(self):
        """How far v is from a kink, in relative terms: from an entry, and from one's own threshold."""
        near = np.minimum(np.abs(self.a / self.v - 1), np.abs(self.u / self.v - 1))
        return near.min(-1, keepdims=True)

    def output(self, debias):
        block = self.response(self.v) + (self.lam * self.t(self.v) if debias else 0.0)
        return np.where(self.whole, self.a if debias else self.u, np.where(self.block, block, 0.0))

    def gradient(self, g, debias):
        """The cotangent of x for that of y being g.

        On the block dy_i = (D_i + debias) (da_i - dv), with D_i = S'(t_i)/lam and
        dv = sum_i D_i da_i / (sum_i D_i + k - number of whole entries).
        """
        gain = np.where(self.block, self.slope(self.v) / self.lam, 0.0)
        left = self.k - self.whole.sum(-1, keepdims=True)
        total = gain.sum(-1, keepdims=True) + left
        moved = np.where(self.block, (gain + debias) * g, 0.0).sum(-1, keepdims=True)
        mean = moved / np.where(left > 0, total, 1.0)
        alone = self.slope(self.u) / self.lam
        alone = np.ones_like(gain) if debias else alone / (1 + alone)
        return np.where(
            self.whole, alone * g, np.where(self.block, (gain + debias) * g - gain * mean, 0.0)
        )


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(("p", "lam"), SETTINGS)
def test_the_closed_form_is_the_derivative_of_the_definition(p, lam, debias):
    for n, k in SHAPES:
        a = rows_of(n)[:10]
        g = np.random.default_rng(1).normal(size=a.shape)
        at = Definition(a, k, lam, p)
        step = 1e-5 * a.min(-1, keepdims=True)
        found = np.zeros_like(a)
        for i in range(n):
            move = step * (np.arange(n) == i)
            y = [Definition(a + s * move, k, lam, p).output(debias) for s in (1, -1)]
            found[:, i] = (g * (y[0] - y[1]) / (2 * step)).sum(-1)
        smooth = (at.reach > 1e-3)[:, 0]
        expected = at.gradient(g, debias)[smooth]
        # Differences lose 1e-16/1e-5 to rounding, over the smallest entry, and the square of the step.
        np.testing.assert_allclose(found[smooth], expected, rtol=1e-5, atol=1e-5)


def in_numpy(x, g, k, lam, p, debias):
    y = st.topk_mag(x, k, lam, p=p, debias=debias)
    return y, st.topk_mag_vjp(x, k, lam, dy=g, p=p, debias=debias)[0]


def in_torch(dtype):
    def way(x, g, k, lam, p, debias):
        torch = pytest.importorskip("torch")
        import sparsetopk.torch as stt

        at = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True)
        y = stt.topk_mag(at, k, lam, p=p, debias=debias)
        y.backward(torch.tensor(g, dtype=at.dtype))
        return y.detach().double().numpy(), at.grad.double().numpy()

    return way


def in_jax(dtype):
    def way(x, g, k, lam, p, debias):
        jax = pytest.importorskip("jax")
        import sparsetopk.jax as stj

        at, g = jax.numpy.asarray(x, dtype), jax.numpy.asarray(g, dtype)
        y, back = jax.vjp(lambda x: stj.topk_mag(x, k, lam, p=p, debias=debias), at)
        return np.asarray(y, np.float64), np.asarray(back(g)[0], np.float64)

    return way


# A way takes x, the cotangent of y, k, lam, p and debias, and returns y and the cotangent of x.
WAYS = {
    "numpy float64": in_numpy,
    "torch float32": in_torch("float32"),
    "torch float64": in_torch("float64"),
    "jax float32": in_jax("float32"),
    "jax float64": in_jax("float64"),
}

# S(t) = t^e and S'(t) have up to e = 10 times the error of t, that of a difference and a quotient, and
# the difference to the mean has as much again. In all, 64 roundings.
TOLERANCE = {"float32": 64 * 2.0**-24, "float64": 64 * 2.0**-53}


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(("p", "lam"), SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_the_derivative_is_that_of_the_definition(way, p, lam, debias):
    tolerance = TOLERANCE[way.split()[-1]]
    for n, k in SHAPES:
        x = rows_of(n)
        g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32).astype(np.float64)
        y, dx = WAYS[way](x, g, k, lam, p, debias)
        at = Definition(x, k, lam, p)
        expected = at.gradient(g, debias)
        # v and t are as precise as the entries; the slope multiplies that.
        unit = 1 + (at.slope(at.v) / lam).max(-1, keepdims=True)
        off_y = np.abs(y - at.output(debias)) / (unit * x.max(-1, keepdims=True))
        off_dx = np.abs(dx - expected) / unit
        wrong = (np.maximum(off_y, off_dx) > tolerance).any(-1)
        assert not wrong.any(), (n, k, wrong.sum(), x[wrong][0], dx[wrong][0], expected[wrong][0])
