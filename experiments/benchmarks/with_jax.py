"""The same networks and products in JAX, jitted; compiling is not part of what is timed."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from experiments.benchmarks import problems
from experiments.benchmarks.problems import Encoder, Problem
from experiments.benchmarks.workload import Call, peer

Array = Any
Leaves = tuple[Array, ...]  # in torch's order
Network = Callable[[Leaves, Array], Array]
Params = dict[str, Array]


def to_jax(tensor: Tensor) -> Array:
    return peer("jax.numpy").asarray(tensor.detach().numpy())


def mlp(act: Callable[[Array], Array]) -> Network:
    def run(leaves: Leaves, x: Array) -> Array:
        *hidden, weight, bias = leaves
        for w, b in zip(hidden[::2], hidden[1::2], strict=True):
            x = act(x @ w.T + b)
        return x @ weight.T + bias

    return run


def cnn(act: Callable[[Array], Array], mean: bool) -> Network:
    """Convolutions of 3x3, and a linear layer of all pixels, or of the mean over the image."""
    lax = peer("jax.lax")

    def run(leaves: Leaves, x: Array) -> Array:
        *convs, weight, bias = leaves
        for w, b in zip(convs[::2], convs[1::2], strict=True):
            x = act(lax.conv_general_dilated(x, w, (1, 1), "SAME") + b[:, None, None])
        return (x.mean((2, 3)) if mean else x.reshape(len(x), -1)) @ weight.T + bias

    return run


def encoder(model: Any) -> Network:
    """The same as `problems.Encoder`."""
    jax, jnp = peer("jax"), peer("jax.numpy")
    names, layers = [name for name, _ in model.named_parameters()], len(model.encoder.layers)
    heads = model.encoder.layers[0].self_attn.num_heads

    def norm(p: Params, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scale = (centred**2).mean(-1, keepdims=True) + 1e-5
        return centred / jnp.sqrt(scale) * p["weight"] + p["bias"]

    def linear(p: Params, x: Array) -> Array:
        return x @ p["weight"].T + p["bias"]

    def attention(p: Params, x: Array) -> Array:
        rows, length, width = x.shape
        q, k, v = (
            part.reshape(rows, length, heads, width // heads).swapaxes(1, 2)
            for part in jnp.split(x @ p["in_proj_weight"].T + p["in_proj_bias"], 3, -1)
        )
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (width // heads) ** 0.5, axis=-1)
        return linear(below(p, "out_proj"), (weights @ v).swapaxes(1, 2).reshape(x.shape))

    def below(p: Params, name: str) -> Params:
        start = name + "."
        return {key.removeprefix(start): p[key] for key in p if key.startswith(start)}

    def run(leaves: Leaves, x: Array) -> Array:
        p = dict(zip(names, leaves, strict=True))
        for i in range(layers):
            layer = below(p, f"encoder.layers.{i}")
            x = norm(below(layer, "norm1"), x + attention(below(layer, "self_attn"), x))
            hidden = jax.nn.gelu(linear(below(layer, "linear1"), x), approximate=False)
            x = norm(below(layer, "norm2"), x + linear(below(layer, "linear2"), hidden))
        return linear(below(p, "head"), x.mean(1))

    return run


def network(model: nn.Module) -> Network:
    if isinstance(model, Encoder):
        return encoder(model)
    tanh = peer("jax.numpy").tanh
    return cnn(tanh, mean=True) if isinstance(model, problems.Network) else mlp(tanh)


class Translated:
    """A problem in JAX: weights and vectors as tuples in torch's order, functions of the weights."""

    def __init__(self, problem: Problem) -> None:
        self.jax, self.jnp = peer("jax"), peer("jax.numpy")
        self.params = tuple(to_jax(p) for p in problem.params.values())
        self.x, self.y = to_jax(problem.x), to_jax(problem.y)
        columns = map(problem.vector, range(problem.vectors.shape[1]))
        self.vectors = [tuple(map(to_jax, parts)) for parts in columns]
        self.network = network(problem.model)

    def outputs(self, params: Leaves) -> Array:
        return self.network(params, self.x)

    def criterion(self, logits: Array) -> Array:
        chosen = self.jax.nn.log_softmax(logits)[self.jnp.arange(len(self.y)), self.y]
        return -chosen.mean()

    def loss(self, params: Leaves) -> Array:
        return self.criterion(self.outputs(params))


def jvp_of_grad(problem: Problem) -> Call:
    t = Translated(problem)
    product = t.jax.jit(lambda p, v: t.jax.jvp(t.jax.grad(t.loss), (p,), (v,))[1])
    return lambda: t.jax.block_until_ready(product(t.params, t.vectors[0]))


def linearized(problem: Problem) -> Call:
    t = Translated(problem)
    start = t.jax.jit(lambda p: t.jax.linearize(t.jax.grad(t.loss), p)[1])
    apply = t.jax.jit(lambda product, v: product(v))

    def run() -> Iterator[Leaves]:
        product = start(t.params)
        for v in t.vectors:
            yield t.jax.block_until_ready(apply(product, v))

    return run


def vmapped(problem: Problem) -> Call:
    t = Translated(problem)
    stacked = tuple(to_jax(part) for part in problem.split(problem.vectors))

    def one(p: Any, v: Any) -> Any:
        return t.jax.jvp(t.jax.grad(t.loss), (p,), (v,))[1]

    many = t.jax.jit(t.jax.vmap(one, in_axes=(None, -1), out_axes=-1))
    return lambda: t.jax.block_until_ready(many(t.params, stacked))


def gauss_newton(problem: Problem) -> Call:
    t = Translated(problem)

    def one(p: Any, v: Any) -> Any:
        _, jv = t.jax.jvp(t.outputs, (p,), (v,))
        logits, back = t.jax.vjp(t.outputs, p)
        return back(t.jax.jvp(t.jax.grad(t.criterion), (logits,), (jv,))[1])[0]

    product = t.jax.jit(one)
    return lambda: t.jax.block_until_ready(product(t.params, t.vectors[0]))
