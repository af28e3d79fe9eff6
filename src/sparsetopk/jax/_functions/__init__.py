"""The public functions, from checked arguments to outputs."""
