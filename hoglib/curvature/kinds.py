"""The three curvature matrices, each as a linear map at one point, by the mode that is asked for.

The products and the operators go through here: a matrix is made once, and put at points.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import finite_differences, torch_internals, validation
from hoglib._core.autograd import Vector, without_graph
from hoglib.curvature import gauss_newton
from hoglib.curvature.fisher_metric import fisher_metric
from hoglib.curvature.gauss_newton import CompositeLoss
from hoglib.curvature.routes import (
    Call,
    LinearMap,
    cannot_be_strict,
    forward_over_reverse,
    reverse_over_reverse,
)
from hoglib.errors import ArgumentTypeError, UnsupportedError

DIFFERENCES = "finite-differences"
ParamsOf = Callable[[Vector], Any]


class CurvatureKind(ABC):
    """A matrix of second derivatives of a loss, before it is known where."""

    modes: tuple[str, ...]
    draws = False  # whether random numbers are drawn for each batch

    def __init__(self, mode: str) -> None:
        self.mode = validation.one_of("mode", mode, ["auto", *self.modes, DIFFERENCES])

    @abstractmethod
    def at(
        self, func: Any, params_of: ParamsOf, args: Any, leaves: Vector, call: Call, several: bool
    ) -> LinearMap:
        """The matrix of `func(params_of(leaves), *args)`, for one vector or for `several`."""

    def key(self) -> tuple[Any, ...]:
        """Equal for two matrices that are the same of every function."""
        return type(self), self.mode

    def check(self, func: Any) -> Any:
        return validation.function("func", func)

    def in_double(self, func: Any) -> Any:
        """The function in float64, of float64 leaves and arguments; the user's own is left alone."""
        if isinstance(func, nn.Module):
            return copy.deepcopy(func).double()
        return func.double() if hasattr(func, "double") else func


class HessianKind(CurvatureKind):
    modes = ("reverse-over-reverse", "forward-over-reverse")

    def at(
        self, func: Any, params_of: ParamsOf, args: Any, leaves: Vector, call: Call, several: bool
    ) -> LinearMap:
        def of_leaves(*values: Tensor) -> Tensor:
            value = func(params_of(list(values)), *args)
            return validation.scalar("func(params, *args)", value)

        if self.mode == DIFFERENCES:
            return _differences_of(of_leaves, leaves, call)
        if self._chosen(call.what) == "reverse-over-reverse":
            return reverse_over_reverse(of_leaves, leaves, call)
        return forward_over_reverse(of_leaves, leaves, call)

    def _chosen(self, what: str) -> str:
        """Reverse-over-reverse, but inside torch.func transforms."""
        if not torch_internals.transforms_active():
            return "reverse-over-reverse" if self.mode == "auto" else self.mode
        if self.mode == "reverse-over-reverse":
            raise UnsupportedError(
                f"{what}: expected mode='auto' or 'forward-over-reverse' inside torch.func transforms, "
                "got 'reverse-over-reverse', whose vmap is silently wrong through normalisation "
                "layers."
            )
        return "forward-over-reverse"


def _differences_of(func: Callable[..., Tensor], leaves: Vector, call: Call) -> LinearMap:
    """H v by differences of the gradient."""
    cannot_be_strict(call, DIFFERENCES)
    gradient = finite_differences.gradient_function(func)

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        value = without_graph(lambda: func(*leaves))
        return value, finite_differences.directional_derivative(gradient, leaves, vector)

    return LinearMap(apply)


class GaussNewtonKind(CurvatureKind):
    modes = ("forward", "reverse")

    def at(
        self, func: Any, params_of: ParamsOf, args: Any, leaves: Vector, call: Call, several: bool
    ) -> LinearMap:
        split = CompositeLoss(func, params_of, args[0], self.metric)
        if self.mode == DIFFERENCES:
            return gauss_newton.by_differences(split, leaves, call)
        if torch_internals.transforms_active():
            return gauss_newton.in_transforms(split, leaves, call)
        if self.mode == "reverse" or (self.mode == "auto" and several):
            return gauss_newton.in_reverse(split, leaves, call)
        forward = gauss_newton.in_forward(split, leaves, call)
        if self.mode == "forward":
            return forward

        def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
            try:
                return forward.apply(vector, keep)
            except UnsupportedError:  # an operation has no forward mode
                return gauss_newton.in_reverse(split, leaves, call).apply(vector, keep)

        return LinearMap(apply)

    def metric(self, split: CompositeLoss, ys: Vector, call: Call) -> gauss_newton.Metric:
        if self.mode == DIFFERENCES:
            return gauss_newton.hessian_by_differences(split, ys, call)
        return gauss_newton.criterion_hessian(split, ys, call)

    def check(self, func: Any) -> Any:
        for half in ("outputs", "criterion"):
            if not callable(getattr(func, half, None)):
                raise ArgumentTypeError(
                    "loss: expected one from `hoglib.functional_loss(model, criterion)`, or an object "
                    "with .outputs(params, batch) and .criterion(outputs, batch), because the model's "
                    f"outputs are needed by themselves; got {validation.describe(func)}."
                )
        return func


class FisherKind(GaussNewtonKind):
    def __init__(
        self,
        mode: str,
        kind: str,
        likelihood: Any,
        reduction: str,
        num_samples: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(mode)
        self._options: dict[str, Any] = {
            "likelihood": likelihood,
            "reduction": validation.one_of("reduction", reduction, ["mean", "sum"]),
            "num_samples": validation.at_least("num_samples", num_samples, 1),
        }
        self._generator = validation.generator(generator)
        self.seed: int | None = None  # of the draws, in the place of the generator
        self._kind = validation.one_of("kind", kind, ["exact", "mc", "empirical"])
        self.draws = kind == "mc"

    def key(self) -> tuple[Any, ...]:
        return *super().key(), self._kind, *self._options.values()

    def metric(self, split: CompositeLoss, ys: Vector, call: Call) -> gauss_newton.Metric:
        if torch_internals.transforms_active():
            raise UnsupportedError(
                f"{call.what}: expected to run outside of torch.func transforms, got a call inside; "
                "loop over what vmap maps, or use ggn_vp, which the exact Fisher matrix of most "
                "criteria is equal to."
            )
        outputs = split.with_floats([y.detach() for y in ys])
        random = self._generator
        if self.seed is not None:
            random = torch.Generator(ys[0].device).manual_seed(self.seed)
        by = fisher_metric(
            self._kind, split.loss, outputs, split.batch, generator=random, **self._options
        )
        return lambda u, keep: by(u)

    def draw_seed(self) -> int:
        """A seed from the generator."""
        random = self._generator
        where = torch.device("cpu") if random is None else random.device
        return int(torch.randint(2**31, (), generator=random, device=where))
