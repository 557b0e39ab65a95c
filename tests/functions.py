"""Toy custom Functions of the tests: right ones, and one for each common mistake."""

import inspect
from functools import partial

import numpy as np
import torch
from torch.autograd.function import once_differentiable


def saving_inputs(function, output=False):
    """A `forward` that saves its inputs, or its output, and returns the function of the inputs."""

    def forward(ctx, *inputs):
        y = function(*inputs)
        ctx.save_for_backward(*((y,) if output else inputs))
        return y

    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = inspect.signature(function).parameters.values()
    forward.__signature__ = inspect.Signature([ctx, *names])
    return staticmethod(forward)


saving_output = partial(saving_inputs, output=True)


def by_saved(gradient):
    """A `backward`, or `jvp`: a function of the incoming derivatives and of what is saved."""

    def rule(ctx, *incoming):
        return gradient(*incoming, *ctx.saved_tensors)

    return staticmethod(rule)


def made(name, value, gradient):
    """A Function of value(*inputs), which saves its inputs, and gradient(g, *inputs)."""
    rules = {"forward": saving_inputs(value), "backward": by_saved(gradient)}
    return type(name, (torch.autograd.Function,), rules)


@staticmethod
def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@staticmethod
def save_inputs_for_both(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


class Cube(torch.autograd.Function):
    """x^3, with a derivative for reverse mode and one for forward mode."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x**3)

    setup_context = save_inputs_for_both

    backward = by_saved(lambda g, x: 3 * g * x**2)

    jvp = by_saved(lambda t, x: 3 * t * x**2)


class WrongSign(Cube):
    backward = by_saved(lambda g, x: -3 * g * x**2)


class Detached(Cube):
    """The first derivative is right, and the second lost without an error."""

    backward = by_saved(lambda g, x: 3 * g * x.detach() ** 2)


class DetachedTangent(Cube):
    jvp = by_saved(lambda t, x: 3 * t * x.detach() ** 2)


class WrongTangent(Cube):
    jvp = by_saved(lambda t, x: 2 * t * x**2)


class OnceDifferentiable(Cube):
    generate_vmap_rule = False

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class ThroughNumpy(Cube):
    generate_vmap_rule = False

    backward = by_saved(lambda g, x: 3 * g * torch.from_numpy(np.asarray(x.detach()) ** 2))


# As most published code writes it: no setup_context, so no transforms.
ClassicCube = made("ClassicCube", lambda x: x**3, lambda g, x: 3 * g * x**2)


class BackwardWithoutGrad(ClassicCube):
    """Its backward runs under no_grad, so that the second derivative is lost."""

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 3 * g * ctx.saved_tensors[0] ** 2


class KeepsIntermediate(torch.autograd.Function):
    """It keeps what forward computed on ctx, whose part of the second derivative is lost."""

    @staticmethod
    def forward(ctx, x):
        ctx.square = x * x
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.square


# Right, in the old style; its derivative is another Function.
Sine = made("Sine", lambda x: x.sin(), lambda g, x: Cosine.apply(x) * g)


Cosine = made("Cosine", lambda x: x.cos(), lambda g, x: -Sine.apply(x) * g)
