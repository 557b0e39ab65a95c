"""The gradients that a Function returns: number, shape, dtype and device, and that they are linear."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.element_differences import max_abs
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification import function_rules
from hoglib.verification.function_rules import Run
from hoglib.verification.perturbed_point import PerturbedPoint
from hoglib.verification.report import Row
from hoglib.verification.subject import Application

UNSUMMED = (
    "Sum it back over the broadcast dimensions, `grad.sum_to_size({bare}.shape)`: autograd does so "
    "for gradients that are too large, but only where the shapes allow it, and after the full size "
    "was computed."
)


def gradients(app: Application) -> list[Row]:
    run = app.seeded()
    hidden = list(_outputs(run))
    if hidden:
        return hidden
    returned = function_rules.backward(app.function, run.record, run.incoming())
    number = _number(app, run, returned)
    if number.status == "fail":
        return [number]
    faults: dict[str, list[str]] = {"shape": [], "dtype": [], "device": []}
    for i, (x, grad) in enumerate(zip(run.inputs, returned, strict=False)):
        if i not in app.by or not isinstance(grad, Tensor):
            continue
        name = app.name(i)
        if grad.shape != x.shape:
            faults["shape"].append(_shape(name, x, grad))
        if grad.dtype != x.dtype:
            faults["dtype"].append(
                f"the gradient of {name} is {grad.dtype}, and {name} {x.dtype}: autograd casts it, "
                f"and what was rounded is gone. Make constants with `dtype={name.strip('`')}.dtype`."
            )
        if grad.device != x.device:
            faults["device"].append(
                f"the gradient of {name} is on {grad.device}, and {name} on {x.device}."
            )
    return [
        number,
        *_tangents(app, run),
        *(
            Row(f"gradients: {what}", "fail" if texts else "pass", None, " ".join(texts))
            for what, texts in faults.items()
        ),
    ]


def _outputs(run: Run) -> Iterator[Row]:
    """Tensors in a list or a dict, which autograd hands through as they are."""
    hidden = [
        type(y).__name__
        for y in run.outputs
        if not isinstance(y, Tensor) and any(isinstance(leaf, Tensor) for leaf in pytree.leaves(y))
    ]
    if hidden:
        yield Row(
            "outputs: type", "fail", None,
            f"forward returns tensors in a {hidden[0]}, into which autograd does not look: its "
            "backward is never run. Return a tensor, or a tuple of tensors.",
        )  # fmt: skip


def _tangents(app: Application, run: Run) -> Iterator[Row]:
    """Shapes and dtypes of what the jvp returns."""
    if not function_rules.offers_jvp(app.function):
        return
    tangents = [torch.ones_like(x) if i in app.by else None for i, x in enumerate(run.inputs)]
    try:
        returned = function_rules.jvp(app.function, run.record, tangents)
    except Exception:  # judged with the derivatives
        return
    faults = []
    if len(returned) != len(run.outputs):
        faults.append(f"jvp returns {len(returned)} tangents for {len(run.outputs)} outputs.")
    for k, (y, t) in enumerate(zip(run.outputs, returned, strict=False)):
        if isinstance(t, Tensor) and isinstance(y, Tensor):
            if t.shape != y.shape:
                shapes = f"{tuple(t.shape)}, and the output {tuple(y.shape)}"
                faults.append(f"the tangent of output {k} has shape {shapes}.")
            if t.dtype != y.dtype and is_float(y):
                faults.append(f"the tangent of output {k} is {t.dtype}, and the output {y.dtype}.")
    text = f"{' '.join(faults)} A tangent is like its output." if faults else ""
    yield Row("tangents: shape and dtype", "fail" if faults else "pass", None, text)


def _number(app: Application, run: Run, returned: Sequence[Any]) -> Row:
    name = "gradients: number"
    inputs, given = len(run.inputs), len(returned)
    extra = [grad for grad in returned[inputs:] if grad is not None]
    if given < inputs or extra:
        return Row(
            name, "fail", None,
            f"the wrong number of gradients: backward returns {given}, and forward has {inputs} "
            f"inputs. Return one for each input in their order, None for what has no gradient.",
        )  # fmt: skip
    for i, grad in enumerate(returned[:inputs]):
        x = run.inputs[i]
        if grad is not None and not isinstance(grad, Tensor):
            return Row(
                name, "fail", None,
                f"the gradient of {app.name(i)} is no tensor but a {type(grad).__name__}; return a "
                "tensor or None, and several gradients as a tuple.",
            )  # fmt: skip
        if grad is not None and not isinstance(x, Tensor):
            return Row(
                name, "fail", None,
                f"backward returns a gradient for {app.name(i)}, which is no tensor; return None in "
                "its place. Are the gradients in the order of the inputs?",
            )  # fmt: skip
    return Row(name, "pass")


def _shape(name: str, x: Tensor, grad: Tensor) -> str:
    bare = name.strip("`")
    text = f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(x.shape)}."
    if tuple(x.shape) != () and tuple(grad.shape) == tuple(reversed(x.shape)):
        return f"{text} It is transposed: return its transpose."
    if _expands(x.shape, grad.shape):
        return f"{text} The sum over broadcast dimensions is missing. " + UNSUMMED.format(bare=bare)
    if _expands(grad.shape, x.shape):
        return (
            f"{text} It was summed over too many dimensions; expand it, "
            f"`grad.expand({bare}.shape)`, or sum over fewer."
        )
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
        torch.manual_seed(0)
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


# === Partial gradients: when only some inputs require grad, or only some outputs have a gradient.

MOST_SUBSETS = 14
UNDEFINED = (
    "An incoming gradient may be None (undefined): ask `if g is not None`, or leave "
    "ctx.set_materialize_grads at True, which makes it zeros."
)


def subsets(around: PerturbedPoint) -> tuple[Row, tuple[int, ...]]:
    """The row, and the subset of which the second derivative is another one."""
    name = "inputs: each subset"
    if around.n < 2:
        return Row(name, "skip", None, "there is one input only."), ()
    worst, refused = 0.0, ""
    for subset in _subsets(around.n):
        only = " and ".join(around.names[j] for j in subset)
        how = f"when only {only} require{'s' if len(subset) == 1 else ''} grad"
        try:
            first = calls.gradient(around.f, around.n, subset)(*around.x, *around.u)
            off, j = around.worst(first, [around.first[j] for j in subset])
            if off > around.tolerance:
                text = (
                    f"{how}, the gradient by {around.names[subset[j]]} is another one. Does "
                    "backward mix up ctx.needs_input_grad, or forward save less?"
                )
                return Row(name, "fail", off, text), ()
            worst = max(worst, off)
            if around.second is None:
                continue
            second = around.twice(around.f, around.x, subset)
            right = around.twice(around.f, around.x, around.every, subset)
            off, j = around.worst(second, right)
            if off > around.tolerance:
                text = f"{how}, the second derivative by {around.names[subset[j]]} is another one."
                return Row(name, "fail", off, text), subset
            worst = max(worst, off)
        except Exception as raised:
            text = f"{how}, it raised {format_error(raised)}"
            if "does not require grad" not in str(raised):
                return Row(name, "fail", None, text), ()
            refused = refused or (
                f"{text}. backward differentiates by inputs that need no gradient: leave those out, by "
                "ctx.needs_input_grad or x.requires_grad."
            )
    return Row(name, "warn" if refused else "pass", worst, refused), ()


def outputs_alone(around: PerturbedPoint) -> Row:
    """No gradient comes in at all, or only that of one output."""
    name = "outputs: undefined gradients"
    if not around.subject.functions:
        return Row(name, "skip", None, "no custom Function is in it.")
    leaves = [y.detach().clone().requires_grad_() for y in around.x]
    try:
        values = [_Nothing.apply(y) for y in around.f(*leaves)]
        total = torch.stack([y.sum() for y in values]).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception as raised:
        return Row(
            name,
            "fail",
            None,
            f"with an undefined gradient it raised {format_error(raised)}. {UNDEFINED}",
        )
    usual = all(bool(g.isfinite().all()) for g in around.first)
    if usual and any(g is not None and bool((g != 0).any()) for g in grads):
        return Row(
            name, "fail", None, f"with an undefined gradient its gradient is not zero. {UNDEFINED}"
        )
    if len(around.u) < 2:
        return Row(name, "pass")
    total_of: list[Tensor] | None = None
    for k in range(len(around.u)):
        try:
            part = calls.pull(around.f, around.x, [(k, around.u[k])])[0]
        except Exception as raised:
            return Row(
                name, "fail", None,
                f"when only {around.subject.rows[k]} has a gradient it raised {format_error(raised)}. "
                f"{UNDEFINED}",
            )  # fmt: skip
        total_of = (
            part if total_of is None else [a + b for a, b in zip(total_of, part, strict=True)]
        )
    off, j = around.worst(total_of or [], around.first)
    if off > around.tolerance:
        return Row(
            name, "fail", off,
            f"the gradient by {around.names[j]} of all outputs is not the sum of those of each "
            f"output alone. {UNDEFINED}",
        )  # fmt: skip
    return Row(name, "pass", off)


class _Nothing(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _subsets(count: int) -> list[tuple[int, ...]]:
    """Each proper subset; of many inputs, each alone and all but each."""
    if count <= 3:
        sizes = range(1, count)
        return [s for size in sizes for s in itertools.combinations(range(count), size)]
    singles = [(j,) for j in range(count)]
    others = [tuple(k for k in range(count) if k != j) for j in range(count)]
    return [*singles[:MOST_SUBSETS], *others[:MOST_SUBSETS]]
