"""The figures of the operators: their data have what the pictures show."""

import copy

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from sparsetopk.experiments import figures, runs
from sparsetopk.experiments.figures import SURFACES, WEIGHTS


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return figures.run(runs.Options(tmp_path_factory.mktemp("figures")))


def test_the_same_numbers_give_the_same_file(tmp_path):
    for name in "ab":
        figures.draw_permutahedra(tmp_path / name)
    for suffix in ("png", "svg"):
        first, second = ((tmp_path / n / f"permutahedra.{suffix}").read_bytes() for n in "ab")
        assert first == second


def test_continuity_is_told_by_refining_the_grid():
    s = np.linspace(-1, 1, 401)
    assert figures.continuous(figures.jumps(np.sin(s)))
    assert figures.continuous(figures.jumps(np.abs(s)))
    assert figures.continuous(figures.jumps(np.zeros_like(s)))
    assert not figures.continuous(figures.jumps(np.sign(s)))
    assert not figures.continuous(figures.jumps(np.sin(s) + 0.1 * (s > 0.3)))


def test_what_the_curves_show(result):
    results = result["results"]
    first, saturation = results["figure1"], results["saturation"]
    smooth = {
        place: {label for label, measured in curves.items() if figures.differentiable(measured)}
        for place, curves in (("first", first), ("saturation", saturation))
    }
    assert smooth["first"] == {"p = 4/3", "two-sided p = 3/2"}
    assert smooth["saturation"] == {"two-sided p = 3/2"}
    assert saturation["p = 4/3"]["slope"][1] == pytest.approx(1.6705, abs=2e-3)
    assert not figures.continuous(first["hard"]["value"])
    assert all(measured["zeros"] > 0.1 for measured in first.values())
    several = results["several_p"]
    assert {p for p, m in several.items() if figures.differentiable(m)} == {
        *("p = 8/7", "p = 4/3", "p = 3/2")
    }


def test_p_3_is_the_same_as_p_2_on_this_path():
    left_out, shown = (figures.Curve("", "", 1.0, {"p": p}) for p in (3.0, 2.0))
    for found, expected in zip(
        *(curve.along(figures.FIGURE_1) for curve in (left_out, shown)), strict=True
    ):
        inside = np.abs(found) > 0  # at the kinks, either slope may be given
        np.testing.assert_allclose(found[inside], expected[inside], atol=1e-6)


@pytest.mark.parametrize(("name", "corners"), list(zip(WEIGHTS, (3, 3, 6), strict=True)))
def test_vertices_are_the_permutations_in_turn(name, corners):
    found = figures.vertices(WEIGHTS[name])
    assert len(found) == corners
    np.testing.assert_allclose(np.sort(found), np.sort([WEIGHTS[name]] * corners))
    # Convex and in turn: all corners bend the same way, seen along (1, 1, 1).
    edges = np.roll(found, -1, axis=0) - found
    bend = np.cross(edges, np.roll(edges, -1, axis=0)).sum(axis=-1)
    assert (bend > 0.01).all() or (bend < -0.01).all()


def test_surfaces():
    hard, p_2, p_4_3 = (figures.measure_surface(s, 4001, 17) for s in SURFACES)
    assert not figures.continuous(hard["value"])
    assert figures.continuous(p_2["value"])
    assert not figures.differentiable(p_2)
    assert figures.continuous(p_4_3["value"])
    assert not figures.differentiable(p_4_3)
    centre = np.linspace(-0.2, 0.2, 11)
    for surface in SURFACES:
        value, slope = surface.at(centre, centre[::-1].copy())
        assert (value == 0).all()
        assert (slope == 0).all()
        ahead, behind = (surface.at(np.array([1.7 + h]), np.array([0.8]))[0] for h in (1e-6, -1e-6))
        slope = surface.at(np.array([1.7]), np.array([0.8]))[1]
        np.testing.assert_allclose((ahead - behind) / 2e-6, slope, atol=1e-6)


def test_negentropy():
    y = figures.simplex(31)
    assert len(np.unique(y, axis=0)) == 31 * 32 // 2
    np.testing.assert_allclose(y.sum(axis=-1), 1.0)
    measured = figures.measure_negentropy(31)
    assert measured["edges"] < 1e-12
    assert measured["above"] < 1e-12
    assert figures.st.support_negentropy([1 / 3] * 3, 2) == pytest.approx(-np.log(2))


def test_claims_follow_the_numbers(result):
    found = figures.claims(result)
    verdicts = [claim.verdict for claim in found]
    assert verdicts == ["reproduced", "reproduced", "partly", "reproduced", "reproduced"]

    def changed(*path, value):
        other = copy.deepcopy(result)
        at = other["results"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return [claim.verdict for claim in figures.claims(other)]

    assert changed("figure1", "p = 2", "zeros", value=0.0)[0] == "not reproduced"
    assert changed("surfaces", "p = 2", "value", value=[0.3, 0.3])[1] == "not reproduced"
    assert changed("figure1", "hard", "value", value=[0.4, 0.1])[1] == "not reproduced"
    assert changed("figure1", "p = 4/3", "slope", value=[0.3, 0.3])[2] == "not reproduced"
    assert changed("permutahedra", "w = (2/3, 1/3, 0)", value=5)[3] == "not reproduced"
    assert changed("negentropy", "above", value=0.1)[4] == "not reproduced"
    smooth = copy.deepcopy(result)
    for part in ("saturation", "surfaces"):
        smooth["results"][part]["p = 4/3"]["slope"] = [0.4, 0.1]
    assert figures.claims(smooth)[2].verdict == "reproduced"


def test_tables_have_a_header_and_full_rows(result):
    for rows in figures.tables(result).values():
        assert len(rows) > 3
        assert len({len(row) for row in rows}) == 1
