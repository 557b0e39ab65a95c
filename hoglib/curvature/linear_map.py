"""A curvature matrix at one point as a linear map, the kinds of matrices, and the Hessian."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core import finite_differences, pytree, torch_forward_mode, torch_internals, validation
from hoglib._core.autograd import (
    NOT_DIFFERENTIABLE,
    Vector,
    check_uses_given_params,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    vjp,
)
from hoglib._core.blocks import Remat, check_remat
from hoglib._core.closures import STATE, ClosureWalker
from hoglib._core.gradient_graph import check_custom_functions, graph_bytes, graph_summary
from hoglib._core.sharding import Sharding
from hoglib._core.state import RandomState
from hoglib._core.torch_sharding import wrapped_attributes
from hoglib.errors import ArgumentValueError, HoglibError, NoSecondDerivative, UnsupportedError
from hoglib.verification.entry_points import note_lost_graph

DIFFERENCES = "finite-differences"


class ProductOptions(NamedTuple):
    """The options of products with a curvature matrix, checked."""

    caller: str  # public function or class, named in messages
    create_graph: bool = False
    stand_ins: bool = True
    backend: str = ""  # that compile= names; empty for none
    strict: tuple[str, ...] | None = None  # leaf names; each must have a second derivative
    remat: Remat = False  # blocks of the model that are recomputed

    @property
    def one_graph(self) -> bool:
        """Whether the product is captured as a whole."""
        return bool(self.backend) and self.remat is False


@final
@dataclass(frozen=True)
class BoundLoss:
    """A loss with its other arguments bound: a scalar function of the leaves of its parameters."""

    func: Any
    structure: Any  # of the parameters, as `pytree.flatten` gives it
    args: tuple[Any, ...]
    sharding: Sharding | None = None  # of the leaves, where each process holds a part of them

    def __call__(self, *leaves: Tensor) -> Tensor:
        params = self.params_of(leaves)

        def value() -> Tensor:
            return validation.scalar("func(params, *args)", self.func(params, *self.args))

        return value() if self.sharding is None else self.sharding.mean_of(value)

    def params_of(self, leaves: Sequence[Tensor]) -> Any:
        """The parameters, made of their leaves; whole ones of shards."""
        if self.sharding is not None:
            leaves = self.sharding.gather(leaves)
        return pytree.unflatten(leaves, self.structure)


class LinearMap(NamedTuple):
    """A matrix at one point, known by its products with vectors.

    ``apply(vector, keep_graph)`` returns the loss at the point and the product. Without ``keep_graph``
    it is the last product: the graph is freed.
    """

    apply: Callable[[Vector, bool], tuple[Tensor, Vector]]
    # memory held between products; of a compiled map it is known after the first product
    held_bytes: Callable[[], int] = lambda: 0
    # the leaves that the loss does not depend on; None where that is not known
    unused: Callable[[], tuple[int, ...] | None] = lambda: None
    # whether it is known to be zero, because the gradient does not depend on the leaves
    is_zero: Callable[[], bool] = lambda: False


class CurvatureKind(ABC):
    """A matrix of second derivatives of a loss, before its point is given.

    Kinds are equal where they are the same matrix of every loss, and can be hashed.
    """

    mode: str

    @property
    def random(self) -> bool:
        """Whether random numbers are drawn for each batch."""
        return False

    @property
    def seed(self) -> int:
        """The seed of those random numbers, where there is one."""
        return 0

    @abstractmethod
    def linearize(
        self, loss: BoundLoss, leaves: Vector, options: ProductOptions, several: bool
    ) -> LinearMap:
        """The matrix of a loss at the leaves, for one vector or for `several`."""

    def for_batch(self, number: int) -> "CurvatureKind":
        """The kind for a batch of that number, which decides its random numbers."""
        return self

    def check_loss(self, loss: Any) -> Any:
        return validation.function("func", loss)


def apply_block(linear_map: LinearMap, vectors: Vector, block: bool) -> tuple[Tensor, Vector]:
    """The loss, and the product with one vector or with each column of a block (the last dimension)."""
    if not block:
        return linear_map.apply(vectors, False)
    values, products = [], []
    count = vectors[0].shape[-1]
    for j in range(count):
        # contiguous: matrix products with strided vectors take half as long again
        column = [leaf[..., j].contiguous() for leaf in vectors]
        value, product = linear_map.apply(column, j + 1 < count)
        values.append(value)
        products.append(product)
    return values[0], [torch.stack(parts, -1) for parts in zip(*products, strict=True)]


def checked_options(
    caller: str, kind: CurvatureKind, create_graph: bool, stand_ins: bool, compile: Any,
    remat: Any = False, strict: tuple[str, ...] | None = None,
) -> ProductOptions:  # fmt: skip
    """The options; raises where compile= names a backend for a kind that has no graph, or for a mode
    in which blocks are not compiled."""
    backend = validation.backend("compile", compile)
    if backend and kind.mode == DIFFERENCES:
        raise ArgumentValueError(
            f"{caller}(mode='{DIFFERENCES}', compile=True): expected a mode that differentiates twice, "
            "got finite differences, whose step is chosen by values. Leave out one of the two."
        )
    if backend and kind.random:
        raise UnsupportedError(
            f"{caller}(kind='mc', compile=True): expected a Fisher matrix without random draws, got a "
            "sampled one; a graph cannot draw from a torch.Generator. Use kind='exact', of which it "
            "is an estimate, or compile=False."
        )
    remat = check_remat(remat)
    if backend and remat is not False and kind.mode == "forward":
        raise ArgumentValueError(
            f"{caller}(mode='forward', remat=..., compile=...): expected a mode in which each block's "
            "passes are compiled, got dual tensors. Leave out mode or compile."
        )
    return ProductOptions(caller, create_graph, stand_ins, backend, strict, remat)


def double_loss(loss: Any) -> Any:
    """The loss in float64, for float64 leaves and arguments; the given one is not changed."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    return loss.double() if hasattr(loss, "double") else loss


def no_forward_mode(caller: str, mode: str, error: Exception) -> Exception:
    """What to raise for an error in forward mode: explained, where torch lacks a derivative."""
    words = (
        *NOT_DIFFERENTIABLE,
        "ZeroTensor",
        "jvp",
        "autocast",
        "forward mode AD",
        "functorch transform",
        "view size is not compatible",  # rules that view tangents of any layout
    )
    if isinstance(error, HoglibError) or not any(word in str(error) for word in words):
        return error
    hint = ""
    if "ZeroTensor" in str(error):
        hint = " torch's mse_loss is such an operation: leave stand_ins at True."
    return UnsupportedError(
        f"{caller}(mode='{mode}'): expected operations that torch can differentiate in forward mode, "
        f"got an error from one: {str(error).splitlines()[0]}{hint} Outside of torch.func transforms "
        "use the reverse mode."
    )


def refuse_wrapped_calls(caller: str, func: Any) -> None:
    """Raise for a function that calls, by itself, a module whose hooks gather its parameters."""
    if getattr(func, "model", None) is None and any(
        isinstance(part, nn.Module) and wrapped_attributes(part, mixed_precision=True)
        for found in ClosureWalker(func, STATE).objects
        for part in (found.modules() if isinstance(found, nn.Module) else ())
    ):
        raise UnsupportedError(
            f"{caller}: expected `hoglib.functional_loss(model, criterion, forward=...)` of a "
            "module whose parameters are DTensors, got another function that calls it: its hooks would "
            "gather the module's own parameters."
        )


REVERSE, FORWARD = "reverse-over-reverse", "forward-over-reverse"


@final
@dataclass(frozen=True)
class HessianKind(CurvatureKind):
    """The Hessian of a loss."""

    mode: str = "auto"

    def __post_init__(self) -> None:
        validation.one_of("mode", self.mode, ("auto", REVERSE, FORWARD, DIFFERENCES))

    def linearize(
        self, loss: BoundLoss, leaves: Vector, options: ProductOptions, several: bool
    ) -> LinearMap:
        mode = REVERSE if self.mode == "auto" else self.mode
        if torch_internals.transforms_active() and mode != DIFFERENCES:
            if self.mode == REVERSE:
                raise UnsupportedError(
                    f"{options.caller}: expected mode='auto' or '{FORWARD}' inside torch.func "
                    f"transforms, got '{REVERSE}', whose vmap is silently wrong through normalisation "
                    "layers."
                )
            mode = FORWARD
        if mode == REVERSE:
            return reverse_over_reverse(loss, leaves, options)
        if options.strict is not None:
            raise ArgumentValueError(
                f"{options.caller}(strict=True): expected mode='{REVERSE}', got {mode}, which "
                "cannot tell a missing second derivative from a zero."
            )
        linearize = forward_over_reverse if mode == FORWARD else differences_of_gradient
        return linearize(loss, leaves, options)


def reverse_over_reverse(loss: Any, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v = d <grad f, v> / d p; the graph of the gradient is kept from one v to the next."""
    caller, create_graph = options.caller, options.create_graph
    found = gradient_with_graph(loss, leaves, caller, create_graph)
    note_lost_graph(found)
    value, own, gradient, graph = found

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        with graph.backward_modes():
            product = vjp(gradient, own, vector, caller, keep_graph, create_graph, graph)
            if options.strict is not None:
                _check_strict(caller, options.strict, product)
            return value, materialize_grads(product, own)

    def held_bytes() -> int:
        return graph_bytes([g for g in gradient if g is not None and g.requires_grad])

    def unused() -> tuple[int, ...]:
        return tuple(i for i, g in enumerate(gradient) if g is None)

    def is_zero() -> bool:
        return not any(g is not None and g.requires_grad for g in gradient)

    return LinearMap(apply, held_bytes, unused, is_zero)


def forward_over_reverse(loss: Any, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v = d grad f(p + e v) / d e in forward mode; nothing is kept between products."""
    at = leaves if options.create_graph else [leaf.detach() for leaf in leaves]
    inside = torch_internals.transforms_active()
    # Where the product has no graph, its gradient is not kept beside it.
    alone = not (options.create_graph or inside or torch_internals.tracing())

    def checked(*own: Tensor) -> Tensor:
        if alone:
            torch_forward_mode.keep_tangents(own)
        value: Tensor = loss(*own)
        check_custom_functions(graph_summary(value), options.caller)
        return value

    def value_and_gradient(with_graph: bool, *own: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        value_and_vjp: Any = torch.func.vjp(checked, *own)
        value, pull = value_and_vjp
        one = torch.ones_like(value)
        # Without a graph of the product, the one beneath is freed while the gradient is computed.
        return value, pull(one, retain_graph=with_graph and not alone, create_graph=with_graph)

    def in_forward_mode(with_graph: bool, vector: Vector) -> tuple[Tensor, Vector]:
        function = partial(value_and_gradient, with_graph)
        found: Any = torch.func.jvp(function, tuple(at), tuple(vector), has_aux=alone)
        if alone:
            value, _, product = found
        else:
            (value, _), (_, product) = found
        return value, list(product)

    with_graph = partial(in_forward_mode, True)

    def without_graph_first(vector: Vector) -> tuple[Tensor, Vector]:
        # The graph of the gradient is not needed, but torch has forward mode of some operations, such
        # as the backward of silu, only where there is one.
        before = RandomState()
        try:
            return in_forward_mode(False, vector)
        except NotImplementedError:
            before.restore()
            return with_graph(vector)

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        try:
            with torch_forward_mode.one_thread_in_forward_mode(options.caller):
                value, product = (without_graph_first if alone else with_graph)(vector)
        except (RuntimeError, NotImplementedError) as error:
            raise no_forward_mode(options.caller, FORWARD, error) from error
        if not (options.create_graph or inside):  # a graph is then of tensors from elsewhere
            check_uses_given_params(graph_summary(value), leaves, options.caller)
        return value, product

    return LinearMap(apply)


def differences_of_gradient(loss: BoundLoss, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v by central differences of the gradient."""
    gradient = finite_differences.gradient_function(loss)

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        value = loss(*fresh_leaves(leaves, False))
        check_uses_given_params(graph_summary(value), leaves, options.caller)
        product = finite_differences.directional_derivative(gradient, leaves, vector, loss.sharding)
        return value.detach(), product

    return LinearMap(apply)


def _check_strict(caller: str, names: tuple[str, ...], product: list[Tensor | None]) -> None:
    missing = [repr(name) for name, part in zip(names, product, strict=True) if part is None]
    if missing:
        raise NoSecondDerivative(
            f"{caller}(strict=True): expected a second derivative for every parameter, got none for "
            f"{', '.join(missing)}: the gradient does not depend on it. Leave it out of params, "
            f"or use strict=False, which gives zero there."
        )
