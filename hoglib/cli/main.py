"""Checks of second derivatives: verify a custom Function, audit a model's loss; list hoglib's ops;
check this installation.

examples:
  hoglib check                                  is this installation fine?
  hoglib verify file.py                         its Functions that have sample_inputs()
  hoglib verify file.py:MyFunction --input "randn(3, 4)"
  hoglib audit file.py                          its functions named second_order_problem...

Each command has its own help: hoglib verify --help
"""

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from typing import Any, NoReturn

from hoglib._core.messages.validation import did_you_mean
from hoglib._version import __version__
from hoglib.cli import commands
from hoglib.cli.outcomes import NOT_RUN, print_error
from hoglib.errors import HoglibError


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 all right, 1 something is wrong, 2 something did not
    run."""
    parser, own = _make_parser()
    words = sys.argv[1:] if args is None else list(args)
    if not words:
        parser.print_help()
        return 2
    if words[0] not in own and words[0][:1] != "-":
        file = ".py" in words[0] or ":" in words[0]
        hint = f"; did you mean `hoglib verify {words[0]}` or `hoglib audit {words[0]}`?"
        parser.error(
            f"expected one of the commands {', '.join(own)}, got {words[0]!r}"
            f"{hint if file else did_you_mean(words[0], own)}"
        )
    # parse_args would raise before the hint on how to name a Function of a file
    given, rest = parser.parse_known_args(words)
    if rest:
        target = getattr(given, "target", ":")
        hint = f"; name a Function of a file as {target}:{rest[0]}" if ":" not in target else ""
        if getattr(given, "inputs", ()):
            hint = "; give one --input for each argument"
        if rest[0][:1] == "-":
            known = re.findall(r"--[a-z][-a-z]*", own[given.command].format_usage())
            hint = did_you_mean(rest[0], known).rstrip(".")
        own[given.command].error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode
    options, leave = vars(given), os._exit
    os._exit = partial(_tell_exit, options.get("target") or "hoglib", os.getpid(), leave)
    try:
        try:
            # the command's name is a function in `commands`; its keyword arguments are the options
            status: int = getattr(commands, options.pop("command"))(**options)
        except HoglibError as error:
            print_error(error)
            status = NOT_RUN
        # flush here: later, a full disk or a closed pipe could not be reported
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        # the status of shells for SIGINT
        return 130
    except BrokenPipeError:  # the reader, such as `| head`, has ended
        _discard_stdout()
        return 1
    except OSError as error:  # a full disk, or a file or folder that the error names
        _discard_stdout()
        what = "" if error.filename else "the output could not be written: "
        print(f"error: {what}{error}", file=sys.stderr)
        return 2
    finally:
        os._exit = leave


def _tell_exit(target: Any, own: int, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    """Replaces os._exit while user code runs: os._exit would end the command without a message."""
    if os.getpid() == own:  # not in a forked copy
        print_error(f"{target}: it ended the process with exit status {status}, by os._exit.")
        status = NOT_RUN
    leave(status)


def _discard_stdout() -> None:
    """Redirect stdout to the null device: flushing at exit would raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    raw = argparse.RawDescriptionHelpFormatter
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="hoglib",
        description=description,
        epilog=examples,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hoglib {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        text = getdoc(getattr(commands, name))
        return subparsers.add_parser(
            name, help=summary, description=text, formatter_class=raw, allow_abbrev=False
        )

    verify = command("verify", "verify the derivatives of custom Functions")
    add = verify.add_argument
    add("target", help="package.module:Function, path/to/file.py or path/to/file.py:Function")
    add(
        "--input",
        action="append",
        default=[],
        metavar="EXPRESSION",
        dest="inputs",
        help="an argument; give one --input for each",
    )
    add("--reference", metavar="MODULE:NAME", help="the same function of plain torch operations")
    add("--orders", type=_parse_orders, metavar="1,2,3", help="orders to check (default: 1,2)")
    modes = "modes to check (default: all supported)"
    add("--modes", type=_parse_words, metavar="rr,fr,rf,ff", help=modes)
    _add_switch(verify, "the gradient differs from the derivative on purpose", "--surrogate")
    _add_switch(verify, "check every element instead of random directions", "--full")
    add(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for one check, in a process of its own (default: 60); 0: in this process, without one",
    )
    _add_common_arguments(verify, "inputs are")
    audit = command("audit", "audit the second derivatives of a model's loss")
    add = audit.add_argument
    add("target", help="package.module:factory, path/to/file.py or path/to/file.py:factory")
    add(
        "--routes",
        type=_parse_words,
        metavar="rr,fr,...",
        help="routes that must be right; the others only warn (default: rr, the route of hoglib.hvp)",
    )
    add(
        "--stand-ins",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check what hoglib runs, inside of hoglib.second_order(), or torch as it is",
    )
    _add_common_arguments(audit, "a problem is")
    ops = command("ops", "list the ops")
    ops.add_argument("name", nargs="?", default="", help="only ops with this in their names")
    _add_switch(ops, "as the table of docs/ops.md", "--markdown")
    env = command("env", "list versions, devices, and the torch calls that have stand-ins")
    check = command("check", "is this installation fine? in seconds; a minute at first")
    for one in (env, check):
        _add_switch(one, "print JSON", "--json")
    return parser, subparsers.choices


def _add_common_arguments(parser: argparse.ArgumentParser, made: str) -> None:
    seed = f"torch's seed, set before {made} made (default: 0)"
    parser.add_argument("--seed", type=_parse_seed, default=0, help=seed)
    _add_switch(parser, "print the reports as JSON", "--json")
    _add_switch(parser, "print the table of checks also of what is right", "-v", "--verbose")


def _add_switch(parser: argparse.ArgumentParser, help: str, *names: str) -> None:
    parser.add_argument(*names, action="store_true", help=help)


def _parse_orders(text: str) -> tuple[Any, ...]:
    """Numbers as int; other words stay, for `verify` to refuse."""
    return tuple(int(part) if part.isdigit() else part for part in _parse_words(text))


def _parse_seed(text: str) -> int:
    # the range of torch.manual_seed
    if text.strip("-").isdigit() and -(2**63) <= int(text) < 2**64:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer of 64 bits, got {text!r}")


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
