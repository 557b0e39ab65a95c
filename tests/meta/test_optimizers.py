"""The update rules: step for step torch.optim's, and their derivatives against central differences."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import hoglib as hog
from hoglib._core.torch_modes import StandInMode
from hoglib.meta import RULES, adam, adamw, momentum, rmsprop, sgd
from hoglib.stand_ins.mode import second_order
from tests.oracles import gradient, gradient_by_differences, random_like, relative
from tests.refused import refused

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# by a name: the rule, its options, and, where torch's differ, torch's
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("sgd", {}, {}),
    "sgd, decay": ("sgd", {"weight_decay": 0.1}, {}),
    "sgd, momentum": ("sgd", {"momentum": 0.9}, {}),
    "sgd, dampening": ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {}),
    "sgd, nesterov": ("sgd", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, {}),
    "momentum": ("momentum", {}, {"momentum": 0.9}),
    "momentum, all": ("momentum", {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True}, {}),
    "momentum, dampening": ("momentum", {"dampening": 0.3}, {"momentum": 0.9, "dampening": 0.3}),
    "adam": ("adam", {}, {}),
    "adam, betas": ("adam", {"betas": (0.5, 0.9), "eps": 1e-3}, {}),
    "adam, betas of zero": ("adam", {"betas": (0.0, 0.0)}, {}),
    "adam, decay": ("adam", {"weight_decay": 0.1}, {}),
    "adam, amsgrad": ("adam", {"amsgrad": True, "betas": (0.9, 0.5), "weight_decay": 0.1}, {}),
    "adamw": ("adamw", {}, {}),
    "adamw, no decay": ("adamw", {"weight_decay": 0.0}, {}),
    "adamw, amsgrad": ("adamw", {"amsgrad": True, "betas": [0.9, 0.5], "weight_decay": 0.2}, {}),
    "rmsprop": ("rmsprop", {}, {}),
    "rmsprop, decay": ("rmsprop", {"alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1}, {}),
    "rmsprop, momentum": ("rmsprop", {"momentum": 0.9}, {}),
    "rmsprop, centered": ("rmsprop", {"centered": True, "alpha": 0.9}, {}),
    "rmsprop, all": ("rmsprop", {"centered": True, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1}, {}),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LR = 0.05


def number(value):
    return torch.tensor(value, dtype=torch.float64)


class DeadUnit(nn.Sequential):
    """The first hidden unit is never positive: all its gradients are exactly zero."""

    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            self[0].bias[0] = -50.0


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(9, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x.to(dtype), y.to(dtype)


def ours(rule, params, grads_of, steps):
    """The parameters after each step."""
    state, path = rule.init(params), []
    for _ in range(steps):
        params, state = rule.update(params, grads_of(params), state)
        path.append(params)
    return path


def theirs(kind, options, params, grads_of, steps):
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    optimizer, path = OPTIMIZERS[kind](leaves.values(), lr=LR, **options), []
    for _ in range(steps):
        found = grads_of({n: p.detach() for n, p in leaves.items()})
        for n, p in leaves.items():
            p.grad = found[n].clone()
        optimizer.step()
        path.append({n: p.detach().clone() for n, p in leaves.items()})
    return path


def net_and_gradient(dtype):
    model, (x, y) = DeadUnit().to(dtype), batch(dtype)

    def loss(params):
        return (functional_call(model, params, (x,)) - y).square().mean()

    return hog.trainable_params(model), partial(gradient, loss)


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_step_is_that_of_torch(case, dtype):
    kind, options, other = case
    params, grads_of = net_and_gradient(dtype)
    assert not grads_of(params)["0.weight"][0].any()  # or the dead unit tests nothing
    expected = theirs(kind, other or options, params, grads_of, 10)
    path = ours(RULES[kind](LR, **options), params, grads_of, 10)
    for step, (a, b) in enumerate(zip(path, expected, strict=True)):
        for name in b:
            assert a[name].dtype == dtype
            # rounding grows from step to step
            bound = 1e-12 if dtype == torch.float64 else 2e-5
            assert relative(a[name], b[name]) < bound, (step, name)


@cases
def test_complex_parameters_are_pairs_of_real_numbers_as_in_torch(case):
    kind, options, other = case
    w, b, t = (torch.randn(s, dtype=torch.complex128) for s in ((3, 2), (2,), (2, 3)))
    params = {"w": w, "b": b, "t": t.T}  # the last is not contiguous
    target = random_like(params)

    def grads_of(at):
        found = {n: (at[n] - target[n]) * (1 + 2j) for n in at}
        found["b"] = found["b"].conj().resolve_conj().conj()  # conjugated lazily
        return found

    def plain(at):
        return {n: g.resolve_conj() for n, g in grads_of(at).items()}

    expected = theirs(kind, other or options, params, plain, 8)
    for a, b in zip(ours(RULES[kind](LR, **options), params, grads_of, 8), expected, strict=True):
        assert relative(a, b) < 1e-12
    rates = {"w": number([LR, LR]), "b": LR, "t": number([[LR]] * 3)}
    for a, b in zip(
        ours(RULES[kind](rates, **options), params, grads_of, 8), expected, strict=True
    ):
        assert relative(a, b) < 1e-12
    assert {p.dtype for p in a.values()} == {torch.complex128}


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
    "sgd by one rate in a tree": Learned({"lr": number(0.1)}, lambda h: sgd({"w": h["lr"], "b": 0.2})),
    "sgd by momentum, dampening and decay": Learned(
        {"m": number(0.6), "d": number(0.3), "decay": number(0.1)},
        lambda h: sgd(0.1, momentum=h["m"], dampening=h["d"], weight_decay=h["decay"]),
    ),
    "sgd by decays of elements": Learned(RATES, lambda h: sgd(0.1, weight_decay={"w": h["w rate"], "b": h["b rate"]})),
    "nesterov by rate and momentum": Learned(
        {"lr": number(0.1), "m": number(0.6)}, lambda h: momentum(h["lr"], momentum=h["m"], nesterov=True)
    ),
    "nesterov": Learned({}, lambda h: sgd(0.1, momentum=0.6, nesterov=True, weight_decay=0.1)),
    "momentum with dampening": Learned({}, lambda h: sgd(0.1, momentum=0.6, dampening=0.3)),
    "adam": Learned({}, lambda h: adam(0.1)),
    "adam by all": Learned(ADAM, partial(learned_betas, adam)),
    "adam, amsgrad, by all": Learned(ADAM, partial(learned_betas, adam, amsgrad=True)),
    "adam by rates of elements": Learned(RATES, lambda h: of_tree(adam, h)),
    "adam by beta1": Learned({"b": number(0.7)}, lambda h: adam(0.1, betas=(h["b"], 0.9))),
    "adamw by all": Learned(ADAM, partial(learned_betas, adamw)),
    "adamw by rates of elements": Learned(RATES, lambda h: of_tree(adamw, h)),
    "adamw by decays of elements": Learned(
        RATES, lambda h: adamw(0.1, weight_decay={"w": h["w rate"], "b": h["b rate"]})
    ),
    "rmsprop": Learned({}, lambda h: rmsprop(0.1, centered=True, momentum=0.5)),
    "rmsprop by all": Learned(
        {"lr": number(0.1), "alpha": number(0.7), "m": number(0.5), "decay": number(0.1), "eps": number(0.01)},
        lambda h: rmsprop(h["lr"], alpha=h["alpha"], momentum=h["m"], weight_decay=h["decay"], eps=h["eps"], centered=True),
    ),
    "rmsprop by rates of elements": Learned(RATES, lambda h: of_tree(rmsprop, h)),
}  # fmt: skip
learned = pytest.mark.parametrize("case", LEARNED.values(), ids=LEARNED)


def after_three_steps(case):
    """A loss after three inner steps, as a function of the first parameters and the options."""
    x, y = batch()

    def inner(params):
        return (torch.tanh(x @ params["w"] + params["b"]) - y).square().mean()

    def outer(variables):
        params, rule = {n: variables[n] for n in ("w", "b")}, case.rule(variables)
        state = rule.init(params)
        for _ in range(3):
            with torch.enable_grad():
                params, state = rule.update(params, grad(inner)(params), state)
        return (params["w"].sin().sum() + params["b"].exp().sum()) * inner(params)

    start = {"w": torch.randn(3, 2).double(), "b": torch.randn(2).double()}
    return outer, {**start, **case.options}


@learned
def test_derivatives_against_central_differences(case):
    outer, variables = after_three_steps(case)
    expected = gradient_by_differences(outer, variables)
    by_backward, by_func = gradient(outer, variables), grad(outer)(variables)
    v = random_like(variables)
    _, along = jvp(outer, (variables,), (v,))
    for name in variables:
        assert by_backward[name].abs().max() > 1e-4  # each has a part in it
        assert relative(by_backward[name], expected[name]) < 1e-6, name
        assert relative(by_func[name], by_backward[name]) < 1e-11, name
    inner_product = sum((by_func[n] * v[n]).sum() for n in variables)
    torch.testing.assert_close(along, inner_product, rtol=1e-10, atol=1e-12)


@learned
def test_under_vmap_each_has_its_own_parameters_and_options(case):
    outer, variables = after_three_steps(case)
    several = [{n: v * (1 + 0.05 * i) for n, v in variables.items()} for i in range(3)]
    stacked = {n: torch.stack([one[n] for one in several]) for n in variables}
    found = vmap(grad(outer))(stacked)
    for i, one in enumerate(several):
        assert relative({n: g[i] for n, g in found.items()}, grad(outer)(one)) < 1e-11


@pytest.mark.parametrize("in_dim", [0, 1, -1])
@cases
def test_complex_parameters_under_vmap(case, in_dim):
    kind, options, _ = case
    p, g = torch.randn(2, 4, 3, dtype=torch.complex128)

    def two_steps(p, g):
        return ours(RULES[kind](LR, **options), p, lambda at: g + at, 2)[-1]

    moved = vmap(two_steps, in_dim)(p.movedim(0, in_dim), g.movedim(0, in_dim))
    assert relative(moved, torch.stack([two_steps(*row) for row in zip(p, g, strict=True)])) < 1e-12


EXACTLY_ZERO = {
    "adam": lambda h: adam(0.1, eps=1e-3),
    "adam, eps of 1e-8": lambda h: adam(0.1),
    "adam by all": partial(learned_betas, adam),
    "amsgrad, ties": lambda h: adam(0.1, amsgrad=True, eps=1e-3),
    "amsgrad by all": partial(learned_betas, adam, amsgrad=True),
    "adamw": lambda h: adamw(0.1, eps=1e-3),
    "rmsprop": lambda h: rmsprop(0.1, eps=1e-3),
    "centered": lambda h: rmsprop(0.1, eps=1e-3, centered=True),
    "centered, no variance": lambda h: rmsprop(1e-4, eps=1e-3, alpha=0.0, centered=True),
    "centered, momentum": lambda h: rmsprop(h["lr"], eps=1e-3, centered=True, momentum=h["beta1"]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", EXACTLY_ZERO.values(), ids=EXACTLY_ZERO)
def test_derivatives_are_finite_where_gradients_are_exactly_zero(rule, dtype):
    model, (x, y) = DeadUnit().to(dtype), batch(dtype)

    def inner(params):
        return (functional_call(model, params, (x,)) - y).square().mean()

    def outer(variables):
        rule_, params = rule(variables["options"]), variables["params"]
        params = ours(rule_, params, grad(inner), 3)[-1]
        return inner(params)

    params = hog.trainable_params(model)
    assert not grad(inner)(params)["0.weight"][0].any()
    variables = {"params": params, "options": {n: v.to(dtype) for n, v in ADAM.items()}}
    found = grad(outer)(variables)
    v = torch.utils._pytree.tree_map(torch.ones_like, variables)
    forward = jvp(outer, (variables,), (v,))[1]
    again = jvp(grad(outer), (variables,), (v,))[1]
    for leaf in torch.utils._pytree.tree_leaves([found, forward, again]):
        assert leaf.isfinite().all()
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
        (expected,) = theirs(kind, options, {"p": p}, lambda _: {"p": g}, 1)  # noqa: B023
        torch.testing.assert_close(found["p"], expected["p"], rtol=2e-3, atol=0)


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


def some_trees():
    a, b = torch.randn(2, 3).double(), torch.randn(4).double()
    return {
        "a tensor": a,
        "a list": [a, b],
        "a dict": {"a": a, "b": b},
        "dicts of dicts": {"x": {"a": a}, "y": [b, (a,)]},
        "a named tuple": Pair(a, [b]),
        "an ordered dict": OrderedDict(a=a, b=b),
        "no dimensions": {"a": a.sum()},
        "nothing": {},
    }


@cases
@pytest.mark.parametrize("name", some_trees())
def test_any_pytree_goes_in_and_comes_out(case, name):
    kind, options, _ = case
    params = some_trees()[name]
    flat, structure = torch.utils._pytree.tree_flatten(params)
    grads = torch.utils._pytree.tree_map(lambda p: p.sin(), params)
    expected = dict(enumerate(flat))
    rule = RULES[kind](LR, **options)
    path = ours(rule, params, lambda at: torch.utils._pytree.tree_map(torch.sin, at), 2)
    other = ours(rule, expected, lambda at: {n: p.sin() for n, p in at.items()}, 2)
    leaves, found = torch.utils._pytree.tree_flatten(path[-1])
    assert found == structure
    torch.testing.assert_close(leaves, list(other[-1].values()), rtol=0, atol=0)
    same_rates = torch.utils._pytree.tree_map(lambda p: torch.full_like(p, LR), params)
    by_rates, state = RULES[kind](same_rates, **options).update(params, grads, rule.init(params))
    torch.testing.assert_close(by_rates, path[0], rtol=1e-13, atol=1e-13)
    assert all(isinstance(leaf, Tensor | int) for leaf in torch.utils._pytree.tree_leaves(state))
    slots = {name: tree for name, tree in state.items() if name != "step"}
    assert state.get("step", 1) == 1
    assert all(torch.utils._pytree.tree_structure(tree) == structure for tree in slots.values())


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


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["number", "tensor", "tree"])
def test_nothing_is_upcast_and_nothing_mutated(case, dtype, form):
    kind, options, _ = case
    params = {"w": torch.randn(2, 3).to(dtype), "s": torch.randn(()).to(dtype), "d": torch.randn(2).double()}  # fmt: skip
    wide = {n: number(v) for n, v in options.items() if isinstance(v, float) and n != "dampening"}
    options = {**options, **({} if form == "number" else wide)}
    tree = {n: number(0.1).expand(p.shape) for n, p in params.items()}
    lr = {"number": 0.1, "tensor": number([0.1]), "tree": tree}[form]
    rule, grads = RULES[kind](lr, **options), {n: torch.ones_like(p) for n, p in params.items()}
    state = rule.init(params)
    moved, state = rule.update(params, grads, state)
    trees = [params, grads, moved, *(tree for slot, tree in state.items() if slot != "step")]
    before = [{n: t.clone() for n, t in tree.items()} for tree in trees]
    rule.update(moved, grads, state)
    rule.update(params, grads, state)
    like = lambda tree: [(n, t.dtype, t.shape) for n, t in tree.items()]  # noqa: E731
    for tree, copy in zip(trees, before, strict=True):
        assert like(tree) == like(params)
        torch.testing.assert_close(tree, copy, rtol=0, atol=0)


@cases
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, second_order])
def test_modes_change_no_value(case, mode):
    kind, options, _ = case
    params = {"w": torch.randn(2, 3), "b": torch.randn(3)}
    rule = RULES[kind](LR, **options)
    expected = ours(rule, params, lambda at: {n: p.sin() for n, p in at.items()}, 3)
    with mode():
        found = ours(rule, params, lambda at: {n: p.sin() for n, p in at.items()}, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


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
    "a negative rate": (lambda: adam(-0.1), ValueError, "lr: expected .* greater than 0, got -0.1"),
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
    "decays that do not broadcast": (updated(lambda: sgd(0.1, weight_decay={"w": torch.ones(2), "b": 0.1})), ValueError, r"weight_decay\['w'\]: expected a shape"),
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
    "no state": (updated(lambda: adam(0.1), state=()), ValueError, r"state: expected a dict of mean, square, step, got tuple \(\); .* init"),
    "the state of another rule": (updated(lambda: adam(0.1), state=momentum(0.1).init(P)), ValueError, "state: expected a dict of mean, square, step"),
    "the state of others": (updated(lambda: adam(0.1), state=adam(0.1).init({"w": P["w"]})), ValueError, r"state\['mean'\]: expected the structure"),
}  # fmt: skip


test_errors_say_what_was_expected_and_what_came = refused(ERRORS, by=hog.errors.HoglibError)


def test_the_rules_by_name_are_those_of_the_module():
    assert all(getattr(hog.meta, name) is make for name, make in RULES.items())
    assert list(RULES) == list(OPTIMIZERS)
