"""lam = 0 in the compiled core, and gaps: rows in lanes and alone, against a stable sort, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from sparsetopk._core import native

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from levels import printed_at_all_levels

pytestmark = pytest.mark.skipif(native is None, reason="the compiled core is not there")

EDGES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 383, 384, 385)
LONG = (1023, 1024, 1025, 8191, 8192, 8193, 70_000)
OPERATORS = {"mask": st.topk_mask, "sign": st.topk_sign, "magnitude": st.topk_mag}


def expected(x: torch.Tensor, k: torch.Tensor, kind: str) -> torch.Tensor:
    """The largest keys are selected, of equal ones the first."""
    keys = x.double() if kind == "mask" else x.double().abs()
    order = torch.sort(-keys, dim=-1, stable=True).indices
    z = (k - torch.arange(x.shape[-1])).clamp(0, 1)
    z = torch.zeros_like(z).scatter(-1, order, z)
    if kind == "magnitude":
        return z * x.double()
    return z if kind == "mask" else z * torch.where(x < 0, -1.0, 1.0)


def batch(rows: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers without ties in every other row, and few different ones in the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    x[1::2] = torch.randint(-3, 4, x[1::2].shape, generator=generator).double()
    return x.to(dtype)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [EDGES, LONG], ids=["lanes", "long"])
def test_hard_rows_of_every_length(kind, dtype, lengths):
    for n in lengths:
        rows = 16 + n % 17 if n < 1000 else 4
        x = batch(rows, n, dtype, n)
        fraction = torch.rand(rows, 1, generator=torch.Generator().manual_seed(n)).double()
        for k in (
            torch.ceil(fraction * n),
            fraction * n,
            torch.full((rows, 1), 1.0 * (n // 2), dtype=torch.float64),
        ):
            y = OPERATORS[kind](x, k, 0.0)
            z = expected(x, k, kind)
            # Only what k has beyond a whole number is rounded, and its product.
            torch.testing.assert_close(
                y.double(), z, rtol=1.01 * torch.finfo(dtype).eps, atol=0, msg=f"n = {n}"
            )
            assert not (torch.signbit(y) & (y == 0)).any(), "-0"


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_hard_row_is_the_same_in_every_batch(kind):
    """In batches of any size, beside relaxed rows, and with any p."""
    x, operator = batch(35, 40, torch.float32, 0), OPERATORS[kind]
    for k in (1.0, 3.3, 17.0):
        y = operator(x, k, 0.0)
        for rows in range(1, 34):
            assert torch.equal(operator(x[:rows], k, 0.0), y[:rows])
        lam = (torch.arange(35) % 2).double()[:, None]
        assert torch.equal(operator(x, k, lam)[::2], y[::2])
        assert torch.equal(operator(x, k, 0.0, p=1.5), y)


def test_gradients_of_hard_rows():
    x = batch(35, 20, torch.float64, 1).requires_grad_()
    k = torch.full((35, 1), 4.5, dtype=torch.float64)
    g = torch.randn_like(x)
    (mask,) = torch.autograd.grad(st.topk_mask(x, k, 0.0), x, g)
    (magnitude,) = torch.autograd.grad(st.topk_mag(x, k, 0.0), x, g)
    assert (mask == 0).all()
    z = expected(x.detach().abs(), k, "mask")
    torch.testing.assert_close(magnitude, z * g, rtol=1e-15, atol=0)


_PRINT = """
import torch, sparsetopk.torch as st
generator = torch.Generator().manual_seed(0)
for n in (8, 40, 3000):
    x = torch.randn(19, n, generator=generator)
    for y in (st.topk_mask(x, 3.3, 0.0), st.topk_mag(x, 3.3, 0.0), st.topk_sign(x, n / 2, 0.0)):
        print(y.any().item(), y.numpy().tobytes().hex())
"""


def test_all_instruction_sets_select_the_same():
    (found,) = printed_at_all_levels(_PRINT)
    assert found.count("True") == 9


@pytest.mark.parametrize("ties", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [22, 130, 384, 500])
@pytest.mark.parametrize("name", ["topk_mask", "topk_sign", "topk_mag"])
def test_a_gap_makes_rows_hard_exactly(name, n, dtype, ties):
    """The first entry below it had 1e-16 instead of 0, and ties at it had slopes."""
    rng = np.random.default_rng(n)
    x = np.repeat(rng.normal(size=(300, -(-n // ties))), ties, axis=-1)[:, :n].astype(dtype)
    k = 6 if ties == 3 else n // 3
    a = x if name == "topk_mask" else np.abs(x)
    ordered = -np.sort(-a, axis=-1)
    last, after = ordered[:, k - 1 : k], ordered[:, k : k + 1]
    lam = 0.7 * np.float64(last - after) / (last if name == "topk_mag" else 1.0)
    apart = lam[:, 0] > 0
    x, lam, selected = x[apart], lam[apart], (a > after)[apart]
    g = rng.normal(size=x.shape).astype(dtype)
    whole = {"topk_mask": np.ones_like(x), "topk_sign": np.sign(x), "topk_mag": x}[name]
    at = torch.from_numpy(x).requires_grad_()
    y = getattr(st, name)(at, k, torch.from_numpy(lam))
    y.backward(torch.from_numpy(g))
    np.testing.assert_array_equal(y.detach().numpy(), whole * selected)
    np.testing.assert_array_equal(at.grad.numpy(), g * selected if name == "topk_mag" else 0.0 * g)
