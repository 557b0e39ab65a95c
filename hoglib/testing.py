"""Assertions for tests of code that is differentiated twice."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hoglib import _arguments as arguments
from hoglib import _tree


class Tolerance(NamedTuple):
    """|a - b| <= atol + rtol |b|."""

    atol: float
    rtol: float


# What an exact derivative is allowed to lose to rounding, by the dtype it was computed in.
TOLERANCES = {
    torch.float64: Tolerance(1e-10, 1e-8),
    torch.complex128: Tolerance(1e-10, 1e-8),
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.complex64: Tolerance(1e-5, 1e-4),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}


def assert_double_differentiable(
    fn: Callable[..., Any] | type[torch.autograd.Function],
    inputs: Tensor | Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
    forward_mode: bool = True,
    vmap: bool = True,
    atol: float = 1e-6,
    rtol: float = 1e-4,
) -> None:
    r"""Fail unless the first and second derivatives of a function are right.

    fn: a function of tensors, `MyFunction.apply`, the Function class itself, or a module; inputs: its
    arguments. Floating-point inputs are checked in float64 copies that require grad; anything else
    is passed as it is. Compared with central differences: the gradient and the gradient of the
    gradient in reverse mode and, with forward_mode, in forward mode and forward-over-reverse; with
    vmap, also gradients batched by vmap. With a reference, a function of plain torch operations, also
    the value, the gradient and the whole second derivative by reverse-over-reverse and
    forward-over-reverse of a random projection of the outputs.

    forward_mode and vmap are switched off for a Function that does not offer them. atol and rtol are
    those of `torch.autograd.gradcheck`. Kinks (relu at 0) must not lie within 1e-6 of an input.

    Raises AssertionError that says which derivative is wrong, with torch's account of it.
    """
    function = _callable(fn)
    arguments_ = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    copies = tuple(_copy(value) for value in arguments_)
    if not any(isinstance(value, Tensor) and value.requires_grad for value in copies):
        raise arguments.WrongValue(
            "inputs: expected at least one floating-point or complex tensor, got none; there is "
            "nothing to differentiate by."
        )
    name = getattr(fn, "__qualname__", type(fn).__name__)

    def check(what: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except AssertionError as error:
            raise AssertionError(f"{name}: {what} is wrong.\n{error}") from None
        except Exception as error:
            raise AssertionError(f"{name}: {what} is wrong or missing.\n{error}") from error

    check(
        "the first derivative",
        lambda: gradcheck(
            function, copies, atol=atol, rtol=rtol, check_forward_ad=forward_mode,
            check_batched_grad=vmap, check_batched_forward_grad=vmap and forward_mode,
        ),
    )  # fmt: skip
    check(
        "the second derivative",
        lambda: gradgradcheck(
            function, copies, atol=atol, rtol=rtol, check_fwd_over_rev=forward_mode,
            check_batched_grad=vmap,
        ),
    )  # fmt: skip
    if reference is not None:
        check(
            "agreement with the reference",
            lambda: _compare(function, reference, copies, forward_mode),
        )


def _callable(fn: Any) -> Callable[..., Any]:
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        return fn.apply
    return arguments.function("fn", fn)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not (value.is_floating_point() or value.is_complex()):
        return value
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to(wide).clone().requires_grad_()


def _compare(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Any, forward_mode: bool
) -> None:
    values, expected = _tree.leaves(function(*inputs)), _tree.leaves(reference(*inputs))
    for value, other in zip(values, expected, strict=True):
        torch.testing.assert_close(value, other, **TOLERANCES[value.dtype]._asdict())
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(v.shape, dtype=v.dtype, generator=generator).to(v.device) for v in expected
    ]

    def projection(call: Callable[..., Any]) -> Callable[..., Tensor]:
        def total(*tensors: Tensor) -> Tensor:
            given = iter(tensors)
            filled = [next(given) if _counts(value) else value for value in inputs]
            outputs = _tree.leaves(call(*filled))
            # tanh of each output, so that second derivatives by every output count too
            return _tree.sum_scalars(
                [(w * y.tanh()).sum().real for w, y in zip(weights, outputs, strict=True)]
            )

        return total

    tensors = [value.detach() for value in inputs if _counts(value)]
    every = tuple(range(len(tensors)))
    routes: dict[str, Callable[..., Any]] = {
        "the gradient": torch.func.grad,
        "reverse-over-reverse": _reverse,
    }
    if forward_mode:
        routes["forward-over-reverse"] = torch.func.hessian
    for route, transform in routes.items():
        ours = _tree.leaves(transform(projection(function), every)(*tensors))
        theirs = _tree.leaves(transform(projection(reference), every)(*tensors))
        for a, b in zip(ours, theirs, strict=True):
            tolerance = TOLERANCES[b.dtype]._asdict()
            torch.testing.assert_close(a, b, **tolerance, msg=_prefix(route))


def _prefix(route: str) -> Callable[[str], str]:
    return lambda text: f"{route}: {text}"


def _reverse(function: Callable[..., Tensor], every: tuple[int, ...]) -> Callable[..., Any]:
    return torch.func.jacrev(torch.func.grad(function, every), every)


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
