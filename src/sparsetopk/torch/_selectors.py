"""Layers that select tokens for each input, and learn which: exactly k in the forward, straight through.

What is selected is found without gradients; the relaxed top-k is then solved among the few entries that
are selected or compete, which is the same as among all, since what is 0 does not move the threshold. So
the cost of a backward grows with the slots, and not with the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._checks import check_positive_int
from .._maths.select import check_slots, default_capacity
from ._functions.operators import topk_mask
from ._modules import HardenedModule, Lam, selects
from ._rows.arguments import check_float_tensor, check_where


class _Selector(HardenedModule):
    """k slots in evaluation mode, and a few more for what competes while training."""

    k: int

    def __init__(
        self,
        k: int,
        lam: Lam,
        *,
        p: float,
        capacity: int | None = None,
        backward_k: int | None = None,
    ) -> None:
        super().__init__(check_positive_int("k", k), lam, hard_eval=True, p=p)
        self.capacity = capacity
        self.backward_k = (
            k if backward_k is None else check_positive_int("backward_k", backward_k, k)
        )
        if capacity is not None:
            check_slots(check_positive_int("capacity", capacity), k, capacity + k)

    def slots(self, n: int) -> int:
        if self.k > n:
            raise ValueError(f"k must be in [1, n] with n={n}, got {self.k}")
        if not self.training:
            return self.k
        return default_capacity(self.k, n) if self.capacity is None else min(n, self.capacity)

    def select(self, scores: Tensor, n: int, every: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Weights of the slots ``[..., slots]``, 1 for the k largest of n scores, and which these are.

        Scores are in decreasing order, so that the first k slots are the hard selection; -inf is no
        candidate. ``every`` gives all n scores of some rows, to count what competes: a lam with which
        all do would else look as if it left only so many as there are slots.
        """
        lam, slots = self.current_lam, scores.shape[-1]

        def masked(of: Tensor) -> Tensor:
            return topk_mask(of, self.backward_k, lam, **self.options)

        relaxed = masked(scores)
        self.watch(
            lambda: _fractional(relaxed.detach()),
            scores.numel() // max(slots, 1),
            n,
            selects(self.k, n),
            among_all=lambda: _fractional(masked(every())),
        )
        selected = torch.arange(slots, device=scores.device) < self.k
        selected = selected & (scores.detach() > -torch.inf)
        return selected.to(relaxed.dtype) + (relaxed - relaxed.detach()), selected


def _fractional(y: Tensor) -> Tensor:
    return (y > 0) & (y < 1)


class SelectedTokens(NamedTuple):
    """What a ``TokenSelector`` has selected: ``[..., slots]``, and tokens ``[..., slots, dim]``."""

    tokens: Tensor  # times their weights
    weights: Tensor  # 1 for what is selected, 0 for what competes; both have a derivative
    indices: Tensor
    selected: Tensor  # whether a slot is of the k


class TokenSelector(_Selector):
    r"""k of n tokens for each input, by scores that learn from what the rest of the network needs.

    ``scorer`` gives a score to every token, ``[..., n, dim]`` to ``[..., n]`` or ``[..., n, 1]``; by
    default a linear layer. In ``eval()`` there are k slots, in the order of the tokens. In ``train()``
    the first k are the same, and the slots after them hold tokens that compete: they are 0 in the
    forward and have the relaxed derivative in the backward, so that what follows should treat a token
    that is 0 as none (a sum over slots does). ``mask`` is True where there is a token.

    ``backward_k``, at most k, is the k of the derivative. Where few of the k are what is looked for, as
    in retrieval, 1 is better: the derivative of top-k moves a token over the boundary and no further,
    that of top-1 moves it to the front.

    >>> selector = TokenSelector(k=3, dim=8)
    >>> selector.eval()(torch.randn(2, 20, 8)).tokens.shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        k: int,
        dim: int,
        lam: Lam = 1.0,
        *,
        p: float = 2.0,
        capacity: int | None = None,
        backward_k: int | None = None,
        scorer: nn.Module | None = None,
    ) -> None:
        super().__init__(k, lam, p=p, capacity=capacity, backward_k=backward_k)
        self.scorer = nn.Linear(dim, 1) if scorer is None else scorer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> SelectedTokens:
        n = check_float_tensor("x", x).shape[-2]
        scores = self.scorer(x)
        scores = scores.squeeze(-1) if scores.ndim == x.ndim else scores
        if mask is not None:
            scores = scores.masked_fill(~check_where(mask, scores, "mask"), -torch.inf)
        best = scores.detach().topk(self.slots(n), dim=-1).indices
        # The hard selection in the order of the tokens, and then what competes in decreasing order.
        weights, selected = self.select(scores.gather(-1, best), n, scores.detach)
        order = torch.where(selected, best, n + torch.arange(best.shape[-1], device=x.device))
        order = order.argsort(dim=-1)
        weights, selected, indices = (v.gather(-1, order) for v in (weights, selected, best))
        tokens = x.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, x.shape[-1]))
        tokens = tokens * weights.to(tokens.dtype).unsqueeze(-1)
        return SelectedTokens(tokens, weights, indices, selected)


class PatchSelector(TokenSelector):
    """k of the square patches of a picture, ``[batch, channels, height, width]``, as tokens.

    Patches come row by row, each as its channels by rows by columns. ``scorer`` sees the patches.

    >>> PatchSelector(k=2, patch=4, channels=1).eval()(torch.randn(3, 1, 16, 12)).tokens.shape
    torch.Size([3, 2, 16])
    """

    def __init__(
        self,
        k: int,
        patch: int,
        channels: int,
        lam: Lam = 1.0,
        *,
        p: float = 2.0,
        capacity: int | None = None,
        backward_k: int | None = None,
        scorer: nn.Module | None = None,
    ) -> None:
        dim = channels * patch * patch
        super().__init__(k, dim, lam, p=p, capacity=capacity, backward_k=backward_k, scorer=scorer)
        self.patch = patch

    def forward(self, x: Tensor, mask: Tensor | None = None) -> SelectedTokens:
        height, width = check_float_tensor("x", x).shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"x must have sides that are multiples of patch={self.patch}, got {tuple(x.shape)}"
            )
        patches = nn.functional.unfold(x, self.patch, stride=self.patch)
        return super().forward(patches.mT, mask)


class TopKAttention(_Selector):
    r"""Attention of each query to k keys, which a small indexer selects, and learns to.

    .. math:: o_i = \frac{\sum_j y_{ij}\, e^{\langle q_i, k_j \rangle/\sqrt{d}}\, v_j}
                         {\sum_j y_{ij}\, e^{\langle q_i, k_j \rangle/\sqrt{d}}}, \qquad
              y_i = \mathrm{topk\_mask}(\langle a_i, b_\cdot \rangle / \sqrt{d'}, k, \lambda)

    for each head, with one selection for all of them, by a and b of size d' = ``index_dim``. y is 1 for
    the k selected keys in the forward, and has the relaxed derivative for these and for the keys that
    compete. Index scores of all keys are computed for ``chunk`` queries at a time and without
    gradients: nothing of size L x L is kept, and the backward gathers ``capacity`` keys for every query.

    ``causal=True`` lets a query see no later key; ``mask``, ``[batch, L]``, is True where tokens are.
    Queries that see no key give 0. ``backward_k`` is that of ``TokenSelector``.

    >>> layer = TopKAttention(dim=32, heads=4, k=4)
    >>> layer(torch.randn(2, 50, 32)).shape
    torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        k: int,
        lam: Lam = 1.0,
        *,
        index_dim: int = 32,
        causal: bool = False,
        capacity: int | None = None,
        backward_k: int | None = None,
        p: float = 2.0,
        chunk: int = 512,
    ) -> None:
        super().__init__(k, lam, p=p, capacity=capacity, backward_k=backward_k)
        if dim % check_positive_int("heads", heads):
            raise ValueError(f"dim must be a multiple of heads={heads}, got {dim}")
        self.heads, self.causal, self.chunk = heads, causal, check_positive_int("chunk", chunk)
        self.index = nn.Linear(dim, 2 * index_dim, bias=False)
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if check_float_tensor("x", x).ndim != 3:
            raise ValueError(f"x must have the shape [batch, L, dim], got {tuple(x.shape)}")
        batch, length, dim = x.shape
        if mask is not None:
            mask = check_where(mask, x[..., 0], "mask").broadcast_to(batch, length)
        a, b = self.index(x).chunk(2, dim=-1)
        a = a / math.sqrt(a.shape[-1])
        at, allowed = self._candidates(a.detach(), b.detach(), mask)
        scores = (a.unsqueeze(2) * _rows_at(b, at)).sum(dim=-1)
        y, selected = self.select(
            scores.masked_fill(~allowed, -torch.inf),
            length,
            lambda: self._scores(a.detach(), b.detach(), mask, max(0, length - self.chunk)),
        )
        q, k, v = self.inputs(x).chunk(3, dim=-1)
        heads = self.heads, dim // self.heads
        q = q.reshape(batch, length, heads[0], 1, heads[1]) / math.sqrt(heads[1])
        k, v = (_rows_at(each, at).reshape(*at.shape, *heads).transpose(2, 3) for each in (k, v))
        logits = (q * k).sum(dim=-1).masked_fill(~allowed.unsqueeze(2), -torch.inf)
        weights = _exp(logits, selected.unsqueeze(2)) * y.to(logits.dtype).unsqueeze(2)
        # At least 1, but for queries that see no key.
        total = weights.sum(dim=-1, keepdim=True).clamp_min(0.5)
        out = ((weights / total).unsqueeze(-1) * v).sum(dim=-2)
        return self.output(out.reshape(batch, length, dim))

    @torch.no_grad()
    def _candidates(self, a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys with the largest index scores, ``[batch, L, slots]``, and which may be seen."""
        length = a.shape[1]
        slots = self.slots(length)
        found = [
            self._scores(a, b, mask, first).topk(slots, dim=-1)
            for first in range(0, length, self.chunk)
        ]
        scores, at = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return at, scores > -torch.inf

    def _scores(self, a: Tensor, b: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """Of all keys, for a chunk of queries; -inf where a key may not be seen."""
        keys = torch.arange(b.shape[1], device=a.device)
        scores = a[:, first : first + self.chunk] @ b.mT
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        if self.causal:
            later = keys > keys[first : first + self.chunk].unsqueeze(-1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def _exp(logits: Tensor, selected: Tensor) -> Tensor:
    """Exponentials over the largest of those that are selected, whatever logits compete with them.

    What competes may be far above; it is 0 in the forward, and its derivative is kept finite.
    """
    top = logits.detach().masked_fill(~selected, -torch.inf).amax(dim=-1, keepdim=True)
    most = math.log(torch.finfo(logits.dtype).max) / 2
    return (logits - top.nan_to_num(neginf=0.0)).clamp(max=most).exp()


def _rows_at(x: Tensor, at: Tensor) -> Tensor:
    """x ``[batch, L, dim]`` at indices ``[batch, ...]``."""
    batch, length, dim = x.shape
    first = length * torch.arange(batch, device=x.device).reshape(-1, *[1] * (at.ndim - 1))
    return x.reshape(-1, dim).index_select(0, (at + first).flatten()).reshape(*at.shape, dim)
