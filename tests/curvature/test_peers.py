"""Operators against those of curvlinops, where that is installed (`make bench-full` brings it) and right."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import MODELS, draw, problem

curvlinops = pytest.importorskip(
    "curvlinops", reason="curvlinops is optional", exc_type=ImportError
)
PAIRS = {
    "Hessian": (hog.HessianOperator, curvlinops.HessianLinearOperator),
    "Gauss-Newton": (hog.GGNOperator, curvlinops.GGNLinearOperator),
    "empirical Fisher": (
        lambda *args: hog.FisherOperator(*args, kind="empirical"),
        curvlinops.EFLinearOperator,
    ),
}
# attention has no second derivative in torch, and curvlinops runs vmap through norms
RIGHT = [name for name in MODELS if "transformer" not in name and "Norm" not in name and name != "LSTM"]  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", RIGHT)
def test_the_same_matrix(name, kind):
    ours, theirs = PAIRS[kind]
    loss, params, batch = problem(name)
    data = [tuple(t[:4] for t in batch), tuple(t[4:] for t in batch)]  # uneven
    A = ours(loss, params, data)
    B = theirs(loss.model, nn.CrossEntropyLoss(), list(params.values()), data)
    V = draw(A.shape[0], 2)
    assert_close(A @ V, B @ V)
    assert_close(
        torch.as_tensor(A.to_scipy() @ V.numpy()), torch.as_tensor(B.to_scipy() @ V.numpy())
    )
