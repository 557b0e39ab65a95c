"""The derivatives with other memory layouts, sizes and dtypes, under autocast and torch.compile."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hoglib._core.element_differences import max_abs, random_like
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.call import Arrange, Call
from hoglib.verification.circumstances import DRAWS, REFUSED, Baseline
from hoglib.verification.function_rules import handles_memory
from hoglib.verification.options import Options
from hoglib.verification.report import Row

LAYOUT = (
    "Assume nothing about strides: use reshape instead of view, call .contiguous() before code that "
    "reads memory directly, and save the inputs themselves: a contiguous copy of one has no graph."
)
STRUCTURED = "its arguments keep a structure that equal rows do not have."
SENSITIVE = "with equal rows its derivatives depend on the rounding of the inputs."
MEMORY = (
    "{} handles the memory of tensors itself (storage, resize_, set_), which may end the process with "
    "other layouts."
)


def layouts(base: Baseline) -> Iterator[Row]:
    """The same numbers in another memory layout; inputs without elements, and without dimensions."""
    handling = sorted(f.__name__ for f in base.subject.functions if handles_memory(f))
    reason = DRAWS if base.subject.draws else MEMORY.format(", ".join(handling)) if handling else ""
    if reason:
        for name in ("layout: non-contiguous inputs", "layout: stride-0 inputs"):
            yield Row(name, "skip", None, reason)
    else:
        yield _with_layout(base, "layout: non-contiguous inputs", strided, None)
        yield _stride_zero_inputs(base)
    yield from gradient_layouts(base)
    yield _zero_size(base)
    yield _no_dimensions(base)


def gradient_layouts(base: Baseline) -> Iterator[Row]:
    """The same numbers where the incoming gradients have another memory layout."""
    yield _with_layout(base, "layout: non-contiguous gradients", None, strided)
    yield _stride_zero_gradients(base)


def _with_layout(base: Baseline, name: str, before: Arrange | None, after: Arrange | None) -> Row:
    f = base.subject.call.map(base.subject.output_indices, before=before, after=after)
    try:
        values = f(*base.x)
    except Exception as raised:
        advice = "Call .contiguous() first, or reshape rather than view."
        return Row(name, "warn", None, f"{REFUSED.format(error=format_error(raised))} {advice}")
    off, i = base.largest_difference(values, base.values)
    if off > base.tolerance:
        return Row(name, "fail", off, f"{base.subject.rows[i]} is different. {LAYOUT}")
    return base.compare(name, lambda: base.derivatives(f, base.x), base.first, base.second, LAYOUT)


def _stride_zero_inputs(base: Baseline) -> Row:
    """Inputs of stride 0, against copies of them."""
    name = "layout: stride-0 inputs"
    call, which = base.subject.call, base.subject.output_indices
    if call.projections:
        return Row(name, "skip", None, STRUCTURED)
    f = call.map(which, before=_stretched)

    def of_copies(noise: float) -> tuple[list[Tensor], list[Tensor] | None]:
        random = torch.Generator().manual_seed(9)

        def copied(x: Tensor) -> Tensor:
            return _stretched(x) * (1 + noise * random_like(x, random))

        return base.derivatives(call.map(which, before=copied), base.x)

    try:
        f(*base.x)
        plain = of_copies(0.0)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=format_error(raised)))
    row = base.compare(name, lambda: base.derivatives(f, base.x), *plain, LAYOUT)
    if row.status == "fail" and row.error is not None:
        with suppress(Exception):  # the row stands
            rounded = of_copies(4 * base.subject.eps)
            if base.compare(name, lambda: rounded, *plain, LAYOUT).status == "fail":
                return Row(name, "skip", None, SENSITIVE)
    return row


def _stride_zero_gradients(base: Baseline) -> Row:
    """The gradient of a sum, which is one number expanded, against a contiguous one."""
    name = "layout: stride-0 gradients"
    call, which = base.subject.call, base.subject.output_indices

    def run(after: Arrange) -> tuple[list[Tensor], list[Tensor] | None]:
        f = call.map(which, after=after)
        leaves = [y.detach().clone().requires_grad_() for y in base.x]
        total = torch.stack([y.sum() for y in f(*leaves)]).sum()
        first = torch.autograd.grad(
            total, leaves, create_graph=base.second is not None, materialize_grads=True
        )
        if not any(g.requires_grad for g in first):
            return list(first), None
        return list(first), calls.grad(first, leaves, base.w)

    right, twice = run(lambda y: (y * torch.ones_like(y)).sum())
    return base.compare(name, lambda: run(torch.sum), right, twice, LAYOUT)


def _zero_size(base: Baseline) -> Row:
    batch = base.x[0].shape[0] if base.x[0].dim() else None
    x = [y[:0].clone() if y.dim() and y.shape[0] == batch else y for y in base.x]
    reason = "its inputs have no dimensions." if batch is None else ""
    return _of_another_shape(base, "layout: zero size", "elements", x, reason)


def _no_dimensions(base: Baseline) -> Row:
    shapes = {tuple(y.shape) for y in base.x}
    other = len(shapes) > 1 or shapes == {()} or any(base.subject.call.complex_variables)
    reason = "its inputs are not of one shape with dimensions." if other else ""
    x = [] if reason else [y.reshape(-1)[0].clone() for y in base.x]
    return _of_another_shape(base, "layout: 0-d", "dimensions", x, reason)


def _of_another_shape(base: Baseline, name: str, without: str, x: list[Tensor], reason: str) -> Row:
    """Whether backward takes the inputs that forward takes."""
    if not base.subject.functions:  # kernels of torch itself may stop the process
        reason = "it is made of torch's own functions."
    if reason:
        return Row(name, "skip", None, reason)
    try:
        values = base.f(*x)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=format_error(raised)))
    try:
        calls.gradient(base.f, base.n)(*x, *[torch.ones_like(y) for y in values])
    except Exception as raised:
        text = f"forward takes inputs without {without}, backward {format_error(raised)}"
        return Row(name, "warn", None, text)
    return Row(name, "pass")


def strided(x: Tensor) -> Tensor:
    """x, stored with its dimensions reversed and gaps between elements."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)


def _stretched(x: Tensor) -> Tensor:
    """One entry of the first dimension, repeated without a copy."""
    return x[:1].expand_as(x) if x.dim() else x


USELESS = 0.3  # relative error above which a gradient in float32 is wrong


def dtypes(base: Baseline) -> Iterator[Row]:
    """The gradient in narrower dtypes against that of the same rounded inputs."""
    yield _in_dtype(base, "dtype: float32", torch.float32, 1e-3)
    yield _in_dtype(base, "dtype: bfloat16", torch.bfloat16, 0.1)


def _in_dtype(base: Baseline, name: str, dtype: torch.dtype, tolerance: float) -> Row:
    if base.subject.half is not None:
        return Row(name, "skip", None, f"it computes in {_dtype_name(base.subject.half)}.")
    if base.subject.dtype != torch.float64:
        return Row(
            name, "skip", None, f"it was checked in {base.subject.dtype}, as float64 is refused."
        )
    if base.subject.draws:
        return Row(name, "skip", None, DRAWS)
    call = _call_in_dtype(base, dtype)
    x = [y.to(dtype) for y in base.x]
    rounded = [y.to(torch.float64) for y in x]
    try:
        found, values = _gradients(base, call, x)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses {_dtype_name(dtype)}: {format_error(raised)}")
    right, exact = _gradients(base, base.subject.call, rounded)
    scale = max(map(max_abs, exact), default=0.0)
    pairs = zip(values, exact, strict=True)
    same_values = all(_relative_difference(a.double(), b, scale) < 1e-3 for a, b in pairs)
    worst = 0.0
    for j, (a, b) in enumerate(zip(found, right, strict=True)):
        off = _relative_difference(a.double(), b, scale)
        if dtype == torch.float32 and off > USELESS and same_values:
            return Row(
                name, "fail", off,
                f"the gradient by {base.names[j]} is {off:.0%} off in float32, more than rounding. "
                "Does a branch depend on the dtype, or is a small number the difference of large ones?",
            )  # fmt: skip
        if off > tolerance:
            return Row(
                name, "warn", off,
                f"the gradient by {base.names[j]} is {off:.0e} off in {_dtype_name(dtype)}, more than "
                "its rounding explains. Are sums or differences of large numbers taken in it?",
            )  # fmt: skip
        worst = max(worst, off)
    return Row(name, "pass", worst)


def _call_in_dtype(base: Baseline, dtype: torch.dtype) -> Call:
    return Call(base.subject.fn, base.subject.inputs, dtype).with_settings_of(base.subject.call)


def _gradients(
    base: Baseline, call: Call, x: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    f = call.map(base.subject.output_indices)
    values = f(*x)
    u = [a.to(b.dtype) for a, b in zip(base.u, values, strict=True)]
    grads = calls.gradient(f, base.n)(*x, *u)
    return grads, [y.detach() for y in values]


def autocast(base: Baseline) -> Row:
    name = "autocast"
    if base.subject.dtype != torch.float64 or base.subject.half is not None:
        return Row(name, "skip", None, "it was not checked in float64.")
    call = _call_in_dtype(base, torch.float32)
    x = [y.float() for y in base.x]
    f = call.map(base.subject.output_indices)
    try:
        right, usual = _gradients(base, call, x)
        scale = max(map(max_abs, usual), default=0.0)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses float32: {format_error(raised)}")
    try:
        leaves = [y.detach().clone().requires_grad_() for y in x]
        with torch.autocast(x[0].device.type, torch.bfloat16):
            values = f(*leaves)
        u = [a.to(b.dtype) for a, b in zip(base.u, values, strict=True)]
        found = calls.grad(values, leaves, u)
    except Exception as raised:
        return Row(
            name, "warn", None,
            f"under torch.autocast it raised {format_error(raised)}. Decorate forward and backward "
            "with torch.amp.custom_fwd and custom_bwd.",
        )  # fmt: skip
    pairs = enumerate(zip(found, right, strict=True))
    off, j = max((_relative_difference(a.double(), b.double(), scale), j) for j, (a, b) in pairs)
    if off > 0.1:
        return Row(
            name, "warn", off,
            f"under torch.autocast the gradient by {base.names[j]} is off by {off:.0%}. Keep sums "
            "in float32, or decorate with torch.amp.custom_fwd(cast_inputs=torch.float32).",
        )  # fmt: skip
    return Row(name, "pass", off)


def compiled(base: Baseline, options: Options) -> Row:
    name = "compile"
    if not options.compile:
        return Row(name, "skip", None, "not asked for: it takes seconds; pass compile=True.")
    torch._dynamo.reset()
    try:
        f = torch.compile(base.f, backend="aot_eager")
        found = base.once(f)
    except Exception as raised:
        return Row(name, "warn", None, f"torch.compile raised {format_error(raised)}")
    finally:
        torch._dynamo.reset()
    text = (
        "under torch.compile the gradient by {name} is different. Does forward or backward use "
        "something that the compiler treats as a constant (NumPy, Python numbers)?"
    )
    return base.compare_first(name, found, text)


def _relative_difference(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    size = max(max_abs(b), 1e-3 * scale, 1e-30)
    known = b.isfinite() & a.isfinite()
    return max_abs(torch.where(known, a - b, 0.0)) / size


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
