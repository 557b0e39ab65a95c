"""Diagonals of the matrices of single examples, against dense matrices of batches of one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature import per_example_diagonals
from tests.curvature.problems import CRITERIA, draw, problem
from tests.refused import refused
from tests.rows import rows

KINDS = {"ggn": hog.curvature.ggn, "hessian": hog.hessian}
NAMES = ["layers of hoglib", "ReLU", "LayerNorm", "CNN with BatchNorm in eval", "tied and frozen"]


def one_of(batch, n):
    return tuple(x[n : n + 1] for x in batch)


def dense_diagonals(matrix, loss, params, batch):
    found = {name: [] for name in params}
    for n in range(len(batch[0])):
        blocks = matrix(loss, params, one_of(batch, n))
        for name, p in params.items():
            block = blocks[name][name].reshape(p.numel(), -1)
            found[name].append(block.diagonal().reshape(p.shape))
    return {name: torch.stack(parts).detach() for name, parts in found.items()}


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_dense_matrices(kind, criterion):
    for name in NAMES:
        loss, params, batch = problem(name, criterion, n=3)
        expected = dense_diagonals(KINDS[kind], loss, params, batch)
        for size in (None, 2):
            ours = per_example_diagonals(loss, params, batch, kind=kind, chunk_size=size)
            assert_close(ours, expected, rtol=1e-8, atol=1e-10)


@rows("kind", KINDS)
def test_the_mean_is_the_diagonal_of_the_batch_also_with_weights(kind):
    weights = torch.tensor([1.0, 2.0, 0.5]).double()
    criterion = nn.CrossEntropyLoss(weight=weights, ignore_index=2)
    model = nn.Linear(2, 3).double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    batch = draw(5, 2), torch.tensor([0, 1, 2, 1, 0])
    ours = per_example_diagonals(loss, params, batch, kind=kind)
    assert bool((ours["weight"][2] == 0).all())
    blocks = KINDS[kind](loss, params, batch)
    for name, p in params.items():
        block = blocks[name][name].reshape(p.numel(), -1)
        assert_close(ours[name].mean(0), block.diagonal().reshape(p.shape).detach())


def test_several_outputs_and_an_indefinite_criterion():
    # a Gaussian with a learned variance: two outputs, and H_n is indefinite
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log = nn.Linear(2, 1), nn.Linear(2, 2)

        def forward(self, x):
            return {"mean": self.mean(x), "log": self.log(x)}

    def criterion(y, t):
        scale = y["log"].sum(1, keepdim=True)
        return ((t - y["mean"]).square() * scale.exp() - scale).mean()

    model = Two().double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    batch = draw(3, 2), draw(3, 1, seed=1)
    for kind, matrix in KINDS.items():
        expected = dense_diagonals(matrix, loss, params, batch)
        assert_close(per_example_diagonals(loss, params, batch, kind=kind), expected)


def test_a_plain_function_has_hessians():
    x = draw(4, 3)
    ours = per_example_diagonals(lambda p, x: (x @ p).pow(3).mean(), torch.ones(3).double(), x, kind="hessian")  # fmt: skip
    assert_close(ours, 6 * x.sum(1, keepdim=True) * x.square())


def test_operations_without_a_rule_of_torch_func_take_one_example_after_another():
    class Cube(torch.autograd.Function):  # no setup_context
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    model, plain = (nn.Sequential(nn.Linear(2, 2), made).double() for made in (Applied(Cube.apply), Applied(lambda x: x**3)))  # fmt: skip
    plain.load_state_dict(model.state_dict())
    batch = draw(3, 2), draw(3, 2, seed=1)
    for kind in KINDS:
        ours, expected = (of(one, F.mse_loss, batch=batch, kind=kind) for one in (model, plain))
        assert_close(ours, expected)


ONES = torch.ones(4, 2), torch.ones(4, 2)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def of(model, criterion, batch=ONES, **options):
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    return per_example_diagonals(loss, params, batch, **options)


X = torch.ones(2, 3)
test_others_are_refused = refused({
    "an unknown kind": (lambda: of(nn.Linear(2, 2), F.mse_loss, kind="fisher"), ValueError, "ggn.*hessian"),
    "a plain function for ggn": (lambda: per_example_diagonals(lambda p, x: (x @ p).mean(), X[0], X), TypeError, "functional_loss"),
    "batch norm": (lambda: of(nn.BatchNorm1d(2), F.mse_loss), ValueError, "train mode"),
    "coupled examples": (lambda: of(nn.Linear(2, 2), lambda o, y: (o @ o.T).logsumexp(1).mean(), (draw(4, 2).float(), X)), ValueError, "couples them"),
    "compile": (lambda: of(nn.Linear(2, 2), F.mse_loss, compile=True), TypeError, "expected options among"),
    "no examples": (lambda: per_example_diagonals(lambda p, x: p.sum(), X[0], X[:0], kind="hessian"), ValueError, "at least one"),
    "a transform": (lambda: torch.func.vmap(lambda x: per_example_diagonals(lambda p, x: (x @ p).pow(2).mean(), X[0], x, kind="hessian"))(X[None]), RuntimeError, "torch.func"),
})  # fmt: skip
