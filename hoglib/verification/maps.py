"""A function under test as a map between lists of real tensors, and derivatives of such maps."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isbuiltin
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from hoglib._core.messages import validation
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.element_differences import TensorMap, max_abs, unit_of, units_of
from hoglib._core.substrate.autograd import Vector, clone_inference_tensors
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.mixed_precision import is_half
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_forward_mode import load_decompositions
from hoglib._core.torch_api.torch_internals import gradients, transforms_active
from hoglib._core.torch_api.torch_library import OPERATORS
from hoglib.errors import UnsupportedError
from hoglib.verification.layouts import copy_argument, copy_in_layout, layout_of

Tensors = Sequence[Tensor]
Numbered = Sequence[tuple[int, Tensor]]  # vectors, each with the index of its input or output


def seed_all(seed: int = 0) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would record three stack traces for devices to be initialised later
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


Arrange = Callable[[Tensor], Tensor]  # a projection, or a change of the memory layout
PhaseFixing = Callable[[Tensors], list[Tensor]]  # a function of all outputs together


class Variable(NamedTuple):
    """A variable of a map: a tensor among the leaves of the inputs, or a parameter of the module."""

    name: str  # in messages
    slot: int  # index among the leaves of the inputs, followed by the module's state
    is_complex: bool  # the map then takes real and imaginary parts, in an additional last dimension
    project: Arrange | None = None  # onto a structure, such as symmetric matrices
    layout: Arrange | None = None  # to a non-contiguous memory layout
    unit: Tensor | float = 1.0  # fn gets x times this; see `Map.scaled`

    def given(self, x: Tensor) -> Tensor:
        """The argument that fn gets for the real tensor x."""
        x = _times(x, self.unit)
        own = torch.complex(*x.unbind(-1)) if self.is_complex else x
        own = own if self.project is None else self.project(own)
        return own if self.layout is None else self.layout(own)

    def coordinates(self, own: Tensor) -> Tensor:
        """The real tensor x for an argument of fn."""
        x = real(own)
        return (x.double() / self.unit).to(x.dtype)

    def unit_for(self, own: Tensor) -> Tensor | float:
        """The unit for an argument of fn; real and imaginary part of a number have a common unit."""
        unit = units_of(own)
        return unit[..., None] if self.is_complex and isinstance(unit, Tensor) else unit


MASKED = 1e6, 1e3  # how far a mask exceeds all other elements: positive, negative


def _find_mask(x: Tensor) -> Tensor:
    """Mark elements used as a mask, such as -1e9 in attention scores: infinite elements, and equal
    elements far beyond all others. Nothing is marked if everything would be."""
    most = max_abs(x)
    # huge elements of different size are no mask, but quantities in another unit
    masked, extreme = x.isinf(), x.abs() * 1.001 >= most
    rest = max_abs(torch.where(extreme, 0, x))
    negative = not x.is_complex() and bool((x == -most).any())
    if 0 < MASKED[negative] * rest < most and (most > 1e30 or int(extreme.sum()) > 1):
        masked |= extreme
    return masked & ~masked.all()


def _zero_masked(x: Tensor) -> Tensor:
    """x with zeros in place of masked elements; x itself if there are none."""
    masked = _find_mask(x)
    return torch.where(masked, 0, x) if bool(masked.any()) else x


def _put_masked(given: Tensor, x: Tensor) -> Tensor:
    return torch.where(_find_mask(given), given.to(x.dtype), x)


def _compose(outer: Arrange, inner: Arrange, x: Tensor) -> Tensor:
    return outer(inner(x))


def _times(x: Tensor, unit: Tensor | float) -> Tensor:
    if isinstance(unit, Tensor):
        return x * unit.to(x.dtype)
    return x if unit == 1.0 else x * unit


class _Form(NamedTuple):
    """A call of fn as a function of leaves: the leaves of the inputs, then the module's state."""

    function: Any  # fn; for a Function class, its `apply`
    structure: Any  # pytree structure of the inputs
    keys: tuple[str, ...]  # names of the module's parameters and buffers
    constants: tuple[Any, ...]  # all leaves; None in the place of a variable

    def run(self, values: list[Any]) -> list[Any]:
        """The leaves of fn's result for these leaves."""
        count = len(values) - len(self.keys)
        inputs = pytree.unflatten(values[:count], self.structure)
        if isinstance(self.function, nn.Module):
            state = dict(zip(self.keys, values[count:], strict=True))
            return pytree.leaves(call_with(self.function, state, *inputs))
        return pytree.leaves(self.function(*inputs))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Map:
    """A map x -> y between lists of real tensors, and a point x. y are leaves of fn(*inputs).

    fn is a function, a Function class or its `apply`, or a module. The variables are the floating-point
    tensors among the leaves of the inputs (only those requiring grad, if any does) and the trainable
    parameters of a module. They are copied to the given real dtype, or keep their own; a complex
    variable is represented by real and imaginary parts. Everything else is constant, and copied, too,
    sparse tensors included. A sparse tensor that requires grad is refused, because torch
    has no second derivative by sparse tensors.

    A map is immutable: `at`, `in_dtype`, `to`, `seeded`, `scaled`, `projected`, `rounded`,
    `laid_out`, `then`, `phase_fixed` and `adapted` return another map.
    """

    fn: Any
    inputs: tuple[Any, ...]  # as the user gave them
    dtype: torch.dtype | None  # of the copies; None keeps the inputs' own
    form: _Form
    variables: tuple[Variable, ...]
    point: list[Tensor]  # x
    which: tuple[int, ...] = ()  # indices of y among the leaves of fn's result
    finish: PhaseFixing = list  # applied to these leaves
    # divisors of y, by index; 1 by default
    units: Mapping[int, float] = field(default_factory=dict)
    seeds: bool = False  # seed the global generators before each run
    clones: bool = False  # give fn copies, because it changes its inputs and calls mark_dirty
    # give fn variables that require grad, because it calls autograd.grad inside, like a score or a flow
    needs_graph: bool = False

    def __call__(self, *x: Tensor) -> list[Tensor]:
        found = self.leaves(*x)
        outputs = self.finish([found[i] for i in self.which])
        units = (self.units.get(i, 1.0) for i in self.which)
        return [y if t == 1.0 else y / t for y, t in zip(map(real, outputs), units, strict=True)]

    def leaves(self, *x: Tensor) -> list[Any]:
        """All leaves of fn's result at x."""
        if self.seeds:
            seed_all()
        # copy at each run: fn may write to its constants
        values = [copy_argument(value) for value in self.form.constants]
        for one, y in zip(self.variables, x, strict=True):
            own = one.given(y)
            if not (own.requires_grad or transforms_active()):
                # requires_grad_() inside fn must not reach the caller's tensor: pass an alias
                own = own.detach().requires_grad_() if self.needs_graph else own.view_as(own)
            values[one.slot] = own.clone() if self.clones else own
        return self.form.run(values)

    def from_leaves(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """For `hoglib.drawing`: leaves for the variables, the copies that fn gets (and may change in
        place), and all leaves of fn's result."""
        values = [copy_argument(value) for value in self.form.constants]
        own = [self.value(j).clone().requires_grad_() for j in range(len(self.point))]
        copies = [x.clone() for x in own]
        for one, x in zip(self.variables, copies, strict=True):
            values[one.slot] = x
        return own, copies, self.form.run(values)

    def run_with_grad(self) -> list[Any]:
        """All leaves of fn's result at the point; all variables require grad."""
        return at_leaves(self.leaves, self.point)[1]

    def differentiable(self, *x: Tensor) -> list[Tensor]:
        """The leaves of fn's result that have a graph, as real tensors."""
        return [real(y) for y in self.leaves(*x) if is_float(y) and y.requires_grad]

    def value(self, j: int) -> Tensor:
        """The value of variable j at the point, before projection and layout."""
        x = _times(self.point[j], self.variables[j].unit)
        return torch.view_as_complex(x) if self.variables[j].is_complex else x

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.variables]

    @property
    def num_inputs(self) -> int:
        """The number of variables among the inputs; the module's parameters come after them."""
        leaves = len(self.form.constants) - len(self.form.keys)
        return sum(one.slot < leaves for one in self.variables)

    # Methods that return another map.

    def at(self, x: list[Tensor]) -> "Map":
        """The map at another point."""
        return replace(self, point=x)

    def in_dtype(self, dtype: torch.dtype | None) -> "Map":
        """The map at the given inputs in another dtype."""
        other = map_of(self.fn, self.inputs, dtype)
        values = [_zero_masked(other.value(j)) for j in range(len(other.point))]
        point = [one.coordinates(x) for one, x in zip(self.variables, values, strict=True)]
        return replace(self, dtype=dtype, form=other.form, point=point)

    def to(self, which: Iterable[int]) -> "Map":
        """The map to the leaves of fn's result with these indices."""
        return replace(self, which=tuple(which))

    def to_differentiable(self) -> "Map":
        """The map to all leaves of fn's result that can be differentiated."""
        found = enumerate(self.run_with_grad())
        return self.to(i for i, y in found if is_float(y) and y.requires_grad and y.numel())

    def seeded(self) -> "Map":
        """The map with equal random numbers in each run."""
        return replace(self, seeds=True)

    def scaled(self) -> "Map":
        """The map u -> f(s u), where x = s u with powers of two s (`units_of`): steps and tolerances
        are made for numbers near one. Masked elements become constants, because differences of a size
        near theirs say nothing about other elements."""
        full = [self.value(j) for j in range(len(self.point))]
        values = [*map(_zero_masked, full)]
        masked = [j for j, x in enumerate(full) if values[j] is not x]
        given = zip(self.variables, values, strict=True)
        variables = tuple(one._replace(unit=one.unit_for(x)) for one, x in given)
        point = [one.coordinates(x) for one, x in zip(variables, values, strict=True)]
        constant = {j: partial(_put_masked, full[j]) for j in masked}
        return replace(self, variables=variables, point=point).projected(constant)

    def unscaled(self) -> "Map":
        """The map from fn's own arguments to its own results, without units."""
        point = [real(self.value(j)) for j in range(len(self.point))]
        variables = tuple(one._replace(unit=1.0) for one in self.variables)
        return replace(self, variables=variables, point=point, units={})

    def in_given_units(self, gradient: Tensor, i: int, j: int) -> Tensor:
        """The flat gradient of output i by variable j, converted from the map's units to fn's own."""
        unit = torch.as_tensor(self.variables[j].unit, device=gradient.device)
        units = unit.expand_as(self.point[j]).reshape(-1)
        return gradient * self.units.get(self.which[i], 1.0) / units

    def in_units(self, sizes: Sequence[float]) -> "Map":
        """The map to y / t; t are powers of two near these sizes of the outputs."""
        return replace(self, units=dict(zip(self.which, map(unit_of, sizes), strict=True)))

    def projected(self, projections: Mapping[int, Arrange]) -> "Map":
        """The map f P for projections P of some variables; they apply before existing projections."""
        variables = list(self.variables)
        for j, project in projections.items():
            own = variables[j].project
            after = project if own is None else partial(_compose, own, project)
            variables[j] = variables[j]._replace(project=after)
        return self._of(variables)

    def rounded(self) -> "Map":
        """The map of float64 numbers; fn gets them rounded to the half precision of its variables."""
        half = {j: x.dtype for j, x in enumerate(self.point) if is_half(x)}
        point = [x.double() if j in half else x for j, x in enumerate(self.point)]
        to = {j: partial(torch.Tensor.to, dtype=dtype) for j, dtype in half.items()}
        return replace(self, point=point).projected(to)

    def laid_out(self, arrange: Arrange) -> "Map":
        """The map; fn gets each variable in another memory layout."""
        return self._of(one._replace(layout=arrange) for one in self.variables)

    def laid_out_as_given(self) -> "Map":
        """The map; fn gets variables and constants in the memory layouts of the given inputs."""
        leaves = pytree.leaves(self.inputs)
        layouts = ((i, layout_of(x)) for i, x in enumerate(leaves) if is_float(x))
        found = {i: partial(copy_in_layout, layout=one) for i, one in layouts if one is not None}
        constants = list(self.form.constants)
        for i in found.keys() - {one.slot for one in self.variables}:
            constants[i] = found[i](constants[i])
        variables = (one._replace(layout=found.get(one.slot)) for one in self.variables)
        form = self.form._replace(constants=tuple(constants))
        return replace(self, form=form)._of(variables)

    def _of(self, variables: Iterable[Variable]) -> "Map":
        return replace(self, variables=tuple(variables))

    def then(self, arrange: Arrange) -> "Map":
        """The map with a function applied to each output, after `finish`."""
        return replace(self, finish=lambda outputs: [arrange(y) for y in self.finish(outputs)])

    def phase_fixed(self, fixing: PhaseFixing) -> "Map":
        """The map to outputs with fixed (otherwise arbitrary) signs or phases; replaces `finish`."""
        return replace(self, finish=fixing)

    def adapted(self) -> "Map":
        """The map in a form that fn accepts: with `clones` if fn changes its inputs and declares it by
        mark_dirty, which autograd refuses for leaves; with `needs_graph` if fn raises without grad."""
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


def map_of(fn: object, inputs: Sequence[Any], dtype: torch.dtype | None = None) -> Map:
    """The map of a call fn(*inputs), without outputs yet. dtype: by default the inputs' own."""
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


def coarsest_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The real dtype with the largest spacing of numbers among the tensors' dtypes."""
    return max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)


def name_of(fn: object) -> str:
    if isinstance(fn, partial):
        return name_of(fn.func)
    if (function := as_function(fn)) is not None:
        return function.__qualname__
    if type(fn) in OPERATORS:
        return f"torch.ops.{fn}"
    if isbuiltin(fn):  # a builtin such as torch.sort: its qualified name has a private owner
        return str(fn.__name__)
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def custom_functions(outputs: Sequence[Any]) -> set[type[Function]]:
    """The custom Functions in the graphs of the outputs."""
    found = (entry.function for entry in graph_summary(outputs).functions)
    return {function for function in found if function is not None and not is_part(function)}


def is_part(function: type[Function]) -> bool:
    """Whether a Function is a part of one of hoglib's ops: then the op is verified instead.

    The part saves intermediates of the op, so it is right only inside that op.
    """
    return bool(getattr(function, "part_of_an_op", False))


def as_function(fn: object) -> type[Function] | None:
    """The Function class, if fn is one or its `apply`; else None."""
    owner = fn if isinstance(fn, type) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    """A contiguous copy: code that reads memory directly may rely on it. Variants try other layouts."""
    if not is_float(value):
        return copy_argument(value)
    wanted = value.dtype if dtype is None else dtype.to_complex() if value.is_complex() else dtype
    copy = value.detach().to(wanted)
    strided = copy.layout is torch.strided
    return copy.clone(memory_format=torch.contiguous_format) if strided else copy.clone()


def real(value: Tensor) -> Tensor:
    """Real and imaginary parts of a complex tensor; a sparse tensor as a dense one."""
    return pytree.as_real(value if value.layout is torch.strided else value.to_dense())


# Derivatives of a map in reverse and forward mode. The gradient and the tangent of a map are maps, so
# these functions compute second derivatives, too. They use `torch.autograd` unless torch.func is asked
# for: its transforms are wrong through some of torch's own layers.


def gradient(
    function: TensorMap, count: int, by: Sequence[int] | None = None, *, create_graph: bool = True
) -> TensorMap:
    """The map (x, u) -> J(x)^T u: the gradient by all or some of the first `count` arguments.

    Backward gets copies of u: a backward that works in place must not affect other checks.
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
    """The map x -> J(x)^T u(y), u = w (1 + y / s): the gradient of sum w (y + y^2 / 2s) for outputs y.

    values: the outputs at some point. s is twice their size, so that both terms of u count, and u is
    nowhere zero.
    """
    sizes = [2 * max_abs(y) or 1.0 for y in values]

    def composed(*x: Tensor) -> list[Tensor]:
        return [y + y * (y / (2 * s)) for y, s in zip(function(*x), sizes, strict=True)]

    return lambda *x: gradient(composed, len(x))(*x, *weights)


def stack_outputs(function: TensorMap, values: Tensors) -> Iterator[TensorMap]:
    """The function followed by torch.stack and unbind, along each dimension: the gradients of its
    outputs are then views of one tensor. Yields nothing for one output, or for different shapes."""
    if len(values) < 2 or len({y.shape for y in values}) > 1:
        return
    for dim in range(values[0].dim() + 1):
        yield lambda *x, dim=dim: list(torch.stack(function(*x), dim).unbind(dim))


def at_leaves(function: TensorMap, x: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves with the values x, and the outputs of the map there, with their graph."""
    leaves = [y.detach().clone().requires_grad_() for y in x]
    return leaves, function(*leaves)


def grad(outputs: Tensors, inputs: Tensors, weights: Tensors | None = None, **more: Any) -> Vector:
    """The gradients of the weighted sum of all outputs with a graph; zeros if no output has one.

    more: for `gradients`; with unhandled=True, TorchFunctionModes do not intercept autograd.grad, so
    that they see the torch calls inside backward.
    """
    weights = list(map(torch.ones_like, outputs)) if weights is None else weights
    live = [(y, u.clone()) for y, u in zip(outputs, weights, strict=True) if y.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in inputs]
    values, factors = zip(*live, strict=True)
    found = gradients(values, inputs, factors, **more)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def tangent(function: TensorMap, count: int, *, by_torch_func: bool = False) -> TensorMap:
    """The map (x, t) -> J(x) t in forward mode, by torch.func (which nests) or by dual tensors."""
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

    The graph is kept from one covector to the next; it is rebuilt if it allows only one backward pass.
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
    """J(x) v in forward mode, for a direction v of input j."""

    def moved(*y: Tensor) -> Vector:
        return f(*x[:j], *y, *x[j + 1 :])

    pushed = tangent(moved, 1, by_torch_func=by_torch_func)
    return [t.detach() for t in pushed(x[j].detach().clone(), v)]


def _tangent(y: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if found is None else torch.zeros_like(y) + found
