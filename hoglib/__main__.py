"""The command `hoglib`: `hoglib ops` lists the ops and tries each of them."""

import argparse
import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 where something is wrong, 2 for a bad command."""
    parser = argparse.ArgumentParser(prog="hoglib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser(
        "ops", help="list the ops; every row is tried against its plain torch reference"
    )
    ops.add_argument("--markdown", action="store_true", help="as the table of docs/ops.md")
    given = parser.parse_args(args)
    return _ops(given.markdown)


def _ops(markdown: bool) -> int:
    from hoglib.ops import overview  # after the arguments: it takes torch's import

    table = overview.rows()
    print(overview.markdown(table) if markdown else overview.text(table))
    wrong = [row.cells[0] for row in table if not row.right]
    if wrong:
        print(f"error: not as their references: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
