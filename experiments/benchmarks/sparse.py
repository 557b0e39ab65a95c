"""`python -m experiments.benchmarks.sparse`: sparse Hessians and Jacobians beside asdex, Laplacians of
independent particles beside folx, both jitted.

The first call finds the pattern, and compiles in JAX; the next ones reuse it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import hoglib as hog
from experiments.benchmarks.timing import interleaved, program, relative_error
from experiments.benchmarks.with_jax import to_jax
from experiments.benchmarks.workload import Missing, peer

Function = Callable[[Any, Any], Any]  # of an array, by the library that it is of


def chain(x: Any, of: Any) -> Any:
    """The energy of particles on a line, each bound to the next one."""
    return ((x[1:] - x[:-1]) ** 4).sum() + of.cos(x).sum()


def poisson(x: Any, of: Any) -> Any:
    """The residual of u_xx + u_yy = u^3 on a square grid, with zeros around it."""
    n = round(x.shape[0] ** 0.5)
    u = x.reshape(n, n)
    inside = of.zeros_like(u[:1])
    rows = of.concatenate([inside, u, inside], 0)
    columns = of.concatenate([inside.T, u, inside.T], 1)
    return (rows[2:] + rows[:-2] + columns[:, 2:] + columns[:, :-2] - 4 * u - u**3).reshape(-1)


def particles(x: Any, of: Any) -> Any:
    """The energy of sixty particles that do not act on each other: a network of each place."""
    w = of.cos(of.arange(3 * 16)).reshape(3, 16)
    return of.tanh(of.tanh(x.reshape(60, 3) @ w) @ w.T).sum()


def asdex(name: str, function: Function, x: torch.Tensor) -> Callable[[], Any]:
    jax, of = peer("jax"), peer("jax.numpy")
    at = to_jax(x)
    run = jax.jit(getattr(peer("asdex"), name)(lambda x: function(x, of), at))
    return lambda: jax.block_until_ready(run(at))


def folx(function: Function, x: torch.Tensor) -> Callable[[], Any]:
    jax, of = peer("jax"), peer("jax.numpy")
    at = to_jax(x)
    run = jax.jit(peer("folx").forward_laplacian(lambda x: function(x, of), sparsity_threshold=6))
    return lambda: jax.block_until_ready(run(at).laplacian)


Makers = dict[str, Callable[[], Callable[[], Any]]]  # name of a way: makes its call


def problems(small: bool) -> Iterator[tuple[str, Makers]]:
    n, side = (100, 10) if small else (10_000, 100)
    x, u, y = torch.randn(n), torch.randn(side**2), torch.randn(180)
    energy = partial(particles, of=torch)
    yield f"Hessian of a chain, {n:,} unknowns", {
        "hoglib": lambda: partial(hog.sparse_hessian, partial(chain, of=torch), x),
        "asdex": partial(asdex, "hessian", chain, x),
    }  # fmt: skip
    yield f"Jacobian of a residual, {side**2:,} unknowns", {
        "hoglib": lambda: partial(hog.sparse_jacobian, partial(poisson, of=torch), u),
        "asdex": partial(asdex, "jacobian", poisson, u),
    }  # fmt: skip
    yield "Laplacian of 60 particles", {
        "hoglib": lambda: lambda: hog.laplacian(energy, y, sparsity="auto")[1],
        "hoglib, dense": lambda: lambda: hog.laplacian(energy, y)[1],
        "folx": partial(folx, particles, y),
    }  # fmt: skip


def dense(value: Any) -> torch.Tensor:
    value = value.todense() if hasattr(value, "todense") else value
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value.tolist())
    return value.to_dense()


def rows(small: bool) -> Iterator[str]:
    """Milliseconds of the first call and of the next ones."""
    for what, makers in problems(small):
        calls, first, values = {}, {}, {}
        for name, make in makers.items():
            start = time.perf_counter()
            try:
                calls[name] = make()
            except Missing as reason:
                yield f"| {what} | {name} | {reason} | |"
                continue
            values[name] = calls[name]()
            first[name] = time.perf_counter() - start
        ours = values.pop("hoglib")
        for name, value in values.items() if small else ():
            assert relative_error(dense(value), dense(ours)) < 1e-5, f"{name} differs: {what}"
        seconds = interleaved(calls, 1 if small else 20)
        for name in calls:
            yield f"| {what} | {name} | {1e3 * first[name]:.0f} | {1e3 * seconds[name]:.2f} |"


TABLES = {"| | | first call, ms | next calls, ms |": rows}

if __name__ == "__main__":
    program(__doc__, TABLES)
