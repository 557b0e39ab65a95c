"""The rule of each operation, against nested reverse mode, which shares no code with it."""

import math
from contextlib import closing, nullcontext

import mpmath
import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib.taylor.propagation import Propagation
from hoglib.taylor.series import Univariate
from tests.rows import rows
from tests.taylor.operations import CASES, WITHOUT_A_RULE


def coefficients(x, count, *absent):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(count)]
    return [None if k in absent else part for k, part in enumerate(drawn)]


def along(algebra, func, x, parts):
    with closing(Propagation(algebra, record=True)) as run:
        with run:
            run.seed(x, parts)
            y = func(x)
        found = run.coefficients(y)
    return [torch.zeros_like(y) if part is None else part for part in found]


@rows("name", CASES)
def test_a_rule_by_nested_derivatives(name):
    func, x = CASES[name]
    series = coefficients(x, 4, 2)
    value, found = hog.jet(func, x, series, mode="taylor")
    expected_value, expected = hog.jet(func, x, series, mode="nested")
    assert_close(value, expected_value, rtol=1e-12, atol=1e-12)
    for k, (part, other) in enumerate(zip(found, expected, strict=True), start=1):
        scale = 1 + other.abs().max()
        assert_close(part / scale, other / scale, rtol=0, atol=1e-11, msg=f"order {k}")


@rows("name", CASES)
def test_many_directions_are_each_as_alone_and_their_top_is_summed(name):
    func, x = CASES[name]
    seeds = torch.stack(coefficients(x, 3))
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=x.dtype)
    with hog.second_order():
        alone = [along(Univariate(3), func, x.clone(), [v, None, None]) for v in seeds]
        found = along(Univariate(3, True, weights), func, x.clone(), [seeds, None, None])
    first, second = (torch.stack([one[k] for one in alone]) for k in (0, 1))
    top = sum(w * one[2] for w, one in zip(weights, alone, strict=True))
    for part, expected in zip(found, (first, second, top), strict=True):
        scale = 1 + expected.abs().max()
        assert_close(part.expand(expected.shape) / scale, expected / scale, rtol=0, atol=1e-11)


@rows("name", WITHOUT_A_RULE)
def test_an_operation_without_a_rule_is_nested_and_named(name):
    func, x = WITHOUT_A_RULE[name]
    series = coefficients(x, 2)
    assert_close(hog.jet(func, x, series), hog.jet(func, x, series, mode="nested"))
    with pytest.raises(
        NotImplementedError, match=r"jet: expected operations with a rule.*torch\.ops"
    ):
        hog.jet(func, x, series, mode="taylor")


def powers(p):
    """d^k/dx^k x^p at 0, for x = t."""
    return [
        float(torch.lgamma(torch.tensor(p + 1.0)).exp().round()) * (k == p) for k in range(1, 7)
    ]


def test_the_statistics_of_a_norm_have_derivatives():
    x, v = torch.randn(2, 4, 3, dtype=torch.float64)
    statistics = lambda x: torch.native_layer_norm(x, [3], None, None, 1e-5)[1:]  # noqa: E731
    formula = lambda x: (x.mean(1, True), (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt())  # noqa: E731
    found = hog.jet(statistics, x, [v, None], mode="taylor")
    assert_close(found, hog.jet(formula, x, [v, None], mode="nested"))


@pytest.mark.parametrize("log", [False, True])
def test_a_softmax_in_which_one_element_has_all_the_weight(log):
    """softmax_0 = 1 - e^-(60 + 2000 t) and its logarithm to that accuracy, though v^3 is 1e9."""
    x, v = torch.tensor([0.0, -60.0]).double(), torch.tensor([1e3, -1e3]).double()
    func = lambda x: (x.log_softmax(0) if log else x.softmax(0))[0]  # noqa: E731
    series = hog.jet(func, x, [v, None, None], mode="taylor")[1]
    expected = [-((-2000.0) ** k) * math.exp(-60) for k in (1, 2, 3)]
    assert_close(torch.stack(series), torch.tensor(expected, dtype=x.dtype), rtol=1e-10, atol=0)


def test_logcumsumexp_of_numbers_that_lie_far_apart():
    # torch's second derivatives of it are NaN
    x, v = torch.randn(2, 4, 3, dtype=torch.float64)
    found = hog.jet(lambda x: x.logcumsumexp(0), x, [v, None, v], mode="taylor")
    assert_close(found, hog.jet(lambda x: x.exp().cumsum(0).log(), x, [v, None, v], mode="nested"))
    far = torch.tensor([0.0, 2000.0, -2000.0])
    assert_close(
        hog.jet(lambda x: x.logcumsumexp(0), far, [torch.tensor([1.0, 2, 3])], mode="taylor")[1][0],
        torch.tensor([1.0, 2, 2]),
    )


def test_complex_values_are_differentiated_in_every_mode():
    x, v = torch.randn(2, 3, dtype=torch.float64)
    for mode in ("taylor", "nested"):
        value, (d1, d2) = hog.jet(lambda x: torch.complex(x * x, x), x, [v, None], mode=mode)
        assert_close(value, torch.complex(x * x, x))
        assert_close(d1, torch.complex(2 * x * v, v))
        assert_close(d2, torch.complex(2 * v * v, 0 * v))


# func, x, and the first six derivatives in x: known series
KNOWN = {
    "polynomial": (lambda x: x**5 - 2 * x**3 + x, 2.0, [57.0, 136.0, 228.0, 240.0, 120.0, 0.0]),
    "cube at zero": (lambda x: x**3, 0.0, powers(3)),
    "product at zero": (lambda x: x * x * x.square(), 0.0, powers(4)),
    "exp(2 x)": (lambda x: (2 * x).exp(), 0.0, [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]),
    "sin x cos x at zero": (lambda x: x.sin() * x.cos(), 0.0, [1.0, 0.0, -4.0, 0.0, 16.0, 0.0]),
    "1 / (1 - x)": (lambda x: 1 / (1 - x), 0.0, [1.0, 2.0, 6.0, 24.0, 120.0, 720.0]),
    "tan": (torch.tan, 0.0, [1.0, 0.0, 2.0, 0.0, 16.0, 0.0]),
    "asin": (torch.asin, 0.0, [1.0, 0.0, 1.0, 0.0, 9.0, 0.0]),
    "acosh": (torch.acosh, 2.0, [3**-0.5, -2 * 3**-1.5, 3**-0.5 * (4 / 3 - 1 / 3), None, None, None]),
    "atan": (torch.atan, 0.0, [1.0, 0.0, -2.0, 0.0, 24.0, 0.0]),
    "erf": (torch.erf, 0.0, [2 / 3.141592653589793**0.5 * c for c in (1, 0, -2, 0, 12, 0)]),
    "log1p": (torch.log1p, 0.0, [1.0, -1.0, 2.0, -6.0, 24.0, -120.0]),
    "tanh": (torch.tanh, 0.0, [1.0, 0.0, -2.0, 0.0, 16.0, 0.0]),
    "softplus": (torch.nn.functional.softplus, 0.0, [0.5, 0.25, 0.0, -0.125, 0.0, 0.25]),
    "Gaussian": (lambda x: (-x.square()).exp(), 0.0, [0.0, -2.0, 0.0, 12.0, 0.0, -120.0]),
}  # fmt: skip


@rows("name", KNOWN)
def test_known_series_to_order_six(name):
    func, at, expected = KNOWN[name]
    x = torch.tensor(at, dtype=torch.float64)
    _, found = hog.jet(func, x, [torch.ones_like(x)] + [None] * 5, mode="taylor")
    for part, value in zip(found, expected, strict=True):
        if value is not None:
            assert_close(part.item(), value, rtol=1e-10, atol=1e-10)


@rows("dtype", [torch.float32, torch.float64], ids=str)
def test_sinc_near_zero_and_far_from_it(dtype):
    """torch's formula, nested, divides by x^k: in float32 its third derivative at 1e-3 is off by 1e3."""
    x = torch.tensor([0.0, 1e-8, 1e-3, -0.02, 0.4, 1.2, -1.3, 2.0, 7.3], dtype=dtype)
    series = [torch.ones_like(x)] + [None] * 11
    value, found = hog.jet(torch.sinc, x, series, mode="taylor")
    expected = [[mpmath.sincpi(t), *exact_sinc_derivatives(t, 12)] for t in x.tolist()]
    rtol = 1e-4 if dtype == torch.float32 else 1e-12
    for k, part in enumerate([value, *found]):
        theirs = torch.tensor([float(row[k]) for row in expected], dtype=torch.float64)
        assert_close(part.double(), theirs, rtol=rtol, atol=rtol * math.pi**k)


def exact_sinc_derivatives(t, count):
    """pi^k int_0^1 s^k cos(pi t s + k pi / 2) ds, in 30 digits."""
    with mpmath.workdps(30):
        z = mpmath.pi * mpmath.mpf(t)
        return [
            mpmath.pi**k
            * mpmath.quad(lambda s, k=k: s**k * mpmath.cos(z * s + k * mpmath.pi / 2), [0, 0.5, 1])
            for k in range(1, count + 1)
        ]


# Values at which a formula has a kink, a zero, or 0 / 0; the expected derivatives 1 to 3 by x.
SPECIAL = {
    "relu at 0": (torch.relu, 0.0, (0.0, 0.0, 0.0)),
    "abs at 0": (torch.abs, 0.0, (0.0, 0.0, 0.0)),
    "x |x| at 0": (lambda x: x * x.abs(), 0.0, (0.0, 0.0, 0.0)),
    "norm at 0": (lambda x: torch.stack([x, x]).norm(), 0.0, (0.0, 0.0, 0.0)),
    "norm of a line": (lambda x: torch.stack([x, 2 * x]).norm(), 1.0, (5**0.5, 0.0, 0.0)),
    "square at 0": (lambda x: x**2, 0.0, (0.0, 2.0, 0.0)),
    "power 1 at 0": (lambda x: x**1.0, 0.0, (1.0, 0.0, 0.0)),
    "power 0 at 0": (lambda x: x**0 + x, 0.0, (1.0, 0.0, 0.0)),
    "power of a tensor at 0": (lambda x: x ** torch.tensor(2.0), 0.0, (0.0, 2.0, 0.0)),
    "product with a zero": (lambda x: torch.stack([x, x + 1, x - 2]).prod(), 0.0, (-2.0, -2.0, 6.0)),
    "clamp at its limit": (lambda x: x.clamp(max=1.0) ** 2, 1.0, (2.0, 2.0, 0.0)),
    "elu at 0": (torch.nn.functional.elu, 0.0, (1.0, 1.0, 1.0)),
    "softplus far out": (torch.nn.functional.softplus, 40.0, (1.0, 0.0, 0.0)),
    "softmax far out": (lambda x: torch.stack([x, 0 * x]).softmax(0)[0], 800.0, (0.0, 0.0, 0.0)),
    "a tie of a maximum": (lambda x: torch.stack([x, 3 * x]).amax(), 0.0, (2.0, 0.0, 0.0)),
    "atan2 left of the origin": (lambda x: torch.atan2(x, x - 2), 0.0, (-0.5, -0.5, -0.5)),
    "xlog1py with a factor 0": (lambda x: torch.special.xlog1py(x, x + 1), 0.0, (math.log(2), 1.0, -0.75)),
    "i1 at 0": (torch.special.i1, 0.0, (0.5, 0.0, 0.375)),
    "determinant of a singular matrix": (lambda x: torch.linalg.det(torch.stack([torch.stack([x + 1, x]), torch.stack([x, 1 + 0 * x])])), 0.0, (1.0, -2.0, 0.0)),
}  # fmt: skip


NESTED = {"i1 at 0"}  # without a rule
# Where a derivative does not exist, or func is piecewise linear.
WARNED = {
    "relu at 0", "abs at 0", "x |x| at 0", "norm at 0", "clamp at its limit", "a tie of a maximum",
}  # fmt: skip


@rows("name", SPECIAL)
def test_special_values(name):
    func, at, expected = SPECIAL[name]
    x = torch.tensor(at, dtype=torch.float64)
    with (
        pytest.warns(match="piecewise linear|exactly at a kink")
        if name in WARNED
        else nullcontext()
    ):
        mode = "nested" if name in NESTED else "taylor"
        _, found = hog.jet(func, x, [torch.ones_like(x), None, None], mode=mode)
    for part, value in zip(found, expected, strict=True):
        assert_close(part.item(), value, rtol=1e-9, atol=1e-9)
