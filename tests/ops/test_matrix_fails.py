"""The matrix must fail on ops that are wrong: one op for each mistake, and the cell that finds it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hoglib.ops import define
from hoglib.ops._function import (  # to make faulty ops as hoglib makes right ones
    Batch,
    Saved,
    make_function,
)
from tests.functions import KeepsIntermediate
from tests.ops.matrix import CELLS
from tests.ops.opinfo.op_info import WITH_COMPLEX, OpInfo, elementwise_info, normals, sample_input
from tests.rows import rows

# What a cell raises when it finds a mistake: its own assertion, torch's account of a wrong derivative,
# torch's refusal of the code, or an error that was due and did not come.
FOUND = (
    AssertionError,
    RuntimeError,
    NotImplementedError,
    IndexError,
    TypeError,
    pytest.fail.Exception,
    UserWarning,  # hvp's, of a Function that keeps what its forward made
)


class Mistake(NamedTuple):
    name: str
    info: OpInfo
    cells: tuple[str, ...]  # each of them must fail


def cube(function: Callable[[Tensor], Any], *cells: str, name: str, **others: Any) -> Mistake:
    """x^3 with a mistake."""
    return Mistake(name, entry(function, lambda x: x**3, **others), cells)


def entry(function: Callable[..., Any], reference: Callable[..., Any], **others: Any) -> OpInfo:
    samples = others.pop("samples", ())
    return elementwise_info("broken", reference, function).on(*samples, **others)


def from_class(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    return lambda *inputs: cls.apply(*inputs)


def cube_by(
    backward: Callable[[Saved, Tensor], Tensor] | None = None,
    jvp: Callable[[Saved, Tensor], Tensor] | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """x^3 whose rules are right where they are not given."""
    right = lambda saved, g: g * 3 * saved.inputs[0] ** 2  # noqa: E731
    rule = backward or right
    function = make_function(
        "Cube",
        1,
        forward=others.pop("forward", lambda x: x**3),
        backward=lambda saved, g: [rule(saved, g)],
        jvp=jvp or right,
        **others,
    )
    return function.apply


class SavedIntermediate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grad * slope


class IgnoresUndefinedGradient(torch.autograd.Function):
    """Two outputs, whose backward counts on a gradient for each."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3, x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 + h * 2 * x


def in_place_on_gradient(saved: Saved, g: Tensor) -> Tensor:
    return g.mul_(3 * saved.inputs[0].detach() ** 2)


def in_place_on_input(x: Tensor) -> Tensor:
    return x.mul_(1) ** 3


def nondeterministic(saved: Saved, g: Tensor) -> Tensor:
    return g * 3 * saved.inputs[0] ** 2 * (1 + 1e-13 * torch.rand(()).item())


def float32_inside(saved: Saved, g: Tensor) -> Tensor:
    return g * 3 * (saved.inputs[0].float() ** 2).to(g.dtype)


def contiguous_assumed(saved: Saved, g: Tensor) -> Tensor:
    x = saved.inputs[0]
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset()) if x.numel() else x
    return g * 3 * flat.reshape(x.shape) ** 2


def product_by(partials: Callable[[Saved, Tensor], list[Tensor | None]]) -> Callable[..., Any]:
    def jvp(saved: Saved, s: Tensor | None, t: Tensor | None) -> Tensor:
        x, p = saved.inputs
        terms = [] if s is None else [s * p]
        terms += [] if t is None else [x * t]
        return sum(terms[1:], terms[0])

    return make_function("Product", 2, forward=torch.mul, backward=partials, jvp=jvp).apply


def product(backward: Callable[[Saved, Tensor], list[Tensor | None]], **others: Any) -> OpInfo:
    info = entry(
        product_by(backward),
        torch.mul,
        samples=(sample_input("matrices", lambda n: (n(2, 3), n(2, 3))),),
        **others,
    )
    return info.on(broadcasting=normals((2, 1), (3,)))


def wrong_vmap(batch: Batch, x: Tensor) -> Any:
    return batch.function.apply(x), 0


MISTAKES = [
    cube(lambda x: from_class(SavedIntermediate)(x)[0], "second derivative", "func hessian",
         "hvp", name="saved intermediate"),
    cube(from_class(KeepsIntermediate), "second derivative", "third derivative", "float32",
         name="intermediate kept on ctx"),
    cube(cube_by(lambda saved, g: (g * 3 * saved.inputs[0] ** 2).detach()), "second derivative",
         "hvp", name="detached gradient"),
    cube(cube_by(lambda saved, g: g * 3 * saved.inputs[0].detach() ** 2), "second derivative",
         "func hessian", name="detached input"),
    cube(cube_by(lambda saved, g: -g * 3 * saved.inputs[0] ** 2), "first derivative",
         "func vjp", name="wrong sign"),
    cube(cube_by(jvp=lambda saved, t: t * saved.inputs[0] ** 2), "first derivative", "func jvp",
         "reverse over forward", name="wrong tangent"),
    cube(cube_by(), "forward over forward", name="jvp inside jvp without the reference"),
    cube(cube_by(), "compile", name="jvp in front of the compiler"),
    cube(cube_by(jvp=lambda saved, t: t * 3 * saved.inputs[0].detach() ** 2),
         "reverse over forward", name="detached tangent"),
    cube(cube_by(in_place_on_gradient), "nothing changed in place", name="gradient changed in place"),
    cube(cube_by(forward=in_place_on_input), "nothing changed in place",
         name="input changed in place"),
    cube(cube_by(nondeterministic), "deterministic", name="random backward"),
    cube(cube_by(float32_inside), "func vjp", "func hessian", name="float32 inside"),
    cube(cube_by(contiguous_assumed), "transposed", "non-contiguous", "stride 0",
         name="layout assumed"),
    cube(cube_by(vmap=wrong_vmap), "func vmap", name="vmap dimension ignored"),
    cube(lambda x: x**3 if x.numel() else x.sum(), "zero size", name="zero size forgotten"),
    cube(lambda x: (x.unsqueeze(0) if x.dim() == 0 else x) ** 3, "no dimensions",
         name="dimension added"),
    cube(lambda x: (x.double() ** 3).to(x.dtype) if x.dtype != torch.bfloat16 else x.float() ** 3,
         "bfloat16", name="another dtype returned"),
    cube(lambda x: (x**3).abs() if x.is_complex() else x**3, "complex", name="complex value wrong",
         dtypes=WITH_COMPLEX),
    cube(lambda x: x**3, "complex", name="complex numbers neither declared nor refused"),
    cube(define(lambda x: x**3, [lambda x, _: 3 * x * x], reference=lambda x: x.detach() ** 2 * x),
         "plain operations", name="reference with another gradient"),
    Mistake(
        "gradient of an output ignored",
        entry(from_class(IgnoresUndefinedGradient), lambda x: (x**3, x**2)),
        ("undefined gradients",),
    ),
    Mistake(
        "missing term",
        product(lambda saved, g: [g * saved.inputs[1], torch.zeros_like(g)]),
        ("first derivative", "func vjp", "subsets of inputs"),
    ),
    Mistake(
        "missing sum over broadcast dimensions",
        product(lambda saved, g: [g * saved.inputs[1], g * saved.inputs[0]]),
        ("broadcasting",),
    ),
    Mistake(
        "needs_input_grad ignored",
        product(lambda saved, g: [g * saved.inputs[1], g * saved.inputs[0]]),
        ("subsets of inputs",),
    ),
]  # fmt: skip


@rows(
    ("mistake", "cell"),
    [(mistake, cell) for mistake in MISTAKES for cell in mistake.cells],
    ids=[f"{mistake.name}-{cell}" for mistake in MISTAKES for cell in mistake.cells],
)
def test_the_cell_finds_the_mistake(mistake: Mistake, cell: str) -> None:
    with pytest.raises(FOUND):
        CELLS[cell](mistake.info, mistake.info.samples[0])


@rows("cell", sorted(CELLS.keys() - {"cuda", "broadcasting"}))
def test_the_right_op_passes(cell: str) -> None:
    right = define(lambda x: x**3, [lambda x, _: 3 * x**2], reference=lambda x: x**3, keep="inputs")
    info = entry(right, lambda x: x**3, dtypes=WITH_COMPLEX)
    CELLS[cell](info, info.samples[0])


def test_every_cell_is_shown_to_fail() -> None:
    not_shown = CELLS.keys() - {cell for mistake in MISTAKES for cell in mistake.cells}
    assert not_shown == {"cuda"}  # it needs a device
