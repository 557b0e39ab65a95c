"""Sparse Hessians and Jacobians: dense ones, closed forms, few products, patterns that are wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hoglib as hog
from hoglib.curvature import Band, DiagonalBlocks
from tests.refused import refused


def chain(x):
    return (x.diff() ** 3).sum() + x.sin().sum()


def arrow(x):
    return x[0].sin() * x.square().sum() + x.pow(3).sum()


def stencil(u):
    """A nonlinear Poisson equation on a square: five points, (n - 2)^2 unknowns."""
    n = round(u.numel() ** 0.5)
    U = F.pad(u.view(1, 1, n, n), (1, 1, 1, 1))[0, 0]
    lap = U[:-2, 1:-1] + U[2:, 1:-1] + U[1:-1, :-2] + U[1:-1, 2:] - 4 * u.view(n, n)
    return lap + u.view(n, n).exp()


def projections(p):
    """Of 30 points by 4 cameras: each row has one camera and one point."""
    cameras, points = p[:24].view(4, 6), p[24:].view(30, 3)
    c, q = cameras[torch.arange(60) % 4], points[torch.arange(60) // 2]
    y = q + c[:, :3] + torch.linalg.cross(c[:, 3:], q)
    return y[:, :2] / (y[:, 2:] + 10)


def normed(x):
    return F.layer_norm(x.view(10, 5), (5,)).pow(3).sum()


# function, size, at most so many products with a known pattern
HESSIANS = {
    "a chain": (chain, 40, 3),
    "an arrow": (arrow, 40, 3),
    "squares of a stencil": (lambda u: stencil(u).square().sum(), 100, 30),
    "a bundle adjustment": (lambda p: projections(p).square().sum(), 114, 60),
    "layer norms, which vmap gets wrong": (normed, 50, 5),
    "a diagonal": (lambda x: x.exp().sum(), 40, 1),
    "one unknown": (lambda x: x.pow(3).sum(), 1, 1),
    "dense": (lambda x: x.sum().sin(), 20, 20),
    "tiny beside huge": (lambda x: 1e12 * x[0] ** 2 + (1e-3 * x[1:].diff() ** 3).sum(), 40, 3),
}
JACOBIANS = {
    "a stencil": (stencil, 100, 8),
    "a bundle adjustment": (projections, 114, 10),
    "a dense column": (lambda x: x * x[3], 40, 2),
    "a dense row": (lambda x: torch.cat([x.square(), x.sin().sum().view(1)]), 40, 2),
    "rows apart": (lambda x: x.view(8, 5).prod(1), 40, 1),
    "one output": (lambda x: x.prod(), 6, 1),
    "constant": (lambda x: x * 0 + 1, 6, 1),
}


def point(size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def counted(monkeypatch):
    from hoglib._core.numerics import sparsity

    counts, multiply = [], sparsity.Products.__call__

    def spy(self, rows):
        counts.append(len(rows))
        return multiply(self, rows)

    monkeypatch.setattr(sparsity.Products, "__call__", spy)
    return counts


@pytest.mark.parametrize("name", HESSIANS)
def test_a_sparse_hessian_is_the_dense_one(name, monkeypatch):
    f, size, products = HESSIANS[name]
    x = point(size)
    found = hog.sparse_hessian(f, x)
    dense = hog.hessian(lambda x, _: f(x), x, ())
    assert found.layout == torch.sparse_csr
    torch.testing.assert_close(found.to_dense(), dense, rtol=1e-10, atol=0)
    assert len(found.values()) == dense.count_nonzero()
    counts = counted(monkeypatch)
    other = hog.sparse_hessian(
        f, x + 0.1
    )  # by the remembered pattern, compared by one product more
    assert sum(counts) <= products + 1
    torch.testing.assert_close(
        other.to_dense(), hog.hessian(lambda x, _: f(x), x + 0.1, ()), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("name", JACOBIANS)
def test_a_sparse_jacobian_is_the_dense_one(name, monkeypatch):
    f, size, products = JACOBIANS[name]
    x = point(size)
    found = hog.sparse_jacobian(f, x)
    dense = torch.autograd.functional.jacobian(f, x).reshape(-1, size)
    torch.testing.assert_close(found.to_dense(), dense, rtol=1e-10, atol=1e-14)
    counts = counted(monkeypatch)
    given = hog.sparse_jacobian(f, x, sparsity=found)
    assert sum(counts) <= products + 1
    assert torch.equal(given.col_indices(), found.col_indices())
    torch.testing.assert_close(given.to_dense(), dense, rtol=1e-10, atol=1e-14)


def test_ten_thousand_unknowns_take_some_products(monkeypatch):
    u, counts = point(10_000), counted(monkeypatch)
    J = hog.sparse_jacobian(stencil, u)
    assert sum(counts) < 120
    assert len(J.values()) == 5 * 10_000 - 4 * 100
    diagonal = J.values()[
        J.col_indices() == torch.arange(10_000).repeat_interleave(J.crow_indices().diff())
    ]
    torch.testing.assert_close(diagonal, u.exp() - 4)
    assert bool((J.values() == 1).sum() == 4 * 10_000 - 4 * 100)


def test_operators_over_data_are_sparse_too():
    embedding = nn.Embedding(12, 2).double()
    loss = hog.functional_loss(embedding, lambda y, t: (y - 1).pow(4).sum())
    batches = [(torch.tensor([1, 2]), 0), (torch.tensor([2, 7]), 0)]
    H = hog.HessianOperator(loss, hog.trainable_params(embedding), batches, reduction="sum")
    sparse = H.to_sparse()
    torch.testing.assert_close(sparse.to_dense(), H.to_dense())
    assert len(sparse.values()) == 6
    square = H @ H
    torch.testing.assert_close(square.to_sparse(chunk_size=2).to_dense(), square.to_dense())


def test_another_point_may_have_another_pattern():
    def relus(x):
        return x.relu().pow(3).sum() + (x[:-1] * x[1:]).relu().pow(2).sum()

    for x in (-torch.ones(6), torch.tensor([1.0, -1, 1, 1, -1, 1]), torch.ones(6)):
        found = hog.sparse_hessian(relus, x).to_dense()
        torch.testing.assert_close(found, hog.hessian(lambda x, _: relus(x), x, ()))


# function of x and c, size, dtype: the entries that c = 0 hides are small beside others
HIDDEN = {
    "small rows beside a huge one": (
        lambda x, c: x**2 * F.pad(x.new_full((1,), 1e12), (0, 29), value=1e-6) + 1e-6 * c * x.roll(1),
        30, torch.float64,
    ),
    "small entries beside large ones": (lambda x, c: 1e4 * x**2 + c * x.roll(1), 30, torch.float32),
    "an entry 710 columns further": (lambda x, c: x[100 + 710 * c].view(1), 900, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_remembered_pattern_is_not_trusted(name):
    f, size, dtype = HIDDEN[name]
    x = point(size).to(dtype)
    narrow = hog.sparse_jacobian(f, x, 0)
    dense = torch.autograd.functional.jacobian(lambda x: f(x, 1), x)
    torch.testing.assert_close(hog.sparse_jacobian(f, x, 1).to_dense(), dense, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="pattern with all entries"):
        hog.sparse_jacobian(f, x, 1, sparsity=narrow)


def weighted(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x.view(-1, 3) @ x.new_tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]).sin()).sin().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.diff().square().sum(),  # equal and opposite entries
        lambda x: (50 * x.view(-1, 3)).softmax(1).square().sum(),  # entries of rounding alone
        lambda x: (30 * x.view(-1, 3)).logsumexp(1).sum(),
        weighted,
    ],
)
def test_rounding_is_no_wrong_pattern(f, dtype):
    for seed in range(4):
        x = point(300).roll(seed).to(dtype)
        dense = hog.hessian(lambda x, _: f(x), x, ())
        atol = 100 * torch.finfo(dtype).eps * float(dense.abs().max())
        atol = 0.05 * float(dense.abs().max()) if f is weighted else atol
        for given in (None, Band(2)):
            found = hog.sparse_hessian(f, x, sparsity=given)
            torch.testing.assert_close(found.to_dense(), dense, rtol=0.05, atol=atol)


def test_a_sparse_hessian_inside_torch_compile():
    step = torch.compile(lambda x: hog.sparse_hessian(chain, x).to_dense() * 2, backend="eager")
    torch.testing.assert_close(step(point(9)), 2 * hog.sparse_hessian(chain, point(9)).to_dense())


def test_patterns_of_other_kinds_of_tensors():
    with torch.inference_mode():
        made = torch.ones(9, 9)
    rows = torch.ones(9, 9).to_sparse(1)
    for sparsity in (made, rows):
        found = hog.sparse_hessian(chain, point(9), sparsity=sparsity)
        assert torch.equal(found.to_dense(), hog.sparse_hessian(chain, point(9)).to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_patterns_hold_more_than_the_matrix(dtype):
    x = point(9).to(dtype)
    dense = hog.hessian(lambda x, _: chain(x), x, ())
    for sparsity in (
        Band(1),
        Band(3),
        torch.ones(9, 9),
        torch.ones(9, 9).to_sparse(),
        DiagonalBlocks(9),
    ):
        found = hog.sparse_hessian(chain, x, sparsity=sparsity)
        torch.testing.assert_close(found.to_dense(), dense)
        assert found.dtype == dtype


def hessian(f, **options):
    return lambda: hog.sparse_hessian(f, point(9), **options)


def laplacian(f=chain, x=None, **options):
    return lambda: hog.laplacian(f, point(9) if x is None else x, **options)


def of_opposite_signs(x):
    return x[:, 0].sign() * x[:, 1] * x[:, 2]


test_what_is_refused = refused({
    "too narrow a band": (hessian(chain, sparsity=Band(0)), ValueError, "pattern with all entries.*row"),
    "another shape": (hessian(chain, sparsity=torch.ones(3, 3)), ValueError, r"shape \[9, 9\], got \[3, 3\]"),
    "a name": (hessian(chain, sparsity="band"), TypeError, "sparsity: expected a tensor"),
    "a negative band": (hessian(chain, sparsity=Band(-1)), ValueError, "at least 0, got -1"),
    "no chunk": (hessian(chain, chunk_size=0), ValueError, "chunk_size: .* at least 1"),
    "no scalar": (hessian(lambda x: x * 2), ValueError, "scalar"),
    "no function": (hessian(3), TypeError, "func: expected a function"),
    "random numbers": (hessian(lambda x: (x * torch.rand(9) * x).sum()), RuntimeError, "random|determin"),
    "not finite": (hessian(lambda x: (x - x).sqrt().sum()), ArithmeticError, "finite"),
    "integers": (lambda: hog.sparse_jacobian(lambda x: x, torch.arange(3)), TypeError, "x: expected a .*floating"),
    "a wrong pattern of points": (laplacian(sparsity=DiagonalBlocks(3)), ValueError, "pattern with all entries"),
    "entries that cancel over points": (
        laplacian(of_opposite_signs, torch.tensor([[1.0, 2, 3], [-1, 2, 3]]), sparsity=Band(0)), ValueError, "pattern"
    ),
    "two kinds of directions": (laplacian(sparsity="auto", num_projections=2), ValueError, "neither coefficients"),
    "another word": (laplacian(sparsity="found"), TypeError, "sparsity: expected a tensor"),
    "vmap": (
        lambda: torch.func.vmap(lambda x: hog.laplacian(chain, x, sparsity="auto")[1])(torch.ones(1, 9)),
        NotImplementedError, "outside of torch.func transforms",
    ),
})  # fmt: skip


# ---- Laplacians of functions with sparse Hessians


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def directions(monkeypatch):
    from hoglib.curvature.points import point_derivatives

    counts, kind = [], point_derivatives.Directions

    def spy(vectors, *rest):
        counts.append(len(vectors))
        return kind(vectors, *rest)

    monkeypatch.setattr(point_derivatives, "Directions", spy)
    return counts


@pytest.mark.parametrize("sparsity", ["auto", DiagonalBlocks(2)])
@pytest.mark.parametrize("mode", ["collapsed", "nested"])
def test_a_laplacian_of_particles_takes_the_directions_of_one(sparsity, mode, monkeypatch):
    model, x = net(), point(5 * 24).view(5, 24)

    def f(x):
        return model(x.unflatten(1, (12, 2))).sum((1, 2))

    value, expected = hog.laplacian(f, x, mode=mode)
    counts = directions(monkeypatch)
    for _ in range(3):  # the second is compared, the third is not
        found = hog.laplacian(f, x, sparsity=sparsity, mode=mode, return_gradient=True)
        torch.testing.assert_close(found[0], value)
        torch.testing.assert_close(found[1], expected)
    assert counts == [2] * 3
    grads = [
        torch.autograd.grad(y.square().sum(), model[0].weight)[0] for y in (expected, found[1])
    ]
    torch.testing.assert_close(*grads)


def test_a_laplacian_of_one_point():
    x = point(9)
    found = hog.laplacian(chain, x, sparsity=Band(1))
    torch.testing.assert_close(found, hog.laplacian(chain, x))


class Rolled(nn.Module):
    def forward(self, x, by=0):
        return (x * x.roll(by, 1)).sin().sum(1)

    def other(self, x):
        return self(x, 1)


def rolled(by):
    return lambda x: Rolled()(x, by)


# what is called before, what is called then
CHANGES = {
    "a closure": lambda f: (rolled(0), rolled(1), ()),
    "a method": lambda f: (f.forward, f.other, ()),
    "a number in args": lambda f: (f, f, (1,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_laplacian_of_another_function_has_another_pattern(name):
    first, second, args = CHANGES[name](Rolled())
    x = point(60).view(5, 12)
    for _ in range(2):
        hog.laplacian(first, x, sparsity="auto")
    found = hog.laplacian(second, x, *args, sparsity="auto")
    torch.testing.assert_close(found, hog.laplacian(second, x, *args))


def test_a_laplacian_with_a_pattern_that_holds_no_more_is_an_estimate():
    def f(x, t):
        return x.pow(3).sum(1) + t * (x[:, :-1] * x[:, 1:]).sin().sum(1)

    x, zero, one = point(12).expand(4000, 12), torch.zeros(()), torch.ones(())
    for _ in range(2):
        hog.laplacian(f, x, zero, sparsity="auto")
    _, found = hog.laplacian(f, x, one, sparsity="auto")
    _, expected = hog.laplacian(f, x, one)
    assert 0 < float(found.std()) < 10
    torch.testing.assert_close(found.mean(), expected.mean(), rtol=0, atol=0.5)
    torch.testing.assert_close(hog.laplacian(f, x, one, sparsity="auto")[1], expected)


def test_a_laplacian_draws_random_numbers_as_without_a_pattern():
    def f(x):
        return F.dropout(x, 0.5).pow(3).sum(1)

    found = []
    for sparsity in (None, "auto"):
        torch.manual_seed(0)
        found.append(hog.laplacian(f, point(60).view(5, 12), sparsity=sparsity))
    torch.testing.assert_close(*found)
