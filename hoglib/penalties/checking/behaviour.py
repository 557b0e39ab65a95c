"""What is checked besides the value: the gradient by the critic, other inputs, and side effects."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import finite_differences
from hoglib._core.detachment import INNER, DetachedGradient
from hoglib._core.source_location import format_error
from hoglib.penalties.checking.formulas import is_close, relative_error
from hoglib.penalties.checking.subject import Critic, CriticFactory, Subject, number, seed
from hoglib.verification.call import same
from hoglib.verification.report import Row

DIFFER = (
    "not checked: equal calls differ, because its random numbers are not those of torch, NumPy or "
    "Python."
)
ENABLE_GRAD = (
    "Run it in `with torch.inference_mode(False), torch.enable_grad():`, on a clone of the batch."
)
DISABLE_AUTOCAST = (
    "Compute it inside `with torch.autocast(device_type, enabled=False):`, from float32 inputs."
)
REPEATED = "repeated calls"
UNFREEZE = "Set free what you freeze: set it back to True after the penalty."
LOST = 0.1  # relative error under autocast that is more than rounding to half precision
ROUNDED = 1e-4
CALLS = 33  # in a row, to detect a lazy penalty without every=: StyleGAN2 has one at every 16th
COPY = "Differentiate by a new tensor: `x = x.detach().requires_grad_()`."
REACHES, GRADIENT, ZERO = "reaches the critic", "parameter gradient", "zero gradient"
CREATE = (
    "Without `create_graph=True` the gradient is a constant: the penalty is added to the loss and "
    "trains nothing. Pass it to torch.autograd.grad (or to backward)."
)
FROZEN = "The value does not depend on them: they were frozen while it ran, or it is a constant."
STAY = "Use torch operations, with gradients on, from the gradient to the value."
SAFE = (
    "The derivative of a root at zero is infinite, and infinity times zero is NaN. Use "
    "`g.flatten(1).norm(2, dim=1)`, whose derivative at zero is zero, or add 1e-12 under the root."
)


def reaches(subject: Subject, factory: CriticFactory) -> Row:
    """Whether the gradient by any parameter of the critic is nonzero."""
    critic = factory.quadratic()
    outcome = subject(critic, factory.data(5), factory.data(5))
    gradient = _gradient(outcome.mean, critic)
    if gradient is not None and bool(gradient.abs().max() > 0):
        return Row(REACHES, "pass")
    fix = CREATE if any(d.how == INNER for d in outcome.detached) else STAY
    return Row(
        REACHES, "fail", None,
        f"no gradient reaches the critic's parameters{_detached_by(outcome.detached)}. "
        + (fix if outcome.detached else FROZEN),
    )  # fmt: skip


def derivative(subject: Subject, factory: CriticFactory) -> Row:
    """The gradient by the parameters against finite differences of the value, in random directions."""
    return _derivative(subject, factory.network(), factory.data(5))


def _derivative(subject: Subject, critic: Critic, x: Tensor) -> Row:
    fake = x.clone()
    again = [subject(critic, x, fake).number for _ in range(2)]
    if again[0] != again[1]:
        return Row(GRADIENT, "skip", None, DIFFER)
    leaves = [p.detach().clone() for p in critic.parameters()]

    def value(at: list[Tensor]) -> list[Tensor]:
        _set_parameters(critic, at)
        return [subject(critic, x, fake).mean.detach().reshape(1)]

    outcome = subject(critic, x, fake)
    gradient = _gradient(outcome.mean, critic)
    worst, size, allowed = 0.0, 0.0, 1e-5 if x.dtype == torch.float64 else 3e-2
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        v = [torch.randn(p.shape, generator=random, dtype=torch.float64).to(p) for p in leaves]
        (slope,) = finite_differences.directional_derivative(value, leaves, v)
        flat = torch.cat([part.reshape(-1) for part in v])
        product = 0.0 if gradient is None else float(gradient @ flat)
        size = max(size, abs(float(slope)))
        worst = max(worst, abs(product - float(slope)))
        if product != product:
            return Row(GRADIENT, "fail", None, "the gradient is NaN where the penalty is smooth.")
    _set_parameters(critic, leaves)
    error = worst / max(size, 1e-6)
    if error <= allowed:
        return Row(GRADIENT, "pass", error)
    return Row(
        GRADIENT, "fail", error,
        "finite differences show that it is not the derivative of the "
        f"value{_detached_by(outcome.detached)}: a part of it is lost, and training follows another "
        f"penalty. {STAY}",
    )  # fmt: skip


def at_zero(subject: Subject, factory: CriticFactory) -> Row:
    """The same where one sample's gradient is zero, and stays zero, and those of others are not."""
    critic, x = factory.hinge(), factory.data(5, low=0.05)
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
    """The gradient of a value by all parameters, as one vector; None without a graph."""
    if not value.requires_grad:
        return None
    parameters = list(critic.requires_grad_().parameters())  # a penalty may have frozen them
    parts: Any = torch.autograd.grad(value, parameters, allow_unused=True)
    filled = [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True)
    ]
    return torch.cat([part.detach().reshape(-1) for part in filled])


def _set_parameters(critic: Critic, tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, tensor in zip(critic.parameters(), tensors, strict=True):
            parameter.copy_(tensor)


def _detached_by(detached: list[DetachedGradient]) -> str:
    return (
        f"; the gradient is detached by {'; by '.join(map(str, detached[:3]))}" if detached else ""
    )


def without_grad(subject: Subject, factory: CriticFactory) -> list[Row]:
    """The value under no_grad and in inference mode, as in validation."""
    critic, real = factory.linear(1.7), factory.data(5)
    expected = subject(critic, real, real.clone()).number
    rows = []
    for name in ("no_grad", "inference_mode"):
        with getattr(torch, name)():
            x = real.clone()
            try:
                found = subject(critic, x, x.clone()).number
            except Exception as error:
                text = (
                    f"it raises {format_error(error)}. Validation runs in this mode. {ENABLE_GRAD}"
                )
                rows.append(Row(f"under {name}", "warn", None, text))
                continue
        if is_close(found, expected, 1e-3):
            rows.append(Row(f"under {name}", "pass"))
        else:
            text = (
                f"it returned {found:.4g} with gradients on {expected:.4g}, and did not raise: "
                f"validation logs a wrong number. {ENABLE_GRAD}"
            )
            rows.append(Row(f"under {name}", "fail", None, text))
    return rows


def autocast(subject: Subject, factory: CriticFactory) -> Row:
    """The value in float32 under autocast to half precision, against the value without autocast."""
    name, kind = "under autocast", factory.device.type
    plain = factory.like(dtype=torch.float32)
    worst, how = 0.0, ""
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 400.0)):
        critic, real = plain.network(scale), plain.data(5)
        try:
            expected, again = (subject(critic, real, real.clone()).number for _ in range(2))
        except Exception:
            return Row(name, "skip", None, "not checked: it does not run in float32.")
        if expected != again:
            return Row(name, "skip", None, DIFFER)
        try:
            with torch.autocast(kind, dtype=dtype):
                found = subject(critic, real, real.clone()).number
        except Exception as error:
            return Row(
                name,
                "fail",
                None,
                f"under {dtype} it raises {format_error(error)}. {DISABLE_AUTOCAST}",
            )
        gap = relative_error(found, expected)
        gap = gap if gap == gap else float("inf")
        if gap > worst:
            worst, how = gap, f"under {dtype} it is {found:.4g}, without autocast {expected:.4g}"
    if worst <= ROUNDED:
        return Row(name, "pass", worst)
    if worst > LOST:
        text = f"{how}: a sum or a product in half precision overflows, or loses all digits. "
        return Row(name, "fail", worst, text + DISABLE_AUTOCAST)
    text = f"{how}: the critic, or the norm, runs in half precision. {DISABLE_AUTOCAST}"
    return Row(name, "warn", worst, text)


def unchanged(subject: Subject, factory: CriticFactory) -> list[Row]:
    """Whether arguments are as before: flags, gradients, values and modes; and the running
    statistics of a critic that has some, if the penalty accepts it."""
    rows = _changes(subject, factory.network(), factory)
    try:
        moved = _updated_buffers(subject, factory.batch_normed(), factory)
    except Exception as error:
        text = f"it raises for a critic with BatchNorm: {format_error(error)}."
        return [*rows, Row("unchanged: running statistics", "skip", None, text)]
    text = (
        f"it moves {', '.join(moved)} of a critic with BatchNorm. They become those of points that are "
        "not data. The score of one sample also depends on the others then: use LayerNorm."
    )
    status = "warn" if moved else "pass"
    return [*rows, Row("unchanged: running statistics", status, None, text if moved else "")]


def _changes(subject: Subject, critic: nn.Module, factory: CriticFactory) -> list[Row]:
    real, fake = factory.data(5), factory.data(5)
    given = {"real": real, "fake": fake} | dict(critic.named_parameters())
    values = {name: x.detach().clone() for name, x in given.items()}
    flags = {name: x.requires_grad for name, x in given.items()}
    found = {"requires_grad": "", "gradients": "", "values": "", "training mode": ""}
    for mode in (True, False):
        critic.train(mode)
        subject(critic, real, fake)
        if critic.training is not mode:
            found["training mode"] = (
                f"the critic was in {'train' if mode else 'eval'}() mode and is in the other one now. "
                "Do not change its mode, or restore it."
            )
    changed = [name for name, x in given.items() if x.requires_grad is not flags[name]]
    if changed:
        fix = COPY if {"real", "fake"} & set(changed) else UNFREEZE
        found["requires_grad"] = f"requires_grad of {', '.join(changed)} was changed. {fix}"
    filled = [name for name, x in given.items() if x.grad is not None]
    if filled:
        found["gradients"] = (
            f".grad of {', '.join(filled)} is filled, and adds to the gradients of the step. Use "
            "`torch.autograd.grad(score.sum(), x, create_graph=True)` in place of backward()."
        )
    written = [name for name, x in given.items() if not same(values[name], x.detach())]
    if written:
        found["values"] = f"{', '.join(written)} was written to. Use out-of-place operations."
    return [
        Row(f"unchanged: {what}", "fail" if text else "pass", None, text)
        for what, text in found.items()
    ]


def _updated_buffers(subject: Subject, critic: nn.Module, factory: CriticFactory) -> list[str]:
    before = {name: x.clone() for name, x in critic.named_buffers()}
    n = 6  # so that micro-batches of two or three leave no remainder of one
    subject(critic, factory.data(n), factory.data(n))
    after = dict(critic.named_buffers())
    return [name for name, x in before.items() if not same(x, after[name])]


def other_inputs(
    factory: CriticFactory, evaluate: Callable[[CriticFactory, int], tuple[float, float] | None]
) -> list[Row]:
    """A batch of one, float32, scores and samples of another shape. evaluate returns the value and the
    expected one, or None. Shapes that were not asked for may be refused, or give a warning."""
    score = "[N]" if factory.column else "[N, 1]"
    other = (7,) if len(factory.shape) > 1 else (2, 3, 4)
    single = (
        "A last batch of one sample would end the training: leave squeeze() out, or set drop_last."
    )
    narrow = "Create tensors and random numbers in the dtype of real, `.to(real)`."
    cases = [
        ("batch of one", factory, 1, "warn", "fail", single),
        ("in float32", factory.like(dtype=torch.float32), 5, "fail", "fail", narrow),
        (
            f"scores of shape {score}",
            factory.like(column=not factory.column),
            5,
            "skip",
            "fail",
            "",
        ),
        (f"samples of shape {other}", factory.like(shape=other), 5, "skip", "warn", ""),
    ]
    rows = []
    for name, made, n, raising, wrong, advice in cases:
        try:
            values = evaluate(made, n)
        except Exception as error:
            rows.append(
                Row(name, raising, None, f"it raises {format_error(error)}. {advice}".rstrip())
            )
            continue
        if values is None:
            text = "not checked: the formula of the value is not known."
            rows.append(Row(name, "skip", None, text))
            continue
        value, expected = values
        if is_close(value, expected, 1e-5 if made.dtype == torch.float64 else 1e-2):
            rows.append(Row(name, "pass"))
            continue
        text = (
            f"it returned {value:.4g}, where the same formula gives {expected:.4g}. A "
            "dimension that is squeezed or reduced is missing here: name dimensions, "
            "`g.flatten(1)`, `score.reshape(-1)`."
        )
        if made.dtype is not factory.dtype:
            text = f"it returned {value:.4g}, where {expected:.4g} is right. {narrow}"
        rows.append(Row(name, wrong, relative_error(value, expected), text))
    return rows


def repeated(subject: Subject, factory: CriticFactory) -> list[Row]:
    """Whether a penalty that is not lazy has the same value at each call."""
    if subject.every > 1:
        return []
    critic, real = factory.linear(1.7), factory.data(5)
    seed(factory.device)
    given = (critic, real, real.clone())
    values = [float(number(subject.once(*given), real)) for _ in range(CALLS)]
    if all(is_close(value, values[0], 1e-3) for value in values):
        return [Row(REPEATED, "pass")]
    first = next(i for i, v in enumerate(values) if not is_close(v, values[0], 1e-3))
    shown = ", ".join(f"{v:.4g}" for v in (values[0], *values[max(first - 1, 1) : first + 3]))
    text = f"equal calls in a row returned {shown}. If it is lazy, pass every=."
    return [Row(REPEATED, "fail", None, text)]
