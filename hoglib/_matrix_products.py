"""Products of matrices by the faster of the two libraries that torch has for them on a processor.

`torch.mm` calls MKL (or another BLAS); oneDNN is there as well. Which one is faster depends on the
processor and on the sizes: on some processors oneDNN takes half of the time for large
matrices, on others both are alike, and for small ones MKL is faster everywhere. So both are timed once
a machine, class by class, the times are kept on disk, and from then on the choice follows from shapes
alone: a run that is resumed is the same run.

HOGLIB_ONEDNN=off switches it off, as does `torch.backends.mkldnn.enabled = False`; `on` takes oneDNN
for all but small matrices, without timing; `auto`, the default, is what is described above. Where this
build of torch has no oneDNN nothing of it happens.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib import _arguments as arguments
from hoglib import _functorch, _onednn
from hoglib._timed_products import SIZES, Class, Times, class_of, kept

SWITCH = "HOGLIB_ONEDNN"
SMALLEST = SIZES[0] // 2  # the classes begin here
GAIN, SAVED = 1.05, 5e-5  # times as fast, and seconds less, or it is not worth other roundings
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
    """x W^T + b by oneDNN, or None where that is not chosen; of anything at all."""
    rows = _large(x, weight)
    if rows is None or not _fits(rows, weight, bias):
        return None
    y = _differentiable(rows, weight, bias)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], len(weight))


def faster_product(a: Any, b: Any) -> Tensor | None:
    """A B by oneDNN, or None where that is not chosen; of anything at all."""
    rows = _large(a, b)
    if rows is None or not _fits(rows, b.t()):
        return None
    y = _differentiable(rows, b.t(), None)
    return y if a.dim() == 2 else y.reshape(*a.shape[:-1], b.shape[1])


def chosen(m: int, k: int, n: int, columns: bool) -> bool:
    """Whether oneDNN takes a float32 product [m, k] times [k, n]; columns: of the first factor."""
    if min(m, k, n) < SMALLEST:
        return False
    how = _way()
    if how == "off":
        return False
    return how == "on" or class_of(m, k, n, columns) in faster()


@cache
def faster() -> frozenset[Class]:
    """The classes in which oneDNN is clearly faster on this machine, which are timed at need."""
    return frozenset(of for of, times in kept().items() if is_faster(times))


def state() -> str:
    """What a compiled graph depends on: two that differ in this have other products in them."""
    how = _way()
    return str(sorted(faster())) if how == "auto" else how


def facts() -> dict[str, Any]:
    """For `hoglib env`: what the switch says, and in how many classes oneDNN is clearly faster."""
    known: dict[str, Any] = {"switch": switch(), "available": _onednn.available()}
    if _way() == "auto":
        times = kept()
        ratios = [of.mm / of.onednn for of in times.values() if is_faster(of)]
        known |= {"classes": len(times), "faster": len(ratios), "most": max(ratios, default=None)}
    return known


def is_faster(times: Times) -> bool:
    return times.mm >= GAIN * times.onednn and times.mm - times.onednn >= SAVED


def forget() -> None:
    """The next product reads the times again."""
    faster.cache_clear()


def switch() -> str:
    """off, on or auto."""
    value = os.environ.get(SWITCH, "auto")
    arguments.one_of(SWITCH, value, ("auto", "off", "on"))
    return value


def _way() -> str:
    """The switch, off where there is no oneDNN to be taken."""
    return switch() if _onednn.available() and _onednn.full_precision() else "off"


def _fits(x: Tensor, weight: Tensor, bias: Any = None) -> bool:
    """Whether oneDNN takes x W^T + b of these matrices."""
    if not (_onednn.takes(x) and _onednn.takes(weight)) or x.shape[1] != weight.shape[1]:
        return False
    if bias is not None and not (
        type(bias) in _PLAIN and bias.dtype is x.dtype and bias.shape == weight.shape[:1]
    ):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return chosen(x.shape[0], x.shape[1], len(weight), columns=not _onednn.by_rows(x))


def _large(x: Any, matrix: Any) -> Tensor | None:
    """x as rows, without a copy, where both are plain tensors large enough to be looked at.

    Not inside of transforms and traces, whose own rules are for torch's operations.
    """
    if type(x) not in _PLAIN or type(matrix) not in _PLAIN or x.is_nested or matrix.is_nested:
        return None
    if _functorch.transforms_active() or _functorch.forward_mode_active() or _functorch.tracing():
        return None
    shape = x.shape
    if matrix.dim() != 2 or len(shape) < 2 or min(shape[-1], *matrix.shape) < SMALLEST:
        return None
    if len(shape) == 2:
        found: Tensor = x
        return found
    return x.reshape(shape[:-1].numel(), shape[-1]) if x.is_contiguous() else None


def _differentiable(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        result: Tensor = _Affine.apply(x, weight, bias)
        return result
    return _onednn.affine(x, weight, bias)


class _Affine(torch.autograd.Function):
    """The product with its derivatives, which are products again, each by what is faster for it.

    Without `setup_context`, which takes three times as long: no transform of torch.func sees it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn.affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            product(g, weight) if by_x else None,
            product(g.t(), x) if by_weight else None,
            g.sum(0) if by_bias else None,
        )
