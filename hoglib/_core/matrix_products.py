"""Matrix products by the faster of the two libraries that torch has on a CPU.

`torch.mm` calls MKL (or another BLAS); torch also contains oneDNN. Which one is faster depends on the
processor and the sizes: on some processors oneDNN takes half of the time for large matrices, on others
both take the same time, and MKL is faster for small matrices on all. Both are timed once per machine
for classes of sizes, and the times are cached on disk. The choice then depends on shapes only, so a
resumed run computes the same numbers.

HOGLIB_ONEDNN=off disables oneDNN, as does `torch.backends.mkldnn.enabled = False`; `on` uses it for all
but small matrices, without timing; `auto` is the default. Without oneDNN in torch this module has no
effect.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib._core import torch_internals, validation
from hoglib._core.timed_products import SIZES, Class, Times, class_of, kept

SWITCH = "HOGLIB_ONEDNN"
SMALLEST = SIZES[0] // 2  # the smallest size of a class
SAVED = 5e-5  # seconds that oneDNN must save per product
IN_GRAPHS = 1.05  # the speedup that is required in graphs
IN_FUNCTIONS = 1.25  # and outside of graphs, where it needs a Function in Python
_PLAIN = (Tensor, torch.nn.Parameter)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, with every derivative that `torch.nn.functional.linear` has.

    Shapes: x [..., in], weight [out, in], bias [out] or None.
    """
    y = faster_affine(x, weight, bias)
    return F.linear(x, weight, bias) if y is None else y


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B, with every derivative that `torch.matmul` has, and its shapes."""
    y = faster_product(a, b)
    return a @ b if y is None else y


def faster_affine(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """x W^T + b by oneDNN, or None if oneDNN is not chosen; accepts any arguments."""
    rows = _large(x, weight)
    if rows is None or not _fits(rows, weight, bias):
        return None
    y = _differentiable(rows, weight.t(), bias)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], len(weight))


def faster_product(a: Any, b: Any) -> Tensor | None:
    """A B by oneDNN, or None if oneDNN is not chosen; accepts any arguments."""
    rows = _large(a, b)
    if rows is None or not _fits(rows, b.t()):
        return None
    y = _differentiable(rows, b, None)
    return y if a.dim() == 2 else y.reshape(*a.shape[:-1], b.shape[1])


def chosen(m: int, k: int, n: int, columns: bool, gain: float = IN_GRAPHS) -> bool:
    """Whether oneDNN is chosen for [m, k] times [k, n] in float32; columns: column-major first
    factor."""
    if min(m, k, n) < SMALLEST:
        return False
    how = _way()
    if how == "off":
        return False
    return how == "on" or class_of(m, k, n, columns) in faster(gain)


@cache
def faster(gain: float) -> frozenset[Class]:
    """The classes in which oneDNN has at least this speedup on this machine; times them if needed."""
    return frozenset(of for of, times in _times().items() if is_faster(times, gain))


@cache
def _times() -> dict[Class, Times]:
    return kept()


def state() -> str:
    """The choices that a compiled graph depends on, as text."""
    how = _way()
    return str(sorted(faster(IN_GRAPHS))) if how == "auto" else how


def facts() -> dict[str, Any]:
    """Facts for `hoglib env`: the setting, and the number of classes in which oneDNN is faster."""
    known: dict[str, Any] = {"switch": switch(), "available": torch_internals.onednn_available()}
    if _way() == "auto":
        times, graphs, functions = _times(), faster(IN_GRAPHS), faster(IN_FUNCTIONS)
        known |= {"classes": len(times), "in_graphs": len(graphs), "in_functions": len(functions)}
        known["most"] = max((times[of].mm / times[of].onednn for of in graphs), default=None)
    return known


def is_faster(times: Times, gain: float) -> bool:
    return times.mm >= gain * times.onednn and times.mm - times.onednn >= SAVED


def forget() -> None:
    """Clears the times in memory, so that the next product reads them again."""
    faster.cache_clear()
    _times.cache_clear()


def switch() -> str:
    """The setting HOGLIB_ONEDNN: off, on or auto."""
    value = os.environ.get(SWITCH, "auto")
    validation.one_of(SWITCH, value, ("auto", "off", "on"))
    return value


def _way() -> str:
    """The setting; off if oneDNN is not available."""
    return (
        switch()
        if torch_internals.onednn_available() and torch_internals.onednn_full_precision()
        else "off"
    )


def _fits(x: Tensor, weight: Tensor, bias: Any = None) -> bool:
    """Whether oneDNN is chosen for x W^T + b of these matrices."""
    if (
        not (torch_internals.onednn_takes(x) and torch_internals.onednn_takes(weight))
        or x.shape[1] != weight.shape[1]
    ):
        return False
    if bias is not None and not (
        type(bias) in _PLAIN and bias.dtype is x.dtype and bias.shape == weight.shape[:1]
    ):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    columns = not torch_internals.by_rows(x)
    return chosen(x.shape[0], x.shape[1], len(weight), columns, IN_FUNCTIONS)


def _large(x: Any, matrix: Any) -> Tensor | None:
    """x as a matrix of rows, without a copy; None if one of both is small or not a plain tensor.

    None inside transforms and traces, which have rules for torch's operations.
    """
    if type(x) not in _PLAIN or type(matrix) not in _PLAIN or x.is_nested or matrix.is_nested:
        return None
    if (
        torch_internals.transforms_active()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
    ):
        return None
    shape = x.shape
    if matrix.dim() != 2 or len(shape) < 2 or min(shape[-1], *matrix.shape) < SMALLEST:
        return None
    if len(shape) == 2:
        found: Tensor = x
        return found
    return x.reshape(shape[:-1].numel(), shape[-1]) if x.is_contiguous() else None


def _differentiable(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    given = (a, b) if bias is None else (a, b, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        result: Tensor = _Product.apply(a, b, bias)
        return result
    return torch_internals.onednn_affine(a, b.t(), bias)


class _Product(torch.autograd.Function):
    """A B + bias and its derivatives, which are products again, each by the faster library.

    The gradient with respect to a factor has the layout of the factor, as in torch: sums of matrices in
    different layouts take up to four times as long. It has no `setup_context`, which takes three times
    as long, because it never runs inside a transform of torch.func.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch_internals.onednn_affine(a, b.t(), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        by_a, by_b, by_bias = ctx.needs_input_grad
        grad_a = grad_b = None
        if by_a:
            grad_a = product(g, b.t()) if torch_internals.by_rows(a) else product(b, g.t()).t()
        if by_b:
            grad_b = product(a.t(), g) if torch_internals.by_rows(b) else product(g.t(), a).t()
        return grad_a, grad_b, g.sum(0) if by_bias else None
