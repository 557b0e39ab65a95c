"""Products compiled by hand, by each of the three routes to a second derivative."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from experiments.benchmarks.problems import Problem, plain_attention
from experiments.benchmarks.with_torch import detached
from experiments.benchmarks.workload import Call

Loss = Callable[..., Tensor]  # of the leaves
Leaves = Sequence[Tensor]
_pushed: Any = torch.func.jvp


def compiled_by_hand(problem: Problem, route: str) -> Call:
    """The product traced by make_fx, without dead code, and compiled by inductor, as hoglib's are."""
    from torch._inductor import config, standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, v, count = list(detached(problem).values()), list(problem.vector()), len(problem.params)
    inputs: list[Any] = [*leaves, *v, problem.x, problem.y]

    def product(*given: Tensor) -> tuple[Tensor, ...]:
        x, y = given[-2:]

        def loss(*leaves: Tensor) -> Tensor:
            named = dict(zip(problem.params, leaves, strict=True))
            return F.cross_entropy(functional_call(problem.model, named, (x,)), y)

        return ROUTES[route](loss, given[:count], given[count:-2])

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


def _reverse_over_reverse(loss: Loss, leaves: Leaves, v: Leaves) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(*own)
        grads = torch.autograd.grad(value, own, create_graph=True)
        return value.detach(), *torch.autograd.grad(grads, own, v)


def _forward_over_reverse(loss: Loss, leaves: Leaves, v: Leaves) -> tuple[Tensor, ...]:
    gradient = torch.func.grad_and_value(loss, tuple(range(len(leaves))))
    (_, value), (product, _) = _pushed(gradient, tuple(leaves), tuple(v))
    return value, *product


def _reverse_over_forward(loss: Loss, leaves: Leaves, v: Leaves) -> tuple[Tensor, ...]:
    def along(*own: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = _pushed(loss, own, tuple(v))
        return slope, value

    product, value = torch.func.grad(along, tuple(range(len(leaves))), has_aux=True)(*leaves)
    return value, *product


ROUTES = {
    "reverse-over-reverse": _reverse_over_reverse,
    "forward-over-reverse": _forward_over_reverse,
    "reverse-over-forward": _reverse_over_forward,
}
