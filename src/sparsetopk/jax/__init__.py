"""Fast, differentiable and sparse top-k operators on JAX arrays."""

from .losses import topk_loss, topk_value
from .operators import topk, topk_mag, topk_mask, topk_sign
from .selection import Selection, choose_lam, topk_select

__all__ = [
    # relaxed top-k
    "topk_mask",
    "topk",
    "topk_mag",
    "topk_sign",
    "topk_select",
    "choose_lam",
    # values and losses
    "topk_value",
    "topk_loss",
    # results
    "Selection",
]
