"""A function under test as a map between lists of real tensors, and the derivatives of such maps."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import isbuiltin
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from hoglib._core.messages import validation
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.element_differences import TensorMap, max_abs
from hoglib._core.substrate.autograd import Vector, clone_inference_tensors
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_forward_mode import load_decompositions
from hoglib._core.torch_api.torch_internals import gradients, transforms_active
from hoglib._core.torch_api.torch_library import OPERATORS
from hoglib.errors import UnsupportedError
from hoglib.verification.layouts import fresh, laid_out, layout_of

Tensors = Sequence[Tensor]
Numbered = Sequence[tuple[int, Tensor]]  # with the input or output that each belongs to


def seed_all(seed: int = 0) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # where there is no other device, torch.manual_seed notes three stacks for later
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


Arrange = Callable[[Tensor], Tensor]
PhaseFixing = Callable[[Tensors], list[Tensor]]


class Variable(NamedTuple):
    """A variable of a map: a tensor among the leaves of the inputs, or a parameter of the module."""

    name: str  # in messages
    slot: int  # its position among the leaves of the inputs and the module's state
    is_complex: bool  # then its real and imaginary parts are along the last dimension
    project: Arrange | None = None  # keeps a structure: a symmetric matrix stays symmetric
    layout: Arrange | None = None  # to another memory layout than a contiguous one

    def given(self, x: Tensor) -> Tensor:
        """What fn gets for it."""
        own = torch.complex(*x.unbind(-1)) if self.is_complex else x
        own = own if self.project is None else self.project(own)
        return own if self.layout is None else self.layout(own)


class _Form(NamedTuple):
    """What the leaves of a call belong to."""

    function: Any
    structure: Any  # of the inputs
    keys: tuple[str, ...]  # of the module's state
    constants: tuple[Any, ...]  # the leaves of the inputs and of the state; None for a variable

    def run(self, values: list[Any]) -> list[Any]:
        """All leaves of what the function returns."""
        count = len(values) - len(self.keys)
        inputs = pytree.unflatten(values[:count], self.structure)
        if isinstance(self.function, nn.Module):
            state = dict(zip(self.keys, values[count:], strict=True))
            return pytree.leaves(call_with(self.function, state, *inputs))
        return pytree.leaves(self.function(*inputs))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Map:
    """x -> y, real tensors, for some leaves y of fn(*inputs), and the point x where it is asked.

    fn is a function, a Function class or its `apply`, or a module. The variables are the floating-point
    tensors among the leaves of the inputs (only those that require grad, if any does), and the
    trainable parameters of a module. They are copied to the given real dtype, or in their own; a
    complex variable is represented by its real and imaginary parts. Everything else is constant, also
    copied, and so is a tensor that is not strided: one that requires grad is refused, because torch has
    no second derivative by it.

    A map is immutable: `at`, `in_dtype`, `to`, `seeded`, `projected`, `laid_out`, `then`, `phase_fixed`
    and `adapted` return another one.
    """

    fn: Any
    inputs: tuple[Any, ...]
    dtype: torch.dtype | None
    form: _Form
    variables: tuple[Variable, ...]
    point: list[Tensor]
    which: tuple[int, ...] = ()  # of the leaves that fn returns
    finish: PhaseFixing = list  # what is done with these
    seeds: bool = False  # each run draws the same random numbers
    clones: bool = False  # fn gets copies, because it changes its inputs and declares that
    # the variables require grad, because fn differentiates by them itself, as a forward does that
    # returns a log-determinant or a score
    needs_graph: bool = False

    def __call__(self, *x: Tensor) -> list[Tensor]:
        found = self.leaves(*x)
        return [real(y) for y in self.finish([found[i] for i in self.which])]

    def leaves(self, *x: Tensor) -> list[Any]:
        """All leaves of what fn returns."""
        if self.seeds:
            seed_all()
        # copies at each run: fn may write to its constants, and the next run needs them as they were
        values = [fresh(value) for value in self.form.constants]
        for one, y in zip(self.variables, x, strict=True):
            own = one.given(y)
            if not (own.requires_grad or transforms_active()):
                # fn may take a gradient itself
                own = own.detach().requires_grad_() if self.needs_graph else own.view_as(own)
            values[one.slot] = own.clone() if self.clones else own
        return self.form.run(values)

    def from_leaves(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """A leaf for each variable; the copies of them that fn gets, which it may change in place; and
        all leaves of what it returns."""
        values = [fresh(value) for value in self.form.constants]
        own = [self.value(j).clone().requires_grad_() for j in range(len(self.point))]
        copies = [x.clone() for x in own]
        for one, x in zip(self.variables, copies, strict=True):
            values[one.slot] = x
        return own, copies, self.form.run(values)

    def run_with_grad(self) -> list[Any]:
        """All leaves of what fn returns when each variable requires grad."""
        return at_leaves(self.leaves, self.point)[1]

    def differentiable(self, *x: Tensor) -> list[Tensor]:
        """Those that have a graph, as real tensors."""
        return [real(y) for y in self.leaves(*x) if is_float(y) and y.requires_grad]

    def value(self, j: int) -> Tensor:
        """What fn gets for the variable j at the point."""
        x = self.point[j]
        return torch.view_as_complex(x) if self.variables[j].is_complex else x

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.variables]

    @property
    def num_inputs(self) -> int:
        """How many variables come from the inputs."""
        leaves = len(self.form.constants) - len(self.form.keys)
        return sum(one.slot < leaves for one in self.variables)

    # Other maps.

    def at(self, x: list[Tensor]) -> "Map":
        """At another point."""
        return replace(self, point=x)

    def in_dtype(self, dtype: torch.dtype | None) -> "Map":
        """At the same inputs, copied to another dtype."""
        other = map_of(self.fn, self.inputs, dtype)
        return replace(self, dtype=dtype, form=other.form, point=other.point)

    def to(self, which: Iterable[int]) -> "Map":
        """To some of the leaves that fn returns."""
        return replace(self, which=tuple(which))

    def to_differentiable(self) -> "Map":
        """To those that can be differentiated."""
        found = enumerate(self.run_with_grad())
        return self.to(i for i, y in found if is_float(y) and y.requires_grad and y.numel())

    def seeded(self) -> "Map":
        """With the same random numbers in each run."""
        return replace(self, seeds=True)

    def projected(self, projections: Mapping[int, Arrange]) -> "Map":
        """f P, for the projections P of some variables."""
        given = enumerate(self.variables)
        return self._of(one._replace(project=projections.get(j, one.project)) for j, one in given)

    def laid_out(self, arrange: Arrange) -> "Map":
        """Of variables in another memory layout."""
        return self._of(one._replace(layout=arrange) for one in self.variables)

    def laid_out_as_given(self) -> "Map":
        """Of variables, and constants, in the layouts that the inputs have."""
        leaves = pytree.leaves(self.inputs)
        layouts = ((i, layout_of(x)) for i, x in enumerate(leaves) if is_float(x))
        found = {i: partial(laid_out, layout=one) for i, one in layouts if one is not None}
        constants = list(self.form.constants)
        for i in found.keys() - {one.slot for one in self.variables}:
            constants[i] = found[i](constants[i])
        variables = (one._replace(layout=found.get(one.slot)) for one in self.variables)
        form = self.form._replace(constants=tuple(constants))
        return replace(self, form=form)._of(variables)

    def _of(self, variables: Iterable[Variable]) -> "Map":
        return replace(self, variables=tuple(variables))

    def then(self, arrange: Arrange) -> "Map":
        """To outputs that are rearranged one by one."""
        return replace(self, finish=lambda outputs: [arrange(y) for y in self.finish(outputs)])

    def phase_fixed(self, fixing: PhaseFixing) -> "Map":
        """To outputs with fixed signs or phases, which are arbitrary."""
        return replace(self, finish=fixing)

    def adapted(self) -> "Map":
        """With copies of the inputs, if fn changes these and declares it, which autograd allows for no
        leaf; and of variables that require grad, if it runs on these only."""
        found = self
        try:
            found.run_with_grad()
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            found = replace(found, clones=True)
            found.run_with_grad()
        try:
            found.leaves(*(x.clone() for x in found.point))
        except RuntimeError as error:
            found = replace(found, needs_graph="require grad" in str(error))
        return found


def map_of(fn: Any, inputs: Sequence[Any], dtype: torch.dtype | None = None) -> Map:
    """The map of a call fn(*inputs), to none of its outputs yet, in a dtype or in its own ones."""
    owner: Any = as_function(fn)
    is_class = owner is not None and isinstance(fn, type)
    function: Any = owner.apply if is_class else validation.function("fn", fn)
    leaves, structure = pytree.flatten(tuple(clone_inference_tensors(list(inputs))))
    marked = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    wanted = marked if any(marked) else [True] * len(leaves)
    pairs = zip(leaves, wanted, strict=True)
    free = [is_float(x) and x.layout is torch.strided and wants for x, wants in pairs]
    names = ["inputs" + path for path in pytree.paths(tuple(inputs))]
    for name, x, mark in zip(names, leaves, marked, strict=True):
        if mark and x.layout is not torch.strided:
            raise UnsupportedError(
                f"{name_of(fn)}: expected strided tensors where grad is required, got {name} with "
                f"{x.layout}: derivatives by it are not judged. Verify a function of its values, "
                "which builds it inside, or pass it without requires_grad for those by the other "
                "arguments."
            )
    values: list[Any] = [_copy(x, dtype) for x in leaves]
    state: dict[str, Any] = {}
    if isinstance(fn, nn.Module):
        parameters = dict(fn.named_parameters())
        own = {**parameters, **dict(fn.named_buffers())}
        state = {name: _copy(x, dtype) for name, x in own.items()}
        names += [f"the parameter {name}" for name in state]
        free += [name in parameters and parameters[name].requires_grad for name in state]
    values += state.values()
    variables = [Variable(names[i], i, values[i].is_complex()) for i in range(len(free)) if free[i]]
    constants = [None if varies else x for varies, x in zip(free, values, strict=True)]
    form = _Form(function, structure, tuple(state), tuple(constants))
    point = [real(values[one.slot]) for one in variables]
    return Map(fn, tuple(inputs), dtype, form, tuple(variables), point)


def name_of(fn: Any) -> str:
    if isinstance(fn, partial):
        return name_of(fn.func)
    if (function := as_function(fn)) is not None:
        return function.__qualname__
    if type(fn) in OPERATORS:
        return f"torch.ops.{fn}"
    if isbuiltin(fn):  # torch.sort and its like, whose owner is private to torch
        return str(fn.__name__)
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def custom_functions(outputs: Sequence[Any]) -> set[type[Function]]:
    """The custom Functions in the graphs of the outputs."""
    found = (entry.function for entry in graph_summary(outputs).functions)
    return {function for function in found if function is not None and not is_part(function)}


def is_part(function: type[Function]) -> bool:
    """Whether it is a part of one of hoglib's ops, whose derivatives are judged instead of its own.

    It saves what the op computed from its inputs, so it is right only inside that op.
    """
    return bool(getattr(function, "part_of_an_op", False))


def as_function(fn: Any) -> type[Function] | None:
    """The Function class that fn is, or is the `apply` of."""
    owner = fn if isinstance(fn, type) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    """A copy with memory of its own; contiguous, which code that reads memory directly may rely on:
    other layouts are tried later, by checks of their own."""
    if not is_float(value):
        return fresh(value)
    wanted = value.dtype if dtype is None else dtype.to_complex() if value.is_complex() else dtype
    copy = value.detach().to(wanted)
    strided = copy.layout is torch.strided
    return copy.clone(memory_format=torch.contiguous_format) if strided else copy.clone()


def real(value: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, a sparse one as a dense one."""
    value = value if value.layout is torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


# The derivatives of a map in reverse and in forward mode. The gradient of a map is a map again, and so
# is its tangent; so a second derivative is computed by the same functions as a first one. All is built
# on `torch.autograd` unless torch.func is asked for, because the transforms of torch.func are wrong
# through some of torch's own layers.


def gradient(
    function: TensorMap, count: int, by: Sequence[int] | None = None, *, create_graph: bool = True
) -> TensorMap:
    """(x, u) -> J(x)^T u, the gradient by all of the first `count` arguments, or by some of them.

    Backward gets copies of u, so that one that works in place does not affect other checks.
    """
    places = range(count) if by is None else by

    def map_(*given: Tensor) -> list[Tensor]:
        inputs = [
            x.view_as(x).requires_grad_() if j in places and not x.requires_grad else x
            for j, x in enumerate(given[:count])
        ]
        own = [inputs[j] for j in places]
        return grad(function(*inputs), own, given[count:], create_graph=create_graph)

    return map_


def gradient_of_composition(function: TensorMap, values: Tensors, weights: Tensors) -> TensorMap:
    """x -> J(x)^T u(y) with u = w (1 + y / s): the gradient of sum w (y + y^2 / 2s), a function of the
    outputs y. values: the outputs at some point; s is twice their size, so that both parts count, and u
    is nowhere zero."""
    sizes = [2 * max_abs(y) or 1.0 for y in values]

    def composed(*x: Tensor) -> list[Tensor]:
        return [y + y * (y / (2 * s)) for y, s in zip(function(*x), sizes, strict=True)]

    return lambda *x: gradient(composed, len(x))(*x, *weights)


def stacked(function: TensorMap, values: Tensors) -> Iterator[TensorMap]:
    """The function, where the gradients of its outputs, if they are several of one shape, are parts of
    one tensor, along each dimension."""
    if len(values) < 2 or len({y.shape for y in values}) > 1:
        return
    for dim in range(values[0].dim() + 1):
        yield lambda *x, dim=dim: list(torch.stack(function(*x), dim).unbind(dim))


def at_leaves(function: TensorMap, x: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves with the values x, and the values of the map there, with their graph."""
    leaves = [y.detach().clone().requires_grad_() for y in x]
    return leaves, function(*leaves)


def grad(outputs: Tensors, inputs: Tensors, weights: Tensors | None = None, **more: Any) -> Vector:
    """The gradients of the weighted sum of those outputs that have a graph; zeros if none has. With
    unhandled=True a mode does not handle this call itself, so that it sees what backward calls."""
    weights = list(map(torch.ones_like, outputs)) if weights is None else weights
    live = [(y, u.clone()) for y, u in zip(outputs, weights, strict=True) if y.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in inputs]
    values, factors = zip(*live, strict=True)
    found = gradients(values, inputs, factors, **more)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def tangent(function: TensorMap, count: int, *, by_torch_func: bool = False) -> TensorMap:
    """(x, t) -> J(x) t, in forward mode: by torch.func, which nests, or by dual tensors."""
    load_decompositions()

    def map_(*given: Tensor) -> list[Tensor]:
        x, t = given[:count], given[count:]
        if by_torch_func:
            return list(torch.func.jvp(function, x, t)[1])
        with forward_ad.dual_level():
            return [_tangent(y) for y in function(*map(forward_ad.make_dual, x, t))]

    return map_


def vjps(function: TensorMap, x: Tensors, covectors: Numbered) -> list[list[Tensor]]:
    """For each covector (i, w), J_i(x)^T w by every input.

    The graph is kept from one covector to the next, unless the function allows one backward pass only.
    """
    results: list[list[Tensor]] = []
    leaves, outputs = at_leaves(function, x)
    for i, w in covectors:
        try:
            grads = grad([outputs[i]], leaves, [w], retain_graph=True)
        except Exception:
            if not results:
                raise
            leaves, outputs = at_leaves(function, x)
            grads = grad([outputs[i]], leaves, [w], retain_graph=True)
        results.append([g.detach() for g in grads])
    return results


def jvp(f: TensorMap, x: Tensors, j: int, v: Tensor, *, by_torch_func: bool = False) -> Vector:
    """J(x) v, with v a direction of input j, in forward mode."""

    def moved(*y: Tensor) -> Vector:
        return f(*x[:j], *y, *x[j + 1 :])

    pushed = tangent(moved, 1, by_torch_func=by_torch_func)
    return [t.detach() for t in pushed(x[j].detach().clone(), v)]


def _tangent(y: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if found is None else torch.zeros_like(y) + found
