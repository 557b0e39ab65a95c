"""Recomputation in backward instead of saved intermediate values, as `jax.checkpoint` does.

A custom Function saves the inputs of `fn`. Its backward applies the same Function to the vjp of `fn`,
so that the vjp saves only its inputs too, and derivatives of every order are recomputed.

    level    a function that the Function runs: `fn`, the vjp or jvp of `fn`, the vjp of the vjp, ...
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hoglib._core.messages import closures, validation
from hoglib._core.modules.state import RunState
from hoglib._core.modules.swap import keep_swapped
from hoglib._core.remat.block_parts import replaced_forwards
from hoglib._core.remat.call import ByTangents, Call, FirstRun, Inputs, Level, Run, Tensors
from hoglib._core.runtime.ambient import AMBIENT, CallerState
from hoglib._core.runtime.freed_memory import return_freed_memory
from hoglib._core.runtime.provided import provided
from hoglib._core.substrate.autograd import materialize_grads
from hoglib._core.torch_api import torch_forward_mode, torch_internals
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_modes import (
    ActiveStandIns,
    AutocastState,
    only_plain_operations,
    without_stand_ins,
)
from hoglib.errors import ArgumentValueError

F = TypeVar("F", bound=Callable[..., Any])


def remat(fn: F, *, compile: bool | str = False) -> F:
    r"""A function whose intermediate values are recomputed in backward instead of kept in memory.

        y = fn(x)        g -> vjp(fn, x)(g), recomputed from x
        h -> vjp(vjp(fn), (x, g))(h), recomputed from (x, g), and so on to any order
        v -> jvp(fn, x)(v), recomputed from (x, v) in its own backward

    Derivatives of any order can be taken by `torch.autograd` (`create_graph=True`), inside
    `torch.func.{grad, vjp, vmap, jacrev, hessian}`, and in forward mode (`jvp`, `jacfwd`, dual
    tensors), which computes tangents in one more run of fn. Each order runs fn once more. While
    torch.compile or make_fx traces, fn runs without recomputation, and the compiler decides what to
    keep. Of nested remats only the outermost recomputes.

    A recomputation runs under the conditions of the first run: the states of random generators (also of
    generators among the arguments and in the closure), autocast, and the train or eval mode of modules.
    It changes no buffer: the first run updates the running statistics of a train-mode BatchNorm once;
    inside torch.func transforms, where torch cannot update them, no run does. fn runs without a graph;
    take derivatives inside it by `torch.func.grad`, or with respect to tensors made inside.

    Args:
        fn: A function of tensors, or an `nn.Module`, whose parameters and buffers become inputs, so
            that they receive gradients. Arguments and result are any pytrees. A module among the
            arguments is treated like fn; other objects than tensors and modules are passed unchanged.
        compile: Run fn and its vjps in reverse mode as compiled graphs: True for inductor, "eager" to
            run the captured graphs by torch. Calls with modules and arguments that differ only in
            their tensors, such as the blocks of a network, share the graphs. In forward mode and
            inside torch.func transforms fn runs uncompiled.
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
    refuse: Any = closures.refuse_hidden if isinstance(fn, nn.Module) else closures.refuse
    refuse("remat", fn)

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if torch_internals.tracing():
            return fn(*args, **kwargs)
        if isinstance(fn, nn.Module):
            return recompute(_call_module, fn, args, kwargs, backend=backend)
        # Checked at each call: the closure may have changed. Backward rewinds its generators.
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
    by_tangents: ByTangents | None = None,
) -> Any:
    """Run fn(*args, **keywords) as `remat` does, without a check of the closure of fn.

    generators: random generators in the closure of fn; a rerun rewinds them.
    modes_of: modules in the closure of fn; a rerun restores their train or eval modes.
    nested: remats inside fn recompute too, except inside torch.func transforms.
    backend: compiles fn and its vjps in reverse mode, see `hoglib.compile`; "" for none.
    is_part: fn is a part of a block, and the remat of the block leaves its recomputation to this call.
    by_tangents: fn is a loss; its gradient is differentiated forward over reverse.
    """
    keywords = keywords or {}
    if not is_part and _is_bypassed():
        return fn(*args, **keywords)
    inputs, tensors = Inputs.of((args, keywords))
    if not tensors:
        return fn(*args, **keywords)
    transformed, stand_ins = torch_internals.transforms_active(), ActiveStandIns()
    by_func = torch_internals.forward_mode_active() and not torch_forward_mode.in_dual_level()
    contiguous = transformed or by_func or by_tangents is not None
    nested = nested and not transformed  # torch.func fails an assertion on a Function in a Function
    with without_stand_ins():  # fn itself runs with them, see `Call.run`
        modules = [*inputs.scope.modules(), *modes_of]
        own = [x for m in modules for x in vars(m).values() if isinstance(x, torch.Generator)]
        drawn_from = [*generators, *_generators_among(inputs.arguments.leaves), *own]
        run_state = RunState(tensors, drawn_from, modules)
        call = Call(
            fn, inputs, run_state, stand_ins, transformed, contiguous, nested, backend, by_tangents
        )
        first = FirstRun(call, is_part)
        return first.result(_run_recomputed(first, tensors))


def _call_module(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _is_bypassed() -> bool:
    """Whether fn runs without the Function, which would save no memory or give wrong derivatives."""
    no_graph = not torch.is_grad_enabled() and not torch_internals.transforms_active()
    within = AMBIENT.remat is not None and not AMBIENT.remat.nested
    return no_graph or within or torch_internals.tracing() or only_plain_operations()


def _generators_among(leaves: list[Any]) -> list[torch.Generator]:
    """The generators among arguments, or in them. Refuses objects that hold a tensor or a module."""
    objects = [x for x in leaves if x is not None and not isinstance(x, nn.Module)]
    held = [(leaf, capture) for leaf in objects for capture in closures.held(leaf)]
    for leaf, capture in held:
        if not isinstance(capture.value, torch.Generator):
            raise ArgumentValueError(
                f"remat: expected tensors and modules as separate arguments, or in lists, tuples and "
                f"dicts, got a {type(leaf).__name__} that holds one ({capture.path}): it would receive "
                f"no gradient. Pass it separately from the {type(leaf).__name__}, or register the type "
                f"with torch.utils._pytree.register_pytree_node."
            )
    return [capture.value for _, capture in held]


def _run_recomputed(run: Level, tensors: Sequence[Tensor | None]) -> Tensors:
    """run(*tensors) by the Function; if inputs have tangents, one run computes values and tangents."""
    tangents = torch_forward_mode.tangents_without_graph(tensors)
    if tangents is not None:
        run = _WithTangents(run, len(tensors), tangents)
    return _Recompute.apply(run, *tensors)


def inside_recomputation() -> bool:
    """Whether a remat runs the caller, for the first time or again."""
    return AMBIENT.remat is not None


class _Recompute(torch.autograd.Function):
    """Runs a level and saves its inputs. backward() and jvp() apply this Function to its vjp and jvp.

    jvp() cannot compute the tangents directly: torch returns 0 for a jvp of the jvp of a Function,
    unless that jvp is itself a Function with a jvp.
    """

    generate_vmap_rule = True
    recomputes = True

    @staticmethod
    def forward(run: Level, *inputs: Tensor | None) -> Tensors:
        outputs = _run_level(run, *inputs)
        if torch_internals.forward_mode_active():  # a view shares the tangent of its base
            return _without_views(outputs, inputs)
        # Autograd refuses to save an input that is also an output.
        ids = {id(x) for x in inputs}
        return tuple(y if y is None or id(y) not in ids else y.view_as(y) for y in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: Tensors) -> None:
        run, *tensors = inputs
        ctx.rerun, ctx.count, ctx.caller = run.rerun(), len(tensors), CallerState()
        ctx.computed = run if isinstance(run, _WithTangents) else None  # for jvp()
        changed = ctx.rerun.changed_buffers
        # the rerun has its own copies of buffers that the first run changed
        ctx.saved = [i for i, t in enumerate(tensors) if t is not None and i not in changed]
        ctx.save_for_backward(*(tensors[i] for i in ctx.saved))
        # jvp() gets only the tensors of save_for_forward()
        if torch_internals.forward_mode_active():
            ctx.save_for_forward(*(tensors[i] for i in ctx.saved))
        # Zero cotangents stay None, so that no order computes with them.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in outputs if y is not None and not is_float(y)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # Autograd runs a device's nodes on a worker thread, which lacks the caller's AMBIENT.
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
    saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
    return [*map(saved.get, range(ctx.count))]


def _without_views(outputs: Tensors, inputs: Sequence[Tensor | None]) -> Tensors:
    """The outputs, cloned where they share memory with an input.

    All are cloned under the vmap of `torch.autograd.grad(is_grads_batched=True)`, which hides storages.
    """
    given = [x for x in inputs if x is not None]
    if any(map(torch_internals.is_batched, (*given, *(y for y in outputs if y is not None)))):
        return tuple(None if y is None else y.clone() for y in outputs)
    memory = {torch_internals.storage_id(x) for x in given}
    return tuple(
        y.clone() if y is not None and torch_internals.storage_id(y) in memory else y
        for y in outputs
    )


def _backward(ctx: Any, grads: Tensors) -> Any:
    """None for the level, and the gradients of its inputs."""
    inputs, rerun = _saved_inputs(ctx), ctx.rerun
    needs = ctx.needs_input_grad[1:]
    wanted = [i for i, x in enumerate(inputs) if x is not None and needs[i] and is_float(x)]
    if not wanted or all(grad is None for grad in grads):
        return (None,) * (1 + ctx.count)
    if rerun.by_tangents is not None and not any(needs[rerun.count :]):
        found = _forward_over_reverse(rerun, inputs, wanted, grads)
    else:
        padded = rerun.padded_inputs
        if padded:  # The gradients of padded inputs are dropped, so their cotangents are zero.
            grads = tuple(
                torch.zeros_like(cast(Tensor, inputs[i])) if g is None and i in padded else g
                for i, g in zip(rerun.wanted, grads, strict=True)
            )
        arrived = [j for j, grad in enumerate(grads) if grad is not None]
        padded = padded or _padded_inputs(rerun, inputs, wanted, arrived)
        wanted = sorted({*wanted, *padded})
        tensors = (*inputs, *(grads[j] for j in arrived))
        vjp = _Vjp(rerun, ctx.count, wanted, arrived, padded)
        found = _run_level(vjp, *tensors) if _is_bypassed() else _run_recomputed(vjp, tensors)
    result = {i: grad for i, grad in zip(wanted, found, strict=True) if needs[i]}
    return None, *map(result.get, range(ctx.count))


def _run_level(run: Level, *inputs: Tensor | None) -> Tensors:
    """run(*inputs), by a compiled graph if the call has a backend and nothing differentiates it."""
    return_freed_memory()
    if isinstance(run, _Jvp | _WithTangents):
        return run.without_graph(*inputs)
    if not torch_internals.forward_mode_active() and _is_compiled(run):
        return cast(Tensors, provided("compile_level")(run, inputs))
    return run(*inputs)


def _is_compiled(run: Level) -> bool:
    """Whether a level runs as a compiled graph here, provided that its inputs have no tangents."""
    differentiated = torch.is_grad_enabled() or torch_internals.transforms_active()
    return bool(run.call.backend) and not differentiated and not torch_internals.tracing()


def _padded_inputs(
    run: Level, inputs: Sequence[Tensor | None], wanted: list[int], arrived: list[int]
) -> frozenset[int]:
    """Arguments that need no gradient, but that the compiled vjp of equal calls differentiates by.

    Example: the first block of a network gets data, the next ones get activations. To compute one more
    gradient takes less time than to compile two more levels.
    """
    if not isinstance(run, Run) or run.template is None:
        return frozenset()
    free = {i for i in run.call.inputs.places if i not in wanted and is_float(inputs[i])}
    return run.template.extra_inputs(run, len(inputs), wanted, arrived, free)


class _Derivative(Level):
    """A derivative of a level. Arguments: the level's inputs, followed by cotangents or tangents.

    run: The level. count: The number of its inputs.
    """

    def __init__(self, run: Level, count: int) -> None:
        self.run, self.count, self.call = run, count, run.call
        self.changed_buffers, self.autocast = run.changed_buffers, AutocastState()


class _Vjp(_Derivative):
    """The vjp (inputs, cotangents) -> gradients of the wanted inputs.

    wanted: Indices of inputs.
    arrived: Indices of the outputs with a cotangent.
    padded: Indices of inputs that need no gradient, see `_padded_inputs`.
    """

    def __init__(
        self, run: Level, count: int, wanted: list[int], arrived: list[int], padded: frozenset[int]
    ) -> None:
        super().__init__(run, count)
        self.key = "the vjp", run.key, count, (*wanted,), (*arrived,)
        self.wanted, self.arrived, self.padded_inputs = wanted, arrived, padded
        self.by_tangents = run.call.by_tangents if isinstance(run, Run) else None

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        inputs, cotangents = tensors[: self.count], tensors[self.count :]
        # keep_swapped(): a checkpoint inside fn recomputes during backward, with these parameters.
        with self.autocast.restored(), keep_swapped():
            # torch.func is slower than autograd, and refuses Functions without setup_context.
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
        """An input to differentiate by: a view in the caller's graph, or a leaf."""
        if nested and tensor.requires_grad:
            return tensor.view_as(tensor)
        tangent = torch_forward_mode.tangent_of(tensor)
        variable = tensor.detach().requires_grad_(index in self.wanted)  # without its tangent
        return variable if tangent is None else forward_ad.make_dual(variable, tangent)

    def _by_func(self, inputs: Tensors, cotangents: Tensors) -> Tensors:
        run: Any = self.run
        variables: list[Tensor] = []
        pairs: list[tuple[GradientEdge, Tensor]] = []

        def of_wanted(*own: Tensor) -> Tensor:
            arguments = list(inputs)
            for i, variable in zip(self.wanted, own, strict=True):
                arguments[i] = variable
            # forward over reverse: the graph of this gradient keeps tangents too
            low_memory = isinstance(run, Run) and torch_forward_mode.gradient_with_tangents()
            outputs = _run_in_parts(run, arguments) if low_memory else run(*arguments)
            variables[:] = own
            if self.as_tangents:
                torch_forward_mode.keep_tangents(own)
            if self.by_tangents is not None:
                self.by_tangents.check_value(run.value, outputs[self.arrived[0]])
            for j, cotangent in zip(self.arrived, cotangents, strict=True):
                if (y := outputs[j]) is not None and y.requires_grad:
                    pairs.append((get_gradient_edge(y), cast(Tensor, cotangent)))
            return torch.zeros(())

        # torch.func.vjp keeps outputs alive, and the gradient needs only their edges.
        torch.func.vjp(of_wanted, *(cast(Tensor, inputs[i]) for i in self.wanted))
        if not pairs:
            return tuple(torch.zeros_like(cast(Tensor, inputs[i])) for i in self.wanted)
        edges: Any
        edges, weights = zip(*pairs, strict=True)
        # retain_graph=False: each transform has its own graph, so this one is freed during backward.
        again = torch.is_grad_enabled()
        # unhandled=True: modes see the torch calls of backward, which may have stand-ins.
        found = torch_internals.gradients(
            edges, variables, weights, retain_graph=False, create_graph=again, unhandled=True
        )
        return tuple(found if self.as_tangents else materialize_grads(found, variables))


@final
class _TangentsOfVjp(_Vjp):
    """A vjp whose jvp returns tangents alone."""

    as_tangents = True


def _run_in_parts(run: Run, tensors: Sequence[Tensor | None]) -> Tensors:
    """run(*tensors) in less memory: parts are recomputed one by one, and operations run on slices."""
    parts = () if torch_internals.tracing() else run.parts  # the compiler chooses what to keep
    with replaced_forwards(parts, lambda p: partial(_recompute_part, p, p.forward)):
        return run(*tensors, slices=True)


def _recompute_part(part: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    def run(part: nn.Module, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return recompute(run, part, args, kwargs, is_part=True)


class _Jvp(_Derivative):
    """The jvp (inputs, tangents of the moved inputs) -> tangents of the outputs.

    moved: Indices of the inputs with a tangent.
    """

    def __init__(self, run: Level, count: int, moved: list[int]) -> None:
        super().__init__(run, count)
        self.key, self.moved = ("the jvp", run.key, count, (*moved,)), moved

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        return self.with_values(*tensors)[1]

    def with_values(self, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        """The outputs and their tangents."""
        inputs, tangents = tensors[: self.count], tensors[self.count :]
        # Dual tensors are faster than torch.func.jvp, and accept Functions without setup_context. But
        # they have one level; if autograd records, tangents live until the level ends, and torch
        # changes in place what softmax and logsumexp saved. So they come last where it records.
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
        """The tangents, as constants of every derivative."""
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
        """The outputs and their tangents, computed with gradients enabled and detached afterwards.

        With gradients disabled torch lacks the forward mode of some operations, such as the backward
        of silu and of layer norm.
        """
        with torch.enable_grad():
            found = self.with_values(*(None if x is None else x.detach() for x in tensors))
        values, tangents = (tuple(None if y is None else y.detach() for y in ys) for ys in found)
        return values, tangents

    def _by_duals(self, inputs: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        with torch_forward_mode.dual_tensors():
            own = list(inputs)
            for i, tangent in zip(self.moved, tangents, strict=True):
                own[i] = forward_ad.make_dual(cast(Tensor, inputs[i]), cast(Tensor, tangent))
            run = self.run
            outputs = run(*own, slices=True) if isinstance(run, Run) else run(*own)
            found = [None if y is None else torch_forward_mode.tangent_of(y) for y in outputs]
            values = tuple(torch_forward_mode.primal(y) for y in outputs)
        return values, tuple(
            torch.zeros_like(y) if t is None and y is not None and is_float(y) else t
            for y, t in zip(values, found, strict=True)
        )

    def _by_func(self, inputs: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        moved: list[int] = []  # indices of outputs
        constant: list[int] = []
        values: list[Tensor | None] = []
        result: list[Tensor | None] = []

        def of_moved(*variables: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
            arguments = list(inputs)
            for i, variable in zip(self.moved, variables, strict=True):
                arguments[i] = variable
            outputs: Any = self.run(*arguments)
            values[:], result[:] = [None] * len(outputs), [None] * len(outputs)
            for j, y in enumerate(outputs):
                if y is not None:
                    (moved if is_float(y) and not as_tangents else constant).append(j)
            moving = tuple(outputs[j] for j in moved) if moved else variables[0].new_zeros(())
            return moving, tuple(outputs[j] for j in constant)

        as_tangents = self.run.as_tangents
        at: Any = tuple(inputs[i] for i in self.moved)
        with torch_forward_mode.tangents_enabled(True):  # torch disables them inside a Function
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
    """The jvp as a level to compile. Returns the outputs, followed by their tangents."""

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        values, tangents = self.with_values_detached(*tensors)
        return *values, *tangents


@final
class _WithTangents(Level):
    """A level that computes tangents with its outputs; `_Recompute.jvp` takes them."""

    def __init__(self, run: Level, count: int, tangents: Sequence[Tensor | None]) -> None:
        self.run, self.count, self.call = run, count, run.call
        self._given: Sequence[Tensor | None] = tangents  # of the inputs, until the run
        self._found: Tensors = ()  # of the outputs, until take()

    def rerun(self) -> Level:
        return self.run.rerun()

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
        """Return the tangents, and drop the reference to them."""
        found, self._found = self._found, ()
        return found


def _forward_over_reverse(
    gradient: _Vjp, inputs: Sequence[Tensor | None], wanted: list[int], v: Tensors
) -> Tensors:
    """The vjp of the gradient of a loss f, in forward mode: the Hessian is symmetric, so

        (d grad_p f / d q)^T v = d/de grad_q f(p + e v)    p: inputs that v moves, q: wanted inputs

    Memory holds f and its tangents; in reverse mode it would hold the graph of the gradient.
    """
    moved = [gradient.wanted[j] for j, tangent in enumerate(v) if tangent is not None]
    tensors = *inputs, *(tangent for tangent in v if tangent is not None)
    is_last = not (torch.is_grad_enabled() or torch_internals.transforms_active())
    kind = _TangentsOfVjp if is_last else _Vjp
    again = kind(gradient.run, gradient.count, wanted, gradient.arrived, frozenset())
    jvp = _Jvp(again, len(inputs), moved)
    with cast(ByTangents, gradient.by_tangents).explained():
        return _run_level(jvp, *tensors) if is_last else _run_recomputed(jvp, tensors)
