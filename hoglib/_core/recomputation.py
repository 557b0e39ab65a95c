"""Recomputation instead of memory: what `jax.checkpoint` is to JAX.

The idea fits in a line: a Function whose backward is the vjp of `fn` at the saved inputs, where that
vjp is run by *the same Function*. So backward saves only its inputs as well, the derivative of the
derivative is recomputed too, and so on to any order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from threading import local
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from hoglib._core import closures, pytree, torch_internals, validation
from hoglib._core.state import AutocastState, RunState
from hoglib._core.swap import batch_statistics, keep_swapped
from hoglib._core.torch_modes import ActiveStandIns, without_stand_ins
from hoglib.errors import ArgumentValueError

F = TypeVar("F", bound=Callable[..., Any])
Tensors = tuple[Tensor | None, ...]


def remat(fn: F) -> F:
    r"""`fn`, with its intermediate values recomputed in backward instead of kept in memory.

        y = fn(x)        g -> vjp(fn, x)(g), run again from x
        h -> vjp(vjp(fn), (x, g))(h), run again from (x, g), and so on

    fn: a function of tensors, or an `nn.Module`, whose parameters and buffers become inputs, so that
    gradients arrive in them. Arguments and result are any pytrees; a module among the arguments is
    lifted in the same way; what is neither tensor nor module is passed as it is. An input that the
    result does not depend on gets None from `torch.autograd`, as it would without remat.

    Orders and modes: any order by `torch.autograd` (`create_graph=True`) and inside
    `torch.func.{grad, vjp, vmap, jacrev, hessian}`; each order runs fn once more. Under forward mode
    (`jvp`, `jacfwd`, dual tensors) fn itself runs, which is right and saves no memory; under a tracer
    (torch.compile, make_fx) likewise, and the compiler decides what to keep. Inside a recomputation
    remat does nothing, so the outermost of nested ones counts.

    A recomputation sees what the first run saw: random generators (those among the arguments and in
    the closure too), autocast, and the train or eval mode of lifted modules. It changes no buffer: the
    running statistics of a train-mode BatchNorm are updated once, by the first run, and inside
    torch.func transforms, where torch cannot, not at all. fn runs without a graph of its own; where
    it needs derivatives inside, it takes them by `torch.func.grad` or by variables of its own.

    Raises ValueError for a function whose closure, globals, defaults, partial arguments or self hold
    tensors or modules, because their gradients would vanish, and shows how to write it (functions of
    installed libraries are trusted); ValueError for a module with unregistered parameters, and for a
    function that changes an input in place.
    Source: Griewank and Walther, Evaluating Derivatives, 2008, ch. 12; `jax.checkpoint`.
    """
    validation.function("fn", fn)
    if getattr(fn, "_rematerialized", False):
        return fn
    if isinstance(fn, nn.Module):
        closures.refuse_hidden("remat", fn)
    else:
        closures.refuse("remat", fn)

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if torch_internals.tracing():
            return fn(*args, **kwargs)
        if isinstance(fn, nn.Module):
            return recompute(_call_module, fn, args, kwargs)
        # Asked again, for what the closure was given since.
        return recompute(fn, *args, generators=closures.refuse("remat", fn), keywords=kwargs)

    update_wrapper(rematerialized, fn, updated=())
    rematerialized._rematerialized = True  # type: ignore[attr-defined]
    return cast(F, rematerialized)


def recompute(
    fn: Callable[..., Any],
    *args: Any,
    generators: Sequence[torch.Generator] = (),
    keywords: dict[str, Any] | None = None,
    modes_of: Sequence[nn.Module] = (),
) -> Any:
    """fn(*args, **keywords) as `remat` runs it, for a caller who vouches for the closure of fn.

    modes_of: modules, beside those among the arguments, whose train or eval mode counts.
    """
    keywords = keywords or {}
    if _runs_as_it_is():
        return fn(*args, **keywords)
    leaves, structure = pytree.flatten((args, keywords))
    call = _Call(fn, leaves, structure)
    tensors = call.tensors(leaves)
    if not tensors:
        return fn(*args, **keywords)
    with without_stand_ins():  # but for fn, which is given them again
        call.surroundings = RunState(
            tensors, [*generators, *_generators(leaves)], [*call.scope.modules(), *modes_of]
        )
        return call.result(_Recompute.apply(call.first, *tensors))


def _call_module(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _runs_as_it_is() -> bool:
    """Where nothing would be saved, or a Function would be wrong or in the way."""
    unrecorded = not torch.is_grad_enabled() and not torch_internals.transforms_active()
    return (
        unrecorded
        or running_again()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
    )


class _Recompute(torch.autograd.Function):
    """Run a function of tensors, save its inputs, and have its vjp run in the same manner."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
        # Autograd will not save an input that is an output too.
        given = {id(x) for x in inputs}
        return tuple(y if y is None or id(y) not in given else y.view_as(y) for y in run(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: Tensors) -> None:
        run, *tensors = inputs
        ctx.again, ctx.count = run.again, len(tensors)
        ctx.kept = [i for i, t in enumerate(tensors) if t is not None and ctx.again.reads(i)]
        ctx.save_for_backward(*(tensors[i] for i in ctx.kept))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(y for y in outputs if y is not None and not _has_derivatives(y))
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs: list[Tensor | None] = [None] * ctx.count
        for i, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            inputs[i] = tensor
        wanted = [
            i
            for i, tensor in enumerate(inputs)
            if tensor is not None and ctx.needs_input_grad[i + 1] and _has_derivatives(tensor)
        ]
        arrived = [j for j, grad in enumerate(grads) if grad is not None]
        result: list[Tensor | None] = [None] * ctx.count
        if wanted and arrived:
            given = (*inputs, *(grads[j] for j in arrived))
            autocast = AutocastState(tensor for tensor in given if tensor is not None)
            vjp = _Vjp(ctx.again, ctx.count, wanted, arrived, autocast)
            run = vjp if _runs_as_it_is() else partial(_Recompute.apply, vjp)
            for i, grad in zip(wanted, run(*given), strict=True):
                result[i] = grad
        return None, *result


class _Vjp:
    """(inputs, cotangents) -> a gradient for each wanted input: a function of tensors once more."""

    def __init__(
        self, run: Any, count: int, wanted: list[int], arrived: list[int], autocast: AutocastState
    ) -> None:
        self.run, self.count, self.wanted, self.arrived = run, count, wanted, arrived
        self.autocast, self.again = autocast, self

    def reads(self, index: int) -> bool:
        return index >= self.count or self.run.reads(index)

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        inputs, cotangents = tensors[: self.count], tensors[self.count :]
        # What backward of fn runs again (a checkpoint in a module) finds the parameters of this run.
        with self.autocast.restored(), keep_swapped():
            # torch.func is slower, and refuses Functions without setup_context.
            by = self._by_func if torch_internals.transforms_active() else self._by_autograd
            return by(inputs, cotangents)

    def _by_autograd(self, inputs: Tensors, cotangents: Tensors) -> Tensors:
        nested = torch.is_grad_enabled()
        with torch.enable_grad():
            own = [None if t is None else self._own(i, t, nested) for i, t in enumerate(inputs)]
            outputs = self.run(*own)
        pairs = [
            (outputs[j], cotangent)
            for j, cotangent in zip(self.arrived, cotangents, strict=True)
            if outputs[j] is not None and outputs[j].requires_grad
        ]
        if not pairs:
            return (None,) * len(self.wanted)
        values, weights = zip(*pairs, strict=True)
        variables = [cast(Tensor, own[i]) for i in self.wanted]
        return torch.autograd.grad(
            values, variables, weights, create_graph=nested, allow_unused=True
        )

    def _own(self, index: int, tensor: Tensor, nested: bool) -> Tensor:
        """A variable of this vjp alone, which is joined to the caller's graph if there is one."""
        if nested and tensor.requires_grad:
            return tensor.view_as(tensor)
        tangent = forward_ad.unpack_dual(tensor).tangent if forward_ad._current_level >= 0 else None
        variable = tensor.detach()  # which drops the tangent as well
        if index in self.wanted:
            variable.requires_grad_()
        return variable if tangent is None else forward_ad.make_dual(variable, tangent)

    def _by_func(self, inputs: Tensors, cotangents: Tensors) -> Tensors:
        def of_wanted(*variables: Tensor) -> tuple[Tensor, ...]:
            filled = list(inputs)
            for i, variable in zip(self.wanted, variables, strict=True):
                filled[i] = variable
            outputs = self.run(*filled)
            return tuple(outputs[j] for j in self.arrived)

        _, pull = torch.func.vjp(of_wanted, *(cast(Tensor, inputs[i]) for i in self.wanted))[:2]
        gradients: Tensors = pull(cotangents)
        return gradients


class _Run:
    """A call of the user's function as a function of its tensors: the first time, or again."""

    def __init__(self, call: "_Call", body: Callable[[Tensors], Tensors]) -> None:
        self.call, self.body = call, body

    @property
    def again(self) -> "_Run":
        return self.call.again

    def reads(self, index: int) -> bool:
        return index not in self.call.changed

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        return self.body(tensors)


class _Call:
    """What one call was given, without its tensors, which only the graph may keep alive."""

    surroundings: RunState

    def __init__(self, fn: Callable[..., Any], leaves: list[Any], structure: Any) -> None:
        self.fn, self.structure = fn, structure
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.scope = _Scope([leaf for leaf in leaves if isinstance(leaf, nn.Module)])
        self.transformed = torch_internals.transforms_active()
        self.standing = ActiveStandIns()
        self.changed: dict[int, Tensor] = {}  # buffers that the first run changed, as they were
        self.first, self.again = _Run(self, self._first), _Run(self, self._again)

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        """Tensor arguments, then the parameters and the buffers of modules, shared ones once."""
        tensors = [leaves[i] for i in self.slots]
        index: dict[int, int] = {}
        self.places: dict[str, int] = {}  # every name of a parameter or buffer -> its tensor
        for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
            start = len(tensors)
            for prefix, module in self.scope.named_modules():
                for name, tensor in kind(module, recurse=False, remove_duplicate=False):
                    if id(tensor) not in index:
                        index[id(tensor)] = len(tensors)
                        tensors.append(tensor)
                    self.places[f"{prefix}.{name}"] = index[id(tensor)]
        self.buffers = range(start, len(tensors))
        return tensors

    def _first(self, tensors: Tensors) -> Tensors:
        """With every side effect that the function has on its modules, where torch can have them."""
        versions = [_version(tensor) for tensor in tensors]
        if self.transformed:
            outputs = self._with_state(tensors)
        else:
            before = {i: cast(Tensor, tensors[i]).clone() for i in self.buffers}
            outputs = self._call(tensors)
            self.changed = {
                i: copy for i, copy in before.items() if _version(tensors[i]) != versions[i]
            }
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if _version(tensor) != version and i not in self.buffers:
                raise ArgumentValueError(
                    f"remat: expected a function that leaves its inputs as they are, got "
                    f"`{closures.name_of(self.fn)}`, which changed {validation.describe(tensor)} "
                    f"in place, so that it cannot be run again; let it work on a copy, "
                    f"`x = x.clone()`, or return the new value."
                )
        leaves, self.output_structure = pytree.flatten(outputs)
        self.outputs = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.output_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return tuple(leaves[i] for i in self.output_slots)

    def _again(self, tensors: Tensors) -> Tensors:
        with self.surroundings.restored():
            outputs = self._with_state(tensors)
        return tuple(leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, Tensor))

    def _with_state(self, tensors: Sequence[Tensor | None]) -> Any:
        """With these tensors in the place of the modules' parameters and buffers."""
        if not self.places:
            return self._call(tensors)
        given = {i: self._undisturbed(i, tensors[i]) for i in self.places.values()}
        state: Any = {name: given[i] for name, i in self.places.items()}
        run = partial(self._call, tensors)
        with batch_statistics(self.scope):
            return functional_call(self.scope, state, (run,), tie_weights=False)

    def _undisturbed(self, index: int, tensor: Tensor | None) -> Tensor | None:
        """A copy of a buffer that fn may change, as it was before the first run."""
        if index in self.changed:
            return self.changed[index].clone()
        if tensor is not None and self.transformed and index in self.buffers:
            return tensor.clone()
        return tensor

    def _call(self, tensors: Sequence[Tensor | None]) -> Any:
        leaves = list(self.constants)
        for i, tensor in zip(self.slots, tensors, strict=False):
            leaves[i] = tensor
        args, keywords = pytree.unflatten(leaves, self.structure)
        with _inside(), self.standing.resume(), self.surroundings.autocast.restored():
            return self.fn(*args, **keywords)

    def result(self, tensors: Tensors) -> Any:
        leaves, self.outputs = self.outputs, []
        for i, tensor in zip(self.output_slots, tensors, strict=True):
            leaves[i] = tensor
        return pytree.unflatten(leaves, self.output_structure)


class _Scope(nn.Module):
    """The modules of a call as one, whose state `functional_call` can exchange."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


_running = local()


@contextmanager
def _inside() -> Iterator[None]:
    before = running_again()
    _running.inside = True
    try:
        yield
    finally:
        _running.inside = before


def running_again() -> bool:
    """Whether the caller is what a recomputation runs, or its first run."""
    return getattr(_running, "inside", False)


def _generators(leaves: list[Any]) -> list[torch.Generator]:
    """The generators among the arguments; an argument that hides a tensor is refused."""
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module):
            continue
        for capture in closures.held(leaf):
            if isinstance(capture.value, torch.Generator):
                found.append(capture.value)
                continue
            raise ArgumentValueError(
                f"remat: expected tensors and modules as arguments of their own, or in lists, tuples "
                f"and dicts, got a {type(leaf).__name__} that holds one ({capture.path}): no gradient "
                f"would reach it. Pass it beside the {type(leaf).__name__}, or register the type with "
                f"torch.utils._pytree.register_pytree_node."
            )
    return found


def _has_derivatives(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _version(tensor: Tensor | None) -> int:
    # Inference tensors count no changes.
    return 0 if tensor is None or tensor.is_inference() else tensor._version
