"""A curvature matrix at one point as a linear map, and what each kind of matrix provides."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.autograd import NOT_DIFFERENTIABLE, Vector
from hoglib._core.blocks import Remat, check_remat
from hoglib._core.closures import STATE, ClosureWalker
from hoglib._core.sharding import Sharding
from hoglib._core.torch_sharding import wrapped_attributes
from hoglib.errors import ArgumentValueError, HoglibError, UnsupportedError

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


def check_blocks(caller: str, remat: Any, backend: str, mode: str) -> Remat:
    """The option remat=; raises for a mode in which blocks are not compiled, if that is asked for."""
    remat = check_remat(remat)
    if backend and remat is not False and mode == "forward":
        raise ArgumentValueError(
            f"{caller}(mode='forward', remat=..., compile=...): expected a mode in which each block's "
            "passes are compiled, got dual tensors. Leave out mode or compile."
        )
    return remat


def check_backend(caller: str, compile: Any, kind: CurvatureKind) -> str:
    """The backend that compile= names, or "" for none; raises for a kind that has no graph."""
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
    return backend


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
