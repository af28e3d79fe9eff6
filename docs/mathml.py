"""Formulas as MathML, written when the site is built: it shows them offline and without a script."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.logging import getLogger
from sphinx.util.math import get_node_equation_number

logger = getLogger(__name__)

# Commands of LaTeX that docutils has under another name only.
SYNONYMS = {r"\dots": r"\ldots", r"\big": r"\bigl"}
SYNONYM = re.compile(r"(\\dots|\\big)(?![A-Za-z])")

# These brackets have the height of a letter, whatever they enclose, and bars belong to it.
FENCES = (
    (re.compile(r"<mo>([⟨⟩⌊⌋⌈⌉])</mo>"), r'<mo stretchy="false">\1</mo>'),
    (
        re.compile(r'<mo class="mathopen">([|‖])</mo>'),
        r'<mo form="prefix" stretchy="false">\1</mo>',
    ),
    (re.compile(r"<mo>([|‖])</mo>"), r'<mo form="postfix" stretchy="false">\1</mo>'),
)


def render(node, **options):
    """The formula of the node; a warning, which fails the build, if docutils does not know its TeX."""
    tex = SYNONYM.sub(lambda match: SYNONYMS[match[1]], node.astext().strip())
    try:
        formula = tex2mathml(tex, **options)
    except MathError as error:
        logger.warning("formula: %s", error, location=node)
        return ""
    for pattern, fence in FENCES:
        formula = pattern.sub(fence, formula)
    return formula


def inline(translator, node):
    translator.body.append(render(node))
    raise nodes.SkipNode


def block(translator, node):
    number = get_node_equation_number(translator, node) if node["number"] else ""
    anchor = f' id="{node["ids"][0]}"' if node["ids"] else ""
    label = f'<span class="eqno">({number})</span>' if number else ""
    formula = render(node, as_block=True)
    translator.body.append(f'<div class="formula"{anchor}>{formula}{label}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
