"""Pool adjacent violators by a Triton kernel, under Triton's interpreter, against the core."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")
st = pytest.importorskip("sparsetopk.torch")

from interpreted import assert_near, both, compile_all, interpreted  # noqa: F401
from launches import launches

inf, nan = float("inf"), float("nan")

FUNCTIONS = {
    "sort": lambda x, lam, p=2.0: st.soft_sort(x, lam, p=p),
    "rank": lambda x, lam, p=2.0: st.soft_rank(x, lam, p=p, descending=False),
    "magnitude": lambda x, lam, p=2.0: _permutahedron(x, lam, p, "half_square"),
    "sign": lambda x, lam, p=2.0: _permutahedron(x, lam, p, "abs"),
    "entropy": lambda x, lam, p=2.0: _permutahedron(x, lam, p, "exp"),
}
CLOSED = [name for name in FUNCTIONS if name != "entropy"]  # p = 2: a merge is a formula


def _permutahedron(x, lam, p, phi):
    w = torch.linspace(3.0, 0.0, x.shape[-1], device=x.device)
    return st.permutahedron(x, w, lam, p=p, phi=phi)


def rows(m, n, dtype):
    """Ties, constants, tiny and huge lam, hard rows, padding; infinity and NaN."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(m, n)))
    tenth = m // 10
    x[:tenth] = x[:tenth].round()
    x[tenth : tenth + 10] = 0.25
    x[tenth + 10 : tenth + 20] *= 1e6
    x[tenth + 20, 3], x[tenth + 21, 4], x[tenth + 22, 5] = inf, -inf, nan
    lam = torch.from_numpy(rng.choice([0.0, 1e-3, 0.1, 1.0, 100.0], size=(m, 1)))
    return x.to(dtype), lam, torch.from_numpy(rng.normal(size=x.shape)).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CLOSED), ("rank", torch.float64)],
    ids=str,
)
def test_a_thousand_rows(name, dtype):
    compare(FUNCTIONS[name], *rows(1000, 17, dtype))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("p", [1.2, 4 / 3, 1.5, 2.0, 3.0])
def test_other_p(name, p):
    """The search for what a block shares: 300 rows of 11 entries in float64, and the same rules."""
    f = lambda x, lam: FUNCTIONS[name](x, lam, p)  # noqa: E731
    # An exponential has as many roundings of its argument as that is large: here up to 8.
    compare(f, *rows(300, 11, torch.float64), p=p, roundings=32 if name == "entropy" else 4)


def compare(f, x, lam, g, p=2.0, roundings=4):
    """S(t) = t^e has e times the roundings of t or, for e < 1, at 0 their e-th power."""
    found, want = both(f, x, lam, g=g)
    e = 1 / (p - 1)
    eps = (roundings * max(1.0, e) * torch.finfo(x.dtype).eps) ** min(1.0, e)
    scale = want[0].double().nan_to_num(0.0).abs().amax(-1, keepdim=True).clamp_min(1.0)
    assert_near(found[0], want[0], eps, scale)
    steep = g.double().abs().sum(-1, keepdim=True) * scale
    steep = steep * (1 + 1 / torch.where(lam > 0, lam, 1.0))
    assert_near(found[1], want[1], eps, steep)
    assert_near(found[2], want[2], eps, steep * scale / torch.where(lam > 0, lam, 1.0))


def test_derivatives_in_w_and_second_ones():
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 9))).double()
    w = torch.from_numpy(np.random.default_rng(3).normal(size=(6, 9))).double()

    def gradient(x, w):
        y = st.permutahedron(x, w, 0.7)
        return torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]

    found, want = both(gradient, x, w, g=x.flip(0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 1e-10, b.abs().max().clamp_min(1.0))


def test_vmap():
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(3, 4, 9))).double()
    found = torch.func.vmap(lambda x: st.soft_rank(x, 0.5))(x)
    assert_near(found, st.soft_rank(x, 0.5), 0.0)


def test_nothing_is_read_by_the_host():
    """Sorts and one launch, and ordinary operations around them."""
    for f in FUNCTIONS.values():
        for p in (2.0, 1.5, 3.0):
            forward, backward = launches(lambda x, f=f, p=p: f(x, 1.0, p), (64, 256))
            assert forward["rows_pav"] == 1
            assert "pav" not in forward
            assert "rows_pav" not in backward


def test_compiled():
    """Nothing spills."""
    requests = [
        {"name": name, "arch": arch, "n": 100, "PHI": 1, "E": e}
        for name, e in (("pav", 1.0), ("merge", 2.0), ("merge", 5.0))
        for arch in (80, 90, "gfx942")
    ]
    assert [found["spills"] for found in compile_all(requests)] == [0] * 9
