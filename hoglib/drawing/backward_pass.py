"""A gradient with a graph, watched from inside: which Function loses the graph, and what raises."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import torch_internals
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.gradient_graph import FunctionNode, walk
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib.verification.call import is_part


class CutGradient(NamedTuple):
    """A gradient that a custom Function gave without a graph, and the leaf that stands for it."""

    node: Any
    leaf: Tensor
    why: str


class Leak(NamedTuple):
    """Places where a backward leaves the graph, though its gradient has one."""

    node: Any
    why: str
    whole: bool  # only the incoming gradient still has a graph


class Raised(NamedTuple):
    """What could not be differentiated, and what was said."""

    node: Any
    text: str


class Pass:
    """One backward pass. `cuts`, `leaks` and `raised` are what was found in it.

    A gradient without a graph is replaced by a leaf as it leaves its Function, so that the graph goes
    on after it. The incoming gradients have to require grad: then what backward gives does too, unless
    it is cut.
    """

    def __init__(self, applying: torch_internals.Applying) -> None:
        self.cuts: list[CutGradient] = []
        self.leaks: list[Leak] = []
        self.raised: Raised | None = None
        self._applying = applying
        self._running: list[tuple[Any, tuple[Any, ...], DetachmentWatch | None]] = []

    def gradients(
        self, values: Sequence[Tensor], by: Sequence[Tensor], incoming: Sequence[Tensor],
        *, create_graph: bool = True,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients; None for each if the pass raised."""
        handles = []
        for node, _ in walk(values):
            if hasattr(node, "variable"):
                continue
            function = torch_internals.custom_function(node) if create_graph else None
            watched = function if FunctionNode(node, function).by_user else None
            handles.append(node.register_prehook(partial(self._enter, node, watched)))
            handles.append(node.register_hook(partial(self._leave, node, function)))
        try:
            # in this thread, where the Functions that backward applies are seen
            with torch.autograd.set_multithreading_enabled(False):
                return list(
                    torch.autograd.grad(
                        list(values), list(by), list(incoming), create_graph=create_graph,
                        retain_graph=True, allow_unused=True,
                    )
                )  # fmt: skip
        except Exception as error:
            self.raised = Raised(
                self._running[-1][0] if self._running else None, format_error(error)
            )
            return [None] * len(by)
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, node: Any, function: type[Function] | None, grads: tuple[Any, ...]) -> None:
        watch = None
        if function is not None:
            watch = DetachmentWatch()
            watch.applying = self._applying
            watch.__enter__()  # torch ends it with the node, should that raise
        self._running.append((node, grads, watch))

    def _leave(
        self, node: Any, function: type[Function] | None, returned: tuple[Any, ...], _: Any
    ) -> tuple[Any, ...] | None:
        _, incoming, watch = self._running.pop()
        if watch is not None:
            watch.__exit__(None, None, None)
        if function is None or is_part(function):
            return None
        once = torch_internals.is_once_differentiable(function)
        why = (
            "@once_differentiable" if once else _listed(watch.detached) if watch is not None else ""
        )
        lost = [is_float(g) and (once or (not g.requires_grad and bool(g.any()))) for g in returned]
        if any(lost):
            return tuple(
                self._replaced(node, g, why) if is_lost else g
                for g, is_lost in zip(returned, lost, strict=True)
            )
        if watch is not None:
            grads = [g for g in returned if is_float(g) and g.requires_grad]
            whole = bool(grads) and not _depends_on_more(node, grads, incoming)
            self.leaks.append(Leak(node, why, whole))
        return None

    def _replaced(self, node: Any, grad: Tensor, why: str) -> Tensor:
        leaf = grad.detach().clone().requires_grad_()
        self.cuts.append(CutGradient(node, leaf, why))
        return leaf


def _listed(cuts: Sequence[DetachedGradient]) -> str:
    """Where, and by what; each line of code once."""
    places: dict[Any, list[str]] = {}
    for cut in cuts:
        how = f"{cut.how}, then {cut.then}" if cut.then else cut.how
        places.setdefault(cut.place, []).append(how)
    told_of = [(place, " and ".join(dict.fromkeys(hows))) for place, hows in places.items()]
    return "; ".join(f"{hows} at {place}" if place else hows for place, hows in told_of)


def _depends_on_more(node: Any, grads: Sequence[Tensor], incoming: Sequence[Any]) -> bool:
    """Whether gradients that a node gave depend on anything but the incoming ones."""
    ids = {id(u) for u in incoming}
    since = [u for u in incoming if isinstance(u, Tensor)]
    return any(
        id(part.variable) not in ids
        if hasattr(part, "variable")
        else torch_internals.made_by(part) is not node
        for part, _ in walk(grads, since)
    )
