"""`hoglib.compile`: a function of pytrees of tensors, with the derivatives inside it, as one graph; and
`hoglib.compiled_loss`: a loss and its gradient as one graph."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.closures import name_of
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.runtime.ambient import inside
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import materialize_grads, with_gradients
from hoglib._core.substrate.gradient_graph import leaf_tensors
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_internals import apply
from hoglib.capture import capturing, signature
from hoglib.capture.signature import CallSignature, FakeTensor
from hoglib.capture.trace import InputRef, as_leaf, refuse_outer_graph, without_tensor_hooks
from hoglib.errors import NoSecondDerivative
from hoglib.verification.entry_points import examined_functions

MAX_GRAPHS = 16  # of one function: if there are more, a value that changes should be a tensor
MISSES_TO_WARN = 3  # captures for one signature in a row


def compile(
    fn: Callable[..., Any],
    *,
    backend: object = "inductor",
    dynamic: bool = False,
    check: bool = True,
    name: str | None = None,
) -> "Compiled":
    r"""Compile a function together with derivatives of any order inside it.

        compile(fn)(*args) = fn(*args)

    The first call with a new signature captures a graph, in which all derivatives are operations, and
    compiles it. The signature consists of the structure of the arguments; the shapes, strides, dtypes,
    devices and ``requires_grad`` of their tensors; which arguments are one tensor; grad mode,
    autocast, stand-ins, and the default dtype and device. ``torch.compile`` supports neither double
    backward nor a custom Function with a jvp.

    Parameters, buffers and other tensors that ``fn`` reaches are inputs of the graph: each call uses
    their current values. A new graph is captured if ``fn`` reaches another module, number, string or
    function, a list of another length, or a module in another mode or with other hooks. Functions that
    are compiled twice share their graphs. Equal graphs share compiled code, which stays for later
    processes in the cache of torch's compiler (``TORCHINDUCTOR_CACHE_DIR``).

    The outputs are differentiable to any order if the outputs of ``fn`` are: the graph of a backward is
    captured when the backward is first called. Inside ``torch.func`` transforms, and while another tool
    traces, ``fn`` itself runs. A graph only returns outputs: a call does not set attributes that ``fn``
    sets.

    Args:
        fn: A function of pytrees of tensors that returns pytrees of tensors. Numbers and strings among
            the arguments are constants of the graph. ``torch.func`` transforms,
            ``torch.autograd.grad(create_graph=True)``, hoglib's functions and custom Functions inside
            it are traced.
        backend: "inductor", torch's compiler; "eager", which runs the operations of the graph one by
            one, bit for bit as ``fn`` (on Intel processors with ``MKL_CBWR=AVX2,STRICT``), without the
            overhead of autograd and without compile time; "reduce-overhead" (CUDA graphs),
            "max-autotune" or "max-autotune-no-cudagraphs", the compiler in these modes of
            ``torch.compile``; or a function (graph module, inputs) -> function. Settings of
            ``torch._inductor.config`` apply. Without a C++ compiler it warns and runs as "eager".
        dynamic: Use symbolic sizes, for sizes that change from call to call.
        check: Compare the first run of each graph with ``fn``, also at other values; the first call
            then runs ``fn`` three times. Nothing else detects inputs of ``fn`` other than
            tensors, such as an iterator or the state of another library.
        name: The name of the function in messages. Default: its qualified name.
    Returns:
        A :class:`Compiled`, which is called like ``fn``. Its ``signatures`` lists the captured graphs;
        beyond 16, it warns and runs ``fn``.
    Raises:
        UnsupportedError: If ``fn`` reads values of tensors (``if``, ``.item()``, NumPy), changes an
            argument, parameter or buffer in place, or draws from a ``torch.Generator``; the message
            names the line.
        NoSecondDerivative: If the results of the graph and of ``fn`` differ.
    Example:
        >>> loss = lambda p, x: (p * x).sin().sum()
        >>> hvp = hog.compile(lambda p, v, x: hog.hvp(loss, p, v, x)[1], backend="eager")
        >>> hvp(torch.zeros(2), torch.ones(2), torch.ones(2))
        tensor([-0., -0.])
        >>> len(hvp.signatures)
        1
    """
    return Compiled(fn, backend=backend, dynamic=dynamic, check=check, name=name)


class Compiled:
    """A function that runs as a graph, returned by :func:`compile`.

    Args:
        fn: The function; an attribute, as are the options.
        backend: Runs the graph; see :func:`compile`.
        dynamic: Use symbolic sizes.
        check: Compare the first run of each graph with ``fn``.
        name: The name of the function in messages. Default: its qualified name.
        place: The place where graphs are kept, for functions that are created anew for each call and
            depend only on objects that they reach. Default: with the function.
        precheck: Called with the arguments before each capture; makes all checks of values, because
            ``fn`` makes none while it is captured and compared.
    Example:
        >>> square = hog.compile(lambda x: x.square(), backend="eager", name="square")
        >>> square(torch.tensor(3.0))
        tensor(9.)
        >>> square
        hoglib.compile(square, backend='eager'), 1 graph
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: object,
        dynamic: bool = False,
        check: bool = True,
        name: str | None = None,
        place: capturing.CacheSlot | None = None,
        precheck: Callable[..., Any] | None = None,
    ) -> None:
        self.fn = validation.function("fn", fn)
        if not callable(backend):
            validation.choice("backend", backend, validation.BACKENDS)
        self.backend = backend
        self.dynamic = validation.boolean("dynamic", dynamic)
        self.check = validation.boolean("check", check)
        self.name = name or name_of(fn)
        self._place = place or capturing.CacheSlot.of(fn)
        self._precheck = precheck
        self.__doc__ = fn.__doc__

    @property
    def _options(self) -> dict[str, Any]:
        return {"backend": self.backend, "dynamic": self.dynamic, "check": self.check}

    @cached_property
    def _graphs(self) -> capturing.Graphs:
        owner, key = self._place
        place = capturing.CacheSlot(owner, (key, self.backend, self.dynamic, self.check))
        return capturing.get_or_make(place, capturing.Graphs, self.name)

    @property
    def signatures(self) -> list[capturing.GraphEntry]:
        """The graphs that were captured so far, one per signature, in the order of capture."""
        return self._graphs.all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self.fn(*args, **kwargs) if capturing.in_other_tracer() else self.run(*args, **kwargs)
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a graph, also inside forward mode.

        Args:
            *args, **kwargs: The arguments of ``fn``; tensors without tangents.
        """
        form, tensors = signature.parse_call(self.name, args, kwargs, self.dynamic)
        found = self.find_or_capture(form, tensors)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        if torch.is_grad_enabled() and True in entry.output.differentiable:
            call = self, entry, form, len(tensors)
            outputs = list(apply(GraphFunction, call, *tensors, *lifted))
        else:
            outputs = entry.execute(entry.graph_inputs(tensors, lifted))
        return entry.assemble(outputs)

    def find_or_capture(
        self, form: CallSignature, tensors: list[Tensor]
    ) -> capturing.Captured | None:
        """The graph for a call, and the tensors that ``fn`` reaches besides its arguments.

        Args:
            form: The call without its tensors.
            tensors: The tensors among its arguments.
        Returns:
            The graph and the tensors; None if there are too many graphs.
        """
        found = self._lookup(form, tensors)
        if found is None:
            with capturing.CAPTURING:  # another thread may capture it first
                found = self._lookup(form, tensors) or self._capture(form, tensors)
        return found

    def _capture(self, form: CallSignature, tensors: list[Tensor]) -> capturing.Captured | None:
        if len(self._graphs.all()) >= MAX_GRAPHS:
            self._warn_full(form, tensors)
            return None
        self._count_miss(form)
        checks: dict[str, Any] = {}
        if self._precheck is not None:
            args, kwargs = form.fill(tensors)
            with examined_functions(self.name):
                self._precheck(*args, **kwargs)
            # precheck has made the checks that read values; fake tensors have none
            checks["value_checks_off"] = True
        with inside(**checks), examined_functions(self.name) as functions:
            captured = capturing.capture(self, form, tensors)
            # custom Functions that ran on fake tensors only are examined in a run on values
            if functions is not None and functions.only_traced:
                with preserve_random_state():
                    self.on_tensors(form)(*tensors)
        self._graphs.by_signature.setdefault(form.key, []).append(captured[0])
        return captured

    def on_tensors(self, form: CallSignature) -> Callable[..., Any]:
        """The function of a call as a function of the tensors among its arguments.

        Args:
            form: The call without its tensors.
        Returns:
            A function of tensors.
        """

        def run(*tensors: Tensor) -> Any:
            args, kwargs = form.fill(list(tensors))
            return self.fn(*args, **kwargs)

        return run

    def pullback(self, entry: capturing.GraphEntry, form: CallSignature) -> "Compiled":
        """The backward of a graph, as a function that runs as a graph, too.

        Args:
            entry: The graph.
            form: The call with which the graph was captured.
        Returns:
            A function (args, kwargs, cotangents) -> gradients.
        """
        back, name = Pullback(self.fn, entry, form.constants), f"the backward of {self.name}"
        return Compiled(back, **self._options, name=name, place=capturing.CacheSlot(entry, None))

    def check_unchanged(
        self, entry: capturing.GraphEntry, form: CallSignature, given: list[Tensor], lifted: Any
    ) -> None:
        """Raises NoSecondDerivative if the function reaches other tensors or modules than in the call.

        Args:
            entry: The graph.
            form: The call without its tensors.
            given: The tensors among its arguments.
            lifted: The tensors that the function reached besides its arguments.
        """
        now = entry.resolve(self.fn, form, given)
        if now is None or any(a is not b for a, b in zip(now, lifted, strict=True)):
            raise NoSecondDerivative(
                f"{self.name}: expected backward to run while the function's parameters, modules and "
                "numbers are those of the call, got others (a new tensor in the place of a parameter, "
                "another mode, another value of an attribute). Call backward before they change."
            )

    def prepared(self, *args: Any) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph for a call, as a function of the tensors among its arguments, in their order.

        It skips the lookup, so it is valid for calls with an equal signature as long as nothing that
        ``fn`` reads changes: parameters, buffers, modes, and values in closures, globals and
        attributes. A call of the compiled function checks these, ``prepared`` does not. A tensor that
        is passed twice here may be two tensors later.

        Args:
            args: Arguments of ``fn``.
        Returns:
            A function from a list of tensors to the list of tensors among the outputs.
        """
        # tensors passed twice become two inputs
        distinct = pytree.map_tensors(as_leaf, args)
        form, tensors = signature.parse_call(self.name, distinct, {}, self.dynamic)
        found = self.find_or_capture(form, tensors)
        if found is None:
            return lambda given: pytree.tensors(self.on_tensors(form)(*given))
        entry, lifted = found
        return lambda given: entry.execute(given + lifted)

    def _lookup(self, form: CallSignature, tensors: list[Tensor]) -> capturing.Captured | None:
        for entry in self._graphs.by_signature.get(form.key, ()):
            lifted = entry.resolve(self.fn, form, tensors)
            if lifted is not None:
                self._graphs.misses = 0
                return entry, lifted
        return None

    def _count_miss(self, form: CallSignature) -> None:
        """Warns if calls of one signature are captured again and again."""
        known = self._graphs.by_signature.get(form.key)
        if not known:
            return
        self._graphs.misses = misses = self._graphs.misses + 1
        if misses == MISSES_TO_WARN:
            reason = known[-1].reached.explain((self.fn, form.constants))
            warn(
                f"{self.name} was captured again in each of the last {misses} calls, which takes "
                f"seconds: {reason}. Keep it the same from call to call, or do not compile."
            )

    def _warn_full(self, form: CallSignature, tensors: list[Tensor]) -> None:
        if self._graphs.full:
            return
        self._graphs.full = True
        warn(
            f"{self.name} has {MAX_GRAPHS} graphs and captures no more: calls with other arguments, "
            f"such as this one ({form.describe(tensors)}), run without compiling. Pass values that "
            "change from call to call as tensors, use batches of one size, or pass dynamic=True."
        )

    def __get__(self, owner: object, kind: object = None) -> Any:
        """Binds like a function, so that a method can be compiled."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> Any:
        """A copy has graphs of its own."""
        return partial(type(self), **self._options, name=self.name), (self.fn,)

    def __repr__(self) -> str:
        return f"hoglib.compile({self.name}, backend={self.backend!r}), {count_graphs(self.signatures)}"


@final
class GraphFunction(torch.autograd.Function):
    """A graph as one node of autograd. Its backward runs the graph of a pullback, hence any order."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        _, entry, _, count = call
        ctx.call, ctx.lifted = call, list(tensors[count:])
        outputs = entry.execute(entry.graph_inputs(list(tensors[:count]), ctx.lifted))
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, entry.output.differentiable, strict=True)
        ctx.mark_non_differentiable(*[x for x, has in pairs if not has])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        compiled, entry, form, count = ctx.call
        saved, lifted = ctx.saved_tensors[:count], ctx.lifted  # raises after an in-place change
        needed = ctx.needs_input_grad[1:]
        # saved-tensor hooks may return tensors with another requires_grad
        given = [
            x if x.requires_grad is has else x.detach().requires_grad_(has)
            for x, has in zip(saved, needed, strict=False)
        ]
        compiled.check_unchanged(entry, form, given, lifted)
        args, kwargs = form.fill(given)
        of_outputs = [
            g for g, has in zip(cotangents, entry.output.differentiable, strict=True) if has
        ]
        # a backward is often called outside of the call's autocast and stand-ins
        with form.restored_context():
            grads = compiled.pullback(entry, form)(args, kwargs, of_outputs)
        of = dict(zip(map(id, requiring_grad(given, lifted)), grads, strict=True))
        # pop: a tensor that is an argument and lifted gets its gradient once
        return None, *[of.pop(id(x), None) for x in (*given, *lifted)]


@final
class Pullback:
    """The vector-Jacobian product of a captured function.

        pullback(args, kwargs, c) = c^T J, by the arguments and then the tensors that fn reaches

    It is differentiable if grad mode is on.
    """

    independent = True  # arguments are variables, also if one was computed from another

    def __init__(self, fn: Any, entry: capturing.GraphEntry, constants: list[Any]) -> None:
        self.fn, self._entry, self._constants = fn, entry, constants

    def __call__(self, args: Any, kwargs: Any, cotangents: list[Tensor | None]) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        lifted = self._entry.reached.resolve((self.fn, self._constants)) or []
        inputs = requiring_grad(pytree.tensors((args, kwargs)), lifted)
        with torch.enable_grad():
            outputs = [x for x in pytree.tensors(self.fn(*args, **kwargs)) if x.requires_grad]
            pairs = [(x, g) for x, g in zip(outputs, cotangents, strict=True) if g is not None]
            known, given = [x for x, _ in pairs], [g for _, g in pairs]
            grads = _grad(known, given, inputs, create_graph)
        return materialize_grads(list(grads), inputs)


def _grad(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None,
    inputs: list[Tensor],
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad as in a backward: without autocast, and without the hooks of the inputs,
    which the backward runs later."""
    with without_tensor_hooks(inputs), torch_internals.no_autocast():
        return torch.autograd.grad(
            outputs, inputs, cotangents, create_graph=create_graph, allow_unused=True
        )


def trace_graph(fn: Callable[..., Any], *args: Any, name: str | None = None) -> capturing.Captured:
    """The graph of a function for a call, neither compiled nor kept, and the tensors that the function
    reaches besides its arguments."""
    compiled = Compiled(fn, backend="eager", check=False, name=name)
    return capturing.capture(compiled, *signature.parse_call(compiled.name, args, {}, False))


def requiring_grad(given: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
    """The tensors that require grad, each once."""
    return list({id(x): x for x in (*given, *lifted) if x.requires_grad}.values())


def count_graphs(graphs: list[capturing.GraphEntry]) -> str:
    return f"{len(graphs)} graph" + "s" * (len(graphs) != 1)


def compiled_loss(
    loss_fn: Callable[..., Tensor],
    *,
    backend: object = "inductor",
    dynamic: bool = False,
    check: bool = True,
) -> "CompiledLoss":
    r"""Compile a loss together with its gradient, and all derivatives inside it, to one graph.

        (L, dL/dtheta) = graph(theta, *args)

    Use the result like the loss: ``backward()``, ``torch.autograd.grad``, gradient accumulation,
    ``GradScaler``, hooks of parameters and of DistributedDataParallel, Lightning's automatic
    optimisation. Gradients with respect to all leaf tensors that require grad (arguments, and
    parameters that the loss reaches) are computed together with the value; backward multiplies them by
    the incoming gradient. With ``create_graph=True`` they come from a second graph, differentiable to
    any order. If grad mode is off, only the value is computed.

    A ``GradScaler`` multiplies a gradient that was computed without its factor: under autocast to
    float16, small gradients may already be zero, so prefer bfloat16. DistributedDataParallel wraps the
    module that calls the loss, and is not called inside the loss.

    Args:
        loss_fn: A function that returns a scalar tensor; see :func:`compile` for its limits.
            Parameters are inputs: they may change between calls, or be replaced.
        backend: Runs the graph; see :func:`compile`.
        dynamic: Use symbolic sizes, for sizes that change from call to call.
        check: Compare the first run of each graph with ``loss_fn`` and its gradient.
    Returns:
        A :class:`CompiledLoss`, which is called like ``loss_fn``.
    Raises:
        UnsupportedError: If ``loss_fn`` reads values of tensors, changes one in place, or draws from a
            ``torch.Generator``.
        NoSecondDerivative: If the loss depends on no tensor that requires grad, or if the results of
            the graph and of ``loss_fn`` differ.
    Example:
        >>> w = nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> loss = hog.compiled_loss(lambda x: (w * x).square().sum(), backend="eager")
        >>> loss(torch.ones(2)).backward()
        >>> w.grad
        tensor([2., 4.])
    """
    validation.function("loss_fn", loss_fn)
    return CompiledLoss(loss_fn, backend=backend, dynamic=dynamic, check=check)


@final
class CompiledLoss(Compiled):
    """A loss that runs as one graph with its gradient, returned by :func:`compiled_loss`.

    Args:
        fn: The loss; an attribute, as is ``name``.
        backend: Runs the graph; see :func:`compile`.
        dynamic: Use symbolic sizes.
        check: Compare the first run of each graph with ``fn`` and its gradient.
        name: The name of the loss in messages. Default: its qualified name.
        place: The place where graphs are kept. Default: with the function.
        precheck: Called with the arguments before each capture.
    Example:
        >>> hog.compiled_loss(nn.functional.mse_loss, backend="eager")
        hoglib.compiled_loss(mse_loss), 0 graphs
    """

    @cached_property
    def _with_gradient(self) -> Compiled:
        return self._gradient(create_graph=False)

    @cached_property
    def _with_graph(self) -> Compiled:
        return self._gradient(create_graph=True)

    def _gradient(self, create_graph: bool) -> Compiled:
        fn = _Gradient(self.fn, self.name, create_graph)
        place = self._place._replace(key=(self._place.key, "gradient", create_graph))
        name = f"{self.name} and its gradient"
        return Compiled(fn, **self._options, name=name, place=place, precheck=self._precheck)

    @property
    def signatures(self) -> list[capturing.GraphEntry]:
        """The graphs that were captured so far; see :func:`compile`."""
        both, graph = self._with_gradient.signatures, self._with_graph.signatures
        return [*both, *super().signatures, *graph]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if capturing.in_other_tracer():
            return self.fn(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        both = self._with_gradient
        form, tensors = signature.parse_call(both.name, args, kwargs, both.dynamic)
        found = both.find_or_capture(form, tensors)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        inputs = entry.graph_inputs(tensors, lifted)
        value, grads = self._run_graph(entry, inputs)
        versions = [x._version for x in inputs]  # a later in-place change makes a recompute wrong
        arguments = requiring_grad(tensors, [])
        variables = [
            (arguments if x.is_argument else lifted)[x.where] for x in entry.output.inputs_named
        ]

        def recompute() -> list[Tensor]:
            if versions != [x._version for x in inputs]:
                raise NoSecondDerivative(
                    f"{self.name}: expected a second backward (retain_graph=True) before the tensors "
                    "that the loss was computed from change, got one that was changed in place. Call "
                    "backward before it changes."
                )
            return self._run_graph(entry, inputs)[1]

        def differentiable_gradients() -> list[Tensor]:
            both.check_unchanged(entry, form, tensors, lifted)
            args, kwargs = form.fill(tensors)
            with form.restored_context():
                if self._with_graph.find_or_capture(form, tensors) is None:
                    value = self.fn(*args, **kwargs)
                    return list(torch.autograd.grad(value, variables, create_graph=True))
                grads: list[Tensor] = self._with_graph(*args, **kwargs)[1]
            return grads

        return with_gradients(
            value, grads, variables, with_graph=differentiable_gradients, recompute=recompute
        )

    def _run_graph(
        self, entry: capturing.GraphEntry, inputs: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The value, and gradients that do not alias the inputs or one another: backward scales them in
        place, and a graph may return an input, one tensor twice, or an expanded tensor.

        A graph does so in each call or in none, except with a backend of the user.
        """
        value, *grads = entry.execute(inputs)
        aliases = entry.aliases
        if aliases is None or callable(self.backend):
            aliases, known = [], {x.untyped_storage().data_ptr() for x in inputs}
            for i, grad in enumerate(grads):
                pointer = grad.untyped_storage().data_ptr()
                if pointer in known or 0 in grad.stride():
                    aliases.append(i)
                known.add(pointer)
            entry.aliases = aliases  # only now: other threads may read it at any time
        for i in aliases:
            grads[i] = grads[i].clone()
        return value, grads

    def __repr__(self) -> str:
        return f"hoglib.compiled_loss({self.name}), {count_graphs(self.signatures)}"


@final
class _Gradient:
    """A loss as a function that returns (value, gradients, inputs of the gradients): this is captured.

    The comparison runs it again, and has to get gradients by the leaves of the capture in their order.
    """

    independent = True  # arguments are variables, also if one was computed from another

    def __init__(self, fn: Callable[..., Tensor], name: str, create_graph: bool) -> None:
        self.fn, self._name, self._create_graph = fn, name, create_graph
        self._reached: list[int] = []  # ids of the leaves other than arguments, at the last capture

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor], list[InputRef]]:
        value = validation.scalar(self._name, self.fn(*args, **kwargs))
        refuse_outer_graph(self._name)
        given = requiring_grad(pytree.tensors((args, kwargs)), [])
        variables = given + self._leaves(value, given)
        if value.requires_grad:
            grads = _grad([value], None, variables, self._create_graph)
            refs = [InputRef(i, True) for i in range(len(given))]
            refs += [InputRef(x, False) for x in variables[len(given) :]]
            found = [(g, of) for g, of in zip(grads, refs, strict=True) if g is not None]
            if found:
                return value, [g for g, _ in found], [of for _, of in found]
        raise NoSecondDerivative(
            f"{self._name}: expected a loss that depends on tensors that require grad, got one that "
            "does not. Look for .detach(), torch.no_grad(), and parameters that are frozen."
        )

    def _leaves(self, value: Tensor, given: list[Tensor]) -> list[Tensor]:
        """The leaves that a loss reaches, except arguments.

        Leaves that the loss creates, such as ``x.detach().requires_grad_()``, do not count: during a
        capture these are fake tensors.
        """
        inside = leaf_tensors([value], since=[x for x in given if not x.is_leaf])
        arguments = {id(x) for x in given}
        leaves = [value] if value.is_leaf else inside
        found = {id(x): x for x in leaves if id(x) not in arguments}
        # the run for the comparison takes the leaves, and the order, of the capture
        if torch_internals.tracing():
            self._reached = [key for key, x in found.items() if not isinstance(x, FakeTensor)]
        return [found[key] for key in self._reached if key in found]
