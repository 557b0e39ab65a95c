"""One call of a function as a map between lists of real tensors, the derivatives of such maps, and the
dtype in which a function is judged."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isbuiltin
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, source_location, validation
from hoglib._core.ambient import replaced
from hoglib._core.autograd import Vector, clone_inference_tensors
from hoglib._core.element_differences import TensorMap, element_scales, max_abs, random_like
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.mixed_precision import is_half
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib._core.swap import call_with
from hoglib._core.torch_forward_mode import load_decompositions
from hoglib._core.torch_internals import gradients, settable_precisions, transforms_active
from hoglib._core.torch_library import OPERATORS
from hoglib._core.torch_private import private
from hoglib.errors import UnsupportedError

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")

Tensors = Sequence[Tensor]
Numbered = Sequence[tuple[int, Tensor]]  # with the input or output that each belongs to

# The memory layout of an argument: copies that have it too.
#
#     x[:, :3]      strides (5, 1)      gaps between the rows
#     x.mT          strides (1, 4)      another order of the dimensions
#     x.expand(4)   strides (0,)        one element for all
#
# A Function whose forward calls `contiguous()` saves a copy of the first two, and the input itself
# where that is contiguous: its second derivative is right for some layouts only.


class Layout(NamedTuple):
    """How the dimensions of a tensor are stored, but for the sizes of gaps.

    order: the dimensions of several elements, the innermost one first. gaps: those whose elements are
    further apart than they are long. repeated: those of stride 0.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    repeated: tuple[int, ...]


def layout_of(x: Tensor) -> Layout | None:
    """The layout; None for a contiguous tensor, and for one that cannot be copied with its own."""
    if x.layout is not torch.strided or x.is_contiguous() or type(x) not in (Tensor, nn.Parameter):
        return None
    several = [d for d in range(x.dim()) if x.shape[d] > 1]
    order = sorted((d for d in several if x.stride(d)), key=x.stride)
    extent, gaps = 1, []
    for d in order:
        if x.stride(d) < extent:  # windows that overlap
            return None
        gaps += [d] * (x.stride(d) > extent)
        extent += (x.shape[d] - 1) * x.stride(d)
    return Layout(tuple(order), tuple(gaps), tuple(d for d in several if not x.stride(d)))


def laid_out(x: Tensor, layout: Layout) -> Tensor:
    """x in new memory of that layout, differentiable; a repeated dimension keeps its first element."""
    strides, extent = [0] * x.dim(), 1
    for d in layout.order:
        strides[d] = extent + (d in layout.gaps)
        extent += (x.shape[d] - 1) * strides[d]
    part = x
    for d in layout.repeated:
        part = part.narrow(d, 0, 1)
    memory = x.new_zeros(extent).as_strided_scatter(part, part.shape, strides)
    return memory.as_strided(x.shape, strides)


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    layout = layout_of(like)
    return x if layout is None else laid_out(x, layout)


def copied(x: Tensor) -> Tensor:
    """A detached copy with the same layout."""
    return laid_out_as(x, x.detach().clone())


def fresh(value: Any) -> Any:
    """A copy of what a run may change: a tensor's values, the state of a random generator, the items of
    a container."""
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return pytree.map(fresh, value) if isinstance(value, list | tuple | dict) else value


def seed_all(seed: int = 0) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # where there is no other device, torch.manual_seed notes three stacks for later
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


# Maps between lists of real tensors, and their derivatives in reverse and in forward mode. The gradient
# of a map is a map again, and so is its tangent; so a second derivative is computed by the same
# functions as a first one. All is built on `torch.autograd` unless torch.func is asked for, because
# the transforms of torch.func are wrong through some of torch's own layers.


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


Arrange = Callable[[Tensor], Tensor]
PhaseFixing = Callable[[Tensors], list[Tensor]]


@final
class Call:
    """fn(*inputs), where fn is a function, a Function class or its `apply`, or a module.

    The variables are the floating-point tensors among the leaves of the inputs (only those that require
    grad, if any does), and the trainable parameters of a module. They are copied to the given real
    dtype, or in their own; a complex variable is represented by its real and imaginary parts.
    Everything else is constant, also copied, and so is a tensor that is not strided: one that requires
    grad is refused, because torch has no second derivative by it.

    point: the values of the variables. names: what messages call them. num_inputs: how many of them
    come from the inputs. positions: their positions among the leaves of the inputs and the module's
    state. reseed: whether each call draws the same random numbers. clone: whether fn gets copies,
    because it changes its inputs and declares that. needs_graph: whether the variables have to require
    grad, because fn differentiates by them itself, as a forward does that returns a log-determinant or
    a score. projections: of the variables whose structure is kept (a symmetric matrix stays symmetric),
    each applied before fn gets the variable. layouts: of the variables that fn gets in other memory
    layouts than contiguous ones. fix_phases: fixes the signs or phases of the outputs that a map is
    to, if these are arbitrary.
    """

    reseed = False
    clone = False
    needs_graph = False
    projections: Mapping[int, Arrange] = MappingProxyType({})
    layouts: Mapping[int, Layout] = MappingProxyType({})
    fix_phases: PhaseFixing | None = None

    def __init__(self, fn: Any, inputs: Sequence[Any], dtype: torch.dtype | None) -> None:
        self.name, self.dtype = name_of(fn), dtype
        owner: Any = as_function(fn)
        is_class = owner is not None and isinstance(fn, type)
        self._function: Any = owner.apply if is_class else validation.function("fn", fn)
        leaves, self._structure = pytree.flatten(tuple(clone_inference_tensors(list(inputs))))
        marked = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        wanted = marked if any(marked) else [True] * len(leaves)
        pairs = zip(leaves, wanted, strict=True)
        free = [is_float(x) and x.layout is torch.strided and wants for x, wants in pairs]
        names = ["inputs" + path for path in pytree.paths(tuple(inputs))]
        for name, x, mark in zip(names, leaves, marked, strict=True):
            if mark and x.layout is not torch.strided:
                raise UnsupportedError(
                    f"{self.name}: expected strided tensors where grad is required, got {name} with "
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
        self._keys = list(state)
        self._values = [*values, *state.values()]
        self.positions = [i for i, is_free in enumerate(free) if is_free]
        self._num_leaves = len(leaves)
        self.num_inputs = sum(free[: len(leaves)])
        self.names = [names[i] for i in self.positions]
        self.point = [real(self._values[i]) for i in self.positions]
        self.complex_variables = [self._values[i].is_complex() for i in self.positions]

    def with_settings_of(self, other: "Call") -> "Call":
        for name in ("reseed", "clone", "needs_graph", "projections", "layouts", "fix_phases"):
            setattr(self, name, getattr(other, name))
        return self

    def keep_layouts(self, inputs: Sequence[Any]) -> None:
        """fn gets tensors of the layouts that these inputs have."""
        leaves = pytree.leaves(tuple(inputs))
        layouts = ((i, layout_of(x)) for i, x in enumerate(leaves) if is_float(x))
        found = {i: layout for i, layout in layouts if layout is not None}
        self.layouts = {j: found[i] for j, i in enumerate(self.positions) if i in found}
        for i in found.keys() - set(self.positions):
            self._values[i] = laid_out(self._values[i], found[i])

    def leaves(self, *variables: Tensor, before: Arrange | None = None) -> list[Any]:
        """All leaves of what fn returns for these variables, rearranged by `before`."""
        if self.reseed:
            seed_all()
        # copies at each call: fn may write to its constants, and the next call needs them as they
        # were
        values = [fresh(x) for x in self._values]
        variables_in = zip(self.positions, variables, self.complex_variables, strict=True)
        for j, (slot, x, parts) in enumerate(variables_in):
            own = torch.complex(*x.unbind(-1)) if parts else x
            own = self.projections[j](own) if j in self.projections else own
            if before is not None:
                own = before(own)
            elif j in self.layouts:
                own = laid_out(own, self.layouts[j])
            if not (own.requires_grad or transforms_active()):
                # fn may take a gradient itself
                own = own.detach().requires_grad_() if self.needs_graph else own.view_as(own)
            values[slot] = own.clone() if self.clone else own
        return self._run(values)

    def from_leaves(self) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """A leaf for each variable; the copies of them that fn gets, which it may change in place; and
        all leaves of what it returns."""
        values = [fresh(x) for x in self._values]
        own = [self.value(j).clone().requires_grad_() for j in range(len(self.positions))]
        copies = [x.clone() for x in own]
        for slot, x in zip(self.positions, copies, strict=True):
            values[slot] = x
        return own, copies, self._run(values)

    def _run(self, values: list[Any]) -> list[Any]:
        inputs = pytree.unflatten(values[: self._num_leaves], self._structure)
        if isinstance(self._function, nn.Module):
            state = dict(zip(self._keys, values[self._num_leaves :], strict=True))
            return pytree.leaves(call_with(self._function, state, *inputs))
        return pytree.leaves(self._function(*inputs))

    def map(
        self, which: Sequence[int], *, before: Arrange | None = None, after: Arrange | None = None
    ) -> TensorMap:
        """The map to some of the leaves of what fn returns; `after` rearranges them."""

        def map_(*variables: Tensor) -> list[Tensor]:
            found = self.leaves(*variables, before=before)
            chosen = [found[i] for i in which]
            chosen = chosen if self.fix_phases is None else self.fix_phases(chosen)
            return [real(y if after is None else after(y)) for y in chosen]

        return map_

    def value(self, j: int) -> Tensor:
        """What fn gets for the variable j."""
        return torch.view_as_complex(self.point[j]) if self.complex_variables[j] else self.point[j]

    def run_with_grad(self) -> list[Any]:
        """All leaves of what fn returns when each variable requires grad."""
        return at_leaves(self.leaves, self.point)[1]

    def differentiable(self, *variables: Tensor) -> list[Tensor]:
        """Those that have a graph, as real tensors."""
        return [real(y) for y in self.leaves(*variables) if is_float(y) and y.requires_grad]


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


# Matrix products in full precision, and modes that notice where float64 numbers lose digits.

_BACKENDS: Any = torch.backends  # its members are made at run time
_PRECISION_OWNERS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
    _BACKENDS.cudnn,  # before its older setting, which has to agree with it
)
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, float32 matrix products and convolutions are computed in float32, not in TF32 or less."""
    settings: list[tuple[Any, str, Any]] = [(_BACKENDS, "fp32_precision", "ieee")]
    settings += [(one, "fp32_precision", "ieee") for one in _PRECISION_OWNERS]
    settings += _cudnn_settings()
    settings += [(_BACKENDS.cuda.matmul, name, False) for name in _REDUCED]
    with settable_precisions(), replaced(settings):
        yield


def _cudnn_settings() -> list[tuple[Any, str, Any]]:
    """By the older setting, as some code reads it (`with cudnn.flags(allow_tf32=...)`), which raises
    where the newer ones were set by operator."""
    cudnn = _BACKENDS.cudnn
    try:
        bool(cudnn.allow_tf32)
    except RuntimeError:
        return [(one, "fp32_precision", "ieee") for one in (cudnn.conv, cudnn.rnn)]
    return [(cudnn, "allow_tf32", False)]


DOUBLE = (torch.float64, torch.complex128)


@final
class PrecisionWatch(TorchFunctionMode):
    """Describes three calls, each the first of its kind: one that rounded float64 numbers (`rounded`),
    one that got a number of lower precision which was made inside (`met`), and one that got such a
    number from elsewhere (`foreign`).

    A constant whose digits fit into half precision (1, 0.5, a mask) lost nothing; a Python number has
    no precision to judge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.met = self.foreign = ""
        self._made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        given = [x for x in pytree.leaves((args, kwargs)) if is_float(x)]
        written = args[0] if name == "__setitem__" else result
        results = [y for y in pytree.leaves(written) if is_float(y)]
        if not given or any(self._is_made(x) for x in given):
            self._made += [y for y in results if y.dtype not in DOUBLE]
        if any(y.dtype in DOUBLE for y in results):
            narrow = [x for x in given if _loses_digits(x)]
            made = [x for x in narrow if x.ndim == 0 or self._is_made(x)]
            self.met = self.met or _describe_call(name, "got", made)
            self.foreign = self.foreign or _describe_call(name, "got", narrow)
        elif any(x.dtype in DOUBLE for x in given):
            lossy = [y for y in results if _loses_digits(y)]
            self.rounded = self.rounded or _describe_call(name, "rounded float64 numbers to", lossy)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self._made)


@final
class HalfWatch(TorchDispatchMode):
    """The first operation, if any, that rounds what it was given to half precision: also inside
    backward and under autocast."""

    dtype: torch.dtype | None = None
    where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.dtype is None:
            given = [x for x in pytree.leaves((args, kwargs or {})) if is_float(x)]
            found = [y for y in pytree.leaves(result) if is_float(y) and is_half(y) and y.numel()]
            if found and given:
                self.dtype = found[0].dtype
                self.where = str(source_location.torch_call_line() or "")
        return result


def _describe_call(name: str, did: str, culprits: list[Tensor]) -> str:
    if not culprits:
        return ""
    place = source_location.torch_call_line()
    at = f" at {place}" if place else ""
    return f"`{name}` {did} {validation.describe(culprits[0])}{at}"


def _loses_digits(tensor: Tensor) -> bool:
    """Whether a narrow tensor has digits that half precision would lose: it is no mask or count."""
    if tensor.dtype in DOUBLE or tensor.layout is not torch.strided:
        return False
    values = real(tensor)
    mantissa, _ = torch.frexp(values.detach().double())
    return bool((values.isfinite() & ((mantissa * 2**11).frac() != 0)).any())


# In which dtype a function is judged: float64, unless it refuses that, or works in less anyway.

LINE_POINTS = 6
# In units of rounding. Noise of float64 numbers is far less; more is no rounding, but a step of the
# function.
STEP_SIZES = (1 / 60, 840.0)
NEGLIGIBLE = 1e-4  # of the largest element: less is what cancellation leaves


class DtypeChoice(NamedTuple):
    """A call, and why it is not in float64."""

    call: Call
    refused: str = ""
    computes_narrow: bool = False  # it works in float32 or less, whatever it is given
    half: torch.dtype | None = None  # the dtype, if that is half precision


def call_for(fn: Any, inputs: Sequence[Any], *, own_dtype: bool = False) -> DtypeChoice:
    """The call in float64; in its own dtypes if only these get as far as a second derivative; in
    float32 if it computes in float32 anyway. Raises its error if it does not run at all.

    Args:
        fn: What `verify` takes.
        inputs: Its arguments.
        own_dtype: Whether to leave the dtypes as they are, because it runs code that is not torch's.
    """
    call = Call(fn, inputs, None if own_dtype else torch.float64)
    validation.something_to_differentiate_by(call.names, call.point)
    if own_dtype:
        _run_and_adapt(call)
        return _in_half(call) or DtypeChoice(call, "it runs code that is not torch's")
    reached, error = _stage_reached(call)
    # float64 may be what stops it: its own dtypes are taken if they get further
    if error is not None and any(x.dtype != torch.float64 for x in Call(fn, inputs, None).point):
        own = Call(fn, inputs, None)
        if _stage_reached(own)[0] > reached:
            return _in_half(own) or DtypeChoice(own, format_error(error))
    if error is not None:
        if reached == 0:
            raise error
        return DtypeChoice(call)
    if (half := _in_half(call)) is not None:
        return half
    watch = PrecisionWatch()
    with watch:
        _stage_reached(call)
    # a narrow number somewhere is a fault only if results show it, by steps where float64 is smooth
    met = watch.rounded or watch.met or watch.foreign
    if not (met and _moves_in_steps(call)):
        return DtypeChoice(call)
    narrow = Call(fn, inputs, torch.float32)
    narrow.clone, narrow.needs_graph = call.clone, call.needs_graph
    if _stage_reached(narrow)[0] < reached:
        return DtypeChoice(call)
    given_double = any(x.dtype == torch.float64 for x in Call(fn, inputs, None).point)
    if given_double and not _second_derivatives_agree(call, narrow):
        # a cast that copies, which it does in float64 only, cuts its graph
        return DtypeChoice(call)
    return DtypeChoice(narrow, f"it computes in float32: {met}", computes_narrow=True)


def _in_half(call: Call) -> DtypeChoice | None:
    """The choice for what computes in half precision, if it rounds to that and its values or gradients
    show it; the inputs stay what they are, as all else may be of a higher precision."""
    if any(is_half(x) for x in call.point):
        return None
    watch = HalfWatch()
    with watch:
        _stage_reached(call)
    if watch.dtype is None or not _moves_in_steps(call, torch.finfo(watch.dtype).eps):
        return None
    name = str(watch.dtype).removeprefix("torch.")
    at = f" at {watch.where}" if watch.where else ""
    return DtypeChoice(call, f"it computes in {name}{at}", computes_narrow=True, half=watch.dtype)


def _stage_reached(call: Call) -> tuple[int, Exception | None]:
    """How far a call gets, and the error that ends it: 0 if it does not run, 1 for its values, 2 for
    first derivatives, 3 for second ones."""
    reached = 0
    try:
        _run_and_adapt(call)
        reached = 1
        leaves, values = at_leaves(call.differentiable, call.point)
        grads = grad(values, leaves, create_graph=True, unhandled=True)
        reached = 2
        grad(grads, leaves)
    except Exception as error:
        return reached, error
    return 3, None


def _second_derivatives_agree(wide: Call, narrow: Call) -> bool:
    """Whether the second derivatives are the same, but for digits."""
    found = []
    for call in (wide, narrow):
        leaves, values = at_leaves(call.differentiable, call.point)
        grads = grad(values, leaves, create_graph=True)
        random = torch.Generator().manual_seed(11)
        found.append(grad(grads, leaves, [random_like(g, random) for g in grads]))
    pairs = zip(*found, strict=True)
    return all(max_abs(a - b) <= 0.03 * max(max_abs(a), max_abs(b)) + 1e-6 for a, b in pairs)


def _run_and_adapt(call: Call) -> list[Any]:
    """Runs the call, and sets how it has to be made: `clone` if fn changes its inputs and declares it,
    which autograd allows for no leaf; `needs_graph` if it runs on inputs that require grad only."""
    try:
        found = call.run_with_grad()
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        call.clone = True
        found = call.run_with_grad()
    try:
        call.leaves(*(x.clone() for x in call.point))
    except RuntimeError as error:
        call.needs_graph = "require grad" in str(error)
    return found


def _moves_in_steps(call: Call, eps: float = torch.finfo(torch.float32).eps) -> bool:
    """Whether values or gradients move in steps of the size of eps, where float64 numbers are smooth.

    Along a line of points less than eps apart, second differences of a smooth function are rounding.
    They grow fourfold with twice the distance; those of a staircase do not. The incoming gradients move
    along a line, too: a backward may round these alone.
    """
    random = torch.Generator().manual_seed(7)
    v = [random_like(x, random) * element_scales(x) * eps / 2 for x in call.point]
    try:
        with replaced([(call, "reseed", True)]):
            ends = [_values_and_gradients(call, k, v, k * eps / 2) for k in range(1, LINE_POINTS)]
    except Exception:  # reported by the derivative checks
        return False
    for line in zip(*ends, strict=True):
        size = torch.stack([y.abs() for y in line]).amax(0)
        counts = size > NEGLIGIBLE * max(map(max_abs, line))
        near, far = _second_difference(line, 1), _second_difference(line, 2)
        least, most = eps * STEP_SIZES[0], min(eps * STEP_SIZES[1], 0.5)
        steps = (least * size < near) & (near < most * size) & (far < 2.5 * near)
        if bool((steps & counts).any()):
            return True
    return False


def _second_difference(line: Tensors, stride: int) -> Tensor:
    """The largest second difference of each element."""
    triples = zip(line, line[stride:], line[2 * stride :], strict=False)
    return torch.stack([(a - 2 * b + c).abs() for a, b, c in triples]).amax(0)


def _values_and_gradients(call: Call, k: int, v: Tensors, moved: float) -> list[Tensor]:
    """Values and gradients at the point k of the line, in float64.

    moved: how far the incoming gradients are, relative to their elements.
    """
    point = [x + k * d for x, d in zip(call.point, v, strict=True)]
    leaves, values = at_leaves(call.differentiable, point)
    random = torch.Generator().manual_seed(8)  # not ones: the gradient of a softmax is zero then
    # the second of each pair is how the first one moves
    incoming = [(random_like(y, random), random_like(y, random)) for y in values]
    grads = grad(values, leaves, [u * (1 + moved * r) for u, r in incoming])
    return [t.detach().double() for t in (*values, *grads)]
