"""Fast, differentiable and sparse top-k operators on JAX arrays."""

from .operators import topk, topk_mag, topk_mask, topk_sign

__all__ = ["topk_mask", "topk", "topk_mag", "topk_sign"]
