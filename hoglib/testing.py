"""Assertions for tests of code that is differentiated twice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._call import Call
from hoglib._double_check import DoubleCheck
from hoglib._recording import recording


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
    inputs: Any,
    *,
    reference: Callable[..., Any] | None = None,
    forward_mode: bool | None = None,
    vmap: bool | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-4,
) -> None:
    r"""Fail unless the first and second derivatives of a function are right.

    fn: a function, `MyFunction.apply`, the Function class itself, or a module; inputs: its arguments,
    or the only one. Derivatives are taken by the floating-point tensors anywhere in the inputs (only
    by those that require grad, if any does) and by the trainable parameters of a module; outputs
    that do not require grad are left alone. All floating-point numbers are checked in float64
    copies: tensors that fn holds itself, other than a module's, must be float64 too.

    At the inputs and at a point beside them (within 2 %, or within 0.01 of a zero), the gradient
    and the gradient of the gradient are compared with central differences in reverse mode; in
    forward mode and forward-over-reverse with forward_mode; in reverse-over-forward where a custom
    Function is in the graph; under vmap, values and gradients, with vmap. Reverse mode is checked
    again for each input alone, for non-contiguous and expanded inputs and gradients, and for
    constants of lower precision. With a reference, a function of plain torch operations, values,
    gradients and second derivatives are also compared with its own.

    forward_mode and vmap: None means where it is offered. A custom Function offers forward mode by
    its jvp, vmap by setup_context with a vmap rule; anything else is checked in forward mode and not
    under vmap. forward_mode=True asks for reverse-over-forward of plain torch operations as well,
    which torch has wrong through layer_norm, batch_norm and linalg.solve.
    A derivative d is right within rtol |d| + atol min(1, largest |d| of that input and output), and
    what rounding leaves of central differences. Kinks (relu at 0) must not lie within 1e-6 of an
    input.

    Raises AssertionError that says which derivative is wrong, by which input, and by how much;
    ValueError if there is nothing to differentiate by.
    """
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    devices = {x.device for x in _tree.leaves(given) if isinstance(x, Tensor) and x.is_cuda}
    with recording(), torch.random.fork_rng(devices=list(devices)):
        call = Call(fn, given)
        _something_to_differentiate_by(call)
        check = DoubleCheck(call, forward_mode, vmap, atol, rtol)
        check.precision()
        check.derivatives(call.point)
        beside = check.derivatives(check.beside())
        check.each_input_alone(beside)
        check.layouts(beside)
        check.under_vmap(beside)
        if reference is not None:
            plain = Call(arguments.function("reference", reference), given)
            for x in (call.point, beside.x):
                check.agreement(plain, x, *TOLERANCES[torch.float64])


def _something_to_differentiate_by(call: Call) -> None:
    if not call.point:
        raise arguments.WrongValue(
            "inputs: expected at least one floating-point or complex tensor, got none; there is "
            "nothing to differentiate by."
        )
    for name, x in zip(call.names, call.point, strict=True):
        if not x.numel():
            raise arguments.WrongValue(
                f"{name}: expected at least one element, got shape {tuple(x.shape)}; there is "
                "nothing to differentiate by. Give it a size."
            )
