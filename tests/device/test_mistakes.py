"""Tensors on another device than the model: each function names what to move."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hoglib as hog
from hoglib import curvature, meta, penalties
from tests.rows import rows

pytestmark = pytest.mark.gpu


def setting():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).cuda()
    loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
    batch = torch.randn(16, 8), torch.randint(0, 5, (16,))
    return net, loss, params, batch


def operator(loss, params, batch):
    return curvature.GGNOperator(loss, params, [batch])


MISTAKES = {
    "hvp, batch": (lambda net, f, p, b: hog.hvp(f, p, p, b), r"batch\[0\]"),
    "hvp, targets": (lambda net, f, p, b: hog.hvp(f, p, p, (b[0].cuda(), b[1])), r"batch\[1\]"),
    "hvp, vector": (lambda net, f, p, b: hog.hvp(f, p, on_the_cpu(p), on_the_gpu(b)), "v"),
    "ggn_vp, batch": (lambda net, f, p, b: hog.ggn_vp(f, p, p, b), r"batch\[0\]"),
    "operator, vector": (lambda net, f, p, b: operator(f, p, b) @ torch.ones(229), "v"),
    "solve": (lambda net, f, p, b: operator(f, p, b).solve(torch.ones(229), damping=1.0), "b"),
    "penalty": (lambda net, f, p, b: penalties.r1(net, b[0], output=0), "points"),
    "penalty, fake": (lambda net, f, p, b: penalties.wgan_gp(net, b[0].cuda(), b[0]), "fake like"),
    "forces": (lambda net, f, p, b: penalties.forces(lambda x: net(x).sum(-1), b[0]), "points"),
    "laplacian": (lambda net, f, p, b: hog.laplacian(lambda x: net(x).sum(-1), b[0]), "inputs"),
    "MAML": (lambda net, f, p, b: meta.MAML(net, cross_entropy, inner_lr=0.1).loss([(b, b)]), "batch"),
}  # fmt: skip


def on_the_cpu(tree):
    return torch.utils._pytree.tree_map(lambda x: x.detach().cpu(), tree)


def on_the_gpu(tree):
    return torch.utils._pytree.tree_map(torch.Tensor.cuda, tree)


@rows("name", MISTAKES)
def test_what_to_move_is_named(name):
    call, what = MISTAKES[name]
    with pytest.raises(hog.errors.ArgumentValueError, match=rf"{what}.*(cpu|cuda)"):
        call(*setting())
