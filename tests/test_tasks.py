"""The benchmark of tasks: what it counts, how it chooses, and that it goes on where it was."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from sparsetopk import cli
from sparsetopk.experiments.tasks import TASKS, page, patches, top_loss, training
from sparsetopk.experiments.tasks.methods import (
    CROSS_ENTROPY,
    LOSS_2,
    METHODS,
    RAMP,
    SMOOTHED,
    THREE,
    hard,
)
from sparsetopk.experiments.tasks.models import Indexer
from sparsetopk.experiments.tasks.training import Watched, beyond, first_settings
from sparsetopk.torch import topk_loss


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


def test_ramps_and_annealing_end_in_the_middle():
    for name, start, end in ((RAMP, 1.0, 0.0), ("LapSum", 3.0, 0.03), ("hard", 3.0, 3.0)):
        watched, seen = Watched(name, Indexer(30, {}, 0), 3.0), []
        for watched.progress in (0.0, 0.25, 0.5, 0.9):
            seen.append(watched.current())
        assert seen[0] == start
        assert seen[2:] == pytest.approx([end, end])
        assert start >= seen[1] >= end
        assert (seen[1] == start) == (name == "hard")


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
        return {"quality": quality, "rate": 0.1, "strength": 1.0, "form": ours}

    def result(**found):
        return {"results": {"methods": {k.replace("_", " "): run(v) for k, v in found.items()}}}

    ours, rival = "p = 2 straight-through", "LapSum"
    for of_ours, word in (([50.0, 52.0], "worse"), ([88.0, 91.0], "within one standard error")):
        said = page.verdict(result(**{ours: of_ours, rival: [90.0, 90.5]}))
        assert said.startswith("Best: LapSum (90.25 ± 0.25 %)")
        assert word in said
    assert "one of ours" in page.verdict(result(**{ours: [95.0, 96.0], rival: [90.0, 90.0]}))
    six = result(**{ours: [95.0, 96.0], rival: [90.0, 90.5]})
    for quality, word, by in (
        ([80.0, 81.0], "worse than", "-9.75 ± 0.56"),
        ([90.0, 90.4], "within one standard error of", "-0.05 ± 0.32"),
        ([90.0, 90.6], "as good as", "+0.05 ± 0.39"),
        ([92.0, 92.5], "better than", "+2.00 ± 0.35"),
    ):
        six["results"]["ours"] = run(quality)
        assert page.standing(six, run(quality)) == word
        assert page.difference(six, run(quality)) == by
        assert f"{word} LapSum (90.25 ± 0.25 %)" in page.verdict(six)
    assert page.chosen_form(six) is None
    six["results"]["methods"][ours]["validation"] = 91.0
    assert page.chosen_form(six) == ours


def test_losses_that_take_no_mask_are_those_of_torch_and_ours():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 8, generator=generator), torch.arange(300) % 12
    task = top_loss.TopLoss({"train": (x, y), "test": (x, y)}, 0)
    logits, labels = task.batch(torch.Generator().manual_seed(1))
    expected = {
        CROSS_ENTROPY: torch.nn.functional.cross_entropy(logits, labels),
        SMOOTHED: torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2),
        LOSS_2: topk_loss(logits, labels, 5, 2.5),
    }
    for name, value in expected.items():
        watched = Watched(name, task, 2.5)
        drawn = torch.Generator().manual_seed(1)
        loss = training.step_loss(watched, watched.in_training, watched.watch, drawn)
        assert torch.equal(loss, value), name
        loss.backward()
        assert watched.rows == task.BATCH
        assert 0 < watched.backward <= task.BATCH * 12
    best_five = task.head(x).topk(5).indices
    share = (best_five == y.unsqueeze(-1)).any(dim=-1).float().mean().item()
    assert task.quality(hard, "test") == pytest.approx(100 * share)


def test_noise_stays_inside_superclasses():
    groups = torch.tensor(top_loss.GROUPS)
    assert torch.equal(groups.bincount(), torch.full((20,), 5))
    y = torch.arange(100).repeat(100)
    data = {name: (torch.zeros(len(y), 1), y) for name in ("train", "validation", "test")}
    found = top_loss.noisy(data)
    assert torch.equal(found["test"][1], y)
    for name in ("train", "validation"):
        changed = found[name][1]
        assert torch.equal(groups[changed], groups[y])
        assert (changed != y).float().mean().item() == pytest.approx(0.4, abs=0.02)
        assert (changed - y).unique().numel() > 100  # each of the four others is taken
    assert not torch.equal(found["train"][1], found["validation"][1])


def test_clutter_has_its_digit_and_more():
    digit = torch.zeros(28, 28)
    digit[4:24, 4:24] = 1.0
    x, y = digit.flatten().repeat(50, 1), torch.arange(50)
    generator = torch.Generator().manual_seed(0)
    alone, labels = patches._draw(x, y, 200, 0, generator)
    side = patches.SIDE // patches.COARSER
    assert alone.shape == (200, side * side)
    assert torch.allclose(alone.sum(dim=-1), torch.tensor(400 / 9), atol=1e-3)
    assert labels.unique().numel() > 40
    among, _ = patches._draw(x, y, 200, patches.PIECES, generator)
    assert (among.sum(dim=-1) > 400 / 9 - 1e-3).all()
    assert among.sum() > alone.sum() + 1000
    assert among.max() <= 1
    corners = alone.unflatten(-1, (side, side)).amax(dim=-1).argmax(dim=-1)
    assert corners.unique().numel() > 15  # it lies anywhere


def test_a_patch_that_is_not_selected_is_not_seen():
    data = {"train": (torch.rand(4, 784), torch.arange(4))}
    task = patches.Patches(data, 0)
    x = data["train"][0].clone().requires_grad_()
    mask = torch.zeros(4, 49)
    mask[:, 8] = 1.0  # second row, second column: pixels 4 to 7 of 28 each way
    task.logits(x, lambda scores, k: mask).square().sum().backward()
    seen = (x.grad != 0).unflatten(-1, (28, 28)).any(dim=0)
    assert seen[4:8, 4:8].any()
    seen[4:8, 4:8] = False
    assert not seen.any()


@pytest.mark.parametrize("name", ["indexer-64", "pixels-20", "top-5", "patches"])
def test_a_task_goes_on_where_it_was(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "QUICK_STEPS", 2)
    assert cli.main(["tasks", name, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "Best: " in first
    content = json.loads((tmp_path / f"task-{name}" / "result.json").read_text())
    over = None if name == "top-5" else 0.5
    assert content["settings"] == {"seeds": 1, "steps": 2, "annealed over": over}
    assert ("hard ramp" in content["results"]["methods"]) == (name == "pixels-20")
    assert ("cross-entropy" in content["results"]["methods"]) == (name == "top-5")
    assert content["results"]["ours"]["settings"] == 6
    monkeypatch.setattr(training, "train", None)  # nothing is trained again
    assert cli.main(["tasks", name, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first


def test_names():
    assert list(TASKS) == list(training.MAKE)
    for name in (*THREE, *top_loss.TopLoss.ours):
        assert METHODS[name].ours
