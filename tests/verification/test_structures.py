"""Functions that are right along directions which keep a structure of their argument, and no others."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

import hoglib as hog
from hoglib.verification import entry_points
from hoglib.verification.subject import keeps_structure, structures_of

F64 = torch.float64
ROW = "first derivative: other directions"
FIRST, SECOND = "first derivative: reverse", "second derivative: reverse-over-reverse"
A = torch.tensor([[1.2, 0.3, -0.4], [0.5, 1.6, 0.2], [-0.1, 0.7, 2.1]], dtype=F64)


def made(
    forward: Callable[[Tensor], Tensor], gradient: Callable[..., Tensor], *, cut: bool
) -> type[Function]:
    """A Function of one tensor, whose backward gets it detached if cut."""

    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient(x.detach() if cut else x, g)

    return Made


class Case(NamedTuple):
    """A formula that assumes a structure, and what makes an argument that has it."""

    forward: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor]
    words: str


def root(a: Tensor) -> Tensor:
    """The square root of a positive definite matrix by Newton's iteration, for any such matrix."""
    size, eye = a.norm(), torch.eye(len(a), dtype=a.dtype)
    y, z = a / size, eye
    for _ in range(25):
        t = 0.5 * (3 * eye - z @ y)
        y, z = y @ t, t @ z
    return y * size.sqrt()


def root_gradient(a: Tensor, g: Tensor) -> Tensor:
    """G S + S G = g in the eigenvectors, of which only a symmetric S has orthogonal ones."""
    w, v = torch.linalg.eigh((a + a.mT) / 2)
    s = w.sqrt()
    return v @ ((v.mT @ g @ v) / (s[:, None] + s)) @ v.mT


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(1)


def entropy_gradient(p: Tensor, g: Tensor) -> Tensor:
    """Without the part that changes the sum."""
    d = -p.log()
    return g[:, None] * (d - d.mean(1, keepdim=True))


def paths(q: Tensor) -> Tensor:
    return -q[:, :2].sum(0).logsumexp(0)


def paths_gradient(q: Tensor, g: Tensor) -> Tensor:
    """By the logits, of which q are the log-probabilities."""
    return g * (q.exp() - F.pad(q[:, :2].sum(0).softmax(0), (0, 1)))


def angle(x: Tensor) -> Tensor:
    return torch.arccos(0.9 * x[:, 0])


def angle_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The part of it that is tangent to the sphere."""
    d = -0.9 * F.one_hot(torch.tensor(0), 3) * (g / (1 - (0.9 * x[:, 0]) ** 2).sqrt())[:, None]
    return d - (d * x).sum(1, keepdim=True) * x


CASES = {
    "symmetric": Case(root, root_gradient, lambda b: b @ b.mT, "(`x`) symmetric"),
    "triangular": Case(
        lambda a: a.diagonal().log().sum(), lambda a, g: g * torch.linalg.inv(a).mT,
        torch.triu, "upper triangular",
    ),
    "probabilities": Case(entropy, entropy_gradient, lambda b: b.softmax(1), "summing to one"),
    "log-probabilities": Case(paths, paths_gradient, lambda b: b.log_softmax(1), "log-probabilities along dimension 1"),
    "unit vectors": Case(angle, angle_gradient, lambda b: F.normalize(b, dim=1), "of length one along dimension 1"),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


@each
def test_what_is_right_within_a_structure_is_right_with_a_row(name):
    case = CASES[name]
    right = made(case.forward, case.gradient, cut=False)
    report = hog.verify(right, case.prepare(A))
    assert not report.failed, report
    assert report[FIRST].status == report[SECOND].status == "pass"
    assert report[ROW].status == "warn"
    assert case.words in report[ROW].text
    assert "the first derivative is wrong: output 0" in report[ROW].text


@each
def test_other_arguments_are_failed(name):
    case = CASES[name]
    report = hog.verify(
        made(case.forward, case.gradient, cut=False), case.prepare(A) + 0.1 * A.abs()
    )
    assert report[FIRST].status == "fail"
    assert ROW not in [row.name for row in report]


@each
def test_a_lost_second_derivative_is_failed_within_the_structure(name):
    case = CASES[name]
    report = hog.verify(made(case.forward, case.gradient, cut=True), case.prepare(A))
    assert report[FIRST].status == "pass"
    assert report[SECOND].status == "fail"
    assert report.failed[0].name == "detached: .detach()"


def told(function: type[Function], prepare: Callable[[Tensor], Tensor]) -> list[str]:
    entry_points.forget_reports()

    def loss(b: Tensor) -> Tensor:
        y = function.apply(prepare(b))
        return (y * torch.linspace(1, 2, y.numel(), dtype=F64).reshape(y.shape)).sin().sum()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _, product = hog.hvp(loss, A, torch.ones_like(A))
    assert product.isfinite().all()
    return [str(w.message) for w in found]


@each
def test_an_argument_that_is_computed_so_is_not_told_and_another_one_is(name):
    case = CASES[name]
    function = made(case.forward, case.gradient, cut=False)
    assert told(function, case.prepare) == []
    # the verdict is for such arguments: others of the same kind are examined again
    (text,) = told(function, lambda b: case.prepare(b) + 0.1 * b.abs())
    assert "derivative of" in text
    assert told(function, case.prepare) == []
    (text,) = told(made(case.forward, case.gradient, cut=True), case.prepare)
    assert "leaves the graph by .detach()" in text


def test_the_users_code_does_not_run_to_find_how_an_argument_was_computed():
    runs = []

    class Doubled(Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            runs.append(1)
            return 2 * g

    symmetric = Doubled.apply(A.clone().requires_grad_())
    symmetric = symmetric + symmetric.T
    (found, *_) = structures_of(symmetric.detach())
    assert keeps_structure(symmetric, found)
    assert runs == []


@each
@pytest.mark.parametrize("how", ["a parameter", "computed from one"])
def test_a_parameter_that_has_the_structure_at_first_is_told(name, how):
    """A training would not keep it, so that the gradient along other directions counts."""
    case = CASES[name]
    function = made(case.forward, case.gradient, cut=False)
    start = case.prepare(A).detach()

    def prepare(b: Tensor) -> Tensor:
        return b if how == "a parameter" else 1.0 * b

    entry_points.forget_reports()

    def loss(p: Tensor) -> Tensor:
        y = function.apply(prepare(p))
        return (y * torch.linspace(1, 2, y.numel(), dtype=F64).reshape(y.shape)).sin().sum()

    with pytest.warns(UserWarning, match="derivative of .*Made is wrong"):
        hog.hvp(loss, start, torch.ones_like(start))


def test_structures_of_tensors():
    def names(x):
        return [one.name for one in structures_of(x)]

    torch.manual_seed(0)
    assert names(torch.randn(3, 3)) == []
    assert names(torch.zeros(3, 3)) == []
    assert names(torch.randn(3, 4)) == []
    assert "symmetric" in names(torch.eye(3))
    z = torch.randn(2, 3, 3, dtype=torch.complex128)
    assert names(z + z.mH) == ["symmetric"]
    assert names(torch.rand(2, 3, 4).softmax(1)) == ["summing to one along dimension 1"]
    assert names(torch.tensor([0.25, 0.75])) == ["summing to one altogether"]
    assert names(torch.full((2, 2), torch.nan)) == []
