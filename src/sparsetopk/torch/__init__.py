"""Fast, differentiable and sparse top-k operators on PyTorch tensors."""

from . import baselines, moe, nn, prune
from ._functions.losses import topk_loss, topk_value
from ._functions.norms import half_sq_support_norm, owl_norm, support_negentropy
from ._functions.operators import topk, topk_mag, topk_mask, topk_sign
from ._functions.ordering import choose_rank_lam, soft_rank, soft_sort
from ._functions.polytope import permutahedron, permutahedron_value
from ._functions.selection import (
    Selection,
    StraightThroughSelection,
    choose_lam,
    topk_select,
    topk_threshold,
)
from ._spread.multi import topk_mag_multi
from .moe import Routing, expert_choice, token_choice

__all__ = [
    # relaxed top-k
    "topk_mask",
    "topk",
    "topk_mag",
    "topk_mag_multi",
    "topk_sign",
    "topk_select",
    "topk_threshold",
    "choose_lam",
    "choose_rank_lam",
    # values and losses
    "topk_value",
    "topk_loss",
    # sorting, ranking and the permutahedron
    "soft_sort",
    "soft_rank",
    "permutahedron",
    "permutahedron_value",
    # norms and entropies
    "half_sq_support_norm",
    "owl_norm",
    "support_negentropy",
    # routing
    "expert_choice",
    "token_choice",
    # modules, applications and results
    "nn",
    "prune",
    "baselines",
    "moe",
    "Selection",
    "StraightThroughSelection",
    "Routing",
]
