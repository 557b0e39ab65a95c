"""Derivatives of a fixed point beside jaxopt and TorchOpt, where they are installed.

    python -m experiments.benchmarks.fixed_points

mean(z^2) at z = tanh(W z + U x + b), differentiated by W, in float64 on one thread: errors relative to
unrolled steps, and medians of milliseconds. Peers solve the adjoint to their default tolerance, and to
1e-13.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import hoglib as hog
from experiments.benchmarks.timing import once, program, relative_error
from experiments.benchmarks.workload import Call, peer

TIGHT, MOST = 1e-13, 400
SOLVERS: tuple[Literal["anderson", "iteration"], ...] = ("anderson", "iteration")


class Problem:
    """The layer, its weight W, and a direction V."""

    def __init__(self, width: int, rows: int) -> None:
        torch.manual_seed(0)
        rand = partial(torch.randn, dtype=torch.float64)
        self.W = (0.8 / width**0.5 * rand(width, width)).requires_grad_()
        self.V, self.z0 = rand(width, width), torch.zeros(rows, width, dtype=torch.float64)
        self.shift = rand(rows, 8) @ rand(8, width) + 0.1 * rand(width)

    def image(self, z: Tensor, W: Tensor) -> Tensor:
        return torch.tanh(z @ W.T + self.shift)

    def residual(self, z: Tensor, W: Tensor) -> Tensor:
        return self.image(z, W) - z

    def unrolled(self, W: Tensor) -> Tensor:
        z = self.z0
        for _ in range(300):
            z = self.image(z, W)
        return z

    def derivatives(self, solve: Callable[[Tensor], Tensor]) -> tuple[Call, Call]:
        """The gradient, and its derivative along V, by torch."""

        def gradient(again: bool = False) -> Tensor:
            loss = solve(self.W).square().mean()
            return torch.autograd.grad(loss, self.W, create_graph=again)[0]

        return gradient, lambda: torch.autograd.grad(gradient(True), self.W, self.V)[0]


def by_torchopt(problem: Problem) -> Iterator[tuple[str, Call, Call]]:
    torchopt: Any = peer("torchopt")
    linear = torchopt.linear_solve.solve_normal_cg
    for name, solve in (("", linear()), (", to 1e-13", linear(rtol=TIGHT, maxiter=500))):
        custom_root = torchopt.diff.implicit.custom_root(problem.residual, argnums=1, solve=solve)
        run = partial(custom_root(lambda _, W: problem.unrolled(W.detach())), problem.z0)
        yield f"TorchOpt{name}", *problem.derivatives(run)


def by_jaxopt(problem: Problem) -> Iterator[tuple[str, Call, Call]]:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    jax, jnp, jaxopt = map(peer, ("jax", "jax.numpy", "jaxopt"))
    jax.config.update("jax_enable_x64", True)
    given = problem.W.detach(), problem.V, problem.z0, problem.shift
    W, V, z0, shift = (jnp.asarray(x.numpy()) for x in given)
    linear = partial(jaxopt.linear_solve.solve_normal_cg, tol=TIGHT, maxiter=500)
    for name, options in (("", {}), (", to 1e-13", {"implicit_diff_solve": linear})):
        solver = jaxopt.FixedPointIteration(
            lambda z, W: jnp.tanh(z @ W.T + shift), maxiter=MOST, tol=TIGHT, **options
        )

        def loss(W: Any, solver: Any = solver) -> Any:
            return jnp.mean(solver.run(z0, W).params ** 2)

        def product(W: Any, loss: Any = loss) -> Any:
            return jax.grad(lambda W: jnp.vdot(jax.grad(loss)(W), V))(W)

        gradient, hvp = (partial(_as_torch, jax.jit(f), W) for f in (jax.grad(loss), product))
        yield f"jaxopt, jitted{name}", gradient, hvp


def _as_torch(call: Callable[..., Any], W: Any) -> Tensor:
    return torch.tensor(np.asarray(call(W)))


def rows(small: bool) -> list[str]:
    problem = Problem(4, 2) if small else Problem(64, 32)
    truths = [call() for call in problem.derivatives(problem.unrolled)]
    ways: list[tuple[str, Call, Call]] = []
    for method in SOLVERS:
        solve = partial(
            hog.meta.fixed_point, problem.image, problem.z0, solver=method, tol=TIGHT, max_iter=MOST
        )
        ways.append((f"hoglib, {method}", *problem.derivatives(solve)))
    for package, others in (("torchopt", by_torchopt), ("jaxopt", by_jaxopt)):
        ways += others(problem) if find_spec(package) else ()
    found = []
    for name, *calls in ways:
        texts = [f"{name:24}"]
        for what, call, truth in zip(("gradient", "product"), calls, truths, strict=True):
            error = relative_error(call(), truth)
            milliseconds = 1e3 * median(once(call) for _ in range(1 if small else 20))
            texts.append(f"{what} error {error:.0e}, {milliseconds:6.1f} ms")
        found.append("  ".join(texts))
    return found


TABLES = {"": rows}


if __name__ == "__main__":
    program(__doc__, TABLES)
