"""The paper's figures and experiments. They need the extra ``experiments``.

The operators never import this package.
"""

EXPERIMENTS = ("figures", "timing", "pruning", "finetune", "moe")
"""Their names; each is a module of this package, see ``runs``."""
