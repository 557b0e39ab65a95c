"""python -m tests.size: lines of code of hoglib, experiments and tests, by package.

A line of code is one where a token begins that is no comment and no docstring.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(text: str) -> int:
    """How many lines of a module are code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {token.start[0] for token in tokens if token.type not in LAYOUT}
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


def main() -> None:
    for part in ("hoglib", "experiments", "tests"):
        lines, files = Counter[str](), Counter[str]()
        for path in (ROOT / part).rglob("*.py"):
            package = "/".join(path.relative_to(ROOT).parts[:2])
            lines[package] += lines_of_code(path.read_text())
            files[package] += 1
        for package, count in lines.most_common():
            print(f"{count:8,}{files[package]:6}  {package}")
        print(f"{lines.total():8,}{files.total():6}  {part}\n")


if __name__ == "__main__":
    main()
