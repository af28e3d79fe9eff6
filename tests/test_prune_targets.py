"""What is pruned in real models, in which units, and how much of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsetopk.torch as st
from sparsetopk.torch.prune import erdos_renyi, finalize, prune, report


class Own(nn.Module):
    """As the Conv1D of GPT-2: a weight (in, out) in a module that torch does not know."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        return x @ self.weight + self.bias


def model():
    torch.manual_seed(0)
    parts = {
        "own": Own(),
        "attention": nn.MultiheadAttention(8, 2),
        "apart": nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        "transposed": nn.ConvTranspose2d(4, 8, 3),
        "bag": nn.EmbeddingBag(10, 8),
        "norm": nn.LayerNorm((4, 8)),
        "lstm": nn.LSTM(8, 8),
    }
    return nn.ModuleDict(parts)


PRUNED = [
    "own.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "apart.q_proj_weight",
    "apart.k_proj_weight",
    "apart.v_proj_weight",
    "apart.out_proj.weight",
    "transposed.weight",
    "bag.weight",
]
LEFT_OUT = ("norm.weight", "norm.bias", "lstm.weight_ih_l0", "lstm.weight_hh_l0")


def test_every_matrix_is_pruned_and_what_is_not_is_named():
    whole = model()
    total = sum(w.numel() for w in whole.parameters())
    pruner = prune(whole, 0.25, lam=0)
    rows = report(whole)
    assert [row.name for row in rows] == PRUNED
    assert all(row.fraction == pytest.approx(0.25, abs=0.02) for row in rows)
    covered = sum(torch.Size(row.shape).numel() for row in rows)
    assert pruner.coverage == (covered, total, LEFT_OUT)
    assert "left out: norm.weight, norm.bias" in repr(pruner)


def test_chosen_by_a_function():
    whole = model()
    prune(whole, 0.25, modules=lambda name, w: w.ndim == 2 and "lstm" in name)
    assert [row.name for row in report(whole)] == list(LEFT_OUT[2:])
    whole = model()
    prune(whole, 0.25, exclude=lambda name, w: "proj" in name)
    assert [row.name for row in report(whole)] == ["own.weight", "transposed.weight", "bag.weight"]


def test_attention_sees_pruned_projections():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    prune(attention, 0.5, lam=0.1)
    y = attention(x, x, x)[0]
    y.sum().backward()
    assert attention.parametrizations.in_proj_weight.original.grad.count_nonzero() > 0
    finalize(attention)
    torch.testing.assert_close(attention(x, x, x)[0], y)


def test_two_of_every_four():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 8), nn.Conv2d(4, 6, 3))
    prune(layers, unit="2:4", lam=0.1)
    for layer in layers:
        w = layer.parametrizations.weight.original
        expected = st.topk_mag(w.detach().reshape(-1, 4), 2, 0.1).view_as(w)
        torch.testing.assert_close(layer.weight, expected)
    finalize(layers, hard=True)
    for layer in layers:
        assert (layer.weight.reshape(-1, 4).count_nonzero(dim=1) == 2).all()


def test_semi_structured_tensors_take_the_result():
    """``to_sparse_semi_structured`` itself needs a GPU; what it asks of the values does not."""
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    layer = nn.Linear(64, 32)
    prune(layer, unit="2:4", lam=0)
    w = finalize(layer, hard=True).weight.detach().bfloat16()
    packed = sparse_semi_structured_from_dense_cutlass(w)
    torch.testing.assert_close(sparse_semi_structured_to_dense_cutlass(*packed), w, rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_blocks_by_their_norm(scope):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    dense = [layer.weight.detach().clone() for layer in layers]
    prune(layers, 0.25, unit=(2, 4), lam=0, scope=scope)
    norms = [w.unflatten(1, (-1, 4)).unflatten(0, (-1, 2)).norm(dim=(1, 3)) for w in dense]
    if scope == "tensor":
        masks = [st.topk_mask(n.flatten(), n.numel() / 4, 0).view_as(n) for n in norms]
    else:
        count = sum(n.numel() for n in norms)
        both = st.topk_mask(torch.cat([n.flatten() for n in norms]), count / 4, 0)
        parts = both.split([n.numel() for n in norms])
        masks = [mask.view_as(n) for mask, n in zip(parts, norms, strict=True)]
    for layer, w, mask in zip(layers, dense, masks, strict=True):
        whole = mask.repeat_interleave(2, 0).repeat_interleave(4, 1)
        torch.testing.assert_close(layer.weight, w * whole)


def test_budgets_by_the_sizes_of_layers():
    layers = nn.Sequential(nn.Linear(200, 100), nn.Conv2d(8, 16, 3), nn.Linear(4, 3))
    keep = erdos_renyi(layers, 0.1)
    weights = [layer.weight for layer in layers]
    kept = [keep[f"{i}.weight"] * w.numel() for i, w in enumerate(weights)]
    assert sum(kept) == pytest.approx(0.1 * sum(w.numel() for w in weights))
    assert keep["2.weight"] == 1.0
    ratio = kept[0] / kept[1]
    assert ratio == pytest.approx((200 + 100) / (8 + 16 + 3 + 3))
    prune(layers, keep, lam=0)
    assert [row.kept for row in report(layers)] == [round(k) for k in kept]


def test_frozen_masks_hold_whatever_the_optimiser_does():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    prune(layers, 0.25, lam=0.1)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def step():
        optimizer.zero_grad()
        layers(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    step()
    finalize(layers, hard=True, freeze=True)
    masks = [layer.weight.detach() != 0 for layer in layers[::2]]
    before = layers[0].weight.detach().clone()
    assert [int(mask.sum()) for mask in masks] == [128, 32]
    for _ in range(3):
        step()
    assert not torch.equal(layers[0].weight, before)
    finalize(layers)
    assert "parametrizations.0.weight" not in layers.state_dict()
    for layer, mask in zip(layers[::2], masks, strict=True):
        assert type(layer.weight) is nn.Parameter
        assert torch.equal(layer.weight != 0, mask)
        assert layer.weight in set(optimizer.param_groups[0]["params"])
