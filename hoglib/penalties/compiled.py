"""A penalty and its gradients as one graph, for each signature: the option `compile`.

Checks that look at values (gradient flow, finite differences, batch dependence) are made in an eager
run before each capture. Random numbers of a generator are drawn before the graph runs, and are inputs.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.gradient_graph import graph_summary
from hoglib._core.state import preserve_random_state
from hoglib.capture.api import Compiled
from hoglib.capture.capturing import Graphs, runs_elsewhere
from hoglib.capture.loss import CompiledLoss
from hoglib.capture.signature import parse_call
from hoglib.penalties.critic_context import owner_of
from hoglib.penalties.samples import random_like

_GRAPHS_BY_OWNER: Any = WeakIdKeyDictionary()
Term = Callable[..., Any]  # of tensors, and of the numbers that a generator drew


def run_as_graph(
    name: str,
    term: Term,
    args: tuple[Any, ...],
    backend: Any,
    generator: torch.Generator | None,
    with_gradients: bool,
    check: "Callable[[RecordedDraws], bool]",
) -> Any:
    """term(*args, numbers) by a graph; with_gradients: its gradients too, which backward returns.

    term: created for each call, with all that it depends on in its attributes. check: the same run,
    eager and with its checks, which records what it draws; False if no gradient is needed.
    """
    owned = _GRAPHS_BY_OWNER.setdefault(owner_of(term.func), {})  # type: ignore[attr-defined]
    known: OwnedGraphs = owned.setdefault((name, backend), OwnedGraphs())
    signature, _ = parse_call(name, args, {}, dynamic=False)
    checked = False

    def check_once() -> None:
        nonlocal checked
        if checked:
            return
        checked = True
        with preserve_random_state(generator):
            draws = RecordedDraws()
            known.draws[signature.key] = draws.recorded if check(draws) else None
        if known.draws[signature.key] is None:
            raise _NoGradientNeeded

    options: dict[str, Any] = {
        "backend": backend, "dynamic": False, "check": True, "name": name,
        "before": check_once,
    }  # fmt: skip
    try:
        if known.draws.get(signature.key) is None:
            check_once()
        numbers = [
            random_like(
                torch.empty((), dtype=d.dtype, device=d.device), d.sampler, d.shape, generator
            )
            for d in known.draws[signature.key] or ()
        ]
        if with_gradients:
            return CompiledLoss(term, graphs=known.graphs, **options)(*args, numbers)
        return Compiled(term, graphs=known.graphs[0], **options)(*args, numbers)
    except _NoGradientNeeded:
        return term(*args, None)


def backend_of(compile: Any) -> Any:
    """The backend that the option `compile` names; None where nothing is compiled: without gradients,
    and where the call is part of an outer transform or capture."""
    if not compile or not torch.is_grad_enabled():
        return None
    if runs_elsewhere():
        return None
    return "inductor" if compile is True else compile


def leaves_of(value: Tensor) -> list[Tensor]:
    """The leaf tensors that a backward of the value reaches."""
    return list(graph_summary(value).leaves.values())


class Draw(NamedTuple):
    """One call that draws random numbers from a generator."""

    sampler: Callable[..., Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@final
class RecordedDraws:
    """Replaces `random_like`: records what a generator draws, or returns numbers that were drawn
    before, in the same order."""

    def __init__(self, numbers: list[Tensor] | None = None) -> None:
        self.recorded: list[Draw] = []
        self._numbers = None if numbers is None else iter(numbers)

    def __call__(
        self, like: Tensor, sampler: Any, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> Tensor:
        if generator is None:  # torch's own random numbers are drawn in the graph
            return random_like(like, sampler, shape, None)
        if self._numbers is not None:
            return next(self._numbers)
        self.recorded.append(Draw(sampler, tuple(shape), like.dtype, like.device))
        return random_like(like, sampler, shape, generator)


@final
class OwnedGraphs:
    """The graphs of the functions of one owner, and for each signature what it draws, or None if no
    gradient was needed."""

    def __init__(self) -> None:
        self.graphs = Graphs(), Graphs(), Graphs()
        self.draws: dict[Hashable, list[Draw] | None] = {}


class _NoGradientNeeded(Exception):
    """Nothing that the value depends on requires grad."""
