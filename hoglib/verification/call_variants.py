"""The derivatives of a call made in another way: an equivalent function, subsets of inputs, repeated
calls, other memory layouts, float32, vmap.

Each variant calls the map differently, or calls a changed map such as `f.laid_out(strided)` or
`f.in_dtype(float32)`. It is compared with a baseline that passed the derivative checks. So a row fails
only if the variant makes a difference.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.numerics.element_differences import TensorMap, max_abs, random_like
from hoglib._core.numerics.tolerances import TOLERANCES
from hoglib._core.runtime.source_location import format_error
from hoglib._core.torch_api.pytree import is_float
from hoglib.verification import maps
from hoglib.verification.attribution import subset_rows
from hoglib.verification.comparison import Options, Pair, agreement, largest_difference
from hoglib.verification.derivatives import nan_operation
from hoglib.verification.function_rules import handles_memory
from hoglib.verification.layouts import make_non_contiguous
from hoglib.verification.maps import Map
from hoglib.verification.report import Row, Rows
from hoglib.verification.subject import Subject

REFUSED = "forward refuses it with an error: {error}"
DRAWN = "it draws random numbers, which differ for another layout or dtype."


@final
@dataclass(frozen=True)
class Baseline:
    """The values y of a map f at a point, its gradient G = J^T u, and d<w, G>/dx; u, w are random."""

    subject: Subject
    options: Options
    f: Map
    values: list[Tensor]  # y
    u: list[Tensor]  # a covector for each output
    w: list[Tensor]  # a covector for each variable
    first: list[Tensor] = field(default_factory=list)  # G
    second: list[Tensor] | None = None  # d<w, G>/dx; None if it raises

    @property
    def x(self) -> list[Tensor]:
        return self.f.point

    @property
    def names(self) -> list[str]:
        return self.subject.names

    def gradient(self, f: TensorMap, by: Sequence[int] | None = None) -> list[Tensor]:
        return maps.gradient(f, len(self.x), by)(*self.x, *self.u)

    def second_derivative(
        self, f: TensorMap, requires: Sequence[int] | None = None, by: Sequence[int] | None = None
    ) -> list[Tensor]:
        """d<w, G>/dx by the variables `by`, if only the variables `requires` require grad."""
        requires = range(len(self.x)) if requires is None else requires
        by = requires if by is None else by
        leaves = [y.detach().clone().requires_grad_(j in requires) for j, y in enumerate(self.x)]
        u = [y.clone().requires_grad_() for y in self.u]
        grads = maps.gradient(f, len(self.x), requires)(*leaves, *u)
        chosen = [grads[list(requires).index(j)] for j in by]
        return maps.grad(chosen, [leaves[j] for j in by], [self.w[j] for j in by])

    def compared(self, name: str, *pairs: Pair, names: Sequence[str] = ()) -> Row:
        """A row that passes if the tensors of each pair (message, found, expected) agree."""
        # half of the digits: the variant may sum in another order
        tolerance, names = float(self.subject.eps**0.5), names or self.names
        return agreement(name, *pairs, tolerance=tolerance, floor=self._floor, names=names)

    @cached_property
    def _floor(self) -> float:
        """Smaller differences count as rounding: the result may be a sum of terms that cancel."""
        return 1e-4 * max(max(map(max_abs, self.values)), 1e-3 * max(map(max_abs, self.x)))


def baseline(subject: Subject, x: list[Tensor], options: Options) -> Baseline:
    """The baseline of a subject at x; raises if the first derivative raises."""
    f = subject.map.at(x)
    values = [y.detach() for y in f(*x)]
    u, w = ([random_like(y, subject.random) for y in some] for some in (values, x))
    base = Baseline(subject, options, f, values, u, w)
    base = replace(base, first=base.gradient(f))
    with suppress(Exception):  # reported by the derivative checks
        base = replace(base, second=base.second_derivative(f))
    return base


# For values, gradients and second derivatives: label, noun, and advice of the row on NaN.
NAN = (
    ("{}", "a value", "Are the inputs in its domain?"),
    ("the gradient by {}", "a gradient", "The values are not: choose the derivative there by "
     "convention, with torch.where on the argument of the function and on the result."),
    ("the second derivative by {}", "a second derivative", "The first is not. A torch.where lets NaN "
     "through where its other branch is infinite: guard the argument, not only the result."),
)  # fmt: skip


def check_finite(base: Baseline) -> Row:
    name = "finite"
    derivatives = (base.f(*base.x), base.first, base.second or [])
    labels = (base.subject.rows, base.names, base.names)
    for (which, _, advice), tensors, known in zip(NAN, derivatives, labels, strict=True):
        for label, t in zip(known, tensors, strict=False):
            if bool(t.isnan().any()):
                origin = ""
                with suppress(Exception):  # the row stands without a line
                    origin = nan_operation(base.f, base.x, base.u) if tensors is base.first else ""
                arises = f"; NaN arises in {origin}" if origin else ""
                text = f"{which.format(label)} is NaN at the inputs{arises}. {advice}"
                return Row(name, "fail", None, text)
    for (_, what, _), tensors in zip(NAN, derivatives, strict=True):
        if any(bool(t.isinf().any()) for t in tensors):
            return Row(name, "warn", None, f"{what} is infinite at the inputs.")
    if any(map(max_abs, base.first)):
        return Row(name, "pass")
    text = (
        "every gradient is zero at the inputs. If that is not intended, is something detached or "
        "rounded in forward?"
    )
    return Row(name, "warn", 0.0, text)


def check_create_graph(base: Baseline) -> Row:
    """Whether create_graph=True changes the gradient."""
    text = (
        "the gradient by {name} with create_graph=True is not the one without it: backward depends "
        "on whether gradients are enabled (torch.is_grad_enabled, requires_grad). Compute the same in "
        "both cases."
    )
    leaves, values = maps.at_leaves(base.f, base.x)
    return base.compared("create_graph", (text, maps.grad(values, leaves, base.u), base.first))


def check_determinism(base: Baseline) -> Row:
    name, options = "deterministic", base.options
    leaves, values = maps.at_leaves(base.f, base.x)
    keep = {"retain_graph": True, "create_graph": base.second is not None}
    found, again = (maps.grad(values, leaves, base.u, **keep) for _ in range(2))
    off, j = largest_difference(found, again, None)
    if off > options.nondet_tol:
        text = (
            f"the gradient by {base.names[j]} differs between two backward passes by {off:.2g} "
            "(nondeterministic). backward draws random numbers (torch's, NumPy's or random's), or sums "
            "in no fixed order. Its derivatives were judged with the same draws each time. Draw random "
            "numbers in forward and save them, or set nondet_tol."
        )
        return Row(name, "warn" if options.surrogate else "fail", off, text)
    if base.subject.draws:
        text = (
            "forward draws random numbers (torch's, NumPy's or random's); it was checked with the same "
            "ones each time."
        )
        return Row(name, "warn", off, text)
    return Row(name, "pass", off)


def check_state(base: Baseline) -> Row:
    """Whether a second forward, before the backward of the first, changes the gradient."""
    name = "state"
    n = base.f.num_inputs
    # class attributes of the Functions: a user may keep state there instead of on ctx
    before = {f: dict(vars(f)) for f in base.subject.functions}
    try:
        leaves, values = maps.at_leaves(base.f, base.x)
        # with unchanged parameters: call_with() swaps them, and a module has one set at a time
        base.f(*((1.1 * y).requires_grad_() for y in base.x[:n]), *leaves[n:])
        found = maps.grad(values, leaves, base.u, create_graph=True)
    except Exception as raised:
        return Row(name, "skip", None, f"two calls before a backward raised {format_error(raised)}")
    now = [(f, name, value) for f in before for name, value in vars(f).items()]
    changed = [f"{f.__name__}.{name}" for f, name, value in now if value is not before[f].get(name)]
    where = f"on the class, as {', '.join(changed)}" if changed else "outside ctx, as in a global"
    text = (
        "the gradient by {name} of one call changes when it is called again: something that backward "
        f"reads is kept {where}. Save it with ctx.save_for_backward."
    )
    return base.compared(name, (text, found, base.first))


MAX_SUBSETS = 14  # inputs to try alone, and to leave out, one at a time

UNDEFINED = (
    "An incoming gradient may be None (undefined): ask `if g is not None`, or leave "
    "ctx.set_materialize_grads at True, which makes it zeros."
)


def check_subsets(base: Baseline) -> Rows:
    """Gradients if only some inputs require grad, and the causes of a lost second derivative."""
    name = "inputs: each subset"
    if len(base.x) < 2:
        yield Row(name, "skip", None, "there is one input only.")
        return
    worst, refused = 0.0, ""
    for subset in _choose_subsets(len(base.x)):
        names = [base.names[j] for j in subset]
        how = f"when only {' and '.join(names)} require{'s' if len(subset) == 1 else ''} grad"
        gradient = (
            f"{how}, the gradient by {{name}} is different. Does backward mix up ctx.needs_input_grad, "
            "or forward save less?"
        )
        second = f"{how}, the second derivative by {{name}} is different."
        try:
            right = [base.first[j] for j in subset]
            row = base.compared(name, (gradient, base.gradient(base.f, subset), right), names=names)
            if row.status == "pass" and base.second is not None:
                found = base.second_derivative(base.f, subset)
                right = base.second_derivative(base.f, by=subset)
                row = base.compared(name, (second, found, right), names=names)
                if row.status == "fail":
                    yield from subset_rows(base.subject, base.x, subset)
        except Exception as raised:
            text = f"{how}, it raised {format_error(raised)}"
            row = Row(name, "fail", None, text)
            if "does not require grad" in str(raised):
                row = row._replace(status="warn", error=0.0)
                refused = refused or (
                    f"{text}. backward differentiates by inputs that need no gradient: leave those "
                    "out, by ctx.needs_input_grad or x.requires_grad."
                )
        if row.status == "fail":
            yield row
            return
        worst = max(worst, row.error or 0.0)
    yield Row(name, "warn" if refused else "pass", worst, refused)


def _choose_subsets(count: int) -> list[tuple[int, ...]]:
    """Each input alone, and all inputs but one; for up to three inputs these are all proper subsets."""
    singles = [(j,) for j in range(count)]
    others = [tuple(k for k in range(count) if k != j) for j in range(count)]
    return [*dict.fromkeys([*singles[:MAX_SUBSETS], *others[:MAX_SUBSETS]])]


def check_undefined(base: Baseline) -> Row:
    """Gradients if autograd passes undefined gradients (None), for all outputs or for all but one."""
    name = "outputs: undefined gradients"
    if base.options.surrogate:
        text = "declared a surrogate, whose gradient may ignore the incoming one."
        return Row(name, "skip", None, text)
    if not base.subject.functions:
        return Row(name, "skip", None, "no custom Function is in it.")
    when = "with an undefined gradient"
    try:
        leaves, values = maps.at_leaves(base.f, base.x)
        # without any incoming gradient, all gradients must be zero or undefined
        total = torch.stack([_UndefinedGradient.apply(y).sum() for y in values]).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        usual = all(bool(g.isfinite().all()) for g in base.first)
        if usual and any(g is not None and bool((g != 0).any()) for g in grads):
            return Row(name, "fail", None, f"{when} its gradient is not zero. {UNDEFINED}")
        parts = []
        for k, row in enumerate(base.subject.rows if len(base.u) > 1 else ()):
            when = f"when only {row} has a gradient"
            parts.append(maps.vjps(base.f, base.x, [(k, base.u[k])])[0])
    except Exception as raised:
        return Row(name, "fail", None, f"{when} it raised {format_error(raised)}. {UNDEFINED}")
    if not parts:
        return Row(name, "pass")
    sums = [torch.stack(column).sum(0) for column in zip(*parts, strict=True)]
    text = "the gradient by {name} of all outputs is not the sum of those of each output alone. "
    return base.compared(name, (text + UNDEFINED, sums, base.first))


@final
class _UndefinedGradient(Function):
    """The identity; its backward returns an undefined gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
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


def check_layouts(base: Baseline) -> Rows:
    """Whether values and derivatives are equal in another memory layout."""
    handling = sorted(f.__name__ for f in base.subject.functions if handles_memory(f))
    reason = DRAWN if base.subject.draws else MEMORY.format(", ".join(handling)) if handling else ""
    name = "layout: non-contiguous inputs"
    yield (
        Row(name, "skip", None, reason)
        if reason
        else _layout_row(base, name, base.f.laid_out(make_non_contiguous))
    )
    yield from gradient_layouts(base)


def gradient_layouts(base: Baseline) -> Rows:
    """Whether derivatives are equal if incoming gradients have another memory layout."""
    yield _layout_row(base, "layout: non-contiguous gradients", base.f.then(make_non_contiguous))
    yield _stride_zero_gradients(base)


def gradient_variants(base: Baseline) -> list[Row]:
    """The rows of variants that change backward only: create_graph, and layouts of gradients."""
    return [check_create_graph(base), *gradient_layouts(base)]


def _layout_row(base: Baseline, name: str, f: Map) -> Row:
    try:
        values = f(*base.x)
    except Exception as raised:
        advice = "Call .contiguous() first, or reshape rather than view."
        return Row(name, "warn", None, f"{REFUSED.format(error=format_error(raised))} {advice}")
    pair = f"{{name}} is different. {LAYOUT}", values, base.values
    row = base.compared(name, pair, names=base.subject.rows)
    if row.status == "fail":
        return row

    def run() -> Orders:
        second = base.second is not None
        return base.gradient(f), base.second_derivative(f) if second else None

    return _same_in_layout(base, name, run, (base.first, base.second))


Orders = tuple[list[Tensor], list[Tensor] | None]  # gradient; second derivative, if there is one


def _same_in_layout(base: Baseline, name: str, run: Callable[[], Orders], right: Orders) -> Row:
    first, second = right
    try:
        found, twice = run()
    except Exception as raised:
        return Row(name, "fail", None, f"backward raised {format_error(raised)}. {LAYOUT}")
    text = f"by {{name}} is different. {LAYOUT}"
    once = f"the gradient {text}", found, first
    return base.compared(name, once, (f"the second derivative {text}", twice, second))


def _stride_zero_gradients(base: Baseline) -> Row:
    """Gradients of y.sum(): autograd passes one number, expanded with stride 0."""

    def run(after: maps.Arrange) -> Orders:
        leaves, values = maps.at_leaves(base.f.then(after), base.x)
        total = torch.stack([y.sum() for y in values]).sum()
        first = maps.grad([total], leaves, create_graph=base.second is not None)
        graphed = any(g.requires_grad for g in first)
        return first, maps.grad(first, leaves, base.w) if graphed else None

    # multiplying by ones makes autograd pass a contiguous tensor of equal numbers
    right = run(lambda y: (y * torch.ones_like(y)).sum())
    return _same_in_layout(base, "layout: stride-0 gradients", lambda: run(torch.sum), right)


USELESS = 0.3  # a larger relative error of a float32 gradient counts as wrong
ROUNDING = 1e-3  # a smaller relative error is explained by rounding
OFF = {
    "fail": "{:.0%} off in float32, more than rounding. Does a branch depend on the dtype, or is a "
    "small number the difference of large ones?",
    "warn": "{:.0e} off in float32, more than its rounding explains. Are sums or differences of large "
    "numbers taken in it?",
}


def check_float32(base: Baseline) -> Row:
    """The gradient in float32, compared with float64 at the inputs rounded to float32."""
    name, subject = "dtype: float32", base.subject
    skipped = DRAWN if subject.draws else ""
    if subject.dtype != torch.float64:
        skipped = f"it was checked in {subject.dtype}, as float64 is refused."
    if (half := subject.precision.half) is not None:
        skipped = f"it computes in {str(half).removeprefix('torch.')}."
    if skipped:
        return Row(name, "skip", None, skipped)
    x = [y.float() for y in base.x]
    try:
        values, found = _gradients(base, base.f.in_dtype(torch.float32), x)
    except Exception as raised:
        return Row(name, "skip", None, f"it refuses float32: {format_error(raised)}")
    exact, right = _gradients(base, base.f, [y.double() for y in x])
    # differences below one thousandth of the largest value are rounding in sums
    floor = max(1e-3 * max(map(max_abs, exact), default=0.0), 1e-30)
    offs = []
    for a, b in zip((*values, *found), (*exact, *right), strict=True):
        # overflow in float32 is no bug
        known = torch.where(a.isfinite() & b.isfinite(), a.double(), b)
        offs.append(largest_difference([known], [b], floor)[0])
    count = len(values)
    # a gradient off by much is a failure only if the values agree; otherwise the map differs
    same_values = max(offs[:count], default=0.0) < ROUNDING
    for j, off in enumerate(offs[count:]):
        status = "fail" if off > USELESS and same_values else "warn" if off > ROUNDING else "pass"
        if status != "pass":
            text = f"the gradient by {base.names[j]} is {OFF[status].format(off)}"
            return Row(name, status, off, text)
    return Row(name, "pass", max(offs[count:], default=0.0))


def _gradients(base: Baseline, f: Map, x: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Values, and gradients for the baseline's u, of a map at x."""
    values = f(*x)
    u = [a.to(b.dtype) for a, b in zip(base.u, values, strict=True)]
    return [y.detach() for y in values], maps.gradient(f, len(x))(*x, *u)


OWN_RULE = (
    "Its vmap staticmethod gets in_dims, the batch dimension of each input (None where there is none), "
    "and returns (outputs, out_dims): move batch dimensions by what they say. Or have the rule made: "
    "generate_vmap_rule = True."
)
GENERATED = (
    "Remove generate_vmap_rule, or make forward and backward of torch operations that depend on no "
    "values, and on no number of dimensions."
)


def vmap_fault(base: Baseline, near: Sequence[list[Tensor]]) -> str:
    """Describe a difference between vmap over several points and a loop; "" if there is none. Raises
    the errors of vmap."""
    f, n, u, here = base.f, len(base.x), base.u, base.x
    points = [here, *near]
    batch = [torch.stack(parts) for parts in zip(*points, strict=True)]
    alone, none = [None] * n, [None] * len(u)

    def pulled(*given: Tensor) -> list[Tensor]:
        return list(torch.func.vjp(f, *given[:n])[1](list(given[n:])))

    def gradient(x: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
        return maps.gradient(f, n)(*x, *(factor * c for c in u))

    # (description, map, batch dimensions, arguments, results of a loop)
    cases: list[tuple[str, TensorMap, list[int | None], list[Tensor], list[list[Tensor]]]] = [
        ("the value under vmap over all inputs", f, [0] * n, batch, [f(*x) for x in points])
    ]
    for j, name in enumerate(base.names):
        # the batch dimension comes last: a vmap rule that ignores in_dims fails
        mixed = [*here[:j], batch[j].movedim(0, -1), *here[j + 1 :]]
        loop = [f(*here[:j], x, *here[j + 1 :]) for x in batch[j]]
        dims = [*alone[:j], -1, *alone[j + 1 :]]
        cases.append((f"the value under vmap over {name}", f, dims, mixed, loop))
    weights = [torch.stack([c, -2 * c]) for c in u]  # like autograd.grad(is_grads_batched=True)
    cases += [
        ("the gradient under vmap", pulled, [*[0] * n, *none], [*batch, *u],
         [gradient(x) for x in points]),
        ("the gradient under vmap over incoming gradients", pulled, [*alone, *[0] * len(u)],
         [*here, *weights], [gradient(here, factor) for factor in (1, -2)]),
    ]  # fmt: skip
    for what, map_, dims, arguments, loop in cases:
        found = list(torch.func.vmap(map_, tuple(dims), randomness="same")(*arguments))
        for i, (y, parts) in enumerate(zip(found, zip(*loop, strict=True), strict=True)):
            right = torch.stack(list(parts))
            if y.shape != right.shape:
                shapes = f"{tuple(y.shape)}, in a loop {tuple(right.shape)}"
                return f"{what} has shape {shapes} (result {i})"
            off, _ = largest_difference([y], [right], None)
            if off > base.subject.eps**0.5 * max(max_abs(right), 1e-6):
                return f"{what} differs from a loop by {off:.2g} (result {i})"
    return ""


def check_vmap(base: Baseline) -> Row:
    """vmap of the function; without a declared rule, vmap may refuse, but not give a wrong number."""
    name, subject, declared = "vmap", base.subject, base.subject.offers_vmap
    if declared is False:
        why = (
            "it is not offered: set `generate_vmap_rule = True` in a Function with setup_context, or "
            "give it a vmap staticmethod."
        )
        return Row(name, "skip", None, why)
    if subject.draws:
        why = "it draws random numbers, and vmap draws others than a loop."
        return Row(name, "skip", None, why)
    fix = OWN_RULE if any(f.vmap is not Function.vmap for f in subject.functions) else GENERATED
    fix = fix if declared else ""
    try:
        fault = vmap_fault(base, [subject.perturbed_point() for _ in range(2)])
    except Exception as error:
        text = f"it is not offered: {format_error(error)}"
        if declared:
            text = f"a vmap rule is declared, and it raised {format_error(error)}. {fix}"
        return Row(name, "fail" if declared else "skip", None, text)
    return Row(name, "fail" if fault else "pass", None, fault and f"{fault}. {fix}".strip())


# All variants: functions of the baseline that return one row or several.
VARIANTS: tuple[Callable[[Baseline], Row | Iterable[Row]], ...] = (
    check_create_graph, check_determinism, check_state, check_subsets, check_undefined, check_layouts,
    check_float32, check_vmap,
)  # fmt: skip


def variant_rows(subject: Subject, x: list[Tensor], options: Options) -> Rows:
    """The row `finite` at the inputs, and the rows of all variants at x."""
    try:
        base, at_inputs = (baseline(subject, at, options) for at in (x, subject.x))
    except Exception:  # the first derivative raises: its own row says so
        return
    for check, at in ((check_finite, at_inputs), *((variant, base) for variant in VARIANTS)):
        try:
            found = check(at)
            yield from [found] if isinstance(found, Row) else list(found)
        except Exception as error:  # other rows name the cause of the error
            yield Row("circumstances", "skip", None, f"not compared: {format_error(error)}")


# Comparison with a reference: an equivalent function of plain torch operations

REFERENCE = [f"reference: {what}" for what in ("value", "first derivative", "second derivative")]


def reference_rows(
    subject: Subject, reference: Callable[..., Any], points: list[list[Tensor]], *, surrogate: bool
) -> Rows:
    """Compare values and derivatives by the inputs; the reference does not know the parameters."""
    f = subject.map
    dtype = None if subject.precision.refused else subject.dtype
    theirs = maps.map_of(reference, f.inputs, dtype).scaled().to(f.which)
    theirs = replace(theirs, units=f.units)
    for order, name in enumerate(REFERENCE):
        found = [_error_of(subject, theirs, x, order) for x in points]
        worst, text = max(off for off, _ in found), next((text for _, text in found if text), "")
        yield Row(
            name,
            "fail" if text else "pass",
            worst * TOLERANCES[subject.precision.half or subject.dtype].rtol,
            text,
        )
        if order:
            continue
        if text or not f.num_inputs:
            return
        why = "declared a surrogate: it differs on purpose." if surrogate else ""
        _, values = maps.at_leaves(theirs, theirs.point)
        if not any(y.requires_grad for y in values):
            why = why or "the reference has no gradient: it leaves torch."
        if why:
            yield from (Row(other, "skip", None, why) for other in REFERENCE[1:])
            return


def _error_of(subject: Subject, reference: Map, x: list[Tensor], order: int) -> tuple[float, str]:
    """The largest difference of values (order 0) or derivatives, in units of the tolerance, and a text
    if it is above 1."""
    n = subject.map.num_inputs
    values = subject.map(*x)
    u, w = ([random_like(y, subject.random) for y in some] for some in (values, x[:n]))
    found = []
    for f, who in ((reference, "the reference"), (subject.map, "it")):
        try:
            leaves = [y.detach().clone().requires_grad_(order > 0) for y in x[:n]]
            inputs = [*leaves, *f.point[n:]]
            gradient = maps.gradient(f, len(inputs), range(n))
            grads = gradient(*inputs, *u) if order else f.leaves(*inputs)
            found.append(maps.grad(grads, leaves, w) if order == 2 else grads)
        except Exception as raised:
            return inf, f"{who} raised {format_error(raised)}"
    right, ours = found
    if len(ours) != len(right):
        return inf, (
            f"expected as many outputs as the reference gives, {len(right)}, got {len(ours)}; take "
            "equal ones of both, such as the first, `lambda *inputs: f(*inputs)[0]`."
        )
    size = max(map(max_abs, x[:n]), default=0.0)
    # where terms cancel, derivatives are small beside the values: rounding has the size of the values
    size = max(1e-3 * size, *map(max_abs, values)) if order else size
    worst = 0.0
    for i, (a, b) in enumerate(zip(ours, right, strict=True)):
        what = f"by {subject.names[i]} it" if order else f"output {i}"
        try:
            off, pair = _difference_in_tolerances(a, b, size, subject.precision.half)
        except Exception as raised:
            return inf, f"{what} cannot be compared: {format_error(raised)}"
        if off > 1:
            return off, f"{what} differs from the reference: {pair}."
        worst = max(worst, off)
    return worst, ""


def _difference_in_tolerances(
    a: Any, b: Any, size: float, half: torch.dtype | None
) -> tuple[float, str]:
    """The largest difference in units of the tolerance, and the element where it occurs."""
    if not isinstance(a, Tensor):
        return 0.0 if a == b else 2.0, f"{a!r}, expected {b!r}"
    if a.shape != b.shape:
        return inf, f"shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = torch.where(same, 0, (a - b).abs() if is_float(a) else 2).nan_to_num(inf)
    if bool(same.all()):
        return 0.0, ""
    k = int(gaps.argmax())
    where = f"element {k} is {a.reshape(-1)[k].item():.8g}, expected {b.reshape(-1)[k].item():.8g}"
    if not is_float(a):
        return 2.0, where
    atol, rtol = TOLERANCES[half or a.dtype]
    allowed = atol * min(1.0, max(max_abs(b), size)) + rtol * max_abs(b)
    return float(gaps.max()) / max(allowed, 1e-300), where
