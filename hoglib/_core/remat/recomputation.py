"""Recomputation in backward instead of saved intermediate values, as `jax.checkpoint` does.

A custom Function saves the inputs of `fn`, and its backward is the vjp of `fn` at those inputs. That
vjp is run by *the same Function*: so it saves only its own inputs too, and derivatives of every order
are recomputed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from hoglib._core.messages import closures, validation
from hoglib._core.modules.state import RunState
from hoglib._core.modules.swap import batch_statistics, keep_swapped
from hoglib._core.numerics.trust import SUMS, agree
from hoglib._core.remat.block_parts import (
    PartsWatch,
    SlicedOperations,
    replaced_forwards,
    version_of,
)
from hoglib._core.runtime.ambient import AMBIENT, CallerState, RunningRemat, inside, replaced
from hoglib._core.runtime.provided import provided
from hoglib._core.substrate.autograd import materialize_grads, no_forward_mode
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.torch_api import pytree, torch_forward_mode, torch_internals
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_modes import (
    ActiveStandIns,
    AutocastState,
    ContiguousDropout,
    only_plain_operations,
    without_stand_ins,
)
from hoglib.errors import ArgumentValueError, NondeterministicError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])
Tensors = tuple[Tensor | None, ...]


def remat(fn: F, *, compile: bool | str = False) -> F:
    r"""A function whose intermediate values are recomputed in backward instead of kept in memory.

        y = fn(x)        g -> vjp(fn, x)(g), recomputed from x
        h -> vjp(vjp(fn), (x, g))(h), recomputed from (x, g), and so on to any order
        v -> jvp(fn, x)(v), recomputed from (x, v) in its own backward

    Derivatives of any order can be taken by `torch.autograd` (`create_graph=True`) and inside
    `torch.func.{grad, vjp, vmap, jacrev, hessian}` and in forward mode (`jvp`, `jacfwd`, dual tensors),
    whose tangents come from one more run of fn. Each order runs fn once more. Under a tracer
    (torch.compile, make_fx) fn runs without recomputation, and the compiler decides what to keep. Of
    nested remats only the outermost recomputes.

    A recomputation runs under the conditions of the first run: the states of random generators (also of
    those among the arguments and in the closure), autocast, and the train or eval mode of modules. It
    changes no buffer: the running statistics of a train-mode BatchNorm are updated once, by the first
    run, and not at all inside torch.func transforms, where torch cannot. fn runs without a graph of its
    own; derivatives inside it are taken by `torch.func.grad`, or with respect to tensors made inside.

    Args:
        fn: A function of tensors, or an `nn.Module`, whose parameters and buffers become inputs, so
            that they receive gradients. Arguments and result are any pytrees. A module among the
            arguments is treated like fn; what is neither tensor nor module is passed unchanged.
        compile: Run fn and its vjps in reverse mode as compiled graphs, each one for all calls whose
            modules and arguments are equal but for their tensors, as those of the blocks of a network:
            True for inductor, "eager" to run the captured graphs by torch. In forward mode and inside
            torch.func transforms fn runs as it is.
    Returns:
        A function with the signature and the values of fn. An input that the result does not depend on
        has the gradient None, as without remat.
    Raises:
        ArgumentTypeError: if fn is not callable.
        ArgumentValueError: if the closure, globals, defaults, partial arguments or self of fn hold
            tensors or modules, because these would receive no gradient (functions of installed
            libraries are not searched); if a module has unregistered parameters; and, at a call, if fn
            changes an input in place.
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 12; `jax.checkpoint`.
    Example:
        >>> f = hog.ops.remat(lambda x: x.sin().exp())
        >>> x = torch.tensor(0.5, requires_grad=True)
        >>> (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        >>> torch.autograd.grad(g, x)
        (tensor(0.4696),)
    """
    validation.function("fn", fn)
    backend = validation.backend("compile", compile)
    if getattr(fn, "_rematerialized", False):
        if not backend:
            return fn
        fn = fn.__wrapped__  # type: ignore[attr-defined]
    hidden = isinstance(fn, nn.Module)
    refuse: Callable[..., Any] = closures.refuse_hidden if hidden else closures.refuse
    refuse("remat", fn)

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if torch_internals.tracing():
            return fn(*args, **kwargs)
        if isinstance(fn, nn.Module):
            return recompute(_call_module, fn, args, kwargs, backend=backend)
        # Checked at each call, because the closure may have changed.
        # of the closure, which draw again in backward
        generators = closures.refuse("remat", fn)
        return recompute(fn, *args, generators=generators, keywords=kwargs, backend=backend)

    update_wrapper(rematerialized, fn, updated=())
    rematerialized._rematerialized = True  # type: ignore[attr-defined]
    return cast(F, rematerialized)


def recompute(
    fn: Callable[..., Any],
    *args: Any,
    generators: Sequence[torch.Generator] = (),
    keywords: dict[str, Any] | None = None,
    modes_of: Sequence[nn.Module] = (),
    nested: bool = False,
    backend: str = "",
    is_part: bool = False,
    by_tangents: "ByTangents | None" = None,
) -> Any:
    """fn(*args, **keywords) as `remat` runs it, without the check of what fn closes over.

    modes_of: modules, besides those among the arguments, whose train or eval mode is restored.
    nested: whether remats inside fn recompute too, outside of torch.func transforms, which refuse it.
    backend: of `hoglib.compile`, which compiles fn and its vjps in reverse mode; "" for none.
    is_part: whether a remat around the caller has left it to this one to recompute.
    by_tangents: fn is a loss, whose gradient is differentiated forward over reverse.
    """
    keywords = keywords or {}
    if not is_part and _is_bypassed():
        return fn(*args, **keywords)
    leaves, structure = pytree.flatten((args, keywords))
    call = _Call(fn, leaves, structure, backend)
    call.is_part, call.by_tangents = is_part, by_tangents
    # torch.func refuses a Function within itself by an internal assertion
    call.nested = nested and not torch_internals.transforms_active()
    call.mixed = call.mixed or by_tangents is not None
    tensors = call.tensors(leaves)
    if not tensors:
        return fn(*args, **keywords)
    with without_stand_ins():  # fn itself runs with them, see `_Call._call`
        modules = [*call.scope.modules(), *modes_of]
        own = [x for m in modules for x in vars(m).values() if isinstance(x, torch.Generator)]
        call.run_state = RunState(tensors, [*generators, *_generators_among(leaves), *own], modules)
        return call.result(_run_recomputed(call.first, tensors))


def _call_module(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _is_bypassed() -> bool:
    """Whether fn runs without the Function: nothing would be saved, or a derivative be wrong."""
    no_graph = not torch.is_grad_enabled() and not torch_internals.transforms_active()
    within = AMBIENT.remat is not None and not AMBIENT.remat.nested
    return no_graph or within or torch_internals.tracing() or only_plain_operations()


def _generators_among(leaves: list[Any]) -> list[torch.Generator]:
    """The generators among the arguments. Refuses objects that hold a tensor."""
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module):
            continue
        for capture in closures.held(leaf):
            if isinstance(capture.value, torch.Generator):
                found.append(capture.value)
                continue
            raise ArgumentValueError(
                f"remat: expected tensors and modules as separate arguments, or in lists, tuples and "
                f"dicts, got a {type(leaf).__name__} that holds one ({capture.path}): it would receive "
                f"no gradient. Pass it separately from the {type(leaf).__name__}, or register the type "
                f"with torch.utils._pytree.register_pytree_node."
            )
    return found


def _run_recomputed(run: Any, tensors: Sequence[Tensor | None]) -> Tensors:
    """run(*tensors) by the Function; values and tangents by one run, where there are tangents."""
    tangents = torch_forward_mode.tangents_without_graph(tensors)
    if tangents is not None:
        run = _WithTangents(run, len(tensors), tangents)
    return _Recompute.apply(run, *tensors)


class _Call:
    """The arguments of one call without its tensors, which only the graph may keep alive."""

    run_state: RunState
    # the results without their tensors, their structure, and the places of the tensors among them
    outputs: list[Any]
    output_structure: Any
    output_slots: list[int]

    def __init__(
        self, fn: Callable[..., Any], leaves: list[Any], structure: Any, backend: str
    ) -> None:
        self.fn, self.structure, self.backend = fn, structure, backend
        self.template: Any = None  # for the compiler
        self.nested = self.is_part = self.slices = False
        self.by_tangents: ByTangents | None = None
        self.value: Tensor | None = None  # of the first run, where it is a loss
        self.parts: list[nn.Module] = []  # which are recomputed one by one
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.scope = _Scope([leaf for leaf in leaves if isinstance(leaf, nn.Module)])
        self.transformed = torch_internals.transforms_active()
        self.stand_ins = ActiveStandIns()
        # some runs will be inside of torch.func, which orders random numbers in its own way
        by_func = torch_internals.forward_mode_active() and not torch_forward_mode.in_dual_level()
        self.mixed = self.transformed or by_func
        self.changed_buffers: dict[int, Tensor] = {}  # as they were before the first run
        self.first, self.rerun = Run(self, self._first), Run(self, self._rerun)

    def with_parts(self, fn: Callable[..., Any], constants: list[Any]) -> "_Call":
        """This call with another function, and modules in the place of its own, to be captured: its
        runs are without side effects."""
        own = copy(self)
        own.fn, own.constants = fn, constants
        own.scope = _Scope([x for x in constants if isinstance(x, nn.Module)])
        own.run_state, own.parts = self.run_state.without_modules(), []
        own.first = own.rerun = Run(own, own._captured)
        return own

    def adopt_outputs(self, other: "_Call") -> None:
        """Takes the structure of the outputs from an equal call."""
        self.outputs, self.output_structure = list(other.outputs), other.output_structure
        self.output_slots = other.output_slots

    def _captured(self, tensors: Tensors) -> Tensors:
        state: Any = {name: tensors[i] for name, i in self.state_names.items()}
        run = partial(self._call, tensors)
        return self._take_tensors(
            functional_call(self.scope, state, (run,), tie_weights=False) if state else run()
        )

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        """Tensor arguments, then parameters, then buffers of modules; shared tensors appear once.

        An argument that is a parameter too appears as both: its gradients are apart."""
        places = {id(leaves[i]): i for i in reversed(self.slots)}  # of the first of equal ones
        tensors = [leaves[i] for i in self.slots if places[id(leaves[i])] == i]
        order = {id(x): place for place, x in enumerate(tensors)}
        self.places = [order[id(leaves[i])] for i in self.slots]
        self.arguments = len(tensors)
        index: dict[int, int] = {}
        # name of a parameter or buffer -> index of its tensor
        self.state_names: dict[str, int] = {}
        for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
            start = len(tensors)
            for prefix, module in self.scope.named_modules():
                for name, tensor in kind(module, recurse=False, remove_duplicate=False):
                    if id(tensor) not in index:
                        index[id(tensor)] = len(tensors)
                        tensors.append(tensor)
                    self.state_names[f"{prefix}.{name}"] = index[id(tensor)]
        self.buffers = range(start, len(tensors))
        return tensors

    def _first(self, tensors: Tensors) -> Tensors:
        """The first run, with the function's side effects on its modules where torch allows them."""
        versions = [version_of(tensor) for tensor in tensors]
        # torch cannot change buffers inside of torch.func
        if self.transformed:
            outputs = self._watching_parts(tensors)
        else:
            before = {i: cast(Tensor, tensors[i]).clone() for i in self.buffers}
            outputs = self._call(tensors)
            self.changed_buffers = {
                i: copy for i, copy in before.items() if version_of(tensors[i]) != versions[i]
            }
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(tensor) != version and i not in self.buffers:
                raise ArgumentValueError(
                    f"remat: expected a function that does not change its inputs, got "
                    f"`{closures.name_of(self.fn)}`, which changed {validation.describe(tensor)} "
                    f"in place, so that it cannot be run again. Change a copy, `x = x.clone()`, or "
                    f"return the new value."
                )
        found = self._take_tensors(outputs)
        if self.by_tangents is not None:
            # a copy: the memory of torch's mse_loss is that of all its terms
            # compared with the loss that backward computes again
            self.value = torch_internals.unwrap(found[0]).detach().clone()
        return found

    def _watching_parts(self, tensors: Tensors) -> Any:
        """Runs the function, and sees which parts of its modules can be recomputed alone."""
        if self.is_part or not torch_internals.forward_mode_active():
            return self._with_state(tensors)
        watch = PartsWatch([*self.scope.held])
        with watch.watching():
            outputs = self._with_state(tensors)
        self.parts = watch.recomputable()
        return outputs

    @contextmanager
    def in_small_parts(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, a run takes less memory: these parts are recomputed one by one, and operations run on
        slices."""
        if torch_internals.tracing():  # a compiler decides what is kept
            yield
            return
        recomputed = replaced_forwards(parts, lambda p: partial(_recompute_part, p, p.forward))
        with replaced([(vars(self), "slices", True)]), recomputed:
            yield

    def _take_tensors(self, outputs: Any) -> Tensors:
        """The tensors among the outputs; their structure is kept."""
        leaves, self.output_structure = pytree.flatten(outputs)
        for leaf in leaves:
            held = () if isinstance(leaf, Tensor) else closures.held(leaf)
            if kept := next((one for one in held if isinstance(one.value, Tensor)), None):
                raise ArgumentValueError(
                    f"remat: expected results in tuples, lists and dicts, got a {type(leaf).__name__} "
                    f"that holds a tensor ({kept.path}) from `{closures.name_of(self.fn)}`; it would "
                    "have no gradient. Return a tuple or dict, or register the type with "
                    "torch.utils._pytree.register_dataclass."
                )
        self.outputs = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.output_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return tuple(leaves[i] for i in self.output_slots)

    def _rerun(self, tensors: Tensors) -> Tensors:
        with self.run_state.restored():
            outputs = self._with_state(tensors)
        return tuple(leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, Tensor))

    def _with_state(self, tensors: Sequence[Tensor | None]) -> Any:
        """Runs the function with these tensors as the modules' parameters and buffers."""
        if not self.state_names:
            return self._call(tensors)
        swapped = {i: self._unchanged(i, tensors[i]) for i in self.state_names.values()}
        state: Any = {name: swapped[i] for name, i in self.state_names.items()}
        run = partial(self._call, tensors)
        with batch_statistics(self.scope):
            return functional_call(self.scope, state, (run,), tie_weights=False)

    def _unchanged(self, index: int, tensor: Tensor | None) -> Tensor | None:
        """The tensor; of a buffer that fn may change, a copy from before the first run."""
        if index in self.changed_buffers:
            return self.changed_buffers[index].clone()
        if tensor is not None and self.transformed and index in self.buffers:
            return tensor.clone()
        return tensor

    def _call(self, tensors: Sequence[Tensor | None]) -> Any:
        leaves = list(self.constants)
        for i, place in zip(self.slots, self.places, strict=True):
            leaves[i] = tensors[place]
        args, keywords = given = pytree.unflatten(leaves, self.structure)
        nested = self.nested and (AMBIENT.remat is None or AMBIENT.remat.nested)
        # the mode that is entered last sees a call first: operations are cut into slices, whose dropout
        # is made contiguous, and a stand-in takes what is left
        with (
            inside(remat=RunningRemat(nested, self.slices)),
            self.stand_ins.resume(),
            self.run_state.autocast.restored(),
            ContiguousDropout() if self.mixed else nullcontext(),
            SlicedOperations() if self.slices else nullcontext(),
        ):
            outputs = self.fn(*args, **keywords)
        refuse_changed(self.fn, given, self.structure)
        return outputs

    def result(self, tensors: Tensors) -> Any:
        leaves, self.outputs = self.outputs, []
        for i, tensor in zip(self.output_slots, tensors, strict=True):
            leaves[i] = tensor
        return pytree.unflatten(leaves, self.output_structure)


class _Scope(nn.Module):
    """The modules of a call as one module, for `functional_call`."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def inside_recomputation() -> bool:
    """Whether the caller is run by a remat, for the first time or again."""
    return AMBIENT.remat is not None


def refuse_changed(fn: Callable[..., Any], arguments: Any, structure: Any) -> None:
    """Raises if a function has changed a list or dict among its arguments, whose structure was this."""
    if pytree.flatten(arguments)[1] != structure:
        raise ArgumentValueError(
            f"remat: expected a function that returns what it computes, got `{closures.name_of(fn)}`, "
            "which changes a list or dict among its arguments; what it puts there would have no "
            "gradient. Return it."
        )


@final
class Run:
    """A call of the user's function as a function of its tensors: the first run, or a later one."""

    padded_inputs, by_tangents, as_tangents = frozenset[int](), None, False
    key = ("the forward",)  # which level it is, for calls that are equal

    def __init__(self, call: "_Call", body: Callable[[Tensors], Tensors]) -> None:
        self.call, self.body = call, body

    @property
    def rerun(self) -> "Run":
        return self.call.rerun

    def uses(self, index: int) -> bool:
        return index not in self.call.changed_buffers

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        return self.body(tensors)


class _Recompute(torch.autograd.Function):
    """Runs a function of tensors and saves its inputs; its backward runs the vjp by this Function, and
    its jvp the function of inputs and tangents. (torch alone takes the second derivative of a jvp for
    zero where two levels of forward mode meet; not where it is again a Function with a jvp.)"""

    generate_vmap_rule = True
    recomputes = True

    @staticmethod
    def forward(run: Callable[..., Tensors], *inputs: Tensor | None) -> Tensors:
        outputs = _run_level(run, *inputs)
        if torch_internals.forward_mode_active():  # a view would share its tangent with the input
            return _without_views(outputs, inputs)
        # Autograd does not save an input that is an output too.
        ids = {id(x) for x in inputs}
        return tuple(y if y is None or id(y) not in ids else y.view_as(y) for y in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: Tensors) -> None:
        run, *tensors = inputs
        ctx.rerun, ctx.count, ctx.caller = run.rerun, len(tensors), CallerState()
        ctx.computed = run if isinstance(run, _WithTangents) else None
        ctx.saved = [i for i, t in enumerate(tensors) if t is not None and ctx.rerun.uses(i)]
        ctx.save_for_backward(*(tensors[i] for i in ctx.saved))
        # the jvp of a Function reads what was saved for forward mode only
        if torch_internals.forward_mode_active():
            ctx.save_for_forward(*(tensors[i] for i in ctx.saved))
        # a cotangent that is zero stays None: nothing is computed with it, in any order
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in outputs if y is not None and not is_float(y)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # autograd runs the backward of a device in a thread of its own, where the state of the caller
        # does not hold
        with ctx.caller.restored():
            return _backward(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        if ctx.computed is not None:
            return torch_forward_mode.at_this_level(ctx.computed.take())
        inputs = [torch_forward_mode.primal(x) for x in _saved_inputs(ctx)]
        moved = [i for i, t in enumerate(tangents) if t is not None and inputs[i] is not None]
        tensors = (*inputs, *(tangents[i] for i in moved))
        return _Recompute.apply(_Jvp(ctx.rerun, ctx.count, moved), *tensors)


def _saved_inputs(ctx: Any) -> list[Tensor | None]:
    inputs: list[Tensor | None] = [None] * ctx.count
    for i, tensor in zip(ctx.saved, ctx.saved_tensors, strict=True):
        inputs[i] = tensor
    return inputs


def _without_views(outputs: Tensors, inputs: Sequence[Tensor | None]) -> Tensors:
    """The outputs, those that share memory with an input as copies; so are all where that cannot be
    seen, under the vmap of `torch.autograd.grad(is_grads_batched=True)`."""
    given = [x for x in inputs if x is not None]
    if any(map(torch_internals.is_batched, (*given, *(y for y in outputs if y is not None)))):
        return tuple(None if y is None else y.clone() for y in outputs)
    memory = {torch_internals.storage_id(x) for x in given}
    return tuple(
        y.clone() if y is not None and torch_internals.storage_id(y) in memory else y
        for y in outputs
    )


def _backward(ctx: Any, grads: Tensors) -> Any:
    inputs, rerun = _saved_inputs(ctx), ctx.rerun
    needs = ctx.needs_input_grad[1:]
    wanted = [i for i, x in enumerate(inputs) if x is not None and needs[i] and is_float(x)]
    result: list[Tensor | None] = [None] * ctx.count
    if wanted and any(grad is not None for grad in grads):
        if rerun.by_tangents is not None and not any(needs[rerun.count :]):
            found = _forward_over_reverse(rerun.by_tangents, rerun, inputs, wanted, grads)
            for i, tangent in zip(wanted, found, strict=True):
                result[i] = tangent
            return None, *result
        padded = rerun.padded_inputs
        if padded:  # nobody needs these gradients, so that the derivative by them is zero
            at = [inputs[i] if i in padded else None for i in rerun.wanted]
            pairs = zip(grads, at, strict=True)
            grads = tuple(
                torch.zeros_like(x) if g is None and x is not None else g for g, x in pairs
            )
        arrived = [j for j, grad in enumerate(grads) if grad is not None]
        padded = padded or _padded_inputs(rerun, inputs, wanted, arrived)
        wanted = sorted({*wanted, *padded})
        tensors = (*inputs, *(grads[j] for j in arrived))
        vjp = _Vjp(rerun, ctx.count, wanted, arrived, padded)
        grads = _run_level(vjp, *tensors) if _is_bypassed() else _run_recomputed(vjp, tensors)
        for i, grad in zip(wanted, grads, strict=True):
            result[i] = grad if needs[i] else None
    return None, *result


def _run_level(run: Any, *inputs: Tensor | None) -> Tensors:
    """run(*inputs), compiled where that is asked for and no graph and no tangents are needed."""
    if isinstance(run, _Jvp | _WithTangents):
        return run.without_graph(*inputs)
    if not torch_internals.forward_mode_active() and _is_compiled(run):
        return cast(Tensors, provided("compile_level")(run, inputs))
    return run(*inputs)


def _is_compiled(run: Any) -> bool:
    """Whether a level is compiled here, if its tensors have no tangents."""
    differentiated = torch.is_grad_enabled() or torch_internals.transforms_active()
    return bool(run.call.backend) and not differentiated and not torch_internals.tracing()


def _padded_inputs(
    run: Any, inputs: Sequence[Tensor | None], wanted: list[int], arrived: list[int]
) -> frozenset[int]:
    """Arguments whose gradients nobody needs, but that the compiled vjp of equal calls computes: those
    of the first block of a network, whose input is data. One more gradient takes less time than two
    more levels to compile."""
    call = run.call
    if call.template is None or not isinstance(run, Run):
        return frozenset()
    arguments = (i for i in range(call.arguments) if i not in wanted)
    free = {i for i in arguments if (x := inputs[i]) is not None and is_float(x)}
    return call.template.extra_inputs(run, len(inputs), wanted, arrived, free)


class _Derivative:
    """A derivative of a function of tensors, which is itself one: of the same inputs, and then of
    cotangents or tangents.

    padded_inputs: inputs whose gradients are computed only because equal calls need them.
    """

    padded_inputs = frozenset[int]()
    by_tangents: "ByTangents | None" = None  # of the gradient of a loss
    as_tangents = False  # whether a jvp takes its tangents alone: they are then its results

    def __init__(self, run: Any, count: int) -> None:
        self.run, self.count, self.call, self.rerun = run, count, run.call, self
        self.autocast = AutocastState()

    def uses(self, index: int) -> bool:
        return index >= self.count or self.run.uses(index)


class _Vjp(_Derivative):
    """The vjp (inputs, cotangents) -> gradients of the wanted inputs."""

    def __init__(
        self, run: Any, count: int, wanted: list[int], arrived: list[int], padded: frozenset[int]
    ) -> None:
        super().__init__(run, count)
        self.wanted, self.arrived, self.padded_inputs = wanted, arrived, padded
        self.by_tangents = run.call.by_tangents if isinstance(run, Run) else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Which level it is, for calls that are equal."""
        return "the vjp", self.run.key, self.count, (*self.wanted,), (*self.arrived,)

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        inputs, cotangents = tensors[: self.count], tensors[self.count :]
        # What the backward of fn recomputes (a checkpoint in a module) uses the parameters of this run.
        with self.autocast.restored(), keep_swapped():
            # torch.func is slower, and refuses Functions without setup_context.
            if torch_internals.transforms_active():
                return self._by_func(inputs, cotangents)
            return self._by_autograd(inputs, cotangents)

    def _by_autograd(self, inputs: Tensors, cotangents: Tensors) -> Tensors:
        nested = torch.is_grad_enabled()
        with torch.enable_grad():
            own = [None if t is None else self._fresh(i, t, nested) for i, t in enumerate(inputs)]
            outputs = self.run(*own)
        if self.by_tangents is not None:
            self.by_tangents.check(outputs)
        arrived = zip((outputs[j] for j in self.arrived), cotangents, strict=True)
        pairs = [(y, u) for y, u in arrived if y is not None and y.requires_grad]
        if not pairs:
            return (None,) * len(self.wanted)
        values, weights = zip(*pairs, strict=True)
        leaves = [cast(Tensor, own[i]) for i in self.wanted]
        return torch.autograd.grad(values, leaves, weights, create_graph=nested, allow_unused=True)

    def _fresh(self, index: int, tensor: Tensor, nested: bool) -> Tensor:
        """A tensor to differentiate by, connected to the caller's graph if there is one."""
        if nested and tensor.requires_grad:
            return tensor.view_as(tensor)
        tangent = torch_forward_mode.tangent_of(tensor)
        variable = tensor.detach()  # without its tangent
        if index in self.wanted:
            variable.requires_grad_()
        return variable if tangent is None else forward_ad.make_dual(variable, tangent)

    def _by_func(self, inputs: Tensors, cotangents: Tensors) -> Tensors:
        variables: list[Tensor] = []
        pairs: list[tuple[GradientEdge, Tensor]] = []

        def of_wanted(*own: Tensor) -> Tensor:
            arguments = list(inputs)
            for i, variable in zip(self.wanted, own, strict=True):
                arguments[i] = variable
            with self._in_small_parts():
                outputs = self.run(*arguments)
            variables[:] = own
            if self.as_tangents:
                torch_forward_mode.keep_tangents(own)
            if self.by_tangents is not None:
                self.by_tangents.check_value(self.call.value, outputs[self.arrived[0]])
            for j, cotangent in zip(self.arrived, cotangents, strict=True):
                if (y := outputs[j]) is not None and y.requires_grad:
                    pairs.append((get_gradient_edge(y), cast(Tensor, cotangent)))
            return torch.zeros(())

        # Where the graph begins is all that the gradient needs of the outputs: what torch.func.vjp
        # returns, it keeps.
        torch.func.vjp(of_wanted, *(cast(Tensor, inputs[i]) for i in self.wanted))
        if not pairs:
            return tuple(torch.zeros_like(cast(Tensor, inputs[i])) for i in self.wanted)
        edges: Any
        edges, weights = zip(*pairs, strict=True)
        # Other levels have graphs of their own, so this one is freed while the gradient is computed.
        again = torch.is_grad_enabled()
        # seen by the modes: what backward calls may have a stand-in
        found = torch_internals.gradients(
            edges, variables, weights, retain_graph=False, create_graph=again, unhandled=True
        )
        return tuple(found if self.as_tangents else materialize_grads(found, variables))

    def _in_small_parts(self) -> AbstractContextManager[None]:
        """Inside, parts of a block are recomputed one by one, and some operations run on slices, where
        it would keep tangents too."""
        if isinstance(self.run, Run) and torch_forward_mode.gradient_with_tangents():
            call: _Call = self.call
            return call.in_small_parts(call.parts)
        return nullcontext()


def _recompute_part(part: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    def run(part: nn.Module, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return recompute(run, part, args, kwargs, is_part=True)


class _Jvp(_Derivative):
    """The jvp (inputs, tangents of the moved inputs) -> tangents of the outputs."""

    def __init__(self, run: Any, count: int, moved: list[int]) -> None:
        super().__init__(run, count)
        self.moved = moved

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        return self.with_values(*tensors)[1]

    def with_values(self, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        """The outputs and their tangents."""
        inputs, tangents = tensors[: self.count], tensors[self.count :]
        # Dual tensors take less time, and Functions without setup_context. But there is one level of
        # them, and under a gradient their tangents have a graph, and are kept until the level ends.
        # In such a graph torch changes what softmax and logsumexp saved: only where nothing else goes.
        transforms = torch_internals.transforms_active()
        needs = any(x.requires_grad for x in tensors if x is not None)
        recorded = torch.is_grad_enabled() and needs and not transforms
        plain = torch_forward_mode.in_dual_level() or (isinstance(self.run, Run) and not recorded)
        run = self._by_func if transforms or not plain else self._by_duals
        with self.autocast.restored(), keep_swapped():
            try:
                return run(inputs, tangents)
            except RuntimeError as error:
                if not recorded or "setup_context" not in str(error):
                    raise
            self.call.run_state.rewind()
            return self._by_duals(inputs, tangents)

    def without_graph(self, *tensors: Tensor | None) -> Tensors:
        """The same as a constant of every derivative."""
        return self.with_values_without_graph(*tensors)[1]

    def with_values_without_graph(self, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        """The outputs and their tangents as constants of every derivative."""
        known = self.call.by_tangents
        if known is None or not known.needs_graph:
            try:
                with torch.no_grad():
                    return self.with_values(*tensors)
            except NotImplementedError:
                self.call.run_state.rewind()
                if known is not None:
                    known.needs_graph = True
        return self.with_values_detached(*tensors)

    def with_values_detached(self, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        """The same where gradients are enabled: torch has forward mode of some operations, such as the
        backward of silu and of layer norm, only there. The graph that is then made is not needed."""
        with torch.enable_grad():
            found = self.with_values(*(None if x is None else x.detach() for x in tensors))
        values, tangents = (tuple(None if y is None else y.detach() for y in ys) for ys in found)
        return values, tangents

    def _by_duals(self, inputs: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        with torch_forward_mode.dual_tensors():
            own = list(inputs)
            for i, tangent in zip(self.moved, tangents, strict=True):
                own[i] = forward_ad.make_dual(cast(Tensor, inputs[i]), cast(Tensor, tangent))
            with self.call.in_small_parts([]) if isinstance(self.run, Run) else nullcontext():
                outputs = self.run(*own)
            found = [None if y is None else torch_forward_mode.tangent_of(y) for y in outputs]
            values = tuple(torch_forward_mode.primal(y) for y in outputs)
        return values, tuple(
            torch.zeros_like(y) if t is None and y is not None and is_float(y) else t
            for y, t in zip(values, found, strict=True)
        )

    def _by_func(self, inputs: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        moved: list[int] = []  # places of outputs
        constant: list[int] = []
        values: list[Tensor | None] = []
        result: list[Tensor | None] = []

        def of_moved(*variables: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
            arguments = list(inputs)
            for i, variable in zip(self.moved, variables, strict=True):
                arguments[i] = variable
            outputs = self.run(*arguments)
            values[:], result[:] = [None] * len(outputs), [None] * len(outputs)
            for j, y in enumerate(outputs):
                if y is not None:
                    (moved if is_float(y) and not as_tangents else constant).append(j)
            moving = tuple(outputs[j] for j in moved) if moved else variables[0].new_zeros(())
            return moving, tuple(outputs[j] for j in constant)

        as_tangents = self.run.as_tangents
        at: Any = tuple(inputs[i] for i in self.moved)
        with torch_forward_mode.tangents_enabled(True):  # the mode beneath the new level
            found: Any = torch.func.jvp(of_moved, at, tangents, has_aux=True)
        if moved:
            for j, value, tangent in zip(moved, *found[:2], strict=True):
                values[j], result[j] = value, tangent
        for j, value in zip(constant, found[2], strict=True):
            values[j] = value
        if as_tangents:
            result = values
        return tuple(values), tuple(result)


@final
class _ValuesAndTangents(_Jvp):
    """The jvp as a level to compile, which returns the outputs too, before their tangents."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Which level it is, for calls that are equal."""
        return "the jvp", self.run.key, self.count, (*self.moved,)

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        values, tangents = self.with_values_detached(*tensors)
        return *values, *tangents


@final
class _WithTangents(_Derivative):
    """A run whose values are computed together with their tangents, which its jvp then takes."""

    def __init__(self, run: Any, count: int, tangents: Sequence[Tensor | None]) -> None:
        super().__init__(run, count)
        self.rerun = run.rerun
        self._given: Sequence[Tensor | None] = tangents
        self._found: Tensors = ()

    def without_graph(self, *inputs: Tensor | None) -> Tensors:
        given, self._given = self._given, ()
        moved = [i for i, t in enumerate(given) if t is not None and inputs[i] is not None]
        tensors = (*inputs, *(given[i] for i in moved))
        jvp = _ValuesAndTangents(self.run, self.count, moved)
        if _is_compiled(jvp):
            found = provided("compile_level")(jvp, tensors)
            values, tangents = found[: len(found) // 2], found[len(found) // 2 :]
        else:
            values, tangents = jvp.with_values_without_graph(*tensors)
        self._found = _without_views(tangents, tensors)
        return values

    def take(self) -> Tensors:
        """The tangents, which are kept no longer."""
        found, self._found = self._found, ()
        return found


@final
class ByTangents:
    """The gradients of losses are differentiated forward over reverse, in all steps of a loop.

    option, instead: for messages, what asks for it and what to use otherwise.
    """

    def __init__(self, option: str, instead: str) -> None:
        self.option, self.instead = option, instead
        # whether torch has forward mode of an operation only where there is a graph of its backward
        self.needs_graph = False

    def check(self, outputs: Tensors) -> None:
        """Raise for custom Functions in the graph of a loss that have no forward mode."""
        graph = graph_summary(outputs)
        check_custom_functions(graph, self.option)
        for function in (entry.function for entry in graph.functions if entry.by_user):
            if function is not None and not torch_internals.has_forward_mode(function):
                raise UnsupportedError(
                    f"{self.option}: expected custom Functions with setup_context and jvp, got "
                    f"{function.__qualname__}, which has no forward mode. {self.instead}"
                )

    def check_value(self, first: Tensor | None, again: Tensor | None) -> None:
        """Raise for a loss that is another one when it is run again. A device would be waited for."""
        if first is None or again is None or not first.is_cpu:
            return
        again = torch_internals.unwrap(again)
        known = first.shape == again.shape and bool(first.isfinite().all())
        if known and not agree(first, again, SUMS):
            raise NondeterministicError(
                f"{self.option}: expected a loss that is the same when it is run again, got "
                f"{first.tolist()} and {again.tolist()}. Look for random numbers that are not torch's "
                "(NumPy, random), and for modules that count or keep statistics."
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, an error says where torch has no forward mode."""
        try:
            with torch_forward_mode.one_thread_in_forward_mode(self.option):
                yield
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise no_forward_mode(self.option, error, self.instead) from error


def _forward_over_reverse(
    by_tangents: ByTangents,
    gradient: "_Vjp",
    inputs: Sequence[Tensor | None],
    wanted: list[int],
    v: Tensors,
) -> Tensors:
    """The vjp of the gradient of a loss in forward mode: by symmetry

        (d grad_p f / d q)^T v = d/de grad_q f(p + e v)    p what v is of, q what is wanted

    which holds f and its tangents, where reverse mode holds the graph of the gradient.
    """
    moved = [gradient.wanted[j] for j, tangent in enumerate(v) if tangent is not None]
    tensors = *inputs, *(tangent for tangent in v if tangent is not None)
    again = _Vjp(gradient.run, gradient.count, wanted, gradient.arrived, frozenset())
    jvp = _Jvp(again, len(inputs), moved)
    with by_tangents.explained():
        if torch.is_grad_enabled() or torch_internals.transforms_active():
            return _run_recomputed(jvp, tensors)
        again.as_tangents = True
        return _run_level(jvp, *tensors)
