"""Finds where a function leaves the graph: a watch on every torch call that it makes.

A call is a cut if a floating-point tensor with a graph goes in and one without comes out, or a number.
That names `.detach()` and `.data`, code under `no_grad`, kernels without a derivative, and whatever
torch adds tomorrow. Not every cut does harm; to find out, the watch can mend one: it hands back the
tensor that was detached, or records a call that ran with gradients off.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, source_location
from hoglib._core.pytree import is_float
from hoglib._core.source_location import SourceLine
from hoglib._core.torch_internals import Applying

# What they return does not depend on the values that they are given.
VALUELESS = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "heaviside",
)  # fmt: skip
LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")
ESCAPES = {
    "item": ".item()", "__float__": "float()", "__complex__": "complex()", "tolist": ".tolist()",
    "numpy": ".numpy()", "__array__": "NumPy", "__dlpack__": "DLPack", "data_ptr": ".data_ptr()",
    "untyped_storage": ".untyped_storage()",
}  # fmt: skip
INNER = "torch.autograd.grad without create_graph=True"
ALIASES = {
    "data": ".data", "detach": ".detach()", "tensor": "torch.tensor()", "new_tensor": ".new_tensor()",
}  # fmt: skip


@dataclass
class DetachedGradient:
    """One place where the graph ends."""

    how: str  # ".detach()"
    kind: str  # "alias", "escape", "off", "inner", "write" or "kernel"
    place: SourceLine | None
    then: str = ""  # ".numpy()", where the detached tensor left torch

    @property
    def mendable(self) -> bool:
        return self.kind in ("alias", "off", "inner") and not self.then

    def __str__(self) -> str:
        then = f", then {self.then}," if self.then else ""
        return f"{self.how}{then} at {self.place}" if self.place else self.how + then


class DetachmentWatch(TorchFunctionMode):
    """`cuts` are the cuts seen, each place once; those in `mend` are mended as they pass."""

    def __init__(self, mend: Collection[tuple[str, SourceLine | None]] = ()) -> None:
        super().__init__()
        self.applying = Applying()  # what another Function's forward does has a backward of its own
        self._mend = set(mend)
        self._lost: list[tuple[Tensor, DetachedGradient]] = []
        self._aliases: list[Tensor] = []  # what .data and .detach() gave of tensors without a graph
        self._seen: dict[tuple[str, SourceLine | None], DetachedGradient] = {}

    @property
    def cuts(self) -> list[DetachedGradient]:
        return list(self._seen.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.applying.depth:
            return func(*args, **kwargs)
        name = name_of_call(func)
        given = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        graphed = any(x.requires_grad and is_float(x) for x in given)
        if name == "detach_" and graphed:
            cut = self._note(".detach_()", "alias")
            if (cut.how, cut.place) in self._mend:
                return args[0]
            self._lost.append((args[0], cut))
            return func(*args, **kwargs)
        if func is torch.autograd.grad and (INNER, source_location.torch_call_line()) in self._mend:
            return func(*args, **(kwargs | {"create_graph": True}))
        result = func(*args, **kwargs)
        if name in ALIASES and not graphed and isinstance(result, Tensor):
            self._aliases.append(result)
        if graphed and _changed(name, args, kwargs, self._aliases):
            self._note(f"a write through .data by `{_short(func)}`", "write")
            return result
        if name in ESCAPES:
            self._escape(ESCAPES[name], given, graphed)
        elif graphed and name not in VALUELESS and not only_like(name, args):
            return self._check(func, name, args, kwargs, result)
        return result

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        made = [y for y in pytree.leaves(result) if is_float(y)]
        without = [y for y in made if not y.requires_grad]
        # what torch's fallback for kernels without a formula leaves behind
        raw = [y for y in made if y.grad_fn and "NotImplemented" in y.grad_fn.name()]
        if not without and not raw:
            return result
        if name in ALIASES:
            cut = self._note(ALIASES[name], "alias")
        elif name == "grad" and func is torch.autograd.grad:
            cut = self._note(INNER, "inner")
        elif not torch.is_grad_enabled():
            by = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
            cut = self._note(f"`{_short(func)}` under {by}", "off")
        else:
            cut = self._note(f"`{_short(func)}`, which has no derivative", "kernel")
        if (cut.how, cut.place) in self._mend:
            if name in ALIASES:
                return args[0]
            if cut.kind == "off":
                with torch.inference_mode(False), torch.enable_grad():
                    return func(*args, **kwargs)
        self._lost += [(y, cut) for y in without]
        return result

    def _escape(self, how: str, given: list[Tensor], graphed: bool) -> None:
        for x in given:
            for lost, cut in self._lost:
                if lost is x:
                    cut.then = how
                    return
        if graphed:
            self._note(how, "escape")

    def _note(self, how: str, kind: str) -> DetachedGradient:
        place = source_location.torch_call_line()
        return self._seen.setdefault((how, place), DetachedGradient(how, kind, place))


def _changed(name: str, args: Any, kwargs: Any, aliases: list[Tensor]) -> bool:
    """Whether it writes into a tensor that autograd does not see."""
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = args[0] if args and in_place else kwargs.get("out")
    return any(written is alias for alias in aliases)


def name_of_call(func: Any) -> str:
    """What the user calls it: `data` for the getter of Tensor.data."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def only_like(name: str, args: Any) -> bool:
    """Whether the tensor with a graph lends its dtype or shape only: x.to(other), x.view_as(other)."""
    return name in LIKE and bool(args) and isinstance(args[0], Tensor) and not args[0].requires_grad


def _short(func: Any) -> str:
    return str(getattr(func, "__name__", func)).removeprefix("aten.")
