"""What a penalty does in circumstances other than a plain step, and to what it was given."""

from collections.abc import Callable

import torch
from torch import nn

from hoglib.penalties._check._critics import Makers
from hoglib.penalties._check._mistakes import close, off
from hoglib.penalties._check._subject import DIFFER, Subject, number, seed
from hoglib.verification._around import told
from hoglib.verification._copies import same
from hoglib.verification.report import Row

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
                text = f"it raises {told(error)}. Validation runs so. {WITHIN}"
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
            return Row(name, "fail", None, f"under {dtype} it raises {told(error)}. {WITHOUT}")
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
        text = f"it refuses a critic with BatchNorm: {told(error)}."
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
            rows.append(Row(name, raising, None, f"it raises {told(error)}. {advice}".rstrip()))
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
