"""Each row of the pages for users of BackPACK, curvlinops, Laplace and kfac-jax is run, against definitions."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import lsmr
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import draw

DOCS = Path(__file__).parents[2] / "docs" / "migrate"
NONE = "none"
N, F64 = 12, torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Setup:
    """A network, and what rows are compared with, all dense."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        self.x, self.y = draw(N, 2), torch.arange(N) % 3
        self.batch = self.x, self.y
        self.loss = hog.functional_loss(self.model, F.cross_entropy)
        self.params = hog.trainable_params(self.model)
        plain = {name: p.detach() for name, p in self.params.items()}
        H = torch.func.hessian(lambda p: self.loss(p, self.batch))(plain)
        self.H = self.dense(H)
        J = torch.func.jacrev(lambda p: self.loss.outputs(p, self.batch))(plain)
        self.J = torch.cat([part.flatten(2) for part in J.values()], 2)  # [N, C, P]
        p = self.model(self.x).detach().softmax(1)
        self.M = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        self.G = torch.einsum("ncp,ncd,ndq->pq", self.J, self.M, self.J) / N
        each = [torch.autograd.grad(self.loss(self.params, (a[None], b[None])), list(self.params.values())) for a, b in zip(self.x, self.y, strict=True)]  # fmt: skip
        self.rows = torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in each])
        self.gradient = self.rows.mean(0)
        self.empirical = self.rows.T @ self.rows / N
        self.I = torch.eye(len(self.G), dtype=F64)
        self.b = draw(len(self.G))

    def dense(self, nested):
        return torch.cat([
            torch.cat([nested[a][b].reshape(p.numel(), -1) for b in self.params], 1)
            for a, p in self.params.items()
        ])  # fmt: skip

    def operator(self, made, /, **options):
        return made(self.loss, self.params, self.batch, **options)

    def kfac(self, **options):
        return self.operator(hog.KFACOperator, **options)

    def one(self, name="0.weight"):
        """A parameter, and its entries among all."""
        at = 0
        for key, p in self.params.items():
            if key == name:
                return {name: p}, slice(at, at + p.numel())
            at += p.numel()
        raise KeyError(name)


def near(found, expected, errors=5):
    """An estimate with its standard error."""
    assert abs(found.value - expected) <= errors * found.error + 1e-9


def average(s, made, expected, **options):
    found = s.operator(made, kind="mc", num_samples=4000, generator=seeded(), **options)
    assert (found.to_dense() - expected).norm() < 0.1 * expected.norm()


def grad_batch(s):
    found = hog.per_example_gradients(s.loss, s.params, s.batch)[1]
    return torch.cat([part.flatten(1) for part in found.values()], 1) / N


def norms_of_one(s):
    part, at = s.one()
    found = hog.curvature.per_example_gradient_norms(s.loss, part, s.batch)
    assert_close(found.square() / N**2, s.rows[:, at].square().sum(1) / N**2)


def products_of_one(s):
    part, at = s.one()
    found = hog.curvature.per_example_gradient_products(s.loss, part, s.batch)
    assert_close(found / N**2, s.rows[:, at] @ s.rows[:, at].T / N**2)


def diagonal_by_draws(s):
    K = s.kfac(kind="mc", num_samples=4000, generator=seeded())
    expected = s.G.diagonal()
    assert (K.exact_diagonal() - expected).norm() < 0.1 * expected.norm()


def one_example_each(s, kind, dense):
    for i in (0, 3):
        data = s.x[i : i + 1], s.y[i : i + 1]
        operator = kind(s.loss, s.params, data)
        found = (
            operator.exact_diagonal()
            if kind is hog.KFACOperator
            else operator.to_dense().diagonal()
        )
        assert_close(found, dense(i).diagonal())


def hessian_of(s, i):
    plain = {name: p.detach() for name, p in s.params.items()}
    data = s.x[i : i + 1], s.y[i : i + 1]
    return s.dense(torch.func.hessian(lambda p: s.loss(p, data))(plain))


def factors_apart(s):
    block = s.kfac(joint_bias=False).blocks()[0]
    assert_close(block.A[0], s.x.T @ s.x / N)
    g = s.J[:, :, s.one("0.bias")[1]]  # the Jacobian by the outputs of the layer
    assert_close(block.G[0], torch.einsum("ncp,ncd,ndq->pq", g, s.M, g) / N)


def of_one_parameter(s):
    part, at = s.one()
    for kind, dense in ((hog.GGNOperator, s.G), (hog.HessianOperator, s.H)):
        assert_close(kind(s.loss, part, s.batch).to_dense(), dense[at, at])


BACKPACK = {
    "BatchGrad": lambda s: assert_close(grad_batch(s), s.rows / N),
    "BatchL2Grad": norms_of_one,
    "BatchDotGrad": products_of_one,
    "SumGradSquared": lambda s: assert_close(grad_batch(s).square().sum(0), (s.rows / N).square().sum(0)),
    "Variance": lambda s: assert_close(grad_batch(s).var(0, unbiased=False), (s.rows / N).var(0, unbiased=False)),
    "DiagGGNExact": lambda s: assert_close(s.kfac().exact_diagonal(), s.G.diagonal()),
    "DiagGGNMC": diagonal_by_draws,
    "BatchDiagGGNExact": lambda s: one_example_each(s, hog.KFACOperator, lambda i: s.J[i].T @ s.M[i] @ s.J[i]),
    "DiagHessian": lambda s: assert_close(s.operator(hog.HessianOperator).to_dense().diagonal(), s.H.diagonal()),
    "BatchDiagHessian": lambda s: one_example_each(s, hog.HessianOperator, partial(hessian_of, s)),
    "KFLR": factors_apart,
    "KFAC": lambda s: average(s, hog.KFACOperator, s.kfac(joint_bias=False).to_dense(), joint_bias=False),
    "GGNMP": of_one_parameter,
}  # fmt: skip


def submatrix(s):
    rows, columns = [0, 3, 7], [1, 2]
    found = (s.operator(hog.GGNOperator) @ s.I[:, columns])[rows]
    assert_close(found, s.G[rows][:, columns])


def inverses(s):
    K = s.kfac()
    assert_close(K.inverse(0.1).to_dense(), torch.linalg.inv(K.to_dense() + 0.1 * s.I))
    for method in ("pi", "factors"):
        assert_close(K.solve(s.b, damping=0.1, method=method), K.inverse(0.1, method=method) @ s.b)


def spectrum(s):
    found = s.operator(hog.GGNOperator).spectral_density(40, generator=seeded())
    near(found.average(lambda x: x), s.G.trace() / len(s.G))
    assert found.nodes.shape == found.weights.shape


def blocks(s):
    _, at = s.one()
    found = hog.hessian(s.loss, s.params, s.batch, blocks="parameter")
    assert_close(found["0.weight"]["0.weight"].reshape(6, 6), s.H[at, at])
    G = s.operator(hog.GGNOperator).block_diagonal("parameter").to_dense()
    assert_close(G[at, at], s.G[at, at])


def jacobians(s):
    with hog.second_order():
        v = hog.GGNOperator(s.loss, s.params, s.batch).unravel(s.b)
        _, Jv = torch.func.jvp(lambda p: s.loss.outputs(p, s.batch), (s.params,), (v,))
        _, pull = torch.func.vjp(lambda p: s.loss.outputs(p, s.batch), s.params)
        (JTu,) = pull(Jv)
    assert_close(Jv, s.J @ s.b)
    found = torch.cat([part.reshape(-1) for part in JTu.values()])
    assert_close(found, torch.einsum("ncp,nc->p", s.J, s.J @ s.b))


def algebra(s):
    A, B = s.operator(hog.HessianOperator), s.operator(hog.GGNOperator)
    assert_close((A + B) @ s.b, (s.H + s.G) @ s.b)
    assert_close((A - B) @ s.b, (s.H - s.G) @ s.b)
    assert_close((2 * A).damped(0.5) @ s.b, 2 * s.H @ s.b + 0.5 * s.b)


def curvlinops_diagonal(s, **options):
    found = s.operator(hog.GGNOperator).diagonal(len(s.G) * 40, generator=seeded(), **options)
    assert (found - s.G.diagonal()).norm() < 0.1 * s.G.diagonal().norm()


def trace(s, **options):
    near(
        s.operator(hog.GGNOperator).trace(12, generator=seeded(), return_error=True, **options),
        s.G.trace(),
    )


def by_size(s):
    data = [{"y": b, "x": a} for a, b in zip(s.x.split(5), s.y.split(5), strict=True)]
    loss = hog.functional_loss(
        s.model,
        lambda f, batch: F.cross_entropy(f, batch["y"]),
        forward=lambda m, batch: m(batch["x"]),
    )
    found = hog.GGNOperator(loss, s.params, data, batch_size=lambda batch: len(batch["x"]))
    assert_close(found.to_dense(), s.G)


def solved(s):
    found = s.operator(hog.GGNOperator).solve(s.b, damping=0.1)
    assert_close(found, torch.linalg.solve(s.G + 0.1 * s.I, s.b), rtol=1e-6, atol=1e-6)


CURVLINOPS = {
    "HessianLinearOperator": lambda s: assert_close(s.operator(hog.HessianOperator).to_dense(), s.H),
    "GGNLinearOperator": lambda s: assert_close(s.operator(hog.GGNOperator).to_dense(), s.G),
    "EFLinearOperator": lambda s: assert_close(s.operator(hog.FisherOperator, kind="empirical").to_dense(), s.empirical),
    "FisherMCLinearOperator": lambda s: average(s, hog.FisherOperator, s.G),
    "FisherType": lambda s: [s.kfac(kind=kind, generator=seeded()).update() for kind in ("exact", "mc", "empirical")],
    "KFACLinearOperator": lambda s: assert_close(s.kfac(eigenvalue_corrected=True).trace(), s.G.trace()),
    "KFACInverseLinearOperator": inverses,
    "KFACType": lambda s: assert_close(s.kfac(approximation="reduce").to_dense(), s.kfac().to_dense()),  # one position
    "JacobianLinearOperator": jacobians,
    "TransposedJacobianLinearOperator": jacobians,
    "CGInverseLinearOperator(A + d * I) @ b": solved,
    "LSMRInverseLinearOperator(A) @ b": lambda s: assert_close(
        torch.as_tensor(lsmr(s.operator(hog.GGNOperator).damped(0.1).to_scipy(), s.b.numpy(), atol=1e-13, btol=1e-13)[0]),
        torch.linalg.solve(s.G + 0.1 * s.I, s.b), rtol=1e-6, atol=1e-6),
    "SubmatrixLinearOperator": of_one_parameter,
    "SubmatrixLinearOperator(A, rows, cols)": submatrix,
    "hutchinson_trace": trace,
    "hutchinson_diag": curvlinops_diagonal,
    "hutchinson_squared_fro": lambda s: near(
        s.operator(hog.GGNOperator).squared_frobenius(64, generator=seeded(), return_error=True), s.G.square().sum()),
    "xtrace": partial(trace, method="xtrace"),
    "hutchpp_trace": partial(trace, method="xtrace"),
    "xdiag": lambda s: assert_close(
        s.operator(hog.GGNOperator).diagonal(2 * len(s.G), method="xdiag", generator=seeded()), s.G.diagonal(), atol=0.1, rtol=0.1),
    "lanczos_approximate_spectrum": spectrum,
    "LanczosApproximateSpectrumCached": spectrum,
    "block_sizes": blocks,
    "batch_size_fn": by_size,
    "check_deterministic": lambda s: s.operator(hog.GGNOperator, check_deterministic=False) @ s.b,
    "progressbar": lambda s: s.operator(hog.GGNOperator, progress=False) @ s.b,
    "seed": lambda s: s.operator(hog.FisherOperator, kind="mc", num_samples=2, generator=seeded()) @ s.b,
    "num_data": lambda s: assert_close(hog.GGNOperator(s.loss, s.params, [s.batch, s.batch]).to_dense(), s.G),
    "A.gradient_and_loss()": lambda s: assert_close(s.operator(hog.GGNOperator).gradient()[0], s.loss(s.params, s.batch).detach()),
    "A.to_scipy()": lambda s: assert_close(torch.as_tensor(s.operator(hog.GGNOperator).to_scipy() @ s.b.numpy()), s.operator(hog.GGNOperator).T @ s.b),
    "A + B": algebra,
    "A @ B": lambda s: assert_close(s.operator(hog.HessianOperator) @ (s.operator(hog.GGNOperator) @ s.b), s.H @ (s.G @ s.b)),
}  # fmt: skip
PAGES = {"backpack": BACKPACK, "curvlinops": CURVLINOPS}


def rows_of(page):
    """The first name of each row, and whether there is something of hoglib's beside it."""
    for line in (DOCS / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        name = re.search(r"`([^`]*)`", cells[0])
        if line.startswith("|") and name:
            yield name[1], cells[1]


CASES = [(page, name, cell) for page in PAGES for name, cell in rows_of(page)]


@pytest.mark.parametrize(("page", "name", "cell"), CASES, ids=[f"{p}: {n}" for p, n, _ in CASES])
def test_a_row(page, name, cell):
    check = PAGES[page].get(name)
    if check is None:
        assert cell.startswith((NONE, "not needed")), f"{page}: a row that nothing runs"
        return
    check(Setup())


def test_laplace_and_kfac_jax():
    """What their tables name beside the code on the pages."""
    s, prior = Setup(), 0.1
    K = N * s.kfac(joint_bias=False)
    precision = K.damped(prior)
    dense = K.to_dense() + prior * s.I
    assert_close(precision.logdet(), dense.logdet())
    low = (N * s.operator(hog.GGNOperator)).low_rank(5, generator=seeded())
    assert_close(low.inverse(prior).to_dense(), torch.linalg.inv(low.to_dense() + prior * s.I))
    last = {name: p for name, p in s.params.items() if name.startswith("2.")}
    at = slice(len(s.G) - sum(p.numel() for p in last.values()), None)
    assert_close(hog.GGNOperator(s.loss, last, s.batch).to_dense(), s.G[at, at])
    sample = precision.inverse().sqrt() @ draw(len(s.G), 2)
    assert_close(sample, precision.inverse().sqrt().to_dense() @ draw(len(s.G), 2))
    state = s.kfac().state_dict()
    other = s.kfac()
    other.load_state_dict(state)
    assert_close(other.to_dense(), s.kfac().to_dense())
    noise = 0.5
    squares = hog.functional_loss(
        s.model, lambda f, y: (f - y).square().sum(1).mean() / (2 * noise**2)
    )
    found = hog.GGNOperator(squares, s.params, (s.x, draw(N, 3, seed=2))).to_dense()
    assert_close(found, torch.einsum("ncp,ncq->pq", s.J, s.J) / N / noise**2)
    values = precision.map(lambda values: values**-0.5)
    assert_close(values.to_dense() @ values.to_dense() @ dense, s.I, atol=1e-8, rtol=1e-8)
    assert math.isclose(float(precision.eigenvalues().log().sum()), float(dense.logdet()))
    for options in (
        {"decay": 0.9, "inverse_every": 2, "factors_every": 2, "method": "pi", "weight_decay": 0.1},
        {"rescale": False, "kl_clip": 1e-3, "momentum": 0.5, "lr": 0.1, "kind": "empirical"},
        {"kind": "exact", "approximation": "reduce", "batch_size": lambda batch: len(batch[0])},
    ):
        optimizer = hog.curvature.KFAC(s.loss, damping=0.1, **options)
        before = optimizer.step(s.batch)
        optimizer.step(s.batch)
        assert s.loss(s.params, s.batch) < before
        assert optimizer.info.loss < before
