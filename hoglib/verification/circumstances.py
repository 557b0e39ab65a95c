"""The derivatives in other circumstances: other inputs, subsets of inputs, repeated calls, other
memory layouts, float32, vmap.

They are compared with those of a baseline, which the derivative checks have judged. So a row fails only
if the circumstances make a difference.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.element_differences import TensorMap, max_abs, random_like
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.call import Arrange, Call
from hoglib.verification.derivatives import nan_operation
from hoglib.verification.function_rules import handles_memory
from hoglib.verification.options import Options
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

REFUSED = "forward refuses it with an error: {error}"
DRAWS = "it draws random numbers, which differ for another layout or dtype."


@final
class Baseline:
    """Values, gradients G for random u, and d<w, G>/dx for random w."""

    def __init__(self, subject: Subject, x: list[Tensor]) -> None:
        self.subject, self.x = subject, x
        self.f, self.n, self.names = subject.map, len(x), subject.names
        self.all_inputs = list(range(self.n))
        self.values = [y.detach() for y in self.f(*x)]
        self.u = [random_like(y, subject.random) for y in self.values]
        self.w = [random_like(y, subject.random) for y in x]
        self.first = calls.gradient(self.f, self.n)(*x, *self.u)
        self.second: list[Tensor] | None
        try:
            self.second = self.second_derivative(self.f, x, self.all_inputs)
        except Exception:  # reported by the derivative checks
            self.second = None
        self.tolerance = float(subject.eps**0.5)
        # smaller differences may come from a sum whose terms cancel
        self._floor = 1e-4 * max(max(map(max_abs, self.values)), 1e-3 * max(map(max_abs, x)))

    def largest_difference(
        self, a: Sequence[Tensor], b: Sequence[Tensor], *, relative: bool = True
    ) -> tuple[float, int]:
        """The largest difference between two lists of tensors, and the index of its tensor."""
        errors = []
        for x, y in zip(a, b, strict=True):
            x, y = x.detach(), y.detach()
            same = (x == y) | (x.isnan() & y.isnan())
            off = torch.where(same, 0.0, (x - y).abs()) if x.numel() else torch.zeros(1)
            size = max(max_abs(y), self._floor, 1e-300) if relative else 1.0
            errors.append(float(off.nan_to_num(torch.inf).max()) / size if off.any() else 0.0)
        j = max(range(len(errors)), key=errors.__getitem__, default=0)
        return (errors[j] if errors else 0.0), j

    def second_derivative(
        self,
        f: TensorMap,
        x: Sequence[Tensor],
        requires: Sequence[int],
        by: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """d<w, G>/dx by some inputs, where G are the gradients by the same ones."""
        by = requires if by is None else by
        leaves = [y.detach().clone().requires_grad_(j in requires) for j, y in enumerate(x)]
        u = [y.clone().requires_grad_() for y in self.u]
        grads = calls.gradient(f, self.n, requires)(*leaves, *u)
        chosen = [grads[list(requires).index(j)] for j in by]
        return calls.grad(chosen, [leaves[j] for j in by], [self.w[j] for j in by])

    def derivatives(
        self, f: TensorMap, x: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        first = calls.gradient(f, self.n)(*x, *self.u)
        return first, None if self.second is None else self.second_derivative(f, x, self.all_inputs)

    def compare_first(self, name: str, found: list[Tensor], text: str) -> Row:
        """Whether gradients are the same; `text` says what is wrong with that by {name}."""
        off, j = self.largest_difference(found, self.first)
        if off > self.tolerance:
            return Row(name, "fail", off, text.format(name=self.names[j]))
        return Row(name, "pass", off)

    def compare(
        self, name: str, run: Callable[[], tuple[list[Tensor], list[Tensor] | None]],
        first: list[Tensor], second: list[Tensor] | None, advice: str,
    ) -> Row:  # fmt: skip
        try:
            found, twice = run()
        except Exception as raised:
            return Row(name, "fail", None, f"backward raised {format_error(raised)}. {advice}")
        worst = 0.0
        for what, ours, right in (
            ("gradient", found, first), ("second derivative", twice, second),
        ):  # fmt: skip
            if ours is not None and right is not None:
                error, j = self.largest_difference(ours, right)
                if error > self.tolerance:
                    text = f"the {what} by {self.names[j]} is different. {advice}"
                    return Row(name, "fail", error, text)
                worst = max(worst, error)
        return Row(name, "pass", worst)


NAN = (
    ("{}", "a value", "Are the inputs in its domain?"),
    ("the gradient by {}", "a gradient", "The values are not: choose the derivative there by "
     "convention, with torch.where on the argument of the function and on the result."),
    ("the second derivative by {}", "a second derivative", "The first is not. A torch.where lets NaN "
     "through where its other branch is infinite: guard the argument, not only the result."),
)  # fmt: skip


def finite(base: Baseline) -> Row:
    name = "finite"
    values, grads = base.f(*base.x), base.first
    derivatives = (values, grads, base.second or [])
    labels = (base.subject.rows, base.names, base.names)
    for (which, _, advice), tensors, known in zip(NAN, derivatives, labels, strict=True):
        for label, t in zip(known, tensors, strict=False):
            if bool(t.isnan().any()):
                origin = _nan_origin(base) if tensors is grads else ""
                text = f"{which.format(label)} is NaN at the inputs{origin}. {advice}"
                return Row(name, "fail", None, text)
    for (_, what, _), tensors in zip(NAN, derivatives, strict=True):
        if any(bool(t.isinf().any()) for t in tensors):
            return Row(name, "warn", None, f"{what} is infinite at the inputs.")
    if any(map(max_abs, grads)):
        return Row(name, "pass")
    text = (
        "every gradient is zero at the inputs. If that is not intended, is something detached or "
        "rounded in forward?"
    )
    return Row(name, "warn", 0.0, text)


def _nan_origin(base: Baseline) -> str:
    """Where a first derivative becomes NaN; "" where that is not known."""
    with suppress(Exception):
        origin = nan_operation(base.f, base.x, base.u)
        return f"; NaN arises in {origin}" if origin else ""
    return ""


def with_graph(base: Baseline) -> Row:
    """Whether the gradient is the same with and without create_graph=True."""
    text = (
        "the gradient by {name} with create_graph=True is not the one without it: backward depends "
        "on whether gradients are enabled (torch.is_grad_enabled, requires_grad). Compute the same in "
        "both cases."
    )
    leaves = [y.detach().clone().requires_grad_() for y in base.x]
    without = calls.grad(base.f(*leaves), leaves, base.u)
    return base.compare_first("create_graph", without, text)


def deterministic(base: Baseline, options: Options) -> Row:
    name = "deterministic"
    leaves = [y.detach().clone().requires_grad_() for y in base.x]
    values = base.f(*leaves)

    twice = [
        calls.grad(values, leaves, base.u, retain_graph=True, create_graph=base.second is not None)
        for _ in range(2)
    ]
    what = "the gradient"
    off, j = base.largest_difference(*twice, relative=False)
    if off <= options.nondet_tol and base.second is not None:
        twice = [calls.grad(twice[0], leaves, base.w, retain_graph=True) for _ in range(2)]
        off, j = base.largest_difference(*twice, relative=False)
        what = "the second derivative"
    if off > options.nondet_tol:
        text = (
            f"{what} by {base.names[j]} differs between two backward passes by {off:.2g} "
            "(nondeterministic). backward draws random numbers (torch's, NumPy's or random's), or "
            "sums in no fixed order. Its derivatives were judged with the same draws each time. Draw "
            "random numbers in forward and save them, or set nondet_tol."
        )
        return Row(name, "warn" if options.surrogate else "fail", off, text)
    if base.subject.draws:
        return Row(
            name, "warn", off,
            "forward draws random numbers (torch's, NumPy's or random's); it was checked with the same "
            "ones each time.",
        )  # fmt: skip
    return Row(name, "pass", off)


def state(base: Baseline) -> Row:
    """Whether a second call, between forward and backward of the first, changes the gradient."""
    name = "state"
    n = base.subject.call.num_inputs
    if not n:
        return Row(name, "skip", None, "it is differentiated by its parameters only.")
    before = {f: dict(vars(f)) for f in base.subject.functions}
    try:
        leaves = [y.detach().clone().requires_grad_() for y in base.x]
        values = base.f(*leaves)
        # with the same parameters: a module has one set at a time
        base.f(*((1.1 * y).requires_grad_() for y in base.x[:n]), *leaves[n:])
        found = calls.grad(values, leaves, base.u, create_graph=True)
    except Exception as raised:
        return Row(name, "skip", None, f"two calls before a backward raised {format_error(raised)}")
    text = (
        "the gradient by {name} of one call changes when it is called again: something that backward "
        f"reads is kept {_where(before)}. Save it with ctx.save_for_backward."
    )
    return base.compare_first(name, found, text)


def _where(before: dict[type[Function], dict[str, Any]]) -> str:
    changed = [
        f"{function.__name__}.{name}"
        for function, was in before.items()
        for name, value in vars(function).items()
        if value is not was.get(name)
    ]
    return f"on the class, as {', '.join(changed)}" if changed else "outside of ctx, as in a global"


MOST_SUBSETS = 14

UNDEFINED = (
    "An incoming gradient may be None (undefined): ask `if g is not None`, or leave "
    "ctx.set_materialize_grads at True, which makes it zeros."
)


def subsets(base: Baseline) -> tuple[Row, tuple[int, ...]]:
    """The row, and the subset whose second derivative is different."""
    name = "inputs: each subset"
    if base.n < 2:
        return Row(name, "skip", None, "there is one input only."), ()
    worst, refused = 0.0, ""
    for subset in _choose_subsets(base.n):
        only = " and ".join(base.names[j] for j in subset)
        how = f"when only {only} require{'s' if len(subset) == 1 else ''} grad"
        try:
            first = calls.gradient(base.f, base.n, subset)(*base.x, *base.u)
            off, j = base.largest_difference(first, [base.first[j] for j in subset])
            if off > base.tolerance:
                text = (
                    f"{how}, the gradient by {base.names[subset[j]]} is different. Does "
                    "backward mix up ctx.needs_input_grad, or forward save less?"
                )
                return Row(name, "fail", off, text), ()
            worst = max(worst, off)
            if base.second is None:
                continue
            second = base.second_derivative(base.f, base.x, subset)
            right = base.second_derivative(base.f, base.x, base.all_inputs, subset)
            off, j = base.largest_difference(second, right)
            if off > base.tolerance:
                text = f"{how}, the second derivative by {base.names[subset[j]]} is different."
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


def _choose_subsets(count: int) -> list[tuple[int, ...]]:
    """Each input alone, and all but each: of up to three inputs, every proper subset."""
    singles = [(j,) for j in range(count)]
    others = [tuple(k for k in range(count) if k != j) for j in range(count)]
    return [*dict.fromkeys([*singles[:MOST_SUBSETS], *others[:MOST_SUBSETS]])]


def outputs_alone(base: Baseline, options: Options) -> Row:
    """Gradients of outputs that are undefined: of all of them, or of all but one."""
    name = "outputs: undefined gradients"
    if options.surrogate:
        text = "declared a surrogate, whose gradient may ignore the incoming one."
        return Row(name, "skip", None, text)
    if not base.subject.functions:
        return Row(name, "skip", None, "no custom Function is in it.")

    def failed(text: str, off: float | None = None) -> Row:
        return Row(name, "fail", off, f"{text}. {UNDEFINED}")

    leaves = [y.detach().clone().requires_grad_() for y in base.x]
    try:
        values = [_UndefinedGradient.apply(y) for y in base.f(*leaves)]
        total = torch.stack([y.sum() for y in values]).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception as raised:
        return failed(f"with an undefined gradient it raised {format_error(raised)}")
    usual = all(bool(g.isfinite().all()) for g in base.first)
    if usual and any(g is not None and bool((g != 0).any()) for g in grads):
        return failed("with an undefined gradient its gradient is not zero")
    if len(base.u) < 2:
        return Row(name, "pass")
    parts = []
    for k, row in enumerate(base.subject.rows):
        try:
            parts.append(calls.vjps(base.f, base.x, [(k, base.u[k])])[0])
        except Exception as raised:
            return failed(f"when only {row} has a gradient it raised {format_error(raised)}")
    sums = [torch.stack(column).sum(0) for column in zip(*parts, strict=True)]
    off, j = base.largest_difference(sums, base.first)
    if off > base.tolerance:
        text = f"the gradient by {base.names[j]} of all outputs is not the sum of those of each"
        return failed(f"{text} output alone", off)
    return Row(name, "pass", off)


@final
class _UndefinedGradient(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


# Other memory layouts, float32, and vmap.

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
        short = str(base.subject.half).removeprefix("torch.")
        return Row(name, "skip", None, f"it computes in {short}.")
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
    size = max(max_abs(b), 1e-3 * scale, 1e-30)
    known = b.isfinite() & a.isfinite()
    return max_abs(torch.where(known, a - b, 0.0)) / size


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
    found = _vmap(f, (0,) * n, batch)
    fault = _differs("the value under vmap over all inputs", found, [f(*x) for x in points], eps)
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
