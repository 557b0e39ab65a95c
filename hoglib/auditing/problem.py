"""What is audited: a loss, its parameters and a batch, and the checks of these arguments."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector
from hoglib._core.module_names import ModuleNames
from hoglib._core.torch_internals import transforms_active
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

PROBLEM = "(loss, params, batch)"


class NamedProblem(NamedTuple):
    """A loss(params, batch) to audit; the name is empty where there is only one."""

    name: str
    loss: Any
    params: Any
    batch: Any


def problems(what: str, value: Any) -> list[NamedProblem]:
    """The problems in (loss, params, batch), in a list of such tuples, or in a dict of them by name.

    Raises ArgumentTypeError for anything else, ArgumentValueError for no problem at all.
    """
    named: dict[str, Any] = {"": value}
    if isinstance(value, Mapping):
        named = {str(name): problem for name, problem in value.items()}
    elif isinstance(value, list):
        named = {str(number): problem for number, problem in enumerate(value)}
    if not named:
        raise ArgumentValueError(f"{what}: expected at least one {PROBLEM}, got none.")
    for name, found in named.items():
        if isinstance(found, tuple) and len(found) == 3 and callable(found[0]):
            continue
        got = validation.describe(found)
        if isinstance(found, tuple):
            got = f"a tuple ({', '.join(type(part).__name__ for part in found)})"
        raise ArgumentTypeError(
            f"{what}{f'[{name}]' if name else ''}: expected {PROBLEM}, where loss is a function of "
            f"params and batch, a list of such tuples, or a dict of them by name, got {got}; for "
            "instance `return hoglib.functional_loss(model, criterion), "
            "hoglib.trainable_params(model), batch`."
        )
    return [NamedProblem(name, *problem) for name, problem in named.items()]


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check_arguments(loss: Any, params: Any, batch: Any) -> None:
    """Raises for a loss, parameters or a batch of the wrong kind."""
    validation.loss_function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise ArgumentTypeError(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    validation.parameters(params)
    if transforms_active():
        raise UnsupportedError(
            "audit: expected to be called outside of torch.func transforms, got called inside one; "
            "audit the function before it is transformed."
        )
    for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True):
        what = f"params[{path!r}]" if path else "params"
        if is_lazy(x):
            raise ArgumentValueError(
                f"{what}: expected a tensor with values, got one of a lazy module that has not run; "
                "call the model on a batch once."
            )
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.dtype not in DTYPES:
            kind = "a nested tensor" if x.is_nested else f"{validation.describe(x)} ({x.layout})"
            raise ArgumentTypeError(
                f"{what}: expected a dense tensor with values, of dtype "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind} on {x.device}; "
                "convert it here, and convert it back inside the loss."
            )
    for x in pytree.leaves(batch):
        if isinstance(x, Iterator | DataLoader):
            raise ArgumentTypeError(
                "batch: expected one batch that the loss can read many times, got "
                f"{validation.describe(x)}; pass list(...) of it, or of a DataLoader "
                "next(iter(loader))."
            )


@final
class Problem:
    """A loss, parameters and a batch as they were given to `audit`, with the names of the modules."""

    def __init__(self, loss: Callable[..., Tensor], params: Any, batch: Any) -> None:
        self.loss, self.batch = loss, batch
        self.originals, self.structure = pytree.flatten(params)
        # copies: the loss may change its parameters in place
        self.leaves: Vector = [x.detach().clone() for x in self.originals]
        self.paths = pytree.paths(params)
        self.names = ModuleNames(loss)
        for module in self.names.modules():
            tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
            if any(map(is_lazy, tensors)):
                raise ArgumentValueError(
                    f"loss: expected modules with values, got {self.names.called(module)}, which is "
                    "lazy and has not run; call the model on a batch once."
                )

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators other than torch's own that the loss may draw from."""
        in_batch = [g for g in pytree.leaves(self.batch) if isinstance(g, torch.Generator)]
        return [*self.names.generators(), *in_batch]

    def value(self, leaves: Vector, batch: Any) -> Tensor:
        """The loss at leaves, on a copy of the batch, which the loss may change in place."""
        params = pytree.unflatten(list(leaves), self.structure)
        return validation.scalar("loss(params, batch)", self.loss(params, _copy_of_batch(batch)))


def _copy_of_batch(tree: Any) -> Any:
    """A copy with the same aliasing: a tensor that occurs twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copy_of(x: Tensor) -> Tensor:
        if id(x) not in copies:
            # torch.func refuses requires_grad_() inside its transforms
            wanted = x.requires_grad and not transforms_active()
            copied = x.detach().clone()
            copies[id(x)] = copied.requires_grad_() if wanted else copied
        return copies[id(x)]

    return map_tensors(copy_of, tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, depth: int = 4) -> Any:
    """`function` applied to the tensors of a pytree, and of plain objects in it, which are then copied.

    depth: how many objects within objects are searched.
    """

    def map_leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        fields = getattr(x, "__dict__", None)
        if not fields or not depth or callable(x) or isinstance(x, type | nn.Module):
            return x
        found = {name: map_tensors(function, value, depth - 1) for name, value in fields.items()}
        before, after = pytree.leaves(fields), pytree.leaves(found)
        if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
            return x
        try:
            copied = copy(x)
            for name, value in found.items():
                object.__setattr__(copied, name, value)
        except Exception:  # the object cannot be copied
            return x
        return copied

    return pytree.map(map_leaf, tree)
