"""Fast, differentiable and sparse top-k operators on PyTorch tensors."""
