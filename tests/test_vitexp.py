"""The ViT, CIFAR-100, and the experiments with top-k losses and with routers of experts."""

import copy
import dataclasses
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
safetensors = pytest.importorskip("safetensors.torch")

from sparsetopk.experiments import cifar, finetune, fitting, moe, vit
from sparsetopk.experiments.fitting import Recipe
from sparsetopk.experiments.runs import Checkpoint, ExperimentError, Options

SHAPE = vit.Shape(8, 2, 16, 2, 2, 32, channels=1)
TINY = Recipe("adamw", "cosine", 1e-2, 6, 2, 32, 8, save_every=3)


@pytest.fixture(scope="module")
def digits():
    return cifar.digits()


def weights(model, path, drop=(), **more):
    state = {k: v.half() for k, v in model.state_dict().items() if k not in drop}
    safetensors.save_file(state | more, path)
    return path


def test_made_up_file_loads_all_but_the_head(tmp_path):
    model = vit.ViT(SHAPE, 3)
    torch.nn.init.normal_(model.head.weight)
    path = weights(model, tmp_path / "w.safetensors")
    loaded = vit.load(path, SHAPE, 7)
    for key, value in loaded.state_dict().items():
        if key.startswith("head."):
            assert (value == 0).all()
        else:
            torch.testing.assert_close(value, model.state_dict()[key].half().float())
    assert loaded(torch.randn(2, 1, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize(
    ("drop", "more", "said"),
    [
        (("blocks.1.attn.qkv.bias",), {}, "missing: blocks.1.attn.qkv.bias"),
        ((), {"blocks.0.ls1.gamma": torch.ones(16)}, "unknown: blocks.0.ls1.gamma"),
        ((), {"norm.weight": torch.ones(5)}, r"of another shape: norm.weight \(5,\) for \(16,\)"),
    ],
)
def test_wrong_keys_are_named(tmp_path, drop, more, said):
    path = weights(vit.ViT(SHAPE, 3), tmp_path / "w.safetensors", drop, **more)
    with pytest.raises(ExperimentError, match=said):
        vit.load(path, SHAPE, 3)


def test_no_safetensors_file(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"not this")
    with pytest.raises(ExperimentError, match="not a safetensors file"):
        vit.load(tmp_path / "w.safetensors", SHAPE, 3)


DATA = os.environ.get("SPARSETOPK_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="SPARSETOPK_DATA is not set")


@needs_data
def test_the_real_file_loads():
    path = Path(DATA) / finetune.VIT_S14_FILE
    model = vit.load(path, vit.VIT_S14, 100).eval()
    with torch.no_grad():
        features = model.norm(model.blocks(model.tokens(torch.zeros(1, 3, 56, 56))))
    assert features.shape == (1, 17, 384)
    assert 0.1 < features.std() < 10


@needs_data
@pytest.mark.slow
def test_the_real_images(tmp_path):
    images = cifar.cifar100(Options(tmp_path, data=Path(DATA)))
    assert torch.bincount(images.test.y).tolist() == [100] * 100
    both = torch.cat([images.train.y, images.validation.y])
    assert torch.bincount(both).tolist() == [500] * 100
    x = torch.cat([images.train.x, images.validation.x])
    mean = x.double().mean(dim=(0, 2, 3)) / 255  # as published
    torch.testing.assert_close(
        mean, torch.tensor([0.50707516, 0.48654887, 0.44091784]).double(), atol=1e-6, rtol=0
    )


def test_archive_is_read(tmp_path):
    rng = np.random.default_rng(0)
    made = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("train", "test"):
            content = {b"data": made.reshape(6, -1), b"fine_labels": [3, 1, 4, 1, 5, 9]}
            (tmp_path / name).write_bytes(pickle.dumps(content))
            archive.add(tmp_path / name, f"cifar-100-python/{name}")
    train, test = cifar._from_archive(tmp_path / "a.tar.gz")
    assert train.y.tolist() == [3, 1, 4, 1, 5, 9]
    np.testing.assert_array_equal(test.x.numpy(), made)


def test_mosaics_are_cut():
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    rows = [np.concatenate(list(tiles[i : i + 3]), axis=1) for i in (0, 3)]
    import io

    buffer = io.BytesIO()
    image.fromarray(np.concatenate(rows)).save(buffer, "WEBP", lossless=True, exact=True)
    np.testing.assert_array_equal(cifar._cut(np.frombuffer(buffer.getvalue(), np.uint8)), tiles)


def test_corrupt_images_are_refused(tmp_path):
    (tmp_path / cifar.MOSAICS).write_bytes(b"broken")
    with pytest.raises(ExperimentError, match="corrupt"):
        cifar.load(Options(tmp_path / "out", data=tmp_path))


def test_splits_of_the_digits_do_not_meet(digits):
    sizes = [len(s) for s in (digits.train, digits.validation, digits.test)]
    assert sizes == [1197, 240, 360]
    from sklearn.datasets import load_digits

    count = np.bincount(load_digits().target)
    together = torch.cat([digits.train.y, digits.validation.y, digits.test.y])
    assert torch.bincount(together).tolist() == count.tolist()


def test_positions_at_native_size_are_the_parameters():
    model = vit.ViT(SHAPE, 3)
    assert model.positions(4, 4) is model.pos_embed
    assert model.positions(2, 3).shape == (1, 7, 16)
    with torch.no_grad():  # a constant stays constant, whatever the grid
        model.pos_embed[:, 1:] = 2.5
    torch.testing.assert_close(model.positions(7, 5)[:, 1:], torch.full((1, 35, 16), 2.5))


@pytest.mark.parametrize("name", moe.ROUTERS)
def test_upcycled_is_the_dense_model_where_all_tokens_are_taken(name):
    torch.manual_seed(0)
    dense = vit.ViT(SHAPE, 3)
    torch.nn.init.normal_(dense.head.weight)
    # k = all tokens: every expert takes every token, and the weights sum to 1
    router = vit.make_router(name, 0.1, capacity_factor=4.0, normalize=True)
    mixed = vit.upcycled(copy.deepcopy(dense), 4, router, group=2)
    x = torch.randn(4, 1, 8, 8)
    assert len(vit.mixtures(mixed)) == 1
    torch.testing.assert_close(mixed(x), dense(x), atol=1e-5, rtol=1e-5)


def test_dykstra_router_approaches_the_exact_one():
    torch.manual_seed(0)
    logits = torch.randn(2, 40, 4)
    exact = vit.make_router("relaxed", 0.02, 1.0)(logits)
    ours = vit.make_router("Dykstra-10", 0.02, 1.0)(logits)
    assert ours.tokens.shape == exact.tokens.shape
    dense = [
        torch.zeros(2, 4, 40).scatter(-1, r.tokens, r.selected.detach()) for r in (exact, ours)
    ]
    torch.testing.assert_close(dense[1].sum(-1), dense[0].sum(-1), atol=1e-3, rtol=0)
    assert (dense[0] - dense[1]).abs().max() < 0.3
    assert ((dense[1] > 0) & (dense[1] < 1)).any()


def test_rates():
    assert [TINY.rate(i) for i in (0, 1)] == [0.5e-2, 1e-2]
    assert TINY.rate(4) == pytest.approx(0.5e-2)
    assert dataclasses.replace(TINY, decay="linear").rate(3) == pytest.approx(0.75e-2)


def test_ranks():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 2.0]])
    assert fitting.ranks(logits, torch.tensor([2, 0, 1])).tolist() == [1, 2, 2]


class Interrupted(Exception):
    pass


class Bar:
    """A bar whose run is killed after so many steps."""

    def __init__(self, steps):
        self.total, self.left = 0, steps

    def refresh(self):
        pass

    def update(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def trained(digits, checkpoint=None, bar=None, seed=0):
    torch.manual_seed(seed)
    router = vit.make_router("relaxed", 0.05, 2.0)
    model = vit.with_experts(vit.ViT(SHAPE, 10), 4, router, group=8)
    loss = finetune.make_loss("p = 2")
    result = fitting.fit(model, loss, digits, TINY, seed, checkpoint, bar)
    return result["curve"], model.state_dict()


def test_same_seed_same_numbers_and_resumed_runs_too(digits, tmp_path):
    curve, state = trained(digits)
    again = trained(digits)
    checkpoint = Checkpoint(tmp_path / "c.checkpoint", {"a": 1})
    with pytest.raises(Interrupted):
        trained(digits, checkpoint, Bar(5))
    assert checkpoint.load()["state"]["step"] == 3
    resumed = trained(digits, checkpoint)
    for other_curve, other in (again, resumed):
        assert other_curve == curve
        assert all(torch.equal(other[key], state[key]) for key in state)
    assert trained(digits, seed=1)[1]["norm.weight"].ne(state["norm.weight"]).any()


def test_fixed_embeddings_do_not_move(digits):
    model = vit.fix_embeddings(vit.ViT(SHAPE, 10))
    before = copy.deepcopy(model.state_dict())
    fitting.fit(model, torch.nn.functional.cross_entropy, digits, TINY, seed=0)
    same = {key for key, value in model.state_dict().items() if torch.equal(value, before[key])}
    assert same == {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}


def without_seconds(value):
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def small(monkeypatch):
    """The quick forms, smaller."""
    quick = finetune.QUICK
    few = dataclasses.replace(quick.recipe, steps=2, warmup=1, batch=32)
    monkeypatch.setattr(
        finetune,
        "QUICK",
        dataclasses.replace(
            quick, recipe=few, rates=dict.fromkeys(finetune.NAMES, (0.1, 0.3)), seeds=2, rounds=2
        ),
    )
    monkeypatch.setattr(finetune, "PRETRAINING", 10)
    parts = {
        part: dataclasses.replace(
            getattr(moe.QUICK, part),
            recipe=dataclasses.replace(moe.QUICK.scratch.recipe, steps=2, warmup=1, batch=32),
            seeds=2,
        )
        for part in moe.PARTS
    }
    monkeypatch.setattr(moe, "QUICK", dataclasses.replace(moe.QUICK, **parts, rounds=2))


@pytest.mark.parametrize("experiment", [finetune, moe], ids=["finetune", "moe"])
def test_tiny_quick_forms(experiment, small, tmp_path):
    first = experiment.run(Options(tmp_path / "a"))
    name = first["experiment"]
    runs = sorted((tmp_path / "a" / name / "runs").glob("*.json"))
    runs[0].unlink()  # a run that was not finished
    again = experiment.run(Options(tmp_path / "a"))
    fresh = experiment.run(Options(tmp_path / "b"))
    assert without_seconds(first) == without_seconds(again) == without_seconds(fresh)
    written = json.loads((tmp_path / "a" / name / "result.json").read_text())
    assert written["form"] == "quick"
    experiment.draw(written, tmp_path / "figures")
    for suffix in ("png", "svg"):
        assert (tmp_path / "figures" / f"{name}.{suffix}").stat().st_size > 1000
    for claim in experiment.claims(written):
        assert "nan" not in claim.ours
    names = finetune.NAMES if name == "finetune" else moe.ROUTERS
    for rows in experiment.tables(written).values():
        assert tuple(row[0] for row in rows[1:]) == tuple(names)
        assert {len(row) for row in rows} == {len(rows[0])}


def test_pretraining_sees_half_of_the_classes(digits, monkeypatch):
    seen = []

    def fit(model, loss, images, recipe, seed):
        seen.append(sorted(set(images.train.y.tolist())))
        return fitting.fit(model, loss, images, dataclasses.replace(recipe, steps=1), seed)

    monkeypatch.setattr(finetune, "fit", fit)
    first, again = finetune.pretrained(digits, 8), finetune.pretrained(digits, 8)
    assert seen == [[0, 1, 2, 3, 4]] * 2
    assert "head.weight" not in first
    assert all(torch.equal(first[key], again[key]) for key in first)


def finetune_result(gains, *, seeds=3, loss_seconds=0.001):
    """Cross-entropy at 50 %, and every loss better by its gain, for each k."""
    noise = [0.0, 0.2, -0.1][:seeds]

    def runs(gain):
        return [{"accuracy": dict.fromkeys(("1", "3", "5", "10"), 50 + gain + e)} for e in noise]

    names = finetune.NAMES
    test = {name: runs(0.0) for name in names}
    for i, (name, gain) in enumerate(gains.items()):
        # not the same shift in every seed, or the difference would have no error
        test[name] = [
            {"accuracy": {k: v + gain + 0.1 * (i + 1) * (s - 1) for k, v in r["accuracy"].items()}}
            for s, r in enumerate(test[name])
        ]
    seconds = {
        "step": [1.0, 1.1, 0.9],
        "loss": {n: [0.0001 if n == finetune.BASELINE else loss_seconds] for n in names},
    }
    return {
        "settings": {"ks": [1, 3, 5, 10], "seeds": seeds, "backbone": "b", "data": "d"},
        "results": {
            "test": test,
            "at the edge of the sweep": [],
            "timing": {"seconds": seconds},
        },
    }


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({"p = 2": 3.0, "p = 4/3": 2.0}, "reproduced"),
        ({"p = 2": 3.0, "p = 4/3": 0.0}, "partly"),
        ({"p = 2": 0.0, "p = 4/3": 0.0}, "not reproduced"),
        ({"p = 2": -3.0, "p = 4/3": -2.0}, "not reproduced"),
        ({"p = 2": 0.0, "p = 4/3": 0.0, "spread": 5.0}, "not reproduced"),
    ],
)
def test_finetune_claim(gains, verdict):
    assert finetune.claims(finetune_result(gains))[0].verdict == verdict


def test_one_seed_decides_nothing():
    result = finetune_result({"p = 2": 3.0}, seeds=1)
    assert finetune.claims(result)[0].verdict == "not measured"


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.001, "reproduced"), (0.04, "partly"), (0.2, "not reproduced")]
)
def test_finetune_time_claim(seconds, verdict):
    result = finetune_result({}, loss_seconds=seconds)
    assert finetune.claims(result)[1].verdict == verdict


def moe_result(gains, ratio=1.5, seeds=3):
    """``gains[part, router]`` in points against the hard router."""

    def runs(part, name):
        gain = gains.get((part, name), 0.0)
        base = [40.0, 41.0, 40.5][:seeds]
        spread = [0.1, 0.0, -0.1] if name != "hard" else [0.0] * 3
        return [
            {"accuracy": b + gain + e, "fractional": 5.0}
            for b, e in zip(base, spread, strict=False)
        ]

    step = {"hard": [1.0, 1.1, 0.9], "relaxed": [1.05] * 3}
    step["Dykstra-10"] = [ratio * s for s in step["hard"]]
    part = {"seeds": seeds, "backbone": "b"}
    return {
        "settings": {"scratch": part, "upcycled": part, "data": "d", "lams": [0.03, 0.1, 0.3]},
        "results": {
            **{p: {n: runs(p, n) for n in moe.ROUTERS} for p in moe.PARTS},
            "lam": 0.1,
            "timing": {"seconds": {"step": step, "router": step}},
        },
    }


DYKSTRA = {("scratch", "Dykstra-10"): 2.0, ("upcycled", "Dykstra-10"): 2.0}


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        (DYKSTRA, "reproduced"),
        ({("scratch", "relaxed"): 2.0}, "partly"),
        ({("scratch", "Dykstra-10"): 2.0, ("upcycled", "Dykstra-10"): -2.0}, "not reproduced"),
        ({}, "not reproduced"),
        (dict.fromkeys(DYKSTRA, -2.0), "not reproduced"),
    ],
)
def test_moe_claim(gains, verdict):
    assert moe.claims(moe_result(gains))[0].verdict == verdict


def test_moe_says_if_lam_is_at_the_edge_of_the_sweep():
    result = moe_result({})
    assert "edge" not in moe.claims(result)[0].note
    result["results"]["lam"] = 0.3
    assert "at the edge of the sweep" in moe.claims(result)[0].note


def test_moe_one_seed_decides_nothing():
    assert moe.claims(moe_result(DYKSTRA, seeds=1))[0].verdict == "not measured"


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.5, "reproduced"), (1.0, "not reproduced"), (3.0, "not reproduced")]
)
def test_moe_time_claim(ratio, verdict):
    claim = moe.claims(moe_result({}, ratio))[1]
    assert claim.verdict == verdict


def test_noisy_times_decide_nothing():
    result = moe_result({})
    result["results"]["timing"]["seconds"]["step"]["Dykstra-10"] = [0.9, 2.4, 1.4]
    assert moe.claims(result)[1].verdict == "not measured"


def test_missing_weights_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "cifar100", lambda options: cifar.digits())
    monkeypatch.setenv("SPARSETOPK_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for experiment in (finetune, moe):
        with pytest.raises(ExperimentError, match="missing"):
            experiment.run(Options(tmp_path / "out", full=True))
    assert not (tmp_path / "out").exists()
