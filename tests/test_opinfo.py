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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
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

F64 = torch.float64
Vector = tuple[Tensor, ...]
Row = tuple[str, str, str]
BAD = ("wrong", "crashed")
OURS = re.compile(r"^(hvp|jvp|jet|laplacian)\b|hoglib|second_order")
BY_TORCH = re.compile("not implemented|not support|ill-defined")
DERIVATIVES = (
    "hvp, reverse", "hvp, forward", "jvp", "gradient of jvp", "jet 2", "jet 3", "laplacian",
)  # fmt: skip
VERDICTS = ("right", "told", "wrong", "crashed", "excepted", "no truth")
STEPS = [2.0**-k for k in range(4, 12)]

# Operations of torch without Taylor rules: the whole function is nested.
NESTED = {
    "_sparse_mm_reduce_impl", "sparse_sampled_addmm", "_to_sparse", "_segment_reduce",  # sparse layouts, segments
    "normal", "rrelu_with_noise", "fractional_max_pool2d", "fractional_max_pool3d",  # draw random numbers
    "_native_batch_norm_legit", "_batch_norm_with_update",  # write the running statistics
    "linalg_eig", "_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "lu_unpack", "linalg_lstsq", "linalg_pinv", "linalg_matrix_exp", "linalg_householder_product", "ormqr",
    "i0", "special_i0e", "special_i1", "special_i1e", "special_erfcx", "special_log_ndtr", "special_ndtri", "polygamma",
    "median", "nanmedian", "nextafter", "frexp", "adaptive_max_pool2d", "adaptive_max_pool3d", "_upsample_bilinear2d_aa",
    "scatter_reduce", "masked_scatter", "put", "as_strided_scatter", "masked_select", "_trilinear",
    "cholesky", "linalg_cholesky_ex", "linalg_solve_triangular", "copysign", "erfinv",
}  # fmt: skip
# What is wrong for a reason that is no fault of hoglib: operator -> (points, reason).
EXCEPTIONS = {
    **dict.fromkeys(
        ("linalg.solve", "linalg.solve_ex", "linalg.tensorsolve"),
        ("masked", "no matrix with -inf is inverted: torch's result has no meaning, and its tangent is NaN"),
    ),
    **dict.fromkeys(
        ("nn.functional.grid_sample", "grid_sampler_2d"),
        ("masked", "a pixel of -inf beside the grid: 0 times -inf is NaN, also the value"),
    ),
    "nn.functional.multilabel_margin_loss": ("masked", "-inf minus -inf, which torch's kernel skips"),
    "linalg.pinv.singular": ("large entries", "a condition number of 3e6, squared in a second derivative: two formulas are 2e-4 apart"),
    "renorm": ("zero operand", "NaN by torch, which hvp names; the gradient of a jvp is torch's own"),
}  # fmt: skip


def operators() -> dict[str, Any]:
    # torch imports this package for its TestCase only
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    # the import forbids setting precisions in the rest of the process, which other tests do
    settings = torch.backends.disable_global_flags.__globals__
    settings["__allow_nonbracketed_mutation_flag"] = True
    every = [op for op in op_db if torch.float64 in op.supported_dtypes("cpu")]
    names = [f"{op.name}.{op.variant_test_name}".strip(".") for op in every]
    return {name: op for name, op in zip(names, every, strict=True) if op.supports_autograd}


class Point(NamedTuple):
    """A function of tensors, and where it is derived."""

    label: str
    func: Callable[..., Tensor]  # all entries of the outputs, real numbers in a row
    xs: Vector


def points(op: Any, most: int) -> Iterator[Point]:
    """The samples of an operator, at most so many (0: all), and others made of the first, the middle and
    the last of them."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", F64, requires_grad=True))
    count = min(most or len(samples), len(samples))
    chosen = sorted({i * len(samples) // count for i in range(count)})
    for i in chosen:
        func, xs = function_of(op, samples[i])
        if xs and i in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
            for label, other in others(xs):
                yield Point(f"{i} {label}", func, other)
            yield Point(f"{i} masked", lambda x, *rest, func=func: func(masked(x), *rest), xs)
        if xs:
            yield Point(f"{i}", func, xs)


def function_of(op: Any, sample: Any) -> tuple[Callable[..., Tensor], Vector]:
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [(k, x) for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.numel()]
    places = [k for k, x in tensors if x.requires_grad and x.dtype == F64 and is_dense(x)]

    def func(*xs: Tensor) -> Tensor:
        own = list(leaves)
        for k, x in zip(places, xs, strict=True):
            own[k] = x
        first, args, kwargs = pytree.tree_unflatten(own, structure)
        torch.default_generator.manual_seed(0)  # of all devices takes longer than the operator
        found = sample.output_process_fn_grad(op.gradcheck_wrapper(op, first, *args, **kwargs))
        ys = [y for y in pytree.tree_leaves(found) if isinstance(y, Tensor)]
        ys = [y if is_dense(y) else y.to_dense() for y in ys]
        ys = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in ys]
        return torch.cat([y.reshape(-1) for y in ys if y.dtype == F64])

    return func, tuple(leaves[k].detach().clone() for k in places)


def is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def masked(x: Tensor) -> Tensor:
    """Its first entry is -inf, and no variable."""
    return x.masked_fill(torch.arange(x.numel()).view(x.shape) == 0, -torch.inf)


def others(xs: Vector) -> Iterator[tuple[str, Vector]]:
    def first(x: Tensor, value: float) -> Tensor:
        return x.masked_fill(torch.arange(x.numel()).view(x.shape) == 0, value)

    yield "zero operand", (torch.zeros_like(xs[0]), *xs[1:])
    yield "zero entries", tuple(first(x, 0.0) for x in xs)
    yield "equal entries", tuple(torch.full_like(x, float(x.reshape(-1)[0])) for x in xs)
    yield "large entries", tuple(first(x, 1e3) for x in xs)
    if len(xs) > 1 and xs[0].numel() >= 9:
        square, row = xs[0].reshape(-1)[:9].view(3, 3), xs[1].reshape(-1).repeat(3)[:3]
        yield "ranks 2 and 1", (square, row, *xs[2:])
        yield "ranks 1 and 2", (row, square, *xs[2:])
        yield "ranks 2 and 0", (square, row[0], *xs[2:])
        yield "ranks 0 and 2", (row[0], square, *xs[2:])


def smooth(func: Callable[..., Tensor], y: Tensor) -> Callable[..., Tensor]:
    """L, of the entries that are finite at the point, where they are y."""
    chosen = y.isfinite()
    every, scale = bool(chosen.all()), 1 / (1 + y[chosen].abs())
    w = (torch.arange(len(scale)) * 1.7 + 1).sin()

    def loss(*xs: Tensor) -> Tensor:
        u = func(*xs)
        u = (u if every else u[chosen]) * scale
        return (w * (u + u * u)).sum()

    return loss


def gradient(loss: Callable[..., Tensor], xs: Vector) -> tuple[Tensor, Tensor]:
    own = [x.detach().clone().requires_grad_() for x in xs]
    value = loss(*own)
    return value.detach(), flat(
        torch.autograd.grad(value, own, allow_unused=True, materialize_grads=True)
    )


def flat(xs: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in xs])


class Truth(NamedTuple):
    value: Tensor
    error: float
    scale: float


def converged(levels: list[Tensor], size: float, order: int = 2) -> Truth | None:
    """The limit of estimates whose error is O(h^order), by Richardson's extrapolation; None without."""
    better = [(2**order * b - a) / (2**order - 1) for a, b in pairwise(levels)]
    errors = [float((a - b).abs().max().nan_to_num(torch.inf)) for a, b in pairwise(better)]
    best = min(range(len(errors)), key=errors.__getitem__)
    scale = float(better[best + 1].abs().max()) + size
    return Truth(better[best + 1], errors[best], scale) if errors[best] < 1e-4 * scale else None


def agree(a: Truth | None, b: Truth | None) -> bool:
    if a is None or b is None:
        return False
    off = float((a.value - b.value).abs().max())
    return off <= 1e-3 * max(a.scale, b.scale) + 10 * (a.error + b.error)


def truths(loss: Callable[..., Tensor], xs: Vector, v: Vector, more: list[Vector]) -> Any:
    """H v, p'' and the sum of v_i H v_i over other directions, None where they have no limit; or why
    there are none. At a kink the limits on both sides differ."""

    def at(t: float, along: Vector) -> tuple[Tensor, Tensor]:
        return gradient(loss, tuple(x + t * u for x, u in zip(xs, along, strict=True)))

    (L, g), h, few = at(0.0, v), STEPS, STEPS[:6]
    p = {t: at(t, v) for size in h for t in (size, -size)}
    size = 1e-3 * float(g.abs().max()) + 1e-6
    slope = converged([(p[t][0] - p[-t][0]) / (2 * t) for t in h], size)
    sides = [converged([(p[s * t][0] - L) / (s * t) for t in h], size, 1) for s in (-1, 1)]
    if slope is None or not agree(*sides):
        return "kink"
    q = {t: grad @ flat(v) for t, (_, grad) in p.items()} | {0: g @ flat(v)}
    if not abs(float(q[0] - slope.value)) < 1e-4 * slope.scale + 10 * slope.error:
        return "torch's first derivative"
    Hv = converged([(p[t][1] - p[-t][1]) / (2 * t) for t in h], size)
    sides = [
        converged([s * (4 * p[s * t / 2][1] - 3 * g - p[s * t][1]) / t for t in h[:-1]], size)
        for s in (-1, 1)
    ]
    if Hv is None or not agree(*sides):
        return "kink"
    third = converged([(q[t] - 2 * q[0] + q[-t]) / t**2 for t in few], Hv.scale)
    sides = [
        converged([(q[s * t] - 2 * q[s * t / 2] + q[0]) * 4 / t**2 for t in few], Hv.scale, 1)
        for s in (-1, 1)
    ]
    parts = [
        converged([(at(t, w)[1] - at(-t, w)[1]) @ flat(w) / (2 * t) for t in h[3:7]], Hv.scale)
        for w in more
    ]
    lap = None
    if all(parts):
        total = sum(part.value for part in parts)
        lap = Truth(total, sum(part.error for part in parts), float(total.abs()) + Hv.scale)
    return Hv, third if agree(*sides) else None, lap


def directions(xs: Vector, count: int) -> list[Vector]:
    draw = torch.Generator().manual_seed(1)

    def one(x: Tensor) -> Tensor:
        size = torch.rand(x.shape, generator=draw, dtype=x.dtype) + 0.5
        return size * (1 - 2 * torch.randint(2, x.shape, generator=draw))

    return [tuple(one(x) for x in xs) for _ in range(count)]


def outcomes(point: Point) -> Iterator[Row]:
    """(derivative, verdict, what is known) at a point; of derivative "" why nothing is compared there."""
    _, func, xs = point
    try:
        y = func(*xs)
        loss = smooth(func, y.detach())
        _, g = gradient(loss, xs)
        if not y.isfinite().any() or not (y.isfinite().all() or g.isfinite().all()):
            raise ValueError("no finite value, or no gradient beside one that is not")
    except Exception as error:
        yield "", "outside", f"{type(error).__name__}: {error}"
        return
    count = size if xs[0].dim() and 3 <= (size := xs[0].shape[-1]) <= 5 else 3
    v, a, b, *more = directions(xs, 3 + count)
    found: Any = "no finite first derivative"
    if g.isfinite().all():
        try:
            found = truths(loss, xs, v, more)
        except Exception as error:
            found = f"outside nearby: {type(error).__name__}"
    Hv = third = lap = slope = second = None
    if isinstance(found, str):
        yield "", found, ""
    else:
        Hv, third, lap = found
        slope = Truth(g @ flat(v), 0.0, float(g.abs().max()) + 1e-6)
        second = Hv._replace(value=Hv.value @ flat(v) + g @ flat(a))
    if third is not None:
        value = third.value + 3 * (Hv.value @ flat(a)) + g @ flat(b)
        third = third._replace(value=value, scale=third.scale + float(value.abs()))
    nested = ""

    def hvp(mode: Any) -> Tensor:
        return flat(hog.hvp(lambda xs: loss(*xs), xs, v, mode=mode)[1])

    def jvp() -> Tensor:
        t = hog.jvp(loss, xs, v)[1]
        return torch.zeros(()) if slope is None else t  # torch's own, as the gradient below

    def gradient_of_jvp() -> Tensor:
        own = tuple(x.clone().requires_grad_() for x in xs)
        t = hog.jvp(loss, own, v)[1]
        if not t.requires_grad or Hv is None:
            return torch.zeros_like(flat(xs))
        return flat(torch.autograd.grad(t, own, allow_unused=True, materialize_grads=True))

    def jet(order: int) -> Tensor:
        nonlocal nested
        series = tuple(list(parts[:order]) for parts in zip(v, a, b, strict=True))
        try:
            return hog.jet(loss, xs, series, mode="taylor")[1][order - 1]
        except hog.errors.UnsupportedError as refused:
            nested = str(refused)
            return hog.jet(loss, xs, series, mode="nested")[1][order - 1]

    def laplacian() -> Tensor:
        def along(z: Tensor) -> Tensor:
            terms = (torch.stack(ws, -1) @ z for ws in zip(*more, strict=True))
            return loss(*(x + term for x, term in zip(xs, terms, strict=True)))

        return hog.laplacian(along, torch.zeros(count, dtype=F64))[1]

    calls = (
        partial(hvp, "reverse-over-reverse"), partial(hvp, "forward-over-reverse"), jvp, gradient_of_jvp,
        partial(jet, 2), partial(jet, 3), laplacian,
    )  # fmt: skip
    expected = (Hv, Hv, slope, Hv, second, third, lap)
    for name, call, truth in zip(DERIVATIVES, calls, expected, strict=True):
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
            return "told" if BY_TORCH.search(text) and "INTERNAL" not in text else "crashed", text
    told = next((str(w.message) for w in given if OURS.search(str(w.message))), None)
    if truth is None:
        fine = bool(found.isfinite().all())
        return ("told", told) if told else ("no truth", "") if fine else ("wrong", "not finite")
    off = float((found - truth.value).abs().max())
    if off <= 1e-5 * truth.scale + 30 * truth.error:
        return "right", ""
    return ("told", told) if told else ("wrong", f"off by {off:.1e} of {truth.scale:.1e}")


def judged(name: str, places: Iterable[Point]) -> list[tuple[str, ...]]:
    """(point, derivative, verdict, what is known) of an operator at points."""
    where, why = EXCEPTIONS.get(name, ("nowhere", ""))
    rows = [(p.label, *row) for p in places for row in outcomes(p)]
    return [
        (label, kind, "excepted", why)
        if bad in BAD and where in label
        else (label, kind, bad, known)
        for label, kind, bad, known in rows
    ]


def work(name: str, most: int) -> list[tuple[str, ...]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return judged(name, points(operators()[name], most))


def faults(name: str, rows: list[tuple[str, ...]]) -> list[str]:
    """What is wrong with an operator, a line each."""
    found = []
    for label, kind, verdict, known in rows:
        operation = re.search(r"torch\.ops\.\w+\.(\w+)", known)
        refused = verdict == "nested" and not (operation and operation[1] in NESTED)
        if verdict in BAD or refused:
            found.append(f"{name} [{label}] {kind}: {verdict}, {known}")
    return found


def table(every: dict[str, list[tuple[str, ...]]]) -> str:
    lines = [f"{'':16}{'operators':>10}{'points':>10}" + "".join(f"{v:>10}" for v in VERDICTS)]
    for kind in DERIVATIVES:
        own = [(name, row[2]) for name, rows in every.items() for row in rows if row[1] == kind]
        counts = [sum(v == w for _, w in own) for v in VERDICTS]
        sizes = [len({name for name, _ in own}), len(own), *counts]
        lines.append(f"{kind:16}" + "".join(f"{size:10,}" for size in sizes))
    reasons = Counter(row[2] for rows in every.values() for row in rows if not row[1])
    return "\n".join([*lines, *(f"{n:8,} points: {why}" for why, n in reasons.most_common())])


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m tests.test_opinfo", description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of operators, as torch's list has them")
    parser.add_argument("--samples", type=int, default=0, help="of each operator at most; 0: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("build/opinfo.jsonl"))
    parser.add_argument("--resume", action="store_true", help="go on from the log")
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    given.log.open("a" if given.resume else "w").close()
    every = dict(json.loads(line) for line in given.log.read_text().splitlines())
    names = [name for name in given.only or operators() if name not in every]
    start = time.monotonic()
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool, given.log.open("a") as log:
        pending = {pool.submit(work, name, given.samples): name for name in names}
        for k, done in enumerate(as_completed(pending), start=1):
            name = pending[done]
            every[name] = done.result()
            print(json.dumps([name, every[name]]), file=log, flush=True)
            left = (time.monotonic() - start) / k * (len(names) - k) / 60
            bar = f"\r{'#' * (30 * k // len(names)):30} {k}/{len(names)}, {left:.0f} min left"
            print(f"{bar}, {name:40.40}", end="", flush=True)
    bad = [line for name, rows in every.items() for line in faults(name, rows)]
    excepted = [
        f"{name}, {where}: {why}" for name, (where, why) in EXCEPTIONS.items() if name in every
    ]
    print("", *bad, *excepted, table(every), f"{len(every)} operators, {len(bad)} faults", sep="\n")
    return bool(bad)


# torch warns of what its samples call: operators that are deprecated, layouts in beta
@pytest.mark.filterwarnings("ignore")
def test_a_hundredth_of_torchs_samples():
    """The same points each day; `make opinfo` has all."""
    draw, every = random.Random(0), operators()
    names = draw.sample(sorted(every), len(every) // 10)
    chosen = {name: draw.choice([*points(every[name], 3), None]) for name in names}
    found = {name: judged(name, [p]) for name, p in chosen.items() if p is not None}
    assert not [line for name, rows in found.items() for line in faults(name, rows)]
    assert sum(row[2] == "right" for rows in found.values() for row in rows) > 150, table(found)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # as above
def test_a_sample_of_each_operator_of_torch():
    found = {name: judged(name, islice(points(op, 1), 6)) for name, op in operators().items()}
    assert not [line for name, rows in found.items() for line in faults(name, rows)]
    assert sum(any(row[2] == "right" for row in rows) for rows in found.values()) > 450, table(
        found
    )


if __name__ == "__main__":
    sys.exit(main())
