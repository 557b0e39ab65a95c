"""What is audited: a loss, its parameters and a batch, with the names of the modules in it."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector
from hoglib._core.module_names import ModuleNames
from hoglib._core.torch_internals import transforms_active
from hoglib.errors import ArgumentTypeError, ArgumentValueError

DEPTH = 4  # of objects in objects of a batch


class Problem:
    """A loss, parameters and a batch, as they were given to `audit`."""

    def __init__(self, loss: Callable[..., Tensor], params: Any, batch: Any) -> None:
        self.loss, self.batch = loss, batch
        leaves, self.structure = pytree.flatten(params)
        self.leaves: Vector = [x.detach().clone() for x in leaves]  # the loss may change them
        self.paths = pytree.paths(params)
        self.names = ModuleNames(loss)
        self.originals = leaves

    @property
    def generators(self) -> list[torch.Generator]:
        """What the loss may draw by, beside torch's own."""
        in_batch = [g for g in pytree.leaves(self.batch) if isinstance(g, torch.Generator)]
        return [*self.names.generators(), *in_batch]

    def frozen(self) -> dict[int, int]:
        """Of leaves that are weights of embeddings, the row with a gradient of zero by definition."""
        places = {id(x): i for i, x in enumerate(self.originals)}
        padded = [row for m in self.names.roots for row in padding_rows(m)]
        return {places[id(weight)]: row for _, weight, row in padded if id(weight) in places}

    def value(self, leaves: Vector, batch: Any) -> Tensor:
        """The loss of copies of the batch, which it may change."""
        params = pytree.unflatten(list(leaves), self.structure)
        return validation.scalar("loss(params, batch)", self.loss(params, copied(batch)))


def padding_rows(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Weights of embeddings, by name, and the row of each whose gradient is zero by definition."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
            yield f"{name}.weight".removeprefix("."), part.weight, part.padding_idx


def copied(tree: Any) -> Any:
    """A copy, for a loss that changes its batch; what is there twice is one copy."""
    copies: dict[int, Tensor] = {}

    def of_tensor(x: Tensor) -> Tensor:
        if id(x) not in copies:
            own = x.detach().clone()
            # torch.func refuses that inside of its transforms
            wanted = x.requires_grad and not transforms_active()
            copies[id(x)] = own.requires_grad_() if wanted else own
        return copies[id(x)]

    return mapped(of_tensor, tree)


def mapped(function: Callable[[Tensor], Tensor], tree: Any, depth: int = DEPTH) -> Any:
    """`function` of the tensors in a tree, also of those in plain objects, which are copied then."""

    def of_leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        fields = getattr(x, "__dict__", None)
        if not fields or not depth or callable(x) or isinstance(x, type | nn.Module):
            return x
        found = {name: mapped(function, value, depth - 1) for name, value in fields.items()}
        before, after = pytree.leaves(fields), pytree.leaves(found)
        if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
            return x
        try:
            other = copy(x)
            for name, value in found.items():
                object.__setattr__(other, name, value)
        except Exception:  # it does not let itself be copied
            return x
        return other

    return pytree.map(of_leaf, tree)


# === What is audited: a loss, parameters and a batch, or several such.

ONE = "(loss, params, batch)"


class NamedProblem(NamedTuple):
    """A loss(params, batch) to audit; the name is empty where there is only one."""

    name: str
    loss: Any
    params: Any
    batch: Any


def problems(what: str, value: Any) -> list[NamedProblem]:
    """(loss, params, batch), a list of such tuples, or a dict of them by name; as a list of problems.

    Raises TypeError for anything else, and ValueError for no problem at all.
    """
    if _is_one(value):
        return [NamedProblem("", *value)]
    if isinstance(value, Mapping):
        named = {str(name): one for name, one in value.items()}
    elif isinstance(value, list):
        named = {str(number): one for number, one in enumerate(value)}
    else:
        raise _wrong(what, value)
    if not named:
        raise ArgumentValueError(f"{what}: expected at least one {ONE}, got none.")
    for name, one in named.items():
        if not _is_one(one):
            raise _wrong(f"{what}[{name}]", one)
    return [NamedProblem(name, *one) for name, one in named.items()]


def _is_one(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and callable(value[0])


def _wrong(what: str, value: Any) -> ArgumentTypeError:
    if isinstance(value, tuple):
        came = f"a tuple ({', '.join(type(part).__name__ for part in value)})"
    else:
        came = validation.describe(value)
    return ArgumentTypeError(
        f"{what}: expected {ONE} with a function of params and batch first, a list of such tuples or "
        f"a dict of them by name, got {came}; for instance `return hoglib.functional_loss(model, "
        "criterion), hoglib.trainable_params(model), batch`."
    )
