"""The same by hoglib. Operators are made inside of what is timed: their set-up is part of the price."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments.benchmarks.problems import Problem
from experiments.benchmarks.with_torch import each_vector, quarters
from experiments.benchmarks.workload import Call, Eigenvalues


def compiled(make: Callable[..., Call], **options: Any) -> Callable[[Problem], Call]:
    """The same with products as compiled graphs."""
    return lambda problem: make(problem, compile=problem.backend, **options)


def around(make: Callable[..., Call]) -> Callable[[Problem], Call]:
    """The same call inside `torch.compile`, with hoglib's passes."""

    def compiled(problem: Problem) -> Call:
        options = hog.capture.inductor_options() if problem.backend == "inductor" else None
        return torch.compile(
            make(problem), backend=problem.backend, fullgraph=True, options=options
        )

    return compiled


def product(of: Callable[..., Any], problem: Problem, vectors: Tensor, **options: Any) -> Call:
    """A call of `hoglib.hvp`, `ggn_vp` or `fisher_vp`."""
    loss, params = hog.functional_loss(problem.model, F.cross_entropy), problem.params
    v = problem.named(vectors)
    return lambda: of(loss, params, v, problem.batch, **options)[1]


def hvp(problem: Problem, **options: Any) -> Call:
    return product(hog.hvp, problem, problem.vectors[:, 0], **options)


def hvp_of_block(problem: Problem, **options: Any) -> Call:
    """All vectors in one call: leaves with a trailing dimension of columns."""
    return product(hog.hvp, problem, problem.vectors, **options)


def operator(problem: Problem, kind: str = "HessianOperator", **options: Any) -> Callable[[], Any]:
    loss, params = hog.functional_loss(problem.model, F.cross_entropy), problem.params
    return partial(
        getattr(hog, kind), loss, params, problem.batch, check_deterministic=False, **options
    )


def products(problem: Problem, **options: Any) -> Call:
    make = operator(problem, **options)
    return each_vector(problem, lambda: make().__matmul__)


def block(problem: Problem, **options: Any) -> Call:
    make = operator(problem, **options)
    return lambda: make() @ problem.vectors


def one_product(problem: Problem, kind: str = "HessianOperator", **options: Any) -> Call:
    make, v = operator(problem, kind, **options), problem.vectors[:, 0].contiguous()
    return lambda: make() @ v


def micro_batches(problem: Problem) -> Call:
    return in_use(operator(problem, micro_batch=quarters(problem))(), problem)


def whole_batch(problem: Problem) -> Call:
    return in_use(operator(problem, memory_limit=0)(), problem)


def in_use(made: Any, problem: Problem) -> Call:
    """One product of an operator that has looked at its data before."""
    v = problem.vectors[:, 0].contiguous()
    made @ v
    return lambda: made @ v


def once_more(problem: Problem, **options: Any) -> Call:
    """A product of an operator on one batch that keeps what it needs between products."""
    return in_use(operator(problem, **options)(), problem)


def gauss_newton(problem: Problem, **options: Any) -> Call:
    return product(hog.ggn_vp, problem, problem.vectors[:, 0], **options)


def fisher(problem: Problem, kind: Literal["exact", "mc", "empirical"]) -> Call:
    # Only what is drawn at random takes a generator.
    random = torch.Generator(problem.device).manual_seed(0) if kind == "mc" else None
    v = problem.vectors[:, 0]
    return product(hog.fisher_vp, problem, v, kind=kind, generator=random)


def top_five(problem: Problem, **options: Any) -> Call:
    make = operator(problem, **options)

    def run() -> Eigenvalues:
        found = make().eigsh(k=5, which="LA", tol=1e-4)  # as `with_torch.top_five`
        return Eigenvalues(found.values.flip(0), found.products)

    return run
