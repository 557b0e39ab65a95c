"""A penalty and its gradients as one graph, for each signature: the option `compile`.

Checks that look at values (gradient flow, finite differences, batch dependence) are made in an eager
run before each capture. Random numbers of a generator are drawn before the graph runs, and are inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.closures import owner_of
from hoglib._core.problem import Policy
from hoglib._core.state import preserve_random_state
from hoglib.capture.api import Compiled, kept_graph
from hoglib.capture.capturing import Place, kept, runs_elsewhere
from hoglib.capture.loss import CompiledLoss
from hoglib.capture.signature import parse_call
from hoglib.penalties.options import CheckedOptions
from hoglib.penalties.samples import random_like


def captures(policy: Policy) -> bool:
    """Whether a penalty runs as one graph: with gradients, and where the call is no part of an outer
    transform or capture."""
    return policy.one_graph and policy.create_graph and not runs_elsewhere()


def run_as_graph(
    body: Any, options: CheckedOptions, inputs: tuple[Any, ...], with_gradients: bool = False
) -> Any:
    """body(*inputs, draws) by a graph; with_gradients: its gradients too, which backward returns.

    body: created for each call, with all that it depends on in its attributes. draws: RecordedDraws in
    an eager run with checks, then what the generator drew, in a run without; None in a plain run.
    """
    name, generator, owner = options.name, options.generator, owner_of(body.func)
    signature, state, known = None, None, {}
    if generator is not None:
        signature, state = parse_call(name, inputs, {}, dynamic=False)[0].key, generator.get_state()
        known = kept(Place(owner, (name, "draws")), dict, name)  # by signature

    def check(*_: Any) -> None:
        draws = RecordedDraws()
        with preserve_random_state(generator):
            found = pytree.leaves(body(*inputs, draws))
        if not any(isinstance(x, Tensor) and x.requires_grad for x in found):
            raise _NoGradientNeeded
        if draws.recorded != known.get(signature, []):
            known[signature] = draws.recorded
            raise _OtherDraws

    def run(precheck: Callable[..., Any]) -> Any:
        kind = CompiledLoss if with_gradients else Compiled
        backend = options.policy.backend
        compiled = kept_graph(body, name, owner, None, backend, precheck=precheck, kind=kind)
        return compiled(*inputs, [draw.tensor(generator) for draw in known.get(signature, ())])

    try:
        return run(check)
    except (_NoGradientNeeded, _OtherDraws) as reason:
        again = type(reason)
    if generator is not None and state is not None:
        generator.set_state(state)
    if again is _OtherDraws:
        return run(lambda *_: None)  # what there was to check is checked
    return body(*inputs, None)


class Draw(NamedTuple):
    """One call that draws random numbers from a generator."""

    sampler: Callable[..., Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self, generator: torch.Generator | None) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=self.device)
        return random_like(like, self.sampler, self.shape, generator)


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


class _NoGradientNeeded(Exception):
    """Nothing that the value depends on requires grad."""


class _OtherDraws(Exception):
    """The generator draws other numbers than those that were known."""
