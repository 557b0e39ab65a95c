"""`hoglib.ops.define`: what a user's own op may be made of, and what it refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from hoglib.ops import define
from tests.ops.matrix import F64

X = torch.linspace(-1, 2, 4, dtype=F64)
cube = define(lambda x: x**3, [lambda x, _: 3 * x * x], keep="inputs")


def test_constant_partials() -> None:
    op = define(lambda x, y: 2 * x - y, [lambda *_: 2, lambda *_: -1.0], keep="none")
    hog.testing.assert_double_differentiable(op, (X, X[:1]), reference=lambda x, y: 2 * x - y)


@pytest.mark.parametrize(
    "forward", [lambda x: x, lambda x: x[:]], ids=["the input itself", "a view of it"]
)
def test_a_forward_that_returns_its_input(forward: Callable[[Tensor], Tensor]) -> None:
    op = define(forward, [lambda *_: 1], keep="none")
    hog.testing.assert_double_differentiable(op, (X,), reference=lambda x: 1 * x)
    x = X.clone()
    op(x).add_(1)
    assert_close(x, X)


def test_masks_as_partials() -> None:
    op = define(torch.relu, [lambda x, _: x > 0], keep="inputs")
    hog.testing.assert_double_differentiable(op, (X + 0.1,), reference=torch.relu)


def test_complex_value_of_real_inputs() -> None:
    def wave(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(1j * x) * y

    op = define(wave, [lambda x, y, z: 1j * z, lambda x, y, z: torch.exp(1j * x)])
    hog.testing.assert_double_differentiable(op, (X, X.flip(0)))
    grads = torch.func.grad(lambda *v: op(*v).real.sum(), (0, 1))(X, X)
    assert [g.dtype for g in grads] == [F64, F64]


def test_constant_complex_partial_of_a_real_input() -> None:
    op = define(lambda x: 1j * x, [lambda *_: 1j], keep="none")
    hog.testing.assert_double_differentiable(op, (X,), reference=lambda x: 1j * x)


def test_real_and_complex_inputs_together() -> None:
    op = define(torch.mul, [lambda x, y, _: y, lambda x, y, _: x], keep="inputs")
    hog.testing.assert_double_differentiable(op, (X, X.flip(0) + 1j))


def test_integer_tensors_are_constants() -> None:
    op = define(
        lambda x, chosen: torch.where(chosen, x * x, 0),
        [lambda x, chosen, _: torch.where(chosen, 2 * x, 0), None],
        keep="inputs",
    )
    chosen = X > 0
    hog.testing.assert_double_differentiable(
        op, (X, chosen), reference=lambda x, c: torch.where(c, x * x, 0)
    )


def test_third_order() -> None:
    third = torch.func.grad(torch.func.grad(torch.func.grad(cube)))
    assert_close(third(torch.tensor(2.0, dtype=F64)), torch.tensor(6.0, dtype=F64))


def test_jvp_inside_jvp_raises_without_a_reference_and_is_right_with_one() -> None:
    x = torch.tensor(2.0, dtype=F64)
    with pytest.raises(NotImplementedError, match="reference"):
        torch.func.jacfwd(torch.func.jacfwd(cube))(x)
    known = define(lambda x: x**3, [lambda x, _: 3 * x * x], reference=lambda x: x**3)
    assert_close(torch.func.jacfwd(torch.func.jacfwd(known))(x), 6 * x)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["value", "func.grad"])
def test_the_compiler_takes_an_op_without_a_reference(transform: object) -> None:
    def loss(x: Tensor) -> Tensor:
        return cube(torch.sin(x)).sum()

    torch._dynamo.reset()  # its limit of graphs is one for all that torch.func transforms
    compiled = torch.compile(transform(loss), backend="aot_eager", fullgraph=True)  # type: ignore[operator]
    assert_close(compiled(X), transform(loss)(X))  # type: ignore[operator]


def test_a_surrogate_says_so() -> None:
    op = define(torch.sign, [lambda *_: 1], surrogate=True)
    assert op.surrogate  # type: ignore[attr-defined]
    assert not cube.surrogate  # type: ignore[attr-defined]
    assert_close(torch.func.vmap(torch.func.grad(op))(X), torch.ones_like(X))


def test_nothing_is_kept_that_the_partials_do_not_read() -> None:
    kept: dict[str, int] = {}
    for keep in ("both", "inputs", "output", "none"):
        op = define(torch.exp, [lambda x, y: 1], keep=keep)
        y = op(X.clone().requires_grad_())
        kept[keep] = len(y.grad_fn.saved_tensors)  # type: ignore[union-attr]
    assert kept == {"both": 2, "inputs": 1, "output": 1, "none": 0}


def test_wrong_definitions_and_calls_are_explained() -> None:
    with pytest.raises(TypeError, match=r"partials\[0\]: expected a function"):
        define(torch.exp, [1.0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="keep: expected one of both, inputs, output, none"):
        define(torch.exp, [lambda x, y: y], keep="all")
    with pytest.raises(TypeError, match="expected 1 inputs, one for each partial, got 2"):
        cube(X, X)
    magnitude = define(torch.abs, [lambda x, y: x / y])
    with pytest.raises(NotImplementedError, match="real function of complex numbers"):
        magnitude(X + 1j)
    by_one = define(torch.mul, [lambda x, y, _: y, None], keep="inputs")
    y = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="expected input 1 to be a constant"):
        by_one(X, y).sum().backward()
    with pytest.raises(NotImplementedError, match="expected input 1 to be a constant"):
        torch.func.jvp(lambda y: by_one(X, y), (X,), (X,))
