"""Every operator on a mesh of 2 x 2 devices, with axes of every kind."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")

SETTING = """
    import contextlib, re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import sparsetopk.jax as st

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 4, 12)), jnp.float32)
    labels = jnp.asarray(rng.integers(12, size=(8, 4)))
    k = jnp.asarray(rng.integers(1, 9, size=(8, 1, 1)))
    w = jnp.linspace(2.0, 0.0, 12)

    OPERATORS = {
        "topk_mask": lambda x: st.topk_mask(x, k, 0.3, p=1.5),
        "topk": lambda x: st.topk(x, 5, 0.3, two_sided=True),
        "topk_mag": lambda x: st.topk_mag(x, 5, 0.3, straight_through=True),
        "topk_sign": lambda x: st.topk_sign(x, 5, 0.3),
        "topk_mask by pav": lambda x: st.topk_mask(x, 5, 0.3, solver="pav"),
        "soft_sort": lambda x: st.soft_sort(x, 0.3),
        "soft_rank": lambda x: st.soft_rank(x, 0.3),
        "permutahedron": lambda x: st.permutahedron(x, w, 0.3, phi="half_square"),
        "permutahedron_value": lambda x: st.permutahedron_value(x, w, 0.3),
        "topk_value": lambda x: st.topk_value(x, 5, 0.3),
        "topk_loss": lambda x: st.topk_loss(x, labels, 3, completion="best", reduction="none"),
        "topk_loss, spread": lambda x: st.topk_loss(
            x, labels, 3, completion="spread", reduction="none"
        ),
        "half_sq_support_norm": lambda x: st.half_sq_support_norm(x, 3),
        "support_negentropy": lambda x: st.support_negentropy(jnp.abs(x), 3),
        "owl_norm": lambda x: st.owl_norm(x, w),
        "topk_select": lambda x: st.topk_select(x, 5, 0.3, capacity=6).values,
        "straight through": lambda x: st.topk_select(x, 5, 0.3, straight_through=True).values,
        "expert_choice": lambda x: st.expert_choice(x, 2, 0.3, capacity=3, normalize=True).weights,
        "token_choice": lambda x: st.token_choice(x, 5, 0.3, capacity=3, normalize=True).weights,
    }

    def mesh(kind):
        return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))

    def moves(program):
        return sorted(set(re.findall(r" (all-[a-z]+|collective-[a-z]+)\\(", program)))

    def both(f):
        def value_and_slope(x):
            y, pull = jax.vjp(f, x)
            return y, pull(jnp.cos(y))[0]
        return value_and_slope

    def close(found, expected, name):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
"""


def run(code):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    script = textwrap.dedent(SETTING) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | flags,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_sharded_batch_stays_where_it_is():
    """Forward and backward, with axes of every kind: nothing goes from device to device."""
    run(
        """
        FEW = ("topk", "soft_rank", "topk_select", "token_choice")
        for name, f in OPERATORS.items():
            # the rows of a router are the experts of a sequence, or its tokens
            spec = P(("a", "b")) if "choice" in name else P("a", "b")
            expected = jax.jit(both(f))(x)
            for kind in (AxisType.Explicit, AxisType.Auto) if name in FEW else (AxisType.Explicit,):
                place = NamedSharding(mesh(kind), spec)
                program = jax.jit(both(f)).lower(jax.device_put(x, place)).compile()
                assert not moves(program.as_text()), (name, kind, moves(program.as_text()))
                found = program(jax.device_put(x, place))
                close(found, expected, name)
                assert found[1].sharding.is_equivalent_to(place, 3), (name, kind)
            if name in FEW:
                local = jax.shard_map(both(f), mesh=mesh(AxisType.Auto), in_specs=spec, out_specs=spec)
                close(jax.jit(local)(x), expected, name)
        """
    )


def test_explicit_axes():
    run(
        """
        f = OPERATORS["topk"]
        expected = both(f)(x)
        devices = mesh(AxisType.Explicit)
        placed = jax.device_put(x, NamedSharding(devices, P("a", "b")))
        for using in (contextlib.nullcontext(), jax.set_mesh(devices)):
            with using:
                close(both(f)(placed), expected, "outside of jit")
                close(jax.jit(jax.vmap(jax.vmap(both(f))))(placed), expected, "mapped")
                close(jax.jit(jax.vmap(both(f), 1, 1))(placed), expected, "mapped over the second axis")
                moved = jax.jit(lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1])(placed)
                close([moved], [jax.jvp(f, (x,), (jnp.cos(x),))[1]], "forward mode")
                # what has no derivative asks all devices who is done
                close([st.choose_lam(placed, 5)], [st.choose_lam(x, 5)], "choose_lam")
        with jax.set_mesh(devices):
            loss = jax.jit(lambda x: st.topk_loss(x, labels, 3, 0.3))(placed)
        close([loss], [st.topk_loss(x, labels, 3, 0.3)], "a mean over all rows")
        across = jax.device_put(x, NamedSharding(devices, P("a", None, "b")))
        for f in (OPERATORS["topk"], OPERATORS["soft_rank"], OPERATORS["topk_select"]):
            try:
                f(across)
            except ValueError as error:
                assert "x must not be sharded along axis 2" in str(error), error
                assert "axis_name" in str(error), error
            else:
                raise AssertionError("no error")
        """
    )
