"""The same by other PyTorch libraries, each through its public way, without its checks of the data."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks import with_torch
from experiments.benchmarks.problems import Problem
from experiments.benchmarks.with_torch import each_vector, quarters, with_plain_attention
from experiments.benchmarks.workload import Call, Eigenvalues, peer


def curvlinops(problem: Problem, kind: str = "HessianLinearOperator") -> Callable[[], Any]:
    operator = getattr(peer("curvlinops"), kind)
    leaves, criterion = problem.leaves, nn.CrossEntropyLoss()
    options = {"check_deterministic": False, "num_data": len(problem.x)}
    return lambda: operator(problem.model, criterion, leaves, [problem.batch], **options)


def curvlinops_product(kind: str = "HessianLinearOperator") -> Callable[[Problem], Call]:
    """One product, or with several vectors a block of them."""

    @with_plain_attention
    def made(problem: Problem) -> Call:
        make = curvlinops(problem, kind)
        block = problem.vectors
        v = block[:, 0].contiguous() if block.shape[1] == 1 else block
        return lambda: make() @ v

    return made


@with_plain_attention
def curvlinops_products(problem: Problem) -> Call:
    make = curvlinops(problem)
    return each_vector(problem, lambda: make().__matmul__)


@with_plain_attention
def curvlinops_top_five(problem: Problem) -> Call:
    make = curvlinops(problem)

    def run() -> Eigenvalues:
        op = make()
        return with_torch.top_five(lambda v: op @ v, len(problem.vectors), problem.device)

    return run


def eigenthings(problem: Problem, **options: Any) -> Callable[[], Any]:
    library = peer("hessian_eigenthings")
    loss = library.supervised_loss(F.cross_entropy)
    return lambda: library.HessianOperator(problem.model, [problem.batch], loss, **options)


@with_plain_attention
def eigenthings_product(problem: Problem, **options: Any) -> Call:
    make, v = eigenthings(problem, **options), problem.vectors[:, 0].contiguous()
    return lambda: make().matvec(v)


def eigenthings_micro_batches(problem: Problem) -> Call:
    return eigenthings_product(problem, microbatch_size=quarters(problem))


@with_plain_attention
def eigenthings_products(problem: Problem) -> Call:
    make = eigenthings(problem)
    return each_vector(problem, lambda: make().matvec)


@with_plain_attention
def eigenthings_gauss_newton(problem: Problem) -> Call:
    library, v = peer("hessian_eigenthings"), problem.vectors[:, 0].contiguous()
    loss = library.supervised_loss_of_output(F.cross_entropy)
    given = problem.model, [problem.batch], library.supervised_forward, loss
    return lambda: library.GGNOperator(*given).matvec(v)


@with_plain_attention
def eigenthings_empirical_fisher(problem: Problem) -> Call:
    library, v = peer("hessian_eigenthings"), problem.vectors[:, 0].contiguous()
    loss = library.supervised_per_sample_loss(F.cross_entropy)
    return lambda: library.EmpiricalFisherOperator(problem.model, [problem.batch], loss).matvec(v)


# it has no restarts and ends after these; its default of 10 is far from converged
LANCZOS_STEPS = 160


@with_plain_attention
def eigenthings_top_five(problem: Problem) -> Call:
    library, make = peer("hessian_eigenthings"), eigenthings(problem)
    steps = min(LANCZOS_STEPS, len(problem.vectors) - 1)

    def run() -> Eigenvalues:
        found = library.lanczos(
            make(), k=5, max_iter=steps, tol=1e-4, which="LA", seed=0, reorthogonalize=True
        )
        return Eigenvalues(found.eigenvalues.sort(descending=True).values, found.iterations)

    return run


@with_plain_attention
def pyhessian_product(problem: Problem) -> Call:
    """It differentiates on construction, into `.grad` and with a graph, which is cleared here."""
    library, v = peer("pyhessian"), problem.vector()
    model = deepcopy(problem.model)

    def run() -> tuple[Tensor, ...]:
        made = library.hessian(model, F.cross_entropy, data=problem.batch, cuda=False)
        product = library.hessian_vector_product(made.gradsH, made.params, v)
        model.zero_grad()
        return product

    return run


@with_plain_attention
def pyhessian_top_five(problem: Problem) -> Call:
    """Power iteration with deflation, until an eigenvalue moves by less than a relative 1e-5."""
    library, model = peer("pyhessian"), deepcopy(problem.model)
    inner = peer("pyhessian.hessian")

    def run() -> Eigenvalues:
        product = inner.hessian_vector_product
        with mock.patch.object(inner, "hessian_vector_product", wraps=product) as counted:
            made = library.hessian(model, F.cross_entropy, data=problem.batch, cuda=False)
            values, _ = made.eigenvalues(top_n=5, tol=1e-5, maxIter=1000)
            model.zero_grad()
        return Eigenvalues(Tensor(values).sort(descending=True).values, counted.call_count)

    return run
