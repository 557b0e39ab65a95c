"""`hoglib.compile`: a function of pytrees of tensors, second derivatives and all, as one graph."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.autograd import materialize_grads
from hoglib._core.source_location import warn
from hoglib._core.torch_internals import no_autocast
from hoglib.capture import backend as backends
from hoglib.capture import signature
from hoglib.capture.capturing import (
    CAPTURING,
    GraphEntry,
    Graphs,
    capture,
    of_function,
    runs_elsewhere,
)
from hoglib.capture.signature import CallSignature
from hoglib.capture.trace import alike, without_hooks
from hoglib.errors import NoSecondDerivative

OPTIONS = ("backend", "dynamic", "check", "progress", "name")
MOST = 16  # graphs of one function; beyond, something changes at each call that should be a tensor


class Compiled:
    """A function that runs as a graph; made by `compile`."""

    def __init__(
        self, fn: Callable[..., Any], *, backend: Any, dynamic: bool, check: bool,
        name: str | None = None, progress: bool = True, graphs: Graphs | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.fn = validation.function("fn", fn)
        if not callable(backend):
            validation.one_of("backend", backend, backends.NAMES)
        self.backend = backend
        self.dynamic = validation.flag("dynamic", dynamic)
        self.check = validation.flag("check", check)
        self.progress = validation.flag("progress", progress)
        self.name = name or named(fn)
        # graphs: of functions made anew, that compute the same from what they reach
        self._graphs = of_function(fn, (backend, dynamic, check)) if graphs is None else graphs
        self._before = before  # done ahead of a capture
        self.__doc__ = fn.__doc__

    @property
    def signatures(self) -> list[GraphEntry]:
        """What was captured so far, in the order of capture: one graph for each signature."""
        return self._graphs.all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_elsewhere():
            return self.fn(*args, **kwargs)
        form, tensors = signature.of_call(self.name, args, kwargs, self.dynamic)
        found = self.captured(form, tensors)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        if torch.is_grad_enabled() and True in entry.recorded:
            outputs = list(Graph.apply(self, entry, form, len(tensors), *tensors, *lifted))
        else:
            outputs = entry.execute(entry.inputs(tensors, lifted))
        return entry.assembled(outputs)

    def captured(
        self, form: CallSignature, tensors: list[Tensor]
    ) -> tuple[GraphEntry, list[Tensor]] | None:
        """The graph for such a call, and the tensors that fn reaches besides; None where there are too
        many graphs already."""
        found = self._known(form, tensors)
        if found is not None:
            return found
        with CAPTURING:
            found = self._known(form, tensors)  # which another thread captured meanwhile
            if found is not None:
                return found
            if len(self.signatures) >= MOST:
                self._say_full(form, tensors)
                return None
            if self._before is not None:
                self._before()
            entry, lifted = capture(self, form, tensors)
            self._graphs.by_signature.setdefault(form.key, []).append(entry)
        return entry, lifted

    def pullback(self, entry: GraphEntry, form: CallSignature) -> "Compiled":
        """The backward of a graph, captured when it is first asked for."""
        return Compiled(
            Pullback(self.fn, entry, form.others), backend=self.backend, dynamic=self.dynamic,
            check=self.check, progress=self.progress, name=f"the backward of {self.name}",
            graphs=entry.backward,
        )  # fmt: skip

    def prepared(self, *args: Any) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph for such a call, as a function of the tensors among its arguments, in their order.

        For calls with the same signature while parameters, buffers and modes stay: nothing is looked
        up. The arguments stand for any of their kind: one that is given twice need not be later.
        """
        apart = pytree.map_tensors(alike, args)
        form, tensors = signature.of_call(self.name, apart, {}, self.dynamic)
        found = self.captured(form, tensors)
        if found is None:
            return lambda given: tensors_of(self.of_tensors(form)(*given))
        entry, lifted = found
        return lambda given: entry.execute(given + lifted)

    def _known(
        self, form: CallSignature, tensors: list[Tensor]
    ) -> tuple[GraphEntry, list[Tensor]] | None:
        for entry in self._graphs.by_signature.get(form.key, ()):
            lifted = entry.found(self.fn, form, tensors)
            if lifted is not None:
                return entry, lifted
        return None

    def of_tensors(self, form: CallSignature) -> Callable[..., Any]:
        """The function of the tensors among such arguments."""

        def run(*tensors: Tensor) -> Any:
            args, kwargs = form.filled(list(tensors))
            return self.fn(*args, **kwargs)

        return run

    def _say_full(self, form: CallSignature, tensors: list[Tensor]) -> None:
        if self._graphs.full:
            return
        self._graphs.full = True
        warn(
            f"{self.name} has {MOST} graphs and captures no more: calls with other arguments, as now "
            f"({form.described(tensors)}), run as they would without compiling. Pass as tensors what "
            "changes from call to call, give batches of one size, or use dynamic=True."
        )

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As a method, where it stands in a class."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> Any:
        """A copy has graphs of its own."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return remade, (type(self), self.fn, options)

    def __repr__(self) -> str:
        return f"hoglib.compile({self.name}, backend={self.backend!r}), {counted(self.signatures)}"


def compile(
    fn: Callable[..., Any],
    *,
    backend: Any = "inductor",
    dynamic: bool = False,
    check: bool = True,
    progress: bool = True,
    name: str | None = None,
) -> Compiled:
    r"""A function whose derivatives of any order, taken inside it, run as one compiled graph.

        fast = hog.compile(lambda params, v, batch: hog.hvp(loss, params, v, batch))
        value, product = fast(params, v, batch)

    fn: any function of pytrees of tensors (numbers and strings in them are constants), with pytrees of
    tensors out: torch.func transforms, `autograd.grad(create_graph=True)`, hoglib's own functions and
    custom Functions in it are traced through. `torch.compile` takes neither double backward nor a
    Function with a jvp; here the derivatives are operations of the graph by the time that it is
    compiled.

    It is captured at the first call with a signature: the structure of the arguments, shapes, strides,
    dtypes, devices and requires_grad of their tensors, which of them are one, grad mode, autocast,
    stand-ins, default dtype and device. Parameters, buffers and other tensors that fn reaches are
    inputs, which each call finds where they are then. Where fn reaches another module, number, text or
    function, a list of another length, or a module with another mode or other hooks than when it was
    captured, it is captured anew. `fast.signatures` lists what was captured: operations, seconds to
    trace and to compile, and where the code came from. Graphs are shared by all that compile the same
    function, at most 16; compiled code by all equal graphs, and with later processes (in
    HOGLIB_CACHE_DIR, by default hoglib in the user's cache directory).

    The outputs are differentiable where those of fn are, to any order: a backward is captured when it
    is first asked for. Inside of transforms, and where something else traces, fn itself runs. Nothing
    but the outputs comes out of a graph: attributes that fn sets are not set by a call.

    backend: "inductor", torch's compiler; "eager", the same operations one by one, to the bit, with
    none of the time that autograd and Python take around them and no time to compile; or a function
    (graph module, inputs) -> function. Without a C++ compiler it is "eager", with a warning.
    dynamic: shapes are symbols, for sizes that change from call to call.
    check: the first run of each graph is compared with fn, also at other values; so fn runs three times
    in all at a first call. What fn reads of the world besides tensors and the above (an iterator, the
    state of another library) is found out by nothing else.
    progress: what is compiled, and how long it took, is said on stderr.
    name: what the function is called in messages.

    Raises NotImplementedError where fn reads values of tensors (if, .item(), NumPy), changes an
    argument, parameter or buffer in place, or draws from a Generator of its own, naming the line;
    RuntimeError where the graph's results are not those of fn. Nothing is kept of a capture that
    raises.
    """
    return Compiled(fn, backend=backend, dynamic=dynamic, check=check, progress=progress, name=name)


def captured(fn: Callable[..., Any], *args: Any) -> GraphEntry:
    """The graph of a function for such a call, by itself and not compiled."""
    compiled = Compiled(fn, backend="eager", dynamic=False, check=False, graphs=Graphs())
    return capture(compiled, *signature.of_call(compiled.name, args, {}, False))[0]


def remade(kind: Any, fn: Any, options: dict[str, Any]) -> Any:
    return kind(fn, **options)


def tensors_of(output: Any) -> list[Tensor]:
    return [x for x in pytree.leaves(output) if isinstance(x, Tensor)]


def counted(graphs: list[GraphEntry]) -> str:
    return f"{len(graphs)} graph" + "s" * (len(graphs) != 1)


def named(fn: Any) -> str:
    """What to call a function in a message."""
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    if isinstance(fn, partial):
        return named(fn.func)
    return str(getattr(fn, "__qualname__", None) or repr(fn)).rpartition("<locals>.")[2]


# === Derivatives of a function that runs as a graph: its backward is a function that runs as a
# graph.


class Pullback:
    """Gradients of a function by those of its tensors that require grad, for cotangents of its outputs.

        pullback(args, kwargs, c) = c^T J, of the arguments and then of the tensors that fn reaches

    Differentiable where grad mode is on.
    """

    apart = True  # an argument's gradient has no part of what another one was computed from

    def __init__(self, fn: Any, entry: GraphEntry, others: list[Any]) -> None:
        self.fn = fn
        self._entry = entry
        self._others = others

    def __call__(self, args: Any, kwargs: Any, cotangents: list[Tensor | None]) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        given = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        wanted = differentiated(given, self._entry.reached.now((self.fn, self._others)) or [])
        with torch.enable_grad():
            outputs = [x for x in pytree.leaves(self.fn(*args, **kwargs)) if isinstance(x, Tensor)]
            recorded = [x for x in outputs if x.requires_grad]
            pairs = [(x, g) for x, g in zip(recorded, cotangents, strict=True) if g is not None]
            with without_hooks(wanted), no_autocast():  # as a backward outside of its region
                grads = torch.autograd.grad(
                    [x for x, _ in pairs], wanted, [g for _, g in pairs],
                    create_graph=create_graph, allow_unused=True,
                )  # fmt: skip
        return materialize_grads(list(grads), wanted)


class Graph(torch.autograd.Function):
    """A graph as one node; its backward is the graph of a pullback, and so to any order."""

    @staticmethod
    def forward(
        ctx: Any,
        compiled: "Compiled",
        entry: GraphEntry,
        form: CallSignature,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given, lifted = list(tensors[:count]), list(tensors[count:])
        outputs = entry.execute(entry.inputs(given, lifted))
        ctx.save_for_backward(*tensors)
        ctx.compiled, ctx.entry, ctx.form, ctx.count, ctx.lifted = (
            compiled,
            entry,
            form,
            count,
            lifted,
        )
        ctx.set_materialize_grads(False)
        recorded = entry.recorded
        ctx.mark_non_differentiable(
            *[x for x, has in zip(outputs, recorded, strict=True) if not has]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        entry, form, lifted = ctx.entry, ctx.form, ctx.lifted
        saved = ctx.saved_tensors[: ctx.count]  # raises if one was changed in place
        needed = ctx.needs_input_grad[4:]
        given = [
            x if x.requires_grad is has else x.detach().requires_grad_(has)  # kept by hooks
            for x, has in zip(saved, needed, strict=False)
        ]
        check_unchanged(ctx.compiled, entry, form, given, lifted)
        args, kwargs = form.filled(given)
        recorded = [g for g, has in zip(cotangents, entry.recorded, strict=True) if has]
        with form.again():
            grads = ctx.compiled.pullback(entry, form)(args, kwargs, recorded)
        of = dict(zip(map(id, differentiated(given, lifted)), grads, strict=True))
        return (None,) * 4 + tuple(of.pop(id(x), None) for x in (*given, *lifted))


def differentiated(given: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
    """The tensors that require grad, each once."""
    return list({id(x): x for x in (*given, *lifted) if x.requires_grad}.values())


def check_unchanged(
    compiled: "Compiled",
    entry: GraphEntry,
    form: CallSignature,
    given: list[Tensor],
    lifted: list[Tensor],
) -> None:
    """Raises NoSecondDerivative where the function reaches other tensors or modules than at a call."""
    now = entry.found(compiled.fn, form, given)
    if now is None or any(a is not b for a, b in zip(now, lifted, strict=True)):
        raise NoSecondDerivative(
            f"{compiled.name}: expected backward while the function's parameters, modules and numbers "
            "are those of the call, got others (a new tensor in a parameter's place, another mode, "
            "another value of an attribute). Call backward before they change."
        )
