"""The derivatives with other memory layouts, and in float32."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.element_differences import TensorMap, max_abs
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.call import Arrange, Call
from hoglib.verification.circumstances import DRAWS, REFUSED, Baseline
from hoglib.verification.function_rules import handles_memory
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

LAYOUT = (
    "Assume nothing about strides: use reshape instead of view, call .contiguous() before code that "
    "reads memory directly, and save the inputs themselves: a contiguous copy of one has no graph."
)
MEMORY = (
    "{} handles the memory of tensors itself (storage, resize_, set_), which may end the process with "
    "other layouts."
)


def layouts(base: Baseline) -> Iterator[Row]:
    """The same numbers in another memory layout."""
    handling = sorted(f.__name__ for f in base.subject.functions if handles_memory(f))
    reason = DRAWS if base.subject.draws else MEMORY.format(", ".join(handling)) if handling else ""
    name = "layout: non-contiguous inputs"
    yield Row(name, "skip", None, reason) if reason else _with_layout(base, name, strided, None)
    yield from gradient_layouts(base)


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


def strided(x: Tensor) -> Tensor:
    """x, stored with its dimensions reversed and gaps between elements."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)


USELESS = 0.3  # relative error above which a gradient in float32 is wrong
ROUNDING = 1e-3


def in_float32(base: Baseline) -> Row:
    """The gradient in float32 against that of the same rounded inputs."""
    name = "dtype: float32"
    if base.subject.half is not None:
        return Row(name, "skip", None, f"it computes in {_dtype_name(base.subject.half)}.")
    if base.subject.dtype != torch.float64:
        return Row(
            name, "skip", None, f"it was checked in {base.subject.dtype}, as float64 is refused."
        )
    if base.subject.draws:
        return Row(name, "skip", None, DRAWS)
    call = Call(base.subject.fn, base.subject.inputs, torch.float32)
    x = [y.float() for y in base.x]
    rounded = [y.double() for y in x]
    try:
        found, values = _gradients(base, call.with_settings_of(base.subject.call), x)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses float32: {format_error(raised)}")
    right, exact = _gradients(base, base.subject.call, rounded)
    scale = max(map(max_abs, exact), default=0.0)
    pairs = zip(values, exact, strict=True)
    same_values = all(_relative_difference(a.double(), b, scale) < 1e-3 for a, b in pairs)
    worst = 0.0
    for j, (a, b) in enumerate(zip(found, right, strict=True)):
        off = _relative_difference(a.double(), b, scale)
        if off > USELESS and same_values:
            return Row(
                name, "fail", off,
                f"the gradient by {base.names[j]} is {off:.0%} off in float32, more than rounding. "
                "Does a branch depend on the dtype, or is a small number the difference of large ones?",
            )  # fmt: skip
        if off > ROUNDING:
            return Row(
                name, "warn", off,
                f"the gradient by {base.names[j]} is {off:.0e} off in float32, more than "
                "its rounding explains. Are sums or differences of large numbers taken in it?",
            )  # fmt: skip
        worst = max(worst, off)
    return Row(name, "pass", worst)


def _gradients(
    base: Baseline, call: Call, x: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    f = call.map(base.subject.output_indices)
    values = f(*x)
    u = [a.to(b.dtype) for a, b in zip(base.u, values, strict=True)]
    grads = calls.gradient(f, base.n)(*x, *u)
    return grads, [y.detach() for y in values]


def _relative_difference(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    size = max(max_abs(b), 1e-3 * scale, 1e-30)
    known = b.isfinite() & a.isfinite()
    return max_abs(torch.where(known, a - b, 0.0)) / size


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


OWN_RULE = (
    "Its vmap staticmethod gets in_dims, the batch dimension of each input (None where there is none), "
    "and returns (outputs, out_dims): move batch dimensions by what they say. Or have the rule made: "
    "generate_vmap_rule = True."
)
GENERATED = (
    "Remove generate_vmap_rule, or make forward and backward of torch operations that depend on no "
    "values, and on no number of dimensions."
)


def _fault(subject: Subject, points: Sequence[list[Tensor]], u: list[Tensor]) -> str:
    """What is wrong with values and gradients under vmap, in words; raises what vmap raises."""
    f, n, eps = subject.map, len(subject.x), subject.eps
    here = points[0]
    batch = [torch.stack(parts) for parts in zip(*points, strict=True)]
    fault = _differs(
        "the value under vmap over all inputs",
        _vmap(f, (0,) * n, batch),
        [f(*x) for x in points],
        eps,
    )
    for j, name in enumerate(subject.names):
        mixed = [*here[:j], batch[j].movedim(0, -1), *here[j + 1 :]]
        dims = tuple(-1 if k == j else None for k in range(n))
        loop = [f(*here[:j], x, *here[j + 1 :]) for x in batch[j]]
        fault = fault or _differs(
            f"the value under vmap over {name}", _vmap(f, dims, mixed), loop, eps
        )

    def pulled(*given: Tensor) -> list[Tensor]:
        return list(torch.func.vjp(f, *given[:n])[1](list(given[n:])))

    dims = (*(0 for _ in range(n)), *(None for _ in u))
    loop = [calls.gradient(f, n)(*x, *u) for x in points]
    fault = fault or _differs(
        "the gradient under vmap", _vmap(pulled, dims, [*batch, *u]), loop, eps
    )
    weights = [torch.stack([c, -2 * c]) for c in u]  # as is_grads_batched=True of autograd.grad
    found = _vmap(pulled, (*(None for _ in range(n)), *(0 for _ in u)), [*here, *weights])
    loop = [calls.gradient(f, n)(*here, *(factor * c for c in u)) for factor in (1, -2)]
    return fault or _differs("the gradient under vmap over incoming gradients", found, loop, eps)


def _vmap(f: TensorMap, dims: tuple[int | None, ...], batch: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.func.vmap(f, dims, randomness="same")(*batch))


def _differs(
    what: str, found: Sequence[Tensor], loop: Sequence[Sequence[Tensor]], eps: float
) -> str:
    for i, (y, parts) in enumerate(zip(found, zip(*loop, strict=True), strict=True)):
        right = torch.stack(list(parts))
        if y.shape != right.shape:
            return f"{what} has shape {tuple(y.shape)}, in a loop {tuple(right.shape)} (result {i})"
        off = torch.where((y == right) | (y.isnan() & right.isnan()), 0.0, (y - right).abs())
        if max_abs(off) > eps**0.5 * max(max_abs(right), 1e-6):
            return f"{what} differs from a loop by {max_abs(off):.2g} (result {i})"
    return ""


def vmapped(subject: Subject, points: Sequence[list[Tensor]], u: list[Tensor]) -> Row:
    """vmap where it is offered; where it was not declared, only a wrong number is a fault."""
    name, declared = "vmap", subject.offers_vmap
    if declared is False:
        return Row(
            name, "skip", None,
            "it is not offered: set `generate_vmap_rule = True` in a Function with setup_context, or "
            "give it a vmap staticmethod.",
        )  # fmt: skip
    if subject.draws:
        why = "it draws random numbers, and vmap draws others than a loop."
        return Row(name, "skip", None, why)
    fix = OWN_RULE if any(f.vmap is not Function.vmap for f in subject.functions) else GENERATED
    fix = fix if subject.functions else ""
    try:
        fault = _fault(subject, points, u)
    except Exception as error:
        if "randomness" in str(error):
            why = "it draws random numbers, which this transform refuses."
            return Row(name, "skip", None, why)
        text = f"it is not offered: {format_error(error)}"
        if declared:
            text = f"a vmap rule is declared, and it raised {format_error(error)}. {fix}"
        return Row(name, "fail" if declared else "skip", None, text)
    return Row(name, "fail" if fault else "pass", None, fault and f"{fault}. {fix}".strip())
