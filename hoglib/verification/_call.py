"""One call of a function as a map between lists of real tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import isbuiltin
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._functional import call_with
from hoglib._functorch import custom_function, transforms_active
from hoglib._graph import nodes
from hoglib._recording import recordable
from hoglib.verification._copies import fresh
from hoglib.verification._maps import Map

Arrange = Callable[[Tensor], Tensor]


class Call:
    """fn(*inputs), with fn a function, a Function class or its `apply`, or a module.

    The variables are the floating-point tensors among the leaves of the inputs (only those that
    require grad, if any does) and the trainable parameters of a module, as copies of the given real
    dtype, or of their own; a complex one counts as its real and imaginary parts. `point` are their
    values, `names` what to call them, `num_inputs` how many come from the inputs
    (and `slots` their places among the leaves). Everything else is
    constant, in such copies too, and so is a tensor that is not strided. With `reseed` each call
    draws the same random numbers; with `clone` it gets copies, for a function that changes its inputs
    and says so. The variables in `symmetric` are symmetrised on their way in, for a function that
    reads one triangle only.
    """

    reseed = False
    clone = False
    symmetric: frozenset[int] = frozenset()

    def __init__(
        self, fn: Any, inputs: Sequence[Any], dtype: torch.dtype | None = torch.float64
    ) -> None:
        self.name, self.dtype = name_of(fn), dtype
        self._function = fn.apply if _is_function_class(fn) else arguments.function("fn", fn)
        leaves, self._structure = _tree.flatten(tuple(recordable(list(inputs))))
        marked = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        free = [
            is_float(x) and x.layout is torch.strided and (not any(marked) or mark)
            for x, mark in zip(leaves, marked, strict=True)
        ]
        names = ["inputs" + path for path in _tree.paths(tuple(inputs))]
        values: list[Any] = [_copy(x, dtype) for x in leaves]
        state: dict[str, Any] = {}
        if isinstance(fn, nn.Module):
            parameters = dict(fn.named_parameters())
            state = {
                name: _copy(x, dtype)
                for name, x in {**parameters, **dict(fn.named_buffers())}.items()
            }
            names += [f"the parameter {name}" for name in state]
            free += [name in parameters and parameters[name].requires_grad for name in state]
        self._keys = list(state)
        self._values = [*values, *state.values()]
        self.slots = [i for i, is_free in enumerate(free) if is_free]
        self._num_leaves = len(leaves)
        self.num_inputs = sum(free[: len(leaves)])
        self._names = names
        self.names = [names[i] for i in self.slots]
        self.point = [real(self._values[i]) for i in self.slots]
        self.complex_variables = [self._values[i].is_complex() for i in self.slots]

    def treated_like(self, other: "Call") -> "Call":
        self.reseed, self.clone, self.symmetric = other.reseed, other.clone, other.symmetric
        return self

    def leaves(self, *variables: Tensor, before: Arrange | None = None) -> list[Any]:
        """All leaves of what fn returns; before rearranges the variables on their way in."""
        if self.reseed:
            torch.manual_seed(0)
        values = [fresh(x) for x in self._values]
        variables_in = zip(self.slots, variables, self.complex_variables, strict=True)
        for j, (slot, x, parts) in enumerate(variables_in):
            value = torch.complex(*x.unbind(-1)) if parts else x
            value = (value + value.mH) / 2 if j in self.symmetric else value
            value = value if before is None else before(value)
            if not (value.requires_grad or transforms_active()):
                value = value.view_as(value)  # fn may ask for a gradient of its own
            values[slot] = value.clone() if self.clone else value
        return self._run(values)

    def from_leaves(self) -> tuple[list[Tensor], dict[str, Any], list[Any]]:
        """A leaf for each variable, as fn gets it; the constants that fn gets, by name; and all leaves
        of what it returns for them."""
        values = [fresh(x) for x in self._values]
        own = [self.value(j).clone().requires_grad_() for j in range(len(self.slots))]
        for slot, x in zip(self.slots, own, strict=True):
            values[slot] = x.clone() if self.clone else x
        constants = {n: values[i] for i, n in enumerate(self._names) if i not in self.slots}
        return own, constants, self._run(values)

    def _run(self, values: list[Any]) -> list[Any]:
        inputs = _tree.unflatten(values[: self._num_leaves], self._structure)
        if isinstance(self._function, nn.Module):
            state = dict(zip(self._keys, values[self._num_leaves :], strict=True))
            return _tree.leaves(call_with(self._function, state, *inputs))
        return _tree.leaves(self._function(*inputs))

    def map(
        self,
        which: Sequence[int],
        *,
        before: Arrange | None = None,
        after: Arrange | None = None,
    ) -> Map:
        """The map to some of the leaves; after rearranges them on their way out."""

        def map_(*variables: Tensor) -> list[Tensor]:
            found = self.leaves(*variables, before=before)
            chosen = [found[i] for i in which]
            return [real(y if after is None else after(y)) for y in chosen]

        return map_

    def value(self, j: int) -> Tensor:
        """What fn gets for the variable j."""
        return torch.view_as_complex(self.point[j]) if self.complex_variables[j] else self.point[j]

    def recorded(self) -> list[Any]:
        """All leaves of what fn returns when each variable requires grad."""
        return self.leaves(*(x.clone().requires_grad_() for x in self.point))


def name_of(fn: Any) -> str:
    if isinstance(fn, partial):
        return name_of(fn.func)
    owner: Any = getattr(fn, "__self__", None)
    if _is_function_class(owner):  # Function.apply
        return str(owner.__qualname__)
    if isbuiltin(fn):  # torch.sort and its like, whose owner is private to torch
        return str(fn.__name__)
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def custom_functions(outputs: Sequence[Any]) -> set[type[torch.autograd.Function]]:
    """The custom Functions in the graphs of the outputs."""
    found = (custom_function(node) for node in nodes(outputs))
    return {function for function in found if function is not None and not is_part(function)}


def is_part(function: type[torch.autograd.Function]) -> bool:
    """Whether it is a part of one of hoglib's ops, right inside of that alone, for it keeps what the op
    made of its inputs: the derivatives of the op are judged, not its own."""
    return bool(getattr(function, "part_of_an_op", False))


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_function_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not is_float(value):
        return fresh(value)
    return value.detach().to(dtype.to_complex() if value.is_complex() else dtype).clone()


def real(value: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, a sparse one as a dense one."""
    value = value if value.layout is torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
