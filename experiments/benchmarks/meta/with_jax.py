"""The same in JAX: one jitted function, vmap(grad) over the tasks."""

from typing import Any

from experiments.benchmarks.meta.tasks import Learner
from experiments.benchmarks.meta.with_torch import Call, Found
from experiments.benchmarks.with_jax import Array, Leaves, Network, encoder, mlp, to_jax
from experiments.benchmarks.workload import Missing, peer


def conv4(leaves: Leaves, x: Array) -> Array:
    jax, lax = peer("jax"), peer("jax.lax")
    *blocks, weight, bias = leaves
    for i in range(0, len(blocks), 4):
        w, b, scale, shift = (
            leaf if leaf.ndim > 1 else leaf[:, None, None] for leaf in blocks[i : i + 4]
        )
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME") + b
        centred = x - x.mean((0, 2, 3), keepdims=True)
        x = centred * lax.rsqrt((centred**2).mean((0, 2, 3), keepdims=True) + 1e-5)
        x = jax.nn.relu(x * scale + shift)
        x = lax.reduce_window(x, -jax.numpy.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ weight.T + bias


def network(learner: Learner) -> Network:
    jax = peer("jax")
    if learner.kind == "linear_act":
        raise Missing("as sinusoid")  # JAX fuses the layers of both
    if learner.kind == "conv4":
        return conv4
    if learner.kind == "transformer":
        return encoder(learner.model)
    return mlp({"tanh": jax.numpy.tanh, "relu": jax.nn.relu}[learner.kind])


def vmap_of_grad(learner: Learner) -> Call:
    jax, jnp = peer("jax"), peer("jax.numpy")
    outputs = network(learner)
    start = tuple(to_jax(p) for p in learner.model.parameters())
    tasks = [tuple(to_jax(t) for t in batch) for batch in (learner.support, learner.query)]

    def loss(leaves: Leaves, batch: tuple[Array, Array]) -> Array:
        x, y = batch
        found = outputs(leaves, x)
        if learner.kind == "tanh":
            return ((found - y) ** 2).mean()
        return -jax.nn.log_softmax(found)[jnp.arange(len(y)), y].mean()

    def step(leaves: Leaves, support: Any) -> Leaves:
        grads = jax.grad(loss)(leaves, support)
        return tuple(p - learner.inner_lr * g for p, g in zip(leaves, grads, strict=True))

    def after(leaves: Leaves, support: Any, query: Any) -> Array:
        if learner.kind == "conv4":  # as fast as unrolled, and compiles in half the time
            leaves, _ = jax.lax.scan(
                lambda leaves, _: (step(leaves, support), None),
                leaves,
                length=learner.inner_steps,
            )
        else:
            for _ in range(learner.inner_steps):
                leaves = step(leaves, support)
        return loss(leaves, query)

    def every(leaves: Leaves, support: Any, query: Any) -> Found:
        both = jax.vmap(jax.value_and_grad(after), in_axes=(None, 0, 0))
        values, grads = both(leaves, support, query)
        return values.mean(), *(g.mean(0) for g in grads)

    compiled = jax.jit(every)
    return lambda: jax.block_until_ready(compiled(start, *tasks))
