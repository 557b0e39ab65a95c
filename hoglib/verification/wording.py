"""Describes how a wrong gradient differs from the right one, and which change would make it right."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core.element_differences import TensorMap, element_scales, max_abs, random_like, slope
from hoglib._core.pytree import is_float
from hoglib._core.torch_internals import backward_rule
from hoglib.verification import call as calls
from hoglib.verification import function_rules
from hoglib.verification.call import real
from hoglib.verification.function_rules import Run, kind_of
from hoglib.verification.subject import Application, Subject

MOST = 256  # elements that are differentiated one by one
NEAR = 1e-4
DECLARE = "If that is on purpose, as in a straight-through gradient, pass surrogate=True."
ORDER = "gradients are in the order of forward's inputs."


def describe_gradient(subject: Subject, x: list[Tensor], i: int, j: int) -> str:
    """Describes what is wrong with the gradient of output i by input j; empty if nothing is known."""
    if x[j].numel() > MOST:
        return ""
    case = _case(subject, x, i, j)
    if not bool(case.got.isfinite().all()):
        return f"The gradient by {case.name} is not finite where the derivative is."
    if not case.size:
        return f"The derivative by {case.name} is zero, and the gradient is not. {DECLARE}"
    if not max_abs(case.got):
        alone = [_case(subject, x, k, j) for k in range(len(case.u)) if k != i]
        ignored = any(_near(one.got, one.right, one.size) for one in alone)
        return (not ignored and _repaired(case)) or _missing(case)
    elsewhere = _elsewhere(case)
    if _near(case.got, case.right, case.size) and not elsewhere:
        return (
            f"For another gradient of the outputs the one by {case.name} is right: is backward not "
            "linear in it, or does it read or change the state of another call?"
        )
    return (
        elsewhere
        or _misplaced(case)
        or _repaired(case)
        or _conjugated(case)
        or _scaled(case, _case(subject, x, i, j))
        or _partly(case)
    )


class _Case(NamedTuple):
    """The gradient of one output by one input, and what it should be."""

    subject: Subject
    x: list[Tensor]
    u: list[Tensor]  # the gradient of the outputs
    i: int
    j: int
    grads: list[Tensor]  # by all inputs
    right: Tensor

    @property
    def got(self) -> Tensor:
        return self.grads[self.j]

    @property
    def size(self) -> float:
        return max_abs(self.right)

    @property
    def name(self) -> str:
        return self.subject.names[self.j]


def _case(subject: Subject, x: list[Tensor], i: int, j: int) -> _Case:
    outputs = subject.map(*x)
    u = [
        random_like(y, subject.random) if k == i else torch.zeros_like(y)
        for k, y in enumerate(outputs)
    ]
    grads = calls.vjps(subject.map, x, [(i, u[i])])[0]
    return _Case(subject, x, u, i, j, grads, _by_differences(subject.map, x, i, u[i], j))


def _by_differences(f: TensorMap, x: list[Tensor], i: int, u: Tensor, j: int) -> Tensor:
    def scalar(*given: Tensor) -> list[Tensor]:
        return [(u * f(*given)[i]).sum().reshape(1)]

    scale = element_scales(x[j])
    parts = []
    for k in range(x[j].numel()):
        v = torch.zeros_like(x[j]).reshape(-1)
        v[k] = scale.reshape(-1)[k]
        parts.append(slope(scalar, x, j, v.reshape(x[j].shape)).values[0] / v[k])
    return torch.cat(parts).reshape(x[j].shape)


def _missing(case: _Case) -> str:
    name, out = case.name, case.subject.rows[case.i]
    if len(case.u) > 1:
        return (
            f"The gradient of {out} by {name} is zero and should not be: does backward ignore the "
            f"incoming gradient of {out}? Add its part to the gradient of {name}, or declare {out} "
            "with ctx.mark_non_differentiable."
        )
    text = f"The gradient by {name} is missing (zero, or None): backward does not compute it."
    apps = case.subject.applications
    if len(apps) == 1 and _returned(apps[0]) is None:
        return f"{text} It returns None: does it have no `return`?"
    if len(case.x) == 1:
        return text
    return f"{text} If {name} is meant to be constant, give the other inputs requires_grad."


def _returned(app: Application) -> object:
    run = app.seeded()
    return backward_rule(app.function)(function_rules.Context(run.record), *run.incoming())


def _elsewhere(case: _Case) -> str:
    """Whether the gradient is that of another point."""
    moved = [1.25 * y for y in case.x]
    there = calls.vjps(case.subject.map, moved, [(case.i, case.u[case.i])])[0][case.j]
    right = _by_differences(case.subject.map, moved, case.i, case.u[case.i], case.j)
    if not torch.equal(there, case.got) or _near(right, case.right, case.size):
        return ""
    return (
        f"The gradient by {case.name} is the same at another point, where the derivative is another "
        f"one: does backward read what an earlier call left, in a cache or a global? {DECLARE}"
    )


def _repaired(case: _Case) -> str:
    """Whether the gradient is right once backward reads something else in one place."""
    apps = case.subject.applications
    if len(apps) != 1 or len(apps[0].by) != len(case.x):
        return ""
    (app,) = apps
    run = app.run(app.fresh())
    incoming = run.incoming()
    live = [k for k, y in enumerate(run.outputs) if is_float(y) and not run.record.is_silent(y)]
    if len(live) != len(case.u):
        return ""
    for k, u in zip(live, case.u, strict=True):
        incoming[k] = torch.view_as_complex(u) if run.outputs[k].is_complex() else u
    for text, slots, grads in repairs(run, incoming, live, app.names):
        try:
            returned = function_rules.backward(app.function, run.record.with_slots(slots), grads)
            found = real(returned[app.by[case.j]])
        except Exception:  # the change does not fit
            continue
        if _near(found, case.right, case.size):
            return f"{text} the gradient is right."
    return ""


def _conjugated(case: _Case) -> str:
    is_complex = case.subject.call.complex_variables[case.j]
    if not is_complex or not _near(case.got[..., 0], case.right[..., 0], case.size):
        return ""
    return (
        f"The imaginary part of the gradient by {case.name} is wrong, the real part is right: is a "
        "conj() missing, or one too many? Torch's gradient of a real loss is that by the conjugate."
    )


def _scaled(case: _Case, other: _Case) -> str:
    """A constant factor, which is the same for another gradient of the outputs."""
    ratio, again = _factor(case.got, case.right), _factor(other.got, other.right)
    if ratio is None or again is None or abs(ratio - again) > NEAR * abs(ratio):
        return ""
    if abs(ratio + 1) < NEAR:
        return (
            f"The gradient by {case.name} has the wrong sign: it is minus the derivative. {DECLARE}"
        )
    return (
        f"The gradient by {case.name} is {ratio:.4g} times the derivative: a constant factor is "
        f"wrong.{_mean(ratio, case.x)} {DECLARE}"
    )


def _factor(got: Tensor, right: Tensor) -> float | None:
    """c, if got = c right."""
    size = max_abs(right)
    if not size:
        return None
    ratio = float((got * right).sum() / (right * right).sum())
    return ratio if _near(got, ratio * right, size) else None


def _mean(ratio: float, x: Sequence[Tensor]) -> str:
    for count in {n for value in x for n in (*value.shape, value.numel()) if n > 1}:
        if abs(ratio * count - 1) < NEAR:
            return f" Is it a mean where a sum is due, over {count} elements?"
        if abs(ratio / count - 1) < NEAR:
            return f" Is it a sum where a mean is due, over {count} elements?"
    return ""


def _misplaced(case: _Case) -> str:
    if case.got.dim() == 2 and _near(case.got.T, case.right, case.size):
        return f"The gradient by {case.name} is transposed: return its transpose."
    for k, other in enumerate(case.grads):
        if k != case.j and _near(other, case.right, case.size):
            return f"The gradient by {case.name} is returned in the place of input {k}: {ORDER}"
    return ""


def _partly(case: _Case) -> str:
    got, right = case.got.reshape(-1), case.right.reshape(-1)
    wrong = ((got - right).abs() > NEAR * case.size).nonzero().reshape(-1).tolist()
    first = wrong[0] if wrong else 0
    example = f"element {first} is {float(got[first]):.6g}, and should be {float(right[first]):.6g}"
    if 0 < len(wrong) < got.numel():
        zero = " The wrong ones are zero." if not bool(got[wrong].any()) else ""
        branch = _branch(case, wrong)
        if branch:
            return (
                f"The gradient by {case.name} is wrong where {branch}, and right elsewhere: "
                f"{example}.{zero} The formula of that branch is wrong."
            )
        return (
            f"{len(wrong)} of {got.numel()} elements of the gradient by {case.name} are wrong, the "
            f"others right: {example}.{zero} Is one branch or one term of the formula wrong?"
        )
    off = max_abs(got - right) / case.size
    return (
        f"A term of the gradient by {case.name} is wrong or missing: {example}; the largest error is "
        f"{off:.0%} of the largest element."
    )


def _branch(case: _Case, wrong: list[int]) -> str:
    """The side of a threshold on which an input lies exactly where the gradient is wrong."""
    count = case.got.numel()
    mask = torch.zeros(count, dtype=torch.bool)
    mask[wrong] = True
    if min(len(wrong), count - len(wrong)) < 2:
        return ""
    for x, name in zip(case.x, case.subject.names, strict=True):
        if x.shape != case.got.shape:
            continue
        values = x.detach().reshape(-1).cpu()
        for what, quantity in ((name, values), (f"the size of {name}", values.abs())):
            inside, outside = quantity[mask], quantity[~mask]
            if bool(inside.max() < outside.min()):
                low, high, side = inside.max(), outside.min(), "below"
            elif bool(inside.min() > outside.max()):
                low, high, side = outside.max(), inside.min(), "above"
            else:
                continue
            if low < 0 < high:
                return f"{what} is {'negative' if side == 'below' else 'positive'}"
            return f"{what} is {side} a threshold between {float(low):.3g} and {float(high):.3g}"
    return ""


def _near(a: Tensor, b: Tensor, size: float) -> bool:
    if a.shape != b.shape or not bool((a - b).isfinite().all()):
        return False
    return max_abs(a - b) <= NEAR * size


Repair = tuple[str, dict[str, Any], list[Tensor | None]]


def repairs(
    run: Run, grads: list[Tensor | None], live: list[int], names: tuple[str, ...]
) -> Iterator[Repair]:
    """Changes under which a backward may be right: a description, the slots, and the incoming
    gradients."""
    slots = run.record.slots()
    for a, b in combinations(
        [label for label, value in slots.items() if isinstance(value, Tensor)], 2
    ):
        yield (
            f"Two tensors are exchanged, where they are saved or where they are read: with {a} in the "
            f"place of {b}, and the other way round,",
            slots | {a: slots[b], b: slots[a]}, grads,
        )  # fmt: skip
    for label, value in slots.items():
        if not isinstance(value, Tensor):
            continue
        what = kind_of(value, run, names)[1]
        for change, lacking, changed in _turned(value):
            yield (
                f"A {lacking} is missing, or one too many: with {label} ({what}) {change} in backward",
                slots | {label: changed}, grads,
            )  # fmt: skip
        for other, instead in _others(value, run, names):
            yield (
                f"The wrong tensor is read, or saved: with {other} in the place of {label} ({what})",
                slots | {label: instead}, grads,
            )  # fmt: skip
    for k, m in combinations(live, 2):
        exchanged = list(grads)
        exchanged[k], exchanged[m] = grads[m], grads[k]
        yield (
            f"backward takes the incoming gradients of outputs {k} and {m} in the wrong order (they "
            "come in the order of forward's outputs): exchanged,",
            slots, exchanged,
        )  # fmt: skip


def _turned(value: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    if value.dim() > 1 and value.shape[-1] == value.shape[-2]:
        yield "transposed", "transpose", value.mT
    if value.is_complex():
        yield "conjugated", "conj()", value.conj()


def _others(value: Tensor, run: Run, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """The inputs and outputs that could stand in its place."""
    inputs = [(f"input {names[i] if i < len(names) else i}", x) for i, x in enumerate(run.inputs)]
    outputs = [(f"output {k}", y) for k, y in enumerate(run.outputs)]
    for name, tensor in (*inputs, *outputs):
        fits = isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (
            value.shape,
            value.dtype,
        )
        if fits and tensor is not value:
            yield name, tensor
