"""Every operator on a mesh of 2 x 2 devices, with axes of every kind."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")

from jax_ways import with_four_devices

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
        "topk_loss, smoothed": lambda x: st.topk_loss(
            x, labels, 3, label_smoothing=0.1, reduction="none"
        ),
        "topk_loss of sets": lambda x: st.topk_loss(
            x, jnp.broadcast_to(w > 1.7, x.shape), 3, completion="best", reduction="none"
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

    def collectives(program):
        # Of each operation between devices its type and name; one that is started, then awaited, once.
        names = "all-gather|all-reduce|all-to-all|collective-[a-z]+?|reduce-scatter"
        return re.findall(rf"= (.*?) ({names})(?:-start)?\\(", program)

    def moves(program):
        return sorted({name for _, name in collectives(program)})

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
    script = textwrap.dedent(SETTING) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=with_four_devices(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_sharded_batch_stays_where_it_is():
    """Every operator, forward and backward, mapped and not, with axes of every kind: as on one device,
    and nothing goes from device to device. All of them in one program for each kind."""
    run(
        """
        # the rows of a router are the experts of a sequence, or its tokens
        routers = {name: f for name, f in OPERATORS.items() if "choice" in name}
        others = {name: f for name, f in OPERATORS.items() if name not in routers}
        whole = [name for name in others if name == "topk_mask" or "loss" in name]  # k, labels
        mapped = {f"mapped {n}": jax.vmap(f, 1, 1) for n, f in others.items() if n not in whole}
        of_rows, of_sequences = P("a", "b"), P(("a", "b"))

        def every(x, sequences):
            slopes = {name: both(f)(x) for name, f in (others | mapped).items()}
            return slopes, {name: both(f)(sequences) for name, f in routers.items()}

        def of_shards(x, sequences, k_, labels_):
            # what is closed over is whole on every device: its part is that of the shard
            global k, labels
            kept, (k, labels) = (k, labels), (k_, labels_)
            found = every(x, sequences)
            k, labels = kept
            return found

        expected = jax.jit(every)(x, x)
        for kind in (AxisType.Explicit, AxisType.Auto, AxisType.Manual):
            on = mesh(AxisType.Explicit if kind == AxisType.Explicit else AxisType.Auto)
            places = [NamedSharding(on, spec) for spec in (of_rows, of_sequences)]
            f, at = every, [jax.device_put(x, place) for place in places]
            if kind == AxisType.Manual:
                specs = of_rows, of_sequences, P("a"), of_rows
                results = of_rows, of_sequences
                f = jax.shard_map(of_shards, mesh=on, in_specs=specs, out_specs=results)
                at = [*at, k, labels]
            program = jax.jit(f).lower(*at).compile()
            assert not moves(program.as_text()), (kind, moves(program.as_text()))
            found = program(*at)
            for each, wanted, place in zip(found, expected, places, strict=True):
                for name, (_, slope) in each.items():
                    close(each[name], wanted[name], f"{name}, {kind}")
                    assert slope.sharding.is_equivalent_to(place, 3), (name, kind)
        """
    )


def test_explicit_axes():
    run(
        """
        f = OPERATORS["topk"]
        expected = both(f)(x)
        devices = mesh(AxisType.Explicit)
        placed = jax.device_put(x, NamedSharding(devices, P("a", "b")))
        placed_sequences = jax.device_put(x, NamedSharding(devices, P("a")))
        tokens_expected = both(lambda x: st.token_choice(x, 5, 0.3).weights)(x)
        for using in (contextlib.nullcontext(), jax.set_mesh(devices)):
            with using:
                close(both(f)(placed), expected, "outside of jit")
                close(jax.jit(jax.vmap(jax.vmap(both(f))))(placed), expected, "mapped")
                close(jax.jit(jax.vmap(both(f), 1, 1))(placed), expected, "mapped over the second axis")
                moved = jax.jit(lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1])(placed)
                close([moved], [jax.jvp(f, (x,), (jnp.cos(x),))[1]], "forward mode")
                close([st.choose_lam(placed, 5)], [st.choose_lam(x, 5)], "choose_lam")
                close([st.choose_rank_lam(placed)], [st.choose_rank_lam(x)], "choose_rank_lam")
                tokens = both(lambda x: st.token_choice(x, 5, 0.3).weights)
                close(tokens(placed_sequences), tokens_expected, "token_choice, outside of jit")
        slopes = {
            name: jax.grad(lambda x: (f(x) * x).sum()) for name, f in {
                "topk": f, "expert_choice": lambda x: st.expert_choice(x, 2, 0.3, capacity=4).weights.mT,
            }.items()
        }
        for name, slope in slopes.items():  # of an array that is on no mesh
            expected = slope(x)
            with jax.set_mesh(devices):
                close([slope(x)], [expected], name)
        attention = lambda x: st.topk_attention(*[x[:, :, None]] * 3, x, x, 2, is_causal=True)
        expected = both(attention)(x)
        for f in (both(attention), jax.jit(both(attention))):
            with jax.set_mesh(devices):
                close(f(placed_sequences), expected, "topk_attention")
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


@pytest.mark.slow
def test_a_row_that_is_sharded_over_automatic_axes():
    """Nobody knows while tracing that it is: XLA gathers it, and results are those of one device."""
    run(
        """
        names = "topk_mag", "soft_sort", "topk_loss, spread", "expert_choice", "token_choice"
        every = lambda x: {name: both(OPERATORS[name])(x) for name in names}
        across = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P(None, "a", "b")))
        found, expected = jax.jit(every)(across), jax.jit(every)(x)
        for name in names:
            close(found[name], expected[name], name)
        """
    )


@pytest.mark.slow
def test_sharded_parameters_are_pruned_where_they_are():
    """Together, with axes of every kind: numbers are added up, and no weight moves."""
    run(
        """
        import sparsetopk
        params = {"one": x[:, 0], "two": x[:, 1:3, :8] / 3, "bias": w}
        specs = {"one": P("a", "b"), "two": P("b"), "bias": P()}
        weights = [np.asarray(params[name], np.float64).ravel() for name in ("one", "two")]
        dy = np.cos(np.arange(224.0))
        at = (np.concatenate(weights), 0.2 * 224 // 1 + 1, 0.1)
        value = sparsetopk.topk_mag(*at)
        slope = sparsetopk.topk_mag_vjp(*at, dy=dy).x

        def pruned(params, **options):
            found = st.prune_params(params, 0.2, 0.1, scope="global", **options)
            return found["one"], found["two"], found["bias"]

        def both(params, g, **options):
            y, pull = jax.vjp(lambda params: pruned(params, **options), params)
            dx = pull((*g, jnp.zeros_like(w)))[0]
            return y, (dx["one"], dx["two"])

        given = jnp.asarray(dy, jnp.float32)
        g = given[:96].reshape(8, 12), given[96:].reshape(8, 2, 8)

        def put(tree, specs, m):
            return jax.tree.map(lambda v, s: jax.device_put(v, NamedSharding(m, s)), tree, specs)

        gs = (specs["one"], specs["two"])
        for kind in (AxisType.Explicit, AxisType.Auto, None):
            m = mesh(kind or AxisType.Auto)
            f = both
            if kind is None:
                f = jax.shard_map(
                    lambda p, g: both(p, g, axis_name=("a", "b")), mesh=m,
                    in_specs=(specs, gs), out_specs=((*gs, P()), gs),
                )
            at = put(params, specs, m), put(g, gs, m)
            program = jax.jit(f).lower(*at).compile()
            text = program.as_text()
            assert moves(text) == ["all-reduce"], (kind, moves(text))
            shapes = [shape for shape, _ in collectives(text)]
            assert len(shapes) == (20 if kind is None else 10), (kind, len(shapes))
            sizes = re.findall(r"32\\[(.*?)\\]", " ".join(shapes))
            assert set(sizes) <= {"", "1"}, (kind, sizes)
            y, dx = program(*at)
            found = np.concatenate([np.ravel(v) for v in y[:2]])
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
            found = np.concatenate([np.ravel(v) for v in dx])
            np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-4)
            for v, spec in zip(y[:2], gs, strict=True):
                assert v.sharding.is_equivalent_to(NamedSharding(m, spec), v.ndim), (kind, v.sharding)
        try:
            jax.shard_map(lambda p: pruned(p), mesh=m, in_specs=(specs,), out_specs=(*gs, P()))(params)
        except ValueError as error:
            assert "axis_name must be given inside shard_map" in str(error), error
        else:
            raise AssertionError("no error")
        """
    )


@pytest.mark.slow
def test_sharded_parameters_are_pruned_each_by_itself():
    """In any way, whole, of ties, full, empty and of another dtype: as of one device in float64, in y, x
    and lam; and the program for many is hardly longer than for few."""
    run(
        """
        import sparsetopk
        ways = [P("a", "b"), P("b"), P(), P(None, "a"), P(("b", "a")), P(), P("a")]
        shapes = [(8, 12), (40, 64), (4, 8), (8, 300), (16, 4, 8), (0, 3), (600, 4)]
        keep = [0.2, 0.5, 1.0, 7, 0.0, 0, 0.01]
        parts = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in shapes]
        parts[3], parts[0] = parts[3].round(1), parts[0].at[0].set(0)
        parts[4] = parts[4].astype(jnp.bfloat16)
        g = [jnp.cos(1 + 3 * v) for v in parts]

        def wanted(v, g, share, lam, p=2.0, straight_through=False):
            x = np.asarray(v, np.float64).ravel()
            k = share if isinstance(share, int) else round(share * v.size)
            pulled = sparsetopk.topk_mag_vjp(x, k, lam, dy=np.asarray(g, np.float64).ravel(), p=p)
            y = sparsetopk.topk_mag(x, k, 0.0 if straight_through else lam, p=p)
            return y.reshape(v.shape), pulled.x.reshape(v.shape), pulled.lam.sum()

        def both(parts, g, lam, **options):
            f = lambda parts, lam: st.prune_params(parts, lambda i, _: keep[int(i)], lam, **options)
            y, pull = jax.vjp(f, parts, lam)
            return y, *pull(g)

        every = [{"lam": 0.1}, {"lam": 0.0}, {"lam": 0.3, "p": 1.5}]
        every.append({"lam": 0.1, "straight_through": True})
        for kind in (AxisType.Explicit, AxisType.Auto, None):
            m = mesh(kind or AxisType.Auto)
            put = lambda parts: [jax.device_put(v, NamedSharding(m, s)) for v, s in zip(parts, ways)]
            for options in every if kind == AxisType.Auto else every[:1]:
                want = [wanted(v, d, k, **options) for v, d, k in zip(parts, g, keep) if v.size]
                others = {name: v for name, v in options.items() if name != "lam"}
                f = lambda *at: both(*at, **others)
                if kind is None:
                    f = jax.shard_map(
                        lambda *at: both(*at, axis_name=("a", "b"), **others), mesh=m,
                        in_specs=(ways, ways, P()), out_specs=(ways, ways, P()),
                    )
                y, dx, dlam = jax.jit(f)(put(parts), put(g), options["lam"])
                for v, spec in zip(y, ways, strict=True):
                    assert v.sharding.is_equivalent_to(NamedSharding(m, spec), v.ndim), v.sharding
                y, dx = ([v for v in each if v.size] for each in (y, dx))
                for a, b, (wy, wx, _) in zip(y, dx, want, strict=True):
                    near = 1e-2 if a.dtype == jnp.bfloat16 else 1e-5
                    np.testing.assert_allclose(np.asarray(a, np.float64), wy, rtol=near, atol=near)
                    np.testing.assert_allclose(np.asarray(b, np.float64), wx, rtol=near, atol=near)
                np.testing.assert_allclose(dlam, sum(v for *_, v in want), rtol=1e-4)

        def length(count):
            some = [put(parts)[i % 4] for i in range(count)]
            prune = jax.jit(lambda parts: st.prune_params(parts, 0.2, 0.1))
            program = prune.lower(some).compile().as_text()
            assert moves(program) == ["all-reduce"], moves(program)
            sizes = re.findall(r"32\\[(.*?)\\]", " ".join(shape for shape, _ in collectives(program)))
            entries = [np.prod([int(v or 1) for v in size.split(",")]) for size in sizes]
            assert max(entries) <= 4 * count, sizes
            return program.count("\\n")

        m = mesh(AxisType.Auto)
        assert length(40) < 2 * length(8), (length(40), length(8))
        """
    )


@pytest.mark.slow
def test_sharded_parameters_in_second_derivatives_and_mapped():
    run(
        """
        parts, g = [x[:, 0], 2 * x[:, 1:3, :8]], [jnp.cos(3 * x[:, 0]), jnp.sin(x[:, 1:3, :8])]
        ks = [20, 13]
        by_itself = lambda parts: [st.topk_mag(v, k, 0.1, axis=None) for v, k in zip(parts, ks)]
        together = lambda parts: st.prune_params(parts, lambda i, _: ks[int(i)], 0.1)

        def second(prune):
            f = lambda parts: sum((v**3).sum() for v in prune(parts)) / 100
            inner = lambda parts: sum((a * b).sum() for a, b in zip(jax.grad(f)(parts), g))
            return lambda parts: (jax.jvp(jax.grad(f), (parts,), (g,))[1], jax.grad(inner)(parts))

        m = mesh(AxisType.Auto)
        put = [jax.device_put(v, NamedSharding(m, s)) for v, s in zip(parts, (P("a", "b"), P("b")))]
        found, expected = jax.jit(second(together))(put), second(by_itself)(parts)
        close(*map(jax.tree.leaves, (found, expected)), "second derivatives")
        rows = [jnp.stack([v, -2 * v]) for v in parts]
        found, expected = jax.jit(jax.vmap(together))(rows), jax.vmap(by_itself)(rows)
        close(found, expected, "mapped")
        """
    )


@pytest.mark.slow
def test_losses_and_routers_over_devices():
    """Classes that are sharded, and tokens that are: as in one piece."""
    run(
        """
        m = mesh(AxisType.Auto)
        smooth = jnp.asarray(rng.random((8, 4, 12)) < 0.1, jnp.float32)
        weight = jnp.linspace(0.5, 2.0, 12)
        for t, spec, options in (
            (labels, P("a"), {"completion": "best"}),
            (labels.at[0, 0].set(-100), P("a"), {"label_smoothing": 0.1, "weight": weight}),
            (smooth, P("a", None, "b"), {"completion": "spread", "p": 1.5}),
        ):
            weights = options.pop("weight", jnp.ones(12))
            f = lambda x, t, weights, **o: st.topk_loss(
                x, t, 3, 0.5, reduction="none", weight=weights, **options, **o
            )
            local = jax.shard_map(
                lambda *at: both(lambda x: f(x, *at[1:], axis_name="b"))(at[0]), mesh=m,
                in_specs=(P("a", None, "b"), spec, P("b")), out_specs=(P("a"), P("a", None, "b")),
            )
            close(jax.jit(local)(x, t, weights), both(lambda x: f(x, t, weights))(x), str(options))
        logits = jnp.asarray(rng.normal(size=(2, 16, 4)), jnp.float32)
        for name in ("expert_choice", "token_choice"):
            # experts choose among the tokens of a sequence; the balance is over all sequences
            over = "b" if name == "expert_choice" else ("a", "b")
            f = lambda x, **o: getattr(st, name)(x, 2, 0.3, capacity=x.shape[1], **o)
            local = jax.shard_map(
                lambda x: f(x, axis_name=over), mesh=m, in_specs=P("a", "b"),
                out_specs=st.Routing(*[P("a", None, "b")] * 3, P("a", "b"), P()),
            )
            found, expected = jax.jit(local)(logits), f(logits)
            close([found.weights], [expected.weights], name)
            close([found.balance], [expected.balance], name)
        """
    )


@pytest.mark.slow
def test_what_moves_between_devices():
    """As docs/jax.md has it: where a row itself is sharded, numbers of each row are added up."""
    run(
        """
        m = mesh(AxisType.Auto)
        row, rows = P(None, None, "b"), P("a")

        def program(f, spec, out):
            local = jax.shard_map(f, mesh=m, in_specs=spec, out_specs=out)
            text = jax.jit(local).lower(x).compile().as_text()
            shapes = " ".join(shape for shape, _ in collectives(text))
            sizes = [s.split(",") for s in re.findall(r"32\\[(.*?)\\]", shapes)]
            return moves(text), max(np.prod([int(v or 1) for v in size]) for size in sizes)

        forward = lambda x: st.topk_mask(x, 5, 0.3, axis_name="b")
        backward = lambda x: jax.vjp(forward, x)[1](jnp.cos(x))[0]
        for f, out in (
            (forward, row),
            (backward, row),
            (lambda x: st.topk_select(x, 5, 0.3, capacity=6, axis_name="b").values, row),
            (lambda x: st.topk_loss(x, labels, 3, 0.3, axis_name="b", reduction="none"), P()),
        ):
            kinds, most = program(f, row, out)
            assert kinds == ["all-reduce"], kinds
            assert most <= 32, most  # a number for each of the 8 x 4 rows
        place = NamedSharding(m, rows)
        for choose in (lambda x: st.choose_lam(x, 5), st.choose_rank_lam):
            text = jax.jit(choose).lower(jax.device_put(x, place)).compile().as_text()
            assert not moves(text), moves(text)
        """
    )


@pytest.mark.slow
def test_many_sharded_arrays():
    """As in one piece, in derivatives of both modes, and where entries tie; and the program for many of
    them is hardly longer than for few."""
    run(
        """
        m = mesh(AxisType.Auto)
        ways = [P("a", "b"), P("b"), P(), P(None, "a"), P(("b", "a"))]
        specs = [ways[i % 5] for i in range(40)] + [P()]
        parts = [jnp.asarray(rng.normal(size=(8, 4)).round(1), jnp.float32) for _ in specs[:-1]]
        parts.append(jnp.zeros((0, 3)))
        put = lambda parts: [jax.device_put(v, NamedSharding(m, s)) for v, s in zip(parts, specs)]
        flat = lambda parts: jnp.concatenate([jnp.ravel(v) for v in parts])
        g = [jnp.cos(3 * v + i) for i, v in enumerate(parts)]
        at = (put(parts), 300.5, 0.1), (put(g), 1.0, 0.3)

        def slopes(parts, k, lam, f):
            inner = lambda *at: (f(*at) * flat(g)).sum()
            return jax.grad(inner, (0, 1, 2))(parts, k, lam), jax.jvp(f, (parts, k, lam), at[1])

        many = lambda *at: flat(st.topk_mag_multi(*at))
        one = lambda parts, k, lam: st.topk_mag(flat(parts), k, lam)
        found = jax.jit(lambda *at: slopes(*at, many))(*at[0])
        expected = slopes(parts, 300.5, 0.1, one)
        close(map(np.asarray, jax.tree.leaves(found)), jax.tree.leaves(expected), "derivatives")
        hard = jax.jit(lambda p: flat(st.topk_mag_multi(p, 300.5, 0.0)))(at[0][0])
        whole = np.sort(np.abs(flat(parts)))[::-1]
        assert np.isclose(np.abs(hard).sum(), whole[:300].sum() + whole[300] / 2, rtol=1e-5)
        assert (np.asarray(hard) != 0).sum() == 301
        leading = [i for i, s in enumerate(specs) if s in (P("b"), P(), P(("b", "a")))]
        order = put(parts)
        some = jax.jit(lambda p: flat(st.topk_mag_multi(p, 150, 0.0)))([order[i] for i in leading])
        np.testing.assert_array_equal(some, one([parts[i] for i in leading], 150, 0.0))

        def length(count):
            f = lambda p: st.topk_mag_multi(p, 50, 0.1)
            return jax.jit(f).lower(at[0][0][:count]).compile().as_text().count("\\n")

        assert length(40) < 2 * length(10), (length(40), length(10))
        """
    )
