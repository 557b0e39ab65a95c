"""Products J^T M J v at one point: generalised Gauss-Newton and Fisher matrices.

J is the Jacobian of a model's outputs by its parameters, M a symmetric matrix on the outputs: the
Hessian of the criterion, or the Fisher matrix of the distribution that the outputs stand for.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError

from hoglib._core import finite_differences, pytree, torch_internals, validation
from hoglib._core.autograd import (
    Vector,
    fresh_leaves,
    materialize_grads,
    translate_errors,
    without_graph,
)
from hoglib._core.gradient_graph import check_custom_functions, graph_summary, warn_detached
from hoglib._core.tolerances import TOLERANCES
from hoglib._core.torch_modes import value_checks_on
from hoglib.curvature.routes import (
    Call,
    LinearMap,
    forward_over_reverse,
    no_forward_mode,
    reverse_over_reverse,
)
from hoglib.errors import ArgumentTypeError, NoSecondDerivative, UnsupportedError

Metric = Callable[[Vector, bool], Vector]


class CompositeLoss:
    """A loss in its two halves, at one batch: the outputs of leaves, and the criterion of outputs."""

    def __init__(
        self,
        loss: Any,
        params_of: Callable[[Vector], Any],
        batch: Any,
        metric: Callable[["CompositeLoss", Vector, Call], Metric],
    ) -> None:
        self.loss, self.batch = loss, batch
        self._params_of, self._metric = params_of, metric
        self.outputs: Any = None  # as the model gave them last

    def floats(self, leaves: Vector) -> Vector:
        """The floating-point tensors among the outputs; the others are constants."""
        self.outputs = self.loss.outputs(self._params_of(leaves), self.batch)
        if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in self._flat):
            raise ArgumentTypeError(
                "loss.outputs(params, batch): expected real outputs, got complex ones; give their "
                "real view, `torch.view_as_real`."
            )
        return [self._flat[i] for i in self._which]

    @property
    def _flat(self) -> list[Any]:
        return pytree.leaves(self.outputs)

    @property
    def _which(self) -> list[int]:
        return [
            i
            for i, leaf in enumerate(self._flat)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]

    def floats_alone(self, leaves: Vector) -> Vector:
        """The same without a graph."""
        found: Vector = []

        def run() -> Tensor:
            found[:] = self.floats(leaves)
            _depends_on_params(found)
            return found[0]

        without_graph(run)
        return [y.detach() for y in found]

    def with_floats(self, values: Any) -> Any:
        """The outputs with other values for their floating-point tensors."""
        flat, structure = pytree.flatten(self.outputs)
        for i, value in zip(self._which, values, strict=True):
            flat[i] = value
        return pytree.unflatten(flat, structure)

    def criterion(self, *values: Tensor) -> Tensor:
        # copies, because a criterion may work in place, which the leaves of a graph do not bear
        outputs = self.with_floats([y.clone() for y in values])
        value = self.loss.criterion(outputs, self.batch)
        return validation.scalar("criterion(outputs, targets)", value)

    def metric(self, ys: Vector, call: Call) -> Metric:
        return self._metric(self, ys, call)

    def value(self, ys: Vector, call: Call) -> Tensor:
        if call.create_graph:
            return self.criterion(*ys)
        return without_graph(lambda: self.criterion(*ys))


def criterion_hessian(split: CompositeLoss, ys: Vector, call: Call) -> Metric:
    """M = d^2 criterion / d outputs^2."""
    inside = torch_internals.transforms_active()
    at = (forward_over_reverse if inside else reverse_over_reverse)(split.criterion, ys, call)
    return lambda u, keep: at.apply(u, keep)[1]


def in_reverse(split: CompositeLoss, leaves: Vector, call: Call) -> LinearMap:
    """J v as the derivative of J^T u by u, without any forward mode; the graphs are kept."""
    own = fresh_leaves(leaves, call.create_graph)
    every = split.floats(own)
    depends = [i for i, y in enumerate(every) if y.requires_grad]
    ys = [every[i] for i in depends]
    _depends_on_params(ys)
    graph = graph_summary(ys)
    check_custom_functions(graph, call.what)
    us = [torch.ones_like(y, requires_grad=True) for y in ys]
    with translate_errors(call.what), warn_detached(graph, call.what):
        by_u = torch.autograd.grad(ys, own, us, create_graph=True, allow_unused=True)
    if any(part is not None and not part.requires_grad for part in by_u):
        raise _lost(call)  # J^T u is linear in u: a part without a graph has lost it
    used = [i for i, part in enumerate(by_u) if part is not None]
    parts = [part for part in by_u if part is not None]
    metric, value = split.metric(every, call), split.value(every, call)

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        again = {"retain_graph": keep or call.create_graph, "create_graph": call.create_graph}
        with translate_errors(call.what):
            along = torch.autograd.grad(
                parts, us, [vector[i] for i in used], allow_unused=True, **again
            )
        tangents = [torch.zeros_like(y) for y in every]
        for i, part in zip(depends, along, strict=True):
            tangents[i] = tangents[i] if part is None else part
        weighted = metric(tangents, keep)
        product = _transposed(ys, own, [weighted[i] for i in depends], call, keep)
        if not _adjoint(vector, product, tangents, weighted):
            raise _lost(call)
        return value, product

    unused = tuple(i for i, part in enumerate(by_u) if part is None)
    return LinearMap(apply, tuple(parts), unused)


def _adjoint(vector: Vector, product: Vector, tangents: Vector, weighted: Vector) -> bool:
    """<v, J^T w> = <J v, w>, unless either has lost a part; it costs two inner products."""
    if not value_checks_on():
        return True
    pairs = [
        [(a.detach(), b.detach()) for a, b in zip(*sides, strict=True)]
        for sides in ((vector, product), (tangents, weighted))
    ]
    one, other = (sum(float((a * b).sum()) for a, b in side) for side in pairs)
    lengths = [
        float(pytree.norm([a for a, _ in side]) * pytree.norm([b for _, b in side]))
        for side in pairs
    ]
    size = sum(float((a * b).abs().sum()) for side in pairs for a, b in side)
    dtypes = {x.dtype for side in pairs for pair in side for x in pair}
    rtol = max(TOLERANCES[dtype].rtol for dtype in dtypes)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if not isfinite(one + other):
        return True  # which is told of elsewhere
    rounding = rtol * size + 100 * eps * max(lengths)
    return abs(one - other) <= rounding


def _lost(call: Call) -> Exception:
    return NoSecondDerivative(
        f"{call.what}(mode='reverse'): expected a backward that can be differentiated, got one whose "
        "gradient has lost its graph: it runs under no_grad, detaches, or leaves torch. "
        "`hoglib.verify` of the custom Functions in the model names the line; mode='forward' does "
        "without, where they have a jvp."
    )


def in_forward(split: CompositeLoss, leaves: Vector, call: Call) -> LinearMap:
    """J v in forward mode, in one run with the outputs; nothing is kept between products."""

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        own = fresh_leaves(leaves, call.create_graph)
        try:
            every, tangents = _with_tangents(split, own, vector)
        except (RuntimeError, NotImplementedError) as error:
            raise no_forward_mode(call.what, "mode='forward'", error) from error
        if not call.create_graph:
            tangents = [t.detach() for t in tangents]
        depends = [i for i, y in enumerate(every) if y.requires_grad]
        _depends_on_params([every[i] for i in depends])
        check_custom_functions(graph_summary(every[i] for i in depends), call.what)
        weighted = split.metric(every, call)(tangents, False)
        ys, us = [every[i] for i in depends], [weighted[i] for i in depends]
        try:
            product = _transposed(ys, own, us, call, False)
        except CheckpointError as error:  # what is run again has no tangents
            raise UnsupportedError(
                f"{call.what}(mode='forward'): expected no checkpoint in the model, got one; use "
                "mode='reverse'."
            ) from error
        if not _adjoint(vector, product, tangents, weighted):
            raise UnsupportedError(
                f"{call.what}(mode='forward'): expected tangents and gradients that agree, <w, J v> = "
                "<J^T w, v>, got others: scripted code loses tangents, a Function has a wrong jvp, or "
                "torch's gradient is by convention not the derivative (padding_idx). Use "
                "mode='reverse'."
            )
        return split.value(every, call), product

    return LinearMap(apply)


def _with_tangents(split: CompositeLoss, own: Vector, vector: Vector) -> tuple[Vector, Vector]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, v) for p, v in zip(own, vector, strict=True)]
        pairs = [forward_ad.unpack_dual(y) for y in split.floats(duals)]
        return [y for y, _ in pairs], [torch.zeros_like(y) if t is None else t for y, t in pairs]


def in_transforms(split: CompositeLoss, leaves: Vector, call: Call) -> LinearMap:
    """The same by torch.func, inside of its transforms."""

    def outputs(*own: Tensor) -> tuple[Tensor, ...]:
        return tuple(split.floats(list(own)))

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        pulled_back: Any = torch.func.vjp(outputs, *leaves)
        pushed: Any = torch.func.jvp(outputs, tuple(leaves), tuple(vector))
        (every, transpose), (_, tangents) = pulled_back, pushed
        weighted = split.metric(list(every), call)(list(tangents), False)
        return split.criterion(*every), list(transpose(tuple(weighted)))

    return LinearMap(apply)


def by_differences(split: CompositeLoss, leaves: Vector, call: Call) -> LinearMap:
    """J v by differences of the outputs, J^T by ordinary backward."""

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        tangents = finite_differences.directional_derivative(split.floats_alone, leaves, vector)
        own = fresh_leaves(leaves, False)
        every = split.floats(own)
        depends = [i for i, y in enumerate(every) if y.requires_grad]
        _depends_on_params([every[i] for i in depends])
        weighted = split.metric([y.detach() for y in every], call)(tangents, False)
        ys, us = [every[i] for i in depends], [weighted[i] for i in depends]
        return split.value(every, call), _transposed(ys, own, us, call, False)

    return LinearMap(apply)


def hessian_by_differences(split: CompositeLoss, ys: Vector, call: Call) -> Metric:
    """M = d^2 criterion / d outputs^2, by differences of the criterion's gradient."""
    gradient: Callable[[Vector], Vector] = finite_differences.gradient_function(split.criterion)
    return lambda u, keep: finite_differences.directional_derivative(gradient, ys, u)


def _transposed(ys: Vector, own: Vector, us: Vector, call: Call, keep: bool) -> Vector:
    """J^T u."""
    with translate_errors(call.what):
        parts: Any = torch.autograd.grad(
            ys,
            own,
            us,
            retain_graph=keep or call.create_graph,
            create_graph=call.create_graph,
            allow_unused=True,
        )
    return materialize_grads(list(parts), own)


def _depends_on_params(ys: Vector) -> None:
    if not ys:
        raise NoSecondDerivative(
            "loss.outputs(params, batch): expected outputs that depend on params, got none that do; "
            "look for .detach(), .item(), .data or a torch.no_grad() in the model, for a loss that "
            "uses the model's own parameters instead of the params it is given, and for outputs in an "
            "object of your own (give a tensor, a tuple or a dict, for instance by forward=)."
        )
