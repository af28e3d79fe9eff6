"""A digit somewhere in a large picture, among pieces of others (Mnih et al., 2014): k patches of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .models import Data, Pictures, Select

SIDE, PATCH, DIGIT = 84, 12, 28
PIECE, PIECES = 8, 8  # pixels on a side of what is no digit, and how many there are
COARSER = 3  # networks see a third of the resolution, which makes them cheap
STEPS = 600  # that the classifier is trained for without clutter
MADE = {"train": 20_000, "validation": 2000, "test": 2000}  # pictures, in the full form


class Patches(Pictures):
    """A network scores 7 x 7 patches; a classifier, which knows digits without clutter, sees k of them
    and blanks in the place of others. Both are trained."""

    K = 9  # as many as a digit covers where it lies best
    BATCH = 32
    steps = 100

    def __init__(self, data: Data, seed: int, known: dict[str, Tensor] | None = None) -> None:
        super().__init__(data)
        self.scorer = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 1, 6, stride=2, padding=2),
            nn.Flatten(),
        )
        self.network = classifier()
        if known is not None:
            self.network.load_state_dict(known)

    def logits(self, x: Tensor, select: Select) -> Tensor:
        side, patches = SIDE // COARSER, SIDE // PATCH
        picture = x.unflatten(-1, (1, side, side))
        mask = select(self.scorer(picture), self.K).unflatten(-1, (1, patches, patches))
        out: Tensor = self.network(picture * F.interpolate(mask, (side, side)))
        return out


def classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def without_clutter(data: Data, steps: int) -> dict[str, Tensor]:
    """The weights of a classifier that was trained with digits alone, anywhere in the picture."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = classifier()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    for _ in range(steps):
        x, y = _draw(*data["train"], 64, 0, generator)
        optimizer.zero_grad()
        side = SIDE // COARSER
        F.cross_entropy(network(x.unflatten(-1, (1, side, side))), y).backward()
        optimizer.step()
    return network.state_dict()


def cluttered(data: Data, share: float = 1.0) -> Data:
    """Pictures of 84 x 84 in a third of that resolution, made of each split's own digits."""
    generator = torch.Generator().manual_seed(0)
    return {
        split: _draw(*data[split], round(share * MADE[split]), PIECES, generator) for split in data
    }


def _draw(
    x: Tensor, y: Tensor, size: int, pieces: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    picture = torch.zeros(size, SIDE, SIDE)
    for _ in range(pieces):
        others = torch.randint(len(y), (size,), generator=generator)
        piece = _window(size, DIGIT, PIECE, generator)
        _paste(picture, _square(x[others])[piece], generator)
    at = torch.randint(len(y), (size,), generator=generator)
    _paste(picture, _square(x[at]), generator)
    return F.avg_pool2d(picture, COARSER).flatten(1), y[at]


def _paste(picture: Tensor, tiles: Tensor, generator: torch.Generator) -> None:
    """Each somewhere in its picture; the lighter of the two is seen."""
    where = _window(len(picture), SIDE, tiles.shape[-1], generator)
    picture[where] = torch.maximum(picture[where], tiles)


def _window(size: int, whole: int, part: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Indices of a square window in each of ``size`` squares."""
    corner = torch.randint(whole - part + 1, (2, size, 1), generator=generator)
    rows, columns = corner + torch.arange(part)
    return torch.arange(size).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)


def _square(x: Tensor) -> Tensor:
    """Rows of pixels as digits of 28 x 28, whatever they were."""
    side = round(x.shape[-1] ** 0.5)
    x = x.unflatten(-1, (side, side))
    return x if side == DIGIT else F.interpolate(x.unsqueeze(1), (DIGIT, DIGIT)).squeeze(1)
