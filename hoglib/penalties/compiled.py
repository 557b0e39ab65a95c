"""A penalty and its gradients as one graph, from call to call: compile=True.

What is looked at with values (effect, second look, coupling) is looked at in an eager run, ahead of
each capture; random numbers of a generator are drawn before the graph runs, and are inputs.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.gradient_graph import graph_summary
from hoglib._core.state import preserve_random_state
from hoglib.capture.api import Compiled
from hoglib.capture.capturing import Graphs, runs_elsewhere
from hoglib.capture.loss import CompiledLoss
from hoglib.capture.signature import of_call
from hoglib.penalties.critic_state import home
from hoglib.penalties.interpolation import drawn

_OF_HOMES: Any = WeakIdKeyDictionary()


class Draw(NamedTuple):
    """Random numbers that are drawn by a generator on the way."""

    draw: Callable[..., Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Draws:
    """Notes what is drawn by a generator, or hands out what was drawn before, in the same order."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        self.noted: list[Draw] = []
        self._given = None if given is None else iter(given)

    def __call__(
        self, draw: Any, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        if generator is None:  # torch's own draws inside of a graph
            return drawn(draw, shape, like, None)
        if self._given is not None:
            return next(self._given)
        self.noted.append(Draw(draw, tuple(shape), like.dtype, like.device))
        return drawn(draw, shape, like, generator)


class Known:
    """The graphs of functions of one home, and what each signature draws: None, nothing is learnt."""

    def __init__(self) -> None:
        self.graphs = Graphs(), Graphs(), Graphs()
        self.draws: dict[Hashable, list[Draw] | None] = {}


Term = Callable[..., Any]  # (tensors, and what a generator drew) -> what is compiled


class NothingLearns(Exception):
    """There is no gradient to compute."""


def run(
    what: str,
    term: Term,
    given: tuple[Any, ...],
    backend: Any,
    generator: torch.Generator | None,
    scalar: bool,
    guarded: Callable[[Draws], bool],
) -> Any:
    """term(*given, draws) as a graph; scalar: with its gradients, which backward hands on.

    term: made anew for each call, with all that it depends on in its attributes. guarded: the same run
    eagerly with its guards, which notes what it draws, and says whether anything is learnt.
    """
    known: Known = _OF_HOMES.setdefault(home(term.func), {}).setdefault((what, backend), Known())  # type: ignore[attr-defined]
    form, _ = of_call(what, given, {}, dynamic=False)
    seen = False

    def look() -> None:
        nonlocal seen
        if seen:
            return
        seen = True
        with _state_kept(generator):
            draws = Draws()
            known.draws[form.key] = draws.noted if guarded(draws) else None
        if known.draws[form.key] is None:
            raise NothingLearns

    options: dict[str, Any] = {
        "backend": backend, "dynamic": False, "check": True, "progress": True, "name": what,
        "before": look,
    }  # fmt: skip
    try:
        if known.draws.get(form.key) is None:
            look()
        numbers = [
            drawn(s.draw, s.shape, torch.empty((), dtype=s.dtype, device=s.device), generator)
            for s in known.draws[form.key] or ()
        ]
        if scalar:
            return CompiledLoss(term, graphs=known.graphs, **options)(*given, numbers)
        return Compiled(term, graphs=known.graphs[0], **options)(*given, numbers)
    except NothingLearns:
        return term(*given, None)


def leaves_of(value: Tensor) -> list[Tensor]:
    """What its backward reaches."""
    return list(graph_summary(value).leaves.values())


def chosen(value: Any) -> Any:
    """The backend that `compile` names; None for none, where there is no gradient to compute, and where
    the call is a part of what is transformed or captured outside."""
    if not value or not torch.is_grad_enabled():
        return None
    if runs_elsewhere():
        return None
    return "inductor" if value is True else value


@contextmanager
def _state_kept(generator: torch.Generator | None) -> Iterator[None]:
    own = None if generator is None else generator.get_state()
    try:
        with preserve_random_state():
            yield
    finally:
        if generator is not None and own is not None:
            generator.set_state(own)
