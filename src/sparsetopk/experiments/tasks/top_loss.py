"""A linear classifier on frozen features that should have the label among its five best.

The features are those of ViT-S/14 for CIFAR-100. A mask of the five best makes a loss: -log of what the
label has of it; other losses need no mask. With noise, some labels to train with and to choose settings
by become others of the same superclass; tests are never noisy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...torch import topk_loss
from .. import cifar, finetune, vit
from ..cifar import Images, Split
from ..data import find
from ..fitting import prepared
from ..runs import Options
from .methods import CROSS_ENTROPY, LOSS_2, LOSS_4_3, LOSS_TWO_SIDED, SMOOTHED
from .models import Data, Select, Task, Watch

K = 5
NOISE = 0.4
PIXELS = 56
TAKEN = {"train": 10_000, "validation": 2000, "test": 5000}  # of CIFAR-100
LEAST = 0.01  # of a mask, where it is 0 and its logarithm is taken
# The superclass of each class of CIFAR-100, in the order of their names.
GROUPS = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)


class TopLoss(Task):
    BATCH = 128
    rates = (0.001, 0.003)
    annealed_over = None  # a loss is not to become hard
    special = (CROSS_ENTROPY, SMOOTHED, LOSS_2, LOSS_4_3, LOSS_TWO_SIDED)
    ours = (LOSS_2, LOSS_4_3, LOSS_TWO_SIDED)

    def __init__(self, data: Data, seed: int) -> None:
        super().__init__()
        self.data = data
        x, y = data["train"]
        self.head = nn.Linear(x.shape[-1], int(y.max()) + 1)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = self.data["train"]
        at = torch.randint(len(y), (self.BATCH,), generator=generator)
        return self.head(x[at]), y[at]

    def loss(self, select: Select, generator: torch.Generator) -> Tensor:
        logits, y = self.batch(generator)
        of_label = select(logits, K).gather(-1, y.unsqueeze(-1))
        return -(of_label + LEAST).log().mean()

    def special_loss(
        self, name: str, watch: Watch, strength: float, generator: torch.Generator
    ) -> Tensor:
        logits, y = self.batch(generator)
        return _LOSSES[name](watch(logits), y, strength)

    def quality(self, select: Select, split: str) -> float:
        x, y = self.data[split]
        of_label = select(self.head(x), K).gather(-1, y.unsqueeze(-1))
        return 100 * (of_label > 0).float().mean().item()


def _smoothed(logits: Tensor, y: Tensor, strength: float) -> Tensor:
    """Labels are smoothed by 3, 9 or 23 % at first."""
    return F.cross_entropy(logits, y, label_smoothing=strength / (10 + strength))


_LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    CROSS_ENTROPY: lambda logits, y, _: F.cross_entropy(logits, y),
    SMOOTHED: _smoothed,
    LOSS_2: lambda logits, y, lam: topk_loss(logits, y, K, lam),
    LOSS_4_3: lambda logits, y, lam: topk_loss(logits, y, K, lam, p=4 / 3),
    LOSS_TWO_SIDED: lambda logits, y, lam: topk_loss(logits, y, K, lam, p=1.5, two_sided=True),
}


def features(options: Options) -> Data:
    """Of the splits, with mean 0 and deviation 1; of digits, in the quick form, their pixels."""
    images = cifar.cifar100(options) if options.full else cifar.digits()
    describe = _by_vit(images, options) if options.full else _pixels
    found = {}
    for name, count in TAKEN.items():
        split: Split = getattr(images, name)
        found[name] = (describe(split.x[:count]), split.y[:count])
    x = found["train"][0]
    mean, deviation = x.mean(dim=0), x.std(dim=0) + 1e-6
    return {name: ((x - mean) / deviation, y) for name, (x, y) in found.items()}


def _pixels(x: Tensor) -> Tensor:
    return x.flatten(1).float()


def _by_vit(images: Images, options: Options) -> Callable[[Tensor], Tensor]:
    """The class token beside the mean of the patches."""
    path = find(finetune.VIT_S14_FILE, [finetune.VIT_S14_SHA256], options)
    model = vit.load(path, vit.VIT_S14, images.classes).eval()

    @torch.no_grad()
    def describe(x: Tensor) -> Tensor:
        parts = []
        for part in x.split(100):
            tokens = model.norm(
                model.blocks(model.tokens(prepared(part, PIXELS, torch.device("cpu"))))
            )
            parts.append(torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=-1))
        return torch.cat(parts)

    return describe


def noisy(data: Data) -> Data:
    """Labels to train with and to choose by are, with a chance of 40 %, others of their superclass."""
    classes = int(data["train"][1].max()) + 1
    group = torch.tensor(GROUPS) if classes == len(GROUPS) else torch.arange(classes) // 5
    generator = torch.Generator().manual_seed(0)
    return {
        name: (x, y if name == "test" else _changed(y, group, generator))
        for name, (x, y) in data.items()
    }


def _changed(y: Tensor, group: Tensor, generator: torch.Generator) -> Tensor:
    others = (group[y].unsqueeze(-1) == group) & (y.unsqueeze(-1) != torch.arange(len(group)))
    drawn = others.float().multinomial(1, generator=generator).squeeze(-1)
    return torch.where(torch.rand(len(y), generator=generator) < NOISE, drawn, y)
