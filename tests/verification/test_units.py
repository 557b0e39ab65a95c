"""A Function in pascal is the same Function in bar: verdicts do not depend on the units of inputs and
outputs, in `verify`, at an entry point, and in a penalty."""

import math
import re
import warnings

import pytest
import torch
from torch.autograd import Function

import hoglib as hog
from hoglib.errors import NoSecondDerivative
from tests.functions import made
from tests.rows import as_in_a_new_process

KINDS = ("right", "first derivative", "cut", "1 % of the second")


def faulty(name, value, partials, kind):
    """A Function of value(*inputs), by its partial derivatives; wrong in a way."""

    def gradient(g, *inputs):
        if kind == "cut":
            inputs = [x.detach() for x in inputs]
        if kind == "1 % of the second":
            inputs = [0.99 * x + 0.01 * x.detach() for x in inputs]
        found = [(1.1 if kind == "first derivative" else 1.0) * g * d for d in partials(*inputs)]
        return found[0] if len(found) == 1 else tuple(found)

    return made(name, value, gradient)


def wave(unit, out, kind):
    return faulty(
        "Wave",
        lambda x: out * torch.sin(x / unit),
        lambda x: [out / unit * torch.cos(x / unit)],
        kind,
    )


def reported(call):
    """What an entry point says of a Function."""
    as_in_a_new_process()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call()
        except NoSecondDerivative as error:
            return str(error)
    return " ".join(str(one.message) for one in found)


def reported_by_hvp(function, inputs):
    v = [torch.ones_like(x) for x in inputs]
    return reported(lambda: hog.hvp(lambda xs: function.apply(*xs).sum(), list(inputs), v))


def reported_by_r1(function, x):
    weight = torch.ones((), dtype=x.dtype, requires_grad=True)
    critic = lambda x: function.apply(weight * x).sum(1)  # noqa: E731
    return reported(lambda: hog.penalties.r1(critic, x).backward())


def assert_judged(kind, report, texts):
    if kind == "right":
        assert not report.failed, report
        assert not [row for row in report.warnings if " derivative: " in row.name], report
        assert texts == [""] * len(texts)
    else:
        assert " derivative: " in " ".join(row.name for row in report.failed), report
        assert all("is wrong" in text for text in texts), texts


POINT = torch.tensor([[0.7, 1.1, -0.4], [0.9, 2.3, 1.6]], dtype=torch.float64)
# units of the input and of the output
UNITS = [
    (1e-12, 1.0), (1e-8, 1.0), (1e-4, 1.0), (1e3, 1.0), (1e5, 1.0), (1e12, 1.0), (1.0, 1e-12), (1.0, 1e12),
    (1e5, 1e-6), (1e-9, 1e6),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("unit", "out"), UNITS, ids=[f"{a:g} to {b:g}" for a, b in UNITS])
def test_the_verdict_is_the_same_in_all_units(unit, out, kind, dtype):
    function, x = wave(unit, out, kind), (unit * POINT).to(dtype)
    texts = [reported_by_hvp(function, [x]), reported_by_r1(function, x)]
    assert_judged(kind, hog.verify(function, x), texts)


# Functions as they are published, of quantities in their usual units: the value, the partial
# derivatives, and values of the arguments.
PLANCK = 6.62607015e-34
PUBLISHED = {
    "pinhole camera, pixels and millimetres": (
        lambda f, x, z: f * x / z, lambda f, x, z: [x / z, f / z, -f * x / z**2],
        ([1250.0, 1310.0], [310.0, -140.0], [2100.0, 3400.0]),
    ),
    "thin lens, millimetres": (
        lambda f, u: 1 / (1 / f - 1 / u), lambda f, u: [(u / (u - f)) ** 2, -((f / (u - f)) ** 2)],
        ([85.0, 105.0], [1900.0, 3200.0]),
    ),
    "black body, kelvin": (
        lambda t: 1 / torch.expm1(14388 / t),
        lambda t: [14388 / t**2 * torch.exp(14388 / t) / torch.expm1(14388 / t) ** 2],
        ([2900.0, 5800.0, 9100.0],),
    ),
    "Arrhenius, joule per mole and kelvin": (
        lambda e, t: 1e13 * torch.exp(-e / (8.314 * t)),
        lambda e, t: [
            -1e13 / (8.314 * t) * torch.exp(-e / (8.314 * t)),
            1e13 * e / (8.314 * t**2) * torch.exp(-e / (8.314 * t)),
        ],
        ([51000.0, 53000.0], [310.0, 325.0]),
    ),
    "Tait equation, pascal": (
        lambda p: 1e-3 * (1 - 0.0894 * torch.log1p(p / 3.0e8)), lambda p: [-1e-3 * 0.0894 / (p + 3.0e8)],
        ([1.0e8, 4.0e8, 7.0e8],),
    ),
    "ideal gas, kelvin and cubic metres": (
        lambda t, v: 8.314 * t / v, lambda t, v: [8.314 / v, -8.314 * t / v**2],
        ([290.0, 320.0], [0.024, 0.019]),
    ),
    "chirp, hertz per second and seconds": (
        lambda k, t: torch.sin(math.pi * k * t**2),
        lambda k, t: [
            math.pi * t**2 * torch.cos(math.pi * k * t**2),
            2 * math.pi * k * t * torch.cos(math.pi * k * t**2),
        ],
        ([1.1e12, 0.9e12], [0.8e-6, 1.2e-6]),
    ),
    "circadian rhythm, seconds": (
        lambda t: torch.cos(2 * math.pi * t / 86400),
        lambda t: [-2 * math.pi / 86400 * torch.sin(2 * math.pi * t / 86400)],
        ([31000.0, 52000.0, 70000.0],),
    ),
    "logistic growth, people": (
        lambda p: 0.02 * p * (1 - p / 1.1e10), lambda p: [0.02 * (1 - 2 * p / 1.1e10)],
        ([2.1e9, 7.9e9],),
    ),
    "new infections, people": (
        lambda s, i: 0.3 * s * i / 8.0e6, lambda s, i: [0.3 * i / 8.0e6, 0.3 * s / 8.0e6],
        ([5.1e6, 7.2e6], [2.0e4, 3.1e5]),
    ),
    "potential of the sun, metres": (
        lambda r: -1.327e20 / r, lambda r: [1.327e20 / r**2], ([1.5e11, 2.3e11],),
    ),
    "distance modulus, metres": (
        lambda d: 5 * torch.log10(d / 3.0857e17), lambda d: [5 / (math.log(10) * d)],
        ([4.2e16, 9.7e17, 3.3e18],),
    ),
    "Coulomb energy, coulomb and metres": (
        lambda q, r: 8.988e9 * 1.602e-19 * q / r,
        lambda q, r: [8.988e9 * 1.602e-19 / r, -8.988e9 * 1.602e-19 * q / r**2],
        ([1.602e-19, 3.204e-19], [0.53e-10, 1.1e-10]),
    ),
    "Hill equation, mole": (
        lambda c: c**2 / (c**2 + 3e-9**2), lambda c: [2 * c * 3e-9**2 / (c**2 + 3e-9**2) ** 2],
        ([1.2e-9, 3.1e-9, 8e-9],),
    ),
    "a harmonic oscillator, joule": (
        lambda w: PLANCK * w * (0.5 + 1 / torch.expm1(w / 4e13)),
        lambda w: [
            PLANCK * (0.5 + 1 / torch.expm1(w / 4e13))
            - PLANCK * w / 4e13 * torch.exp(w / 4e13) / torch.expm1(w / 4e13) ** 2
        ],
        ([3e13, 6e13],),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_functions_are_judged_in_their_own_units(name, kind):
    value, partials, values = PUBLISHED[name]
    inputs = [torch.tensor(x, dtype=torch.float64) for x in values]
    function = faulty("Published", value, partials, kind)
    assert_judged(kind, hog.verify(function, inputs), [reported_by_hvp(function, inputs)])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# Functions with another scale than that of their values, and tensors of several quantities.
OTHERS = {
    "oscillates": (lambda x: torch.sin(1e6 * x), lambda x: [1e6 * torch.cos(1e6 * x)], double(0.7, 1.1, -0.4)),
    "oscillates, large": (lambda x: torch.sin(x), lambda x: [torch.cos(x)], double(0.7e6, 1.1e6, -0.4e6)),
    "Celsius": (
        lambda x: torch.exp(x / 10), lambda x: [torch.exp(x / 10) / 10], double(20.0, 15.0, -3.0, 0.0, 1e-3, 30.0),
    ),
    "zeros beside large numbers": (
        lambda x: torch.sin(x / 1e5), lambda x: [torch.cos(x / 1e5) / 1e5], double(0.0, 1e5, 0.0, -0.5e5),
    ),
    "zeros": (lambda x: torch.exp(x), lambda x: [torch.exp(x)], double(0.0, 0.0)),
    "integers": (lambda x: x**2 / 7, lambda x: [2 * x / 7], double(3000.0, 12000.0, -500.0)),
    "cancels": (
        lambda x: 1e-9 * (x - 1e5) ** 3, lambda x: [3e-9 * (x - 1e5) ** 2], double(100001.0, 100002.0, 100003.0),
    ),
    "times beside populations": (
        lambda x: torch.sin(x[:, 0] / 1e5) * torch.exp(-x[:, 1] / 1e12),
        lambda x: [torch.stack((
            torch.cos(x[:, 0] / 1e5) * torch.exp(-x[:, 1] / 1e12) / 1e5,
            -torch.sin(x[:, 0] / 1e5) * torch.exp(-x[:, 1] / 1e12) / 1e12,
        ), 1)],
        torch.tensor([[1e5, 0.7e12], [0.8e5, 2e12], [2e5, 1e12]], dtype=torch.float64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_functions_with_another_scale_than_their_values(name, kind):
    value, partials, x = OTHERS[name]
    rows = (lambda d: d[:, None]) if x.dim() > 1 else (lambda d: d)

    def gradient(g, x):
        if kind == "cut":
            x = x.detach()
        if kind == "1 % of the second":
            x = 0.99 * x + 0.01 * x.detach()
        return (1.1 if kind == "first derivative" else 1.0) * rows(g) * partials(x)[0]

    function = made("Other", value, gradient)
    assert_judged(kind, hog.verify(function, x), [reported_by_hvp(function, [x])])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_function_that_computes_in_half_precision(kind):
    rounded = lambda f: lambda x: f((x / 1e3).half()).to(x.dtype)  # noqa: E731
    function = faulty("Half", rounded(torch.sin), lambda x: [rounded(torch.cos)(x) / 1e3], kind)
    x = torch.tensor([700.0, 1100.0, -400.0])
    assert bool(hog.verify(function, x).failed) == (kind != "right")


def test_what_is_left_of_terms_that_cancel_has_no_derivative_of_its_own():
    report = hog.verify(lambda x: x - (x.mean() + (x - x.mean())), 1e4 * double(1.0, 2.0, 3.7))
    assert not report.failed, report
    assert not [row for row in report.warnings if " derivative: " in row.name], report


class Triples(Function):
    """x^2, with a gradient of 3 x."""

    forward = staticmethod(lambda x: x**2)
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    backward = staticmethod(lambda ctx, g: 3 * g * ctx.saved_tensors[0])


def test_numbers_are_told_in_the_units_of_the_user():
    text = hog.verify(Triples, double(1e5, 2e5)).failed[0].text
    got, right = map(float, re.search(r"element 0 is (\S+), and should be (\S+)\.", text).groups())
    assert abs(got / right - 1.5) < 1e-4
    assert 1e5 < right < 3e5  # 2 x, times an incoming gradient between 0.5 and 1.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e6])
def test_an_audit_and_differences_of_parameters_in_any_unit(unit, kind):
    x, function = unit * POINT[0], wave(unit, 1.0, kind)

    def loss(params, batch):
        return function.apply(params["x"]).sum() + (params["x"] / unit)[0] ** 4

    report = hog.audit(loss, {"x": x}, torch.zeros(1))
    assert report.judged
    assert report.ok == (kind == "right")
    exact = lambda x: torch.sin(x / unit).sum()  # noqa: E731
    product = hog.hvp(exact, x, x, mode="finite-differences")[1]
    torch.testing.assert_close(product * unit, -torch.sin(x / unit) * x / unit, rtol=1e-8, atol=0.0)
