"""The experiment on pruning: data, runs that are the same twice and after a kill, claims, figures."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from tqdm import tqdm

from sparsetopk.experiments import data, demo, digits, pruning
from sparsetopk.experiments.pruned_mlp import METHODS, Setting, Trainer, network, nonzeros, train
from sparsetopk.experiments.runs import Checkpoint, ExperimentError, Options

TINY = replace(
    pruning.QUICK,
    batch=128,
    epochs=2,
    best_epochs=2,
    sweep_epochs=1,
    variant_epochs=1,
    lrs=(0.3,),
    lams=(0.3, 1),
)
PRUNED = [method for method in METHODS if method != "dense"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data directory, an empty cache, no network."""
    monkeypatch.delenv("SPARSETOPK_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def offline(url, timeout):
        raise OSError("no network")

    monkeypatch.setattr(data.urllib.request, "urlopen", offline)
    return tmp_path


@pytest.fixture(scope="module")
def tensors():
    return tuple(map(torch.from_numpy, digits.digits()))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The quick form in a tiny setting."""
    out = tmp_path_factory.mktemp("tiny")
    return pruning.carry_out(TINY, Options(out))


def without_seconds(value):
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------ data


def test_digits_are_split_without_overlap():
    x, y, x_test, y_test = digits.digits()
    assert x.shape == (1348, 64)
    assert x_test.shape == (449, 64)
    assert len(y) == 1348
    assert len(y_test) == 449
    assert x.dtype == np.float32
    assert x.min() == 0
    assert x.max() == 1
    assert set(y) == set(y_test) == set(range(10))


def test_validation_is_taken_from_the_training_set():
    x, y, _, _ = every = digits.digits()
    x_rest, y_rest, x_chosen, y_chosen = digits.hold_out(every, 0.25)
    assert len(y_chosen) == 337
    together = np.concatenate([x_rest, x_chosen])
    assert sorted(map(bytes, together)) == sorted(map(bytes, x))
    assert sorted([*y_rest, *y_chosen]) == sorted(y)
    np.testing.assert_array_equal(digits.hold_out(every, 0.25)[2], x_chosen)


def test_missing_files_are_named(nowhere):
    for load, name in ((digits.mnist, "mnist.npz"), (digits.fashion_mnist, "train-images-idx3")):
        with pytest.raises(ExperimentError, match=f"{name}.* is missing"):
            load(Options(nowhere))


def test_corrupt_file_is_named(nowhere):
    (nowhere / "mnist.npz").write_bytes(b"half a file")
    with pytest.raises(ExperimentError, match=r"mnist\.npz is corrupt: its SHA-256 is"):
        digits.mnist(Options(nowhere, data=nowhere))
    (nowhere / "fashion-mnist").mkdir()
    (nowhere / "fashion-mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"half a file")
    with pytest.raises(ExperimentError, match="is corrupt"):
        pruning._fashion(Options(nowhere, data=nowhere))


def test_fashion_mnist_that_cannot_be_had_is_left_out(nowhere):
    found, left_out = pruning._fashion(Options(nowhere))
    assert found is None
    assert "Fashion-MNIST" in left_out[0]
    assert "no network" in left_out[0]


def test_idx_files(nowhere, monkeypatch):
    import gzip
    import hashlib

    pictures = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes([0, 0, 8, 3]) + np.array([2, 3, 4], ">i4").tobytes()
    content = gzip.compress(header + pictures.tobytes())
    (nowhere / "fashion-mnist").mkdir()
    (nowhere / "fashion-mnist" / "some.gz").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    found = digits._idx("some.gz", sha256, Options(nowhere, data=nowhere))
    np.testing.assert_array_equal(found, pictures)


def test_mnist():
    if data.at_hand("mnist.npz", Options(Path())) is None:
        pytest.skip("mnist.npz is not at hand; SPARSETOPK_DATA says where it is")
    x, _, x_test, y_test = digits.mnist(Options(Path()))
    assert x.shape == (60000, 784)
    assert x_test.shape == (10000, 784)
    assert x.max() == 1
    np.testing.assert_array_equal(np.bincount(y_test)[:3], [980, 1135, 1032])


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_numbers_twice(method, tensors, tmp_path):
    setting = Setting(method, 0.3, 0.3, relative=True, ramp=0.5, batch=128, epochs=2)
    runs = [train(setting, tensors, 3, Checkpoint(tmp_path / str(i), {})) for i in range(2)]
    assert without_seconds(runs[0]) == without_seconds(runs[1])


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_from_its_checkpoint(method, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsetopk.experiments.pruned_mlp.SAVE_EVERY", 2)
    setting = Setting(method, 0.3, 0.3, relative=True, ramp=0.8, batch=128, epochs=5)
    whole = train(setting, tensors, 0, Checkpoint(tmp_path / "whole", {}))

    class Stopped(Exception):
        pass

    done = []

    def stop(epochs):
        done.append(epochs)
        if sum(done) == 3:
            raise Stopped

    checkpoint = Checkpoint(tmp_path / "part", {})
    with pytest.raises(Stopped):
        train(setting, tensors, 0, checkpoint, stop)
    assert len(checkpoint.load()["curves"]["errors"]) == 2
    ticks = []
    assert without_seconds(train(setting, tensors, 0, checkpoint, ticks.append)) == without_seconds(
        whole
    )
    assert sum(ticks) == 5


@pytest.mark.parametrize("method", PRUNED)
def test_share_of_nonzeros(method, tensors):
    setting = Setting(method, 0.3, 1e-4, relative=True, batch=128, epochs=1)
    trainer = Trainer(setting, tensors, 0)
    trainer.epoch()
    kept = [int(layer.weight.count_nonzero()) for layer in trainer.sparse()[::2]]
    assert kept == [205, 102, 32]
    assert nonzeros(trainer.model) == pytest.approx(0.1, abs=0.005)


def test_hard_weights_are_the_sparse_ones(tensors):
    trainer = Trainer(Setting("hard", 0.3, batch=128), tensors, 0)
    before = trainer.model[0].weight.detach().clone()
    trainer.epoch()
    assert not torch.equal(trainer.model[0].weight, before)
    for ours, layer in zip(trainer.model[::2], trainer.sparse()[::2], strict=True):
        assert torch.equal(ours.weight, layer.weight)
        assert torch.equal(ours.bias, layer.bias)


def test_methods_start_alike():
    first, second = network(64, 5), network(64, 5, 3.0)
    assert torch.equal(3 * first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, network(64, 6)[0].weight)


def test_a_run_that_diverges_says_so(tensors, tmp_path):
    setting = Setting("dense", lr=1e20, batch=128, epochs=4)
    made = train(setting, tensors, 0, Checkpoint(tmp_path / "c", {}))
    assert made["diverged"]
    assert made["errors"] == made["sparse errors"] == [0.9] * 4


SCRIPT = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from sparsetopk.experiments import pruned_mlp, pruning
from sparsetopk.experiments.runs import Options
torch.set_num_threads(1)
pruned_mlp.SAVE_EVERY = 1
pruning.carry_out(replace(pruning.QUICK, **eval(sys.argv[2])), Options(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_killed_and_started_again(tmp_path):
    plan = {
        "epochs": 3,
        "best_epochs": 3,
        "sweep_epochs": 1,
        "variant_epochs": 1,
        "lrs": (0.3,),
        "lams": (1.0,),
    }

    def start(out):
        command = [sys.executable, "-c", SCRIPT, str(out), repr({**plan, "batch": 256})]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    disturbed = start(tmp_path / "disturbed")
    runs = tmp_path / "disturbed" / "pruning" / "runs"
    while len(list(runs.glob("*.json"))) < 3 or not list(runs.glob("*.checkpoint")):
        assert disturbed.poll() is None, "ended before it could be killed"
        time.sleep(0.002)
    os.kill(disturbed.pid, signal.SIGKILL)
    disturbed.wait()
    assert not (tmp_path / "disturbed" / "pruning" / "result.json").exists()
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    for out in ("disturbed", "undisturbed"):
        assert start(tmp_path / out).wait() == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    first, second = (
        json.loads((tmp_path / out / "pruning" / "result.json").read_text())
        for out in ("disturbed", "undisturbed")
    )
    assert without_seconds(first) == without_seconds(second)
    assert not list(runs.glob("*.checkpoint"))


# --------------------------------------------------------------------------------------------- the plan


def test_every_method_is_swept_with_the_same_budget():
    for plan in (pruning.FULL, pruning.QUICK):
        budgets = {len(set(pruning.swept_settings(plan, method))) for method in METHODS}
        assert budgets == {len(plan.lrs) * len(plan.lams)}


@pytest.mark.slow
def test_the_bar_ends_at_its_total(tmp_path, monkeypatch):
    bars = []

    def remember(*args, **kwargs):
        bars.append(tqdm(*args, **kwargs))
        return bars[-1]

    monkeypatch.setattr(pruning, "tqdm", remember)
    for _ in range(2):  # made, then read
        pruning.carry_out(replace(TINY, seeds=1, best_epochs=1), Options(tmp_path))
    assert [bar.n for bar in bars] == [bar.total for bar in bars]


def test_the_papers_setting():
    setting = pruning.paper_setting(pruning.FULL, "p = 2")
    assert (setting.lr, setting.lam, setting.batch, setting.epochs) == (1e-2, 1e-4, 128, 30)
    assert not setting.relative
    assert (setting.init, setting.ramp) == (1.0, 0.0)


def test_variants_change_one_thing():
    for base, _, setting in pruning.variants(pruning.QUICK):
        start = replace(
            pruning.paper_setting(pruning.QUICK, setting.method),
            epochs=pruning.QUICK.variant_epochs,
            **pruning.BASES[base],
        )
        changed = [k for k in vars(setting) if getattr(setting, k) != getattr(start, k)]
        assert len(changed) <= 1


def test_the_best_is_chosen_by_the_error_of_the_sweep():
    swept = [
        {"setting": vars(Setting("hard", lr=lr)), "error": error}
        for lr, error in ((0.1, 0.3), (0.3, 0.1), (1.0, 0.2))
    ]
    assert pruning._best(swept).lr == 0.3


def test_the_sweep_does_not_see_the_test_set(tmp_path, monkeypatch):
    """With labels of the test set that are all wrong, the choice is the same."""
    chosen = []
    for name, wrong in (("as it is", False), ("wrong", True)):
        x, y, x_test, y_test = digits.digits()
        labels = (y_test + 1) % 10 if wrong else y_test
        with monkeypatch.context() as patch:
            patch.setattr(digits, "digits", lambda each=(x, y, x_test, labels): each)
            patch.setattr(pruning, "variants", lambda plan: [])
            patch.setattr(pruning, "METHODS", ("dense", "hard"))
            made = pruning.carry_out(replace(TINY, lams=(1.0,)), Options(tmp_path / name))
        chosen.append(made["results"]["sweep"])
    assert chosen[0] == chosen[1]


# -------------------------------------------------------------------------------------------- results


def test_quick_form_in_small(result, tmp_path):
    results = result["results"]
    assert list(results["paper"]) == list(results["best"]) == list(METHODS)
    assert list(results["ramp"]) == PRUNED
    assert len(results["paper"]["hard"]["errors"]) == TINY.seeds
    pruning.draw(result, tmp_path)
    for name in ("pruning", "pruning-variants"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert b"<svg" in (tmp_path / f"{name}.svg").read_bytes()
    tables = pruning.tables(result)
    assert [row[0] for row in tables["Each method at its best"]] == ["method", *METHODS]
    changes = tables["One change at a time: test error"]
    assert [row[0] for row in changes] == ["", *pruning.CHANGES]
    assert sum(cell != "" for row in changes[1:] for cell in row[1:]) == len(results["variants"])
    assert len(pruning.claims(result)) == 5


def made_up(paper, best, data="mnist", nonzeros=0.1, seeds=3):
    """A result in which each method ends with the given error, and a spread of 0.1 %."""

    def summary(method, errors):
        error = errors.get(method, 0.5)
        curves = [[2 * error, error + 0.001 * seed] for seed in range(seeds)]
        return {
            "setting": vars(Setting(method)),
            "errors": curves,
            "sparse errors": curves,
            "nonzeros": [nonzeros] * seeds,
            "seconds": [[1.0, 1.0]] * seeds,
        }

    results = {
        "paper": {m: summary(m, paper) for m in METHODS},
        "best": {m: summary(m, best) for m in METHODS},
        "ramp": {m: summary(m, best) for m in PRUNED},
        "data": data,
    }
    return {"results": results}


GOOD = {"hard": 0.1, "p = 2": 0.05, "p = 4/3": 0.05, "straight-through": 0.05}
BAD = {"hard": 0.1, "p = 2": 0.2, "p = 4/3": 0.2, "straight-through": 0.15}


@pytest.mark.parametrize(
    ("paper", "best", "verdict"),
    [(GOOD, GOOD, "reproduced"), (BAD, GOOD, "partly"), (BAD, BAD, "not reproduced")],
)
def test_claims_follow_from_the_numbers(paper, best, verdict):
    found = pruning.claims(made_up(paper, best))
    assert [claim.verdict for claim in found] == [verdict] * 4 + ["reproduced"]


def test_a_difference_within_the_spread_is_none():
    near = {**GOOD, "hard": 0.0505}
    _, faster, better, comparable, _ = pruning.claims(made_up(near, near))
    assert faster.verdict == better.verdict == "not reproduced"
    assert comparable.verdict == "reproduced"


def test_networks_that_learned_nothing_are_not_comparable():
    nothing = dict.fromkeys(METHODS, 0.88)
    assert pruning.claims(made_up(nothing, nothing))[3].verdict == "not reproduced"


def test_one_of_two_operators_is_partly():
    half = {**GOOD, "p = 4/3": 0.2}
    verdicts = {claim.verdict for claim in pruning.claims(made_up(half, half))[1:4]}
    assert verdicts == {"partly"}


def test_what_cannot_be_judged():
    assert pruning.claims(made_up(GOOD, GOOD, data="digits"))[0].verdict == "not measured"
    single = pruning.claims(made_up(GOOD, GOOD, seeds=1))
    assert {claim.verdict for claim in single[:4]} == {"not measured"}
    assert pruning.claims(made_up(GOOD, GOOD, nonzeros=0.2))[-1].verdict == "not reproduced"


def test_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.train_all, "__defaults__", (2,))
    text = demo.main(tmp_path)
    picture = tmp_path / "demo.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert text.endswith(f"Picture: {picture}")
    rows = {line[:10].strip(): line for line in text.splitlines()}
    assert rows["dense"].endswith("100.0 %")
    found = {line.split()[0]: float(line.split()[1]) for line in demo.needles().splitlines()[2:]}
    assert found["hard"] < 20
    assert found["relaxed"] > 99
    for method in ("hard", "p = 2", "p = 4/3", "smooth"):
        assert rows[method].endswith(" 10.0 %")
