"""A small vision transformer, with timm's parameter names, and its form with mixtures of experts.

Pre-norm blocks, a class token, learned positions, an optional LayerScale; so weights of ViT-B/16
(Dosovitskiy et al., 2021) and of DINOv2's ViT-S/14 can be loaded from a safetensors file.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._maths.select import default_capacity
from ..torch._functions.operators import topk_mask
from ..torch._functions.selection import select_slots
from ..torch.moe import ExpertChoice, ExpertMLP, MixtureOfExperts, Routing, upcycle
from ..torch.moe import _normalized as normalized
from .runs import ExperimentError

RouterName = Literal["hard", "relaxed", "Dykstra-10"]
EVERY = 2  # every other block has experts, as in V-MoE


@dataclass(frozen=True)
class Shape:
    """``image`` is the number of pixels on a side that the positions are for."""

    image: int
    patch: int
    dim: int
    depth: int
    heads: int
    hidden: int
    channels: int = 3
    layer_scale: bool = False


VIT_B16 = Shape(224, 16, 768, 12, 12, 3072)
VIT_S14 = Shape(518, 14, 384, 12, 6, 1536, layer_scale=True)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    mlp: nn.Module

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.dim, eps=1e-6)
        self.attn = Attention(shape.dim, shape.heads)
        self.ls1 = LayerScale(shape.dim) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.dim, eps=1e-6)
        self.mlp = MLP(shape.dim, shape.hidden)
        self.ls2 = LayerScale(shape.dim) if shape.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(shape.channels, shape.dim, shape.patch, shape.patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class ViT(nn.Module):
    """Images ``[batch, channels, height, width]`` to logits. The head starts at 0."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, shape.dim))
        tokens = 1 + (shape.image // shape.patch) ** 2
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, tokens, shape.dim))
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.dim, eps=1e-6)
        self.head = nn.Linear(shape.dim, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x)))[:, 0])

    def tokens(self, x: Tensor) -> Tensor:
        """The class token and the patches, with their positions."""
        patches = self.patch_embed(x)
        positions = self.positions(patches.shape[-2], patches.shape[-1])
        patches = patches.flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1) + positions

    def positions(self, height: int, width: int) -> Tensor:
        """The positions, interpolated to a grid of height x width patches."""
        side = self.shape.image // self.shape.patch
        if (height, width) == (side, side):
            return self.pos_embed
        grid = self.pos_embed[:, 1:].mT.unflatten(-1, (side, side))
        grid = F.interpolate(grid, (height, width), mode="bicubic", antialias=True)
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).mT], dim=1)


def fix_embeddings(model: ViT) -> ViT:
    """Patches and positions stay embedded as they are, as Kumar et al. (2022, "How to fine-tune vision
    models with SGD") advise: their gradients are so large that the rest could not learn."""
    for parameter in (*model.patch_embed.parameters(), model.cls_token, model.pos_embed):
        parameter.requires_grad_(False)
    return model


def load(path: Path, shape: Shape, classes: int) -> ViT:
    """The ViT with the weights of a safetensors file, but for the head, which is new."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExperimentError(f"{path} is not a safetensors file: {error}") from error
    found = {key: value.float() for key, value in found.items() if not key.startswith("head.")}
    model = ViT(shape, classes)
    _check_keys(path, found, model.state_dict())
    model.load_state_dict(found, strict=False)
    return model


def _check_keys(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    wanted = {key: value for key, value in wanted.items() if not key.startswith("head.")}
    both = sorted(found.keys() & wanted.keys())
    wrong = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{key} {tuple(found[key].shape)} for {tuple(wanted[key].shape)}"
            for key in both
            if found[key].shape != wanted[key].shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in wrong.items() if keys)
        raise ExperimentError(f"{path} does not fit this ViT: {said}")


class DykstraChoice(nn.Module):
    """``ExpertChoice`` by 10 iterations of Dykstra's algorithm, as in the paper's experiment."""

    def __init__(self, lam: float, capacity_factor: float, normalize: bool) -> None:
        super().__init__()
        self.lam, self.capacity_factor, self.normalize = lam, capacity_factor, normalize

    def forward(self, logits: Tensor, mask: Tensor | None = None) -> Routing:
        n, experts = logits.shape[-2:]
        k = min(n, math.ceil(self.capacity_factor * n / experts))
        gates = logits.softmax(dim=-1).mT.contiguous()
        y = topk_mask(gates, k, self.lam, solver="dykstra", solver_options={"max_iter": 10})
        slots = select_slots(y.detach().flatten(0, -2), default_capacity(float(k), n))
        tokens = slots.reshape(*y.shape[:-1], -1)
        selected = y.gather(-1, tokens)
        dropped = y.detach().scatter(-1, tokens, 0.0).sum(dim=-1)
        weights = selected * gates.gather(-1, tokens)
        if self.normalize:
            weights = normalized(weights, tokens, n)
        return Routing(weights, tokens, selected, dropped, logits.new_zeros(()))


def make_router(
    name: RouterName, lam: float, capacity_factor: float, *, normalize: bool = False
) -> nn.Module:
    """An expert-choice router that selects by the gates, as in the paper; ``lam`` is for the relaxed
    ones."""
    if name == "Dykstra-10":
        return DykstraChoice(lam, capacity_factor, normalize)
    return ExpertChoice(
        lam=lam if name == "relaxed" else 0.0,
        capacity_factor=capacity_factor,
        select_on="gates",
        normalize=normalize,
    )


class Grouped(nn.Module):
    """A mixture whose experts choose among the tokens of so many images at once.

    The paper's 400 tokens are those of 8 images. Their number must divide that of a batch.
    """

    def __init__(self, moe: MixtureOfExperts, images: int) -> None:
        super().__init__()
        self.moe, self.images = moe, images

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.images * x.shape[1], x.shape[2])
        return self.moe(groups).reshape(x.shape)


def with_experts(model: ViT, experts: int, router: nn.Module, group: int) -> ViT:
    """Every other MLP becomes a mixture of new experts, in place."""
    for block in list(model.blocks)[EVERY - 1 :: EVERY]:
        assert isinstance(block, Block)
        fresh = ExpertMLP(experts, model.shape.dim, model.shape.hidden)
        block.mlp = Grouped(MixtureOfExperts(copy.deepcopy(router), fresh), group)
    return model


def upcycled(model: ViT, experts: int, router: nn.Module, group: int) -> ViT:
    """Every other MLP becomes a mixture of copies of itself, in place."""
    taken = {f"blocks.{i}.mlp" for i in range(EVERY - 1, model.shape.depth, EVERY)}
    upcycle(model, experts, router, where=lambda name, module: name in taken)
    for block in model.blocks:
        assert isinstance(block, Block)
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp = Grouped(block.mlp, group)
    return model


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
