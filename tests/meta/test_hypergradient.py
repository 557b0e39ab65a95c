"""Hyper-gradients of quadratic trainings, whose closed forms are a few lines of linear algebra."""

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from tests.oracles import relative
from tests.refused import refused
from tests.tensors import F64
from tests.tensors import randn as rand

WAYS = {
    "store": {},
    "remat": {"memory": "remat"},
    "mixed": {"memory": "mixed"},
    "checkpoint": {"memory": "checkpoint"},
    "checkpoint, log": {"memory": "checkpoint", "schedule": "log"},
    "disk": {"memory": "disk"},
    "disk, log": {"memory": "disk", "schedule": "log"},
}
STEPS, RATE = 6, 0.15


# Training: f = mean_n c_n (x_n.w - y_n)^2 / 2 + exp(rho) |w|^2 / 2, from w_0, at the rate alpha.
# Validation: F = |Z w - t|^2 / 2 + rho^2, so that a hyper-parameter counts directly too.
X, Y, Z, T = rand(8, 3), rand(8), rand(5, 3), rand(5)
HYPER = {
    "weights": torch.linspace(0.5, 1.5, 8, dtype=F64),
    "rho": torch.tensor(-1.0, dtype=F64),
    "rate": torch.tensor(RATE, dtype=F64),
    "start": rand(3),
}


def inner(params, hyper, rows=slice(None)):
    errors = X[rows] @ params["w"] - Y[rows]
    ridge = hyper["rho"].exp() * params["w"].square().sum() / 2
    return (hyper["weights"][rows] * errors.square()).mean() / 2 + ridge


def outer(params, hyper):
    return (Z @ params["w"] - T).square().sum() / 2 + hyper["rho"] ** 2


def hypergradient(hyper=HYPER, **options):
    options = {"rule": lambda hyper: hog.meta.sgd(hyper["rate"]), "steps": STEPS, **options}
    start = lambda hyper: {"w": hyper["start"]}  # noqa: E731
    return hog.meta.hypergradient(outer, inner, start, hyper, **options)


def parts(rows, w):
    """Of f on some rows, at w: its Hessian A, its gradient, and d gradient / d (weights, rho)."""
    x, y, c = X[rows], Y[rows], HYPER["weights"][rows]
    hessian = x.T @ (c[:, None] * x) / len(x) + HYPER["rho"].exp() * torch.eye(3, dtype=F64)
    right = x.T @ (c * y) / len(x)
    of_weights = torch.zeros(3, len(X), dtype=F64)
    of_weights[:, rows] = x.T * (x @ w - y) / len(x)
    return hessian, hessian @ w - right, of_weights, HYPER["rho"].exp() * w


def closed_form(steps=STEPS, truncate=None, batches=None):
    """dw / d hyper, from step to step: J <- (I - alpha A) J - alpha d gradient / d hyper."""
    w, eye = HYPER["start"], torch.eye(3, dtype=F64)
    J = {
        "weights": torch.zeros(3, 8, dtype=F64), "rho": torch.zeros(3, dtype=F64),
        "rate": torch.zeros(3, dtype=F64), "start": eye,
    }  # fmt: skip
    for i in range(steps):
        A, g, of_weights, of_rho = parts(slice(None) if batches is None else batches[i], w)
        twice = truncate is None or i >= steps - truncate  # else g is a constant
        J = {name: (eye - RATE * A if twice else eye) @ part for name, part in J.items()}
        if twice:
            J["weights"] = J["weights"] - RATE * of_weights
            J["rho"] = J["rho"] - RATE * of_rho
        J["rate"] = J["rate"] - g
        w = w - RATE * g
    v = Z.T @ (Z @ w - T)
    found = {name: v @ part for name, part in J.items()}
    found["rho"] = found["rho"] + 2 * HYPER["rho"]
    return w, found


BATCHES = [slice(0, 4), slice(2, 8), slice(5, 6), slice(0, 8), slice(3, 7), slice(1, 3)]


def kept(way, path):
    """The options of a way to memory."""
    return {**WAYS[way], **({"directory": path} if "disk" in way else {})}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batches", [None, BATCHES], ids=["one batch", "batches"])
@pytest.mark.parametrize("truncate", [None, 0, 1, 4, STEPS, 99])
def test_unrolled(truncate, batches, way, tmp_path):
    found = hypergradient(truncate=truncate, batches=batches, **kept(way, tmp_path))
    w, expected = closed_form(truncate=truncate, batches=batches)
    assert_close(found.params["w"], w, rtol=1e-12, atol=0)
    assert_close(found.value, outer({"w": w}, HYPER), rtol=1e-12, atol=0)
    assert found.residual is None
    for name in HYPER:
        assert_close(found.gradient[name], expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_rules_with_state_and_learned_options(way, tmp_path):
    """Adam, and its betas, against differences of the validation loss."""
    hyper = {**HYPER, "beta": torch.tensor(0.8, dtype=F64)}

    def found(hyper, **options):
        rule = lambda h: hog.meta.adam(h["rate"], betas=(h["beta"], 0.95), eps=0.1)  # noqa: E731
        return hypergradient(hyper, rule=rule, **options)

    ours = found(hyper, **kept(way, tmp_path)).gradient
    assert relative(ours, found(hyper).gradient) < 1e-12
    for name, at in hyper.items():
        direction = torch.ones_like(at)
        above, below = (found({**hyper, name: at + h * direction}).value for h in (1e-5, -1e-5))
        assert_close((ours[name] * direction).sum(), (above - below) / 2e-5, rtol=1e-7, atol=1e-9)


# The implicit methods, at the minimum of f


def minimum():
    A, _, _, _ = parts(slice(None), torch.zeros(3, dtype=F64))
    w = torch.linalg.solve(A, X.T @ (HYPER["weights"] * Y) / len(X))
    return A, w, Z.T @ (Z @ w - T)


SOLVERS = {
    "cg": {"method": "cg", "tol": 1e-13},
    "neumann": {"method": "neumann", "iterations": 400, "step_size": 0.4},
}


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_implicit_at_the_minimum(solver, damping):
    A, w, v = minimum()
    found = hog.meta.hypergradient(
        outer, inner, {"w": w}, HYPER, damping=damping, **SOLVERS[solver]
    )
    x = torch.linalg.solve(A + damping * torch.eye(3, dtype=F64), v)
    _, _, of_weights, of_rho = parts(slice(None), w)
    assert_close(found.gradient["weights"], -x @ of_weights, rtol=1e-9, atol=1e-12)
    assert_close(found.gradient["rho"], -x @ of_rho + 2 * HYPER["rho"], rtol=1e-9, atol=1e-12)
    assert not found.gradient["rate"].any()  # where a minimum is does not depend on the way there
    assert not found.gradient["start"].any()
    assert max(found.residual) < 1e-12


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_the_residual_is_that_of_the_system_and_of_the_minimum(terms):
    A, w, v = minimum()
    w = w + 0.1
    v = Z.T @ (Z @ w - T)
    options = {"method": "neumann", "iterations": terms, "step_size": 0.4}
    with pytest.warns(UserWarning, match="expected params at a minimum of inner"):
        found = hog.meta.hypergradient(outer, inner, {"w": w}, HYPER, **options)
    power = torch.linalg.matrix_power(torch.eye(3, dtype=F64) - 0.4 * A, terms)
    assert_close(found.residual.system, (power @ v).norm() / v.norm())
    assert_close(found.residual.stationarity, parts(slice(None), w)[1].norm())
    x = torch.linalg.solve(A, v - power @ v)  # 0.4 sum_k (I - 0.4 A)^k v, k < terms
    assert_close(found.gradient["rho"], -x @ parts(slice(None), w)[3] + 2 * HYPER["rho"])


def test_the_last_batch_is_that_of_the_minimum():
    rows = slice(2, 8)
    A, g, _, _ = parts(rows, torch.zeros(3, dtype=F64))
    w = torch.linalg.solve(A, -g)
    options = {"method": "cg", "tol": 1e-13, "steps": 0, "batches": [BATCHES[0], rows]}
    found = hog.meta.hypergradient(outer, inner, {"w": w}, HYPER, **options)
    x = torch.linalg.solve(A, Z.T @ (Z @ w - T))
    assert_close(found.gradient["weights"], -x @ parts(rows, w)[2], rtol=1e-9, atol=1e-12)


# Wherever it is called

NO_MINIMUM = pytest.mark.filterwarnings(
    "ignore:hypergradient. expected params at a minimum of inner"
)


@NO_MINIMUM
@pytest.mark.parametrize("method", ["unrolled", "cg"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad(context, method):
    expected = hypergradient(method=method).gradient
    with context():
        hyper = {name: h.clone() for name, h in HYPER.items()}
        assert relative(hypergradient(hyper, method=method).gradient, expected) == 0


@NO_MINIMUM
@pytest.mark.parametrize("method", ["unrolled", "cg"])
def test_what_is_passed_stays_as_it_is(method):
    hyper = {name: h.clone().requires_grad_() for name, h in HYPER.items()}
    found = hypergradient(hyper, method=method)
    assert all(h.grad is None and h.requires_grad for h in hyper.values())
    assert not found.value.requires_grad
    assert not found.params["w"].requires_grad
    assert not any(part.requires_grad for part in found.gradient.values())
    assert all(torch.equal(hyper[name], HYPER[name]) for name in HYPER)


def test_any_tree_of_hyper_parameters():
    tree = (HYPER["weights"], [{"rho": HYPER["rho"]}])
    named = lambda h: {"weights": h[0], "rho": h[1][0]["rho"]}  # noqa: E731
    found = hog.meta.hypergradient(
        lambda p, h: outer(p, named(h)), lambda p, h: inner(p, named(h)),
        {"w": HYPER["start"]}, tree, rule=hog.meta.sgd(RATE), steps=STEPS,
    )  # fmt: skip
    expected = closed_form()[1]
    assert_close(found.gradient, (expected["weights"], [{"rho": expected["rho"]}]))


def from_outside(constants=HYPER, **options):
    """What is learned is closed over, instead of taken from the argument."""
    return hog.meta.hypergradient(
        lambda p, h: p["w"].sum(), lambda p, h: inner(p, constants), {"w": HYPER["start"]},
        {"rho": constants["rho"]}, **{"rule": hog.meta.sgd(RATE), "steps": 2, **options},
    )  # fmt: skip


def rate_of_a_minimum():
    return from_outside(rule=lambda h: hog.meta.sgd(h["rho"].exp()), method="cg")


def not_solved():
    """A Hilbert matrix, of condition 1e10: rounding alone leaves a residual of 1e-9 of v or more, in
    whatever order a processor adds."""
    i, rho = torch.arange(8, dtype=F64), torch.tensor(1.0, dtype=F64)
    hilbert, v = 1 / (1 + i + i[:, None]), rand(8)
    return hog.meta.hypergradient(
        lambda p, h: p["w"] @ v, lambda p, h: p["w"] @ hilbert @ p["w"] / 2 - h["rho"] * p["w"].sum(),
        {"w": torch.zeros_like(v)}, {"rho": rho}, method="cg", tol=1e-13,
    )  # fmt: skip


def diverging(**options):
    return hypergradient({**HYPER, "rate": torch.tensor(1e200, dtype=F64)}, **options)


ERRORS = {
    "an unknown method": (lambda: hypergradient(method="exact"), ValueError, "unrolled, cg, neumann"),
    "an implicit method": (lambda: hypergradient(method="implicit"), ValueError, "got 'implicit'. Implicit differentiation is cg or neumann"),
    "a graph to nothing": (lambda: hypergradient(method="cg", create_graph=True), ValueError, "create_graph: expected a tensor of hyper that requires grad, got none"),
    "a rate for a rule": (lambda: hypergradient(rule=0.1), TypeError, r"rule: expected a rule with its rate, got float 0\.1; for instance `rule=hoglib\.meta\.sgd"),
    "a rate for a rule of adapt": (lambda: hog.meta.adapt(inner, {"w": HYPER["start"]}, HYPER, 0.1, steps=1), TypeError, r"a rule with its rate, got float 0\.1"),
    "a rule of adapt without its rate": (lambda: hog.meta.adapt(inner, {"w": HYPER["start"]}, HYPER, hog.meta.sgd, steps=1), TypeError, "a rule with its rate, got function <function sgd"),
    "a rate for a rule of one step": (lambda: hog.meta.inner_step(inner, {"w": HYPER["start"]}, HYPER, 0.1, {}), TypeError, r"a rule with its rate, got float 0\.1"),
    "an unknown memory": (lambda: hypergradient(memory="none"), ValueError, "store, remat, checkpoint"),
    "no rule": (lambda: hypergradient(rule=None), ValueError, "rule: expected an update rule for the inner steps, got None.* steps=6`"),
    "a rule without steps": (lambda: from_outside(steps=None, method="cg"), ValueError, "steps: expected a number of inner steps with this rule"),
    "a rule by name": (lambda: hypergradient(rule="sgd"), TypeError, "rule: expected a rule with its rate, got str 'sgd'"),
    "an optimizer": (lambda: hypergradient(rule=torch.optim.SGD([torch.ones(2)])), TypeError, r"got SGD .*`rule=hoglib\.meta\.sgd\(0\.1\)`"),
    "a module in the place of its parameters": (lambda: hog.meta.hypergradient(outer, inner, torch.nn.Linear(2, 1), HYPER), TypeError, r"params: expected a dict of tensors by qualified name, got Linear"),
    "an outer loss of params alone": (lambda: hog.meta.hypergradient(lambda p: 0, inner, {"w": HYPER["start"]}, HYPER, method="cg"), TypeError, r"outer: expected a function of \(params, hyper\), got <lambda> \(too many"),
    "no steps": (lambda: hypergradient(steps=0), ValueError, "steps: expected an integer of at least 1"),
    "fewer batches than steps": (lambda: hypergradient(batches=BATCHES[:2]), ValueError, "one for each of 6 steps, got 2"),
    "integers": (lambda: hypergradient({**HYPER, "rho": torch.tensor(1)}), TypeError, "rho"),
    "hyper from outside": (from_outside, RuntimeError, "depends on hyper, got none that does"),
    "hyper from outside, mixed": (lambda: from_outside(memory="mixed"), RuntimeError, "depends on hyper, got none"),
    "hyper from outside, of a minimum": (lambda: from_outside(method="cg"), RuntimeError, "depends on hyper"),
    "hyper from outside that requires grad": (lambda: from_outside({**HYPER, "rho": HYPER["rho"].clone().requires_grad_()}), RuntimeError, "from elsewhere"),
    "the learning rate of a minimum": (rate_of_a_minimum, RuntimeError, "for those use method='unrolled'"),
    "hyper that is a number": (lambda: hypergradient({**HYPER, "rho": 1.0}), TypeError, r"hyper\['rho'\]: expected a torch.Tensor, got float 1.0; make one"),
    "neumann without a step size": (lambda: hypergradient(method="neumann"), ValueError, "step_size: expected a positive number"),
    "neumann that diverges": (lambda: hypergradient(method="neumann", step_size=1e3), FloatingPointError, "expected terms that shrink.* lower step_size"),
    "training that diverges": (diverging, FloatingPointError, "at step 2 of 6. The inner training diverges"),
    "a value per example": (lambda: hog.meta.hypergradient(lambda p, h: p["w"], inner, {"w": HYPER["start"]}, HYPER, rule=hog.meta.sgd(RATE)), ValueError, r"outer\(params, hyper\)"),
    "no minimum": (lambda: hog.meta.hypergradient(outer, lambda p, h: -inner(p, h), {"w": HYPER["start"]}, HYPER, method="cg"), ArithmeticError, "direction of zero or negative curvature"),
    "a flat direction": (lambda: hog.meta.hypergradient(lambda p, h: p.sum(), lambda p, h: (p[:2] - h).square() @ torch.tensor([0.5, 1.0]), torch.zeros(3), torch.ones(2), method="cg"), ArithmeticError, "zero or negative curvature.* singular"),
    "a system that was not solved": (not_solved, UserWarning, "solved to a relative residual of .* only"),
    "a minimum at a kink": (lambda: hog.meta.hypergradient(lambda p, h: p.sum(), lambda p, h: (p - 1).abs().sum() + h @ p.square(), torch.ones(2), torch.ones(2) / 9, method="cg"), UserWarning, r"at a minimum of inner.* Minima at kinks"),
    "inside of torch.func": (lambda: torch.func.vmap(lambda r: hypergradient({**HYPER, "rate": r}).value)(torch.rand(2)), NotImplementedError, "hoglib.meta.adapt"),
}  # fmt: skip


test_errors = refused(ERRORS)
