"""What every update rule of an inner loop does, whatever its formula: one call."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure

import hoglib as hog
from tests.oracles import gradient, gradient_by_differences, random_like, relative

LR = 0.05
F64 = torch.float64
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def check_rule(make, optimizer):
    """A rule goes step for step as torch's optimizer, is differentiated as differences say, again and under
    `vmap`, takes any tree, upcasts nothing, changes nothing that it is given, and is the same in any mode.

    Args:
        make: make(rates) makes the rule; rates are a number, a tensor with one, or a tree like parameters.
        optimizer: optimizer(tensors) makes that of torch, at the rate LR.
    """
    check_steps(make, optimizer)
    check_derivatives(make)
    for params in some_trees():
        check_tree(make, params)
    for dtype in NARROW:
        check_dtype(make, dtype)
    params = {"w": torch.randn(2, 3), "b": torch.randn(3)}
    expected = ours(make(LR), params, sines, 3)
    for mode in (torch.no_grad, torch.inference_mode, hog.second_order):
        with mode():
            assert_close(ours(make(LR), params, sines, 3), expected, rtol=0, atol=0)


def number(value):
    return torch.tensor(value, dtype=F64)


def sines(tree):
    return tree_map(torch.sin, tree)


class DeadUnit(nn.Sequential):
    """The first hidden unit is never positive: all its gradients are exactly zero."""

    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            self[0].bias[0] = -50.0


def batch(dtype=F64):
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(9, n, generator=generator, dtype=F64) for n in (3, 2))
    return x.to(dtype), y.to(dtype)


def ours(rule, params, grads_of, steps):
    """The parameters after each step."""
    state, path = rule.init(params), []
    for _ in range(steps):
        params, state = rule.update(params, grads_of(params), state)
        path.append(params)
    return path


def theirs(make, params, grads_of, steps):
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    optimizer, path = make(list(leaves.values())), []
    for _ in range(steps):
        found = grads_of({n: p.detach() for n, p in leaves.items()})
        for n, p in leaves.items():
            p.grad = found[n].resolve_conj().clone()
        optimizer.step()
        path.append({n: p.detach().clone() for n, p in leaves.items()})
    return path


def check_steps(make, optimizer):
    # rounding grows from step to step
    for dtype, bound in ((F64, 1e-12), (torch.float32, 2e-5)):
        model, (x, y) = DeadUnit().to(dtype), batch(dtype)
        loss = lambda p, m=model, x=x, y=y: (functional_call(m, p, (x,)) - y).square().mean()  # noqa: E731
        params, grads_of = hog.trainable_params(model), partial(gradient, loss)
        assert not grads_of(params)["0.weight"][0].any()  # or the dead unit tests nothing
        path = ours(make(LR), params, grads_of, 10)
        expected = theirs(optimizer, params, grads_of, 10)
        for a, b in zip(path, expected, strict=True):
            for name in b:
                assert a[name].dtype == dtype
                assert relative(a[name], b[name]) < bound, name
    # complex parameters are pairs of real numbers, as in torch
    w, b, t = (torch.randn(s, dtype=torch.complex128) for s in ((3, 2), (2,), (2, 3)))
    params = {"w": w, "b": b, "t": t.T}  # the last is not contiguous
    target = random_like(params)

    def of_complex(at):
        found = {n: (at[n] - target[n]) * (1 + 2j) for n in at}
        return found | {"b": found["b"].conj().resolve_conj().conj()}  # conjugated lazily

    expected = theirs(optimizer, params, of_complex, 8)
    for rates in (LR, {"w": number([LR, LR]), "b": LR, "t": number([[LR]] * 3)}):
        for a, b in zip(ours(make(rates), params, of_complex, 8), expected, strict=True):
            assert relative(a, b) < 1e-12
            assert {p.dtype for p in a.values()} == {torch.complex128}


def after_three_steps(rule_of):
    """A loss after three steps of rule_of(variables), as a function of variables, the first parameters among
    them."""
    x, y = batch()

    def inner(params):
        return (torch.tanh(x @ params["w"] + params["b"]) - y).square().mean()

    def outer(variables):
        params, rule = {n: variables[n] for n in ("w", "b")}, rule_of(variables)
        state = rule.init(params)
        for _ in range(3):
            with torch.enable_grad():
                params, state = rule.update(params, grad(inner)(params), state)
        return (params["w"].sin().sum() + params["b"].exp().sum()) * inner(params)

    return outer, {"w": torch.randn(3, 2).double(), "b": torch.randn(2).double()}


def check_outer(outer, variables):
    """The derivatives of a loss after some steps, of first and of second order, in every mode and by vmap."""
    expected = gradient_by_differences(outer, variables)
    by_backward, by_func = gradient(outer, variables), grad(outer)(variables)
    v = random_like(variables)
    _, along = jvp(outer, (variables,), (v,))
    for name in variables:
        assert by_backward[name].abs().max() > 1e-4  # each has a part in it
        assert relative(by_backward[name], expected[name]) < 1e-6, name
        assert relative(by_func[name], by_backward[name]) < 1e-11, name
    assert_close(along, sum((by_func[n] * v[n]).sum() for n in variables), rtol=1e-10, atol=1e-12)
    leaves = {n: x.clone().requires_grad_() for n, x in variables.items()}
    first = torch.autograd.grad(outer(leaves), list(leaves.values()), create_graph=True)
    slope = sum((g * v[n]).sum() for g, n in zip(first, v, strict=True))
    again = dict(zip(v, torch.autograd.grad(slope, list(leaves.values())), strict=True))
    ends = [gradient(outer, {n: x + h * v[n] for n, x in variables.items()}) for h in (1e-5, -1e-5)]
    assert relative(again, {n: (ends[0][n] - ends[1][n]) / 2e-5 for n in v}) < 1e-5
    several = [{n: x * (1 + 0.05 * i) for n, x in variables.items()} for i in range(3)]
    found = vmap(grad(outer))({n: torch.stack([one[n] for one in several]) for n in variables})
    for i, one in enumerate(several):
        assert relative({n: g[i] for n, g in found.items()}, grad(outer)(one)) < 1e-11


def check_derivatives(make):
    outer, start = after_three_steps(lambda variables: make(variables["rate"]))
    check_outer(outer, start | {"rate": number(0.1)})
    p, g = torch.randn(2, 4, 3, dtype=torch.complex128)

    def two_steps(p, g):
        return ours(make(LR), p, lambda at: g + at, 2)[-1]

    expected = torch.stack([two_steps(*row) for row in zip(p, g, strict=True)])
    for dim in (0, 1, -1):
        moved = vmap(two_steps, dim)(p.movedim(0, dim), g.movedim(0, dim))
        assert relative(moved, expected) < 1e-12


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


def some_trees():
    a, b = torch.randn(2, 3).double(), torch.randn(4).double()
    nested = {"x": {"a": a}, "y": [b, (a,)]}
    return [
        a, [a, b], {"a": a, "b": b}, {"a": a, "b": {"c": b}}, nested, Pair(a, [b]), OrderedDict(a=a, b=b), {"a": a.sum()}, {},
    ]  # fmt: skip


def check_tree(make, params):
    """Any tree goes in and comes out, as the rates and the state too."""
    flat, structure = tree_flatten(params)
    rule, grads = make(LR), sines(params)
    path, other = ours(rule, params, sines, 2), ours(rule, dict(enumerate(flat)), sines, 2)
    leaves, found = tree_flatten(path[-1])
    assert found == structure
    assert_close(leaves, list(other[-1].values()), rtol=0, atol=0)
    rates = tree_map(lambda p: torch.full_like(p, LR), params)
    by_rates, state = make(rates).update(params, grads, rule.init(params))
    assert_close(by_rates, path[0], rtol=1e-13, atol=1e-13)
    assert all(isinstance(leaf, Tensor | int) for leaf in tree_leaves(state))
    assert state.get("step", 1) == 1
    slots = [tree for name, tree in state.items() if name != "step"]
    assert all(tree_structure(tree) == structure for tree in slots)


def check_dtype(make, dtype):
    """Nothing is upcast, whatever the rates are of, and nothing that is given is changed."""
    params = {"w": torch.randn(2, 3).to(dtype), "s": torch.randn(()).to(dtype), "d": torch.randn(2).double()}  # fmt: skip
    grads = {n: torch.ones_like(p) for n, p in params.items()}
    for rates in (0.1, number([0.1]), {n: number(0.1).expand(p.shape) for n, p in params.items()}):
        rule = make(rates)
        moved, state = rule.update(params, grads, rule.init(params))
        trees = [params, grads, moved, *(tree for slot, tree in state.items() if slot != "step")]
        before = [{n: t.clone() for n, t in tree.items()} for tree in trees]
        rule.update(moved, grads, state)
        rule.update(params, grads, state)
        for tree, copy in zip(trees, before, strict=True):
            assert [(n, t.dtype, t.shape) for n, t in tree.items()] == [
                (n, p.dtype, p.shape) for n, p in params.items()
            ]
            assert_close(tree, copy, rtol=0, atol=0)
