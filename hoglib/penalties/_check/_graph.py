"""Whether a penalty's gradient reaches the critic's parameters, and is the derivative of its value."""

from typing import Any

import torch
from torch import Tensor

from hoglib import _differences as differences
from hoglib.penalties._check._critics import Critic, Makers
from hoglib.penalties._check._subject import DIFFER, Subject
from hoglib.verification._cuts import INNER, Cut
from hoglib.verification.report import Row

REACHES, GRADIENT, ZERO = "reaches the critic", "parameter gradient", "zero gradient"
CREATE = (
    "Without `create_graph=True` the gradient is a constant: the penalty is added to the loss and "
    "trains nothing. Pass it to torch.autograd.grad (or to backward)."
)
FROZEN = (
    "What is returned does not depend on them: they were frozen while it ran, or it is a constant."
)
STAY = "Stay in torch operations, with gradients on, from the gradient to the value."
SAFE = (
    "The derivative of a root at zero is infinite, and infinity times zero is NaN. Use "
    "`g.flatten(1).norm(2, dim=1)`, whose derivative at zero is zero, or add 1e-12 under the root."
)


def reaches(subject: Subject, makers: Makers) -> Row:
    """Whether the gradient by any parameter of the critic is there at all."""
    critic = makers.quadratic()
    outcome = subject(critic, makers.data(5), makers.data(5))
    gradient = _gradient(outcome.mean, critic)
    if gradient is not None and bool(gradient.abs().max() > 0):
        return Row(REACHES, "pass")
    mend = CREATE if any(cut.how == INNER for cut in outcome.cuts) else STAY
    return Row(
        REACHES, "fail", None,
        f"no gradient reaches the critic's parameters{_by(outcome.cuts)}. "
        + (mend if outcome.cuts else FROZEN),
    )  # fmt: skip


def derivative(subject: Subject, makers: Makers) -> Row:
    """The gradient by the parameters beside differences of the value, along random directions."""
    return _derivative(subject, makers.network(), makers.data(5))


def _derivative(subject: Subject, critic: Critic, x: Tensor) -> Row:
    fake = x.clone()
    again = [subject(critic, x, fake).number for _ in range(2)]
    if again[0] != again[1]:
        return Row(GRADIENT, "skip", None, DIFFER)
    leaves = [p.detach().clone() for p in critic.parameters()]

    def value(at: list[Tensor]) -> list[Tensor]:
        _put(critic, at)
        return [subject(critic, x, fake).mean.detach().reshape(1)]

    outcome = subject(critic, x, fake)
    gradient = _gradient(outcome.mean, critic)
    worst, size, allowed = 0.0, 0.0, 1e-5 if x.dtype == torch.float64 else 3e-2
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        v = [torch.randn(p.shape, generator=random, dtype=torch.float64).to(p) for p in leaves]
        (slope,) = differences.along(value, leaves, v)
        flat = torch.cat([part.reshape(-1) for part in v])
        came = 0.0 if gradient is None else float(gradient @ flat)
        size = max(size, abs(float(slope)))
        worst = max(worst, abs(came - float(slope)))
        if came != came:
            return Row(GRADIENT, "fail", None, "it is NaN where the penalty is smooth.")
    _put(critic, leaves)
    error = worst / max(size, 1e-6)
    if error <= allowed:
        return Row(GRADIENT, "pass", error)
    return Row(
        GRADIENT, "fail", error,
        f"it is not the derivative of the value, by differences{_by(outcome.cuts)}: a part of it is "
        f"lost, and training follows another penalty. {STAY}",
    )  # fmt: skip


def at_zero(subject: Subject, makers: Makers) -> Row:
    """The same at a sample whose gradient is zero, and stays so, beside samples where it is not."""
    critic, x = makers.hinge(), makers.data(5, low=0.05)
    x[0] = -5.0
    outcome = subject(critic, x, x.clone())
    gradient = _gradient(outcome.mean, critic)
    if outcome.number != outcome.number:
        return Row(
            ZERO, "fail", None, "the value is NaN where a sample's gradient is zero. " + SAFE
        )
    if gradient is not None and not bool(gradient.isfinite().all()):
        text = "one sample with a zero gradient makes the gradient by the parameters NaN. "
        return Row(ZERO, "fail", None, text + SAFE)
    row = _derivative(subject, critic, x)
    if row.status != "fail":
        return row._replace(name=ZERO)
    return row._replace(name=ZERO, text=f"where one sample has a zero gradient: {row.text}")


def _gradient(value: Tensor, critic: Critic) -> Tensor | None:
    """By all parameters, one vector; None without a graph."""
    if not value.requires_grad:
        return None
    parameters = list(critic.requires_grad_().parameters())  # a penalty may have frozen them
    parts: Any = torch.autograd.grad(value, parameters, allow_unused=True)
    filled = [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True)
    ]
    return torch.cat([part.detach().reshape(-1) for part in filled])


def _put(critic: Critic, tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, tensor in zip(critic.parameters(), tensors, strict=True):
            parameter.copy_(tensor)


def _by(cuts: list[Cut]) -> str:
    return f"; the graph ends by {'; by '.join(map(str, cuts[:3]))}" if cuts else ""
