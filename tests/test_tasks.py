"""The benchmark of tasks: what it counts, how it chooses, and that it goes on where it was."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from sparsetopk import cli
from sparsetopk.experiments.tasks import TASKS, page, training
from sparsetopk.experiments.tasks.methods import METHODS, RAMP, hard
from sparsetopk.experiments.tasks.models import Indexer
from sparsetopk.experiments.tasks.training import Watched, beyond, first_settings


def test_every_method_selects_k_in_use_and_says_what_it_does():
    scores = torch.randn(100, 30, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for name, method in METHODS.items():
        in_use = (method.in_use or hard)(scores, 4)
        assert torch.equal(in_use != 0, hard(scores, 4) != 0), name
        if name == RAMP:
            continue
        mask = method.mask(scores, 4, 0.5)
        if "straight-through" in name and "Gumbel" not in name:
            assert torch.equal(mask.detach(), hard(scores, 4)), name
    assert hard(scores, 4).sum() == 400
    assert METHODS[RAMP].mask(scores, 4, 1.0).sum() == 3000
    assert METHODS[RAMP].mask(scores, 4, 0.0).sum() == 400


def test_counts_are_those_of_masks_and_gradients():
    task = Indexer(30, {}, 0)
    scores = torch.randn(50, 30, requires_grad=True)
    watched = Watched("p = 2 straight-through", task, 0.5)
    watched.in_training(scores, 4).sin().cumsum(-1).sum().backward()
    assert watched.rows == 50
    assert watched.forward == 200
    assert watched.backward == (scores.grad != 0).sum()
    assert watched.off < 1e-6


def test_as_many_settings_for_all_and_more_at_an_edge():
    task = Indexer(30, {}, 0)
    for strengths in (True, False):
        settings = first_settings(task, strengths)
        assert len(set(settings)) == 6
        inside = sorted(settings, key=lambda s: (s.strength, s.rate))[2]
        assert beyond(settings, inside, strengths) == []
        for edge in (settings[0], settings[-1]):
            more = beyond(settings, edge, strengths)
            assert len(more) == 2
            assert not set(more) & set(settings)


def test_the_verdict_names_a_rival_that_is_better():
    def run(quality):
        return {"quality": quality, "rate": 0.1, "strength": 1.0}

    def result(**found):
        return {"results": {"methods": {k.replace("_", " "): run(v) for k, v in found.items()}}}

    ours, rival = "p = 2 straight-through", "LapSum"
    for of_ours, word in (([50.0, 52.0], "worse"), ([88.0, 91.0], "within one standard error")):
        said = page.verdict(result(**{ours: of_ours, rival: [90.0, 90.5]}))
        assert said.startswith("Best: LapSum (90.25 ± 0.25 %)")
        assert word in said
    assert "one of ours" in page.verdict(result(**{ours: [95.0, 96.0], rival: [90.0, 90.0]}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexer-64", "pixels-20", "pruning"])
def test_a_task_goes_on_where_it_was(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "QUICK_STEPS", 2)
    assert cli.main(["tasks", name, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "Best: " in first
    content = json.loads((tmp_path / f"task-{name}" / "result.json").read_text())
    assert content["settings"] == {"seeds": 1, "steps": 2}
    assert ("hard ramp" in content["results"]["methods"]) == (name != "indexer-64")
    monkeypatch.setattr(training, "train", None)  # nothing is trained again
    assert cli.main(["tasks", name, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first


def test_names():
    assert list(TASKS) == list(training.MAKE)
