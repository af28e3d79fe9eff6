"""Sphinx configuration."""

import sparsetopk

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
    """Fail the build on a public name that the API page does not show."""
    page = (app.srcdir / "api.md").read_text()
    missing = [name for name in sparsetopk.__all__ if f"sparsetopk.{name}\n" not in page]
    if missing:
        raise RuntimeError(f"docs/api.md does not document {missing}")


def setup(app):
    app.connect("env-updated", check_coverage)
