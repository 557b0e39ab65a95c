"""Losses, parameters and batches of the curvature tests, and matrices to compare with, by differences."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.curvature import LinearOperator
from hoglib.curvature.algebra.vector_space import Space
from tests.models import Fn, Tied, attending
from tests.oracles import gradient

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=seeded(seed))


def last_of_lstm():
    def run(net, x):
        return net.head(net.lstm(x)[0][:, -1])

    return Fn(run, lstm=nn.LSTM(2, 2, batch_first=True), head=nn.Linear(2, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )


# name -> (makes the model, the shape of an input); three outputs each
MODELS = {
    "layers of hoglib": (lambda: nn.Sequential(hog.nn.LinearAct(3, 4, act="tanh"), hog.nn.LinearAct(4, 4, act="swish"), hog.nn.Linear(4, 3)), (3,)),
    "ReLU": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)), (3,)),
    "CNN with BatchNorm in eval": (lambda: cnn().eval(), (1, 3, 3)),
    "CNN with BatchNorm in train": (cnn, (1, 3, 3)),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 3)), (3,)),
    "GroupNorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.GELU(), nn.Linear(4, 3)), (3,)),
    "transformer block": (lambda: attending(2, 3, 3), (3, 2)),
    "LSTM": (last_of_lstm, (3, 2)),
    "tied and frozen": (lambda: Tied(3), (3,)),
}  # fmt: skip
SMOOTH = [name for name in MODELS if name != "ReLU"]
CRITERIA = {
    "cross entropy": (F.cross_entropy, lambda n: torch.arange(n) % 3),
    "mean square": (F.mse_loss, lambda n: draw(n, 3, seed=5)),
    "binary cross entropy": (F.binary_cross_entropy_with_logits, lambda n: draw(n, 3, seed=6).sigmoid()),
}  # fmt: skip


def problem(name, criterion="cross entropy", n=7):
    """(loss, params, batch) in float64, the same at every call."""
    make, shape = MODELS[name]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = make().double()
    torch.set_rng_state(state)
    function, targets = CRITERIA[criterion]
    loss = hog.functional_loss(model, function)
    return loss, hog.trainable_params(model), (draw(n, *shape, seed=3), targets(n))


def flat(tree):
    return torch.cat([leaf.detach().reshape(-1) for leaf in torch.utils._pytree.tree_leaves(tree)])


def nested_to_matrix(H, params):
    """The nested dict of `hessian` as [P, P]."""
    return torch.cat([
        torch.cat([H[a][b].detach().reshape(params[a].numel(), -1) for b in params], 1) for a in params
    ])  # fmt: skip


def columns(function, params, step=1e-4):
    """d function / d params [M, P] by central differences of the fourth order, column by column."""
    x = flat(params)

    def at(vector):
        parts = vector.split([p.numel() for p in params.values()])
        return flat(function({n: part.reshape(p.shape) for (n, p), part in zip(params.items(), parts, strict=True)}))  # fmt: skip

    found = []
    for i in range(len(x)):
        e = torch.zeros_like(x)
        e[i] = step
        near, far = at(x + e) - at(x - e), at(x + 2 * e) - at(x - 2 * e)
        found.append((8 * near - far) / (12 * step))
    return torch.stack(found, 1)


def dense_hessian(loss, params, batch):
    return columns(lambda p: gradient(lambda p: loss(p, batch), p), params)


def dense_ggn(loss, params, batch):
    """J^T H J, J and H by differences."""
    with torch.no_grad():
        J = columns(lambda p: loss.outputs(p, batch), params)
        outputs = loss.outputs(params, batch)
    of_outputs = lambda p: loss.criterion(p["outputs"], batch)  # noqa: E731
    H = columns(lambda p: gradient(of_outputs, p), {"outputs": outputs})
    return J.T @ H @ J


@cache
def expected_matrix(matrix, name, criterion="cross entropy", n=7):
    """`matrix`, dense_hessian or dense_ggn, of a problem: computed once for all tests."""
    return matrix(*problem(name, criterion, n))


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def matrix(eigenvalues, seed=0):
    """A symmetric matrix of these eigenvalues, its eigenvectors drawn by seed."""
    Q, _ = torch.linalg.qr(draw(len(eigenvalues), len(eigenvalues), seed=seed))
    return Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=F64)) @ Q.T


def quadratic(A, dtype=F64):
    """An operator whose matrix is A: the Hessian of x A x / 2."""
    A = A.to(dtype)
    func = lambda p, b: p @ A @ p / 2 * b.mean()  # noqa: E731
    return hog.HessianOperator(func, torch.zeros(len(A), dtype=dtype), torch.ones(1, dtype=dtype))


class Given(LinearOperator):
    """A matrix as an operator, whose products cost nothing."""

    def __init__(self, A):
        super().__init__(Space(torch.zeros(len(A), dtype=A.dtype)))
        self.A = A

    def _products(self, rows):
        return rows @ self.A
