"""python -m tests.test_opinfo: torch's own samples of its operators, through each derivative of hoglib.

At each point x, which a sample gives, or the sample with extreme values or operands of other ranks, the
output's entries u are a scalar, L = sum w (u + u^2), of which along a direction v

    p(t) = L'(x + t v)    H v = d L'(x + t v) / dt    p', p'': the derivatives of the path

are differences of torch's first gradient, which differences of L confirm. A result is right, told (an
error or a warning of hoglib), wrong, or a crash. Points with a kink have no truth, as those where torch's
first gradient is not the derivative; there a result that is not finite has to be told.
"""

import argparse
import json
import random
import re
import sys
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import hoglib as hog
from tests.rows import as_in_a_new_process

OURS = re.compile(r"^(hvp|jvp|jet|laplacian|bilaplacian)\b|hoglib|second_order")
DERIVATIVES = (
    "hvp, reverse",
    "hvp, forward",
    "jvp",
    "gradient of jvp",
    "jet 2",
    "jet 3",
    "laplacian",
)
STEPS = [2.0**-k for k in range(4, 12)]

# Without Taylor rules: nested as a whole.
NESTED = {
    "sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse",  # sparse layouts
    "normal", "normal.number_mean", "nn.functional.rrelu",  # draw random numbers
    "_native_batch_norm_legit", "_batch_norm_with_update",  # write the running statistics
    "linalg.eig", "linalg.eigvals",  # eigenvectors have no fixed phase
    "linalg.eigh", "linalg.eigvalsh",  # of matrices of which one triangle is read
    "linalg.lstsq", "linalg.lstsq.grad_oriented", "as_strided_scatter",
}  # fmt: skip
# Wrong, or a crash, for a reason that is no fault of hoglib: operator -> reason.
EXCEPTIONS: dict[str, str] = {}


def operators() -> dict[str, Any]:
    # torch imports this package for its TestCase only
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}".strip("."): op
        for op in op_db
        if torch.float64 in op.supported_dtypes("cpu") and op.supports_autograd
    }


class Point(NamedTuple):
    """A function of tensors, where it is derived."""

    label: str
    func: Callable[..., Tensor]  # all entries of the outputs, real numbers in a row
    xs: tuple[Tensor, ...]


def points(op: Any, most: int) -> Iterator[Point]:
    """The samples of an operator, at most so many (0: all), and others made of the first, the middle and
    the last of them."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
    count = min(most or len(samples), len(samples))
    chosen = sorted({i * len(samples) // count for i in range(count)})
    for i in chosen:
        leaves, structure = pytree.tree_flatten(
            (samples[i].input, samples[i].args, samples[i].kwargs)
        )
        places = [
            k for k, x in enumerate(leaves)
            if isinstance(x, Tensor) and x.dtype == torch.float64 and x.requires_grad and x.numel()
            and x.layout == torch.strided and not x.is_nested
        ]  # fmt: skip

        def func(*xs: Tensor, own=leaves, places=places, structure=structure, after=samples[i].output_process_fn_grad) -> Tensor:  # fmt: skip
            own = list(own)
            for k, x in zip(places, xs, strict=True):
                own[k] = x
            first, args, kwargs = pytree.tree_unflatten(own, structure)
            torch.default_generator.manual_seed(
                0
            )  # of all devices, it takes longer than the operator
            found = after(op.gradcheck_wrapper(op, first, *args, **kwargs))
            ys = [y for y in pytree.tree_leaves(found) if isinstance(y, Tensor)]
            ys = [y if y.layout == torch.strided else y.to_dense() for y in ys]
            ys = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in ys]
            return torch.cat([y.reshape(-1) for y in ys if y.dtype == torch.float64])

        xs = tuple(leaves[k].detach().clone() for k in places)
        if xs:
            every = others(xs) if i in (chosen[0], chosen[len(chosen) // 2], chosen[-1]) else ()
            for label, other in (("", xs), *every):
                yield Point(f"{i} {label}".strip(), func, other)
            if every:
                yield Point(f"{i} masked", lambda x, *rest, func=func: func(masked(x), *rest), xs)


def masked(x: Tensor) -> Tensor:
    """Its first entry is -inf, and no variable."""
    where = torch.arange(x.numel()).view(x.shape) == 0
    return x.masked_fill(where, -torch.inf)


def others(xs: tuple[Tensor, ...]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    def first(x: Tensor, value: Any) -> Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    xs = tuple(x.contiguous() for x in xs)
    yield "zero operand", (torch.zeros_like(xs[0]), *xs[1:])
    yield "zero entries", tuple(first(x, 0.0) for x in xs)
    yield "equal entries", tuple(torch.full_like(x, float(x.view(-1)[0])) for x in xs)
    yield "large entries", tuple(first(x, 1e3) for x in xs)
    if len(xs) > 1 and xs[0].numel() >= 9:
        square, row = xs[0].view(-1)[:9].view(3, 3), xs[1].view(-1).repeat(3)[:3]
        for label, pair in (
            ("ranks 2 and 1", (square, row)), ("ranks 1 and 2", (row, square)),
            ("ranks 2 and 0", (square, row[0])), ("ranks 0 and 2", (row[0], square)),
        ):  # fmt: skip
            yield label, (*pair, *xs[2:])


def smooth(func: Callable[..., Tensor], y: Tensor) -> Callable[..., Tensor]:
    """L, of the entries that are finite at the point, where they are y."""
    chosen = y.isfinite()
    u = y[chosen]
    scale, w = 1 / (1 + u.abs()), (torch.arange(len(u)) * 1.7 + 1).sin()

    def loss(*xs: Tensor) -> Tensor:
        u = func(*xs)
        u = (u if bool(chosen.all()) else u[chosen]) * scale
        return (w * (u + u * u)).sum()

    return loss


def gradient(loss: Callable[..., Tensor], xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    own = [x.detach().clone().requires_grad_() for x in xs]
    value = loss(*own)
    found = torch.autograd.grad(value, own, allow_unused=True, materialize_grads=True)
    return value.detach(), torch.cat([g.detach().reshape(-1) for g in found])


class Truth(NamedTuple):
    value: Tensor
    error: float
    scale: float


def moved(xs: tuple[Tensor, ...], vs: tuple[Tensor, ...], t: float) -> tuple[Tensor, ...]:
    return tuple(x + t * v for x, v in zip(xs, vs, strict=True))


def converged(levels: list[Tensor], size: float, order: int = 2) -> Truth | None:
    """The limit of estimates whose error is O(h^order), by Richardson's extrapolation; None without."""
    factor = 2**order
    better = [(factor * b - a) / (factor - 1) for a, b in pairwise(levels)]
    errors = [float((a - b).abs().max()) for a, b in pairwise(better)]
    errors = [e if e == e else torch.inf for e in errors]
    best = min(range(len(errors)), key=errors.__getitem__)
    scale = float(better[best + 1].abs().max()) + size
    return Truth(better[best + 1], errors[best], scale) if errors[best] < 1e-4 * scale else None


def agree(a: Truth | None, b: Truth | None) -> bool:
    if a is None or b is None:
        return False
    off = float((a.value - b.value).abs().max())
    return off <= 1e-3 * max(a.scale, b.scale) + 10 * (a.error + b.error)


def truths(loss: Callable[..., Tensor], xs: tuple[Tensor, ...], vs: tuple[Tensor, ...], V: list[Any]) -> Any:  # fmt: skip
    """p(0), H v, p''(0) and the sum of v_i H v_i over other directions; or why there are none."""
    L0, g0 = gradient(loss, xs)
    v = torch.cat([v.reshape(-1) for v in vs])
    p = {}
    for h in STEPS:
        p[h], p[-h] = (gradient(loss, moved(xs, vs, t)) for t in (h, -h))
    size = 1e-3 * float(g0.abs().max()) + 1e-6
    slope = converged([(p[h][0] - p[-h][0]) / (2 * h) for h in STEPS], size)
    sides = [converged([(p[s * h][0] - L0) / (s * h) for h in STEPS], size, 1) for s in (-1, 1)]
    if slope is None or not agree(*sides):
        return "kink"
    if not abs(float(g0 @ v - slope.value)) < 1e-4 * slope.scale + 10 * slope.error:
        return "torch's first derivative"
    Hv = converged([(p[h][1] - p[-h][1]) / (2 * h) for h in STEPS], size)
    beside = [
        converged(
            [s * (4 * p[s * h / 2][1] - 3 * g0 - p[s * h][1]) / h for h in STEPS[:-1]], size
        )
        for s in (-1, 1)
    ]  # fmt: skip
    if Hv is None or not agree(*beside):
        return "kink"
    q = {h: g @ v for h, (_, g) in p.items()}
    p0 = g0 @ v
    third = converged([(q[h] - 2 * p0 + q[-h]) / h**2 for h in STEPS[:6]], Hv.scale)
    sides = [
        converged([(q[s * h] - 2 * q[s * h / 2] + p0) * 4 / h**2 for h in STEPS[:6]], Hv.scale, 1)
        for s in (-1, 1)
    ]
    third = third if agree(*sides) else None
    total, error = torch.zeros(()), 0.0
    for ws in V:
        w = torch.cat([w.reshape(-1) for w in ws])
        ends = [(gradient(loss, moved(xs, ws, h))[1] - gradient(loss, moved(xs, ws, -h))[1]) @ w / (2 * h) for h in STEPS[3:7]]  # fmt: skip
        part = converged(ends, Hv.scale)
        if part is None:
            total = None
            break
        total, error = total + part.value, error + part.error
    lap = None if total is None else Truth(total, error, float(total.abs()) + Hv.scale)
    return g0, Hv, third, lap


def directions(xs: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)

    def one(x: Tensor) -> Tensor:
        size = torch.rand(x.shape, generator=draw, dtype=x.dtype) + 0.5
        return size * (1 - 2 * torch.randint(2, x.shape, generator=draw))

    return [tuple(one(x) for x in xs) for _ in range(count)]


def outcomes(point: Point) -> Iterator[tuple[str, str, str]]:
    """(derivative, verdict, what is known) at a point; of derivative "" why nothing is compared there."""
    _, func, xs = point
    try:
        y = func(*xs)
        loss = smooth(func, y.detach())
        _, g0 = gradient(loss, xs)
        if not y.isfinite().any() or not (y.isfinite().all() or g0.isfinite().all()):
            raise ValueError("no finite value, or no gradient beside one that is not")
    except Exception as error:
        yield "", "outside", f"{type(error).__name__}: {error}"
        return
    size = xs[0].shape[-1] if xs[0].dim() else 3
    count = size if 3 <= size <= 5 else 3
    v, a, b, *more = directions(xs, 3 + count)
    flat = lambda ts: torch.cat([t.detach().reshape(-1) for t in ts])  # noqa: E731
    if g0.isfinite().all():
        try:
            found = truths(loss, xs, v, more)
        except Exception as error:
            found = f"outside nearby: {type(error).__name__}"
    else:
        found = "no finite first derivative"
    if isinstance(found, str):
        yield "", found, ""
        Hv = third = lap = slope = None
    else:
        g, Hv, third, lap = found
        slope = Truth(g @ flat(v), 0.0, float(g.abs().max()) + 1e-6)
    second = None if Hv is None else Truth(Hv.value @ flat(v) + g0 @ flat(a), Hv.error, Hv.scale)
    if third is not None:
        value = third.value + 3 * (Hv.value @ flat(a)) + g0 @ flat(b)
        third = third._replace(value=value, scale=third.scale + float(value.abs()))

    def hvp(mode: str) -> Tensor:
        return flat(hog.hvp(lambda xs: loss(*xs), xs, v, mode=mode)[1])

    def jvp() -> Tensor:
        found = hog.jvp(loss, xs, v)[1]
        return found if slope is not None else torch.zeros(())  # torch's own, as its gradient

    def gradient_of_jvp() -> Tensor:
        own = tuple(x.clone().requires_grad_() for x in xs)
        t = hog.jvp(loss, own, v)[1]
        if not t.requires_grad or Hv is None:
            return flat([torch.zeros_like(x) for x in xs])
        return flat(torch.autograd.grad(t, own, allow_unused=True, materialize_grads=True))

    def jet(order: int) -> Tensor:
        series = tuple(list(parts[:order]) for parts in zip(v, a, b, strict=True))
        try:
            return hog.jet(loss, xs, series, mode="taylor")[1][order - 1]
        except hog.errors.UnsupportedError as refused:
            nonlocal nested
            nested = str(refused)
            return hog.jet(loss, xs, series, mode="nested")[1][order - 1]

    def laplacian() -> Tensor:
        def along(z: Tensor) -> Tensor:
            terms = (torch.stack(ws, -1) @ z for ws in zip(*more, strict=True))
            return loss(*(x + term for x, term in zip(xs, terms, strict=True)))

        return hog.laplacian(along, torch.zeros(count, dtype=torch.float64))[1]

    nested = ""
    for name, call, truth in zip(
        DERIVATIVES,
        (
            lambda: hvp("reverse-over-reverse"), lambda: hvp("forward-over-reverse"),
            jvp, gradient_of_jvp, lambda: jet(2), lambda: jet(3), laplacian,
        ),
        (Hv, Hv, slope, Hv, second, third, lap), strict=True,
    ):  # fmt: skip
        kind, known = verdict(call, truth)
        if kind == "wrong" and "nan" in known and not y.isfinite().all():
            kind = "no truth"  # 0 times inf, of outputs that the loss leaves out
        yield name, kind, known
    if nested:
        yield "", "nested", nested


def verdict(call: Callable[[], Tensor], truth: Truth | None) -> tuple[str, str]:
    as_in_a_new_process()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            found = call()
        except hog.errors.HoglibError as error:
            return "told", str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            by_torch = "INTERNAL ASSERT" not in text and re.search(
                "not implemented|not support|ill-defined", text
            )
            return "told" if by_torch else "crashed", text
    told = next((str(w.message) for w in given if OURS.search(str(w.message))), None)
    if truth is None:
        fine = bool(found.isfinite().all())
        return (
            ("told", told)
            if told
            else ("no truth", "")
            if fine
            else ("wrong", f"not finite: {found}")
        )
    off = float((found - truth.value).abs().max())
    if off <= 1e-5 * truth.scale + 30 * truth.error:
        return "right", ""
    return (
        ("told", told)
        if told
        else ("wrong", f"off by {off / truth.scale:.1e} of {truth.scale:.1e}")
    )


def judged(name: str, most: int) -> list[tuple[str, ...]]:
    """(point, derivative, verdict, what is known) of an operator."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for point in points(operators()[name], most):
        found += [(point.label, *outcome) for outcome in outcomes(point)]
    return found


def faults(name: str, found: list[tuple[str, ...]]) -> list[str]:
    """What is wrong with an operator, a line each."""
    bad = [f"{name} [{point}] {kind}: {verdict}, {known}" for point, kind, verdict, known in found if verdict in ("wrong", "crashed") and name not in EXCEPTIONS]  # fmt: skip
    return bad + [f"{name}: {why}" for _, _, verdict, why in found if verdict == "nested" and name not in NESTED][:1]  # fmt: skip


def table(every: dict[str, list[tuple[str, ...]]]) -> str:
    verdicts = ("right", "told", "wrong", "crashed", "no truth")
    lines = [f"{'':16}{'operators':>10}{'points':>10}" + "".join(f"{v:>10}" for v in verdicts)]
    for kind in DERIVATIVES:
        own = Counter(row[2] for found in every.values() for row in found if row[1] == kind)
        count = sum(any(row[1] == kind for row in found) for found in every.values())
        lines.append(
            f"{kind:16}{count:10,}{own.total():10,}" + "".join(f"{own[v]:10,}" for v in verdicts)
        )
    reasons = Counter(row[2] for found in every.values() for row in found if not row[1])
    return "\n".join(
        [*lines, *(f"{count:8,} points: {why}" for why, count in reasons.most_common())]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.test_opinfo", description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of operators, as torch's list has them")
    parser.add_argument("--samples", type=int, default=6, help="of each operator at most; 0: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("build/opinfo.jsonl"))
    parser.add_argument("--resume", action="store_true", help="keep what the log has")
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    if not given.resume:
        given.log.unlink(missing_ok=True)
    lines = given.log.read_text().splitlines() if given.log.exists() else []
    every = dict(json.loads(line) for line in lines)
    names = [name for name in given.only or operators() if name not in every]
    start = time.monotonic()
    with (
        ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool, given.log.open("a") as log,
    ):  # fmt: skip
        pending = {pool.submit(judged, name, given.samples): name for name in names}
        for k, done in enumerate(as_completed(pending), start=1):
            name = pending[done]
            every[name] = done.result()
            print(json.dumps([name, every[name]]), file=log, flush=True)
            bar = f"{'#' * (30 * k // len(names)):30}"
            left = (time.monotonic() - start) / k * (len(names) - k)
            print(
                f"\r{bar} {k}/{len(names)}, {left / 60:.0f} min left, {name:50.50}",
                end="",
                flush=True,
            )
    bad = [line for name, found in every.items() for line in faults(name, found)]
    print(
        "\n"
        + "\n".join(
            [*bad, *(f"{name}: {why}" for name, why in EXCEPTIONS.items() if name in every)]
        )
    )
    print(f"{table(every)}\n{len(every)} operators, {len(bad)} faults")
    return bool(bad)


# torch warns of what its samples call: operators that are deprecated, layouts in beta
@pytest.mark.filterwarnings("ignore")
def test_a_hundredth_of_torchs_samples() -> None:
    """The same points each day; `make opinfo` has all."""
    draw, every, bad = random.Random(0), operators(), []
    for name in draw.sample(sorted(every), len(every) // 10):
        found = draw.sample(list(points(every[name], 3)), 1)
        bad += faults(name, [(p.label, *row) for p in found for row in outcomes(p)])
    assert not bad


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # as above
def test_a_sample_of_each_operator_of_torch() -> None:
    every = {name: [("", *row) for p in islice(points(op, 1), 1) for row in outcomes(p)] for name, op in operators().items()}  # fmt: skip
    assert not [line for name, found in every.items() for line in faults(name, found)]
    right = [
        name for name, found in every.items() if {"right"} >= {row[2] for row in found if row[1]}
    ]
    assert len(right) > 400, table(every)


if __name__ == "__main__":
    sys.exit(main())
