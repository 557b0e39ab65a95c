"""A TorchFunctionMode that finds the lines at which a function leaves the autograd graph.

A call leaves the graph if an argument is a floating-point tensor with a graph, and the result is a
number or a tensor without a graph: `.detach()`, `.data`, code under `no_grad`, kernels without a
derivative. Not every such call does harm. To find out, the mode can repair a call: it returns the
argument instead of the detached tensor, or enables gradients for the call.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core.runtime import source_location
from hoglib._core.runtime.source_location import SourceLine
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.function_watch import Applying, watching_functions
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import watching_constructors

# Calls with results that do not depend on the values of their arguments.
VALUE_INDEPENDENT = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "heaviside",
)  # fmt: skip
# Calls that may read only the dtype or shape of their second tensor.
LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")
# Calls that return no tensor: method -> what users write.
ESCAPES = {
    "item": ".item()", "__float__": "float()", "__complex__": "complex()", "tolist": ".tolist()",
    "numpy": ".numpy()", "__array__": "NumPy", "__dlpack__": "DLPack", "data_ptr": ".data_ptr()",
    "untyped_storage": ".untyped_storage()",
}  # fmt: skip
INNER = "torch.autograd.grad without create_graph=True"
# Calls that return a tensor's values without its graph: method -> what users write.
ALIASES = {
    "data": ".data", "detach": ".detach()", "tensor": "torch.tensor()", "new_tensor": ".new_tensor()",
    "Variable": "Variable()", "Parameter": "nn.Parameter()",
}  # fmt: skip


@dataclass
class DetachedGradient:
    """A line at which a function leaves the graph.

    how: The call, such as ".detach()".
    kind: "alias": the result has the values without the graph. "escape": the result is no tensor.
        "off": gradients were disabled. "inner": autograd.grad without create_graph. "backward":
        .backward(), which accumulates. "write": an in-place write that autograd does not see.
        "kernel": an operation without a derivative.
    place: The user's line.
    then: The later call, such as ".numpy()", that took the detached tensor out of torch; or "".
    module: The running module, such as " in Linear", if the watch records modules.
    """

    how: str
    kind: str
    place: SourceLine | None
    then: str = ""
    module: str = ""

    @property
    def repairable(self) -> bool:
        """Whether the mode can keep the graph in this call."""
        return self.kind in ("alias", "off", "inner") and not self.then

    def __str__(self) -> str:
        then = f", then {self.then}," if self.then else ""
        place = f" at {self.place}" if self.place else ""
        return f"{self.how}{then}{place}{self.module}"


class DetachmentWatch(TorchFunctionMode):
    """A mode that collects in `detached` the lines at which calls inside it leave the graph.

    repair: (how, place) of the calls to repair.
    module: Describes the running module.
    """

    def __init__(
        self, repair: Iterable[tuple[str, SourceLine | None]] = (), module: Callable[[], str] = str
    ) -> None:
        super().__init__()
        self._module = module
        self.applying = Applying()  # calls in the forward of a custom Function are not watched
        self._repair = set(repair)
        self._lost: list[tuple[Tensor, DetachedGradient]] = []  # (detached tensor, where)
        # results of .data and .detach() on tensors without a graph: autograd misses writes into them
        self._aliases: list[Tensor] = []
        self._seen: dict[tuple[str, SourceLine | None], DetachedGradient] = {}

    @contextmanager
    def outside_functions(self, seen: Callable[..., None] = lambda *_: None) -> Iterator[None]:
        """Inside, calls are watched, except in the forward of a custom Function; `seen` is called with
        each Function and its arguments."""
        with watching_functions(seen) as self.applying, self:
            yield

    @property
    def detached(self) -> list[DetachedGradient]:
        """The lines found so far, each once."""
        return list(self._seen.values())

    def __enter__(self) -> Self:
        self._constructors = watching_constructors(self.__torch_function__)
        self._constructors.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._constructors.__exit__(*error)

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if self.applying:
            return func(*args, **kwargs)
        name = name_of_call(func)
        tensors = pytree.tensors((args, kwargs))
        has_graph = any(x.requires_grad and is_float(x) for x in tensors)
        if name == "detach_" and has_graph:
            found = self._note(".detach_()", "alias")
            if (found.how, found.place) in self._repair:
                return args[0]
            self._lost.append((args[0], found))
            return func(*args, **kwargs)
        repaired = func is torch.autograd.grad and self._repair
        if repaired and (INNER, source_location.torch_call_line()) in self._repair:
            return func(*args, **(kwargs | {"create_graph": True}))
        if name == "backward" and func is not Tensor.backward:  # that calls torch.autograd.backward
            if has_graph and not kwargs.get("create_graph"):
                self._note("torch.autograd.backward", "backward")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in ALIASES and not has_graph and isinstance(result, Tensor):
            self._aliases.append(result)
        written = tensors_written(name, args, kwargs) if has_graph else []
        if any(x is alias for x in written for alias in self._aliases):
            self._note(f"a write through .data by `{_short_name(func)}`", "write")
            return result
        if name in ESCAPES:
            self._escape(ESCAPES[name], tensors, has_graph)
        elif has_graph and name not in VALUE_INDEPENDENT and not uses_metadata(name, args):
            return self._check(func, name, args, kwargs, result)
        return result

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """The result of a call; notes a lost graph, and repairs the call if it is in `repair`."""
        outputs = [y for y in pytree.leaves(result) if is_float(y)]
        without = [y for y in outputs if not y.requires_grad or name == "Parameter"]
        # kernels without a derivative get torch's NotImplemented node, which raises in backward
        raw = [y for y in outputs if y.grad_fn and "NotImplemented" in y.grad_fn.name()]
        if not without and not raw:
            return result
        if name in ALIASES:
            found = self._note(ALIASES[name], "alias")
        # the attribute x.grad: `.backward()` was noted already
        elif name == "grad" and func is not torch.autograd.grad:
            return result
        elif name == "grad":
            found = self._note(INNER, "inner")
        elif not torch.is_grad_enabled():
            by = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
            found = self._note(f"`{_short_name(func)}` under {by}", "off")
        else:
            found = self._note(f"`{_short_name(func)}`, which has no derivative", "kernel")
        if (found.how, found.place) in self._repair:
            if name in ALIASES:
                return args[0]
            if found.kind == "off":
                with torch.inference_mode(False), torch.enable_grad():
                    return func(*args, **kwargs)
        self._lost += [(y, found) for y in without]
        return result

    def _escape(self, how: str, tensors: list[Tensor], has_graph: bool) -> None:
        """Notes that values leave torch, of a tensor with a graph or of a detached tensor."""
        for x in tensors:
            for lost, found in self._lost:
                if lost is x:
                    found.then = how
                    return
        if has_graph:
            self._note(how, "escape")

    def _note(self, how: str, kind: str) -> DetachedGradient:
        place = source_location.torch_call_line()
        found = self._seen.get((how, place))
        if found is None:
            found = DetachedGradient(how, kind, place, module=self._module())
            self._seen[how, place] = found
        return found


def tensors_written(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes into: `out`, and the first argument of an in-place call."""
    # torch passes `x += y` under the name of the method, `add_`
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return pytree.tensors((kwargs.get("out"), args[:1] if in_place else ()))


def name_of_call(func: Callable[..., Any]) -> str:
    """A torch callable's name in user code: `data` for the getter of Tensor.data."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def uses_metadata(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call reads only dtype or shape of a tensor with a graph: x.to(y), x.view_as(y)."""
    return name in LIKE and bool(args) and isinstance(args[0], Tensor) and not args[0].requires_grad


def _short_name(func: Callable[..., Any]) -> str:
    name = str(getattr(func, "__name__", func)).removeprefix("aten.")
    return f".{name_of_call(func)}" if name == "__get__" else name
