"""Penalties of Jacobians and of parameter gradients, and forces, against closed forms and differences."""

import pytest
import torch
from torch.testing import assert_close

from hoglib import penalties
from tests.conformance.test_penalties import smooth
from tests.curvature.problems import F64
from tests.penalties.critics import build, draw, generator
from tests.refused import refused

J, X = draw(4, 3, 2), draw(6, 3, 2, seed=1)
linear = lambda x: torch.einsum("cab,nab->nc", J, x)  # noqa: E731  # its Jacobian is J everywhere


# Closed forms


def test_the_jacobian_of_a_linear_map():
    square = J.square().sum() / 2
    for options in ({"num_projections": None}, {"num_projections": 4}, {"num_projections": 7}):
        assert_close(penalties.jacobian(linear, X, **options), square)
    shaped = lambda x: linear(x).view(6, 2, 2)  # noqa: E731
    assert_close(penalties.jacobian(shaped, X, num_projections=None), square)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_projections_are_without_bias(count):
    x = X[:1].expand(4000, 3, 2)
    terms = penalties.jacobian(
        linear, x, num_projections=count, generator=generator(), reduction="none"
    )
    error = terms.std() / 4000**0.5
    assert abs(terms.mean() - J.square().sum() / 2) < 4 * error
    assert error > 0
    # orthogonal directions: the more, the less they scatter, and faster than by averaging
    one = penalties.jacobian(linear, x, generator=generator(), reduction="none").std()
    if count > 1:
        assert terms.std() < one / count**0.5


def test_the_spectral_norm_of_a_linear_map():
    s = torch.linalg.matrix_norm(J.reshape(4, -1), 2)
    for options in ({"num_iterations": None}, {"num_iterations": 60}):
        assert_close(penalties.lipschitz(linear, X, bound=0.5, **options), (s - 0.5) ** 2)
    assert penalties.lipschitz(linear, X, bound=float(s) + 0.1) == 0
    few = penalties.lipschitz(linear, X, bound=0.0, num_iterations=1, generator=generator())
    assert few < s**2  # from below


def test_sobolev_is_the_distance_of_derivatives():
    d = draw(6, 4, 3, 2, seed=2)
    expected = (J - d).square().sum((1, 2, 3)).mean()
    assert_close(penalties.sobolev(linear, X, d), expected)
    assert_close(penalties.sobolev(linear, X, d, num_projections=4), expected)
    assert penalties.sobolev(linear, X, J.expand(6, 4, 3, 2)) < 1e-25
    one = lambda x: linear(x)[:, :1]  # noqa: E731
    expected = (J[0] - d[:, 0]).square().sum((1, 2)).mean()
    for given in (d[:, 0], d[:, :1]):
        assert_close(penalties.sobolev(one, X, given), expected)
    many = penalties.sobolev(
        linear, X[:1].expand(4000, 3, 2), d[:1].expand(4000, 4, 3, 2), num_projections=1,
        generator=generator(), reduction="none",
    )  # fmt: skip
    assert abs(many.mean() - (J - d[0]).square().sum()) < 4 * many.std() / 4000**0.5


def test_trees_of_inputs():
    func = lambda x, s: torch.stack([x["a"].sum(1) * 2, (x["b"] * s).sum(1)], 1)  # noqa: E731
    x, s = {"a": draw(5, 3), "b": draw(5, 2)}, draw(5, 1)
    each = 4 * 3 + 2 * s[:, 0] ** 2
    assert_close(penalties.jacobian(func, x, s, num_projections=None), each.mean() / 2)
    zeros = {"a": torch.zeros(5, 2, 3, dtype=F64), "b": torch.zeros(5, 2, 2, dtype=F64)}
    assert_close(penalties.sobolev(func, x, zeros, s), each.mean())
    assert_close(penalties.sobolev(func, x, zeros, s, micro_batch=2), each.mean())
    largest = torch.maximum(torch.tensor(12.0, dtype=F64), 2 * s[:, 0] ** 2).mean()
    assert_close(penalties.lipschitz(func, x, s, bound=0.0, num_iterations=None), largest)
    assert_close(penalties.lipschitz(func, x, s, bound=0.0, num_iterations=200), largest)


def test_the_spectral_norm_of_graphs():
    index = torch.tensor([0, 0, 1, 1, 1])
    func = lambda x: torch.zeros(2, 4, dtype=F64).index_add(0, index, x @ draw(3, 4))  # noqa: E731
    s = torch.linalg.matrix_norm(draw(3, 4), 2)
    expected = torch.stack([2 * s**2, 3 * s**2])
    for options in ({"num_iterations": None}, {"num_iterations": 100}):
        terms = penalties.lipschitz(
            func, draw(5, 3, seed=4), bound=0.0, batch=index, reduction="none", **options
        )
        assert_close(terms, expected)


def test_one_output_of_one_sample_may_be_squeezed():
    model, x = build(smooth), draw(5, 3)
    one = lambda x: model(x)[:, 0]  # noqa: E731
    for penalty, *rest in ((penalties.jacobian, x[:1]), (penalties.sobolev, x[:1], x[1:2])):
        assert_close(penalty(lambda x: one(x).squeeze(), *rest), penalty(one, *rest))


REFUSED = {
    "no projection": (lambda: penalties.jacobian(linear, X, num_projections=0), ValueError, "at least 1"),
    "no iteration": (lambda: penalties.lipschitz(linear, X, num_iterations=0), ValueError, "at least 1"),
    "a negative bound": (lambda: penalties.lipschitz(linear, X, bound=-1), ValueError, "bound"),
    "one loss for all": (lambda: penalties.input_gradient(lambda x: linear(x).sum(), X), ValueError, "leave out the mean"),
    "one output for all": (lambda: penalties.jacobian(lambda x: linear(x).sum(0), X), ValueError, "one row for each of 6 samples"),
    "one sample": (lambda: penalties.jacobian(lambda x: x.sum()[None], torch.ones(2)), ValueError, r"a batch of one: `x\[None\]`"),
    "derivatives of another shape": (lambda: penalties.sobolev(linear, X, X), ValueError, r"derivatives: expected shape \(6, 4, 3, 2\)"),
    "derivatives of another structure": (lambda: penalties.sobolev(linear, X, [X]), ValueError, "structure of x"),
}  # fmt: skip


test_what_is_refused = refused(REFUSED)


# The gradient by the parameters


def test_the_norm_of_a_quadratic_loss():
    """f = a |p|^2 / 2: its gradient is a p."""
    params = {"p": draw(3).requires_grad_(), "q": draw(2, 2).requires_grad_()}
    func = lambda t, a: a / 2 * (t["p"].square().sum() + t["q"].square().sum())  # noqa: E731
    flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
    value, loss = penalties.parameter_gradient(func, params, 3.0, return_outputs=True)
    assert_close(value.detach(), 3 * flat.norm())
    assert_close(loss.detach(), func(params, 3.0).detach())
    grads = torch.autograd.grad(value, list(params.values()))
    assert_close(torch.cat([g.reshape(-1) for g in grads]), 3 * flat / flat.norm())
    assert_close(
        penalties.parameter_gradient(func, params, 3.0, squared=True).detach(), 9 * flat.norm() ** 2
    )
    zeros = {name: torch.zeros_like(p).requires_grad_() for name, p in params.items()}
    value = penalties.parameter_gradient(func, zeros, 3.0)
    grads = torch.autograd.grad(value, list(zeros.values()))
    assert value == 0
    assert not any(g.any() for g in grads)


def test_what_has_no_gradient_by_the_parameters():
    p = {"p": draw(3).requires_grad_()}
    with pytest.raises(
        RuntimeError, match="no effect because the gradient of func does not depend"
    ):
        penalties.parameter_gradient(lambda t: t["p"].sum(), p)
    with pytest.raises(RuntimeError, match="depends on params"):
        penalties.parameter_gradient(lambda t: t["p"].detach().sum(), p)
    with pytest.raises(ValueError, match="expected a scalar"):
        penalties.parameter_gradient(lambda t: t["p"] ** 2, p)
    with pytest.raises(TypeError, match="squared"):
        penalties.parameter_gradient(lambda t: t["p"].sum(), p, squared=2)
