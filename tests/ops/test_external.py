"""external: SciPy functions that torch lacks, against finite differences and closed forms."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special as sp
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import hoglib as hog
from hoglib.ops import external
from tests.refused import refused
from tests.rows import rows

DOUBLE = torch.float64


cube = external(lambda x: x**3, lambda x: 3 * x**2, lambda x: 6 * x, lambda x: 6.0)
tanh = external(
    np.tanh, lambda x: 1 - np.tanh(x) ** 2, lambda x: -2 * np.tanh(x) * (1 - np.tanh(x) ** 2)
)
power = external(
    np.power,
    lambda x, n: (n * x ** (n - 1), x**n * np.log(x)),
    lambda x, n: (
        (n * (n - 1) * x ** (n - 2), x ** (n - 1) * (1 + n * np.log(x))),
        (x ** (n - 1) * (1 + n * np.log(x)), x**n * np.log(x) ** 2),
    ),
)
kv = external(
    sp.kv,
    lambda v, x: (None, sp.kvp(v, x)),
    lambda v, x: ((None, None), (None, sp.kvp(v, x, 2))),
    lambda v, x: (None, ((None, None), (None, sp.kvp(v, x, 3)))),
)


def positive(*shape: int, low: float = 0.2, high: float = 0.8) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 1)
    return (
        low + (high - low) * torch.rand(shape, dtype=DOUBLE, generator=generator)
    ).requires_grad_()


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "cube": (cube, (positive(2, 3),)),
    "power, broadcast": (power, (positive(2, 1), positive(3))),
    "Bessel K of a fixed order": (lambda x: kv(1.5, x), (positive(4, high=3.0),)),
    "complex error function": (
        external(
            sp.wofz,
            lambda z: -2 * z * sp.wofz(z) + 2j / math.sqrt(math.pi),
            lambda z: (4 * z**2 - 2) * sp.wofz(z) - 4j * z / math.sqrt(math.pi),
        ),
        (torch.complex(positive(3).detach(), positive(3).detach() + 1).requires_grad_(),),
    ),
}  # fmt: skip


@rows(("op", "inputs"), CASES.values(), ids=CASES.keys())
def test_derivatives_agree_with_finite_differences(op, inputs) -> None:
    batched = inputs[0].dim() > 0
    assert gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=batched)
    assert gradgradcheck(op, inputs, check_fwd_over_rev=True, check_batched_grad=batched)


# How far the chain goes.


def test_an_order_beyond_the_given_names_what_to_add() -> None:
    op, x = external(np.sin, np.cos), positive(3)
    (slope,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, x.cos())
    message = r"external\(sin\): expected a derivative of order 2.*add d2f, as in `external\(f, df, d2f\)`"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(slope.sum(), x)
    for outer, inner in ((jacrev, jacrev), (jacfwd, jacrev), (jacrev, jacfwd)):
        with pytest.raises(RuntimeError, match="add d2f"):
            outer(inner(lambda x: op(x).sum()))(x.detach())
    with pytest.raises(RuntimeError, match="add d3f"):
        grad(grad(grad(external(np.sin, np.cos, lambda x: -np.sin(x)))))(x[0].detach())


def test_an_unknown_derivative_is_an_error_only_for_who_needs_it() -> None:
    v, x = torch.tensor(1.5, dtype=DOUBLE, requires_grad=True), positive(2)
    (slope,) = torch.autograd.grad(kv(v.detach(), x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert bend.isfinite().all()
    with pytest.raises(RuntimeError, match=r"known derivative df\[0\], got None"):
        torch.autograd.grad(kv(v, x).sum(), v)
    mixed = external(
        sp.kv, lambda v, x: (x * 0, sp.kvp(v, x)), lambda v, x: ((None, None), (None, x))
    )
    (slope,) = torch.autograd.grad(mixed(v, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"known derivative d2f\[1\]\[0\], got None"):
        torch.autograd.grad(slope.sum(), v)


def test_only_what_is_needed_is_computed() -> None:
    calls = []

    def slopes(x, y):
        calls.append("df")
        return y, x

    x, y = positive(3), positive(3).detach()
    product = external(lambda x, y: calls.append("f") or x * y, slopes)(x, y)
    assert calls == ["f"]
    torch.autograd.grad(product.sum(), x)
    assert calls == ["f", "df"]


# Inputs and outputs.


@rows("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    x = positive(5).detach().to(dtype).requires_grad_()
    y = tanh(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == slope.dtype == dtype
    torch.testing.assert_close(y, x.tanh())
    torch.testing.assert_close(slope, 1 - x.double().tanh().to(dtype) ** 2, atol=0.02, rtol=0.02)


def test_mixed_dtypes_are_promoted_and_gradients_come_back_in_their_own() -> None:
    x, n = positive(3), positive(3).detach().float().requires_grad_()
    y = power(x, n)
    assert y.dtype == DOUBLE
    assert [g.dtype for g in torch.autograd.grad(y.sum(), [x, n])] == [DOUBLE, torch.float32]


def test_conjugate_views_and_work_in_place_inside_harm_nobody() -> None:
    def doubles(x):
        x *= 2
        return x

    op, x = external(doubles, lambda x: 2.0), positive(3)
    before = x.detach().clone()
    torch.testing.assert_close(op(x), 2 * x)
    torch.testing.assert_close(x.detach(), before)
    z = torch.complex(before, before)
    torch.testing.assert_close(op(z.conj()), 2 * z.conj())
    torch.testing.assert_close(op(z.imag), 2 * before)


def test_an_output_buffer_that_is_used_again() -> None:
    buffer = np.empty(3)
    op = external(lambda x: np.multiply(x, 2, out=buffer), lambda x: 2.0)
    first = op(torch.ones(3, dtype=DOUBLE))
    op(torch.zeros(3, dtype=DOUBLE))
    torch.testing.assert_close(first, torch.full((3,), 2.0, dtype=DOUBLE))


def test_a_constant_in_python_keeps_its_digits() -> None:
    third = external(lambda x: x / 3, lambda x: 1 / 3)
    assert grad(third)(torch.tensor(1.0, dtype=DOUBLE)).item() == 1 / 3


@pytest.mark.gpu
def test_a_round_trip_from_the_device() -> None:
    x = positive(4).detach().cuda().requires_grad_()
    y = cube(x)
    assert y.device == x.device
    assert gradgradcheck(cube, x)


def test_the_meta_device_has_shapes_only() -> None:
    assert cube(torch.empty(2, 3, device="meta")).shape == (2, 3)


# Tracers record a call, and not the numbers it gave.


@rows("mode", ["real", "fake", "symbolic"])
def test_make_fx_bakes_nothing_in(mode: str) -> None:
    x = positive(3).detach()
    gradient = grad(lambda x: grad(lambda x: cube(x).sum())(x).sin().sum())
    graph = make_fx(gradient, tracing_mode=mode)(x)
    other = torch.linspace(0.1, 0.9, 7 if mode == "symbolic" else 3, dtype=DOUBLE)
    torch.testing.assert_close(graph(other), gradient(other))
    assert "hoglib.external" in graph.code


def test_torch_compile_in_one_graph() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return power(x, n).sin()

    fast = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (3, 5):
        x, n = positive(size), positive(size)
        torch.testing.assert_close(
            torch.autograd.grad(fast(x, n).sum(), [x, n]),
            torch.autograd.grad(fn(x, n).sum(), [x, n]),
        )


# The compiler itself, when it looks at a custom Function from the inside.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@rows("transform", [grad, vmap], ids=["grad", "vmap"])
def test_torch_compile_over_a_transform(transform: Any) -> None:
    x = positive(3).detach()

    def fn(x: Tensor) -> Tensor:
        return vmap(transform(tanh) if transform is grad else tanh)(x)

    fast = torch.compile(fn, backend="aot_eager")
    for point in (x, x + 1):
        torch.testing.assert_close(fast(point), fn(point))


def test_the_operator_passes_the_checks_of_torch() -> None:
    from hoglib.ops._external import _CHAINS, _external

    number = next(i for i, chain in enumerate(_CHAINS) if chain.name == "power")
    for which in ("", "0 1", "0,1"):
        inputs = [positive(3), positive(3)]
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(_external, (inputs, number, which), test_utils=tests)


# What is refused.

REFUSED: dict[str, Any] = {
    "integers": (lambda: cube(torch.ones(3, dtype=int)), TypeError, "input 0: expected a floating"),
    "numbers alone": (lambda: power(1.0, 2.0), TypeError, "at least one tensor"),
    "no function": (lambda: external(np.sin, 3), TypeError, "df: expected a function, got int 3"),
    "d3f without d2f": (lambda: external(np.sin, np.cos, None, np.sin), ValueError, "d2f: expected"),
    "another shape": (lambda: external(lambda x: x[:2], np.cos)(positive(4)), ValueError, r"external\(<lambda>\): expected f to give an array of the shape of its inputs, \(4,\), got \(2,\)"),
    "complex numbers": (lambda: external(sp.lambertw, np.cos)(positive(3)), ValueError, r"got complex128; take `\.real`"),
    "text": (lambda: external(lambda x: "a", np.cos)(positive(3)), TypeError, "f to give numbers, got str 'a'"),
    "one array for two inputs": (lambda: external(np.multiply, lambda x, y: y)(positive(3), positive(3)).sum().backward(), ValueError, r"expected df to be a tuple of 2 arrays, .* got ndarray"),
    "three arrays for two inputs": (lambda: external(np.multiply, lambda x, y: (y, x, x))(positive(3), positive(3)).sum().backward(), ValueError, r"expected df to be a tuple of 2 arrays, .* got 3"),
    "a tuple for one input": (lambda: external(np.sin, lambda x: (x, x))(positive(3)).sum().backward(), ValueError, "the shape of its inputs"),
    "forward over forward": (lambda: jacfwd(jacfwd(lambda x: cube(x).sum()))(positive(3)), NotImplementedError, r"at most one level .* torch\.func\.hessian"),
}  # fmt: skip


test_errors_say_what_to_do = refused(REFUSED)


def test_the_op_has_the_name_and_the_text_of_the_function() -> None:
    assert power.__name__ == "power"
    assert "power" in power.__doc__.lower()
    assert hog.ops.external is external
