"""Products by hand in float64, reverse-over-reverse, against which every method is held."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks import critic_steps, kronecker
from experiments.benchmarks.meta.tasks import Learner
from experiments.benchmarks.meta.with_torch import checkpointed_by_hand
from experiments.benchmarks.problems import Problem, plain_attention
from experiments.benchmarks.workload import Truth


def flat(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def leaves_of(found: tuple[Any, ...]) -> Tensor:
    """A loss, and then its gradient, as one column."""
    return flat(found)[:, None]


def hessian(problem: Problem) -> Tensor:
    """H v for each vector."""
    exact = problem.double()
    with plain_attention():
        grads = torch.autograd.grad(exact.loss(), exact.leaves, create_graph=True)
        products = [
            flat(torch.autograd.grad(grads, exact.leaves, exact.vector(i), retain_graph=True))
            for i in range(exact.vectors.shape[1])
        ]
    return torch.stack(products, 1)


def _through_logits(problem: Problem, M: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """J' M(p, J v) / N, with p the softmax of the logits; J v by differentiating u -> u'J twice."""
    exact = problem.double()
    with plain_attention():
        logits = exact.model(exact.x)
        u = torch.zeros_like(logits, requires_grad=True)
        back = torch.autograd.grad(logits, exact.leaves, u, create_graph=True)
        (jv,) = torch.autograd.grad(back, u, exact.vector())
        h = M(logits.detach().softmax(1), jv) / len(jv)
        return flat(torch.autograd.grad(logits, exact.leaves, h))[:, None]


def gauss_newton(problem: Problem) -> Tensor:
    """G v = J' (diag(p) - p p') J v / N, with p the softmax of the logits."""
    return _through_logits(problem, lambda p, jv: p * jv - p * (p * jv).sum(1, keepdim=True))


def empirical_fisher(problem: Problem) -> Tensor:
    """E v = sum_n g_n (g_n' v) / N, with g_n = J_n' (p_n - onehot(y_n)) the gradient of one sample."""

    def M(p: Tensor, jv: Tensor) -> Tensor:
        r = p - F.one_hot(problem.y, p.shape[1])
        return r * (r * jv).sum(1, keepdim=True)

    return _through_logits(problem, M)


def quadratic_form(problem: Problem, product: Tensor) -> Tensor:
    """v' A v, what is left to compare when A is drawn at random; v [P], or of the first parameters."""
    return (problem.vectors[: len(product), 0].double() @ product).reshape(1, 1)


def sampling_error(problem: Problem) -> float:
    """Five standard errors of v' F v, the mean of N squares of which each is about a chi-square."""
    return 5 * math.sqrt(2 / len(problem.x))


def eigenvalues(problem: Problem, which: str = "LA") -> Tensor:
    """The five largest eigenvalues of H, or with "LM" in magnitude, by ARPACK on float64 products."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    exact = problem.double()
    with plain_attention():
        grads = torch.autograd.grad(exact.loss(), exact.leaves, create_graph=True)
    size = len(exact.vectors)

    def product(v: Any) -> Any:
        parts = exact.split(torch.as_tensor(v, device=exact.device).reshape(-1))
        found = torch.autograd.grad(grads, exact.leaves, parts, retain_graph=True)
        return flat(found).cpu().numpy()

    start = exact.vectors[:, 0].cpu().numpy()
    operator = LinearOperator((size, size), matvec=product, dtype=start.dtype)
    values = eigsh(operator, k=5, which=which, tol=1e-6, v0=start, return_eigenvectors=False)
    return torch.as_tensor(values).sort(descending=True).values[:, None]


def meta_gradient(learner: Learner) -> Tensor:
    return leaves_of(checkpointed_by_hand(learner.double())())


# the wrong meta-gradients that torch gives are off by 2e-4 and more
META_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
# a critic's gradient in float32 is 1e-4 off float64's where terms nearly cancel, by hand too
CRITIC_TOLERANCE = 5e-4


def of_critic(loss: critic_steps.Loss) -> Truth:
    step = critic_steps.truth(loss)
    return Truth(lambda point: leaves_of(step(point)), lambda _: CRITIC_TOLERANCE, apart=1)


def sampled(value: Callable[[Problem], Tensor]) -> Truth:
    """The truth for a matrix drawn at random: the quadratic form of its mean, which gives `value`."""

    def form(problem: Problem) -> Tensor:
        return quadratic_form(problem, value(problem))

    return Truth(form, sampling_error, quadratic_form)


TRUTHS = {
    "hessian": Truth(hessian),
    "gauss-newton": Truth(gauss_newton),
    "empirical fisher": Truth(empirical_fisher),
    "sampled fisher": sampled(gauss_newton),
    "kronecker": Truth(kronecker.truth),
    "empirical kronecker": Truth(partial(kronecker.truth, kind="empirical")),
    "sampled kronecker": sampled(kronecker.truth),
    "eigenvalues": Truth(eigenvalues, lambda _: 1e-3),
    "eigenvalues by magnitude": Truth(partial(eigenvalues, which="LM"), lambda _: 1e-3),
    "meta-gradient": Truth(
        meta_gradient, lambda learner: META_TOLERANCE[learner.support[0].dtype], apart=1
    ),
    "r1": of_critic(critic_steps.with_r1_by_hand),
    "wgan_gp": of_critic(critic_steps.with_wgan_gp_by_hand),
}
