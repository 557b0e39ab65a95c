"""Products compiled by hand, by each of the three routes to a second derivative."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from experiments.benchmarks.problems import Problem, plain_attention
from experiments.benchmarks.with_torch import detached

Call = Callable[[], Any]
Leaves = Sequence[Tensor]


def compiled_by_hand(problem: Problem, route: str) -> Call:
    """The product traced by make_fx, without dead code, and compiled by inductor, as hoglib's are."""
    from torch._inductor import config, standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, v, count = list(detached(problem).values()), list(problem.vector()), len(problem.params)
    inputs: list[Any] = [*leaves, *v, problem.x, problem.y]

    def product(*given: Tensor) -> tuple[Tensor, ...]:
        return ROUTES[route](
            problem.model, list(problem.params), given[:count], *_rest(given, count)
        )

    with torch.no_grad(), plain_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        graph = make_fx(product, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        with config.patch({"fallback_random": True, "cpp.vec_isa_ok": True}):
            run = standalone_compile(graph, inputs, dynamic_shapes="from_example_inputs")

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(run(*inputs)[1:])

    return call


def _rest(given: Leaves, count: int) -> tuple[Leaves, Tensor, Tensor]:
    return given[count:-2], given[-2], given[-1]


def _loss_of(model: nn.Module, names: list[str], leaves: Leaves, x: Tensor, y: Tensor) -> Tensor:
    named = dict(zip(names, leaves, strict=True))
    return F.cross_entropy(functional_call(model, named, (x,)), y)


_pushed: Any = torch.func.jvp


def _reverse_over_reverse(
    model: nn.Module, names: list[str], leaves: Leaves, v: Leaves, x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        value = _loss_of(model, names, own, x, y)
        grads = torch.autograd.grad(value, own, create_graph=True)
        return value.detach(), *torch.autograd.grad(grads, own, v)


def _forward_over_reverse(
    model: nn.Module, names: list[str], leaves: Leaves, v: Leaves, x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    every = tuple(range(len(leaves)))
    gradient = torch.func.grad_and_value(lambda *own: _loss_of(model, names, own, x, y), every)
    (_, value), (product, _) = _pushed(gradient, tuple(leaves), tuple(v))
    return value, *product


def _reverse_over_forward(
    model: nn.Module, names: list[str], leaves: Leaves, v: Leaves, x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    def along(*own: Tensor) -> tuple[Tensor, Tensor]:
        of = lambda *own: _loss_of(model, names, own, x, y)  # noqa: E731
        value, slope = _pushed(of, own, tuple(v))
        return slope, value

    product, value = torch.func.grad(along, tuple(range(len(leaves))), has_aux=True)(*leaves)
    return value, *product


ROUTES = {
    "reverse-over-reverse": _reverse_over_reverse,
    "forward-over-reverse": _forward_over_reverse,
    "reverse-over-forward": _reverse_over_forward,
}
