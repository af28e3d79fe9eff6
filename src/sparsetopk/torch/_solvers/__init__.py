"""Solvers as torch operators: for any device, for tracing, exporting and vmap."""
