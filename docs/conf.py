"""Sphinx configuration."""

import os
import sys
from importlib.resources import files
from pathlib import Path

from sphinx.util.fileutil import copy_asset

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before it is imported: the gallery needs no more

import sparsetopk
import sparsetopk.jax
import sparsetopk.torch

sys.path.insert(0, str(Path(__file__).parent))  # for mathml, measured, gallery_look

project = "sparsetopk"
author = "The sparsetopk authors"
release = version = sparsetopk.__version__

extensions = [
    "mathml",
    "measured",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints_format = "short"
suppress_warnings = ["ref.python"]  # a type of one name in torch and in jax, where either will do
nitpicky = (
    True  # a link to a function that is not there fails the build; types of others may have none
)
nitpick_ignore_regex = [("py:class", ".*"), ("py:data", ".*"), ("py:obj", ".*")]
exclude_patterns = ["_build", "gallery"]
html_math_renderer = "mathml"
html_static_path = ["static", str(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf")]
html_css_files = ["site.css", "gallery.css"]
html_theme = "furo"
html_title = "sparsetopk"
html_show_copyright = False

# Scripts are run again when they have changed. What they take and when they ran is no part of the pages.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "reset_modules": ("gallery_look.reset",),
    "image_srcset": ["2x"],
    "thumbnail_size": (400, 280),
    "capture_repr": (),
    "min_reported_time": 3600,
    "write_computation_times": False,
    "show_signature": False,
    "remove_config_comments": True,
    "download_all_examples": False,
}


def check_coverage(app, env):
    """Fail the build on a public name that the API pages do not show."""
    pages = {"api.md": sparsetopk, "torch.md": sparsetopk.torch, "jax.md": sparsetopk.jax}
    for name, module in pages.items():
        page = (app.srcdir / name).read_text()
        full = [f"{module.__name__}.{public}" for public in module.__all__]
        missing = [public for public in full if f"{public}\n" not in page]
        if missing:
            raise RuntimeError(f"docs/{name} does not document {missing}")


def copy_explorer(app, exception):
    """The explorer is a page of its own: html_extra_path would put its files beside index.html."""
    if exception is None and app.builder.format == "html":
        copy_asset(app.srcdir / "explorer", app.outdir / "explorer", force=True)


def setup(app):
    app.connect("env-updated", check_coverage)
    app.connect("build-finished", copy_explorer)
