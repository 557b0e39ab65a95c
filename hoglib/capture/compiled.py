"""`hoglib.compile`: a function of pytrees of tensors, second derivatives and all, as one graph."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._warning import warn
from hoglib.capture import _backends as backends
from hoglib.capture import _signature as signature
from hoglib.capture._capturing import capture, runs_elsewhere
from hoglib.capture._derivative import Graph, Pullback
from hoglib.capture._graphs import CAPTURING, Captured, Graphs, of_function
from hoglib.capture._signature import Form
from hoglib.capture._trace import alike

OPTIONS = ("backend", "dynamic", "check", "progress", "name")
MOST = 16  # graphs of one function; beyond, something changes at each call that should be a tensor


class Compiled:
    """A function that runs as a graph; made by `compile`."""

    def __init__(
        self, fn: Callable[..., Any], *, backend: Any, dynamic: bool, check: bool,
        name: str | None = None, progress: bool = True, graphs: Graphs | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.fn = arguments.function("fn", fn)
        if not callable(backend):
            arguments.one_of("backend", backend, backends.NAMES)
        self.backend = backend
        self.dynamic = arguments.flag("dynamic", dynamic)
        self.check = arguments.flag("check", check)
        self.progress = arguments.flag("progress", progress)
        self.name = name or named(fn)
        # graphs: of functions made anew, that compute the same from what they reach
        self._graphs = of_function(fn, (backend, dynamic, check)) if graphs is None else graphs
        self._before = before  # done ahead of a capture
        self.__doc__ = fn.__doc__

    @property
    def signatures(self) -> list[Captured]:
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

    def captured(self, form: Form, tensors: list[Tensor]) -> tuple[Captured, list[Tensor]] | None:
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

    def pullback(self, entry: Captured, form: Form) -> "Compiled":
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
        apart = _tree.map_tensors(alike, args)
        form, tensors = signature.of_call(self.name, apart, {}, self.dynamic)
        found = self.captured(form, tensors)
        if found is None:
            return lambda given: tensors_of(self.of_tensors(form)(*given))
        entry, lifted = found
        return lambda given: entry.execute(given + lifted)

    def _known(self, form: Form, tensors: list[Tensor]) -> tuple[Captured, list[Tensor]] | None:
        for entry in self._graphs.by_signature.get(form.key, ()):
            lifted = entry.found(self.fn, form, tensors)
            if lifted is not None:
                return entry, lifted
        return None

    def of_tensors(self, form: Form) -> Callable[..., Any]:
        """The function of the tensors among such arguments."""

        def run(*tensors: Tensor) -> Any:
            args, kwargs = form.filled(list(tensors))
            return self.fn(*args, **kwargs)

        return run

    def _say_full(self, form: Form, tensors: list[Tensor]) -> None:
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


def captured(fn: Callable[..., Any], *args: Any) -> Captured:
    """The graph of a function for such a call, by itself and not compiled."""
    compiled = Compiled(fn, backend="eager", dynamic=False, check=False, graphs=Graphs())
    return capture(compiled, *signature.of_call(compiled.name, args, {}, False))[0]


def remade(kind: Any, fn: Any, options: dict[str, Any]) -> Any:
    return kind(fn, **options)


def tensors_of(output: Any) -> list[Tensor]:
    return [x for x in _tree.leaves(output) if isinstance(x, Tensor)]


def counted(graphs: list[Captured]) -> str:
    return f"{len(graphs)} graph" + "s" * (len(graphs) != 1)


def named(fn: Any) -> str:
    """What to call a function in a message."""
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    if isinstance(fn, partial):
        return named(fn.func)
    return str(getattr(fn, "__qualname__", None) or repr(fn)).rpartition("<locals>.")[2]
