"""Derivatives of traces, diagonals, solutions, log determinants and eigenvalues, against differences
with the same samples, dense matrices and closed forms."""

import math
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hoglib as hog
from hoglib.curvature import LinearOperator
from hoglib.curvature.sums.dataset_sum import DatasetSum
from tests.curvature.problems import F64, SMOOTH, draw, problem, seeded
from tests.refused import refused
from tests.rows import rows

SIZE = 9  # of the parameters of `small`


def small():
    """A loss of nine parameters, two batches of different sizes, and a dict with the logarithm of its
    scale, which the loss closes over."""
    state = torch.get_rng_state()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    torch.set_rng_state(state)
    closed = {"s": torch.tensor(0.3, dtype=F64)}

    def criterion(outputs, y):
        return closed["s"].exp() * (outputs - y).square().mean()

    data = [(draw(n, 2, seed=n), draw(n, 1, seed=n + 9)) for n in (4, 2)]
    return hog.functional_loss(model, criterion), hog.trainable_params(model), data, closed


def dense(p, s):
    """A positive definite matrix, as a differentiable function of tensors."""
    x = torch.cat([leaf.reshape(-1) for leaf in p.values()])
    return torch.outer(x, x) + x.exp().diag() * s


def matvec(p, s):
    return LinearOperator.from_matvec(lambda v: dense(p, s) @ v, torch.zeros(SIZE, dtype=F64))


def sandwich(H, G):
    return H @ G @ H


# name -> the operator of (loss, params, batches), the scale s, a factor and a damping
HESSIAN, GGN = hog.HessianOperator, hog.GGNOperator
OPERATORS = {
    "Hessian": lambda given, s, c, d: HESSIAN(*given),
    "GGN, a sum": lambda given, s, c, d: GGN(*given, reduction="sum"),
    "Hessian, forward over reverse": lambda given, s, c, d: HESSIAN(*given, mode="forward-over-reverse"),
    "GGN, forward": lambda given, s, c, d: GGN(*given, mode="forward"),
    "micro-batches, recomputed": lambda given, s, c, d: HESSIAN(*given, micro_batch=1, remat=["0"]),
    "a single batch": lambda given, s, c, d: GGN(*given[:2], given[2][0]),
    "a product": lambda given, s, c, d: sandwich(HESSIAN(*given), GGN(*given)),
    "a sum in a sum": lambda given, s, c, d: 2 * (c * GGN(*given) + c * HESSIAN(*given).damped(d)) / 3,
    "blocks": lambda given, s, c, d: HESSIAN(*given).block_diagonal("module"),
    "a submatrix": lambda given, s, c, d: HESSIAN(*given).submatrix(["0.bias", "2.*"]),
    "from_matvec": lambda given, s, c, d: matvec(given[1], s),
    "from_dense": lambda given, s, c, d: LinearOperator.from_dense(dense(given[1], s)),
}  # fmt: skip


def vector_of(A, seed=8):
    return draw(A.shape[0], seed=seed)


# name -> a scalar of an operator and a damping
ALGORITHMS = {
    "trace": lambda A, d, graph: A.trace(3, method="hutchinson", generator=seeded(1), create_graph=graph),
    "exact trace": lambda A, d, graph: A.trace(SIZE, create_graph=graph),
    "diagonal": lambda A, d, graph: A.diagonal(3, generator=seeded(1), create_graph=graph) @ vector_of(A),
    "solve": lambda A, d, graph: A.solve(vector_of(A), damping=d, tol=1e-13, create_graph=graph) @ vector_of(A, 7),
    "logdet": lambda A, d, graph: A.damped(d).logdet(2, generator=seeded(1), create_graph=graph),
    "eigenvalues": lambda A, d, graph: A.eigsh(2, which="LA", create_graph=graph).values @ torch.tensor([1.0, 2.0], dtype=F64),
}  # fmt: skip


def slope(function, x, along, step=3e-4):
    """d function(x + t along) / dt at 0, by central differences of the fourth order."""
    at = [
        function([p + t * step * v for p, v in zip(x, along, strict=True)]) for t in (1, -1, 2, -2)
    ]
    return (8 * (at[0] - at[1]) - (at[2] - at[3])) / (12 * step)


def assert_slope(function, tensors, rtol=1e-6):
    """function(tensors, graph): its gradient agrees with differences along a random direction."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    value = function(leaves, True)
    found = torch.autograd.grad(value, leaves, materialize_grads=True, allow_unused=True)
    along = [draw(*x.shape, seed=40 + i) for i, x in enumerate(tensors)]
    ours = sum((g * v).sum() for g, v in zip(found, along, strict=True))
    plain = [x.detach() for x in tensors]
    expected = slope(lambda x: function(x, False), plain, along)
    assert abs(expected) > 1e-4
    assert_close(ours, expected, rtol=rtol, atol=1e-8)
    assert_close(value.detach(), function(plain, False), rtol=1e-9, atol=1e-9)


# every operator with a product and with a system, every algorithm with two operators
PAIRS = [
    (make, run)
    for make in OPERATORS
    for run in ALGORITHMS
    if run in ("diagonal", "solve") or make in ("Hessian", "from_dense")
]


@rows(("make", "run"), [(OPERATORS[a], ALGORITHMS[b]) for a, b in PAIRS], ids=map(", ".join, PAIRS))
def test_the_derivative_is_that_of_differences_with_the_same_samples(make, run):
    loss, params, data, closed = small()
    damping = torch.tensor(20.0, dtype=F64)

    def result(x, graph):
        *leaves, closed["s"], c, d = x
        given = loss, dict(zip(params, leaves, strict=True)), data
        return run(make(given, closed["s"], c, d), d, graph)

    factor = torch.tensor(1.7, dtype=F64)
    assert_slope(result, [*params.values(), closed["s"], factor, damping])


@rows("name", SMOOTH, ids=SMOOTH)
@rows("make", [HESSIAN, GGN], ids=["Hessian", "GGN"])
def test_the_third_derivatives_of_layers_are_right(name, make):
    loss, params, batch = problem(name)

    def result(x, graph):
        A = make(loss, dict(zip(params, x, strict=True)), batch)
        return A.trace(2, method="hutchinson", generator=seeded(2), create_graph=graph)

    assert_slope(result, [*params.values()], rtol=1e-5)


def test_it_is_the_derivative_of_the_dense_matrix():
    loss, params, data, _ = small()
    batch = data[0]
    hessian = torch.func.hessian(lambda p: loss(p, batch))

    def trace(p):
        blocks = hessian(p)
        return sum(blocks[n][n].flatten(p[n].dim()).flatten(0, p[n].dim() - 1).trace() for n in p)

    expected = torch.func.grad(trace)({n: p.detach() for n, p in params.items()})
    hog.HessianOperator(loss, params, batch).trace(SIZE, create_graph=True).backward()
    assert_close({n: p.grad for n, p in params.items()}, expected)


def test_the_evidence_of_a_linear_regression_is_maximal_where_its_closed_form_is():
    # log p(y) of y = X w + noise, w ~ N(0, 1/alpha), noise ~ N(0, 1/beta)
    X = draw(12, 4)
    y = X @ draw(4, seed=2) + 0.3 * draw(12, seed=1)
    logs = torch.tensor([0.2, -0.3], dtype=F64, requires_grad=True)

    def loss(p, batch):
        return (batch[0] @ p - batch[1]).square().sum() / 2

    def evidence():
        alpha, beta = logs.exp()
        G = hog.HessianOperator(loss, torch.zeros(4, dtype=F64), (X, y), reduction="sum")
        precision = (beta * G).damped(alpha)
        mode = precision.solve(beta * X.T @ y, tol=1e-12, create_graph=True)
        fit = alpha * mode @ mode + beta * (y - X @ mode).square().sum()
        logdet = precision.logdet(40, generator=seeded(3), create_graph=True)
        return (4 * logs[0] + 12 * logs[1] - 12 * math.log(2 * math.pi) - fit - logdet) / 2

    def closed_form():
        alpha, beta = logs.exp()
        covariance = X @ X.T / alpha + torch.eye(12, dtype=F64) / beta
        return torch.distributions.MultivariateNormal(
            torch.zeros(12, dtype=F64), covariance
        ).log_prob(y)

    ours, expected = evidence(), closed_form()
    assert_close(ours, expected, rtol=5e-3, atol=0)  # the log determinant is estimated
    assert_close(*(torch.autograd.grad(x, logs)[0] for x in (ours, expected)), rtol=5e-3, atol=5e-3)
    found = []
    for function in (evidence, closed_form):
        optimizer = torch.optim.LBFGS([logs], line_search_fn="strong_wolfe", max_iter=30)

        def step(optimizer=optimizer, function=function):
            optimizer.zero_grad()
            value = -function()
            value.backward()
            return value

        optimizer.step(step)
        found.append(logs.detach().clone())
        with torch.no_grad():
            logs.copy_(torch.tensor([0.2, -0.3], dtype=F64))
    assert (found[1] - logs).norm() > 0.3  # the start is far from the maximum
    assert_close(*found, rtol=0, atol=0.02)


def test_the_solution_is_differentiated_by_b_and_keeps_its_form():
    loss, params, data, _ = small()
    G = hog.GGNOperator(loss, params, data).damped(0.5)
    b = {n: draw(*p.shape, 2, seed=i).requires_grad_() for i, (n, p) in enumerate(params.items())}
    x, info = G.solve(b, tol=1e-12, create_graph=True, return_info=True)
    assert bool(info.converged.all())
    weights = {n: draw(*p.shape, 2, seed=20 + i) for i, (n, p) in enumerate(params.items())}
    sum((x[n] * weights[n]).sum() for n in x).backward()
    expected = torch.linalg.solve(G.to_dense(), G.ravel(weights))
    assert_close(G.ravel({n: v.grad for n, v in b.items()}), expected)
    assert_close(G.ravel(x).detach(), torch.linalg.solve(G.to_dense(), G.ravel(b)))


def test_parameters_of_a_graph_and_of_a_closure_are_told_apart():
    # p = w^2 is a parameter; the loss uses w itself, too: d/dw of tr H has both parts
    w = torch.tensor([0.5, 2.0], dtype=F64, requires_grad=True)
    loss = lambda p, x: (w * p**3).sum() * x  # noqa: E731
    H = hog.HessianOperator(loss, w.square(), torch.ones((), dtype=F64))
    H.trace(2, create_graph=True).backward()  # 6 sum w^3
    assert_close(w.grad, 18 * w.detach().square())


def test_gradients_add_up_over_several_backwards_and_follow_steps():
    loss, params, data, closed = small()
    closed["s"].requires_grad_()
    H = hog.HessianOperator(loss, params, data)
    for s in (0.3, 1.0):
        with torch.no_grad():
            closed["s"].fill_(s)
        closed["s"].grad = None
        value = H.trace(SIZE, create_graph=True)
        value.backward()
        assert_close(closed["s"].grad, value.detach())  # the loss is exp(s) times another
        again = H.trace(SIZE, create_graph=True)
        (value.detach() * again).backward()
        assert_close(closed["s"].grad, value.detach() * (1 + value.detach()))


RESULTS = {
    "trace": lambda A: A.trace(2, create_graph=True, generator=seeded(1)),
    "diagonal": lambda A: A.diagonal(2, create_graph=True, generator=seeded(1)),
    "solve": lambda A: A.solve(vector_of(A), create_graph=True),
    "logdet": lambda A: A.logdet(2, create_graph=True, generator=seeded(1)),
    "eigenvalues": lambda A: A.eigsh(2, create_graph=True).values,
}


@rows("run", RESULTS.values(), ids=RESULTS)
@rows("context", [torch.no_grad, torch.inference_mode])
def test_it_works_without_gradients_around(context, run):
    p = {"": draw(SIZE).requires_grad_()}
    A = matvec(p, 1.0)
    with context():
        result = run(A)
    expected = run(A)
    ours, theirs = (torch.autograd.grad(x.sum(), p[""])[0] for x in (result, expected))
    assert_close(ours, theirs)


def test_saved_tensors_may_be_copies():
    A = cubic()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        A.trace(3, create_graph=True).backward()
    assert_close(A.params.grad, torch.autograd.grad(A.trace(3, create_graph=True), A.params)[0])


def test_the_mean_of_the_log_determinant_s_derivative_is_that_of_the_matrix():
    p = draw(30).requires_grad_()
    make = lambda: LinearOperator.from_dense(torch.outer(p, p) + p.exp().diag())  # noqa: E731
    value = make().logdet(400, steps=8, generator=seeded(5), create_graph=True)
    (ours,) = torch.autograd.grad(value, p)
    dense_value = torch.logdet(torch.outer(p, p) + p.exp().diag())
    assert_close(value.detach(), dense_value.detach(), rtol=0, atol=0.2)
    (expected,) = torch.autograd.grad(dense_value, p)
    assert float((ours - expected).norm() / expected.norm()) < 0.1


def test_the_graph_of_one_batch_is_held_at_a_time():
    made, most = [], 0

    def loss(p, x):
        nonlocal most
        y = p * p  # saved in the graph of the product
        made.append(weakref.ref(y))
        most = max(most, sum(ref() is not None for ref in made))
        return (y * p * x).sum()

    p, found = torch.ones(2, dtype=F64, requires_grad=True), []
    for batches in (2, 8):
        data = draw(batches).abs()
        H = hog.HessianOperator(loss, p, DataLoader(data, batch_size=1))
        trace = H.trace(2, create_graph=True)
        most = 0
        (g,) = torch.autograd.grad(trace, p)
        assert_close(g, torch.full_like(p, 6 * float(data.mean())).detach())
        found.append(most)
    assert 0 < found[0] == found[1]


def test_repeated_eigenvalues_are_told_and_their_sum_is_right():
    # diag(a, a, c) rotated: the derivative of the sum of both copies is determined
    def operator(x):
        a = torch.stack([x[0] * 2, x[0] + x[1], x[2]])
        Q = torch.linalg.qr(draw(3, 3))[0]
        return LinearOperator.from_dense(Q @ a.diag() @ Q.T)

    x = torch.tensor([1.0, 1.0, 0.1], dtype=F64, requires_grad=True)
    with pytest.warns(UserWarning, match="expected separate eigenvalues, got 2"):
        values = operator(x).eigsh(1, which="LA", create_graph=True).values
    with pytest.warns(UserWarning, match="got 2, 2"):
        values = operator(x).eigsh(2, which="LA", create_graph=True).values
    assert_close(torch.autograd.grad(values.sum(), x)[0], torch.tensor([3.0, 1.0, 0.0], dtype=F64))


@rows("which", ["LM", "LA", "SA", "BE", "SM"])
def test_the_eigenvalues_are_those_that_were_asked_for(which):
    A = matvec({"": draw(SIZE).requires_grad_()}, 1.0)
    ours, plain = A.eigsh(3, which=which, create_graph=True), A.eigsh(3, which=which)
    assert_close(ours.values.detach(), plain.values)
    assert_close(ours.vectors.detach().abs(), plain.vectors.abs(), rtol=1e-6, atol=1e-7)
    assert ours.residuals.shape == (3,)


CUBE = lambda p, x: p**3 @ torch.tensor([1.0, 2.0, 3.0]).to(p) * x.sum()  # noqa: E731
ONE = torch.ones(1, dtype=F64)


def cubic(*, data=ONE, **options):
    return hog.HessianOperator(CUBE, torch.ones(3, dtype=F64).requires_grad_(), data, **options)


def fisher(kind):
    loss, params, data, _ = small()
    return hog.FisherOperator(loss, params, data, kind=kind, likelihood=None if kind == "empirical" else "gaussian")  # fmt: skip


def of_tensors(A):
    A.trace(create_graph=True)


def after_a_step():
    A = cubic()
    trace = A.trace(create_graph=True)
    with torch.no_grad():
        A.params.add_(1.0)
    trace.backward()


def after_a_replacement():
    params = {"p": torch.ones(2, dtype=F64, requires_grad=True)}
    trace = hog.HessianOperator(lambda p, x: (p["p"] ** 3).sum() * x, params, ONE[0]).trace(create_graph=True)  # fmt: skip
    params["p"] = torch.ones(2, dtype=F64, requires_grad=True)
    trace.backward()


def of_batches_with_grad():
    data = [torch.ones(1, dtype=F64, requires_grad=True) for _ in range(2)]
    batches = DataLoader(data, batch_size=None)
    cubic(data=batches).trace(create_graph=True).backward()


def after_another_batch(wrap=lambda A: A):
    batches = [{"x": ONE}]
    params = torch.ones(3, dtype=F64, requires_grad=True)
    A = hog.HessianOperator(lambda p, batch: CUBE(p, batch["x"]), params, batches)
    trace = wrap(A).trace(create_graph=True)
    batches[0] = {"x": 2 * ONE}
    trace.backward()


def after_a_write_to_data(part=False):
    params = {n: torch.ones(2, dtype=F64, requires_grad=True) for n in "ab"}
    A = hog.HessianOperator(lambda p, x: (p["a"] ** 3 * p["b"]).sum() * x, params, ONE[0])
    trace = (A.submatrix("a") if part else A).trace(create_graph=True)
    params["b"].data.mul_(2)
    trace.backward()


def after_a_buffer():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double().eval()
    data = draw(3, 2), draw(3, 2, seed=1)
    A = hog.GGNOperator(hog.functional_loss(model, nn.MSELoss()), hog.trainable_params(model), data)
    trace = A.trace(create_graph=True)
    model[1].running_var.mul_(2)
    trace.backward()


def twice():
    A = cubic()
    (g,) = torch.autograd.grad(A.trace(create_graph=True), A.params, create_graph=True)
    return g


def second_of_solve():
    A = LinearOperator.from_dense(torch.eye(2, dtype=F64))
    b = torch.ones(2, dtype=F64, requires_grad=True)
    torch.autograd.grad(A.solve(b, create_graph=True).sum(), b, create_graph=True)


def of_a_transform():
    func = lambda p: hog.HessianOperator(CUBE, p, ONE).trace(create_graph=True)  # noqa: E731
    torch.func.grad(func)(torch.ones(3, dtype=F64))


def kfac():
    loss, params, data, _ = small()
    hog.KFACOperator(loss, params, data[0]).eigsh(1, create_graph=True)


def of_processes():
    with mock.patch.object(DatasetSum, "alone", False):
        cubic().eigsh(1, create_graph=True)


REFUSED = {
    "processes": (of_processes, RuntimeError, "processes=.*part of the derivative"),
    "nothing that requires grad": (lambda: hog.HessianOperator(CUBE, torch.ones(3), ONE.float()).trace(create_graph=True), ValueError, "requires_grad_"),
    "KFAC": (kfac, RuntimeError, "KFACOperator.*knows its derivative"),
    "a low-rank approximation": (lambda: of_tensors(cubic().low_rank(1) + cubic()), RuntimeError, "LowRankOperator.*knows its derivative"),
    "an exact Fisher matrix": (lambda: of_tensors(fisher("exact")), RuntimeError, "FisherOperator.*no graph.*GGNOperator"),
    "an empirical Fisher matrix": (lambda: of_tensors(fisher("empirical")), RuntimeError, "FisherOperator.*no graph"),
    "a sampled Fisher matrix": (lambda: of_tensors(fisher("mc")), RuntimeError, "FisherOperator.*no graph"),
    "compiled": (lambda: of_tensors(cubic(compile="eager")), RuntimeError, "compile=.*captured"),
    "finite differences": (lambda: of_tensors(cubic(mode="finite-differences")), ValueError, "differences have no graph"),
    "xtrace": (lambda: cubic().trace(method="xtrace", create_graph=True), RuntimeError, "hutchinson.*xtrace"),
    "xdiag": (lambda: cubic().diagonal(method="xdiag", create_graph=True), RuntimeError, "hutchinson.*xdiag"),
    "a solution that ends early": (lambda: cubic().solve(torch.ones(3, dtype=F64), stagnation_tol=1e-3, create_graph=True), ValueError, "stagnation_tol=0"),
    "no boolean": (lambda: cubic().trace(create_graph="yes"), TypeError, "create_graph"),
    "a second derivative": (twice, RuntimeError, "trace.*no second one"),
    "a second derivative of a solution": (second_of_solve, RuntimeError, "solve.*no second one"),
    "eigenvectors": (lambda: cubic().eigsh(1, create_graph=True).vectors.sum().backward(), RuntimeError, "derivative of the vectors"),
    "a step in between": (after_a_step, RuntimeError, "modified by an inplace operation"),
    "another batch in between": (after_another_batch, RuntimeError, "stay the same until backward"),
    "another batch of a sum": (lambda: after_another_batch(lambda A: 2 * A + A @ A @ A), RuntimeError, "stay the same until backward"),
    "a write to .data": (after_a_write_to_data, RuntimeError, "stay the same until backward"),
    "a write to .data of a submatrix": (lambda: after_a_write_to_data(part=True), RuntimeError, "stay the same until backward"),
    "another buffer": (after_a_buffer, RuntimeError, "stay the same until backward"),
    "replaced parameters": (after_a_replacement, ValueError, "params were replaced"),
    "batches with a gradient each": (of_batches_with_grad, ValueError, "batches require grad"),
    "torch.func": (of_a_transform, RuntimeError, "transforms"),
}  # fmt: skip
test_what_has_no_derivative_is_refused = refused(REFUSED)


def test_inside_a_checkpoint():
    # whose recomputation found the kept graph, and ran itself again for its saved tensors, for ever
    x = torch.arange(1.0, 4.0, dtype=F64)
    p = torch.tensor([1.0, 2.0, 3.0], dtype=F64, requires_grad=True)
    H = hog.HessianOperator(lambda p, x: (x * p**3).sum(), p, x)  # diag(6 x p)
    y = torch.ones(3, dtype=F64, requires_grad=True)

    def run(y):
        return y * H.trace(3, create_graph=True) + y * (H @ torch.ones_like(y))

    value = checkpoint(run, y, use_reentrant=False).sum()
    by_p, by_y = torch.autograd.grad(value, (p, y))
    assert_close(by_p, 3 * 6 * x)
    assert_close(by_y, (6 * x * p).sum() + 6 * x * p.detach())
