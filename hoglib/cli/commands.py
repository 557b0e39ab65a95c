"""The commands: verify, audit, ops, env, check. Each prints, and returns the exit status."""

import json as json_format
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hoglib._version import __version__
from hoglib.auditing.api import audit as audit_loss
from hoglib.auditing.problem import problems
from hoglib.capture.runners import cache_dir, cpp_compiler
from hoglib.cli import op_table, self_test
from hoglib.cli.isolation import Check, Targets, found_here, found_in_child
from hoglib.cli.outcomes import RIGHT, WRONG, Outcomes, stdout_for
from hoglib.cli.targets import SAMPLES, Target, factories, functions, object_of
from hoglib.stand_ins.mode import stand_in_table
from hoglib.verification.api import verify as verify_function
from hoglib.verification.report import MODES

WIDTH = 100


def verify(
    target: str, inputs: Sequence[str], *, json: bool, verbose: bool, seed: int,
    reference: str | None, orders: Sequence[int] | None, modes: Sequence[str] | None,
    surrogate: bool, full: bool, time_limit: float,
) -> int:  # fmt: skip
    """`hoglib verify`: Functions of a module or a file, with inputs from the command line or their
    own."""
    options: dict[str, Any] = {"orders": orders, "modes": modes}
    switches = {"surrogate": surrogate, "full": full}
    options |= {name: True for name, on in switches.items() if on}
    with stdout_for(json):
        targets, without_samples = functions(target, inputs)
        make = partial(_verifications, target, tuple(inputs), reference, options)
        here = make()
        names = [one.name for one in targets]
        outcomes = Outcomes(seed, as_json=json, show_tables=verbose or len(names) == 1)
        isolated = found_in_child(make, seed, names, time_limit)
        for one in isolated if time_limit > 0 else found_here(here, seed):
            outcomes.take(one, "verifying")
    missing = ", ".join(without_samples)
    note = f", {len(without_samples)} without {SAMPLES}() ({missing})" if missing else ""
    return outcomes.conclude(note, without_samples=without_samples)


def _verifications(
    target: str, inputs: Sequence[str], reference: str | None, options: dict[str, Any]
) -> Targets:
    if reference is not None:
        options = options | {"reference": object_of(reference, "--reference")}
    return [(one.name, partial(_samples, one, options)) for one in functions(target, inputs)[0]]


def _samples(target: Target, options: dict[str, Any]) -> Iterator[Check]:
    """A check of each sample of one Function, which may have its reference as a static method.

    A list of tuples is several samples, anything else is one.
    """
    made = target.inputs()
    several = isinstance(made, list) and made and all(isinstance(one, tuple) for one in made)
    samples = made if several else [made]
    own = getattr(target.fn, "reference", None) if isinstance(target.fn, type) else None
    if callable(own):
        options = {"reference": own} | options
    for i, sample in enumerate(samples):
        label = f"{target.name}[{i}]" if len(samples) > 1 else target.name
        yield label, partial(verify_function, target.fn, sample, **options)


def audit(
    target: str, *, json: bool, verbose: bool, seed: int, routes: Sequence[str] | None,
    stand_ins: bool,
) -> int:  # fmt: skip
    """`hoglib audit`: the losses that a factory of a module or a file returns."""
    with stdout_for(json):
        found = factories(target)
        outcomes = Outcomes(seed, as_json=json, show_tables=verbose or len(found) == 1)
        options = {"routes": routes, "stand_ins": stand_ins}
        targets = [(name, partial(_problems, name, make, options)) for name, make in found.items()]
        for one in found_here(targets, seed, making=""):
            outcomes.take(one, "auditing")
    return outcomes.conclude()


def _problems(name: str, factory: Callable[[], Any], options: dict[str, Any]) -> Iterator[Check]:
    """A check of each loss of one factory."""
    for one in problems(f"{name}()", factory()):
        label = f"{name}[{one.name}]" if one.name else name
        yield label, partial(audit_loss, *one[1:], **options)


def ops(*, markdown: bool) -> int:
    """`hoglib ops`: the table of ops."""
    print((op_table.markdown if markdown else op_table.text)(op_table.rows()))
    return RIGHT


def env(*, json: bool) -> int:
    """`hoglib env`: versions, devices, and the torch calls that have stand-ins."""
    facts = _environment()
    facts["stand_ins"] = [
        {name: getattr(row, name) for name in ("name", "lacks", "modes", "instead", "issue")}
        | {"replaced": bool(row.replaces)}
        for row in stand_in_table()
    ]
    if json:
        print(json_format.dumps(facts, indent=2))
    else:
        print(f"{_environment_text(facts)}\n{_stand_ins_text(facts['stand_ins'])}")
    return RIGHT


def check(*, json: bool) -> int:
    """`hoglib check`: the environment, and whether second derivatives are right in it."""
    facts = _environment()
    if not json:
        print(_environment_text(facts) + "\n", flush=True)
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


def _environment() -> dict[str, Any]:
    return {
        "hoglib": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "compiler": cpp_compiler(),
        "cache": str(cache_dir()),
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
    keys = ", ".join(f"{mode.key} {mode.title}" for mode in MODES.values())
    return "\n".join([*lines, "", *textwrap.wrap(f"Modes: {keys}.", WIDTH)])
