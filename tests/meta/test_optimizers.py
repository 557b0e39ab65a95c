"""The update rules: derivatives by their options, at gradients of zero, and what they refuse."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.utils import _pytree as pytree

import hoglib as hog
from hoglib._core.torch_api.torch_modes import StandInMode
from hoglib.meta import RULES, adam, adamw, momentum, rmsprop, sgd
from tests.conformance.rules import (
    LR,
    DeadUnit,
    after_three_steps,
    batch,
    check_outer,
    number,
    ours,
    theirs,
)  # fmt: skip
from tests.conformance.test_rules import CASES, OPTIMIZERS
from tests.refused import refused
from tests.rows import rows

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# what an inner loop's result is differentiated by, besides the parameters
TREE = {
    "w": torch.tensor([[0.03, 0.05], [0.1, 0.02], [0.07, 0.04]]).double(),
    "b": torch.tensor(0.06).double(),
}


class Learned(NamedTuple):
    options: dict[str, Any]
    rule: Callable[[dict[str, Tensor]], Any]


def of_tree(make, hyper):
    return make({"w": hyper["w rate"], "b": hyper["b rate"]})


def learned_betas(make, hyper, **options):
    betas = (hyper["beta1"], hyper["beta2"])
    return make(hyper["lr"], betas=betas, eps=hyper["eps"], weight_decay=hyper["decay"], **options)


ADAM = {"lr": 0.1, "beta1": 0.7, "beta2": 0.8, "eps": 0.01, "decay": 0.1}
ADAM = {name: number(value) for name, value in ADAM.items()}
RATES = {"w rate": TREE["w"], "b rate": TREE["b"]}
LEARNED = {
    "sgd by a rate": Learned({"lr": number(0.1)}, lambda h: sgd(h["lr"])),
    "sgd by a rate of shape [1]": Learned({"lr": number([0.1])}, lambda h: sgd(h["lr"])),
    "sgd by rates of tensors and elements": Learned(RATES, lambda h: of_tree(sgd, h)),
    "sgd by rates of rows": Learned({"rate": TREE["w"][:, :1]}, lambda h: sgd({"w": h["rate"], "b": 0.2})),
    "sgd by a rate of shape [1, 1] in a tree": Learned({"rate": number([[0.1]])}, lambda h: sgd({"w": 0.2, "b": h["rate"]})),
    "sgd by one rate in a tree": Learned({"lr": number(0.1)}, lambda h: sgd({"w": h["lr"], "b": 0.2})),
    "sgd by momentum, dampening and decay": Learned(
        {"m": number(0.6), "d": number(0.3), "decay": number(0.1)},
        lambda h: sgd(0.1, momentum=h["m"], dampening=h["d"], weight_decay=h["decay"]),
    ),
    "sgd by decays of elements": Learned(RATES, lambda h: sgd(0.1, weight_decay={"w": h["w rate"], "b": h["b rate"]})),
    "nesterov by rate and momentum": Learned(
        {"lr": number(0.1), "m": number(0.6)}, lambda h: momentum(h["lr"], momentum=h["m"], nesterov=True)
    ),
    "adam by all": Learned(ADAM, partial(learned_betas, adam)),
    "adam, amsgrad, by all": Learned(ADAM, partial(learned_betas, adam, amsgrad=True)),
    "adam by rates of elements": Learned(RATES, lambda h: of_tree(adam, h)),
    "adam by beta1": Learned({"b": number(0.7)}, lambda h: adam(0.1, betas=(h["b"], 0.9))),
    "adamw by all": Learned(ADAM, partial(learned_betas, adamw)),
    "adamw by rates of elements": Learned(RATES, lambda h: of_tree(adamw, h)),
    "adamw by decays of elements": Learned(RATES, lambda h: adamw(0.1, weight_decay={"w": h["w rate"], "b": h["b rate"]})),
    "rmsprop by all": Learned(
        {"lr": number(0.1), "alpha": number(0.7), "m": number(0.5), "decay": number(0.1), "eps": number(0.01)},
        lambda h: rmsprop(h["lr"], alpha=h["alpha"], momentum=h["m"], weight_decay=h["decay"], eps=h["eps"], centered=True),
    ),
    "rmsprop by rates of elements": Learned(RATES, lambda h: of_tree(rmsprop, h)),
}  # fmt: skip


@pytest.mark.parametrize("case", LEARNED.values(), ids=LEARNED)
def test_derivatives_by_options(case):
    outer, start = after_three_steps(case.rule)
    check_outer(outer, {**start, **case.options})


EXACTLY_ZERO = {
    "adam, eps of 1e-8": lambda h: adam(0.1),
    "amsgrad, ties": lambda h: adam(0.1, amsgrad=True, eps=1e-3),
    "amsgrad by all": partial(learned_betas, adam, amsgrad=True),
    "adamw by all": partial(learned_betas, adamw),
    "centered, no variance": lambda h: rmsprop(1e-4, eps=1e-3, alpha=0.0, centered=True),
    "centered, momentum": lambda h: rmsprop(h["lr"], eps=1e-3, centered=True, momentum=h["beta1"]),
}


@rows("dtype", [torch.float64, torch.float32, torch.bfloat16])
@rows("rule", EXACTLY_ZERO.values(), ids=EXACTLY_ZERO)
def test_derivatives_are_finite_where_gradients_are_exactly_zero(rule, dtype):
    model, (x, y) = DeadUnit().to(dtype), batch(dtype)
    inner = lambda params: (functional_call(model, params, (x,)) - y).square().mean()  # noqa: E731
    outer = lambda at: inner(ours(rule(at["options"]), at["params"], grad(inner), 3)[-1])  # noqa: E731
    params = hog.trainable_params(model)
    assert not grad(inner)(params)["0.weight"][0].any()
    variables = {"params": params, "options": {n: v.to(dtype) for n, v in ADAM.items()}}
    v, found = pytree.tree_map(torch.ones_like, variables), grad(outer)(variables)
    along = [jvp(function, (variables,), (v,))[1] for function in (outer, grad(outer))]
    assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves([found, along]))
    assert not found["params"]["0.weight"][0].any()  # the outer loss does not depend on them


@pytest.mark.parametrize("make", [adam, adamw, rmsprop], ids=lambda make: make.__name__)
def test_at_a_gradient_of_zero_the_derivative_is_that_of_the_formula(make):
    # for one step u = c g / (d |g| + eps), so du/dg = c / eps at 0, with c = 1 in all three
    rule = make(0.1, eps=1e-3)
    p = torch.ones(2, dtype=torch.float64)

    def step(g):
        return rule.update(p, g, rule.init(p))[0]

    expected = -0.1 / 1e-3 * torch.eye(2).double()
    zero = torch.zeros(2, dtype=torch.float64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(step)(zero), expected, rtol=1e-12, atol=0)


def test_a_variance_that_rounding_made_negative_counts_as_zero():
    p = torch.ones(1, dtype=torch.float64)
    rule = rmsprop(0.1, eps=1e-2, alpha=0.5, centered=True)
    state = {"step": 3, "square": number([1.0]), "mean": number([1.0 + 1e-9])}
    g = torch.ones(1, dtype=torch.float64)
    moved = lambda g: rule.update(p, g, state)[0].sum()  # noqa: E731
    torch.testing.assert_close(moved(g), number(1 - 0.1 / 1e-2), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad(moved)(g), number([-0.1 / 1e-2]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_gradient_that_is_not_a_number_stays_seen(name):
    p = torch.ones(2)
    moved, _ = RULES[name](0.1).update(p, torch.tensor([math.nan, 1.0]), RULES[name](0.1).init(p))
    assert moved.isnan().tolist() == [True, False]


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_float16_is_that_of_torch(eps):
    p, g = torch.ones(3, dtype=torch.float16), torch.tensor([1e-3, 0.5, -2.0], dtype=torch.float16)
    for kind in ("adam", "rmsprop"):
        options = {"eps": eps}
        if eps == 1e-8:
            g = torch.tensor([0.1, 0.5, -2.0], dtype=torch.float16)
        (found,) = ours(RULES[kind](LR, **options), {"p": p}, lambda _: {"p": g}, 1)  # noqa: B023
        make = partial(OPTIMIZERS[kind], lr=LR, **options)
        (expected,) = theirs(make, {"p": p}, lambda _: {"p": g}, 1)  # noqa: B023
        torch.testing.assert_close(found["p"], expected["p"], rtol=2e-3, atol=0)


def test_names_decide_not_their_order():
    a, b = torch.ones(2), torch.full((2,), 2.0)
    for make in (lambda *pairs: dict(pairs), lambda *pairs: {"x": dict(pairs)}):
        params, grads = make(("a", a), ("b", b)), make(("b", 3 * b), ("a", 5 * a))
        rates = make(("b", 0.1), ("a", 0.2))
        moved, _ = sgd(rates).update(params, grads, sgd(rates).init(params))
        torch.testing.assert_close(moved, make(("a", a - 1), ("b", b - 0.6)))


@cases
def test_no_call_goes_by_the_stand_ins(case):
    kind, options, _ = case
    seen = []

    class Seeing(StandInMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    rule, params = RULES[kind](LR, **options), {"w": torch.ones(2)}
    state = rule.init(params)
    with Seeing():
        rule.update(params, params, state)
    assert not seen


def test_a_rule_made_under_no_grad_is_differentiated_by_its_options():
    lr = torch.tensor([0.1], requires_grad=True)
    with torch.no_grad():
        rules = [make(lr) for make in (sgd, adam)] + [sgd(0.1, momentum=lr)]
    for rule in rules:
        moved = ours(rule, torch.ones(2), lambda at: at, 2)[-1]
        assert torch.autograd.grad(moved.sum(), lr)[0].abs() > 0


P = {"w": torch.ones(2, 3), "b": torch.ones(3)}


def updated(rule, params=P, grads=P, state=None):
    return lambda: rule().update(params, grads, rule().init(params) if state is None else state)


ERRORS = {
    "a rate of zero": (lambda: sgd(0.0), ValueError, "lr: expected a finite number greater than 0, got 0.0"),
    "a rate in words": (lambda: sgd("0.1"), TypeError, r"lr: expected a number, a tensor .* got str '0.1'; .*float"),
    "a rate that is a flag": (lambda: adam(True), TypeError, "lr: expected a number.* got bool True"),
    "a whole tensor": (lambda: sgd(torch.tensor(1)), TypeError, "lr: expected a floating-point"),
    "a complex rate": (lambda: sgd(torch.tensor(1j)), TypeError, "lr: expected a real"),
    "a word in a tree of rates": (lambda: sgd({"w": 0.1, "b": "x"}), TypeError, r"lr\['b'\]: expected a number.*str 'x'"),
    "many rates for a tree": (updated(lambda: sgd(torch.ones(3))), ValueError, r"lr: expected a tensor with one number or a tree like params, got a float32 tensor of shape \(3,\)"),
    "a tree of other rates": (updated(lambda: adam({"w": 0.1, "c": 0.1})), ValueError, r"lr: expected the structure of params .* missing: b; not in params: c"),
    "a tree for a tensor": (updated(lambda: adam({"w": 0.1, "b": {"x": 0.1}})), ValueError, "lr: expected the structure of params .* missing: b; not in params: b.x"),
    "rates that do not broadcast": (updated(lambda: sgd({"w": torch.ones(2), "b": 0.1})), ValueError, r"lr\['w'\]: expected a shape that broadcasts .* \(2, 3\), got \(2,\)"),
    "rates that would enlarge": (updated(lambda: sgd({"w": 0.1, "b": torch.ones(2, 3)})), ValueError, r"lr\['b'\]: expected a shape .* \(3,\), got \(2, 3\)"),
    "a tree of other decays": (updated(lambda: adamw(0.1, weight_decay={"w": 0.1})), ValueError, "weight_decay: expected the structure of params .* missing: b"),
    "a negative decay": (lambda: adamw(0.1, weight_decay=-1), ValueError, "weight_decay: expected a finite number of at least 0, got -1"),
    "a decay in words": (lambda: rmsprop(0.1, weight_decay="no"), TypeError, "weight_decay: expected a number.*'no'"),
    "a negative momentum": (lambda: momentum(0.1, momentum=-0.1), ValueError, "momentum: expected .* got -0.1"),
    "momentum as a flag": (lambda: rmsprop(0.1, momentum=True), TypeError, "momentum: expected a number or a tensor with one, got bool"),
    "two momenta": (lambda: sgd(0.1, momentum=torch.ones(2)), ValueError, r"momentum: expected a tensor with one number, got .*\(2,\)"),
    "a negative dampening": (lambda: sgd(0.1, dampening=-1), ValueError, "dampening: expected .* got -1"),
    "nesterov without momentum": (lambda: sgd(0.1, nesterov=True), ValueError, "nesterov: expected a momentum greater than 0 .* got momentum=0"),
    "nesterov with dampening": (lambda: momentum(0.1, nesterov=True, dampening=0.1), ValueError, "nesterov: expected dampening=0 .* got float 0.1"),
    "nesterov that is no flag": (lambda: momentum(0.1, nesterov=1), TypeError, "nesterov: expected True or False, got int 1"),
    "one beta": (lambda: adam(0.1, betas=0.9), TypeError, "betas: expected a pair .* got float 0.9"),
    "a beta of one": (lambda: adam(0.1, betas=(0.9, 1.0)), ValueError, r"betas\[1\]: expected .* less than 1, got 1.0"),
    "a negative eps": (lambda: adam(0.1, eps=-1), ValueError, "eps: expected .* at least 0, got -1"),
    "amsgrad that is no flag": (lambda: adam(0.1, amsgrad="yes"), TypeError, "amsgrad: expected True or False"),
    "an alpha of one": (lambda: rmsprop(0.1, alpha=1), ValueError, "alpha: expected .* less than 1, got 1"),
    "centered that is no flag": (lambda: rmsprop(0.1, centered=None), TypeError, "centered: expected True or False"),
    "other gradients": (updated(lambda: sgd(0.1), grads={"w": P["w"]}), ValueError, "grads: expected the structure of params .* missing: b"),
    "no gradient": (updated(lambda: sgd(0.1), grads={**P, "b": None}), ValueError, r"grads\['b'\]: expected a tensor of shape \(3,\) .* got NoneType None"),
    "a gradient of another shape": (updated(lambda: adam(0.1), grads={**P, "b": torch.ones(1)}), ValueError, r"grads\['b'\]: expected .* \(3,\) .* shape \(1,\)"),
    "the state of another rule": (updated(lambda: adam(0.1), state=momentum(0.1).init(P)), ValueError, "state: expected a dict of mean, square, step"),
    "the state of others": (updated(lambda: adam(0.1), state=adam(0.1).init({"w": P["w"]})), ValueError, r"state\['mean'\]: expected the structure"),
}  # fmt: skip


test_errors_say_what_was_expected_and_what_came = refused(ERRORS, by=hog.errors.HoglibError)
