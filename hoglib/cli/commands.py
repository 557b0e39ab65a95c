"""The commands: verify, audit, ops, env, check. Each prints its result and returns the exit status. Its
docstring is its help text."""

import json as json_format
import platform
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import getdoc
from typing import Any

import torch

from hoglib import ops as hog_ops
from hoglib._core.messages import validation
from hoglib._version import __version__
from hoglib.auditing.api import audit as audit_loss
from hoglib.auditing.problem import parse_problems
from hoglib.capture.runners import cache_dir, cpp_compiler
from hoglib.cli import self_test
from hoglib.cli.isolation import Check, Targets, run_here, run_in_child
from hoglib.cli.outcomes import RIGHT, WRONG, Outcomes, stdout_for
from hoglib.cli.targets import SAMPLES, Target, factories, functions, object_of
from hoglib.stand_ins.mode import stand_in_table
from hoglib.verification.api import verify as verify_function
from hoglib.verification.report import MODES

WIDTH = 100  # characters in a line of text


def verify(
    target: str,
    inputs: Sequence[str],
    *,
    json: bool,
    verbose: bool,
    seed: int,
    reference: str | None,
    time_limit: float,
    **options: Any,
) -> int:
    """Verify the derivatives of custom Functions, to second order, in every mode that they support.

      hoglib verify package.module:Function --input "randn(3, 4)" --input "rand(4) + 1"
      hoglib verify path/to/file.py                every Function in it with a static sample_inputs()
      hoglib verify path/to/file.py:Function --reference path/to/file.py:plain --modes rr,fr

    A Function runs in a child process: one that ends it, or does not return within --time-limit, is
    reported as not run.

    An input is a Python expression over torch's functions. sample_inputs() returns the arguments as a
    tuple, or a list of such tuples. A Function may have a static reference() of plain torch operations,
    and `surrogate = True` if its gradient differs from the derivative on purpose.

    Exit status: 0 everything is right, 1 something is wrong, 2 something could not be run.
    """
    validation.number("--time-limit", time_limit, minimum=0)
    with stdout_for(json):
        targets, without_samples = functions(target, inputs)
        make = partial(_verify_targets, target, tuple(inputs), reference, options)
        # make the targets here, too: a wrong reference then raises before a child starts
        here = make()
        names = [one.name for one in targets]
        outcomes = Outcomes(seed, as_json=json, show_tables=verbose or len(names) == 1)
        isolated = run_in_child(make, seed, names, time_limit)
        for one in isolated if time_limit > 0 else run_here(here, seed):
            outcomes.take(one, "verifying")
    missing = ", ".join(without_samples)
    note = f", {len(without_samples)} without {SAMPLES}() ({missing})" if missing else ""
    return outcomes.conclude(note, without_samples=without_samples)


def _verify_targets(
    target: str, inputs: Sequence[str], reference: str | None, options: dict[str, Any]
) -> Targets:
    # at module level, with plain arguments: the child process unpickles this call
    if reference is not None:
        options = options | {"reference": object_of(reference, "--reference")}
    return [(one.name, partial(_samples, one, options)) for one in functions(target, inputs)[0]]


def _samples(target: Target, options: dict[str, Any]) -> Iterator[Check]:
    """One check for each sample of a Function, with its static method `reference` if it has one.

    A list of tuples holds several samples; anything else is one sample.
    """
    made = target.inputs()
    # an empty list, or a list of tensors, holds the arguments of one sample
    several = isinstance(made, list) and made and all(isinstance(one, tuple) for one in made)
    samples = made if several else [made]
    own = getattr(target.fn, "reference", None) if isinstance(target.fn, type) else None
    if callable(own):
        # a --reference on the command line takes precedence
        options = {"reference": own} | options
    for i, sample in enumerate(samples):
        label = f"{target.name}[{i}]" if len(samples) > 1 else target.name
        yield label, partial(verify_function, target.fn, sample, **options)


def audit(target: str, *, json: bool, verbose: bool, seed: int, **options: Any) -> int:
    """Audit the second derivatives of a whole model's loss, and name the modules at fault.

      hoglib audit package.module:factory
      hoglib audit path/to/file.py                 every function in it named second_order_problem...
      hoglib audit path/to/file.py --routes rr,fr --no-stand-ins

    A factory is a function without arguments that returns (loss, params, batch), a list of such tuples,
    or a dict of them by name. loss(params, batch) is a scalar; hoglib.functional_loss makes one.

    Exit status: 0 everything is right, 1 something is wrong, 2 something could not be run.
    """
    with stdout_for(json):
        found = factories(target)
        outcomes = Outcomes(seed, as_json=json, show_tables=verbose or len(found) == 1)
        targets = [(name, partial(_problems, name, make, options)) for name, make in found.items()]
        for one in run_here(targets, seed, making=""):
            outcomes.take(one, "auditing")
    return outcomes.conclude()


def _problems(name: str, factory: Callable[[], Any], options: dict[str, Any]) -> Iterator[Check]:
    """One check for each loss of a factory."""
    for one in parse_problems(f"{name}()", factory()):
        label = f"{name}[{one.name}]" if one.name else name
        yield label, partial(audit_loss, *one[1:], **options)


def ops(name: str, *, markdown: bool) -> int:
    """List the ops of hoglib.ops: the equation of each, and the orders of its derivatives.

      hoglib ops
      hoglib ops softmax
      hoglib ops --markdown > ops.md

    The last is the table of docs/ops.md: the names by their orders.
    """
    print((op_markdown if markdown else op_text)([row for row in op_rows() if name in row[0]]))
    return RIGHT


def env(*, json: bool) -> int:
    """List versions, devices, and the torch calls that have stand-ins.

      hoglib env
      hoglib env --json

    The second is for programs to read.
    """
    facts = _describe_environment()
    facts["stand_ins"] = [
        {name: getattr(row, name) for name in ("name", "lacks", "modes", "instead", "issue")}
        | {"replaced": not row.refuses}
        for row in stand_in_table()
    ]
    if json:
        print(json_format.dumps(facts, indent=2))
    else:
        print(f"{_environment_text(facts)}\n{_stand_ins_text(facts['stand_ins'])}")
    return RIGHT


def check(*, json: bool) -> int:
    """Is this installation fine? Prints versions, devices, the C++ compiler and the directory of
    compiled graphs, and compares second derivatives with closed forms and finite differences. It takes
    some ten seconds, and up to a minute where its compiled product is not cached yet.

      hoglib check
      hoglib check --json

    Exit status: 0 it is fine, 1 a check failed, 2 the checks could not be run.
    """
    facts = _describe_environment()
    if not json:
        print(_environment_text(facts) + "\n", flush=True)  # before checks that take a minute
    outcomes = []
    for outcome in self_test.run():
        outcomes.append(outcome)
        if not json:
            print(f"  {outcome.status:7}  {outcome.seconds:5.1f} s  {outcome.name}", flush=True)
            if outcome.why:
                print(textwrap.indent(outcome.why.strip(), " " * 20))
    wrong = [outcome.name for outcome in outcomes if outcome.status == "WRONG"]
    if json:
        checks = [outcome._asdict() for outcome in outcomes]
        print(json_format.dumps({**facts, "ok": not wrong, "checks": checks}, indent=2))
    else:
        seconds = sum(outcome.seconds for outcome in outcomes)
        failed = f"{len(wrong)} of {len(outcomes)} checks failed"
        print(f"\n{failed if wrong else 'The installation is fine'} ({seconds:.0f} s).")
    return WRONG if wrong else RIGHT


def _describe_environment() -> dict[str, Any]:
    return {
        "hoglib": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "compiler": cpp_compiler(),
        "cache": cache_dir(),
    }


def _environment_text(facts: dict[str, Any]) -> str:
    cuda = f"CUDA {facts['cuda']}, {', '.join(facts['devices'])}" if facts["devices"] else "no GPU"
    return (
        f"hoglib {facts['hoglib']}, Python {facts['python']}, torch {facts['torch']}, "
        f"{facts['platform']}, {cuda}, {facts['threads']} threads\n"
        f"C++ compiler: {facts['compiler'] or 'none; graphs run without being compiled'}\n"
        f"Compiled graphs: {facts['cache']}"
    )


def _stand_ins_text(stand_ins: list[dict[str, Any]]) -> str:
    lines = []
    for title, replaced in (
        ("Inside hoglib.second_order() these torch calls are replaced by stand-ins:", True),
        ("These have no second derivative and no stand-in; there a call of one raises:", False),
    ):
        table = [row for row in stand_ins if row["replaced"] == replaced]
        if table:
            lines += ["", title, ""]
            width = max(len(row["name"]) for row in table)
            for row in table:
                why = f"{row['lacks']} ({', '.join(row['modes'])})"
                why += f"; pytorch/pytorch#{row['issue']}" if row["issue"] else ""
                why += f". {row['instead']}" if row["instead"] else ""
                first, *rest = textwrap.wrap(why, WIDTH - width - 4)
                lines.append(f"  {row['name']:{width}}  {first}")
                lines += [" " * (width + 4) + line for line in rest]
    keys = ", ".join(f"{key} {title}" for key, title in MODES.items())
    return "\n".join([*lines, "", *textwrap.wrap(f"Modes: {keys}.", WIDTH)])


HEAD = ("op", "equation", "orders")
# A phrase of the docstring -> the orders. Without a phrase the second derivative is 0, or a convention.
_ORDERS = {
    "no derivative of any order": "none",
    "as many orders as derivatives were given": "as given",
    "to any order": "any",
}


def op_rows() -> list[tuple[str, str, str]]:
    """(name, first line of equations, orders of derivatives) of each op, read from its docstring."""
    names = hog_ops.__all__
    return [(name, *_of_docstring(getdoc(getattr(hog_ops, name)) or "")) for name in names]


def _of_docstring(text: str) -> tuple[str, str]:
    body = text.split("\nArgs:")[0]
    equation: Any = re.search(r"^    (.+)$", body, re.MULTILINE)
    words = " ".join(body.split()).lower()
    orders = next((cell for said, cell in _ORDERS.items() if said in words), "first")
    return re.sub(r",? {2,}", "; ", equation[1].strip()), orders


def op_text(table: list[tuple[str, str, str]]) -> str:
    """The table in aligned columns, for a terminal or a log."""
    lines = [HEAD, *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    ruled = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([ruled[0], "-" * len(ruled[0]), *ruled[1:]])


def op_markdown(table: list[tuple[str, str, str]]) -> str:
    """The ops, grouped by the orders of their derivatives, with links: for a page of the docs."""
    lines = ["| orders | ops |", "| --- | --- |"]
    for orders in sorted({orders for _, _, orders in table}):
        links = [f"[`{name}`][hoglib.ops.{name}]" for name, _, of_it in table if of_it == orders]
        lines.append(f"| {orders} | {', '.join(links)} |")
    return "\n".join(lines)
