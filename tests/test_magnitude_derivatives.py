"""topk_mag and its derivative in x against the definition, also where the threshold v is tiny beside the
entries, as for p near 1 and large lam."""

import itertools

import numpy as np
import pytest

import sparsetopk as st
from fuzz_oracle import Rows
from fuzz_paths import PATHS

PS = (1.1, 1.2, 4 / 3, 1.5, 2.0)
LAMS = (1.0, 10.0, 100.0)  # from v of the size of the entries down to 1e-20 of it
KS = {3: (2,), 7: (6, 2.5), 40: (10,)}  # by n


def rows_of(n, rows=100):
    """Sizes that float32 holds too, as all ways are given the same numbers, with every k and lam; and a
    cotangent. x and g (m, n), k and lam (m, 1)."""
    x = np.abs(np.random.default_rng(0).normal(size=(rows, n)))
    g = np.random.default_rng(1).normal(size=x.shape)
    numbers = np.array(list(itertools.product(KS[n], LAMS)))
    k, lam = (np.repeat(v, rows)[:, None] for v in numbers.T)
    x, g = (np.tile(v.astype(np.float32).astype(np.float64), (len(numbers), 1)) for v in (x, g))
    return x, g, k, lam


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
@pytest.mark.parametrize("p", PS)
def test_the_closed_form_is_the_derivative_of_the_definition(p, debias):
    for n in KS:
        a, g, k, lam = rows_of(n, rows=10)
        at = Definition(a, k, lam, p)
        step = 1e-5 * a.min(-1, keepdims=True)
        # every row with each of its entries moved up, and down
        moves = step[:, :, None] * np.concatenate([np.eye(n), -np.eye(n)])
        every = (np.repeat(v, 2 * n, axis=0) for v in (k, lam))
        y = Definition((a[:, None] + moves).reshape(-1, n), *every, p).output(debias)
        ahead, behind = y.reshape(len(a), 2, n, n).swapaxes(0, 1)
        found = (g[:, None] * (ahead - behind)).sum(-1) / (2 * step)
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
        y = stt.topk_mag(at, torch.tensor(k), torch.tensor(lam), p=p, debias=debias)
        y.backward(torch.tensor(g, dtype=at.dtype))
        return y.detach().double().numpy(), at.grad.double().numpy()

    return way


def in_jax(dtype):
    def way(x, g, k, lam, p, debias):
        jax = pytest.importorskip("jax")
        import sparsetopk.jax as stj

        @jax.jit
        def both(x, g, k, lam):
            y, back = jax.vjp(lambda x: stj.topk_mag(x, k, lam, p=p, debias=debias), x)
            return y, back(g)[0]

        found = both(*(jax.numpy.asarray(v, dtype) for v in (x, g, k, lam)))
        return tuple(np.asarray(v, np.float64) for v in found)

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
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("way", WAYS)
def test_the_derivative_is_that_of_the_definition(way, p, debias):
    tolerance = TOLERANCE[way.split()[-1]]
    for n in [7] if way.startswith("jax") else KS:  # on JAX each is compiled
        x, g, k, lam = rows_of(n)
        y, dx = WAYS[way](x, g, k, lam, p, debias)
        at = Definition(x, k, lam, p)
        expected = at.gradient(g, debias)
        # v and t are as precise as the entries; the slope multiplies that.
        unit = 1 + (at.slope(at.v) / lam).max(-1, keepdims=True)
        off_y = np.abs(y - at.output(debias)) / (unit * x.max(-1, keepdims=True))
        off_dx = np.abs(dx - expected) / unit
        wrong = (np.maximum(off_y, off_dx) > tolerance).any(-1)
        assert not wrong.any(), (n, wrong.sum(), x[wrong][0], k[wrong][0], lam[wrong][0])


def rows_with_ties(rows=64, n=34, k=17, lam=0.03):
    """Of p = 2, on a grid, with entries that tie at the boundary of k and are whole, but barely: they
    are, down to a threshold of a/(1 + lam), which is next to the entries below."""
    rng = np.random.default_rng(0)
    a = -np.sort(-rng.integers(64, 128, size=(20_000, n)) / 32.0, axis=-1)
    ties, last, below = a[:, k - 2] == a[:, k - 1], a[:, k - 1] / (1 + lam), a[:, k]
    chosen = a[ties & (last > below * (1 + 1e-5)) & (last < below * 1.02)][:rows]
    assert len(chosen) == rows
    x = rng.permuted(chosen, axis=-1)
    g = rng.normal(size=x.shape).astype(np.float32).astype(np.float64)
    zero = np.zeros((rows, 1))
    numbers = np.full((rows, 1), float(k)), np.full((rows, 1), lam)
    return Rows(x, *numbers, g, np.zeros_like(x), zero, zero), x >= chosen[:, k - 1 : k]


# A row of these takes a second under the interpreter.
SLOW_PATHS = ("torch triton in chunks", "torch triton of many tensors")
PATHS_WITH_TIES = (
    *("numpy core", "numpy operations"),
    *("torch core", "torch operations", "torch many tensors", "torch triton"),
    *("jax core", "jax operations", "jax Pallas for GPUs", "jax Pallas for TPUs"),
    *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_PATHS),
)


@pytest.mark.parametrize("kind", ["magnitude", "debiased"])
@pytest.mark.parametrize("way", PATHS_WITH_TIES)
def test_entries_that_tie_and_are_whole_stand_alone(way, kind):
    """They are no block because rounding leaves the threshold at the edge of where they are whole."""
    frontend, path = way.split(maxsplit=1)
    pytest.importorskip(frontend)
    if path not in PATHS[frontend]:
        pytest.skip(f"there is no {way} here")
    many = 8 if way in SLOW_PATHS else 64
    rows, selected = rows_with_ties(many)
    found = PATHS[frontend][path].run(kind, 2.0, "float32", rows).answer
    alone = 1.0 if kind == "debiased" else 1 / (1 + rows.lam)
    np.testing.assert_allclose(found.y, np.where(selected, alone * rows.x, 0.0), rtol=1e-5)
    np.testing.assert_allclose(found.x, np.where(selected, alone * rows.g, 0.0), rtol=1e-5)
    in_lam = np.zeros_like(rows.x) if kind == "debiased" else -(alone**2) * rows.x * rows.g
    in_lam = np.where(selected, in_lam, 0.0)
    rounding = 1e-5 * np.abs(in_lam).sum(-1).max()
    np.testing.assert_allclose(found.lam, in_lam.sum(-1, keepdims=True), rtol=0, atol=rounding)
