"""Curvature by torch alone: what one writes without a library. Each makes a call from a problem."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from experiments.benchmarks.problems import Problem, plain_attention
from experiments.benchmarks.workload import Call, Eigenvalues

Params = dict[str, Tensor]


def with_plain_attention(make: Callable[..., Call]) -> Callable[..., Call]:
    def made(problem: Problem, **options: Any) -> Call:
        call = make(problem, **options)

        def run() -> Any:
            with plain_attention():
                result = call()
            return _within(result) if isinstance(result, Iterator) else result

        return run

    return made


def _within(products: Iterator[Any]) -> Iterator[Any]:
    with plain_attention():
        yield from products


def each_vector(problem: Problem, make: Callable[[], Callable[[Tensor], Any]]) -> Call:
    """Products with all vectors of the problem by an operator, which is made first."""
    vectors = [v.contiguous() for v in problem.vectors.unbind(1)]

    def run() -> Iterator[Any]:
        apply = make()
        for v in vectors:
            yield apply(v)

    return run


def pure_loss(problem: Problem) -> Callable[[Params], Tensor]:
    return lambda params: F.cross_entropy(
        functional_call(problem.model, params, (problem.x,)), problem.y
    )


def detached(problem: Problem) -> Params:
    return {name: p.detach() for name, p in problem.params.items()}


@with_plain_attention
def gradient(problem: Problem) -> Call:
    return lambda: torch.autograd.grad(problem.loss(), problem.leaves)


@with_plain_attention
def double_backward(problem: Problem) -> Call:
    leaves, v = problem.leaves, problem.vector()

    def run() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(problem.loss(), leaves, create_graph=True)
        return torch.autograd.grad(grads, leaves, v)

    return run


@with_plain_attention
def jvp_of_grad(problem: Problem) -> Call:
    grad, params = torch.func.grad(pure_loss(problem)), detached(problem)
    v = problem.named(problem.vectors[:, 0])
    return lambda: torch.func.jvp(grad, (params,), (v,))[1]


@with_plain_attention
def autograd_functional(problem: Problem) -> Call:
    loss, params = pure_loss(problem), detached(problem)

    def of_leaves(*leaves: Tensor) -> Tensor:
        return loss(dict(zip(params, leaves, strict=True)))

    inputs, v = tuple(params.values()), problem.vector()
    return lambda: torch.autograd.functional.hvp(of_leaves, inputs, v)[1]


@with_plain_attention
def rebuilt(problem: Problem) -> Call:
    """The graph of the gradient again for each vector."""
    leaves = problem.leaves
    vectors = [problem.vector(i) for i in range(problem.vectors.shape[1])]

    def run() -> Iterator[tuple[Tensor, ...]]:
        for v in vectors:
            grads = torch.autograd.grad(problem.loss(), leaves, create_graph=True)
            yield torch.autograd.grad(grads, leaves, v)

    return run


@with_plain_attention
def graph_kept(problem: Problem) -> Call:
    """The graph of the gradient once, and one backward pass through it for each vector."""
    leaves = problem.leaves
    vectors = [problem.vector(i) for i in range(problem.vectors.shape[1])]

    def run() -> Iterator[tuple[Tensor, ...]]:
        grads = torch.autograd.grad(problem.loss(), leaves, create_graph=True)
        for v in vectors:
            yield torch.autograd.grad(grads, leaves, v, retain_graph=True)

    return run


@with_plain_attention
def block_of_kept_graph(problem: Problem) -> Call:
    """The graph of the gradient once, run for each vector; all products as one block."""
    products = graph_kept(problem)

    def run() -> tuple[Tensor, ...]:
        return tuple(torch.stack(parts, -1) for parts in zip(*products(), strict=True))

    return run


@with_plain_attention
def linearized(problem: Problem) -> Call:
    """The derivative of the gradient traced once, and run for each vector."""
    grad, params = torch.func.grad(pure_loss(problem)), detached(problem)

    def make() -> Callable[[Tensor], Params]:
        product: Any = torch.func.linearize(grad, params)[1]
        return lambda v: product(problem.named(v))

    return each_vector(problem, make)


@with_plain_attention
def vmapped(problem: Problem) -> Call:
    grad, params = torch.func.grad(pure_loss(problem)), detached(problem)
    block = problem.named(problem.vectors)
    many = torch.func.vmap(
        lambda v: torch.func.jvp(grad, (params,), (v,))[1], in_dims=-1, out_dims=-1
    )
    return lambda: many(block)


def quarters(problem: Problem) -> int:
    """The rows of a micro-batch: a quarter of the batch."""
    return len(problem.x) // 4


@with_plain_attention
def micro_batches(problem: Problem) -> Call:
    leaves, v, rows = problem.leaves, problem.vector(), quarters(problem)

    def run() -> tuple[Tensor, ...]:
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for x, y in zip(problem.x.split(rows), problem.y.split(rows), strict=True):
            loss = F.cross_entropy(problem.model(x), y) * (len(x) / len(problem.x))
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            for part, more in zip(total, torch.autograd.grad(grads, leaves, v), strict=True):
                part.add_(more)
        return tuple(total)

    return run


@with_plain_attention
def gauss_newton(problem: Problem) -> Call:
    """Forward mode through the network, the Hessian of the loss, and back."""
    params, v = detached(problem), problem.named(problem.vectors[:, 0])

    def outputs(params: Params) -> Tensor:
        return functional_call(problem.model, params, (problem.x,))

    def run() -> Params:
        jv = torch.func.jvp(outputs, (params,), (v,))[1]
        logits, back, *_ = torch.func.vjp(outputs, params)
        by_logits = torch.func.grad(lambda f: F.cross_entropy(f, problem.y))
        (product,) = back(torch.func.jvp(by_logits, (logits,), (jv,))[1])
        return product

    return run


@with_plain_attention
def empirical_fisher(problem: Problem) -> Call:
    """Forward mode through the losses of the samples, weighted by it back."""
    params, v = detached(problem), problem.named(problem.vectors[:, 0])

    def losses(params: Params) -> Tensor:
        outputs = functional_call(problem.model, params, (problem.x,))
        return F.cross_entropy(outputs, problem.y, reduction="none")

    def run() -> Params:
        by_v = torch.func.jvp(losses, (params,), (v,))[1]
        _, back, *_ = torch.func.vjp(losses, params)
        (product,) = back(by_v / len(by_v))
        return product

    return run


@with_plain_attention
def arpack(problem: Problem) -> Call:
    """SciPy's eigsh on products through a graph that is kept."""
    leaves = problem.leaves
    size = len(problem.vectors)

    def run() -> Eigenvalues:
        grads = torch.autograd.grad(problem.loss(), leaves, create_graph=True)

        def product(v: Tensor) -> Tensor:
            parts = torch.autograd.grad(grads, leaves, problem.split(v), retain_graph=True)
            return torch.cat([part.reshape(-1) for part in parts])

        return top_five(product, size, problem.device)

    return run


def top_five(product: Callable[[Tensor], Tensor], size: int, device: torch.device) -> Eigenvalues:
    """The five largest eigenvalues by SciPy, to a relative 1e-4, counting products."""
    import numpy as np
    from scipy.sparse.linalg import LinearOperator, eigsh

    count = 0

    def matvec(v: Any) -> Any:
        nonlocal count
        count += 1
        vector = torch.from_numpy(np.ascontiguousarray(v.reshape(-1)))
        return product(vector.to(device)).cpu().numpy()

    operator = LinearOperator((size, size), matvec=matvec, dtype=np.dtype("float32"))
    start = np.random.default_rng(0).standard_normal(size).astype("float32")
    values = eigsh(operator, k=5, which="LA", tol=1e-4, v0=start, return_eigenvectors=False)
    return Eigenvalues(torch.from_numpy(values).sort(descending=True).values, count)
