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
    "sort": lambda x, lam: st.soft_sort(x, lam),
    "rank": lambda x, lam: st.soft_rank(x, lam, descending=False),
    "magnitude": lambda x, lam: st.permutahedron(x, W, lam, phi="half_square"),
    "sign": lambda x, lam: st.permutahedron(x, W, lam, phi="abs"),
}
W = torch.linspace(3.0, 0.0, 17)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [*((f, torch.float32) for f in FUNCTIONS.values()), (FUNCTIONS["rank"], torch.float64)],
    ids=[*FUNCTIONS, "rank in float64"],
)
def test_a_thousand_rows(f, dtype):
    """Ties, constants, tiny and huge lam, hard rows, padding; infinity and NaN as the core has them."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(1000, 17)))
    x[:100] = x[:100].round()
    x[100:110] = 0.25
    x[110:120] *= 1e6
    x[120, 3], x[121, 4], x[122, 5] = inf, -inf, nan
    x = x.to(dtype)
    lam = torch.from_numpy(rng.choice([0.0, 1e-3, 0.1, 1.0, 100.0], size=(1000, 1)))
    g = torch.from_numpy(rng.normal(size=x.shape)).to(dtype)
    found, want = both(f, x, lam, g=g)
    eps = 4 * torch.finfo(dtype).eps
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
    """Sorts and one launch, and ordinary operations around them; through the host for other p."""
    for f in (FUNCTIONS["sort"], FUNCTIONS["rank"]):
        forward, backward = launches(lambda x, f=f: f(x, 1.0), (64, 256))
        assert forward["rows_pav"] == 1
        assert "pav" not in forward
        assert "rows_pav" not in backward
    forward, _ = launches(lambda x: st.soft_rank(x, 1.0, p=1.5), (64, 256))
    assert forward["pav"] == 1


@pytest.mark.slow
def test_compiled():
    """Nothing spills."""
    requests = [{"name": "pav", "arch": arch, "n": 100, "PHI": 1} for arch in (80, 90, "gfx942")]
    assert [found["spills"] for found in compile_all(requests)] == [0, 0, 0]
