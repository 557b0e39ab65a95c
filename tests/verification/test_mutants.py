"""Right Functions and their mutants, in each form that a user can write: the mutants are told, and the
right ones are equal to torch's own and are not."""

import itertools
import warnings
from typing import NamedTuple

import pytest
import torch
from torch.autograd import Function
from torch.testing import assert_close

import hoglib as hog
from hoglib.verification import entry_points
from tests.rows import rows
from tests.verification.faults import load_cpp


class Formula(NamedTuple):
    """y of x [N, 3] and w [3], and the terms of both gradients, of the incoming gradient and x, w."""

    forward: object
    by_x: tuple
    by_w: tuple


FORMULAS = {
    "scaled sine": Formula(
        lambda x, w: x.sin() * w,
        (lambda g, x, w: g * x.cos() * w,),
        (lambda g, x, w: (g * x.sin()).sum(0),),
    ),
    "square and product": Formula(
        lambda x, w: x**2 + x * w,
        (lambda g, x, w: 2 * g * x, lambda g, x, w: g * w),
        (lambda g, x, w: (g * x).sum(0),),
    ),
    "radial": Formula(
        lambda x, w: torch.exp(-((x - w) ** 2)),
        (lambda g, x, w: -2 * g * (x - w) * torch.exp(-((x - w) ** 2)),),
        (lambda g, x, w: (2 * g * (x - w) * torch.exp(-((x - w) ** 2))).sum(0),),
    ),
    "softmax": Formula(
        lambda x, w: torch.softmax(x * w, 1),
        (
            lambda g, x, w: g * torch.softmax(x * w, 1) * w,
            lambda g, x, w: -(g * torch.softmax(x * w, 1)).sum(1, True) * torch.softmax(x * w, 1) * w,
        ),
        (
            lambda g, x, w: (g * torch.softmax(x * w, 1) * x).sum(0),
            lambda g, x, w: -(
                (g * torch.softmax(x * w, 1)).sum(1, True) * torch.softmax(x * w, 1) * x
            ).sum(0),
        ),
    ),
}  # fmt: skip
# A mutation of the terms of one gradient; None where it has none.
MUTATIONS = {
    "a term is dropped": lambda terms: terms[:-1] if len(terms) > 1 else None,
    "x is detached": lambda terms: [lambda g, x, w, t=t: t(g, x.detach(), w) for t in terms],
    "w is detached": lambda terms: [lambda g, x, w, t=t: t(g, x, w.detach()) for t in terms],
    "a sign is wrong": lambda terms: [lambda g, x, w: -terms[0](g, x, w), *terms[1:]],
    "another factor": lambda terms: [lambda g, x, w: 1.1 * terms[0](g, x, w), *terms[1:]],
    "the mean of examples": lambda terms: [lambda g, x, w, t=t: t(g, x, w) / len(x) for t in terms],
}
NUMBERS = itertools.count()


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def classic(forward, backward):
    def run(ctx, x, w):
        ctx.save_for_backward(x, w)
        return forward(x, w)

    name = f"Classic{next(NUMBERS)}"
    rules = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    return type(name, (Function,), rules).apply


def new_style(forward, backward):
    rules = {"forward": forward, "setup_context": save, "backward": backward}
    made = type(f"New{next(NUMBERS)}", (Function,), {k: staticmethod(v) for k, v in rules.items()})
    return made.apply


def operator(forward, backward):
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return forward(x, w)

    made = torch.library.custom_op(f"hoglib_mutants::op{next(NUMBERS)}", run, mutates_args=())
    made.register_autograd(backward, setup_context=save)
    return made


LIBRARY = torch.library.Library("hoglib_mutants", "FRAGMENT")


def defined(forward, backward):
    name = f"defined{next(NUMBERS)}"
    LIBRARY.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"hoglib_mutants::{name}", backward, setup_context=save, lib=LIBRARY
    )
    return getattr(torch.ops.hoglib_mutants, name)


def found(function, x, w):
    """The product of a Hessian, and what was said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = lambda p: function(p["x"], p["w"]).sin().sum()  # noqa: E731
        v = {"x": torch.cos(3 * x), "w": torch.cos(2 * w)}
        product = hog.hvp(loss, {"x": x, "w": w}, v)[1]
    return product, [str(one.message) for one in said]


def made(form, formula, by_x, by_w):
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return sum(t(g, x, w) for t in by_x), sum(t(g, x, w) for t in by_w)

    return form(formula.forward, backward)


def drawn():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=random, dtype=torch.float64) for s in ((3, 3), (3,))]


FORMS = [classic, new_style, operator, defined]
MUTANTS = []  # each mutation of each formula, by x and by w in turn
for (i, mutation), (k, name) in itertools.product(enumerate(MUTATIONS), enumerate(FORMULAS)):
    gradients = {"x": FORMULAS[name].by_x, "w": FORMULAS[name].by_w}
    by = "w" if (i + k) % 2 and mutation != "a term is dropped" else "x"
    mutated = MUTATIONS[mutation](gradients[by])
    if mutated is not None:
        MUTANTS.append((name, gradients | {by: mutated}))


@rows(
    ("form", "name"),
    [(FORMS[(i + k) % 4], name) for i, name in enumerate(FORMULAS) for k in (0, 1)],
)
def test_right_ones_are_torchs_own_and_not_told(form, name):
    formula, at = FORMULAS[name], drawn()
    product, said = found(made(form, formula, formula.by_x, formula.by_w), *at)
    assert_close(product, found(formula.forward, *at)[0])
    assert said == []


@pytest.mark.parametrize("form", FORMS)
def test_mutants_are_told(form):
    for name, terms in MUTANTS[FORMS.index(form) :: 4]:
        formula, at = FORMULAS[name], drawn()
        expected, _ = found(formula.forward, *at)
        product, said = found(made(form, formula, terms["x"], terms["w"]), *at)
        is_wrong = not all(torch.allclose(product[k], expected[k], rtol=1e-6) for k in product)
        assert any("derivative of" in text and "is wrong" in text for text in said) == is_wrong


IN_CPP = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <ATen/ATen.h>
using namespace torch::autograd;
struct Sine : Function<Sine> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w, int64_t m) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["m"] = m;
    return x.sin() * w;
  }
  static variable_list backward(AutogradContext* ctx, variable_list g) {
    auto saved = ctx->get_saved_variables();
    auto m = ctx->saved_data["m"].toInt();
    auto x = m == 1 ? saved[0].detach() : saved[0], w = m == 2 ? saved[1].detach() : saved[1];
    auto by_x = g[0] * x.cos() * w * (m == 3 ? -1.0 : m == 4 ? 1.1 : 1.0);
    auto by_w = m == 5 ? (g[0] * x.sin()).mean(0) : (g[0] * x.sin()).sum(0);
    return {by_x, by_w, at::Tensor()};
  }
};
TORCH_LIBRARY(hoglib_mutants_cpp, m) {
  m.def("sine", [](const at::Tensor& x, const at::Tensor& w, int64_t m) { return Sine::apply(x, w, m); });
}
"""


@pytest.mark.full
def test_mutants_in_cpp(tmp_path):
    """Those of the scaled sine: they are named as not examined, and `verify` tells which are wrong."""
    load_cpp(tmp_path, IN_CPP)
    x, w = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3), torch.ones(3).double()
    expected, _ = found(FORMULAS["scaled sine"].forward, x, w)
    for mutation in range(6):

        def function(x, w, mutation=mutation):
            return torch.ops.hoglib_mutants_cpp.sine(x, w, mutation)

        product, (text,) = found(function, x, w)
        assert "hvp: Sine was not examined, a backward in C++" in text
        entry_points.forget_reports()
        assert hog.verify(function, (x, w)).ok is (mutation == 0)
        is_right = all(torch.allclose(product[k], expected[k], rtol=1e-6) for k in product)
        assert is_right is (mutation == 0)
