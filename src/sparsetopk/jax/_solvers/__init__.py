"""Solvers: the compiled core as custom calls of XLA, and XLA operations."""
