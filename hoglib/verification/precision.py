"""Whether a number of lower precision enters float64 maths."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.element_differences import max_abs
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification import contract
from hoglib.verification.call import Call
from hoglib.verification.comparison import Bounds, in_reverse, target
from hoglib.verification.perturbed_point import DRAWS, PerturbedPoint
from hoglib.verification.report import Row
from hoglib.verification.rounding import PrecisionWatch
from hoglib.verification.subject import Subject


def row(subject: Subject) -> Row:
    name = "dtype: constants"
    if subject.dtype != torch.float64:
        return Row(name, "skip", None, "it was not checked in float64.")
    watch = PrecisionWatch()
    with watch:
        subject.map(*subject.x)
    for app in subject.applications:
        try:
            contract.run_rules(app, watch)
        except Exception:  # other checks say it
            continue
    found = watch.rounded or watch.met
    if found:
        return Row(
            name, "fail", None,
            f"a constant or a step in float32 enters float64 maths: {found}. Give it the dtype of the "
            "inputs, `torch.tensor(0.1, dtype=x.dtype)`, or use a Python number.",
        )  # fmt: skip
    if watch.foreign:
        return Row(
            name, "fail" if subject.given_wide else "warn", None,
            f"a tensor of lower precision, from outside, enters float64 maths: {watch.foreign}. Pass "
            "it as an input, or convert it, `table.to(x.dtype)`.",
        )  # fmt: skip
    return Row(name, "pass")


# === Other dtypes, autocast and the compiler.

USELESS = 0.3  # a gradient in float32 that is further off is not one


def dtypes(around: PerturbedPoint) -> Iterator[Row]:
    """The gradient in narrower dtypes against that of the same rounded inputs, and complex inputs."""
    yield _in_dtype(around, "dtype: float32", torch.float32, 1e-3)
    yield _in_dtype(around, "dtype: bfloat16", torch.bfloat16, 0.1)
    yield _complex(around)


def _in_dtype(around: PerturbedPoint, name: str, dtype: torch.dtype, tolerance: float) -> Row:
    if around.subject.dtype != torch.float64:
        return Row(
            name, "skip", None, f"it was checked in {around.subject.dtype}, as float64 is refused."
        )
    if around.subject.draws:
        return Row(name, "skip", None, DRAWS)
    call = _again(around, dtype)
    x = [y.to(dtype) for y in around.x]
    rounded = [y.to(torch.float64) for y in x]
    try:
        found, values = _gradients(around, call, x)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses {_short(dtype)}: {format_error(raised)}")
    right, wide = _gradients(around, around.subject.call, rounded)
    scale = max(map(max_abs, wide), default=0.0)
    pairs = zip(values, wide, strict=True)
    same_values = all(_relative(a.double(), b, scale) < 1e-3 for a, b in pairs)
    worst = 0.0
    for j, (a, b) in enumerate(zip(found, right, strict=True)):
        off = _relative(a.double(), b, scale)
        if dtype == torch.float32 and off > USELESS and same_values:
            return Row(
                name, "fail", off,
                f"the gradient by {around.names[j]} is {off:.0%} off in float32, which is no rounding. "
                "Does a branch ask for the dtype, or is a small number the difference of large ones?",
            )  # fmt: skip
        if off > tolerance:
            return Row(
                name, "warn", off,
                f"the gradient by {around.names[j]} is {off:.0e} off in {_short(dtype)}, more than "
                "its rounding explains. Are sums or differences of large numbers taken in it?",
            )  # fmt: skip
        worst = max(worst, off)
    return Row(name, "pass", worst)


def _again(around: PerturbedPoint, dtype: torch.dtype) -> Call:
    return Call(around.subject.fn, around.subject.inputs, dtype).treated_like(around.subject.call)


def _gradients(
    around: PerturbedPoint, call: Call, x: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    f = call.map(around.subject.which)
    values = f(*x)
    u = [a.to(b.dtype) for a, b in zip(around.u, values, strict=True)]
    grads = calls.gradient(f, around.n)(*x, *u)
    return grads, [y.detach() for y in values]


def _complex(around: PerturbedPoint) -> Row:
    """Complex inputs in the place of real ones; what they give is no fault, as nobody asked for it."""
    name = "dtype: complex"
    subject = around.subject
    if any(subject.call.complex_variables):
        return Row(name, "pass")
    if subject.num_parameters or subject.refused or not subject.functions:
        return Row(name, "skip", None, "its inputs are real.")
    inputs = pytree.map(_turned, tuple(subject.inputs))
    call = Call(subject.fn, inputs).treated_like(subject.call)
    try:
        which = [i for i, y in enumerate(call.recorded()) if is_float(y) and y.requires_grad]
        f, rows = call.map(which), [f"output {i}" for i in which]
        at = target(f, call.point, rows, call.names, subject.random)
        found = in_reverse(at, Bounds(1e-6, 1e-4), subject.random, draws=1)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses complex numbers: {format_error(raised)}")
    if found.raised is not None:
        return Row(
            name, "skip", None, f"backward refuses complex numbers: {format_error(found.raised)}"
        )
    if found.wrong:
        return Row(
            name, "skip", None,
            "its inputs are real; it takes complex ones too, and has a wrong gradient for them (a "
            "conj() is missing, or it is not holomorphic). Refuse them, or pass some to see.",
        )  # fmt: skip
    return Row(name, "pass", found.error)


def _turned(value: Any) -> Any:
    """A real tensor as a complex one beside it."""
    if not is_float(value) or value.is_complex() or value.layout is not torch.strided:
        return value
    wide = value.detach().to(torch.float64)
    turned = torch.complex(wide, 0.1 * wide.cos())
    return turned.requires_grad_(value.requires_grad)


def autocast(around: PerturbedPoint) -> Row:
    name = "autocast"
    if around.subject.dtype != torch.float64:
        return Row(name, "skip", None, "it was not checked in float64.")
    call = _again(around, torch.float32)
    x = [y.float() for y in around.x]
    f = call.map(around.subject.which)
    try:
        right, usual = _gradients(around, call, x)
        scale = max(map(max_abs, usual), default=0.0)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses float32: {format_error(raised)}")
    try:
        leaves = [y.detach().clone().requires_grad_() for y in x]
        with torch.autocast(x[0].device.type, torch.bfloat16):
            values = f(*leaves)
        u = [a.to(b.dtype) for a, b in zip(around.u, values, strict=True)]
        found = torch.autograd.grad(values, leaves, u, materialize_grads=True)
    except Exception as raised:
        return Row(
            name, "warn", None,
            f"under torch.autocast it raised {format_error(raised)}. Decorate forward and backward "
            "with torch.amp.custom_fwd and custom_bwd.",
        )  # fmt: skip
    pairs = zip(found, right, strict=True)
    errors = [_relative(a.double(), b.double(), scale) for a, b in pairs]
    off = max(errors)
    j = errors.index(off)
    if off > 0.1:
        return Row(
            name, "warn", off,
            f"under torch.autocast the gradient by {around.names[j]} is off by {off:.0%}. Keep sums "
            "in float32, or decorate with torch.amp.custom_fwd(cast_inputs=torch.float32).",
        )  # fmt: skip
    return Row(name, "pass", off)


def compiled(around: PerturbedPoint, asked: bool) -> Row:
    name = "compile"
    if not asked:
        return Row(name, "skip", None, "not asked for: it takes seconds; pass compile=True.")
    torch._dynamo.reset()
    try:
        f = torch.compile(around.f, backend="aot_eager")
        leaves = [y.detach().clone().requires_grad_() for y in around.x]
        values = f(*leaves)
        found = torch.autograd.grad(values, leaves, around.u, materialize_grads=True)
    except Exception as raised:
        return Row(name, "warn", None, f"torch.compile raised {format_error(raised)}")
    finally:
        torch._dynamo.reset()
    off, j = around.worst(list(found), around.first)
    if off > around.tolerance:
        return Row(
            name, "fail", off,
            f"compiled, the gradient by {around.names[j]} is another one. Does forward or backward "
            "use something that the compiler takes for a constant (NumPy, Python numbers)?",
        )  # fmt: skip
    return Row(name, "pass", off)


def _relative(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    size = max(max_abs(b), 1e-3 * scale, 1e-30)
    known = b.isfinite() & a.isfinite()
    return max_abs(torch.where(known, a - b, 0.0)) / size


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
