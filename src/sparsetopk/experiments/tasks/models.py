"""The tasks: each a network that asks for a mask of its scores, and how good it is with k selected.

``loss(select, generator)`` is that of one batch, ``quality(select, split)`` a percentage on "validation"
or "test" data; ``select(scores, k)`` gives the mask. ``special`` names methods for this task alone; the
loss of those that take no mask is ``special_loss``, which passes its scores through ``watch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .methods import DISTILLED, RAMP, THREE

Select: TypeAlias = Callable[[Tensor, int], Tensor]
Watch: TypeAlias = Callable[[Tensor], Tensor]
Data: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # pictures (m, pixels) and labels by split


class Task(nn.Module):
    steps = 200
    rates: tuple[float, ...] = (0.003, 0.01)  # of Adam
    annealed_over: float | None = 0.5  # of the steps
    special: tuple[str, ...] = ()
    ours: tuple[str, ...] = THREE  # the forms of ours that six settings are for
    loss: Callable[[Select, torch.Generator], Tensor]
    quality: Callable[[Select, str], float]

    def importance(self) -> Tensor | None:
        """What a hard ramp goes by, if not by the scores."""
        return None

    def special_loss(
        self, name: str, watch: Watch, strength: float, generator: torch.Generator
    ) -> Tensor:
        raise NotImplementedError


class Indexer(Task):
    """One of n tokens, the needle, has a code that fits the query by a map that is not known."""

    CODE, VALUE, K, BATCH = 16, 4, 4, 64
    steps = 300
    rates = (0.01, 0.03)
    special = (DISTILLED,)

    def __init__(self, tokens: int, data: Data, seed: int) -> None:
        super().__init__()
        self.tokens, self.seed = tokens, seed
        self.index = nn.Linear(self.CODE, self.CODE, bias=False)
        self.gate = nn.Linear(self.CODE, self.CODE, bias=False)
        hidden = torch.randn(self.CODE, self.CODE, generator=torch.Generator().manual_seed(seed))
        self.hidden_map = torch.linalg.qr(hidden).Q

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        codes = torch.randn(batch, self.tokens, self.CODE, generator=generator)
        values = torch.randn(batch, self.tokens, self.VALUE, generator=generator)
        needle = torch.randint(self.tokens, (batch,), generator=generator)
        queries = codes[torch.arange(batch), needle] @ self.hidden_map
        return queries, codes, values, needle

    def scores(self, of: nn.Module, queries: Tensor, codes: Tensor) -> Tensor:
        return torch.einsum("bi,bni->bn", of(queries), codes) / math.sqrt(self.CODE)

    def loss(self, select: Select, generator: torch.Generator) -> Tensor:
        queries, codes, values, needle = self.draw(self.BATCH, generator)
        mask = select(self.scores(self.index, queries, codes), self.K)
        logits = self.scores(self.gate, queries, codes)
        weights = mask * (logits - logits.detach().amax(dim=-1, keepdim=True)).exp()
        weights = weights / weights.sum(dim=-1, keepdim=True)
        answer = torch.einsum("bn,bnv->bv", weights, values)
        return (answer - values[torch.arange(len(needle)), needle]).square().mean()

    def special_loss(
        self, name: str, watch: Watch, strength: float, generator: torch.Generator
    ) -> Tensor:
        """Attention to all tokens, and an indexer that is told by KL what it attends to."""
        queries, codes, values, needle = self.draw(self.BATCH, generator)
        weights = self.scores(self.gate, queries, codes).softmax(dim=-1)
        answer = torch.einsum("bn,bnv->bv", weights, values)
        error = (answer - values[torch.arange(len(needle)), needle]).square().mean()
        log_index = watch(self.scores(self.index, queries, codes)).log_softmax(dim=-1)
        return error + F.kl_div(log_index, weights.detach(), reduction="batchmean")

    def quality(self, select: Select, split: str) -> float:
        """The share of needles that are fetched."""
        seed = {"validation": 10_000, "test": 20_000}[split] + self.seed
        queries, codes, _, needle = self.draw(4000, torch.Generator().manual_seed(seed))
        mask = select(self.scores(self.index, queries, codes), self.K)
        return 100 * (mask[torch.arange(len(needle)), needle] > 0).float().mean().item()


class Pictures(Task):
    """A task on digits; the training set is what is left by the validation set."""

    BATCH = 128

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data
        self.pixels = data["train"][0].shape[-1]

    def batch(self, generator: torch.Generator, size: int | None = None) -> tuple[Tensor, Tensor]:
        x, y = self.data["train"]
        at = torch.randint(len(y), (size or self.BATCH,), generator=generator)
        return x[at], y[at]

    def logits(self, x: Tensor, select: Select) -> Tensor:
        raise NotImplementedError

    def loss(self, select: Select, generator: torch.Generator) -> Tensor:
        x, y = self.batch(generator)
        return F.cross_entropy(self.logits(x, select), y)

    def quality(self, select: Select, split: str) -> float:
        x, y = self.data[split]
        return 100 * (self.logits(x, select).argmax(dim=-1) == y).float().mean().item()


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Pixels(Pictures):
    """k pixels for all pictures; their scores are parameters."""

    rates = (0.01, 0.03)
    special = (RAMP,)

    def __init__(self, k: int, data: Data, seed: int) -> None:
        super().__init__(data)
        self.k = k
        self.pixel_scores = nn.Parameter(0.1 * torch.randn(self.pixels))
        self.network = _mlp(self.pixels, 64, 10)
        self.deviation = data["train"][0][:5000].std(dim=0)

    def importance(self) -> Tensor:
        of_pixels = self.network.get_parameter("0.weight").detach().norm(dim=0)
        return of_pixels * self.deviation

    def logits(self, x: Tensor, select: Select) -> Tensor:
        out: Tensor = self.network(x * select(self.pixel_scores, self.k))
        return out


class Instances(Pictures):
    """k pixels for each picture, by a network that sees all of it."""

    BATCH = 64  # rows of 784 scores, which take the dense methods long

    def __init__(self, k: int, data: Data, seed: int) -> None:
        super().__init__(data)
        self.k = k
        self.scorer = _mlp(self.pixels, 64, self.pixels)
        self.network = _mlp(self.pixels, 64, 10)

    def logits(self, x: Tensor, select: Select) -> Tensor:
        out: Tensor = self.network(x * select(self.scorer(x), self.k))
        return out


class Neighbours(Pictures):
    """An embedding in which the k nearest of other pictures should have the same label."""

    K = 9
    BATCH = 64

    def __init__(self, data: Data, seed: int) -> None:
        super().__init__(data)
        self.embedding = _mlp(self.pixels, 64, 16)

    def scores(self, x: Tensor, others: Tensor) -> Tensor:
        """Minus squared distances."""
        a, b = self.embedding(x), self.embedding(others)
        return 2 * a @ b.mT - a.square().sum(-1, keepdim=True) - b.square().sum(-1)

    def loss(self, select: Select, generator: torch.Generator) -> Tensor:
        (x, y), (others, labels) = self.batch(generator), self.batch(generator, 256)
        mask = select(self.scores(x, others), self.K)
        right = (mask * (labels == y.unsqueeze(-1))).sum(dim=-1) / self.K
        return -right.clamp_min(1e-3).log().mean()

    def quality(self, select: Select, split: str) -> float:
        x, y = self.data[split]
        others, labels = (part[:2000] for part in self.data["train"])
        votes = select(self.scores(x, others), self.K) @ F.one_hot(labels, 10).float()
        return 100 * (votes.argmax(dim=-1) == y).float().mean().item()


class Pruning(Pictures):
    """A network of which a tenth of every matrix is used; scores are sizes of weights."""

    KEEP = 0.1
    special = (RAMP,)

    def __init__(self, data: Data, seed: int) -> None:
        super().__init__(data)
        self.network = _mlp(self.pixels, 32, 32, 10)

    def logits(self, x: Tensor, select: Select) -> Tensor:
        for layer in self.network:
            if not isinstance(layer, nn.Linear):
                x = layer(x)
                continue
            size = layer.weight.abs().flatten()
            size = size / size.detach().square().mean().sqrt()
            mask = select(size, round(self.KEEP * size.numel())).reshape(layer.weight.shape)
            x = F.linear(x, layer.weight * mask, layer.bias)
        return x
