"""The paper's figures and experiments. They need the extra ``experiments``.

The operators never import this package.
"""
