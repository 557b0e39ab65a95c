"""Says in words how a wrong gradient differs from the right one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hoglib.verification import _maps as maps
from hoglib.verification import _plain as plain
from hoglib.verification._call import real
from hoglib.verification._differences import largest, scales, slope, uniform
from hoglib.verification._maps import Map
from hoglib.verification._subject import Subject
from hoglib.verification.doctor import kind_of

MOST = 256  # elements that are differentiated one by one
NEAR = 1e-4
DECLARE = "If that is on purpose, as in a straight-through gradient, pass surrogate=True."


def of_gradient(subject: Subject, x: list[Tensor], i: int, j: int) -> str:
    """What is the matter with the gradient of output i by input j; empty if nothing can be said."""
    f, name, out = subject.map, subject.names[j], subject.rows[i]
    if x[j].numel() > MOST:
        return ""
    values = f(*x)
    u = [uniform(y, subject.random) if k == i else torch.zeros_like(y) for k, y in enumerate(values)]
    got = maps.pull(f, x, [(i, u[i])])[0]
    right = _by_differences(f, x, i, u[i], j)
    if not bool(got[j].isfinite().all()):
        return f"The gradient by {name} is not finite where the derivative is."
    other = uniform(u[i], subject.random)
    factor = _factor(maps.pull(f, x, [(i, other)])[0][j], _by_differences(f, x, i, other, j))
    part = subject.call.complex_variables[j]
    return (
        _repaired(subject, u, right, j)
        or _conjugated(got[j], right, name, is_complex=part)
        or describe(got[j], right, name, out, got, len(values), factor, x)
    )


def _factor(got: Tensor, right: Tensor) -> float | None:
    """c, if got = c right."""
    size = largest(right)
    if not size:
        return None
    ratio = float((got * right).sum() / (right * right).sum())
    return ratio if _near(got, ratio * right, size) else None


def _conjugated(got: Tensor, right: Tensor, name: str, *, is_complex: bool) -> str:
    if not is_complex or not _near(got[..., 0], right[..., 0], largest(right)):
        return ""
    return (
        f"The imaginary part of the gradient by {name} is wrong, the real part is right: is a conj() "
        "missing, or one too many? Torch's gradient of a real loss is that by the conjugate."
    )


def _repaired(subject: Subject, u: list[Tensor], right: Tensor, j: int) -> str:
    """Whether the gradient is right once something that backward reads is transposed or conjugated."""
    if len(subject.applications) != 1:
        return ""
    (app,) = subject.applications
    if len(app.by) != len(subject.x) or len(u) != 1:
        return ""
    run = app.run(app.fresh())
    grads = [torch.view_as_complex(u[0]) if run.outputs[0].is_complex() else u[0]]
    for label, value in run.record.slots().items():
        if not isinstance(value, Tensor):
            continue
        what = kind_of(value, run, app.names)[1]
        for change, repaired in _changes(value):
            slots = run.record.slots() | {label: repaired}
            try:
                found = plain.backward(app.function, run.record.with_slots(slots), grads)[app.by[j]]
            except Exception:  # it does not fit there
                continue
            if isinstance(found, Tensor) and _near(real(found), right, largest(right)):
                lacking = "transpose" if change == "transposed" else "conj()"
                return (
                    f"A {lacking} is missing, or one too many: with {label} ({what}) {change} in it the "
                    "gradient is right."
                )
    return ""


def _changes(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if value.dim() > 1 and value.shape[-1] == value.shape[-2]:
        yield "transposed", value.mT
    if value.is_complex():
        yield "conjugated", value.conj()


def _factor(got: Tensor, right: Tensor) -> float | None:
    """c, if got = c right."""
    size = largest(right)
    if not size:
        return None
    ratio = float((got * right).sum() / (right * right).sum())
    return ratio if _near(got, ratio * right, size) else None


def _conjugated(got: Tensor, right: Tensor, name: str, *, is_complex: bool) -> str:
    if not is_complex or not _near(got[..., 0], right[..., 0], largest(right)):
        return ""
    return (
        f"The imaginary part of the gradient by {name} is wrong, the real part is right: is a conj() "
        "missing, or one too many? Torch's gradient of a real loss is that by the conjugate."
    )


def _transposed(subject: Subject, u: list[Tensor], right: Tensor, j: int) -> str:
    """Whether the gradient is right once something that backward reads is transposed."""
    if len(subject.applications) != 1:
        return ""
    (app,) = subject.applications
    if len(app.by) != len(subject.x) or len(u) != 1:
        return ""
    run = app.run(app.fresh())
    for label, value in run.record.slots().items():
        if not (isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == value.shape[-2]):
            continue
        slots = run.record.slots() | {label: value.mT}
        try:
            found = plain.backward(app.function, run.record.with_slots(slots), u)[app.by[j]]
        except Exception:
            continue
        if isinstance(found, Tensor) and _near(found, right, largest(right)):
            what = kind_of(value, run, app.names)[1]
            return f"A transpose is missing: with {label} ({what}) transposed in it the gradient is right."
    return ""


def describe(
    got: Tensor, right: Tensor, name: str, out: str, others: Sequence[Tensor], outputs: int,
    factor: float | None, x: Sequence[Tensor],
) -> str:  # fmt: skip
    size = largest(right)
    if not size:
        hint = ""
        if bool((got == got.reshape(-1)[0]).all()) or largest(got):
            hint = f" {DECLARE}"
        return f"The derivative by {name} is zero, and the gradient is not.{hint}"
    if not largest(got):
        if outputs > 1:
            return (
                f"The gradient of {out} by {name} is zero and should not be: does backward ignore the "
                f"incoming gradient of {out}? Add its part to the gradient of {name}."
            )
        return (
            f"The gradient by {name} is missing (zero, or None): backward does not compute it. If "
            f"{name} is meant to be constant, give the other inputs requires_grad."
        )
    ratio = _factor(got, right)
    if ratio is not None and factor is not None and abs(ratio - factor) <= NEAR * abs(factor):
        if abs(ratio + 1) < NEAR:
            return f"The gradient by {name} has the wrong sign: it is minus the derivative. {DECLARE}"
        return (
            f"The gradient by {name} is {ratio:.4g} times the derivative: a constant factor is "
            f"wrong.{_mean(ratio, x)} {DECLARE}"
        )
    if got.dim() == 2 and got.shape[0] == got.shape[1] and _near(got.T, right, size):
        return f"The gradient by {name} is transposed: return its transpose."
    for k, other in enumerate(others):
        if other is not got and other.shape == right.shape and _near(other, right, size):
            return (
                f"The gradient by {name} is returned in the place of input {k}: gradients are in the "
                "order of forward's inputs."
            )
    if got.numel() > 1:
        same = (got - right).abs() <= NEAR * size
        if bool(same.any()):
            first = int((~same).reshape(-1).nonzero()[0])
            return (
                f"{int((~same).sum())} of {got.numel()} elements of the gradient by {name} are wrong, "
                f"the first of them element {first}: expected {float(right.reshape(-1)[first]):.6g}, got "
                f"{float(got.reshape(-1)[first]):.6g}; the others are right. {_where_wrong(got, right, same)}"
            )
        if bool((got == got.reshape(-1)[0]).all()):
            return f"The gradient by {name} is the same for every element. {DECLARE}"
    missing = right - got
    return (
        f"A term of the gradient by {name} is wrong or missing: element 0 is {float(got.reshape(-1)[0]):.6g}, "
        f"and should be {float(right.reshape(-1)[0]):.6g}; the difference is "
        f"{largest(missing) / size:.0%} of the largest element."
    )


def _where_wrong(got: Tensor, right: Tensor, same: Tensor) -> str:
    zero = got == 0
    if bool((zero == ~same).all()):
        return "The wrong ones are zero."
    return ""


def _mean(ratio: float, x: Sequence[Tensor]) -> str:
    for value in x:
        for count in (*value.shape, value.numel()):
            for guess, what in ((1 / count, "a mean where a sum is due"), (count, "a sum where a mean is due")):
                if count > 1 and abs(ratio - guess) < NEAR * guess:
                    return f" Is it {what}, over {count} elements?"
    return ""


def _near(a: Tensor, b: Tensor, size: float) -> bool:
    return a.shape == b.shape and bool((a - b).isfinite().all()) and largest(a - b) <= NEAR * size


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
