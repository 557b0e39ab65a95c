"""Second derivatives of whole models, captured and compiled, are those that torch gives otherwise."""

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close

import hoglib as hog
from tests.capture.models import MODELS, criterion, draw, made
from tests.long_tail import all_but

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def by_hvp(model, loss, params, v, batch):
    return hog.hvp(loss, params, v, batch)


def by_double_backward(model, loss, params, v, batch):
    """Of the model as it is: its parameters are reached, and not arguments."""
    by = list(params.values())
    with torch.enable_grad(), hog.second_order():
        grads = torch.autograd.grad(criterion(model(batch)), by, create_graph=True)
        dot = sum((g.conj() * x).sum().real for g, x in zip(grads, v.values(), strict=True))
        return torch.autograd.grad(dot, by, allow_unused=True, materialize_grads=True)


def by_forward_over_reverse(model, loss, params, v, batch):
    def value(params):
        return criterion(functional_call(model, params, (batch,)))

    return torch.func.jvp(torch.func.grad(value), (params,), (v,))


def by_hessian(model, loss, params, v, batch):
    return torch.func.hessian(lambda p: criterion(functional_call(model, p, (batch,))))(params)


def routes(name):
    _, _, hessian, forward = MODELS[name]
    return [
        by_hvp,
        by_double_backward,
        *([by_forward_over_reverse] if forward else []),
        # before 2.13 torch's jacfwd reads a tensor's value, and is refused for it
        *([by_hessian] if hessian and torch.__version__ >= "2.13" else []),
    ]


CASES = [(name, route) for name in MODELS for route in routes(name)]
ALL_ROUTES = ("MLP", "LayerNorm")  # the others go by the first one


def problem(name):
    model, batch, *_ = made(name)
    loss = hog.functional_loss(
        model, lambda outputs, x: criterion(outputs), forward=lambda m, x: m(x)
    )
    params = hog.trainable_params(model)
    v = {n: draw(*p.shape, seed=i, dtype=p.dtype) for i, (n, p) in enumerate(params.items())}
    return model, loss, params, v, batch


@pytest.mark.parametrize(
    ("name", "route"),
    all_but(lambda name, route: name in ALL_ROUTES or route is by_hvp, CASES),
    ids=[f"{name}-{route.__name__}" for name, route in CASES],
)
def test_a_captured_second_derivative_is_the_eager_one(name, route):
    model, loss, params, v, batch = problem(name)

    def second(params, v, batch):
        return route(model, loss, params, v, batch)

    fast = hog.compile(second, backend="eager")
    assert_close(fast(params, v, batch), second(params, v, batch), **EXACT)
    with torch.no_grad():  # a step, and another batch
        for p in model.parameters():
            p.mul_(1.1)
        other = batch if batch.dtype is torch.int64 else 0.5 * batch
    result = fast(params, v, other)
    assert_close(result, second(params, v, other), **EXACT)
    assert len(fast.signatures) == 1
