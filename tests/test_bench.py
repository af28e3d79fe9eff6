"""``sparsetopk bench``, on the CPU and with few rows."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from sparsetopk import cli
from sparsetopk.torch import _bench as bench


@pytest.fixture
def small(monkeypatch):
    others = {name: f for name, f in bench._others().items() if "compiled" not in name}
    monkeypatch.setattr(bench, "_others", lambda: others)
    monkeypatch.setattr(bench, "_SECONDS", 1e-3)
    monkeypatch.setattr(bench.check, "__defaults__", (500,))
    monkeypatch.setattr(bench.measure, "__defaults__", (((4, 20),),))


def test_everything_is_right_and_written_down(small, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert cli.main(["bench", "--device", "cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [c["right"] for c in found["checked"]] == [True] * len(bench.OPERATORS)
    assert {t["operation"] for t in found["timed"]} >= {"copy", "torch.topk", "topk_mask"}
    assert all(t["forward"] > 0 and t["both"] > 0 for t in found["timed"])
    assert "Please send it" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [lambda y: y * (1 + 1e-4), lambda y: y.nan_to_num(0.0)])
def test_what_is_wrong_on_a_device_is_seen(small, monkeypatch, wrong, capsys):
    """Here float32 is the device: the values that it is compared with are float64."""
    first = bench.OPERATORS[0]

    def broken(x, *v):
        y = first.call(x, *v)
        return wrong(y) if x.dtype == torch.float32 else y

    monkeypatch.setattr(bench, "OPERATORS", (first._replace(call=broken),))
    assert cli.main(["bench", "--device", "cpu"]) == 2
    assert "NO" in capsys.readouterr().out


def test_derivatives_beside_a_jump(monkeypatch):
    """Of 100,000 rows some are so near to a jump that rounding decides on which side they are."""
    rows = bench._random_rows(100_000)
    monkeypatch.setattr(bench, "_random_rows", lambda n: tuple(v[75_640:75_650] for v in rows))
    found = {line["operator"]: line for line in bench.check("cpu", 10)}
    assert all(line["right"] for line in found.values()), found
    wrong = bench.OPERATORS[4]
    assert wrong.name == "topk_mag"

    def broken(x, k, lam):  # by a hundred times what is allowed
        y = wrong.call(x, k, lam)
        return y + 1e-3 * (x - x.detach()) if x.dtype == torch.float32 else y

    monkeypatch.setattr(bench, "OPERATORS", (wrong._replace(call=broken),))
    assert not bench.check("cpu", 10)[0]["right"]
