"""What a custom Function must do, and not do, besides computing the right numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib.verification import _plain as plain
from hoglib.verification._application import Application
from hoglib.verification._around import told
from hoglib.verification._devices import Watch as DeviceWatch
from hoglib.verification._gradients import gradients, linear
from hoglib.verification._in_place import in_place
from hoglib.verification._slots import kind_of
from hoglib.verification.report import Row

SETUP = (
    "Its forward takes ctx, which torch.func (grad, vmap, jvp, hessian) refuses. Split it: "
    "`forward(*inputs)` without ctx, and `setup_context(ctx, inputs, output)`, which saves."
)
ATTRIBUTE = (
    "Save it with ctx.save_for_backward, which frees it after backward and notices changes in place; "
    "an output on ctx is a reference cycle and leaks its graph."
)


def check(app: Application, *, surrogate: bool = False) -> list[Row]:
    """The contract of one Function, from running it as plain functions."""
    rows = [_setup_context(app.function)]
    checks: list[Callable[[Application], list[Row]]] = [gradients, in_place, _context]
    checks += [] if surrogate else [linear]
    checks += [_needs_input_grad, _device]
    problems = []
    for part in checks:
        try:
            with torch.no_grad():
                rows += part(app)
        except Exception as error:  # the derivatives say what it means under autograd
            problems.append(told(error))
    if problems:
        text = f"not run as plain functions: {'; '.join(dict.fromkeys(problems))}."
        rows.append(Row("contract", "skip", None, text))
    return rows


def _setup_context(function: type[Function]) -> Row:
    if plain.is_classic(function):
        return Row(
            "setup_context", "warn", None, f"{function.__name__} has no setup_context. {SETUP}"
        )
    return Row("setup_context", "pass")


def run_rules(app: Application, watch: AbstractContextManager[Any]) -> None:
    """forward, backward and jvp as plain functions, each under a watch."""
    torch.manual_seed(0)
    args = app.fresh()
    with torch.no_grad():
        with watch:
            run = app.run(args)
        grads = run.incoming()
        with watch:
            plain.backward(app.function, run.record, grads)
        if plain.offers_jvp(app.function):
            tangents = [
                torch.ones_like(x) if i in app.by else None for i, x in enumerate(run.inputs)
            ]
            with watch:
                plain.jvp(app.function, run.record, tangents)


def _needs_input_grad(app: Application) -> list[Row]:
    name = "needs_input_grad"
    if len(app.by) < 2:
        return [Row(name, "skip", None, "it is differentiated by one input only.")]
    idle = []
    for i in app.by:
        alone = app._replace(by=tuple(j for j in app.by if j != i))
        run = alone.seeded()
        grads = run.incoming()
        returned = plain.backward(app.function, run.record, grads)
        free = i < len(returned) and any(returned[i] is g for g in grads)
        if i < len(returned) and isinstance(returned[i], Tensor) and not free:
            idle.append(app.name(i))
    if not idle:
        return [Row(name, "pass")]
    first = app.by.index(next(i for i in app.by if app.name(i) == idle[0]))
    text = (
        f"needs_input_grad is ignored: backward computes a gradient for {', '.join(idle)} also when "
        f"none is needed: wasted work. Ask first: `if ctx.needs_input_grad[{app.by[first]}]:`."
    )
    return [Row(name, "warn", None, text)]


def _context(app: Application) -> list[Row]:
    run = app.seeded()
    names = tuple(app.name(i) for i in range(len(run.inputs)))
    attributes = []
    for attribute, value in run.record.attributes.items():
        for tensor in plain.tensors(value)[:1]:
            _, what = kind_of(tensor, run, names)
            place = run.record.noted(f"ctx.{attribute}").place
            attributes.append(f"ctx.{attribute} ({what}{f', {place}' if place else ''})")
    copies = []
    for label, value in run.record.slots().items():
        kind, what = kind_of(value, run, names)
        if kind == "copy":
            copies.append(f"{label} is {what}")
    return [
        Row(
            "ctx: attributes",
            "warn" if attributes else "pass",
            None,
            f"a tensor is kept as an attribute: {'; '.join(attributes)}. {ATTRIBUTE}"
            if attributes
            else "",
        ),
        Row(
            "ctx: copies",
            "warn" if copies else "pass",
            None,
            f"a clone is saved: {'; '.join(copies)}. Save the tensor itself: a clone costs memory, and "
            "has no graph, so that a second derivative through it is lost."
            if copies
            else "",
        ),
    ]


def _device(app: Application) -> list[Row]:
    watch = DeviceWatch()
    run_rules(app, watch)
    if not watch.found:
        return [Row("device", "pass")]
    text = (
        f"a device is hard-coded: {watch.found}. It fails with inputs on another device; make new "
        "tensors with `torch.zeros_like(x)` or `device=x.device`."
    )
    return [Row("device", "warn", None, text)]
