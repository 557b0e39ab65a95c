"""hog.compiled_loss: a loss with its gradient in one graph is used as any loss."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.capture.models import draw


def compiled(fn, **options):
    return hog.compiled_loss(fn, backend="eager", **options)


class Problem:
    """A critic with a gradient penalty, as a loss of a batch; the same at every call."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        self.x = draw(6, 3).to(dtype)

    def loss(self, x):
        given = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.model(given).sum(), given, create_graph=True)
        return self.model(x).mean() + (slope.norm(dim=1) - 1).square().mean()

    def grads(self):
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def both(use, make=Problem, steps=2):
    """What a use of the loss gives, compiled and as it is, with models of their own; and the graphs."""
    found, fast = [], None
    for compiles in (True, False):
        problem = make()
        loss = problem.loss
        if compiles:
            loss = fast = compiled(loss)
        found.append([use(problem, loss) for _ in range(steps)])
    assert_close(*found, rtol=1e-10, atol=1e-12)
    return fast.signatures


def backward(problem, loss):
    value = loss(problem.x)
    value.backward()
    return value.detach(), problem.grads()


def autograd_grad(problem, loss):
    return torch.autograd.grad(loss(problem.x), list(problem.model.parameters()))


def accumulated(problem, loss):
    for k in range(3):
        (loss(problem.x * (k + 1)) / 3).backward()
    return problem.grads()


def a_sum_of_losses(problem, loss):
    (loss(problem.x).exp() + 2 * loss(2 * problem.x)).backward()
    return problem.grads()


def scaled(problem, loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(problem.model.parameters(), 0.1)
    scaler.scale(loss(problem.x)).backward()
    scaled_grads = problem.grads()
    scaler.unscale_(optimizer)
    return scaled_grads, problem.grads()


def hooked(problem, loss):
    order, weight = [], problem.model[0].weight
    handles = [
        weight.register_hook(lambda g: (order.append(1.0), 2 * g)[1]),
        weight.register_post_accumulate_grad_hook(lambda p: order.append(2.0)),
    ]
    loss(problem.x).backward()
    for handle in handles:
        handle.remove()
    return order, problem.grads()


def double_backward(problem, loss):
    params = list(problem.model.parameters())[:-1]
    grads = torch.autograd.grad(loss(problem.x), params, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), params)


def third_order(problem, loss):
    weight = problem.model[0].weight
    value = loss(problem.x)
    for _ in range(3):
        (grad,) = torch.autograd.grad(value, weight, create_graph=True)
        value = grad.sin().sum()
    return value.detach()


def without_gradients(problem, loss):
    with torch.no_grad():
        value = loss(problem.x)
    assert not value.requires_grad or loss == problem.loss
    return value.detach()


def of_a_frozen_layer(problem, loss):
    problem.model[0].requires_grad_(False)
    loss(problem.x).backward()
    return problem.grads()[2:], [p.grad is None for p in problem.model.parameters()]


def of_an_input(problem, loss):
    x = problem.x.clone().requires_grad_()
    hidden = x * 2
    loss(hidden).backward()
    return x.grad, problem.grads()


def kept_for_another_backward(problem, loss):
    value = loss(problem.x)
    value.backward(retain_graph=True)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    return problem.grads()


USES = {
    backward: 1, autograd_grad: 1, accumulated: 1, a_sum_of_losses: 1,
    scaled: 1, hooked: 3, double_backward: 3, third_order: 4,
    without_gradients: 1, of_a_frozen_layer: 1, of_an_input: 1, kept_for_another_backward: 1,
}  # fmt: skip


@pytest.mark.parametrize(("use", "graphs"), USES.items(), ids=[use.__name__ for use in USES])
def test_it_is_used_as_any_loss(use, graphs):
    assert len(both(use)) <= graphs


def test_value_and_gradient_are_one_graph():
    problem = Problem()
    runs = []

    def counting(graph, inputs):
        return lambda *tensors: (runs.append(1), graph.forward(*tensors))[1]

    loss = hog.compiled_loss(problem.loss, backend=counting, check=False)
    for _ in range(3):
        loss(problem.x).backward()
    assert len(runs) == 3
    assert len(loss.signatures) == 1


def test_a_double_backward_after_a_change_raises():
    for change in (
        lambda m: setattr(m[0], "weight", nn.Parameter(draw(4, 3))),
        lambda m: m.eval(),
        lambda m: m.__setitem__(1, nn.Sigmoid()),
    ):
        problem = Problem()
        value, weight = compiled(problem.loss)(problem.x), problem.model[0].weight
        change(problem.model)
        with pytest.raises(RuntimeError, match="Call backward before they change"):
            torch.autograd.grad(value, weight, create_graph=True)


WRONG = {
    "on nothing": (lambda x: (x * 2).sum(), RuntimeError, "depends on tensors that require grad"),
    "on what is detached": (lambda x: (WEIGHT.detach() * x).sum(), RuntimeError, "depends on tensors"),
    "a vector": (lambda x: WEIGHT * x, ValueError, "scalar"),
    "a number": (lambda x: 3.0, TypeError, "tensor"),
    "on a tensor with a graph": (lambda x: (HIDDEN * x).sum(), NotImplementedError, "Pass it as an argument"),
}  # fmt: skip
WEIGHT = draw(3).requires_grad_()
HIDDEN = WEIGHT * 2


@pytest.mark.parametrize(("fn", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_loss_that_is_none_is_refused(fn, error, words):
    loss = compiled(fn)
    with pytest.raises(error, match=words):
        loss(draw(3))
    assert loss.signatures == []
    if error is RuntimeError:
        with torch.no_grad():
            assert_close(loss(draw(3)), fn(draw(3)))
    (WEIGHT * 2).sum().backward()  # whose graph is whole
    torch.autograd.grad(HIDDEN.sum(), WEIGHT, retain_graph=True)


def test_beyond_the_limit_it_is_an_ordinary_loss():
    weight = draw(3).requires_grad_()
    loss, x = compiled(lambda x, n: (weight * x).sum() * n, check=False), draw(3)
    for n in range(1, 17):
        loss(x, n)
    with pytest.warns(UserWarning, match="16 graphs"):
        value = loss(x, 17)
    assert_close(torch.autograd.grad(value, weight)[0], 17 * x)


def test_a_gradient_that_is_one_number_in_all_places_is_scaled():
    weight = draw(3).requires_grad_()
    (compiled(lambda x: (weight.sum() + x).sum())(draw(1)) / 2).backward()
    assert_close(weight.grad, torch.full_like(weight, 0.5))


def test_another_thread_sees_no_part_of_the_shared_gradients(monkeypatch):
    w, b, x = (draw(3, seed=i).requires_grad_(i < 2) for i in range(3))
    loss, seen = hog.compiled_loss(lambda: ((w + b) * x).sum(), backend="eager", check=False), []
    plain = torch.Tensor.untyped_storage

    def look(tensor):
        seen.extend(entry.aliases for entry in loss.signatures)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "untyped_storage", look)
    loss().backward()
    assert set(map(str, seen)) == {"None"}
    assert [len(entry.aliases) for entry in loss.signatures] == [1]
