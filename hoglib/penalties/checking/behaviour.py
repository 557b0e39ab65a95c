"""Somebody's penalty, run so that nothing of theirs is changed and all that it does is seen."""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import finite_differences, validation
from hoglib._core.detachment import INNER, DetachedGradient, DetachmentWatch
from hoglib._core.source_location import format_error
from hoglib.penalties.checking.critics import Critic, Makers
from hoglib.penalties.checking.mistakes import Kind, close, off
from hoglib.verification.call import same
from hoglib.verification.report import Row

DIFFER = "not judged: equal calls differ; its random numbers are not of torch, NumPy or Python."
FLAG = "requires_grad_"  # the watch takes it for an operation without a derivative


class Outcome(NamedTuple):
    """What `every` calls in a row gave: the mean of their values, where the critic was called in each,
    and where the graph ended."""

    mean: Tensor
    calls: list[list[Tensor]]
    cuts: list[DetachedGradient]

    @property
    def number(self) -> float:
        return float(self.mean.detach())

    @property
    def active(self) -> list[list[Tensor]]:
        """The calls in which the critic was run: a lazy penalty does nothing in others."""
        return [xs for xs in self.calls if xs]


class Returned(Exception):
    """What came is not one number; the text says what came."""


class Subject:
    """A penalty as a function of (critic, real, fake)."""

    def __init__(self, penalty: Callable[..., Any], kind: Kind, every: int) -> None:
        self.penalty, self.kind, self.every = penalty, kind, every
        self.attached = False  # whether fake comes with a graph, as from a generator
        self._both = kind.at in ("between", "both") or _takes_fake(penalty)

    def __call__(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Outcome:
        """As many calls as a lazy penalty needs, always with the same random numbers."""
        values, calls, cuts = [], [], []
        seed(real.device)
        if isinstance(critic, Critic):
            critic.requires_grad_()  # what one call froze is not the next one's fault
        for _ in range(self.every):
            if isinstance(critic, Critic):
                critic.calls = []
            with DetachmentWatch() as watch:
                returned = self.once(critic, real, fake)
            cuts += [cut for cut in watch.detached if cut.place is not None and FLAG not in cut.how]
            values.append(number(returned, real))
            calls.append(critic.calls if isinstance(critic, Critic) else [])
        mean = torch.stack([v.to(real.dtype) for v in values]).mean()
        return Outcome(mean, calls, list({str(cut): cut for cut in cuts}.values()))

    def once(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Any:
        if self.attached:
            fake = fake.detach().requires_grad_().clone()
        if self._both:
            return self.penalty(critic, real, fake)
        return self.penalty(critic, fake if self.kind.at == "fake" else real)


def number(returned: Any, like: Tensor) -> Tensor:
    """A scalar tensor: a Python number, as lazy penalties return where they do nothing, is one too."""
    if isinstance(returned, bool | int | float):
        return torch.tensor(float(returned), dtype=like.dtype, device=like.device)
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.is_floating_point():
        return returned.reshape(())
    raise Returned(validation.describe(returned))


def _takes_fake(penalty: Callable[..., Any]) -> bool:
    """Whether a penalty at one set of points is called with both, by its signature."""
    function = penalty.forward if isinstance(penalty, nn.Module) else penalty
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) < 3:
        return False
    third = plain[2]
    return third.default is third.empty or "fake" in third.name.lower()


@contextmanager
def untouched(penalty: Callable[..., Any], device: torch.device) -> Iterator[Callable[..., Any]]:
    """The penalty, or a copy of one that counts its calls; inside, random numbers are nobody's."""
    owner: Any = getattr(penalty, "__self__", penalty)
    state = copy.deepcopy(owner.state_dict()) if isinstance(owner, nn.Module) else None
    if state is None and not inspect.isroutine(penalty):
        penalty = _copied(penalty)
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield penalty
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)
            if state is not None:
                owner.load_state_dict(state)


def _copied(penalty: Any) -> Any:
    try:
        return copy.deepcopy(penalty)
    except Exception:  # it holds what cannot be copied; then it counts our calls
        return penalty


def seed(device: torch.device) -> None:
    """The same random numbers from here on, of all libraries, inside `untouched`."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(0)


# === What a penalty does in circumstances other than a plain step, and to what it was given.

WITHIN = (
    "Run it in `with torch.inference_mode(False), torch.enable_grad():`, on a clone of the batch."
)
WITHOUT = (
    "Put `with torch.autocast(device_type, enabled=False):` around it, and give the critic float32."
)
REPEATED = "repeated calls"
GROSS = 0.1  # of a value under autocast: more than half precision can explain
ROUNDED = 1e-4
CALLS = 33  # in a row, to see a lazy one that is not said to be: StyleGAN2's is due at every 16th
COPY = "Differentiate by a tensor of its own: `x = x.detach().requires_grad_()`."


def without_grad(subject: Subject, makers: Makers) -> list[Row]:
    """The value under no_grad and in inference mode, where validation runs."""
    critic, real = makers.linear(1.7), makers.data(5)
    expected = subject(critic, real, real.clone()).number
    rows = []
    for name in ("no_grad", "inference_mode"):
        with getattr(torch, name)():
            x = real.clone()
            try:
                found = subject(critic, x, x.clone()).number
            except Exception as error:
                text = f"it raises {format_error(error)}. Validation runs so. {WITHIN}"
                rows.append(Row(f"under {name}", "warn", None, text))
                continue
        if close(found, expected, 1e-3):
            rows.append(Row(f"under {name}", "pass"))
        else:
            text = (
                f"it returned {found:.4g} where it is {expected:.4g} with gradients on, and did not "
                f"raise: validation logs a wrong number. {WITHIN}"
            )
            rows.append(Row(f"under {name}", "fail", None, text))
    return rows


def autocast(subject: Subject, makers: Makers) -> Row:
    """The value in float32 under autocast to half precision, beside the one without."""
    name, kind = "under autocast", makers.device.type
    plain = makers.like(dtype=torch.float32)
    worst, how = 0.0, ""
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 400.0)):
        critic, real = plain.network(scale), plain.data(5)
        try:
            expected, again = (subject(critic, real, real.clone()).number for _ in range(2))
        except Exception:
            return Row(name, "skip", None, "not judged: it does not run in float32.")
        if expected != again:
            return Row(name, "skip", None, DIFFER)
        try:
            with torch.autocast(kind, dtype=dtype):
                found = subject(critic, real, real.clone()).number
        except Exception as error:
            return Row(
                name, "fail", None, f"under {dtype} it raises {format_error(error)}. {WITHOUT}"
            )
        gap = off(found, expected)
        gap = gap if gap == gap else float("inf")
        if gap > worst:
            worst, how = gap, f"under {dtype} it is {found:.4g}, without autocast {expected:.4g}"
    if worst <= ROUNDED:
        return Row(name, "pass", worst)
    if worst > GROSS:
        text = f"{how}: a sum or a product in half precision overflows, or has no digits left. "
        return Row(name, "fail", worst, text + WITHOUT)
    text = f"{how}: the critic, or the norm, runs in half precision. {WITHOUT}"
    return Row(name, "warn", worst, text)


def unchanged(subject: Subject, makers: Makers) -> list[Row]:
    """What was given, afterwards: flags, gradients, values and modes; running statistics of a critic
    that has some, where the penalty runs with one."""
    rows = _after(subject, makers.network(), makers)
    try:
        moved = _moved(subject, makers.batch_normed(), makers)
    except Exception as error:
        text = f"it refuses a critic with BatchNorm: {format_error(error)}."
        return [*rows, Row("unchanged: running statistics", "skip", None, text)]
    text = (
        f"it moves {', '.join(moved)} of a critic with BatchNorm. They become those of points that are "
        "no data. Such a critic couples samples, and has no gradient of one sample: use LayerNorm."
    )
    status = "warn" if moved else "pass"
    return [*rows, Row("unchanged: running statistics", status, None, text if moved else "")]


def _after(subject: Subject, critic: nn.Module, makers: Makers) -> list[Row]:
    real, fake = makers.data(5), makers.data(5)
    given = {"real": real, "fake": fake} | dict(critic.named_parameters())
    values = {name: x.detach().clone() for name, x in given.items()}
    flags = {name: x.requires_grad for name, x in given.items()}
    found = {"requires_grad": "", "gradients": "", "values": "", "training mode": ""}
    for mode in (True, False):
        critic.train(mode)
        subject(critic, real, fake)
        if critic.training is not mode:
            found["training mode"] = (
                f"the critic was in {'train' if mode else 'eval'}() mode and is not any more. Leave "
                "its mode alone, or restore it."
            )
    changed = [name for name, x in given.items() if x.requires_grad is not flags[name]]
    if changed:
        mend = COPY if {"real", "fake"} & set(changed) else "Set free what you freeze."
        found["requires_grad"] = (
            f"requires_grad of {', '.join(changed)} is another one afterwards. {mend}"
        )
    filled = [name for name, x in given.items() if x.grad is not None]
    if filled:
        found["gradients"] = (
            f".grad of {', '.join(filled)} is filled, and will be added to those of the step. Use "
            "`torch.autograd.grad(score.sum(), x, create_graph=True)` in place of backward()."
        )
    written = [name for name, x in given.items() if not same(values[name], x.detach())]
    if written:
        found["values"] = f"{', '.join(written)} was written to. Work on new tensors, not in place."
    return [
        Row(f"unchanged: {what}", "fail" if text else "pass", None, text)
        for what, text in found.items()
    ]


def _moved(subject: Subject, critic: nn.Module, makers: Makers) -> list[str]:
    before = {name: x.clone() for name, x in critic.named_buffers()}
    n = 6  # where pieces of two or three leave no rest of one
    subject(critic, makers.data(n), makers.data(n))
    after = dict(critic.named_buffers())
    return [name for name, x in before.items() if not same(x, after[name])]


def others(makers: Makers, judge: Callable[[Makers, int], tuple[float, float] | None]) -> list[Row]:
    """A batch of one, float32, other scores, samples of another rank; judge gives what came and is
    expected. What was not asked for may be refused, or warned of."""
    score = "[N]" if makers.column else "[N, 1]"
    other = (7,) if len(makers.shape) > 1 else (2, 3, 4)
    single = "A last batch of one sample ends the training: leave squeeze() out, or set drop_last."
    narrow = "Give what is drawn or made inside the dtype of real, `.to(real)`."
    cases = [
        ("batch of one", makers, 1, "warn", "fail", single),
        ("in float32", makers.like(dtype=torch.float32), 5, "fail", "fail", narrow),
        (f"scores of shape {score}", makers.like(column=not makers.column), 5, "skip", "fail", ""),
        (f"samples of shape {other}", makers.like(shape=other), 5, "skip", "warn", ""),
    ]
    rows = []
    for name, made, n, raising, wrong, advice in cases:
        try:
            judged = judge(made, n)
        except Exception as error:
            rows.append(
                Row(name, raising, None, f"it raises {format_error(error)}. {advice}".rstrip())
            )
            continue
        if judged is None:
            text = "not judged: what is wrong with the value says nothing of this."
            rows.append(Row(name, "skip", None, text))
            continue
        came, expected = judged
        if close(came, expected, 1e-5 if made.dtype == torch.float64 else 1e-2):
            rows.append(Row(name, "pass"))
            continue
        text = (
            f"it returned {came:.4g}, where the same formula is {expected:.4g}. Dimensions that are "
            "squeezed or reduced are not always there: name them, `g.flatten(1)`, `score.reshape(-1)`."
        )
        if made.dtype is not makers.dtype:
            text = f"it returned {came:.4g}, where {expected:.4g} is right. {narrow}"
        rows.append(Row(name, wrong, off(came, expected), text))
    return rows


def repeated(subject: Subject, makers: Makers) -> list[Row]:
    """Of a penalty that is not lazy: the same value at each call."""
    if subject.every > 1:
        return []
    critic, real = makers.linear(1.7), makers.data(5)
    seed(makers.device)
    given = (critic, real, real.clone())
    values = [float(number(subject.once(*given), real)) for _ in range(CALLS)]
    if all(close(value, values[0], 1e-3) for value in values):
        return [Row(REPEATED, "pass")]
    first = next(i for i, v in enumerate(values) if not close(v, values[0], 1e-3))
    shown = ", ".join(f"{v:.4g}" for v in (values[0], *values[max(first - 1, 1) : first + 3]))
    text = f"calls in a row, all the same, returned {shown}. If it is lazy, say so with every=."
    return [Row(REPEATED, "fail", None, text)]


# === Whether a penalty's gradient reaches the critic's parameters, and is the derivative of its
# value.

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
        (slope,) = finite_differences.directional_derivative(value, leaves, v)
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


def _by(cuts: list[DetachedGradient]) -> str:
    return f"; the graph ends by {'; by '.join(map(str, cuts[:3]))}" if cuts else ""
