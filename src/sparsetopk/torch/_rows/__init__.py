"""Rows of one tensor: argument checks, the namespace of the maths, and outputs on live tensors."""
