"""Solutions of equations as functions: closed forms, and differences of solutions, to the fourth order."""

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.oracles import relative
from tests.refused import refused
from tests.rows import rows

F64 = torch.float64


def rand(*shape, seed=0):
    return torch.randn(
        *shape, dtype=F64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


W, X, Y, Z, T = 0.3 * rand(4, 4), rand(4), rand(8), rand(5, 3), rand(5)
DATA = rand(8, 3)


def newton(F, z, h, steps=60):
    """z of F(z, h) = 0, by dense steps."""
    for _ in range(steps):
        J = torch.func.jacrev(F)(z, h)
        z = z - torch.linalg.solve(J, F(z, h))
    return z


def equilibrium(z, h):
    return z - torch.tanh(h["W"] @ z + h["x"])


def stationary(w, h):
    """The gradient of a ridge regression with weights of examples."""
    return DATA.T @ (h["c"] * (DATA @ w - Y)) / 8 + h["rho"].exp() * w


def transport(z, h):
    """The equations of two scaled marginals: dual variables of entropic optimal transport."""
    u, v = z[:3], z[3:]
    plan = (u[:, None] + v[None] - h["cost"]).exp()
    anchored = plan.sum(0) - torch.tensor([0.2, 0.8], dtype=F64)
    return torch.cat([plan.sum(1) - h["a"].softmax(0), anchored[:1], v[1:]])


def cube(z, h):
    return z**3 + z - h


def coupled(z, h):
    """Not symmetric, and far from the identity."""
    return torch.roll(z, 1) * (1 + z.square()) - h


# name -> (residual, inputs, a start for Newton's method)
PROBLEMS = {
    "equilibrium": (equilibrium, {"W": W, "x": X}, torch.zeros(4, dtype=F64)),
    "ridge": (stationary, {"rho": rand(3), "c": rand(8).exp()}, torch.zeros(3, dtype=F64)),
    "transport": (transport, {"cost": rand(3, 2), "a": rand(3)}, torch.zeros(5, dtype=F64)),
    "one number": (cube, torch.tensor([2.0], dtype=F64), torch.ones(1, dtype=F64)),
    "a matrix that is not symmetric": (coupled, rand(4, seed=3), torch.full((4,), 0.1, dtype=F64)),
}


def leaves(h):
    return list(h.values()) if isinstance(h, dict) else [h]


def like(h, parts):
    return dict(zip(h, parts, strict=True)) if isinstance(h, dict) else parts[0]


def loss(name, parts):
    """A function of the solution and of the inputs."""
    F, h, start = PROBLEMS[name]
    at = like(h, parts)
    solution = newton(F, start, like(h, [p.detach() for p in parts]))
    z = hog.meta.root(F, solution, at)
    return (z.sin() * torch.arange(1, len(z) + 1)).sum() + sum((p**2).sum() for p in parts)


def along(name, t, directions, order):
    """The derivative of an order, along directions, at h + t of the last one."""
    parts = [
        (p + t * d).requires_grad_()
        for p, d in zip(leaves(PROBLEMS[name][1]), directions[order], strict=True)
    ]
    y = loss(name, parts)
    for k in range(order):
        grads = torch.autograd.grad(y, parts, create_graph=True)
        y = sum((g * d).sum() for g, d in zip(grads, directions[k], strict=True))
    return y.detach()


@rows("name", PROBLEMS)
def test_derivatives_of_four_orders(name):
    """Each against differences of the one below, which for the first are those of solutions."""
    directions = [[rand(*p.shape, seed=k) for p in leaves(PROBLEMS[name][1])] for k in range(5)]
    for order in range(1, 5):
        moving = [*directions[: order - 1], directions[order - 1]]
        at = lambda t, o=order, d=moving: along(name, t, d, o - 1)  # noqa: E731
        step = 1e-3
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        found = along(name, 0.0, [*directions[:order], directions[order]], order)
        assert_close(found, slope, rtol=2e-6, atol=1e-7)


def closed(h):
    """The validation loss of a ridge regression, in closed form."""
    A = DATA.T @ (h["c"][:, None] * DATA) / 8 + h["rho"].exp().diag()
    w = torch.linalg.solve(A, DATA.T @ (h["c"] * Y) / 8)
    return (Z @ w - T).square().sum() / 2


def test_the_hessian_of_a_ridge_regression():
    h = PROBLEMS["ridge"][1]

    def by_root(h):
        w = newton(stationary, torch.zeros(3, dtype=F64), {k: x.detach() for k, x in h.items()}, 1)
        return (Z @ hog.meta.root(stationary, w, h) - T).square().sum() / 2

    ours, theirs = hog.hessian(by_root, h), torch.func.hessian(closed)(h)
    assert relative(ours, theirs) < 1e-8
    v = {key: rand(*x.shape) for key, x in h.items()}
    product = torch.func.jvp(torch.func.grad(closed), (h,), (v,))[1]
    for mode in ("auto", "finite-differences"):
        assert relative(hog.hvp(by_root, h, v, mode=mode)[1], product) < 1e-7


def test_a_hypergradient_to_second_order():
    """As the message of `hypergradient` says it."""

    def inner(p, h):
        error = (h["c"] * (DATA @ p["w"] - Y).square()).mean()
        return (error + (h["rho"].exp() * p["w"].square()).sum()) / 2

    outer = lambda p, h: (Z @ p["w"] - T).square().sum() / 2  # noqa: E731
    start, h = {"w": torch.zeros(3, dtype=F64)}, PROBLEMS["ridge"][1]
    options = {"rule": hog.meta.sgd(0.2), "steps": 2000, "method": "cg"}
    with pytest.raises(hog.errors.UnsupportedError, match=r"hoglib\.meta\.root\(slope, found"):
        hog.meta.hypergradient(outer, inner, start, h, create_graph=True, **options)
    found = hog.meta.hypergradient(outer, inner, start, h, **options)
    h = {key: x.clone().requires_grad_() for key, x in h.items()}
    params = hog.meta.root(torch.func.grad(inner), found.params, h)
    g = torch.autograd.grad(outer(params, h), h["rho"], create_graph=True)[0]
    assert_close(g.detach(), found.gradient["rho"], rtol=1e-7, atol=1e-9)
    again = torch.autograd.grad(g.sum(), (h["rho"], h["c"]))
    H = torch.func.hessian(closed)({key: x.detach() for key, x in h.items()})["rho"]
    assert relative(again, (H["rho"].sum(0), H["c"].sum(0))) < 1e-7


def test_trees_contexts_and_dtypes():
    residual = lambda z, h: (z["a"] - h.exp(), [z["b"][0] - h.sum()])  # noqa: E731
    for dtype in (F64, torch.float32):
        h = rand(3).to(dtype)
        solution = {"a": h.exp(), "b": [h.sum()]}
        z = hog.meta.root(residual, solution, h.clone().requires_grad_())
        assert z["a"].dtype == dtype
        assert z["a"].requires_grad
        assert z["b"][0].shape == ()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                z = hog.meta.root(residual, solution, h.clone())
                assert not z["a"].requires_grad
                assert_close(z["a"], h.exp())
    large = torch.randn(300, 300) / 40
    h = torch.randn(300, requires_grad=True)
    z = torch.linalg.solve(torch.eye(300) + large, h.detach())
    z = hog.meta.root(lambda z, h: z + large @ z - h, z, h)
    (g,) = torch.autograd.grad(z.sum(), h)
    assert_close(g, torch.linalg.solve(torch.eye(300) + large.T, torch.ones(300)), rtol=1e-4, atol=1e-4)  # fmt: skip


def test_right_work_is_not_refused():
    """Solutions at zero, of large and small units, of equations without a part of the inputs, and by few
    digits."""
    one = torch.ones(2, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for residual, z, h in [
            (lambda z, h: z - h, 0 * one, 0 * one),
            (lambda z, h: 1e-20 * (z - h), one, one),
            (lambda z, h: 1e20 * (z - h), one, one),
            (lambda z, h: z - h[0], one, (one, one)),
            (lambda z, h: z - torch.tanh(h), torch.tanh(one), one),
            (lambda z, h: z * h - 1, 1 / (3 * one.float()), 3 * one.float()),
            (lambda z, h: z.square() - h, (2 * one).sqrt() * (1 + 1e-7), 2 * one),
        ]:
            found = hog.meta.root(residual, z, torch.utils._pytree.tree_map(lambda x: x.clone().requires_grad_(), h))  # fmt: skip
            found.sum().backward()


def singular():
    h = torch.zeros(2, dtype=F64, requires_grad=True)
    z = torch.tensor([1.0, -1.0], dtype=F64)
    z = hog.meta.root(lambda z, h: torch.stack([z.sum(), z.sum()]) - h, z, h)
    return torch.autograd.grad(z[0], h)


def test_a_solution_of_several_dtypes_keeps_them():
    h = X.clone().requires_grad_()
    residual = lambda z, h: (z[0] - h[:2], z[1] - 2 * h)  # noqa: E731
    a, b = hog.meta.root(residual, (X[:2].float(), 2 * X), h, tol=1e-6, accuracy=1e-6)
    assert (a.dtype, b.dtype) == (torch.float32, F64)
    (g,) = torch.autograd.grad(a.sum() + b.sum(), h)
    assert_close(g, torch.tensor([3.0, 3.0, 2.0, 2.0], dtype=F64))


layer = nn.Linear(4, 4).double()
at = {"W": W.clone().requires_grad_(), "x": X}
ERRORS = {
    "no solution": (lambda: hog.meta.root(equilibrium, torch.zeros(4, dtype=F64), at), RuntimeError, "got 4 with .* more steps"),
    "a solution by three digits": (
        lambda: hog.meta.root(equilibrium, newton(equilibrium, torch.zeros(4, dtype=F64), PROBLEMS["equilibrium"][1]) * 1.001, at), RuntimeError, "accuracy=",
    ),
    "NaN": (lambda: hog.meta.root(equilibrium, torch.full((4,), torch.nan, dtype=F64), at), RuntimeError, "= nan"),
    "fewer equations": (lambda: hog.meta.root(lambda z, h: (z - h).sum(), X, X), RuntimeError, "with 4 residuals .* got 1"),
    "parameters from elsewhere": (lambda: hog.meta.root(lambda z, h: z - 0.1 * layer(z) - h, X, X), RuntimeError, "functional_call"),
    "a singular system": (singular, RuntimeError, "is singular where"),
    "complex numbers": (lambda: hog.meta.root(lambda z, h: z - h, X + 0j, X + 0j), TypeError, "view_as_real"),
    "no inputs": (lambda: hog.meta.root(lambda z, h: z, X, {}), ValueError, "inputs: expected at least one tensor"),
    "no solution at all": (lambda: hog.meta.root(lambda z, h: (), (), X), ValueError, "solution: expected at least one tensor"),
    "no residual": (lambda: hog.meta.root(lambda z, h: None, X, X), TypeError, "residual: expected a torch.Tensor, got None"),
    "random numbers": (lambda: hog.meta.root(lambda z, h: nn.functional.dropout(z) - h, X, X), RuntimeError, r"draws no random numbers.*model\.eval"),
    "a negative tolerance": (lambda: hog.meta.root(lambda z, h: z - h, X, X, tol=-1), ValueError, "tol: expected a number of at least 0"),
    "a negative accuracy": (lambda: hog.meta.root(lambda z, h: z - h, X, X, accuracy=-1), ValueError, "accuracy: expected a number of at least 0"),
    "inside of torch.func": (lambda: torch.func.vmap(lambda x: hog.meta.root(lambda z, h: z - h, x, x))(rand(2, 3)), NotImplementedError, "torch.autograd.grad"),
}  # fmt: skip

test_errors = refused(ERRORS)
