"""Fast, differentiable and sparse top-k operators on JAX arrays."""

from jax import export as _export

from ._functions.losses import topk_loss, topk_value
from ._functions.multi import topk_mag_multi
from ._functions.norms import half_sq_support_norm, owl_norm, support_negentropy
from ._functions.operators import topk, topk_mag, topk_mask, topk_sign
from ._functions.polytope import (
    choose_rank_lam,
    permutahedron,
    permutahedron_value,
    soft_rank,
    soft_sort,
)
from ._functions.selection import Selection, StraightThroughSelection, choose_lam, topk_select
from ._functions.selectors import SelectedTokens, select_tokens, topk_attention
from ._solvers.ffi import export_checks
from .moe import Routing, expert_choice, token_choice
from .prune import prune_params, sparsity

for _type in (Selection, StraightThroughSelection, Routing, SelectedTokens):
    _export.register_namedtuple_serialization(
        _type, serialized_name=f"sparsetopk.jax.{_type.__name__}"
    )

__all__ = [
    # relaxed top-k
    "topk_mask",
    "topk",
    "topk_mag",
    "topk_sign",
    "topk_mag_multi",
    "topk_select",
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
    # applications
    "prune_params",
    "sparsity",
    "expert_choice",
    "token_choice",
    "select_tokens",
    "topk_attention",
    "export_checks",
    # results
    "Selection",
    "StraightThroughSelection",
    "Routing",
    "SelectedTokens",
]
