"""The contract of a custom Function with autograd, apart from the right numbers.

forward and backward are run as plain functions: the number, shape, dtype and device of gradients,
whether they are linear in the incoming gradient, what is kept on ctx, and which gradients are computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.element_differences import max_abs
from hoglib._core.pytree import is_float
from hoglib._core.source_location import error_line
from hoglib.verification import function_rules
from hoglib.verification.call import seed_all
from hoglib.verification.function_rules import Run, kind_of
from hoglib.verification.report import Row
from hoglib.verification.side_effects import accumulates, device, in_place
from hoglib.verification.subject import Application

SETUP = (
    "Its forward takes ctx, which torch.func (grad, vmap, jvp, hessian) refuses. Split it: "
    "`forward(*inputs)` without ctx, and `setup_context(ctx, inputs, output)`, which saves."
)

ATTRIBUTE = (
    "Save it with ctx.save_for_backward, which frees it after backward and notices changes in place; "
    "an output on ctx is a reference cycle and leaks its graph."
)

CLONE = (
    "Save the tensor itself: a clone costs memory, and has no graph, so that a second derivative "
    "through it is lost."
)

UNSUMMED = (
    "Sum it back over the broadcast dimensions, `grad.sum_to_size({bare}.shape)`: autograd does so "
    "for gradients that are too large, but only where the shapes allow it, and after the full size "
    "was computed."
)


def check(app: Application, *, surrogate: bool = False) -> list[Row]:
    """The contract of one Function, from running it as plain functions."""
    classic = function_rules.is_classic(app.function)
    text = f"{app.function.__name__} has no setup_context. {SETUP}" if classic else ""
    rows = [Row("setup_context", "warn" if classic else "pass", None, text)]
    checks: list[Callable[[Application], list[Row]]] = [gradients, in_place, accumulates, _context]
    checks += [] if surrogate else [linear]
    checks += [_needs_input_grad, device]
    problems = []
    for part in checks:
        try:
            with torch.no_grad():
                rows += part(app)
        except Exception as error:  # the derivative checks report what follows under autograd
            problems.append(str(error_line(error) or ""))
    if problems:
        places = "; ".join(filter(None, dict.fromkeys(problems)))
        at = f" (it raises at {places})" if places else ""
        text = f"not judged: it does not run as plain functions, outside of autograd{at}."
        rows.append(Row("contract", "skip", None, text))
    return rows


def gradients(app: Application) -> list[Row]:
    run = app.seeded()
    returned = function_rules.backward(app.function, run.record, run.incoming())
    number = _number(app, run, returned)
    if number.status == "fail":
        return [number]
    faults: dict[str, list[str]] = {"shape": [], "dtype": []}
    harmless = {"shape", "dtype"}  # autograd sums what is too large, and casts to more digits
    for i, (x, grad) in enumerate(zip(run.inputs, returned, strict=False)):
        if i not in app.by or not isinstance(grad, Tensor):
            continue
        name = app.name(i)
        if grad.shape != x.shape:
            faults["shape"].append(_shape(name, x, grad))
            if not _expands(x.shape, grad.shape):
                harmless.discard("shape")
        if grad.dtype != x.dtype:
            if not is_float(grad):
                harmless.discard("dtype")
            faults["dtype"].append(
                f"the gradient of {name} is {grad.dtype}, and {name} {x.dtype}: autograd casts it, "
                f"and the digits are lost. Make constants with `dtype={name.strip('`')}.dtype`."
            )
    rows = [number]
    for what, texts in faults.items():
        status = ("warn" if what in harmless else "fail") if texts else "pass"
        rows.append(Row(f"gradients: {what}", status, None, " ".join(texts)))
    return rows


def _number(app: Application, run: Run, returned: Sequence[Any]) -> Row:
    count = len(run.inputs)
    odd = [
        f"a {type(grad).__name__} for {app.name(i)}, a {type(x).__name__}"
        for i, (grad, x) in enumerate(zip(returned, run.inputs, strict=False))
        if grad is not None and not (isinstance(grad, Tensor) and isinstance(x, Tensor))
    ]
    if len(returned) >= count and not odd and all(g is None for g in returned[count:]):
        return Row("gradients: number", "pass")
    also = f", among them {', '.join(odd)}" if odd else ""
    return Row(
        "gradients: number", "fail", None,
        f"the wrong number of gradients: backward returns {len(returned)} for {count} inputs{also}. "
        "Return a tensor for each tensor among the inputs, in their order, as a tuple, and None for "
        "what has no gradient.",
    )  # fmt: skip


def _shape(name: str, x: Tensor, grad: Tensor) -> str:
    text = f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(x.shape)}."
    if _expands(x.shape, grad.shape):
        bare = name.strip("`")
        return f"{text} The sum over broadcast dimensions is missing. " + UNSUMMED.format(bare=bare)
    return f"{text} A gradient has the shape of its input."


def _expands(small: Sequence[int], large: Sequence[int]) -> bool:
    if len(small) > len(large):
        return False
    pairs = zip(reversed(small), reversed(large), strict=False)
    return all(a in (1, b) for a, b in pairs)


def linear(app: Application) -> list[Row]:
    """B(2 g) = 2 B(g): a gradient is linear in the incoming one."""
    name = "gradients: linear"
    run = app.seeded()
    grads = run.incoming()

    def returned(factor: float) -> list[Tensor]:
        seed_all()
        scaled = [None if g is None else factor * g for g in grads]
        found = function_rules.backward(app.function, app.seeded().record, scaled)
        return [g for g in found if is_float(g)]

    once, twice = returned(1.0), returned(-2.0)
    if all(_close(-2.0 * a, b) for a, b in zip(once, twice, strict=True)):
        return [Row(name, "pass")]
    text = (
        "backward is not linear in grad_output: twice the incoming gradient is not twice the result. "
        "Is grad_output ignored, or used twice? If it is clipped on purpose, pass surrogate=True."
    )
    return [Row(name, "fail", None, text)]


def _close(a: Tensor, b: Tensor) -> bool:
    size = max(max_abs(a), max_abs(b), 1e-300)
    return a.shape == b.shape and max_abs(a - b) <= torch.finfo(a.dtype).eps ** 0.5 * size


def _needs_input_grad(app: Application) -> list[Row]:
    name = "needs_input_grad"
    if len(app.by) < 2:
        return [Row(name, "skip", None, "it is differentiated by one input only.")]
    idle: list[int] = []
    for i in app.by:
        alone = app._replace(by=tuple(j for j in app.by if j != i))
        run = alone.seeded()
        grads = run.incoming()
        returned = function_rules.backward(app.function, run.record, grads)
        free = i < len(returned) and any(returned[i] is g for g in grads)
        if i < len(returned) and isinstance(returned[i], Tensor) and not free:
            idle.append(i)
    if not idle:
        return [Row(name, "pass")]
    text = (
        f"needs_input_grad is ignored: backward computes a gradient for "
        f"{', '.join(map(app.name, idle))} even if "
        f"none is needed. Check first: `if ctx.needs_input_grad[{idle[0]}]:`."
    )
    return [Row(name, "warn", None, text)]


def _context(app: Application) -> list[Row]:
    run = app.seeded()
    names = tuple(app.name(i) for i in range(len(run.inputs)))
    attributes = []
    for attribute, value in run.record.attributes.items():
        for tensor in pytree.tensors(value)[:1]:
            _, what = kind_of(tensor, run, names)
            place = run.record.noted(f"ctx.{attribute}").place
            attributes.append(f"ctx.{attribute} ({what}{f', {place}' if place else ''})")
    copies = []
    for label, value in run.record.slots().items():
        kind, what = kind_of(value, run, names)
        if kind == "copy":
            copies.append(f"{label} is {what}")
    kept = f"a tensor is kept as an attribute: {'; '.join(attributes)}. {ATTRIBUTE}"
    cloned = f"a clone is saved: {'; '.join(copies)}. {CLONE}"
    return [
        Row("ctx: attributes", "warn", None, kept)
        if attributes
        else Row("ctx: attributes", "pass"),
        Row("ctx: copies", "warn", None, cloned) if copies else Row("ctx: copies", "pass"),
    ]
