"""The command `hoglib`: verify judges Functions, audit losses; graph draws what they judge; ops lists
ops, env what runs here."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

VERIFY = """\
Verify the derivatives of custom Functions, to second order, in every mode that they offer.

  hoglib verify package.module:Function --input "randn(3, 4)" --input "rand(4) + 1"
  hoglib verify path/to/file.py                every Function in it with a static sample_inputs()

Inputs are expressions over torch's functions. sample_inputs() returns the arguments as a tuple, or a
list of such tuples; a Function may have a static reference() of plain torch operations, and
`surrogate = True` if its gradient differs from the derivative on purpose.

Exit status: 0 all right, 1 something is wrong, 2 something could not be run.
"""
GRAPH = """\
Draw the graph that a second derivative goes through; what cuts it is red, and told on stderr.

  hoglib graph package.module:fn --input "randn(3)" -o picture.svg

.svg, .png and .pdf need graphviz's program `dot`; .dot and .gv, and stdout without -o, do not.
Exit status: 0 drawn, 2 it could not be.
"""

AUDIT = """\
Audit the second derivatives of a whole model's loss, and name the module that is at fault.

  hoglib audit package.module:factory
  hoglib audit path/to/file.py                 every function in it named second_order_problem...

A factory is a function without arguments that returns (loss, params, batch), a list of such tuples,
or a dict of them by name; loss(params, batch) is a scalar, as of hoglib.functional_loss.

Exit status: 0 all right, 1 something is wrong, 2 something could not be run.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 where something is wrong, 2 for what could not be run."""
    parser = argparse.ArgumentParser(prog="hoglib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _verify_arguments(
        commands.add_parser(
            "verify", help="verify the derivatives of custom Functions", description=VERIFY,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )  # fmt: skip
    _audit_arguments(
        commands.add_parser(
            "audit", help="audit the second derivatives of a model's loss", description=AUDIT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )  # fmt: skip
    ops = commands.add_parser(
        "ops", help="list the ops; every row is tried against its plain torch reference"
    )
    ops.add_argument("--markdown", action="store_true", help="as the table of docs/ops.md")
    env = commands.add_parser(
        "env", help="versions, devices, and the torch calls that have stand-ins, with the reasons"
    )
    env.add_argument("--json", action="store_true", help="as JSON")
    _graph_arguments(
        commands.add_parser(
            "graph", help="draw the graph of a function's gradient, with what is missing in it",
            description=GRAPH, formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )  # fmt: skip
    given = parser.parse_args(args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode
    try:
        status = _COMMANDS[given.command](given)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        _drop_stdout()
        return 1
    except OSError as error:  # a full disk
        _drop_stdout()
        print(f"error: the output could not be written: {error}", file=sys.stderr)
        return 2


def _drop_stdout() -> None:
    """What is left to flush at exit would raise once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="package.module:Function, path/to/file.py or path/to/file.py:Function")
    add("--input", action="append", default=[], metavar="EXPRESSION", help="once for each argument")
    add("--reference", metavar="MODULE:NAME", help="the same function of plain torch operations")
    add("--orders", type=_numbers, metavar="1,2,3", help="orders to check (default 1,2)")
    add("--modes", type=_words, metavar="rr,fr,rf,ff", help="modes to check (default: all offered)")
    add(
        "--surrogate",
        action="store_true",
        help="the gradient differs from the derivative on purpose",
    )
    add("--full", action="store_true", help="along every element, not random directions")
    add("--compile", action="store_true", help="also under torch.compile")
    _common_arguments(parser, "inputs are")


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="package.module:factory, path/to/file.py or path/to/file.py:factory")
    add(
        "--routes",
        type=_words,
        metavar="rr,fr,...",
        help="routes that must be right (default rr, which hoglib.hvp takes; of others is warned)",
    )
    add("--stand-ins", action="store_true", help="judge it inside of hoglib.second_order()")
    _common_arguments(parser, "a problem is")


def _common_arguments(parser: argparse.ArgumentParser, made: str) -> None:
    add = parser.add_argument
    add("--seed", type=int, default=0, help=f"of torch, before {made} made (default 0)")
    add("--json", action="store_true", help="reports as JSON on stdout")
    add("-v", "--verbose", action="store_true", help="the table also of what is right")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _verify(given: argparse.Namespace) -> int:
    # after the arguments: it takes torch's import
    from hoglib.cli import verify

    options = {name: getattr(given, name) for name in ("orders", "modes")}
    switches = {name: True for name in ("surrogate", "full", "compile") if getattr(given, name)}
    return verify.run(
        given.target, given.input, as_json=given.json, verbose=given.verbose, seed=given.seed,
        reference=given.reference, **options, **switches,
    )  # fmt: skip


def _audit(given: argparse.Namespace) -> int:
    from hoglib.cli import audit

    return audit.run(
        given.target, as_json=given.json, verbose=given.verbose, seed=given.seed,
        routes=given.routes, stand_ins=given.stand_ins,
    )  # fmt: skip


def _env(given: argparse.Namespace) -> int:
    from hoglib.cli import environment
    from hoglib.errors import ArgumentValueError

    try:
        print(environment.as_json() if given.json else environment.text())
    except ArgumentValueError as error:  # a variable of the environment
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _ops(given: argparse.Namespace) -> int:
    from hoglib.testing.opinfo import overview

    table = overview.rows()
    print(overview.markdown(table) if given.markdown else overview.text(table))
    wrong = [row.cells[0] for row in table if not row.right]
    if wrong:
        print(f"error: not as their references: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _graph_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="package.module:function or path/to/file.py:function")
    add("--input", action="append", default=[], metavar="EXPRESSION", help="once for each argument")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help=".svg, .png, .pdf, .dot or .gv (default: DOT on stdout)",
    )
    add("--order", type=int, default=2, help="1: the forward's graph alone (default 2)")
    add("--no-saved", action="store_true", help="without what is kept for backward")
    add("--seed", type=int, default=0, help="of torch, before inputs are made (default 0)")


def _graph(given: argparse.Namespace) -> int:
    from hoglib.cli import graph

    return graph.run(
        given.target, given.input, given.output, seed=given.seed, order=given.order,
        saved=not given.no_saved,
    )  # fmt: skip


_COMMANDS = {"verify": _verify, "audit": _audit, "graph": _graph, "ops": _ops, "env": _env}
