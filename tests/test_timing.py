"""The timing experiment: what is measured, that it goes on where it stopped, how it is judged."""

import math
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from sparsetopk.experiments import runs, timing

TINY = {"sizes": [16, 32, 64], "seconds": 0.001}
SOME = tuple(
    m
    for m in timing.METHODS
    if m.framework == "torch" and m.name in ("hard", "PAV", "Dykstra, 100")
)


@pytest.mark.filterwarnings("ignore:JAXopt is no longer maintained:DeprecationWarning")
@pytest.mark.parametrize("method", timing.METHODS, ids=lambda method: method.key)
def test_every_method_is_what_it_says(method):
    if not method.installed():
        pytest.skip(f"{method.needs} or {method.framework} is not installed")
    found = timing.measure(method, 64, "cpu", 0.001)
    assert all(0 < seconds < math.inf for seconds in found["seconds"].values())
    assert (found["error"] is not None) == method.relaxed
    if method.relaxed:
        assert found["error"] <= timing.EQUAL


def test_contestants_take_turns():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: (time.sleep(0.003), order.append("b"))}
    found = timing.minima(calls, 0.01)
    assert found["b"] >= 0.003 > found["a"]
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns[:6] == ["a", "b"] * 3


def test_a_finished_run_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "METHODS", SOME)
    made = []
    measure = timing.measure

    def counted(method, n, *rest):
        made.append((method.name, n))
        return measure(method, n, *rest)

    monkeypatch.setattr(timing, "measure", counted)
    options = runs.Options(tmp_path)
    first = timing.measure_all(options, TINY)
    assert len(made) == 9
    assert first["results"]["not installed"] == []
    made.clear()
    assert timing.measure_all(options, TINY) == first
    assert made == []
    (tmp_path / "timing" / "runs" / "torch-PAV-32.json").unlink()
    again = timing.measure_all(options, TINY)
    assert made == [("PAV", 32)]
    agreement = first["results"]["agreement"]
    assert again["results"]["agreement"] == agreement
    timing.measure_all(options, {**TINY, "seconds": 0.002})
    assert len(made) == 10


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    absent = timing.Method("torch", "PAV", "no_such_package", timing._torch_mask("pav"))
    monkeypatch.setattr(timing, "METHODS", (SOME[0], absent))
    result = timing.measure_all(runs.Options(tmp_path), TINY)
    assert list(result["results"]["times"]) == ["torch hard"]
    assert result["results"]["not installed"] == ["torch PAV"]
    title, ratios = next(iter(timing.tables(result).items()))
    assert title.endswith("Not installed: torch PAV")
    assert ratios[1][:4] == ["torch hard", "1", "1", "1"]


def test_disagreement_grows_with_n_and_lam():
    short, long = timing.disagreement(100), timing.disagreement(3000)
    assert short["0.01"] <= timing.EQUAL < short["1.0"] < long["1.0"]
    assert long["0.1"] > 0.05


def test_exponent():
    runs_ = {
        str(n): {"seconds": {"call": 1e-3 * max(n / 1000, 1.0) ** 1.5}}
        for n in (10, 100, 1000, 10_000, 100_000)
    }
    assert timing.exponent(runs_) == pytest.approx(1.5)
    assert math.isnan(timing.exponent({"10": runs_["10"]}))


def made_up(differences, ratio, device="cpu"):
    def time_of(call):
        return {"100": {"seconds": {"call": call, "hard": 1e-5}}}

    return {
        "settings": {"device": device, "sizes": [100]},
        "results": {
            "agreement": {str(n): dict.fromkeys(map(str, timing.LAMS), d) for n, d in differences},
            "times": {"torch PAV": time_of(1e-3), "torch Dykstra, 100": time_of(1e-3 * ratio)},
        },
    }


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([(100, 1e-16), (1000, 1e-7)], "reproduced"),
        ([(100, 1e-16), (1000, 1e-3)], "partly"),
        ([(100, 1e-3), (1000, 0.3)], "not reproduced"),
    ],
)
def test_agreement_is_judged_by_the_numbers(differences, verdict):
    claim = timing.claims(made_up(differences, 2.0))[0]
    assert claim.verdict == verdict
    assert ("0.3" in claim.ours) == (verdict == "not reproduced")


@pytest.mark.parametrize(
    ("device", "ratio", "verdict"),
    [
        ("cpu", 0.5, "not measured"),
        ("cuda", 0.5, "reproduced"),
        ("cuda", 2.0, "not reproduced"),
    ],
)
def test_accelerators_are_judged_on_accelerators_only(device, ratio, verdict):
    assert timing.claims(made_up([(100, 0.0)], ratio, device))[1].verdict == verdict
