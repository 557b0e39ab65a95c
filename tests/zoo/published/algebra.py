"""Matrix functions and complex numbers."""

import numpy as np
import torch
from torch.autograd import Function

from tests.functions import by_saved, made, saving_output
from tests.zoo.published.specimen import Specimen


def _square_root(a):
    """The principal square root of a matrix, by the iteration of Denman and Beavers."""
    y, z = a, torch.eye(len(a), dtype=a.dtype, device=a.device)
    for _ in range(20):
        y, z = (y + torch.linalg.inv(z)) / 2, (z + torch.linalg.inv(y)) / 2
    return y


def _sum_with(a, b):
    """The matrix of X -> A X + X B, on X read row by row."""
    m, n = len(a), len(b)
    left = torch.einsum("ik,jl->ijkl", a, torch.eye(n, dtype=a.dtype, device=a.device))
    right = torch.einsum("ik,lj->ijkl", torch.eye(m, dtype=a.dtype, device=a.device), b)
    return (left + right).reshape(m * n, m * n)


def _sylvester(a, b, c):
    """X of A X + X B = C."""
    return torch.linalg.solve(_sum_with(a, b), c.reshape(-1)).reshape(c.shape)


class SquareRoot(Function):
    """Y Y = A; A receives X of Y^T X + X Y^T = G."""

    forward = saving_output(lambda a: _square_root(a))

    backward = by_saved(lambda g, y: _sylvester(y.mT, y.mT, g))


class SquareRootNumpy(SquareRoot):
    """The same, but the equation is solved in NumPy."""

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        matrix = _sum_with(y.mT, y.mT).detach().cpu().numpy()
        x = np.linalg.solve(matrix, g.detach().cpu().reshape(-1).numpy())
        return torch.from_numpy(x).to(g).reshape(g.shape)


class LogDet(Function):
    """y = log det S, S = (A + A^T) / 2, by Cholesky; A receives g S^-1."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return 2 * torch.linalg.cholesky((a + a.mT) / 2).diagonal().log().sum()

    backward = by_saved(lambda g, a: g * torch.linalg.inv((a + a.mT) / 2))


class LogDetSavesInverse(Function):
    """The same, but S^-1 comes from the forward."""

    @staticmethod
    def forward(ctx, a):
        factor = torch.linalg.cholesky((a + a.mT) / 2)
        ctx.save_for_backward(torch.cholesky_inverse(factor))
        return 2 * factor.diagonal().log().sum()

    backward = by_saved(lambda g, inverse: g * inverse)


# y = a b in complex numbers; a receives g conj(b), b receives g conj(a).
ComplexMul = made("ComplexMul", lambda a, b: a * b, lambda g, a, b: (g * b.conj(), g * a.conj()))


class ComplexMulNoConjugate(ComplexMul):
    """y = a b, but with the gradients of real numbers."""

    backward = by_saved(lambda g, a, b: (g * b, g * a))


def _near_identity():
    return (torch.eye(3) + 0.2 * torch.randn(3, 3),)


def _positive_definite():
    a = torch.randn(3, 3)
    return (a @ a.mT + torch.eye(3),)


def _complex():
    return torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)


SPECIMENS = [
    Specimen("matrix square root", SquareRoot, _near_identity),
    Specimen("matrix square root, solved in NumPy", SquareRootNumpy, _near_identity, "fail", ("numpy",)),
    Specimen("log det by Cholesky", LogDet, _positive_definite),
    Specimen("log det by Cholesky, inverse saved", LogDetSavesInverse, _positive_definite, "fail", ("saved_tensors[0]",)),
    Specimen("complex product", ComplexMul, _complex),
    Specimen("complex product, no conjugate", ComplexMulNoConjugate, _complex, "fail", ("expected", "inputs[")),
]  # fmt: skip
