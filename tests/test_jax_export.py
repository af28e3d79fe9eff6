"""``jax.export``: one program for CPU, CUDA and TPU, for any number of rows of any length."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from jax import export

import sparsetopk.jax as st
from jax_ways import in_xla_operations

ANY_N = {
    "value and gradient": jax.value_and_grad(lambda x: (st.topk(x, 5, 0.1) ** 2).sum()),
    "two-sided, hard": lambda x: (
        st.topk_mask(x, 5, 0.1, p=1.5, two_sided=True),
        st.topk_mag(x, 5, 0.0),
    ),
    "topk_select": lambda x: st.topk_select(x, 5, 0.1, capacity=8),
    "straight through": lambda x: st.topk_select(x, 3, 0.1, capacity=8, straight_through=True),
    "topk_loss": lambda x: st.topk_loss(x, jnp.zeros(x.shape[:1], int), 3),
    "token_choice": lambda x: st.token_choice(x, 2, 0.1, capacity=4),
    "select_tokens": lambda x: st.select_tokens(jnp.stack([x, -x], -1), x, 3, capacity=8),
    "soft_rank": jax.value_and_grad(lambda x: (st.soft_rank(x, 0.1) * jnp.cos(x)).sum()),
    "soft_sort": jax.value_and_grad(lambda x: (st.soft_sort(x, 0.1) ** 2).sum()),
    "permutahedron": lambda x: st.permutahedron(x, jnp.cos(x) + 1, 0.1, phi="half_square"),
    "choose_lam": lambda x: (st.choose_lam(x, 5), st.choose_lam(x, jnp.array([[5.0]]))),
    "choose_rank_lam": lambda x: st.choose_rank_lam(x, 3),
}


def round_trip(f, shape, constraints=(), platforms=("cpu", "cuda", "tpu")):
    size = export.symbolic_shape(shape, constraints=constraints)
    made = export.export(jax.jit(f), platforms=platforms, disabled_checks=st.export_checks())(
        jax.ShapeDtypeStruct(size, jnp.float32)
    )
    assert made.platforms == platforms
    return export.deserialize(made.serialize())


def check(f, program, *sizes):
    for rows, n in sizes:
        x = jnp.asarray(np.random.default_rng(n).normal(size=(rows, n)), jnp.float32)
        found, expected = program.call(x), f(x)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ANY_N)
def test_any_number_of_rows_of_any_length(name):
    program = round_trip(ANY_N[name], "b, n", ["b >= 4", "n >= 9"])
    check(ANY_N[name], program, (4, 9), (7, 30))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft_sort", "choose_lam"])
def test_any_length_in_xla_operations(name):
    """As GPUs have them, with rows of one piece and of many."""
    f, sizes = ANY_N[name], ((4, 9), (2, 70))
    with in_xla_operations():
        program = round_trip(f, "b, n", ["n >= 9"], ("cpu",))
        assert "@sparsetopk_" not in program.mlir_module()
    check(f, program, *sizes)


def test_a_bad_k_makes_rows_nan_where_n_is_known_later():
    program = round_trip(lambda x: st.topk_mask(x, 10, 0.1), "b, n")
    assert jnp.isnan(program.call(jnp.ones((2, 9), jnp.float32))).all()
    assert not jnp.isnan(program.call(jnp.ones((2, 10), jnp.float32))).any()
