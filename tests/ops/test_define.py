"""`hoglib.ops.define`: what a user's own op may be made of, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from hoglib.ops import define
from tests.ops.matrix import F64
from tests.rows import rows

X = torch.linspace(-1, 2, 4, dtype=F64)
cube = define(lambda x: x**3, [lambda x, _: 3 * x * x], keep="inputs")


def wave(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(1j * x) * y


def square_where(x: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, x * x, 0)


# the formula, its partials, what they read, inputs
RIGHT: dict[str, tuple[Callable[..., Tensor], list[Any], str, tuple[Tensor, ...]]] = {
    "constant partials": (lambda x, y: 2 * x - y, [lambda *_: 2, lambda *_: -1.0], "none", (X, X[:1])),
    "a mask as a partial": (torch.relu, [lambda x, _: x > 0], "inputs", (X + 0.1,)),
    "a complex value of real inputs": (
        wave, [lambda x, y, z: 1j * z, lambda x, y, z: torch.exp(1j * x)], "both", (X, X.flip(0)),
    ),
    "a constant complex partial": (lambda x: 1j * x, [lambda *_: 1j], "none", (X,)),
    "real and complex inputs": (
        torch.mul, [lambda x, y, _: y, lambda x, y, _: x], "inputs", (X, X.flip(0) + 1j),
    ),
    "a tensor that is no number": (
        square_where, [lambda x, chosen, _: torch.where(chosen, 2 * x, 0), None], "inputs", (X, X > 0),
    ),
}  # fmt: skip


@rows(("formula", "partials", "keep", "inputs"), RIGHT.values(), ids=RIGHT)
def test_what_partials_may_be(formula: Any, partials: Any, keep: str, inputs: Any) -> None:
    op = define(formula, partials, keep=keep)
    hog.testing.assert_double_differentiable(op, inputs, reference=formula)


@rows("forward", [lambda x: x, lambda x: x[:]], ids=["the input itself", "a view of it"])
def test_a_forward_that_returns_its_input(forward: Callable[[Tensor], Tensor]) -> None:
    op = define(forward, [lambda *_: 1], keep="none")
    hog.testing.assert_double_differentiable(op, (X,), reference=lambda x: 1 * x)
    x = X.clone()
    op(x).add_(1)
    assert_close(x, X)


def test_jvp_inside_jvp_raises_without_a_reference_and_is_right_with_one() -> None:
    x = torch.tensor(2.0, dtype=F64)
    with pytest.raises(NotImplementedError, match="reference"):
        torch.func.jacfwd(torch.func.jacfwd(cube))(x)
    known = define(lambda x: x**3, [lambda x, _: 3 * x * x], reference=lambda x: x**3)
    assert_close(torch.func.jacfwd(torch.func.jacfwd(known))(x), 6 * x)


@rows("transform", [lambda f: f, torch.func.grad], ids=["value", "func.grad"])
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
        kept[keep] = sum(x is not None for x in y.grad_fn.saved_tensors)  # type: ignore[union-attr]
    assert kept == {"both": 2, "inputs": 1, "output": 1, "none": 0}


def test_partials_are_asked_for_only_where_a_gradient_is_wanted() -> None:
    calls: list[str] = []
    by_a, by_b = (lambda a, b, y: calls.append("a") or b), (lambda a, b, y: calls.append("b") or a)
    a, b = X.clone().requires_grad_(), X.clone()
    define(torch.mul, [by_a, by_b])(a, b).sum().backward()
    assert calls == ["a"]
    assert_close(a.grad, b)


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
