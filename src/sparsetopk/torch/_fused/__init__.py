"""Forward and backward by the compiled core, for plain CPU tensors."""
