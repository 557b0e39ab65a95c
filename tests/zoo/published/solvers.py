"""Layers that solve something: differential equations, fixed points, reversible blocks."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, saving_inputs
from tests.zoo.exhibit import normal
from tests.zoo.published.specimen import Specimen

STEPS, H = 4, 0.25


def _euler(x, w):
    """The states x_0, ..., x_n of x' = tanh(w x)."""
    states = [x]
    for _ in range(STEPS):
        states.append(states[-1] + H * torch.tanh(states[-1] @ w.mT))
    return states


def _euler_adjoint(states, w, g):
    """Backwards through the steps: the gradients of x_0 and w."""
    gw = torch.zeros_like(w)
    for x in reversed(states[:-1]):
        u = H * g * (1 - torch.tanh(x @ w.mT) ** 2)
        g, gw = g + u @ w, gw + u.mT @ x
    return g, gw


class Euler(Function):
    """x(1) of x' = tanh(w x); the adjoint computes the trajectory again."""

    forward = saving_inputs(lambda x, w: _euler(x, w)[-1])

    backward = by_saved(lambda g, x, w: _euler_adjoint(_euler(x, w), w, g))


class EulerSavesTrajectory(Function):
    """The same, but the trajectory is saved."""

    @staticmethod
    def forward(ctx, x, w):
        states = _euler(x, w)
        ctx.save_for_backward(w, torch.stack(states))
        return states[-1]

    backward = by_saved(lambda g, w, states: _euler_adjoint(list(states), w, g))


def _runge_kutta(x, w):
    """x(1) of x' = tanh(w x), by the classical method of fourth order."""

    def f(x):
        return torch.tanh(x @ w.mT)

    for _ in range(STEPS):
        a = f(x)
        b = f(x + H / 2 * a)
        c = f(x + H / 2 * b)
        x = x + H / 6 * (a + 2 * b + 2 * c + f(x + H * c))
    return x


class RungeKutta(Function):
    """x(1) of x' = tanh(w x); the backward runs again and asks autograd, with a graph if wanted."""

    forward = saving_inputs(lambda x, w: _runge_kutta(x, w))

    @staticmethod
    def backward(ctx, g):
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            x, w = (
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
                for t in ctx.saved_tensors
            )
            return torch.autograd.grad(_runge_kutta(x, w), (x, w), g, create_graph=twice)


def _fixed_point(x, w):
    z = torch.zeros_like(x)
    for _ in range(80):
        z = torch.tanh(z @ w.mT + x)
    return z


class Equilibrium(Function):
    """z = tanh(w z + x); x receives u = D (g + w^T u), D = 1 - z^2, w receives u z^T."""

    @staticmethod
    def forward(ctx, x, w):
        z = _fixed_point(x, w)
        ctx.save_for_backward(z, w)
        return z

    @staticmethod
    def _adjoint(z, w, g):
        """u of u = D (g + w^T u), for each row, by iteration, which is differentiable."""
        u = torch.zeros_like(g)
        for _ in range(80):
            u = (1 - z * z) * (g + u @ w)
        return u

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        u = Equilibrium._adjoint(z, w, g)
        return u, u.mT @ z


class EquilibriumDetached(Equilibrium):
    """The same, but the adjoint is solved at a detached z."""

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        z = z.detach()
        u = Equilibrium._adjoint(z, w, g)
        return u, u.mT @ z


class Reversible(Function):
    """(y1, y2) with y1 = x1 + tanh(x2 v), y2 = x2 + tanh(y1 w), inverted from the outputs."""

    @staticmethod
    def forward(ctx, x1, x2, v, w):
        y1 = x1 + torch.tanh(x2 @ v)
        y2 = x2 + torch.tanh(y1 @ w)
        ctx.save_for_backward(y1, y2, v, w)
        return y1, y2

    @staticmethod
    def _gradients(y1, y2, v, w, g1, g2):
        t = torch.tanh(y1 @ w)
        x2 = y2 - t
        u = g2 * (1 - t * t)
        g1 = g1 + u @ w.mT
        s = g1 * (1 - torch.tanh(x2 @ v) ** 2)
        return g1, g2 + s @ v.mT, x2.mT @ s, y1.mT @ u

    backward = staticmethod(lambda ctx, g1, g2: Reversible._gradients(*ctx.saved_tensors, g1, g2))


class ReversibleData(Reversible):
    """The same, but the outputs are read by .data, as their memory is about to be freed."""

    @staticmethod
    def backward(ctx, g1, g2):
        y1, y2, v, w = ctx.saved_tensors
        return Reversible._gradients(y1.data, y2.data, v, w, g1, g2)


def _state_and_weight():
    return torch.randn(2, 3), 0.3 * torch.randn(3, 3)


SPECIMENS = [
    Specimen("Euler's method, adjoint", Euler, normal((2, 3), (3, 3))),
    Specimen("Euler's method, trajectory saved", EulerSavesTrajectory, normal((2, 3), (3, 3)), "fail", ("saved_tensors[1]",)),
    Specimen("Runge-Kutta, run again", RungeKutta, normal((2, 3), (3, 3))),
    Specimen("fixed point, implicit gradient", Equilibrium, _state_and_weight),
    Specimen("fixed point, detached", EquilibriumDetached, _state_and_weight, "fail", (".detach()",)),
    Specimen("reversible block", Reversible, normal((2, 3), (2, 3), (3, 3), (3, 3))),
    Specimen("reversible block, .data", ReversibleData, normal((2, 3), (2, 3), (3, 3), (3, 3)), "fail", (".data",)),
]  # fmt: skip
