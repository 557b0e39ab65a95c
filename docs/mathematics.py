"""Formulas as MathML, which browsers show by themselves: `$...$` in a line, `$$...$$` on lines of their
own, as GitHub reads them."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of a formula: \(...\) in a line, \[...\] on its own.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


# The bars of norms and conditions, which browsers else stretch below the line.
BARS = re.compile(r"<mo>(?=(&#x02016;|&#x02223;|&#x02225;|&#x0007C;|\|)</mo>)")


def _as_mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    formula = BARS.sub('<mo stretchy="false">', convert(html.unescape(found[2]), display=display))
    return f"<{found[1]}>{formula}</{found[1]}>"


def on_page_content(content: str, **_: Any) -> str:
    """The HTML of a page with its formulas as MathML; MkDocs calls it."""
    return FORMULA.sub(_as_mathml, content)
