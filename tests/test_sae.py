"""Sparse autoencoders: what they select, count and save."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch.nn import RunningLam, TopKSAE

F64 = torch.float64
KINDS = ("topk", "abstopk", "batchtopk")


def sae(kind, **options):
    torch.manual_seed(0)
    made = TopKSAE(6, 40, 3, kind=kind, **options).to(F64)
    with torch.no_grad():
        made.b_enc.normal_()
        made.b_dec.normal_()
    return made


def hard(kind, before, k=3):
    """The definitions, entry by entry."""
    z = torch.zeros_like(before)
    if kind == "batchtopk":
        at = before.flatten().sort(descending=True).indices[: k * len(before)]
        z.view(-1)[at] = before.flatten()[at].relu()
        return z
    for i, row in enumerate(before):
        at = (row.abs() if kind == "abstopk" else row).sort(descending=True).indices[:k]
        z[i, at] = row[at] if kind == "abstopk" else row[at].relu()
    return z


@pytest.mark.parametrize("kind", KINDS)
def test_hard_selections_are_the_definitions(kind):
    layer, x = sae(kind, lam=0.0), torch.randn(3000, 6, dtype=F64)
    before = (x - layer.b_dec) @ layer.W_enc + layer.b_enc
    z = layer.encode(x)
    torch.testing.assert_close(z, hard(kind, before))
    torch.testing.assert_close(layer(x), z @ layer.W_dec + layer.b_dec)
    in_use = layer.eval().encode(x)
    if (
        kind == "batchtopk"
    ):  # the threshold of the one batch that was seen, which itself is not above
        least = torch.sort(before.flatten(), descending=True).values[9000 - 1]
        torch.testing.assert_close(layer.threshold, least)
        assert torch.equal(in_use, torch.where(before > layer.threshold, before, 0.0))
        assert (in_use != 0).sum() == 9000 - 1
    else:
        assert torch.equal(in_use, z)


@pytest.mark.parametrize("kind", KINDS)
def test_relaxed_in_training_with_gradients_for_what_competes(kind):
    layer, x = sae(kind, lam=0.5), torch.randn(50, 6, dtype=F64)
    before = (x - layer.b_dec) @ layer.W_enc + layer.b_enc
    expected = {
        "topk": lambda: st.topk(before, 3, 0.5).relu(),
        "abstopk": lambda: st.topk_mag(before, 3, 0.5),
        "batchtopk": lambda: st.topk(before.flatten(), 150, 0.5).reshape(50, 40).relu(),
    }[kind]()
    z = layer.encode(x)
    torch.testing.assert_close(z, expected)
    assert (z != 0).sum() > (hard(kind, before) != 0).sum()
    through = sae(kind, lam=0.5, straight_through=True)
    torch.testing.assert_close(through.encode(x), hard(kind, before))
    found = [torch.autograd.grad(v.sin().sum(), layer.W_enc)[0] for v in (z, expected)]
    torch.testing.assert_close(*found)


def test_counts_of_dead_latents_and_the_decoder():
    layer, x = sae("topk", lam=0.0), torch.randn(20, 6, dtype=F64)
    with torch.no_grad():
        layer.b_enc[7] = -100.0
    used = (layer.encode(x) != 0).any(0)
    layer(x)
    assert torch.equal(layer.idle, torch.where(used, 0, 40))
    assert layer.dead(40)[7]
    assert torch.equal(layer.dead(40), ~used)
    assert not layer.dead(41).any()
    layer.eval()(x)
    assert layer.idle.max() == 40
    with torch.no_grad():
        layer.W_dec.mul_(3.0)
    layer.normalize_decoder()
    torch.testing.assert_close(layer.W_dec.norm(dim=-1), torch.ones(40, dtype=F64))
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.idle, layer.idle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_lam_compile_and_empty_batches(kind):
    lam = RunningLam(2.0, 0.1) if kind != "batchtopk" else 0.1
    layer, x = sae(kind, lam=lam).float(), torch.randn(4, 5, 6)
    assert layer(x).shape == (4, 5, 6)
    if kind != "batchtopk":
        assert lam.step == 1
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert torch.equal(twin.idle, layer.idle)
    assert layer(x[:0]).shape == (0, 5, 6)
    assert layer.eval()(x[:0]).shape == (0, 5, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_for_sae_lens(kind, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    layer, x = sae(kind, lam=0.1).float(), torch.randn(30, 6)
    layer(x)
    layer.save_sae_lens(tmp_path, model_name="small")
    settings = json.loads((tmp_path / "cfg.json").read_text())
    weights = load_file(tmp_path / "sae_weights.safetensors")
    assert settings["d_in"] == 6
    assert settings["d_sae"] == 40
    assert settings["metadata"] == {"model_name": "small"}
    before = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    if kind == "batchtopk":
        assert settings["architecture"] == "jumprelu"
        z = before.relu() * (before > weights["threshold"])
    else:
        assert settings["architecture"] == kind
        z = hard(kind, before, settings["k"])
    torch.testing.assert_close(layer.eval()(x), z @ weights["W_dec"] + weights["b_dec"])


@pytest.mark.parametrize("kind", KINDS)
def test_sae_lens_itself_loads_it(kind, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    layer, x = sae(kind, lam=0.1).float(), torch.randn(30, 6)
    layer(x)
    layer.save_sae_lens(tmp_path, model_name="small")
    found = sae_lens.SAE.load_from_disk(tmp_path)
    assert found.cfg.metadata.model_name == "small"
    torch.testing.assert_close(found.encode(x), layer.eval().encode(x))
    torch.testing.assert_close(found(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TopKSAE(4, 8, 9), ValueError, r"k must be in \[1, 8\], got 9"),
        (lambda: TopKSAE(4, 8, 2, kind="best"), ValueError, "kind must be one of"),
        (lambda: TopKSAE(4, 8, 2, threshold_rate=0.0), ValueError, "threshold_rate must be in"),
        (lambda: TopKSAE(4, 8, 2)(torch.ones(3, 4).long()), TypeError, "x must"),
        (lambda: TopKSAE(4, 8, 2).dead(0), ValueError, "inputs must be at least 1"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
