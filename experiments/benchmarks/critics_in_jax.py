"""The steps of a critic in JAX: one jitted function, a gradient inside of a gradient."""

from collections.abc import Callable
from typing import Any

from torch import nn

from experiments.benchmarks.critic_steps import WEIGHT
from experiments.benchmarks.critics import Critics
from experiments.benchmarks.with_jax import Array, Leaves, Network, cnn, mlp, to_jax
from experiments.benchmarks.workload import peer


def network(point: Critics) -> Network:
    jax = peer("jax")
    acts = {nn.Tanh: jax.numpy.tanh, nn.SiLU: jax.nn.silu, nn.Softplus: jax.nn.softplus}
    layers = list(point.model.children())
    act = next(acts[type(layer)] for layer in layers if type(layer) in acts)
    return cnn(act, mean=False) if isinstance(layers[0], nn.Conv2d) else mlp(act)


def step(penalty: str) -> Callable[[Critics], Callable[[], Any]]:
    """penalty: "r1" or "wgan_gp"."""

    def made(point: Critics) -> Callable[[], Any]:
        jax, jnp, scores = peer("jax"), peer("jax.numpy"), network(point)
        start = tuple(to_jax(p) for p in point.model.parameters())
        real, fake, e = (to_jax(t) for t in (point.real, point.fake, point.drawn()))

        def squares(leaves: Leaves, x: Array) -> tuple[Array, Array]:
            def total(x: Array) -> tuple[Array, Array]:
                found = scores(leaves, x)
                return found.sum(), found

            g, found = jax.grad(total, has_aux=True)(x)
            return found, (g.reshape(len(x), -1) ** 2).sum(1)

        def r1(leaves: Leaves, real: Array, fake: Array, e: Array) -> Array:
            found, at_real = squares(leaves, real)
            loss = jax.nn.softplus(scores(leaves, fake) - found).mean()
            return loss + WEIGHT * at_real.mean() / 2

        def wgan_gp(leaves: Leaves, real: Array, fake: Array, e: Array) -> Array:
            e = e.reshape(-1, *[1] * (real.ndim - 1))
            _, at_points = squares(leaves, e * real + (1 - e) * fake)
            loss = scores(leaves, fake).mean() - scores(leaves, real).mean()
            return loss + WEIGHT * ((jnp.sqrt(at_points) - 1) ** 2).mean()

        compiled = jax.jit(jax.value_and_grad({"r1": r1, "wgan_gp": wgan_gp}[penalty]))

        def run() -> tuple[Array, ...]:
            value, grads = jax.block_until_ready(compiled(start, real, fake, e))
            return value, *grads

        return run

    return made
