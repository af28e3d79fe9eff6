"""Fast, differentiable and sparse top-k operators on PyTorch tensors."""

from .operators import topk, topk_mag, topk_mask, topk_sign

__all__ = ["topk", "topk_mag", "topk_mask", "topk_sign"]
