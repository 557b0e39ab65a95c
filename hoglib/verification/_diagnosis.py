"""Says in words how a wrong gradient differs from the right one."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib.verification import _maps as maps
from hoglib.verification import _plain as plain
from hoglib.verification._call import real
from hoglib.verification._differences import largest, scales, slope, uniform
from hoglib.verification._maps import Map
from hoglib.verification._slots import kind_of
from hoglib.verification._subject import Subject

MOST = 256  # elements that are differentiated one by one
NEAR = 1e-4
DECLARE = "If that is on purpose, as in a straight-through gradient, pass surrogate=True."
ORDER = "gradients are in the order of forward's inputs."


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
        return largest(self.right)

    @property
    def name(self) -> str:
        return self.subject.names[self.j]


def of_gradient(subject: Subject, x: list[Tensor], i: int, j: int) -> str:
    """What is the matter with the gradient of output i by input j; empty if nothing can be said."""
    if x[j].numel() > MOST:
        return ""
    case = _case(subject, x, i, j)
    if not bool(case.got.isfinite().all()):
        return f"The gradient by {case.name} is not finite where the derivative is."
    if not case.size:
        return f"The derivative by {case.name} is zero, and the gradient is not. {DECLARE}"
    if not largest(case.got):
        return _missing(case)
    return (
        _repaired(case)
        or _conjugated(case)
        or _scaled(case, _case(subject, x, i, j))
        or _misplaced(case)
        or _partly(case)
    )


def _case(subject: Subject, x: list[Tensor], i: int, j: int) -> _Case:
    outputs = subject.map(*x)
    u = [
        uniform(y, subject.random) if k == i else torch.zeros_like(y) for k, y in enumerate(outputs)
    ]
    grads = maps.pull(subject.map, x, [(i, u[i])])[0]
    return _Case(subject, x, u, i, j, grads, _by_differences(subject.map, x, i, u[i], j))


def _by_differences(f: Map, x: list[Tensor], i: int, u: Tensor, j: int) -> Tensor:
    def scalar(*given: Tensor) -> list[Tensor]:
        return [(u * f(*given)[i]).sum().reshape(1)]

    scale = scales(x[j])
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
    return (
        f"The gradient by {name} is missing (zero, or None): backward does not compute it. If {name} "
        "is meant to be constant, give the other inputs requires_grad."
    )


def _repaired(case: _Case) -> str:
    """Whether the gradient is right once something that backward reads is transposed or conjugated."""
    apps = case.subject.applications
    if len(apps) != 1 or len(apps[0].by) != len(case.x) or len(case.u) != 1:
        return ""
    (app,) = apps
    run = app.run(app.fresh())
    u = case.u[0]
    grads = [torch.view_as_complex(u) if run.outputs[0].is_complex() else u]
    for label, value in run.record.slots().items():
        for change, lacking, repaired in _changes(value):
            slots = run.record.slots() | {label: repaired}
            try:
                returned = plain.backward(app.function, run.record.with_slots(slots), grads)
                found = real(returned[app.by[case.j]])
            except Exception:  # it does not fit there
                continue
            if _near(found, case.right, case.size):
                what = kind_of(value, run, app.names)[1]
                return (
                    f"A {lacking} is missing, or one too many: with {label} ({what}) {change} in "
                    "backward the gradient is right."
                )
    return ""


def _changes(value: object) -> Iterator[tuple[str, str, Tensor]]:
    if not isinstance(value, Tensor):
        return
    if value.dim() > 1 and value.shape[-1] == value.shape[-2]:
        yield "transposed", "transpose", value.mT
    if value.is_complex():
        yield "conjugated", "conj()", value.conj()


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
    size = largest(right)
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
        return (
            f"{len(wrong)} of {got.numel()} elements of the gradient by {case.name} are wrong, the "
            f"others right: {example}.{zero} Is one branch or one term of the formula wrong?"
        )
    off = largest(got - right) / case.size
    return (
        f"A term of the gradient by {case.name} is wrong or missing: {example}; the largest error is "
        f"{off:.0%} of the largest element."
    )


def _near(a: Tensor, b: Tensor, size: float) -> bool:
    if a.shape != b.shape or not bool((a - b).isfinite().all()):
        return False
    return largest(a - b) <= NEAR * size
