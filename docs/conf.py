"""Sphinx configuration."""

import sparsetopk
import sparsetopk.jax
import sparsetopk.torch

project = "sparsetopk"
author = "The sparsetopk authors"
release = version = sparsetopk.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
nitpicky = False
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "sparsetopk"


def check_coverage(app, env):
    """Fail the build on a public name that the API pages do not show."""
    pages = {"api.md": sparsetopk, "torch.md": sparsetopk.torch, "jax.md": sparsetopk.jax}
    for name, module in pages.items():
        page = (app.srcdir / name).read_text()
        full = [f"{module.__name__}.{public}" for public in module.__all__]
        missing = [public for public in full if f"{public}\n" not in page]
        if missing:
            raise RuntimeError(f"docs/{name} does not document {missing}")


def setup(app):
    app.connect("env-updated", check_coverage)
