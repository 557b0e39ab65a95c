"""Docstrings for the site: what its parser does not know, in the parser's own words.

Roles such as `` :func:`name` ``, and names of hoglib in backticks, become links to the API reference. A
section starts after a blank line; ``Example:`` becomes ``Examples:``, whose ``>>>`` lines are code; the
sections that the parser does not know become prose.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth):`~?([\w.]+)()`")
PROSE = re.compile(r"^(Shape|References):\n((?:    .*\n?|\n)+)", re.M)
HEADING = re.compile(r"^[A-Z][a-z]+:$", re.M)
CODE = re.compile(r"(?<![`\[])`(hoglib(?:\.\w+)+)((?:\(\))?)`(?!`)")


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = dict(_exports(pkg))
        for docstring in _docstrings(pkg):
            docstring.value = _rewrite(docstring.value, public)


def _exports(module: griffe.Module) -> Iterator[tuple[str, str]]:
    """Each exported name and its public path; the shortest path of a name comes last."""
    for member in module.members.values():
        if not member.is_alias and member.is_module and not member.name.startswith("_"):
            yield from _exports(member)
    for name in module.exports or ():
        yield str(name), f"{module.path}.{name}"


def _docstrings(obj: griffe.Object) -> Iterator[griffe.Docstring]:
    if obj.docstring:
        yield obj.docstring
    for member in obj.members.values():
        if not member.is_alias:
            yield from _docstrings(member)


def _rewrite(text: str, public: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        shown = f"`{name}{match[2]}`"
        return f"[{shown}][{public[name]}]" if name in public else shown

    text = CODE.sub(link, ROLE.sub(link, text))
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
    text = PROSE.sub(lambda m: f"**{m[1]}:**\n\n{textwrap.dedent(m[2])}", text)
    return HEADING.sub(r"\n\g<0>", text)
