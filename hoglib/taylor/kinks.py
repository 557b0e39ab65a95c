"""Kinks of a function that is differentiated twice or more.

A Taylor rule gives a kink torch's first derivative, and zero as every higher one. Two warnings follow:
func is piecewise linear, so that all higher derivatives are zero; or a point lies exactly at a kink,
where higher derivatives do not exist.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hoglib._core.runtime.source_location import SourceLine, is_user_file, warn_once
from hoglib._core.torch_api import torch_internals
from hoglib.taylor.series import Algebra, Biharmonic, Call, MultiIndex, Parts, Univariate

SMOOTH = "a smooth activation, such as tanh, SiLU, GELU or sine"
COMPARISONS = {"gt", "lt", "ge", "le"}
MASKED = {"where.self", "masked_fill.Scalar", "masked_fill.Tensor", "mul.Tensor"}
_SHOWN = 3  # operations in a message


class Kink(NamedTuple):
    """A piecewise linear operation, and where it ran."""

    operation: str  # torch's name, with the module's class around it: "ReLU (relu)"
    line: SourceLine | None  # the user's line

    def __str__(self) -> str:
        return f"{self.operation} at {self.line}" if self.line else self.operation


def _at_limits(x: Tensor, low: object = None, high: object = None) -> Tensor:
    at = torch.zeros_like(x, dtype=torch.bool)
    for limit in (low, high):
        if limit is not None:
            at = at | (x == limit)
    return at


# Operation -> a mask of the elements exactly at a kink; None: such elements are not looked for.
KINKS: dict[str, Callable[..., Tensor] | None] = {
    **dict.fromkeys(("relu", "leaky_relu", "abs"), lambda x, *_: x == 0),
    "threshold": lambda x, threshold, value: x == threshold,
    "hardtanh": lambda x, low=-1, high=1: _at_limits(x, low, high),
    **dict.fromkeys(("hardshrink", "softshrink"), lambda x, width=0.5: x.abs() == width),
    "clamp": _at_limits,
    "clamp_min": lambda x, low: _at_limits(x, low),
    "clamp_max": lambda x, high: _at_limits(x, None, high),
    **dict.fromkeys(("maximum", "minimum"), lambda a, b: a == b),
    **dict.fromkeys(
        (
            "_prelu_kernel", "hardsigmoid", "rrelu_with_noise", "fmax", "fmin", "amax", "amin", "max",
            "min", "median", "nanmedian", "sort", "topk", "kthvalue", "cummax", "cummin",
            "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
        )
    ),
}  # fmt: skip


@final
class Kinks:
    """Collects the kinks that coefficients pass while a function runs."""

    def __init__(self) -> None:
        self.passed: dict[Kink, None] = {}  # piecewise linear operations that coefficients passed
        self.crossed: dict[Kink, None] = {}  # a point lies on the kink, and its path leaves it
        self.even = False  # |x| or a norm was crossed, and |x|^2, a function of it, is smooth
        self.not_finite: Kink | None = None  # the first operation with infinite or NaN coefficients
        self._masks = WeakTensorKeyDictionary()  # results of comparing tensors with coefficients

    def record_mask(self, name: str, out: object) -> None:
        """Note the result of a comparison: a mask that depends on the point."""
        if name in COMPARISONS and isinstance(out, Tensor):
            self._masks[out] = name

    def record_derived_mask(self, args: tuple[Any, ...], out: object) -> None:
        """Note a function of masks alone, such as `mask.float()`."""
        if self._masks and isinstance(out, Tensor) and self._from_mask(args):
            self._masks[out] = True

    def _from_mask(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(x, Tensor) and x in self._masks for x in args)

    def record(self, names: tuple[str, str], call: Call, inside_composite: bool) -> None:
        """Note an operation if it has a kink.

        inside_composite: it is part of a decomposition; then only an absolute value or a norm is noted,
        if a point lies exactly at zero.
        """
        name, packet = names
        if inside_composite and packet not in ("linalg_vector_norm", "abs"):
            return
        if packet == "linalg_vector_norm":
            self._see_norm(call)
        elif packet not in KINKS:
            if name in MASKED and self._masks and self._from_mask(call.args):
                self.passed[kink_here(f"a product or selection by a comparison ({packet})")] = None
        else:
            kink, elements = kink_here(packet), KINKS[packet]
            if not inside_composite:
                self.passed[kink] = None
            if elements is not None and not torch_internals.tracing():
                at = elements(*call.args, **call.kwargs)
                if bool(at.any()) and _coefficient_moves(call, at):
                    self.crossed[kink] = None
                    self.even |= packet == "abs"

    def _see_norm(self, call: Call) -> None:
        """Note a Euclidean norm of zeros, if the path moves away from zero."""
        _, _, dims, keep = call.norm_arguments()
        if torch_internals.tracing() or bool(call.out.all()):
            return
        zero = call.out == 0
        for d in () if keep else dims:
            zero = zero.unsqueeze(d)
        if _coefficient_moves(call, zero):
            self.crossed[kink_here("linalg.vector_norm")] = None
            self.even = True

    def check_finite(self, where: Kink, outputs: Sequence[Parts | None]) -> None:
        """Note `where` if it is the first operation with an infinite or NaN coefficient."""
        known = [part for parts in outputs for part in parts or [] if part is not None]
        if self.not_finite is None and not all(bool(part.isfinite().all()) for part in known):
            self.not_finite = where


def _coefficient_moves(call: Call, at: Tensor) -> bool:
    """Whether a coefficient of the operands is nonzero at an element of the mask `at`."""
    for x in call.args[:2]:
        for part in call.parts(x) or []:
            if part is not None and bool(((part != 0) & at).any()):
                return True
    return False


def kink_here(operation: str) -> Kink:
    """The running operation as a Kink: named by the torch module around it, at the user's line."""
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_user_file(file):
            return Kink(operation, SourceLine(file, line))
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and "(" not in operation:
            operation = f"{type(module).__name__} ({operation})"
    return Kink(operation, None)


def warn_if_linear(caller: str, kinks: Kinks, algebra: Algebra, series: list[Parts | None]) -> None:
    """Warn if kinks were passed and no output has a coefficient of order 2 or above."""
    if algebra.order < 2 or not kinks.passed:
        return
    for parts in series:
        for part, order in zip(parts or [], algebra.orders, strict=False):
            if part is not None and order > 1:
                return
    warn_once(
        f"{caller}: expected a func with second derivatives, got one that is piecewise linear, "
        f"whose derivatives of order 2 and above are zero: {_text(kinks.passed)}. Use {SMOOTH}."
    )


def without_derivative(caller: str, order: int, kinks: Iterable[Kink]) -> str:
    """The text of the warning about points exactly at a kink."""
    return (
        f"{caller}: expected points where func has a derivative of order {order}, got some exactly "
        f"at a kink: {_text(kinks)}. Its result has torch's first derivative there and zeros as the "
        "higher ones. Move the points or use a smoother function; where that is what you want, pass "
        "message='.*exactly at a kink' to warnings.filterwarnings('ignore')."
    )


def _text(kinks: Iterable[Kink]) -> str:
    shown = [str(kink) for kink in kinks]
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more


def along_paths(algebra: Algebra, parts: Sequence[Parts]) -> tuple[Univariate, list[Parts]]:
    """An algebra of single paths, and seeds for it, that have kinks where the given algebra has them.

    One-sided derivatives are defined along a path, so mixed derivatives are examined along the axes
    and the diagonal between them.
    """
    order = algebra.order
    if isinstance(algebra, Univariate):
        return Univariate(order, algebra.leads[0]), list(parts)
    paths = []
    for own in parts:
        if isinstance(algebra, Biharmonic):
            first = own[0]
        else:
            assert isinstance(algebra, MultiIndex)
            units = [p for p, k in zip(own, algebra.orders, strict=True) if k == 1]
            first = torch.stack([p for p in units if p is not None])
        assert first is not None
        # the axes, and their diagonal
        paths.append([torch.cat([first, first.sum(0, keepdim=True)]), *[None] * (order - 1)])
    return Univariate(order, True), paths


def one_sided(call: Call, x: Tensor) -> Tensor:
    """x moved off a kink to the next float, in the path's direction before (side -1) or after it.

    The result has the shape of the coefficients, whose directions may move to different sides.
    """
    sign = call.direction(call.parts(x) or [])
    if sign is None:
        return x
    limit = torch.where(sign == 0, x, sign * torch.inf)
    tiny = torch.where(x == 0, sign * torch.finfo(x.dtype).tiny, 0)
    return torch.nextafter(x.expand(limit.shape), limit) + tiny
