"""Rows of matrices side by side: right through stand-ins and custom Functions, as many at once as asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian as by_rows
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.maps import rows as engine
from hoglib.penalties import forces
from tests.oracles import relative
from tests.rows import rows

SIZES = [1, 2, 7, None]  # of chunks, which do not divide the numbers of rows


class Inner(torch.autograd.Function):
    """3 g x^2, without a rule for vmap."""

    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return 3 * g * x**2

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        return 3 * h * x**2, 6 * h * g * x


class Mapped(torch.autograd.Function):
    """3 g x^2, with a wrong rule for vmap."""

    @staticmethod
    def forward(g, x):
        return 3 * g * x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        return 3 * h * x**2, 6 * h * g * x

    @staticmethod
    def vmap(info, in_dims, g, x):
        return 3 * g * x**2 + 1, in_dims[0]


def cube_by(derivative):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return derivative.apply(g, *ctx.saved_tensors)

    return Cube.apply


class Reads(Inner):
    """The same, whose backward reads numbers."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def forward(g, x):
        return 3 * g * x**2

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        assert float(h.detach().abs().sum()) < 1e9
        return 3 * h * x**2, 6 * h * g * x


@torch.library.custom_op("hoglib_rows::cube", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x**3


operator.register_autograd(
    lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
CUBE = lambda p: (p**3).sin().sum()  # noqa: E731
FUNCTIONS = {  # the function, and one of the same values whose rows torch takes one by one
    "products": (lambda p: (X * p).tanh().sum(), None),
    "cdist, a stand-in": (
        lambda p: torch.cdist(X[0] * p, X[1]).exp().sum(),
        lambda p: (X[0] * p).unsqueeze(1).sub(X[1]).square().sum(-1).sqrt().exp().sum(),
    ),
    "layer norm's weight": (lambda p: F.layer_norm(X * p, (3,), p, p).pow(3).sum(), None),
    "batch norm": (lambda p: F.batch_norm((X * p).mT, None, None, p, p, True).pow(3).sum(), None),
    "attention": (
        lambda p: F.scaled_dot_product_attention(X * p, X, X * p).square().sum(),
        lambda p: ((X * p) @ X.mT / 3**0.5).softmax(-1).matmul(X * p).square().sum(),
    ),
    "a Function without a rule": (lambda p: cube_by(Inner)(p).sin().sum(), CUBE),
    "a Function that reads": (lambda p: cube_by(Reads)(p).sin().sum(), CUBE),
    "an operator": (lambda p: operator(p).sin().sum(), CUBE),
    "linear in a part": (lambda p: p[0] + p[1] ** 2, None),
}


@pytest.fixture
def passes(monkeypatch):
    """How many vectors are multiplied side by side, or by themselves (-1)."""
    found = []
    together, alone = engine.Rows._side_by_side, engine.Rows._one_by_one

    def side_by_side(self, vectors, *args):
        found.append(len(vectors[0]))
        return together(self, vectors, *args)

    def one_by_one(self, vectors):
        found.extend([-1] * len(vectors[0]))
        return alone(self, vectors)

    monkeypatch.setattr(engine.Rows, "_side_by_side", side_by_side)
    monkeypatch.setattr(engine.Rows, "_one_by_one", one_by_one)
    return found


@rows("name", FUNCTIONS)
def test_hessians_of_functions(name):
    func, same = FUNCTIONS[name]
    p = torch.tensor([0.7, -0.4, 1.1]).double()
    expected = by_rows(same or func, p)
    for size in SIZES:
        assert relative(hog.hessian(func, p, chunk_size=size), expected) < 1e-12
    v = torch.randn(3, 8).double()
    assert relative(hog.hvp(func, p, v)[1], expected @ v) < 1e-12
    H = hog.HessianOperator(lambda p, _: func(p), p, X[0])
    assert relative(H.to_dense(chunk_size=2), expected) < 1e-12


def test_a_wrong_rule_for_vmap_is_noticed(passes):
    func = lambda p: cube_by(Mapped)(p).sin().sum()  # noqa: E731
    p = torch.tensor([0.7, -0.4, 1.1]).double()
    for _ in range(3):
        assert_close(hog.hessian(func, p), by_rows(CUBE, p))
    assert passes == [3] + 9 * [-1]


class ByNumber(Mapped):
    """A rule that is wrong for two vectors, and for the last of more than four."""

    @staticmethod
    def vmap(info, in_dims, g, x):
        found, size = 3 * g * x**2, info.batch_size
        return torch.cat([found[:-1], found[-1:] * (2 if size == 2 or size > 4 else 1)]), 0


@pytest.mark.parametrize("size", [4, 6], ids=["the last ones are fewer", "more than before"])
def test_a_rule_that_is_wrong_for_other_numbers_of_vectors_is_noticed(size):
    func = lambda p: cube_by(ByNumber)(p).sin().sum()  # noqa: E731
    p = torch.linspace(-1, 1, 6).double()
    for call in range(3):
        found = hog.hessian(func, p, chunk_size=size if call == 2 or size == 4 else 3)
        assert_close(found, by_rows(CUBE, p))


def test_numbers_that_are_not_finite_do_not_count_against_vmap(passes):
    func = lambda p: p.sqrt().sum()  # noqa: E731
    with pytest.warns(UserWarning, match="infinite or NaN"):
        assert hog.hessian(func, torch.tensor([0.0, 1.0]))[1, 1] == -0.25
    hog.hessian(func, torch.tensor([2.0, 1.0]))
    assert passes == [2, -1, -1, 2]


def test_as_many_at_once_as_asked_for(passes):
    p = torch.randn(4, 5).double()
    func = lambda p: p.tanh().prod() + p.sum() ** 3  # noqa: E731
    hog.hessian(func, p, chunk_size=7)
    hog.hessian(func, p, chunk_size=1)
    hog.hessian(func, p)
    assert passes == [7, 7, 6, *20 * [-1], 20]
    for call in (hog.hessian, forces):
        options = {} if call is hog.hessian else {"hessian": True}
        with pytest.raises(hog.errors.ArgumentValueError, match="chunk_size"):
            call(func, p, chunk_size=0, **options)


def test_rows_differentiate_the_part_of_their_own_leaf_alone():
    noted = []

    class Noted(Mapped):
        @staticmethod
        def vmap(info, in_dims, g, x):
            noted.append(info.batch_size)
            return 3 * g * x**2, in_dims[0]

    p = {name: torch.linspace(-1, 1, n).double() for name, n in (("a", 2), ("b", 3), ("c", 4))}

    def func(p, _):
        return cube_by(Noted)(p["b"]).sin().sum() + (p["a"].prod() * p["c"] ** 3).sum()

    H = hog.HessianOperator(func, p, X[0])
    one_by_one = torch.stack([H @ e for e in torch.eye(9).double()])
    noted.clear()
    for size, expected in ((None, [3]), (4, [2, 1])):
        assert_close(H.to_dense(chunk_size=size), one_by_one)
        assert noted == expected
        noted.clear()


def test_large_graphs_take_fewer_rows_at_once(passes, monkeypatch):
    monkeypatch.setattr(engine, "AT_ONCE", 2**14)
    monkeypatch.setattr(engine, "ALONE", 2**13)
    p = torch.randn(8)
    func = lambda p, x: (x * p).tanh().sum()  # noqa: E731
    for rows_of_x in (2, 20, 200):
        hog.hessian(func, p, torch.randn(rows_of_x, 8))
    first, second, *others = passes
    assert first == 8 > second > 1
    assert -1 in others


def test_remat_takes_one_vector_at_a_time(passes):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = X[0], X[0, :, :1]
    H = hog.hessian(loss, params, batch, remat=["0"])
    assert set(passes) == {-1}
    assert_close(H, torch.func.hessian(loss)(params, batch))


def test_many_rows_are_taken_from_the_columns():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 28), nn.Tanh(), nn.Linear(28, 28), nn.Tanh(), nn.Linear(28, 3)
    ).double()
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    batch = torch.randn(5, 10).double(), torch.arange(5) % 3
    expected = torch.func.hessian(loss)(params, batch)
    assert_close(hog.hessian(loss, params, batch), expected)
    assert_close(
        hog.hessian(loss, params, batch, blocks="module")["2.bias"]["2.weight"],
        expected["2.bias"]["2.weight"],
    )


def test_matrices_of_a_model_by_blocks_of_vectors(passes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 3)).double()
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    batches = [(X[0], torch.arange(5) % 3), (X[1, :3], torch.arange(3))]
    P = sum(p.numel() for p in params.values())
    for kind in (hog.HessianOperator, hog.GGNOperator, hog.FisherOperator):
        A = kind(loss, params, batches)
        one_by_one = torch.stack([A @ e for e in torch.eye(P).double()])
        passes.clear()
        assert_close(A.to_dense(), one_by_one)
        assert_close(A.to_dense(chunk_size=7), one_by_one)
        assert_close(A @ torch.eye(P).double()[:, 5:16], one_by_one[:, 5:16])
        assert -1 not in passes, kind
    J, outputs = hog.JacobianOperator(model, params, X[0]), 3 * 5
    one_by_one = torch.stack([J @ e for e in torch.eye(P).double()], 1)
    passes.clear()
    assert_close(J @ torch.eye(P).double(), one_by_one)
    assert_close(J.T @ torch.eye(outputs).double(), one_by_one.T)
    assert_close(J.to_dense(chunk_size=5), one_by_one)
    assert -1 not in passes
    G = hog.curvature.ggn(loss, params, batches[0], chunk_size=5)
    expected = hog.GGNOperator(loss, params, batches[:1]).to_dense()
    flat = torch.cat(
        [
            torch.cat(
                [G[a][b].flatten(a_dims := p.dim()).flatten(0, a_dims - 1) for b in params], 1
            )
            for a, p in params.items()
        ]
    )
    assert_close(flat, expected)


def pairs(x):
    apart = x.unsqueeze(-2) - x.unsqueeze(-3)
    return (apart.square().sum(-1) + 0.1).sqrt().exp().sum((-1, -2))


@rows("chunk_size", SIZES)
def test_force_constants(chunk_size):
    options = {"hessian": True, "chunk_size": chunk_size}
    index = torch.tensor([0, 1, 1, 0, 1])
    expected = [by_rows(pairs, x) for x in X]
    assert_close(forces(pairs, X, **options).hessian, torch.stack(expected))
    assert_close(forces(pairs, X[0], **options).hessian, expected[0])
    of_graphs = lambda x: torch.stack([pairs(x[index == k]) for k in range(2)])  # noqa: E731
    found = forces(of_graphs, X[0], batch=index, **options).hessian
    assert_close(found, [by_rows(pairs, X[0][index == k]) for k in range(2)])
    tree = forces(lambda t: pairs(t["x"] * t["s"]), {"x": X[0], "s": X[1, 0]}, **options).hessian
    assert_close(tree["x"]["s"], by_rows(lambda x, s: pairs(x * s), (X[0], X[1, 0]))[0][1])


@rows("stand_ins", [True, False])
def test_a_loss_of_force_constants_is_trained(stand_ins):
    torch.manual_seed(0)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def plain(x):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (centred / scale * weight).tanh().square().sum()

    normed = lambda x: F.layer_norm(x, (3,), weight).tanh().square().sum()  # noqa: E731
    energy = normed if stand_ins else plain
    H = forces(energy, X[0, :2], hessian=True, stand_ins=stand_ins).hessian
    (g,) = torch.autograd.grad(H.square().sum(), weight)
    expected = by_rows(plain, X[0, :2], create_graph=True)
    assert_close(H, expected)
    assert_close(g, torch.autograd.grad(expected.square().sum(), weight)[0])


@rows("call", [
    lambda f, x: hog.hessian(f, x),
    lambda f, x: hog.hvp(f, x, x, mode="forward-over-reverse"),
    lambda f, x: hog.jvp(f, x, x),
    lambda f, x: hog.laplacian(f, x),
], ids=["hessian", "hvp", "jvp", "laplacian"])  # fmt: skip
def test_functions_that_close_over_a_variable_without_a_value(call):
    def loss(x):
        return later(x) if x.numel() > 3 else x.pow(3).sum()

    call(loss, torch.ones(3))
    later = torch.sum
    assert loss(torch.ones(4)) == 4
