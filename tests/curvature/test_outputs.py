"""Hessians of functions with several outputs, against torch.func and differences."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import F64, columns, draw, flat
from tests.oracles import gradient
from tests.refused import refused
from tests.rows import rows

X = draw(3)
NESTED = {"w": draw(2, 3), "b": [draw(2, seed=1)]}


def layers(p):
    return {"y": torch.tanh(p["w"] @ X + p["b"][0]), "z": [p["w"].prod(), p["b"][0].outer(X).sin()]}


# name -> a function, and where
FUNCTIONS = {
    "a vector": (lambda p: p**3 * p.sum(), X),
    "a matrix": (lambda p: torch.outer(p, p.sin()), X),
    "one number": (lambda p: p.prod().reshape(1), X),
    "entries that are linear": (lambda p: torch.stack([p.sum(), p.square().sum()]), X),
    "nested": (layers, NESTED),
}


@rows(("func", "params"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_layout_and_the_values_are_those_of_torch(func, params):
    ours, expected = hog.hessian(func, params), torch.func.hessian(func)(params)
    assert_close(ours, expected)


def test_blocks_and_derivatives_of_it():
    func = lambda p: torch.stack([(p["a"] ** 4).sum() * p["b"].sum(), p["b"].prod()])  # noqa: E731
    params = {"a": draw(2).requires_grad_(), "b": draw(2, seed=1)}
    H = hog.hessian(func, params, blocks="parameter", create_graph=True)
    assert {n: [*H[n]] for n in H} == {"a": ["a"], "b": ["b"]}
    (g,) = torch.autograd.grad(H["a"]["a"][0].sum(), params["a"])
    assert_close(g, 24 * params["a"].detach() * params["b"].sum())


def test_layer_norms_are_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    x, params = draw(1, 2), {n: p.detach() for n, p in model.named_parameters()}
    func = lambda p: torch.func.functional_call(model, p, x)[0]  # noqa: E731
    H = hog.hessian(func, params)
    for i in range(2):
        expected = columns(lambda p, i=i: gradient(lambda p: func(p)[i], p), params)
        ours = torch.cat([flat([H[a][b][i].reshape(params[a].numel(), -1).T for b in H]).reshape(-1, params[a].numel()).T for a in H])  # fmt: skip
        assert_close(ours, expected, rtol=1e-6, atol=1e-8)


def test_all_entries_have_the_same_random_numbers():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    params = {n: p.detach() for n, p in model.named_parameters()}
    func = lambda p: torch.func.functional_call(model, p, X).sum().expand(2, 2)  # noqa: E731
    first, again = (hog.hessian(func, params)["0.weight"]["0.weight"] for _ in range(2))
    assert_close(first, first[:1, :1].expand_as(first))
    assert not torch.equal(first, again)  # but each call its own


def test_inside_a_transform():
    func = lambda p: p**3 * p.sum()  # noqa: E731
    batch = draw(4, 3)
    ours = torch.func.vmap(lambda p: hog.hessian(func, p))(batch)
    assert_close(ours, torch.func.vmap(torch.func.hessian(func))(batch))


test_other_results_are_refused = refused({
    "integers": (lambda: hog.hessian(lambda p: p.long(), X), ValueError, "expected a scalar, got a int64"),
    "no tensor": (lambda: hog.hessian(lambda p: [1.0], X), TypeError, "expected a torch.Tensor, got list"),
    "compiled": (lambda: hog.hessian(lambda p: p**3, X, compile="eager"), RuntimeError, "compile=.*several outputs"),
    "a criterion of each example": (lambda: hog.hessian(hog.functional_loss(nn.Linear(2, 1).double(), nn.MSELoss(reduction="none")), {"weight": draw(1, 2)}, (draw(4, 2), draw(4, 1))), ValueError, "reduction='mean'"),
    "wrong blocks": (lambda: hog.hessian(lambda p: p["a"].sum() ** 2, {"a": X}, blocks="layer"), ValueError, "blocks"),
    "an output without parameters": (lambda: hog.hessian(lambda p: (p**2, X), X), RuntimeError, "depends on params"),
})  # fmt: skip


def test_a_function_that_fails_says_so():
    def func(p):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        hog.hessian(func, X.to(F64))
