"""Solutions of equations as functions: closed forms, and differences of solutions, to the fourth order."""

import warnings

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


def newton(F, z, h, steps=12):
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
    "fixed point": (equilibrium, {"W": W, "x": X}, torch.zeros(4, dtype=F64)),
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
    if name == "fixed point":  # from a start of its own
        z = hog.meta.fixed_point(lambda z, h: z - F(z, h), start, at)
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
        at, step = lambda t, o=order: along(name, t, directions, o - 1), 1e-3
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        assert_close(along(name, 0.0, directions, order), slope, rtol=2e-6, atol=1e-7)


def inner(p, h):
    error = (h["c"] * (DATA @ p["w"] - Y).square()).mean()
    return (error + (h["rho"].exp() * p["w"].square()).sum()) / 2


def validation(p, h):
    return (Z @ p["w"] - T).square().sum() / 2


def implicit(h, inner=inner, at=None, **options):
    at = {key: x.detach() for key, x in (at or h).items()}
    solution = newton(stationary, torch.zeros(3, dtype=F64), at, 1)
    options = {"method": "cg", "tol": 1e-13, "create_graph": True, **options}
    return hog.meta.hypergradient(validation, inner, {"w": solution}, h, **options)


@rows("options", [{}, {"method": "neumann", "step_size": 0.2, "iterations": 100}, {"damping": 0.5}])
def test_a_hypergradient_to_third_order(options):
    """By value and gradient, along v; damping is that of a proximal term."""
    h = {key: x.clone().requires_grad_() for key, x in PROBLEMS["ridge"][1].items()}
    own, v = [*h.values()], [rand(*x.shape, seed=1) for x in h.values()]
    found = implicit(h, **options)
    gradient = list(found.gradient.values())
    damping = options.get("damping", 0.0) * torch.eye(3, dtype=F64)
    A = DATA.T @ (h["c"][:, None] * DATA) / 8 + h["rho"].exp().diag() + damping
    b = DATA.T @ (h["c"] * Y) / 8 + damping @ found.params["w"].detach()
    y = value = validation({"w": torch.linalg.solve(A, b)}, h)
    assert_close(found.value, value)
    for order in range(3):
        expected = torch.autograd.grad(value, own, create_graph=True)
        ours = torch.autograd.grad(y, own, create_graph=True) if order else gradient
        assert relative(list(ours), list(expected)) < 1e-9, order
        value, y = (sum((g * x).sum() for g, x in zip(k, v, strict=True)) for k in (expected, ours))
    assert relative(list(torch.autograd.grad(found.value, own)), gradient) < 1e-12


class Cell(nn.Sequential):
    def forward(self, z, x):
        return torch.tanh(super().forward(z) / 4 + x)


class Equilibrium(nn.ModuleList):
    def forward(self, x):
        cell, head = self
        z = 0 * x
        for _ in range(self.steps):
            z = cell(z, x)
        return head(z if self.steps else hog.meta.fixed_point(cell, z, x, tol=1e-12))


PARTS = {
    "tied": lambda: nn.Sequential(*2 * [nn.Linear(4, 4)]),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


@rows("name", PARTS)
def test_a_module_as_the_function(name):
    """Products with the Hessian, and a penalty's gradient, of equilibrium models as of unrolled ones."""
    x, y, found = rand(5, 4), rand(5, 1), []
    for steps in (0, 100):
        torch.manual_seed(0)
        model = Equilibrium([Cell(PARTS[name]()), nn.Linear(4, 1)]).double()
        model.steps = steps
        state = {key: value.clone() for key, value in model.state_dict().items()}
        params = hog.trainable_params(model)
        loss = hog.functional_loss(model, nn.functional.mse_loss)
        Hv = hog.hvp(loss, params, {key: p.sin() for key, p in params.items()}, (x, y))[1]
        hog.penalties.parameter_gradient(loss, params, (x, y)).backward()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        found.append([*Hv.values(), *(p.grad for p in params.values() if p.grad is not None)])
    assert relative(*found) < 1e-8


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


fixed_point = hog.meta.fixed_point
HALF = lambda z, x: z / 2 + x  # noqa: E731
IMPLICIT = {key: x.clone().requires_grad_() for key, x in PROBLEMS["ridge"][1].items()}


def test_right_fixed_points_are_not_refused():
    """Constants among the inputs, a solution of zero, maps that expand, kinks, containers, own solvers, no
    inputs, few digits."""
    rows_of = torch.tensor([0, 2, 1, 0])
    newton_step = lambda f, z: newton(lambda z, _: z - f(z), z, None, 20)  # noqa: E731
    several = lambda z, x: {"b": z["a"].cos(), "a": z["b"] / 2 + x}  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = fixed_point(lambda z, table, i, mask: torch.where(mask, table[i] - z / 3, 0.0), 0 * X, X, rows_of, X > 0)  # fmt: skip
        assert_close(z, torch.where(X > 0, 0.75 * X[rows_of], 0.0))
        assert fixed_point(lambda z, x: z.tanh() / 2 + x, X, 0 * X).abs().max() < 1e-100
        assert_close(fixed_point(lambda z, x: 3 * z + x, 0 * X, X), -X / 2)
        assert_close(fixed_point(lambda z, x: (x - z / 2).relu(), 0 * X, X), X.relu() / 1.5)
        assert_close(fixed_point(HALF, X, X, solver="iteration"), 2 * X)
        z = fixed_point(lambda z, x: 1 - z**3 + x, X, X, solver=newton_step)
        assert_close(1 - z**3 + X, z)
        z = fixed_point(several, {"a": X, "b": X}, X)
        assert_close(z["b"], z["a"].cos())
        assert_close(fixed_point(torch.cos, X).cos(), fixed_point(torch.cos, X))
        for dtype in (torch.float32, torch.bfloat16):
            assert_close(fixed_point(HALF, X.to(dtype), X.to(dtype)), 2 * X.to(dtype))


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
    "a solution by three digits": (lambda: hog.meta.root(equilibrium, newton(equilibrium, torch.zeros(4, dtype=F64), PROBLEMS["equilibrium"][1]) * 1.001, at), RuntimeError, "accuracy="),
    "NaN": (lambda: hog.meta.root(equilibrium, torch.full((4,), torch.nan, dtype=F64), at), RuntimeError, "= nan"),
    "fewer equations": (lambda: hog.meta.root(lambda z, h: (z - h).sum(), X, X), RuntimeError, "with 4 residuals .* got 1"),
    "parameters from elsewhere": (lambda: hog.meta.root(lambda z, h: z - 0.1 * layer(z) - h, X, X), RuntimeError, r"functional_call.* `module.requires_grad_\(False\)`"),
    "complex numbers": (lambda: hog.meta.root(lambda z, h: z - h, X + 0j, X + 0j), TypeError, "view_as_real"),
    "no inputs": (lambda: hog.meta.root(lambda z, h: z, X, {}), ValueError, "inputs: expected at least one tensor"),
    "no solution at all": (lambda: hog.meta.root(lambda z, h: (), (), X), ValueError, "solution: expected at least one tensor"),
    "no residual": (lambda: hog.meta.root(lambda z, h: None, X, X), TypeError, "residual: expected a torch.Tensor, got None"),
    "random numbers": (lambda: hog.meta.root(lambda z, h: nn.functional.dropout(z) - h, X, X), RuntimeError, r"draws no random numbers.*model\.eval"),
    "no fixed point": (lambda: fixed_point(lambda z, x: z + x, X, X), RuntimeError, "fixed_point: expected a solution, .*Give more max_iter"),
    "a map that is not finite": (lambda: fixed_point(lambda z, x: z.abs().log() + x, 0 * X, X), RuntimeError, "= (nan|inf)"),
    "a solver's start": (lambda: fixed_point(HALF, X, X, solver=lambda f, z: z), RuntimeError, "got 4 with .*another z0 or solver"),
    "detach": (lambda: fixed_point(lambda z, x: z.detach().sin() / 2 + x, X, X), UserWarning, r"by autograd as by differences.*Look for detach\(\)"),
    "NumPy": (lambda: fixed_point(lambda z, x: torch.from_numpy(HALF(z, x).detach().numpy()), X, X), UserWarning, "by autograd as by differences"),
    "data": (lambda: hog.meta.root(lambda z, x: z - 2 * x.data, 2 * X, X), UserWarning, "by autograd as by differences"),
    "detach in a training": (lambda: implicit(IMPLICIT, inner=lambda p, h: inner(p, h) + (p["w"] - p["w"].detach()).square().sum()), UserWarning, "by autograd as by differences"),
    "a solver by name": (lambda: fixed_point(HALF, X, X, solver="broyden"), ValueError, "anderson, iteration"),
    "a value of another shape": (lambda: fixed_point(HALF, X[:1], X), ValueError, r"f\(z, \*inputs\): expected \(1,\), got \(4,\)"),
    "a value of another dtype": (lambda: fixed_point(HALF, X.float(), X), TypeError, "expected torch.float32 as in z0, got torch.float64"),
    "a module that is closed over": (lambda: fixed_point(lambda z, x: layer(z) / 9 + x, X, X), RuntimeError, "f may be a module"),
    "I - J that is singular": (lambda: torch.autograd.grad(fixed_point(lambda z, x: z * torch.eye(4)[0] + x, 0 * X, 0 * IMPLICIT["rho"][0]).sum(), IMPLICIT["rho"]), RuntimeError, "is singular where"),
    "a hypergradient's constants that require grad": (lambda: implicit({"rho": IMPLICIT["rho"], "c": IMPLICIT["c"].detach()}, inner=lambda p, h: inner(p, IMPLICIT)), RuntimeError, "Pass them in hyper"),
    "a graph of steps": (lambda: implicit(IMPLICIT, method="unrolled", rule=hog.meta.sgd(0.1), tol=None), NotImplementedError, r"hoglib\.meta\.adapt"),
    "a hypergradient away from the minimum": (lambda: implicit({**IMPLICIT, "rho": IMPLICIT["rho"] + 1}, at=IMPLICIT), UserWarning, "at a minimum of inner"),
    "a negative tolerance": (lambda: hog.meta.root(lambda z, h: z - h, X, X, tol=-1), ValueError, "tol: expected a number of at least 0"),
    "inside of torch.func": (lambda: torch.func.vmap(lambda x: hog.meta.root(lambda z, h: z - h, x, x))(rand(2, 3)), NotImplementedError, "torch.autograd.grad"),
}  # fmt: skip

test_errors = refused(ERRORS)
