"""Penalties of critics that change, cut, cast or run again what they are given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hoglib import penalties
from tests.penalties.critics import draw, generator

F64 = torch.float64
X, FAKE = draw(5, 4), draw(5, 4, seed=1)


def weights(func, model):
    """The gradients of a penalty by the parameters."""
    return torch.autograd.grad(func(), list(model.parameters()), allow_unused=True)


def same(a, b):
    for p, q in zip(a, b, strict=True):
        assert (p is None) == (q is None)
        assert p is None or torch.allclose(p, q, rtol=1e-12, atol=1e-14)


CHECKPOINTED = {
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)),
    "batch norm in eval mode": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
    "transformer": lambda: nn.Sequential(
        nn.Linear(4, 6),
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
        nn.Flatten(),
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_what_a_checkpoint_runs_again_in_backward_runs_with_the_same_operations(name):
    block, last = CHECKPOINTED[name]().to(F64), nn.Linear(6, 1).to(F64)
    model = nn.ModuleList([block, last])
    plain = weights(lambda: penalties.r1(lambda x: last(block(x).tanh()), X), model)
    again = weights(
        lambda: penalties.r1(lambda x: last(checkpoint(block, x, use_reentrant=False).tanh()), X),
        model,
    )
    same(plain, again)


def test_forces_through_a_checkpoint():
    block, last = CHECKPOINTED["layer norm"]().to(F64), nn.Linear(6, 1).to(F64)
    model = nn.ModuleList([block, last])

    def loss(run):
        return penalties.forces(lambda x: last(run(x).tanh()).sum(), X)[1].square().sum()

    plain = weights(lambda: loss(block), model)
    same(plain, weights(lambda: loss(lambda x: checkpoint(block, x, use_reentrant=False)), model))
