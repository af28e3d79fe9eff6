"""A k beyond 2^24, where float32 has no odd numbers, on devices that compute in it."""

import pytest

torch = pytest.importorskip("torch")

from sparsetopk._maths.operator import MAGNITUDE, MASK, Operator
from sparsetopk.torch._fused import operations
from sparsetopk.torch._rows import arguments
from sparsetopk.torch._rows.arguments import Rows
from sparsetopk.torch._solvers import ops, vectorized


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Operator(MASK, 1.0), Operator(MAGNITUDE, 1.0, True)])
def test_a_whole_k_is_exact(monkeypatch, kind):
    """The CPU as such a device: as many entries are selected as k says, an odd number."""
    for module in (arguments, operations):
        monkeypatch.setattr(module, "compute_dtype", lambda x: torch.float32)
    solve = lambda x, k, lam, op, e, hard: vectorized.state_of(x, k, lam, op, e, hard=hard)  # noqa: E731
    monkeypatch.setattr(ops, "threshold", solve)
    k = (1 << 24) + 1
    x = torch.rand(1, k + 62, generator=torch.Generator().manual_seed(0)) + 1.0
    for number in (k, torch.tensor([[k]])) if kind.op == MASK else (float(k),):
        y = operations.evaluate(Rows("x", x, 1), number, 0.0, kind)
        assert int((y != 0).sum()) == k
