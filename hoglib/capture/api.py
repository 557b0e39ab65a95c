"""`hoglib.compile`: a function of pytrees of tensors, second derivatives included, as one graph."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.ambient import inside
from hoglib._core.autograd import materialize_grads
from hoglib._core.closures import name_of
from hoglib._core.source_location import warn
from hoglib._core.state import preserve_random_state
from hoglib._core.torch_internals import apply, no_autocast
from hoglib.capture import signature
from hoglib.capture.capturing import (
    CAPTURING,
    GraphEntry,
    Graphs,
    Place,
    capture,
    kept,
    runs_elsewhere,
)
from hoglib.capture.runners import NAMES
from hoglib.capture.signature import CallSignature
from hoglib.capture.trace import as_leaf, without_tensor_hooks
from hoglib.errors import NoSecondDerivative
from hoglib.verification.entry_points import examined_functions

OPTIONS = ("backend", "dynamic", "check", "name")
# of one function: with more, something changes at each call that should be a tensor
MAX_GRAPHS = 16
MISSES_TO_WARN = 3  # captures for one signature, one after the other


def compile(
    fn: Callable[..., Any],
    *,
    backend: Any = "inductor",
    dynamic: bool = False,
    check: bool = True,
    name: str | None = None,
) -> "Compiled":
    r"""Compile a function together with the derivatives of any order that are taken inside it.

        compile(fn)(*args) = fn(*args)

    The first call with a new signature captures a graph, in which all derivatives are operations, and
    compiles it. The signature consists of the structure of the arguments; the shapes, strides, dtypes,
    devices and ``requires_grad`` of their tensors; which of them are the same tensor; grad mode,
    autocast, stand-ins, and the default dtype and device. ``torch.compile`` supports neither double
    backward nor a custom Function with a jvp.

    Parameters, buffers and other tensors that ``fn`` reaches are inputs of the graph: each call uses
    their current values. A new graph is captured if ``fn`` reaches another module, number, string or
    function, a list of another length, or a module in another mode or with other hooks. Functions that
    are compiled twice share their graphs. Compiled code is shared by equal graphs, and kept for later
    processes in ``HOGLIB_CACHE_DIR`` (default: ``hoglib`` in the user's cache directory).

    The outputs are differentiable to any order if those of ``fn`` are: the graph of a backward is
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
            overhead of autograd and without compile time; or a function (graph module, inputs) ->
            function. If there is no C++ compiler, "inductor" warns and runs as "eager".
        dynamic: Whether sizes are symbolic, for sizes that change from call to call.
        check: Whether the first run of each graph is compared with ``fn``, also at other values; the
            first call then runs ``fn`` three times. Nothing else detects what ``fn`` reads besides
            tensors, such as an iterator or the state of another library.
        name: The name of the function in messages. Default: its qualified name.
    Returns:
        A :class:`Compiled`, which is called like ``fn``. Its ``signatures`` lists the captured graphs;
        beyond 16, it warns and runs ``fn``.
    Raises:
        UnsupportedError: If ``fn`` reads values of tensors (``if``, ``.item()``, NumPy), changes an
            argument, parameter or buffer in place, or draws from a ``torch.Generator``; the message
            names the line.
        NoSecondDerivative: If the results of the graph differ from those of ``fn``.
    Example:
        >>> loss = lambda p, x: (p * x).sin().sum()
        >>> hvp = hog.compile(lambda p, v, x: hog.hvp(loss, p, v, x)[1], backend="eager")
        >>> hvp(torch.zeros(2), torch.ones(2), torch.ones(2))
        tensor([-0., -0.])
        >>> len(hvp.signatures)
        1
    """
    return Compiled(fn, backend=backend, dynamic=dynamic, check=check, name=name)


@final
class Compiled:
    """A function that runs as a graph, returned by :func:`compile`.

    Args:
        fn: The function; an attribute, as are the options.
        backend: What runs the graph; see :func:`compile`.
        dynamic: Whether sizes are symbolic.
        check: Whether the first run of each graph is compared with ``fn``.
        name: The name of the function in messages. Default: its qualified name.
        place: Where graphs are kept, for functions that are made anew at each call and compute the
            same from what they reach. Default: with the function.
        precheck: A function that is called with the arguments before each capture, and makes all checks
            of values: ``fn`` makes none while it is captured and compared.
    Example:
        >>> square = hog.compile(lambda x: x.square(), backend="eager", name="square")
        >>> square(torch.tensor(3.0))
        tensor(9.)
        >>> square
        hoglib.compile(square, backend='eager'), 1 graph
    """

    def __init__(
        self, fn: Callable[..., Any], *, backend: Any, dynamic: bool = False, check: bool = True,
        name: str | None = None, place: Place | None = None,
        precheck: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.fn = validation.function("fn", fn)
        if not callable(backend):
            validation.one_of("backend", backend, NAMES)
        self.backend = backend
        self.dynamic = validation.flag("dynamic", dynamic)
        self.check = validation.flag("check", check)
        self.name = name or name_of(fn)
        owner, key = place or Place.of(fn)
        self._graphs = kept(Place(owner, (key, backend, dynamic, check)), Graphs, self.name)
        self._precheck = precheck
        self.__doc__ = fn.__doc__

    @property
    def signatures(self) -> list[GraphEntry]:
        """The graphs that were captured so far, one per signature, in the order of capture."""
        return self._graphs.all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs) if runs_elsewhere() else self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The results by a graph, also inside forward mode.

        Args:
            *args, **kwargs: The arguments of ``fn``; tensors without tangents.
        """
        form, tensors = signature.parse_call(self.name, args, kwargs, self.dynamic)
        found = self.find_or_capture(form, tensors)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        if torch.is_grad_enabled() and True in entry.differentiable:
            outputs = list(apply(GraphFunction, self, entry, form, len(tensors), *tensors, *lifted))
        else:
            outputs = entry.execute(entry.graph_inputs(tensors, lifted))
        return entry.assemble(outputs)

    def find_or_capture(
        self, form: CallSignature, tensors: list[Tensor]
    ) -> tuple[GraphEntry, list[Tensor]] | None:
        """The graph for such a call, and the tensors that ``fn`` reaches besides its arguments.

        Args:
            form: The call without its tensors.
            tensors: The tensors among its arguments.
        Returns:
            The graph and the tensors; None if there are too many graphs already.
        """
        found = self._lookup(form, tensors)
        if found is not None:
            return found
        with CAPTURING:
            found = self._lookup(form, tensors)  # another thread may have captured it meanwhile
            if found is not None:
                return found
            if len(self.signatures) >= MAX_GRAPHS:
                self._warn_full(form, tensors)
                return None
            self._count_miss(form, tensors)
            checked: AbstractContextManager[None] = nullcontext()
            if self._precheck is not None:
                args, kwargs = form.fill(tensors)
                with examined_functions(self.name):
                    self._precheck(*args, **kwargs)
                checked = inside(value_checks_off=True)
            with checked, examined_functions(self.name) as functions:
                entry, lifted = capture(self, form, tensors)
                if functions is not None and functions.only_traced:
                    with preserve_random_state():
                        self.on_tensors(form)(*tensors)
            self._graphs.by_signature.setdefault(form.key, []).append(entry)
        return entry, lifted

    def pullback(self, entry: GraphEntry, form: CallSignature) -> "Compiled":
        """The backward of a graph, as a function that runs as a graph.

        Args:
            entry: The graph.
            form: The call that it was captured for.
        Returns:
            A function (args, kwargs, cotangents) -> gradients.
        """
        return Compiled(
            Pullback(self.fn, entry, form.constants), backend=self.backend, dynamic=self.dynamic,
            check=self.check, name=f"the backward of {self.name}", place=Place(entry, None),
        )  # fmt: skip

    def prepared(self, *args: Any) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph for such a call, as a function of the tensors among its arguments, in their order.

        It skips the lookup, so it is valid for calls with the same signature as long as all that ``fn``
        reads stays the same: parameters, buffers, modes, and values in closures, globals and
        attributes. A call of the compiled function checks them, this one does not. A tensor that is
        passed twice here need not be the same tensor later.

        Args:
            args: Arguments of ``fn``.
        Returns:
            A function from a list of tensors to the list of tensors among the outputs.
        """
        distinct = pytree.map_tensors(as_leaf, args)
        form, tensors = signature.parse_call(self.name, distinct, {}, self.dynamic)
        found = self.find_or_capture(form, tensors)
        if found is None:
            return lambda given: pytree.tensors(self.on_tensors(form)(*given))
        entry, lifted = found
        return lambda given: entry.execute(given + lifted)

    def on_tensors(self, form: CallSignature) -> Callable[..., Any]:
        """The function of the tensors among the arguments of a call.

        Args:
            form: The call without its tensors.
        Returns:
            A function of tensors.
        """

        def run(*tensors: Tensor) -> Any:
            args, kwargs = form.fill(list(tensors))
            return self.fn(*args, **kwargs)

        return run

    def _lookup(
        self, form: CallSignature, tensors: list[Tensor]
    ) -> tuple[GraphEntry, list[Tensor]] | None:
        for entry in self._graphs.by_signature.get(form.key, ()):
            lifted = entry.resolve(self.fn, form, tensors)
            if lifted is not None:
                self._graphs.misses = 0
                return entry, lifted
        return None

    def _count_miss(self, form: CallSignature, tensors: list[Tensor]) -> None:
        """Warns if calls of one signature are captured again and again."""
        known = self._graphs.by_signature.get(form.key)
        if not known:
            return
        self._graphs.misses = misses = self._graphs.misses + 1
        if misses == MISSES_TO_WARN:
            reason = known[-1].explain_mismatch(self.fn, form, tensors)
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

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Binds like a function, so that a method can be compiled."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> Any:
        """A copy has graphs of its own."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return partial(type(self), **options), (self.fn,)

    def __repr__(self) -> str:
        return f"hoglib.compile({self.name}, backend={self.backend!r}), {count_graphs(self.signatures)}"


@final
class GraphFunction(torch.autograd.Function):
    """A graph as one node of autograd. Its backward is the graph of a pullback, hence any order."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, entry: GraphEntry, form: CallSignature, count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        given, lifted = list(tensors[:count]), list(tensors[count:])
        outputs = entry.execute(entry.graph_inputs(given, lifted))
        ctx.save_for_backward(*tensors)
        ctx.compiled, ctx.entry, ctx.form, ctx.count = compiled, entry, form, count
        ctx.lifted = lifted
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[x for x, has in zip(outputs, entry.differentiable, strict=True) if not has]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        entry, form, lifted = ctx.entry, ctx.form, ctx.lifted
        saved = ctx.saved_tensors[: ctx.count]  # raises if one was changed in place
        needed = ctx.needs_input_grad[4:]
        given = [
            x if x.requires_grad is has else x.detach().requires_grad_(has)  # of saved-tensor hooks
            for x, has in zip(saved, needed, strict=False)
        ]
        check_unchanged(ctx.compiled, entry, form, given, lifted)
        args, kwargs = form.fill(given)
        of_outputs = [g for g, has in zip(cotangents, entry.differentiable, strict=True) if has]
        with form.restored_context():
            grads = ctx.compiled.pullback(entry, form)(args, kwargs, of_outputs)
        of = dict(zip(map(id, requiring_grad(given, lifted)), grads, strict=True))
        return (None,) * 4 + tuple(of.pop(id(x), None) for x in (*given, *lifted))


@final
class Pullback:
    """The vector-Jacobian product of a captured function.

        pullback(args, kwargs, c) = c^T J, for the arguments and then the tensors that fn reaches

    It is differentiable if grad mode is on.
    """

    independent = True  # the gradient of an argument excludes what it was computed from

    def __init__(self, fn: Any, entry: GraphEntry, constants: list[Any]) -> None:
        self.fn = fn
        self._entry = entry
        self._constants = constants

    def __call__(self, args: Any, kwargs: Any, cotangents: list[Tensor | None]) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        lifted = self._entry.reached.resolve((self.fn, self._constants)) or []
        inputs = requiring_grad(pytree.tensors((args, kwargs)), lifted)
        with torch.enable_grad():
            outputs = [x for x in pytree.tensors(self.fn(*args, **kwargs)) if x.requires_grad]
            pairs = [(x, g) for x, g in zip(outputs, cotangents, strict=True) if g is not None]
            with without_tensor_hooks(inputs), no_autocast():  # backward runs outside of autocast
                grads = torch.autograd.grad(
                    [x for x, _ in pairs], inputs, [g for _, g in pairs],
                    create_graph=create_graph, allow_unused=True,
                )  # fmt: skip
        return materialize_grads(list(grads), inputs)


def kept_graph(
    run: Callable[..., Any], name: str, owner: Any, key: Hashable, backend: Any,
    *, precheck: Callable[..., Any] | None = None, kind: Any = Compiled,
) -> Any:  # fmt: skip
    """A function that is made anew at each call, as a graph that is found again: by its owner, the
    object that it derives from, and a key of all else that it depends on.

    Args:
        run: The function.
        name: Its name in messages.
        owner: A function, whose graphs a method shares with its object; or another object.
        key: The options of ``run``.
        backend: Of :func:`compile`.
        precheck: Called with the arguments before each capture; see :class:`Compiled`.
        kind: Compiled, or CompiledLoss.
    """
    place = Place.of(owner)
    place = Place(place.owner, (place.key, name, key))
    return kind(run, backend=backend, name=name, place=place, precheck=precheck)


def trace_graph(
    fn: Callable[..., Any], *args: Any, name: str | None = None
) -> tuple[GraphEntry, list[Tensor]]:
    """The graph of a function for such a call, neither compiled nor kept, and the tensors that the
    function reaches besides."""
    compiled = Compiled(fn, backend="eager", check=False, name=name)
    return capture(compiled, *signature.parse_call(compiled.name, args, {}, False))


def requiring_grad(given: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
    """The tensors that require grad, each once."""
    return list({id(x): x for x in (*given, *lifted) if x.requires_grad}.values())


def check_unchanged(
    compiled: Compiled, entry: GraphEntry, form: CallSignature, given: list[Tensor],
    lifted: list[Tensor],
) -> None:  # fmt: skip
    """Raises NoSecondDerivative if the function reaches other tensors or modules than at the call."""
    now = entry.resolve(compiled.fn, form, given)
    if now is None or any(a is not b for a, b in zip(now, lifted, strict=True)):
        raise NoSecondDerivative(
            f"{compiled.name}: expected backward to run while the function's parameters, modules and "
            "numbers are those of the call, got others (a new tensor in the place of a parameter, "
            "another mode, another value of an attribute). Call backward before they change."
        )


def count_graphs(graphs: list[GraphEntry]) -> str:
    return f"{len(graphs)} graph" + "s" * (len(graphs) != 1)
