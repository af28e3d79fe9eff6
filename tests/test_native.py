"""What the compiled kernels must get right beyond the case table; `make sanitize` looks much harder."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as stt  # noqa: E402

KERNELS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("two_sided", [False, True])
def test_nothing_is_selected_for_k_0_though_an_entry_is_infinite(two_sided):
    x = torch.tensor([np.inf, 1.0, -np.inf, 2.0])
    assert stt.topk_mask(x, 0, 0.1, two_sided=two_sided).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", KERNELS)
def test_minus_zero_counts_as_zero(dtype):
    x = torch.tensor([-0.0, 0.0, 2.0, -3.0], dtype=dtype)
    assert stt.topk_sign(x, 4, 0.0).tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
def test_almost_everything_is_selected(dtype, p):
    """Where the two-sided responses are flat one more step of Newton's method may lead far away."""
    x = torch.tensor([1.0, -0.5] * 8, dtype=dtype)
    y = stt.topk_mask(x, 16 - 1e-9, 1.0, p=p, two_sided=True)
    assert abs(float(y.double().sum()) - 16) <= 16 * torch.finfo(dtype).eps + 1e-6


def test_lam_as_small_as_numbers_get():
    lam = 5e-324
    x = torch.tensor([3.0, 2.0, 2.0, 0.0], dtype=torch.float64) * lam
    for two_sided in (False, True):
        y = stt.topk_mask(x, 1.5, lam, two_sided=two_sided)
        np.testing.assert_allclose(float(y.sum()), 1.5, rtol=1e-12)


@pytest.mark.parametrize("p", [4 / 3, 3.0])
def test_magnitudes_near_the_largest_number(p):
    x = torch.tensor([1.7e308, -1.79e308, 1.0], dtype=torch.float64)
    for debias in (False, True):
        y = stt.topk_mag(x, 2, 1e-3, p=p, debias=debias)
        assert torch.isfinite(y).all()
        assert (y.abs() <= x.abs()).all()


def run_python(code: str, timeout: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=timeout,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_calls_end_where_subnormal_numbers_are_flushed():
    """The boundary lies just above many zeros: the number after 0 must not be one that counts as 0."""
    run_python(
        """
        import torch, sparsetopk.torch as st
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        for n in (300, 1024, 5000):
            for k in range(1, n // 2, 7):
                x = torch.where(torch.rand(n) < 0.7, 0.0, torch.randn(n))
                y = st.topk_mask(x, k, 1e-3)
                assert abs(float(y.sum()) - k) <= 1e-6 * k + 1e-6
        """
    )
