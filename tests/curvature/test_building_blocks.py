"""Operators of what a user has: functions, dense matrices, parts of others, products, Jacobians; beside dense
matrices."""

import pickle
from collections import UserDict

import pytest
import scipy.sparse.linalg
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from hoglib import errors
from hoglib.curvature import LinearOperator
from hoglib.curvature.batches.data import rows_of
from tests.curvature.problems import F64, columns, draw, flat, matrix, problem, relative, seeded
from tests.functions import BackwardWithoutGrad, Detached, OnceDifferentiable
from tests.refused import refused
from tests.rows import rows

of, dense = LinearOperator.from_matvec, LinearOperator.from_dense
M = matrix([1.0 + k / 4 for k in range(12)])
X = torch.linalg.cholesky(M)
LIKE = {"a": torch.zeros(2, 3, dtype=F64), "b": torch.zeros(6, dtype=F64)}


def nested(v):
    product = M @ torch.cat([v["a"].reshape(6, *v["b"].shape[1:]), v["b"]])
    return {"a": product[:6].reshape(v["a"].shape), "b": product[6:]}


def linear(p, batch):
    return batch[0] @ p


def jacobian(matrix, rows=12):
    """Of a linear function, over batches of so many outputs."""
    return hog.JacobianOperator(linear, 0 * M[0], [(part,) for part in matrix.split(rows)])


def whole(a):
    """M as the rows and columns 6 to 18 of another matrix."""
    other = torch.block_diag(torch.ones(6, 6, dtype=F64), M)
    params = {"x": torch.zeros(6, dtype=F64), "y.a": 0 * M[0]}
    return dense(other, params).submatrix(a)


BLOCKS = {
    "a function": lambda: of(lambda v: M @ v, 0 * M[0]),
    "a function of a dict, and blocks": lambda: of(nested, LIKE, matmat=nested),
    "a function that changes its vector": lambda: of(lambda v: v.copy_(M @ v), 0 * M[0]),
    "a matrix": lambda: dense(M),
    "a matrix like a dict": lambda: dense(M, LIKE),
    "rows and columns by pattern": lambda: whole("y.*"),
    "rows and columns by function": lambda: whole(lambda name: name != "x"),
    "J.T @ J": lambda: (lambda J: J.T @ J)(jacobian(X.T, 7)),
    "J @ J.T": lambda: (lambda J: J @ J.T)(jacobian(X)),
    "J @ S @ J.T": lambda: (lambda J: J @ dense(2 * torch.eye(12, dtype=F64)) @ J.T / 2)(jacobian(X, 5)),
    "a product of three": lambda: (lambda S: S @ dense(M) @ S - dense((X + X.T) @ M @ (X + X.T) - M))(dense(X + X.T)),
    "a sum": lambda: dense(M / 2) + of(lambda v: M @ v / 2, 0 * M[0]),
    "damped": lambda: dense(M - 0.5 * torch.eye(12, dtype=F64)).damped(0.5),
}  # fmt: skip


@rows("make", BLOCKS.values(), ids=BLOCKS)
def test_they_have_all_algorithms(make):
    A, b = make(), draw(12, 2)
    values, vectors = torch.linalg.eigh(M)
    assert_close(A.to_dense(), M)
    assert_close(A.matvec(b), M @ b)
    assert_close(A.eigsh(3).values, values[-3:])
    assert_close(A.solve(b, tol=1e-12), torch.linalg.solve(M, b), rtol=1e-6, atol=1e-8)
    assert_close(A.trace(12, method="xtrace"), M.trace())
    assert_close(A.diagonal(24, method="xdiag"), M.diagonal())
    logarithm = vectors @ (values.log()[:, None] * (vectors.T @ b))
    assert_close(A.matrix_function(b, torch.log), logarithm)
    assert_close(A.low_rank(12).values.sort().values, values)
    found, error = A.logdet(20, generator=seeded(), return_error=True)
    assert abs(found - M.logdet()) < 5 * error
    mean, error = A.spectral_density(20, generator=seeded()).average(lambda x: x)
    assert abs(mean - values.mean()) < 5 * error + 1e-9
    assert_close(torch.as_tensor(scipy.sparse.linalg.eigsh(A.to_scipy(), 2)[0]), values[-2:])


Z = torch.zeros(3)
REFUSED = {
    "another length": (lambda: of(lambda v: v[:2], Z).trace(), ValueError, r"matvec\(v\): expected \(3,\).*structure of like"),
    "NaN": (lambda: of(lambda v: v / 0, Z) @ Z, errors.NonFiniteError, "GivenOperator @ v: expected finite products"),
    "not symmetric": (lambda: of(lambda v: v.roll(1), Z) @ Z, ValueError, "matvec: expected the products of a symmetric"),
    "not linear": (lambda: of(lambda v: v + 1, Z).eigsh(1), ValueError, "matvec: .*check_symmetric=False"),
    "other blocks": (lambda: of(lambda v: v, Z, matmat=lambda V: 2 * V) @ Z, ValueError, "matmat those of each column"),
    "not like it": (lambda: dense(torch.eye(2), Z), ValueError, r"expected \[3, 3\].*got \[2, 2\]"),
    "no symmetric matrix": (lambda: dense(torch.ones(3, 3).triu()), ValueError, "matrix: expected a finite, symmetric one"),
    "a matrix with NaN": (lambda: dense(torch.eye(3) / 0), ValueError, "matrix: expected a finite, symmetric one"),
    "no name": (lambda: whole("z"), ValueError, "names: expected patterns of x, y.a, .*got z"),
    "names of a tensor": (lambda: dense(M).submatrix("x"), TypeError, "params: expected a dict"),
    "other spaces": (lambda: jacobian(X[:5]) @ jacobian(X[:5]), ValueError, r"A @ B: .*got \(5, 12\) and \(5, 12\)"),
    "eigenvalues of a Jacobian": (lambda: jacobian(X).eigsh(2), errors.UnsupportedError, "JacobianOperator.eigsh: expected a symmetric operator, .*`lstsq` and `svd` need none"),
    "a vector of a Jacobian": (lambda: jacobian(X).unravel(X[0]), errors.UnsupportedError, "has the structure of params or outputs"),
    "outputs of another size": (lambda: jacobian(X).T @ draw(7), ValueError, "structure of outputs"),
    "a loader that shuffles": (lambda: hog.JacobianOperator(nn.Linear(3, 1), {"bias": Z[:1]}, DataLoader([Z], shuffle=True)), ValueError, "data: expected data in a fixed order"),
    "a slope that is not finite": (lambda: hog.JacobianOperator(lambda p, x: (p * x).sqrt(), Z, Z).to_dense(), errors.NonFiniteError, "infinity in (params|outputs), where the outputs are"),
    "an operator inside of vmap": (lambda: torch.vmap(hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(3), Z).__matmul__)(torch.eye(3)), errors.UnsupportedError, "use the function hvp or ggn_vp there"),
}  # fmt: skip
test_what_is_refused = refused(REFUSED, by=errors.HoglibError)


def test_some_rows_of_a_mapping_are_a_mapping_of_its_type():
    piece = rows_of(UserDict(x=torch.arange(5), y=2), 5, 1, 3)
    assert type(piece) is UserDict
    assert piece["x"].tolist() == [1, 2]
    assert piece["y"] == 2


@rows("name", ["ReLU", "LayerNorm", "tied and frozen", "LSTM"])
def test_a_jacobian_over_data(name):
    """Of a batch, with a graph that is kept or not, of loaders, and after a step of the parameters."""
    loss, params, (x, y) = problem(name)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    made = [
        hog.JacobianOperator(loss, params, (x, y)),
        hog.JacobianOperator(loss, params, (x, y), memory_limit=0),
        hog.JacobianOperator(loss, params, loader),
        hog.JacobianOperator(loss.model, params, [(x[:2],), (x[2:],)]),
    ]
    for _ in range(2):
        with torch.no_grad():
            D = columns(lambda p: loss.outputs(p, (x, y)), params)
        for J in made:
            for A, B in ((J, D), (J.T, D.T), (J @ J.T @ J, D @ D.T @ D), (J, D)):
                v, V, u = draw(B.shape[1]), draw(B.shape[1], 3, seed=1), draw(B.shape[0], 2)
                back = torch.as_tensor(A.to_scipy().rmatmat(u.numpy()))
                for found, expected in ((A @ v, B @ v), (A @ V, B @ V), (back, B.T @ u)):
                    assert relative(found, expected) < 1e-8
            like = {n: draw(*p.shape) for n, p in params.items()}
            assert relative(J @ like, (D @ flat(like)).view(7, 3)) < 1e-8
            assert relative(flat(J.T @ draw(7, 3)), D.T @ draw(7, 3).flatten()) < 1e-8
        for p in params.values():
            p.data.mul_(0.9)


def test_what_changes_between_passes_is_told():
    x, unchecked = torch.randn(6, 3), of(lambda v: M @ v.flip(0), M[0], check_symmetric=False)
    assert_close(unchecked.to_dense(), M.flip(1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout())
    with pytest.raises(errors.NondeterministicError, match=r"1 \(Dropout\)"):
        hog.JacobianOperator(model, hog.trainable_params(model), x).to_dense()
    data = [(x[:3],), (x[3:],)]
    J = hog.JacobianOperator(linear, torch.ones(3), data)
    assert_close(pickle.loads(pickle.dumps(J.T @ J)).to_dense(), x.T @ x)
    data.reverse()
    with pytest.raises(errors.NondeterministicError, match="outputs are stacked"):
        J @ torch.ones(3)


def test_no_second_derivative_is_needed_but_a_graph_is():
    f = lambda function: lambda p, x: function.apply(p * x)  # noqa: E731
    J = hog.JacobianOperator(f(Detached), Z + 1, Z + 2)  # (p x)^3
    assert_close(torch.stack([J @ (Z + 1), J.T @ (Z + 1)]), torch.full((2, 3), 24.0))
    J = hog.JacobianOperator(f(OnceDifferentiable), Z + 1, Z + 2)
    assert_close(J.T @ (Z + 1), Z + 24)
    with pytest.raises(errors.NoSecondDerivative, match="OnceDifferentiable"):
        J @ (Z + 1)
    with pytest.raises(
        errors.NoSecondDerivative, match=r"JacobianOperator @ v: .*names the line; J.T @ u"
    ):
        hog.JacobianOperator(f(BackwardWithoutGrad), Z + 1, Z + 2) @ (Z + 1)
