"""Values and derivatives under vmap, and the second derivatives of torch.func."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.element_differences import TensorMap, max_abs, random_like
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.options import Options
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

TORCH = (
    "torch.func batches by rules of its own, which are wrong for some of torch's operations; loop over "
    "the batch, or over the columns."
)

OWN_RULE = (
    "Its vmap staticmethod gets in_dims, the batch dimension of each input (None where there is none), "
    "and returns (outputs, out_dims): move batch dimensions by what they say. Or have the rule made: "
    "generate_vmap_rule = True."
)
GENERATED = (
    "Remove generate_vmap_rule, or make forward and backward of torch operations that depend on no "
    "values, and on no number of dimensions."
)


def values(subject: Subject, points: Sequence[list[Tensor]], u: list[Tensor]) -> str:
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


def hessian(subject: Subject, x: list[Tensor], u: list[Tensor]) -> Row:
    """torch.func.hessian and jacrev(jacrev) in a plane through x, against looped double backward."""
    name = "torch.func.hessian"
    spans = [[random_like(y, subject.random) for y in x] for _ in range(2)]

    def scalar(z: Tensor) -> Tensor:
        point = [y + z[0] * a + z[1] * b for y, a, b in zip(x, *spans, strict=True)]
        terms = [(a * y).sum() for a, y in zip(u, subject.map(*point), strict=True)]
        return sum(terms[1:], terms[0])

    zero = torch.zeros(2, dtype=x[0].dtype, device=x[0].device)
    try:
        looped = torch.autograd.functional.hessian(scalar, zero)
    except Exception:  # reported by the derivative checks
        return Row(name, "skip", None, "double backward does not run.")
    if not bool(looped.isfinite().all()):
        return Row(name, "skip", None, "the second derivative is not finite.")
    error, wrong = 0.0, ""
    transforms = {"torch.func.jacrev(jacrev)": lambda f: torch.func.jacrev(torch.func.jacrev(f))}
    if subject.offers_forward is not False:
        transforms["torch.func.hessian"] = torch.func.hessian
    for title, transform in transforms.items():
        found = transform(scalar)(zero)
        size = max(max_abs(looped), 1e-6 * max(map(max_abs, u)))
        off = max_abs(found - looped) / size if bool(found.isfinite().all()) else float("inf")
        if off > subject.eps**0.5 and not wrong:
            wrong = f"{title} differs from double backward in a loop by {off:.2g}. {TORCH}"
        error = max(error, off)
    return Row(name, "fail" if wrong else "pass", error, wrong)


def rows(
    subject: Subject, points: Sequence[list[Tensor]], u: list[Tensor], options: Options
) -> list[Row]:  # fmt: skip
    """vmap where it is offered; where it was not declared, only a wrong number is a fault."""
    declared = subject.offers_vmap
    if declared is False:
        why = (
            "it is not offered: set `generate_vmap_rule = True` in a Function with setup_context, or "
            "give it a vmap staticmethod."
        )
        return [
            Row("vmap", "skip", None, why),
            Row("torch.func.hessian", "skip", None, "no vmap rule."),
        ]
    fix = OWN_RULE if any(f.vmap is not Function.vmap for f in subject.functions) else GENERATED
    fix = fix if subject.functions else ""
    if subject.draws:
        why = "it draws random numbers, and vmap draws others than a loop."
        return [Row(name, "skip", None, why) for name in ("vmap", "torch.func.hessian")]
    try:
        fault = values(subject, points, u)
        found = [
            Row("vmap", "fail" if fault else "pass", None, fault and f"{fault}. {fix}".strip())
        ]
    except Exception as error:
        found = [_raised("vmap", declared, error, fix)]
    if options.modes is not None:
        why = "`modes` was given, and this transform mixes two of them."
        return [*found, Row("torch.func.hessian", "skip", None, why)]
    try:
        found.append(hessian(subject, points[0], u))
    except Exception as error:
        if found[0].status == "pass" and (
            missing := re.search(r"Batching rule not implemented for (\S+?)[;,]", str(error))
        ):
            # vmap of fn works: the missing rule is for an operation inside torch's own derivatives
            why = f"torch has no vmap rule for {missing[1]}, which its own derivatives use here."
            return [*found, Row("torch.func.hessian", "skip", None, why)]
        found.append(_raised("torch.func.hessian", declared, error, fix))
    return found


def _raised(name: str, declared: bool | None, error: Exception, fix: str) -> Row:
    if "randomness" in str(error):
        return Row(name, "skip", None, "it draws random numbers, which this transform refuses.")
    if declared:
        return Row(
            name, "fail", None,
            f"a vmap rule is declared, and it raised {format_error(error)}. {fix}",
        )  # fmt: skip
    return Row(name, "skip", None, f"it is not offered: {format_error(error)}")
